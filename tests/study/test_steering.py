"""Forecasts steer a study: unfit candidates are not launched, beaten trials stop, the search ends when it is done."""

import math
import zlib
from collections import Counter
from dataclasses import replace

import pytest
from support.instant import STEPS, Instant, Watcher, failed, report, runner_of, spec_of

from autotune.errors import SpecError
from autotune.report import load
from autotune.scoring import recommend, step_times
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.estimates import estimate
from autotune.space.candidate import Candidate
from autotune.study.folder import gate_path
from autotune.study.storage import records
from autotune.trial.folder import write_record
from autotune.trial.result import Outcome

LIMIT = 1_100_000_000
SMALL = [{"micro_batch_size": [2, 4, 8, 16, 32], "gradient_accumulation_steps": [1, 2], "precision": ["fp32", "bf16"]}]
NEVER = {"stop_below": 0.0, "stop_trials": False, "finalists": 0}


def needs(candidate):
    """Bytes of a made-up workload: activations, and something that is always there."""
    return 10**8 + 5 * 10**7 * candidate.micro_batch_size


def limited(candidate):
    """Runs where it fits."""
    if needs(candidate) > LIMIT:
        return failed(Outcome.OOM, "over the memory limit")
    return report(candidate, peak_memory_bytes={"steady": needs(candidate)})


def run(folder, behaviour=report, **changes):
    executor, watcher = Instant(behaviour), Watcher()
    runner = runner_of(folder, executor, watcher=watcher, **changes)
    runner.run()
    return runner, executor, watcher


def outcomes(runner):
    return [m.outcome for m in runner.state.measured()]


# What does not fit.


@pytest.mark.cells(1)
@pytest.mark.parametrize("micros", [[8, 16, 96, 128], [8, 16, 18]])
def test_what_a_trials_deadline_leaves_no_time_for_is_not_tried(tmp_path, micros):
    """Studies of slow trainings tried large batches that were killed at the deadline, one ZeRO stage after the other."""

    def slow(candidate):
        seconds = candidate.micro_batch_size / 60
        if candidate.micro_batch_size > 16:
            return replace(failed(Outcome.TIMEOUT, "no end within 1 s"), phase="measure")
        return report(candidate, step_times_s=[seconds] * STEPS)

    space = [{"micro_batch_size": micros, "zero_stage": [0, 1, 2]}]
    own = {"space": space, "trial_budget_s": 0.5, "trial_deadline_s": 1.0, "global_batch": "free", "branch": False}
    own["objectives"] = ["latency", "throughput"]  # the noise scale has no time, either
    runner, _, watcher = run(tmp_path, slow, trials=20, **own, **NEVER)
    # The baseline foretells that a micro-batch of 96 has no time for its steps, and one of 18 shows it.
    assert outcomes(runner).count(Outcome.TIMEOUT) == (18 in micros)
    assert any("are not tried: a trial's deadline leaves no time for their steps" in text for text in watcher.said)


@pytest.mark.system
def test_a_slow_baseline_leaves_out_no_batch_that_others_are_forecast_to_have_time_for(tmp_path):
    """At the baseline's throughput there was no time for the batches that were a quarter faster in what has a shorter step."""

    def waits(candidate):
        seconds = candidate.micro_batch_size / 1000 + (0.3 if candidate.zero_stage == 3 else 0.0)
        return report(candidate, step_times_s=[seconds] * STEPS)

    space = [{"micro_batch_size": [8, 16, 96], "zero_stage": [0, 3]}]
    own = {"space": space, "trial_budget_s": 0.5, "trial_deadline_s": 1.0, "global_batch": "free", "branch": False}
    own |= {"objectives": ["throughput"], "planned": {"baseline": Candidate(micro_batch_size=8, zero_stage=3)}}
    _, executor, watcher = run(tmp_path, waits, trials=6, sampler="grid", stop_trials=False, **own)
    assert {candidate.micro_batch_size for candidate in executor.ran} == {8, 16, 96}
    assert not any("are not tried" in text for text in watcher.said)


@pytest.mark.system
def test_a_trial_that_hangs_says_nothing_of_a_batch_that_others_were_timed_at(tmp_path):
    """All larger batches were left out where one ZeRO stage stood still until the deadline."""

    def hangs(candidate):
        if candidate.zero_stage == 2 and candidate.micro_batch_size > 8:
            return replace(failed(Outcome.TIMEOUT, "no end within 1 s"), phase="measure")
        return report(candidate)

    space = [{"micro_batch_size": [8, 16, 32], "zero_stage": [0, 1, 2]}]
    own = {"space": space, "trial_budget_s": 0.5, "trial_deadline_s": 1.0, "global_batch": "free", "branch": False}
    runner, _, watcher = run(tmp_path, hangs, trials=20, sampler="grid", stop_trials=False, **own)
    assert outcomes(runner).count(Outcome.TIMEOUT) == 2 and len(outcomes(runner)) == 9
    assert not any("are not tried" in text for text in watcher.said)


