"""The quality gate: candidates with other numerics must train as the baseline does."""

import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.instant import WORKLOAD, Instant, Watcher, failed, report, runner_of, spec_of
from support.paths import MODELS
from support.studies import run

from autotune.errors import Unavailable, UserError
from autotune.scoring import recommend
from autotune.scoring.convergence.quality_gate import LEAST_STEPS
from autotune.scoring.estimates import estimate
from autotune.space.candidate import Candidate
from autotune.space.rule import Setting
from autotune.study.numerics_check import NumericsCheck, with_batch
from autotune.trial.folder import read_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import GradientCheck, Outcome, TrialResult

SMALL = [{"micro_batch_size": [8, 16], "precision": ["fp32", "bf16"]}]


def trains(**bad):
    """A behaviour in which some precisions train worse: the loss falls so many times more slowly."""

    def behaviour(candidate):
        batch, slower = candidate.global_batch_size(1), bad.get(candidate.precision, 1.0)
        return report(candidate, losses=[1 + 2 / (1 + i * batch / 100 / slower) for i in range(24)])

    return behaviour


def test_numerics_that_train_worse_are_refused_and_something_else_is_recommended(tmp_path, unhurried):
    runner, executor, watcher = run(tmp_path, Instant(trains(bf16=3.0)), trials=4, sampler="grid", space=SMALL)
    refused = [m for m in runner.state.measured() if m.outcome is Outcome.DIVERGED]
    assert refused and {m.candidate.precision for m in refused} == {"bf16"}
    assert all("trains worse: over steps" in m.verdict.reason and "steps behind" in m.verdict.reason for m in refused)
    assert any(f"trial {refused[0].trial} trains worse" in text for text in watcher.said)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert all(pick.measured.candidate.precision == "fp32" for pick in found.picks.values())
    assert not {m.trial for m in found.front} & {m.trial for m in refused}
    references = {request.candidate["precision"] for request in executor.gated}
    assert references == {"fp32"}  # the baseline's numerics, at each batch; candidates show their own curves


def test_numerics_that_train_alike_may_be_recommended_and_the_reasons_say_so(tmp_path, unhurried):
    runner, executor, _ = run(tmp_path, trials=4, sampler="grid", space=SMALL)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    best = found.picks["recommended"].measured
    assert best.candidate.precision == "bf16" and best.verdict.passed and best.verdict.losses
    assert any(
        "not seen to train worse than the baseline's numerics" in reason
        for reason in found.picks["recommended"].reasons
    )
    assert found.picks["drop_in"].measured.candidate.precision == "fp32"
    batch = best.candidate.global_batch_size(1)
    seen = [
        r
        for r in executor.gated
        if r.candidate["micro_batch_size"] * r.candidate["gradient_accumulation_steps"] == batch
    ]
    assert [r.replicate for r in seen] == ([1, 2] if batch == 8 else [0, 1, 2])


@pytest.mark.system
def test_more_gradients_summed_in_16_bits_are_judged_by_the_trials_own_gradient(tmp_path, unhurried):
    """No curve is trained for them; fewer than the baseline's need no check at all."""
    space = [{"gradient_accumulation_steps": [1, 2, 4]}]
    base = Candidate(micro_batch_size=8, gradient_accumulation_steps=2, precision="bf16")

    runner, executor, _ = run(
        tmp_path, Instant(exact), trials=3, sampler="grid", space=space, baseline=base, objectives=["throughput"]
    )
    by_steps = {m.candidate.gradient_accumulation_steps: m for m in runner.state.measured()}
    assert executor.gated == [] and by_steps[1].numerics_kept and by_steps[1].verdict is None
    assert by_steps[4].verdict.passed and by_steps[4].verdict.gradient_error == 0.002
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1).picks["recommended"]
    assert found.measured is not None and found.measured.candidate.gradient_accumulation_steps == 4
    assert any("sums up more gradients in 16 bits" in reason and "0.20%" in reason for reason in found.reasons)


