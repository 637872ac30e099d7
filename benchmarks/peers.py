"""Which tuner answers sooner, and whose answer is better? DeepSpeed's own autotuner, autotune, and loops of Optuna.

`python benchmarks/peers.py race DIR` lets tuners answer for three trainings, in two tracks, once for each seed, in random
order (`free`: any batch up to 64 samples a rank; `fixed`: 32 samples a rank in micro-batches of 8, 16 or 32); what has
run is not run again. `--trainings`, `--tracks` and `--seeds` choose some. `python benchmarks/peers.py judge DIR` measures
every answer again, in turns, under plain torchrun, and writes its rows of `results/peers.json`. `make bench-peers` does
both (two hours on an idle machine).

All are given the same script, ranks, limits and space: micro-batch, accumulation, ZeRO stage; bf16 is in everybody's
base. DeepSpeed's tuner runs in its fast mode with its own defaults, `autotune` as `autotune run --quick` with a cold cache.
`tpe` and `random` (`--tuners`) start a process for each of 16 trials and take the fastest. Nobody checks how an answer with another
batch trains. A claim is what a tuner says its answer reaches; `peers/launch.py` times the optimizer steps of the untouched
script. Answers that are the same configuration share what was measured for it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, plain_environment, write

from autotune.space.candidate import Candidate
from autotune.trial.folder import write_record

FOLDER = Path(__file__).parent
LAUNCH = FOLDER / "peers" / "launch.py"
RANKS = 2
STAGES = (0, 1, 2, 3)
# Adam as torch has it, since DeepSpeed's own is compiled first.
BASE: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "bf16": {"enabled": True}
}  # fmt: skip
TRIALS, TRIAL_STEPS, SETUP, JUDGED_STEPS = 16, 12, 3, 24
DRAWS = 2000


@dataclass(frozen=True)
class Training:
    """What is tuned: a training script that takes `--deepspeed_config FILE`, and its other arguments."""

    script: Path
    arguments: tuple[str, ...] = ()

    def command(self, config: Path | str) -> list[str]:
        """The script and its arguments."""
        return [str(self.script), *self.arguments, "--deepspeed", "--deepspeed_config", str(config)]


# Attention, on steps of 0.1 to 0.7 s; convolutions; and a training whose steps take milliseconds, with a loader of its own.
TRAININGS = {
    "gpt": Training(FOLDER / "peers" / "train.py"),
    "conv": Training(FOLDER / "peers" / "train.py", ("--model", str(FOLDER / "truth" / "conv.py"))),
    "clicks": Training(FOLDER / "peers" / "clicks.py"),
}


@dataclass(frozen=True)
class Track:
    """What a tuner may choose.

    Attributes:
        micro: Micro-batch sizes.
        accumulation: Numbers of micro-steps.
        samples: Most samples of an optimizer step and rank; all have as many where the batch is fixed.
        fixed: Whether it is.
    """

    micro: tuple[int, ...]
    accumulation: tuple[int, ...]
    samples: int
    fixed: bool

    def base(self) -> dict[str, Any]:
        """The configuration that everybody starts from."""
        steps = self.samples // self.micro[0] if self.fixed else 1
        micro = self.micro[0] if self.fixed else 8
        return {**BASE, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}

    def allows(self, micro: int, accumulation: int) -> bool:
        """Whether a step may have so many samples."""
        found = micro * accumulation
        return found == self.samples if self.fixed else found <= self.samples


TRACKS = {
    "free": Track((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8), 64, fixed=False),
    "fixed": Track((8, 16, 32), (4, 2, 1), 32, fixed=True),
}


def torchrun(training: Training, config: dict[str, Any], folder: Path, steps: int) -> tuple[float, float] | None:
    """Median step time and samples of a step under plain torchrun; None where it fails."""
    file = folder / "judged.json"
    write_record(file, config)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(LAUNCH)]
    command = [*launcher, "--measure", str(steps), *training.command(file)]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if "MEASURED " in line), None)
    if line is None:
        print(done.stderr[-500:], file=sys.stderr)
        return None
    found = json.loads(line.partition("MEASURED ")[2])
    return statistics.median(found["times_s"][SETUP:]), found["samples_per_step"]


def loop(training: Training, track: Track, folder: Path, seed: int, sampler: str) -> dict[str, Any]:
    """Optuna with a process for each trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    configs: dict[int, dict[str, Any]] = {}

    def objective(asked: Any) -> float:
        micro, stage = asked.suggest_categorical("micro", track.micro), asked.suggest_categorical("stage", STAGES)
        accumulation = asked.suggest_categorical("accumulation", track.accumulation)
        if not track.allows(micro, accumulation):
            raise optuna.TrialPruned
        candidate = Candidate(
            micro_batch_size=micro, gradient_accumulation_steps=accumulation, zero_stage=stage, precision="bf16"
        )
        configs[asked.number] = candidate.to_deepspeed(track.base())
        found = torchrun(training, configs[asked.number], folder, TRIAL_STEPS)
        if found is None:
            raise optuna.TrialPruned
        return found[1] / found[0]

    study = optuna.create_study(direction="maximize", sampler=getattr(optuna.samplers, sampler)(seed=seed))
    while sum(t.state.name == "COMPLETE" for t in study.trials) < TRIALS:
        study.optimize(objective, n_trials=1)
    best = study.best_trial
    return {"config": configs[best.number], "claimed_samples_per_s": best.value, "trials": len(configs)}


