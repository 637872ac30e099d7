"""Prints the text of `docs/reference.md`: every command with its options, and every key of `study.yaml`.

`python .ci/reference.py >docs/reference.md`, or `make reference`.
"""

from collections.abc import Iterator
from typing import Any

from autotune.cli.app import COMMANDS, imported
from autotune.study.spec.presets import DEFAULT_GOAL, DEFAULT_SPACES
from autotune.study.spec.settings import SETTINGS, flag
from autotune.study.spec.spec import StudySpec

HEAD = """# Reference

Made by `make reference` from the program itself.

- [Commands](#commands)
- [Settings of a study](#settings-of-a-study)
"""
# Defaults that the specification works out.
DEFAULTS = {
    "name": "from the target", "target": "", "space": ", ".join(DEFAULT_SPACES),
    "goal": DEFAULT_GOAL, "objectives": "the goal's", "global_batch": "keep or free",
}  # fmt: skip


def lines() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    yield "## Commands"
    for path in COMMANDS:
        yield from _command(path)
    yield ""
    yield "## Settings of a study"
    yield ""
    yield "Keys of `study.yaml`, and arguments of `autotune.run` in Python. An option goes before the file."
    yield ""
    yield "| key | option of `autotune run` | default | what it is |"
    yield "| --- | --- | --- | --- |"
    for key, each in SETTINGS.items():
        field = StudySpec.model_fields[key]
        default = DEFAULTS.get(key, "" if field.default_factory else _shown(field.default))
        option = " ".join(filter(None, (flag(key), each.metavar))) if each.option else ""
        option = " ".join(f"`{part}`" for part in (option, each.off) if part)
        yield f"| `{key}` | {_cell(option)} | {default} | {_cell(f'{each.help} {each.more}')} |"


def _command(path: str) -> Iterator[str]:
    """A command with its arguments and options."""
    command = imported(path)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    named = [each.metavar if each.required else f"[{(each.metavar or '').strip('[]')}]" for each in arguments]
    rows = [each for each in command.params if each.name != "help"]
    yield from ("", f"### `{' '.join(['autotune', path, *named])}`", "", " ".join((command.help or "").split()))
    if rows:
        yield from ("", "| option | what it does |", "| --- | --- |")
    for each in rows:
        names = [each.metavar] if each in arguments else [*each.opts, *each.secondary_opts]
        value = f" {each.metavar}" if each not in arguments and not each.is_flag else ""
        stated = isinstance(each.default, str | int) and each.default and value
        text = (each.help or "") + (f" (default: {each.default})" if stated else "")
        yield f"| {_cell(', '.join(f'`{name}{value}`' for name in names))} | {_cell(text)} |"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default or ("" if default != 0 else 0))


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


if __name__ == "__main__":
    print("\n".join(lines()))
