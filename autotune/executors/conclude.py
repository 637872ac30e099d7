"""Merges the reports of a trial's ranks into one result and names the failure that came first."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autotune.scoring import step_times
from autotune.space.candidate import AUTOCAST
from autotune.trial.device_load import DeviceLoad
from autotune.trial.failures import means_lost_peer, means_other_dtype
from autotune.trial.lengths import longest
from autotune.trial.request import TrialRequest
from autotune.trial.result import OOM_EXIT_CODE, PHASES, TAIL_PHASES, Exit, Outcome, RankReport, TrialResult


def joined(found: Mapping[int, Exit], nodes: int) -> Exit:
    """Returns one exit from those of all machines; `lost` if one of them is missing."""
    missing = [node for node in range(nodes) if node not in found]
    # The first failure on any machine is the cause; the others only lost a peer.
    first = min(
        (end for end in found.values() if end.failed_at is not None), key=lambda end: end.failed_at or 0.0, default=None
    )
    whys = {end.killed for end in found.values()} | ({"lost"} if missing else set())
    silent = f"machine {missing[0]} of {nodes} left no word" if missing else ""
    return Exit(
        codes={rank: code for end in found.values() for rank, code in end.codes.items()},
        first_failed=first.first_failed if first else None,
        failed_at=first.failed_at if first else None,
        killed=next((why for why in ("lost", "cancel", "processes", "deadline", "peer") if why in whys), None),
        note=next((end.note for end in found.values() if end.note), silent),
        kernel_oom=any(end.kernel_oom for end in found.values()),
        wall_s=max((end.wall_s for end in found.values()), default=0.0),
        swept=sorted({line for end in found.values() for line in end.swept}),
    )


def is_dtype_mismatch(result: TrialResult) -> bool:
    """Returns whether a trial with 16-bit weights crashed because a tensor of the model has another type."""
    mixed = means_other_dtype(result.reason) and result.candidate.get("precision") in AUTOCAST
    return mixed and result.outcome is Outcome.CRASHED


# What rank 0 measures for all ranks.
OF_RANK_0 = (
    "step_times_s", "losses", "loss_dtype", "other_cores", "log_slowdown", "observed", "noise", "gradient", "expected",
)  # fmt: skip


def merge(
    request: TrialRequest, found: Mapping[int, RankReport], end: Exit, entered: Mapping[int, str] | None = None
) -> TrialResult:
    """Returns the result of a trial from the reports of its ranks and the exit of their processes.

    Args:
        entered: Last phase of each rank, for ranks without a report.
    """
    outcome, reason, phase, rank = _verdict(request, found, end, _first_phase(found, entered or {}, end))
    if phase in TAIL_PHASES and outcome in (Outcome.OOM, Outcome.CRASHED):
        how = "does not fit" if outcome is Outcome.OOM else "fails"
        tried = next((report.tail for report in found.values() if report.tail), {})
        reason = f"{_in_the_tail(phase, request, tried)} {how}: {reason}"
    every = list(found.values())
    by_phase = _highest(report.peak_memory_bytes for report in every)
    peaks = [*by_phase.values(), *filter(None, (report.reserved_memory_bytes for report in every))]
    result = TrialResult(
        outcome=outcome,
        reason=reason,
        phase=phase,
        failed_rank=rank,
        candidate=request.candidate,
        world_size=request.world_size,
        wall_s=end.wall_s,
        startup_s=_highest(report.startup_s for report in every),
        peak_memory_bytes=max(peaks) if peaks else None,
        memory_by_phase_bytes=by_phase,
        caveats=sorted({caveat for report in every for caveat in report.caveats}),
        side_changes=sorted({change for report in every for change in report.side_changes}),
        unreproducible=sorted({change for report in every for change in report.unreproducible}),
        flags={name: names for report in every for name, names in report.flags.items()},
        hosts=sorted({report.host for report in every if report.host}),
        machine=" / ".join(sorted({report.machine for report in every if report.machine})),
    )
    lead = found.get(0)
    if lead is None or lead.observed is None:
        return result
    steps = step_times.summarise(lead.step_times_s)
    cpu_s = sum(statistics.median(report.cpu_times_s[steps.n_warmup :] or [0.0]) for report in every)
    loads = [report.device_load for report in every if report.device_load is not None]
    reserved = [report.reserved_memory_bytes for report in every if report.reserved_memory_bytes is not None]
    retries = [report.alloc_retries for report in every if report.alloc_retries is not None]
    return replace(
        result,
        **{name: getattr(lead, name) for name in OF_RANK_0},
        tail={} if phase == "tail" else lead.tail,  # there it was not trained on
        taken_in=_in_short(lead.taken_in),
        steps=steps if steps.n_steps else None,
        cpu_s_per_step=cpu_s if steps.n_steps else None,
        samples_per_step=lead.observed.samples_per_step,
        tokens_per_step=lead.observed.tokens_per_step,
        phase_times_s=_highest(report.phase_times_s for report in every),
        micro_step_s=_highest(report.micro_step_s for report in every),
        alloc_retries=sum(retries) if retries else None,
        device_load=DeviceLoad.of_all(loads),
        reserved_memory_bytes=max(reserved, default=None),
    )


def _in_the_tail(phase: str, request: TrialRequest, tried: Mapping[str, int]) -> str:
    """What a trial did in a phase of its tail check, in words; `tried` is the worst batch, if a rank has left word of it."""
    if phase != "tail" or not request.lengths:
        return TAIL_PHASES[phase]
    # A collate function may have cut the samples.
    length = tried.get("length") or max(longest(request.lengths), request.tail.length if request.tail else 0)
    length = min(length, int(request.candidate.get("data.max_length") or length))  # that it cuts all samples to
    n = tried.get("samples") or request.candidate.get("micro_batch_size")
    return f"{TAIL_PHASES[phase]} ({n} sample{'' if n == 1 else 's'} of up to {length:,})"


def _verdict(
    request: TrialRequest, found: Mapping[int, RankReport], end: Exit, phase: str
) -> tuple[Outcome, str, str, int | None]:
    if end.killed == "cancel":
        return Outcome.LOST, end.note or "stopped before it ended", phase, None
    if end.killed == "processes":
        return Outcome.CRASHED, end.note, phase, None
    failed = [report for report in found.values() if report.outcome not in (Outcome.COMPLETE, Outcome.STOPPED_EARLY)]
    if not failed and len(found) == request.world_size:
        last = found[0]  # the ranks decide together; how the processes ended after their reports does not matter
        return last.outcome, last.reason, "done" if last.outcome is Outcome.COMPLETE else "measure", None
    if end.killed == "lost":
        return Outcome.LOST, end.note or "the process that watched the ranks died", phase, None
    # The cause is the earliest failure that is not the echo of a dead peer.
    failed.sort(key=lambda report: (_is_echo(report), report.failed_at or 0.0))
    if end.killed == "deadline" and end.first_failed is None and all(map(_is_echo, failed)):
        # Nothing had failed before the deadline; ranks that failed later lost the peers that were killed, maybe on
        # another machine.
        return Outcome.TIMEOUT, f"no end within {request.deadline_s:g} s", phase, None
    # Ranks that ended by themselves without a report; those that the agent killed could not write one.
    silent = [rank for rank in sorted(end.codes) if rank not in found and not _was_killed(rank, end)]
    if failed and not (_is_echo(failed[0]) and silent):
        return failed[0].outcome, failed[0].reason, failed[0].phase, failed[0].rank
    if silent:
        rank = end.first_failed if end.first_failed in silent else silent[0]
        return _silent_end(rank, end, phase)
    missing = next(rank for rank in range(request.world_size) if rank not in found)
    return Outcome.CRASHED, f"rank {missing} left no result", phase, missing


def _was_killed(rank: int, end: Exit) -> bool:
    return end.killed is not None and end.codes[rank] == -9 and rank != end.first_failed


def _silent_end(rank: int, end: Exit, phase: str) -> tuple[Outcome, str, str, int | None]:
    code = end.codes[rank]
    if code == 0:
        return Outcome.CRASHED, f"rank {rank} exited with status 0 but wrote no result", phase, rank
    if code == OOM_EXIT_CODE:
        return Outcome.OOM, "over the memory limit", phase, rank
    if code == -9 and end.kernel_oom:
        return Outcome.OOM, f"rank {rank} was killed by the kernel: out of memory", phase, rank
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return Outcome.CRASHED, f"rank {rank} {how}", phase, rank


def _is_echo(report: RankReport) -> bool:
    return report.outcome is Outcome.CRASHED and means_lost_peer(report.reason)


def _first_phase(found: Mapping[int, RankReport], entered: Mapping[int, str], end: Exit) -> str:
    """Returns the phase of the rank that failed first; if none did, the earliest phase of all ranks."""
    last = {**entered, **{rank: report.phase for rank, report in found.items()}}
    if end.first_failed in last:
        return last[end.first_failed]
    return min(last.values(), key=lambda phase: PHASES.index(phase) if phase in PHASES else 0, default="")


def _in_short(taken_in: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Returns what each step took in; one number where all steps are alike, and nothing where there was nothing."""
    return {
        name: amounts[:1] if len(set(amounts)) == 1 else amounts for name, amounts in taken_in.items() if any(amounts)
    }


def _highest(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        merged |= {key: max(value, merged.get(key, value)) for key, value in table.items()}
    return merged
