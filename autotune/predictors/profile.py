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
MAX_REUSE_DISTANCE = 1_000_000_000
PERSISTENCE = 100_000
SUB_GROUP = 1_000_000_000
GUESSED_SEQUENCE = 256
# Bytes of a value that travels between ranks.
WIRE_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}
# What each precision of a candidate computes with; a pass is followed once for each.
ARITHMETIC = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "torch_autocast": "autocast",
    "torch_autocast_fp16": "autocast",
}
# Bytes of activations in proportion to those of fp32, where a pass was not followed in the precision itself.
ACTIVATION_SCALE = {"fp32": 1.0, "bf16": 0.5, "autocast": 0.65}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward and backward of one micro-batch, followed op by op; amounts are affine in the micro-batch: constant, per sample.

    Attributes:
        moments: Instants at which memory can be highest: live bytes of activations and temporaries (constant, per sample),
            and how many elements of gradients are complete by then.
        kept_bytes: Live when forward ends: what backward needs.
        largest_bytes: The largest tensor of forward, often the logits.
        flops: Of matrix products, convolutions and attention; recomputation is counted.
        moved_bytes: Read and written by all other operations.
        n_ops: Operations.
    """

    moments: tuple[tuple[float, float, float], ...]
    kept_bytes: tuple[float, float]
    largest_bytes: tuple[float, float]
    flops: tuple[float, float]
    moved_bytes: tuple[float, float]
    n_ops: float

    def highest(self, micro: Floats, gradient_bytes: Floats) -> tuple[Floats, Floats]:
        """Bytes of activations and of gradients at the instant at which their sum is highest.

        Args:
            micro: Micro-batches.
            gradient_bytes: Bytes that each element of a complete gradient takes, until the pass ends.
        """
        constant, slope, elements = np.array(self.moments).T
        live = constant + np.outer(micro, slope)
        complete = np.outer(gradient_bytes, elements)
        at = np.argmax(live + complete, axis=1)[:, None]
        return np.take_along_axis(live, at, axis=1)[:, 0], np.take_along_axis(complete, at, axis=1)[:, 0]


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
        optimizer_scratch: Bytes that its step needs besides, per element of the tensor that is updated (fp32).
        scratch_for_all: It needs them for all tensors at once, not one after the other.
        guessed: The numbers follow from the parameter count alone.
        passes: Forward and backward by arithmetic and recomputation (`pass_of`); empty where they were not followed.
        n_tied: Parameters that are used under more than one name, counted once in `n_parameters`.
        sizes: Elements of the parameters, each size with the number of parameters that have it.
        largest_module: Elements of the largest module's own parameters: what stage 3 gathers at once.
        data_bytes: Host memory that the target and its data set take.
        input_s_per_sample: Time to draw a sample in a rank.
        shapes: Shapes of one sample's tensors, as text.
        caveats: What could not be found out, and what was assumed instead.
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
    optimizer_scratch: float = 8.0
    scratch_for_all: bool = False
    guessed: bool = False
    passes: Mapping[str, Pass] = field(default_factory=dict, hash=False)
    n_tied: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    largest_module: int = 0
    data_bytes: float = 0.0
    input_s_per_sample: float = 0.0
    shapes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max(
            (size for size, _ in self.sizes),
            default=int(self.block_share * self.n_parameters / max(1, 12 * self.n_blocks)),
        )

    def small_elements(self, threshold: float) -> int:
        """Elements in parameters of at most so many: stage 3 does not split them."""
        return sum(size * count for size, count in self.sizes if size <= threshold)

    def highest(
        self, arithmetic: str, every: int, share: float, micro: Floats, gradient_bytes: Floats
    ) -> tuple[Floats, Floats]:
        """Bytes of activations and complete gradients at the highest instant of forward and backward; see `Pass.highest`.

        Args:
            arithmetic: As in `ARITHMETIC`.
            every: `checkpoint_every`.
            share: Share of the blocks that it recomputes.
            micro: Micro-batches.
            gradient_bytes: Bytes that each element of a complete gradient takes.
        """
        if not self.passes:
            kept = self.activation_bytes_per_sample * (1 - share) + self.checkpointed_bytes_per_sample * share
            return micro * kept * ACTIVATION_SCALE[arithmetic], gradient_bytes * self.n_trainable
        for name, scale in ((arithmetic, 1.0), ("fp32", ACTIVATION_SCALE[arithmetic])):
            exact = self.passes.get(f"{name}/{every}")
            if exact is not None:
                live, complete = exact.highest(micro, gradient_bytes / scale)
                return scale * live, scale * complete
            plain, again = self.passes.get(f"{name}/0"), self.passes.get(f"{name}/1")
            if plain is not None and again is not None:
                found = [each.highest(micro, gradient_bytes / scale) for each in (plain, again)]
                live, complete = ((1 - share) * a + share * b for a, b in zip(*found, strict=True))
                return scale * live, scale * complete
        live, complete = self.passes["fp32/0"].highest(micro, gradient_bytes)
        return ACTIVATION_SCALE[arithmetic] * live, complete

    def largest_tensor_bytes(self, precision: str, micro_batch_size: int) -> float:
        """Bytes of forward's largest tensor, often the logits; 0 where no pass was followed."""
        name = ARITHMETIC.get(precision, "fp32")
        found, scale = self.passes.get(f"{name}/0"), 1.0
        if found is None:
            found, scale = self.passes.get("fp32/0"), ACTIVATION_SCALE[name]
        return (
            scale * (found.largest_bytes[0] + found.largest_bytes[1] * micro_batch_size) if found is not None else 0.0
        )

    def work(self, arithmetic: str, every: int, micro: Floats) -> tuple[Floats, Floats, Floats]:
        """FLOPs, bytes moved by other operations, and operations of one micro-step, with all blocks recomputed or none.

        Args:
            arithmetic: As in `ARITHMETIC`.
            every: 0 or 1.
            micro: Micro-batches.
        """
        names = [f"{name}/{k}" for k in (every, 0) for name in (arithmetic, "fp32")]
        found = self.passes[next(name for name in names if name in self.passes)]
        flops, moved = (constant + slope * micro for constant, slope in (found.flops, found.moved_bytes))
        return flops, moved, np.full(len(micro), found.n_ops)

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
        op_s: Fixed cost of one operation, where a workload's operations were counted.
        optimizer_bytes_per_s: Rate at which an optimizer's step moves its bytes; None for the memory's.
        workspace_bytes: What a process needs once it has trained, besides tensors; 0 for the usual.
        kernel_bytes: What 16-bit arithmetic adds to it; 0 for the usual.
        measured: The rates were measured on this machine.
        ranks_per_node: Ranks of a node; 0 where all are on one. The link between ranks is then the one within a node.
        node_alpha_s: Latency of one message between nodes.
        node_bytes_per_s: Bandwidth between a node and the others, each way, which its ranks share.
        algorithm: How collectives go: `ring`, `tree`, `hierarchical`, or `auto` for the faster of the first two.
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
    op_s: float = 1e-5
    optimizer_bytes_per_s: float | None = None
    workspace_bytes: float = 0.0
    kernel_bytes: float = 0.0
    measured: bool = False
    ranks_per_node: int = 0
    node_alpha_s: float = 0.0
    node_bytes_per_s: float = 0.0
    algorithm: str = "ring"

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
        persistence: Elements up to which stage 3 does not split a parameter.
        max_live: Elements that stage 3 may have whole at once.
        reuse_distance: Elements within which it keeps what will be used again.
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
    persistence: Floats
    max_live: Floats
    reuse_distance: Floats
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
            persistence=column(zero + "stage3_param_persistence_threshold", PERSISTENCE),
            max_live=column(zero + "stage3_max_live_parameters", MAX_LIVE_PARAMETERS),
            reuse_distance=column(zero + "stage3_max_reuse_distance", MAX_REUSE_DISTANCE),
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
