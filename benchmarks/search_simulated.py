"""Every sampler on simulated machines: hypervolume, regret and out-of-memory trials against the number of trials.

The truth is a simulator whose formulas differ from those of `autotune.forecast`: a saturation curve with steps,
overlap as a power mean, a slow-down near the memory limit, and a random offset of each level. What is shown is how fast
a sampler finds the front of such a table, not that any machine is like it.
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
from dataclasses import dataclass, replace
from typing import Any

from autotune.space.legality import why_illegal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
import optuna

from autotune.forecast.features import PriorPrediction, flat
from autotune.forecast.predictor import AnalyticPrior
from autotune.search.acquisition import dominated
from autotune.search.physics import PhysicsSampler
from autotune.search.samplers import LegalSampler
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.trial.profile import Machine, Profile

METRICS = ["step_time_s", "samples_per_s", "time_to_loss_s"]
DIRECTIONS = ["minimize", "maximize", "minimize"]
CHECKED = (10, 20, 30)
NOISE, MICRO_NOISE = 0.025, 0.02
PRIORS = ("physics", "physics, guessed workload", "physics, wrong prior", "physics, no prior")
ZERO = "zero_optimization."
# Where a study would have ended by itself; it goes on here all the same.
STOP_BELOW = 0.01


@dataclass(frozen=True)
class World:
    """One simulated place to train: what it is, and what a profile of it would say."""

    name: str
    space: SearchSpace
    setting: Setting
    default: Candidate
    profile: Profile
    nominal: Machine
    limit: float
    noise_scale: float
    seed: int

    def truth(self, candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a step, bytes, and times of an inner and a boundary micro-step, of each candidate."""
        rng = np.random.default_rng(self.seed)
        m, p, N = self.nominal, self.profile, self.nominal.world_size
        off = {
            name: float(np.exp(rng.normal(0, 0.35)))
            for name in ("flops", "link", "alpha", "memory", "launch", "host", "activations")
        }
        levels: dict[tuple[str, str], float] = {}
        for parameter in self.space.parameters:
            if len(parameter.all_values()) <= 5 and "batch" not in parameter.name:
                levels |= {(parameter.name, repr(v)): float(rng.normal(0, 0.06)) for v in parameter.all_values()}
        rows = [self._one(c, m, p, N, off, levels) for c in candidates]
        steps, sizes, inner, boundary = (np.array(column) for column in zip(*rows, strict=True))
        return steps, sizes, inner, boundary

    def _one(
        self, c: Candidate, m: Machine, p: Profile, N: int, off: dict[str, float], levels: dict[tuple[str, str], float]
    ) -> Any:
        values = c.values()
        b, K, stage, half = (
            c.micro_batch_size,
            c.gradient_accumulation_steps,
            c.zero_stage,
            c.precision in ("bf16", "fp16"),
        )
        w = 2 if half else 4
        every = c.checkpoint_every
        share = math.ceil(p.n_blocks / every) / p.n_blocks if every else 0.0
        # Samples are computed in tiles of four: 5 cost as much as 8.
        tiles = 4 * math.ceil(b / 4) if b > 4 else b
        rate = m.flops.get(c.precision, m.flops["fp32"]) * off["flops"]
        launch = m.launch_s * off["launch"] * p.n_blocks
        forward = p.flops_per_sample / 3 * (0.7 * b + 0.3 * tiles + 0.6) / rate + launch / 3
        backward = 2 * forward + share * 0.85 * forward
        bucket = values.get(ZERO + "reduce_bucket_size") or 5e8
        calls = max(1.0, p.n_trainable / float(bucket))  # type: ignore[arg-type]
        reduce_s = (
            (1 if stage in (1, 2, 3) else 2) * (N - 1) / N * p.n_trainable * w / (m.link_bytes_per_s * off["link"])
        )
        reduce_s += calls * 2 * N * m.link_alpha_s * off["alpha"] if N > 1 else 0.0
        gather_s = (N - 1) / N * p.n_parameters * w / (m.link_bytes_per_s * off["link"])
        gather_s += p.n_blocks * N * m.link_alpha_s * off["alpha"] if N > 1 else 0.0
        overlap = values.get(ZERO + "overlap_comm")
        overlap = (stage == 3) if overlap is None else overlap
        if stage == 3:
            forward = (forward**3 + gather_s**3) ** (1 / 3) + 0.15 * gather_s
            backward = (backward**3 + gather_s**3) ** (1 / 3) + 0.15 * gather_s
        gamma = 2.5 if overlap else 1.0

        def joined(compute: float, sync: float) -> float:
            return float((compute**gamma + sync**gamma) ** (1 / gamma))

        inner = forward + (joined(backward, reduce_s) if stage >= 2 else backward)
        host = c.offload_optimizer != "none"
        shard = p.n_trainable / (N if stage else 1)
        optimizer = 30 * shard / ((m.host_memory_bytes_per_s if host else m.memory_bytes_per_s) * off["memory"])
        optimizer += 2 * w * shard / (m.host_bytes_per_s * off["host"]) if host else 0.0
        boundary = forward + joined(backward, reduce_s) + optimizer + (gather_s if stage in (1, 2) else 0.0)
        offset = math.exp(sum(levels.get((name, repr(value)), 0.0) for name, value in values.items()))
        states = w * p.n_parameters / (N if stage == 3 else 1) + w * p.n_trainable / (N if stage >= 2 else 1)
        states += 0.0 if host else (12 if half else 8) * shard
        kept = p.activation_bytes_per_sample * (1 - share) + p.checkpointed_bytes_per_sample * share
        size = (
            states
            + off["activations"] * b**0.97 * kept * (0.55 if half else 1.0)
            + w * min(float(bucket), 2.0 * p.n_trainable)
        )  # type: ignore[arg-type]
        size = size * 1.06 + 2e8
        over = max(0.0, size / self.limit - 0.88)
        slow = offset * (1 + 2.0 * over)
        return ((K - 1) * inner + boundary) * slow, size, inner * slow, boundary * slow


