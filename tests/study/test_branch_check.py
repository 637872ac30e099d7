"""Branches: candidates with another global batch train from one state on equal data."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.instant import Instant, report
from support.studies import run

from autotune.scoring import recommend
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.estimates import estimate
from autotune.space.candidate import Candidate
from autotune.study import branch_check, budget
from autotune.study.storage import analysed, records
from autotune.trial import request as trial_request
from autotune.trial.folder import read_record
from autotune.trial.result import Outcome, TrialResult


def branching(folder, worth=None, **changes):
    """Runs a study in which half the batch takes half the time; `worth` says how fast the loss falls, by batch."""

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
        runner.state.plan.spec.trial_deadline_s
    }  # it trains longer than a trial
    samples = {r.max_steps * r.candidate["micro_batch_size"] for r in branches}
    assert max(samples) - min(samples) < 16  # equal, up to a step
    assert any(m.branch is not None and m.branch.confirmed for m in runner.state.measured())
    assert any("in a branch of" in text for text in watcher.said)


def test_weights_whose_run_was_cut_after_they_were_saved_are_warmed_up_again(tmp_path, monkeypatch):
    """How far they had been trained was not known, so that no later run branched, and no other batch could be the answer."""
    submit = Instant.submit

    def cut(executor, folder):
        if read_record(folder.request, trial_request.TrialRequest).save_weights:
            raise KeyboardInterrupt
        return submit(executor, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Instant, "submit", cut)
        with pytest.raises(KeyboardInterrupt):
            branching(tmp_path)
    _, executor, _ = branching(tmp_path)
    assert any(request.save_weights for request in executor.requests)
    assert any(request.weights for request in executor.requests)


def test_what_a_branch_refutes_is_not_recommended_and_a_resumed_study_branches_nothing_twice(tmp_path):
    runner, _, _ = branching(tmp_path, worth={16: 0.1, 4: 0.1})
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.candidate.global_batch_size(1) == 8
    refuted = [m for m in runner.state.measured() if m.branch is not None and m.branch.confirmed is False]
    assert refuted and refuted[0].doubt.startswith("in a branch of")
    _, executor, _ = branching(tmp_path, worth={16: 0.1, 4: 0.1})
    assert not [request for request in executor.requests if request.weights is not None]


def test_a_branch_that_fails_is_said_and_its_candidate_is_no_answer(tmp_path, monkeypatch):
    """What led was passed over without a word."""
    crashed = TrialResult(outcome=Outcome.CRASHED, reason="no")
    monkeypatch.setattr(branch_check.BranchCheck, "_train", lambda *_: crashed)
    space = [{"micro_batch_size": [8, 16]}]
    runner, _, watcher = branching(tmp_path, space=space, trials=2, objectives=["throughput"])
    assert "trial 1: the branch of trial 0 ended with crashed: no" in watcher.said
    assert runner.state.measured()[1].barred


def test_what_the_gate_has_passed_is_branched_in_the_same_run(tmp_path, unhurried):
    space = [{"micro_batch_size": [8, 16], "precision": ["fp32", "bf16"]}]
    runner, _, _ = branching(tmp_path, space=space, trials=4)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    best = found.picks["recommended"].measured
    assert (best.candidate.precision, best.candidate.global_batch_size(1)) == ("bf16", 16)
    assert best.verdict.passed and best.branch.confirmed and best.repeats


@pytest.mark.system
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
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    best = found.picks["recommended"].measured
    assert best.candidate == Candidate(micro_batch_size=16, precision="bf16") and best.verdict.passed


def test_without_branches_nothing_is_branched(tmp_path):
    _, executor, _ = branching(tmp_path, branch=False)
    assert not [request for request in executor.requests if request.weights or request.save_weights]


@pytest.mark.system
def test_who_goes_on_without_branches_has_them_lifted_from_the_kept_study_too(tmp_path, monkeypatch):
    """The report read from the study's record, which kept that branches are wanted, so that the flag changed nothing."""
    monkeypatch.setattr(branch_check, "compare", lambda *_: Branch(confirmed=None, reason="undecided"))
    space = {"space": [{"micro_batch_size": [8, 16]}], "trials": 2, "objectives": ["throughput"], "branch_tokens": 1600}
    for wanted in (True, False, True):
        runner, _, _ = branching(tmp_path, **space, branch=wanted)
        kept = records.record(runner.study)
        (_, wide) = analysed.measured(runner.study, runner.state.folder, kept)
        assert kept.branches is wide.branch_wanted is bool(wide.barred) is wanted


