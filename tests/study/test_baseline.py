"""The baseline: it decides which objectives, constraints and batches a study has."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.instant import WORKLOAD, Instant, Watcher, failed, plan_of, report, runner_of, spec_of
from support.studies import run

from autotune.errors import UserError
from autotune.report import load
from autotune.scoring import recommend
from autotune.scoring.estimates import estimate
from autotune.scoring.objective import Constraint
from autotune.study.setup.plan import completed
from autotune.study.storage import records
from autotune.trial.result import Outcome
from autotune.trial.target import Target
from autotune.trial.workload import Pipeline, Probed


def test_an_objective_that_the_baseline_does_not_yield_is_left_out_with_a_word(tmp_path):
    flat = Instant(lambda candidate: report(candidate, losses=[1.0 + 0.1 * (i % 3) for i in range(24)]))
    runner, _, watcher = run(tmp_path, flat, trials=3, objectives=DEFAULTS)
    assert [o.name for o in runner.state.objectives] == ["latency", "throughput", "memory"]
    assert any("'convergence' is left out: the baseline's loss did not fall" in text for text in watcher.said)


class Began(Instant):
    """One whose ranks write when they began: a thousand seconds apart."""

    def submit(self, folder):
        found = super().submit(folder)
        folder.events.write_text(json.dumps({"time": BEGAN_S + 1000 * len(self.ran), "rank": 0, "phase": "import"}))
        return found


def test_the_trial_of_the_baseline_lasted_as_long_as_its_measurement(tmp_path):
    """Its row is written after it, so that Optuna's dashboard drew it as 0.3 s long."""
    runner, _, _ = run(tmp_path, Began(), trials=2, finalists=0)
    baseline = runner.state.told()[0]
    assert baseline.datetime_start.timestamp() == BEGAN_S + 1000
    assert (baseline.datetime_complete - baseline.datetime_start).total_seconds() == 1.0  # as the engine says


def test_the_probe_of_the_noise_scale_is_no_pause_between_the_baseline_and_the_first_trial(tmp_path, monkeypatch):
    """What a pause lies between is compared less surely, as the load of others may have changed."""
    runner, _, _ = run(tmp_path, Began(), trials=2, finalists=0, objectives=["latency", "convergence"])
    first = runner.state.told()[1].datetime_complete.timestamp()
    noise = tmp_path / "s" / "trials" / "noise"
    for began_s, sittings in ((first - 10, [0, 0]), (first - 1000, [0, 1])):
        (noise / "events.jsonl").write_text(json.dumps({"time": began_s, "rank": 0, "phase": "import"}))
        assert [m.sitting for m in runner.state.measured()] == sittings


BEGAN_S = 1_795_000_000.0
TO_LOSS = {"name": "convergence", "metric": "time_to_loss_s"}
DEFAULTS = ["latency", "throughput", TO_LOSS, "memory"]


def test_the_noise_scale_is_measured_once_and_tells_what_other_batches_are_worth(tmp_path):
    given = {"finalists": 0, "objectives": ["latency", "convergence"]}
    runner, executor, _ = run(tmp_path, trials=4, **given)
    probes = [request for request in executor.requests if request.noise]
    assert [(p.candidate["micro_batch_size"], p.candidate["gradient_accumulation_steps"]) for p in probes] == [(2, 4)]
    phi = runner.state.reference.noise.samples
    assert phi == pytest.approx(8 * (4.1 - 2) / 3 / ((8 - 4.1) / 3), rel=0.01)
    for m in runner.state.measured():
        batch = m.candidate.global_batch_size(1)
        assert m.metrics["goodput_samples_per_s"] == pytest.approx(
            m.metrics["samples_per_s"] * (phi + 8) / (phi + batch)
        )
    again, executor, _ = run(tmp_path, trials=5, **given)
    assert again.state.reference == runner.state.reference and not any(request.noise for request in executor.requests)


