"""Time of an optimizer step by terms: compute, traffic, recomputation, communication, optimizer, offload, input."""

from dataclasses import replace

import numpy as np

from autotune.forecast.communication import collective_s, in_groups_s
from autotune.forecast.knobs import Knobs
from autotune.forecast.memory import (
    ALLREDUCE_ELEMENTS,
    PACKED_BYTES,
    SCALE_BYTES,
    bf16_optimizer,
    kept_elements,
    second_share,
    small_elements,
    staying_share,
    stored_elements,
    wire_bytes,
)
from autotune.trial.profile import Floats, Machine, Profile

# Standard deviation of the logarithm of each term, before anything was measured.
SPREADS = {
    "compute": 0.25,
    "traffic": 0.5,
    "recompute": 0.3,
    "communication": 0.5,
    "messages": 0.7,
    "groups": 0.7,
    "optimizer": 0.4,
    "offload": 0.6,
    "launches": 0.7,
    "bookkeeping": 0.5,
    "partitioning": 0.5,
    "input": 0.3,
}
# The same of what Python does for each operation and parameter, where these were not counted.
UNCOUNTED_SPREAD = 1.5
# An optimizer reads gradient and weight and writes the weight (4 bytes each), and reads and writes its states; and the
# 16-bit copy.
STEP_BYTES, COPY_BYTES = 12.0, 2.0
# What a step of ZeRO moves besides, for each parameter of a shard: the gradient's norm in double precision, the gradient
# flattened and cast, the weight copied back (stage_1_and_2.py, step); with weights of 2 bytes, and 36 with those of 4.
SHARD_BYTES = 34.0
# How often stages 1 and 2 move the gradients through memory where they are reduced: into the bucket, divided, out of it.
# Timed at the optimizer's rate.
BUCKET_PASSES = 3.0
# What a collective cannot hide behind backward, however much there is to hide it behind.
EXPOSED_AT_LEAST = 0.1
# Factor by which a collective is slower within a step than alone: NCCL by a third (vTrain), gloo since it runs on
# the ranks' cores.
WITHIN_A_STEP = {"cpu": 2.0, "cuda": 1.3}
# The same for links between nodes, which no core of a rank drives.
BETWEEN_NODES = {"cpu": 1.0, "cuda": 1.3}
# What ZeRO does in Python, in operations of the host: at stages 1 and 2 for each trained tensor of parameters wherever
# gradients are reduced (as timed: two networks of 1.6 million parameters in 10 and in 50 tensors), at stage 3 for each
# tensor in every micro-step (fetched, released, split again) and once more in the step (counted on a small transformer
# of two ranks, timed on one).
REDUCE_OPS, PARTITION_OPS, PARTITION_OPS_ALONE = 8.0, 180.0, 110.0
# Operations of an optimizer's step for each trained tensor of parameters: of DeepSpeed's for 16-bit weights at stage 0
# (overflow, norm, copies of gradients and weights one by one), of ZeRO's for each in a rank's shard with weights of 16
# bits (overflow, norm) and of 32 (norm); and of BF16_Optimizer, which casts and adds a gradient in each micro-step (counted
# without views on networks of 14 and of 26 tensors, one and two ranks; DeepSpeed 0.19.8).
STEP_OPS_16, STEP_OPS_ZERO_16, STEP_OPS_ZERO_32, SUM_OPS = 20.0, 15.0, 2.0, 2.0
# Of a block whose operations were not counted.
TENSORS_A_BLOCK, OPS_A_BLOCK = 12, 120


