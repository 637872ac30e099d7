"""Studies on simulated machines under the stopping rule: when they end, and how far behind the best their answer is.

The machines are those of `simulator.py` with constants drawn anew for each seed. Finalists are measured again and
the answer is picked as in a study, from all measurements together. `--quick` takes the studies that `autotune run --quick` makes.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
from simulator import KINDS, METRICS, NOISES, Noise, Table, measure, micro_steps, redrawn, worlds

from autotune.forecast.predictor import AnalyticPrior
from autotune.scoring import racing, recommend
from autotune.scoring.estimates import estimate
from autotune.scoring.measured import Measured
from autotune.scoring.objective import Objective
from autotune.search import stopping
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.space.candidate import Candidate
from autotune.study import finalists
from autotune.study.spec import spec
from autotune.trial.result import Outcome

GOALS = {"balanced": METRICS, "throughput": ["samples_per_s"]}


@dataclass(frozen=True)
class Kind:
    """A kind of study.

    Attributes:
        trials: The most.
        stop_below: Expected gain below which it ends (share).
        finalists: How many are measured again.
        rounds: How often each of them is, at least and at most.
        settled: The race of the finalists ends below this expected loss.
    """

    trials: int
    stop_below: float
    finalists: int
    rounds: tuple[int, int]
    settled: float = racing.SETTLED


FULL = Kind(trials=30, stop_below=0.01, finalists=3, rounds=(2, 8))
QUICK = Kind(
    trials=int(spec.QUICK["trials"]), stop_below=spec.QUICK["stop_below"], finalists=int(spec.QUICK["finalists"]),
    rounds=(0, finalists.UNSTATED_ROUNDS), settled=math.inf,
)  # fmt: skip


def study_until_settled(table: Table, seed: int, metrics: Sequence[str], kind: Kind, noise: Noise) -> dict[str, Any]:
    """One study under the stopping rule: its trials, whether it ended by itself, the regret of its answer and of its best trial."""
    world, rng = table.world, np.random.default_rng((seed, 11))
    guide = CandidateOptimizer(
        table.candidates, AnalyticPrior(world.profile, world.nominal), metrics,
        world_size=world.setting.world_size, memory_limit_bytes=world.limit, reference=world.default,
    )  # fmt: skip
    guide.quick = kind is QUICK
    told: list[Observation] = []
    ended = False
    while len(told) < kind.trials and not ended:
        candidate = guide.suggest(told) if told else world.default
        if candidate is None:
            break
        row = table.row[candidate]
        if table.fits[row]:
            timed = micro_steps(table, row, rng, noise)
            found = measure(table, row, rng, noise)
            told.append(
                Observation(
                    candidate=candidate, metrics=found, inner_s=timed.get("inner"), boundary_s=timed.get("boundary")
                )
            )
        else:
            told.append(Observation(candidate=candidate, outcome=Outcome.OOM))
        ended = stopping.settled(guide, told, [], kind.stop_below) is not None
    goal = table.costs[:, [METRICS.index(name) for name in metrics]].mean(axis=1)
    trials = analysed(guide, told)
    answer, best = confirmed(table, trials, metrics, kind, rng, noise, unforeseen=not ended), goal[table.fits].min()
    tried = min(goal[table.row[m.candidate]] for m in trials)
    return {
        "trials": len(told), "ended": ended, "regret": math.expm1(goal[table.row[answer]] - best),
        "regret_of_tried": math.expm1(tried - best), "regret_of_baseline": math.expm1(goal[table.row[world.default]] - best),
    }  # fmt: skip


def analysed(guide: CandidateOptimizer, told: Sequence[Observation]) -> list[Measured]:
    """The trials that completed as the analysis sees them, with what all others foretell of each."""
    return [
        Measured(
            trial=number, candidate=t.candidate, ds_config={}, outcome=t.outcome, metrics=t.metrics, ci95={}, forecast=forecast
        )
        for number, (t, forecast) in enumerate(zip(told, guide.foretold(told), strict=True))
        if t.outcome is Outcome.COMPLETE
    ]  # fmt: skip


def confirmed(
    table: Table, trials: Sequence[Measured], metrics: Sequence[str], kind: Kind, rng: np.random.Generator, noise: Noise,
    *, unforeseen: bool,
) -> Candidate:  # fmt: skip
    """What a study recommends after its finalists were measured again, as `study.finalists` does."""
    objectives = [Objective(name=metric, metric=metric) for metric in metrics]
    n_ranks, now = table.world.setting.world_size, list(trials)
    found = [m.trial for m in recommend.finalists(estimate(now), objectives, kind.finalists, n_ranks)]
    for number in range(1, kind.rounds[1] + 2):
        turn = racing.next_round(
            estimate(now), objectives, found, n_ranks, kind.finalists, tried={m.trial: len(m.repeats) for m in now},
            rounds=racing.Rounds(least=kind.rounds[0], most=kind.rounds[1], below=kind.settled, unforeseen=unforeseen),
        )  # fmt: skip
        if not turn:
            break
        again = {m.trial for m in turn} | {0}
        for n, m in enumerate(now):
            if m.trial in again:
                values = measure(table, table.row[m.candidate], rng, noise)
                now[n] = replace(m, repeats={**m.repeats, number: values})
    return recommend.recommend(estimate(now), objectives, n_ranks).picks["recommended"].measured.candidate


def figures(seeds: Sequence[int], kind: Kind, noise: Noise, names: Sequence[str]) -> dict[str, Any]:
    """Studies of both goals on machines that are drawn anew for each seed; where the baseline does not fit, there is none."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for world in worlds(names):
        for seed in seeds:
            table = Table(redrawn(world, seed))
            if not table.fits[table.row[world.default]]:
                continue
            for goal, metrics in GOALS.items():
                runs.setdefault(goal, []).append(study_until_settled(table, seed, metrics, kind, noise))
                print(world.name, seed, goal, runs[goal][-1], flush=True)
    every = [run for some in runs.values() for run in some]
    return {
        "noise": noise.name, "trials": kind.trials, "stop_below": kind.stop_below, "seeds": [min(seeds), max(seeds)],
        "overall": ends_of(every), **{goal: ends_of(some) for goal, some in runs.items()},
    }  # fmt: skip


