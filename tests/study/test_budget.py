"""What the checks of a study may cost."""

from types import SimpleNamespace

import pytest
from support.instant import Clock, Instant, plan_of, runner_of, spec_of
from support.studies import run

from autotune.executors.base import Status, TimeOver
from autotune.study.budget import CHECK_BUDGETS, CHECK_SHARE, MOST_CLOSING_S, Budget, closing_s
from autotune.study.events import DECIDING_SHARE, UNFINISHED
from autotune.study.runner import CUT
from autotune.study.storage import records
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.result import Outcome, TrialResult


def check_took(folder, wall_s):
    write_record(
        TrialDir(folder / "trials" / "0001" / "gate").result, TrialResult(outcome=Outcome.COMPLETE, wall_s=wall_s)
    )


@pytest.mark.parametrize(
    ("time_budget_s", "trial_budget_s", "spent_s", "room_s", "decisive_s"),
    [
        (None, 4.0, 1000.0, 1000 * CHECK_SHARE, 2000 * CHECK_SHARE),
        (None, 4.0, 10.0, 10 * CHECK_SHARE, 4 * CHECK_BUDGETS),
        (2000.0, 4.0, 900.0, 2000 * CHECK_SHARE, 2000 * DECIDING_SHARE),
        (2000.0, 4.0, 1980.0, 20.0 - MOST_CLOSING_S, 20.0 - MOST_CLOSING_S),
        (2000.0, 4.0, 2001.0, 0.0, 0.0),
    ],
)
def test_checks_have_a_share_of_the_study_and_no_more_than_its_time_budget_leaves(
    monkeypatch, tmp_path, time_budget_s, trial_budget_s, spent_s, room_s, decisive_s
):
    clock = Clock(monkeypatch)
    spec = spec_of(time_budget_s=time_budget_s, trial_budget_s=trial_budget_s)
    budget = Budget(SimpleNamespace(spec=spec, plan=plan_of(spec), exists=False, folder=tmp_path))
    clock.now_s = spent_s
    for decides, expected_s in ((False, room_s), (True, decisive_s)):
        assert budget.check_room_s(decides=decides) == pytest.approx(expected_s)
    check_took(tmp_path, CHECK_SHARE * max(spent_s, time_budget_s or 0.0))
    assert budget.check_room_s() == 0.0


@pytest.mark.parametrize(("startup_s", "trains_s"), [(0.0, 270.0), (200.0, 90.0), (400.0, 0.0)])
def test_a_check_trains_no_longer_than_a_trials_deadline_leaves_after_its_startup(
    monkeypatch, tmp_path, startup_s, trains_s
):
    """A model that takes minutes to load was killed in each of its checks."""
    spec = spec_of(trial_deadline_s=300.0, trial_budget_s=10.0)
    budget = Budget(SimpleNamespace(spec=spec, plan=plan_of(spec), exists=False, folder=tmp_path))
    monkeypatch.setattr(budget, "startup_s", lambda: startup_s)
    assert budget.check_trains_s(1e3) == pytest.approx(trains_s)


def test_a_finished_study_that_is_run_again_is_checked_no_further_however_old_the_command_is(tmp_path, monkeypatch):
    """In a long-lived process the command began long ago, and its age bought checks that changed the answer."""
    settings = {"trials": 2, "finalists": 1, "space": [{"precision": ["fp32", "bf16"]}]}
    first, again = Instant(), Instant()
    run(tmp_path, first, **settings)
    real = Budget.spent_s
    monkeypatch.setattr(Budget, "spent_s", lambda self: real(self) + 1000.0)
    run(tmp_path, again, **settings)
    assert first.gated and not again.gated and not again.requests


