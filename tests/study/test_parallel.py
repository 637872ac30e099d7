"""Several trials at once in one coordinator."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from support.coordinate import SPACE
from support.instant import Instant, Watcher, plan_of, report, runner_of, spec_of

from autotune.executors.base import Status
from autotune.report import load
from autotune.space.candidate import Candidate
from autotune.study import parallel
from autotune.study.parallel import ClaimedTrial, TrialPool
from autotune.study.runner import Runner
from autotune.study.storage import records
from autotune.trial.result import Outcome, TrialResult


def test_two_slots_run_two_trials_at_once_and_each_candidate_once(tmp_path):
    running, most, begun = [0], [0], [0]

    def behaviour(candidate):
        running[0] += 1
        begun[0] += 1
        most[0] = max(most[0], running[0])
        # Until a second one has come; the baseline, and what reads its noise scale, run alone.
        end = time.monotonic() + (60 if begun[0] > 2 else 0)
        while most[0] < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.1)
        running[0] -= 1
        return report(candidate)

    executor = Instant(behaviour)
    spec = spec_of(trials=5, finalists=0, space=[SPACE], stop_below=0, overlap=True)
    runner = Runner(
        plan_of(spec), executor, tmp_path / "s", records.default_url(tmp_path), Watcher(), [executor, executor]
    )
    runner.run()
    assert most[0] == 2
    measured = runner.state.measured()
    assert len({m.candidate for m in measured}) == len(measured) == 5
    caveats = [records.told_data(t)["caveats"] for t in records.told_trials(runner.study)]
    assert caveats[0] == [] and any("ran on this host at the same time" in text for found in caveats for text in found)


def test_an_overlap_of_one_trial_at_a_time_is_said_to_have_no_effect(tmp_path):
    view = Watcher()
    for overlap in (True, False):
        found = SimpleNamespace(spec=SimpleNamespace(parallel=1, overlap=overlap))
        with parallel.executors_for(found, executor := object(), tmp_path, view) as slots:
            assert slots == [executor]
    assert len(view.said) == 1 and "--overlap has no effect" in view.said[0]


@pytest.mark.system
def test_trials_at_once_do_not_make_the_studys_time_longer_than_it_took(tmp_path):
    """It was the sum of the trials' times, in the answer and in the time that it advised."""

    class Waiting(Instant):
        def submit(self, folder):
            self.until = time.monotonic() + 1.0  # as long as its trials say that they took
            return super().submit(folder)

        def poll(self):
            return Status.EXITED if time.monotonic() > self.until else Status.RUNNING

    began = time.monotonic()
    slots = [Waiting(), Waiting(), Waiting()]
    runner = runner_of(tmp_path, Waiting(), slots=slots, trials=9, finalists=0, stop_trials=False, overlap=True)
    runner.run()
    took_s = time.monotonic() - began
    shown_s = load.load("s", records.default_url(tmp_path), tmp_path / "s").study["wall_s"]
    assert records.WALL_S.of(runner.study) <= shown_s <= took_s


def test_ctrl_c_gives_every_trial_under_way_back(tmp_path):
    executor = Instant(lambda candidate: time.sleep(0.2) or report(candidate))
    runner = runner_of(tmp_path, executor, trials=20, slots=[executor, executor])
    original, calls = runner.proposer.next, [0]

    def interrupted():
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return original()

    runner.proposer.next = interrupted
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert records.running(runner.study) == []
    again = runner_of(tmp_path, Instant(), trials=6, finalists=0)
    again.run()
    assert len(records.told_trials(again.study)) == 6


def test_flights_return_what_ended_and_stop_the_rest():
    flights, both_run = TrialPool([Instant(), Instant()]), threading.Event()

    def quick(executor, tick):
        assert both_run.wait(60)
        return TrialResult(outcome=Outcome.COMPLETE, wall_s=1.0)

    def endless(executor, tick):
        while True:
            tick()
            time.sleep(0.01)

    class Asked:
        number = 1

    one, other = (ClaimedTrial(asked=Asked(), candidate=Candidate(micro_batch_size=n)) for n in (1, 2))
    flights.start(one, quick)
    flights.start(other, endless)
    both_run.set()
    ((claim, result),) = flights.landed(None)
    assert claim is one and "up to 2 trials ran on this host" in result.caveats[0]
    flights.stop()
    assert flights.claims == [other] and flights.results() == {}


def test_the_next_candidate_is_not_sought_beside_one_under_way(tmp_path):
    runner = runner_of(tmp_path, Instant(), trials=8, sampler="physics", finalists=0, stop_below=0)
    runner.run()
    asked = [runner.proposer.claim().candidate for _ in range(4)]
    assert len(set(asked)) == 4
    assert not set(asked) & {m.candidate for m in runner.state.measured()}
