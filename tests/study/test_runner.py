"""The loop: what is asked, run, told, resumed and measured again. Trials take no time here; `test_cli.py` runs real ones."""

import fcntl
import functools
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from optuna.trial import TrialState
from support.instant import SPACE, WORKLOAD, Instant, Watcher, failed, plan_of, report, runner_of, spec_of

from autotune.errors import UserError
from autotune.scoring import recommend
from autotune.scoring.convergence.quality_gate import LEAST_STEPS
from autotune.scoring.objective import Constraint
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.study.budget import measuring_s
from autotune.study.events import EventSink
from autotune.study.lock import note_agent, study_lock
from autotune.study.proposals import Proposer
from autotune.study.setup.script import inspect_workload, remedy
from autotune.study.storage import records
from autotune.system.signals import undisturbed
from autotune.trial import request as trial_request
from autotune.trial import result
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import GradientCheck, Outcome, TrialResult
from autotune.trial.workload import Probed


def run(folder, executor=None, **changes):
    """Runs (or resumes) the study of a folder to its end."""
    executor, watcher = executor or Instant(), Watcher()
    runner = runner_of(folder, executor, watcher=watcher, **changes)
    runner.run()
    return runner, executor, watcher


def states(runner):
    return [told.state.name for told in runner.study.get_trials(deepcopy=False)]


def candidates(runner):
    return [records.told_candidate(told) for told in records.told_trials(runner.study)]


# One run.


def test_the_baseline_is_trial_0_and_all_others_are_new_and_can_run(tmp_path):
    runner, _, _ = run(tmp_path, trials=10)
    found = candidates(runner)
    assert found[0] == Candidate(micro_batch_size=8)
    assert len(set(found)) == 10
    assert all(why_illegal(candidate, runner.plan.setting) is None for candidate in found)


def test_finalists_and_baseline_are_measured_again_in_turns(tmp_path):
    runner, executor, watcher = run(tmp_path, trials=6, finalists=2, repeats=2)
    again = executor.ran[6:]
    assert len(again) == 6
    assert again[:3] == again[3:]
    assert again[2] == Candidate(micro_batch_size=8)
    assert [progress.role for progress in watcher.ended_with] == ["baseline"] + ["search"] * 5 + ["repeat"] * 6
    finalists = [m for m in runner.measured() if m.repeats]
    assert all(list(m.repeats) == [1, 2] for m in finalists)


def test_more_rounds_follow_where_the_first_ones_disagree(tmp_path):
    """A machine that is twice as slow in every other trial: no two rounds agree."""
    executor = Instant()

    def unsteady(candidate):
        steady, factor = report(candidate), 1 + len(executor.ran) % 2
        return replace(steady, step_times_s=[factor * step for step in steady.step_times_s])

    executor.behaviour = unsteady
    run(tmp_path, executor, trials=4, finalists=2, repeats=2)
    assert len(executor.ran) == 4 + 2 * 2 * 3


def test_without_finalists_nothing_is_measured_again(tmp_path):
    assert len(run(tmp_path, trials=4, finalists=0)[1].ran) == 4


def test_a_single_trial_is_the_baseline(tmp_path):
    runner, _, _ = run(tmp_path, trials=1)
    assert candidates(runner) == [Candidate(micro_batch_size=8)]


def test_a_space_that_is_smaller_than_the_budget_ends_the_study(tmp_path):
    runner, executor, watcher = run(tmp_path, trials=50, space=[{"checkpoint_every": [0, 1, 2]}], finalists=0)
    assert len(executor.ran) == 3
    assert "every candidate that can run here has been measured" in watcher.said
    assert len(candidates(runner)) == 3


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random", "grid"])
def test_every_sampler_runs_a_study(tmp_path, sampler):
    runner, executor, _ = run(tmp_path, trials=14, sampler=sampler, finalists=0)
    assert len(set(executor.ran)) == 14
    assert set(states(runner)) == {"COMPLETE"}


def test_the_gaussian_process_runs_a_study(tmp_path):
    assert len(set(run(tmp_path, trials=10, sampler="gp", finalists=0, objectives=["latency"])[1].ran)) == 10


def test_the_time_budget_ends_a_study_and_says_so(tmp_path):
    executor = Instant(lambda candidate: time.sleep(0.2) or report(candidate))
    _, _, watcher = run(tmp_path, executor, trials=50, time_budget_s=3.0, finalists=0, objectives=["latency"])
    assert 2 <= len(executor.ran) <= 15
    assert any("the time budget of 3 s is spent after" in text for text in watcher.said)