def test_a_checkpoint_of_the_users_is_where_probe_and_branches_start(tmp_path):
    checkpoint = tmp_path / "mine.pt"
    checkpoint.touch()
    _, executor, _ = branching(tmp_path, from_checkpoint=str(checkpoint), objectives=["latency", "convergence"])
    started = [request for request in executor.requests if request.weights is not None]
    assert {request.weights for request in started} == {str(checkpoint)} and any(request.noise for request in started)
    assert not [request for request in executor.requests if request.save_weights]


@pytest.mark.system
def test_branch_tokens_say_how_long_a_branch_is(tmp_path):
    _, executor, _ = branching(tmp_path, branch_tokens=1600)  # these samples are no sequences
    branches = [request for request in executor.requests if request.weights is not None]
    assert branches and all(r.max_steps * r.candidate["micro_batch_size"] == 1600 for r in branches)


@pytest.mark.system
def test_a_branch_that_would_take_most_of_the_study_is_not_begun_and_said_so(tmp_path):
    """Its samples alone would take minutes: the answer keeps the baseline's batch."""
    runner, executor, watcher = branching(tmp_path, trial_budget_s=0.1, branch_tokens=10**8)
    assert not [request for request in executor.requests if request.weights is not None]
    assert any("more than the checks' share of the study's time" in text for text in watcher.said)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.candidate.global_batch_size(1) == 8


def test_a_branch_has_as_many_samples_as_there_is_time_for(tmp_path, monkeypatch):
    """The usual length would take longer than the checks may."""
    samples = []
    for budgets in (5, 3):
        monkeypatch.setattr(budget, "CHECK_BUDGETS", budgets)
        _, executor, _ = branching(tmp_path / str(budgets), trial_budget_s=4)
        branches = [request for request in executor.requests if request.weights is not None]
        samples.append({r.max_steps * r.candidate["micro_batch_size"] for r in branches})
    assert 12 * 16 < max(samples[1]) < min(samples[0])


def lengths(executor):
    branched = [request for request in executor.requests if request.weights is not None]
    return [r.max_steps * r.candidate["micro_batch_size"] for r in branched]


def test_a_branch_that_did_not_decide_is_followed_by_longer_ones_while_there_is_time(tmp_path, monkeypatch):
    """One that was left out for want of time is made by a later run with more of it, and its time is kept for advice."""

    def undecided_below(n_samples):
        def decide(own, baseline, *_):
            n = len(own.losses) * own.batch
            return Branch(confirmed=True if n >= n_samples else None, reason=f"saw {n}", n_samples=n)

        monkeypatch.setattr(branch_check, "compare", decide)

    space = {"space": [{"micro_batch_size": [8, 16]}], "trials": 2, "trial_budget_s": 0.1, "objectives": ["throughput"]}
    monkeypatch.setattr(budget, "CHECK_BUDGETS", 100)
    undecided_below(10**6)
    runner, executor, watcher = branching(tmp_path, **space)
    first = lengths(executor)
    assert len(set(first)) > 1 and max(first) > 3 * min(first)
    assert any(text.startswith("no longer branch for trial 1 so far") for text in watcher.said)
    assert records.UNCHECKED_S.of(runner.study) > 0
    assert (
        recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
        .picks["recommended"]
        .measured.trial
        == 0
    )
    again = lengths(branching(tmp_path, **space)[1])
    assert not again  # another look at the study has no more time
    undecided_below(max(first) + 1)
    runner, executor, _ = branching(tmp_path, **space, time_budget_s=1e6)
    assert min(lengths(executor)) > 1.9 * max(first)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.trial == 1 and records.UNCHECKED_S.of(runner.study) == 0