def ends_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How studies ended: of those that ended by themselves, and of those that ran all trials, regret of the answer."""
    found: dict[str, Any] = {
        "studies": len(runs), "trials_mean": round(float(np.mean([run["trials"] for run in runs])), 1),
        **{
            f"{name}_median_and_worst_tenth": np.quantile([run[name] for run in runs], (0.5, 0.9)).round(4).tolist()
            for name in ("regret", "regret_of_baseline")
        },
    }  # fmt: skip
    for name, ended in (("ended", True), ("ran_all", False)):
        some = [run for run in runs if run["ended"] is ended]
        found[name] = {"studies": len(some)}
        if some:
            regrets = [run["regret"] for run in some]
            found[name] |= {
                "trials_mean": round(float(np.mean([run["trials"] for run in some])), 1),
                "regret_mean": round(float(np.mean(regrets)), 4), "regret_worst": round(max(regrets), 4),
                "within_1_percent": round(float(np.mean([regret <= 0.01 for regret in regrets])), 4),
                "tried_within_1_percent": round(float(np.mean([run["regret_of_tried"] <= 0.01 for run in some])), 4),
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="studies as those of `autotune run --quick`")
    parser.add_argument("--worlds", nargs="*", default=list(KINDS), help="only these")
    parser.add_argument("--noise", choices=[noise.name for noise in NOISES], default=NOISES[0].name)
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    noise = next(noise for noise in NOISES if noise.name == arguments.noise)
    found = figures(seeds, QUICK if arguments.quick else FULL, noise, arguments.worlds)
    print(found) if arguments.dry else common.write("quick" if arguments.quick else "stopping", found)


if __name__ == "__main__":
    main()
