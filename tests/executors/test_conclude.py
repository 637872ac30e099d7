"""One result from what the ranks and the machines of a trial left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instant import Instant

from autotune.executors import base, conclude
from autotune.space.candidate import Candidate
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import OOM_EXIT_CODE, Exit, Observed, Outcome, RankReport, TrialResult

OBSERVED = Observed(
    micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=2, samples_per_step=16, tokens_per_step=None,
    zero_stage=1, dtype="float32",
)  # fmt: skip
CANDIDATE = Candidate(micro_batch_size=4, gradient_accumulation_steps=2, zero_stage=1)
REQUEST = TrialRequest(target="model.py", world_size=2, candidate=CANDIDATE.values(), deadline_s=60.0)
STEPS = [3.0, 2.0, 1.0, 1.01, 0.99, 1.0, 1.0]
DONE: dict[str, Any] = {
    "outcome": Outcome.COMPLETE, "phase": "done", "step_times_s": STEPS, "cpu_times_s": [0.5] * 7, "losses": [2.0, 1.0],
    "observed": OBSERVED,
}  # fmt: skip
ECHO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2222"
BUG = "ValueError: bad batch"
COMPLETE, CRASHED, OOM, TIMEOUT, LOST = Outcome.COMPLETE, Outcome.CRASHED, Outcome.OOM, Outcome.TIMEOUT, Outcome.LOST


def done(rank: int, **what: Any) -> RankReport:
    """The report of a rank that came to the end."""
    return RankReport(**{"rank": rank, **DONE, **what})


def failed(rank: int, reason: str, *, at: float = 10.0, outcome: Outcome = CRASHED, **what: Any) -> RankReport:
    """The report of a rank that failed."""
    return RankReport(
        **{"rank": rank, "outcome": outcome, "phase": "measure", "reason": reason, "failed_at": at, **what}
    )


def merged(*reports: RankReport, entered: dict[int, str] | None = None, **end: Any) -> TrialResult:
    """The result of these reports and this end."""
    return conclude.merge(
        REQUEST, {report.rank: report for report in reports}, Exit(**{"codes": {0: 0, 1: 0}, **end}), entered
    )


BOTH, PEER = {0: 1, 1: 1}, {"killed": "peer"}
# What the ranks reported, how they ended, and the verdict: outcome, rank, reason, phase (None: any).
VERDICTS: dict[str, tuple[tuple[RankReport, ...], dict[str, Any], tuple[Any, ...]]] = {
    "all ranks are done": ((done(0), done(1)), {}, (COMPLETE, None, "", "done")),
    "a process that dies after its report changes nothing": (
        (done(0), done(1)), {"codes": {0: -11, 1: -9}, "first_failed": 0, "killed": "deadline"}, (COMPLETE, None, "", "done"),
    ),
    "an echo is not the cause even if it came first": (
        (failed(0, ECHO, at=1.0), failed(1, BUG, at=2.0)), {"codes": BOTH, "first_failed": 0}, (CRASHED, 1, BUG, None),
    ),
    "of two causes the earlier one is named": (
        (failed(0, "ValueError: late", at=2.0), failed(1, BUG, at=1.0)), {"codes": BOTH}, (CRASHED, 1, BUG, None),
    ),
    "an echo alone is better than nothing": (
        (failed(0, ECHO), done(1)), {"codes": {0: 1, 1: 0}, "first_failed": 0}, (CRASHED, 0, ECHO, None),
    ),
    **{
        f"a silent end with {code} explains the echo": (
            (failed(0, ECHO),), {"codes": {0: 1, 1: code}, "first_failed": 1, "entered": {0: "measure", 1: "warmup"}},
            (CRASHED, 1, f"rank 1 {said}", "warmup"),
        )
        for code, said in ((-11, "was killed by signal 11"), (3, "exited with status 3"), (0, "exited with status 0 but wrote no result"))
    },
    "a rank that we killed is no cause, whatever the other's words sound like": (
        (failed(1, "OSError: connection refused by the data server"),), {"codes": {0: -9, 1: 1}, "first_failed": 1, **PEER},
        (CRASHED, 1, "OSError: connection refused by the data server", None),
    ),
    "of silent ranks the one that fell first is named": (
        (), {"codes": {0: -9, 1: -11}, "first_failed": 1, **PEER, "entered": {0: "measure", 1: "measure"}},
        (CRASHED, 1, "rank 1 was killed by signal 11", None),
    ),
    "the kernel's out of memory": (
        (failed(1, ECHO),), {"codes": {0: -9, 1: 1}, "first_failed": 0, "kernel_oom": True},
        (OOM, 0, "rank 0 was killed by the kernel: out of memory", None),
    ),
    "the same signal without it": ((failed(1, ECHO),), {"codes": {0: -9, 1: 1}, "first_failed": 0}, (CRASHED, 0, None, None)),
    "a kernel's out of memory elsewhere excuses no crash": (
        (), {"codes": {0: -11, 1: -9}, "first_failed": 0, **PEER, "kernel_oom": True}, (CRASHED, 0, None, None),
    ),
    "the watchdog's exit status is out of memory without a report": (
        (), {"codes": {0: OOM_EXIT_CODE, 1: -9}, "first_failed": 0, **PEER, "entered": {0: "warmup"}}, (OOM, 0, None, "warmup"),
    ),
    **{
        f"a reported {outcome} stands": (
            (failed(0, "why", outcome=outcome), failed(1, ECHO)), {"codes": BOTH, "first_failed": 1}, (outcome, 0, "why", None),
        )
        for outcome in (OOM, Outcome.DIVERGED, Outcome.NOT_APPLIED)
    },
    "the deadline is a timeout in the phase of the slowest": (
        (), {"codes": {0: -9, 1: -9}, "killed": "deadline", "entered": {0: "measure", 1: "initialize"}},
        (TIMEOUT, None, "no end within 60 s", "initialize"),
    ),
    "a failure just before the deadline is the failure": (
        (failed(1, BUG),), {"codes": {0: -9, 1: 1}, "first_failed": 1, "killed": "deadline"}, (CRASHED, 1, BUG, None),
    ),
    **{
        f"a cancelled trial with {len(reports)} reports is lost": (
            reports, {"codes": {0: -9, 1: -9}, "killed": "cancel"}, (LOST, None, None, None),
        )
        for reports in ((), (failed(0, BUG),), (done(0), done(1)))
    },
    "a rank without a report is no complete trial": (
        (done(0),), {"first_failed": 1}, (CRASHED, 1, "rank 1 exited with status 0 but wrote no result", None),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reports", "end", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict(reports: tuple[RankReport, ...], end: dict[str, Any], verdict: tuple[Any, ...]) -> None:
    result = merged(*reports, **end)
    outcome, rank, reason, phase = verdict
    assert result.outcome is outcome and (outcome is LOST or result.failed_rank == rank)
    assert reason is None or result.reason == reason
    assert phase is None or result.phase == phase


@given(
    st.lists(st.sampled_from(["none", "done", "echo", "cause", "oom"]), min_size=2, max_size=2),
    st.lists(st.sampled_from([0, 1, 77, -9, -11]), min_size=2, max_size=2),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, "peer", "deadline", "cancel", "processes"]),
    st.booleans(),
)
def test_every_end_has_a_verdict(
    kinds: list[str], codes: list[int], first: int | None, killed: str | None, kernel: bool
) -> None:
    make = {
        "done": done,
        "echo": lambda rank: failed(rank, ECHO),
        "cause": lambda rank: failed(rank, BUG),
        "oom": lambda rank: failed(rank, "too much", outcome=OOM),
    }
    reports = [make[kind](rank) for rank, kind in enumerate(kinds) if kind != "none"]
    note = "it started more than 9 processes" if killed == "processes" else ""
    end = {"first_failed": first, "killed": killed, "kernel_oom": kernel, "note": note}
    result = merged(*reports, codes=dict(enumerate(codes)), **end)
    by_us = killed in ("cancel", "processes")
    assert (result.outcome is COMPLETE) == (kinds == ["done", "done"] and not by_us)
    assert result.reason or result.outcome is COMPLETE
    assert by_us or "cause" not in kinds or result.reason in (BUG, "too much")


def test_no_text_of_a_rank_commands_a_terminal(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    write_record(folder.exit, Exit(codes={0: 1}))
    write_record(folder.report(0), failed(0, "ValueError: \x1b]0;title\x07 bad", caveats=["odd \x1b[2J"]))
    result = base.conclude(folder, replace(REQUEST, world_size=1))
    assert result.reason == r"ValueError: \x1b]0;title\x07 bad" and result.caveats == [r"odd \x1b[2J"]


def test_times_are_rank_0s_cpu_is_summed_and_memory_and_phases_are_the_highest() -> None:
    first = {"phase_times_s": {"data": 1.0, "step": 2.0}, "startup_s": {"build": 1.0}, "caveats": ["b", "a"]}
    second = {"phase_times_s": {"data": 3.0, "step": 1.0}, "startup_s": {"build": 4.0}, "caveats": ["a"]}
    result = merged(
        done(0, peak_memory_bytes={"forward": 5, "step": 9}, **first),
        done(1, peak_memory_bytes={"forward": 7}, cpu_times_s=[0.25] * 7, **second),
        wall_s=9.0,
    )
    assert result.steps is not None and (result.steps.median_s, result.steps.n_steps) == (1.0, 5)
    assert (result.cpu_s_per_step, result.samples_per_step, result.losses, result.wall_s) == (0.75, 16, [2.0, 1.0], 9.0)
    assert (result.memory_by_phase_bytes, result.peak_memory_bytes) == ({"forward": 7, "step": 9}, 9)
    assert (result.phase_times_s, result.startup_s) == ({"data": 3.0, "step": 2.0}, {"build": 4.0})
    assert result.caveats == ["a", "b"]


def test_on_cuda_the_reserved_bytes_are_the_peak() -> None:
    memory = {"peak_memory_bytes": {"forward": 5}, "alloc_retries": 1}
    result = merged(done(0, reserved_memory_bytes=8, **memory), done(1, reserved_memory_bytes=11, **memory))
    assert (result.peak_memory_bytes, result.memory_by_phase_bytes, result.alloc_retries) == (11, {"forward": 5}, 2)


def test_what_was_measured_and_observed_before_a_failure_is_kept_and_nothing_else_is_scored() -> None:
    diverged = done(0, outcome=Outcome.DIVERGED, reason="nan", losses=[2.0, None])
    result = merged(diverged, failed(1, ECHO), codes=BOTH)
    assert result.outcome is Outcome.DIVERGED and result.losses == [2.0, None] and result.steps is not None
    result = merged(failed(0, BUG, step_times_s=STEPS), codes={0: 1, 1: -9}, killed="peer", first_failed=0)
    assert result.steps is None and result.observed is None and result.step_times_s == []
    result = merged(done(0, step_times_s=[1.0, 2.0]), done(1))  # too few steps for a summary
    assert result.outcome is COMPLETE and result.steps is None and result.cpu_s_per_step is None


@pytest.mark.parametrize(
    ("settings", "length"), [({}, "2,048"), ({"data.max_length": 512}, "512"), ({"data.max_length": 4096}, "2,048")]
)
def test_samples_that_the_candidate_cuts_are_named_by_that_length(settings: dict[str, int], length: str) -> None:
    request = replace(REQUEST, candidate=CANDIDATE.values() | settings, lengths=((64, 0.5), (2048, 0.5)))
    reports = {rank: failed(rank, "too much", phase="tail", outcome=OOM) for rank in (0, 1)}
    result = conclude.merge(request, reports, Exit(codes=BOTH), {0: "tail", 1: "tail"})
    assert result.reason == f"the longest batch (4 samples of up to {length}) does not fit: too much"
    reports[1].tail = {"samples": 3, "length": 128, "elements": 384}  # which a collate function cuts
    result = conclude.merge(request, reports, Exit(codes=BOTH), {0: "tail", 1: "tail"})
    assert result.reason == "the longest batch (3 samples of up to 128) does not fit: too much" and not result.tail


# Several machines.

PEER_LOST = "Connection closed by peer"
LATE = Exit(codes={1: -9}, killed="deadline", failed_at=5.0)
MACHINES: dict[str, tuple[list[Exit], tuple[RankReport, ...], tuple[Any, ...]]] = {
    "the machine that failed first is the cause, wherever the others were killed": (
        [Exit(codes={0: -9}, killed="peer", wall_s=3.0), Exit(codes={1: -11}, first_failed=1, failed_at=5.0, wall_s=2.0)], (),
        (CRASHED, 1, "rank 1 was killed by signal 11"),
    ),
    "an echo on one machine does not hide the silent death on another": (
        [Exit(codes={0: 1}, first_failed=0, failed_at=6.0), Exit(codes={1: -6}, first_failed=1, failed_at=5.0)],
        (failed(0, PEER_LOST, at=6.0),), (CRASHED, 1, "rank 1 was killed by signal 6"),
    ),
    "who loses a peer to the deadline of another machine has not failed": (
        [Exit(codes={0: 1}, first_failed=0, failed_at=5.1), LATE], (failed(0, PEER_LOST, at=5.1),), (TIMEOUT, None, "no end within 300 s"),
    ),
    "nor has who died of it": ([Exit(codes={0: -6}, first_failed=0, failed_at=5.1), LATE], (), (TIMEOUT, None, "no end within 300 s")),
    "who failed before the deadline of another machine is the cause": (
        [Exit(codes={0: 1}, first_failed=0, failed_at=4.0), LATE], (failed(0, "Connection refused", at=4.0),),
        (CRASHED, 0, "Connection refused"),
    ),
    "a machine without a word loses the trial": (
        [Exit(codes={0: 1}, first_failed=0, failed_at=1.0)], (), (LOST, None, "machine 1 of 2 left no word"),
    ),
    "reports of all ranks count even if an agent died behind them": (
        [Exit(codes={0: 0})], tuple(RankReport(rank=n, outcome=COMPLETE, phase="done") for n in range(2)), (COMPLETE, None, ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ends", "reports", "verdict"), MACHINES.values(), ids=MACHINES)
def test_one_end_from_those_of_all_machines(
    ends: list[Exit], reports: tuple[RankReport, ...], verdict: tuple[Any, ...]
) -> None:
    request = TrialRequest(target="m.py", world_size=2, nodes=2)
    found = conclude.joined(dict(enumerate(ends)), 2)
    result = conclude.merge(request, {r.rank: r for r in reports}, found)
    assert (result.outcome, result.reason) == (verdict[0], verdict[2])
    assert result.outcome is LOST or result.failed_rank == verdict[1]
    assert result.wall_s == max(end.wall_s for end in ends)
    if result.outcome is LOST:  # the engine's word goes before that
        said = conclude.merge(request, {}, replace(found, note="slurm: a node failed"))
        assert said.reason == "slurm: a node failed"


def test_a_trial_that_nobody_ends_at_its_deadline_has_timed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost, run again, and then crashed with "twice: stopped before it ended"."""
    monkeypatch.setattr(base, "AGENT_GRACE_S", 0.0)
    folder = TrialDir(tmp_path)

    class Hanging:
        reason = ""

        def poll(self) -> base.Status:
            return base.Status.RUNNING

        def cancel(self) -> None:
            write_record(folder.exit, Exit(codes={0: -9, 1: -9}, killed="cancel"))

    result = base._watch(Instant(), Hanging(), folder, replace(REQUEST, deadline_s=0.05), lambda: None)
    assert result.outcome is TIMEOUT and "no end within 0.05 s" in result.reason
