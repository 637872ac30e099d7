"""Whole studies on simulated machines with noise: how good is what they recommend, and do the intervals hold the truth?

`machines`: the nine machines of `simulator.py` with constants drawn anew for each seed; 2.5 % and 10 % noise between
trials, and a drift of 0.5 % from one trial to the next. Regret is against the best throughput of
the whole space, `of_tried` against the best that the study tried. `same`: studies in which every candidate has the same
throughput; a recommendation of any change is false.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
import optuna
from simulator import KINDS, Table, World, redrawn, worlds
from support.instant import WORKLOAD, Instant, failed, report, runner_of

from autotune.scoring import recommend
from autotune.scoring.estimates import estimate
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome, RankReport

NOISES, DRIFT, WITHIN = (0.025, 0.1), 0.005, 0.01
TRIALS, SAME_TRIALS, STEPS = 30, 16, 24
SAME_S = 0.01


class Machine(Instant):
    """A machine whose step times are known; its trials have noise and drift."""

    def __init__(self, seconds: Any, noise: float, seed: int, world_size: int = 1) -> None:
        super().__init__(self._run)
        self._world_size = world_size
        self._seconds, self._noise, self._rng, self._state = seconds, noise, np.random.default_rng((seed, 3)), 0.0

    def _run(self, candidate: Candidate) -> RankReport:
        found = self._seconds(candidate)
        if found is None:
            return failed(Outcome.OOM, "over the limit")
        seconds, size = found
        self._state += self._rng.normal(0, DRIFT)
        step_s = seconds * math.exp(self._state + self._rng.normal(0, self._noise))
        times = list(step_s * np.exp(self._rng.normal(0, WITHIN, STEPS)))
        whole = report(candidate, step_times_s=times, cpu_times_s=times, peak_memory_bytes={"steady": int(size)})
        assert whole.observed is not None
        batch = candidate.global_batch_size(self._world_size)
        return replace(whole, observed=replace(whole.observed, samples_per_step=batch))


def planned(world: World) -> dict[str, Any]:
    """What the plan of a study on that machine differs in."""
    workload = replace(WORKLOAD, profile=world.profile, machine=world.nominal, n_parameters=world.profile.n_parameters,
                       n_trainable=world.profile.n_trainable, n_blocks=world.profile.n_blocks)  # fmt: skip
    found: dict[str, Any] = {"workload": workload, "space": world.space, "full_space": world.space}
    # With accumulation in 16 bits each number of micro-steps is other numerics, which a simulation cannot check.
    found["base_config"] = {"data_types": {"grad_accum_dtype": "fp32"}}
    return found | {"setting": world.setting, "baseline": world.default, "world_size": world.setting.world_size}


def on_machine(table: Table, noise: float, seed: int) -> dict[str, float]:
    """One study of a machine: the shares of the best throughput, and whether the winner's interval holds the truth."""
    world = table.world

    def seconds(candidate: Candidate) -> tuple[float, float] | None:
        if candidate not in table.row:  # a check's reference
            found = world.truth([candidate])
            return float(found[0][0]), float(found[1][0])
        row = table.row[candidate]
        return (table.seconds[row], table.sizes[row]) if table.fits[row] else None

    def rate(candidate: Candidate) -> float:
        row = table.row[candidate]
        return float(table.batch[row] / table.seconds[row]) if table.fits[row] else 0.0

    found, runner = study(
        Machine(seconds, noise, seed, world.setting.world_size), sampler="physics", trials=TRIALS, finalists=3, repeats=2, stop_below=0.0,
        objectives=["throughput"], seed=seed, planned=planned(world), device_memory_bytes=int(world.limit),
    )  # fmt: skip
    pick = found.picks["recommended"]
    tried = max(rate(m.candidate) for m in runner)
    true = rate(pick.measured.candidate) / rate(world.default)
    _, low, high = pick.estimates.speedup(pick.measured) or (1.0, 0.0, math.inf)
    return {
        "of_best": rate(pick.measured.candidate) / float((table.batch / table.seconds)[table.fits].max()),
        "of_tried": rate(pick.measured.candidate) / tried,
        "held": float(low <= true <= high),
        "width": math.log(high / low) if low else math.inf,
        "baseline": float(pick.measured.trial == 0),
        "rounds": float(max(len(m.repeats) for m in runner)),
    }


def study(machine: Machine, planned: dict[str, Any], **given: Any) -> tuple[recommend.Recommendation, Sequence[Any]]:
    """A whole study: what it recommends, and its trials."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = runner_of(Path(folder), machine, planned=planned, stop_trials=False, **given)
        runner.run()
        measured = runner.state.measured()
    return recommend.recommend(estimate(measured), runner.state.objectives, runner.state.plan.data_parallel), measured


def machines(seeds: Sequence[int], noises: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for noise in noises:
        runs = []
        for seed in seeds:
            for world in worlds(names):
                table = Table(redrawn(world, seed))
                if not table.fits[table.row[world.default]]:  # there is nothing to compare with
                    continue
                runs.append(on_machine(table, noise, seed))
                print(noise, world.name, seed, {k: round(v, 3) for k, v in runs[-1].items()}, flush=True)
        columns = {name: np.array([run[name] for run in runs]) for name in runs[0]}
        row = {name: round(float(column.mean()), 4) for name, column in columns.items()}
        tenth = {f"{name}_p10": round(float(np.quantile(columns[name], 0.1)), 4) for name in ("of_best", "of_tried")}
        found[f"{noise:.1%}"] = {"runs": len(runs), **row, **tenth}
    return found


def same(n: int, noises: Sequence[float]) -> dict[str, Any]:
    found = {}
    for noise in noises:
        changed, rounds = 0, []
        for seed in range(n):
            machine = Machine(lambda c: (SAME_S * c.global_batch_size(1), 1e8), noise, 500 + seed)
            result, measured = study(
                machine, {}, sampler="random", trials=SAME_TRIALS, finalists=3, repeats=2, seed=seed,
                objectives=["throughput"],
            )  # fmt: skip
            changed += result.picks["recommended"].measured.trial != 0
            rounds.append(max(len(m.repeats) for m in measured))
        found[f"{noise:.1%}"] = {
            "studies": n,
            "changes_recommended": changed,
            "rounds": round(float(np.mean(rounds)), 2),
        }
        print(noise, found[f"{noise:.1%}"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["machines", "same"], help="machines, same")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--studies", type=int, default=50)
    parser.add_argument("--noise", type=float, nargs="*", default=list(NOISES))
    parser.add_argument("--worlds", nargs="*", default=list(KINDS), help="only these")
    parser.add_argument("--merge", action="store_true", help="keep what earlier runs found of other parts and noises")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kept = common.RESULTS / "estimates.json"
    earlier = json.loads(kept.read_text()) if arguments.merge and kept.exists() else {}
    figures: dict[str, Any] = {"trials": TRIALS, "drift": DRIFT}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    found = {
        "machines": lambda: machines(seeds, arguments.noise, arguments.worlds),
        "same": lambda: same(arguments.studies, arguments.noise),
    }
    for part, measure in found.items():
        figures[part] = earlier.get(part, {}) | (measure() if part in arguments.parts else {})
    if arguments.dry:
        print(figures)
    else:
        common.write("estimates", figures)


if __name__ == "__main__":
    main()