def test_a_look_at_a_finished_study_makes_its_answer_no_dearer(tmp_path, monkeypatch):
    """Each further run of the command added its imports to `6 trials in 1 min 20 s`."""
    clock = Clock(monkeypatch)
    settings = {"trials": 2, "finalists": 1}
    run(tmp_path, Instant(clock.takes(10.0)), **settings)
    took_s = clock.now_s
    for _ in range(2):
        runner = runner_of(tmp_path, Instant(), **settings)
        clock.now_s += 25.0
        runner.run()
        assert records.WALL_S.of(runner.study) == pytest.approx(took_s)
    runner = runner_of(tmp_path, Instant(), **settings | {"trials": 3})
    clock.now_s += 25.0
    runner.run()
    assert records.WALL_S.of(runner.study) == pytest.approx(took_s + 25.0)


class Late(Instant):
    """An engine whose time is over in the trial with a given number, counted from 0: that one never ends by itself."""

    def __init__(self, number):
        super().__init__()
        self.number, self.cancelled = number, 0

    def poll(self):
        n = len(self.requests) - 1
        if n < self.number or self.cancelled:
            return Status.EXITED
        self.over = True
        return Status.RUNNING

    def cancel(self):
        self.cancelled += 1


def test_a_trial_that_the_time_budget_cuts_is_ended_and_not_measured(tmp_path):
    executor = Late(3)
    runner, _, watcher = run(tmp_path, executor, trials=10, finalists=0, time_budget_s=1e4, objectives=["latency"])
    assert executor.cancelled == 1 and [m.trial for m in runner.state.measured() if m.usable] == [0, 1, 2]
    assert (
        watcher.said[-1]
        == "the time budget of 10000 s has no room for a further trial after 3 trials; a larger --time-budget goes on"
    )
    again, executor, _ = run(tmp_path, trials=4, finalists=0, time_budget_s=1e4, objectives=["latency"])
    assert len(executor.ran) == 1 and sum(m.usable for m in again.state.measured()) == 4


@pytest.mark.system
def test_a_repeat_that_the_time_budget_cuts_ends_the_study_with_what_was_measured(tmp_path):
    executor = Late(7)
    runner, _, watcher = run(tmp_path, executor, trials=6, time_budget_s=1e4, objectives=["latency"])
    assert executor.cancelled == 1 and sum(len(m.repeats) for m in runner.state.measured()) == 1
    assert watcher.said[-1].startswith("the time budget ended before the best were checked and measured again")


def test_a_time_budget_that_ends_in_the_noise_probe_keeps_the_batch_and_in_the_baseline_ends_the_run(tmp_path):
    goals = ["latency", "convergence"]
    _, executor, watcher = run(tmp_path, Late(1), trials=3, finalists=0, time_budget_s=1e4, objectives=goals)
    assert executor.requests[1].noise and len(executor.ran) == 1
    assert any("the time budget ended in the probe of the gradient noise scale" in text for text in watcher.said)
    with pytest.raises(TimeOver):
        run(tmp_path / "other", Late(0), trials=3, time_budget_s=1e4, objectives=goals)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("room", "n_again"), [(2.5, 2), (3.5, 3), (0.5, 0)])
def test_a_round_holds_as_many_of_the_best_as_the_time_budget_has_room_for(tmp_path, monkeypatch, room, n_again):
    """Each trial takes a second, as its result says."""
    run(tmp_path, trials=3, finalists=0, objectives=["latency"])
    executor = Instant()
    monkeypatch.setattr(Budget, "room_s", lambda _: room - len(executor.ran))
    runner, _, _ = run(tmp_path, executor, trials=3, finalists=2, repeats=1, objectives=["latency"])
    assert len(executor.ran) == n_again
    # A later `status` said nothing of it where all trials were spent.
    assert runner.study.user_attrs[records.ENDED_ATTR] == (CUT if room < 3 else "")


