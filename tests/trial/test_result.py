"""The contract between driver and ranks: files that are whole or absent, and one verdict from what the ranks left."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.executors import base, conclude
from autotune.space.candidate import Candidate
from autotune.trial import folder as trial_folder
from autotune.trial.folder import TrialDir, phases, read_record, result_in, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import OOM_EXIT_CODE, Exit, Observed, Outcome, RankReport, StepStats, TrialResult
from autotune.trial.workload import Environment, Workload

OBSERVED = Observed(
    micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=2, samples_per_step=16, tokens_per_step=None,
    zero_stage=1, dtype="float32",
)  # fmt: skip
CANDIDATE = Candidate(micro_batch_size=4, gradient_accumulation_steps=2, zero_stage=1)
REQUEST = TrialRequest(target="model.py", world_size=2, candidate=CANDIDATE.values(), deadline_s=60.0)
KNOB_VALUES = st.none() | st.booleans() | st.integers() | st.text()
STEPS = [3.0, 2.0, 1.0, 1.01, 0.99, 1.0, 1.0]


def done(rank: int, **what: Any) -> RankReport:
    """The report of a rank that came to the end."""
    whole = RankReport(
        rank=rank,
        outcome=Outcome.COMPLETE,
        phase="done",
        step_times_s=STEPS,
        cpu_times_s=[0.5] * 7,
        losses=[2.0, 1.0],
        observed=OBSERVED,
    )
    return replace(whole, **what)


def failed(rank: int, reason: str, *, at: float = 10.0, outcome: Outcome = Outcome.CRASHED, **what: Any) -> RankReport:
    """The report of a rank that failed."""
    return RankReport(
        **{"rank": rank, "outcome": outcome, "phase": "measure", "reason": reason, "failed_at": at, **what}
    )


def merged(*reports: RankReport, entered: dict[int, str] | None = None, **end: Any) -> TrialResult:
    """The result of these reports and this end."""
    return conclude.merge(
        REQUEST, {report.rank: report for report in reports}, Exit(**{"codes": {0: 0, 1: 0}, **end}), entered
    )


ECHO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2222"


class TestFiles:
    """JSON that a person can read and replay."""

    @pytest.mark.parametrize(
        "value",
        [
            REQUEST,
            done(1, losses=[1.5, None], peak_memory_bytes={"forward": 7}, alloc_retries=2),
            Exit(codes={0: 0, 1: -9}, first_failed=1, killed="peer", swept=["process 7"]),
            TrialResult(outcome=Outcome.OOM, steps=StepStats(median_s=1.0, ci95_s=0.1, n_steps=5, n_warmup=2), observed=OBSERVED),
            Workload(
                n_parameters=10, n_trainable=9, n_samples=None, n_blocks=2, block_class="Block", block_share=0.5, float_buffers=True,
                client_optimizer=False, caveats=["a"],
                environment=Environment(
                    accelerator="cpu", device_name="a", n_devices=2, device_memory_bytes=1, bf16=True, fp16=False, n_cores=2,
                    versions={"torch": "2"},
                ),
            ),
        ],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    def test_what_was_written_reads_back(self, tmp_path: Path, value: Any) -> None:
        write_record(tmp_path / "new" / "value.json", value)
        assert read_record(tmp_path / "new" / "value.json", type(value)) == value

    @given(
        st.builds(
            TrialRequest,
            target=st.text(),
            candidate=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
        )
    )
    def test_any_request_reads_back(self, tmp_path_factory: pytest.TempPathFactory, request_: TrialRequest) -> None:
        path = tmp_path_factory.getbasetemp() / "any-request.json"
        write_record(path, request_, sync=False)
        assert read_record(path, TrialRequest) == request_

    def test_what_is_no_number_is_not_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError):
            write_record(tmp_path / "x.json", {"loss": math.nan})
        assert list(tmp_path.iterdir()) == []

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text('{"codes": "none"}')
        with pytest.raises(ValueError):
            read_record(tmp_path / "x.json", Exit)

    def test_the_fields_of_a_result_stand_side_by_side_as_in_older_folders(self, tmp_path: Path) -> None:
        flat = {"outcome": "complete", "phase": "done", "candidate": {"micro_batch_size": 4}, "losses": [2.0, None]}
        (tmp_path / "result.json").write_text(json.dumps(flat))
        found = read_record(tmp_path / "result.json", TrialResult)
        assert (found.outcome, found.phase, found.losses) == (Outcome.COMPLETE, "done", [2.0, None])
        write_record(tmp_path / "result.json", found)
        assert flat.items() <= json.loads((tmp_path / "result.json").read_text()).items()

    def test_reports_that_are_missing_or_torn_are_left_out(self, tmp_path: Path) -> None:
        folder = TrialDir(tmp_path)
        write_record(folder.report(0), done(0))
        folder.report(1).write_text('{"rank": 1, "outc')
        assert trial_folder.reports(folder, 3) == {0: done(0)}

    @pytest.mark.parametrize("what", ["noise", "folder", "pipe", "link", "deep", "nan", "another rank's", "endless"])
    def test_what_a_rank_leaves_in_place_of_its_report_is_none(
        self, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = TrialDir(tmp_path)
        path, whole = folder.report(1), {"rank": 1, "outcome": "complete", "phase": "done", "other_cores": 0.5}
        match what:
            case "noise":
                path.write_bytes(bytes(range(256)))
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "link":
                path.symlink_to("/dev/zero")
            case "deep":
                path.write_text("[" * 100_000)
            case "nan":
                path.write_text(json.dumps(whole | {"other_cores": math.nan}))
            case "another rank's":
                path.write_text(json.dumps(whole | {"rank": 0}))
            case "endless":
                monkeypatch.setattr(trial_folder, "LARGEST_REPORT_BYTES", 50)
                path.write_text(json.dumps(whole))
        assert trial_folder.reports(folder, 2) == {}

    def test_a_result_that_cannot_be_read_is_none(self, tmp_path: Path) -> None:
        assert result_in(tmp_path) is None
        TrialDir(tmp_path).result.write_text("{")
        assert result_in(tmp_path) is None

    def test_phases_come_from_the_event_stream_torn_or_not(self, tmp_path: Path) -> None:
        folder = TrialDir(tmp_path)
        assert phases(folder) == {}
        events = [
            {"rank": 0, "phase": "build"},
            {"rank": 1, "phase": "import"},
            {"rank": 0, "phase": "warmup"},
            {"rank": 0, "step": 1},
        ]
        folder.events.write_text("\n".join([*map(json.dumps, events), "[1]", '{"rank": 1, "pha']))
        assert phases(folder) == {0: "warmup", 1: "import"}
        nonsense = ['{"rank": 1e999, "phase": "x"}', "[" * 5000, '"phase"', '{"rank": {}, "phase": 1}', "\udcff"]
        with folder.events.open("a", errors="surrogateescape") as file:
            file.write("\n" + "\n".join(nonsense))
        assert phases(folder) == {0: "warmup", 1: "import"}
        folder.events.unlink()
        os.mkfifo(folder.events)  # whoever opened it would wait for ever
        assert phases(folder) == {}


class TestVerdict:
    """Which failure was the first, and what was only its echo."""

    def test_all_ranks_done_is_complete(self) -> None:
        result = merged(done(0), done(1))
        assert (result.outcome, result.reason, result.phase, result.failed_rank) == (Outcome.COMPLETE, "", "done", None)

    def test_it_stays_complete_if_a_process_dies_after_its_report(self) -> None:
        assert (
            merged(done(0), done(1), codes={0: -11, 1: -9}, first_failed=0, killed="deadline").outcome
            is Outcome.COMPLETE
        )

    def test_an_echo_is_not_the_cause_even_if_it_came_first(self) -> None:
        result = merged(
            failed(0, ECHO, at=1.0), failed(1, "ValueError: bad batch", at=2.0), codes={0: 1, 1: 1}, first_failed=0
        )
        assert (result.failed_rank, result.reason) == (1, "ValueError: bad batch")

    def test_of_two_causes_the_earlier_one_is_named(self) -> None:
        result = merged(
            failed(0, "ValueError: late", at=2.0), failed(1, "ValueError: early", at=1.0), codes={0: 1, 1: 1}
        )
        assert result.reason == "ValueError: early"

    def test_an_echo_alone_is_better_than_nothing(self) -> None:
        result = merged(failed(0, ECHO), done(1), codes={0: 1, 1: 0}, first_failed=0)
        assert (result.outcome, result.reason) == (Outcome.CRASHED, ECHO)

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (-11, "rank 1 was killed by signal 11"),
            (3, "rank 1 exited with status 3"),
            (0, "rank 1 exited with status 0 but wrote no result"),
        ],
    )
    def test_a_silent_end_explains_the_echo(self, code: int, reason: str) -> None:
        result = merged(failed(0, ECHO), codes={0: 1, 1: code}, first_failed=1, entered={0: "measure", 1: "warmup"})
        assert (result.outcome, result.reason, result.failed_rank, result.phase) == (
            Outcome.CRASHED,
            reason,
            1,
            "warmup",
        )

    def test_a_rank_that_we_killed_is_no_cause(self) -> None:
        """Rank 1 failed in words that sound like an echo; rank 0 waited for it until the agent ended it."""
        result = merged(
            failed(1, "OSError: connection refused by the data server"),
            codes={0: -9, 1: 1},
            first_failed=1,
            killed="peer",
        )
        assert (result.failed_rank, result.reason) == (1, "OSError: connection refused by the data server")

    def test_of_silent_ranks_the_one_that_fell_first_is_named(self) -> None:
        result = merged(codes={0: -9, 1: -11}, first_failed=1, killed="peer", entered={0: "measure", 1: "measure"})
        assert (result.failed_rank, result.reason) == (1, "rank 1 was killed by signal 11")

    def test_the_kernel_out_of_memory_is_oom(self) -> None:
        end = {"codes": {0: -9, 1: 1}, "first_failed": 0}
        result = merged(failed(1, ECHO), kernel_oom=True, **end)
        assert (result.outcome, result.failed_rank, result.reason) == (
            Outcome.OOM,
            0,
            "rank 0 was killed by the kernel: out of memory",
        )
        assert merged(failed(1, ECHO), kernel_oom=False, **end).outcome is Outcome.CRASHED

    def test_a_kernel_oom_elsewhere_does_not_excuse_a_crash(self) -> None:
        assert merged(codes={0: -11, 1: -9}, first_failed=0, killed="peer", kernel_oom=True).outcome is Outcome.CRASHED

    def test_the_watchdogs_exit_status_is_oom_without_a_report(self) -> None:
        result = merged(codes={0: OOM_EXIT_CODE, 1: -9}, first_failed=0, killed="peer", entered={0: "warmup"})
        assert (result.outcome, result.failed_rank, result.phase) == (Outcome.OOM, 0, "warmup")

    @pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.DIVERGED, Outcome.NOT_APPLIED])
    def test_a_reported_outcome_stands(self, outcome: Outcome) -> None:
        result = merged(failed(0, "why", outcome=outcome), failed(1, ECHO), codes={0: 1, 1: 1}, first_failed=1)
        assert (result.outcome, result.reason, result.failed_rank) == (outcome, "why", 0)

    def test_the_deadline_is_a_timeout_in_the_phase_of_the_slowest(self) -> None:
        result = merged(codes={0: -9, 1: -9}, killed="deadline", entered={0: "measure", 1: "initialize"})
        assert (result.outcome, result.reason, result.phase) == (Outcome.TIMEOUT, "no end within 60 s", "initialize")

    def test_a_failure_just_before_the_deadline_is_the_failure(self) -> None:
        result = merged(failed(1, "ValueError: x"), codes={0: -9, 1: 1}, first_failed=1, killed="deadline")
        assert (result.outcome, result.reason) == (Outcome.CRASHED, "ValueError: x")

    def test_a_cancelled_trial_is_lost_whatever_it_wrote(self) -> None:
        for reports in ((), (done(0), done(1)), (failed(0, "ValueError: x"),)):
            assert merged(*reports, codes={0: -9, 1: -9}, killed="cancel").outcome is Outcome.LOST

    def test_a_rank_without_a_report_is_no_complete_trial(self) -> None:
        result = merged(done(0), codes={0: 0, 1: 0}, first_failed=1)
        assert (result.outcome, result.reason) == (Outcome.CRASHED, "rank 1 exited with status 0 but wrote no result")

    @given(
        st.lists(st.sampled_from(["none", "done", "echo", "cause", "oom"]), min_size=2, max_size=2),
        st.lists(st.sampled_from([0, 1, 77, -9, -11]), min_size=2, max_size=2),
        st.sampled_from([None, 0, 1]),
        st.sampled_from([None, "peer", "deadline", "cancel", "processes"]),
        st.booleans(),
    )
    def test_every_end_has_a_verdict(
        self, kinds: list[str], codes: list[int], first: int | None, killed: str | None, kernel: bool
    ) -> None:
        make = {
            "done": done,
            "echo": lambda rank: failed(rank, ECHO),
            "cause": lambda rank: failed(rank, "ValueError: x"),
            "oom": lambda rank: failed(rank, "too much", outcome=Outcome.OOM),
        }
        reports = [make[kind](rank) for rank, kind in enumerate(kinds) if kind != "none"]
        note = "it started more than 9 processes" if killed == "processes" else ""
        result = merged(
            *reports, codes=dict(enumerate(codes)), first_failed=first, killed=killed, kernel_oom=kernel, note=note
        )
        by_us = killed in ("cancel", "processes")
        assert (result.outcome is Outcome.COMPLETE) == (kinds == ["done", "done"] and not by_us)
        assert result.reason or result.outcome is Outcome.COMPLETE
        assert by_us or "cause" not in kinds or result.reason in ("ValueError: x", "too much")


def test_no_text_of_a_rank_commands_a_terminal(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    write_record(folder.exit, Exit(codes={0: 1}))
    write_record(folder.report(0), failed(0, "ValueError: \x1b]0;title\x07 bad", caveats=["odd \x1b[2J"]))
    result = base.conclude(folder, replace(REQUEST, world_size=1))
    assert result.reason == r"ValueError: \x1b]0;title\x07 bad" and result.caveats == [r"odd \x1b[2J"]


class TestMerge:
    """One result from the ranks' reports."""

    def test_times_are_rank_0s_and_cpu_is_summed(self) -> None:
        result = merged(done(0), done(1, cpu_times_s=[0.25] * 7), wall_s=9.0)
        assert result.steps is not None and (result.steps.median_s, result.steps.n_steps) == (1.0, 5)
        assert result.cpu_s_per_step == 0.75
        assert (result.samples_per_step, result.losses, result.wall_s) == (16, [2.0, 1.0], 9.0)

    def test_memory_and_phases_are_the_highest(self) -> None:
        first = done(
            0,
            peak_memory_bytes={"forward": 5, "step": 9},
            phase_times_s={"data": 1.0, "step": 2.0},
            startup_s={"build": 1.0},
        )
        second = done(
            1, peak_memory_bytes={"forward": 7}, phase_times_s={"data": 3.0, "step": 1.0}, startup_s={"build": 4.0}
        )
        result = merged(first, second)
        assert (result.memory_by_phase_bytes, result.peak_memory_bytes) == ({"forward": 7, "step": 9}, 9)
        assert result.phase_times_s == {"data": 3.0, "step": 2.0}
        assert result.startup_s == {"build": 4.0}

    def test_on_cuda_the_reserved_bytes_are_the_peak(self) -> None:
        memory = {"peak_memory_bytes": {"forward": 5}, "alloc_retries": 1}
        result = merged(done(0, reserved_memory_bytes=8, **memory), done(1, reserved_memory_bytes=11, **memory))
        assert (result.peak_memory_bytes, result.memory_by_phase_bytes, result.alloc_retries) == (11, {"forward": 5}, 2)

    def test_what_was_measured_before_a_failure_is_kept(self) -> None:
        result = merged(
            done(0, outcome=Outcome.DIVERGED, reason="nan", losses=[2.0, None]), failed(1, ECHO), codes={0: 1, 1: 1}
        )
        assert result.outcome is Outcome.DIVERGED and result.losses == [2.0, None] and result.steps is not None

    def test_without_observation_nothing_is_scored(self) -> None:
        result = merged(
            failed(0, "ValueError: x", step_times_s=STEPS), codes={0: 1, 1: -9}, killed="peer", first_failed=0
        )
        assert result.steps is None and result.observed is None and result.step_times_s == []

    def test_too_few_steps_have_no_summary(self) -> None:
        result = merged(done(0, step_times_s=[1.0, 2.0]), done(1))
        assert result.outcome is Outcome.COMPLETE and result.steps is None and result.cpu_s_per_step is None

    def test_caveats_of_all_ranks_are_told_once(self) -> None:
        assert merged(done(0, caveats=["b", "a"]), done(1, caveats=["a"])).caveats == ["a", "b"]


