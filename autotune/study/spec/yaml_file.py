"""Reads YAML as plain data, or raises an error of one sentence; writes it with comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from autotune.errors import SpecError
from autotune.space.deepspeed import DEEPEST
from autotune.system.files import read_text

# More than any study; what takes longer to read than a person waits is not read.
LARGEST_CHARACTERS = 256 << 10
MOST_VALUES = 50_000
LARGEST_BITS = 63
# Plain data: no dates, which a name may look like, no sets and no bytes, which no key takes.
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
PREFIX = "tag:yaml.org,2002:"
# What the parser's words leave open.
HINTS = {
    "'\\t'": "; indent with spaces, not tabs",
    "mapping values are not allowed": "; a colon inside a text needs quotation marks around the text",
    "could not determine a constructor": "; only plain texts, numbers, lists and mappings are read",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 5e8 as a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            found: Any = super().construct_object(node, deep)
        except (
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ):  # PyYAML's own functions on 0x_, 9999...9 or !!bool maybe
            kind = node.tag.removeprefix(PREFIX)
            raise _refused(
                node, f"{str(node.value)[:60]!r} cannot be read as {kind}; put a text in quotation marks"
            ) from None
        if isinstance(found, int) and found.bit_length() > LARGEST_BITS:
            raise _refused(
                node,
                f"{str(node.value)[:20]}{'...' if len(node.value) > 20 else ''} is a larger number than any key takes",
            )
        return found

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value: float = super().construct_yaml_float(node)
        return int(value) if "." not in str(node.value) and value.is_integer() else value


class _Dumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads back: quotes a text that looks like 5e8, and repeats a value rather than refer to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 wants a point in 5e8; YAML 1.2, and everybody who writes a bucket size, does not.
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_PLAIN: dict[str | None, Any] = {PREFIX + name: yaml.SafeLoader.yaml_constructors[PREFIX + name] for name in PLAIN}
_PLAIN[f"{PREFIX}timestamp"] = yaml.SafeLoader.construct_yaml_str
_PLAIN[None] = yaml.SafeLoader.yaml_constructors[None]  # which refuses all others
_Loader.yaml_constructors = _PLAIN
_Loader.add_constructor(f"{PREFIX}float", _Loader.construct_yaml_float)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{PREFIX}float", _EXPONENT, list("-+0123456789"))


def read_yaml(path: Path, where: str | None = None) -> Any:
    """Reads a YAML file as plain data.

    Args:
        path: The file.
        where: What names it, for the error that there is none; by default its own path.

    Raises:
        SpecError: No such file, or not YAML; it names the file and the line.
    """
    return parse_yaml(read_text(path, where or str(path)), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Reads YAML as plain data.

    Args:
        text: The YAML.
        where: What to call it in an error.

    Raises:
        SpecError: It is none, or more than a person writes; it names the line.
    """
    if len(text) > LARGEST_CHARACTERS:
        raise SpecError(
            f"{where}: {len(text):,} characters are more than a person writes ({LARGEST_CHARACTERS:,}); is it the right file?"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {})
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        said = str(error.problem or error.context)
        said = f"{error.context}, {said}" if said.startswith("but ") else said
        hint = next((words for sign, words in HINTS.items() if sign in said), "")
        own = isinstance(error, _Refused)
        raise SpecError(f"{where}:{line} {'' if own else 'not YAML: '}{said}{hint}") from None
    except ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise SpecError(f"{where}: line {line_number}: not YAML: {str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise SpecError(f"{where}: it is nested more than {DEEPEST} deep, which no key takes") from None
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML's scanner, on \\UFFFFFFFF and the like
        raise SpecError(
            f"{where}: not YAML: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None


def read_value(text: str) -> Any:
    """The value of KEY=VALUE on a command line: what the same text means in a study; what is no YAML is itself."""
    try:
        return parse_yaml(text, "value")
    except SpecError:
        return text


def written(value: Any, *, flow: bool) -> str:
    """A value as YAML that `parse_yaml` reads back: on one line, or a line for each part."""
    if flow:
        text = yaml.dump(
            value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10**6
        )
        return text.removesuffix("...\n").strip()
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def commented(key: str, value: Any, comment: str) -> str:
    """A key of a study with its value, below a comment if there is one."""
    above = f"\n# {comment}\n" if comment else ""
    if key in ("space", "objectives", "constraints") and value:
        rows = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        lines = "".join(f"  {name}: {_line(item)}\n" if name else f"  - {_line(item)}\n" for name, item in rows)
        return f"{above}{key}:\n{lines}"
    if isinstance(value, dict):
        return f"{above}{written({key: value}, flow=False)}"
    return f"{above}{key}: {_line(value)}\n"


def _line(value: Any) -> str:
    return written(list(value) if isinstance(value, tuple) else value, flow=True)


class _Refused(ConstructorError):
    """What is YAML, and yet not what a study may hold."""


def _refused(node: yaml.Node, problem: str) -> _Refused:
    return _Refused(None, None, problem, node.start_mark)


def _check(node: yaml.Node, seen: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Refuses nodes that stand for too many values or are nested too deeply, before they are made into data.

    Args:
        node: Where to look.
        seen: Size and depth of the nodes looked at before, to which aliases lead again; (0, 0) while one is looked at.

    Returns:
        How many values it stands for, aliases counted as often as they are used, and how deep they are nested.
    """
    if id(node) in seen:
        if seen[id(node)] == (0, 0):
            raise _refused(node, "an alias (*) stands inside of what it refers to, so that it would never end")
        return seen[id(node)]
    if isinstance(node, yaml.ScalarNode):
        _check_text(node)
        return 1, 0
    seen[id(node)] = (0, 0)
    parts = node.value
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        parts = [part for pair in node.value for part in pair]
    size, depth = 1, 1
    for part in parts:
        inner = _check(part, seen)
        size, depth = size + inner[0], max(depth, inner[1] + 1)
        if size > MOST_VALUES:
            raise _refused(node, f"it stands for more than {MOST_VALUES:,} values; are there aliases (*) of aliases?")
        if depth > DEEPEST:
            raise _refused(node, f"it is nested more than {DEEPEST} deep, which no key takes")
    seen[id(node)] = size, depth
    return size, depth


def _check_text(node: yaml.ScalarNode) -> None:
    try:
        node.value.encode()
    except UnicodeEncodeError:
        raise _refused(node, f"{node.value[:60]!r} holds a character that is none") from None
    if "\0" in node.value:
        raise _refused(node, f"{node.value[:60]!r} holds a zero byte, which neither a path nor a command can")


def _check_keys(node: yaml.MappingNode) -> None:
    keys = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{PREFIX}merge":
            continue
        if (key.tag, key.value) in keys:
            raise _refused(key, f"key {key.value[:60]!r} is there twice")
        keys.add((key.tag, key.value))
