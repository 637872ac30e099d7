"""The configuration that ran, read from the engine and from the batches that it was fed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autotune.errors import UserError
from autotune.trial.result import Observed
from autotune.worker.data.witness import watch
from autotune.worker.device import multiplies_in_tf32
from autotune.worker.measure import groups
from autotune.worker.measure.batches import BatchObserver

DOUBLE = (
    "the model's weights are float64, and DeepSpeed trains none in double precision: ZeRO 1 to 3 round them to float32 in each update,"
    " ZeRO 0 does not reduce their gradients. Make the model float32 (`model.float()`), and what it is given"
)


def observe(
    engine: Any, batches: BatchObserver, checkpointer: Any, taken_in: Mapping[str, Sequence[int]], *, n_copies: int,
    by_script: bool,
) -> Observed:  # fmt: skip
    """Returns the configuration that ran; all ranks take part.

    Args:
        checkpointer: Knows the recomputed blocks; None if none can be recomputed.
        taken_in: What each step so far took in over all ranks, by name.
        n_copies: Data-parallel ranks, or copies of a pipeline.
        by_script: The target is a training script.
    """
    pipelined = hasattr(engine, "stage_id")
    samples = max(batches.samples_per_step, default=0) * share_of(engine, n_copies)
    total = torch.tensor(samples, dtype=torch.float64, device=engine.device)
    dist.all_reduce(total)
    tokens = taken_in.get("tokens", ())
    # DeepSpeed before 0.17 has no torch_autocast.
    autocast = engine.torch_autocast_dtype() if getattr(engine, "torch_autocast_enabled", bool)() else None
    observed = Observed(
        micro_batch_size=_only(batches.micro_batch_sizes),
        loader_batch_size=_only(batches.loader_batch_sizes),
        gradient_accumulation_steps=_only(batches.backward_counts),
        samples_per_step=round(float(total)),
        tokens_per_step=round(sum(tokens) / len(tokens)) or None if tokens else None,
        zero_stage=int(engine.zero_optimization_stage()),
        dtype=dtype_of(engine.module),
        autocast=str(autocast).removeprefix("torch.") if autocast else None,
        checkpointed_blocks=len(checkpointer.recomputed) if checkpointer else 0,
        tf32=multiplies_in_tf32() if torch.device(engine.device).type == "cuda" else None,
        draw_size=batches.draw_size,
        parts=batches.parts,
        draws=watch.loaders.draws() if watch.loaders is not None else (),
        groups=groups.observe(engine, by_script=by_script),
    )
    observed = _of_all_stages(observed, n_copies) if pipelined else observed
    return _uneven(observed, batches, taken_in) if batches.uneven else observed


def dtype_of(model: torch.nn.Module) -> str:
    """Returns the type of most weights; at stage 3 and under autocast they carry it too. Buffers of other types do not count.

    Raises:
        UserError: It is double precision, which no configuration trains in.
    """
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    found = str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    if found == "float64":
        raise UserError(DOUBLE)
    return found


def share_of(engine: Any, n_copies: int) -> float:
    """Returns the share of this rank's batches that counts: ranks that train one copy of the model share theirs."""
    if hasattr(engine, "stage_id"):  # later stages of a pipeline pass on what the first one took in
        return float(engine.stage_id == 0)
    return n_copies / dist.get_world_size()


def _of_all_stages(own: Observed, n_copies: int) -> Observed:
    """Returns the batches of a pipeline's first stage, with the blocks that all stages of a copy recomputed."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    first: Observed = rows[0]
    return replace(first, checkpointed_blocks=sum(row.checkpointed_blocks for row in rows) // n_copies)


def _uneven(seen: Observed, batches: BatchObserver, taken_in: Mapping[str, Sequence[int]]) -> Observed:
    """Returns what ran, with means in place of the samples that vary."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, batches.sizes())
    sizes, steps = [size for row in rows for size in row], taken_in.get("samples", ())
    return replace(
        seen,
        micro_batch_size=max(1, round(sum(sizes) / len(sizes))),
        loader_batch_size=None,
        samples_per_step=round(sum(steps) / len(steps)),
        uneven=(min(sizes), max(sizes)),
    )


def _only(values: set[int]) -> int | None:
    """Returns the element of a set of one; None for other sets."""
    return next(iter(values)) if len(values) == 1 else None