class TestMismatch:
    """What was asked for and did not run."""

    @pytest.mark.parametrize(
        ("seen", "asked", "message"),
        [
            ({}, {}, None),
            ({"micro_batch_size": 8}, {}, None),  # `collate` may make two rows of a sample: the loader's count stands
            ({"micro_batch_size": 2, "loader_batch_size": None}, {}, "micro_batch_size: 4 was asked for, 2 ran"),
            (
                {"micro_batch_size": None, "loader_batch_size": None},
                {},
                "micro_batch_size: 4 was asked for, a varying number ran",
            ),
            ({"gradient_accumulation_steps": 1}, {}, "gradient_accumulation_steps: 2 was asked for, 1 ran"),
            ({"zero_stage": 0}, {}, "zero_stage: 1 was asked for, 0 ran"),
            ({}, {"precision": "bf16"}, "dtype: bfloat16 was asked for, float32 ran"),
            ({}, {"precision": "torch_autocast"}, "precision: torch_autocast was asked for, but it was off"),
            ({"autocast": "bfloat16"}, {"precision": "torch_autocast"}, None),
            ({}, {"checkpoint_every": 1}, "checkpoint_every: no block was checkpointed"),
            ({"checkpointed_blocks": 1}, {"checkpoint_every": 1}, None),
            ({"samples_per_step": 15}, {}, "global batch: 16 was asked for, 15 ran"),
        ],
    )
    def test_it_is_named(self, seen: dict[str, Any], asked: dict[str, Any], message: str | None) -> None:
        assert replace(OBSERVED, **seen).mismatch(replace(CANDIDATE, **asked), 2) == message


