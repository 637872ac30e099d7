"""The worst batch of a data set: the longest samples at a micro-batch, as the tail check trains on it."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from autotune.worker.containers import map_tensors, tensors_in, with_values
from autotune.worker.data import samples


def batch_of(
    dataset: Any, collate: Callable[[list[Any]], Any], positions: Sequence[int], n: int, length: int,
    fixed: Set[int] = frozenset(),
) -> Any:  # fmt: skip
    """Returns a batch of the longest samples of a data set; where fewer are known, they come more than once.

    Args:
        positions: Positions of the longest samples, longest first.
        length: Extend shorter samples to this length; 0 leaves them.
        fixed: As of `stretched`.
    """
    longest = [dataset[positions[i % len(positions)]] for i in range(n)]
    if samples.is_text(longest[0]):
        return stretched(collate(longest), n, length, fixed)
    return collate([stretched_sample(sample, length, fixed) for sample in longest])


def heaviest(iterator: Any, largest: Any, fixed: Set[int] = frozenset()) -> Any:
    """Returns the largest batch of a loader whose batches vary in size: of those that its sampler makes, or was seen.

    The most samples and the longest ones need not come together: a token budget keeps them apart. `fixed` is as of `stretched`.
    """
    dataset = iterator._dataset
    if not iterator._auto_collation or not samples.is_map_style(dataset):
        return largest
    until, heaviest_yet, chosen = time.monotonic() + samples.BUDGET_S, 0, []
    for positions in iterator._index_sampler:
        longest = max((samples.length_of(dataset[at], fixed) for at in positions), default=0)
        if len(positions) * longest > heaviest_yet:
            heaviest_yet, chosen = len(positions) * longest, list(positions)
        if time.monotonic() > until:
            break
    batch = iterator._collate_fn([dataset[at] for at in chosen]) if chosen else largest
    return batch if size_of(batch) > size_of(largest) else largest


def stretched_sample(sample: Any, length: int, fixed: Set[int] = frozenset()) -> Any:
    """Returns a sample repeated along its longest dimension up to a length; `fixed` is as of `stretched`."""
    now = samples.size_of(sample, fixed)
    if not 0 < now < length:
        return sample
    return _resized(sample, now, _count(length) % now)


def cut_sample(sample: Any, length: int) -> Any:
    """Returns a sample without what lies beyond a length, along its longest dimension."""
    now = samples.size_of(sample)
    return _resized(sample, now, _count(length)) if now > length else sample


def _count(n: int) -> Tensor:
    """Returns the numbers below n, in host memory whatever default device a script has set."""
    return torch.arange(n, device="cpu")


def _resized(value: Any, now: int, index: Tensor) -> Any:
    """Takes the entries of an index along each dimension of size `now`, the first one of each tensor or list."""
    if isinstance(value, Mapping):
        return with_values(value, {key: _resized(inner, now, index) for key, inner in value.items()})
    if isinstance(value, str):
        return "".join(value[i] for i in index.tolist()) if len(value) == now else value
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        return [value[i] for i in index.tolist()] if len(value) == now else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_resized(inner, now, index) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_resized(inner, now, index) for inner in value)
    shape = tuple(getattr(value, "shape", ()))
    if now not in shape:
        return value
    if isinstance(value, Tensor):
        return value.index_select(shape.index(now), index.to(value.device))
    return value.take(index.numpy(), axis=shape.index(now))


def stretched(batch: Any, rows: int, length: int, fixed: Set[int] = frozenset()) -> Any:
    """Returns a batch in which every row is the longest one, extended to a length.

    For streams, whose samples cannot be chosen. The longest dimension of pictures is not the second one: theirs is
    left, unless it is known to vary.

    Args:
        rows: Samples of the batch.
        length: Length to extend the rows to, by repeating their tokens without the padding; 0 leaves their length.
        fixed: Sizes that are those of features, since all batches have them, and others vary.
    """
    if not _wide(batch, rows):  # sequence-first batches have the samples in the second dimension
        turned = map_tensors(batch, lambda t: t.transpose(0, 1) if t.dim() > 1 and t.shape[1] == rows else t)
        if not _wide(turned, rows):
            return batch
        longer = stretched(turned, rows, length, fixed)
        return map_tensors(
            longer, lambda t: t.transpose(0, 1).contiguous() if t.dim() > 1 and t.shape[0] == rows else t
        )
    n = _length(batch, rows, fixed)
    longest, real = _longest_row(batch, rows, n)
    index = real[_count(max(n, length)) % len(real)] if len(real) else _count(n)

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            return tensor
        row = tensor[longest]
        # Known to vary, it may come after the features.
        along = tuple(row.shape if fixed else row.shape[:1])
        row = row.index_select(along.index(n), index.to(row.device)) if n in along else row
        return row.expand(rows, *row.shape).contiguous()

    return map_tensors(batch, change)


def first_rows(batch: Any, rows: int, n: int) -> Any:
    """Returns the first n samples of a batch of `rows` rows, the longest one among them."""
    longest, _ = _longest_row(batch, rows, _length(batch, rows))
    kept = [longest, *(row for row in range(rows) if row != longest)][:n]
    return map_tensors(batch, lambda t: t[kept] if t.dim() and t.shape[0] == rows else t)


def _wide(batch: Any, rows: int) -> list[Tensor]:
    return [tensor for tensor in tensors_in(batch) if tensor.dim() > 1 and tensor.shape[0] == rows]


def _length(batch: Any, rows: int, fixed: Set[int] = frozenset()) -> int:
    """Returns the longest dimension of a batch's rows: of its mask or of what a model takes, if it names them; else of all."""
    names = (*samples.MASKS, *samples.PREFERRED) if isinstance(batch, Mapping) else ()
    named = [tensor for name in names if name in batch for tensor in _wide(batch[name], rows)][:1]
    sizes = {int(size) for tensor in named or _wide(batch, rows) for size in tensor.shape[1:]}
    return max(sizes - fixed or sizes, default=0)


def _longest_row(batch: Any, rows: int, n: int) -> tuple[int, Tensor]:
    """Returns the row with the most tokens, and the columns of these."""
    mask = samples.real_mask(batch, (rows, n)) if isinstance(batch, Mapping) else None
    if mask is None:
        return 0, _count(n)
    longest = int(mask.sum(dim=1).argmax())
    return longest, mask[longest].nonzero().flatten().cpu()


def rows_of(batch: Any) -> int:
    """Returns the samples of a batch: the leading dimension that most of its tensors have; 0 without tensors."""
    sizes = [int(tensor.shape[0]) for tensor in tensors_in(batch, objects=True) if tensor.dim()]
    return max(sizes, key=sizes.count, default=0)


def size_of(batch: Any) -> int:
    """Returns the elements of all tensors of a batch, without those of one dimension, such as where packed samples end."""
    tensors = list(tensors_in(batch, objects=True))
    return sum(tensor.numel() for tensor in [one for one in tensors if one.dim() > 1] or tensors)


def length_in(shape: tuple[int, ...], samples: int, fixed: Set[int] = frozenset()) -> int:
    """Returns the length of each sample of a batch: packed in one row, sequence-first, or in rows, as pictures of several sizes."""
    if len(shape) < 2:
        return 0
    if shape[0] == 1:
        return shape[1] // max(1, samples)
    if shape[1] == samples != shape[0]:
        return shape[0]
    return max({*shape[1:]} - fixed or shape[1:])
