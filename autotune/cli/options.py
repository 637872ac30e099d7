"""Arguments and options that commands share; those of a study's settings are made from `SETTINGS`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperOption

from autotune.errors import UserError
from autotune.study.spec.settings import SETTINGS, flag

Callback: TypeAlias = Callable[..., None]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A model.py, a training script, a study.yaml, or a launch command in quotation marks."
    ),
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help=SETTINGS["script_args"].help)]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study.")]
OnlyStudy = Annotated[str | None, typer.Argument(metavar="STUDY", help="Only this one.")]
Storage = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", envvar=SETTINGS["storage"].variable, help=SETTINGS["storage"].help),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Command(TyperCommand):
    """A command that refuses an option which is given twice, where click keeps the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does.

        Raises:
            UserError: An option is there twice.
        """
        seen = set()
        for parameter in self.make_parser(ctx).parse_args(list(args))[2]:
            once = isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag
            if once and parameter.name in seen:
                raise UserError(f"{parameter.opts[0]} is there twice; give it once")
            seen.add(parameter.name)
        return super().parse_args(ctx, args)


def option_of(key: str, said: str = "") -> Any:
    """The option of a setting, as the annotation of a parameter; `said` replaces its help."""
    setting = SETTINGS[key]
    kind: Any = {"": bool, "N": int}.get(setting.metavar, str)
    if setting.repeatable:
        kind = list[str]
    return Annotated[
        kind | None,
        typer.Option(
            f"{flag(key)}/{setting.off}" if setting.off else flag(key),
            help=said or setting.help,
            metavar=setting.metavar or None,
            envvar=setting.variable or None,
        ),
    ]


def takes_settings(*keys: str, **said: str) -> Callable[[Callback], Callback]:
    """Give a command the options of settings, in place of its parameter `settings`.

    Args:
        *keys: The settings.
        **said: Help texts that differ from the table's.

    Returns:
        A decorator. `settings` maps keys to what `StudySpec` reads, None where an option was not given; the arguments of
        the script are among them.
    """

    def decorate(command: Callback) -> Callback:
        own = inspect.signature(command, eval_str=True).parameters
        has_script = "script_args" in own
        added = {
            key: inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option_of(key, said.get(key, ""))
            )
            for key in keys
        }

        @functools.wraps(command)
        def call(**given: Any) -> None:
            settings = {key: _joined(key, given.pop(key)) for key in added}
            if has_script:
                settings["script_args"] = tuple(given.pop("script_args") or ()) or None
            command(settings=settings, **given)

        rest = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values() if each.name != "settings"]
        first = [each for each in rest if each.name in ("target", "script_args", "study")]
        call.__signature__ = inspect.Signature([*first, *added.values(), *(each for each in rest if each not in first)])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


def _joined(key: str, given: Any) -> Any:
    """The value of an option as `StudySpec` reads it: presets of options that were given several times are one list."""
    if isinstance(given, list) and key in ("space", "objectives"):
        return ",".join(given) or None
    return given if given or not isinstance(given, list) else None