def step_time_terms(knobs: Knobs, profile: Profile, machine: Machine) -> dict[str, Floats]:
    """Seconds of an optimizer step, one column a term; the terms add up to the step.

    * compute: K micro-steps of FLOPs / rate; where the operations were not counted, x (b + b_half) / b: a small batch
      does not fill the device;
    * traffic: what operations read and write over the memory bandwidth, and the weights three times a micro-step,
      those of 4 bits besides as they are written out for each pass;
    * recompute: what a forward of the recomputed blocks adds to both;
    * communication, elements per rank and step: stage 0 all-reduces 2 P at the boundary; stages 1 and 2 all-reduce too,
      where the ZeRO paper scatters (stage_1_and_2.py, allreduce_and_scatter), and gather the weights: 3 P at the
      boundary, (2 K + 1) P; stage 3 scatters at each micro-step, over gloo by an all-reduce, and gathers up to twice
      (`gathered_elements`): 2 K P to 4 K P; over the links as `collective_s` says, on one node (N - 1) / N of it; with overlap what
      backward does not hide;
    * messages: the latency of each bucket of each collective, on one node 2 (N - 1) hops for an all-reduce, half for
      its halves;
    * optimizer: 12 bytes a parameter and twice its states (28 for Adam) over its rate; from stage 1 on over N ranks, with
      34 bytes more for what ZeRO does to its shard;
    * offload: what crosses between device and host, see `_offloaded_bytes`;
    * launches: a fixed cost of each operation; the same of what ZeRO does for each tensor in Python, at stages 1 and 2
      (bookkeeping) and at stage 3 (partitioning); on a GPU what the device's own work does not hide; to the bookkeeping
      the step's own operations for each tensor, and ZeRO's copies into buckets and out of them are added;
    * input: what drawing the samples takes.
    """
    Pt, N = float(profile.n_trainable), float(machine.world_size)
    b, K, stage = knobs.micro, knobs.accumulation, knobs.stage
    compute, traffic, recompute, launches = _micro_step(knobs, profile, machine)
    communication, messages = _between_ranks(knobs, profile, machine, compute)

    shard = Pt / np.where(stage >= 1, N, 1.0)
    moved = STEP_BYTES + 2.0 * profile.optimizer_bytes + np.where(knobs.weight_bytes == 2.0, COPY_BYTES, 0.0)
    moved = moved + np.where(stage >= 1, SHARD_BYTES, 0.0)
    rate = machine.optimizer_bytes_per_s or machine.memory_bytes_per_s
    in_host = knobs.offload_optimizer - staying_share(knobs, profile, machine.world_size)
    optimizer = moved * shard * (in_host / machine.host_memory_bytes_per_s + (1.0 - in_host) / rate)
    of_all, of_group = gathered_elements(knobs, profile)  # for which offloaded parameters come in
    offload = (
        knobs.offload_optimizer * _offloaded_bytes(knobs) * shard / machine.host_bytes_per_s
        + knobs.offload_param
        * knobs.weight_bytes
        * (of_all / N + of_group * second_share(knobs))
        / machine.host_bytes_per_s
    )
    return {
        "compute": K * compute,
        "traffic": K * traffic,
        "recompute": K * recompute,
        "communication": communication,
        "messages": messages,
        "groups": np.zeros(len(messages)),  # of degrees; see `forecast.degrees`
        "optimizer": optimizer,
        "offload": offload,
        **_on_the_host(knobs, profile, machine, K * (compute + traffic + recompute), launches, optimizer),
        "input": K * b * profile.input_s_per_sample,
    }


def spreads(profile: Profile) -> dict[str, float]:
    """The standard deviation of the logarithm of each term, before anything was measured."""
    if profile.passes:
        return SPREADS
    return SPREADS | dict.fromkeys(("launches", "bookkeeping", "partitioning"), UNCOUNTED_SPREAD)


def _offloaded_bytes(knobs: Knobs) -> Floats:
    """Bytes that cross between device and host in a step for each parameter of an offloaded optimizer's shard.

    The gradient in the type of the master weights, and the weight back. Gradients are summed up on the device, so that their
    sums come to it and go again: at stage 3 in each micro-step, also in a lone one (zero/stage3.py, `partition_grads`); at stage 2 in
    each but the first, which only sends, and at stage 1 where they are reduced, if there are several (zero/stage_1_and_2.py,
    `async_accumulate_grad_in_cpu_via_gpu`). Sums in another type than the weights stay on the device at stages 1 and 2.
    """
    K, w, g, several = knobs.accumulation, knobs.weight_bytes, knobs.gradient_bytes, knobs.accumulation > 1
    at_2 = np.where(several & (g == w), w * np.where(knobs.stage == 2, 2.0 * K - 1.0, 2.0), 0.0)
    sums = np.where(knobs.stage == 3, 2.0 * K * g, at_2)
    return sums + np.where(knobs.master_16 > 0, 2.0, 4.0) + w


