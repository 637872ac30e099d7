"""The physics-guided search: never illegal, never twice, learns from what ran and from what did not, resumes from storage."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import optuna
import pytest
from support.priors import flat, from_logs

from autotune.forecast.features import PriorPrediction
from autotune.forecast.predictor import AnalyticPrior
from autotune.forecast.regression import probability_below
from autotune.scoring import metrics as known_metrics
from autotune.search import physics
from autotune.search.observation import MEASURED_ATTR, Observation
from autotune.search.optimizer import CandidateOptimizer, Outlook
from autotune.search.physics import PhysicsSampler
from autotune.search.samplers import encoded
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.trial.profile import Machine, Profile
from autotune.trial.result import Outcome

METRICS = ["step_time_s", "samples_per_s"]
DEFAULT = Candidate(micro_batch_size=2, zero_stage=1)
SETTING = Setting(accelerator="cuda", world_size=2, ranks_per_node=2, n_blocks=4, fp16=True)
KNOBS = {
    "micro_batch_size": [1, 2, 4, 8, 16],
    "gradient_accumulation_steps": [1, 2, 4],
    "zero_stage": [0, 1, 2, 3],
    "precision": ["fp32", "bf16"],
    "checkpoint_every": [0, 1],
    "zero_optimization.overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1, 2]}},
    "offload_param": {"choices": ["none", "cpu"], "when": {"zero_stage": [3]}},
    "bf16.bf16_master_weights_and_grads": {"choices": [None, True], "when": {"precision": ["bf16"]}},
}
BUCKETS = {"zero_optimization.reduce_bucket_size": [2**n for n in range(20, 28)]}
PRIOR = AnalyticPrior(
    Profile.guess(10**8, 10**8, 4), Machine.guess("cuda", 2), {"zero_optimization.reduce_bucket_size": 10**8}
)
LEVELS = {"fp32": 0.0, "bf16": -0.5, "torch_autocast": -0.4}


def truth(c):
    """Seconds and bytes of a made-up machine."""
    micro_step = 0.01 * (c.micro_batch_size + 1.5) * math.exp(LEVELS[c.precision] + 0.25 * (c.checkpoint_every > 0))
    seconds = (
        c.gradient_accumulation_steps * micro_step + 0.02 + 0.01 * (c.zero_stage == 3) * c.gradient_accumulation_steps
    )
    size = 1e9 * (1 + 4 / (1 + c.zero_stage)) + c.micro_batch_size * (1e8 if c.checkpoint_every else 4e8)
    return seconds, size


def metrics_of(candidate, noise=1.0):
    seconds, size = truth(candidate)
    return {
        "step_time_s": seconds * noise,
        "samples_per_s": candidate.global_batch_size(2) / seconds / noise,
        "peak_memory_bytes": size,
    }


def told_of(candidate, limit=math.inf, noise=1.0):
    if truth(candidate)[1] > limit:
        return Observation(candidate=candidate, outcome=Outcome.OOM)
    return Observation(candidate=candidate, metrics=metrics_of(candidate, noise))


def sampler_for(knobs=None, *, prior=PRIOR, limit=None, setting=SETTING, default=DEFAULT, metrics=METRICS):
    space = SearchSpace.parse(knobs or KNOBS, "test.yaml")
    return PhysicsSampler(space, default, setting, 0, prior=prior, metrics=metrics, memory_limit_bytes=limit), space


def study_for(sampler, storage=None, name=None):
    return optuna.create_study(
        storage=storage, study_name=name, load_if_exists=True, directions=["minimize", "maximize"], sampler=sampler
    )


def keep_result(study, trial, result):
    study._storage.set_trial_system_attr(trial._trial_id, MEASURED_ATTR, json.dumps(result))


def step(study, sampler, space, limit=math.inf, values=None):
    """One trial as `autotune run` does it; None when the sampler is exhausted."""
    forced, default = sampler.forced, sampler._default
    trial = study.ask()
    _ = trial.relative_params  # Optuna asks lazily
    for name in encoded(space, forced) if forced else ():
        next(p for p in space.parameters if p.optuna_name == name).suggest(trial)
    candidate = forced or space.candidate(space.suggest(lambda parameter: parameter.suggest(trial), default), default)
    if forced is None and sampler.exhausted:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None
    trial.set_user_attr(CANDIDATE_ATTR, candidate.key)
    told = told_of(candidate, limit)
    metrics = dict(told.metrics) if values is None else values
    keep_result(study, trial, {"outcome": str(told.outcome), "metrics": metrics})
    if told.outcome is Outcome.COMPLETE:
        study.tell(trial, [metrics.get(name, 1.0) for name in METRICS])
    else:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return candidate


def all_of(space, setting=SETTING, default=DEFAULT):
    return [c for c in space.candidates(default) if why_illegal(c, setting) is None]


def test_no_candidate_is_illegal_or_comes_twice_and_conditions_hold():
    sampler, space = sampler_for()
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(25)]
    assert len(set(tried)) == 25
    assert all(why_illegal(c, SETTING) is None and space.contains(c) for c in tried)


def test_a_forced_candidate_is_the_next_trial_even_outside_the_space():
    sampler, space = sampler_for()
    study = study_for(sampler)
    outside = Candidate(micro_batch_size=3, zero_stage=1, precision="bf16")
    sampler.force(outside)
    assert step(study, sampler, space) == outside and sampler.forced is None
    assert step(study, sampler, space) != outside


def test_a_space_is_searched_to_its_end_and_then_said_to_be_exhausted():
    knobs = {"micro_batch_size": [1, 2], "zero_stage": [0, 1]}
    sampler, space = sampler_for(knobs)
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(5)]
    assert set(tried[:4]) == set(all_of(space)) and tried[4] is None and sampler.exhausted


def test_one_candidate_is_a_space_too():
    sampler, space = sampler_for({"micro_batch_size": [4]}, default=Candidate(micro_batch_size=4))
    study = study_for(sampler)
    assert step(study, sampler, space) == Candidate(micro_batch_size=4)
    assert step(study, sampler, space) is None


@pytest.mark.parametrize("prior", [PRIOR, flat], ids=["analytic", "flat"])
def test_the_best_is_found_within_a_few_trials(prior):
    sampler, space = sampler_for(prior=prior)
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(25)]
    every = all_of(space)
    for cost in (lambda c: truth(c)[0], lambda c: truth(c)[0] / c.global_batch_size(2)):
        assert min(map(cost, tried)) <= 1.03 * min(map(cost, every))


def test_a_resumed_study_believes_the_same_and_repeats_nothing(tmp_path):
    storage = f"sqlite:///{tmp_path}/s.db"
    first, space = sampler_for(limit=6e9)
    study = study_for(first, storage, "s")
    before = [step(study, first, space, 6e9) for _ in range(9)]
    some = all_of(space)[::37]
    expected = first.guide.beliefs(first.told(study), some)
    second, _ = sampler_for(limit=6e9)
    again = study_for(second, storage, "s")
    found = second.guide.beliefs(second.told(again), some)
    for a, b in zip(
        (*expected.log_step_time, *expected.log_memory, expected.fits),
        (*found.log_step_time, *found.log_memory, found.fits),
        strict=True,
    ):
        assert a == pytest.approx(b)
    assert step(again, second, space, 6e9) not in before


def test_what_all_candidates_share_makes_none_of_them_better():
    """A machine whose speed nobody knows: its scale is uncertain by far more than the difference of two candidates."""
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT)
    state = guide._learn([])
    row = guide.catalogue.row[DEFAULT]
    near = guide.catalogue.row[replace(DEFAULT, gradient_accumulation_steps=2)]
    apart = state.sd_apart(np.array([row, near]), np.array([row]))[:, 0, :]
    alone = state.costs(np.array([near]))[1][0]
    assert apart[0].max() < 0.001 < apart[1].min() and (apart[1] < alone / 2).all()


def test_out_of_memory_lowers_what_is_believed_to_fit():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, memory_limit_bytes=4e9, reference=DEFAULT)
    lost, larger, small = (Candidate(micro_batch_size=b, zero_stage=1) for b in (8, 16, 1))
    before = guide.beliefs([told_of(DEFAULT)], [lost, larger])
    after = guide.beliefs([told_of(DEFAULT), Observation(candidate=lost, outcome=Outcome.OOM)], [lost, larger])
    assert (after.fits < before.fits).all() and after.fits[0] < 0.3 and after.fits[1] < 0.3
    assert guide.beliefs([told_of(small), Observation(candidate=lost, outcome=Outcome.OOM)], [small]).fits[0] > 0.9


def test_few_trials_run_out_of_memory_where_many_candidates_would():
    sampler, space = sampler_for(limit=4e9)
    study = study_for(sampler)
    tried = [step(study, sampler, space, 4e9) for _ in range(20)]
    share = np.mean([truth(c)[1] > 4e9 for c in all_of(space)])
    assert share > 0.25 and sum(truth(c)[1] > 4e9 for c in tried) <= 3


def test_where_nothing_can_fit_nothing_is_proposed():
    def huge(candidates):
        return from_logs(np.zeros(len(candidates)), np.full(len(candidates), math.log(1e15)), memory_scale_sd=0.1)

    sampler, space = sampler_for(prior=huge, limit=1e9)
    assert step(study_for(sampler), sampler, space) is None and sampler.exhausted


def test_where_three_candidates_fit_these_three_are_proposed_and_no_more():
    def size(c):
        return 1.0 if c.zero_stage == 3 and c.micro_batch_size < 8 else 40.0

    def counted(candidates):
        return from_logs(np.zeros(len(candidates)), np.log([size(c) for c in candidates]), memory_scale_sd=0.1)

    every = all_of(SearchSpace.parse({"micro_batch_size": [1, 2, 4, 8, 16], "zero_stage": [0, 1, 2, 3]}, "test.yaml"))
    guide = CandidateOptimizer(every, counted, METRICS, memory_limit_bytes=2.0)
    told = []
    while (candidate := guide.suggest(told)) is not None:
        told.append(
            Observation(
                candidate=candidate, metrics={"step_time_s": truth(candidate)[0], "peak_memory_bytes": size(candidate)}
            )
        )
    assert {t.candidate for t in told} == {c for c in every if size(c) == 1.0} and len(told) == 3


@pytest.mark.parametrize(("accelerator", "outcome"), [("cuda", Outcome.CRASHED), ("cpu", Outcome.OOM)])
def test_the_hosts_memory_says_nothing_of_the_devices(accelerator, outcome):
    sampler, _ = sampler_for(setting=replace(SETTING, accelerator=accelerator))
    study = study_for(sampler)
    for reason in (
        "RuntimeError: unable to allocate pinned memory of 2147483648 bytes",
        "OutOfMemoryError: CUDA out of memory",
    ):
        trial = study.ask()
        trial.set_user_attr(CANDIDATE_ATTR, DEFAULT.key)
        keep_result(study, trial, {"outcome": "oom", "metrics": {}, "reason": reason})
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert [each.outcome for each in sampler.told(study)] == [outcome, Outcome.OOM]


def test_an_objective_that_never_changes_harms_nothing():
    sampler, space = sampler_for()
    study = study_for(sampler)
    tried = [step(study, sampler, space, values={"step_time_s": 1.0, "samples_per_s": 5.0}) for _ in range(12)]
    assert len(set(tried)) == 12


def test_values_that_are_not_numbers_are_passed_over():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, [*METRICS, "time_to_loss_s"], world_size=2, reference=DEFAULT)
    told = [told_of(c) for c in every[::50]]
    spoilt = [
        Observation(
            candidate=c,
            metrics={"step_time_s": bad, "samples_per_s": bad, "time_to_loss_s": bad, "peak_memory_bytes": bad},
        )
        for c, bad in zip(every[7::50], (math.nan, math.inf, -1.0, 0.0, -math.inf), strict=False)
    ]
    suggested = guide.suggest([*told, *spoilt])
    assert suggested is not None and suggested not in {t.candidate for t in [*told, *spoilt]}
    assert all(np.isfinite(guide.beliefs([*told, *spoilt], every).log_step_time).ravel())


def test_a_prior_may_say_nothing_of_some_candidates():
    def partial(candidates):
        said = PRIOR(candidates)
        holes = said.time_terms.copy()
        holes[::3] = math.nan
        holes[1::3] = 0.0
        return PriorPrediction(
            time_terms=holes,
            memory_terms=said.memory_terms,
            time_spread=said.time_spread,
            memory_spread=said.memory_spread,
        )

    sampler, space = sampler_for(prior=partial)
    study = study_for(sampler)
    assert len({step(study, sampler, space) for _ in range(10)}) == 10


def test_the_first_trials_show_every_promising_level():
    sampler, space = sampler_for(prior=flat)
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(12)]
    assert {c.zero_stage for c in tried} == {0, 1, 2, 3}
    assert {c.precision for c in tried} == {"fp32", "bf16"} and {c.checkpoint_every for c in tried} == {0, 1}


def test_one_trial_prices_every_accumulation_count():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, flat, METRICS, world_size=2, reference=DEFAULT)
    other = Candidate(micro_batch_size=2, zero_stage=1, gradient_accumulation_steps=4)
    plain = Observation(candidate=DEFAULT, metrics={"step_time_s": 0.5})
    apart = Observation(candidate=DEFAULT, metrics={"step_time_s": 0.5}, inner_s=0.1, boundary_s=0.5)
    known, unknown = (guide.beliefs([told], [other]).log_step_time for told in (apart, plain))
    assert known[0][0] == pytest.approx(math.log(3 * 0.1 + 0.5), abs=0.08)
    assert known[1][0] < 0.5 * unknown[1][0]


def test_the_best_is_named_by_posterior_mean_and_not_by_one_lucky_trial():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, ["step_time_s"], world_size=2, reference=DEFAULT)
    rng = random.Random(0)
    some = [c for c in every if c.micro_batch_size in (1, 2) and c.gradient_accumulation_steps == 1]
    fastest = min(truth(c)[0] for c in some)
    lucky = max((c for c in some if truth(c)[0] <= 1.2 * fastest), key=lambda c: truth(c)[0])
    read = 0.96 * fastest
    told = [told_of(c, noise=read / truth(c)[0] if c == lucky else math.exp(rng.gauss(0, 0.015))) for c in some]
    believed = math.exp(guide.beliefs(told, [lucky]).log_step_time[0][0])
    assert min(told, key=lambda t: t.metrics["step_time_s"]).candidate == lucky
    assert believed > 1.03 * read and guide.best(told)["step_time_s"] != lucky
    # A re-tuning with time for one of the best began with that of the shortest step, whatever its goal.
    goals = {"step_time_s": 1.0, "samples_per_s": 9.0}, {"samples_per_s": 1.0, "step_time_s": 9.0}
    for goal in goals:
        guide = CandidateOptimizer(every, PRIOR, goal, world_size=2, reference=DEFAULT)
        assert list(guide.best(told)) == list(goal)[::-1]


def test_the_best_of_very_many_are_chosen_by_all_that_is_believed_of_them():
    """What knobs do together is in the smooth part of the model alone."""
    every, metrics = all_of(SearchSpace.parse(KNOBS, "test.yaml")), [*METRICS, "peak_memory_bytes", "joules_per_sample"]
    guide = CandidateOptimizer(every, flat, metrics, world_size=2, reference=DEFAULT)
    told = [told_of(c, noise=0.7 if c.zero_stage == 1 and c.precision == "bf16" else 1.0) for c in every[::7]]
    told = [replace(t, metrics=t.metrics | {"joules_per_sample": 300.0 / t.metrics["samples_per_s"]}) for t in told]
    state = guide._learn(told)
    rows = np.arange(len(every))
    mean, _ = state.costs(rows)
    assert state.rough_costs(rows) == pytest.approx(mean, abs=1e-3)
    assert np.abs(state.rough_costs() - mean).max() > 0.02


@pytest.mark.parametrize(("outcome", "limit"), [(Outcome.CRASHED, None), (Outcome.OOM, 1e12)])
def test_of_two_levels_that_crashed_together_each_is_likelier_to_run_without_the_other(outcome, limit):
    """So where they ran out of memory, but need 1 % of what there is: nothing was learned of that, and all trials went to such."""
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT, memory_limit_bytes=limit)
    both = Candidate(micro_batch_size=8, zero_stage=2, precision="bf16")
    told = [told_of(DEFAULT), *(Observation(candidate=both, outcome=outcome) for _ in range(2))]
    apart = [replace(both, zero_stage=1), replace(both, precision="fp32"), DEFAULT]
    chances = guide._learn(told).completes(np.array([guide.catalogue.row[c] for c in [both, *apart]]))
    assert chances[0] < 0.5 * chances[1:3].min() and chances[3] == 1.0


def test_what_ran_out_of_memory_and_surely_fits_tells_nothing_of_what_others_need():
    """Others were foretold three times the memory that they need, and some of them did not fit then."""
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT, memory_limit_bytes=1e12)
    told = [told_of(c) for c in every[::9]]
    odd = Observation(candidate=Candidate(micro_batch_size=8, zero_stage=2, precision="bf16"), outcome=Outcome.OOM)
    needs = guide.catalogue.memory.take(np.arange(len(every)))
    without, beside = (guide._learn(some).memory.predict(needs)[0] for some in (told, [*told, odd]))
    assert np.allclose(without, beside)


def test_what_needs_more_memory_than_there_is_has_failed_for_no_other_reason():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT, memory_limit_bytes=4e9)
    told = [told_of(c, limit=4e9) for c in every[::9]]
    assert len({t.outcome for t in told}) == 2
    assert (guide._learn(told).completes(np.arange(len(every))) == 1.0).all()


def test_a_level_that_crashes_is_left_alone():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT)
    told = [told_of(c) for c in every if c.precision == "fp32"][:60:6]
    crashed = [Observation(candidate=c, outcome=Outcome.CRASHED) for c in every if c.precision == "bf16"][:60:12]
    proposed = []
    for _ in range(8):
        c = guide.suggest([*told, *crashed])
        proposed.append(c.precision)
        (told if c.precision == "fp32" else crashed).append(
            told_of(c) if c.precision == "fp32" else Observation(candidate=c, outcome=Outcome.CRASHED)
        )
    assert proposed.count("fp32") >= 5


def test_in_a_space_too_large_to_enumerate_what_may_be_proposed_is_of_it_where_the_baseline_is_not(monkeypatch):
    """A neighbour of the baseline had its value, which the space has not, and the study ended with a KeyError."""
    monkeypatch.setattr(physics, "MOST_CANDIDATES", 10)
    monkeypatch.setattr(physics, "DRAWN", 2)
    default = replace(DEFAULT, micro_batch_size=3)  # and without a size of a bucket
    sampler, space = sampler_for(KNOBS | BUCKETS, default=default)
    study = study_for(sampler)
    sampler.force(default)
    for _ in range(3):
        step(study, sampler, space)
    assert all(space.contains(c, default) for c in sampler.guide.catalogue.candidates if c != default)


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("crashes", "more"),
    [
        (lambda c: c.micro_batch_size > 4, {}),
        (lambda c: c.gradient_accumulation_steps > 1, {}),
        (lambda c: dict(c.config).get("zero_optimization.reduce_bucket_size", 0) < 2**26, BUCKETS),
    ],
)
def test_sizes_that_crash_are_left_alone(crashes, more):
    """Only what is no number was blamed: where larger micro-batches crashed, so did 26 of 30 trials."""
    default = replace(DEFAULT, config=(("zero_optimization.reduce_bucket_size", 2**27),) if more else ())
    every = all_of(SearchSpace.parse(KNOBS | more, "test.yaml"), default=default)
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=default)
    told = [told_of(default)]
    while len(told) < 12:
        c = guide.suggest(told)
        told.append(Observation(candidate=c, outcome=Outcome.CRASHED) if crashes(c) else told_of(c))
    assert sum(t.outcome is Outcome.CRASHED for t in told) <= 5


def test_padded_tokens_are_a_rate_as_tokens_are():
    """Of candidates with one batch the slowest were taken for the best, and only these were looked at in a large space."""
    every = [c for c in all_of(SearchSpace.parse(KNOBS, "test.yaml")) if c.global_batch_size(2) == 16]
    metrics = ["padded_tokens_per_s"]
    guide = CandidateOptimizer(every, PRIOR, metrics, world_size=2, reference=DEFAULT)
    told = [told_of(c) for c in every[::5]]
    told = [replace(t, metrics=t.metrics | {metrics[0]: 100 * t.metrics["samples_per_s"]}) for t in told]
    state = guide._learn(told)
    rows = np.array([guide.catalogue.row[c] for c in every])
    assert np.corrcoef(state.rough_costs()[rows, 0], [truth(c)[0] for c in every])[0, 1] > 0.8
    assert np.corrcoef(state.costs(rows)[0][:, 0], [truth(c)[0] for c in every])[0, 1] > 0.8


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_energy_of_a_sample_is_looked_for_where_samples_are_fast(direction, monkeypatch):
    """Taken for a multiple of the step time, it was sought among the smallest batches, where it is highest."""
    energy = known_metrics.METRICS["joules_per_sample"]  # to be maximised it stands for samples per joule
    monkeypatch.setitem(known_metrics.METRICS, "joules_per_sample", replace(energy, direction=direction))
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, ["joules_per_sample"], world_size=2, reference=DEFAULT)
    sign = 1 if direction == "minimize" else -1
    joules = {c: (300.0 / metrics_of(c)["samples_per_s"]) ** sign for c in every}
    told = [
        replace(t, metrics=t.metrics | {"joules_per_sample": joules[t.candidate]})
        for t in map(told_of, [DEFAULT, *every[:: len(every) // 3]])
    ]
    state, rows = guide._learn(told), np.array([guide.catalogue.row[c] for c in every])
    true = np.log(list(joules.values()))
    assert np.corrcoef(state.rough_costs()[rows, 0], sign * true)[0, 1] > 0.7
    assert np.corrcoef(state.costs(rows)[0][:, 0], sign * true)[0, 1] > 0.8
    assert np.median(np.abs(guide.beliefs(told, every).log("joules_per_sample")[0] - true)) < 0.4


def test_a_bound_draws_the_search_to_what_holds_it():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    bounds = [("peak_memory_bytes", "max", 3.2e9)]
    guide = CandidateOptimizer(every, PRIOR, ["samples_per_s"], world_size=2, reference=DEFAULT, bounds=bounds)
    told = [told_of(DEFAULT)]
    for _ in range(18):
        told.append(told_of(guide.suggest(told)))
    held = [t.metrics["samples_per_s"] for t in told if t.metrics["peak_memory_bytes"] <= 3.2e9]
    possible = [metrics_of(c)["samples_per_s"] for c in every if truth(c)[1] <= 3.2e9]
    assert len(held) >= 6 and max(held) >= 0.97 * max(possible)


def test_other_programs_trials_are_understood_by_values_and_parameters():
    sampler, space = sampler_for(limit=4e9)
    study = study_for(sampler)
    for _ in range(6):
        trial = study.ask()
        candidate = space.candidate(
            space.suggest(lambda parameter, trial=trial: parameter.suggest(trial), DEFAULT), DEFAULT
        )
        seconds, size = truth(candidate)
        if size > 4e9:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, [seconds, candidate.global_batch_size(2) / seconds])
    told = sampler.told(study)
    assert len({t.candidate for t in told}) == 6
    assert all((t.outcome is Outcome.OOM) == (truth(t.candidate)[1] > 4e9) for t in told)


def test_a_space_too_large_to_enumerate_is_searched_all_the_same(monkeypatch):
    knobs = {
        **KNOBS, "micro_batch_size": {"range": [1, 64]}, "gradient_accumulation_steps": {"range": [1, 64]},
        "zero_optimization.reduce_bucket_size": {"range": [16, 29], "power_of_two": True, "when": {"zero_stage": [1, 2, 3]}},
    }  # fmt: skip
    monkeypatch.setattr(SearchSpace, "candidates", lambda *_: pytest.fail("it was enumerated"))
    monkeypatch.setattr(physics, "DRAWN", 2_000)
    sampler, space = sampler_for(knobs)
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(3)]
    assert space.size(DEFAULT) > 10**6 and len(set(tried)) == 3


@pytest.mark.system
def test_the_neighbours_in_a_long_range_are_a_few_for_all_of_it(monkeypatch):
    monkeypatch.setattr(physics, "DRAWN", 200)
    bucket = {"zero_optimization.reduce_bucket_size": {"range": [1_000, 500_000]}}
    sampler, space = sampler_for({**KNOBS, **bucket, "zero_stage": [1, 2, 3]})
    study = study_for(sampler)
    tried = [step(study, sampler, space) for _ in range(6)]
    assert len(set(tried)) == 6 and len(sampler.guide.catalogue.candidates) < 5_000


def test_stated_intervals_hold_the_truth_about_as_often_as_they_say():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT)
    actual = np.array([math.log(truth(c)[0]) for c in every])
    held, errors = [], []
    for seed in range(6):
        rng = random.Random(seed)
        told = [told_of(c, noise=math.exp(rng.gauss(0, 0.025))) for c in rng.sample(every, 25)]
        mean, sd = guide.beliefs(told, every).log_step_time
        measured = actual + np.array([rng.gauss(0, 0.025) for _ in every])
        held.append(np.mean(np.abs(measured - mean) <= 1.645 * sd))
        errors.append(np.median(np.abs(actual - mean)))
    assert 0.8 <= np.mean(held) <= 0.98 and np.mean(errors) < 0.1


def test_probability_below_is_that_of_a_normal():
    assert probability_below(np.array([0.0]), np.array([1.0]), 0.0)[0] == pytest.approx(0.5)


def test_goodput_follows_from_step_time_and_what_a_useful_sample_costs():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    phi, base = 24.0, DEFAULT.global_batch_size(2)

    def goodput(c):
        batch = c.global_batch_size(2)
        return batch / truth(c)[0] * (phi + base) / (phi + batch)

    guide = CandidateOptimizer(every, PRIOR, ["goodput_samples_per_s", "step_time_s"], world_size=2, reference=DEFAULT)
    told = []
    for _ in range(16):
        c = guide.suggest(told) if told else DEFAULT
        told.append(Observation(candidate=c, metrics={**metrics_of(c), "goodput_samples_per_s": goodput(c)}))
    assert max(map(goodput, (t.candidate for t in told))) >= 0.98 * max(map(goodput, every))
    mean, _ = guide.beliefs(told, every).log_count("goodput_samples_per_s")
    assert np.median(np.abs(mean - [math.log((phi + c.global_batch_size(2)) / (phi + base)) for c in every])) < 0.05


def test_two_coordinators_on_one_storage_never_run_the_same(tmp_path):
    url = f"sqlite:///{tmp_path / 'two.db'}"
    pair = [sampler_for() for _ in range(2)]
    studies = [study_for(sampler, url, "two") for sampler, _ in pair]
    running = []
    for n in range(10):
        (_, space), study = pair[n % 2], studies[n % 2]
        trial = study.ask()
        candidate = space.candidate(
            space.suggest(lambda parameter, trial=trial: parameter.suggest(trial), DEFAULT), DEFAULT
        )
        trial.set_user_attr(CANDIDATE_ATTR, candidate.key)
        running.append((study, trial, candidate))
        if len(running) > 3:  # up to four run at a time
            other, done, what = running.pop(0)
            other.tell(done, [truth(what)[0], what.global_batch_size(2) / truth(what)[0]])
    keys = [trial.user_attrs[CANDIDATE_ATTR] for trial in studies[0].trials]
    assert len(set(keys)) == len(keys) == 10


def test_a_frozen_batch_and_a_baseline_outside_the_space_are_searched_all_the_same():
    frozen = {**KNOBS, "micro_batch_size": [3], "gradient_accumulation_steps": [1]}
    outside = Candidate.of(
        {"micro_batch_size": 3, "zero_stage": 1, "precision": "bf16", "zero_optimization.reduce_bucket_size": 12345}
    )
    sampler, space = sampler_for(frozen, default=outside, limit=4e9)
    study = study_for(sampler)
    sampler.force(outside)
    tried = [step(study, sampler, space, 4e9) for _ in range(10)]
    assert tried[0] == outside and len(set(tried)) == 10 and {c.micro_batch_size for c in tried} == {3}


def test_without_a_known_limit_what_ran_out_of_memory_still_teaches():
    every = all_of(SearchSpace.parse(KNOBS, "test.yaml"))
    guide = CandidateOptimizer(every, PRIOR, METRICS, world_size=2, reference=DEFAULT)
    told = [told_of(DEFAULT)]
    for _ in range(18):
        told.append(told_of(guide.suggest(told), 4e9))
    # Two of the first two, and few later ones; one more or less is the chance of the order.
    assert sum(t.outcome is Outcome.OOM for t in told) <= 4
    assert max(t.metrics.get("samples_per_s", 0.0) for t in told) >= 0.85 * max(
        metrics_of(c)["samples_per_s"] for c in every if truth(c)[1] <= 4e9
    )


def test_what_is_far_behind_in_time_is_tried_once_and_no_more():
    """Whatever memory it saves: bf16 is emulated here, 20 times slower than fp32, and needs half of the memory."""
    candidates = [Candidate(micro_batch_size=m, precision=p) for m in (1, 2, 4, 8, 16) for p in ("fp32", "bf16")]
    slow = [0.01 * c.micro_batch_size * (20 if c.precision == "bf16" else 1) for c in candidates]
    size = [1e9 * c.micro_batch_size * (0.5 if c.precision == "bf16" else 1) for c in candidates]
    told = []

    def prior(some):
        rows = [candidates.index(c) for c in some]
        return from_logs(np.log(np.array(slow)[rows]), np.log(np.array(size)[rows]))

    weights = {"step_time_s": 1.0, "samples_per_s": 1.0, "peak_memory_bytes": 0.5}
    guide = CandidateOptimizer(candidates, prior, weights, reference=candidates[6])
    while (c := guide.suggest(told)) is not None:
        seconds, bytes_ = (values[candidates.index(c)] for values in (slow, size))
        metrics = {"step_time_s": seconds, "samples_per_s": c.micro_batch_size / seconds, "peak_memory_bytes": bytes_}
        told.append(Observation(candidate=c, metrics=metrics))
    ran = [t.candidate.precision for t in told]
    assert ran.count("fp32") == 5 and ran.count("bf16") <= 1


def test_a_level_that_may_be_good_is_tried_however_sure_the_prior_is():
    """Stage 3 is forecast three times as slow and is the fastest."""
    candidates = [Candidate(micro_batch_size=m, zero_stage=s) for m in (1, 2, 4, 8, 16) for s in (1, 2, 3)]
    prior = lambda some: from_logs(  # noqa: E731
        np.log([0.01 + 0.01 * c.micro_batch_size * (3 if c.zero_stage == 3 else 1) for c in some]), np.zeros(len(some))
    )
    guide, told = CandidateOptimizer(candidates, prior, ["samples_per_s"], reference=candidates[0]), []
    for _ in range(7):
        c = guide.suggest(told)
        seconds = 0.01 + 0.01 * c.micro_batch_size * (0.7 if c.zero_stage == 3 else 1)
        told.append(
            Observation(candidate=c, metrics={"step_time_s": seconds, "samples_per_s": c.micro_batch_size / seconds})
        )
    best = max(told, key=lambda t: t.metrics["samples_per_s"])
    assert (best.candidate.zero_stage, best.candidate.micro_batch_size) == (3, 16)


def test_a_size_that_a_machine_likes_better_than_any_curve_says_is_learned():
    """Micro-batches of 3 are a third faster; it shows at one stage, and is believed of the other."""
    candidates = [Candidate(micro_batch_size=m, zero_stage=s) for m in (1, 2, 3, 4, 6, 8) for s in (0, 1)]
    flat_rate = lambda some: from_logs(np.log([c.micro_batch_size for c in some]), np.zeros(len(some)))  # noqa: E731
    guide = CandidateOptimizer(candidates, flat_rate, ["samples_per_s"], reference=candidates[0])
    rate = {c: 1.5 if c.micro_batch_size == 3 else 1.0 for c in candidates}
    seen = [c for c in candidates if c.zero_stage == 0 or c.micro_batch_size != 3]
    told = [Observation(candidate=c, metrics={"step_time_s": c.micro_batch_size / rate[c]}) for c in seen]
    other = Candidate(micro_batch_size=3, zero_stage=1)
    between = Candidate(micro_batch_size=4, zero_stage=1)
    (liked, plain), _ = guide.beliefs(told, [other, between]).log_step_time
    assert (math.log(3) - liked) - (math.log(4) - plain) > 0.5 * math.log(1.5)


def test_what_may_be_the_best_and_is_not_known_keeps_a_study_from_ending():
    candidates = [Candidate(micro_batch_size=m, zero_stage=s) for m in (1, 2, 4, 8, 16) for s in (1, 3)]

    def prior(some):
        """Stage 3 has a cost of its own, which is hardly known: much where the batch is small, nothing where it is large."""
        work = np.array([float(c.micro_batch_size) for c in some])
        own = np.array([0.5 * (c.zero_stage == 3) for c in some])
        said = from_logs(np.log(work), np.zeros(len(some)))
        return replace(said, time_terms=np.column_stack([work, own + 1e-9]), time_spread=np.array([0.1, 1.5]))

    guide = CandidateOptimizer(candidates, prior, ["step_time_s"], reference=candidates[0])
    seen = [c for c in candidates if c.zero_stage == 1 or c.micro_batch_size == 16]
    told = [Observation(candidate=c, metrics={"step_time_s": float(c.micro_batch_size)}) for c in seen]
    told += [Observation(candidate=c, metrics={"step_time_s": float(c.micro_batch_size)}) for c in seen[:3]]
    assert not guide.outlook(told).explored
    smallest = Candidate(micro_batch_size=1, zero_stage=3)
    assert guide.outlook([*told, Observation(candidate=smallest, metrics={"step_time_s": 1.1})]).explored


@pytest.mark.parametrize(("factor", "n_tried"), [(21.0, 1), (0.5, 2)])
def test_a_level_that_is_hopeless_by_a_cost_that_is_hardly_known_is_tried_once(factor, n_tried):
    """Stage 3 is forecast 21 times as slow. Where that is so it keeps no study from ending; where it is not it is found."""
    candidates = [Candidate(micro_batch_size=m, zero_stage=s) for m in (1, 2, 4, 8, 16) for s in (1, 3)]

    def prior(some):
        work = np.array([float(c.micro_batch_size) for c in some])
        own = np.array([20.0 * c.micro_batch_size * (c.zero_stage == 3) for c in some])
        said = from_logs(np.log(work), np.zeros(len(some)))
        return replace(said, time_terms=np.column_stack([work, own + 1e-9]), time_spread=np.array([0.1, 1.5]))

    def told(c):
        seconds = c.micro_batch_size * (factor if c.zero_stage == 3 else 1.0)
        return Observation(candidate=c, metrics={"step_time_s": seconds})

    guide = CandidateOptimizer(candidates, prior, ["step_time_s"], reference=candidates[0])
    trials = [told(c) for c in candidates if c.zero_stage == 1]
    tried = guide.suggest(trials)
    assert tried.zero_stage == 3 and not guide.outlook(trials).explored
    while (c := guide.suggest(trials)) is not None:
        trials.append(told(c))
    assert sum(t.candidate.zero_stage == 3 for t in trials) == n_tried  # of the others none is near the best
    assert guide.outlook(trials).explored and guide.outlook(trials).loss == 0.0
    assert min(t.metrics["step_time_s"] for t in trials) == min(factor, 1.0)


def test_a_quick_study_may_end_after_one_candidate_that_leaves_little_to_gain_and_not_before():
    after_one = Outlook(loss=0.1, next_gain=0.02, n_left=5, explored=False, n_ran=2, covered=0.0, quick=True)
    assert after_one.settled(0.03) and not replace(after_one, next_gain=0.04).settled(0.03)
    assert not replace(after_one, n_ran=1).settled(0.03) and not replace(after_one, quick=False).settled(0.03)
