"""How good are the forecasts on configurations that did not calibrate them?

`python benchmarks/forecast.py collect TARGET FOLDER [-n 40] [--ranks 2]` runs varied configurations for three steps
each, which is enough for their memory. `python benchmarks/forecast.py score TABLE` scores the forecasts against a table
of `truth.py`, with the profile that was taken of the table's machine; `score FOLDER --target TARGET [--ranks 2]` against a
folder of trials (of `collect`, or of a study), with a profile of this machine. Writes `results/forecast-NAME.json`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import write
from scipy.stats import kendalltau
from truth import planned

from autotune.errors import UserError
from autotune.executors import base
from autotune.forecast.predictor import Forecast, Predictor, probability_below
from autotune.forecast.words import SURE
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study.setup.engine import executor_for
from autotune.study.setup.forecasts import foresee_workload, measured_in
from autotune.study.setup.plan import plan
from autotune.study.spec.spec import StudySpec
from autotune.trial.request import TrialRequest

SPACES = ["batch", "zero", "precision", "checkpointing", "buckets"]
ANCHORS = (0, 1, 5, 10, 20)
DRAWS = 20
DRAWN_TABLES = 50
# Limits, as quantiles of the measured peaks, at which "it fits" is put to the test.
LIMITS = (0.25, 0.5, 0.75, 0.9)
MOST_SAMPLES_A_STEP = 128

Measured = dict[Candidate, dict[str, float]]


def collect(target: Path, folder: Path, n: int, ranks: int) -> None:
    spec = StudySpec.of(target, {"ranks": ranks, "space": ",".join(SPACES), "global_batch": "free"})
    with executor_for(spec, folder) as executor:
        found = plan(spec, executor, folder)
        drawn = found.space.draw(random.Random(0), found.baseline, 200 * n)
        legal = [c for c in dict.fromkeys(drawn) if why_illegal(c, found.setting) is None]
        small = [c for c in legal if c.micro_batch_size * c.gradient_accumulation_steps <= MOST_SAMPLES_A_STEP]
        for number, candidate in enumerate(small[:n]):
            request = TrialRequest(
                target=str(spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate), world_size=ranks,
                max_steps=3, deadline_s=60,
            )  # fmt: skip
            result = base.run(executor, folder / "trials" / f"{number:04d}", request)
            print(number, candidate.describe(), result.outcome, result.reason, flush=True)


def score(source: Path, target: Path | None, ranks: int, *, timed: bool) -> None:
    found: Measured
    if source.is_dir():
        if target is None:
            raise SystemExit(f"{source}: a folder of trials needs --target, the model that they trained")
        spec = StudySpec.of(target, {"ranks": ranks})
        foreseen = foresee_workload(spec)
        name, profile, base_config = spec.name, foreseen.profile, foreseen.base_config
        machine = replace(foreseen.machine, world_size=ranks)
        found = measured_in(source, spec.target).get(ranks, {})
    else:  # with the profile of the machine that the table was measured on, whatever this one is
        study = source.with_name(source.name.replace(".csv.gz", ".yaml"))
        if not study.with_suffix(".json").exists():
            raise SystemExit(f"{source}: no table of truth.py, since {study.stem}.json is not beside it")
        of_table = planned(study, {})
        name, ranks, base_config = of_table.spec.name, of_table.world_size, of_table.base_config
        profile, machine = of_table.workload.profile, of_table.workload.machine
        found = from_table(source)
    if len(found) < 2 * max(ANCHORS[:3]):
        raise SystemExit(f"{source}: {len(found)} complete configurations are too few")

    def fresh() -> Predictor:
        return Predictor(profile, machine, base_config)

    figures: dict[str, Any] = {"configurations": len(found), "ranks": ranks}
    for n in ANCHORS:
        if n < len(found) / 2:
            figures[f"{n} anchors"] = scored(fresh, found, n, timed=timed)
    if not source.is_dir() and timed and min(map(len, (rows := repeats(source)).values())) > 1:
        figures["one more measurement"] = repeated(rows)
        figures["perfect"] = perfect(rows)
    write(f"forecast-{name}", figures)


def scored(fresh: Any, found: Measured, n: int, *, timed: bool) -> dict[str, float]:
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
    if timed:
        figures |= {f"time_{name}": value for name, value in errors(times).items()} | {
            "time_kendall_tau": statistics.median(taus)
        }
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


def from_table(path: Path) -> Measured:
    """The medians over the repeats of a table: knobs in columns `knob:NAME` as JSON, then what was measured."""
    return {
        c: {name: statistics.median(row[name] for row in some) for name in some[0]} for c, some in repeats(path).items()
    }


def repeats(path: Path) -> dict[Candidate, list[dict[str, float]]]:
    """What each complete measurement of a configuration yielded, in order."""
    rows: dict[Candidate, list[dict[str, float]]] = {}
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else open(path, newline="") as file:
        for cells in csv.DictReader(file):
            if cells["outcome"] != "complete":
                continue
            knobs = {
                name.removeprefix("knob:"): json.loads(text)
                for name, text in cells.items()
                if name.startswith("knob:") and text
            }
            values = {name: float(cells[name]) for name in ("peak_memory_bytes", "step_time_s")}
            rows.setdefault(Candidate.of(knobs), []).append(values)
    return rows


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
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("target", type=Path)
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("-n", type=int, default=40)
    collecting.add_argument("--ranks", type=int, default=2)
    scoring = commands.add_parser("score")
    scoring.add_argument("source", type=Path)
    scoring.add_argument("--target", type=Path, help="the model that the trials of a folder trained")
    scoring.add_argument("--ranks", type=int, default=2, help="of the trials of a folder; a table states its own")
    scoring.add_argument(
        "--memory-only", action="store_true", help="leave step times out, where the machine was not idle"
    )
    arguments = parser.parse_args()
    try:
        if arguments.command == "collect":
            collect(arguments.target.absolute(), arguments.folder, arguments.n, arguments.ranks)
        else:
            target = arguments.target.absolute() if arguments.target else None
            score(arguments.source, target, arguments.ranks, timed=not arguments.memory_only)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
