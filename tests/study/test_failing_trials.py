"""Trials that fail: what the search makes of them, and when it gives up."""

from collections import Counter
from dataclasses import replace

import pytest
from support.instant import Instant, Watcher, failed, plan_of, report, runner_of, spec_of
from support.studies import run, states

from autotune.errors import UserError
from autotune.report import load
from autotune.report.expectations import Expectations
from autotune.space.candidate import Candidate
from autotune.study import measure
from autotune.study.events import EventSink
from autotune.study.setup.remedies import remedy
from autotune.study.storage import records
from autotune.trial.result import Outcome


def test_a_study_goes_on_where_some_trials_fail(tmp_path):
    some = Instant(
        lambda c: (
            failed(Outcome.OOM, "over the limit")
            if c.micro_batch_size > 4 and c != Candidate(micro_batch_size=8)
            else report(c)
        )
    )
    runner, _, _ = run(tmp_path, some, trials=6, finalists=0, memory_filter=False)
    outcomes = {m.outcome for m in runner.state.measured()}
    assert outcomes == {Outcome.COMPLETE, Outcome.OOM}
    assert set(states(runner)) == {"COMPLETE", "PRUNED"}


def test_without_a_baseline_the_others_are_tuned_all_the_same(tmp_path):
    executor = Instant(
        lambda c: failed(Outcome.OOM, "over the limit") if c == Candidate(micro_batch_size=8) else report(c)
    )
    runner, _, watcher = run(tmp_path, executor, trials=5, memory_filter=False)
    assert any("the baseline did not complete (oom: over the limit)" in text for text in watcher.said)
    assert [m.usable for m in runner.state.measured()] == [False, True, True, True, True]
    assert "convergence" not in [o.name for o in runner.state.objectives]


class Flaky:
    """A machine on which one configuration's n-th runs crash, as where a file system fails now and then."""

    def __init__(self, fails, *crashes):
        self.fails, self.crashes, self.n = fails, crashes, 0

    def __call__(self, candidate):
        if not self.fails(candidate):
            return report(candidate)
        self.n += 1
        return failed(Outcome.CRASHED, "RuntimeError: no such share") if self.n in self.crashes else report(candidate)


def is_baseline(candidate):
    return candidate == Candidate(micro_batch_size=8)


def test_a_baseline_that_crashed_is_measured_once_more_so_that_speed_ups_are_stated(tmp_path):
    """One transient crash of the baseline spoilt a study for good: no speed-up, and no way to get one was named."""
    runner, _, watcher = run(tmp_path, Instant(Flaky(is_baseline, 1)), trials=4)
    assert any("measured once more after another trial has completed" in text for text in watcher.said)
    found = load.read(runner.study, tmp_path / "s", series=False)
    assert found.baseline is not None and found.picks["recommended"]["speedup"] is not None
    assert found.trials[0]["outcome"] == "complete" and found.outcomes.count("complete") == 4
    assert runner.state.reference is not None and runner.state.measured()[0].repeats
    assert not any("did not complete" in text for text in found.caveats())
    again, executor, _ = run(tmp_path, trials=4)  # what was measured later is there in a later run, too
    assert not executor.ran and again.state.measured()[0].outcome is Outcome.COMPLETE


@pytest.mark.system
def test_the_search_and_explain_know_a_baseline_that_was_measured_later(tmp_path):
    """They took its settings for such as crash, in each later run."""
    run(tmp_path, Instant(Flaky(is_baseline, 1)), trials=4)
    again, *_ = run(tmp_path, trials=6, stop_below=0.0)
    first = again.proposer.advisor().told(again.study)[0]
    assert first.outcome is Outcome.COMPLETE and first.metrics["step_time_s"] > 0
    assert Expectations(again.study, again.state.folder, {}).told[0] == first


@pytest.mark.system
def test_objectives_that_a_crashed_baseline_cost_are_named_when_it_completes(tmp_path):
    goals = ["latency", "convergence"]
    runner, _, watcher = run(tmp_path, Instant(Flaky(is_baseline, 1)), trials=4, objectives=goals)
    assert [o.name for o in runner.state.objectives] == ["latency"]
    assert any("'convergence' stays left out; --fresh begins anew with it" in text for text in watcher.said)


