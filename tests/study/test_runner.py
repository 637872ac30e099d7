"""One run of a study, from the baseline to the finalists' repeats. Trials take no time; `tests/cli` runs real ones."""

import itertools
import json
import math
import os
import signal
import time
from dataclasses import replace

import pytest
from optuna.trial import TrialState
from support.instant import SPACE, Clock, Instant, failed, plan_of, report, runner_of, spec_of
from support.studies import candidates, run, states

from autotune.scoring.estimates import estimate
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.study import runner as loop
from autotune.study import state, tell
from autotune.study.folder import repeat_paths, trial_path
from autotune.study.proposals import Proposer
from autotune.study.storage import records
from autotune.system.signals import undisturbed
from autotune.trial.folder import TrialDir, record_in
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome


def test_the_baseline_is_trial_0_and_all_others_are_new_and_can_run(tmp_path):
    runner, _, _ = run(tmp_path, trials=8, finalists=0)
    found = candidates(runner)
    assert found[0] == Candidate(micro_batch_size=8)
    assert len(set(found)) == 8
    assert all(why_illegal(candidate, runner.state.plan.setting) is None for candidate in found)


def test_finalists_and_baseline_are_measured_again_in_turns(tmp_path, monkeypatch):
    estimated = []
    monkeypatch.setattr(state, "estimate", lambda measured: estimated.append(measured) or estimate(measured))
    runner, executor, watcher = run(tmp_path, trials=6, finalists=2, repeats=2)
    again = executor.ran[6:]
    assert len(again) == 6
    assert again[:3] == again[3:]
    assert again[2] == Candidate(micro_batch_size=8)
    assert [progress.role for progress in watcher.ended_with] == ["baseline"] + ["search"] * 5 + ["repeat"] * 6
    finalists = [m for m in runner.state.measured() if m.repeats]
    assert all(list(m.repeats) == [1, 2] for m in finalists)
    # Anew only where something was measured since.
    assert len(estimated) > 2 and all(one != other for one, other in itertools.pairwise(estimated))


def test_a_quick_study_ends_when_no_trial_is_worth_its_time_and_repeats_only_what_is_not_settled(tmp_path):
    runner, executor, watcher = run(tmp_path, quick=True, sampler="physics", objectives=["throughput"], stop_below=0.03,
                                    trials=8, finalists=1, repeats=0)  # fmt: skip
    assert 2 <= len(runner.state.measured()) < 8 and any(text.startswith("stopped after") for text in watcher.said)
    assert not any(m.repeats for m in runner.state.measured()) and len(executor.ran) == len(runner.state.measured())


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("changes", "where"),
    [({"quick": True, "repeats": 0}, "trials"), ({"repeats": 1}, "repeats"), ({"finalists": 0}, "trials")],
)
def test_an_evaluation_that_must_fit_is_tried_also_where_nothing_is_measured_again(tmp_path, changes, where):
    """A quick study said nothing of it, and never ran it."""
    runner, _, _ = run(tmp_path, trials=3, with_eval=True, **changes)
    asked = [trial_path(runner.state.folder, m.trial) for m in runner.state.measured()]
    again = [path for m in runner.state.measured() for path in repeat_paths(runner.state.folder, m.trial).values()]
    tried = {
        path
        for path in (*asked, *again)
        if (tail := record_in(TrialDir(path).request, TrialRequest).tail) and tail.evaluate
    }
    assert tried >= set(asked if where == "trials" else again) and tried
    assert where == "trials" or not tried & set(asked)


def test_samples_that_a_trial_cuts_are_not_stretched_to_the_stated_length(tmp_path):
    """A stream's batches are stretched after they were cut, so that such trials ran out of memory in their check."""
    runner, _, _ = run(tmp_path, trials=1, finalists=0, max_length=4096)
    for config, length in (((), 4096), ((("data.max_length", 512),), 512)):
        candidate = replace(runner.state.plan.baseline, config=config)
        assert runner._measurer.request(candidate, "search").tail.length == length
        # A re-tuning said that what is in use needs 21 % less memory, and searched: its rounds had no worst batch.
        assert runner._measurer.request(candidate, "round").tail.length == length
        assert runner._measurer.request(candidate, "repeat").tail is None


