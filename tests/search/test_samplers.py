"""Every sampler by name: only what can run, nothing twice, and an end where nothing is left."""

import random

import optuna
import pytest
from optuna.trial import TrialState
from support.instant import WORKLOAD

from autotune.errors import UserError
from autotune.forecast.predictor import generic_prior
from autotune.search import SAMPLERS, check_sampler, samplers
from autotune.search.physics import PhysicsSampler
from autotune.search.samplers import LegalSampler, encoded
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.storage.optuna_tables import constraint_attrs

QUICK = [name for name in SAMPLERS if name != "gp"]
SETTING = Setting(n_blocks=2, n_samples=64, world_size=2)
BASELINE = Candidate(micro_batch_size=8)
SMALL = SearchSpace.parse({"micro_batch_size": {"range": [1, 5]}, "checkpoint_every": [0, 1]}, "small")
# Conditions two deep, a range of exponents, and values that cannot run in SETTING: fp16, overlap_comm, batches over 64.
CONDITIONAL = SearchSpace.parse(
    {
        "micro_batch_size": [1, 2, 4, 8, 16, 32, 64],
        "gradient_accumulation_steps": [1, 2, 4],
        "zero_stage": [0, 1, 2, 3],
        "zero_optimization.reduce_bucket_size": {
            "range": [16, 29],
            "power_of_two": True,
            "when": {"zero_stage": [1, 2]},
        },
        "zero_optimization.overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1, 2]}},
        "precision": ["fp32", "bf16", "fp16"],
        "bf16.bf16_master_weights_and_grads": {
            "choices": [None, True],
            "when": {"precision": ["bf16"], "zero_stage": [1, 2, 3]},
        },
        "bf16.bf16_optimizer_states": {"choices": [None, True], "when": {"bf16.bf16_master_weights_and_grads": [True]}},
    },
    "conditional",
)


class Search:
    """Asks and tells a sampler as the study does; the values are made up."""

    def __init__(self, name, space, study=None, seed=0, n_objectives=2, constraint=False):
        self.space, self.rng, self.constraint, self.n_objectives = space, random.Random(seed), constraint, n_objectives
        self.study = study or optuna.create_study(directions=["minimize", "maximize"][:n_objectives])
        if name == "physics":
            metrics = ["step_time_s", "samples_per_s"][:n_objectives]
            prior = generic_prior(WORKLOAD, SETTING)
            self.sampler = PhysicsSampler(space, BASELINE, SETTING, seed, prior=prior, metrics=metrics)
        else:
            self.sampler = LegalSampler(name, space, BASELINE, SETTING, seed)
        self.study.sampler = self.sampler

    def ask(self):
        """The next trial and its candidate, or None if nothing is left."""
        asked, forced = self.study.ask(), self.sampler.forced
        _ = asked.relative_params
        if forced is None and self.sampler.exhausted:
            self.study.tell(asked, state=TrialState.FAIL)
            return None
        values = self.space.suggest(lambda parameter: parameter.suggest(asked), BASELINE)
        candidate = self.space.candidate(values, BASELINE)
        asked.set_user_attr(CANDIDATE_ATTR, candidate.key)
        return asked, candidate

    def tell(self, asked, state=None):
        if self.constraint:
            for name, value in constraint_attrs({"completed": 0.0 if state is None else 1.0}).items():
                self.study._storage.set_trial_system_attr(asked._trial_id, name, value)
        self.study.tell(
            asked, None if state else [1 + self.rng.random() for _ in range(self.n_objectives)], state=state
        )

    def run(self, n):
        """The candidates of n trials (or as many as there are); every fourth trial fails."""
        found = []
        while len(found) < n and (asked := self.ask()):
            self.tell(asked[0], TrialState.PRUNED if len(found) % 4 == 3 else None)
            found.append(asked[1])
        return found


@pytest.mark.cells(5)
@pytest.mark.parametrize(
    ("name", "constraint"), [(name, n % 2 == odd) for odd in (1, 0) for n, name in enumerate(QUICK)]
)
def test_only_what_can_run_is_proposed_and_nothing_twice(name, constraint):
    found = Search(name, CONDITIONAL, constraint=constraint).run(40)
    assert len(found) == 40 == len(set(found))
    assert [why_illegal(candidate, SETTING) for candidate in found] == [None] * 40
    assert all(CONDITIONAL.contains(candidate) for candidate in found)


def test_the_gaussian_process_keeps_to_it_too():
    found = Search("gp", CONDITIONAL, n_objectives=1, constraint=True).run(12)
    assert len(found) == 12 == len(set(found))
    assert [why_illegal(candidate, SETTING) for candidate in found] == [None] * 12


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_small_space_is_measured_whole_and_then_there_is_nothing_left(name):
    search = Search(
        name, SMALL, n_objectives=1, constraint=True
    )  # gp of Optuna 4 needs one, which each trial of a study has
    found = search.run(20)
    assert len(found) == 10
    assert set(found) == {
        candidate for candidate in SMALL.candidates(BASELINE) if why_illegal(candidate, SETTING) is None
    }
    assert search.sampler.exhausted
    assert search.ask() is None


@pytest.mark.parametrize("name", QUICK)
def test_a_resumed_search_does_not_repeat_what_is_there(name):
    first = Search(name, CONDITIONAL)
    before = first.run(10)
    after = Search(name, CONDITIONAL, study=first.study, seed=15).run(10)
    assert len({*before, *after}) == 20


