"""A trial that cannot match what was measured before ends by itself, on all ranks; what it showed is kept."""

import math
from dataclasses import replace

import pytest
import torch
from support.paths import MODELS
from support.zoo import ADAMW

from autotune.executors import base
from autotune.scoring import step_times
from autotune.space.candidate import Candidate
from autotune.trial.folder import TrialDir
from autotune.trial.request import TrialRequest, TrialToBeat
from autotune.trial.result import Outcome
from autotune.trial.workload import Probed, Script
from autotune.worker.measure.ledger import WINDOW_S, StepLedger
from autotune.worker.measure.recorder import Recorder

pytestmark = pytest.mark.process

SCRIPTS = MODELS / "scripts"
UNBEATABLE = TrialToBeat(trial=7, step_time_s=0.0, peak_memory_bytes=0.0)
STEPS = {"budget_s": 30.0, "max_steps": 9, "min_samples": 10**9}


def assert_stopped_as_soon_as_may_be(times):
    """The ranks stop when they compare clocks next, so the last window may go on after the step that decides."""
    enough = next(n for n in range(len(times) + 1) if step_times.beaten_by((UNBEATABLE,), times[:n], 1.0) is not None)
    assert len(times) - enough < max(1, int(WINDOW_S["cpu"] / min(times)))


def test_a_beaten_trial_is_stopped_on_all_ranks_and_keeps_what_it_showed(zoo):
    result = zoo.run(
        "gpt_tiny", zero_stage=2, gradient_accumulation_steps=2, budget_s=30.0, min_samples=10**9, rivals=(UNBEATABLE,)
    )
    assert result.outcome is Outcome.STOPPED_EARLY
    assert "worse than trial 7 had read on every objective" in result.reason and "MiB" in result.reason
    assert_stopped_as_soon_as_may_be(result.step_times_s)
    assert result.steps is not None and result.steps.median_s > 0 and (result.peak_memory_bytes or 0) > 0
    assert result.observed is not None and result.observed.zero_stage == 2
    assert {"inner", "boundary"} <= result.micro_step_s.keys() and min(result.micro_step_s.values()) > 0


def test_a_trial_that_may_still_win_runs_to_its_end(zoo):
    small = TrialToBeat(trial=1, step_time_s=0.0, peak_memory_bytes=1e15)
    slow = TrialToBeat(trial=2, step_time_s=1e6, peak_memory_bytes=0.0)
    result = zoo.run("ok", rivals=(small, slow), **STEPS)
    assert result.outcome is Outcome.COMPLETE and len(result.step_times_s) == STEPS["max_steps"]
    assert "inner" not in result.micro_step_s and result.micro_step_s["boundary"] > 0


def test_a_script_is_stopped_in_the_middle_too(zoo):
    candidate = Candidate(micro_batch_size=8, gradient_accumulation_steps=2)
    probed = Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=2)
    script = Script(working_dir=str(SCRIPTS), probed=probed)
    request = TrialRequest(
        target=str(SCRIPTS / "training_data.py"), candidate=candidate.values(), world_size=2,
        ds_config=candidate.to_deepspeed(ADAMW), budget_s=30.0, min_samples=10**9, deadline_s=60.0,
        script=script, rivals=(UNBEATABLE,),
    )  # fmt: skip
    result = base.run(zoo.executor, zoo.next_folder().path, request)
    assert result.outcome is Outcome.STOPPED_EARLY, result.reason
    assert_stopped_as_soon_as_may_be(result.step_times_s)


def test_the_fastest_timed_step_decides_and_memory_where_it_counts():
    times = [9.0, 9.0, 1.2, 1.1, 1.3]
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=1.1)], times, 0.0) is not None
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=1.11)], times, 0.0) is None
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=1.0, peak_memory_bytes=5.0)], times, 4.0) is None
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=1.0, peak_memory_bytes=5.0)], times, 5.0) is not None
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=0.0)], [0.001] * 20, 0.0) is None