def _on_the_host(
    knobs: Knobs, profile: Profile, machine: Machine, device_s: Floats, launches_s: Floats, optimizer_s: Floats
) -> dict[str, Floats]:
    """Seconds of an optimizer step that go to launches, bookkeeping and partitioning; see `step_time_terms`.

    Args:
        device_s: Seconds of the device's own work in the micro-steps of a step.
        launches_s: Seconds of the launches in a micro-step.
        optimizer_s: Seconds of the optimizer's own work.
    """
    K, stage = knobs.accumulation, knobs.stage
    tensors = sum(count for _, count in profile.sizes) or TENSORS_A_BLOCK * max(profile.n_blocks, 1)
    trained = max(tensors - profile.n_frozen, 0)
    # Through buckets; stage 3 reduces otherwise. What a lone rank does there and in its step is, uncounted, part of `launch_s`.
    counted = bool(profile.passes)
    reductions = np.where(stage == 2, K, stage == 1) * (counted or machine.world_size > 1)
    op_s = machine.op_s if counted else machine.launch_s / OPS_A_BLOCK
    host_op_s = machine.host_op_s if counted and machine.host_op_s else op_s
    # Other code of ZeRO, so other terms: what trials of stages 1 and 2 teach of theirs must not pass for stage 3's.
    bookkeeping = reductions * REDUCE_OPS * trained * host_op_s
    partition_ops = PARTITION_OPS if machine.world_size > 1 else PARTITION_OPS_ALONE
    partitioning = np.where(stage == 3, (K + 1.0) * partition_ops, 0.0) * tensors * host_op_s
    sixteen = knobs.weight_bytes == 2.0
    of_zero = np.where(sixteen, STEP_OPS_ZERO_16, STEP_OPS_ZERO_32) / float(machine.world_size)
    of_zero = np.where(stage == 3, 0.0, np.where(bf16_optimizer(knobs), K * SUM_OPS, of_zero))
    in_step = np.where(stage >= 1, of_zero, np.where(sixteen, STEP_OPS_16, 0.0)) * trained * op_s * counted
    if machine.accelerator != "cpu":  # the host runs ahead of the device
        host = K * launches_s + bookkeeping + partitioning
        seen = np.maximum(host - device_s, EXPOSED_AT_LEAST * host) / np.maximum(host, 1e-12)
        launches_s, bookkeeping, partitioning = launches_s * seen, bookkeeping * seen, partitioning * seen
        # The step begins with a norm that waits for the device, so that only the optimizer's own work hides its launches.
        in_step = np.maximum(in_step - optimizer_s * (1.0 - knobs.offload_optimizer), EXPOSED_AT_LEAST * in_step)
    rate = machine.optimizer_bytes_per_s or machine.memory_bytes_per_s
    copies = reductions * BUCKET_PASSES * knobs.weight_bytes * float(profile.n_trainable) / rate
    return {"launches": K * launches_s, "bookkeeping": bookkeeping + in_step + copies, "partitioning": partitioning}


def _between_ranks(knobs: Knobs, profile: Profile, machine: Machine, compute: Floats) -> tuple[Floats, Floats]:
    """Seconds on the links that backward does not hide, and the latencies of all messages."""
    Pt, K, stage = float(profile.n_trainable), knobs.accumulation, knobs.stage
    sent = wire_bytes(knobs, machine)
    # Stage 3 gathers weights in the type of their layers, too (zero/partition_parameters.py, `get_allgather_dtype`).
    whole_bytes = np.where(knobs.arithmetic == "autocast", sent, knobs.weight_bytes)
    gather_bytes = np.where(knobs.quantized_weights > 0, 1.0, whole_bytes)
    of_all, of_group = gathered_elements(knobs, profile)
    reductions = np.where(stage >= 2, K, 1.0)
    buckets = np.ceil(Pt / np.where(stage == 0, ALLREDUCE_ELEMENTS, np.maximum(knobs.reduce_bucket, 1.0)))
    scatters = (stage == 3) & (machine.accelerator != "cpu")
    links = _within_a_step(machine)
    reduce_s, reduce_latency_s = collective_s(
        links, reductions * Pt * sent, reductions * buckets, halves=np.where(scatters, 1.0, 2.0)
    )
    # Each tensor by itself, its numbers and their scales: first within the nodes, then their sums between them, in 4 bits
    # (runtime/comm/coalesced_collectives.py, `all_to_all_quant_reduce`), as a hierarchical half moves it.
    tensors = float(sum(count for _, count in profile.sizes) or max(profile.n_blocks, 1))
    exchange_s, exchange_latency_s = collective_s(
        replace(links, algorithm="hierarchical"), K * Pt * 0.5, 2.0 * K * tensors, halves=np.ones(len(K))
    )
    exchanged = (stage == 3) & (knobs.quantized_gradients > 0) & (0 < machine.ranks_per_node < machine.world_size)
    reduce_s = np.where(exchanged, exchange_s, reduce_s)
    reduce_latency_s = np.where(exchanged, exchange_latency_s, reduce_latency_s)
    gathered = np.where(stage == 3, of_all * gather_bytes, np.where(stage >= 1, Pt * knobs.weight_bytes, 0.0))
    per_block = np.where(
        stage == 3, of_all / stored_elements(knobs, profile) * max(profile.n_blocks, 1), np.where(stage >= 1, 1.0, 0.0)
    )
    gather_s, gather_latency_s = collective_s(links, gathered, per_block, halves=np.ones(len(K)))
    wire_s, messages = reduce_s + gather_s, reduce_latency_s + gather_latency_s
    wire_s = wire_s + np.where(stage == 3, in_groups_s(links, of_group * gather_bytes, knobs.hpz), 0.0)
    hidden = np.minimum((1 - EXPOSED_AT_LEAST) * wire_s, 0.6 * np.where(stage >= 2, K, 1.0) * compute) * knobs.overlap
    return wire_s - hidden, messages