def deepspeed(training: Training, track: Track, folder: Path, seed: int) -> dict[str, Any]:
    """DeepSpeed's autotuner, fast mode, given what it takes to run on a CPU; it draws nothing, so the seed is not used."""
    if find_spec("tabulate") is None:
        sys.exit("DeepSpeed's autotuner needs the package tabulate, which it does not ask for: pip install tabulate")
    results, experiments = folder / "results", folder / "experiments"
    tuning: dict[str, Any] = {
        "enabled": True, "fast": True, "metric": "throughput", "overwrite": True, "results_dir": str(results),
        "exps_dir": str(experiments), "mp_size": 1, "arg_mappings": {},
    }  # fmt: skip
    config = {key: value for key, value in track.base().items() if key != "gradient_accumulation_steps"}
    # Of a list of micro-batches each is given as many micro-steps as make the batch of the largest.
    config["train_micro_batch_size_per_gpu"] = list(track.micro) if track.fixed else "auto"
    if not track.fixed:
        tuning["max_train_batch_size"] = RANKS * track.samples
    config |= {"autotuning": tuning, "zero_optimization": {"stage": "all"}}
    write_record(folder / "tuned.json", config)
    # It ends what failed by `pkill` over `pdsh`, by name: here its own launcher has ended it already.
    harmless = folder / "bin" / "pdsh"
    harmless.parent.mkdir(exist_ok=True)
    harmless.write_text("#!/bin/sh\nexit 0\n")
    harmless.chmod(0o755)
    environment = plain_environment() | {"LOCAL_SIZE": str(RANKS), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    environment["PATH"] = os.pathsep.join([str(harmless.parent), str(Path(sys.executable).parent), environment["PATH"]])
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [sys.executable, str(launcher), "--autotuning", "tune", "--num_gpus", str(RANKS), "--num_nodes", "1"]
    command += [str(LAUNCH), *training.command(folder / "tuned.json")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    best = results / "ds_config_optimal.json"
    if not best.exists():
        sys.exit(f"DeepSpeed's autotuner came to no answer: see {folder / 'log.txt'}: {done.stderr[-800:]}")
    metrics = [json.loads(path.read_text())["throughput"] for path in results.glob("*/metrics.json")]
    return {"config": json.loads(best.read_text()), "claimed_samples_per_s": max(metrics), "trials": len(metrics)}


def ours(training: Training, track: Track, folder: Path, seed: int) -> dict[str, Any]:
    """`autotune run --quick` of the same script."""
    import yaml

    study = {
        "target": os.path.relpath(training.script, folder / "studies" / "peers"), "ranks": RANKS, "quick": True, "seed": seed,
        "base_config": track.base(), "objectives": ["throughput"], "script_args": training.command("{ds_config}")[1:],
        "space": [{
            "micro_batch_size": {"choices": list(track.micro)}, "zero_stage": {"choices": list(STAGES)},
            "gradient_accumulation_steps": {"choices": sorted(track.accumulation)},
        }],
        "global_batch": "keep" if track.fixed else f"{RANKS}..{RANKS * track.samples}",
        "branch": False,  # as the others, which take what is fastest
    }  # fmt: skip
    path = folder / "studies" / "peers" / "study.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOTUNE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "autotune", "run", str(path), "--fresh", "--json"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"autotune came to no answer: {done.stderr[-800:]}")
    pick = json.loads((path.parent / "recommended.json").read_text())["picks"]["recommended"]
    n = len(list(path.parent.glob("trials/[0-9]*/result.json")))
    return {"config": pick["ds_config"], "claimed_samples_per_s": pick["metrics"]["samples_per_s"], "trials": n}


TUNERS: dict[str, Callable[[Training, Track, Path, int], dict[str, Any]]] = {
    "deepspeed": deepspeed,
    "autotune": ours,
    "tpe": lambda training, track, folder, seed: loop(training, track, folder, seed, "TPESampler"),
    "random": lambda training, track, folder, seed: loop(training, track, folder, seed, "RandomSampler"),
}


def race(
    folder: Path, seeds: Sequence[int], tuners: Sequence[str], trainings: Sequence[str], tracks: Sequence[str], until_s: float
) -> None:  # fmt: skip
    """Lets every tuner answer for every training, track and seed, in random order within a seed."""
    for seed in seeds:
        turns = [(name, track, tuner) for name in trainings for track in tracks for tuner in tuners]
        random.Random(seed).shuffle(turns)
        for name, track, tuner in turns:
            into = folder / f"{name}-{track}-{seed}-{tuner}.json"
            if into.exists() or time.monotonic() > until_s:
                continue
            files = into.with_suffix("")
            files.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            answer = TUNERS[tuner](TRAININGS[name], TRACKS[track], files, seed)
            answer |= {"training": name, "track": track, "seed": seed, "tuner": tuner}
            write_record(into, answer | {"wall_s": time.perf_counter() - start})
            print(f"{into.stem}: {time.perf_counter() - start:.1f} s, {answer['trials']} trials", flush=True)


def trained(config: Mapping[str, Any]) -> str:
    """What an answer makes of a training, as far as speed goes: its learning rate and stated defaults left out."""
    found = {key: value for key, value in config.items() if key != "train_batch_size"}
    optimizer = found.get("optimizer", {})
    found["optimizer"] = optimizer | {"params": {k: v for k, v in optimizer.get("params", {}).items() if k != "lr"}}
    found["zero_optimization"] = {"stage": 0, **found.get("zero_optimization", {})}
    return json.dumps(found, sort_keys=True)


def judge(folder: Path, rounds: int) -> None:
    """Measures every answer again, in turns, and writes the comparison; rows of other races stay as they were."""
    answers = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*-*-*.json"))]
    if not answers:
        sys.exit(f"{folder}: no tuner has answered; let them: python benchmarks/peers.py race {folder}")
    configs = {(answer["training"], trained(answer["config"])): answer["config"] for answer in answers}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in configs}
    for _ in range(rounds):
        for key, config in configs.items():
            one = torchrun(TRAININGS[key[0]], config, folder, JUDGED_STEPS)
            if one is not None:
                rates[key].append(one[1] / one[0])
    earlier = RESULTS / "peers.json"
    found: dict[str, Any] = json.loads(earlier.read_text())["trainings"] if earlier.exists() else {}
    for name, track in dict.fromkeys((answer["training"], answer["track"]) for answer in answers):
        some = [answer for answer in answers if (answer["training"], answer["track"]) == (name, track)]
        found.setdefault(name, {})[track] = compared(some, rates)
    write("peers", {"rounds": rounds, "trainings": found})


def compared(answers: Sequence[Mapping[str, Any]], rates: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Any]:
    """Each tuner beside DeepSpeed's on one training and track, with 95 % bootstrap intervals over seeds and rounds.

    Args:
        answers: Of all tuners and seeds.
        rates: Samples per second of each configuration under torchrun, one a round; by training and `trained`.
    """
    keys = {id(answer): (answer["training"], trained(answer["config"])) for answer in answers}
    by_tuner: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        by_tuner.setdefault(answer["tuner"], []).append(answer)
    found: dict[str, Any] = {}
    for tuner, own in by_tuner.items():
        ran = [answer for answer in own if rates[keys[id(answer)]]]
        row = {
            "runs": len(own), "on": datetime.date.today().isoformat(), "wall_s": statistics.median(answer["wall_s"] for answer in own),
            "trials": statistics.median(answer["trials"] for answer in own), "not_running": len(own) - len(ran),
            "answers": sorted({keys[id(answer)][1] for answer in own}),
        }  # fmt: skip
        if ran:
            reached = [statistics.median(rates[keys[id(answer)]]) for answer in ran]
            claims = [answer["claimed_samples_per_s"] / rate for answer, rate in zip(ran, reached, strict=True)]
            row |= {"samples_per_s": statistics.median(reached), "claim_over_measured": statistics.median(claims)}
        base = [answer for answer in by_tuner.get("deepspeed", ()) if rates[keys[id(answer)]]]
        if ran and base:
            row |= _ratios(ran, base, keys, rates)
        found[tuner] = row
    return found


def _ratios(
    own: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], keys: Mapping[int, tuple[str, str]],
    rates: Mapping[tuple[str, str], Sequence[float]],
) -> dict[str, Any]:  # fmt: skip
    """How much sooner and how much faster: ratios of geometric means, with their intervals."""
    rng = np.random.default_rng(0)
    n_rounds = min(len(rates[keys[id(answer)]]) for answer in (*own, *base))
    wall = {id(answer): np.log(answer["wall_s"]) for answer in (*own, *base)}
    rate = {id(answer): np.log(rates[keys[id(answer)]][:n_rounds]) for answer in (*own, *base)}
    sooner, faster = [], []
    for draw in range(DRAWS + 1):  # the first is what was measured
        some, others = (
            [side[i] for i in (rng.integers(0, len(side), len(side)) if draw else range(len(side)))]
            for side in (own, base)
        )
        turns = rng.integers(0, n_rounds, n_rounds) if draw else np.arange(n_rounds)  # one machine for both sides
        sooner.append(np.mean([wall[id(a)] for a in others]) - np.mean([wall[id(a)] for a in some]))
        faster.append(np.mean([rate[id(a)][turns] for a in some]) - np.mean([rate[id(a)][turns] for a in others]))

    def told(logs: Sequence[float]) -> list[float]:
        return [float(np.exp(value)) for value in (logs[0], *np.quantile(logs[1:], (0.025, 0.975)))]

    return {"sooner": told(sooner), "faster": told(faster)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    racing = commands.add_parser("race")
    racing.add_argument("folder", type=Path)
    racing.add_argument("--seeds", type=int, default=5)
    racing.add_argument("--tuners", nargs="+", choices=list(TUNERS), default=["deepspeed", "autotune"])
    racing.add_argument("--trainings", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    racing.add_argument("--tracks", nargs="+", choices=list(TRACKS), default=list(TRACKS))
    racing.add_argument("--minutes", type=float, default=1e6, help="begin no run after that")
    judging = commands.add_parser("judge")
    judging.add_argument("folder", type=Path)
    judging.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.command == "judge":
        judge(folder, arguments.rounds)
    else:
        until_s = time.monotonic() + 60 * arguments.minutes
        race(folder, range(arguments.seeds), arguments.tuners, arguments.trainings, arguments.tracks, until_s)


if __name__ == "__main__":
    main()
