"""Replays every sampler on truth tables: hypervolume, regret and out-of-memory trials, against trials and against seconds.

`python benchmarks/search.py [benchmarks/truth/NAME.yaml ...]` runs whole studies, as `autotune run` does, whose trials
are answered from the table with its noise (`replay.py`). What is counted is the median of a configuration's
repeats, not what the study saw. With `--memory 0.6` a rank has as much memory as 60 % of the configurations need, so
that there is a cliff to fall from. The tables come from short trials, of 3 to 7 timed steps mostly; `--longer 8`
replays each with so many times the steps, as the default `trial_budget_s` of 10 s takes, which is what stopping trials
saves of.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
import truth
import yaml
from replay import ReplayExecutor, Row, read_table
from support.priors import flat

from autotune.forecast.features import PriorPrediction
from autotune.forecast.predictor import AnalyticPrior
from autotune.scoring.metrics import METRICS
from autotune.scoring.pareto import front as front_of
from autotune.search.acquisition import dominated
from autotune.space.candidate import Candidate
from autotune.study import proposals
from autotune.study.events import SILENT
from autotune.study.runner import Runner
from autotune.study.storage import records
from autotune.trial.result import Outcome

TABLES = Path(__file__).parent / "truth"
# Name -> what the study is told besides the sampler.
KINDS: dict[str, dict[str, Any]] = {
    "physics": {"sampler": "physics"},
    "physics, no trial stopped": {"sampler": "physics", "stop_trials": False},
    "physics, wrong prior": {"sampler": "physics"},
    "physics, no advice": {"sampler": "physics"},
    "tpe": {"sampler": "tpe"},
    "nsga2": {"sampler": "nsga2"},
    "random": {"sampler": "random"},
}
# What `search.json` compares; the others have results by themselves.
COMPARED = ("physics", "tpe", "nsga2", "random", "physics, wrong prior")
FORK = multiprocessing.get_context("fork")
CHECKED = (10, 20, 30, 60)
POINTS = 20_000
# Of a level's factor in the wrong prior (standard deviation of the logarithm).
WRONG_SD, NUMERIC = 0.4, ("micro_batch_size", "gradient_accumulation_steps")


class Truth:
    """What a table says is true: medians over repeats, and the front that they make.

    Args:
        rows: The table.
        metrics: The objectives.
        limit: Bytes that a rank has; None for no limit.
    """

    def __init__(self, rows: Sequence[Row], metrics: Sequence[str], limit: float | None) -> None:
        noted = {name for row in rows for name in row.values} | {"samples_per_s"}
        self.metrics = [metric for metric in metrics if metric in noted]  # the baseline's loss may not have fallen
        grouped: dict[Candidate, list[Row]] = {}
        for row in rows:
            grouped.setdefault(row.candidate, []).append(row)
        self.costs: dict[Candidate, np.ndarray] = {}
        for candidate, some in grouped.items():
            complete = [row.values for row in some if row.outcome is Outcome.COMPLETE]
            medians = (
                {name: statistics.median(v[name] for v in complete if name in v) for name in complete[0]}
                if complete
                else {}
            )
            if "samples_per_step" in medians:
                medians["samples_per_s"] = medians["samples_per_step"] / medians["step_time_s"]
            fits = limit is None or medians.get("peak_memory_bytes", 0.0) <= limit
            if fits and all(medians.get(metric, 0.0) > 0 for metric in self.metrics):
                signs = [1.0 if METRICS[metric].direction == "minimize" else -1.0 for metric in self.metrics]
                self.costs[candidate] = np.array(
                    [s * np.log(medians[m]) for s, m in zip(signs, self.metrics, strict=True)]
                )
        every = np.array(list(self.costs.values()))
        front = every[front_of(-every)]
        self.best = every.min(axis=0)
        low, high = front.min(axis=0), np.maximum(front.max(axis=0), front.min(axis=0) + 1e-6)
        points = low + (high - low) * np.random.default_rng(0).random((POINTS, len(low)))
        self.reachable = points[dominated(points, front)]

    def stand(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Share of the true front's hypervolume that candidates dominate (logarithms), and how far each objective is from its best."""
        costs = np.array([self.costs[c] for c in candidates if c in self.costs])
        if not len(costs):
            return {"hypervolume": 0.0, **{f"{m}_regret": float("inf") for m in self.metrics}}
        share = float(dominated(self.reachable, costs).mean()) if len(self.reachable) else 1.0
        regret = np.expm1(costs.min(axis=0) - self.best)
        return {"hypervolume": share, **{f"{m}_regret": float(r) for m, r in zip(self.metrics, regret, strict=True)}}