@pytest.mark.parametrize(
    "sampler", [*(pytest.param(name, marks=pytest.mark.system) for name in ("random", "tpe")), "grid"]
)
def test_what_surely_does_not_fit_is_told_and_not_launched_and_costs_no_trial(tmp_path, sampler):
    given = {"sampler": sampler, "space": SMALL, "trials": 17, "device_memory_bytes": LIMIT}
    runner, executor, watcher = run(tmp_path, limited, **given, **NEVER)
    ended = outcomes(runner)
    assert ended.count(Outcome.PREDICTED_OOM) >= 2 and ended.count(Outcome.OOM) <= 1
    assert len(executor.ran) == len(ended) - ended.count(Outcome.PREDICTED_OOM)
    # 20 candidates, of which those with a micro-batch of 32 do not fit.
    assert ended.count(Outcome.COMPLETE) == min(17 - ended.count(Outcome.OOM), 16)
    reason = next(
        t["reason"]
        for t in map(records.told_data, records.told_trials(runner.study))
        if t["outcome"] == "predicted_oom"
    )
    assert "predicted to need 1." in reason and "a rank has 1.02 GiB" in reason
    seen = load.status_data(load.load("s", str(runner.storage.url), tmp_path / "s"), 0)
    assert seen["outcomes"]["predicted_oom"] == ended.count(Outcome.PREDICTED_OOM)
    assert watcher.ended_with[-1].n_told == min(17, len(executor.ran))


@pytest.mark.system
@pytest.mark.parametrize("sampler", ["grid", "physics"])
def test_without_the_filter_everything_is_launched(tmp_path, sampler):
    runner, executor, _ = run(
        tmp_path,
        limited,
        sampler=sampler,
        space=SMALL,
        trials=30,
        device_memory_bytes=LIMIT,
        memory_filter=False,
        **NEVER,
    )
    assert outcomes(runner).count(Outcome.OOM) == 4 and len(executor.ran) == 20


@pytest.mark.system
def test_predictions_without_end_count_as_trials(tmp_path):
    many = [{"micro_batch_size": [8, *range(100, 160)]}]
    runner, executor, _ = run(
        tmp_path, limited, sampler="grid", space=many, trials=6, device_memory_bytes=LIMIT, **NEVER
    )
    assert 12 <= len(outcomes(runner)) <= 13 and len(executor.ran) <= 3


def test_where_nothing_more_fits_the_study_says_so(tmp_path):
    given = {"sampler": "physics", "space": [{"micro_batch_size": [2, 4, 64, 128, 256]}], "trials": 20}
    given["objectives"] = ["latency", "memory"]  # nothing is gained by trying a large one
    runner, executor, watcher = run(tmp_path, limited, device_memory_bytes=LIMIT, **given, **NEVER)
    assert {c.micro_batch_size for c in executor.ran} <= {2, 4, 8}
    assert any("no remaining candidate fits the device memory of 1.02 GiB: of 3 that" in text for text in watcher.said)
    assert not any("has been measured" in text for text in watcher.said)
    again = load.load("s", str(runner.storage.url), tmp_path / "s")
    assert any("no remaining candidate fits" in text for text in again.caveats())


def test_a_baseline_that_runs_out_of_memory_does_not_end_the_search(tmp_path):
    """Nothing was measured yet, and the guess of the workload may be wrong in its scale."""
    given = {
        "sampler": "physics",
        "space": [{"micro_batch_size": [1, 2, 32, 64], "checkpoint_every": [0, 1]}],
        "trials": 8,
    }
    behaviour = lambda c: failed(Outcome.OOM, "over") if needs(c) > 220_000_000 else limited(c)  # noqa: E731
    runner, _, _ = run(tmp_path, behaviour, device_memory_bytes=220_000_000, **given, **NEVER)
    assert outcomes(runner)[0] is Outcome.OOM and outcomes(runner).count(Outcome.COMPLETE) == 4


