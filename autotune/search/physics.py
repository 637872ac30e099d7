"""The physics-guided sampler as an Optuna sampler: a prior of memory and step time, corrected by every trial.

`CandidateOptimizer` is the search itself, without workload, database or Optuna. `PhysicsSampler` holds nothing but the
candidates and reads every trial back from the storage, so that a resumed study continues with the same beliefs.
"""

import contextlib
import functools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.forecast.features import Prior
from autotune.scoring.objective import Bound
from autotune.search import stopping
from autotune.search.observation import MEASURED_ATTR, Observation, as_usual, observed, parsed
from autotune.search.optimizer import CandidateOptimizer
from autotune.search.samplers import DAMAGED, LegalSampler
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.trial.result import Outcome

# Spaces up to this size are enumerated; from larger ones `DRAWN` candidates are drawn, and the neighbours of the best
# join them.
MOST_CANDIDATES = 100_000
DRAWN = 30_000
NEIGHBOURS_OF = 4
# Of a knob with more values than this, values at equal distances stand for all of them.
MOST_NEIGHBOURS = 64


class PhysicsSampler(LegalSampler):
    """Proposes the legal new candidate that the search without a study, a `CandidateOptimizer`, expects most of.

    Args:
        default: The baseline, whose values hold for what is not tuned.
        metrics: The objectives' metrics, in order; a mapping holds their weights, as for `CandidateOptimizer`.
        memory_limit_bytes: What a rank may use; None if that is not known.
        bounds: Bounds on metrics that a solution must keep, as `objective.bounds` gives them.

    Attributes:
        search: The search itself, which has no candidates before `guide` is asked for.
        proposes: Whether it is to propose candidates: one that is only asked about them need not look at the whole
            space.
    """

    def __init__(
        self,
        space: SearchSpace,
        default: Candidate,
        setting: Setting,
        seed: int,
        *,
        prior: Prior,
        metrics: Sequence[str] | Mapping[str, float],
        memory_limit_bytes: float | None = None,
        bounds: Iterable[Bound] = (),
    ) -> None:
        super().__init__("random", space, default, setting, seed)
        self.search = CandidateOptimizer(
            [], prior, metrics, world_size=setting.world_size, memory_limit_bytes=memory_limit_bytes, bounds=bounds,
            reference=default, knobs={p.name: list(p.all_values()) for p in space.parameters},
        )  # fmt: skip
        self.refused: Collection[int] = ()  # trials that a check has refused, by number
        self.later: Mapping[int, str] = {}  # what stands in place of a told trial's result, by number
        self._whole = self.proposes = True

    @functools.cached_property
    def guide(self) -> CandidateOptimizer:
        """`search` with the candidates; they join it when they are first needed, since enumerating the space takes a second or two."""
        if self.proposes:
            space, default = self._space, self._default
            self._whole = space.size(default) <= MOST_CANDIDATES
            drawn = space.candidates(default) if self._whole else space.draw(random.Random(0), default, DRAWN)
            self.search.add(list(dict.fromkeys(c for c in drawn if why_illegal(c, self._setting) is None)))
        return self.search

    def choose(self, study: Study) -> bool:
        """Chooses the next candidate before there is a trial of it; False if none is left."""
        self.forced = self.forced or self._chosen(study)
        return self.forced is not None

    def _chosen(self, study: Study, trial: FrozenTrial | None = None) -> Candidate | None:
        """The legal new candidate that the guide expects most of; None, with `exhausted` set, when none is left or fits."""
        busy, told, guide = list(self._known(study)), self.told(study), self.guide
        if not self._whole:
            self._refine(told)
        proposed = guide.suggest([*told, *self._imagined(study, told)], busy)
        self.exhausted = proposed is None
        if self.exhausted:
            self.why_exhausted = stopping.nothing_left(guide.left(told, busy), guide.limit)
        return proposed

    def told(self, study: Study) -> list[Observation]:
        """Every trial of the study that taught something, from the storage alone.

        Trials of autotune carry the candidate and what was measured as attributes. Where another program told them, the
        candidate follows from the parameters and the metrics from the values; a pruned trial then ran out of memory.
        """
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        found = []
        for trial in study.get_trials(deepcopy=False, states=states):
            with contextlib.suppress(*DAMAGED):
                seen = self._as_told(trial)
                found.append(replace(seen, eligible=False) if trial.number in self.refused else seen)
        return as_usual(found)

    def _imagined(self, study: Study, told: Sequence[Observation]) -> list[Observation]:
        """What is under way, as if it had measured what is expected of it: the next candidate is then not sought beside it."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        candidates = [self._candidate_of(t) for t in running if CANDIDATE_ATTR in t.user_attrs]
        if not candidates:
            return []
        believed = self.guide.beliefs(told, candidates)
        values = {
            metric: np.exp(believed.log(metric)[0]).tolist()
            for metric in ("step_time_s", "samples_per_s", "peak_memory_bytes")
        }
        return [
            Observation(candidate=candidate, metrics={metric: each[n] for metric, each in values.items()})
            for n, candidate in enumerate(candidates)
        ]

    def unfit(self, study: Study, candidate: Candidate) -> str | None:
        """Why a candidate would surely run out of memory; None where it may fit."""
        return stopping.unfit(self.guide, self.told(study), candidate)

    def settled(self, study: Study, below: float) -> str | None:
        """Why nothing better than a share `below` is to be expected of any candidate; None if something is."""
        return stopping.settled(self.guide, self.told(study), list(self._known(study)), below)

    def next_gain(self, study: Study) -> float:
        """What the most promising candidate is expected to improve the answer by, as a share."""
        return self.guide.outlook(self.told(study), list(self._known(study))).next_gain

    def _as_told(self, trial: FrozenTrial) -> Observation:
        candidate, attrs = self._candidate_of(trial), trial.user_attrs
        if (text := self.later.get(trial.number, trial.system_attrs.get(MEASURED_ATTR))) is not None:
            return observed(candidate, parsed(text), self._setting)
        if trial.state is TrialState.PRUNED or trial.values is None:
            return Observation(candidate=candidate, outcome=Outcome(attrs.get("outcome", "oom")))
        metrics = {
            name: value for name, value in zip(self.search.metrics, trial.values, strict=False) if math.isfinite(value)
        }
        metrics |= {
            name: value
            for name, value in attrs.items()
            if name == "peak_memory_bytes" and isinstance(value, int | float)
        }
        return Observation(candidate=candidate, metrics=metrics)

    def _refine(self, told: Sequence[Observation]) -> None:
        """In a space too large to enumerate: what differs in one knob from the best candidates joins the choice."""
        leading = dict.fromkeys(
            [*self.guide.best(told).values(), self._default, *(t.candidate for t in told[-NEIGHBOURS_OF:])]
        )
        found, firsts = [], self._first_values()
        for candidate in leading:
            values = self._space.values_of(candidate)
            # The baseline may have values that the space has not.
            values = {name: v if self._space[name].contains(v) else firsts[name] for name, v in values.items()}
            for name, value in values.items():
                every = self._space[name].all_values()
                for other in every[:: math.ceil(len(every) / MOST_NEIGHBOURS)]:
                    if other != value:
                        changed = self._space.candidate({**firsts, **values, name: other}, self._default)
                        if changed not in self.guide.catalogue.row and why_illegal(changed, self._setting) is None:
                            found.append(changed)
        if found:
            self.guide.add(list(dict.fromkeys(found)))

    def _first_values(self) -> dict[str, Any]:
        """A value for each knob that a change switches on: its default where the space has that, else its first."""
        firsts = {}
        for parameter in self._space.parameters:
            values = parameter.all_values()
            own = self._default.values().get(parameter.name)
            firsts[parameter.name] = own if parameter.contains(own) else values[0]
        return firsts
