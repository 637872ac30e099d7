"""The user's `model.py` in a rank: load it, build its model, loss and optimizer."""

import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.trial.target import defined_names
from autotune.worker.measure import experts, recompute
from autotune.worker.measure.stages import stages

# Variables that tell a rank where it stands; a notebook's code sets them to those of a process alone.
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class WorkloadError(UserError):
    """The user's target does not define what a trial needs."""


@dataclass
class ModelFile:
    """The functions that a `model.py` defines; None for optional ones that it does not define."""

    path: Path
    model: Callable[[], nn.Module]
    data: Callable[[], Any] | None
    batch: Callable[[int], Any] | None
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    collate: Callable[[list[Any]], Any] | None
    blocks: Sequence[Any] | None


def load(path: Path, join: Callable[[], None] = lambda: None) -> ModelFile:
    """Executes the user's file as a module, which changes nothing of where the rank stands, and joins the ranks.

    Args:
        join: Joins them, unless they have joined: after the file, or where it does so itself, as by `deepspeed.init_distributed`.
    """
    launched = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    original = dist.init_process_group

    def joined(*_: Any, **__: Any) -> None:
        os.environ.update(launched)
        dist.init_process_group = original
        if not dist.is_initialized():
            join()

    dist.init_process_group = joined
    try:
        module, own = _execute(path), defined_names(path)
    finally:
        dist.init_process_group = original
    joined()
    # A library's `loss` that came with `import *` is none of the target's.
    functions = {
        name: getattr(module, name, None) if name in own else None
        for name in ("model", "data", "batch", "loss", "optimizer", "collate")
    }
    if not callable(functions["model"]):
        raise WorkloadError(f"{path.name}: define model() -> nn.Module")
    if not callable(functions["data"]) and not callable(functions["batch"]):
        raise WorkloadError(f"{path.name}: define data() -> Dataset, or batch(n) -> a batch of n samples")
    return ModelFile(path=path, blocks=getattr(module, "blocks", None) if "blocks" in own else None, **functions)  # type: ignore[arg-type]


class _UncachedLoader(SourceFileLoader):
    """Loader that compiles the file as it is now, and leaves no bytecode beside it.

    Python takes a file's cached bytecode for its own until size or second of the last change differ.
    """

    def path_stats(self, path: str) -> NoReturn:
        raise OSError  # without them the import system neither reads nor writes bytecode


def _execute(path: Path) -> ModuleType:
    sys.path[:0] = [str(path.parent), os.getcwd()]
    name = path.stem if path.stem not in sys.modules and path.stem.isidentifier() else "autotune_target"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path}: not a Python file")
    spec.loader = _UncachedLoader(name, str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    spec.loader.exec_module(module)
    return module


def build_model(target: ModelFile, candidate: Candidate | None = None, seed: int = 0) -> nn.Module:
    """Calls `model()`.

    Args:
        candidate: Says how many stages a `PipelineModule` is built with, and over how many ranks layers of deepspeed.moe
            share out their experts; None for one, which has all of them.
        seed: Of the weights of its layers, which start alike however they are shared out.
    """
    candidate = candidate or Candidate(micro_batch_size=1)
    stages.install(candidate)
    experts.layers.install(candidate)
    stages.seed = seed
    model = target.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"{target.path.name}: model() returned {type(model).__name__}, not an nn.Module")
    return model


def make_loss(target: ModelFile, model: nn.Module) -> Callable[[Any, Any], Tensor]:
    """Returns the user's `loss(model, batch)`, or the default one.

    By default a dict is passed by keyword, a tensor alone, a tuple (x, y) as `model(x)`, or as `model(x, y)` if the
    model takes targets. The loss is that in the output (`.loss`, `["loss"]`, a scalar), else cross-entropy for integer
    y and mean squared error otherwise.
    """
    if (own := target.loss) is not None:
        return lambda engine, batch: _scalar(own(engine, batch), target.path.name)
    takes_targets, signature = _takes_targets(model), inspect.signature(model.forward)

    def loss(engine: Any, batch: Any) -> Tensor:
        parts, named, target = _passed(batch, takes_targets=takes_targets)
        try:
            output = engine(*parts, **named)
        except TypeError:
            _check_call(signature, parts, named)
            raise
        return _loss_of(output, target)

    return loss


def _passed(batch: Any, *, takes_targets: bool) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
    """Returns what of a batch the model gets in order and by name, and what its output is compared with."""
    if isinstance(batch, Mapping):
        return (), batch, batch.get("labels")
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        batch = batch[0]
    if not isinstance(batch, (list, tuple)):
        return (batch,), {}, None
    return (batch if takes_targets or len(batch) != 2 else batch[:1]), {}, batch[-1]