@pytest.mark.cells(1)
@pytest.mark.parametrize("repeats", [0, 1])
def test_where_the_loss_depends_on_the_micro_batch_no_other_one_drops_in(repeats, tmp_path, unhurried):
    """As a contrastive loss, which begins log 2 higher over twice the samples."""

    def contrastive(candidate):
        curve = [np.log(candidate.micro_batch_size) + 2 / (1 + i) for i in range(24)]
        step_s = 0.6 if candidate.micro_batch_size != 8 else 0.78
        return report(
            candidate,
            losses=curve,
            step_times_s=[step_s * (1 + 0.1 * np.sin(7 * i)) for i in range(24)],
            gradient=GradientCheck(error=0.0, norm=1.0, n_micro=candidate.gradient_accumulation_steps),
        )

    space = [{"micro_batch_size": [4, 8, 16], "gradient_accumulation_steps": [1, 2, 4], "checkpoint_every": [0, 1]}]
    base = Candidate(micro_batch_size=8, gradient_accumulation_steps=2, checkpoint_every=1)
    runner, executor, watcher = run(
        tmp_path, Instant(contrastive), trials=12, space=space, baseline=base, global_batch="keep", finalists=3,
        repeats=repeats,
    )  # fmt: skip
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert {pick.measured.candidate.micro_batch_size for pick in found.picks.values()} == {8}
    others = [m for m in runner.state.measured() if m.candidate.micro_batch_size != 8]
    assert len(others) == 1 and others[0].doubt and executor.gated == [], "and no further one is tried"
    assert not others[0].repeats, "nor this one again, as it is refused in any case"
    assert len([text for text in watcher.said if "the loss depends on the micro-batch" in text]) == 1


@pytest.mark.system
def test_batch_norm_makes_other_micro_batches_pass_the_gate_though_the_first_losses_do_not_show_it(tmp_path, unhurried):
    def faster_with_more(candidate):
        step_s = candidate.gradient_accumulation_steps * (1.0 if candidate.checkpoint_every else 0.9)
        curve = [1 + 2 / (1 + i) for i in range(24)]
        return report(candidate, losses=curve, step_times_s=[step_s * (1 + 0.1 * np.sin(7 * i)) for i in range(24)])

    space = [{"micro_batch_size": [4, 8], "gradient_accumulation_steps": [1, 2], "checkpoint_every": [0, 1]}]
    runner, executor, _ = run(
        tmp_path, Instant(faster_with_more), trials=5, space=space,
        baseline=Candidate(micro_batch_size=4, gradient_accumulation_steps=2, checkpoint_every=1),
        planned={
            "workload": replace(WORKLOAD, by_micro_batch="BatchNorm2d"),
            "setting": Setting(n_blocks=4, n_samples=4096, global_batch=(8, 8)),
        },
    )  # fmt: skip
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    best, same = (found.picks[name].measured for name in ("recommended", "drop_in"))
    assert executor.gated and best.candidate.micro_batch_size == 8 and best.verdict.passed
    assert same.candidate.micro_batch_size == 4
    plan = runner.state.plan
    assert plan.drops_in(same.candidate) and not plan.drops_in(best.candidate) and plan.same_numerics(best.candidate)


def test_another_recomputation_passes_the_gate_where_it_changes_a_buffer_of_the_blocks_twice(tmp_path, unhurried):
    """It was called drop-in, though a quantiser's running range, and so the loss, is another one."""

    def faster_without(candidate):
        step_s = 1.0 if candidate.checkpoint_every else 0.7
        curve = [1 + 2 / (1 + i) for i in range(24)]
        return report(candidate, losses=curve, step_times_s=[step_s * (1 + 0.1 * np.sin(7 * i)) for i in range(24)])

    runner, executor, _ = run(
        tmp_path, Instant(faster_without), trials=2, space=[{"checkpoint_every": [0, 1]}],
        baseline=Candidate(micro_batch_size=4, checkpoint_every=1),
        planned={"workload": replace(WORKLOAD, updates="FakeQuant"), "setting": Setting(n_blocks=4, n_samples=4096)},
    )  # fmt: skip
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    best = found.picks["recommended"].measured
    assert executor.gated and best.candidate.checkpoint_every == 0 and best.verdict.passed
    assert not runner.state.plan.drops_in(best.candidate)


