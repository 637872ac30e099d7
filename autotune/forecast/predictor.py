"""Forecasts of memory and step time: the formulas' terms as the prior of the calibrated model, corrected by trials."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy

from autotune.forecast import memory as memory_formulas
from autotune.forecast import step_time as step_time_formulas
from autotune.forecast.degrees import cost_terms
from autotune.forecast.features import FeatureTable, PriorPrediction, knobs_of
from autotune.forecast.regression import (
    MEMORY_NOISE,
    MEMORY_SMOOTH,
    OVER_LIMIT,
    CalibratedGP,
    Data,
    Design,
    expected_noise,
    fit,
    joined,
)
from autotune.scoring.quantiles import Z90
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig
from autotune.space.legality import inherited_settings
from autotune.space.rule import Setting
from autotune.trial.profile import Floats, Machine, Profile
from autotune.trial.workload import Workload

Quantity = Literal["memory", "time"]
# Standard deviations of the log of the whole, and the least of a term where the workload was guessed from its size.
MEMORY_SCALE, TIME_SCALE = 0.05, 0.7
GUESSED_SCALE, GUESSED_SPREAD, GUESSED_DOUBT = 1.0, 1.0, 1.5


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a forecast in bytes or seconds, with its 90 % interval."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast of one candidate, taken apart.

    Attributes:
        terms: Its parts, which add up to the total.
        n_measured: Measurements that corrected it.
    """

    terms: list[Term]
    total: Term
    n_measured: int = 0

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm of the total."""
        return float(np.log(self.total.high / self.total.low) / (2 * Z90)) if self.total.low > 0 else 0.0


class AnalyticPrior:
    """Memory and step time by the formulas of `forecast.memory` and `forecast.step_time`.

    Args:
        base: Settings by dotted path that hold where a candidate says nothing.
    """

    def __init__(self, profile: Profile, machine: Machine, base: Mapping[str, Any] | None = None) -> None:
        self.profile, self.machine, self.base = profile, machine, dict(base or {})

    def __call__(self, candidates: Sequence[Candidate]) -> PriorPrediction:
        """The prediction, one row for each candidate."""
        guessed = self.profile.guessed
        sizes, times = cost_terms(candidates, self.profile, self.machine, self.base)
        spreads = np.array(list(step_time_formulas.spreads(self.profile).values()))
        return PriorPrediction(
            time_terms=np.column_stack([times[name] for name in step_time_formulas.SPREADS]),
            memory_terms=np.column_stack([sizes[name] for name in memory_formulas.SPREADS]),
            time_spread=np.maximum(spreads, GUESSED_SPREAD) if guessed else spreads,
            memory_spread=1.5 * np.array(list(memory_formulas.spreads(self.profile).values())),
            time_scale_sd=TIME_SCALE if self.machine.measured and not guessed else GUESSED_SCALE,
            memory_scale_sd=GUESSED_SCALE if guessed else MEMORY_SCALE,
            doubt=GUESSED_DOUBT if guessed else 1.0,
        )


def generic_prior(workload: Workload, setting: Setting) -> AnalyticPrior:
    """The prior of a workload: from its profile and the machine's rates, else a transformer of its size on a typical machine."""
    profile = workload.profile or Profile.guess(workload.n_parameters, workload.n_trainable, workload.n_blocks)
    machine = workload.machine or Machine.guess(setting.accelerator, setting.world_size, workload.environment.n_cores)
    return AnalyticPrior(profile, machine, dict(setting.base))


@dataclass(frozen=True)
class _Measurement:
    candidate: Candidate
    machine: Machine
    peak_memory_bytes: float | None
    step_time_s: float | None
    step_time_sd: float
    exceeded_bytes: float | None


