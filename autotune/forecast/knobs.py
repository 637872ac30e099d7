"""The DeepSpeed settings of a candidate that memory and step time depend on, defaults filled in."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DTYPES, ZERO
from autotune.space.torch_settings import TF32
from autotune.trial.profile import ARITHMETIC, WIRE_BYTES, Floats

# DeepSpeed's defaults (deepspeed/runtime/zero/config.py), in elements.
DEFAULT_BUCKET = 500_000_000
DEFAULT_PREFETCH = 50_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
MAX_REUSE_DISTANCE = 1_000_000_000
PERSISTENCE = 100_000
SUB_GROUP = 1_000_000_000
# The key of master weights in 16 bits, behind the name of their precision.
MASTER = "master_weights_and_grads"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Inputs of the formulas for many candidates at once: one entry per candidate in each column.

    Attributes:
        micro: Micro-batch per rank.
        stage: ZeRO stage; 1 where the stages of a pipeline train in bf16 without ZeRO, since DeepSpeed then takes the optimizer of
            stage 1 that shares out its states (runtime/engine.py, `_do_optimizer_sanity_check`).
        unasked: Whether that is so.
        precision: Names, as in `Candidate.precision`.
        products: What matrices are multiplied in: the precision, or `tf32`.
        weight_bytes: Bytes of a weight in the model.
        gradient_bytes: Bytes of a gradient where it is summed up.
        wire_bytes: Bytes of a gradient between ranks.
        recomputed: `checkpoint_every`.
        ratio: Share of an optimizer offloaded to the CPU that stage 3 moves there.
        pin_optimizer: What is offloaded of the optimizer lies in pinned memory.
        pin_param: So do offloaded parameters.
        reduce_bucket: Elements.
        prefetch: Elements.
        persistence: Elements up to which stage 3 does not split a parameter.
        max_live: Elements that stage 3 may have whole at once.
        sub_group: Elements that stage 3's optimizer steps on at once.
        reuse_distance: Elements within which it keeps what will be used again.
        overlap: Communication overlaps with backward.
        contiguous: Gradients are copied to a contiguous buffer.
        master_16: Master weights and gradients have the 16 bits of the weights.
        quantized_weights: ZeRO++ int8 gathers.
        quantized_gradients: ZeRO++ reduces gradients of 4 bits, within nodes and then between them.
        hpz: Ranks that share a secondary copy of the weights; 1 without.
        packed: Batches are not padded, or hardly.
        budgeted: A number of tokens fills a batch.
        limits: Length that samples are cut to; infinite without.
    """

    micro: Floats
    accumulation: Floats
    stage: Floats
    unasked: NDArray[np.bool_]
    precision: NDArray[np.str_]
    products: NDArray[np.str_]
    weight_bytes: Floats
    gradient_bytes: Floats
    wire_bytes: Floats
    recomputed: Floats
    offload_optimizer: Floats
    ratio: Floats
    offload_param: Floats
    pin_optimizer: Floats
    pin_param: Floats
    reduce_bucket: Floats
    prefetch: Floats
    persistence: Floats
    max_live: Floats
    sub_group: Floats
    reuse_distance: Floats
    overlap: Floats
    contiguous: Floats
    master_16: Floats
    states_16: Floats
    quantized_weights: Floats
    quantized_gradients: Floats
    hpz: Floats
    packed: Floats
    budgeted: Floats
    limits: Floats

    @classmethod
    def of(cls, candidates: Sequence[Candidate], base: Mapping[str, Any] | None = None) -> "Knobs":
        """The columns of candidates.

        Args:
            base: Settings by dotted path that hold where a candidate says nothing; those that a precision reads, with it alone.
        """
        base = dict(base or {})
        found = {name for c in candidates for name, _ in c.config}
        tables = [dict(c.config) for c in candidates] if found else []
        settings = {name: [table.get(name) for table in tables] for name in found}

        def column(path: str, default: float) -> Floats:
            other = default if base.get(path) is None else float(base[path])
            if path not in settings:
                return np.full(len(candidates), other)
            return np.array([other if value is None else float(value) for value in settings[path]], dtype=float)

        def names(path: str) -> list[str]:
            other = base.get(path)
            return [str(value or other or "") for value in settings.get(path, [None] * len(candidates))]

        unasked = np.array([_shares_unasked(c) for c in candidates], dtype=bool)
        stage = np.where(unasked, 1.0, np.array([c.zero_stage for c in candidates], dtype=float))
        precision = np.array([c.precision for c in candidates])
        weight = np.where(np.isin(precision, DTYPES), 2.0, 4.0)
        summed = np.array([WIRE_BYTES.get(name, 0.0) for name in names("data_types.grad_accum_dtype")])
        wire = np.array([WIRE_BYTES.get(name, 0.0) for name in names("communication_data_type")])
        overlap = column(f"{ZERO}overlap_comm", -1.0)
        budgeted = column("data.token_budget", 0.0)  # with samples of similar length
        return cls(
            micro=np.array([c.micro_batch_size for c in candidates], dtype=float),
            accumulation=np.array([c.gradient_accumulation_steps for c in candidates], dtype=float),
            stage=stage,
            unasked=unasked,
            precision=precision,
            products=np.array(["tf32" if dict(c.config).get(TF32) else c.precision for c in candidates]),
            weight_bytes=weight,
            gradient_bytes=np.where((summed > 0) & (weight == 2.0), summed, weight),
            wire_bytes=np.where(wire > 0, wire, weight),
            recomputed=np.array([c.checkpoint_every for c in candidates], dtype=float),
            **_offloads(candidates, column),
            reduce_bucket=column(f"{ZERO}reduce_bucket_size", DEFAULT_BUCKET),
            prefetch=column(f"{ZERO}stage3_prefetch_bucket_size", DEFAULT_PREFETCH),
            persistence=column(f"{ZERO}stage3_param_persistence_threshold", PERSISTENCE),
            max_live=column(f"{ZERO}stage3_max_live_parameters", MAX_LIVE_PARAMETERS),
            sub_group=column(f"{ZERO}sub_group_size", SUB_GROUP),
            reuse_distance=column(f"{ZERO}stage3_max_reuse_distance", MAX_REUSE_DISTANCE),
            # DeepSpeed overlaps by default at stage 3 only.
            overlap=np.where(overlap < 0, (stage == 3).astype(float), overlap),
            contiguous=column(f"{ZERO}contiguous_gradients", 1.0),
            master_16=np.sum([(precision == name) * column(f"{name}.{name}_{MASTER}", 0.0) for name in DTYPES], axis=0),
            states_16=(precision == "bf16") * column("bf16.bf16_optimizer_states", 0.0),
            quantized_weights=column(f"{ZERO}zero_quantized_weights", 0.0),
            quantized_gradients=column(f"{ZERO}zero_quantized_gradients", 0.0),
            hpz=column(f"{ZERO}zero_hpz_partition_size", 1.0),
            packed=np.maximum(column("data.packing", 0.0), budgeted),
            budgeted=budgeted,
            limits=column("data.max_length", np.inf),
        )

    @functools.cached_property
    def arithmetic(self) -> NDArray[np.str_]:
        """What each candidate computes in, a value of `ARITHMETIC`."""
        return np.array([ARITHMETIC.get(str(name), "fp32") for name in self.precision])

    def recomputed_share(self, n_blocks: int) -> Floats:
        """Share of the blocks that is recomputed: every k-th block from the first."""
        blocks = max(n_blocks, 1)
        every = np.maximum(self.recomputed, 1.0)
        return np.where(self.recomputed > 0, np.ceil(blocks / every) / blocks, 0.0)


def _shares_unasked(candidate: Candidate) -> bool:
    """Whether DeepSpeed shares out the optimizer's states without ZeRO."""
    return candidate.zero_stage == 0 and candidate.precision == "bf16" and candidate.pipeline_degree > 1


def _offloads(candidates: Sequence[Candidate], column: Callable[[str, float], Floats]) -> dict[str, Floats]:
    """The columns of what is offloaded, and how."""
    in_host = np.array([c.offload_optimizer == "cpu" for c in candidates])
    return {
        "offload_optimizer": np.array([c.offload_optimizer != "none" for c in candidates], dtype=float),
        "ratio": np.where(in_host, column(f"{ZERO}offload_optimizer.ratio", 1.0), 1.0),
        "offload_param": np.array([c.offload_param != "none" for c in candidates], dtype=float),
        "pin_optimizer": column(f"{ZERO}offload_optimizer.pin_memory", 1.0),
        "pin_param": column(f"{ZERO}offload_param.pin_memory", 1.0),
    }
