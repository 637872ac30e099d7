"""Effects of degrees on a rank: its share of the model and of the work, and the messages within its groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from autotune.forecast.communication import in_groups_s, waiting_s
from autotune.forecast.knobs import Knobs
from autotune.forecast.memory import SPREADS as MEMORY_SPREADS
from autotune.forecast.memory import at_peak, memory_phases
from autotune.forecast.step_time import SPREADS as TIME_SPREADS
from autotune.forecast.step_time import WITHIN_A_STEP, step_time_terms
from autotune.space.candidate import Candidate
from autotune.trial.profile import Floats, Machine, Pass, Profile

# Of the 34 s b h bytes of a layer's activations, 10 belong to the residual stream, which tensor groups hold whole
# (Korthikanti et al., 2205.05198); of a recomputed layer its input, too.
WHOLE_ACTIVATIONS, WHOLE_RECOMPUTED = 10 / 34, 0.6
# All-reduces of the hidden states in a layer: one for attention and one for the MLP, forward and backward.
ALL_REDUCES_A_LAYER = 4
# All-to-alls of a layer's attention: queries, keys, values and the result, forward and backward.
EXCHANGES_A_LAYER = 8

# All-to-alls of a layer's experts: tokens to their experts and back, forward and backward.
EXPERT_EXCHANGES_A_LAYER = 4
# Sharded over this many ranks, a tensor takes no memory.
MANY_RANKS = 2**40

# What a pipeline sends for each micro-batch: activations forward, and their gradient back.
SENDS_A_MICRO_BATCH = 2
# Parts of a step that a stage does for each micro-batch, and waits for while the pipeline fills and drains.
OF_MICRO_BATCHES = ("compute", "traffic", "recompute", "launches", "input")

Terms = dict[str, Floats]


class Split(NamedTuple):
    """Degrees of a candidate, and the micro-batches whose activations the first stage of its pipeline holds at once."""

    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    in_flight: int = 1
    experts: int = 1

    @classmethod
    def of(cls, candidate: Candidate) -> "Split":
        """The degrees of a candidate; a stage of p holds up to p micro-batches (1F1B)."""
        stages = candidate.pipeline_degree
        in_flight = min(stages, candidate.gradient_accumulation_steps)
        return cls(candidate.tensor_degree, candidate.sequence_degree, stages, in_flight, candidate.expert_degree)


def cost_terms(
    candidates: Sequence[Candidate], profile: Profile, machine: Machine, base: Mapping[str, Any] | None = None
) -> tuple[Terms, Terms]:
    """Bytes of a rank at its peak, and seconds of an optimizer step, by part; candidates may have any degrees.

    A tensor group of t ranks holds one copy of the model: each rank has 1 / t of the layers' weights, gradients and
    states, of their work, and of all activations but the residual stream, among N / t data-parallel ranks. A sequence
    group of s ranks has whole weights, 1 / s of the tokens, and shards over all N ranks. A stage of p has 1 / p of all
    of it, holds the activations of up to p of the m micro-batches of a step, and is idle for p - 1 of m + p - 1 turns.
    An expert group of e ranks holds each expert once: a rank has 1 / e of them, shards these over N / e ranks, and so
    saves of what ZeRO does not shard.
    """
    by_degree: dict[Split, list[int]] = {}
    for row, candidate in enumerate(candidates):
        by_degree.setdefault(Split.of(candidate), []).append(row)
    memory: Terms = {name: np.zeros(len(candidates)) for name in MEMORY_SPREADS}
    time: Terms = {name: np.zeros(len(candidates)) for name in TIME_SPREADS}
    for split, own_rows in by_degree.items():
        knobs = Knobs.of([candidates[row] for row in own_rows], base)
        own, there = _of_a_rank(profile, machine, split)
        phases, times = memory_phases(knobs, own, there), step_time_terms(knobs, own, there)
        experts = min(split.experts, there.world_size)  # a lone rank holds them all, whatever was asked for
        if experts > 1 and profile.n_expert:
            phases, times = _with_experts(knobs, own, there, experts, (phases, times))
        held = at_peak(phases, guessed=own.guessed)
        turns = 1.0 + (split.stages - 1) / knobs.accumulation
        times |= {name: times[name] * turns for name in OF_MICRO_BATCHES}
        # A separate term: what trials show of ZeRO's messages says little of those within groups.
        times["groups"] = times["groups"] + _within_groups_s(knobs, profile, machine, split)
        for whole, part in ((memory, held), (time, times)):
            for name, values in part.items():
                whole[name][own_rows] = values
    return memory, time


def held_share(profile: Profile, tensor: int) -> float:
    """Share of the parameters that a rank of a tensor group holds: the layers are split, and with them what is tied."""
    outside = 1.0 - profile.block_share
    # The head is split, embeddings that are not tied to it stay whole.
    parted = profile.block_share + outside * (1.0 if profile.n_tied else 0.5)
    return 1.0 - parted + parted / tensor


def _of_a_rank(profile: Profile, machine: Machine, split: Split) -> tuple[Profile, Machine]:
    """The workload and the machine as a rank of these groups finds them."""
    tensor, sequence, stages, in_flight, _ = split
    if tensor == sequence == stages == 1:
        return profile, machine
    held = held_share(profile, tensor) / stages
    work = held / sequence
    kept = (WHOLE_ACTIVATIONS + (1 - WHOLE_ACTIVATIONS) / tensor) / sequence * in_flight / stages
    again = (WHOLE_RECOMPUTED + (1 - WHOLE_RECOMPUTED) / tensor) / sequence * in_flight / stages
    own = replace(
        profile,
        n_parameters=_share(profile.n_parameters, held),
        n_trainable=_share(profile.n_trainable, held),
        quantized=_share(profile.quantized, held),
        flops_per_sample=profile.flops_per_sample * work,
        activation_bytes_per_sample=profile.activation_bytes_per_sample * kept,
        checkpointed_bytes_per_sample=profile.checkpointed_bytes_per_sample * again,
        # A stage has fewer tensors, not smaller ones.
        sizes=tuple(
            (max(1, _share(size, held * stages)), max(1, _share(count, 1 / stages))) for size, count in profile.sizes
        ),
        n_frozen=_share(profile.n_frozen, 1 / stages),
        largest_module=_share(profile.largest_module, held * stages),
        passes={
            name: replace(_pass(each, kept if name.endswith("/0") else again, work, held), n_ops=each.n_ops / stages)
            for name, each in profile.passes.items()
        },
    )
    copies = max(1, machine.world_size // (tensor * stages))
    # The ranks of a stage are neighbours, those of a tensor group too.
    per_node = min(machine.ranks_per_node // tensor, copies) if machine.ranks_per_node else 0
    there = replace(
        machine,
        world_size=copies,
        ranks_per_node=max(1, per_node) if machine.ranks_per_node else 0,
        # As many groups as a tensor group has ranks send between nodes at once.
        node_bytes_per_s=machine.node_bytes_per_s / tensor,
    )
    return own, there


def _share(count: int, share: float) -> int:
    return round(count * share)


def _pass(whole: Pass, kept: float, work: float, held: float) -> Pass:
    def scaled(pair: tuple[float, float], by: float) -> tuple[float, float]:
        return pair[0] * by, pair[1] * by

    return replace(
        whole,
        moments=tuple((constant * kept, slope * kept, elements * held) for constant, slope, elements in whole.moments),
        kept_bytes=scaled(whole.kept_bytes, kept),
        largest_bytes=scaled(whole.largest_bytes, kept),
        flops=scaled(whole.flops, work),
        moved_bytes=scaled(whole.moved_bytes, kept),
    )


def _within_groups_s(knobs: Knobs, profile: Profile, machine: Machine, split: Split) -> Floats:
    """Seconds that messages take within the groups of a copy of the model, in an optimizer step.

    A message is the hidden states of a micro-batch, b s h values. Recomputation runs the forward's half once more.
    """
    tensor, sequence, stages, _, experts = split
    layers = float(max(profile.n_blocks, 1))
    # Passes through each layer in a step.
    passes = knobs.accumulation * (1.0 + 0.5 * knobs.recomputed_share(profile.n_blocks))
    message = knobs.micro * profile.sequence * profile.width * np.where(knobs.precision != "fp32", 2.0, 4.0)
    slow = WITHIN_A_STEP.get(machine.accelerator, 1.3)
    wait_s = waiting_s(machine)

    def exchanged_s(ranks: int, calls: Floats, n_bytes: Floats) -> Floats:
        """All-to-alls in a group; their messages wait together, the hops of a ring one after the other."""
        links = _between(machine, ranks)
        wire_s = slow * in_groups_s(links, calls * n_bytes, np.full(len(calls), float(ranks)))
        return wire_s + ((ranks - 1) * links.link_alpha_s + wait_s) * calls

    total = np.zeros(len(knobs.micro))
    if tensor > 1:
        calls = ALL_REDUCES_A_LAYER * layers * passes
        # An all-reduce is two all-gathers' worth of bytes and hops.
        wire_s = 2.0 * slow * in_groups_s(machine, calls * message, np.full(len(calls), float(tensor)))
        total = total + wire_s + 2.0 * (tensor - 1) * (machine.link_alpha_s + wait_s) * calls
    if sequence > 1:
        total = total + exchanged_s(sequence, EXCHANGES_A_LAYER * layers * passes, message / sequence)
    if stages > 1:
        sends = SENDS_A_MICRO_BATCH * (knobs.accumulation + stages - 1)
        links = _between(machine, machine.world_size)  # stages stand one machine after the other
        total = total + (slow * message / links.link_bytes_per_s + links.link_alpha_s + wait_s) * sends
    if experts > 1:
        calls = EXPERT_EXCHANGES_A_LAYER * float(profile.expert_layers) * passes
        total = total + exchanged_s(experts, calls, message * profile.experts_per_token)
    return total


def _with_experts(
    knobs: Knobs, profile: Profile, machine: Machine, degree: int, whole: tuple[Mapping[str, Terms], Terms]
) -> tuple[dict[str, Terms], Terms]:
    """Memory by instant and time of a rank that holds 1 / e of the experts, from those of one that holds all.

    What ZeRO shards is P / N either way, as each expert is sharded over N / e ranks; what it does not shard has
    (1 - 1 / e) Pe elements less. The experts' gradients are reduced over N / e ranks.
    """
    P, N, e = float(profile.n_parameters), float(machine.world_size), float(degree)
    gone = round(profile.n_expert * (1 - 1 / e))
    own = replace(profile, n_parameters=profile.n_parameters - gone, n_trainable=max(0, profile.n_trainable - gone))
    apart = replace(machine, world_size=MANY_RANKS, ranks_per_node=0)
    unsharded, left = (memory_phases(knobs, each, apart) for each in (profile, own))
    memory = {
        phase: {
            name: np.maximum(0.0, term - unsharded[phase][name] + left[phase][name]) for name, term in terms.items()
        }
        for phase, terms in whole[0].items()
    }
    reduced = (N - 1) / N * (P - profile.n_expert) + (N - e) / N * profile.n_expert / e
    share: Terms = {
        "optimizer": np.where(knobs.stage == 0, own.n_parameters / P, 1.0),
        "communication": np.full(len(knobs.micro), reduced / ((N - 1) / N * P)),
    }
    return memory, {name: terms * share.get(name, 1.0) for name, terms in whole[1].items()}


def _between(machine: Machine, span: int) -> Machine:
    """The links of a group of `span` ranks, which may span nodes: then each rank has its share of a node's link."""
    per_node = machine.ranks_per_node or machine.world_size
    if min(span, machine.world_size) <= per_node:
        return machine
    return replace(
        machine,
        link_bytes_per_s=min(machine.link_bytes_per_s, machine.node_bytes_per_s / per_node),
        link_alpha_s=machine.node_alpha_s,
    )
