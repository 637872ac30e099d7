"""The profile of a model that was not run: counted from its architecture, the method and the sequence length."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.advise.architecture import Architecture
from autotune.advise.constants import CONSTANTS, Constants
from autotune.trial.profile import Pass, Profile

METHODS = ("full", "lora", "qlora")
LOSSES = ("plain", "fused", "none")
ATTENTIONS = ("eager", "sdpa", "flash")
# By family of optimizer: bytes of fp32 state a parameter, and further bytes an element during its step.
OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (8.0, 8.0), "adam": (8.0, 8.0), "fused-adamw": (8.0, 0.0), "adamw-8bit": (2.0, 4.0), "lion": (4.0, 4.0),
    "muon": (4.0, 8.0), "sgd": (0.0, 4.0), "momentum": (4.0, 4.0), "adagrad": (4.0, 8.0), "adafactor": (0.1, 8.0),
}  # fmt: skip
LORA_RANK = 16
# Operations of a block, forward and backward, as launches of kernels.
OPS_A_BLOCK = 150
# Times that what a block keeps passes the memory: written and read in forward, and so are its gradients in backward.
PASSES_OF_ACTIVATIONS = 3.0
# PEFT keeps adapters in fp32, so each layer's input is cast; beside that the product's output is added in fp32.
ADAPTER_BYTES, ADAPTER_OPS = 4.0, 25
WIDTHS = {"fp32": 4.0, "bf16": 2.0, "autocast": 2.0}


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, as far as its memory and work depend on it.

    Attributes:
        method: `full`, `lora`, or `qlora`: LoRA over weights of 4 bits.
        sequence: Tokens of a sample.
        attention: `eager` keeps the scores, `sdpa` and `flash` do not.
        optimizer: A key of `OPTIMIZERS`.
        lora_rank: Rank of the adapters, which are on every linear layer of the blocks.
        loss: `plain` keeps logits in fp32; `fused` computes loss and gradient of 16-bit logits in place; `none` never
            has them whole (computed in pieces, or no output layer over the vocabulary).
        train_embeddings: LoRA trains the embedding and the output layer as well.
        lean_blocks: Norms and activations keep 16 bits, as fused kernels and trainers for pre-training do.
    """

    method: str = "full"
    sequence: int = 4096
    attention: str = "sdpa"
    optimizer: str = "adamw"
    lora_rank: int = LORA_RANK
    loss: str = "plain"
    train_embeddings: bool = False
    lean_blocks: bool = False


def profile_of(model: Architecture, how: Training, constants: Constants = CONSTANTS) -> Profile:
    """The profile that the formulas of memory and step time take, as if a pass had been followed."""
    parts = model.parameters_of()
    passes = {(width, every): _pass(model, how, constants, width, every) for width in (2.0, 4.0) for every in (0, 1)}
    adapters = _adapters(model, how.lora_rank) if how.method != "full" else 0
    total = sum(parts.values()) + adapters
    trainable = adapters + (parts["embedding"] + parts["head"] if adapters and how.train_embeddings else 0)
    states, scratch = OPTIMIZERS[how.optimizer]
    if how.optimizer == "muon":  # of DeepSpeed: Adam for all that is no matrix of a block
        states += 4.0 * (1.0 - (adapters or parts["blocks"]) / (trainable or total))
    sizes, n_frozen = _sizes(model, how)
    return Profile(
        n_parameters=total, n_trainable=trainable or total, n_blocks=model.layers, sequence=how.sequence,
        flops_per_sample=_flops(model, how, constants)[0],
        activation_bytes_per_sample=0.0, checkpointed_bytes_per_sample=0.0,  # the passes say it
        block_share=parts["blocks"] / total, optimizer_bytes=states, optimizer_scratch=scratch, scratch_for_all=True,
        passes={f"{name}/{every}": passes[width, every] for name, width in WIDTHS.items() for every in (0, 1)},
        sizes=tuple(sizes.items()), n_frozen=n_frozen, largest_module=model.vocab * model.hidden,
        quantized=parts["blocks"] if how.method == "qlora" else 0,
        **_mixture(model, how),
    )  # fmt: skip


def _mixture(model: Architecture, how: Training) -> dict[str, Any]:
    """The profile's fields of a mixture whose experts are trained themselves, not through adapters."""
    if not model.experts or how.method != "full":
        return {}
    layers = model.layers - model.dense_layers
    each = sum(a * b for a, b in model.mlp_matrices(model.expert_intermediate))
    return {
        "n_expert": layers * model.experts * each,
        "expert_layers": layers,
        "experts_per_token": float(model.active_experts),
    }


def _adapters(model: Architecture, rank: int) -> int:
    """Elements of LoRA's adapters on every linear layer of the blocks, those of each expert included."""
    attention, dense, expert, shared = (
        sum(a + b for a, b in matrices)
        for matrices in (
            model.attention_matrices(),
            *map(model.mlp_matrices, (model.intermediate, model.expert_intermediate, model.shared_intermediate)),
        )
    )
    sparse = model.layers - model.dense_layers if model.experts else 0
    each = model.experts * expert + (shared if model.shared_intermediate else 0)
    return rank * (model.layers * attention + (model.layers - sparse) * dense + sparse * each)