def test_where_nothing_fits_at_all_the_answer_says_so(tmp_path):
    given = {
        "sampler": "physics",
        "space": [{"micro_batch_size": [8, 16, 32]}],
        "trials": 12,
        "objectives": ["latency", "throughput"],
    }
    runner, executor, _ = run(
        tmp_path, lambda _: failed(Outcome.OOM, "over"), device_memory_bytes=10**8, **given, **NEVER
    )
    assert set(outcomes(runner)) <= {Outcome.OOM, Outcome.PREDICTED_OOM} and len(executor.ran) == 3
    found = load.load("s", str(runner.storage.url), tmp_path / "s")
    assert found.picks == {} and found.why_nothing.startswith(
        "no configuration fits the device memory: 3 ran out of it"
    )
    assert found.recommended["why_nothing"] == found.why_nothing


# When it is done.


def test_a_study_ends_when_nothing_is_left_to_gain_and_says_so(tmp_path):
    wide = [{"micro_batch_size": {"range": [1, 40]}, "precision": ["fp32", "bf16"], "checkpoint_every": [0, 1]}]
    given = {
        "sampler": "physics",
        "space": wide,
        "finalists": 0,
        "objectives": ["latency", "throughput"],
        "stop_trials": False,
    }
    runner, executor, watcher = run(tmp_path, trials=60, **given)
    assert 8 <= len(executor.ran) < 60
    why = next(text for text in watcher.said if text.startswith("stopped after"))
    assert why.startswith(f"stopped after {len(executor.ran)} of 60 trials: ")
    assert why in load.load("s", str(runner.storage.url), tmp_path / "s").caveats()
    throughputs = [m.metrics["samples_per_s"] for m in runner.state.measured()]
    assert max(throughputs) >= 0.98 * 40 / (0.02 + 0.001 * 40 * 0.6)
    # Run again it ends at once; with the rule switched off it goes on.
    assert run(tmp_path, trials=60, **given)[1].ran == []
    # With no trial left to spend it is said as well: a larger number of trials alone would not go on.
    _, _, watcher = run(tmp_path, trials=len(executor.ran), **given)
    assert why.replace("of 60", f"of {len(executor.ran)}") in watcher.said
    again, executor, _ = run(tmp_path, stop_below=0.0, trials=len(executor.ran) + 2, **given)
    assert len(executor.ran) == 2
    assert not any("stopped after" in text for text in load.load("s", str(again.storage.url), tmp_path / "s").caveats())


@pytest.mark.system
def test_a_study_that_cannot_foretell_does_not_end_itself(tmp_path):
    """Times that follow no rule: each candidate has its own."""

    def erratic(candidate):
        factor = math.exp(1.5 * math.sin(zlib.crc32(candidate.key.encode())))
        return report(candidate, step_times_s=[0.01 * factor] * STEPS)

    wide = [{"micro_batch_size": {"range": [1, 40]}, "precision": ["fp32", "bf16"], "checkpoint_every": [0, 1]}]
    given = {"sampler": "physics", "space": wide, "finalists": 0, "objectives": ["latency"], "stop_trials": False}
    _, executor, _ = run(tmp_path, erratic, trials=18, **given)
    assert len(executor.ran) == 18


# Which trial is lost.


class Stopping(Instant):
    """Ends a trial as the ranks do, when it is seen to be beaten."""

    def __init__(self):
        super().__init__(self.stopped)

    def stopped(self, candidate):
        whole = report(candidate)
        whole = replace(whole, step_times_s=[10 * s for s in whole.step_times_s])
        rival = step_times.beaten_by(
            self.requests[-1].rivals, whole.step_times_s, max(whole.peak_memory_bytes.values())
        )
        if rival is None:
            return whole
        short = {
            "step_times_s": whole.step_times_s[:5],
            "cpu_times_s": whole.cpu_times_s[:5],
            "losses": whole.losses[:5],
        }
        return replace(
            whole, outcome=Outcome.STOPPED_EARLY, reason=f"worse than trial {rival.trial}", phase="measure", **short
        )


def stopping(folder, **changes):
    executor = Stopping()
    runner = runner_of(folder, executor, **changes)
    runner.run()
    return runner, executor