@pytest.mark.system
def test_longer_branches_that_a_later_run_asks_for_are_trained_where_one_did_not_decide(tmp_path, monkeypatch):
    """What a branch that decides nothing advises, --branch-tokens, had no effect on the study that it was said of."""
    undecided = Branch(confirmed=None, reason="undecided", n_samples=1600)
    monkeypatch.setattr(branch_check, "compare", lambda *_: undecided)
    space = {"space": [{"micro_batch_size": [8, 16]}], "trials": 2, "objectives": ["throughput"]}
    for tokens, trained in ((1600, [1600, 1600]), (1600, []), (3200, [3200, 3200]), (800, [])):
        assert lengths(branching(tmp_path, **space, branch_tokens=tokens)[1]) == trained


@pytest.mark.system
def test_a_branch_that_a_trials_deadline_would_cut_is_not_begun_again(tmp_path, monkeypatch):
    """Its advice would be a time budget that cannot help."""
    decide = lambda own, *_: Branch(confirmed=None, reason="", n_samples=len(own.losses) * own.batch)  # noqa: E731
    monkeypatch.setattr(branch_check, "compare", decide)
    monkeypatch.setattr(budget, "CHECK_BUDGETS", 10**6)
    space = {
        "space": [{"micro_batch_size": [8, 16]}],
        "trials": 2,
        "trial_deadline_s": 20.0,
        "objectives": ["throughput"],
    }
    runner, executor, _ = branching(tmp_path, **space, trial_budget_s=1.0)
    assert 0 < max(lengths(executor)) < 20.0 * 600 and records.UNCHECKED_S.of(runner.study) == 0


@pytest.mark.system
@pytest.mark.parametrize("quick", [True, False])
def test_batches_that_no_branch_could_confirm_in_time_are_not_tried_and_said(tmp_path, quick):
    """Eight samples take 28 ms, so that a branch of 24 steps of 512 takes 43 s for the baseline alone."""
    space = [{"micro_batch_size": [8, 16, 32, 64, 128, 256, 512]}]
    shape = {"trials": 8, "space": space, "trial_budget_s": 0.1, "quick": quick, "sampler": "random"}
    runner, _, watcher = branching(tmp_path, **shape, objectives=["throughput"])
    tried = {m.candidate.micro_batch_size for m in runner.state.measured()}
    assert 8 in tried and max(tried) < 512 and any("are not tried: the branch" in text for text in watcher.said)
    assert "are not tried: the branch" in records.LEFT_OUT.of(runner.study)["branch"]  # the report says so, too
    again, *_ = branching(tmp_path / "free", **shape | {"branch": False, "finalists": 0}, objectives=["throughput"])
    assert max(m.candidate.micro_batch_size for m in again.state.measured()) == 512


@pytest.mark.system
def test_a_branch_that_decides_comes_before_the_rounds_that_time_is_kept_for(tmp_path, monkeypatch):
    """Without it the best one cannot be recommended, however often it is measured again."""
    monkeypatch.setattr(budget.Budget, "out_of_time", lambda own: own._expected_s is not None)
    runner, _, _ = branching(tmp_path)
    assert [m.branch.confirmed for m in runner.state.measured() if m.branch is not None] == [True]


@pytest.mark.system
def test_a_training_that_ends_before_its_branch_is_branched_once_and_the_next_best_is_checked(tmp_path):
    """Longer branches were asked for, and each ended with the script; meanwhile no other trial was checked."""
    space = {"space": [{"micro_batch_size": [8, 16, 64]}], "trials": 3, "objectives": ["throughput"], "finalists": 1}
    executor, real = Instant(), report

    def behaviour(candidate):
        whole = real(candidate, losses=[3 - 0.45 * math.log(i * candidate.micro_batch_size + 200) for i in range(200)])
        return replace(whole, losses=whole.losses[:5]) if candidate.micro_batch_size == 64 else whole

    executor.behaviour, submit = behaviour, Instant.submit
    executor.submit = lambda folder: _leaving_weights(executor, submit, folder)
    runner, _, watcher = run(tmp_path, executor, **space, branch=True, sampler="grid")
    by_batch = {m.candidate.micro_batch_size: m for m in runner.state.measured()}
    assert "its branch ended after 320 of" in by_batch[64].doubt and records.UNCHECKED_S.of(runner.study) == 0
    assert sum("training trial" in text for text in watcher.said) == 2
    assert by_batch[16].branch.confirmed