@pytest.mark.parametrize("name", QUICK)
def test_a_resumed_search_of_a_small_space_finds_the_rest(name):
    first = Search(name, SMALL)
    before = first.run(6)
    after = Search(name, SMALL, study=first.study, seed=6).run(20)
    assert len(before) + len(after) == 10 == len({*before, *after})


@pytest.mark.parametrize("name", QUICK)
def test_what_was_lost_comes_again_and_what_runs_now_does_not(name):
    search = Search(name, SMALL, n_objectives=1)
    (_, lost), (_, running) = search.ask(), search.ask()
    search.study.tell(0, state=TrialState.FAIL)
    again = Search(name, SMALL, study=search.study, seed=2, n_objectives=1).run(20)
    assert lost in again
    assert running not in again


@pytest.mark.parametrize("name", QUICK)
def test_what_another_program_told_does_not_come_again_and_a_damaged_row_ends_no_search(name):
    search = Search(name, SMALL)
    known = Candidate(micro_batch_size=2, checkpoint_every=1)
    kinds = {each.optuna_name: each.distribution() for each in SMALL.parameters}
    search.study.add_trial(
        optuna.trial.create_trial(values=[1.0, 1.0], params=encoded(SMALL, known), distributions=kinds)
    )
    torn = {CANDIDATE_ATTR: Candidate(micro_batch_size=3).key[:-1]}
    search.study.add_trial(optuna.trial.create_trial(values=[1.0, 1.0], user_attrs=torn))
    found = search.run(20)
    assert len(found) == 9 and known not in found


@pytest.mark.parametrize("name", ["random", "physics"])
def test_a_forced_candidate_comes_next_and_once(name):
    search = Search(name, CONDITIONAL)
    wanted = Candidate.of({"micro_batch_size": 4, "zero_stage": 2, "zero_optimization.reduce_bucket_size": 2**20})
    search.sampler.force(wanted)
    found = search.run(8)
    assert found[0] == wanted
    assert wanted not in found[1:]


def test_a_forced_candidate_comes_though_nothing_is_left():
    search = Search("random", SMALL)
    search.run(20)
    search.sampler.force(Candidate(micro_batch_size=3))
    assert search.run(1) == [Candidate(micro_batch_size=3)]


def test_of_a_baseline_outside_the_space_only_what_the_space_holds_is_noted():
    assert encoded(SMALL, Candidate(micro_batch_size=8, checkpoint_every=1)) == {"checkpoint_every": 1}


def test_a_conditional_knob_is_suggested_only_under_its_condition():
    search = Search("random", CONDITIONAL)
    for candidate, told in zip(search.run(30), search.study.trials, strict=True):
        named = "zero_optimization.reduce_bucket_size (log2)" in told.params
        assert named == (candidate.zero_stage in (1, 2))


def test_grid_goes_through_the_space_in_order():
    legal = [candidate for candidate in CONDITIONAL.candidates(BASELINE) if why_illegal(candidate, SETTING) is None]
    assert Search("grid", CONDITIONAL).run(30) == legal[:30]


@pytest.mark.parametrize("name", ["tpe", "nsga2", "random"])
def test_equal_seeds_search_alike_and_others_do_not(name):
    first = Search(name, CONDITIONAL, seed=1).run(12)
    assert Search(name, CONDITIONAL, seed=1).run(12) == first
    assert Search(name, CONDITIONAL, seed=2).run(12) != first


@pytest.mark.parametrize("name", ["tpe", "nsga2", "gp"])
def test_samplers_of_optuna_4_heed_constraints_as_those_of_5_do(name, monkeypatch):
    """Without a function for them they took what breaks a constraint for the best of all; a trial of another program ended tpe's study."""
    for kind in optuna.trial.Trial.__mro__:
        monkeypatch.delattr(kind, "set_constraint", raising=False)
    (broken,) = constraint_attrs({"peak_memory_bytes": 1.0}).items()
    trial = optuna.trial.create_trial(value=0.0, system_attrs=dict([broken]))
    asked = samplers._optuna_sampler(name, seed=0)._constraints_func
    assert asked(trial) == [1.0] == asked(optuna.trial.create_trial(value=0.0))


@pytest.mark.system
def test_tpe_finds_a_good_candidate_sooner_than_chance():
    """On a space of 1,024 candidates with one clear slope: the sum over seeds of the best of 40 trials."""
    space = SearchSpace.parse(
        {"micro_batch_size": {"range": [1, 32]}, "gradient_accumulation_steps": {"range": [1, 32]}}, "slope"
    )

    def best(name, seed):
        study = optuna.create_study(directions=["minimize"])
        study.sampler = LegalSampler(name, space, BASELINE, Setting(), seed)
        values = []
        for _ in range(40):
            asked = study.ask()
            candidate = space.candidate(
                space.suggest(lambda parameter, asked=asked: parameter.suggest(asked), BASELINE), BASELINE
            )
            asked.set_user_attr(CANDIDATE_ATTR, candidate.key)
            values.append(abs(candidate.micro_batch_size - 20) + abs(candidate.gradient_accumulation_steps - 5))
            study.tell(asked, values[-1])
        return min(values)

    assert sum(best("tpe", seed) for seed in range(6)) < sum(best("random", seed) for seed in range(6))


def test_an_unknown_sampler_is_refused_with_those_that_are_known():
    with pytest.raises(UserError, match=r"unknown 'tpee'\. Did you mean 'tpe'\? Known: physics, tpe, .*random"):
        check_sampler("tpee")