@pytest.mark.system
def test_a_later_run_measures_a_baseline_that_crashed_twice(tmp_path):
    runner, executor, watcher = run(tmp_path, Instant(Flaky(is_baseline, 1, 2)), trials=4)
    assert sum(map(is_baseline, executor.ran)) == 2  # and no third time
    assert any("did not complete again (crashed: " in text and "--fresh" in text for text in watcher.said)
    (said,) = [t for t in load.read(runner.study, tmp_path / "s").caveats() if "the baseline did not" in t]
    assert said.endswith("the same command measures it once more, and --fresh begins anew")
    again, *_ = run(tmp_path, trials=4)
    assert load.read(again.study, tmp_path / "s").baseline is not None


def test_a_baseline_that_ran_out_of_memory_is_not_measured_again(tmp_path):
    executor = Instant(lambda c: failed(Outcome.OOM, "over the limit") if is_baseline(c) else report(c))
    run(tmp_path, executor, trials=4, memory_filter=False)
    assert sum(map(is_baseline, executor.ran)) == 1


@pytest.mark.cells(1)
@pytest.mark.parametrize(("crashes", "n_again"), [(range(2, 20), 0), ((2,), 1)])
def test_a_crash_of_a_re_measurement_is_followed_by_one_more_try_and_said(tmp_path, crashes, n_again):
    """A trial crashed when it was measured again, and was gone from the answer without a word in the notes."""
    fast = Flaky(lambda c: c.precision == "bf16", *crashes)
    runner, *_ = run(tmp_path, Instant(fast), space=[{"precision": ["fp32", "bf16"]}], trials=2, finalists=1, repeats=1)
    (m,) = [m for m in runner.state.measured() if m.candidate.precision == "bf16"]
    assert len(m.repeats) == n_again
    notes = load.read(runner.study, tmp_path / "s").caveats()
    said = f"trial {m.trial} ended badly when it was measured again: crashed: RuntimeError: no such share"
    assert (said in notes) == (not n_again)


@pytest.mark.system
def test_a_re_measurement_whose_op_can_no_longer_be_built_has_failed_and_is_not_tried_for_ever(tmp_path, monkeypatch):
    """Where the study went on without the compiler of before, it left no result, and was begun again and again."""

    class Ended(Watcher):
        def emit(self, event):
            super().emit(event)
            assert len(self.said) < 30

    changes = {"space": [{"precision": ["fp32", "bf16"]}], "trials": 2}
    run(tmp_path, finalists=0, **changes)
    monkeypatch.setattr(measure, "why_illegal", lambda *_: "cpu_adam cannot be built: no compiler")
    executor = Instant()
    runner = runner_of(tmp_path, executor, watcher=Ended(), finalists=1, repeats=1, **changes)
    runner.run()
    best = next(m for m in runner.state.measured() if m.trial)
    assert best.failed_again == "crashed: cpu_adam cannot be built: no compiler" and not executor.ran


@pytest.mark.cells(1)
@pytest.mark.parametrize("end", [Outcome.OOM, Outcome.CRASHED])
def test_the_best_that_fails_when_it_is_measured_again_is_not_said_to_be_measured_once(tmp_path, end):
    """Where it ran out of memory it stayed the pick of the highest throughput, as one that was measured once."""
    n_ran = Counter()

    def machine(candidate):
        n_ran[candidate] += 1
        fails = candidate.precision == "bf16" and candidate.checkpoint_every == 0 and n_ran[candidate] > 1
        return failed(end, "boom") if fails else report(candidate)

    space = [{"precision": ["fp32", "bf16"], "checkpoint_every": [0, 1]}]
    runner, *_ = run(tmp_path, Instant(machine), space=space, trials=4, goal="throughput")
    found = load.read(runner.study, tmp_path / "s")
    (best,) = [
        t["trial"]
        for t in found.trials
        if (t["candidate"]["precision"], t["candidate"]["checkpoint_every"]) == ("bf16", 0)
    ]
    why = "it ran out of memory" if end is Outcome.OOM else "it failed"
    assert f"trial {best} reads better, but {why} when it was measured again" in found.picks["recommended"]["reasons"]
    assert (found.picks["highest_throughput"]["trial"] == best) == (end is Outcome.CRASHED)
    assert f"trial {best} ended badly when it was measured again: {end}: boom" in found.caveats()


def test_a_baseline_that_runs_out_of_memory_when_it_is_measured_again_is_said_to_be_no_answer(tmp_path):
    """What was recommended read 0.93x its throughput, without a word on why."""
    n_ran = Counter()

    def machine(candidate):
        n_ran[candidate] += 1
        fails = not candidate.checkpoint_every and n_ran[candidate] > 1
        return failed(Outcome.OOM, "boom") if fails else report(candidate)

    runner, *_ = run(tmp_path, Instant(machine), space=[{"checkpoint_every": [0, 1]}], trials=2, goal="throughput")
    found = load.read(runner.study, tmp_path / "s")
    assert found.picks["recommended"]["trial"] == 1
    why = "it ran out of memory when it was measured again"
    assert f"others are compared with the baseline, but it cannot be recommended: {why}" in found.caveats()