def test_trials_that_are_beaten_are_stopped_kept_and_never_picked(tmp_path):
    given = {"sampler": "random", "trials": 11, "finalists": 2, "objectives": ["latency", "memory"]}
    runner, executor = stopping(tmp_path, **given)
    ended = outcomes(runner)
    assert ended[0] is Outcome.COMPLETE and ended.count(Outcome.STOPPED_EARLY) >= 3
    assert executor.requests[0].rivals == () and all(not r.rivals for r in executor.requests[11:])
    stopped = [m for m in runner.state.measured() if m.outcome is Outcome.STOPPED_EARLY]
    assert all(m.metrics["step_time_s"] > 0 and m.metrics["peak_memory_bytes"] > 0 and not m.usable for m in stopped)
    complete = [m for m in runner.state.measured() if m.usable]
    for m in stopped:  # each is worse than one that ran to its end on both objectives
        assert any(
            c.metrics["step_time_s"] <= m.metrics["step_time_s"]
            and c.metrics["peak_memory_bytes"] <= m.metrics["peak_memory_bytes"]
            for c in complete
        )
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert {p.measured.trial for p in found.picks.values()} <= {m.trial for m in complete}
    assert len(runner.proposer.advisor().told(runner.study)) == 11


def test_no_trial_is_stopped_that_may_be_the_drop_in_or_whose_objective_is_not_known_yet(tmp_path):
    same_batch = [
        {"micro_batch_size": [2, 4, 8], "gradient_accumulation_steps": [1, 2, 4], "precision": ["fp32", "bf16"]}
    ]
    _, executor = stopping(
        tmp_path, sampler="random", space=same_batch, trials=9, finalists=0, objectives=["throughput"]
    )
    asked = [
        (Candidate.of(request.candidate).global_batch_size(1), request.rivals) for request in executor.requests[1:]
    ]
    batches = [c.global_batch_size(1) for c in executor.ran]
    assert any(rivals for batch, rivals in asked if batch != 8)
    assert all(batches[rival.trial] == 8 for batch, rivals in asked if batch == 8 for rival in rivals)
    # More micro-steps sum up no more gradients in 16 bits where the base config has them summed up in fp32.
    accumulated = {"data_types": {"grad_accum_dtype": "fp32"}}

    def faster_in_fp32(candidate):
        return report(candidate, step_times_s=[0.01 if candidate.precision == "fp32" else 0.02] * STEPS)

    runner, *_ = run(
        tmp_path / "fp32", faster_in_fp32, sampler="grid", space=[{"precision": ["bf16", "fp32"]}], trials=2, finalists=0,
        baseline=Candidate(micro_batch_size=8, precision="bf16"), planned={"base_config": accumulated}, objectives=["throughput"],
    )  # fmt: skip
    dropping_in = Candidate(micro_batch_size=4, gradient_accumulation_steps=2, precision="bf16")
    assert [rival.trial for rival in runner.proposer.bounds_to_beat(dropping_in)] == [0]
    _, executor = stopping(
        tmp_path / "b", sampler="random", trials=3, finalists=0, objectives=["throughput", {"metric": "cpu_s_per_step"}]
    )
    assert all(not request.rivals for request in executor.requests)


def test_a_trial_that_can_be_no_answer_stops_no_other(tmp_path):
    """Nothing showed that its recomputation acted; it read four times as fast, and each later trial was stopped for it."""

    def behaviour(candidate):
        unseen = candidate.checkpoint_every == 2
        whole = report(candidate, step_times_s=[0.005 if unseen else 0.02] * STEPS)
        return replace(whole, observed=replace(whole.observed, unwitnessed=("checkpoint_every",) if unseen else ()))

    space = {"space": [{"checkpoint_every": [0, 1, 2, 4]}], "objectives": ["throughput"], "sampler": "grid"}
    runner, *_ = run(tmp_path, behaviour, **space, trials=3, finalists=0)
    barred = [m.trial for m in runner.state.measured() if m.barred]
    rivals = runner.proposer.bounds_to_beat(Candidate(micro_batch_size=8, checkpoint_every=4))
    assert barred and rivals and not {rival.trial for rival in rivals} & set(barred)
    told = runner.proposer.advisor().told(runner.study)
    best = runner.proposer.advisor().guide.best(told)
    assert all(candidate.checkpoint_every != 2 for candidate in best.values())


def test_what_a_check_has_refused_is_tried_no_further_by_a_later_run(tmp_path):
    """All five trials of a second run had the numerics that the quality gate had refused in the first one."""
    space = [{"precision": ["fp32", "bf16"], "checkpoint_every": [0, 1, 2, 4], "zero_stage": [0, 1, 2]}]
    given = {"space": space, "objectives": ["throughput"], "stop_below": 0.0}

    def machine(candidate):
        return report(candidate, step_times_s=[0.01 if candidate.precision == "bf16" else 0.012] * STEPS)

    runner, *_ = run(tmp_path, machine, sampler="random", trials=8, finalists=0, **given)
    of_bf16 = [m.trial for m in runner.state.measured() if m.candidate.precision == "bf16"]
    for number in of_bf16:
        write_record(gate_path(runner.state.folder, number), GateVerdict(passed=False, reason="trains worse"))
    again = runner_of(tmp_path, Instant(machine), sampler="physics", trials=12, finalists=0, **given)
    again.run()
    assert of_bf16 and again.proposer.advisor().refused == set(of_bf16)
    assert {m.candidate.precision for m in again.state.measured()[8:]} == {"fp32"}