@pytest.mark.system
def test_that_the_loss_depends_on_the_micro_batch_shows_in_another_precision_too(tmp_path, unhurried):
    def contrastive(candidate):
        curve = [np.log(candidate.micro_batch_size) + 2 / (1 + i) for i in range(24)]
        step_s = 1.0 / candidate.micro_batch_size**0.5 * (0.5 if candidate.precision == "bf16" else 1.0)
        return report(candidate, losses=curve, step_times_s=[step_s * (1 + 0.1 * np.sin(7 * i)) for i in range(24)])

    space = [{"micro_batch_size": [2, 4, 8], "gradient_accumulation_steps": [1, 2, 4], "precision": ["fp32", "bf16"]}]
    base = Candidate(micro_batch_size=2, gradient_accumulation_steps=4)
    runner, _, watcher = run(tmp_path, Instant(contrastive), trials=6, space=space, baseline=base, global_batch="keep")
    assert [text for text in watcher.said if "the loss depends on the micro-batch" in text]
    other = next(m for m in runner.state.measured() if m.loss_off)
    assert other.barred, "so that nothing is stopped for being slower than this one"
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1).picks["recommended"]
    assert found.measured.candidate == replace(base, precision="bf16")


@pytest.mark.cells(1)
@pytest.mark.parametrize("global_batch", ["keep", "free"])
def test_a_somewhat_lower_loss_of_smaller_micro_batches_does_not_pass_the_gate(tmp_path, unhurried, global_batch):
    """It passed as lower, though it is lower by fewer negatives, and not by training."""

    def contrastive(candidate):
        batch = candidate.global_batch_size(1)
        curve = [4 + np.log(candidate.micro_batch_size) + 1 / (1 + i * batch / 400) for i in range(48)]
        step_s = 1.0 if candidate.micro_batch_size == 8 else 0.5
        return report(candidate, losses=curve, step_times_s=[step_s * (1 + 0.1 * np.sin(7 * i)) for i in range(48)])

    runner, executor, watcher = run(
        tmp_path, Instant(contrastive), trials=4, sampler="grid", repeats=0, global_batch=global_batch,
        space=[{"micro_batch_size": [4, 8], "gradient_accumulation_steps": [2, 4] if global_batch == "free" else [1, 2]}],
        baseline=Candidate(micro_batch_size=8),
    )  # fmt: skip
    assert any("have to pass the quality gate" in text for text in watcher.said) and executor.gated
    smaller = [m for m in runner.state.measured() if m.candidate.micro_batch_size == 4]
    assert any(m.verdict is not None and m.verdict.passed is False for m in smaller)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert {pick.measured.candidate.micro_batch_size for pick in found.picks.values()} == {8}


@pytest.mark.system
def test_a_lower_loss_of_smaller_micro_batches_is_no_better_training_at_another_global_batch_either(
    tmp_path, unhurried
):
    """A branch confirmed it: fewer negatives made the contrastive loss lower, which read as sooner at the baseline's."""

    def contrastive(candidate):
        batch = candidate.global_batch_size(1)
        curve = [np.log(candidate.micro_batch_size) + 1 / (1 + i * batch / 400) for i in range(48)]
        return report(candidate, losses=curve, step_times_s=[1.0 + 0.1 * np.sin(7 * i) for i in range(48)])

    space = [{"micro_batch_size": [4, 8], "gradient_accumulation_steps": [1, 4]}]
    runner, _, watcher = run(
        tmp_path, Instant(contrastive), trials=4, space=space, sampler="grid", repeats=0, global_batch="free",
        baseline=Candidate(micro_batch_size=8),
    )  # fmt: skip
    assert len([text for text in watcher.said if "the loss depends on the micro-batch" in text]) == 1
    smaller = [m for m in runner.state.measured() if m.candidate.micro_batch_size == 4]
    assert smaller and all(m.barred and m.outcome is Outcome.DIVERGED for m in smaller)


@pytest.mark.cells(1)
@pytest.mark.parametrize("sums", [True, False])
def test_what_a_loss_that_is_a_sum_over_the_samples_takes_to_have_micro_batches_tuned_is_said(
    tmp_path, unhurried, sums
):
    """As with `reduction="sum"`; it was said to depend on the micro-batch, as contrastive losses do."""

    def loss(candidate):
        scale = candidate.micro_batch_size if sums else 1 + np.log(candidate.micro_batch_size)
        return report(candidate, losses=[scale * (3 + 2 / (1 + i)) for i in range(24)])

    space = [{"micro_batch_size": [2, 4, 8], "gradient_accumulation_steps": [1, 2, 4]}]
    base = Candidate(micro_batch_size=2, gradient_accumulation_steps=4)
    same_batch = Setting(n_blocks=4, n_samples=4096, global_batch=(8, 8))
    _, _, watcher = run(
        tmp_path, Instant(loss), trials=3, space=space, sampler="grid", repeats=0, baseline=base, planned={"setting": same_batch}
    )  # fmt: skip
    said = [text for text in watcher.said if "train with another loss" in text or "the loss depends" in text]
    assert said and all(("divide it by their number" in text) == sums for text in said)