@pytest.mark.parametrize(
    ("time_budget_s", "trial_budget_s", "trains_s"),
    [(None, 10.0, 10.0), (1000.0, 10.0, 10.0), (60.0, 10.0, 3.0), (10.0, 10.0, 1.0), (60.0, 8.0, 8.0)],
)
def test_a_trial_of_a_short_study_trains_for_a_share_of_it_unless_stated(
    tmp_path, time_budget_s, trial_budget_s, trains_s
):
    spec = spec_of(time_budget_s=time_budget_s, trial_budget_s=trial_budget_s)
    budget = Budget(SimpleNamespace(spec=spec, plan=plan_of(spec), exists=False, folder=tmp_path))
    assert budget.trial_s == trains_s


@pytest.mark.parametrize(
    ("budget_s", "load", "seconds"), [(50.0, 0.5, 2.5), (50.0, 2.0, 5.0), (25.0, 9.0, 6.0), (9e3, 0.0, 10.0)]
)
def test_a_busy_machine_is_given_longer_to_write_the_answer(monkeypatch, budget_s, load, seconds):
    monkeypatch.setattr("autotune.study.budget.load_per_core", lambda: load)
    assert closing_s(budget_s) == pytest.approx(seconds)


def test_the_time_left_is_shared_by_the_trials_that_run_at_once(tmp_path, monkeypatch):
    """With --parallel 4 it was four times too long."""
    executor = Instant(Clock(monkeypatch).takes(1.0))
    _, _, watcher = run(tmp_path, executor, slots=[executor] * 4, trials=9, finalists=0)
    assert watcher.ended_with[0].left_s == 2.0


def test_the_time_left_counts_the_rounds_that_usually_follow_and_is_stored_for_those_who_watch(tmp_path, monkeypatch):
    """Each trial takes a second; two finalists and the baseline are measured again, in a round at least and four at most."""
    clock = Clock(monkeypatch)
    executor = Instant(clock.takes(1.0))
    runner, _, watcher = run(
        tmp_path, executor, trials=6, objectives=["latency"], space=[{"micro_batch_size": [2, 4, 6, 8, 10, 12]}]
    )
    left = [told.left_s for told in watcher.ended_with if told.role != "repeat"]
    assert all(5 - n + 3 < left_s < 5 - n + 4 * 3 for n, left_s in enumerate(left)) and len(left) == 6
    assert records.ENDS_S.of(runner.study) == records.WALL_S.of(runner.study) == pytest.approx(clock.now_s)


def test_the_checks_of_a_quick_study_buy_no_further_ones(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    spec = spec_of(quick=True, trial_budget_s=0.1)
    budget = Budget(SimpleNamespace(spec=spec, plan=plan_of(spec), exists=False, folder=tmp_path))
    clock.now_s = 30.0
    assert budget.check_room_s(decides=True) == pytest.approx(60.0)
    clock.now_s = 80.0
    check_took(tmp_path, 50.0)
    assert budget.check_room_s(decides=True) == pytest.approx(10.0)


@pytest.mark.system
def test_time_that_the_end_of_a_study_leaves_goes_to_further_trials(tmp_path, monkeypatch):
    """What was reserved for checks and re-measurements was lost where they took less."""
    clock, noted, note_end = Clock(monkeypatch), list[str](), records.note_end
    monkeypatch.setattr(records, "note_end", lambda study, why: (noted.append(why), note_end(study, why)))
    executor = Instant(clock.takes(1.0))
    runner, _, watcher = run(tmp_path, executor, trials=60, time_budget_s=24.0, objectives=["latency"], stop_below=0.0)
    roles = [told.role for told in watcher.ended_with]
    assert "search" in roles[roles.index("repeat") :] and any("the search goes on" in said for said in watcher.said)
    assert clock.now_s <= 24.0 - closing_s(24.0) < clock.now_s + 3.0, "no room for a trial and its re-measurement"
    assert runner.study.user_attrs[records.ENDED_ATTR].startswith("the time budget of 24 s")
    # For who helps, or reads the study, the search is not over while it goes on.
    assert noted[:3] == ["", UNFINISHED, ""]
