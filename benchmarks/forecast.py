"""How good are the forecasts on configurations that did not calibrate them?

`python benchmarks/forecast.py score TABLE` scores the forecasts against a table of `truth.py`, with the profile that was
taken of the table's machine. Writes `results/forecast-NAME.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import write
from replay import read_table
from scipy.stats import kendalltau
from truth import planned

from autotune.errors import UserError
from autotune.forecast.predictor import Forecast, Predictor, probability_below
from autotune.forecast.words import SURE
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

ANCHORS = (0, 1, 5, 10, 20)
DRAWS = 20
DRAWN_TABLES = 50
# Limits, as quantiles of the measured peaks, at which "it fits" is put to the test.
LIMITS = (0.25, 0.5, 0.75, 0.9)

Measured = dict[Candidate, dict[str, float]]


def score(source: Path) -> None:
    study = source.with_name(source.name.replace(".csv.gz", ".yaml"))
    if not study.with_suffix(".json").exists():
        raise SystemExit(f"{source}: no table of truth.py, since {study.stem}.json is not beside it")
    of_table, rows = planned(study, {}), repeats(source)
    profile, machine = of_table.workload.profile, of_table.workload.machine
    assert profile is not None and machine is not None
    found = {c: {name: statistics.median(row[name] for row in some) for name in some[0]} for c, some in rows.items()}
    if len(found) < 2 * max(ANCHORS[:3]):
        raise SystemExit(f"{source}: {len(found)} complete configurations are too few")

    def fresh() -> Predictor:
        return Predictor(profile, machine, of_table.base_config)

    figures: dict[str, Any] = {"configurations": len(found), "ranks": of_table.world_size}
    for n in ANCHORS:
        if n < len(found) / 2:
            figures[f"{n} anchors"] = scored(fresh, found, n)
    if min(map(len, rows.values())) > 1:
        figures["one more measurement"] = repeated(rows)
        figures["perfect"] = perfect(rows)
    write(f"forecast-{of_table.spec.name}", figures)


def scored(fresh: Any, found: Measured, n: int) -> dict[str, float]:
    """Errors on what was not drawn as an anchor, over several draws."""
    pairs: list[tuple[Forecast, float]] = []
    times: list[tuple[Forecast, float]] = []
    taus = []
    for draw in range(DRAWS if n else 1):
        predictor, every = fresh(), list(found)
        random.Random(draw).shuffle(every)
        for candidate in every[:n]:
            predictor.learn(candidate, **found[candidate])
        left = every[n:]
        pairs += [(predictor.memory(c), found[c]["peak_memory_bytes"]) for c in left]
        own = [(predictor.step_time(c), found[c]["step_time_s"]) for c in left]
        times += own
        taus.append(kendalltau([said.total.value for said, _ in own], [real for _, real in own]).statistic)
    figures = {f"memory_{name}": value for name, value in errors(pairs).items()} | {
        "memory_unsafe_share": unsafe(pairs)
    }
    figures |= {f"time_{name}": value for name, value in errors(times).items()}
    figures["time_kendall_tau"] = statistics.median(taus)
    return {name: round(value, 4) for name, value in figures.items()}


def errors(pairs: Iterable[tuple[Forecast, float]]) -> dict[str, float]:
    pairs = list(pairs)
    off = [abs(said.total.value / real - 1) for said, real in pairs]
    held = [said.total.low <= real <= said.total.high for said, real in pairs]
    return {
        "error_median": float(np.median(off)),
        "error_p95": float(np.quantile(off, 0.95)),
        "interval_90_holds": float(np.mean(held)),
    }


def unsafe(pairs: list[tuple[Forecast, float]]) -> float:
    """Of the configurations that are said to fit a limit, the share that does not."""
    said_to_fit = [
        real > limit
        for limit in np.quantile([real for _, real in pairs], LIMITS)
        for said, real in pairs
        if probability_below(said, float(limit)) >= SURE
    ]
    return float(np.mean(said_to_fit)) if said_to_fit else 0.0


def repeats(path: Path) -> dict[Candidate, list[dict[str, float]]]:
    """What each complete measurement of a configuration yielded, in order."""
    found: dict[Candidate, list[dict[str, float]]] = {}
    for row in read_table(path):
        if row.outcome is Outcome.COMPLETE:
            values = {name: row.values[name] for name in ("peak_memory_bytes", "step_time_s")}
            found.setdefault(row.candidate, []).append(values)
    return found


def repeated(rows: dict[Candidate, list[dict[str, float]]]) -> dict[str, float]:
    """What a measurement says of the mean of the others of its configuration: no forecast can be seen to be better than these allow."""
    times = [[row["step_time_s"] for row in some] for some in rows.values()]
    n = min(map(len, times))
    errors, taus = [], []
    for k in range(n):
        others = [statistics.geometric_mean([*some[:k], *some[k + 1 : n]]) for some in times]
        errors += [abs(some[k] / other - 1) for some, other in zip(times, others, strict=True)]
        taus.append(kendalltau([some[k] for some in times], others).statistic)
    return {"time_error_median": statistics.median(errors), "time_kendall_tau": statistics.median(taus)}


def perfect(rows: dict[Candidate, list[dict[str, float]]]) -> dict[str, float]:
    """What a forecast would score that knew each configuration's mean, against medians of as many readings: a bound.

    Readings are drawn about the mean by what the table's own scatter by. The means hold noise too, which spreads them, so
    the ranking of a real one would agree a little less.
    """
    times = [np.log([row["step_time_s"] for row in some]) for some in rows.values() if len(some) > 1]
    means = np.array([logs.mean() for logs in times])
    scatter = np.concatenate([(logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1)) for logs in times])
    rng = np.random.default_rng(0)
    errors, taus = [], []
    for _ in range(DRAWN_TABLES):
        drawn = np.array([np.median(rng.choice(scatter, len(logs))) for logs in times])
        errors.append(float(np.median(np.abs(np.expm1(-drawn)))))
        taus.append(kendalltau(means, means + drawn).statistic)
    return {"time_error_median": statistics.mean(errors), "time_kendall_tau": statistics.mean(taus)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["score"])
    parser.add_argument("table", type=Path)
    try:
        score(parser.parse_args().table)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