def test_a_trial_that_crashed_is_not_said_to_train_with_another_loss(tmp_path, unhurried):
    def contrastive(candidate):
        if candidate.micro_batch_size == 4:
            return failed(Outcome.CRASHED, "a bug with this size")
        return report(candidate, losses=[np.log(candidate.micro_batch_size) + 2 / (1 + i) for i in range(24)])

    space = [{"micro_batch_size": [2, 4, 8], "gradient_accumulation_steps": [1, 2, 4]}]
    same_batch = Setting(n_blocks=4, n_samples=4096, global_batch=(8, 8))
    runner, _, watcher = run(
        tmp_path, Instant(contrastive), trials=3, space=space, sampler="grid", repeats=0,
        baseline=Candidate(micro_batch_size=2, gradient_accumulation_steps=4), planned={"setting": same_batch},
    )  # fmt: skip
    outcomes = {m.candidate.micro_batch_size: m.outcome for m in runner.state.measured()}
    assert outcomes == {2: Outcome.COMPLETE, 4: Outcome.CRASHED, 8: Outcome.DIVERGED}
    assert len([text for text in watcher.said if "trains with another loss" in text]) == 1


@pytest.mark.system
def test_a_quick_study_whose_leader_is_refused_goes_on(tmp_path, unhurried):
    """It had stopped because of that trial."""

    def behaviour(candidate):
        step_s = 0.05 * (1 + candidate.gradient_accumulation_steps) * (0.3 if candidate.precision == "bf16" else 1.0)
        return replace(
            trains(bf16=9.0)(candidate), step_times_s=[step_s * (1 + 0.01 * np.sin(7 * i)) for i in range(24)]
        )

    space = [{"micro_batch_size": [2, 8], "gradient_accumulation_steps": [1, 4], "precision": ["fp32", "bf16"]}]
    same_batch = Setting(n_blocks=4, n_samples=4096, global_batch=(8, 8))
    runner, _, watcher = run(
        tmp_path, Instant(behaviour), trials=12, space=[*space, "zero"], quick=True, repeats=0, stop_below=0.03,
        baseline=Candidate(micro_batch_size=2, gradient_accumulation_steps=4), sampler="physics",
        objectives=["throughput"], planned={"setting": same_batch},
    )  # fmt: skip
    assert "a check refused trial 1: the search goes on" in watcher.said, watcher.said
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1).picks["recommended"]
    assert (found.measured.candidate.micro_batch_size, found.measured.candidate.precision) == (8, "fp32")


def test_a_resumed_study_checks_nothing_twice(tmp_path):
    run(tmp_path, trials=4, sampler="grid", space=SMALL)
    runner, executor, _ = run(tmp_path, trials=4, sampler="grid", space=SMALL)
    assert executor.gated == [] and any(m.verdict for m in runner.state.measured())


def test_with_the_numerics_kept_nothing_is_checked(tmp_path):
    _, executor, _ = run(tmp_path, trials=6, space=[{"micro_batch_size": [4, 8], "checkpoint_every": [0, 1]}])
    assert executor.gated == []


@pytest.mark.system
def test_a_learning_rate_that_follows_the_batch_is_no_other_numerics_and_one_that_is_searched_is(tmp_path):
    """Each trial of another batch than the baseline's, whose JSON stated a scaled rate, trained loss curves, in quick studies too."""
    base, sizes = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"micro_batch_size": [4, 8, 16, 32]}
    runner, executor, _ = run(tmp_path / "follows", trials=4, space=[sizes], planned={"base_config": base})
    found = runner.state.measured()
    rates = {m.ds_config["optimizer"]["params"]["lr"] for m in found}
    assert len(rates) > 1 and all(m.numerics_kept for m in found) and executor.gated == []
    searched = [{"optimizer.params.lr": [1e-3, 2e-3]}]
    runner, _, _ = run(tmp_path / "searched", trials=2, space=searched, planned={"base_config": base})
    assert [m.numerics_kept for m in runner.state.measured()] == [True, False]