def test_a_short_time_budget_is_for_the_search_and_one_round_of_the_finalists(tmp_path):
    """Three rounds of all finalists would take longer than there is."""
    executor = Instant(lambda candidate: time.sleep(0.3) or report(candidate))
    runner, _, _ = run(tmp_path, executor, trials=50, time_budget_s=4.0, objectives=["latency"])
    told = [m for m in runner.measured() if m.usable]
    assert len(told) >= 3
    assert max(len(m.repeats) for m in told) <= 2


# Objectives.


def test_an_objective_that_the_baseline_does_not_yield_is_left_out_with_a_word(tmp_path):
    flat = Instant(lambda candidate: report(candidate, losses=[1.0 + 0.1 * (i % 3) for i in range(24)]))
    runner, _, watcher = run(tmp_path, flat, trials=3, objectives=DEFAULTS)
    assert [o.name for o in runner.objectives] == ["latency", "throughput", "memory"]
    assert any("'convergence' is left out: the baseline's loss did not fall" in text for text in watcher.said)


TO_LOSS = {"name": "convergence", "metric": "time_to_loss_s"}
DEFAULTS = ["latency", "throughput", TO_LOSS, "memory"]


def test_the_noise_scale_is_measured_once_and_tells_what_other_batches_are_worth(tmp_path):
    runner, executor, _ = run(tmp_path, trials=4, objectives=["latency", "convergence"])
    probes = [request for request in executor.requests if request.noise]
    assert [(p.candidate["micro_batch_size"], p.candidate["gradient_accumulation_steps"]) for p in probes] == [(2, 4)]
    phi = runner.reference.noise.samples
    assert phi == pytest.approx(8 * (4.1 - 2) / 3 / ((8 - 4.1) / 3), rel=0.01)
    for m in runner.measured():
        batch = m.candidate.global_batch_size(1)
        assert m.metrics["goodput_samples_per_s"] == pytest.approx(
            m.metrics["samples_per_s"] * (phi + 8) / (phi + batch)
        )
    again, executor, _ = run(tmp_path, trials=5, objectives=["latency", "convergence"])
    assert again.reference == runner.reference and not any(request.noise for request in executor.requests)


def test_where_the_noise_scale_is_not_resolved_the_baselines_batch_is_kept_with_a_word(tmp_path):
    silent = functools.partial(report, noise=None)
    runner, executor, watcher = run(tmp_path, Instant(silent), trials=6, objectives=["latency", "convergence"])
    assert [o.name for o in runner.objectives] == ["latency", "convergence"]
    assert {candidate.global_batch_size(1) for candidate in executor.ran} == {8} and len(set(executor.ran)) == 6
    assert any("the baseline's 8 is kept" in line for line in watcher.said)
    _, executor, _ = run(tmp_path, Instant(silent), trials=8, objectives=["latency", "convergence"])  # resumed, too
    assert {candidate.global_batch_size(1) for candidate in executor.ran} == {8}
    with pytest.raises(UserError, match="adascale needs the gradient noise scale"):
        run(tmp_path / "other", Instant(silent), trials=2, objectives=["latency"], learning_rate_rule="adascale")
    with pytest.raises(UserError, match="the space varies nothing else"):
        run(
            tmp_path / "third",
            Instant(silent),
            trials=2,
            space=[{"micro_batch_size": [8, 16]}],
            objectives=["convergence"],
        )


def test_with_the_global_batch_kept_goodput_needs_no_probe(tmp_path):
    _, executor, _ = run(tmp_path, trials=2, objectives=["latency", "convergence"], global_batch="keep")
    assert not any(request.noise for request in executor.requests)


def test_the_learning_rate_follows_the_batch_in_the_trial_and_in_what_is_recommended(tmp_path):
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    executor = Instant()
    runner = runner_of(tmp_path, executor, trials=6, planned={"base_config": base})
    runner.run()
    for request in executor.requests:
        batch = request.candidate["micro_batch_size"] * request.candidate["gradient_accumulation_steps"]
        assert request.ds_config["optimizer"]["params"]["lr"] == pytest.approx(1e-3 * (batch / 8) ** 0.5, rel=1e-4)
        assert request.learning_rate_factor == pytest.approx((batch / 8) ** 0.5)
    for m in runner.measured():
        assert m.ds_config["optimizer"]["params"]["lr"] == pytest.approx(
            1e-3 * (m.candidate.global_batch_size(1) / 8) ** 0.5, rel=1e-4
        )


def test_a_study_of_nothing_but_what_cannot_be_measured_is_refused(tmp_path):
    flat = Instant(lambda candidate: report(candidate, losses=[1.0] * 24))
    with pytest.raises(UserError, match="'convergence': time_to_loss_s cannot be measured"):
        run(tmp_path, flat, objectives=[TO_LOSS])


def test_a_constraint_that_cannot_be_measured_is_refused_before_the_budget_is_spent(tmp_path):
    executor = Instant()
    with pytest.raises(UserError, match="tokens_per_s cannot be measured"):
        run(tmp_path, executor, constraints=[Constraint(metric="tokens_per_s", min=1.0)])
    assert len(executor.ran) == 1


