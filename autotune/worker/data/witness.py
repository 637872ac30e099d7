"""Check that each setting of the data acted, by what the running loader holds and what its batches show."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.worker.containers import map_tensors, tensors_in
from autotune.worker.data.change import arguments_of

# Share by which the mean samples of a row may differ from those of the micro-batch that it stands for.
MOST_OFF = 0.05
# Share of the largest output that may differ by rounding, as where experts get other tokens.
ROUNDING = 0.02


class Watch:
    """What the loader of a trial shows.

    Attributes:
        loader: The loader of a `model.py`; None for a script's.
        loaders: The loaders of a script; None for a `model.py`'s.
        batches: The `BatchObserver` of the engine.
        candidate: The configuration under trial.
        row_tokens: Tokens that a framework packs into a row at most; 0 where it packs none.
        per_row: Samples of such a row, on average over the data set.
        grouped: Micro-batches among which the samples are sorted by length.
    """

    def __init__(self) -> None:
        self.loader: Any = None
        self.loaders: Any = None
        self.batches: Any = None
        self.candidate = Candidate(micro_batch_size=1)
        self.row_tokens, self.per_row, self.grouped = 0, 0.0, 1

    @property
    def iterator(self) -> Any:
        """Returns the iterator over a DataLoader's batches; None where there is none."""
        return self.loaders.trained if self.loaders is not None else self.loader and self.loader.workers


watch = Watch()


def witness(name: str) -> Callable[[Any, Scalar], str | None]:
    """Returns the witness of a setting; it says why the setting did not act, or nothing where it did."""
    return _WITNESSES.get(name) or _of_loader(name)


def _of_loader(name: str) -> Callable[[Any, Scalar], str | None]:
    def ask(_engine: Any, value: Scalar) -> str | None:
        iterator = watch.iterator
        found = arguments_of(iterator)[name] if iterator is not None else 0
        return None if found == value else f"{value} was asked for, {found} ran"

    return ask


def _max_length(_engine: Any, value: Scalar) -> str | None:
    # A packed row holds all samples of its micro-batch.
    packed = max((samples or 1 for rows, samples in watch.batches.rows() if rows == 1), default=1)
    longest = max(
        (int(torch.as_tensor(rows).max()) / (packed if len(rows) == 1 else 1) for rows, _ in _seen()), default=0
    )
    return f"a sample of {longest:.0f} tokens was trained on" if longest > int(str(value)) else None


def _multiple(_engine: Any, value: Scalar) -> str | None:
    other = next((width for _, width in _seen() if width % int(str(value))), None)
    return f"a batch is padded to {other} tokens" if other is not None else None


def _packed(engine: Any, value: Scalar) -> str | None:
    rows = {rows for rows, samples in watch.batches.rows() if samples is not None and samples > 1}
    if not rows:
        raise KeyError("no batch of several samples was seen")
    if rows != {1}:
        return f"batches have {max(rows)} rows"
    return _mixed(engine)


def _mixed(engine: Any) -> str | None:
    """Says why the samples of a row are not kept apart; it is looked at once."""
    texts = watch.batches.texts
    row, texts.row = texts.row, None
    return why_mixed(engine, *row) if row is not None else None


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


def _grouped(_engine: Any, value: Scalar) -> str | None:
    if watch.loader is None and watch.iterator is not None:
        sampler = type(sampler_of(watch.iterator)).__name__
        return None if watch.grouped > 1 else f"samples are drawn by {sampler}, which does not group them by length"
    n, widths = watch.candidate.gradient_accumulation_steps, [width for _, width in _seen()]
    steps = [widths[i : i + n] for i in range(0, len(widths) - n + 1, n)]
    return (
        None if all(step == sorted(step) for step in steps) else "the micro-batches of a step are in no order of length"
    )


def _in_rows(micro_batch_size: int) -> str | None:
    """Says why TRL's packing did not make rows of a micro-batch's samples each."""
    if any(rows != 1 for rows, _ in watch.batches.rows()) or max(width for _, width in _seen()) > watch.row_tokens:
        return f"batches are no rows of up to {watch.row_tokens:,} tokens"
    if abs(watch.per_row / micro_batch_size - 1) > MOST_OFF:
        return (
            f"rows of {watch.row_tokens:,} tokens hold {watch.per_row:.1f} samples on average, not {micro_batch_size}"
        )
    return None


def _of_budget(engine: Any, value: Scalar) -> str | None:
    if watch.row_tokens:
        mixed = _mixed(engine)  # all ranks take part, also one whose own rows are not as they should be
        return _in_rows(watch.candidate.micro_batch_size) or mixed
    budget = watch.loader.token_budget if watch.loader is not None else 0
    if not watch.batches.texts.lengths and len({samples for _, samples in watch.batches.rows()}) > 1:
        return None  # nothing tells tokens, but batches are of no one number of samples
    most = max((len(rows) * width for rows, width in _seen() if len(rows) > 1), default=0)
    return None if most <= budget else f"a batch holds {most:,} tokens, padding included, and {budget:,} are its budget"


def sampler_of(iterator: Any) -> Any:
    """Returns the innermost sampler that a DataLoader's iterator draws by: batch samplers hold another one."""
    sampler = iterator._index_sampler
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    return sampler


def _seen() -> Sequence[tuple[Tensor | list[int], int]]:
    seen: Sequence[tuple[Tensor | list[int], int]] = watch.batches.texts.lengths
    if not seen:
        raise KeyError("nothing tells the batches' tokens from padding")
    return seen


_WITNESSES: dict[str, Callable[[Any, Scalar], str | None]] = {
    "max_length": _max_length, "pad_to_multiple_of": _multiple, "packing": _packed, "group_by_length": _grouped,
    "token_budget": _of_budget,
}  # fmt: skip
