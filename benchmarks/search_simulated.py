"""The search on nine simulated machines: hypervolume, regret and out-of-memory trials against the number of trials.

The machines are those of `simulator.py`, with constants drawn anew for each seed. What is shown is how fast a search
finds the front of such a table, not that any machine is like it. Other samplers are compared on measured tables, by
`search.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
from search_known import rows_of_known
from simulator import KINDS, METRICS, NOISES, Noise, Table, redrawn, tried, worlds

from autotune.forecast.predictor import AnalyticPrior
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.space.candidate import Candidate

CHECKED = (10, 20, 30)
# Single objectives are found where the best trial so far is at most this far behind.
NEAR = 0.02


def rows_of_physics(
    table: Table, seed: int, n_trials: int, noise: Noise, *, metrics: Sequence[str] = METRICS
) -> list[int]:
    """The candidates that a study of these objectives tries, in order; what is measured has noise, what is counted is the truth."""
    world, rng = table.world, np.random.default_rng((seed, 11))
    guide = CandidateOptimizer(
        table.candidates, AnalyticPrior(world.profile, world.nominal), metrics,
        world_size=world.setting.world_size, memory_limit_bytes=world.limit, reference=world.default,
        knobs={parameter.name: list(parameter.all_values()) for parameter in world.space.parameters},
    )  # fmt: skip
    rows, told = list[int](), list[Observation]()
    candidate: Candidate | None = world.default
    while candidate is not None and len(rows) < n_trials:
        rows.append(table.row[candidate])
        told.append(tried(table, candidate, rng, noise))
        candidate = guide.suggest(told)
    return rows


# By its name the search; that of studies for one objective alone; and one that knows the formulas of the simulator, see `search_known.py`.
SEARCHES: dict[str, Callable[[Table, int, int, Noise], list[int]]] = {
    "physics": rows_of_physics,
    "latency alone": functools.partial(rows_of_physics, metrics=["step_time_s"]),
    "throughput alone": functools.partial(rows_of_physics, metrics=["samples_per_s"]),
    "formulas known": rows_of_known,
}


def curve(table: Table, rows: Sequence[int], n_trials: int) -> dict[int, dict[str, float]]:
    """What a study had found after some numbers of trials, and how many ran out of memory."""
    return {
        n: {
            **found_by(table, [row for row in rows[:n] if table.fits[row]]),
            "oom": int((~table.fits[list(rows[:n])]).sum()),
        }
        for n in CHECKED
        if n <= n_trials
    }


def found_by(table: Table, rows: Sequence[int]) -> dict[str, float]:
    """Share of the front that candidates dominate, and how far the best of them is behind by each objective."""
    costs = table.costs[list(rows)]
    best = table.costs[table.fits].min(axis=0)
    regret = np.expm1(costs.min(axis=0) - best) if len(rows) else np.full(3, np.inf)
    return {
        "hypervolume": table.share(costs), "latency_regret": float(regret[0]), "throughput_regret": float(regret[1]),
        "time_to_loss_regret": float(regret[2]),
    }  # fmt: skip


def figures(names: Sequence[str], kind: str, seeds: Sequence[int], n_trials: int, noise: Noise) -> dict[str, Any]:
    """Studies of one search on machines that are drawn anew for each seed; where the baseline does not fit, there is none."""
    runs: dict[str, list[dict[int, dict[str, float]]]] = {}
    for world in worlds(names):
        for seed in seeds:
            table = Table(redrawn(world, seed))
            if table.fits[table.row[world.default]]:
                runs.setdefault(world.name, []).append(
                    curve(table, SEARCHES[kind](table, seed, n_trials, noise), n_trials)
                )
    every = [run for some in runs.values() for run in some]
    return {"overall": summary(every), **{name: summary(some) for name, some in runs.items()}}


def summary(runs: Sequence[dict[int, dict[str, float]]]) -> dict[str, Any]:
    """Medians over runs, and shares of them."""
    found: dict[str, Any] = {"runs": len(runs)}
    for n in runs[0]:
        columns = {key: np.array([run[n][key] for run in runs]) for key in runs[0][n]}
        row: dict[str, float] = {key: float(np.median(column)) for key, column in columns.items()}
        row["hypervolume_p10"] = float(np.quantile(columns["hypervolume"], 0.1))
        row["hypervolume_mean"] = float(columns["hypervolume"].mean())
        row["oom_mean"] = float(columns["oom"].mean())
        near = {name: columns[f"{name}_regret"] <= NEAR for name in ("latency", "throughput", "time_to_loss")}
        row |= {f"{name}_near": float(some.mean()) for name, some in near.items()}
        row["latency_and_throughput_near"] = float((near["latency"] & near["throughput"]).mean())
        row["throughput_and_time_to_loss_near"] = float((near["throughput"] & near["time_to_loss"]).mean())
        found[str(n)] = {key: round(value, 4) for key, value in row.items()}
    return found


def line(label: str, found: dict[str, Any]) -> str:
    """The figures of some runs, as a line of the table."""
    shares = " / ".join(f"{found[str(n)]['hypervolume']:.2f}" for n in CHECKED if str(n) in found)
    last = [str(n) for n in CHECKED if str(n) in found][-1]
    row = found["20"] if "20" in found else found[last]
    near = [
        row[f"{name}_near"]
        for name in ("latency", "throughput", "latency_and_throughput", "throughput_and_time_to_loss")
    ]
    end = found[last]
    return (
        f"{label:<28}{found['runs']:>5}{shares:>20}{end['hypervolume_p10']:>7.2f}{' '.join(map('{:4.0%}'.format, near)):>24}"
        f"{end['throughput_regret']:>9.1%}{end['time_to_loss_regret']:>9.1%}{end['oom_mean']:>6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--worlds", nargs="*", default=list(KINDS), help="only these")
    parser.add_argument("--noise", nargs="*", choices=[noise.name for noise in NOISES], help="only these")
    parser.add_argument("--only", nargs="*", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--merge", action="store_true", help="keep what the other search reached in an earlier run")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    kept = common.RESULTS / "search_simulated.json"
    results: dict[str, Any] = json.loads(kept.read_text())["noises"] if arguments.merge and kept.exists() else {}
    print(
        f"{'':28}{'runs':>5}{'share @10/20/30':>20}{'p10':>7}{'L, T, L+T, T+loss @20':>24}{'regrets @30':>18}{'OOM':>6}"
    )
    for noise in NOISES:
        for kind in arguments.only if not arguments.noise or noise.name in arguments.noise else ():
            seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            found = figures(arguments.worlds, kind, seeds, arguments.trials, noise)
            print(line(f"{kind}, {noise.name}", found["overall"]))
            for name in found:
                print(line(f"  {name}", found[name]) if name != "overall" else "", flush=True)
            results.setdefault(noise.name, {})[kind] = found
            if not arguments.dry:
                with contextlib.redirect_stdout(io.StringIO()):  # the table is what people read
                    stated = {"trials": arguments.trials, "seeds": [seeds.start, seeds.stop - 1]}
                    common.write("search_simulated", stated | {"noises": results})


if __name__ == "__main__":
    main()