def _check_call(signature: inspect.Signature, parts: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuses a batch that the model's forward() does not take."""
    try:
        signature.bind(*parts, **named)
    except TypeError as error:
        raise WorkloadError(
            f"the model's forward() does not take the batch ({error}): the entries of a dict are passed by name, those of a tuple"
            " in order; define loss(model, batch) that passes what the model takes, and returns the loss"
        ) from None


def _takes_targets(model: nn.Module) -> bool:
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is inspect.Parameter.empty or second.name in {"y", "label", "labels", "target", "targets"}


def _scalar(returned: Any, file: str) -> Tensor:
    """The loss in what the user's `loss` returned: alone, or beside what it logs."""
    whole = isinstance(returned, Tensor) and returned.numel() == 1
    found = returned if whole else _scalar_in(returned, _values(returned))
    if found is not None and torch.is_grad_enabled() and not found.requires_grad:
        raise WorkloadError(
            f"{file}: the loss that loss() returned leads back to no parameter; leave out detach(), item() or no_grad()"
        )
    if found is not None:
        return found
    shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
    raise WorkloadError(
        f"{file}: loss() returned a {type(returned).__name__}{shape}, in which the loss is not to be told;"
        " return one scalar tensor, as .mean() gives"
    )


def _values(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        output = output.values()
    return list(output) if isinstance(output, Iterable) and not isinstance(output, Tensor) else [output]


def _scalar_in(output: Any, values: Sequence[Any]) -> Tensor | None:
    named = (getattr(output, "loss", None), output.get("loss") if isinstance(output, Mapping) else None, output)
    for candidate in named:
        if isinstance(candidate, Tensor) and candidate.dim() == 0:
            return candidate
    scalars = [value for value in values if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


def _loss_of(output: Any, target: Any) -> Tensor:
    values = _values(output)
    if (found := _scalar_in(output, values)) is not None:
        return found
    if not isinstance(target, Tensor) or not values or not isinstance(values[0], Tensor):
        raise WorkloadError("the model's output holds no loss; define loss(model, batch) -> scalar tensor")
    prediction = values[0].float()
    if target.is_floating_point():
        if prediction.numel() == target.numel():
            prediction = prediction.reshape(target.shape)
        return nn.functional.mse_loss(prediction, target.float())
    if target.dim() == prediction.dim() - 1 and target.dim() > 1 and target.shape == prediction.shape[:-1]:
        return nn.functional.cross_entropy(prediction.flatten(0, -2), target.flatten())
    return nn.functional.cross_entropy(prediction, target)


def make_optimizer(target: ModelFile, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Calls `optimizer(params)` of a target that defines it.

    Raises:
        WorkloadError: It takes its argument for the model, or returns no optimizer.
    """
    assert target.optimizer is not None
    file = target.path.name
    try:
        made = target.optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise WorkloadError(
            f"{file}: optimizer() gets the list of the model's trainable parameters, which has no `{error.name}`, and not the"
            " model: write it as optimizer(params) that passes the list on, as `torch.optim.AdamW(params)`; make groups by"
            " the shapes of the parameters (`p.ndim`)"
        ) from None
    if not isinstance(getattr(made, "param_groups", None), list):
        raise WorkloadError(f"{file}: optimizer() returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def check_optimizer(model: nn.Module, optimizer: Any, source: str) -> str:
    """Refuses an optimizer that would leave the whole model as it is.

    Args:
        optimizer: The model's optimizer; one without `param_groups` is accepted.
        source: Where the optimizer comes from, for the message.

    Returns:
        A sentence that says which trainable parameters the optimizer leaves out; empty if it holds all of them.

    Raises:
        WorkloadError: The optimizer holds no parameter of the model.
    """
    held = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    if held and held.isdisjoint(map(id, model.parameters())):
        raise WorkloadError(
            f"{source} holds none of the model's parameters, so nothing would be trained; make it from"
            " the parameters of the model that is trained"
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    n_left = sum(id(parameter) not in held for parameter in trainable) if held else 0
    return (
        f"{source} leaves out {n_left} of the model's {len(trainable)} trainable parameters, which stay as they are;"
        " give it all of them, or freeze the others by `requires_grad_(False)`"
        if n_left
        else ""
    )


def turn_off_cache(model: nn.Module) -> None:
    """Turns off a transformers model's key-value cache, to which a recomputed block would append twice."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def find_blocks(model: nn.Module, named: Sequence[Any] | None) -> list[nn.Module]:
    """Returns the outermost repeated blocks, whose activations can be recomputed.

    Without `blocks` in the target: what a ModuleList or Sequential holds that is no leaf and whose class occurs there at
    least twice. Several such classes (encoder and decoder layers) are all taken.

    Args:
        named: The target's `blocks`: class names or classes, or one of them; None if the target names none.
    """
    if named:
        several: Collection[Any] = named if isinstance(named, list | tuple | set | frozenset) else [named]
        for block in several:
            if not isinstance(block, str | type):
                said = f"blocks takes classes or their names, as `blocks = [Block]`, and got an object of {type(block).__name__}"
                raise WorkloadError(said)
        names = {block if isinstance(block, str) else block.__name__ for block in several}
        found = [module for module in model.modules() if type(module).__name__ in names]
        if not found:
            raise WorkloadError(f"blocks = {sorted(names)}: the model has no module of such a class")
    else:
        children = [
            child
            for parent in model.modules()
            if isinstance(parent, (nn.ModuleList, nn.Sequential)) or hasattr(parent, "forward_funcs")  # a pipeline's
            for child in recompute.called(parent)
            if any(True for _ in child.children())
        ]
        counts = Counter(map(type, dict.fromkeys(children)))
        found = [child for child in children if counts[type(child)] > 1]
    inner = {id(below) for block in found for below in block.modules() if below is not block}
    return list(dict.fromkeys(block for block in found if id(block) not in inner))


def classes_of(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Names the classes of blocks, each with a word of where they are if the model has more of the class beside them."""
    within = {id(below) for block in blocks for below in block.modules()}
    beside = {type(module) for module in model.modules() if within.isdisjoint(map(id, module.modules()))}
    return ", ".join(sorted({type(block).__name__ + " in a list" * (type(block) in beside) for block in blocks}))
