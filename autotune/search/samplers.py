"""Optuna's samplers, held to candidates that can run and that no trial has had."""

import contextlib
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError
from autotune.search import check_sampler
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.deepspeed import Scalar
from autotune.space.legality import why_illegal
from autotune.space.parameter import Parameter
from autotune.space.rule import Setting
from autotune.space.space import EXHAUSTED, SearchSpace

STARTUP_TRIALS = 8
# The Gaussian process costs seconds a draw; the others are asked again when they propose what cannot run.
DRAWS = {"tpe": 6, "nsga2": 6, "random": 20, "gp": 1, "grid": 0}
MUTATIONS = 200
RANDOM_DRAWS = 500
# What reading a damaged row of the database raises; it teaches nothing.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, UserError)


class LegalSampler(BaseSampler):
    """Draws from an Optuna sampler until the proposal can run and is new.

    Where the sampler keeps proposing what cannot run, its last proposal is changed knob by knob; where that fails too,
    any legal new candidate is taken. `grid` walks the space in order.

    Args:
        name: One of `search.SAMPLERS`.
        default: The baseline, whose values hold for what is not tuned.
        seed: Seed of the draws; a resumed study must not repeat those of its first run, so add the trials already
            there.
    """

    def __init__(self, name: str, space: SearchSpace, default: Candidate, setting: Setting, seed: int) -> None:
        check_sampler(name)
        self.exhausted = False
        self.why_exhausted = EXHAUSTED
        self.forced: Candidate | None = None
        self._space, self._default, self._setting = space, default, setting
        self._draws = DRAWS[name]
        self._base = _optuna_sampler(name, seed)
        self._rng = random.Random(seed)
        self._order: Iterator[Candidate] | None = space.candidates(default) if name == "grid" else None

    def force(self, candidate: Candidate) -> None:
        """Makes the next trial have this candidate: the baseline, or one whose trial was lost."""
        self.forced = candidate

    def choose(self, study: Study) -> bool:
        """Chooses the next candidate before there is a trial of it; False if none is left. Optuna's samplers need a trial to choose one."""
        known = self._known(study)
        return self.forced is not None or any(self._fits(c, known) for c in self._space.candidates(self._default))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All knobs: conditions are this sampler's business."""
        return {parameter.optuna_name: parameter.distribution() for parameter in self._space.parameters}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The values of the active knobs of the next candidate; empty, with `exhausted` set, when none is left."""
        candidate = self.forced or self._chosen(study, trial)
        self.forced = None
        return encoded(self._space, candidate) if candidate else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed: every knob is in the relative space."""
        return optuna.samplers.RandomSampler(seed=self._rng.randrange(2**31)).sample_independent(
            study, trial, param_name, param_distribution
        )

    def _chosen(self, study: Study, trial: FrozenTrial) -> Candidate | None:
        """A legal new candidate; None, with `exhausted` set, when none is left."""
        known = self._known(study)
        found = self._proposed(study, trial, known) or next((c for c in self._every() if self._fits(c, known)), None)
        self.exhausted = found is None
        return found

    def _known(self, study: Study) -> set[Candidate]:
        states = [state for state in TrialState if state is not TrialState.FAIL]  # lost trials are to run again
        found = set()
        for trial in study.get_trials(deepcopy=False, states=states):
            if trial.params or CANDIDATE_ATTR in trial.user_attrs:
                with contextlib.suppress(*DAMAGED):
                    found.add(self._candidate_of(trial))
        return found

    def _candidate_of(self, trial: FrozenTrial) -> Candidate:
        """The candidate of a trial; where another program told it, by its parameters."""
        if CANDIDATE_ATTR in trial.user_attrs:
            return Candidate.from_key(trial.user_attrs[CANDIDATE_ATTR])
        values = {
            p.name: p.decode(trial.params[p.optuna_name])
            for p in self._space.parameters
            if p.optuna_name in trial.params
        }
        return self._space.candidate(values, self._default)

    def _fits(self, candidate: Candidate, known: set[Candidate]) -> bool:
        return candidate not in known and why_illegal(candidate, self._setting) is None

    def _proposed(self, study: Study, trial: FrozenTrial, known: set[Candidate]) -> Candidate | None:
        values: dict[str, Scalar] = {}
        for _ in range(self._draws):
            values = self._draw(study, trial)
            candidate = self._space.candidate(values, self._default)
            if self._fits(candidate, known):
                return candidate
        for n in range(MUTATIONS if values else 0):
            mutated = self._mutated(values, 1 + n // 50)
            candidate = self._space.candidate(mutated, self._default)
            if self._fits(candidate, known):
                return candidate
        return None

    def _draw(self, study: Study, trial: FrozenTrial) -> dict[str, Scalar]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            relative = self._base.sample_relative(study, trial, self._base.infer_relative_search_space(study, trial))

        def ask(parameter: Parameter) -> Scalar:
            name, distribution = parameter.optuna_name, parameter.distribution()
            if distribution.single():
                return parameter.all_values()[0]
            if name in relative:
                return parameter.decode(relative[name])
            return parameter.decode(self._base.sample_independent(study, trial, name, distribution))

        return self._space.suggest(ask, self._default)

    def _mutated(self, values: dict[str, Scalar], n_changes: int) -> dict[str, Scalar]:
        changed = set(self._rng.sample(sorted(values), min(n_changes, len(values))))

        def ask(parameter: Parameter) -> Scalar:
            if parameter.name in values and parameter.name not in changed:
                return values[parameter.name]
            return self._rng.choice(parameter.all_values())

        return self._space.suggest(ask, self._default)

    def _every(self) -> Iterator[Candidate]:
        """Every candidate: in order for `grid`, which goes on where it was; for the others random ones first."""
        if self._order is not None:
            return self._order
        drawn = self._space.draw(self._rng, self._default, RANDOM_DRAWS)
        return itertools.chain(drawn, self._space.candidates(self._default))


def encoded(space: SearchSpace, candidate: Candidate) -> dict[str, Any]:
    """The candidate's active knobs as Optuna parameters; a baseline's value outside the space is left out."""
    values = space.values_of(candidate)
    return {
        space[name].optuna_name: space[name].encode(value)
        for name, value in values.items()
        if space[name].contains(value)
    }


def _optuna_sampler(name: str, seed: int) -> BaseSampler:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Before release 5 a sampler heeds constraints, which are attributes of trials, only if it is given a function. It is asked of what
    # another program told, too, which has none and counts as breaking them.
    heeding: dict[str, Any] = {}
    if not hasattr(optuna.trial.Trial, "set_constraint"):
        heeding["constraints_func"] = lambda trial: trial.system_attrs.get("constraints", [1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "group" and the Gaussian process are marked experimental
        match name:
            case "tpe":
                return optuna.samplers.TPESampler(
                    seed=seed,
                    multivariate=True,
                    group=True,
                    n_startup_trials=STARTUP_TRIALS,
                    warn_independent_sampling=False,
                    **heeding,
                )
            case "gp":
                return optuna.samplers.GPSampler(
                    seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False, **heeding
                )
            case "nsga2":
                return optuna.samplers.NSGAIISampler(seed=seed, population_size=STARTUP_TRIALS, **heeding)
        return optuna.samplers.RandomSampler(seed=seed)