def test_a_baseline_that_passes_its_deadline_says_what_gives_it_more_time(tmp_path):
    """A large model takes minutes to load."""
    slow = Instant(
        lambda c: failed(Outcome.TIMEOUT, "no end within 300 s") if c == Candidate(micro_batch_size=8) else report(c)
    )
    runner, *_ = run(tmp_path, slow, trials=2, finalists=0)
    first = records.told_data(records.told_trials(runner.study)[0])
    assert first["reason"].startswith("no end within 300 s; --trial-deadline gives it more")


# Models whose types do not mix.

MIXED = "RuntimeError: expected scalar type Float but found BFloat16"
WITH_AUTOCAST = {
    "micro_batch_size": [4, 8],
    "precision": ["fp32", "bf16", "torch_autocast"],
    "checkpoint_every": [0, 1],
}


def mixed(candidate):
    return failed(Outcome.CRASHED, MIXED) if candidate.precision == "bf16" else report(candidate)


@pytest.mark.system
def test_a_dtype_mismatch_is_tried_again_under_autocast_and_twice_is_enough(tmp_path):
    runner, executor, watcher = run(tmp_path, Instant(mixed), trials=12, finalists=0, space=[WITH_AUTOCAST])
    bf16 = [n for n, candidate in enumerate(executor.ran) if candidate.precision == "bf16"]
    assert len(bf16) == 2 and len(set(executor.ran)) == len(executor.ran) == 4 + 2 + 4
    for n in bf16:
        again = replace(executor.ran[n], precision="torch_autocast")
        # The next trial, unless it had been measured already.
        assert again in executor.ran[: n + 2]
    assert any("bf16 is no longer proposed" in text for text in watcher.said)
    reasons = [records.told_data(told)["reason"] for told in records.told_trials(runner.study)]
    assert all("under torch_autocast" in reason for reason in reasons if reason)


@pytest.mark.system
def test_without_autocast_in_the_space_the_reason_says_what_to_do(tmp_path):
    runner, executor, _ = run(
        tmp_path, Instant(mixed), trials=10, finalists=0
    )  # the space of `instant` has no autocast
    reasons = [reason for told in records.told_trials(runner.study) if (reason := records.told_data(told)["reason"])]
    assert len(reasons) == 2 and all("add it to `precision` in the study's space" in reason for reason in reasons)
    assert {candidate.precision for candidate in executor.ran[-3:]} == {"fp32"}


def test_a_resumed_study_still_owes_the_try_under_autocast(tmp_path):
    bf16 = Candidate(micro_batch_size=8, precision="bf16")
    first = runner_of(tmp_path, Instant(mixed), trials=1, finalists=0, space=[WITH_AUTOCAST], baseline=bf16)
    first.run()
    executor = Instant(mixed)
    runner_of(tmp_path, executor, trials=2, finalists=0, space=[WITH_AUTOCAST], baseline=bf16).run()
    assert executor.ran == [replace(bf16, precision="torch_autocast")]


def test_what_was_asked_for_and_not_seen_comes_with_the_remedy(tmp_path):
    reason = "micro_batch_size: 4 was asked for, 8 ran"

    def unmoved(candidate):
        return report(candidate) if candidate.micro_batch_size == 8 else failed(Outcome.NOT_APPLIED, reason)

    target = replace(plan_of(spec_of()).target, kind="script")
    runner = runner_of(tmp_path, Instant(unmoved), trials=6, finalists=0, planned={"target": target})
    runner.run()
    reasons = {text for told in records.told_trials(runner.study) if (text := records.told_data(told)["reason"])}
    ways = ("`--flag {micro_batch_size}`", "`--set NAME={micro_batch_size}`", "'NAME={micro_batch_size} torchrun ...'")
    assert len(reasons) == 1 and all(way in next(iter(reasons)) for way in ways)
    assert remedy("zero_stage: 1 was asked for") == "" and remedy(reason + remedy(reason)) == ""