def test_convergence_alone_needs_a_baseline_that_completes(tmp_path):
    broken = Instant(lambda candidate: failed(Outcome.OOM, "over the limit"))
    with pytest.raises(UserError, match="did not complete"):
        run(tmp_path, broken, objectives=["convergence"])


def test_what_breaks_a_constraint_is_told_and_not_picked(tmp_path):
    bound = Constraint(metric="peak_memory_bytes", max=float(10**8 + 5 * 10**6))
    runner, _, _ = run(tmp_path, trials=12, constraints=[bound])
    infeasible = [m for m in runner.measured() if not m.feasible]
    assert infeasible
    assert all(m.candidate.micro_batch_size > 4 for m in infeasible)
    found = recommend.recommend(runner.measured(), None, runner.objectives, 1)
    assert all(pick.measured.candidate.micro_batch_size <= 4 for pick in found.picks.values())


# Trials that fail.


def test_a_study_goes_on_where_some_trials_fail(tmp_path):
    some = Instant(
        lambda c: (
            failed(Outcome.OOM, "over the limit")
            if c.micro_batch_size > 4 and c != Candidate(micro_batch_size=8)
            else report(c)
        )
    )
    runner, _, _ = run(tmp_path, some, trials=12, finalists=0, memory_filter=False)
    outcomes = {m.outcome for m in runner.measured()}
    assert outcomes == {Outcome.COMPLETE, Outcome.OOM}
    assert set(states(runner)) == {"COMPLETE", "PRUNED"}


def test_without_a_baseline_the_others_are_tuned_all_the_same(tmp_path):
    executor = Instant(
        lambda c: failed(Outcome.OOM, "over the limit") if c == Candidate(micro_batch_size=8) else report(c)
    )
    runner, _, watcher = run(tmp_path, executor, trials=5, memory_filter=False)
    assert any("the baseline did not complete (oom: over the limit)" in text for text in watcher.said)
    assert [m.usable for m in runner.measured()] == [False, True, True, True, True]
    assert "convergence" not in [o.name for o in runner.objectives]


# Models whose types do not mix.

MIXED = "RuntimeError: expected scalar type Float but found BFloat16"
WITH_AUTOCAST = {
    "micro_batch_size": [4, 8],
    "precision": ["fp32", "bf16", "torch_autocast"],
    "checkpoint_every": [0, 1],
}


def mixed(candidate):
    return failed(Outcome.CRASHED, MIXED) if candidate.precision == "bf16" else report(candidate)


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
    assert len(reasons) == 1 and "--set NAME={micro_batch_size}" in reasons.pop()
    assert remedy("zero_stage: 1 was asked for") == "" and remedy(reason + remedy(reason)) == ""


def test_a_precision_that_has_worked_once_stays(tmp_path):
    """Only some configurations mix types."""

    def sometimes(candidate):
        return mixed(candidate) if candidate.checkpoint_every else report(candidate)

    _, executor, watcher = run(
        tmp_path, Instant(sometimes), trials=12, finalists=0, space=[WITH_AUTOCAST], sampler="grid"
    )
    assert len(executor.ran) == 12 and not any("no longer proposed" in text for text in watcher.said)


@pytest.mark.parametrize(
    "reason", ["TypeError: model() is broken", "rank {n} exited with status 0 but wrote no result"]
)
def test_a_target_that_always_crashes_stops_the_study_after_four_trials(tmp_path, reason):
    executor = Instant()
    executor.behaviour = lambda _: failed(Outcome.CRASHED, reason.format(n=len(executor.ran)))
    with pytest.raises(
        UserError, match="the first 4 trials, the baseline among them, all ended the same way: crashed: "
    ) as error:
        run(tmp_path, executor, trials=30)
    assert "rank-0.log" in str(error.value)
    assert len(executor.ran) == 4


def test_a_target_that_fails_in_several_ways_stops_it_after_eight(tmp_path):
    executor = Instant()
    executor.behaviour = lambda _: failed(
        Outcome.DIVERGED, ["the loss was not finite", "updates were skipped"][len(executor.ran) % 2]
    )
    with pytest.raises(
        UserError, match="the first 8 trials, the baseline among them, all failed; the baseline: diverged"
    ):
        run(tmp_path, executor, trials=30)


def test_a_broken_target_stays_stopped_when_it_is_run_again(tmp_path):
    broken = lambda _: failed(Outcome.CRASHED, "TypeError: no")  # noqa: E731
    for _ in range(2):
        executor = Instant(broken)
        with pytest.raises(UserError, match="the first 4 trials"):
            run(tmp_path, executor, trials=30)
    assert executor.ran == []