def gathered_elements(knobs: Knobs, profile: Profile) -> tuple[Floats, Floats]:
    """Elements that stage 3 gathers in an optimizer step over all ranks, and within the groups of the second copy (hpZ).

    Each micro-step gathers what is split for forward, and for backward what was not kept whole until then (`kept_elements`).
    Small parameters are gathered once, after the step. The second copy is made where a weight is released for the first
    time after a step, and is read from then on, in forward too (zero/partition_parameters.py; as counted with two ranks).
    """
    K, small = knobs.accumulation, small_elements(knobs, profile)
    split = np.maximum(0.0, stored_elements(knobs, profile) - small)
    every = K * (2.0 * split - kept_elements(knobs, profile))
    of_group = np.where(knobs.hpz > 1, every - split, 0.0)
    return every - of_group + small, of_group


def _within_a_step(machine: Machine) -> Machine:
    """The links as collectives find them while everything else goes on."""
    own, between = (
        table["cpu" if machine.accelerator == "cpu" else "cuda"] for table in (WITHIN_A_STEP, BETWEEN_NODES)
    )
    return replace(
        machine, link_bytes_per_s=machine.link_bytes_per_s / own, node_bytes_per_s=machine.node_bytes_per_s / between
    )


def _rates(knobs: Knobs, profile: Profile, machine: Machine) -> Floats:
    """FLOP/s of products; of those in fp32 convolutions have the rate of TensorFloat-32."""
    rates = np.array([machine.flops.get(str(name), machine.flops["fp32"]) for name in knobs.products])
    plain, tf32 = profile.passes.get("fp32/0"), machine.flops.get("tf32")
    if plain is None or tf32 is None:
        return rates
    mixed = 1.0 / ((1.0 - plain.tf32_share) / rates + plain.tf32_share / tf32)
    return np.where((knobs.products == "fp32") & (plain.tf32_share > 0), mixed, rates)


def _micro_step(knobs: Knobs, profile: Profile, machine: Machine) -> tuple[Floats, Floats, Floats, Floats]:
    """Compute, traffic, recomputation and launches of one micro-step."""
    rates = _rates(knobs, profile, machine)
    share = knobs.recomputed_share(profile.n_blocks)
    usual = profile.usual_share(knobs.micro, knobs.packed, knobs.limits)
    if not profile.passes:
        compute = profile.flops_per_sample * (knobs.micro + machine.half_samples) / rates
        compute = compute * usual
        launches = np.full(len(rates), machine.launch_s * max(profile.n_blocks, 1))
        return compute, np.zeros(len(rates)), compute * share * profile.block_share / 3.0, launches
    plain, more = np.zeros((3, len(rates))), np.zeros((3, len(rates)))
    arithmetic = knobs.arithmetic
    for name in dict.fromkeys(arithmetic.tolist()):
        rows = np.flatnonzero(arithmetic == name)
        first, second = (np.array(profile.work(name, every, knobs.micro[rows])) for every in (0, 1))
        plain[:, rows], more[:, rows] = first, (second - first) * share[rows]
    plain[:2], more[:2] = plain[:2] * usual, more[:2] * usual
    weights = 3.0 * knobs.weight_bytes * profile.n_parameters
    # Weights of 4 bits are read and written out in 16 for each pass through them; frozen ones have no pass for gradients.
    weights = weights + (2.0 + share) * (PACKED_BYTES + SCALE_BYTES + knobs.weight_bytes) * profile.quantized
    bandwidth = machine.memory_bytes_per_s
    compute, traffic, launches = plain[0] / rates, (plain[1] + weights) / bandwidth, plain[2] * machine.op_s
    return compute, traffic, more[0] / rates + more[1] / bandwidth + more[2] * machine.op_s, launches