def test_a_probe_of_the_noise_scale_that_crashed_is_made_once_more(tmp_path):
    """A study kept the baseline's global batch for good after one crash."""
    executor = Instant()

    def behaviour(candidate):
        probes = sum(request.noise for request in executor.requests)
        return (
            failed(Outcome.CRASHED, "a link flapped")
            if probes == 1 and executor.requests[-1].noise
            else report(candidate)
        )

    executor.behaviour = behaviour
    runner, _, watcher = run(tmp_path, executor, trials=1, finalists=0, objectives=["latency", "convergence"])
    assert sum(request.noise for request in executor.requests) == 2 and runner.state.reference.noise is not None
    assert any(
        text.startswith("the probe of the gradient noise scale begins again: it crashed") for text in watcher.said
    )


def test_where_the_noise_scale_is_not_resolved_the_baselines_batch_is_kept_with_a_word(tmp_path):
    silent = functools.partial(report, noise=None)
    given = {"finalists": 0, "objectives": ["latency", "convergence"]}
    runner, executor, watcher = run(tmp_path, Instant(silent), trials=4, **given)
    assert [o.name for o in runner.state.objectives] == ["latency", "convergence"]
    assert {candidate.global_batch_size(1) for candidate in executor.ran} == {8} and len(set(executor.ran)) == 4
    assert any(
        "8 is kept; leave 'convergence' out of the objectives (--fresh --objective latency) to" in line
        for line in watcher.said
    )
    _, executor, _ = run(tmp_path, Instant(silent), trials=6, **given)  # resumed, too
    assert {candidate.global_batch_size(1) for candidate in executor.ran} == {8}
    with pytest.raises(UserError, match="the space varies nothing else"):
        run(
            tmp_path / "third",
            Instant(silent),
            trials=2,
            space=[{"micro_batch_size": [8, 16]}],
            objectives=["convergence"],
        )


def test_where_its_steps_have_no_time_within_the_deadline_the_noise_scale_is_not_probed(tmp_path):
    """The probe of a training of long steps took a whole deadline, told nothing, and asked for more of the trial's budget."""
    slow = Instant(functools.partial(report, step_times_s=[10.0, 10.0, 10.0]))
    given = {"objectives": ["latency", "convergence"], "trial_budget_s": 20, "trial_deadline_s": 60}
    _, executor, watcher = run(tmp_path, slow, trials=2, **given)
    assert not any(request.noise for request in executor.requests)
    assert any("a longer --trial-deadline measures it): what other global batches" in line for line in watcher.said)


def test_with_the_global_batch_kept_goodput_needs_no_probe(tmp_path):
    _, executor, _ = run(tmp_path, trials=2, objectives=["latency", "convergence"], global_batch="keep")
    assert not any(request.noise for request in executor.requests)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("limit", "scarce"), [(150_000_000, True), (10**9, False)])
def test_memory_is_an_objective_of_a_balanced_goal_where_it_is_scarce(tmp_path, limit, scarce):
    runner, _, watcher = run(tmp_path, trials=2, finalists=0, device_memory_bytes=limit)
    assert ("memory" in [o.name for o in runner.state.objectives]) == scarce
    assert any("memory is scarce here (the baseline takes 72%" in text for text in watcher.said) == scarce


@pytest.mark.cells(1)
@pytest.mark.parametrize(("accelerator", "scarce"), [("cuda", False), ("cpu", True)])
def test_the_memory_of_a_gpu_is_not_scarce_where_that_of_its_host_ran_out(tmp_path, accelerator, scarce):
    why = "RuntimeError: CUDA error: out of memory (host memory that was to be pinned)"
    full = Instant(lambda candidate: failed(Outcome.OOM, why) if candidate.micro_batch_size == 8 else report(candidate))
    setting = replace(plan_of(spec_of()).setting, accelerator=accelerator)
    runner = runner_of(tmp_path, full, trials=2, device_memory_bytes=10**9, planned={"setting": setting})
    runner.run()
    assert ("memory" in [o.name for o in runner.state.objectives]) == scarce
    forecast = records.told_data(runner.state.told()[1])["forecast"]["peak_memory_bytes"]
    assert (forecast[0] > 10**9) == scarce, "what is expected of the next trial follows"


