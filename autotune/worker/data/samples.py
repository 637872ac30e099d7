"""The shape of a data set: types and shapes of its samples' tensors, and the lengths of the samples."""

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.trial import lengths as lengths_of
from autotune.trial.workload import DataShape
from autotune.worker.containers import held_by, map_tensors, tensors_in

# Names, as Hugging Face models use them, of tensors whose leading dimension counts the samples.
PREFERRED = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "inputs", "x")
# Names of tensors that tell padding from tokens: of the tokens' shape, or one number for each sample.
# Ones of a mask are tokens; those of a padding mask (`src_key_padding_mask`) may be padding, as in torch.
MASKS, LENGTHS = ("attention_mask", "mask"), ("lengths", "input_lengths", "seq_lens", "length")
# Label of a position that no loss is taken of, in torch and transformers.
IGNORED = -100
# Samples of a stream that are read; the seconds for reading samples; and those whose fields are described.
MAX_STREAMED, BUDGET_S, MAX_DESCRIBED = 2048, 3.0, 256
# Settings that cut or order single samples by their length, and why they are not tried where features are wider than that.
BY_LENGTH = ("max_length", "token_budget", "group_by_length")
WIDE = "some sequences are shorter than their features are wide, so that a sample by itself does not show its length"
# The first samples, which show what of their shapes varies.
N_HEAD = 64
# Positions of the longest samples that are kept.
N_LONGEST = 256
# Beyond, positions are drawn with repetition: a permutation of them would take too much memory.
MOST_PERMUTED = 20_000_000