class TestSeveralMachines:
    """One end from those of all machines."""

    REQUEST = TrialRequest(target="m.py", world_size=2, nodes=2)

    def end(self, *ends: tuple[int, Exit], reports: tuple[RankReport, ...] = (), note: str = "") -> TrialResult:
        return conclude.merge(self.REQUEST, {r.rank: r for r in reports}, conclude.joined(dict(ends), 2, note))

    def test_the_machine_that_failed_first_is_the_cause_wherever_the_others_were_killed(self) -> None:
        result = self.end(
            (0, Exit(codes={0: -9}, killed="peer", wall_s=3.0)),
            (1, Exit(codes={1: -11}, first_failed=1, failed_at=5.0, wall_s=2.0)),
        )
        assert (result.outcome, result.failed_rank, result.reason) == (
            Outcome.CRASHED,
            1,
            "rank 1 was killed by signal 11",
        )
        assert result.wall_s == 3.0

    def test_an_echo_on_one_machine_does_not_hide_the_silent_death_on_another(self) -> None:
        echo = RankReport(
            rank=0, outcome=Outcome.CRASHED, phase="measure", reason="Connection closed by peer", failed_at=6.0
        )
        first = Exit(codes={0: 1}, first_failed=0, failed_at=6.0)
        result = self.end((0, first), (1, Exit(codes={1: -6}, first_failed=1, failed_at=5.0)), reports=(echo,))
        assert result.reason == "rank 1 was killed by signal 6"

    @pytest.mark.parametrize("code", [1, -6])
    def test_who_loses_a_peer_to_the_deadline_of_another_machine_has_not_failed(self, code: int) -> None:
        echo = RankReport(
            rank=0, outcome=Outcome.CRASHED, phase="measure", reason="Connection closed by peer", failed_at=5.1
        )
        late, killed = (
            Exit(codes={0: code}, first_failed=0, failed_at=5.1),
            Exit(codes={1: -9}, killed="deadline", failed_at=5.0),
        )
        result = self.end((0, late), (1, killed), reports=(echo,) if code == 1 else ())
        assert (result.outcome, result.reason, result.failed_rank) == (Outcome.TIMEOUT, "no end within 300 s", None)

    def test_who_failed_before_the_deadline_of_another_machine_is_the_cause(self) -> None:
        failure = RankReport(rank=0, outcome=Outcome.CRASHED, phase="init", reason="Connection refused", failed_at=4.0)
        early, killed = (
            Exit(codes={0: 1}, first_failed=0, failed_at=4.0),
            Exit(codes={1: -9}, killed="deadline", failed_at=5.0),
        )
        result = self.end((0, early), (1, killed), reports=(failure,))
        assert (result.outcome, result.reason, result.failed_rank) == (Outcome.CRASHED, "Connection refused", 0)

    def test_a_machine_without_a_word_loses_the_trial(self) -> None:
        result = self.end((0, Exit(codes={0: 1}, first_failed=0, failed_at=1.0)))
        assert (result.outcome, result.reason) == (Outcome.LOST, "machine 1 of 2 left no word")

    def test_what_the_engine_says_goes_before_that(self) -> None:
        assert self.end((0, Exit(codes={0: -15})), note="slurm: a node failed").reason == "slurm: a node failed"

    def test_reports_of_all_ranks_count_even_if_an_agent_died_behind_them(self) -> None:
        done = tuple(RankReport(rank=n, outcome=Outcome.COMPLETE, phase="done") for n in range(2))
        assert self.end((0, Exit(codes={0: 0})), reports=done).outcome is Outcome.COMPLETE

    def test_the_ends_are_read_from_the_folder(self, tmp_path: Path) -> None:
        folder = TrialDir(tmp_path)
        write_record(folder.node_exit(1, 2), Exit(codes={1: 0}))
        (tmp_path / "exit-0.json").write_text('{"codes": {"0')  # still being carried
        assert trial_folder.ends(folder, 2) == {1: Exit(codes={1: 0})}
        assert folder.node_exit(0, 1) == folder.exit

    def test_events_of_all_machines_tell_the_phases(self, tmp_path: Path) -> None:
        folder = TrialDir(tmp_path)
        for node, phase in enumerate(("measure", "warmup")):
            folder.events_of(node).write_text(json.dumps({"rank": node, "phase": phase}) + "\n")
        assert phases(folder) == {0: "measure", 1: "warmup"}
