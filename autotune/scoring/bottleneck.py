"""What a trial's step is spent on, which part of that is lost, and which knob the study's other trials say would win it back.

A step was taken apart: data, forward, backward, optimizer step, each synchronised, on every rank, and what collectives
took told apart from them. What was not timed by itself is estimated from these, and says so; where steps were traced,
the trace says it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.scoring.effects import Effects
from autotune.scoring.step_parts import Advice, Diagnosis, Evidence, Part, StepObservation
from autotune.space.candidate import differing

PHASES, COMPUTING = ("data", "forward", "backward", "step"), ("forward", "backward")
# Shares of a step from which on a part is called the bottleneck: of what is estimated more is asked than of what is
# measured.
BOUND_FROM = {
    "input pipeline": 0.1,
    "stragglers": 0.15,
    "recomputation": 0.15,
    "communication": 0.2,
    "optimizer": 0.25,
    "launch overhead": 0.3,
    "memory bandwidth": 0.35,
}
# With so much of its memory in use a device has no room for a larger micro-batch.
FULL = 0.85
NO_ROOM = ("oom", "predicted_oom")
# What is avoided with more memory: less recomputed, or a larger micro-batch, which keeps the device busy.
AT_A_PRICE = ("recomputation", "launch overhead")
# FLOP/s (dense, 16 bits) and bytes/s by a part of the device's name, the first that fits; makers' figures.
PEAKS = {
    "H200": (989e12, 4.8e12), "H100 PCIe": (756e12, 2.0e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12), "V100": (125e12, 0.9e12),
}  # fmt: skip
# Bytes that Adam moves for each parameter: gradient, master weight and two moments read, the last three written.
ADAM_BYTES = 28.0
# Which knobs to look at for each bottleneck.
KNOBS: dict[str, tuple[str, ...]] = {
    "input pipeline": (),
    "stragglers": (),
    "communication": (
        "gradient_accumulation_steps", "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm", "zero_stage",
        "communication_data_type", "micro_batch_size",
    ),
    "optimizer": ("zero_stage", "gradient_accumulation_steps", "offload_optimizer", "bf16.bf16_optimizer_states", "micro_batch_size"),
    "recomputation": ("checkpoint_every",),
    "launch overhead": ("micro_batch_size", "zero_stage"),
    "memory bandwidth": ("precision", "micro_batch_size", "checkpoint_every"),
    "compute": ("precision", "checkpoint_every", "micro_batch_size"),
    "memory capacity": ("zero_stage", "checkpoint_every", "precision", "micro_batch_size"),
}  # fmt: skip
OUTSIDE = {
    "input pipeline": "No DeepSpeed knob helps: load in the background (DataLoader num_workers), or prepare the samples beforehand.",
    "stragglers": "No DeepSpeed knob helps: see what else runs on that rank's device or cores, whether it is throttled, and its data.",
}


def diagnose(evidence: Evidence, others: Sequence[StepObservation], effects: Effects | None = None) -> Diagnosis:
    """Takes a trial's step apart.

    Args:
        evidence: The trial.
        others: The study's other trials.
        effects: What the knobs do to throughput over the whole study, where nothing else tells.
    """
    memory, notes = _memory(evidence, others)
    ranks = _typical(evidence.ranks)
    total = max((sum(phases.values()) for phases in ranks.values()), default=0.0)
    if total <= 0:
        why = "the phases of its step were not kept (of a trial of an earlier version, say): --profile runs it again and takes them"
        unknown = [Part(name=name, seconds=None, share=None, known="not measured") for name in ("compute", *BOUND_FROM)]
        return Diagnosis(
            trial=evidence.seen.trial, bound_by="", parts=[*unknown, memory], advice=[], notes=[why, *notes]
        )
    parts = _parts(evidence, others, ranks)
    bound = worst = _worst(parts)
    if _no_room(worst, evidence, others, memory):
        bound = "memory capacity"
        notes.insert(0, f"{worst} takes the time, and what would avoid it does not fit the memory")
    notes += [*_between_ranks(ranks), *_hidden(evidence), *_rates(evidence, ranks)]
    # Ranks meet before each collective of the step that is taken apart; what that costs by itself is no part of other
    # steps.
    spent = total - min(phases.get("wait", 0.0) for phases in ranks.values())
    beside = evidence.beside_s or evidence.step_s
    if beside and abs(spent / beside - 1) > 0.25:
        notes.append(
            f"the step that was taken apart took {spent / beside:.2f} times the median step: read the shares as rough"
        )
    if bound in OUTSIDE:
        notes.insert(0, OUTSIDE[bound])
    known = sorted((part for part in parts if part.seconds is not None), key=lambda part: -(part.seconds or 0.0))
    unknown = [part for part in parts if part.seconds is None]
    return Diagnosis(
        trial=evidence.seen.trial,
        bound_by=bound,
        parts=[*known, *unknown, memory],
        advice=_advice(bound, evidence, others, effects),
        notes=notes,
    )


def _typical(measured: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[int, dict[str, float]]:
    """The median over the times that the trial was measured, so that one disturbed step decides nothing."""
    ranks = {rank for table in measured for rank, phases in table.items() if phases}
    found = {}
    for rank in sorted(ranks):
        tables = [table[rank] for table in measured if table.get(rank)]
        names = dict.fromkeys([*PHASES, *(name for table in tables for name in table)])
        found[rank] = {phase: statistics.median(table.get(phase, 0.0) for table in tables) for phase in names}
    return found


def _parts(
    evidence: Evidence, others: Sequence[StepObservation], ranks: Mapping[int, Mapping[str, float]]
) -> list[Part]:
    """The step part by part.

    * data, optimizer step and collectives were timed;
    * ranks met before each collective: what the others waited beyond what the slowest waited was lost to it;
    * forward and backward of a typical rank computed: a part of it recomputation, a part the fixed cost of operations,
      a part memory traffic, the rest arithmetic.
    """
    stage, every = (
        int(evidence.seen.candidate.get("zero_stage") or 0),
        int(evidence.seen.candidate.get("checkpoint_every") or 0),
    )

    def typical(*names: str) -> float:
        # Of two ranks the faster one: the lead of a slow one is a part of its own.
        return statistics.median_low(sum(phases.get(name, 0.0) for name in names) for phases in ranks.values())

    share = (-(-evidence.n_blocks // every) / evidence.n_blocks if evidence.n_blocks else 1.0 / every) if every else 0.0
    timed = any("recompute" in phases for phases in ranks.values())
    again = typical("recompute") if timed else min(share * typical("forward"), typical("backward"))
    computing = typical(*COMPUTING) - (0.0 if timed else again)
    split, how = _inside(evidence, others)
    lead, messages, between = _lost_between(evidence, ranks, typical("reduce", "gather"))
    missing = {
        "launch overhead": "takes a trace (--profile), or trials of the same precision with other micro-batches",
        "memory bandwidth": "takes a trace (--profile), or a profile of the model and the machine's rates",
    }
    found: list[tuple[str, float | None, str]] = [
        (
            "compute",
            computing * max(0.0, 1 - sum(split.values())),
            "measured: forward and backward" + (", without what follows" if split else ""),
        ),
        ("input pipeline", typical("data"), "measured"),
        ("stragglers", lead, between),
        (
            "recomputation",
            again,
            "measured" if timed else f"estimated: one block of {every} goes forward again" if every else "nothing",
        ),
        (
            "communication",
            messages,
            f"{between.partition(' (')[0]}{', with what stage 3 gathers' if stage == 3 else ''}",
        ),
        ("optimizer", typical("step"), "measured"),
        *(
            (name, computing * split[name] if name in split else None, how.get(name, why))
            for name, why in missing.items()
        ),
    ]
    whole = sum(seconds for _, seconds, _ in found if seconds) or 1.0
    return [
        Part(
            name=name,
            seconds=seconds,
            share=None if seconds is None else seconds / whole,
            known=known if seconds is not None else f"not measured: {known}",
        )
        for name, seconds, known in found
    ]


def _lost_between(
    evidence: Evidence, ranks: Mapping[int, Mapping[str, float]], messages: float
) -> tuple[float | None, float | None, str]:
    """Seconds lost to a slow rank and to the collectives themselves, and how that is known."""
    if evidence.world_size == 1:
        return 0.0, 0.0, "one rank"
    waits = {rank: phases["wait"] for rank, phases in ranks.items() if "wait" in phases}
    if not waits:
        return None, None, "the trial was made by an earlier version; --profile measures it again"
    if len(waits) == 1:
        return None, messages, "measured on the slowest rank alone: the trial's folder is gone"
    slow = min(waits, key=lambda rank: waits[rank])
    lead = statistics.median_high(wait for rank, wait in waits.items() if rank != slow) - waits[slow]
    total = max(sum(phases.values()) for phases in ranks.values())
    return lead, messages, "measured" + (f" (rank {slow} is the slowest)" if lead > 0.05 * total else "")


def _inside(evidence: Evidence, others: Sequence[StepObservation]) -> tuple[dict[str, float], dict[str, str]]:
    """Shares of forward and backward that are no arithmetic, and how each is known.

    A trace says what products and other operations took themselves; what lies between operations is the host's, as is
    what the shortest ones take. Else trials with other micro-batches say what does not grow with them, and the
    machine's rates what to expect.
    """
    traced = [each for each in evidence.traced.values() if each.spans_s.get("forward")]
    if traced:
        each = sorted(traced, key=lambda one: sum(one.spans_s.get(name, 0.0) for name in COMPUTING))[
            (len(traced) - 1) // 2
        ]
        own = {
            kind: sum(each.kinds_s.get(name, {}).get(kind, 0.0) for name in COMPUTING)
            for kind in ("products", "traffic", "messages")
        }
        busy = own["products"] + own["traffic"]  # the rest lies between operations, or in those that are too short
        span = max(sum(each.spans_s.get(name, 0.0) for name in COMPUTING) - own["messages"], busy, 1e-9)
        shares = {"launch overhead": (span - busy) / span, "memory bandwidth": own["traffic"] / span}
        return shares, {
            "launch overhead": "traced: between operations, and the shortest ones",
            "memory bandwidth": "traced: operations that are no products",
        }
    found, how = {}, {}
    if whole := sum(evidence.expected_s.values()):
        for name, term in (("launch overhead", "launches"), ("memory bandwidth", "traffic")):
            found[name], how[name] = evidence.expected_s.get(term, 0.0) / whole, "estimated from the machine's rates"
    overhead, known = _overhead(evidence, others)
    if overhead is not None:
        rest = 1 - found.get("launch overhead", 0.0)
        found = {name: value * (1 - overhead) / rest for name, value in found.items() if rest > 0} | {
            "launch overhead": overhead
        }
        how["launch overhead"] = known
    return found, how


def _overhead(evidence: Evidence, others: Sequence[StepObservation]) -> tuple[float | None, str]:
    """Share of forward that the micro-batch does not change: t(b) = a + c b over trials that differ in it, least squares."""
    own = evidence.seen

    def alike(seen: StepObservation) -> bool:
        return seen.candidate.get("precision") == own.candidate.get("precision") and (
            (seen.candidate.get("zero_stage") == 3) == (own.candidate.get("zero_stage") == 3)
        )

    points = []
    for seen in [own, *others]:
        micro, steps = seen.candidate.get("micro_batch_size"), seen.candidate.get("gradient_accumulation_steps", 1)
        if alike(seen) and micro and steps and seen.phases_s.get("forward"):
            points.append((float(micro), seen.phases_s["forward"] / float(steps)))
    sizes = {micro for micro, _ in points}
    if len(sizes) < 2 or max(sizes) < 2 * min(sizes) or len(points) < 4:
        return None, "takes trials of the same precision with other micro-batches"
    # By the median at each size; weighted by 1 / t, so that large micro-batches do not decide alone.
    times = [statistics.median(time for size, time in points if size == micro) for micro in sorted(sizes)]
    slope, _ = np.polyfit(sorted(sizes), times, 1, w=1 / np.array(times))
    slope = max(0.0, float(slope))
    fixed = max(0.0, float(np.average(np.array(times) - slope * np.array(sorted(sizes)), weights=1 / np.square(times))))
    at = fixed + slope * float(own.candidate["micro_batch_size"])
    share = min(1.0, fixed / at) if at > 0 else 0.0
    return share, f"estimated: what does not grow with the micro-batch over {len(points)} trials"


def _worst(parts: Sequence[Part]) -> str:
    """What loses most beyond what is worth the trouble."""
    arithmetic = next((part.share for part in parts if part.name == "compute"), None) or 0.0
    over = [
        part
        for part in parts
        if part.name in BOUND_FROM and part.share is not None and part.share >= BOUND_FROM[part.name]
    ]
    # Every model moves memory too; it is the bottleneck where it takes longer than the arithmetic.
    over = [part for part in over if part.name != "memory bandwidth" or (part.share or 0.0) > arithmetic]
    # Measured by what is worth the trouble: recomputing can be left off whole, of memory traffic little can be saved.
    return max(over, key=lambda part: (part.share or 0.0) / BOUND_FROM[part.name]).name if over else "compute"


def _no_room(worst: str, evidence: Evidence, others: Sequence[StepObservation], memory: Part) -> bool:
    """Whether memory alone stands in the way of what would lose less: the device is full, or what would was tried and did not fit."""
    tried = [seen.outcome for seen in _relief(worst, evidence.seen, others)]
    if worst not in AT_A_PRICE or "complete" in tried:
        return False
    full = bool(evidence.alloc_retries) or (memory.share is not None and memory.share >= FULL)
    return full or any(outcome in NO_ROOM for outcome in tried)


def _relief(worst: str, own: StepObservation, others: Sequence[StepObservation]) -> list[StepObservation]:
    """The trials that differ from this one only in what would lose less and take more memory."""

    def alike(seen: StepObservation, *but: str) -> bool:
        return not {*differing(own.candidate, seen.candidate)} - {*but}

    def recomputed(seen: StepObservation) -> float:
        every = int(seen.candidate.get("checkpoint_every") or 0)
        return 1 / every if every else 0.0

    match worst:
        case "recomputation":
            return [seen for seen in others if alike(seen, "checkpoint_every") and recomputed(seen) < recomputed(own)]
        case "launch overhead":
            micro = own.candidate.get("micro_batch_size") or math.inf
            batch = ("micro_batch_size", "gradient_accumulation_steps")
            return [
                seen for seen in others if alike(seen, *batch) and (seen.candidate.get("micro_batch_size") or 0) > micro
            ]
        case _:
            return []


def _memory(evidence: Evidence, others: Sequence[StepObservation]) -> tuple[Part, list[str]]:
    """How full the device is; its share is that of the limit, not of the step."""
    notes = []
    if evidence.alloc_retries:
        notes.append(f"the allocator freed its cache {evidence.alloc_retries} times to go on: memory is short")
    larger = [seen.trial for seen in _relief("launch overhead", evidence.seen, others) if seen.outcome in NO_ROOM]
    if larger:
        notes.append(f"larger micro-batches do not fit the memory: trial {', '.join(map(str, larger[:5]))}")
    peak, limit = evidence.peak_memory_bytes, evidence.memory_limit_bytes
    if not peak or not limit:
        return Part(name="memory capacity", seconds=None, share=None, known="not measured: no limit is known"), notes
    return Part(
        name="memory capacity", seconds=None, share=peak / limit, known="measured: the peak, of what a rank may use"
    ), notes


def _between_ranks(ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """How much the ranks differ in what they compute themselves."""
    own = {rank: sum(phases.get(name, 0.0) for name in (*PHASES, "recompute")) for rank, phases in ranks.items()}
    middle = statistics.median_low(own.values())
    slow = max(own, key=lambda rank: own[rank])
    if len(own) < 2 or middle <= 0 or own[slow] < 1.1 * middle:
        return []
    which = max(
        PHASES, key=lambda name: ranks[slow][name] - statistics.median_low(phases[name] for phases in ranks.values())
    )
    return [
        f"the ranks are uneven: rank {slow} takes {own[slow] / middle:.2f} times as long by itself as the usual one, most of it in {which}"
    ]


def _hidden(evidence: Evidence) -> list[str]:
    """How much of the communication overlaps with computing, as far as it was traced."""
    sent = [each for each in evidence.traced.values() if each.messages_s > 0]
    if not sent:
        return []
    messages, hidden = (statistics.median(getattr(each, name) for each in sent) for name in ("messages_s", "hidden_s"))
    return [
        f"messages are under way for {messages * 1e3:,.1f} ms of a step; {hidden / messages:.0%} of that overlaps with computing (traced)"
    ]


def _rates(evidence: Evidence, ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Achieved rates beside the device's, where both are known."""
    notes = []
    peak = next((peaks for name, peaks in PEAKS.items() if name.lower() in evidence.device_name.lower()), None)
    flops, counted = evidence.flops_per_step, "the operations of its products"
    if flops is None and evidence.tokens_per_step and evidence.n_parameters:
        flops, counted = 6.0 * evidence.n_parameters * evidence.tokens_per_step, "6 x parameters x tokens"
    if flops and evidence.step_s:
        rate = flops / evidence.step_s / max(1, evidence.world_size)
        of = "; no peak is known of this device, so no MFU: `autotune probe` measures one"
        if peak:
            of = f", {rate / peak[0]:.0%} of its peak in 16 bits (MFU)"
        elif evidence.peak_flops:
            of = f", {rate / evidence.peak_flops:.0%} (MFU) of the {evidence.peak_flops / 1e9:,.1f} GFLOP/s that products alone reach here"
        notes.append(f"a rank computes {rate / 1e9:,.1f} GFLOP/s over the whole step ({counted}){of}")
    update = max(phases["step"] for phases in ranks.values())
    stage = int(evidence.seen.candidate.get("zero_stage") or 0)
    if update > 0 and evidence.n_parameters:
        moved = ADAM_BYTES * evidence.n_parameters / (evidence.world_size if stage >= 1 else 1)
        of = f", {moved / update / peak[1]:.0%} of its bandwidth" if peak else ""
        notes.append(
            f"the optimizer step moves about {moved / update / 1e9:,.1f} GB/s (Adam, {ADAM_BYTES:.0f} bytes a parameter){of}"
        )
    return notes


