"""Arguments and options that commands share; those of a study's settings are made from `SETTINGS`."""

import glob
import inspect
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from autotune.errors import UserError
from autotune.study.spec.settings import GROUPS, SETTINGS, default_words, flag

# A function that does what a command does; it returns the exit status, None for 0.
Function: TypeAlias = Callable[..., int | None]
FunctionType = TypeVar("FunctionType", bound=Function)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A model.py, a training script, a study.yaml, or a launch command in quotation marks."
    ),
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help=SETTINGS["script_args"].help)]


def option(metavar: str, said: str, *names: str) -> Any:
    """An option with a value; without names it is called as its parameter."""
    return typer.Option(*names, metavar=metavar, help=said)


def study_names(incomplete: str) -> list[str]:
    """Names of studies in this folder that begin so, for a shell's completion."""
    return sorted(path.parent.name for path in Path("studies").glob(f"{glob.escape(incomplete)}*/study.yaml"))


StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study.", autocompletion=study_names)]
OnlyStudy = Annotated[str | None, typer.Argument(metavar="STUDY", help="Only this one.", autocompletion=study_names)]
Storage = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", envvar=SETTINGS["storage"].variable, help=SETTINGS["storage"].help),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

HELP_COLUMNS = 100
FEW_OPTIONS = 8  # up to this number they are listed without groups
# The settings that the parameter `settings` of a function stands for, with help texts that replace the table's.
_settings_of: dict[Function, dict[str, str]] = {}


class Command(TyperCommand):
    """A command that lists its options in groups, and refuses one given twice, where click keeps the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does."""
        seen = set()
        try:
            values, _, given = self.make_parser(ctx).parse_args(list(args))
        except Exception as error:  # its class is typer's own or click's, by typer's version
            raise _of_study_file(getattr(error, "option_name", ""), self.params) or error from None
        for parameter in given:
            # A flag that says the same twice does no harm; one that has an opposite may say both.
            once = isinstance(parameter, TyperOption) and not parameter.multiple
            once = once and (not parameter.is_flag or bool(parameter.secondary_opts))  # type: ignore[attr-defined]
            if once and parameter.name in seen:
                raise UserError(
                    f"{'/'.join(parameter.opts[:1] + parameter.secondary_opts)} is there twice; give it once"
                )
            seen.add(parameter.name)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            value = values.get(getattr(getattr(error, "param", None), "name", ""))
            if isinstance(value, str) and repr(value) not in error.message:  # type: ignore[attr-defined]
                error.message = f"{value!r}: {error.message}"  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name in its usage."""
        return ["[OPTIONS]", *(_shown_argument(each) for each in self.get_params(ctx) if _is_argument(each))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by group."""
        parameters: list[Any] = self.get_params(ctx)
        rows = {"Arguments": [(each.metavar, each.help or "") for each in parameters if _is_argument(each)]}
        options = [(_group_of(each), each.get_help_record(ctx)) for each in parameters if not _is_argument(each)]
        for name in [*GROUPS, "Options"]:
            few = len(options) <= FEW_OPTIONS
            rows[name] = [
                record for group, record in options if record is not None and name == ("Options" if few else group)
            ]
        for name, found in rows.items():
            if found:
                with formatter.section(name):
                    formatter.write_dl(found)


def _of_study_file(option: str, parameters: Sequence[Any]) -> UserError | None:
    """What to do where an option is none, but names a key of study.yaml; None where it may be an option misspelt."""
    start = option.lstrip("-").replace("-", "_")
    if any(name.startswith(option) for each in parameters for name in each.opts):
        return None
    keys = [key for key, setting in SETTINGS.items() if not setting.option and key.startswith(start)]
    if len(start) < 4 or len(keys) != 1 or not any(each.name == "target" for each in parameters):
        return None
    return UserError(
        f"{option} is no option: state `{keys[0]}` in study.yaml, which `autotune init` writes. {SETTINGS[keys[0]].help}"
    )


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _group_of(option: Any) -> str:
    """The group that an option stands in; a setting's is that of the setting."""
    own = next((name for name, keys in GROUPS.items() if option.name in keys), "Options")
    return option.rich_help_panel or own


def _shown_argument(argument: Any) -> str:
    name = argument.metavar.strip("[]")
    return name if argument.required else f"[{name}]"


