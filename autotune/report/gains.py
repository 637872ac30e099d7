"""What a trial gains over the baseline and what it costs, in values and in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autotune.report import trial_notes
from autotune.report.data import THROUGHPUT, Data, StudyReport, times
from autotune.scoring.estimates import READS_BETTER, WITHIN_NOISE, Gain
from autotune.scoring.metrics import METRICS
from autotune.scoring.recommend import PICKS

NO_SPEEDUP = "no speed-up to state"
# A pick's price is stated from this change on: 1 %.
PRICE = 0.01


def leading_metric(report: StudyReport, names: Sequence[str], pick: Data) -> str:
    """The metric that a pick is stated by: its own; of the recommended one that of the heaviest objective, else the throughput.

    Where that is no better than the baseline's beyond noise, the objective that the recommended one gains most by.
    """
    own = next((PICKS[name] for name in names if name in PICKS), "")
    if own and "recommended" not in names and "drop_in" not in names:
        return own
    lead, gained = _heaviest(report) or THROUGHPUT, {}
    for name, weight in (report.study.get("weights") or {}).items():
        if (found := change(pick, name)) and found.better and found.factor > 1 + PRICE:
            gained[name] = found.told, weight * math.log(found.factor)
    best = max(gained, key=gained.__getitem__, default=lead)
    return lead if lead in gained and gained[lead][0] == gained[best][0] else best


def _heaviest(report: StudyReport) -> str:
    """The metric of the objective with the most weight; empty where several have it."""
    weights: Mapping[str, float] = report.study.get("weights") or {}
    heaviest = [name for name, weight in weights.items() if weight == max(weights.values())]
    return heaviest[0] if len(heaviest) == 1 else ""


class Stated(NamedTuple):
    """A pick against the baseline, in the parts that terminal and page put together.

    Attributes:
        metric: Label of the metric that it is stated by; empty where there is nothing to state.
        ratio: That metric over the baseline's.
        span: Its 95 % interval in words; empty where none can be seen.
        noise: That the difference is within noise.
        price: What it costs.
        unsure: What keeps it from being a result.
    """

    metric: str
    ratio: float
    span: str
    noise: list[str]
    price: list[str]
    unsure: list[str]


def stated(report: StudyReport, names: Sequence[str], pick: Data) -> Stated:
    """What a pick gains by its own metric, and the price.

    Where its own metric has no gain to state, the throughput's is, or that there is none: the baseline did not run, or
    cannot be compared with it.
    """
    unsure = ["measured once"] * (pick.get("measurements") == 1)
    unsure += [trial_notes.checks(pick)] if pick.get("unchecked") else []
    gains = _gains(pick)
    for name in (leading_metric(report, names, pick), THROUGHPUT):
        if (gain := gains.get(name)) is not None and not gain.vague:
            ratio, *ends = (_ratio(name, each) for each in gain)
            low, high = (f"{end:.2f}" for end in sorted(ends))
            span, price = f"{low} to {high}" * (low != high), price_words(report, pick, name)
            return Stated(METRICS[name].label, ratio, span, _noise(pick, name), price, unsure)
    return Stated("", 1.0, "", [], [], unsure)


def pick_words(report: StudyReport, names: Sequence[str], pick: Data) -> str:
    """What a pick gains, and the price: `0.64x (0.60 to 0.68) the baseline's peak memory, at 0.91x the throughput`."""
    if report.is_baseline(pick):
        return "the baseline itself"
    said = stated(report, names, pick)
    if not said.metric:
        return ", ".join([NO_SPEEDUP, *said.unsure])
    whole = f"{times(said.ratio)}{f' ({said.span})' if said.span else ''} the baseline's {said.metric}"
    return ", ".join([whole, *said.noise, *said.price, *said.unsure])


def price_words(report: StudyReport, pick: Data, lead: str) -> list[str]:
    """What a pick costs beside the metric that it leads with, as one part of a sentence: `at 2.48x the step time`.

    If it costs nothing, its throughput, or the metric that the goal is about where it leads with its throughput; neither
    where that is the figure just said, as goodput is throughput at an equal global batch. A price that cannot be stated is
    said to be so: what is not known is not free.
    """
    gains = _gains(pick)
    known = [name for name in dict.fromkeys([THROUGHPUT, *report.objectives]) if name in gains]
    vague = [name for name in known if name != lead and gains[name].vague]
    ratios = {name: _ratio(name, gains[name].factor) for name in known if name not in vague}
    worse = {name: ratio for name, ratio in ratios.items() if name != lead and gains[name].factor < 1 - PRICE}
    other = THROUGHPUT if lead != THROUGHPUT else _heaviest(report)
    price = worse or {n: ratio for n, ratio in ratios.items() if n == other and times(ratio) != times(ratios.get(lead))}
    said = [
        f"{times(ratio)} the {METRICS[name].label}{f' ({WITHIN_NOISE})' * bool(_noise(pick, name))}"
        for name, ratio in price.items()
    ]
    said += [f"an unknown {METRICS[name].label}" for name in vague[:1]]
    return [f"at {' and '.join(said)}"] * bool(said)


def _gains(point: Data) -> dict[str, Gain]:
    """The gains of a trial over the baseline by metric."""
    return {name: Gain(*ends) for name, ends in (point.get("gains") or {}).items()}


def _ratio(metric: str, gain: float) -> float:
    """A metric over the baseline's, of the factor by which it is better."""
    return 1 / gain if METRICS[metric].direction == "minimize" else gain


def _noise(pick: Data, metric: str) -> list[str]:
    luck = f" (the best of several trials {READS_BETTER})" if metric in (pick.get("luck") or ()) else ""
    found = change(pick, metric)  # what is equal, as memory on a device, is told
    return [f"{WITHIN_NOISE}{luck}"] if found and not found.told and found.factor != 1 else []


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a metric of a trial compares with the baseline's.

    Attributes:
        factor: How many times better or worse it is; at least 1.
        better: Whether it is better.
        told: Whether the difference is larger than the noise.
    """

    factor: float
    better: bool
    told: bool

    def words(self, sign: str = "x") -> str:
        """The change in words: `1.31x better`."""
        if times(self.factor, sign) == times(1.0, sign):
            return "equal"
        how = "better" if self.better else "worse"
        return f"{times(self.factor, sign)} {how}{'' if self.told else f', {WITHIN_NOISE}'}"


def change(point: Data, metric: str) -> Change | None:
    """A metric of a trial against the baseline's; None where one of them has none, or the interval says nothing."""
    if (gain := _gains(point).get(metric)) is None or gain.vague:
        return None
    told = gain.told and metric not in (point.get("luck") or ())
    return Change(factor=max(gain.factor, 1 / gain.factor), better=gain.factor >= 1, told=told)
