"""Effects of the knobs: their shares of a metric's variance over the trials, and a factor for each value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.trial.profile import Floats

# Fewer trials than this say nothing about several knobs.
MIN_TRIALS = 6
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Level:
    """One value of a knob.

    Attributes:
        value: The value; None is DeepSpeed's default.
        factor: The metric with this value over the metric with the reference's value, all else equal.
    """

    value: Any
    factor: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effect of one knob on a metric.

    Attributes:
        together: Knobs that took another value wherever this one did, and nowhere else: the effect is that of all of them.
        share: Its share of the variance of the metric's logarithm.
        levels: Its values, the reference's first.
    """

    knob: str
    share: float
    levels: Sequence[Level]
    together: Sequence[str] = ()

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knob and those that changed together with it."""
        return (self.knob, *self.together)


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Effects of all knobs on a metric.

    Attributes:
        n: Trials that it rests on.
        explained: Share of the variance that the model predicts in left-out trials; at or below 0 it predicts nothing.
        knobs: Their effects, the one that matters most first.
    """

    metric: str
    n: int
    explained: float
    knobs: Sequence[Effect]


def effects(
    metric: str, trials: Sequence[tuple[Mapping[str, Any], float]], reference: Mapping[str, Any]
) -> Effects | None:
    """Fits log(metric) as a sum of one term for each knob's value.

    Ridge regression on indicator columns, its penalty chosen by leave-one-out (closed form). A search samples knobs
    together, so a knob's share is the covariance of its term with the metric. Interactions of knobs are not modelled.

    Args:
        metric: A key of `METRICS`.
        trials: Knob values and the metric of each trial.
        reference: Knob values that factors are relative to.

    Returns:
        None where there are too few trials, or nothing varied.
    """
    usable = [(values, value) for values, value in trials if value > 0]
    names = list(dict.fromkeys(name for values, _ in usable for name in values))
    levels = {
        name: list(dict.fromkeys([reference.get(name), *(values.get(name) for values, _ in usable)])) for name in names
    }
    # Knobs that change in the same trials have one column for each value between them, and so one effect.
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        alike.setdefault(tuple(levels[name].index(values.get(name)) for values, _ in usable), []).append(name)
    together = {first: more for pattern, (first, *more) in alike.items() if len(set(pattern)) > 1}
    if len(usable) < MIN_TRIALS or not together:
        return None
    y = np.log([value for _, value in usable])
    columns = {
        name: np.array([[values.get(name) == level for level in levels[name]] for values, _ in usable], dtype=float)
        for name in together
    }
    X = np.concatenate(list(columns.values()), axis=1)
    coefficients, explained = _fit(X, y)
    spread = float(((y - y.mean()) ** 2).mean())
    found, start = [], 0
    for name, others in together.items():
        indicators, own = columns[name], coefficients[start : start + len(levels[name])]
        start += len(levels[name])
        term = indicators @ own
        share = float(((term - term.mean()) * (y - y.mean())).mean()) / spread if spread > 0 else 0.0
        counts = indicators.sum(axis=0)
        worth = [
            Level(value=level, factor=float(np.exp(own[i] - own[0])), n=int(counts[i]))
            for i, level in enumerate(levels[name])
            if counts[i] or i == 0
        ]
        found.append(Effect(knob=name, share=max(0.0, share), levels=worth, together=others))
    return Effects(
        metric=metric, n=len(usable), explained=explained, knobs=sorted(found, key=lambda effect: -effect.share)
    )


def _fit(X: Floats, y: Floats) -> tuple[Floats, float]:
    """Coefficients at the penalty with the smallest error in left-out trials, and the share of variance predicted."""
    centred, target = X - X.mean(axis=0), y - y.mean()
    U, s, Vt = np.linalg.svd(centred, full_matrices=False)
    projected = U.T @ target
    total = float((target**2).sum())
    best: tuple[float, Floats] | None = None
    for penalty in PENALTIES:
        shrunk = s**2 / (s**2 + penalty)
        leverage = (U**2) @ shrunk + 1 / len(y)
        error = float((((target - U @ (shrunk * projected)) / np.maximum(1e-6, 1 - leverage)) ** 2).sum())
        if best is None or error < best[0]:
            weights = np.where(s > 1e-9, s / (s**2 + penalty), 0.0)
            best = error, np.asarray(Vt.T @ (weights * projected), dtype=float)
    assert best is not None
    # The mean left out is that of the others, so the variance to beat is as much larger.
    beaten = total * (len(y) / (len(y) - 1)) ** 2
    return best[1], 1 - best[0] / beaten if total > 0 else 0.0