def test_out_of_memory_is_no_reason_to_give_up(tmp_path):
    executor = Instant(lambda c: failed(Outcome.OOM, "over the limit") if len(executor.ran) < 10 else report(c))
    runner, _, _ = run(tmp_path, executor, trials=14, finalists=0)
    assert [m.usable for m in runner.measured()].count(True) > 0


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
    first = runner.measured()[0]
    assert first.outcome is Outcome.CRASHED
    assert len(executor.ran) == 4


# Resuming.


def test_a_resumed_study_runs_only_what_is_missing(tmp_path):
    before, _, _ = run(tmp_path, trials=4, finalists=0)
    first = [(m.candidate, dict(m.metrics)) for m in before.measured()]
    after, executor, watcher = run(tmp_path, trials=6, finalists=0)
    assert len(executor.ran) == 2
    assert [(m.candidate, dict(m.metrics)) for m in after.measured()][:4] == first
    assert len(set(candidates(after))) == 6
    assert "resuming: 4 of 6 trials are already there" in watcher.said


def test_a_finished_study_runs_nothing_when_it_is_run_again(tmp_path):
    run(tmp_path, trials=5)
    assert run(tmp_path, trials=5)[1].ran == []


def test_a_study_with_fewer_trials_asked_for_than_there_are_runs_nothing(tmp_path):
    run(tmp_path, trials=5, finalists=0)
    assert run(tmp_path, trials=2, finalists=0)[1].ran == []


def test_an_exhausted_study_stays_exhausted(tmp_path):
    small = {"space": [{"checkpoint_every": [0, 1, 2]}], "trials": 9, "finalists": 0}
    run(tmp_path, **small)
    runner, executor, _ = run(tmp_path, **small)
    assert executor.ran == []
    assert len(candidates(runner)) == 3


def test_new_finalists_are_measured_with_the_baseline_and_not_compared_with_its_earlier_rounds(tmp_path):
    slow_at_first = Instant(lambda c: report(c, step_times_s=[9.0 + c.micro_batch_size] * 24))
    run(tmp_path, slow_at_first, trials=3, finalists=1, repeats=1)
    runner, executor, _ = run(tmp_path, trials=12, finalists=1, repeats=1)
    assert executor.ran[-1] == Candidate(micro_batch_size=8)
    base, *others = [m for m in runner.measured() if m.repeats]
    newest = max(others, key=lambda m: max(m.repeats))
    assert 1 not in newest.repeats
    assert set(newest.repeats) <= set(base.repeats)


def test_an_interrupted_round_is_measured_anew(tmp_path):
    """Half a round from yesterday and half from today would take a slower machine for a slower configuration."""
    executor = Instant()
    executor.stop_at = 5  # after four trials and the first of two re-measurements
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, executor, trials=4, finalists=1, repeats=1)
    runner, executor, _ = run(tmp_path, trials=4, finalists=1, repeats=1)
    assert len(executor.ran) == 2
    finalist, base = sorted((m for m in runner.measured() if m.repeats), key=lambda m: m.trial == 0)
    assert list(finalist.repeats) == [1, 2]
    assert list(base.repeats) == [2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"space": [SPACE | {"zero_stage": [0, 1]}]}, "space"),
        ({"objectives": ["latency"]}, "objectives"),
        ({"seed": 1}, "seed"),
        ({"device_memory_bytes": "1GiB"}, "device_memory_bytes"),
        ({"global_batch": "8..64"}, "global_batch"),
        ({"base_config": {"bf16": {"enabled": True}}}, "base_config"),
    ],
)
def test_another_study_of_that_name_is_refused_and_what_differs_is_named(tmp_path, change, named):
    run(tmp_path, trials=2, finalists=0)
    with pytest.raises(UserError, match=rf"study 's' exists, but differs in {named},.*--fresh"):
        run(tmp_path, trials=3, finalists=0, **change)


def test_more_trials_another_sampler_or_more_time_are_no_other_study(tmp_path):
    run(tmp_path, trials=2, finalists=0)
    assert len(run(tmp_path, trials=3, finalists=0, sampler="grid", time_budget_s=600)[1].ran) == 1


def test_a_study_that_somebody_else_made_is_refused(tmp_path):
    study = records.create_study(records.open_storage(records.default_url(tmp_path)), "s", ["minimize"], ["m"])
    study.tell(study.ask(), 1.0)
    with pytest.raises(UserError, match="was not made by autotune"):
        run(tmp_path)


# Runs that died.


def test_an_interrupted_trial_is_lost_and_run_again(tmp_path):
    executor = Instant()
    executor.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, executor, trials=5, finalists=0)
    runner, again, _ = run(tmp_path, trials=5, finalists=0)
    assert again.ran[0] == executor.ran[2]
    assert states(runner) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert records.running(runner.study) == []