def worlds() -> list[World]:
    """Compute-bound, communication-bound, and limited by memory."""
    gpu = {"fp32": 6e13, "bf16": 3e14, "fp16": 3e14, "torch_autocast": 2e14}
    knobs: dict[str, Any] = {
        "micro_batch_size": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32],
        "gradient_accumulation_steps": [1, 2, 4, 8, 16],
        "zero_stage": [0, 1, 2, 3],
        "precision": ["fp32", "bf16", "torch_autocast"],
        "checkpoint_every": [0, 1, 2, 4],
        ZERO + "overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1, 2]}},
        ZERO + "reduce_bucket_size": {
            "range": [22, 28],
            "step": 3,
            "power_of_two": True,
            "when": {"zero_stage": [1, 2, 3]},
        },
        "offload_optimizer": {"choices": ["none", "cpu"], "when": {"zero_stage": [1, 2, 3]}},
    }
    space = SearchSpace.parse(knobs, "simulation")
    found = []
    for name, P, blocks, sequence, N, link, alpha, limit, scale, seed in (
        ("compute", 350_000_000, 24, 1024, 4, 2e11, 2e-5, 80e9, 128, 1),
        ("communication", 1_300_000_000, 24, 512, 16, 6e9, 8e-5, 80e9, 1024, 2),
        ("memory", 1_300_000_000, 24, 1024, 8, 1e11, 2e-5, 16e9, 256, 3),
    ):
        profile = replace(Profile.guess(P, P, blocks, sequence), guessed=False)
        machine = Machine(
            accelerator="cuda",
            world_size=N,
            flops=gpu,
            memory_bytes_per_s=2e12,
            link_alpha_s=alpha,
            link_bytes_per_s=link,
            launch_s=4e-4,
        )
        setting = Setting(accelerator="cuda", world_size=N, ranks_per_node=N, n_blocks=blocks, bf16=True, fp16=False)
        default = Candidate(
            micro_batch_size=1,
            gradient_accumulation_steps=4,
            zero_stage=2,
            precision="bf16",
            config=((ZERO + "reduce_bucket_size", 2**28),),
        )
        found.append(World(name, space, setting, default, profile, machine, limit, scale, seed))
    return found