@contextlib.contextmanager
def skewed(seed: int) -> Iterator[None]:
    """Meanwhile the prior's step times are wrong by a random factor for each level of each categorical knob."""
    true, rng, offsets = AnalyticPrior.__call__, np.random.default_rng((seed, 7)), dict[tuple[str, Any], float]()

    def wrong(prior: AnalyticPrior, candidates: Sequence[Candidate]) -> PriorPrediction:
        told = true(prior, candidates)
        levels = [[level for level in c.values().items() if level[0] not in NUMERIC] for c in candidates]
        for level in dict.fromkeys(level for each in levels for level in each):
            offsets.setdefault(level, float(rng.normal(0.0, WRONG_SD)))
        factors = np.exp([sum(offsets[level] for level in each) for each in levels])
        return replace(told, time_terms=told.time_terms * factors[:, None])

    AnalyticPrior.__call__ = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        AnalyticPrior.__call__ = true  # type: ignore[method-assign]


@contextlib.contextmanager
def unadvised() -> Iterator[None]:
    """Meanwhile a search starts without any forecast."""
    with mock.patch.object(proposals, "generic_prior", return_value=flat):
        yield


def prolonged(row: Row, factor: float) -> Row:
    """The same measurement with more steps, which give the median as much more exactly."""
    values = dict(row.values)
    if "n_steps" in values:
        values |= {"n_steps": values["n_steps"] * factor, "ci95_s": values.get("ci95_s", 0.0) / factor**0.5}
    return replace(row, values=values)


def objectives(table: Path, without: Sequence[str]) -> list[Any]:
    """A collected study's objectives as its file states them, but for some."""
    stated = yaml.safe_load(table.read_text())["objectives"]
    return [each for each in stated if (each["name"] if isinstance(each, dict) else each) not in without]