def dead_run(folder, *, with_result):
    """Leaves a study as a killed driver does: two trials told, a third one running."""
    runner, _, _ = run(folder, trials=2, finalists=0)
    claim = runner.proposer.claim()
    candidate, path = claim.candidate, records.trial_path(folder / "s", claim.asked.number)
    path.mkdir(parents=True)
    if with_result:
        write_record(
            TrialDir(path).result,
            result.TrialResult(outcome=Outcome.OOM, reason="it was told on disk", candidate=candidate.values()),
        )
    return candidate


def test_a_trial_that_was_running_when_the_driver_was_killed_is_retried(tmp_path):
    candidate = dead_run(tmp_path, with_result=False)
    runner, executor, _ = run(tmp_path, trials=4, finalists=0)
    assert executor.ran[0] == candidate
    assert states(runner) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_that_ended_just_before_the_driver_was_killed_is_told_and_not_retried(tmp_path):
    candidate = dead_run(tmp_path, with_result=True)
    runner, executor, _ = run(tmp_path, trials=4, finalists=0)
    assert candidate not in executor.ran
    assert [m.outcome for m in runner.measured()][2] is Outcome.OOM
    assert len(executor.ran) == 1


def test_a_run_killed_before_its_first_trial_was_told_begins_anew(tmp_path):
    runner = runner_of(tmp_path, Instant())
    records.create_study(runner.storage, "s", ["minimize"], ["m"])
    assert len(run(tmp_path, trials=3, finalists=0)[1].ran) == 3


def test_a_run_killed_between_record_and_baseline_begins_anew(tmp_path):
    runner = runner_of(tmp_path, Instant())
    study = records.create_study(runner.storage, "s", ["minimize"] * 4, ["a", "b", "c", "d"])
    records.keep(study, runner.state.record())
    study.ask()
    after, executor, _ = run(tmp_path, trials=3, finalists=0)
    assert executor.ran[0] == Candidate(micro_batch_size=8)
    assert states(after) == ["COMPLETE"] * 3


def test_a_trial_killed_before_it_had_a_candidate_is_closed(tmp_path):
    runner, _, _ = run(tmp_path, trials=2, finalists=0)
    runner.leases.claim(runner.study)
    after, _, _ = run(tmp_path, trials=3, finalists=0)
    assert states(after) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


def test_a_study_goes_on_without_its_trials_folder(tmp_path):
    run(tmp_path, trials=3, finalists=1)
    shutil.rmtree(tmp_path / "s" / "trials")
    runner, executor, _ = run(tmp_path, trials=4, finalists=1)
    assert len(candidates(runner)) == 4
    assert len(executor.ran) == 1 + 2


def test_a_study_whose_database_is_gone_begins_anew_in_its_old_folder(tmp_path):
    run(tmp_path, trials=5)
    for path in tmp_path.glob("autotune.db*"):
        path.unlink()
    runner, executor, _ = run(tmp_path, trials=3, finalists=0)
    assert len(executor.ran) == 3
    assert all(not m.repeats for m in runner.measured())


# Interruptions.


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


def test_a_clock_that_is_set_while_a_study_runs_changes_nothing_of_the_time_it_took(tmp_path):
    runner, _, _ = run(tmp_path, trials=5, finalists=0)
    told = records.told_trials(runner.study)
    took = sum(records.told_data(each)["wall_s"] for each in told)
    start = datetime(2026, 11, 21, 12)
    # An hour forth within the second trial, and back within the fourth.
    starts = [0.0, 10.0, 3620.0, 3630.0, 40.0]
    for each, at in zip(told, starts, strict=True):
        each.datetime_start = start + timedelta(seconds=at)
        each.datetime_complete = start + timedelta(seconds=at + 1)
    told[1].datetime_complete += timedelta(hours=1)
    told[3].datetime_complete -= timedelta(hours=1)
    assert measuring_s(told) == took


# The lock.


def test_a_second_run_of_a_study_is_refused_with_the_number_of_the_first(tmp_path):
    with (
        study_lock(tmp_path / "s"),
        pytest.raises(UserError, match=rf"study 's' is being run by process {os.getpid()}"),
        study_lock(tmp_path / "s"),
    ):
        pass