class Table:
    """The truth of a world, every candidate of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.candidates = [c for c in world.space.candidates(world.default) if why_illegal(c, world.setting) is None]
        self.row = {c: n for n, c in enumerate(self.candidates)}
        self.seconds, self.sizes, self.inner, self.boundary = world.truth(self.candidates)
        batch = np.array([c.global_batch_size(world.setting.world_size) for c in self.candidates], dtype=float)
        # Samples to the target: E_min (1 + B / B_noise).
        self.samples, self.batch = 1e6 * (1 + batch / world.noise_scale), batch
        self.fits = self.sizes <= world.limit
        self.costs = np.log(np.column_stack([self.seconds, self.seconds / batch, self.seconds * self.samples / batch]))
        usable = self.costs[self.fits]
        front = usable[~_beaten(usable)]
        self.low, self.high = front.min(axis=0), front.max(axis=0)
        rng = np.random.default_rng(0)
        self.points = self.low + (self.high - self.low) * rng.random((20_000, 3))
        self.reachable = dominated(self.points, front)

    def share(self, costs: np.ndarray) -> float:
        """Share of the true front's hypervolume (logarithms, between its ideal and its nadir point) that is dominated."""
        if not len(costs):
            return 0.0
        return float(dominated(self.points[self.reachable], costs).mean())


def _beaten(costs: np.ndarray) -> np.ndarray:
    order = np.argsort(costs.sum(axis=1))
    kept: list[int] = []
    for row in order:
        if not kept or not (costs[kept] <= costs[row]).all(axis=1).any():
            kept.append(int(row))
    beaten = np.ones(len(costs), dtype=bool)
    beaten[kept] = False
    return beaten


def prior_of(kind: str, world: World, seed: int) -> Callable[[Sequence[Candidate]], PriorPrediction]:
    analytic = AnalyticPrior(world.profile, world.nominal)
    if kind == "physics, no prior":
        return flat
    if kind == "physics, guessed workload":
        profile = Profile.guess(world.profile.n_parameters, world.profile.n_trainable, world.profile.n_blocks)
        return AnalyticPrior(profile, Machine.guess("cuda", world.setting.world_size))
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


def run(table: Table, kind: str, seed: int, n_trials: int) -> dict[str, Any]:
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
    stop: dict[str, float] = {}
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
            metrics = measure(table, row, rng)
            told = {"outcome": "complete", "metrics": metrics, "micro_step_s": micro_steps(table, row, candidate, rng)}
            trial.set_user_attr("measured", json.dumps(told))
            study.tell(trial, [metrics[name] for name in METRICS])
        else:
            trial.set_user_attr("measured", json.dumps({"outcome": "oom", "metrics": {}}))
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        if kind in PRIORS and not stop and sampler.settled(study, STOP_BELOW):
            stop = {"trials": n + 1, "hypervolume": table.share(table.costs[rows])}
        if n + 1 in CHECKED:
            costs = table.costs[rows]
            best = table.costs[table.fits].min(axis=0)
            regret = np.expm1(costs.min(axis=0) - best) if rows else np.full(3, np.inf)
            curve[n + 1] = {
                "hypervolume": table.share(costs), "latency_regret": float(regret[0]), "throughput_regret": float(regret[1]),
                "time_to_loss_regret": float(regret[2]), "oom": int(sum(oom)),
            }  # fmt: skip
    return {"curve": curve, "ask_s": float(np.median(ask_s[1:])) if len(ask_s) > 1 else 0.0, "stop": stop}


def measure(table: Table, row: int, rng: np.random.Generator) -> dict[str, float]:
    """The metrics that a trial reads: the truth with noise."""
    seconds = float(table.seconds[row] * np.exp(rng.normal(0, NOISE)))
    to_loss = seconds * table.samples[row] / table.batch[row] * float(np.exp(rng.normal(0, 0.05)))
    metrics = dict(zip(METRICS, (seconds, table.batch[row] / seconds, to_loss), strict=True))
    return {**metrics, "peak_memory_bytes": float(table.sizes[row] * np.exp(rng.normal(0, 0.005)))}


