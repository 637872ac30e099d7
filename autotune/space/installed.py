"""Names and bounds that the installed DeepSpeed and torch accept, read from their sources.

Importing either takes seconds, and the driver imports neither.
"""

import ast
import contextlib
import functools
import importlib.util
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COMPARE = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "ne": operator.ne}
SIGNS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "ne": "allowed, it must differ from"}
# Bounds that DeepSpeed checks in code (`fp16.loss_scale`), or takes for granted: it divides by `steps_per_print`.
OTHER_BOUNDS: dict[str, dict[str, float]] = {
    "gradient_clipping": {"ge": 0}, "fp16.loss_scale": {"ge": 0}, "steps_per_print": {"ne": 0},
}  # fmt: skip
KIND_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}
# Texts that pydantic reads as true or false, and how Python writes 0.0 and 1.0.
READ_AS_BOOL = frozenset("true false 1 0 1.0 0.0 t f y n yes no on off".split())
# The pydantic models of DeepSpeed's sections whose fields have bounds.
OFFLOAD = "deepspeed.runtime.zero.offload_config"
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_optimizer": (OFFLOAD, "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.offload_param": (OFFLOAD, "DeepSpeedZeroOffloadParamConfig"),
}  # fmt: skip


@functools.cache
def optimizers() -> frozenset[str]:
    """Types of optimizers: DeepSpeed's own in lower case, and torch's; empty if they cannot be read."""
    own, torch = _texts("deepspeed.runtime.config", "DEEPSPEED_OPTIMIZERS"), _texts("torch.optim", "__all__")
    return own | {name for name in torch if name[0].isupper() and name != "Optimizer"} if own and torch else frozenset()


@functools.cache
def schedulers() -> frozenset[str]:
    """Types of learning-rate schedules, DeepSpeed's and torch's; empty if they cannot be read."""
    own = _texts("deepspeed.runtime.lr_schedules", "VALID_LR_SCHEDULES")
    torch = _texts("torch.optim.lr_scheduler", "__all__")
    return own | torch if own and torch else frozenset()


@functools.cache
def bounds() -> Mapping[str, Mapping[str, float]]:
    """Bounds of DeepSpeed's numbers by path; the keys of each are those of `COMPARE`."""
    return OTHER_BOUNDS | {path: limits for path, _, limits in _fields() if limits}


@functools.cache
def kinds() -> Mapping[str, str]:
    """Kinds of the settings of `MODELS` by path: `bool`, `int` or `float`; settings of other kinds are left out."""
    return {path: kind for path, kind, _ in _fields() if kind in KIND_WORDS}


def needed_instead(path: str, value: Any) -> str:
    """What DeepSpeed needs for a setting in place of a value, in words; empty for a value that it reads.

    It also reads true or false from 0, 1 and words, and numbers from texts.
    """
    kind = kinds().get(path, "")
    try:
        fits = {
            "bool": lambda: str(value).lower() in READ_AS_BOOL,
            "int": lambda: isinstance(int(value), int) if isinstance(value, str) else float(value).is_integer(),
            "float": lambda: math.isfinite(float(value)),
        }.get(kind, lambda: True)()
    except (TypeError, ValueError):
        fits = False
    return "" if fits else KIND_WORDS[kind]


@functools.cache
def pins_by_default() -> bool:
    """Whether DeepSpeed pins what it offloads to the host unless told otherwise, as it began to do in 2026."""
    for node in ast.walk(ast.Module(body=_body(OFFLOAD), type_ignores=[])):
        match node:
            case ast.AnnAssign(target=ast.Name(id="pin_memory"), value=ast.Constant(value=value)):
                return bool(value)
    return False


def _fields() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yields the settings of `MODELS` by path, by alias where they have one, with their type (`int` of `Optional[int]`) and bounds."""
    nodes = [
        (section, node)
        for section, (module, model) in MODELS.items()
        for known in _body(module)
        if isinstance(known, ast.ClassDef) and known.name == model
        for node in known.body
    ]
    for section, node in nodes:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                keywords = value.keywords if isinstance(value, ast.Call) else []
                said: dict[str | None, Any] = {
                    k.arg: k.value.value for k in keywords if isinstance(k.value, ast.Constant)
                }
                kind = ast.unparse(annotation).removeprefix("Optional[").removesuffix("]")
                yield f"{section}.{said.get('alias', name)}", kind, {sign: said[sign] for sign in SIGNS if sign in said}


def _texts(module: str, name: str) -> frozenset[str]:
    """The texts in a list that a module assigns at its top level, which may refer to the module's constants."""
    constants: dict[str, str] = {}
    for node in _body(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(text))):
                constants[target] = text
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.List(elts=elements)) if target == name:
                texts = (
                    constants.get(e.id) if isinstance(e, ast.Name) else getattr(e, "value", None) for e in elements
                )
                return frozenset(text for text in texts if isinstance(text, str))
    return frozenset()


def _body(module: str) -> list[ast.stmt]:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)  # of a top-level package: nothing is imported
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                return ast.parse(file.read_bytes()).body
    return []
