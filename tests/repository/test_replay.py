"""Trials answered from a table: the same study, the same files, none of the seconds."""

import itertools
from pathlib import Path

import pytest
from support.instant import SPACE, Watcher, plan_of, report, spec_of
from support.paths import BENCHMARKS

from autotune.executors import base
from autotune.scoring import step_times
from autotune.space.candidate import Candidate
from autotune.study.runner import Runner
from autotune.study.storage import records
from autotune.trial.request import TrialRequest, TrialToBeat
from autotune.trial.result import Outcome

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    from replay import ReplayExecutor, Row, TableError, read_table, write_table

SOME = Candidate.of({"micro_batch_size": 4, "zero_stage": 2, "zero_optimization.overlap_comm": True})


def row(candidate: Candidate, repeat: int = 0, factor: float = 1.0, **values: float) -> Row:
    """What the instant engine would have measured."""
    seen = report(candidate)
    median = factor * seen.step_times_s[10]
    size = 10**8 + 10**6 * candidate.micro_batch_size
    known = {
        "step_time_s": median, "ci95_s": 0.01 * median, "n_steps": 20.0, "peak_memory_bytes": float(size),
        "samples_per_step": float(candidate.global_batch_size(1)), "startup_s": 0.5, "inner_s": 0.4 * median, "boundary_s": 0.6 * median,
    }  # fmt: skip
    return Row(
        candidate=candidate,
        repeat=repeat,
        outcome=Outcome.COMPLETE,
        values={**known, **values},
        losses=[3.0, 2.0, 1.5, 1.2],
    )


def request(candidate: Candidate, **what: object) -> TrialRequest:
    return TrialRequest(target="model.py", candidate=candidate.values(), world_size=2, **what)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_table_reads_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    rows = [
        row(SOME),
        Row(candidate=Candidate(micro_batch_size=2), repeat=1, outcome=Outcome.OOM, reason="over the limit"),
    ]
    write_table(tmp_path / name, rows)
    again = read_table(tmp_path / name)
    assert [r.candidate for r in again] == [r.candidate for r in rows] and again[1].outcome is Outcome.OOM
    assert again[0].values == pytest.approx(rows[0].values, rel=1e-5) and again[0].losses == rows[0].losses


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "repeat,outcome,reason,losses\n0,fine,,\n"])
def test_what_is_no_table_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    if text:
        with pytest.raises(TableError, match="not a truth table"):
            read_table(tmp_path / "t.csv")
    with pytest.raises(TableError, match=r"no\.csv: No such file"):
        read_table(tmp_path / "no.csv")


def test_a_trial_is_answered_with_what_was_measured(tmp_path: Path) -> None:
    executor = ReplayExecutor([row(SOME)])
    result = base.run(executor, tmp_path / "0001", request(SOME))
    assert result.outcome is Outcome.COMPLETE and result.world_size == 2
    assert result.steps is not None and result.steps.median_s == pytest.approx(
        row(SOME).values["step_time_s"], rel=0.01
    )
    assert result.peak_memory_bytes == 10**8 + 4 * 10**6 and result.samples_per_step == 4
    assert result.losses[0] == pytest.approx(3.0) and result.losses[-1] == pytest.approx(1.2)
    assert result.micro_step_s["inner"] > 0
    assert result.wall_s == pytest.approx(0.5 + sum(result.step_times_s)) == pytest.approx(executor.spent_s)
    assert executor.launched == [SOME]


def test_each_repeat_is_asked_for_in_turn(tmp_path: Path) -> None:
    executor = ReplayExecutor([row(SOME, n, factor) for n, factor in enumerate((1.0, 2.0, 4.0))], seed=3)
    seen = [base.run(executor, tmp_path / str(n), request(SOME)).steps for n in range(6)]
    medians = [round(steps.median_s / row(SOME).values["step_time_s"]) for steps in seen if steps]
    assert sorted(medians[:3]) == [1, 2, 4] and medians[3:] == medians[:3]


def test_a_stated_limit_below_what_was_needed_runs_out_of_memory(tmp_path: Path) -> None:
    result = base.run(ReplayExecutor([row(SOME)]), tmp_path / "1", request(SOME, device_memory_bytes=10**8))
    assert result.outcome is Outcome.OOM and "over the stated limit" in result.reason


def test_a_trial_that_its_rivals_beat_is_stopped_as_a_real_one(tmp_path: Path) -> None:
    rival = TrialToBeat(trial=3, step_time_s=0.0, peak_memory_bytes=0.0)
    result = base.run(ReplayExecutor([row(SOME, factor=20.0)]), tmp_path / "1", request(SOME, rivals=(rival,)))
    assert result.outcome is Outcome.STOPPED_EARLY and len(result.step_times_s) == step_times.SETUP_STEPS + 1
    assert "worse than trial 3" in result.reason


def test_what_the_table_does_not_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="holds no measurement of micro-batch 8 x 1"):
        base.run(ReplayExecutor([row(SOME)]), tmp_path / "1", request(Candidate(micro_batch_size=8)))


def test_a_whole_study_is_replayed_from_a_file(tmp_path: Path) -> None:
    plan = plan_of(
        spec_of(
            sampler="physics",
            trials=14,
            stop_below=0,
            finalists=2,
            repeats=1,
            space=[SPACE],
            objectives=["latency", "throughput", "memory"],
        )
    )
    legal = [plan.baseline, *(c for c in plan.space.candidates(plan.baseline) if c != plan.baseline)]
    write_table(tmp_path / "t.csv.gz", [row(c, repeat) for c, repeat in itertools.product(legal, range(2))])
    executor = ReplayExecutor(read_table(tmp_path / "t.csv.gz"))
    runner = Runner(plan, executor, tmp_path / "s", records.default_url(tmp_path), Watcher())  # type: ignore[arg-type]
    runner.run()
    measured = runner.state.measured()
    assert measured[0].usable and len({m.candidate for m in measured}) == len(measured) >= 12
    best = max(legal, key=lambda c: c.global_batch_size(1) / row(c).values["step_time_s"])
    assert best in {m.candidate for m in measured}