def test_where_the_trials_are_spent_it_is_said_what_a_further_one_may_gain(tmp_path):
    short, _, watcher = run(
        tmp_path, sampler="physics", objectives=["throughput"], stop_below=0.01, trials=1, finalists=0
    )
    assert watcher.said[-1].startswith(
        "the only trial is spent, and a further one is expected to improve the answer by"
    )
    assert short.study.user_attrs[records.ENDED_ATTR] == watcher.said[-1]
    diverging = Instant(lambda candidate: failed(Outcome.DIVERGED, "the loss was not finite at step 1"))
    _, _, watcher = run(
        tmp_path / "none",
        diverging,
        sampler="physics",
        objectives=["throughput"],
        stop_below=0.01,
        trials=2,
        finalists=0,
    )
    assert len(diverging.ran) == 2 and not any("further one" in said for said in watcher.said)  # no share of nothing
    whole, _, watcher = run(
        tmp_path, sampler="physics", objectives=["throughput"], stop_below=0.01, trials=40, finalists=0
    )
    assert not any("further one" in said for said in watcher.said) and len(whole.state.measured()) > 1


def test_a_quick_study_measures_again_at_most_twice_what_it_cannot_tell_apart(tmp_path):
    executor = Instant()

    def alike(candidate):
        """The same throughput of all, but for the baseline's first reading and a little noise."""
        n = len(executor.ran)
        step_s = 0.001 * candidate.global_batch_size(1) * (1.08 if n == 1 else 1 + 0.03 * (n % 2))
        return report(candidate, step_times_s=[step_s * (1 + 0.01 * math.sin(7 * i)) for i in range(24)])

    executor.behaviour = alike
    runner, _, _ = run(tmp_path, executor, quick=True, trials=4, finalists=1, repeats=0, objectives=["throughput"],
                    space=[{"micro_batch_size": [4, 8, 16, 32]}])  # fmt: skip
    assert 1 <= max(len(m.repeats) for m in runner.state.measured()) <= 2


@pytest.mark.cells(1)
@pytest.mark.parametrize("busy", [(0,), (1, 2), range(9)])
def test_what_others_slowed_down_is_no_gain_even_in_a_quick_study(tmp_path, busy):
    """A baseline of 62 ms that took 35 without others made 0.83x read as 1.85x (1.52 to 2.24)."""
    executor = Instant()

    def beside_others(candidate):
        n, step_s = len(executor.ran) - 1, 0.001 * candidate.global_batch_size(1)
        slowed = math.log(2.2) if n in busy else 0.0  # told to be twice as long
        times = [step_s * math.exp(slowed) * (1 + 0.01 * math.sin(7 * i)) for i in range(24)]
        return report(
            candidate, other_cores=1.0 if n in busy else 0.0, log_slowdown=min(slowed, math.log(2)), step_times_s=times
        )

    executor.behaviour = beside_others
    runner, _, _ = run(tmp_path, executor, quick=True, trials=4, finalists=1, repeats=0, objectives=["throughput"],
                    space=[{"micro_batch_size": [4, 8, 16, 32]}])  # fmt: skip
    found = estimate(runner.state.measured())
    assert not any(found.told(m, "samples_per_s") for m in found.measured if m.trial)


@pytest.mark.cells(1)
@pytest.mark.parametrize("dear", [True, False])
def test_the_leader_of_a_study_is_estimated_anew_only_where_that_is_cheap(tmp_path, monkeypatch, dear):
    """So long that it is not estimated again: a share of nothing, or hardly a share."""
    monkeypatch.setattr(tell, "CHEAP_S", -1.0 if dear else 1e9)
    monkeypatch.setattr(tell, "STANDING_SHARE", 1e-9)
    _, _, watcher = run(tmp_path, trials=6, finalists=0)
    assert (len({progress.best for progress in watcher.ended_with}) == 1) is dear


def test_more_rounds_follow_where_the_first_ones_disagree(tmp_path):
    """A machine that is twice as slow in every other trial: no two rounds agree."""
    executor = Instant()

    def unsteady(candidate):
        steady, factor = report(candidate), 1 + len(executor.ran) % 2
        return replace(steady, step_times_s=[factor * step for step in steady.step_times_s])

    executor.behaviour = unsteady
    _, _, watcher = run(tmp_path, executor, trials=4, finalists=2, repeats=2)
    assert len(executor.ran) == 4 + 4 * 2 * 3
    assert "up to 6 more rounds: it is not settled yet which one is best" in watcher.said


