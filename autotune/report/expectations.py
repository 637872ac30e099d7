"""Predictions for any configuration from the trials of a study: metrics with intervals, and whether it fits."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from optuna.study import Study

from autotune.report.data import quantity
from autotune.scoring.estimates import TIMED
from autotune.scoring.measured import improvement
from autotune.scoring.metrics import METRICS
from autotune.scoring.objective import Objective, beyond
from autotune.scoring.quantiles import Z90
from autotune.search.observation import Observation
from autotune.search.optimizer import Outlook, chance_needed
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.space.legality import why_illegal
from autotune.study.storage import analysed, records
from autotune.study.storage.database import StoreError
from autotune.system.units import format_bytes
from autotune.trial.profile import Floats
from autotune.trial.result import Outcome

# What is predicted whatever the objectives are.
ALWAYS = ("step_time_s", "samples_per_s", "peak_memory_bytes")


class Expectations:
    """The search model of a study with all of its trials.

    Args:
        folder: The study's folder.
        step_times_s: What all measurements together say of its trials. Predictions are for the machine as it was on average,
            as these are, and not as it was during the search.

    Attributes:
        told: The trials that taught the model something.

    Raises:
        StoreError: autotune did not make the study, or died while it did.
    """

    def __init__(self, study: Study, folder: Path, step_times_s: Mapping[Candidate, float]) -> None:
        kept = records.record(study)
        if kept is None:
            raise StoreError(f"study {study.study_name!r} in this database was not made by autotune")
        search, self._setting = kept.search, kept.search.setting
        self._space, sampler = analysed.search_of(study, folder, kept)
        sampler.search.quick = bool(records.STATED.of(study).get("quick"))  # as the search that ended the study
        self.baseline = Candidate.from_key(kept.baseline)
        self.objectives: Sequence[Objective] = kept.objectives
        self._guide, self._bounds = sampler.guide, search.bounds
        self.told: list[Observation] = sampler.told(study)
        self.memory_limit = format_bytes(search.memory_limit_bytes or 0.0)
        read = ((t.candidate, t.step_time_s(self._setting.world_size)) for t in self.told)
        apart = [math.log(step_times_s[one] / own) for one, own in read if own and step_times_s.get(one)]
        self._slower = float(np.median(apart)) if apart else 0.0

    @cached_property
    def outlook(self) -> Outlook:
        """The improvements that are still expected, and how well the trials predict each other."""
        return self._guide.outlook(self.told)

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The configurations that the search looked at."""
        return self._guide.catalogue.candidates

    def why_illegal(self, candidate: Candidate) -> str | None:
        """Why a configuration cannot run here; None if it can."""
        return why_illegal(candidate, self._setting)

    def changed(self, start: Candidate, changes: Mapping[str, Scalar]) -> Candidate:
        """A configuration with knobs set, or removed by None; knobs whose condition no longer holds are dropped."""
        values, micro = start.values(), changes.get("micro_batch_size")
        if self._space.samples_per_rank is not None and isinstance(micro, int):
            values["gradient_accumulation_steps"] = max(1, int(self._space.samples_per_rank) // micro)
        changed = Candidate.of({name: value for name, value in {**values, **changes}.items() if value is not None})
        return self._space.candidate(self._space.values_of(changed), changed)

    def fits(self, candidate: Candidate) -> float:
        """The probability that a configuration fits the memory."""
        return float(self._guide.beliefs(self.told, [candidate]).fits[0])

    @property
    def least_chance(self) -> float:
        """The probability to fit below which the search runs nothing."""
        return chance_needed(self.told)

    def fitting(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], str]:
        """The candidates that fit the memory, and the smallest size that any of them needs, in words."""
        said, least = self._guide.beliefs(self.told, candidates), self.least_chance
        found = [candidate for candidate, chance in zip(candidates, said.fits, strict=True) if chance >= least]
        return found, format_bytes(math.exp(float(said.log_memory[0].min())))

    def most_promising(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate with the largest weighted geometric mean of the expected gains."""
        logs, total = self._logs(candidates), np.zeros(len(candidates))
        for objective in self.objectives:
            if objective.metric in logs:
                total += objective.weight * improvement(logs[objective.metric][0], objective.metric)
        return candidates[int(np.argmax(total))]

    def predicted(self, candidate: Candidate, reference: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """By metric `value`, `low` and `high` (90 % interval), and where the reference has it `ratio` to it."""
        found = {}
        for metric, (means, sds) in self._logs([candidate]).items():
            low, value, high = (math.exp(float(means[0]) + sign * Z90 * float(sds[0])) for sign in (-1, 0, 1))
            found[metric] = {"value": value, "low": low, "high": high}
            if reference.get(metric):
                found[metric]["ratio"] = value / reference[metric]
        return found

    def broken(self, metrics: Mapping[str, float]) -> list[str]:
        """The constraints that metrics of a configuration break, in words."""
        over = [bound for bound in self._bounds if bound[0] in metrics and beyond(metrics[bound[0]], bound) > 0]
        return [
            f"{METRICS[metric].label} {quantity(metric, metrics[metric])}, {'at most' if end == 'max' else 'at least'}"
            f" {quantity(metric, amount)} is allowed"
            for metric, end, amount in over
        ]

    def _logs(self, candidates: Sequence[Candidate]) -> dict[str, tuple[Floats, Floats]]:
        """Logarithms of the metrics of candidates, as means and standard deviations; objectives where a trial told them."""
        said = self._guide.beliefs(self.told, candidates)
        named = [*(o.metric for o in self.objectives), *(metric for metric, _, _ in self._bounds)]
        done = [t for t in self.told if t.outcome is Outcome.COMPLETE]
        wanted = [*ALWAYS, *(name for name in named if any(t.good(name) for t in done))]
        found = {}
        for name in dict.fromkeys(wanted):
            mean, sd = said.log(name)
            found[name] = mean - improvement(self._slower, name) * (name in TIMED), sd
        return found
