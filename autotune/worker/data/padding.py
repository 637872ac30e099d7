"""Tokens and padding of batches: the lengths of their rows, and what a step takes in on average over the data set."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotune.space.deepspeed import Scalar
from autotune.trial import lengths, token_budget
from autotune.worker.containers import number_in
from autotune.worker.data.samples import IGNORED, LENGTHS, real_mask

# Rows are padded to the longest if they exceed it by less than this, and all of them together by less than this share.
MOST_ROUNDED, MOST_EXCESS = 128, 0.25
# Standard errors by which the lengths that were seen may differ from the data set's, and a share besides.
WITHIN_SDS, WITHIN_SHARE = 4.0, 0.02
# Micro-batches whose lengths are noted.
N_LENGTHS = 4096


class Texts:
    """The texts that went forward: the lengths of their rows, and the latest row that may hold several samples.

    Attributes:
        lengths: Of each micro-batch the lengths of its rows, and the length that they are padded to.
        row: The arguments of the latest forward call with a single row, and its tokens.
        keeps_row: Whether rows are noted; not while steps are timed.

    Args:
        shards: Ranks over which each row is split.
    """

    def __init__(self, model: Any, shards: int = 1) -> None:
        self._shards = shards
        self.lengths: list[tuple[Tensor | list[int], int]] = []
        self.row: tuple[tuple[Any, ...], Mapping[str, Any], Tensor] | None = None
        self.keeps_row = True
        self._padding = padding_id(model)

    def note(
        self, tokens: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first: bool
    ) -> tuple[int, Tensor | float]:
        """Notes a forward call; returns the number of its tokens, with and without padding.

        Args:
            tokens: The tokens, of shape (rows, length).
            first: Whether it is the first call of its micro-batch.
        """
        if self.keeps_row:
            self.row = (args, kwargs, tokens) if tokens.shape[0] == 1 else None
        rows = real_lengths(tokens, args, kwargs, self._padding)
        if rows is None and tokens.shape[0] == 1:  # packed, or a single sample: nothing to pad to
            rows = tokens.new_full((1,), tokens.shape[1])  # on the device: a copy would wait for it in each step
        if rows is None:
            return tokens.numel(), tokens.numel()
        if first and len(self.lengths) < N_LENGTHS:
            self.lengths.append((rows if rows.device.type != "cpu" else rows.tolist(), tokens.shape[1] * self._shards))
        return tokens.numel(), number_in(rows.sum())


def real_lengths(
    tokens: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], padding: int | None
) -> Tensor | None:
    """Returns the tokens of each row of a batch that are no padding; None where nothing tells them apart.

    By its attention mask, else by its lengths, by the model's padding token at the ends of rows, or by labels that no
    loss is taken of there.
    """
    inputs = {**next((value for value in args if isinstance(value, Mapping)), {}), **kwargs}
    if (real := real_mask(inputs, tokens.shape)) is not None:
        return real.sum(dim=1)
    stated = next((inputs[name] for name in LENGTHS if isinstance(inputs.get(name), Tensor)), None)
    if stated is not None and stated.dim() == 1 and not stated.is_floating_point():
        lengths_stated: Tensor = stated
        return lengths_stated
    if padding is not None:
        return _between_ends(tokens != padding)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.shape == tokens.shape and not labels.is_floating_point():
        # A prompt has no loss either, so only what follows the last label is padding.
        return tokens.shape[1] - (labels != IGNORED).flip(1).int().cummax(dim=1).values.eq(0).sum(dim=1)
    return None


def _between_ends(real: Tensor) -> Tensor:
    """Returns for each row the places from the first to the last one that is real."""
    n = real.shape[1]
    before = real.int().cummax(dim=1).values.eq(0).sum(dim=1)
    after = real.flip(1).int().cummax(dim=1).values.eq(0).sum(dim=1)
    return (n - before - after).clamp(min=0)


def padding_id(module: Any) -> int | None:
    """Returns the token that a model knows as padding; None where it knows none."""
    stated = getattr(getattr(module, "config", None), "pad_token_id", None)
    if isinstance(stated, int):
        return stated
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return next((m.padding_idx for m in modules if isinstance(m, nn.Embedding) and m.padding_idx is not None), None)


def expected(
    known: lengths.Table,
    seen: Sequence[tuple[Tensor | list[int], int]],
    micro: int,
    changes: Mapping[str, Scalar],
    grouped: int = 1,
    *,
    flattened: bool = False,
    per_row: float = 0.0,
) -> dict[str, float]:
    """Returns the tokens that a micro-batch takes in on average over the data set, by name in `taken_in`.

    Where a token budget or packed rows decide how many samples it has, also these. Empty where the batches that were seen do
    not follow from the lengths of the samples: they are not padded to the longest of a micro-batch, or the samples are others
    than those whose lengths are known.

    Args:
        known: Lengths of the data set's samples.
        seen: The lengths of each micro-batch's rows, and the length that they are padded to.
        grouped: Micro-batches among which the samples are sorted by length.
        flattened: The samples of a micro-batch are one row, without padding.
        per_row: Samples of a row on average, where rows are packed beforehand.
    """
    known = lengths.cut(known, int(str(changes["max_length"]))) if "max_length" in changes else known
    if len(known) < 2 or len(seen) < 2:
        return {}
    rows = torch.cat([torch.as_tensor(each) for each, _ in seen]).cpu().numpy().astype(int)
    if per_row:
        found = _packed(known, rows, per_row)
        return found and {"samples": per_row, **found}
    if flattened:
        return _packed(known, rows, micro)
    filled = bool(changes.get("token_budget"))
    # Where samples of one length come together, a micro-batch tells hardly more than one of them.
    if not _alike(known, rows, len(seen) if filled or grouped > 1 else len(rows)):
        return {}
    if filled:
        widths = token_budget.padded(known, changes)
        mean = token_budget.filled(widths, token_budget.tokens_for(widths, micro), micro)
        real = mean.samples * lengths.expected(known)
        return {"samples": mean.samples, "tokens": mean.tokens, "real_tokens": real}
    highest = np.array([float(torch.as_tensor(each).max()) for each, _ in seen])
    excess = np.array([float(width) for _, width in seen]) - highest
    rounded = (excess >= 0).all() and (excess < MOST_ROUNDED).all() and excess.mean() <= MOST_EXCESS * highest.mean()
    if not rounded or any(len(each) != micro for each, _ in seen):
        return {}
    width = lengths.mean_width(known, micro, grouped) + float(excess.mean())
    return {"tokens": micro * width, "real_tokens": micro * lengths.expected(known)}


def _packed(known: lengths.Table, rows: np.ndarray, micro: float) -> dict[str, float]:
    """The same of batches in one row, if their lengths may be sums of samples of the known lengths."""
    values, counts = np.array(known, dtype=float).T
    mean = lengths.expected(known)
    sd = math.sqrt(micro * float(np.square(values - mean) @ counts / counts.sum()) / len(rows))
    if abs(rows.mean() - micro * mean) > WITHIN_SDS * sd + WITHIN_SHARE * micro * mean:
        return {}
    return dict.fromkeys(("tokens", "real_tokens"), micro * mean)


def _alike(known: lengths.Table, rows: np.ndarray, n: int) -> bool:
    """Whether rows may be n independent samples of lengths like the known ones, by the mean of the logarithms."""
    values, counts = np.array(known, dtype=float).T
    logs, weights = np.log(np.maximum(values, 1)), counts / counts.sum()
    mean = float(logs @ weights)
    sd = math.sqrt(float(np.square(logs - mean) @ weights))
    apart = abs(float(np.log(np.maximum(rows, 1)).mean()) - mean)
    return apart <= WITHIN_SDS * sd / math.sqrt(n) + WITHIN_SHARE and rows.max() <= values[-1]
