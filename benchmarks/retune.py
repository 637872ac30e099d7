"""Re-tuning on simulated machines: what it finds in a fifth of a cold search's trials, and how seldom it is wrong.

`warm`: six kinds of change on three machines of `simulator.py`. The re-tuning's search is told what a study
of 30 trials found before the change, is held to the knobs that the change touches, and gets 6 trials; a cold search of
the changed machine gets 30. Compared is the true compromise of what each recommends. `moved`: whole re-tunings of one
study whose trials scatter by 1 % and share a drift of 5 %; nothing changed, or the configuration in use is 5 % slower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
from simulator import METRICS, ZERO, Costs, Table, World, tried, worlds
from support.instant import Instant, Watcher, plan_of, recorded, report, spec_of

from autotune.forecast.predictor import AnalyticPrior
from autotune.report import files, load
from autotune.retune.decision import RetuneVerdict
from autotune.retune.retuning import RetuneRequest, Retuning
from autotune.scoring import pareto
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.search.transfer import Transferred
from autotune.session import open_study
from autotune.space.candidate import Candidate
from autotune.study.fingerprint import PARTS, narrowed
from autotune.study.storage import records
from autotune.trial.profile import Profile
from autotune.trial.result import Outcome

COLD_TRIALS, SHARE = 30, 0.2
MACHINES = ("compute", "communication", "memory")
COUNTS = ("unchanged_replaced", "unchanged_searched", "regression_found", "regression_left", "regression_replaced")


@dataclass(frozen=True)
class Moved(World):
    """A world in which some values of knobs cost more or less than they did: another version of a library."""

    factors: dict[tuple[str, Any], float] = field(default_factory=dict)

    def truth(self, candidates: Sequence[Candidate]) -> Costs:
        seconds, sizes, inner, boundary = super().truth(candidates)
        factor = np.array(
            [np.prod([self.factors.get((name, value), 1.0) for name, value in c.values().items()]) for c in candidates]
        )
        return Costs(seconds * factor, sizes, inner * factor, boundary * factor)


def sequence(world: World) -> World:
    p = world.profile
    longer = Profile.guess(p.n_parameters, p.n_trainable, p.n_blocks, 2 * p.sequence)
    return replace(world, profile=replace(longer, guessed=False))


def width(world: World) -> World:
    p = world.profile
    n = int(1.5 * p.n_parameters)
    return replace(world, profile=replace(Profile.guess(n, n, p.n_blocks, p.sequence), guessed=False))


def ranks(world: World) -> World:
    n = 2 * world.setting.world_size
    setting = replace(world.setting, world_size=n, ranks_per_node=n)
    return replace(world, setting=setting, nominal=replace(world.nominal, world_size=n))


def memory(world: World) -> World:
    return replace(world, limit=0.6 * world.limit)


def version(world: World) -> World:
    stages = {("zero_stage", 1): 1.03, ("zero_stage", 2): 1.15, ("zero_stage", 3): 0.9}
    return Moved(**vars(world), factors=stages | {(ZERO + "overlap_comm", True): 1.1})


def fp32(world: World) -> World:
    return replace(world, default=replace(world.default, precision="fp32"))


def without_bf16(world: World) -> World:
    return fp32(replace(world, setting=replace(world.setting, bf16=False)))


def same(world: World) -> World:
    return world


# What changes, from what to what, and which part of a fingerprint says so.
CHANGES: dict[str, tuple[str, Callable[[World], World], Callable[[World], World]]] = {
    "sequence length": ("lengths", same, sequence),
    "ranks": ("ranks", same, ranks),
    "memory limit": ("memory limit", same, memory),
    "model width": ("parameters", same, width),
    "precision support": ("bf16", without_bf16, fp32),
    "DeepSpeed version": ("deepspeed", same, version),
}


def guide_of(world: World, prior: Any, candidates: Sequence[Candidate]) -> CandidateOptimizer:
    return CandidateOptimizer(
        candidates, prior, METRICS, world_size=world.setting.world_size, memory_limit_bytes=world.limit, reference=world.default,
        knobs={p.name: list(p.all_values()) for p in world.space.parameters},
    )  # fmt: skip


def search(
    table: Table, guide: CandidateOptimizer, first: Sequence[Candidate], n: int, rng: np.random.Generator
) -> list[Observation]:
    told = [tried(table, candidate, rng) for candidate in first]
    while len(told) < n:
        proposed = guide.suggest(told)
        if proposed is None:
            break
        told.append(tried(table, proposed, rng))
    return told


def cost(table: Table, candidate: Candidate) -> float:
    """The compromise of all objectives, in truth: less is better."""
    row = table.row[candidate]
    return float(table.costs[row].mean()) if table.fits[row] else np.inf


def best(table: Table, told: Sequence[Observation]) -> Candidate:
    """What is recommended: the best compromise of what completed, measured again until the noise is gone."""
    return min((t.candidate for t in told if t.outcome is Outcome.COMPLETE), key=lambda c: cost(table, c))


def good(table: Table, told: Sequence[Observation]) -> list[Candidate]:
    """The old front."""
    done = [t.candidate for t in told if t.outcome is Outcome.COMPLETE]
    costs = np.array([table.costs[table.row[c]] for c in done])
    return sorted((done[n] for n in pareto.front(-costs)), key=lambda c: cost(table, c))


def one(world: World, change: str, seed: int, tables: dict[Any, tuple[Table, Table]]) -> dict[str, float]:
    part, before, after = CHANGES[change]
    old, new = before(world), after(world)
    if (world.name, change) not in tables:
        tables[world.name, change] = Table(old), Table(new)
    was, now = tables[world.name, change]
    rng = np.random.default_rng((seed, 5))
    earlier_guide, guide = (
        guide_of(w, AnalyticPrior(w.profile, w.nominal), t.candidates) for w, t in ((old, was), (new, now))
    )
    earlier = search(was, earlier_guide, [old.default], COLD_TRIALS, rng)
    cold = search(now, guide, [new.default], COLD_TRIALS, rng)
    incumbent, front = best(was, earlier), good(was, earlier)
    touches = PARTS[part].touches
    space = narrowed(world.space, None if "" in touches else touches, [c.values() for c in [*front, new.default]])
    pool = [c for c in space.candidates(new.default) if c in now.row]
    scale = new.setting.world_size / old.setting.world_size
    prior = Transferred(AnalyticPrior(new.profile, new.nominal), earlier_guide, earlier, scale=scale)
    n = round(SHARE * COLD_TRIALS)
    first = list(dict.fromkeys([new.default, *(c for c in [incumbent] if c in now.row)]))
    guide = guide_of(new, prior, pool)
    guide.goal_only = True
    warm = search(now, guide, first, n, rng)
    cold_cost, warm_cost, kept_cost = (cost(now, best(now, told)) for told in (cold, warm, warm[: len(first)]))
    return {
        "regret": float(np.expm1(warm_cost - cold_cost)), "without": float(np.expm1(min(kept_cost, 9.0) - cold_cost)),
        "oom": float(sum(t.outcome is Outcome.OOM for t in warm)), "pool": float(len(pool)),
    }  # fmt: skip


def warm(seeds: Sequence[int], changes: Sequence[str]) -> dict[str, Any]:
    tables: dict[Any, tuple[Table, Table]] = {}
    found = {}
    for change in changes:
        runs = [one(world, change, seed, tables) for world in worlds(MACHINES) for seed in seeds]
        regrets = np.array([run["regret"] for run in runs])
        found[change] = {
            "runs": len(runs), "median_regret": float(np.median(regrets)),
            "p90_regret": float(np.quantile(regrets, 0.9)),
            "within_2_percent": float((regrets <= 0.02).mean()),
            "median_regret_of_staying": float(np.median([run["without"] for run in runs])),
            "oom_trials": float(np.mean([run["oom"] for run in runs])), "candidates": float(np.mean([run["pool"] for run in runs])),
        }  # fmt: skip
        print(change, {name: round(value, 4) for name, value in found[change].items()}, file=sys.stderr, flush=True)
    return {"cold_trials": COLD_TRIALS, "warm_trials": round(SHARE * COLD_TRIALS), "changes": found}


STUDY = {"trials": 32, "objectives": ["throughput"], "repeats": 2, "stop_trials": False}


class Noisy(Instant):
    """Trials that scatter by 1 %, on a machine that drifts by 5 % from one to the next few."""

    def __init__(self, seed: int, slower: Callable[[Candidate], float] = lambda _: 1.0) -> None:
        super().__init__(self.scattered)
        self.rng, self.drift, self.slower = np.random.default_rng(seed), 0.0, slower

    def scattered(self, candidate: Candidate) -> Any:
        self.drift = 0.9 * self.drift + float(self.rng.normal(0, 0.05 * (1 - 0.9**2) ** 0.5))
        found = report(candidate)
        factor = float(np.exp(self.rng.normal(0, 0.01) + self.drift)) * self.slower(candidate)
        return replace(found, step_times_s=[each * factor for each in found.step_times_s])


def moved(n: int) -> dict[str, Any]:
    counts, rounds = Counter[str](), []
    for seed in range(n):
        if seed and seed % 10 == 0:
            print(seed, counts, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recorded(folder, Noisy(seed), sampler="grid", seed=seed, **STUDY).run()
            url = records.default_url(folder)
            first = load.load("s", url, folder / "s")
            list(files.write_answer(first, folder / "s"))
            plan = plan_of(spec_of(**STUDY))

            def again(executor: Noisy, folder: Path = folder, url: str = url, plan: Any = plan) -> Any:
                run = Retuning(open_study("s", url, folder), RetuneRequest(), Watcher())
                run.begin()
                return run.run(plan, executor)

            decision = again(Noisy(1000 + seed))
            counts["unchanged_replaced"] += decision.verdict is RetuneVerdict.IMPROVED
            counts["unchanged_searched"] += decision.n_trials > 0
            rounds.append(decision.standing.n_rounds)
            if decision.verdict is RetuneVerdict.IMPROVED:
                continue
            incumbent = Candidate.of(first.picks["recommended"]["candidate"])
            slower = lambda c, used=incumbent.precision: 1.05 if c.precision == used else 1.0  # noqa: E731
            decision = again(Noisy(2000 + seed, slower))
            counts["regression_found"] += decision.standing.moved
            counts["regression_left"] += not decision.standing.moved
            counts["regression_replaced"] += decision.verdict is RetuneVerdict.IMPROVED
    return {"retunings": n, **{name: counts[name] for name in COUNTS}, "mean_rounds": float(np.mean(rounds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "warm", "moved"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--retunings", type=int, default=100)
    parser.add_argument("--changes", nargs="*", default=list(CHANGES))
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    first, found = arguments.first_seed, dict[str, Any]()
    if arguments.what != "moved":
        found["warm"] = warm(range(first, first + arguments.seeds), arguments.changes)
    if arguments.what != "warm":
        found["moved"] = moved(arguments.retunings)
    kept = common.RESULTS / "retune.json"
    if kept.exists():  # the other half, from another run
        found = {name: value for name, value in json.loads(kept.read_text()).items() if name != "measured_on"} | found
    if arguments.dry:
        print(json.dumps(found, indent=1))
    else:
        common.write("retune", found)


if __name__ == "__main__":
    main()
