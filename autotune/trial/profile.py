"""Records from which memory and step time are predicted: the passes of a model, and the rates of a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autotune.trial.lengths import Table, cut, expected, longest

Floats = NDArray[np.float64]
GUESSED_SEQUENCE = 256
# Bytes per value in messages between ranks.
WIRE_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}
# A typical `Machine.host_op_s` beside a GPU.
HOST_OP_S = 4e-6
# Arithmetic of each precision of a candidate; a pass is traced once for each.
ARITHMETIC = {
    "fp32": "fp32", "bf16": "bf16", "fp16": "bf16", "torch_autocast": "autocast", "torch_autocast_fp16": "autocast",
}  # fmt: skip
# Bytes of activations relative to fp32, if no pass was traced in the arithmetic itself.
ACTIVATION_SCALE = {"fp32": 1.0, "bf16": 0.5, "autocast": 0.65}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward and backward of one micro-batch, traced op by op.

    Pairs of numbers are affine functions of the micro-batch: a constant, and an amount per sample.

    Attributes:
        moments: Moments at which memory may peak: live bytes of activations and temporaries (constant, per sample), and
            elements of complete gradients.
        kept_bytes: Live bytes at the end of forward.
        largest_bytes: Bytes of forward's largest tensor, often the logits.
        flops: FLOPs of matrix products, convolutions and attention, with recomputation.
        moved_bytes: Bytes that operations read and write, of products without the weights.
        tf32_share: Share of the FLOPs that take TensorFloat-32 in fp32 without being asked to: those of convolutions, unless
            the target turns that off.
    """

    moments: tuple[tuple[float, float, float], ...]
    kept_bytes: tuple[float, float]
    largest_bytes: tuple[float, float]
    flops: tuple[float, float]
    moved_bytes: tuple[float, float]
    n_ops: float
    tf32_share: float = 0.0

    def scaled(self, factor: float) -> "Pass":
        """Returns the pass with numbers of this many times the bytes: the same operations move and keep more."""
        kept, largest, moved = (
            (factor * constant, factor * slope)
            for constant, slope in (self.kept_bytes, self.largest_bytes, self.moved_bytes)
        )
        moments = tuple((factor * constant, factor * slope, n) for constant, slope, n in self.moments)
        return replace(self, moments=moments, kept_bytes=kept, largest_bytes=largest, moved_bytes=moved)

    def highest(self, micro: Floats, gradient_bytes: Floats, bucket_bytes: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the bytes of activations, gradients and buckets at the moment at which their sum is highest.

        Args:
            micro: Micro-batches, shape [n].
            gradient_bytes: Bytes per element of a complete gradient, shape [n].
            bucket_bytes: Bytes of buckets that are allocated when the first gradient is complete, shape [n].
        """
        constant, slope, elements = np.array(self.moments).T
        live = constant + np.outer(micro, slope)
        complete, buckets = np.outer(gradient_bytes, elements), np.outer(bucket_bytes, elements > 0)
        at = np.argmax(live + complete + buckets, axis=1)[:, None]
        activations, gradients, held = (
            np.take_along_axis(each, at, axis=1)[:, 0] for each in (live, complete, buckets)
        )
        return activations, gradients, held


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Quantities of a workload that determine its memory and time.

    Attributes:
        n_parameters: Parameters, tied ones once.
        n_trainable: Of these, the trainable ones.
        flops_per_sample: FLOPs of forward and backward, without recomputation.
        activation_bytes_per_sample: Bytes kept for backward in fp32, without recomputation.
        checkpointed_bytes_per_sample: The same with every block recomputed, the working set of one block included.
        sequence: Tokens (or positions) of a sample.
        of_tokens: Samples are sequences of tokens; images, for example, are not, and are counted themselves.
        block_share: Share of the FLOPs and parameters in the blocks.
        optimizer_bytes: Optimizer state per trainable parameter in fp32: 8 for Adam, 4 for momentum, 0 for plain SGD.
        optimizer_scratch: Further bytes during its step, per element of the tensor that is updated (fp32).
        scratch_for_all: These are needed for all tensors at once, not one after the other.
        guessed: All numbers follow from the parameter count.
        passes: Traced passes by `ARITHMETIC/CHECKPOINT_EVERY`, such as `fp32/0`; empty if none was traced.
        n_tied: Parameters with more than one name, counted once in `n_parameters`.
        sizes: Distinct sizes of the parameters in elements, each with the number of parameters.
        n_frozen: Number of parameter tensors, of those in `sizes`, that are not trained.
        largest_module: Elements of the largest module's own parameters, which stage 3 gathers at once.
        quantized: Frozen parameters that are held at 4 bits.
        n_expert: Parameters of the experts of mixtures, of which a token passes a few.
        experts_per_token: Experts that a token passes in a layer that has some.
        data_bytes: Host memory of the target and its data set.
        input_s_per_sample: Time to draw a sample in a rank.
        built_bytes: Bytes of a parameter that each device holds before `deepspeed.initialize`, 0 where the model waits on
            the host; None where stage 3 has it in shards from the start (`zero.Init`), or may have.
        cut_short: Passes are missing, since the time for profiling was over; what stands in for them is uncertain.
        lengths: Lengths of the data set's samples, where batches are padded to their longest; the passes are of batches
            of `sequence` tokens.
        updates, by_micro_batch: Classes of modules of a `model.py` that change a buffer in each forward: of any in its blocks, of
            floats anywhere. As in `Workload`.
        stated: The length that samples are stated to reach, beyond those that were read; 0 if none is.
        caveats: Quantities that could not be measured, and the assumptions instead.
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
    n_frozen: int = 0
    largest_module: int = 0
    quantized: int = 0
    n_expert: int = 0
    expert_layers: int = 0
    experts_per_token: float = 1.0
    data_bytes: float = 0.0
    input_s_per_sample: float = 0.0
    built_bytes: float | None = None
    cut_short: bool = False
    lengths: Table = ()
    stated: int = 0
    of_tokens: bool = True
    updates: str = ""
    by_micro_batch: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def largest_parameter(self) -> int:
        """Returns the elements of the largest trained parameter, at most."""
        guess = int(self.block_share * self.n_parameters / max(1, 12 * self.n_blocks))
        return min(self.n_trainable, max((size for size, _ in self.sizes), default=guess))

    @property
    def width(self) -> float:
        """Returns the width of the hidden states, from P = 12 L h^2 for the parameters in the blocks.

        Beside a mixture of experts, attention alone has 4 of these 12.
        """
        in_blocks, squares = self.block_share * self.n_parameters - self.n_expert, 4 if self.n_expert else 12
        return float(max(1.0, max(0.0, in_blocks / squares / max(1, self.n_blocks)) ** 0.5))

    @property
    def longest(self) -> int:
        """Returns the length of the longest sample, as far as samples were read."""
        return longest(self.lengths) or self.sequence

    @property
    def tokens_per_sample(self) -> float | None:
        """Returns the tokens of an average sample; None where samples are no token sequences."""
        if not self.of_tokens:
            return None
        return expected(self.lengths) or (float(self.sequence) if self.sequence > 1 else None)

    @property
    def counted_per_sample(self) -> int:
        """Returns what rates count of a sample: its tokens, or 1 where samples are no token sequences."""
        return max(1, self.sequence) if self.of_tokens else 1

    @property
    def unit(self) -> str:
        """Returns the name of what rates count."""
        return "tokens" if self.of_tokens else "samples"

    def reaching(self, length: int) -> "Profile":
        """Returns the profile for samples that are stated to reach a length, which then has to fit."""
        if self.guessed or self.sequence <= 1 or length <= self.longest:
            return self
        times = length / self.longest
        said = f"samples are stated to reach {length:,} tokens, {times:.1f}x the longest that was seen: activations in proportion"
        return replace(self, stated=length, caveats=(*self.caveats, said))

    def worst_share(self, micro: Floats, budgeted: Floats, limits: Floats) -> Floats:
        """Returns the length of a batch of the longest samples, as a multiple of that of the profiled batches.

        Args:
            budgeted: Above 0 where a batch holds as many tokens as this many mean samples, and at least one sample.
            limits: Lengths that samples are cut to; infinite for none.
        """
        known = max(self.longest, self.stated)
        if not self.lengths and not self.stated:
            return np.ones(len(limits))
        longest = np.minimum(limits, known)
        mean = self.usual_share(micro, budgeted, limits) * self.sequence
        return np.asarray(np.where(budgeted > 0, np.maximum(mean, longest / micro), longest) / self.sequence)

    def usual_share(self, micro: Floats, packed: Floats, limits: Floats) -> Floats:
        """Returns the length of an average batch, as a multiple of that of the profiled batches.

        Args:
            micro: Micro-batches, to whose longest samples the others are padded.
            packed: Above 0 where they are not padded.
            limits: Lengths that samples are cut to; infinite for none.
        """
        if not self.lengths:
            return np.ones(len(micro))
        rows = list(zip(np.where(packed > 0, 1, micro).tolist(), limits.tolist(), strict=True))
        means = {row: expected(cut(self.lengths, row[1]), int(row[0])) for row in set(rows)}
        return np.array([means[row] for row in rows]) / self.sequence

    def small_elements(self, threshold: float) -> int:
        """Returns the elements in all parameters of at most `threshold` elements, which stage 3 does not shard."""
        return sum(size * count for size, count in self.sizes if size <= threshold)

    def highest(
        self, arithmetic: str, every: int, share: float, micro: Floats, gradient_bytes: Floats, bucket_bytes: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Returns the bytes of activations, complete gradients and buckets at the peak of a pass; see `Pass.highest`.

        Args:
            arithmetic: A value of `ARITHMETIC`.
            every: `checkpoint_every`.
            share: Share of the blocks that are recomputed.
            micro: Micro-batches, shape [n].
            gradient_bytes: Bytes per element of a complete gradient, shape [n].
            bucket_bytes: Bytes of buckets that are allocated when the first gradient is complete, shape [n].
        """
        if not self.passes:
            kept = self.activation_bytes_per_sample * (1 - share) + self.checkpointed_bytes_per_sample * share
            return micro * kept * ACTIVATION_SCALE[arithmetic], gradient_bytes * self.n_trainable, bucket_bytes
        for name, scale in ((arithmetic, 1.0), ("fp32", ACTIVATION_SCALE[arithmetic])):
            exact = self.passes.get(f"{name}/{every}")
            if exact is not None:
                live, complete, buckets = exact.highest(micro, gradient_bytes / scale, bucket_bytes / scale)
                return scale * live, scale * complete, scale * buckets
            plain, again = self.passes.get(f"{name}/0"), self.passes.get(f"{name}/1")
            if plain is not None:
                moment = micro, gradient_bytes / scale, bucket_bytes / scale
                whole = plain.highest(*moment)
                found = again.highest(*moment) if again else (self._recomputed(whole[0], micro), *whole[1:])
                live, complete, buckets = ((1 - share) * a + share * b for a, b in zip(whole, found, strict=True))
                return scale * live, scale * complete, scale * buckets
        raise AssertionError("the plain fp32 pass is followed first")

    def _recomputed(self, live: Floats, micro: Floats) -> Floats:
        """Returns the bytes of activations with every block recomputed, from the peak without, where that pass was not traced.

        Kept are the blocks' inputs, 4 s b h L bytes in fp32 (Korthikanti et al., 2205.05198: 2 s b h L at 16 bits), one
        block's activations, and what lies outside of the blocks.
        """
        layers = max(1, self.n_blocks)
        inputs = 4.0 * self.sequence * self.width * layers * micro
        return np.minimum(live, inputs + live * (1 - self.block_share + self.block_share / layers))

    def largest_tensor_bytes(self, precision: str, micro_batch_size: int) -> float:
        """Returns the bytes of forward's largest tensor, often the logits; 0 if no pass was traced."""
        name = ARITHMETIC.get(precision, "fp32")
        found, scale = self.passes.get(f"{name}/0"), 1.0
        if found is None:
            found, scale = self.passes.get("fp32/0"), ACTIVATION_SCALE[name]
        constant, per_sample = found.largest_bytes if found is not None else (0.0, 0.0)
        return scale * (constant + per_sample * micro_batch_size)

    def work(self, arithmetic: str, every: int, micro: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns FLOPs, bytes moved, and number of operations of one micro-step.

        Args:
            arithmetic: A value of `ARITHMETIC`.
            every: 1 if all blocks are recomputed, 0 if none is.
            micro: Micro-batch sizes, shape [n].
        """
        names = [f"{name}/{k}" for k in (every, 0) for name in (arithmetic, "fp32")]
        name = next(name for name in names if name in self.passes)
        found = self.passes[name]
        # Where no pass with recomputation was followed: the blocks' forward once more, a third of forward and backward.
        more = 1.0 + (self.block_share / 3 if every and name.endswith("/0") else 0.0)
        flops, moved = (more * (constant + slope * micro) for constant, slope in (found.flops, found.moved_bytes))
        return flops, moved, np.full(len(micro), more * found.n_ops)

    @classmethod
    def guess(cls, n_parameters: int, n_trainable: int, n_blocks: int, sequence: int = GUESSED_SEQUENCE) -> "Profile":
        """Returns the profile of a transformer of this size, for a model of which only the parameter count is known.

        P = 12 L h^2 gives the width; 34 s h bytes per layer at 16 bits with fused attention (Korthikanti et al.,
        2205.05198), twice that at 32; 6 P FLOPs per token (forward 2, backward 4).
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
    """Rates of a machine with all its ranks at work.

    Attributes:
        accelerator: `cpu` or `cuda`.
        flops: FLOP/s that a rank reaches in practice, by precision of a candidate; `fp32` is required.
        memory_bytes_per_s: Memory bandwidth of a rank's device.
        link_alpha_s: Latency of one message between ranks.
        link_bytes_per_s: Bus bandwidth of a collective.
        host_bytes_per_s: Between host and device, each way.
        host_memory_bytes_per_s: Rate at which an optimizer that runs on the host moves its bytes.
        launch_s: Fixed cost of one block in one micro-step: kernel launches, Python.
        half_samples: Micro-batch at which half of the compute rate is reached.
        op_s: Fixed cost of one operation, if a workload's operations were counted.
        host_op_s: The same of one that the host computes itself, the unit of what DeepSpeed does in Python; 0 for `op_s`.
        optimizer_bytes_per_s: Rate at which an optimizer's step moves its bytes; None for the memory bandwidth.
        workspace_bytes: Memory of a process that has trained, besides tensors; 0 for a typical amount.
        kernel_bytes: Further memory for 16-bit arithmetic; 0 for a typical amount.
        device_bytes: Memory of a rank's device; 0 on a CPU, or if unknown.
        measured: The rates were measured on this machine.
        ranks_per_node: Ranks of a node; 0 if all are on one. `link_*` then describe the link within a node.
        node_alpha_s: Latency of one message between nodes.
        node_bytes_per_s: Bandwidth between a node and the others, each way, shared by its ranks.
        n_cores: Cores that the ranks of a node share; 0 where each has another device, or if unknown.
        algorithm: Algorithm of collectives: `ring`, `tree`, `hierarchical`, or `auto` for the faster of the first two.
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
    host_op_s: float = 0.0
    optimizer_bytes_per_s: float | None = None
    workspace_bytes: float = 0.0
    kernel_bytes: float = 0.0
    device_bytes: float = 0.0
    measured: bool = False
    ranks_per_node: int = 0
    node_alpha_s: float = 0.0
    node_bytes_per_s: float = 0.0
    n_cores: int = 0
    algorithm: str = "ring"

    @classmethod
    def guess(cls, accelerator: str, world_size: int, n_cores: int = 4) -> "Machine":
        """Returns typical rates, which may be wrong by a factor of a few; measurements correct them."""
        if accelerator == "cpu":
            # Whether a CPU is faster or slower at 16 bits depends on its instructions: no rate is given.
            rates = {"fp32": 3e10 * max(1.0, n_cores / world_size)}
            memory_bytes_per_s, link_alpha_s, link_bytes_per_s = 1e10, 2e-4, 2e9
        else:
            rates = {
                "fp32": 6e13, "tf32": 1.5e14, "bf16": 3e14, "fp16": 3e14, "torch_autocast": 2e14, "torch_autocast_fp16": 2e14
            }  # fmt: skip
            memory_bytes_per_s, link_alpha_s, link_bytes_per_s = 2e12, 2e-5, 1e11
        return cls(
            accelerator=accelerator, world_size=world_size, flops=rates, memory_bytes_per_s=memory_bytes_per_s,
            link_alpha_s=link_alpha_s, link_bytes_per_s=link_bytes_per_s, host_op_s=0.0 if accelerator == "cpu" else HOST_OP_S,
        )  # fmt: skip