def test_the_first_timed_steps_stop_only_what_is_far_behind():
    def beaten(allowed_s, *times_s):
        return step_times.beaten_by([TrialToBeat(trial=1, step_time_s=allowed_s)], times_s, 0.0) is not None

    assert not beaten(0.0, 2.0, 2.0)  # nothing is timed yet
    assert beaten(1.0, 9.0, 1.7, 1.7) and not beaten(1.0, 9.0, 1.7, 1.5)
    assert beaten(1.0, 9.0, 1.7, 1.3, 1.3) and not beaten(1.0, 9.0, 1.7, 1.3, 1.1)
    assert beaten(1.0, 9.0, 1.7, 1.3, 1.1, 1.1)
    assert not beaten(1.0, 9.0, 1.1, 30.0), "the second set-up step says that the only timed one was a hiccup"


def test_batches_of_varying_sizes_stop_no_trial_by_a_few_long_ones():
    """Three batches longer than the mean stopped a trial whose mean step was as fast as its rival's."""
    rival, sizes = TrialToBeat(trial=1, step_time_s=1.0), [80, 90, 70, 85, 20, 60, 30, 75, 50, 40, 65, 55]
    times = [9.0, *(size / 50 for size in sizes[1:])]
    assert step_times.beaten_by([rival], times[:4], 0.0) is not None
    assert all(step_times.beaten_by([rival], times[:n], 0.0, sizes[:n]) is None for n in range(len(times) + 1))
    slow = [2.5 * time for time in times]
    assert step_times.beaten_by([rival], slow[:9], 0.0, sizes[:9]) is None, "too few steps"
    assert step_times.beaten_by([TrialToBeat(trial=1, step_time_s=0.9)], slow, 0.0, sizes) is not None


def test_what_other_processes_do_beyond_a_rival_s_load_is_not_held_against_a_trial():
    """A candidate as fast as the best was stopped as slower, since another process began beside it."""
    times = [9.0, 9.0, 1.9, 2.0, 2.1]
    alone = TrialToBeat(trial=1, step_time_s=1.05)
    assert step_times.beaten_by([alone], times, 0.0) is not None
    assert step_times.beaten_by([alone], times, 0.0, log_slowdown=math.log(2)) is None
    beside = replace(alone, log_slowdown=math.log(2))
    assert step_times.beaten_by([beside], times, 0.0, log_slowdown=math.log(2)) is not None
    assert step_times.beaten_by([beside], times, 0.0) is not None
    # Small operations in several threads are slowed down by twice the power that is usual.
    assert step_times.beaten_by([alone], [2 * each for each in times], 0.0, log_slowdown=math.log(2)) is None
    assert step_times.beaten_by([alone], [3 * each for each in times], 0.0, log_slowdown=math.log(2)) is not None


def test_the_load_is_looked_at_only_where_a_rival_seems_better(tmp_path):
    looked = []
    request = TrialRequest(
        target="model.py",
        budget_s=1e6,
        candidate={"micro_batch_size": 1},
        rivals=(TrialToBeat(trial=1, step_time_s=1.0),),
    )
    ledger = StepLedger(Recorder(TrialDir(tmp_path), 0), request, torch.device("cpu"), 1)
    ledger.log_slowdown = lambda: looked.append(1) or math.log(3)
    ledger.report.step_times_s = [9.0, 9.0, 0.9, 0.9, 0.9]
    assert not ledger.done() and not looked
    ledger.report.step_times_s = [9.0, 9.0, 2.9, 2.9, 2.9]
    assert not ledger.done() and looked and ledger.report.outcome is not Outcome.STOPPED_EARLY
    ledger.report.step_times_s = [9.0, 9.0, 9.1, 9.1, 9.1]
    assert ledger.done() and ledger.report.outcome is Outcome.STOPPED_EARLY
