"""Every sampler on nine simulated machines: hypervolume, regret and out-of-memory trials against the number of trials.

The machines are those of `simulator.py`, with constants drawn anew for each seed. What is shown is how fast a sampler
finds the front of such a table, not that any machine is like it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
import optuna
from search_known import rows_of_study
from simulator import DIRECTIONS, KINDS, METRICS, NOISES, Noise, Table, World, measure, micro_steps, redrawn, worlds
from support.priors import flat

from autotune.forecast.features import PriorPrediction
from autotune.forecast.predictor import AnalyticPrior
from autotune.search.observation import MEASURED_ATTR
from autotune.search.physics import PhysicsSampler
from autotune.search.samplers import LegalSampler
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.trial.profile import Machine, Profile

CHECKED = (10, 20, 30)
PRIORS = ("physics", "physics, guessed workload", "physics, wrong prior", "physics, no prior")
# A search that knows the formulas of the simulator; see `search_known.py`.
KNOWN = "formulas known"
# Single objectives are found where the best trial so far is at most this far behind.
NEAR = 0.02


def prior_of(kind: str, world: World, seed: int) -> Callable[[Sequence[Candidate]], PriorPrediction]:
    analytic = AnalyticPrior(world.profile, world.nominal)
    if kind == "physics, no prior":
        return flat
    if kind == "physics, guessed workload":
        profile = Profile.guess(world.profile.n_parameters, world.profile.n_trainable, world.profile.n_blocks)
        return AnalyticPrior(profile, Machine.guess(world.setting.accelerator, world.setting.world_size))
    if kind == "physics, wrong prior":
        rng = np.random.default_rng((seed, 7))
        offsets: dict[tuple[str, str], float] = {}

        def wrong(candidates: Sequence[Candidate]) -> PriorPrediction:
            said = analytic(candidates)
            factors = []
            for c in candidates:
                total = 0.0
                for name, value in c.values().items():
                    if name not in ("micro_batch_size", "gradient_accumulation_steps"):
                        total += offsets.setdefault((name, repr(value)), float(rng.normal(0, 0.4)))
                factors.append(math.exp(total))
            return replace(said, time_terms=said.time_terms * np.array(factors)[:, None])

        return wrong
    return analytic


def keep_result(study: optuna.Study, trial: optuna.Trial, result: dict[str, Any]) -> None:
    study._storage.set_trial_system_attr(trial._trial_id, MEASURED_ATTR, json.dumps(result))


def run(table: Table, kind: str, seed: int, n_trials: int, noise: Noise) -> dict[str, Any]:
    """One study; what is measured has noise, what is counted is the truth."""
    world = table.world
    if kind in PRIORS:
        sampler: Any = PhysicsSampler(
            world.space,
            world.default,
            world.setting,
            seed,
            prior=prior_of(kind, world, seed),
            metrics=METRICS,
            memory_limit_bytes=world.limit,
        )  # fmt: skip
    else:
        sampler = LegalSampler(kind, world.space, world.default, world.setting, seed)
    rng = np.random.default_rng((seed, 11))
    study = optuna.create_study(directions=DIRECTIONS, sampler=sampler)
    sampler.force(world.default)
    rows: list[int] = []
    oom, curve, ask_s = [], {}, []
    for n in range(n_trials):
        start = time.perf_counter()
        trial = study.ask()
        # The first is forced; suggesting it too puts its parameters into the study, without which nsga2 and gp stay
        # random.
        values = world.space.suggest(lambda parameter, trial=trial: parameter.suggest(trial), world.default)
        candidate = world.space.candidate(values, world.default)
        ask_s.append(time.perf_counter() - start)  # Optuna asks its sampler with the first suggestion
        row = table.row[candidate]
        trial.set_user_attr(CANDIDATE_ATTR, candidate.key)
        fits = bool(table.fits[row])
        trial.set_constraint("completed", 0.0 if fits else 1.0)
        oom.append(not fits)
        if fits:
            rows.append(row)
            metrics = measure(table, row, rng, noise)
            told = {"outcome": "complete", "metrics": metrics, "micro_step_s": micro_steps(table, row, rng, noise)}
            keep_result(study, trial, told)
            study.tell(trial, [metrics[name] for name in METRICS])
        else:
            keep_result(study, trial, {"outcome": "oom", "metrics": {}})
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        if n + 1 in CHECKED:
            curve[n + 1] = {**found_by(table, rows), "oom": int(sum(oom))}
    return {"curve": curve, "ask_s": float(np.median(ask_s[1:])) if len(ask_s) > 1 else 0.0}


def run_known(table: Table, seed: int, n_trials: int, noise: Noise) -> dict[str, Any]:
    """The same by a search that knows the formulas."""
    rows = rows_of_study(table, seed, n_trials, noise)
    return {"curve": {n: {**found_by(table, rows[:n]), "oom": 0} for n in CHECKED if n <= n_trials}, "ask_s": 0.0}


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
    """Studies of one sampler on machines that are drawn anew for each seed; where the baseline does not fit, there is none."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for world in worlds(names):
        for seed in seeds:
            table = Table(redrawn(world, seed))
            if table.fits[table.row[world.default]]:
                one = (
                    run_known(table, seed, n_trials, noise)
                    if kind == KNOWN
                    else run(table, kind, seed, n_trials, noise)
                )
                runs.setdefault(world.name, []).append(one)
    every = [r for some in runs.values() for r in some]
    return {"overall": summary(every), **{name: summary(some) for name, some in runs.items()}}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over runs, and shares of them."""
    found: dict[str, Any] = {"runs": len(runs), "ask_s": float(np.median([r["ask_s"] for r in runs]))}
    for n in runs[0]["curve"]:
        columns = {key: np.array([r["curve"][n][key] for r in runs]) for key in runs[0]["curve"][n]}
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
    both = f"{row['latency_and_throughput_near']:.0%} / {row['throughput_and_time_to_loss_near']:.0%}"
    end = found[last]
    return (
        f"{label:<28}{found['runs']:>5}{shares:>20}{end['hypervolume_p10']:>7.2f}{both:>16}"
        f"{end['throughput_regret']:>9.1%}{end['time_to_loss_regret']:>9.1%}{end['oom_mean']:>6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--gp-seeds", type=int, default=1, help="GPSampler takes about a second a trial")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--worlds", nargs="*", default=list(KINDS), help="only these")
    parser.add_argument("--noise", nargs="*", choices=[noise.name for noise in NOISES], help="only these")
    parser.add_argument("--only", nargs="*", default=["random", "grid", "nsga2", "tpe", *PRIORS, KNOWN, "gp"])
    parser.add_argument("--merge", action="store_true", help="keep what other samplers reached in an earlier run")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    kept = common.RESULTS / "search_simulated.json"
    results: dict[str, Any] = json.loads(kept.read_text())["noises"] if arguments.merge and kept.exists() else {}
    print(f"{'':28}{'runs':>5}{'share @10/20/30':>20}{'p10':>7}{'within 2 % @20':>16}{'regrets @30':>18}{'OOM':>6}")
    for noise in NOISES:
        for kind in arguments.only if not arguments.noise or noise.name in arguments.noise else ():
            n_seeds = arguments.gp_seeds if kind == "gp" else 1 if kind == "grid" else arguments.seeds
            seeds = range(arguments.first_seed, arguments.first_seed + n_seeds)
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