class Predictor:
    """Peak memory and step time of candidates, corrected by what was measured.

    Args:
        config: The DeepSpeed configuration that holds where a candidate says nothing.
    """

    def __init__(self, profile: Profile, machine: Machine, config: Mapping[str, Any] | None = None) -> None:
        self.profile, self.machine, self.config = profile, machine, config or {}
        self._measured: list[_Measurement] = []
        self._models: dict[Quantity, CalibratedGP] = {}
        self._tables: dict[Machine, FeatureTable] = {}
        self._link_sd: Mapping[str, float] = {}

    def learn(
        self,
        candidate: Candidate,
        *,
        peak_memory_bytes: float | None = None,
        step_time_s: float | None = None,
        step_time_sd: float = 0.0,
        exceeded_bytes: float | None = None,
        machine: Machine | None = None,
    ) -> None:
        """Takes what a trial measured; a candidate may be measured several times.

        Args:
            step_time_sd: Standard deviation of the logarithm of the step time, as far as the trial itself shows it.
            exceeded_bytes: The memory of which a trial ran out; None for one that fitted.
            machine: What it ran on, where that was not the predictor's machine (another number of ranks).
        """
        self._measured.append(
            _Measurement(
                candidate, machine or self.machine, peak_memory_bytes, step_time_s, step_time_sd, exceeded_bytes
            )
        )
        self._models, self._tables = {}, {}

    def on(self, machine: Machine, link_sd: Mapping[str, float] | None = None) -> "Predictor":
        """The same workload on another machine, with what was learned here.

        Args:
            link_sd: Standard deviations of the logarithms of `communication` and `messages`, where the links are
                others, so that what was learned of these says nothing of those; None if they are the same.
        """
        found = Predictor(self.profile, machine, self.config)
        found._measured, found._link_sd = list(self._measured), dict(link_sd or {})
        found._models = {"memory": self._model("memory"), "time": self._model("time")}
        return found

    def memory(self, candidate: Candidate) -> Forecast:
        """Peak bytes of a rank."""
        return self._forecast("memory", "peak memory", list(memory_formulas.SPREADS), candidate)

    def step_time(self, candidate: Candidate) -> Forecast:
        """Seconds of an optimizer step."""
        return self._forecast("time", "step time", list(step_time_formulas.SPREADS), candidate)

    def corrections(self, candidate: Candidate) -> dict[str, float]:
        """What each part of the step time is expected to take, as a multiple of what the formula says, by its name."""
        formula = self._design("time", self.machine, [candidate]).terms[0]
        parts = zip(self.step_time(candidate).terms, formula, strict=True)
        return {term.name: term.value / float(stated) for term, stated in parts if stated > 0}

    def log_memory(self, candidates: Sequence[Candidate]) -> tuple[Floats, Floats]:
        """Logarithm of the peak of many candidates: mean and standard deviation of a measurement."""
        return self._model("memory").predict(self._design("memory", self.machine, candidates), noise=True)

    def _forecast(self, which: Quantity, name: str, names: Sequence[str], candidate: Candidate) -> Forecast:
        # In this order the candidate is worked out together with those that were measured.
        design, model = self._design(which, self.machine, [candidate]), self._model(which)
        foreign = np.array([self._link_sd.get(key, 0.0) if which == "time" else 0.0 for key in names])
        is_own = foreign == 0
        own = replace(design, terms=design.terms * is_own)
        corrected = own.terms[0] * np.exp(model.correction)
        # What links do that no trial has used is as the formula says.
        mean = float(model.predict(own)[0][0])
        values = np.where(is_own, corrected * np.exp(mean) / corrected.sum(), design.terms[0])
        total = float(values.sum())
        sd = float(np.linalg.norm([model.predict(design, noise=True)[1][0], *(values * foreign / total)]))
        spreads = Z90 * np.where(is_own, model.correction_sd(), foreign)
        parts = [
            Term(name=key, value=float(v), low=float(v * np.exp(-s)), high=float(v * np.exp(s)))
            for key, v, s in zip(names, values, spreads, strict=True)
        ]
        low, high = (total * float(np.exp(sign * Z90 * sd)) for sign in (-1, 1))
        whole = Term(name=name, value=total, low=low, high=high)
        return Forecast(terms=parts, total=whole, n_measured=model.n_observed)

    def _model(self, which: Quantity) -> CalibratedGP:
        if which not in self._models:
            is_time = which == "time"
            known = [m for m in self._measured if (m.step_time_s if is_time else m.peak_memory_bytes)]
            over = [m for m in self._measured if m.exceeded_bytes and not is_time]
            values = [float((m.step_time_s if is_time else m.peak_memory_bytes) or 0.0) for m in known]
            values += [OVER_LIMIT * float(m.exceeded_bytes or 0.0) for m in over]
            known += over
            table = self._table(self.machine, known[0].candidate if known else Candidate(micro_batch_size=1))
            within = [m.step_time_sd * is_time for m in known]
            data = None
            if known:
                runs = itertools.groupby(known, key=lambda m: m.machine)
                design = joined([self._design(which, machine, [m.candidate for m in run]) for machine, run in runs])
                data = Data.of(design, np.log(values), within, n_censored=len(over))
            self._models[which] = (
                fit(data, table.time_sd, table.time_spread, expected_noise(within))
                if is_time
                else fit(data, table.memory_sd, table.memory_spread, MEMORY_NOISE, MEMORY_SMOOTH)
            )
        return self._models[which]

    def _design(self, which: Quantity, machine: Machine, candidates: Sequence[Candidate]) -> Design:
        table = self._table(machine, candidates[0])
        table.add(candidates)
        design: Design = getattr(table, which)
        return design.take(np.array([table.row[c] for c in candidates], dtype=np.intp))

    def _table(self, machine: Machine, asked: Candidate) -> FeatureTable:
        """The features on a machine, relative to the first measured candidate; to `asked` itself before that."""
        if machine not in self._tables or not self._measured:
            seen = [m.candidate for m in self._measured]
            prior = AnalyticPrior(self.profile, machine, dict(inherited_settings(self.config)))
            self._tables[machine] = FeatureTable(knobs_of(seen), seen[0] if seen else asked, prior)
            self._tables[machine].add([*seen, asked])
        return self._tables[machine]


def probability_below(forecast: Forecast, limit: float) -> float:
    """Probability that the total is below a limit."""
    if limit <= 0:
        return 0.0
    return float(scipy.special.ndtr(np.log(limit / max(forecast.total.value, 1e-30)) / max(forecast.log_sd, 1e-6)))


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """Inputs of the forecasts for a target.

    Attributes:
        machine: What it runs on, with as many ranks as were asked for.
        share_bytes: Memory of a rank's device; on a CPU its share of the machine's.
        device: What a rank computes on, in words.
    """

    profile: Profile
    machine: Machine
    world_size: int
    base_config: DsConfig
    baseline: Candidate
    setting: Setting
    share_bytes: float
    notes: list[str]
    device: str

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that train one copy of the model together, in groups of the script's own."""
        return self.world_size // self.setting.world_size
