"""What a trial's step is spent on, which part of that is lost, and which knob the study's other trials say would win it back.

A step was taken apart once: data, forward, backward, optimizer step, each synchronised, on every rank. What was not timed by
itself is estimated from these, and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.effects import Effects

# Backward computes two products for each one of forward (gradient of the input and of the weights).
BACKWARD_FORWARD = 2.0
# Shares of a step from which on a part is called the bottleneck: of what is estimated more is asked than of what is measured.
BOUND_FROM = {
    "input pipeline": 0.1,
    "stragglers": 0.15,
    "recomputation": 0.15,
    "communication": 0.2,
    "optimizer": 0.25,
    "launch overhead": 0.3,
}
# With so much of its memory in use a device has no room for a larger micro-batch.
FULL = 0.85
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
    "compute": ("precision", "checkpoint_every", "micro_batch_size"),
    "memory capacity": ("zero_stage", "checkpoint_every", "precision", "micro_batch_size"),
}  # fmt: skip
OUTSIDE = {
    "input pipeline": "No DeepSpeed knob helps: load in the background (DataLoader num_workers), or prepare the samples beforehand.",
    "stragglers": "No DeepSpeed knob helps: see what else runs on that rank's device or cores, whether it is throttled, and its data.",
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trial of the study, as far as a diagnosis of another one needs it.

    Attributes:
        trial: Its number.
        candidate: Its knob values.
        samples_per_s: Its throughput; None if it did not complete.
        outcome: How it ended.
        phases_s: The step that was taken apart, slowest rank.
    """

    trial: int
    candidate: Mapping[str, Any]
    samples_per_s: float | None
    outcome: str
    phases_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of the trial that is diagnosed.

    Attributes:
        seen: The trial.
        world_size: Ranks.
        ranks: The step that was taken apart, by rank; one such table for the trial and each time that it was measured again.
        step_s: Median time of the steps that were timed.
        peak_memory_bytes: Its peak.
        memory_limit_bytes: What a rank may use; None if nothing says so.
        alloc_retries: How often the CUDA allocator had to free its cache.
        n_parameters: Parameters of the model.
        n_blocks: Repeated blocks, of which every k-th may be recomputed.
        tokens_per_step: Tokens of a step over all ranks; None where samples are no token sequences.
        device_name: The device.
    """

    seen: Seen
    world_size: int
    ranks: Sequence[Mapping[int, Mapping[str, float]]]
    step_s: float | None = None
    peak_memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    alloc_retries: int | None = None
    n_parameters: int = 0
    n_blocks: int = 0
    tokens_per_step: int | None = None
    device_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the step.

    Attributes:
        name: What it is.
        seconds: Its time; None if it could not be found out.
        share: Its share of the step that was taken apart.
        known: How it is known, in words.
    """

    name: str
    seconds: float | None
    share: float | None
    known: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change, and what that is worth.

    Attributes:
        knob: The knob.
        value: What to set it to.
        before: What it is in this trial.
        factor: Throughput over this trial's.
        why: Where the factor comes from.
    """

    knob: str
    value: Any
    before: Any
    factor: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Where a trial's time goes.

    Attributes:
        trial: Its number.
        bound_by: The bottleneck; empty where phases were not measured.
        parts: The parts of the step, the largest first, then what could not be found out.
        advice: What the other trials say, the best first.
        notes: What else to know.
    """

    trial: int
    bound_by: str
    parts: Sequence[Part]
    advice: Sequence[Advice]
    notes: Sequence[str]


def diagnose(evidence: Evidence, others: Sequence[Seen], effects: Effects | None = None) -> Diagnosis:
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
        why = "the phases of its step were not measured: that takes a `model.py` target, and the trial's folder"
        unknown = [Part(name=name, seconds=None, share=None, known="not measured") for name in ("compute", *BOUND_FROM)]
        return Diagnosis(trial=evidence.seen.trial, bound_by="", parts=[*unknown, memory], advice=[], notes=[why, *notes])
    parts = _parts(evidence, others, ranks, total)
    bound = _bound(parts, evidence, memory)
    notes += _rates(evidence, ranks)
    if evidence.step_s and abs(total / evidence.step_s - 1) > 0.25:
        notes.append(f"the step that was taken apart took {total / evidence.step_s:.2f} times the median step: read the shares as rough")
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
        found[rank] = {
            phase: statistics.median(table.get(phase, 0.0) for table in tables) for phase in ("data", "forward", "backward", "step")
        }
    return found