def micro_steps(table: Table, row: int, candidate: Candidate, rng: np.random.Generator) -> dict[str, float]:
    """What a trial's clock shows of an inner and a boundary micro-step; without accumulation there is no inner one to be timed."""
    if candidate.gradient_accumulation_steps == 1 and candidate.zero_stage < 2:
        return {}
    noise = np.exp(rng.normal(0, MICRO_NOISE, 2))
    return {"inner": float(table.inner[row] * noise[0]), "boundary": float(table.boundary[row] * noise[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--gp-seeds", type=int, default=1, help="GPSampler takes about a second a trial")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--worlds", nargs="*", help="only these")
    parser.add_argument("--only", nargs="*", default=["random", "grid", "nsga2", "tpe", *PRIORS, "gp"])
    parser.add_argument("--merge", action="store_true", help="keep what other samplers reached in an earlier run")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    tables = [Table(world) for world in worlds() if not arguments.worlds or world.name in arguments.worlds]
    for table in tables:
        print(f"{table.world.name}: {len(table.candidates)} candidates, {table.fits.mean():.0%} fit")
    kept = common.RESULTS / "search_simulated.json"
    results: dict[str, Any] = json.loads(kept.read_text())["samplers"] if arguments.merge and kept.exists() else {}
    print(
        f"{'sampler':28}{'n':>4}{'hypervolume @10/20/30':>26}{'p10 @30':>9}{'throughput, time-to-loss regret @30':>38}{'OOM':>6}{'s':>6}"
    )
    for kind in arguments.only:
        seeds = arguments.gp_seeds if kind == "gp" else 1 if kind == "grid" else arguments.seeds
        start = time.perf_counter()
        runs = {
            table.world.name: [run(table, kind, seed, arguments.trials) for seed in range(seeds)] for table in tables
        }
        every = [r for some in runs.values() for r in some]
        results[kind] = {"overall": summary(every), **{name: summary(some) for name, some in runs.items()}}
        s = results[kind]["overall"]
        hv = " / ".join(f"{s[str(n)]['hypervolume']:.2f}" for n in CHECKED if str(n) in s)
        took_s = time.perf_counter() - start
        last = s[str(max(int(n) for n in s if n.isdigit()))]
        stops = s.get("stops_itself")
        stops = (
            f"  ends itself after {stops['after_trials']:.0f} at {stops['hypervolume']:.2f} in {stops['share_of_runs']:.0%}"
            if stops
            else ""
        )
        print(
            f"{kind:28}{len(every):>4}{hv:>26}{last['hypervolume_p10']:>9.2f}"
            f"{last['throughput_regret']:>28.1%}{last['time_to_loss_regret']:>10.1%}{last['oom_mean']:>6.1f}{took_s:>6.0f}{stops}",
            flush=True,
        )
        if not arguments.dry:
            with contextlib.redirect_stdout(io.StringIO()):  # the table is what people read
                common.write("search_simulated", {"noise": NOISE, "trials": arguments.trials, "samplers": results})


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over runs."""
    found: dict[str, Any] = {"runs": len(runs), "ask_s": float(np.median([r["ask_s"] for r in runs]))}
    if stops := [r["stop"] for r in runs if r["stop"]]:
        found["stops_itself"] = {
            "share_of_runs": len(stops) / len(runs), "after_trials": float(np.median([s["trials"] for s in stops])),
            "hypervolume": float(np.median([s["hypervolume"] for s in stops])),
        }  # fmt: skip
    for n in runs[0]["curve"]:
        columns = {key: [r["curve"][n][key] for r in runs] for key in runs[0]["curve"][n]}
        row: dict[str, float] = {key: float(np.median(column)) for key, column in columns.items()}
        row["hypervolume_p10"] = float(np.quantile(columns["hypervolume"], 0.1))
        row["oom_mean"] = float(np.mean(columns["oom"]))
        both = np.maximum(columns["throughput_regret"], columns["time_to_loss_regret"])
        row["both_within_2_percent"] = float((both <= 0.02).mean())
        found[str(n)] = {key: round(value, 4) for key, value in row.items()}
    return found


if __name__ == "__main__":
    main()
