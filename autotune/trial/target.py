"""Classifies a target by its syntax tree: a model.py, a training script of some family, or a study.yaml."""

import ast
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.errors import SpecError
from autotune.system.files import read_text

YAML = (".yaml", ".yml")
OPTIONAL = ("optimizer", "loss", "collate", "blocks")
# Functions of a model.py: number of positional arguments, and signature for messages.
SIGNATURES = {
    "model": (0, "model()"), "data": (0, "data()"), "batch": (1, "batch(n)"), "loss": (2, "loss(model, batch)"),
    "optimizer": (1, "optimizer(params)"), "collate": (1, "collate(samples)"),
}  # fmt: skip
# Only a training script calls one of these.
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
# A script that uses transformers' Trainer, or a subclass of it, imports one of these.
TRAINER_MODULES = {"transformers", "trl", "sentence_transformers", "setfit"}
LIGHTNING_MODULES = {"lightning", "pytorch_lightning"}
# How the variables begin that libraries read as they are imported, and not again.
READ_BY_IMPORTS = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "DIFFUSERS_", "XDG_CACHE_HOME", "USE_TF", "USE_TORCH",
)  # fmt: skip
# Files of the user's that are read along with a script, at most.
MOST_FILES = 200


@dataclass(frozen=True, kw_only=True)
class Target:
    """Kind and contents of a target file, read from its syntax tree.

    Attributes:
        kind: `model` for a model.py, `script` for a training script, `study` for a study.yaml.
        defines: Those of the optional functions `OPTIONAL` that it defines.
        imports: Modules that it imports at the top level, without those beside it; `module:name,name` where it imports
            names from one, since that may load submodules. Before them stand variables that libraries read as they are
            imported, where it plainly sets these before it imports any: `NAME=value`, or `NAME?=value` for a default.
            Where it sets such variables in other ways there are no imports, as they are not to be imported before.
        constants: Names that it assigns a value to at the top level.
    """

    path: Path
    kind: Literal["model", "script", "study"]
    defines: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


def inspect_target(path: Path, *, launched: bool = False) -> Target:
    """Classifies a target without importing it.

    Args:
        launched: Whether a launcher starts ranks of it; then it is a training script, even if other files train.
    """
    if os.path.isdir(path):
        inside = next((name for name in ("study.yaml", "model.py") if (path / name).exists()), None)
        raise SpecError(
            f"{path} is a folder; name the model.py or study.yaml" + (f": {path / inside}" if inside else " in it")
        )
    own = path.parent / "studies" / path.name / "study.yaml"
    if os.path.isfile(own) and not os.path.exists(path):
        raise SpecError(f"target: there is no file {path}; the study of that name is {own}")
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
    has_source = any(_callable(names.get(name)) for name in ("data", "batch"))
    # A script that trains may import `model` and `data` from its package, whether these are modules or functions.
    owns = not (isinstance(names.get("model"), ast.ImportFrom) and _trains(tree))
    whole, complete = list(_own_modules(path, tree).values()), has_source and owns and _callable(names.get("model"))
    if launched or (not complete and any(map(_trains, whole))):
        return _inspect_script(path, tree, whole, launched=launched)
    if not _callable(names.get("model")):
        raise SpecError(f"{path}: {_why_no_model(names)}")
    if not has_source:
        raise SpecError(
            f"{path}: defines model() but neither data() -> Dataset nor batch(n); add one of them"
            " (`autotune init` shows how)"
        )
    for name, (count, reads) in SIGNATURES.items():
        if isinstance(node := names.get(name), ast.FunctionDef) and not _takes(node.args, count):
            raise SpecError(f"{path}: line {node.lineno}: {name} must be callable as {reads}")
    return Target(
        path=path,
        kind="model",
        defines=frozenset(name for name in OPTIONAL if name in names),
        imports=_imports(path, [tree], whole),
    )