def test_a_reference_that_fails_twice_leaves_a_doubt_and_no_recommendation(tmp_path):
    """One crash left all numerics at that batch unchecked for good."""
    crashes = itertools.count()

    def crashing(most):
        fails = lambda c: c.precision == "fp32" and executor.gated and next(crashes) < most  # noqa: E731
        return lambda c: failed(Outcome.CRASHED, "a bus error") if fails(c) else report(c)

    executor = Instant(crashing(1))
    runner, _, watcher = run(tmp_path / "once", executor, trials=4, sampler="grid", space=SMALL)
    assert any("a run of the quality gate begins again: it crashed" in text for text in watcher.said)
    assert not any(m.doubt for m in runner.state.measured())
    executor = Instant(crashing(math.inf))
    runner, _, _ = run(tmp_path, executor, trials=4, sampler="grid", space=SMALL)
    doubted = [m for m in runner.state.measured() if m.verdict is not None and m.verdict.passed is None]
    assert doubted and all(
        "could not be checked: the baseline's numerics at a global batch of" in m.doubt for m in doubted
    )
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert not found.picks["recommended"].measured.doubt


def test_a_check_that_timed_out_is_made_again_where_it_has_more_time(tmp_path, unhurried, monkeypatch):
    """Its numerics stayed unchecked for good, whatever --trial-deadline a later run had; so they did where that one was killed."""

    def late(candidate):
        in_time = candidate.precision == "bf16" or not executor.gated
        return report(candidate) if in_time else failed(Outcome.TIMEOUT, "no end within 300 s")

    executor = Instant(late)
    given = {"trials": 4, "sampler": "grid", "space": SMALL}
    run(tmp_path, executor, **given)
    assert executor.gated
    runner, again, _ = run(tmp_path, **given)
    assert not again.gated and any(m.verdict and m.verdict.passed is None for m in runner.state.measured())

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, trial_deadline_s=600.0, **given)
    runner, again, _ = run(tmp_path, trial_deadline_s=600.0, **given)
    assert again.gated and not any(m.verdict and m.verdict.passed is None for m in runner.state.measured())
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.candidate.precision == "bf16"


@pytest.mark.cells(1)
@pytest.mark.parametrize("ended_by", ["the engine refuses the job", "the machines are away", "was edited"])
def test_what_ends_the_run_during_a_check_leaves_it_to_the_next_one(tmp_path, unhurried, ended_by):
    """It was kept as why the numerics could not be checked, and they stayed unchecked for good."""
    target, executor = shutil.copy(MODELS / "ok.py", tmp_path / "model.py"), Instant()
    before = target.read_text()

    def ends(candidate):
        if executor.gated and ended_by != "was edited":
            raise (Unavailable if "away" in ended_by else UserError)(ended_by)
        target.write_text(f"{before}X = 1\n" if executor.gated else before)
        return report(candidate)

    executor.behaviour = ends
    given = {"trials": 4, "sampler": "grid", "space": SMALL}
    planned = {"spec": spec_of(**given).model_copy(update={"target": target})}
    with pytest.raises(UserError, match=ended_by):
        run(tmp_path, executor, planned=planned)
    assert len(executor.gated) == 1
    target.write_text(before)
    runner, again, _ = run(tmp_path, planned=planned)
    assert again.gated and all(m.verdict is None or m.verdict.passed for m in runner.state.measured())


def test_a_gradient_that_is_not_what_was_computed_is_refused_whatever_its_losses(tmp_path):
    def lossy(candidate):
        error = 0.008 if candidate.precision == "bf16" and candidate.gradient_accumulation_steps > 1 else 0.0019
        return report(
            candidate, gradient=GradientCheck(error=error, norm=1.0, n_micro=candidate.gradient_accumulation_steps)
        )

    space = [{"gradient_accumulation_steps": [1, 2], "precision": ["fp32", "bf16"]}]
    runner, _, _ = run(tmp_path, Instant(lossy), trials=4, sampler="grid", space=space)
    refused = [m for m in runner.state.measured() if m.outcome is Outcome.DIVERGED]
    # How many micro-gradients a check adds up depends on the batch that it has time for.
    assert refused and all("micro-gradients is off by 0.80%" in m.verdict.reason for m in refused)


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