@pytest.mark.system
def test_the_learning_rate_follows_the_batch_in_the_trial_and_in_what_is_recommended(tmp_path):
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    executor = Instant()
    runner = runner_of(tmp_path, executor, trials=4, finalists=1, planned={"base_config": base})
    runner.run()
    for request in executor.requests:
        batch = request.candidate["micro_batch_size"] * request.candidate["gradient_accumulation_steps"]
        assert request.ds_config["optimizer"]["params"]["lr"] == pytest.approx(1e-3 * (batch / 8) ** 0.5, rel=1e-4)
        assert request.learning_rate_factor == pytest.approx((batch / 8) ** 0.5)
    for m in runner.state.measured():
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
        run(tmp_path, executor, constraints={"tokens_per_s": {"min": 1.0}})
    assert len(executor.ran) == 1


def test_convergence_alone_needs_a_baseline_that_completes(tmp_path):
    broken = Instant(lambda candidate: failed(Outcome.OOM, "over the limit"))
    with pytest.raises(UserError, match="did not complete"):
        run(tmp_path, broken, objectives=["convergence"])


def test_what_breaks_a_constraint_is_told_and_not_picked(tmp_path):
    bound = Constraint(metric="peak_memory_bytes", max=float(10**8 + 5 * 10**6))
    runner, _, _ = run(tmp_path, trials=5, space=[{"micro_batch_size": [2, 3, 4, 8, 16]}], constraints=[bound])
    infeasible = [m for m in runner.state.measured() if not m.feasible]
    assert infeasible
    assert all(m.candidate.micro_batch_size > 4 for m in infeasible)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert all(pick.measured.candidate.micro_batch_size <= 4 for pick in found.picks.values())
    # The baseline is one of them, and what was recommended read 0.57x its goodput, without a word on why.
    (said,) = [text for text in load.read(runner.study, tmp_path / "s").caveats() if "the baseline" in text]
    assert said == "the baseline breaks a constraint: others are compared with it, but it cannot be recommended"


@pytest.mark.cells(1)
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
    "stages": {"pipeline": Pipeline(stages=1, partition="parameters")},
}


@pytest.mark.parametrize("split", SPLIT.values(), ids=SPLIT)
def test_gradients_and_weights_of_a_model_that_is_split_between_ranks_are_no_ranks_own(tmp_path, split):
    executor, watcher = Instant(), Watcher()
    batch = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
    own = split if "pipeline" in split else {"script": Probed(ds_config={}, movable=tuple(batch), **batch, **split)}
    planned = {"workload": replace(WORKLOAD, **own), "world_size": split.get("model_parallel_size", 1)}
    objectives = ["latency", "convergence"]
    runner = runner_of(tmp_path, executor, watcher=watcher, trials=2, objectives=objectives, planned=planned)
    runner.run()
    assert not any(request.noise or request.weights for request in executor.requests)
    assert any("is not measured where a model is split between ranks" in line for line in watcher.said)
    assert not runner.state.record().branches
    checked = split.keys().isdisjoint(
        ("model_parallel_size", "pipeline")
    )  # what checks those would slow each step in vain
    assert any(request.check_gradient for request in executor.requests) == checked


def test_a_schedule_whose_length_only_a_trainer_fills_in_is_refused_for_a_model():
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    with pytest.raises(
        UserError, match=r"scheduler\.params\.total_num_steps is 'auto', which .*give a number, or leave"
    ):
        completed(spec_of(base_config={"scheduler": schedule}), Target(path=Path("m.py"), kind="model"), WORKLOAD)
