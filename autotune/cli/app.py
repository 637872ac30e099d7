"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autotune._version import __version__
from autotune.cli.options import AsJson, Command, OnlyStudy, ScriptArgs, Storage, StudyName, Target, takes_settings
from autotune.cli.schedule_commands import schedule
from autotune.errors import UserError

app = typer.Typer(
    name="autotune",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich would double what --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the DeepSpeed configuration that trains your model best, by measuring it.",
)

command = partial(app.command, cls=Command)


def main() -> None:
    """Run a command; a mistake of the user ends as one sentence and exit status 2, an interrupt as status 130 or 143."""
    try:
        app(standalone_mode=True)
    except SystemExit as error:
        if (stop := _stop_behind(error)) is None:
            raise
        print("autotune: stopped", file=sys.stderr)
        sys.exit(getattr(stop, "status", 130))
    except UserError as error:
        from autotune.system.redaction import redact

        print(f"autotune: {redact(str(error))}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        from autotune.system import files

        if (said := files.words(error)) is None:  # neither a full disk nor a folder that cannot be written
            raise
        print(f"autotune: {said}", file=sys.stderr)
        sys.exit(2)


def _stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that typer turned into an exit."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
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


@command()
@takes_settings(
    "name", "space", "objectives", "trials", "time_budget_s", "ranks", "executor", "nodes", "executor_options", "hostfile",
    "base_config", "global_batch", "device_memory_bytes", "sampler", "stop_below", "memory_filter", "stop_trials", "parallel",
    "overlap", "storage", "seed", "learning_rate_rule", "branch", "branch_tokens", "from_checkpoint", "script_set",
)  # fmt: skip
def run(
    target: Target,
    settings: dict[str, Any],
    script_args: ScriptArgs = None,
    as_json: AsJson = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the study's earlier trials.")] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not start from what related studies found.")
    ] = False,
) -> None:
    """Tune TARGET: measure candidates, recommend one, write its DeepSpeed JSON. Run it again to resume."""
    from autotune.cli import run as run_command

    raise typer.Exit(run_command.run(target, settings, fresh=fresh, as_json=as_json, learn=not no_history))


@command()
@takes_settings("storage", "parallel", "overlap")
def worker(study: StudyName, settings: dict[str, Any]) -> None:
    """Help `autotune run`, on another machine, with the trials of STUDY; takes a database server and the study's folder."""
    from autotune.cli import worker as worker_command

    raise typer.Exit(worker_command.worker(study, settings.pop("storage"), settings))


@command()
@takes_settings(
    "space", "objectives", "ranks", "executor", "nodes", "executor_options", "hostfile", "base_config", "global_batch",
    "device_memory_bytes", "script_set",
)  # fmt: skip
def check(target: Target, settings: dict[str, Any], script_args: ScriptArgs = None, as_json: AsJson = False) -> None:
    """Load TARGET, run two real steps, and say what would be tuned."""
    from autotune.cli import check as check_command

    raise typer.Exit(check_command.check(target, settings, as_json=as_json))