def defined_names(path: Path) -> frozenset[str]:
    """Returns the names that a file itself defines, assigns or imports by name; none that `import *` brings."""
    return frozenset(name for name, _ in _definitions(ast.parse(path.read_bytes()).body))


def is_yaml(path: Path) -> bool:
    """Returns whether the file has the suffix of a study."""
    return path.suffix in YAML


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run on import, also in `try`, `with` and `if`; none below `__main__`."""
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
    """Returns whether a top-level name is probably a function: defined, imported, or an alias."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith("partial")
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom | ast.Lambda | ast.Name | ast.Attribute)


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    keywords = any(default is None for default in arguments.kw_defaults)
    return not keywords and required <= count and (count <= len(positional) or arguments.vararg is not None)


def _trains(tree: ast.Module) -> bool:
    return any(name in SCRIPT_CALLS or name.endswith("Trainer") for name in _calls(tree))


def _calls(tree: ast.Module) -> Iterator[str]:
    """Yields the last part of the name of everything that is called or inherited from."""
    for node in ast.walk(tree):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        yield from (ast.unparse(expression).rsplit(".", 1)[-1] for expression in used)


def _inspect_script(path: Path, tree: ast.Module, whole: Sequence[ast.Module], *, launched: bool) -> Target:
    """Returns a training script of a family that can be tuned.

    Args:
        whole: The trees of the script and of the user's modules that it imports.
        launched: Whether a launcher started it as a rank; then it trains, no matter what it imports.
    """
    calls = {name for each in whole for name in _calls(each)}
    modules = {name.partition(".")[0] for each in whole for node in ast.walk(each) for name in _modules(node)}
    lightning = bool(modules & LIGHTNING_MODULES)
    if "Fabric" in calls and (lightning or "lightning_fabric" in modules):
        raise SpecError(
            f"{path}: a training script with Lightning Fabric cannot be tuned yet; one with Lightning's Trainer can"
        )
    trainer = any(name.endswith("Trainer") for name in calls) and bool(modules & TRAINER_MODULES)
    if not launched and not trainer and not lightning and not modules & {"deepspeed", "accelerate"}:
        raise SpecError(
            f"{path}: looks like a training script, but does not import deepspeed; only one that trains with"
            " deepspeed.initialize, transformers' Trainer, Accelerate or Lightning can be tuned, or a model.py"
            " (`autotune init` shows how)"
        )
    constants = dict.fromkeys(name for name, _ in module_constants(tree.body))
    return Target(path=path, kind="script", imports=_imports(path, whole, whole), constants=tuple(constants))


def sources(target: Path) -> list[Path]:
    """Returns the target and the user's files that it imports, directly or not; empty if there is no such file."""
    target = target.absolute()
    tree = parsed(target)
    return list(_own_modules(target, tree)) if tree is not None else [target] if target.is_file() else []


def _own_modules(path: Path, tree: ast.Module) -> dict[Path, ast.Module]:
    """Returns the syntax trees of a file and of the user's modules that it imports, directly or not."""
    roots, found, pending = _roots(path), {path: tree}, [path]
    while pending and len(found) < MOST_FILES:
        importer = pending.pop()
        for node in ast.walk(found[importer]):
            for file in _imported_files(node, importer, roots):
                if file not in found and (imported := parsed(file)) is not None:
                    found[file] = imported
                    pending.append(file)
    return found


def _roots(path: Path) -> list[Path]:
    """Returns the folders in which a file's imports find the user's modules."""
    roots = list(dict.fromkeys([path.parent, path.resolve().parent]))  # of a link, Python looks beside what it leads to
    while (roots[-1] / "__init__.py").exists():  # in a package, absolute imports begin above it
        roots.append(roots[-1].parent)
    return roots