@pytest.mark.system
def test_a_precision_that_has_worked_once_stays(tmp_path):
    """Only some configurations mix types."""

    def sometimes(candidate):
        return mixed(candidate) if candidate.checkpoint_every else report(candidate)

    _, executor, watcher = run(
        tmp_path, Instant(sometimes), trials=12, finalists=0, space=[WITH_AUTOCAST], sampler="grid"
    )
    assert len(executor.ran) == 12 and not any("no longer proposed" in text for text in watcher.said)


# Scripts that are over early.


@pytest.mark.system
def test_a_batch_with_which_the_script_is_over_leaves_out_the_larger_ones(tmp_path):
    """A script of one epoch crashed with one large batch after the other before the search had learned it."""
    reason = "the script ended by itself after 2 optimizer steps, and 3 are needed: give it more steps or more data"

    def short(candidate):
        return failed(Outcome.TOO_FEW_STEPS, reason) if candidate.global_batch_size(1) > 32 else report(candidate)

    space = [{"micro_batch_size": [4, 8, 16, 32, 64], "gradient_accumulation_steps": [1, 2, 4]}]
    asked = {"trials": 20, "finalists": 0, "space": space, "sampler": "grid", "global_batch": "free"}
    runner, executor, watcher = run(tmp_path, Instant(short), **asked)
    over = [c.global_batch_size(1) for c in executor.ran if c.global_batch_size(1) > 32]
    assert over == sorted(over, reverse=True) and len(set(over)) == len(over)
    left_out = [text for text in watcher.said if "are not tried: the script is over after" in text]
    assert len(left_out) == len(over) and records.LEFT_OUT.of(runner.study)["few steps"] == left_out[-1]
    again = Instant(short)
    runner_of(tmp_path, again, **asked | {"trials": 25}).run()
    assert all(c.global_batch_size(1) < min(over) for c in again.ran)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("outcome", "reasons", "n", "said"),
    [
        (Outcome.CRASHED, ["TypeError: model() is broken"], 4, "all ended the same way: crashed: TypeError"),
        (Outcome.CRASHED, ["rank {n} exited with status 0"], 4, "all ended the same way: crashed: rank"),
        (
            Outcome.DIVERGED,
            ["the loss was not finite", "updates were skipped"],
            8,
            "all failed; the baseline: diverged",
        ),
    ],
)
def test_a_target_that_always_fails_stops_the_study(tmp_path, outcome, reasons, n, said):
    executor = Instant()
    executor.behaviour = lambda _: failed(
        outcome, reasons[len(executor.ran) % len(reasons)].format(n=len(executor.ran))
    )
    first = f"the first {n} trials, the baseline among them,"
    with pytest.raises(UserError, match=rf"{first} {said}.*rank-0\.log\); mend that, then start over with --fresh"):
        run(tmp_path, executor, trials=30)
    assert len(executor.ran) == n
    found = runner_of(tmp_path, executor, trials=30)
    found.open()
    assert found.state.study.user_attrs[records.ENDED_ATTR] == f"{first} all failed"


@pytest.mark.system
def test_a_broken_target_stays_stopped_when_it_is_run_again(tmp_path):
    broken = lambda _: failed(Outcome.CRASHED, "TypeError: no")  # noqa: E731
    for _ in range(2):
        executor = Instant(broken)
        with pytest.raises(UserError, match="the first 4 trials"):
            run(tmp_path, executor, trials=30)
    assert executor.ran == []


def test_out_of_memory_is_no_reason_to_give_up(tmp_path):
    executor = Instant(lambda c: failed(Outcome.OOM, "over the limit") if len(executor.ran) < 9 else report(c))
    runner, _, _ = run(tmp_path, executor, trials=11, finalists=0)
    assert [m.usable for m in runner.state.measured()].count(True) > 0


def test_a_trial_whose_watcher_dies_is_run_again_at_once(tmp_path):
    executor = Instant()

    class Killing(EventSink):
        def ended(self, _):
            executor.lost = 1 if len(executor.ran) == 2 else 0

    runner = runner_of(tmp_path, executor, trials=4, finalists=0, watcher=Killing())
    runner.run()
    assert len(executor.ran) == 5
    assert executor.ran[2] == executor.ran[3]
    assert states(runner) == ["COMPLETE"] * 4


def test_a_candidate_that_is_lost_twice_has_crashed_so_that_a_study_ends(tmp_path):
    executor = Instant()
    executor.lost = 2
    runner, _, _ = run(tmp_path, executor, trials=3, finalists=0)
    first = runner.state.measured()[0]
    assert first.outcome is Outcome.CRASHED
    assert len(executor.ran) == 4