def run(
    table: Path, rows: Sequence[Row], kind: str, seed: int, n_trials: int, limit: int | None, stated: list[Any]
) -> dict[str, Any]:
    """One study; its curve has a point after each trial that was launched."""
    changes = {
        "stop_below": 0.0,
        "finalists": 0,
        "trials": n_trials,
        "seed": seed,
        "device_memory_bytes": limit,
        **KINDS[kind],
    }
    found = truth.planned(table, {**changes, "objectives": stated})
    executor = ReplayExecutor(rows, seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(found, executor, Path(folder) / "study", records.default_url(Path(folder)), SILENT)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if kind == "physics, no advice":
                stack.enter_context(unadvised())
            if kind == "physics, wrong prior":
                stack.enter_context(skewed(seed))
            runner.run()
        ended = [m for m in runner.state.measured() if m.outcome is not Outcome.PREDICTED_OOM]
        told = [records.told_data(each) for each in runner.state.told()]
        walls = [data["wall_s"] for data in told if data["outcome"] != Outcome.PREDICTED_OOM]
    # A loss that did not fall within the baseline's trial is no objective of the study.
    true = Truth(rows, [o.metric for o in runner.state.objectives], limit)
    curve, tried, n_oom, spent = [], [], 0, 0.0
    for m, wall in zip(ended, walls, strict=True):
        spent += wall
        n_oom += m.outcome is Outcome.OOM
        if m.outcome is Outcome.COMPLETE:
            tried.append(m.candidate)
        curve.append({"seconds": spent, "oom": n_oom, **true.stand(tried)})
    return {
        "curve": curve,
        "driver_s": time.perf_counter() - start,
        "stopped": sum(m.outcome is Outcome.STOPPED_EARLY for m in ended),
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over runs after so many trials; a study that ended before stays where it was."""
    found: dict[str, Any] = {
        "runs": len(runs), "driver_s": round(statistics.median(r["driver_s"] for r in runs), 2),
        "stopped_early": round(statistics.mean(r["stopped"] for r in runs), 2),
    }  # fmt: skip
    # A study that never gets there counts as one that does after its last trial.
    needed = [
        next((n for n, p in enumerate(r["curve"], 1) if p["hypervolume"] >= 0.95), len(r["curve"]) + 1) for r in runs
    ]
    found["trials_to_95_percent"] = {"median": statistics.median(needed), "mean": round(statistics.mean(needed), 2)}
    for n in CHECKED:
        if n > max(len(r["curve"]) for r in runs):
            break
        points = [r["curve"][min(n, len(r["curve"])) - 1] for r in runs]
        row = {name: float(np.median([p[name] for p in points])) for name in points[0]}
        row["hypervolume_p10"] = float(np.quantile([p["hypervolume"] for p in points], 0.1))
        row["oom_mean"] = float(np.mean([p["oom"] for p in points]))
        found[str(n)] = {name: round(value, 4) for name, value in row.items() if np.isfinite(value)}
    return found


def plot(curves: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Hypervolume, regret and out-of-memory trials, medians over seeds, as one HTML page (and a PNG where kaleido is installed)."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    shown = [
        ("hypervolume", "share of the front's hypervolume"),
        ("samples_per_s_regret", "throughput regret"),
        ("oom", "out of memory"),
    ]
    figure = make_subplots(
        rows=2, cols=3, subplot_titles=[f"{label} by {by}" for by in ("trials", "seconds") for _, label in shown]
    )
    colours = ["#4269d0", "#97bbf5", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2", "#ff8ab7", "#9498a0"]
    for n, (kind, runs) in enumerate(curves.items()):
        length = max(len(r["curve"]) for r in runs)
        points = [[r["curve"][min(i, len(r["curve"]) - 1)] for r in runs] for i in range(length)]
        by = {1: list(range(1, length + 1)), 2: [float(np.median([p["seconds"] for p in at])) for at in points]}
        for column, (name, _) in enumerate(shown, start=1):
            if name not in points[0][0]:
                continue
            y = [
                float(np.mean([p[name] for p in at])) if name == "oom" else float(np.median([p[name] for p in at]))
                for at in points
            ]
            for row, x in by.items():
                line = {"color": colours[n % len(colours)]}
                first = row == 1 and column == 1
                figure.add_trace(
                    go.Scatter(x=x, y=y, name=kind, legendgroup=kind, showlegend=first, line=line), row, column
                )
    figure.update_layout(title=title, template="plotly_white", width=1400, height=800)
    figure.write_html(path, include_plotlyjs=True)
    with contextlib.suppress(Exception):  # kaleido is not among what autotune needs
        figure.write_image(path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables", nargs="*", type=Path, help="studies that truth.py collected (default: all of benchmarks/truth)"
    )
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--memory", type=float, help="a rank has what this share of the configurations needs")
    parser.add_argument(
        "--without", nargs="*", default=["memory"], help="objectives that are not counted (default: memory)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="studies at once, each in a process")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=COMPARED)
    parser.add_argument("--name", default="search", help="results/NAME.json is written")
    parser.add_argument("--longer", type=float, default=1.0, help="times as many steps a trial as were measured")
    parser.add_argument("--merge", action="store_true", help="keep what other samplers reached in an earlier run")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    kept = common.RESULTS / f"{arguments.name}.json"
    results: dict[str, Any] = json.loads(kept.read_text())["tables"] if arguments.merge and kept.exists() else {}
    for table in arguments.tables or sorted(
        path for path in TABLES.glob("*.yaml") if path.with_suffix(".csv.gz").exists()
    ):
        rows = [prolonged(row, arguments.longer) for row in read_table(table.with_suffix(".csv.gz"))]
        sizes = [row.values["peak_memory_bytes"] for row in rows if "peak_memory_bytes" in row.values]
        limit = int(np.quantile(sizes, arguments.memory)) if arguments.memory else None
        print(f"{table.stem}: {len({row.candidate for row in rows})} configurations", flush=True)
        curves: dict[str, list[dict[str, Any]]] = {}
        for kind in arguments.only:
            stated = objectives(table, arguments.without)
            one = functools.partial(run, table, rows, kind, n_trials=arguments.trials, limit=limit, stated=stated)
            with FORK.Pool(arguments.jobs) as pool:
                curves[kind] = pool.map(one, range(arguments.seeds), chunksize=1)
            found = summary(curves[kind])
            results.setdefault(table.stem, {})[kind] = found
            checked = [n for n in CHECKED if str(n) in found]
            figures = "  ".join(
                f"@{n}: hv {found[str(n)]['hypervolume']:.2f}, oom {found[str(n)]['oom_mean']:.1f}" for n in checked
            )
            seconds = found[str(checked[-1])]["seconds"] if checked else 0.0
            print(
                f"  {kind:<28}{figures}  {seconds:.0f} s of trials, {found['stopped_early']:.1f} stopped early",
                flush=True,
            )
        if not arguments.dry:
            common.RESULTS.mkdir(exist_ok=True)
            plot(
                curves, common.RESULTS / f"{arguments.name}-{table.stem}.html", f"{table.stem}: {arguments.seeds} seeds"
            )
    if not arguments.dry:
        with contextlib.redirect_stdout(io.StringIO()):
            stated = {name: getattr(arguments, name) for name in ("seeds", "trials", "memory", "without", "longer")}
            common.write(arguments.name, stated | {"tables": results})


if __name__ == "__main__":
    main()
