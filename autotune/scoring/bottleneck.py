"""What a trial's step spends its time on, which part is the bottleneck, and which knob would reduce it.

One step is timed in parts on every rank: data, forward, backward, optimizer step and collectives, each synchronised.
A trace splits forward and backward further; without one their parts are estimated, which the result says.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.scoring.data_advice import BY_TOKENS, data_notes
from autotune.scoring.effects import Effects
from autotune.scoring.step_parts import Advice, Diagnosis, Evidence, Part, StepObservation
from autotune.space.candidate import differing
from autotune.space.degree import PIPELINE_DEGREE, TENSOR_DEGREE
from autotune.system.cards import find_card
from autotune.system.units import format_quantity

PHASES, COMPUTING = ("data", "forward", "backward", "step"), ("forward", "backward")
# Shares of a step from which on a part is called the bottleneck; higher for parts that are estimated, not measured.
BOUND_FROM = {
    "input pipeline": 0.1, "the script itself": 0.15, "stragglers": 0.15, "recomputation": 0.15, "communication": 0.2,
    "optimizer": 0.25, "launch overhead": 0.3, "memory bandwidth": 0.35,
}  # fmt: skip
# Share of its memory from which on a device has no room for a larger micro-batch.
FULL = 0.85
# The allocator holds much more than tensors need from this ratio and this difference on.
FRAGMENTED, LEAST_WASTED_BYTES = 1.25, 1 << 30
NO_ROOM, HAD_ROOM = ("oom", "predicted_oom"), {"complete", "infeasible", "diverged"}
# Bottlenecks that more memory would relieve, by less recomputation or a larger micro-batch.
AT_A_PRICE = ("recomputation", "launch overhead")
# Which knobs to look at for each bottleneck.
KNOBS: dict[str, tuple[str, ...]] = {
    "input pipeline": ("data.num_workers", "data.prefetch_factor", "data.persistent_workers", "data.pin_memory"),
    "the script itself": (),
    "stragglers": (),
    "communication": (
        "gradient_accumulation_steps", "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm",
        "zero_stage", "communication_data_type", "micro_batch_size",
    ),
    "optimizer": (
        "zero_stage", "gradient_accumulation_steps", "offload_optimizer", "bf16.bf16_optimizer_states",
        "micro_batch_size",
    ),
    "recomputation": ("checkpoint_every",),
    "launch overhead": ("micro_batch_size", "zero_stage"),
    "memory bandwidth": ("precision", "micro_batch_size", "checkpoint_every"),
    "compute": ("precision", "checkpoint_every", "micro_batch_size"),
    "memory capacity": ("zero_stage", "checkpoint_every", "precision", "micro_batch_size"),
}  # fmt: skip
# What the parts need that are neither traced nor estimated.
UNTRACED = {
    "launch overhead": "takes a trace (--profile), or trials of the same precision with other micro-batches",
    "memory bandwidth": "takes a trace (--profile), or a profile of the model and the machine's rates",
}
OUTSIDE = {
    "input pipeline": "No DeepSpeed knob helps: load in the background (`--space data` tunes the workers) or beforehand.",
    "the script itself": "No DeepSpeed knob helps: look at what the script does between the calls of its engine and its loader, such as"
    " another model's forward, an average of the weights, metrics, or changes of the batch.",
    "stragglers": "No DeepSpeed knob helps: look at that rank's data, throttling, and other processes beside it.",
}


def diagnose(evidence: Evidence, others: Sequence[StepObservation], effects: Effects | None = None) -> Diagnosis:
    """Finds the bottleneck of a trial's step.

    Args:
        effects: Effects of the knobs on throughput over the whole study, for advice that no single trial gives.
    """
    memory, notes = _memory(evidence, others)
    ranks = _typical(evidence.ranks)
    total = max((sum(phases.values()) for phases in ranks.values()), default=0.0)
    if total <= 0:
        why = "the phases of its step were not kept: --profile runs it again and takes them"
        unknown = [Part(name=name, seconds=None, share=None, known="not measured") for name in ("compute", *BOUND_FROM)]
        return Diagnosis(
            trial=evidence.seen.trial, bound_by="", parts=[*unknown, memory], advice=[], notes=[why, *notes]
        )
    parts = _parts(evidence, others, ranks)
    bound = worst = _worst(parts)
    if _no_room(worst, evidence, others, memory):
        bound = "memory capacity"
        notes.insert(0, f"{worst} takes the time, and what would avoid it does not fit the memory")
    waiting = next((part.share or 0.0 for part in parts if part.name == "input pipeline"), 0.0)
    computing = sum(part.share or 0.0 for part in parts if part.name in BY_TOKENS)
    notes += [*data_notes(evidence, waiting, computing), *_between_ranks(ranks), *_hidden(evidence)]
    notes += [*_rates(evidence, ranks), *_device(evidence)]
    # Ranks meet before each collective of the measured step only; other steps do not pay for that.
    spent = total - min(phases.get("wait", 0.0) for phases in ranks.values())
    beside = evidence.beside_s or evidence.step_s
    if beside and abs(spent / beside - 1) > 0.25:
        notes.append(
            f"the step that was taken apart took {spent / beside:.2f} times the median step: read the shares as rough"
        )
    if bound in OUTSIDE:
        notes.insert(0, OUTSIDE[bound])
    shares = {part.name: part.share or 0.0 for part in parts}
    if bound in BOUND_FROM and shares[bound] < max(shares.values()):
        why = f"{bound} ({shares[bound]:.0%}) is not the largest part: named is what is farthest above the share"
        notes.insert(0, f"{why} from which it is worth the trouble (here {BOUND_FROM[bound]:.0%})")
    parts.sort(key=lambda part: -math.inf if part.seconds is None else part.seconds, reverse=True)
    advice = _advice(bound, evidence, others, effects)
    return Diagnosis(trial=evidence.seen.trial, bound_by=bound, parts=[*parts, memory], advice=advice, notes=notes)


def _typical(measured: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[int, dict[str, float]]:
    """The phases of each rank: medians over the measured steps, so that one disturbed step decides nothing."""
    found = {}
    for rank in sorted({rank for table in measured for rank, phases in table.items() if phases}):
        tables = [table[rank] for table in measured if table.get(rank)]
        names = dict.fromkeys([*PHASES, *(name for table in tables for name in table)])
        found[rank] = {phase: statistics.median(table.get(phase, 0.0) for table in tables) for phase in names}
    return found


def _usual(ranks: Mapping[int, Mapping[str, float]], *names: str) -> float:
    """Seconds of some phases on a typical rank; of two ranks on the faster one, as stragglers are another part."""
    return statistics.median_low(sum(phases.get(name, 0.0) for name in names) for phases in ranks.values())


def _parts(
    evidence: Evidence, others: Sequence[StepObservation], ranks: Mapping[int, Mapping[str, float]]
) -> list[Part]:
    """The parts of the step.

    * Data, optimizer step and collectives were timed.
    * Stragglers: how much longer the other ranks waited before collectives than the slowest rank did.
    * Forward and backward of a typical rank are recomputation, fixed costs of operations, memory traffic, and else
      arithmetic.
    """
    again, how_again, computing = _recomputation(evidence, ranks)
    split, how = _inside(evidence, others)
    lead, messages, between = _lost_between(evidence, ranks)
    gathers = ", with what stage 3 gathers" if evidence.seen.candidate.get("zero_stage") == 3 else ""
    found: dict[str, tuple[float | None, str]] = {
        "compute": (
            computing * max(0.0, 1 - sum(split.values())),
            "measured: forward and backward" + (", without what follows" if split else ""),
        ),
        "input pipeline": (_usual(ranks, "data"), "measured"),
        "stragglers": (lead, between),
        "recomputation": (again, how_again),
        "communication": (messages, f"{between.partition(' (')[0]}{gathers}"),
        "optimizer": (_usual(ranks, "step"), "measured"),
    }
    if any("script" in phases for phases in ranks.values()):
        known = "measured: between the calls of its engine and its loader"
        found["the script itself"] = _usual(ranks, "script"), known
    for name, missing in UNTRACED.items():
        found[name] = (computing * split[name], how[name]) if name in split else (None, missing)
    whole = sum(seconds for seconds, _ in found.values() if seconds) or 1.0
    return [
        Part(name=name, seconds=None, share=None, known=f"not measured: {known}")
        if seconds is None
        else Part(name=name, seconds=seconds, share=seconds / whole, known=known)
        for name, (seconds, known) in found.items()
    ]


def _recomputation(evidence: Evidence, ranks: Mapping[int, Mapping[str, float]]) -> tuple[float, str, float]:
    """Seconds of recomputation, how they are known, and those of forward and backward without it."""
    computing = _usual(ranks, *COMPUTING)
    if any("recompute" in phases for phases in ranks.values()):
        return _usual(ranks, "recompute"), "measured", computing
    every = int(evidence.seen.candidate.get("checkpoint_every") or 0)
    if not every:
        return 0.0, "nothing", computing
    share = -(-evidence.n_blocks // every) / evidence.n_blocks if evidence.n_blocks else 1.0 / every
    again = min(share * _usual(ranks, "forward"), _usual(ranks, "backward"))
    return again, f"estimated: one block of {every} goes forward again", computing - again


def _lost_between(
    evidence: Evidence, ranks: Mapping[int, Mapping[str, float]]
) -> tuple[float | None, float | None, str]:
    """Seconds lost to a slow rank and to the collectives themselves, and how they are known."""
    messages = _usual(ranks, "reduce", "gather")
    if evidence.world_size == 1:
        return 0.0, 0.0, "one rank"
    waits = {rank: phases["wait"] for rank, phases in ranks.items() if "wait" in phases}
    if len(waits) < 2:
        return None, messages, "measured on the slowest rank alone: the trial's folder is gone"
    slow = min(waits, key=lambda rank: waits[rank])
    lead = statistics.median_high(wait for rank, wait in waits.items() if rank != slow) - waits[slow]
    total = max(sum(phases.values()) for phases in ranks.values())
    return lead, messages, "measured" + (f" (rank {slow} is the slowest)" if lead > 0.05 * total else "")


def _inside(evidence: Evidence, others: Sequence[StepObservation]) -> tuple[dict[str, float], dict[str, str]]:
    """Shares of forward and backward that are launch overhead and memory traffic, and how each is known.

    A trace shows the time in products and in other operations; the gaps between operations, and the shortest ones, are
    launch overhead. Else the machine's rates give both shares, and trials with other micro-batches the overhead.
    """
    traced = [each for each in evidence.traced.values() if each.spans_s.get("forward")]
    if traced:
        traced.sort(key=lambda each: sum(each.spans_s.get(name, 0.0) for name in COMPUTING))
        each = traced[(len(traced) - 1) // 2]
        products, traffic, messages = (
            sum(each.kinds_s.get(name, {}).get(kind, 0.0) for name in COMPUTING)
            for kind in ("products", "traffic", "messages")
        )
        busy = products + traffic  # the rest lies between operations, or in those that are too short
        span = max(sum(each.spans_s.get(name, 0.0) for name in COMPUTING) - messages, busy, 1e-9)
        return {"launch overhead": (span - busy) / span, "memory bandwidth": traffic / span}, {
            "launch overhead": "traced: between operations, and the shortest ones",
            "memory bandwidth": "traced: operations that are no products",
        }
    found, how = {}, {}
    if whole := sum(evidence.expected_s.values()):
        for name, term in (("launch overhead", "launches"), ("memory bandwidth", "traffic")):
            found[name], how[name] = evidence.expected_s.get(term, 0.0) / whole, "estimated from the machine's rates"
    if (fixed := _overhead(evidence.seen, others)) is not None:
        overhead, how["launch overhead"] = fixed
        rest = 1 - found.get("launch overhead", 0.0)
        found = {name: value * (1 - overhead) / rest for name, value in found.items() if rest > 0}
        found["launch overhead"] = overhead
    return found, how


def _overhead(own: StepObservation, others: Sequence[StepObservation]) -> tuple[float, str] | None:
    """Share of forward that the micro-batch b does not change, by least squares of t(b) = a + c b; None if unknown."""
    points: dict[float, list[float]] = {}
    for seen in [own, *others]:
        micro, steps = seen.candidate.get("micro_batch_size"), seen.candidate.get("gradient_accumulation_steps", 1)
        alike = seen.candidate.get("precision") == own.candidate.get("precision") and (
            (seen.candidate.get("zero_stage") == 3) == (own.candidate.get("zero_stage") == 3)
        )
        if alike and micro and steps and seen.phases_s.get("forward"):
            points.setdefault(float(micro), []).append(seen.phases_s["forward"] / float(steps))
    n = sum(map(len, points.values()))
    if len(points) < 2 or max(points) < 2 * min(points) or n < 4:
        return None
    # By the median at each size; weighted by 1 / t, so that large micro-batches do not decide alone.
    sizes, times = np.array(sorted(points)), np.array([statistics.median(points[size]) for size in sorted(points)])
    slope = max(0.0, float(np.polyfit(sizes, times, 1, w=1 / times)[0]))
    fixed = max(0.0, float(np.average(times - slope * sizes, weights=1 / np.square(times))))
    at = fixed + slope * float(own.candidate["micro_batch_size"])
    share = min(1.0, fixed / at) if at > 0 else 0.0
    return share, f"estimated: what does not grow with the micro-batch over {n} trials"


def _worst(parts: Sequence[Part]) -> str:
    """The part that is largest relative to `BOUND_FROM`, if it exceeds that; else `compute`."""
    shares = {part.name: part.share or 0.0 for part in parts}
    over = {name: shares[name] / least for name, least in BOUND_FROM.items() if shares.get(name, 0.0) >= least}
    # Every model moves memory; that is the bottleneck only where it takes longer than the arithmetic.
    if shares.get("memory bandwidth", 0.0) <= shares["compute"]:
        over.pop("memory bandwidth", None)
    return max(over, key=lambda name: over[name]) if over else "compute"


def _no_room(worst: str, evidence: Evidence, others: Sequence[StepObservation], memory: Part) -> bool:
    """Whether only memory prevents the remedy: the device is full, or trials with the remedy did not fit."""
    tried = [seen.outcome for seen in _relief(worst, evidence.seen, others)]
    if worst not in AT_A_PRICE or HAD_ROOM.intersection(tried):
        return False
    full = bool(evidence.alloc_retries) or (memory.share is not None and memory.share >= FULL)
    return full or any(outcome in NO_ROOM for outcome in tried)


def _relief(worst: str, own: StepObservation, others: Sequence[StepObservation]) -> list[StepObservation]:
    """The trials that differ from this one only in the remedy of a bottleneck, which takes more memory."""

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
    """The part for memory capacity, whose share is that of the limit, and notes."""
    notes, name = [], "memory capacity"
    if evidence.alloc_retries:
        notes.append(f"the allocator freed its cache {evidence.alloc_retries} times to go on: memory is short")
    notes += _reserved(evidence)
    larger = [seen.trial for seen in _relief("launch overhead", evidence.seen, others) if seen.outcome in NO_ROOM]
    if larger:
        notes.append(f"larger micro-batches do not fit the memory: trial {', '.join(map(str, larger[:5]))}")
    peak, limit = evidence.peak_memory_bytes, evidence.memory_limit_bytes
    if not peak or not limit:
        return Part(name=name, seconds=None, share=None, known="not measured: no limit is known"), notes
    known = "measured: the peak, of what a rank may use"
    return Part(name=name, seconds=None, share=peak / limit, known=known), notes


def _reserved(evidence: Evidence) -> list[str]:
    """What the CUDA allocator took beside what tensors needed, and how much of the device is free."""
    held, used, limit = evidence.reserved_bytes, evidence.allocated_bytes, evidence.memory_limit_bytes
    if not held or not used:
        return []
    left = f"; {(limit - held) / 2**30:,.1f} GiB of the device are left" if limit else ""
    notes = [f"the allocator holds {held / 2**30:,.1f} GiB, of which tensors used {used / 2**30:,.1f}{left}"]
    if held > FRAGMENTED * used and held - used > LEAST_WASTED_BYTES:
        notes.append(
            "much of that is in pieces that nothing fits: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the"
            " allocator join them"
        )
    return notes


def _device(evidence: Evidence) -> list[str]:
    """Notes on clocks, throttling, energy and others on the devices."""
    load, notes = evidence.device_load, []
    if load is None:
        return []
    if load.throttled_by:
        clock = f" (at {load.sm_clock_mhz:,} of {load.max_sm_clock_mhz:,} MHz)" if load.max_sm_clock_mhz else ""
        notes.append(f"the device was slowed down by {' and '.join(load.throttled_by)}{clock}")
    if load.n_others:
        notes.append(f"{load.n_others} other process(es) were on the device before the trial")
    if load.power_w and evidence.joules_per_sample:
        notes.append(f"the devices draw {load.power_w:,.0f} W, {evidence.joules_per_sample:,.3g} J a sample")
    return notes


def _between_ranks(ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """A note on a rank that takes at least 10 % longer than the usual one, collectives apart."""
    own = {
        rank: sum(phases.get(name, 0.0) for name in ("script", *PHASES, "recompute")) for rank, phases in ranks.items()
    }
    middle = statistics.median_low(own.values())
    slow = max(own, key=lambda rank: own[rank])
    if len(own) < 2 or middle <= 0 or own[slow] < 1.1 * middle:
        return []
    which = max(("script", *PHASES), key=lambda name: ranks[slow].get(name, 0.0) - _usual(ranks, name))
    return [
        f"the ranks are uneven: rank {slow} takes {own[slow] / middle:.2f} times as long by itself as the usual one,"
        f" most of it in {which}"
    ]


def _hidden(evidence: Evidence) -> list[str]:
    """A note on how much of the traced communication overlaps with computing."""
    sent = [each for each in evidence.traced.values() if each.messages_s > 0]
    if not sent:
        return []
    messages, hidden = (statistics.median(getattr(each, name) for each in sent) for name in ("messages_s", "hidden_s"))
    return [
        f"messages are under way for {messages * 1e3:,.1f} ms of a step; {hidden / messages:.0%} of that overlaps with"
        " computing (traced)"
    ]


def _rates(evidence: Evidence, ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Achieved rates beside the device's, where both are known."""
    notes = []
    card = find_card(evidence.device_name)
    precision = str(evidence.seen.candidate.get("precision", "fp32"))
    peak = card.peak_flops(precision, tf32=bool(evidence.tf32)) if card else None
    if card and evidence.tf32 is False and precision == "fp32" and "tf32" in card.flops:
        notes.append(
            f"fp32 products do without TensorFloat-32, which reaches {card.flops['tf32'] / card.flops['fp32']:.1f} times"
            " the rate: torch.set_float32_matmul_precision('high'), where 10 bits of mantissa are enough"
        )
    flops, counted = evidence.flops_per_step, "the operations of its products"
    if flops is None and evidence.tokens_per_step and evidence.n_parameters:
        flops, counted = 6.0 * evidence.n_parameters * evidence.tokens_per_step, "6 x parameters x tokens"
    if flops and evidence.step_s:
        rate = flops / evidence.step_s / max(1, evidence.world_size)
        without = bool(card and "tf32" in card.flops and precision == "fp32" and not evidence.tf32)
        of = _share_of_peak(rate, peak, evidence.peak_flops, precision, without_tf32=without)
        notes.append(f"a rank computes {format_quantity(rate, 'FLOP/s')} over the whole step ({counted}){of}")
    update = max(phases["step"] for phases in ranks.values())
    stage = int(evidence.seen.candidate.get("zero_stage") or 0)
    if update > 0 and evidence.optimizer_bytes:
        # Ranks of a tensor or pipeline group update their own part of the weights; ZeRO shards it among the others.
        degrees = (int(evidence.seen.candidate.get(path) or 1) for path in (TENSOR_DEGREE, PIPELINE_DEGREE))
        moved = evidence.optimizer_bytes / (evidence.world_size if stage >= 1 else math.prod(degrees))
        of = f", {moved / update / card.memory_bytes_per_s:.0%} of the device's bandwidth" if card else ""
        if evidence.seen.candidate.get("offload_optimizer", "none") != "none":
            of = ", on the host"
        what = f"{moved / update / 1e9:,.1f} GB/s of gradients, weights and its states"
        notes.append(f"the optimizer step moves about {what}{of}")
    return notes