def _parts(evidence: Evidence, others: Sequence[Seen], ranks: Mapping[int, Mapping[str, float]], total: float) -> list[Part]:
    """The step of the rank that everybody waits for, part by part.

    * data and optimizer step were timed;
    * a rank that is slow in data or forward makes the others wait in backward's first collective: its lead over the median of
      the others is lost to stragglers;
    * backward computes twice forward, and forward once more for what is recomputed; what it took beyond that, on the rank that
      waits for nobody, was communication;
    * of forward, a share does not shrink with the micro-batch: a in t(b) = a + c b over the study's trials.
    """
    stage, every = int(evidence.seen.candidate.get("zero_stage") or 0), int(evidence.seen.candidate.get("checkpoint_every") or 0)
    work = {rank: phases["data"] + phases["forward"] for rank, phases in ranks.items()}
    slow = max(work, key=lambda rank: work[rank])
    rest = [time for rank, time in work.items() if rank != slow]
    lead = max(0.0, work[slow] - statistics.median(rest)) if rest else 0.0
    data = statistics.median(phases["data"] for phases in ranks.values())
    forward, backward = ranks[slow]["forward"], ranks[slow]["backward"]
    typical = statistics.median(phases["forward"] for rank, phases in ranks.items() if rank != slow) if rest else forward
    typical = min(typical, forward)
    recomputed = (-(-evidence.n_blocks // every) / evidence.n_blocks if evidence.n_blocks else 1.0 / every) if every else 0.0
    # The slow rank's own backward is as slow as its forward; what it lost there is lost as well.
    pace = forward / typical if typical > 0 else 1.0
    expected = (BACKWARD_FORWARD + recomputed) * typical
    waited = max(0.0, backward - expected * pace) if evidence.world_size > 1 else 0.0
    lead += max(0.0, min(backward, expected * pace) - expected) if lead > 0.05 * total else 0.0
    update = max(phases["step"] for phases in ranks.values())
    overhead, known = _overhead(evidence, others)
    pure = (1 + BACKWARD_FORWARD) * typical
    one_rank = evidence.world_size == 1
    alike = f" (rank {slow} is the slowest)" if lead > 0.05 * total else ""
    gathers = "; gathers in forward are not told apart at stage 3" if stage == 3 else ""
    found = [
        ("compute", pure * (1 - (overhead or 0.0)), "forward was measured, backward counted as twice forward"),
        ("input pipeline", data, "measured"),
        ("stragglers", None if not one_rank and not rest else lead, "one rank" if one_rank else f"measured between ranks{alike}"),
        ("recomputation", recomputed * typical, f"estimated: every {every} blocks go forward again" if every else "nothing is recomputed"),
        ("communication", waited, "one rank" if one_rank else f"estimated: backward beyond twice forward{gathers}"),
        ("optimizer", update, "measured" + ("; with the gathering of the new weights" if stage >= 1 and not one_rank else "")),
        ("launch overhead", None if overhead is None else pure * overhead, known),
    ]
    whole = max(total, sum(seconds for _, seconds, _ in found if seconds))
    return [
        Part(
            name=name,
            seconds=seconds,
            share=None if seconds is None else seconds / whole,
            known=how if seconds is not None else f"not measured: {how}",
        )
        for name, seconds, how in found
    ]


def _overhead(evidence: Evidence, others: Sequence[Seen]) -> tuple[float | None, str]:
    """Share of forward that the micro-batch does not change: t(b) = a + c b over trials that differ in it, least squares."""
    own = evidence.seen

    def alike(seen: Seen) -> bool:
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
    medians = [(micro, statistics.median(time for size, time in points if size == micro)) for micro in sorted(sizes)]
    w = [1 / time**2 for _, time in medians]
    mean_b = sum(wi * b for wi, (b, _) in zip(w, medians, strict=True)) / sum(w)
    mean_t = sum(wi * t for wi, (_, t) in zip(w, medians, strict=True)) / sum(w)
    slope = sum(wi * (b - mean_b) * (t - mean_t) for wi, (b, t) in zip(w, medians, strict=True))
    slope /= sum(wi * (b - mean_b) ** 2 for wi, (b, _) in zip(w, medians, strict=True))
    fixed = max(0.0, mean_t - max(0.0, slope) * mean_b)
    at = fixed + max(0.0, slope) * float(own.candidate["micro_batch_size"])
    share = min(1.0, fixed / at) if at > 0 else 0.0
    return share, f"estimated: what does not grow with the micro-batch over {len(points)} trials"


def _bound(parts: Sequence[Part], evidence: Evidence, memory: Part) -> str:
    """The part that loses most, if it loses enough; a device that is full is named where its memory stands in the way."""
    over = [part for part in parts if part.name in BOUND_FROM and part.share is not None and part.share >= BOUND_FROM[part.name]]
    worst = max(over, key=lambda part: part.share or 0.0).name if over else "compute"
    full = bool(evidence.alloc_retries) or (memory.share is not None and memory.share >= FULL)
    return "memory capacity" if full and worst in ("recomputation", "launch overhead") else worst


def _memory(evidence: Evidence, others: Sequence[Seen]) -> tuple[Part, list[str]]:
    """How full the device is; its share is that of the limit, not of the step."""
    notes = []
    if evidence.alloc_retries:
        notes.append(f"the allocator freed its cache {evidence.alloc_retries} times to go on: memory is short")
    micro = evidence.seen.candidate.get("micro_batch_size")
    larger = [seen for seen in others if seen.outcome == "oom" and micro and (seen.candidate.get("micro_batch_size") or 0) > micro]
    if larger:
        notes.append(f"larger micro-batches ran out of memory: trial {', '.join(str(seen.trial) for seen in larger[:5])}")
    peak, limit = evidence.peak_memory_bytes, evidence.memory_limit_bytes
    if not peak or not limit:
        return Part(name="memory capacity", seconds=None, share=None, known="not measured: no limit is known"), notes
    return Part(name="memory capacity", seconds=None, share=peak / limit, known="measured: the peak, of what a rank may use"), notes


def _rates(evidence: Evidence, ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Achieved rates beside the device's, where both are known."""
    notes = []
    peak = next((peaks for name, peaks in PEAKS.items() if name.lower() in evidence.device_name.lower()), None)
    if evidence.tokens_per_step and evidence.step_s and evidence.n_parameters:
        rate = 6 * evidence.n_parameters * evidence.tokens_per_step / evidence.step_s / max(1, evidence.world_size)
        of = f", {rate / peak[0]:.0%} of its peak in 16 bits (MFU)" if peak else "; no peak is known of this device, so no MFU"
        notes.append(f"a rank computes about {rate / 1e9:,.1f} GFLOP/s (6 x parameters x tokens){of}")
    update = max(phases["step"] for phases in ranks.values())
    stage = int(evidence.seen.candidate.get("zero_stage") or 0)
    if update > 0 and evidence.n_parameters:
        moved = ADAM_BYTES * evidence.n_parameters / (evidence.world_size if stage >= 1 else 1)
        of = f", {moved / update / peak[1]:.0%} of its bandwidth" if peak else ""
        notes.append(f"the optimizer step moves about {moved / update / 1e9:,.1f} GB/s (Adam, {ADAM_BYTES:.0f} bytes a parameter){of}")
    notes.append("memory bandwidth of forward and backward was not measured: trials count no memory traffic")
    return notes


def _advice(bound: str, evidence: Evidence, others: Sequence[Seen], effects: Effects | None) -> list[Advice]:
    """What the other trials gained with the knobs that the bottleneck names: trials that differ in nothing else go first."""
    own, base = evidence.seen, evidence.seen.samples_per_s
    found: dict[tuple[str, str], Advice] = {}
    if not base:
        return []
    for seen in others:
        names = dict.fromkeys([*own.candidate, *seen.candidate])
        changed = [name for name in names if own.candidate.get(name) != seen.candidate.get(name)]
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
                if effect.knob in KNOBS[bound] and own_level and level is not own_level and level.n and key not in found:
                    factor = level.factor / own_level.factor
                    why = f"estimated from {effects.n} trials, all else equal"
                    found[key] = Advice(knob=effect.knob, value=level.value, before=own_level.value, factor=factor, why=why)
    return sorted((advice for advice in found.values() if advice.factor > 1.01), key=lambda advice: -advice.factor)
