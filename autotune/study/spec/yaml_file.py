"""Reads YAML as plain data, or raises an error of one sentence; writes it with comments."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from autotune.errors import SpecError, UserError
from autotune.space.candidate import FIELDS, check_knob, check_value
from autotune.space.deepspeed import DEEPEST, Scalar, check_setting
from autotune.system.files import read_text

T = TypeVar("T")

# The study as it was run, where that took options beside the study.yaml of its folder.
AS_RUN = "as-run.yaml"
# Limits far above any study, below what takes noticeable time to read.
LARGEST_CHARACTERS = 256 << 10
MOST_VALUES = 50_000
LARGEST_BITS = 63
# Plain data: no dates, which a name may look like, no sets and no bytes, which no key takes.
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
PREFIX = "tag:yaml.org,2002:"
# Advice by a part of PyYAML's message.
HINTS = {
    "'\\t'": "; indent with spaces, not tabs",
    "mapping values are not allowed": "; a colon inside a text needs quotation marks around the text",
    "could not determine a constructor": "; only plain texts, numbers, lists and mappings are read",
}
# PyYAML lets these through on 0x_, 9999...9, `!!bool maybe`, "\UFFFFFFFF" and the like.
MISREAD = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)


class _Refused(ConstructorError):
    """YAML that a study may not hold."""


def _refused(node: yaml.Node, problem: str) -> _Refused:
    return _Refused(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses repeated keys and texts that are none, and reads 5e8 as a number, 1:30:00 and 010 as texts."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            found: Any = super().construct_object(node, deep)
        except MISREAD:
            kind, text = node.tag.removeprefix(PREFIX), str(node.value)[:60]
            raise _refused(node, f"{text!r} cannot be read as {kind}; put a text in quotation marks") from None
        if isinstance(found, int) and found.bit_length() > LARGEST_BITS:
            raise _refused(node, f"{str(node.value)[:20]} is a larger number than any key takes")
        if isinstance(found, str) and re.search(r"[\ud800-\udfff]", found):
            raise _refused(node, f"{found[:60]!r} holds a character that is none")
        if isinstance(found, str) and "\0" in found:
            raise _refused(node, f"{found[:60]!r} holds a zero byte, which neither a path nor a command can")
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{PREFIX}merge":
                if (key.tag, key.value) in keys:
                    raise _refused(key, f"key {key.value[:60]!r} is there twice")
                keys.add((key.tag, key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_whole(self, node: yaml.ScalarNode) -> int | str:
        value: int = self.construct_yaml_int(node)
        return str(node.value) if _OLD_NUMBER.search(str(node.value)) else value

    def construct_number(self, node: yaml.ScalarNode) -> float | str:
        value: float = self.construct_yaml_float(node)
        if _OLD_NUMBER.search(str(node.value)):
            return str(node.value)
        return int(value) if "." not in str(node.value) and value.is_integer() else value


class _Dumper(yaml.SafeDumper):
    """Writes YAML for `read_yaml`: quotes a text that looks like 5e8, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(f"{PREFIX}str", data, style='"' if _BREAKS.search(data) else None)


# YAML 1.1 ends a line here, too, and reads a line feed back where they are not written as escapes.
_BREAKS = re.compile("[\x85\u2028\u2029]")
# YAML 1.1 wants a point in 5e8; YAML 1.2, and people who write a bucket size, do not.
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
# YAML 1.1 takes 1:30:00 for a number to the base 60, and 010 for one to the base 8; people write a time limit, an account.
_OLD_NUMBER = re.compile(r":|^[-+]?0[0-9_]+$")
_PLAIN: dict[str | None, Any] = {PREFIX + name: yaml.SafeLoader.yaml_constructors[PREFIX + name] for name in PLAIN}
_PLAIN[f"{PREFIX}timestamp"] = yaml.SafeLoader.construct_yaml_str
_PLAIN[None] = yaml.SafeLoader.yaml_constructors[None]  # refuses all other tags
_Loader.yaml_constructors = _PLAIN
_Loader.add_constructor(f"{PREFIX}float", _Loader.construct_number)
_Loader.add_constructor(f"{PREFIX}int", _Loader.construct_whole)
_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{PREFIX}float", _EXPONENT, list("-+0123456789"))


def read_yaml(path: Path, where: str | None = None) -> Any:
    """Reads a YAML file as plain data; `where` names it in an error, by default its path."""
    return parse_yaml(read_text(path, where or str(path)), str(path))


def as_run(folder: Path) -> Path:
    """The file in a study's folder that states the study as it was last run, with the options of that run."""
    return path if (path := folder / AS_RUN).is_file() else folder / "study.yaml"


def elsewhere(folder: Path) -> str:
    """The place where the trials of a study ran, in words; empty for this machine alone."""
    try:
        stated = read_yaml(as_run(folder))
    except UserError:
        return ""
    stated = stated if isinstance(stated, dict) else {}
    if stated.get("executor", "local") != "local":
        return f"on {stated['executor']}"
    if stated.get("hostfile"):
        return f"on the machines of {stated['hostfile']}"
    return f"on {nodes} machines" if (nodes := stated.get("nodes") or 1) != 1 else ""