def takes_settings(*keys: str, **helps: str) -> Callable[[FunctionType], FunctionType]:
    """Let options of settings fill a function's parameter `settings`.

    It maps keys to what `StudySpec` reads, None where an option was not given; the script's arguments are among them.

    Args:
        *keys: The settings.
        **helps: Help texts that differ from the table's.
    """

    def decorate(function: FunctionType) -> FunctionType:
        _settings_of[function] = {key: helps.get(key, "") for key in keys}
        return function

    return decorate


def command_of(function: Function, path: str, text: str) -> Any:
    """The command that calls a function, as `autotune PATH`; `text` is its help."""
    settings = _settings_of.get(function, {})
    own = inspect.signature(function, eval_str=True).parameters
    added = {key: _parameter(key, _option_of(key, said)) for key, said in settings.items()}

    def call(**given: Any) -> None:
        from autotune.report.results import errors_in_words

        if "settings" in own:
            given["settings"] = {key: _joined(key, given.pop(key)) for key in added}
            if "script_args" in given:
                given["settings"]["script_args"] = tuple(given.pop("script_args") or ()) or None
        with errors_in_words():
            status = function(**given)
        if status:
            raise typer.Exit(status)

    rest = [_parameter(name, each.annotation, each.default) for name, each in own.items() if name != "settings"]
    if "settings" in own and "target" in own:
        rest.insert(1, _parameter("script_args", ScriptArgs))
    first = [each for each in rest if each.name in ("target", "script_args", "study")]
    everything = [*first, *added.values(), *(each for each in rest if each not in first)]
    call.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    alone = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"max_content_width": HELP_COLUMNS}
    )
    alone.command(path.rpartition(" ")[2], cls=Command, help=text)(call)
    return typer.main.get_command(alone)


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_of(key: str, said: str) -> Any:
    """The option of a setting, as the annotation of a parameter; `said` replaces its help."""
    setting = SETTINGS[key]
    kind: Any = {"": bool, "N": int}.get(setting.metavar, str)
    name = f"{flag(key)}/{setting.off}" if setting.off else flag(key)
    default = f" (default: {words})" if (words := default_words(key)) else ""
    option = typer.Option(
        name,
        help=f"{said or setting.help}{default}",
        metavar=setting.metavar or None,
        envvar=setting.variable or None,
        autocompletion=_completion_of(key),
    )
    return Annotated[(list[str] if setting.repeatable else kind) | None, option]


def _completion_of(key: str) -> Callable[[str], list[str]] | None:
    """What completes the value of a setting in a shell; None leaves that to the shell, which knows files."""
    if key in ("name", "script_set") or SETTINGS[key].metavar in ("", "N"):
        return None
    if key not in ("space", "objectives", "sampler") and "|" not in SETTINGS[key].metavar:
        return None
    return lambda incomplete: [name for name in _values_of(key) if name.startswith(incomplete)]


def _values_of(key: str) -> Iterator[str]:
    """The names that a setting takes."""
    if key == "sampler":
        from autotune.search import SAMPLERS

        yield from SAMPLERS
    elif key in ("space", "objectives"):
        from autotune.study.spec.presets import presets

        yield from presets("search_spaces" if key == "space" else "objectives")
    else:
        yield from (name for name in SETTINGS[key].metavar.split("|") if name.islower() or "-" in name)


def _joined(key: str, given: Any) -> Any:
    """The value of an option as `StudySpec` reads it: presets of options that were given several times are one list."""
    if isinstance(given, list) and key in ("space", "objectives"):
        return ",".join(given) if given else None
    return given if given or not isinstance(given, list) else None


def same_command(*left_out: str) -> str:
    """The command of this process as a user may type it again, without some of its options."""
    from autotune.system import redaction

    own = len(list(itertools.takewhile(lambda argument: argument != "--", sys.argv)))  # behind it they are a script's
    arguments = [argument for argument in sys.argv[1:own] if argument not in left_out] + sys.argv[own:]
    return shlex.join(["autotune", *redaction.redact(arguments)])


def check_free(command: str, file: Path) -> None:
    """Refuse to write over a file of the user's; a device or a pipe is written to."""
    if file.is_file():
        raise UserError(f"{command}: {file} exists; name another file, or remove it")


def read_settings(settings: Sequence[str]) -> dict[str, str | int | float | bool | None]:
    """Knobs from KEY=VALUE texts, each at most once."""
    from autotune.study.spec.yaml_file import read_setting

    found: dict[str, str | int | float | bool | None] = {}
    for name, value in map(read_setting, settings):
        if name in found:
            raise UserError(f"{name} is there twice; give it once")
        found[name] = value
    return found