@pytest.mark.system
def test_where_steps_are_slow_checks_train_as_long_as_they_need_and_once_for_equal_numerics(tmp_path, unhurried):
    space = [{"precision": ["fp32", "bf16"], "zero_stage": [1, 2]}]
    runner, executor, _ = run(tmp_path, Slow(), trials=5, finalists=4, sampler="grid", space=space, trial_budget_s=1.0)
    judged = [m for m in runner.state.measured() if m.verdict is not None]
    assert len(judged) == 2 and all(m.verdict.passed and m.verdict.n_steps >= LEAST_STEPS for m in judged), judged
    assert sorted(m.verdict.same_as is None for m in judged) == [False, True]
    assert [r.candidate["precision"] for r in executor.gated].count("bf16") == 1
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.candidate.precision == "bf16"


def exact(candidate):
    """A trial that compared its gradient, and found it right."""
    return report(
        candidate, gradient=GradientCheck(error=0.002, norm=1.0, n_micro=candidate.gradient_accumulation_steps)
    )


@pytest.mark.system
def test_where_a_large_batch_is_too_dear_to_check_its_numerics_are_checked_at_the_baselines(tmp_path):
    """A study of seconds left a gain of 3x unchecked, and without a time budget nothing could have it checked."""
    space, goals = [{"micro_batch_size": [8, 64], "precision": ["fp32", "bf16"]}], ["throughput"]
    runner, executor, watcher = run(
        tmp_path,
        Instant(exact),
        trials=4,
        sampler="grid",
        space=space,
        objectives=goals,
        trial_budget_s=0.01,
        repeats=0,
    )
    found = (
        recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1).picks["recommended"].measured
    )
    assert (found.candidate.micro_batch_size, found.candidate.precision) == (64, "bf16")
    assert found.verdict.passed and found.verdict.batch == 8
    assert {request.candidate["micro_batch_size"] for request in executor.gated} == {8}
    assert "at a global batch of 8" in "".join(watcher.said)


@pytest.mark.system
def test_a_fault_at_the_baselines_batch_refuses_a_large_one_too(tmp_path):
    space, goals = [{"micro_batch_size": [8, 64], "precision": ["fp32", "bf16"]}], ["throughput"]
    worse = trains(bf16=3.0)
    runner, _, _ = run(
        tmp_path, Instant(lambda c: replace(worse(c), gradient=exact(c).gradient)), trials=4, sampler="grid",
        space=space, objectives=goals, trial_budget_s=0.01, repeats=0,
    )  # fmt: skip
    found = (
        recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1).picks["recommended"].measured
    )
    assert (found.candidate.micro_batch_size, found.candidate.precision) == (64, "fp32")


@pytest.mark.parametrize("micro_batch_size", [1, 4, 32])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_candidate_at_another_batch_has_that_batch_whatever_its_degrees(micro_batch_size, steps, degree):
    config = (("sequence_parallel_size", degree),) if degree > 1 else ()
    own = Candidate(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps, config=config)
    for batch in (8, 16, 24, 64):
        moved = with_batch(own, batch, 4)
        assert moved.global_batch_size(4) == batch and moved.micro_batch_size <= max(own.micro_batch_size, 1)
    assert with_batch(own, own.global_batch_size(4), 4) == own


def test_a_candidate_at_the_baselines_batch_is_not_split_finer_than_the_baseline():
    """A model with BatchNorm crashed at one sample, and had another gradient at two."""
    moved = with_batch(Candidate(micro_batch_size=64, gradient_accumulation_steps=8), 16, 2, 8)
    assert (moved.micro_batch_size, moved.gradient_accumulation_steps) == (8, 1)
    kept = with_batch(Candidate(micro_batch_size=64, gradient_accumulation_steps=4), 64, 2, 8)
    assert (kept.micro_batch_size, kept.gradient_accumulation_steps) == (8, 4)


@pytest.mark.parametrize(("script", "split"), [(False, (8, 1)), (True, (2, 4))])
def test_only_a_script_keeps_its_micro_steps_at_the_baselines_batch(script, split):
    plan = SimpleNamespace(
        baseline=Candidate(micro_batch_size=8), data_parallel=2, workload=SimpleNamespace(script=script or None)
    )
    check = NumericsCheck(SimpleNamespace(plan=plan), None, None, None)
    moved = check._at_batch(Candidate(micro_batch_size=64, gradient_accumulation_steps=4), 16)
    assert (moved.micro_batch_size, moved.gradient_accumulation_steps) == split