def stated_storage(path: Path) -> str | None:
    """Returns the database that a study.yaml names; None if it names none, or cannot be read."""
    try:
        data = read_yaml(path) if path.is_file() else None
    except SpecError:
        return None
    found = data.get("storage") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def parse_yaml(text: str, where: str) -> Any:
    """Reads YAML as plain data.

    Args:
        where: The name of the text in an error.

    Raises:
        SpecError: The text is not YAML, or exceeds a limit; the message names the line.
    """
    if len(text) > LARGEST_CHARACTERS:
        many = f"{len(text):,} characters are more than a person writes ({LARGEST_CHARACTERS:,})"
        raise SpecError(f"{where}: {many}; is it the right file?")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        for n, node in enumerate(_nodes(root)):
            if n > MOST_VALUES:
                raise _refused(node, f"there are more than {MOST_VALUES:,} values; are there aliases (*) of aliases?")
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        said = str(error.problem or error.context)
        said = f"{error.context}, {said}" if said.startswith("but ") else said
        hint = next((words for sign, words in HINTS.items() if sign in said), "")
        raise SpecError(f"{where}:{line} {'' if isinstance(error, _Refused) else 'not YAML: '}{said}{hint}") from None
    except RecursionError:
        raise SpecError(f"{where}: it is nested more than {DEEPEST} deep, which no key takes") from None
    except (yaml.YAMLError, *MISREAD) as error:
        line = f" line {text.count(chr(10), 0, error.position) + 1}:" if isinstance(error, ReaderError) else ""
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise SpecError(f"{where}:{line} not YAML: {said}") from None


def _nodes(node: yaml.Node, depth: int = 0) -> Iterator[yaml.Node]:
    """Yields all nodes below one, those behind aliases as often as they are used."""
    if depth > DEEPEST:
        raise _refused(node, f"it is nested more than {DEEPEST} deep; does an alias (*) refer to itself?")
    yield node
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for inner in part if isinstance(part, tuple) else (part,):
            yield from _nodes(inner, depth + 1)


def naming_lines(read: Callable[..., T]) -> Callable[..., T]:
    """Decorates a method that reads a file: an error that begins with the file and a key names the key's line, too."""

    @functools.wraps(read)
    def located(cls: Any, path: Path, *given: Any, **named: Any) -> T:
        try:
            return read(cls, path, *given, **named)
        except UserError as error:
            said = str(error).removeprefix(f"{path}: ")
            line = _line_of(said, path) if said != str(error) else None
            if line is None:
                raise
            raise type(error)(f"{path}: line {line}: {said}") from None

    return located


def _line_of(said: str, path: Path) -> int | None:
    """The line of the innermost key that a message begins with, or of the unknown key that it names."""
    try:
        node, found = yaml.compose(read_text(path, str(path)), Loader=_Loader), None
    except (yaml.YAMLError, RecursionError, SpecError, *MISREAD):
        return None
    while isinstance(node, yaml.MappingNode):
        strange = re.match(r"unknown (?:\w+ )?'([^']*)'", said)
        for key, value in node.value:
            if strange and key.value == strange[1]:
                return int(key.start_mark.line) + 1
            if isinstance(key, yaml.ScalarNode) and re.match(rf"{re.escape(key.value)}(: | )", said):
                said, node, found = said[len(key.value) :].lstrip(": "), value, int(key.start_mark.line) + 1
                break
        else:
            break
    return found


def read_value(text: str) -> Any:
    """Returns the value of KEY=VALUE on a command line, read as in a study; a text that is no YAML stays a text."""
    try:
        return parse_yaml(text, "value")
    except SpecError:
        return text


def read_setting(text: str) -> tuple[str, Scalar]:
    """Returns the knob and the value of KEY=VALUE; None, which `default` reads as too, is DeepSpeed's default.

    Raises:
        UserError: There is no such knob, or it does not take the value.
    """
    name, _, given = (part.strip() for part in text.partition("="))
    if not (name and given):
        raise UserError(f"{text!r}: KEY=VALUE is needed, as in zero_stage=3")
    value = None if given == "default" else read_value(given)
    if isinstance(value, dict | list):
        raise UserError(f"{text!r}: a plain value is needed, as in zero_stage=3")
    check_knob(name)
    if value is None and name in FIELDS:
        raise UserError(f"{text!r}: {name} needs a value; only DeepSpeed's own settings take `default`")
    if value is not None:
        check_value(name, value)
        check_setting(name, value, name)
    return name, value


def written(value: Any, *, flow: bool) -> str:
    """Returns a value as YAML that `parse_yaml` reads back: on one line (`flow`), or a line for each part."""
    width = 10**6 if flow else 120
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width)
    return text.removesuffix("...\n").strip() if flow else text


def commented(key: str, value: Any, comment: str) -> str:
    """Returns a key of a study with its value, below a comment if there is one."""
    above = f"\n# {comment}\n" if comment else ""
    if key in ("space", "objectives", "constraints") and value:
        rows = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        lines = "".join(f"  {name}: {_line(item)}\n" if name else f"  - {_line(item)}\n" for name, item in rows)
        return f"{above}{key}:\n{lines}"
    return above + (written({key: value}, flow=False) if isinstance(value, dict) else f"{key}: {_line(value)}\n")


def _line(value: Any) -> str:
    return written(list(value) if isinstance(value, tuple) else value, flow=True)