def _share_of_peak(rate: float, peak: float | None, probed: float | None, precision: str, *, without_tf32: bool) -> str:
    """A rate as a share of the device's peak (MFU), or of what was measured here; never more than all of it.

    Args:
        without_tf32: The peak is that of fp32 on a device where convolutions take TensorFloat-32 unless they are told
            not to (`torch.backends.cudnn.allow_tf32`), other than matrix products.
    """
    if not (of := peak or probed):
        return "; no peak is known of this device, so no MFU: `autotune probe` measures one"
    named = (
        f"its peak in {precision}" if peak else f"the {format_quantity(of, 'FLOP/s')} that products alone reach here"
    )
    if rate > of and without_tf32:
        return f", more than {named}: convolutions compute in TensorFloat-32 there, as torch lets them by default"
    if rate > of:
        wrong = "the operations were counted too high" if peak else "the machine was busy when `autotune probe` ran"
        again = "" if peak else " (`autotune probe --again` measures it anew)"
        return f", more than {named}, which cannot be: {wrong}{again}"
    return f", {rate / of:.0%} of {named} (MFU)"


def _advice(bound: str, evidence: Evidence, others: Sequence[StepObservation], effects: Effects | None) -> list[Advice]:
    """Gains that other trials show for the bottleneck's knobs; trials that differ in nothing else go before effects."""
    own, base = evidence.seen, evidence.seen.samples_per_s
    found: dict[tuple[str, str], Advice] = {}
    if not base:
        return []

    def note(knob: str, value: Any, factor: float, why: str) -> None:
        before = own.candidate.get(knob)
        found.setdefault((knob, repr(value)), Advice(knob=knob, value=value, before=before, factor=factor, why=why))

    ran = [seen for seen in others if seen.outcome == "complete"]  # and was not refused
    for seen in ran:
        changed = differing(own.candidate, seen.candidate)
        if len(changed) == 1 and changed[0] in KNOBS[bound] and seen.samples_per_s:
            factor, noise = seen.samples_per_s / base, math.hypot(own.log_reach, seen.log_reach)
            why = (
                f"measured: trial {seen.trial} differs in nothing else{'; within noise' * (math.log(factor) <= noise)}"
            )
            note(changed[0], seen.candidate.get(changed[0]), factor, why)
    if effects is None or effects.explained < 0.5:
        effects = Effects(metric="", n=0, explained=0.0, knobs=())
    for effect in effects.knobs:
        own_level = next((level for level in effect.levels if level.value == own.candidate.get(effect.knob)), None)
        knob = next((name for name in effect.knobs if name in KNOBS[bound]), None)
        if knob is not None and own_level:
            together = [name for name in effect.knobs if name != knob]
            beside = f"with {' and '.join(together)}" if together else "all else equal"
            for level in effect.levels:
                known = next((seen.candidate for seen in ran if seen.candidate.get(effect.knob) == level.value), None)
                if level is not own_level and known is not None:
                    why = f"estimated from {effects.n} trials, {beside}"
                    note(knob, known.get(knob), level.factor / own_level.factor, why)
    return sorted((each for each in found.values() if each.factor > 1.01), key=lambda advice: -advice.factor)
