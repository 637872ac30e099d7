"""Check that the samples of a packed row are kept apart: the output for one must not depend on the others."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.worker.containers import map_tensors, tensors_in

# Share of the largest output that may differ by rounding, as where experts get other tokens.
ROUNDING = 0.02


def why_mixed(engine: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: Tensor) -> str | None:
    """Returns why the samples of packed rows are not kept apart; None where they are. All ranks take part.

    The row goes forward twice, with other tokens in its first sample, and the outputs of the others are compared.

    Args:
        tokens: The one of its latest arguments that holds the row.
    """
    second, n = _second(args, kwargs, tuple(tokens.shape)), tokens.shape[1]
    other = tokens.clone()
    other[:, :second] = tokens.flip(1)[:, :second]
    with _arithmetic(engine):
        own, changed = (_outputs(engine.module, args, kwargs, tokens, row) for row in (tokens, other))
    apart = torch.zeros((), device=tokens.device)
    for one, two in zip(own, changed, strict=True):
        per_token = one.dim() > 1 and one.shape[0] == 1 and one.shape[1] in (n, n - 1)  # a loss leaves the last one out
        if second and per_token and one.shape[1] > second:
            differs = (one[:, second:].float() - two[:, second:].float()).abs().max()
            apart = torch.maximum(apart, differs / one.float().abs().max().clamp(min=1e-9))
    if dist.is_initialized():
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    if float(apart) <= ROUNDING:
        return None
    return (
        "the samples of a packed row see one another: the model's attention does not keep apart what `position_ids`"
        " separate (transformers' models do with `use_cache=False` in their configuration)"
    )


def _second(args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """Returns where the second sample of a row begins, by positions that begin anew; 0 where there are none."""
    for tensor in tensors_in([args, dict(kwargs)]):
        if tuple(tensor.shape) != shape or tensor.is_floating_point():
            continue
        steps, begins = tensor[0].diff(), tensor[0][1:] == 0
        if int(tensor[0, 0]) == 0 and bool(begins.any()) and bool((begins | (steps == 1)).all()):
            return int(begins.int().argmax()) + 1
    return 0


def _arithmetic(engine: Any) -> AbstractContextManager[Any]:
    """Returns the context of autocasting in which an engine's forward runs."""
    if not getattr(engine, "torch_autocast_enabled", bool)():
        return contextlib.nullcontext()
    return torch.autocast(torch.device(engine.device).type, dtype=engine.torch_autocast_dtype())


def _outputs(module: Any, args: Any, kwargs: Any, tokens: Tensor, row: Tensor) -> list[Tensor]:
    """Returns the floating-point outputs of a model for another row of tokens, with the same random numbers."""
    changed = map_tensors([args, dict(kwargs)], lambda tensor: row if tensor is tokens else tensor)
    devices = [tokens.device] if tokens.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        output = module(*changed[0], **changed[1])
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
