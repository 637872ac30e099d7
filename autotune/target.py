"""What a target is, read from its syntax tree: a model.py, a training script of some family, or a study.yaml."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from autotune import UserError
from autotune.candidate import nearest
from autotune.trial import module_constants

YAML = (".yaml", ".yml")
OPTIONAL = ("optimizer", "loss", "collate", "blocks")
# Required parameters of the functions of a model.py, and how they read.
SIGNATURES = {"model": (0, "model()"), "data": (0, "data()"), "batch": (1, "batch(n)"), "loss": (2, "loss(model, batch)"),
              "optimizer": (1, "optimizer(params)"), "collate": (1, "collate(samples)")}  # fmt: skip
# What only a training script calls.
SCRIPT_CALLS = (
    "initialize",
    "backward",
    "Trainer",
    "LightningCLI",
    "Accelerator",
    "PipelineModule",
    "fit",
    "parse_args",
)

# What a script imports that has a Trainer (or subclasses of one) from transformers.
TRAINER_MODULES = {"transformers", "trl", "sentence_transformers", "setfit"}
LIGHTNING_MODULES = {"lightning", "pytorch_lightning"}
# Modules of the user's own that a script is looked at together with.
MOST_HELPERS = 200
# Nobody writes more by hand: what is larger is another file than the one that was meant.
LARGEST_BYTES = 1 << 20
# What the parser says of a text that is nested without end, or as deep as no interpreter goes.
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)


class SpecError(UserError):
    """A study, preset or target that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a target file is, read from its syntax tree.

    Attributes:
        path: The file.
        kind: `model` for a model.py, `script` for a training script, `study` for a study.yaml.
        batch_source: The function that batches come from.
        defines: Which of the optional `optimizer`, `loss`, `collate`, `blocks` it has.
        imports: Modules that it imports at the top, without those that lie beside it; `module:name,name` where it takes names
            out of one, which may load more.
        constants: Names that it assigns a value to at the top.
    """

    path: Path
    kind: Literal["model", "script", "study"]
    batch_source: Literal["data", "batch"] | None = None
    defines: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


def inspect_target(path: Path, *, launched: bool = False) -> Target:
    """Finds out what a target is, without importing it.

    Args:
        path: The file.
        launched: A launcher starts ranks of it, so that it is a training script even where its training lies in other files.

    Raises:
        SpecError: In one sentence, why it cannot be tuned.
    """
    if os.path.isdir(path):
        inside = next((name for name in ("study.yaml", "model.py") if (path / name).exists()), None)
        raise SpecError(
            f"{path} is a folder; name the model.py or study.yaml" + (f": {path / inside}" if inside else " in it")
        )
    text = read_text(path, "target")
    if is_yaml(path):
        return Target(path=path, kind="study")
    if path.suffix != ".py" and not launched:
        raise SpecError(f"{path}: a target is a model.py or a study.yaml, or a training script")
    try:
        return _inspect(path, ast.parse(text, filename=str(path)), launched=launched)
    except (RecursionError, MemoryError):
        raise SpecError(f"{path}: not Python: nested too deeply for the interpreter") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise SpecError(
            f"{path}:{f' line {line}:' if line else ''} not Python: {getattr(error, 'msg', error)}"
        ) from None


def _inspect(path: Path, tree: ast.Module, *, launched: bool) -> Target:
    names = dict(_definitions(tree.body))
    source = next((name for name in ("data", "batch") if _callable(names.get(name))), None)
    if launched or not _callable(names.get("model")) or source is None:
        whole = _with_helpers(path, tree)
        if launched or any(map(_trains, whole)):
            return _inspect_script(path, tree, whole, launched=launched)
    if not _callable(names.get("model")):
        raise SpecError(f"{path}: {_why_no_model(names)}")
    if source is None:
        raise SpecError(
            f"{path}: defines model() but neither data() -> Dataset nor batch(n); add one of them (`autotune init` shows how)"
        )
    for name, (count, reads) in SIGNATURES.items():
        if isinstance(node := names.get(name), ast.FunctionDef) and not _takes(node.args, count):
            raise SpecError(f"{path}: line {node.lineno}: {name} must be callable as {reads}")
    return Target(
        path=path,
        kind="model",
        batch_source=cast(Literal["data", "batch"], source),
        defines=frozenset(name for name in OPTIONAL if name in names),
        imports=tuple(_imports(tree.body, path.parent)),
    )


def is_yaml(path: Path) -> bool:
    """Whether the file is named as a study is."""
    return path.suffix in YAML


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs on import: also inside `try`, `with` and `if`, but not below `TYPE_CHECKING` or `__main__`."""
    for node in body:
        yield node
        match node:
            case ast.If(test=test):
                skipped = any(word in ast.unparse(test) for word in ("TYPE_CHECKING", "__main__"))
                yield from _statements(node.orelse if skipped else [*node.body, *node.orelse])
            case ast.Try():
                handled = [statement for handler in node.handlers for statement in handler.body]
                yield from _statements([*node.body, *handled, *node.orelse, *node.finalbody])
            case ast.With():
                yield from _statements(node.body)


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in _statements(body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name, node) for alias in node.names)
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _callable(node: ast.AST | None) -> bool:
    """Whether a top-level name is likely a function: defined, imported, or an alias of one."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith("partial")
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom | ast.Lambda | ast.Name | ast.Attribute)


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    keywords = any(default is None for default in arguments.kw_defaults)
    return not keywords and required <= count and (count <= len(positional) or arguments.vararg is not None)


def _trains(tree: ast.Module) -> bool:
    return any(name in SCRIPT_CALLS or name.endswith("Trainer") for name, _ in _calls(tree))


def _calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Last name and line of everything that is called or inherited from, in the order of the text."""
    used: list[tuple[ast.expr, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            used.append((node.func, node.lineno))
        elif isinstance(node, ast.ClassDef):
            used += [(base, node.lineno) for base in node.bases]
    found = [(ast.unparse(expression).rsplit(".", 1)[-1], line) for expression, line in used]
    yield from sorted(found, key=lambda call: call[1])


def _inspect_script(path: Path, tree: ast.Module, whole: Sequence[ast.Module], *, launched: bool) -> Target:
    """A training script of a family that can be tuned.

    Args:
        path: The file.
        tree: Its syntax tree.
        whole: The same, and those of the user's own modules that it imports.
        launched: A launcher gave it a rank, so it trains, whatever it imports.

    Raises:
        SpecError: It is of another family.
    """
    calls = {name for each in whole for name, _ in _calls(each)}
    modules = {name.partition(".")[0] for each in whole for node in ast.walk(each) for name in _modules(node)}
    lightning = bool(modules & LIGHTNING_MODULES)
    if "Fabric" in calls and (lightning or "lightning_fabric" in modules):
        raise SpecError(
            f"{path}: a training script with Lightning Fabric cannot be tuned yet; one with Lightning's Trainer can"
        )
    trainer = any(name.endswith("Trainer") for name in calls) and bool(modules & TRAINER_MODULES)
    if not launched and not trainer and not lightning and not modules & {"deepspeed", "accelerate"}:
        raise SpecError(
            f"{path}: looks like a training script, but does not import deepspeed; only one that trains with deepspeed.initialize,"
            " transformers' Trainer, Accelerate or Lightning can be tuned, or a model.py (`autotune init` shows how)"
        )
    constants = dict.fromkeys(name for name, _ in module_constants(tree.body))
    imports = dict.fromkeys(name for each in whole for name in _imports(each.body, path.parent))
    return Target(path=path, kind="script", imports=tuple(imports), constants=tuple(constants))


def _with_helpers(path: Path, tree: ast.Module) -> list[ast.Module]:
    """The syntax trees of a script and of the modules of the user's own that it imports, which may do the training."""
    roots = [path.parent]
    while (roots[-1] / "__init__.py").exists():  # a module of a package: what it imports begins above
        roots.append(roots[-1].parent)
    found, pending = {path: tree}, [path]
    while pending and len(found) < MOST_HELPERS:
        importer = pending.pop()
        for node in ast.walk(found[importer]):
            for helper in _helpers(node, importer, roots):
                if helper not in found and (parsed := _parsed(helper)) is not None:
                    found[helper] = parsed
                    pending.append(helper)
    return list(found.values())


def _helpers(node: ast.AST, importer: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """The files that an import statement may mean below the user's own folders."""
    names = _modules(node)
    if isinstance(node, ast.ImportFrom):
        if node.level:
            roots = [importer.parents[node.level - 1]] if node.level <= len(importer.parents) else []
        prefix = f"{node.module}." if node.module else ""
        names = [*names, *(f"{prefix}{alias.name}" for alias in node.names)]
    for root in roots:
        for name in names:
            inside = root.joinpath(*name.split("."))
            yield from (file for file in (inside.with_suffix(".py"), inside / "__init__.py") if file.is_file())


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, *UNPARSED):
        return None


def _modules(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [module]
    return []


def is_script(path: Any) -> bool:
    """Whether it is the path of a training script that can be tuned."""
    try:
        return isinstance(path, Path) and path.suffix == ".py" and inspect_target(path).kind == "script"
    except SpecError:
        return False


def _why_no_model(names: Mapping[str, ast.AST]) -> str:
    if "model" in names:
        line = getattr(names["model"], "lineno", "?")
        return f"line {line}: model is a value; make it a function, model() -> torch.nn.Module, that builds it"
    close = difflib.get_close_matches("model", list(names), n=1, cutoff=0.6)
    hint = f" (there is {close[0]!r})" if close else ""
    return f"defines no model(){hint}; a target has model() -> torch.nn.Module, and data() -> Dataset or batch(n)"


def _imports(body: Sequence[ast.stmt], folder: Path) -> list[str]:
    found: dict[str, None] = {}
    for node in _statements(body):
        match node:
            case ast.Import():
                found |= dict.fromkeys(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0) if module != "__future__":
                found[f"{module}:{','.join(alias.name for alias in node.names if alias.name != '*')}".rstrip(":")] = (
                    None
                )
    beside = set[str]()
    with contextlib.suppress(OSError):  # a folder that may be entered and not listed
        beside = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    return [name for name in found if re.split("[.:]", name)[0] not in beside]


def read_text(path: Path, where: str) -> str:
    """The text of a file that the user named.

    Args:
        path: The file.
        where: What named it, for the error.

    Raises:
        SpecError: It is not there, not text, or not a file that somebody wrote.
    """
    try:
        str(path).encode()  # a study.yaml names it, in UTF-8
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise SpecError(f"{where}: {path} is a folder, not a file")
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device may never end
            raise SpecError(
                f"{where}: {path} is no regular file but a pipe, a socket or a device; write to a file and name that"
            )
        if found.st_size > LARGEST_BYTES:
            size, most = found.st_size / 2**20, LARGEST_BYTES / 2**20
            raise SpecError(
                f"{where}: {path} has {size:,.1f} MiB, more than a person writes ({most:.0f} MiB); is it the right file?"
            )
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark of its encoding
    except FileNotFoundError:
        raise SpecError(f"{where}: there is no file {path}.{similar(path)}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{where}: {path} is not a text file in UTF-8; save it as UTF-8") from None
    except UnicodeEncodeError:
        raise SpecError(
            f"{where}: the name {str(path)!r} is not UTF-8, as a study.yaml that names it has to be; rename it"
        ) from None
    except ValueError:
        raise SpecError(f"{where}: {str(path)!r} cannot be the name of a file") from None
    except OSError as error:
        raise SpecError(f"{where}: {path} cannot be read: {error.strerror}") from None


def similar(path: Path) -> str:
    """A file beside it that may be meant, as a sentence to add."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):  # there is no such folder, or it may not be listed
        return ""


def sources(target: Path) -> Iterator[Path]:
    """The target and the files beside it that it imports, and those that they import."""
    pending, seen = [target.absolute()], set[Path]()
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        yield path
        try:
            tree = ast.parse(path.read_bytes())
        except UNPARSED:
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or "", *(alias.name for alias in node.names)] if isinstance(node, ast.ImportFrom) else []
            )
            for name in names:
                beside = path.parent.joinpath(*name.split("."))
                pending += [beside.with_suffix(".py"), beside / "__init__.py"] if name else []