def test_a_space_that_is_smaller_than_the_budget_ends_the_study(tmp_path):
    runner, executor, watcher = run(tmp_path, trials=50, space=[{"checkpoint_every": [0, 1, 2]}], finalists=0)
    assert len(executor.ran) == 3
    assert "every candidate that can run here has been measured" in watcher.said
    assert len(candidates(runner)) == 3


@pytest.mark.cells(1)
@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random", "grid"])
def test_every_sampler_runs_a_study(tmp_path, sampler):
    runner, executor, _ = run(tmp_path, trials=14, sampler=sampler, finalists=0)
    assert len(set(executor.ran)) == 14
    assert set(states(runner)) == {"COMPLETE"}


@pytest.mark.system
def test_the_gaussian_process_runs_a_study(tmp_path):
    assert len(set(run(tmp_path, trials=10, sampler="gp", finalists=0, objectives=["latency"])[1].ran)) == 10


def test_the_time_budget_ends_a_study_and_says_so(tmp_path, monkeypatch):
    executor = Instant(Clock(monkeypatch).takes(0.2))
    _, _, watcher = run(tmp_path, executor, trials=50, time_budget_s=3.0, finalists=0, objectives=["latency"])
    assert 2 <= len(executor.ran) <= 15
    assert any("the time budget of 3 s has no room for a further trial after" in text for text in watcher.said)


def test_a_short_time_budget_is_for_the_search_and_one_round_of_the_finalists(tmp_path, monkeypatch):
    """Three rounds of all finalists would take longer than there is."""
    executor = Instant(Clock(monkeypatch).takes(0.3))
    runner, _, _ = run(tmp_path, executor, trials=50, time_budget_s=4.0, objectives=["latency"])
    told = [m for m in runner.state.measured() if m.usable]
    assert len(told) >= 3
    assert max(len(m.repeats) for m in told) <= 2


@pytest.mark.system
@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_sampler_of_optunas_sees_what_was_told_since_its_first_trial(tmp_path, sampler):
    """One that does not draws as `random` does, for ever."""
    drawn = {}
    for name in (sampler, "random"):
        (tmp_path / name).mkdir()
        executor = Instant()
        runner_of(
            tmp_path / name,
            executor,
            sampler=name,
            trials=16,
            finalists=0,
            seed=3,
            memory_filter=False,
            stop_trials=False,
            stop_below=0,
        ).run()
        drawn[name] = [candidate.key for candidate in executor.ran]
    assert drawn[sampler][:8] == drawn["random"][:8]  # nothing is learned yet
    assert drawn[sampler][8:16] != drawn["random"][8:16]


def test_a_signal_is_put_off_until_the_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), undisturbed():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(True)
    assert done == [True]


def test_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with undisturbed():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_error_goes_before_an_interruption():
    with pytest.raises(ZeroDivisionError), undisturbed():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        _ = 1 / 0


def test_an_interruption_while_the_sampler_thinks_leaves_no_trial_running(tmp_path, monkeypatch):
    runner = runner_of(tmp_path, Instant(), trials=5)

    def interrupted(*_):
        if len(candidates(runner)) == 2:
            raise KeyboardInterrupt
        return original(*_)

    original = Proposer._drawn
    monkeypatch.setattr(Proposer, "_drawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert states(runner) == ["COMPLETE", "COMPLETE", "FAIL"]


def test_runs_in_several_threads_give_the_threads_of_blas_back_with_the_last_one(monkeypatch):
    """The one that ended last put back what the first one had set: one thread, for the rest of a notebook's life."""
    now = [8]

    class Limit:
        def __init__(self, n, _):
            self.before, now[0] = now[0], n

        def restore_original_limits(self):
            now[0] = self.before

    monkeypatch.setattr(loop, "threadpool_limits", Limit)
    first, second = loop._one_blas_thread(), loop._one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now == [1]
    second.__exit__(None, None, None)
    assert now == [8]


def test_the_optuna_parameters_are_those_of_the_candidate(tmp_path):
    runner, _, _ = run(tmp_path, trials=6, finalists=0)
    for told in runner.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        candidate = Candidate.from_key(told.user_attrs[CANDIDATE_ATTR])
        expected = {name: value for name, value in candidate.values().items() if name in SPACE and value in SPACE[name]}
        assert told.params == expected


def test_the_fingerprint_is_plain_data():
    plan = plan_of(spec_of())
    assert json.loads(json.dumps(plan.fingerprint)) == plan.fingerprint
