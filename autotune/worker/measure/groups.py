"""The groups of ranks that share a copy of the model, a sequence or experts, read from the running engine."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune.trial.groups import Groups
from autotune.worker.containers import n_elements
from autotune.worker.measure import experts
from autotune.worker.measure.wire import CallCount

# Two sums of equal parameters are equal; a gradient that is not summed over the group moves them apart by a step.
MOST_DRIFT = 1e-6


def observe(engine: Any, *, by_script: bool = False) -> Groups:
    """Returns the sizes of an engine's groups and what this rank holds; not a collective."""
    return Groups(
        tensor=_tensor_size(engine),
        sequence=sequence_size(engine),
        pipeline=int(getattr(engine, "num_stages", 1)),
        expert=experts.degree(engine.module),
        exchanges=experts.sent.calls,
        data=data_parallel(engine),
        split_modules=len(split_modules(engine.module)),
        # ZeRO-3 parts what a rank holds of the model over the data-parallel ranks.
        held_parameters=sum(map(n_elements, engine.module.parameters())),
        by_script=by_script,
    )


def data_parallel(engine: Any) -> int:
    """Returns the ranks, or groups of ranks, that are fed different samples."""
    if own := getattr(engine, "dp_world_size", None):
        return int(own)
    # Groups that know sequences only, as those of UlyssesSPAttentionHF, have no size of their own for data.
    return dist.get_world_size() // sequence_size(engine)


def sequence_size(engine: Any) -> int:
    """Returns the ranks of the group over which sequences are split; 1 if none are."""
    return int(getattr(engine, "sequence_parallel_size", 1) or 1)


def _tensor_size(engine: Any) -> int:
    """Returns the ranks of the group over which layers were split; 1 if none was."""
    for module in split_modules(engine.module):
        if (group := getattr(module, "mp_group", None)) is not None:
            return dist.get_world_size(group)
    return 1


def split_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that DeepSpeed split over the ranks of a tensor group."""
    try:
        from deepspeed.module_inject.layers import TensorParallel_Layer
    except ImportError:
        return []
    return [module for module in model.modules() if isinstance(module, TensorParallel_Layer)]


def _whole(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that every rank of a tensor group holds alike."""
    parted = {id(p) for module in split_modules(model) for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        own = getattr(parameter, "tensor_model_parallel", False) or hasattr(
            parameter, "ds_autotp_universal_checkpoint_meta"
        )
        if id(parameter) not in parted and not own and not hasattr(parameter, "ds_tensor"):
            yield name, parameter


def drifted(engine: Any) -> str:
    """Returns a parameter that is not split but differs between the ranks of a tensor group; empty without one.

    All ranks take part. Under ZeRO-3 nothing is compared.
    """
    names, sums = [], []
    for name, parameter in _whole(engine.module):
        names.append(name)
        sums.append(parameter.detach().double().sum())
    if not sums or _tensor_size(engine) == 1:
        return ""
    own = torch.stack(sums)
    highest, lowest = own.clone(), own.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    apart = (highest - lowest) > MOST_DRIFT * (1 + own.abs())
    return next((name for name, differs in zip(names, apart.tolist(), strict=True) if differs), "")


# Exchanges of heads for positions in attention.
exchanges = CallCount()