def _sizes(model: Architecture, how: Training) -> tuple[dict[int, int], int]:
    """Distinct sizes of the parameters, each with their number; and how many of these parameters are frozen."""
    ends = 1 if model.tied else 2
    counts = Counter({model.hidden: 2 * model.layers + 1, model.vocab * model.hidden: ends})
    sparse = model.layers - model.dense_layers if model.experts else 0
    # Libraries keep the experts of a block in one tensor for each matrix.
    groups = (
        (model.layers, 1, model.attention_matrices()),
        (model.layers - sparse, 1, model.mlp_matrices(model.intermediate)),
        (sparse, model.experts, model.mlp_matrices(model.expert_intermediate)),
    )
    linear = [(count, n * a, n * b, n) for count, n, matrices in groups for a, b in matrices if count and a * b]
    for count, a, b, n in linear:
        counts[a * b // n] += count
    if how.method == "full":
        return counts, 0
    n_frozen = counts.total() - (ends if how.train_embeddings else 0)
    for count, a, b, _ in linear:
        counts[how.lora_rank * a] += count
        counts[how.lora_rank * b] += count
    return counts, n_frozen


def block_bytes(model: Architecture, how: Training, width: float = 2.0) -> float:
    """Bytes that a block keeps for backward, for each token.

    As Hugging Face's models compute: each of two norms keeps its input in fp32, the normalised values and its output;
    attention its queries, keys, values and output; the feed-forward network what enters and leaves each product. After
    Korthikanti et al. (arXiv 2205.05198), counted anew for gates and grouped queries.
    """
    h, q, kv = model.hidden, model.query_width, model.kv_width
    norms = 2 * h * width if how.lean_blocks else 2 * h * (4 + 2 * width)
    attention = width * (2 * q + 2 * kv)
    if how.attention != "flash" and kv < q and not how.lean_blocks:
        attention += width * 2 * (q - kv)  # keys and values are repeated for every query head
    if how.attention == "eager":
        attention += (4 + width) * model.heads * how.sequence
    active = model.active_experts * model.expert_intermediate + model.shared_intermediate
    inner = active if model.experts else model.intermediate
    kept = (3 if how.lean_blocks else 4) if model.gated else 2
    dispatched = 2 * width * h * model.active_experts
    # Adapters keep their own copy of what enters each layer, in fp32.
    adapted = ADAPTER_BYTES * _ends(model)[0] if how.method != "full" else 0.0
    return norms + attention + width * kept * inner + dispatched + adapted


def _ends(model: Architecture) -> tuple[float, float]:
    """Sums of the inputs and of the outputs of a block's linear layers, as a token passes them."""
    inner = model.active_experts * model.expert_intermediate + model.shared_intermediate
    layers = model.attention_matrices() + model.mlp_matrices(inner if model.experts else model.intermediate)
    return float(sum(a for a, _ in layers)), float(sum(b for _, b in layers))


def _pass(model: Architecture, how: Training, constants: Constants, width: float, every: int) -> Pass:
    """Forward and backward of a sample with every block recomputed (1) or none (0).

    Memory is highest at the loss, where the logits are, or while backward goes through the last or the first block:
    what is kept falls from one to the other as gradients are completed.
    """
    s, h, L = float(how.sequence), model.hidden, model.layers
    block = constants.activation_factor * block_bytes(model, how, width)
    kept = width * h if every else block
    inner = model.active_experts * model.expert_intermediate if model.experts else model.intermediate
    # In backward through a block: its gradients, and with recomputation what it keeps as well.
    working = width * (2 * inner + 2 * h) + (block if every else 0.0)
    logits = {"plain": constants.logit_bytes, "fused": 2.0 * width, "none": 0.0}[how.loss] * model.vocab
    parts = model.parameters_of()
    head, rest = float(model.vocab * h), float(sum(parts.values()) - (0 if model.tied else parts["embedding"]))
    if how.method != "full":  # an element stands for the first adapter, with which buckets come
        head, rest = 1.0, float(_adapters(model, how.lora_rank))
    moments = (
        (0.0, s * (L * kept + 4 * width * h + logits), 0.0),
        (0.0, s * (L * kept + 2 * width * h + working), head),
        (0.0, s * (kept + working), rest),
    )
    flops, again = _flops(model, how, constants)
    adapters = 3.0 * ADAPTER_BYTES * sum(_ends(model)) if how.method != "full" else 0.0
    traffic = s * (L * (block + adapters) * (PASSES_OF_ACTIVATIONS + every) + 3.0 * logits)
    ops = OPS_A_BLOCK + (ADAPTER_OPS * len(model.attention_matrices() + model.mlp_matrices(1)) if adapters else 0)
    return Pass(
        moments=moments, kept_bytes=(0.0, s * L * kept),
        largest_bytes=(0.0, s * model.vocab * {"plain": 4.0, "fused": width, "none": 0.0}[how.loss]),
        flops=(0.0, flops + every * again), moved_bytes=(0.0, traffic), n_ops=ops * L * (1.33 if every else 1.0),
    )  # fmt: skip


def useful_flops(model: Architecture, how: Training) -> float:
    """FLOPs of forward and backward of a sample as MFU counts them: without recomputation, attention at full rate."""
    return _flops(model, how, replace(CONSTANTS, attention_factor=1.0))[0]


def _flops(model: Architecture, how: Training, constants: Constants) -> tuple[float, float]:
    """FLOPs of forward and backward of a sample, and of a second forward of the blocks.

    2 a product's elements a token forward, twice that backward: half of it for frozen weights, which need no gradient.
    Causal attention does half of 4 s q a token and block, at a lower rate than products (`attention_factor`); eager
    attention computes the masked half too.
    """
    s = float(how.sequence)
    active = model.parameters_of(active=True)
    products = 2.0 * active["blocks"] * s
    head = 2.0 * model.vocab * model.hidden * s
    scores = (
        2.0 * model.layers * (model.query_width + model.heads * (model.mla[4] if model.mla else model.head_dim)) * s * s
    )
    scores *= constants.attention_factor * (1.0 if how.attention == "eager" else 0.5)
    backward = 1.0 if how.method != "full" else 2.0
    return (products + head) * (1.0 + backward) + 3.0 * scores, products + scores