def test_a_curve_at_another_batch_is_as_long_as_what_it_is_compared_with(tmp_path):
    """The baseline's own trial has 24 losses, its replicates have fewer."""
    executor = Instant()

    def behaviour(candidate):
        whole = report(candidate, gradient=GradientCheck(error=0.0, norm=1.0, n_micro=1))
        return replace(whole, losses=whole.losses[:14]) if executor.gated else whole

    executor.behaviour = behaviour
    space, goals = [{"micro_batch_size": [8, 64], "precision": ["fp32", "bf16"]}], ["throughput"]
    run(tmp_path, executor, trials=4, sampler="grid", space=space, objectives=goals, trial_budget_s=0.01, repeats=0)
    assert [r.max_steps for r in executor.gated if r.candidate["precision"] == "bf16"] == [14]


def test_a_curve_that_is_kept_of_another_batch_is_not_taken_for_it(tmp_path):
    """A check that stayed undecided may be made again at another global batch."""
    executor = Instant()
    check = runner_of(tmp_path, executor)._finalists._numerics
    for micro_batch_size in (32, 8, 8):
        curve = check._curve(Candidate(micro_batch_size=micro_batch_size), tmp_path / "0003" / "gate", 12, 0.1)
        assert curve.candidate["micro_batch_size"] == micro_batch_size
    assert [request.candidate["micro_batch_size"] for request in executor.gated] == [32, 8]


@pytest.mark.system
def test_where_a_branch_follows_numerics_are_checked_at_the_baselines_batch(tmp_path, unhurried):
    """References at a large batch took the time that its branch needed."""
    space = [{"micro_batch_size": [8, 32], "precision": ["fp32", "bf16"]}]
    _, executor, _ = run(
        tmp_path, Instant(exact), trials=4, sampler="grid", space=space, objectives=["throughput"], branch=True
    )
    assert executor.gated and {request.candidate["micro_batch_size"] for request in executor.gated} == {8}


SHARED = (("sequence_parallel_size", 2),)  # two ranks share their samples


@pytest.mark.parametrize(
    ("own", "other", "at", "seen"),
    [
        (Candidate(micro_batch_size=4), Candidate(micro_batch_size=5, config=SHARED), None, {4}),
        (Candidate(micro_batch_size=1), Candidate(micro_batch_size=1, config=SHARED), None, {2}),
        (Candidate(micro_batch_size=5, config=SHARED), Candidate(micro_batch_size=5), None, {10}),
        (Candidate(micro_batch_size=5, config=SHARED), Candidate(micro_batch_size=5), 5, {5}),
    ],
)
def test_numerics_are_compared_at_one_batch_where_degrees_differ(tmp_path, monkeypatch, own, other, at, seen):
    """The baseline trained on 4 samples a step and the candidate, whose ranks share samples, on 5: their losses differed by that."""
    plan = SimpleNamespace(baseline=own, data_parallel=2, workload=SimpleNamespace(script=None))
    baseline, found = (
        SimpleNamespace(
            trial=n, candidate=c, numerics_kept=False, verdict=None, metrics={"step_time_s": 1.0}, ds_config={},
            outcome=Outcome.COMPLETE, numerics=str(n), loss_off=0.0,
        )
        for n, c in enumerate((own, other))
    )  # fmt: skip
    paths = {"folder": tmp_path, "trial_path": lambda n: tmp_path / "trials" / f"{n:04d}"}
    state = SimpleNamespace(plan=plan, measured=lambda: [baseline, found], **paths)
    budget = SimpleNamespace(check_room_s=lambda: 60.0)
    check, batches = NumericsCheck(state, None, budget, Watcher()), set()

    def curve(candidate, *_, **__):
        batches.add(candidate.global_batch_size(2))
        return TrialResult(outcome=Outcome.COMPLETE, losses=[3.0, 2.0, 1.0] * 10)

    monkeypatch.setattr(check, "_curve", curve)
    monkeypatch.setattr(check, "_sums_right", lambda *_: False)
    monkeypatch.setattr(check, "_affordable", lambda batch, *_, **__: (at or batch, 0.0))
    check.run([found])
    assert batches == seen