@pytest.mark.process
def test_the_lock_is_free_after_a_run_and_after_a_killed_one(tmp_path):
    with study_lock(tmp_path / "s") as file:
        note_agent(file, "0" * 32)
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(tmp_path / "s" / ".lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with study_lock(tmp_path / "s"):
        assert json.loads((tmp_path / "s" / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_file_full_of_nonsense_is_no_obstacle(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / ".lock").write_text("{nonsense")
    with study_lock(tmp_path / "s"):
        pass


# The plan.


def test_the_optuna_parameters_are_those_of_the_candidate(tmp_path):
    runner, _, _ = run(tmp_path, trials=6, finalists=0)
    for told in runner.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        candidate = Candidate.from_key(told.user_attrs[CANDIDATE_ATTR])
        expected = {name: value for name, value in candidate.values().items() if name in SPACE and value in SPACE[name]}
        assert told.params == expected


def test_the_fingerprint_is_plain_data():
    plan = plan_of(spec_of())
    assert json.loads(json.dumps(plan.fingerprint())) == plan.fingerprint()


# The quality gate.


@pytest.fixture
def unhurried(monkeypatch):
    """No trial takes time here, so that checks may cost any share of it."""
    monkeypatch.setattr("autotune.study.numerics_check.MAX_TIME_SHARE", 1e9)


def trains(**bad):
    """A behaviour in which some precisions train worse: the loss falls so many times more slowly."""

    def behaviour(candidate):
        batch, slower = candidate.global_batch_size(1), bad.get(candidate.precision, 1.0)
        return report(candidate, losses=[1 + 2 / (1 + i * batch / 100 / slower) for i in range(24)])

    return behaviour


def test_numerics_that_train_worse_are_refused_and_something_else_is_recommended(tmp_path, unhurried):
    runner, executor, watcher = run(tmp_path, Instant(trains(bf16=3.0)), trials=12, sampler="grid")
    refused = [m for m in runner.measured() if m.outcome is Outcome.DIVERGED]
    assert refused and {m.candidate.precision for m in refused} == {"bf16"}
    assert all("trains worse: over steps" in m.verdict.reason and "steps behind" in m.verdict.reason for m in refused)
    assert any(f"trial {refused[0].trial} trains worse" in text for text in watcher.said)
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    assert all(pick.measured.candidate.precision == "fp32" for pick in found.picks.values())
    assert not {m.trial for m in found.front} & {m.trial for m in refused}
    references = {request.candidate["precision"] for request in executor.gated}
    assert references == {"fp32"}  # the baseline's numerics, at each batch; candidates show their own curves


def test_numerics_that_train_alike_may_be_recommended_and_the_reasons_say_so(tmp_path, unhurried):
    space = [{"micro_batch_size": [8, 16], "precision": ["fp32", "bf16"]}]
    runner, executor, _ = run(tmp_path, trials=4, sampler="grid", space=space)
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    best = found.picks["recommended"].measured
    assert best.candidate.precision == "bf16" and best.verdict.passed and best.verdict.losses
    assert any("trains as the baseline's numerics do" in reason for reason in found.picks["recommended"].reasons)
    assert found.picks["drop_in"].measured.candidate.precision == "fp32"
    batch = best.candidate.global_batch_size(1)
    seen = [
        r
        for r in executor.gated
        if r.candidate["micro_batch_size"] * r.candidate["gradient_accumulation_steps"] == batch
    ]
    assert [r.replicate for r in seen] == ([1, 2] if batch == 8 else [0, 1, 2])


def test_a_resumed_study_checks_nothing_twice(tmp_path):
    run(tmp_path, trials=12, sampler="grid")
    runner, executor, _ = run(tmp_path, trials=12, sampler="grid")
    assert executor.gated == [] and any(m.verdict for m in runner.measured())


def test_with_the_numerics_kept_nothing_is_checked(tmp_path):
    _, executor, _ = run(tmp_path, trials=6, space=[{"micro_batch_size": [4, 8], "checkpoint_every": [0, 1]}])
    assert executor.gated == []


def test_a_reference_that_fails_leaves_a_doubt_and_no_recommendation(tmp_path):
    executor = Instant()
    executor.behaviour = lambda c: (
        failed(Outcome.OOM, "over the limit") if c.precision == "fp32" and executor.gated else report(c)
    )
    runner, _, _ = run(tmp_path, executor, trials=12, sampler="grid", space=[SPACE | {"precision": ["fp32", "bf16"]}])
    doubted = [m for m in runner.measured() if m.verdict is not None and m.verdict.passed is None]
    assert doubted and all(
        "could not be checked: the baseline's numerics at a global batch of" in m.doubt for m in doubted
    )
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    assert not found.picks["recommended"].measured.doubt


def test_a_gradient_that_is_not_what_was_computed_is_refused_whatever_its_losses(tmp_path):
    def lossy(candidate):
        error = 0.008 if candidate.precision == "bf16" and candidate.gradient_accumulation_steps > 1 else 0.0019
        return report(
            candidate, gradient=GradientCheck(error=error, norm=1.0, n_micro=candidate.gradient_accumulation_steps)
        )

    runner, _, _ = run(tmp_path, Instant(lossy), trials=16, sampler="grid")
    refused = [m for m in runner.measured() if m.outcome is Outcome.DIVERGED]
    assert refused and all(m.candidate.gradient_accumulation_steps == 2 for m in refused)
    assert "the sum of 2 micro-gradients is off by 0.80%" in refused[0].verdict.reason


class Slow(Instant):
    """Steps take seconds, and a trial ends as the ranks' do: with its budget, but not before the fifth step."""

    def submit(self, folder):
        request = read_record(folder.request, TrialRequest)

        def behaviour(candidate):
            whole = report(candidate)
            times = [100 * step for step in whole.step_times_s]
            n = min(len(times), request.max_steps, max(5, int(request.budget_s / times[0])))
            return replace(whole, step_times_s=times[:n], cpu_times_s=times[:n], losses=whole.losses[:n])

        self.behaviour = behaviour
        return super().submit(folder)


def test_where_steps_are_slow_checks_train_as_long_as_they_need_and_once_for_equal_numerics(tmp_path, unhurried):
    space = [{"precision": ["fp32", "bf16"], "zero_stage": [1, 2]}]
    runner, executor, _ = run(tmp_path, Slow(), trials=5, finalists=4, sampler="grid", space=space, trial_budget_s=1.0)
    judged = [m for m in runner.measured() if m.verdict is not None]
    assert len(judged) == 2 and all(m.verdict.passed and m.verdict.n_steps >= LEAST_STEPS for m in judged), judged
    assert sorted(m.verdict.same_as is None for m in judged) == [False, True]
    assert [r.candidate["precision"] for r in executor.gated].count("bf16") == 1
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    assert found.picks["recommended"].measured.candidate.precision == "bf16"


# The branch check.


def branching(folder, worth=None, **changes):
    """Runs a study in which half the batch takes half the time, and a branch finds what it is worth: the loss falls so fast a sample."""

    def behaviour(candidate):
        batch = candidate.global_batch_size(1)
        share = (worth or {}).get(batch, 24 / (16 + batch))
        losses = [3 - 0.45 * math.log(share * i * batch + 200) + 0.01 * math.sin(5 * i * batch) for i in range(200)]
        return report(candidate, losses=losses)

    executor, submit = Instant(behaviour), Instant.submit
    executor.submit = lambda folder: _leaving_weights(executor, submit, folder)
    space = [{"micro_batch_size": [4, 8, 16], "checkpoint_every": [0, 1]}]
    given = {
        "trials": 6,
        "space": space,
        "branch": True,
        "sampler": "grid",
        "objectives": ["latency", "throughput"],
    } | changes
    return run(folder, executor, **given)


def _leaving_weights(executor, submit, folder):
    saves = read_record(folder.request, trial_request.TrialRequest).save_weights
    if saves is not None:
        Path(saves).parent.mkdir(parents=True, exist_ok=True)
        Path(saves).touch()
    return submit(executor, folder)


def test_another_global_batch_is_branched_with_the_baseline_from_one_state_on_equal_data(tmp_path):
    runner, executor, watcher = branching(tmp_path)
    branches = [request for request in executor.requests if request.weights is not None]
    warm = [request for request in executor.requests if request.save_weights is not None]
    assert len(warm) == 1 and {request.weights for request in branches} == {warm[0].save_weights}
    assert len({request.first_sample for request in branches}) == 1
    assert {request.deadline_s for request in branches} == {
        runner.plan.spec.trial_deadline_s
    }  # it trains longer than a trial
    samples = {r.max_steps * r.candidate["micro_batch_size"] for r in branches}
    assert max(samples) - min(samples) < 16  # equal, up to a step
    assert any(m.branch is not None and m.branch.confirmed for m in runner.measured())
    assert any("a branch over" in text for text in watcher.said)


def test_what_a_branch_refutes_is_not_recommended_and_a_resumed_study_branches_nothing_twice(tmp_path):
    runner, _, _ = branching(tmp_path, worth={16: 0.1, 4: 0.1})
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    assert found.picks["recommended"].measured.candidate.global_batch_size(1) == 8
    refuted = [m for m in runner.measured() if m.branch is not None and m.branch.confirmed is False]
    assert refuted and refuted[0].doubt.startswith("a branch over")
    _, executor, _ = branching(tmp_path, worth={16: 0.1, 4: 0.1})
    assert not [request for request in executor.requests if request.weights is not None]


def test_what_the_gate_has_passed_is_branched_in_the_same_run(tmp_path, unhurried):
    space = [{"micro_batch_size": [8, 16], "precision": ["fp32", "bf16"]}]
    runner, _, _ = branching(tmp_path, space=space, trials=4)
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    best = found.picks["recommended"].measured
    assert (best.candidate.precision, best.candidate.global_batch_size(1)) == ("bf16", 16)
    assert best.verdict.passed and best.branch.confirmed and best.repeats


def test_who_leads_only_after_the_re_measurements_stands_the_same_checks(tmp_path):
    """The wider batch is checked last and would cost too much then; measured again it turns out the best by far."""
    executor = Instant()

    def behaviour(candidate):
        quick = candidate.micro_batch_size == 16 and len(executor.ran) > 4  # once it is measured again
        whole = report(candidate)
        return replace(whole, step_times_s=[step / (4 if quick else 1) for step in whole.step_times_s])

    executor.behaviour = behaviour
    space = [{"micro_batch_size": [8, 16], "precision": ["fp32", "bf16"]}]
    runner, _, _ = run(tmp_path, executor, trials=4, finalists=3, sampler="grid", space=space, objectives=["latency"])
    found = recommend.recommend(runner.measured(), runner.measured()[0], runner.objectives, 1)
    best = found.picks["recommended"].measured
    assert best.candidate == Candidate(micro_batch_size=16, precision="bf16") and best.verdict.passed


def test_without_branches_nothing_is_branched(tmp_path):
    _, executor, _ = branching(tmp_path, branch=False)
    assert not [request for request in executor.requests if request.weights or request.save_weights]


def test_a_checkpoint_of_the_users_is_where_probe_and_branches_start(tmp_path):
    checkpoint = tmp_path / "mine.pt"
    checkpoint.touch()
    _, executor, _ = branching(tmp_path, from_checkpoint=str(checkpoint), objectives=["latency", "convergence"])
    started = [request for request in executor.requests if request.weights is not None]
    assert {request.weights for request in started} == {str(checkpoint)} and any(request.noise for request in started)
    assert not [request for request in executor.requests if request.save_weights]


def test_branch_tokens_say_how_long_a_branch_is(tmp_path):
    _, executor, _ = branching(tmp_path, branch_tokens=1600)  # these samples are no sequences
    branches = [request for request in executor.requests if request.weights is not None]
    assert branches and all(r.max_steps * r.candidate["micro_batch_size"] == 1600 for r in branches)


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


def test_a_target_whose_watcher_was_killed_is_loaded_again_once(tmp_path, monkeypatch):
    lost = TrialResult(outcome=Outcome.LOST, reason="the process that watched the ranks died")
    ends = [lost, TrialResult(outcome=Outcome.COMPLETE), lost, lost]
    write_record(TrialDir(tmp_path).workload, WORKLOAD)
    monkeypatch.setattr("autotune.executors.base.run", lambda *_: ends.pop(0))
    assert inspect_workload(spec_of(), Instant(), tmp_path, 1) == WORKLOAD
    with pytest.raises(UserError, match="cannot be loaded: the process that watched the ranks died"):
        inspect_workload(spec_of(), Instant(), tmp_path, 1)


@pytest.mark.parametrize(
    ("movable", "ran"), [(("micro_batch_size",), None), (("micro_batch_size", "gradient_accumulation_steps"), (2, 4))]
)
def test_a_script_whose_batch_cannot_be_split_is_asked_for_no_noise_that_one_micro_batch_cannot_show(
    tmp_path, movable, ran
):
    executor, watcher = Instant(), Watcher()
    script = Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1, movable=movable)
    planned, objectives = {"workload": replace(WORKLOAD, script=script)}, ["latency", "convergence"]
    runner_of(tmp_path, executor, watcher=watcher, trials=2, objectives=objectives, planned=planned).run()
    probes = [request.candidate for request in executor.requests if request.noise]
    assert [(each["micro_batch_size"], each["gradient_accumulation_steps"]) for each in probes] == (
        [ran] if ran else []
    )
    assert any("the script's batch cannot be split" in line for line in watcher.said) == (ran is None)


SPLIT = {
    "tensor-parallel": {"model_parallel_size": 2},
    "pipelined": {"pipeline_stages": 2},
    "experts": {"expert_parallel": True},
}


@pytest.mark.parametrize("split", SPLIT.values(), ids=SPLIT)
def test_gradients_and_weights_of_a_model_that_is_split_between_ranks_are_no_ranks_own(tmp_path, split):
    executor, watcher = Instant(), Watcher()
    script = Probed(
        ds_config={},
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        movable=("micro_batch_size", "gradient_accumulation_steps"),
        **split,
    )
    planned = {"workload": replace(WORKLOAD, script=script), "world_size": split.get("model_parallel_size", 1)}
    objectives = ["latency", "convergence"]
    runner = runner_of(tmp_path, executor, watcher=watcher, trials=2, objectives=objectives, planned=planned)
    runner.run()
    assert not any(request.noise or request.weights for request in executor.requests)
    assert any("is not measured where a model is split between ranks" in line for line in watcher.said)
    assert not runner.state.record().branches
    assert any(request.check_gradient for request in executor.requests) == ("model_parallel_size" not in split)