def is_map_style(dataset: Any) -> bool:
    """Returns whether the samples of a data set are read by their positions."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def describe(
    samples: Any, cannot: Mapping[str, str] | None = None, collate: Callable[[list[Any]], Any] = list
) -> DataShape | None:
    """Returns the shape of a data set; None if no sample can be read, which trials will report.

    Args:
        samples: The data set, read whole or else at random positions as far as the time budget goes; or an iterator,
            of which the first samples are read.
        cannot: Settings of the data that the target cannot follow, each with the reason.
        collate: Makes a batch of samples; the tokens of a text are those that it makes of it.
    """
    try:
        return _read(samples, cannot or {}, collate)
    except Exception:
        return None


def _read(samples: Any, cannot: Mapping[str, str], collate: Callable[[list[Any]], Any]) -> DataShape | None:
    mapped = is_map_style(samples)
    until = time.monotonic() + BUDGET_S
    kinds: dict[str, list[tuple[int, ...]]] = {}
    dtypes: dict[str, str] = {}
    lengths: list[int] = []
    positions: list[int] = []
    head, fixed = list[Any](), frozenset[int]()
    for position, sample in _at_random(samples) if mapped else enumerate(itertools.islice(samples, MAX_STREAMED)):
        if len(lengths) < MAX_DESCRIBED:
            for name, shape, dtype in _fields(sample, ""):
                kinds.setdefault(name, []).append(shape)
                dtypes[name] = dtype
        lengths.append(length_in_batch(sample, collate, fixed))
        positions.append(position)
        if len(lengths) <= N_HEAD:
            head.append(sample)
        if len(lengths) == N_HEAD and (fixed := _fixed(kinds)):
            lengths = [length_in_batch(each, collate, fixed) for each in head]
        if time.monotonic() > until:
            break
    if not lengths:
        return None
    if len(lengths) < N_HEAD and (fixed := _fixed(kinds)):
        lengths = [length_in_batch(each, collate, fixed) for each in head]
    wide = bool(fixed) and any(length_in_batch(s, collate) != length_in_batch(s, collate, fixed) for s in head)
    longest = np.argsort(np.asarray(lengths), kind="stable")[::-1][:N_LONGEST]
    return DataShape(
        fields=tuple(f"{name}{dtypes[name]}[{_common(shapes)}]" for name, shapes in sorted(kinds.items())),
        n_seen=len(lengths),
        n_samples=len(samples) if mapped else None,
        table=lengths_of.table(lengths),
        longest_at=tuple(positions[i] for i in longest) if mapped else (),
        cannot={**cannot, **{name: WIDE for name in BY_LENGTH if wide and not takes(collate, name)}},
    )


def takes(function: Any, name: str) -> bool:
    """Returns whether a function takes an argument of a name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _at_random(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Yields all samples with their positions, in an order that a data set sorted by length does not bias."""
    n, rng = len(dataset), np.random.default_rng(0)
    order: Iterable[Any] = rng.permutation(n) if n <= MOST_PERMUTED else rng.integers(0, n, MOST_PERMUTED)
    for position in order:
        yield int(position), dataset[int(position)]


def fixed_sizes(some: Iterable[Any]) -> frozenset[int]:
    """Returns the sizes of dimensions that are alike in all of some samples, where others vary: of features, and not of lengths."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for sample in some:
        for name, shape, _ in _fields(sample, ""):
            kinds.setdefault(name, []).append(shape)
    return _fixed(kinds)


def _fixed(kinds: Mapping[str, Sequence[tuple[int, ...]]]) -> frozenset[int]:
    found = set[int]()
    for shapes in kinds.values():
        each = [set(sizes) for sizes in zip(*shapes, strict=False)]
        if any(len(sizes) > 1 for sizes in each):
            found |= {size for sizes in each if len(sizes) == 1 for size in sizes}
    return frozenset(found)


def length_in_batch(sample: Any, collate: Callable[[list[Any]], Any], fixed: Set[int] = frozenset()) -> int:
    """Returns the length that a sample has in a batch: the tokens of a text are those that `collate` makes of it."""
    # Most data sets; asked for each sample, of which there may be a hundred thousand.
    if not fixed and isinstance(sample, (tuple, list)) and sample and all(isinstance(part, Tensor) for part in sample):
        return max((size for part in sample for size in part.shape), default=0) or 1
    return length_of(_only(collate([sample])) if is_text(sample) else sample, fixed)


def is_text(sample: Any) -> bool:
    """Returns whether a sample is text, whose tokens only the collate function makes."""
    dtypes = (dtype for _, shape, dtype in _fields(sample, "") if shape)
    return next(dtypes, "") == "text" and all(dtype == "text" for dtype in dtypes)


def _only(batch: Any) -> Any:
    """Returns the only sample of a batch."""
    return map_tensors(batch, lambda tensor: tensor[0] if tensor.dim() and tensor.shape[0] == 1 else tensor)


def length_of(sample: Any, fixed: Set[int] = frozenset()) -> int:
    """Returns the length of a sample: the tokens that its mask or its stated length counts, else its largest dimension; see `size_of`."""
    if isinstance(sample, Mapping):
        rows = {
            name: torch.as_tensor(value)[None] for name, value in sample.items() if is_mask(name) and _is_row(value)
        }
        real = next((found for row in rows.values() if (found := real_mask(rows, row.shape)) is not None), None)
        if real is not None:
            return int(real.sum())
        stated = next((sample[name] for name in LENGTHS if isinstance(sample.get(name), int)), None)
        if stated is not None:
            return int(stated)
    return size_of(sample, fixed) or 1


def is_mask(name: object) -> bool:
    """Returns whether a tensor of this name tells padding from tokens."""
    return name in MASKS or ("pad" in str(name) and "mask" in str(name))


def real_mask(inputs: Mapping[str, Any], shape: Sequence[int]) -> Tensor | None:
    """Returns where a batch of this shape has tokens, by its mask; None without one."""
    masks = [value for name, value in inputs.items() if is_mask(name) and isinstance(value, Tensor)]
    plain = next((inputs[name] for name in MASKS if isinstance(inputs.get(name), Tensor)), None)
    if plain is not None:
        return plain != 0 if tuple(plain.shape) == tuple(shape) else None
    mask = next((mask for mask in masks if mask.dim() == 2 and tuple(mask.shape) == tuple(shape)), None)
    if mask is None or not mask.numel():
        return None
    # A row whose ends are alike has no padding there, as the longest of a batch; else batches are padded on the right.
    row = (mask[:, 0] == mask[:, -1]).int().argmax().view(1)
    return mask == mask[:, 0].gather(0, row)


def size_of(sample: Any, fixed: Set[int] = frozenset()) -> int:
    """Returns the largest dimension of what a model takes of a sample: of its tokens, if it names them; 0 without any.

    Args:
        fixed: Sizes that are no lengths, as long as there are others.
    """
    held = sample if isinstance(sample, Mapping) else held_by(sample)
    named = next((held[name] for name in PREFERRED if name in held), None)
    sizes = {size for _, shape, _ in _fields(sample if named is None else named, "") for size in shape}
    return max(sizes - fixed or sizes, default=0)


def samples_in(batch: Any) -> int | None:
    """Returns the samples of a packed batch, by its positions that begin anew; None without any."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return int((positions == 0).sum()) if isinstance(positions, Tensor) else None


def _is_row(value: Any) -> bool:
    ints = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    return ints or getattr(value, "ndim", 0) == 1


def _fields(value: Any, name: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields name, shape and type of each tensor, array or list of numbers in a sample."""
    if isinstance(value, Tensor):
        yield f"{name} ".lstrip(), tuple(value.shape), str(value.dtype).removeprefix("torch.")
    elif hasattr(value, "shape"):
        yield f"{name} ".lstrip(), tuple(int(size) for size in value.shape), str(value.dtype)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _fields(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], (int, float)):
        yield f"{name} ".lstrip(), (len(value),), type(value[0]).__name__
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _fields(inner, f"{name}.{index}".lstrip("."))
    elif isinstance(value, (int, float)):
        yield f"{name} ".lstrip(), (), type(value).__name__
    elif isinstance(value, str):
        yield f"{name} ".lstrip(), (len(value),), "text"
    elif held := held_by(value):
        yield from _fields(held, name)


def _common(shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns one shape for all, with a star for sizes that differ."""
    if len({len(shape) for shape in shapes}) > 1:
        return "*"
    return ",".join(str(sizes[0]) if len(set(sizes)) == 1 else "*" for sizes in zip(*shapes, strict=True))


def of_batch(args: Sequence[Any], kwargs: Mapping[str, Any], n: int) -> list[Any]:
    """Returns empty samples with the shapes of a batch of n: its tensors of n rows, without that dimension."""
    tensors = [tensor for tensor in tensors_in([args, kwargs], objects=True) if tensor.dim() and tensor.shape[0] == n]
    sample = [torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta") for tensor in tensors]
    return [sample] * n if tensors else []
