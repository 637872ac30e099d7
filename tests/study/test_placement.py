"""Trials on other machines than the baseline's are compared with the baseline on theirs."""

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.instant import STEPS, Instant, Watcher, report, runner_of

from autotune.scoring import recommend, step_times
from autotune.scoring.estimates import estimate
from autotune.study import placement
from autotune.study.folder import trial_path
from autotune.study.storage import database, records
from autotune.study.storage.leases import StudyLeases
from autotune.trial.folder import result_in, write_record
from autotune.trial.request import TrialToBeat
from autotune.trial.result import Outcome, TrialResult


class Moving(Instant):
    """An engine whose trials run at half the pace, on another machine, from the third one on."""

    def __init__(self) -> None:
        super().__init__(self.moved)
        self.hosts, self.held = frozenset({"a"}), False

    @contextmanager
    def turn(self, _):
        self.held = True
        yield
        self.held = False

    def moved(self, candidate):
        assert self.held, "it disturbed another study's trial"
        away = len(self.ran) > 2
        self.hosts = frozenset({"b" if away else "a"})
        whole = report(candidate, host="b" if away else "a", machine="slow" if away else "quick")
        whole.step_times_s = [each * (2 if away else 1) for each in whole.step_times_s]
        if any(rival.beats(min(whole.step_times_s), 10**9) for rival in self.requests[-1].rivals):
            return replace(whole, outcome=Outcome.STOPPED_EARLY, reason="worse than another trial")
        return whole


def test_the_baseline_is_measured_where_trials_move_to_and_its_pace_taken_out(tmp_path):
    executor, watcher = Moving(), Watcher()
    given = {"trials": 8, "finalists": 0, "sampler": "random", "objectives": ["latency"]}
    runner = runner_of(tmp_path, executor, watcher=watcher, **given)
    runner.run()
    assert sum("the baseline is measured on b (slow), too" in text for text in watcher.said) == 1
    assert executor.ran.count(runner.state.plan.baseline) == 2
    # Each trial there was stopped early by the pace at home, and then measured again.
    ends = [m.outcome for m in runner.state.measured()]
    assert Outcome.STOPPED_EARLY in ends and len(executor.ran) <= len(ends) + 2
    for told in records.told_trials(runner.study):
        expected = step_times.summarise(report(records.told_candidate(told)).step_times_s).median_s
        assert records.told_data(told)["metrics"]["step_time_s"] == pytest.approx(expected)
        takes_twice = any("takes 2.00 times as long" in text for text in records.told_data(told)["caveats"])
        assert takes_twice == (told.number > 1)


def test_a_result_from_machines_without_the_baseline_says_that_it_does_not_compare(tmp_path):
    steps = step_times.summarise([1.0] * 20)
    for number, host in ((0, "a"), (1, "b")):
        result = TrialResult(outcome=Outcome.COMPLETE, steps=steps, hosts=[host], machine="cpu")
        write_record(trial_path(tmp_path, number) / "result.json", result)
    told = placement.like_with_like(tmp_path, result_in(trial_path(tmp_path, 1)))
    assert told.steps == steps and told.caveats == [
        "ran on b (cpu), where the baseline was not measured: its times do not compare"
    ]
    home = result_in(trial_path(tmp_path, 0))
    assert placement.like_with_like(tmp_path, home) == home


def test_what_others_did_to_the_baseline_on_both_machines_is_in_its_pace_there(tmp_path):
    """Each trial of a study whose baseline was read beside others counted as beside them, or as without, twice."""
    steps, paths = step_times.summarise([1.0] * 20), trial_path
    for host, slowed, path in (("a", 0.7, paths(tmp_path, 0)), ("b", 0.4, None), ("b", 0.5, paths(tmp_path, 1))):
        result = TrialResult(outcome=Outcome.COMPLETE, steps=steps, hosts=[host], machine="cpu", log_slowdown=slowed)
        write_record((path or placement.baseline_path(tmp_path, result.place)) / "result.json", result)
    told = placement.like_with_like(tmp_path, result_in(paths(tmp_path, 1)))
    assert told.steps.median_s == pytest.approx(1.0) and told.log_slowdown == pytest.approx(0.7 + 0.5 - 0.4)
    (rival,) = placement.rivals_at(tmp_path, result.place, (TrialToBeat(trial=0, step_time_s=1.0, log_slowdown=0.8),))
    assert rival.step_time_s == pytest.approx(1.0) and rival.log_slowdown == pytest.approx(0.5)


@pytest.mark.system
def test_a_round_in_which_the_baseline_ran_elsewhere_says_nothing(tmp_path):
    """A trial that was measured again on a machine 1.5 times as fast was recommended for that."""
    n_ran = Counter()

    def behaviour(candidate):
        n_ran[candidate] += 1
        away = n_ran[candidate] > 1 and candidate.checkpoint_every == 1
        steps = [0.02 / (1.5 if away else 1.0)] * STEPS
        return report(candidate, step_times_s=steps, host="b" if away else "a", machine="cpu")

    given = {"space": [{"checkpoint_every": [0, 1, 2]}], "objectives": ["latency"], "repeats": 2}
    runner = runner_of(tmp_path, Instant(behaviour), trials=3, finalists=3, **given)
    runner.run()
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.trial == 0


def test_two_threads_never_measure_the_baseline_of_one_place_at_once(tmp_path):
    turns = placement.Turns(StudyLeases(database.open_storage(records.default_url(tmp_path)), "s"))
    inside, most, waiting = [], [], threading.Event()

    def measure() -> None:
        with turns.at("x", waiting.set):
            inside.append(1)
            most.append(len(inside))
            assert waiting.wait(60)  # until another one waits
            inside.pop()

    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