@command()
@takes_settings(
    "ranks", "device_memory_bytes", "base_config", "name",
    ranks="Ranks, also more than this machine has.", device_memory_bytes="Memory of a device.",
    name="Study whose trials correct the forecast.",
)  # fmt: skip
def predict(
    target: Target,
    settings: dict[str, Any],
    script_args: ScriptArgs = None,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob, over the baseline's value.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a configuration of TARGET will need before it runs: memory, step time, throughput, and what binds."""
    from autotune.cli import predict as predict_command

    raise typer.Exit(predict_command.predict(target, settings, knobs or [], as_json=as_json))


@command()
def init(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the files.")] = Path()) -> None:
    """Write a commented study.yaml and a model.py that runs."""
    from autotune.cli import presets

    presets.init(folder)


@command()
def ls(
    what: Annotated[
        str, typer.Argument(metavar="spaces|objectives|samplers|metrics|studies", help="What to list.")
    ] = "studies",
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """List search spaces, objectives, samplers, metrics or studies."""
    from autotune.cli import presets

    presets.ls(what, storage, as_json=as_json)


@command()
def cp(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Name of a search space or objective.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
) -> None:
    """Copy a preset to a file of yours, to change it there."""
    from autotune.cli import presets

    presets.cp(preset, file)


@command()
def status(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Name of a study (default: the one that runs).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Say it once, also while the study runs.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say how far STUDY is and what it has found; follow it while another terminal runs it. --json says it once."""
    from autotune.cli import status as status_command

    raise typer.Exit(status_command.status(study, storage, once=once, as_json=as_json))


@command()
def explain(
    study: StudyName,
    why_not: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="Why is nothing with that value recommended?")
    ] = None,
    what_if: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="The recommendation with that changed.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say why STUDY recommends what it does: what was measured, what is predicted, what a change would cost or gain."""
    from autotune.cli import answer

    answer.explain(study, why_not, what_if, storage, as_json=as_json)


@command()
def export(
    study: StudyName,
    pick: Annotated[str | None, typer.Option(metavar="NAME", help="Which pick (default: recommended).")] = None,
    trial: Annotated[int | None, typer.Option(metavar="N", help="This trial instead of a pick.")] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="deepspeed, accelerate, hf-args or command.")
    ] = "deepspeed",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
    storage: Storage = None,
) -> None:
    """Print the configuration that STUDY found, ready for your training."""
    from autotune.cli import answer

    answer.export(study, pick, trial, form, output, storage)


@command()
def report(
    study: StudyName,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write there (default: the study's folder).")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Only the page, no JSON and CSV beside it.")
    ] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw the plots as PNG, too; takes an installed Chromium.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Write what STUDY found as one HTML page that works offline, and as JSON and CSV."""
    from autotune.cli import answer

    answer.report(study, storage, output, png, open_it=open_it, single_file=single_file, as_json=as_json)


@command()
def diagnose(
    study: StudyName,
    trial: Annotated[int | None, typer.Option(metavar="N", help="Which trial (default: the recommended one).")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run it again and trace some steps; the trace is kept.")
    ] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say what a trial of STUDY is bound by, and which knob follows from it."""
    from autotune.cli import answer

    answer.diagnose(study, trial, storage, profile=profile, as_json=as_json)


@command()
@takes_settings("base_config", "script_set", base_config="The DeepSpeed configuration to scale.")
def scale(
    target: Target,
    settings: dict[str, Any],
    script_args: ScriptArgs = None,
    ranks: Annotated[str, typer.Option(metavar="1,2,4", help="Rank counts to compare.")] = "1,2",
    weak: Annotated[
        bool, typer.Option("--weak/--strong", help="Let the global batch grow with the ranks, or keep it.")
    ] = False,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often to measure each, in turns.")] = 3,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plots as PNG, too; takes an installed Chromium.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how TARGET's configuration scales over ranks: time, throughput, speed-up, efficiency, communication."""
    from autotune.cli import scale as scale_command

    mode: Literal["weak", "strong"] = "weak" if weak else "strong"
    raise typer.Exit(scale_command.scale(target, settings, ranks, mode, rounds, png, as_json=as_json))


@command()
def project(
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Name of a study (default: the only one).")
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", help="Devices of the cluster, one rank each.")] = 8,
    per_node: Annotated[int, typer.Option(metavar="N", help="Devices of a node.")] = 8,
    intra_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="300GB/s", help="What a collective reaches within a node (default: as measured here)."),
    ] = None,
    inter_bandwidth: Annotated[
        str | None, typer.Option(metavar="400Gbit/s", help="Of a node to the others, each way.")
    ] = None,
    intra_latency: Annotated[str | None, typer.Option(metavar="5us", help="Of a message within a node.")] = None,
    inter_latency: Annotated[str | None, typer.Option(metavar="20us", help="Of a message between nodes.")] = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="Of collectives: auto, ring, tree or hierarchical.")
    ] = "auto",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch, or let it grow with the devices.")
    ] = False,
    pick: Annotated[str, typer.Option(metavar="NAME", help="Which pick of the study.")] = "recommended",
    trial: Annotated[int | None, typer.Option(metavar="N", help="This trial of its front instead of a pick.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob, over the pick's value.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="80GiB", help="Memory of a device there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what STUDY's configurations take on a larger cluster: step time, memory, communication, efficiency."""
    from autotune.cli import project as project_command
    from autotune.forecast.cluster import Cluster

    links = {"intra_bandwidth": intra_bandwidth, "inter_bandwidth": inter_bandwidth}
    links |= {"intra_latency": intra_latency, "inter_latency": inter_latency}
    question = project_command.question(pick, trial, settings or [], device_memory, strong=strong)
    cluster = Cluster.of(devices, per_node, links, algorithm)
    raise typer.Exit(project_command.project(study, cluster, question, as_json=as_json))


@command()
def probe(
    target: Annotated[Path | None, typer.Argument(metavar="[MODEL.PY]", help="Whose data to draw too.")] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share the machine (default: one per GPU, else 2).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even where an earlier probe is kept.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what this machine reaches: matrix products, memory, collectives by message size, data loading."""
    from autotune.cli import probe as probe_command

    raise typer.Exit(probe_command.probe(target, ranks, again=again, as_json=as_json))


@command()
def dashboard(
    storage: Storage = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0 takes any that is free.")] = 8080,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen there; any but this machine's own loopback asks for a token.")
    ] = "127.0.0.1",
) -> None:
    """Serve the Optuna dashboard: the recommendation and why, the front, every trial with its files."""
    from autotune.cli import dashboard as dashboard_command

    dashboard_command.dashboard(storage, host, port)


@command()
def doctor(
    build: Annotated[bool, typer.Option(help="Compile DeepSpeed's ops once.")] = True, as_json: AsJson = False
) -> None:
    """Say what this machine has and what would fail, and build DeepSpeed's ops once."""
    from autotune.cli import doctor as doctor_command

    raise typer.Exit(doctor_command.doctor(build=build, as_json=as_json))


@command()
def changes(
    study: StudyName,
    quick: Annotated[bool, typer.Option("--quick", help="Only what shows without loading the target.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say what has changed since STUDY found its answer: device, libraries, model, data, ranks, search space."""
    from autotune.cli import retune as retune_command

    retune_command.changes(study, storage, quick=quick, as_json=as_json)


@command()
def retune(
    study: StudyName,
    if_due: Annotated[bool, typer.Option("--if-due", help="Only if a schedule of the study says so.")] = False,
    if_stale: Annotated[
        bool, typer.Option("--if-stale", help="Only if something that it depends on has changed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Search although nothing moved.")] = False,
    min_gain: Annotated[str, typer.Option(metavar="3%", help="Replace the configuration from this gain on.")] = "3%",
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Trials of the search (default: a fifth of the study's).")
    ] = None,
    on_change: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run it where the configuration was replaced.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measure the noise scale from this state.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Measure whether STUDY's answer is still right; search again, in few trials, if it is not. Status 0: unchanged, 3: improved."""
    from autotune.cli import retune as retune_command
    from autotune.study.spec.readers import read_share

    options = {
        "if_due": if_due, "if_stale": if_stale, "force": force, "min_gain": read_share(min_gain, "--min-gain"), "trials": trials,
        "on_change": on_change,
    }  # fmt: skip
    raise typer.Exit(retune_command.retune(study, storage, options, checkpoint, as_json=as_json))


@command()
def history(
    study: OnlyStudy = None,
    what: Annotated[
        str, typer.Option("--what", metavar="KIND", help="measurements, recommendations or decisions.")
    ] = "decisions",
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, max=10**9, help="How many, newest first.")
    ] = 50,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """List what was measured, recommended and decided across studies, newest first."""
    from autotune.cli import history as history_command

    history_command.history(study, storage, what, limit, as_json=as_json)


@command()
def delete(
    study: StudyName, yes: Annotated[bool, typer.Option("--yes", help="Confirm it.")] = False, storage: Storage = None
) -> None:
    """Remove STUDY, its re-tunings, schedules and history; study.yaml and its answer stay in the folder."""
    from autotune.cli import history as history_command

    history_command.delete(study, storage, yes=yes)


app.add_typer(schedule)


def commands_of(application: typer.Typer = app) -> list[str]:
    """The names of the commands."""
    return [str(each.name or getattr(each.callback, "__name__", "")) for each in application.registered_commands]
