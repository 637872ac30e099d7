"""Time of an optimizer step: compute, recomputation, communication by volume and messages, optimizer, offload, launches."""

from __future__ import annotations

import numpy as np

from autotune.candidate import Candidate
from autotune.predict.profile import Floats, Forecast, Knobs, Machine, Profile, forecast

# Standard deviation of the logarithm of each term, before anything was measured.
SPREADS = {
    "compute": 0.25,
    "recompute": 0.3,
    "communication": 0.5,
    "messages": 0.7,
    "optimizer": 0.4,
    "offload": 0.6,
    "launches": 0.7,
}
# Bytes that Adam moves per parameter (read gradient, master, two moments; write master, two moments), and the 16-bit copy.
ADAM_BYTES, COPY_BYTES = 28.0, 2.0
# What a collective cannot hide behind backward, however much there is to hide it behind.
EXPOSED_AT_LEAST = 0.1


def step_time_terms(knobs: Knobs, profile: Profile, machine: Machine) -> dict[str, Floats]:
    """Seconds of an optimizer step, one column a term; the terms add up to the step.

    * compute: K micro-steps of FLOPs x (b + b_half) / rate: a small batch does not fill the device;
    * recompute: one more forward, a third of forward and backward, of the blocks that are recomputed;
    * communication, elements per rank and step: stages 0 and 1 reduce 2 P at the boundary only, stage 2 (K + 1) P, stage 3
      gathers twice and reduces at each micro-step, 3 K P; times (N - 1) / N; with overlap what backward does not hide;
    * messages: alpha for each bucket of each collective, 2 (N - 1) hops for an all-reduce (ring), half for its halves;
    * optimizer: 28 bytes a parameter (and 2 of the 16-bit copy) over the memory bandwidth, from stage 1 on over N ranks.
    """
    P, Pt, N = float(profile.n_parameters), float(profile.n_trainable), float(machine.world_size)
    b, K, stage = knobs.micro, knobs.accumulation, knobs.stage
    rates = np.array([machine.flops.get(str(name), machine.flops["fp32"]) for name in knobs.precision])
    compute = K * profile.flops_per_sample * (b + machine.half_samples) / rates
    recompute = compute * knobs.recomputed_share(profile.n_blocks) * profile.block_share / 3.0
    launches = K * machine.launch_s * max(profile.n_blocks, 1) * (1.0 + 0.5 * (stage == 3))

    ring = (N - 1.0) / N
    gather_bytes = np.where(knobs.quantized_weights > 0, 1.0, knobs.weight_bytes)
    gathers = np.where(knobs.hpz > 1, 1.0, 2.0)
    reduced = np.where(stage >= 2, K, np.where(stage == 1, 1.0, 2.0)) * Pt * knobs.wire_bytes
    gathered = np.where(stage == 3, gathers * K * P * gather_bytes, np.where(stage >= 1, Pt * knobs.weight_bytes, 0.0))
    wire_s = ring * (reduced + gathered) / machine.link_bytes_per_s
    hidden = np.minimum((1 - EXPOSED_AT_LEAST) * wire_s, 0.6 * np.where(stage >= 2, compute, compute / K)) * knobs.overlap
    communication = wire_s - hidden

    calls = np.ceil(Pt / np.where(stage == 0, 5e8, np.maximum(knobs.reduce_bucket, 1.0)))
    hops = np.where(stage == 0, 2.0, 1.0) * (N - 1.0)
    per_block = np.where(stage == 3, gathers * K * max(profile.n_blocks, 1), np.where(stage >= 1, 1.0, 0.0))
    messages = machine.link_alpha_s * (calls * hops * np.where(stage >= 2, K, 1.0) + per_block * (N - 1.0))

    shard = Pt / np.where(stage >= 1, N, 1.0)
    sixteen = knobs.weight_bytes == 2.0
    moved = ADAM_BYTES + np.where(sixteen, COPY_BYTES, 0.0)
    bandwidth = np.where(knobs.offload_optimizer > 0, machine.host_memory_bytes_per_s, machine.memory_bytes_per_s)
    optimizer = moved * shard / bandwidth
    # Gradients to the host and weights back, once a step; parameters in for forward and backward of each micro-step.
    offload = (
        knobs.offload_optimizer * 2.0 * knobs.weight_bytes * shard / machine.host_bytes_per_s
        + knobs.offload_param * 2.0 * K * knobs.weight_bytes * P / N / machine.host_bytes_per_s
    )
    return {
        "compute": compute,
        "recompute": recompute,
        "communication": communication,
        "messages": messages,
        "optimizer": optimizer,
        "offload": offload,
        "launches": launches,
    }


def predict(candidate: Candidate, profile: Profile, machine: Machine) -> Forecast:
    """The time of an optimizer step in seconds, taken apart."""
    return forecast("step time", step_time_terms(Knobs.of([candidate]), profile, machine), SPREADS)