def _advice(bound: str, evidence: Evidence, others: Sequence[StepObservation], effects: Effects | None) -> list[Advice]:
    """What the other trials gained with the knobs that the bottleneck names: trials that differ in nothing else go first."""
    own, base = evidence.seen, evidence.seen.samples_per_s
    found: dict[tuple[str, str], Advice] = {}
    if not base:
        return []
    for seen in others:
        changed = differing(own.candidate, seen.candidate)
        if len(changed) == 1 and changed[0] in KNOBS[bound] and seen.samples_per_s and seen.outcome == "complete":
            knob, value = changed[0], seen.candidate.get(changed[0])
            why = f"measured: trial {seen.trial} differs in nothing else"
            found[knob, repr(value)] = Advice(
                knob=knob, value=value, before=own.candidate.get(knob), factor=seen.samples_per_s / base, why=why
            )
    if effects is not None and effects.explained >= 0.5:
        for effect in effects.knobs:
            own_level = next((level for level in effect.levels if level.value == own.candidate.get(effect.knob)), None)
            for level in effect.levels:
                key = effect.knob, repr(level.value)
                if (
                    effect.knob in KNOBS[bound]
                    and own_level
                    and level is not own_level
                    and level.n
                    and key not in found
                ):
                    factor = level.factor / own_level.factor
                    why = f"estimated from {effects.n} trials, all else equal"
                    found[key] = Advice(
                        knob=effect.knob, value=level.value, before=own_level.value, factor=factor, why=why
                    )
    return sorted((advice for advice in found.values() if advice.factor > 1.01), key=lambda advice: -advice.factor)
