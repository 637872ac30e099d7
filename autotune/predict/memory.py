"""Memory of a rank, as DeepSpeed allocates it: model states, buckets, gathered parameters, activations, temporaries."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autotune.candidate import Candidate
from autotune.predict.profile import MAX_LIVE_PARAMETERS, SUB_GROUP, Floats, Forecast, Knobs, Machine, Profile, forecast

# Standard deviation of the logarithm of each term: states follow from counting, activations and what the allocator adds do not.
SPREADS = {
    "weights": 0.02,
    "gradients": 0.05,
    "master": 0.02,
    "states": 0.02,
    "buckets": 0.15,
    "gathered": 0.3,
    "activations": 0.2,
    "step": 0.25,
    "workspace": 0.5,
}
GUESSED_ACTIVATIONS = 0.8
# Of the bytes that fp32 activations take: a model cast to 16 bits, and autocast, which keeps some tensors (and casts of weights) in fp32.
ACTIVATION_SCALE = {"bf16": 0.5, "fp16": 0.5, "torch_autocast": 0.65, "torch_autocast_fp16": 0.65}
WORKSPACE_BYTES = {"cuda": 0.5e9, "cpu": 1.2e8}


def memory_terms(knobs: Knobs, profile: Profile, machine: Machine) -> dict[str, Floats]:
    """Bytes of a rank at its peak, one column a term; the terms add up to the peak.

    States (ZeRO, SC20; allocations as in DeepSpeed's stage_1_and_2.py, stage3.py, fused_optimizer.py, bf16_optimizer.py), with
    P parameters, Pt trainable, N ranks, w and g bytes of a weight and of a summed gradient:

    * weights w P, at stage 3 w P / N; frozen ones are never sharded below stage 3;
    * gradients g Pt, from stage 2 on g Pt / N; a 16-bit gradient beside its fp32 sum at stage 1;
    * fp32 master 4 Pt with 16-bit weights, from stage 1 on over N; in fp32 stages 1 and 2 clone their shard all the same;
    * states (8 bytes for Adam) Pt, from stage 1 on over N.

    Peak = states + workspace + max(backward: activations + buckets + gathered parameters, step: an fp32 copy of the gradients).
    """
    P, Pt, N = float(profile.n_parameters), float(profile.n_trainable), float(machine.world_size)
    w, g, stage = knobs.weight_bytes, knobs.gradient_bytes, knobs.stage
    sixteen = w == 2.0
    over_1, over_2, over_3 = (np.where(stage >= s, N, 1.0) for s in (1, 2, 3))
    on_device, param_on_device = 1.0 - knobs.offload_optimizer, 1.0 - knobs.offload_param

    weights = w * P / over_3 * param_on_device + np.where(knobs.hpz > 1, w * P / np.maximum(knobs.hpz, 1.0), 0.0)
    both = (stage == 1) & sixteen & (g > w)  # BF16_Optimizer: fp32 sums unsharded, and the 16-bit gradients of a backward
    gradients = np.where(both, (g + w) * Pt, g * Pt / over_2) * on_device
    master_bytes = np.where(sixteen, np.where(knobs.master_16 > 0, 2.0, 4.0), np.where((stage == 1) | (stage == 2), 4.0, 0.0))
    master = master_bytes * Pt / over_1 * on_device
    states = np.where(knobs.states_16 > 0, 0.5, 1.0) * profile.optimizer_bytes * Pt / over_1 * on_device

    buckets = _buckets(knobs, Pt, machine)
    per_block = profile.block_share * P / max(profile.n_blocks, 1)
    # Two blocks in flight, and what is outside the blocks; DeepSpeed caps what is gathered at once.
    live = min(P, 2 * per_block + (1 - profile.block_share) * P, float(MAX_LIVE_PARAMETERS))
    gathered = np.where(stage == 3, w * np.minimum(P, live + np.minimum(knobs.prefetch, P)), 0.0) * (1.0 if N > 1 else 0.5)
    activations = _activations(knobs, profile)
    backward = buckets + gathered + activations

    shard = np.where(stage == 3, np.minimum(float(SUB_GROUP), Pt / N), Pt / over_1)
    step = np.where(sixteen & (knobs.master_16 == 0), 4.0, np.where(stage == 0, 0.0, 4.0)) * shard * on_device
    in_backward = backward >= step
    workspace = np.full(len(w), WORKSPACE_BYTES.get(machine.accelerator, 1e8))
    return {
        "weights": weights,
        "gradients": gradients,
        "master": master,
        "states": states,
        "buckets": np.where(in_backward, buckets, 0.0),
        "gathered": np.where(in_backward, gathered, 0.0),
        "activations": np.where(in_backward, activations, 0.0),
        "step": np.where(in_backward, 0.0, step),
        "workspace": workspace,
    }


def _buckets(knobs: Knobs, Pt: float, machine: Machine) -> Floats:
    """Communication buffers: stages 1 and 2 hold one bucket per backward (two with overlap), stage 3 one for ever.

    They are allocated whole even for a smaller model; on a CPU only the pages that are touched count.
    """
    size = np.minimum(knobs.reduce_bucket, Pt) if machine.accelerator == "cpu" else knobs.reduce_bucket
    sharded = np.where((knobs.stage == 1) | (knobs.stage == 2), knobs.contiguous * (1.0 + knobs.overlap), 1.0)
    # Stage 0 flattens gradients for the all-reduce, at most 5e8 elements at a time; alone, a rank has nothing to reduce.
    plain = min(Pt, 5e8) if machine.world_size > 1 else 0.0
    return np.asarray(np.where(knobs.stage == 0, plain * knobs.wire_bytes, size * knobs.weight_bytes * sharded), dtype=float)


def _activations(knobs: Knobs, profile: Profile) -> Floats:
    """Linear in the micro-batch; accumulation, stage and offload do not change them."""
    share = knobs.recomputed_share(profile.n_blocks)
    kept = profile.activation_bytes_per_sample * (1 - share) + profile.checkpointed_bytes_per_sample * share
    scale = np.array([ACTIVATION_SCALE.get(str(name), 1.0) for name in knobs.precision])
    return np.asarray(knobs.micro * kept * scale, dtype=float)


def spreads(profile: Profile) -> Mapping[str, float]:
    """How sure each term is, as the standard deviation of its logarithm."""
    return {**SPREADS, "activations": GUESSED_ACTIVATIONS} if profile.guessed else SPREADS


def predict(candidate: Candidate, profile: Profile, machine: Machine) -> Forecast:
    """The peak memory of a rank in bytes, taken apart."""
    return forecast("peak memory", memory_terms(Knobs.of([candidate]), profile, machine), spreads(profile))