def test_a_search_that_goes_on_after_the_checks_of_its_own_run_knows_what_they_refused(tmp_path):
    """Only what an earlier run had refused was known, so the time that was left went to settings that could be no answer."""
    space = [{"precision": ["fp32", "bf16"], "checkpoint_every": [0, 1, 2]}]
    runner, *_ = run(tmp_path, space=space, objectives=["throughput"], trials=4, sampler="physics", **NEVER)
    of_bf16 = {m.trial for m in runner.state.measured() if m.candidate.precision == "bf16"}
    for number in of_bf16:
        write_record(gate_path(runner.state.folder, number), GateVerdict(passed=False, reason="trains worse"))
    runner.proposer.start()
    told = runner.proposer.advisor().told(runner.study)
    assert of_bf16 and {n for n, t in enumerate(told) if not t.eligible} == of_bf16


def test_bounds_are_held_by_what_all_measurements_say(tmp_path):
    """The first reading was within the bound, and the three that followed were not."""
    n_ran = Counter()

    def behaviour(candidate):
        n_ran[candidate] += 1
        return report(candidate, step_times_s=[0.0279 if n_ran[candidate] == 1 else 0.030] * STEPS)

    bound = [{"metric": "step_time_s", "max": "29ms"}]
    given = {
        "space": [{"checkpoint_every": [0, 1, 2]}],
        "objectives": ["throughput"],
        "constraints": bound,
        "repeats": 3,
    }
    runner, *_ = run(tmp_path, behaviour, **given, trials=3)
    shown = load.read(runner.study, runner.state.folder, series=False)
    again = [trial for trial in shown.trials if len(trial["readings_s"]) > 1]
    assert again and all(trial["metrics"]["step_time_s"] > 0.029 and not trial["feasible"] for trial in again)
    assert "recommended" not in shown.picks


@pytest.mark.system
def test_with_stopping_switched_off_every_trial_runs_to_its_end(tmp_path):
    runner, _ = stopping(tmp_path, sampler="random", trials=8, finalists=0, objectives=["latency"], stop_trials=False)
    assert set(outcomes(runner)) == {Outcome.COMPLETE}


# What the user says.


def test_physics_is_the_default_and_the_share_is_read_as_people_write_it():
    assert spec_of(sampler=None).sampler == "physics"
    assert spec_of(stop_below="2.5%").stop_below == 0.025
    assert spec_of(stop_below="0").stop_below == 0.0
    for wrong in ("soon", "-1%", "150%"):
        with pytest.raises(SpecError, match="--stop-below"):
            spec_of(stop_below=wrong)


# Racing.


@pytest.mark.system
def test_a_finalist_that_is_clearly_beaten_is_not_measured_again(tmp_path):
    """One candidate was lucky in its trial: it reads half its time there, and its real time ever after."""
    executor = Instant()
    lucky = Candidate(micro_batch_size=16, gradient_accumulation_steps=2, checkpoint_every=1)

    def behaviour(candidate):
        whole = report(candidate)
        first = executor.ran.count(candidate) == 1
        return (
            replace(whole, step_times_s=[0.3 * s for s in whole.step_times_s])
            if candidate == lucky and first
            else whole
        )

    executor.behaviour = behaviour
    given = {
        "sampler": "grid",
        "trials": 33,
        "finalists": 3,
        "repeats": 3,
        "objectives": ["latency", "throughput"],
        "stop_trials": False,
    }
    runner = runner_of(tmp_path, executor, **given)
    runner.run()
    again = executor.ran[len(runner.state.measured()) :]
    assert 1 <= again.count(lucky) <= 2
    assert again.count(Candidate(micro_batch_size=8)) >= 3
    number = next(m.trial for m in runner.state.measured() if m.candidate == lucky)
    found = recommend.recommend(estimate(runner.state.measured()), runner.state.objectives, 1)
    assert found.picks["recommended"].measured.trial != number
    before = len(executor.ran)
    runner_of(tmp_path, executor, **given).run()
    assert len(executor.ran) == before
