"""The command line's entry: the table of commands, and how their errors end."""

import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autotune import __version__
from autotune.cli.options import HELP_COLUMNS, command_of
from autotune.errors import UserError
from autotune.system.signals import broken_pipes, leave_unwritten, terminable

# By command: its module in this package, whose function has the command's name, and its help.
COMMANDS = {
    "run": ("run", "Tune TARGET: measure candidates, recommend one, write its DeepSpeed JSON. Run it again to resume."),
    "submit": ("run", "Run TARGET inside an engine, driver and trials: as a job of Slurm, in Ray, or in Kubernetes."),
    "worker": ("worker", "Run trials of STUDY on a further machine; needs a database server and the study's folder."),
    "check": ("check", "Run two real steps of TARGET, and say what would be tuned and what cannot run here."),
    "predict": ("predict", "Say what a configuration of TARGET will need before it runs: memory, step time,"
                " throughput, and what binds."),
    "advise": ("advise", "Say before anything runs which configuration fits MODEL on which cards, how fast, and what it"
               " costs."),
    "init": ("presets", "Write a commented study.yaml and a model.py that runs."),
    "ls": ("presets", "List studies with their answers; or search spaces, goals, objectives, samplers, metrics."),
    "schema": ("presets", "Print the JSON schema of study.yaml, for editors that complete and check it."),
    "cp": ("presets", "Copy a preset to a file of yours, to change it there."),
    "status": ("status", "Show what STUDY has found; follow it while another terminal runs it."),
    "explain": ("answer", "Say why STUDY recommends what it does: what was measured, what is predicted, what a change"
                " would cost or gain."),
    "export": ("answer", "Print the configuration that STUDY found, ready for your training."),
    "report": ("answer", "Write what STUDY found as one HTML page that works offline, and as JSON and CSV."),
    "diagnose": ("answer", "Say what a trial of STUDY is bound by, and which knob follows from it."),
    "scale": ("scale", "Measure how TARGET's configuration scales over ranks: time, throughput, speed-up, efficiency,"
              " communication."),
    "project": ("project", "Predict what STUDY's configurations take on a larger cluster: step time, memory,"
                " communication, efficiency."),
    "probe": ("probe", "Measure what this machine reaches: matrix products, memory, collectives by message size, data"
              " loading."),
    "dashboard": ("dashboard", "Serve the Optuna dashboard: the recommendation and why, the front, every trial with"
                  " its files."),
    "doctor": ("doctor", "Say what this machine has, and what would fail."),
    "changes": ("retune", "Say what has changed since STUDY found its answer: device, libraries, model, data, ranks,"
                " search space."),
    "retune": ("retune", "Measure whether STUDY's answer is still right; search again, in few trials, if it is not."
               " Status 0: unchanged, 3: improved."),
    "history": ("history", "List what was measured, recommended and decided across studies, newest first."),
    "delete": ("history", "Remove STUDY, its re-tunings, schedules and history; study.yaml and its answer stay in the"
               " folder."),
    "schedule add": ("schedule", "Re-tune STUDY again and again."),
    "schedule list": ("schedule", "List the schedules."),
    "schedule remove": ("schedule", "Remove a schedule."),
    "schedule run": ("schedule", "Run what is due until Ctrl-C. Of several daemons one leads; another takes over when"
                     " it dies."),
    "schedule export": ("schedule", "Print the schedules for a scheduler of yours, which calls `autotune retune STUDY"
                        " --if-due`."),
}  # fmt: skip


# The commands in the order and groups of `autotune --help`; one that is not here stands under "More".
GROUPS = {
    "Before a run": ("init", "check", "advise", "predict", "doctor", "probe"),
    "Tune": ("run", "status", "dashboard", "submit", "worker"),
    "The answer": ("export", "explain", "report", "diagnose", "ls", "history"),
    "More machines": ("scale", "project"),
    "Re-tuning": ("changes", "retune", "schedule"),
}


class Group(TyperGroup):
    """A group that imports a command's module when that command is run, so that `--help` is quick."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group, each with its whole help."""
        names = self.list_commands(ctx)
        groups = GROUPS if ctx.parent is None else {}  # `schedule run` is no `run`
        grouped = {title: [name for name in of if name in names] for title, of in groups.items()}
        told = {name for of in grouped.values() for name in of}
        grouped = {title: of for title, of in grouped.items() if of}
        grouped["More" if grouped else "Commands"] = [name for name in names if name not in told]
        for title, of in grouped.items():
            if of:
                with formatter.section(title):
                    formatter.write_dl([(name, " ".join((self.commands[name].help or "").split())) for name in of])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command itself in the place of its entry in the list of commands."""
        name, found, rest = super().resolve_command(ctx, args)
        path = name if ctx.parent is None else f"{self.name} {name}"
        return name, imported(path) if path in COMMANDS else found, rest


def imported(path: str) -> Any:
    """A command with its options, such as `run` or `schedule add`."""
    module, text = COMMANDS[path]
    return command_of(getattr(import_module(f"autotune.cli.{module}"), path.replace(" ", "_")), path, text)


def _group(name: str, text: str, paths: list[str], *, completion: bool = False) -> typer.Typer:
    """A group that lists commands."""
    found = typer.Typer(
        name=name,
        cls=Group,
        no_args_is_help=True,
        add_completion=completion,
        rich_markup_mode=None,  # importing rich would double what --help takes
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
        help=text,
    )
    for path in paths:
        found.command(path.rpartition(" ")[2], help=COMMANDS[path][1])(lambda: None)
    return found


app = _group(
    "autotune",
    "Find the DeepSpeed configuration that trains your model best, by measuring it.",
    [path for path in COMMANDS if " " not in path],
    completion=True,
)
app.add_typer(
    _group(
        "schedule", "Re-tune studies by themselves, at intervals or times.", [path for path in COMMANDS if " " in path]
    )
)


def main() -> None:
    """Run a command; an error ends as one sentence and its status, an interrupt as status 130, 143 or 129."""
    sys.unraisablehook = _unraised
    for name in ("COLUMNS", "LINES"):  # 0 stands for a size that is not known, and rich would print nothing
        if os.environ.get(name) == "0":
            del os.environ[name]
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the locale cannot show would be an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with terminable():
            _check_folder()
            app(standalone_mode=True)
    except SystemExit as error:
        if (stop := _behind(error, KeyboardInterrupt)) is not None:
            print("autotune: stopped", file=sys.stderr)
            sys.exit(getattr(stop, "status", 130))
        if _behind(error, BrokenPipeError) and broken_pipes():
            sys.exit(0)  # typer ends with 1 then
        raise
    except UserError as error:
        from autotune.system.redaction import redact

        print(f"autotune: {redact(str(error))}", file=sys.stderr)
        leave_unwritten()
        sys.exit(error.status)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        from autotune.system import error_log

        print(f"autotune: {error_log.sentence(error)}", file=sys.stderr)
        sys.exit(error_log.STATUS)


def _check_folder() -> None:
    """Refuse to work in a folder that is gone, as after another checkout: every path of a study is relative to it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to a folder that is there (cd)") from None


def _unraised(found: "sys.UnraisableHookArgs") -> None:
    """Show what is raised where nothing can catch it, as Python does; an interrupt there needs no traceback."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def _behind(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The exception of that kind that typer turned into an exit."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