def _imported_files(node: ast.AST, importer: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yields the files below the user's folders that an import statement may refer to."""
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


def parsed(path: Path) -> ast.Module | None:
    """Returns the syntax tree of a file; None if it cannot be read or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two if it is nested too deeply
        return None


def _modules(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [module]
    return []


def _why_no_model(names: Mapping[str, ast.AST]) -> str:
    if "model" in names:
        line = getattr(names["model"], "lineno", "?")
        return f"line {line}: model is a value; make it a function, model() -> torch.nn.Module, that builds it"
    close = difflib.get_close_matches("model", list(names), n=1, cutoff=0.6)
    hint = f" (there is {close[0]!r})" if close else " by name (`import *` is not followed)" if "*" in names else ""
    return (
        f"defines no model(){hint}; a target has model() -> torch.nn.Module, and data() -> Dataset or batch(n), or is the"
        " file that itself trains, with deepspeed.initialize, a Trainer, Accelerate or Lightning"
    )


def _imports(path: Path, trees: Sequence[ast.Module], whole: Sequence[ast.Module]) -> tuple[str, ...]:
    """Returns the `imports` of a target.

    Args:
        trees: Those whose imports count.
        whole: The trees of the target and of all of the user's modules that it imports.
    """
    plain = dict(_plainly_set(whole[0]))
    rest = [ast.Module([node for node in whole[0].body if node not in plain], []), *whole[1:]]
    if any(is_read_by_imports(name) for tree in rest for name in _variables_set(tree)):
        return ()
    found: dict[str, None] = {}
    for node in (statement for tree in trees for statement in _statements(tree.body)):
        match node:
            case ast.Import():
                found |= dict.fromkeys(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0) if module != "__future__":
                names = ",".join(alias.name for alias in node.names if alias.name != "*")
                found[f"{module}:{names}".rstrip(":")] = None
    beside = set[str]()
    for folder in _roots(path):
        with contextlib.suppress(OSError):  # a folder may be accessible without being listable
            beside |= {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    return (*plain.values(), *(name for name in found if re.split("[.:]", name)[0] not in beside))


def is_read_by_imports(variable: str) -> bool:
    """Whether libraries read a variable as they are imported, and not again."""
    return variable.startswith(READ_BY_IMPORTS) and not variable.endswith("_TOKEN")


def _plainly_set(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yields statements that set variables which imports read, each with its item, up to the first import of a library."""
    for node in tree.body:
        match node:
            case ast.Import() | ast.ImportFrom():
                if not {name.partition(".")[0] for name in _modules(node) or [""]} <= sys.stdlib_module_names:
                    return
                continue
            case ast.Assign([ast.Subscript(place, ast.Constant(str(name)))], ast.Constant(str(value))):
                sign = "="
            case ast.Expr(
                ast.Call(ast.Attribute(place, "setdefault"), [ast.Constant(str(name)), ast.Constant(str(value))])
            ):
                sign = "?="
            case _:
                continue
        if ast.unparse(place).endswith("environ") and is_read_by_imports(name):
            yield node, f"{name}{sign}{value}"


def _variables_set(tree: ast.Module) -> Iterator[str]:
    """Yields texts among which are the variables of the environment that a file sets; `HF_` where it reads them from another."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=place, slice=said, ctx=ast.Store()) | ast.AugAssign(target=place, value=said):
                pass
            case ast.Call(func=ast.Attribute(value=place, attr="setdefault" | "update")) as said:
                pass
            case ast.Call(func=ast.Name(id="load_dotenv") | ast.Attribute(attr="load_dotenv")):
                yield READ_BY_IMPORTS[0]
                continue
            case _:
                continue
        if ast.unparse(place).endswith("environ"):
            yield from (str(part.value) for part in ast.walk(said) if isinstance(part, ast.Constant))
            yield from (str(part.arg) for part in ast.walk(said) if isinstance(part, ast.keyword))


def module_constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Yields the names that a script assigns at its top level, as `--set` may replace them, and the statements."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name, node
            case ast.If() | ast.With() | ast.Try():
                yield from module_constants([*node.body, *getattr(node, "orelse", [])])
