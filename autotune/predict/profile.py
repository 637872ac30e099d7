"""What the formulas need to know: the workload, the machine, and the knobs of many candidates as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.candidate import DTYPES, Candidate

Floats = NDArray[np.float64]
# DeepSpeed's defaults (deepspeed/runtime/zero/config.py), in elements.
DEFAULT_BUCKET = 500_000_000
DEFAULT_PREFETCH = 50_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000
GUESSED_SEQUENCE = 256
# Bytes of a value that travels between ranks.
WIRE_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A workload in the few numbers that memory and time follow from.

    Attributes:
        n_parameters: Parameters, tied ones once.
        n_trainable: Of these, the trainable ones.
        flops_per_sample: Forward and backward, without recomputation.
        activation_bytes_per_sample: Kept for backward by one sample in fp32, nothing recomputed.
        checkpointed_bytes_per_sample: The same with every block recomputed, the working set of one block included.
        n_blocks: Repeated blocks.
        sequence: Tokens (or positions) of a sample.
        block_share: Share of the FLOPs and parameters that lies in the blocks.
        optimizer_bytes: Optimizer state per trainable parameter in fp32: 8 for Adam, 4 for momentum, 0 for plain SGD.
        guessed: The numbers follow from the parameter count alone.
    """

    n_parameters: int
    n_trainable: int
    flops_per_sample: float
    activation_bytes_per_sample: float
    checkpointed_bytes_per_sample: float
    n_blocks: int
    sequence: int
    block_share: float = 0.9
    optimizer_bytes: float = 8.0
    guessed: bool = False

    @classmethod
    def guess(cls, n_parameters: int, n_trainable: int, n_blocks: int, sequence: int = GUESSED_SEQUENCE) -> Profile:
        """A transformer of that size: what to assume while nothing but the parameter count is known.

        P = 12 L h^2 gives the width; 34 s h bytes per layer at 16 bits with fused attention (Korthikanti et al., 2205.05198),
        twice that at 32; 6 P FLOPs per token (forward 2, backward 4).
        """
        layers = max(n_blocks, 1)
        width = max(1.0, (n_parameters / 12 / layers) ** 0.5)
        per_layer = 68.0 * sequence * width
        return cls(
            n_parameters=n_parameters,
            n_trainable=n_trainable,
            flops_per_sample=(2.0 * n_parameters + 4.0 * n_trainable) * sequence,
            activation_bytes_per_sample=per_layer * layers,
            checkpointed_bytes_per_sample=4.0 * sequence * width * layers + per_layer,
            n_blocks=n_blocks,
            sequence=sequence,
            guessed=True,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of the machine that ranks run on.

    Attributes:
        accelerator: `cpu` or `cuda`.
        world_size: Ranks.
        flops: FLOP/s that a rank reaches in practice, by precision of a candidate; `fp32` must be there.
        memory_bytes_per_s: Memory bandwidth of a rank's device.
        link_alpha_s: Latency of one message between ranks.
        link_bytes_per_s: Bus bandwidth of a collective.
        host_bytes_per_s: Between host and device, each way.
        host_memory_bytes_per_s: Memory bandwidth of the host, for an optimizer that runs there.
        launch_s: Fixed cost of one block in one micro-step: kernel launches, Python.
        half_samples: Micro-batch at which half of the compute rate is reached.
    """

    accelerator: str
    world_size: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    link_alpha_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float = 2e10
    host_memory_bytes_per_s: float = 5e10
    launch_s: float = 1e-4
    half_samples: float = 0.5

    @classmethod
    def guess(cls, accelerator: str, world_size: int, n_cores: int = 4) -> Machine:
        """Typical rates, right to a factor of a few; what is measured corrects them."""
        if accelerator == "cuda":
            rates = {"fp32": 6e13, "bf16": 3e14, "fp16": 3e14, "torch_autocast": 2e14, "torch_autocast_fp16": 2e14}
            return cls(
                accelerator=accelerator, world_size=world_size, flops=rates, memory_bytes_per_s=2e12, link_alpha_s=2e-5,
                link_bytes_per_s=1e11,
            )  # fmt: skip
        cores = max(1.0, n_cores / world_size)
        # Whether a CPU computes faster or slower at 16 bits depends on its instructions: no opinion.
        rates = {"fp32": 3e10 * cores}
        return cls(
            accelerator=accelerator, world_size=world_size, flops=rates, memory_bytes_per_s=1e10, link_alpha_s=2e-4,
            link_bytes_per_s=2e9,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What the formulas look at, of many candidates at once: one entry per candidate in each column.

    Attributes:
        micro: Micro-batch per rank.
        accumulation: Micro-batches per optimizer step.
        stage: ZeRO stage.
        precision: Names, as in `Candidate.precision`.
        weight_bytes: Bytes of a weight in the model.
        gradient_bytes: Bytes of a gradient where it is summed up.
        wire_bytes: Bytes of a gradient between ranks.
        recomputed: `checkpoint_every`.
        offload_optimizer: Optimizer states live off the device.
        offload_param: Parameters live off the device.
        reduce_bucket: Elements.
        prefetch: Elements.
        overlap: Communication overlaps with backward.
        contiguous: Gradients are copied to a contiguous buffer.
        master_16: Master weights and gradients are bfloat16.
        states_16: Optimizer states are bfloat16.
        quantized_weights: ZeRO++ int8 gathers.
        hpz: Ranks that share a secondary copy of the weights; 1 without.
    """

    micro: Floats
    accumulation: Floats
    stage: Floats
    precision: NDArray[np.str_]
    weight_bytes: Floats
    gradient_bytes: Floats
    wire_bytes: Floats
    recomputed: Floats
    offload_optimizer: Floats
    offload_param: Floats
    reduce_bucket: Floats
    prefetch: Floats
    overlap: Floats
    contiguous: Floats
    master_16: Floats
    states_16: Floats
    quantized_weights: Floats
    hpz: Floats

    @classmethod
    def of(cls, candidates: Sequence[Candidate], base: Mapping[str, Any] | None = None) -> Knobs:
        """The columns of candidates.

        Args:
            candidates: The rows.
            base: Settings by dotted path that hold where a candidate says nothing.
        """
        base = dict(base or {})
        found = {name for c in candidates for name, _ in c.config}
        settings: dict[str, list[Any]] = {}
        if found:
            tables = [dict(c.config) for c in candidates]
            settings = {name: [table.get(name) for table in tables] for name in found}

        def column(path: str, default: float) -> Floats:
            other = default if base.get(path) is None else float(base[path])
            if path not in settings:
                return np.full(len(candidates), other)
            return np.array([other if value is None else float(value) for value in settings[path]], dtype=float)

        def names(path: str) -> list[str]:
            other = base.get(path)
            return [str(value or other or "") for value in settings.get(path, [None] * len(candidates))]

        zero = "zero_optimization."
        stage = np.array([c.zero_stage for c in candidates], dtype=float)
        weight = np.array([2.0 if c.precision in DTYPES else 4.0 for c in candidates])
        summed = np.array([WIRE_BYTES.get(name, 0.0) for name in names("data_types.grad_accum_dtype")])
        wire = np.array([WIRE_BYTES.get(name, 0.0) for name in names("communication_data_type")])
        overlap = column(zero + "overlap_comm", -1.0)
        return cls(
            micro=np.array([c.micro_batch_size for c in candidates], dtype=float),
            accumulation=np.array([c.gradient_accumulation_steps for c in candidates], dtype=float),
            stage=stage,
            precision=np.array([c.precision for c in candidates]),
            weight_bytes=weight,
            gradient_bytes=np.where(summed > 0, summed, weight),
            wire_bytes=np.where(wire > 0, wire, weight),
            recomputed=np.array([c.checkpoint_every for c in candidates], dtype=float),
            offload_optimizer=np.array([c.offload_optimizer != "none" for c in candidates], dtype=float),
            offload_param=np.array([c.offload_param != "none" for c in candidates], dtype=float),
            reduce_bucket=column(zero + "reduce_bucket_size", DEFAULT_BUCKET),
            prefetch=column(zero + "stage3_prefetch_bucket_size", DEFAULT_PREFETCH),
            # DeepSpeed overlaps by default at stage 3 only.
            overlap=np.where(overlap < 0, (stage == 3).astype(float), overlap),
            contiguous=column(zero + "contiguous_gradients", 1.0),
            master_16=column("bf16.bf16_master_weights_and_grads", 0.0),
            states_16=column("bf16.bf16_optimizer_states", 0.0),
            quantized_weights=column(zero + "zero_quantized_weights", 0.0),
            hpz=column(zero + "zero_hpz_partition_size", 1.0),
        )

    def recomputed_share(self, n_blocks: int) -> Floats:
        """Share of the blocks that is recomputed: every k-th block from the first."""
        blocks = max(n_blocks, 1)
        every = np.maximum(self.recomputed, 1.0)
        return np.where(self.recomputed > 0, np.ceil(blocks / every) / blocks, 0.0)


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a forecast.

    Attributes:
        name: What it is.
        value: Bytes or seconds.
        low: Lower end of its 90 % interval.
        high: Upper end.
    """

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast of one candidate, taken apart.

    Attributes:
        terms: Its parts, which add up to the total.
        total: The total with its interval.
    """

    terms: list[Term]
    total: Term


def forecast(name: str, table: Mapping[str, Floats], spreads: Mapping[str, float], row: int = 0) -> Forecast:
    """One row of a table of terms as a forecast with 90 % intervals.

    Args:
        name: What the total is.
        table: Columns of terms.
        spreads: Standard deviation of the logarithm of each term.
        row: Which row.
    """
    terms = []
    variance = 0.0
    for key, column in table.items():
        value, spread = float(column[row]), spreads[key]
        factor = float(np.exp(1.645 * spread))
        terms.append(Term(name=key, value=value, low=value / factor, high=value * factor))
        variance += (value * spread) ** 2
    total = sum(term.value for term in terms)
    factor = float(np.exp(1.645 * variance**0.5 / total)) if total > 0 else 1.0
    return Forecast(terms=terms, total=Term(name=name, value=total, low=total / factor, high=total * factor))
