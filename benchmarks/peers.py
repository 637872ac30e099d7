"""Which tuner answers sooner, and whose answer is better? DeepSpeed's own autotuner, plain Optuna TPE, random search and autotune.

`python benchmarks/peers.py run TUNER --into DIR` for each of `deepspeed`, `tpe`, `random`, `autotune` (the incumbent's
space: micro-batch, accumulation, ZeRO stage), `autotune-quick` (the same, four trials and no second look) and
`autotune-all` (precision and DeepSpeed's finer settings too), then `python benchmarks/peers.py judge DIR`, which
measures every answer again, in turns, under plain torchrun, and writes `results/peers.json` (`peers-NAME.json` of
another script). `make bench-peers` does it all; `make bench-peers SCRIPT=train.py` on a script of yours that takes
`--deepspeed_config FILE`.

All are given the same script, ranks and limits. `tpe` and `random` start a process for each trial, as whoever writes
such a loop does, and take the fastest. A claim is what a tuner says its answer reaches; its gap is what is left of it
under torchrun, where `peers/launch.py` times the optimizer steps of the untouched script.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import plain_environment, write

from autotune.space.candidate import Candidate
from autotune.trial.folder import write_record

SCRIPT = Path(__file__).parent / "peers" / "train.py"
LAUNCH = SCRIPT.with_name("launch.py")
RANKS = 2
MICRO, ACCUMULATION, STAGES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8), (0, 1, 2, 3)
MOST_SAMPLES = 64  # of an optimizer step and rank
# Adam as torch has it, since DeepSpeed's own is compiled first.
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}  # fmt: skip
TRIALS, TRIAL_STEPS, SETUP = 16, 12, 3
JUDGED_STEPS = 24


@dataclass(frozen=True)
class Training:
    """What is tuned.

    Attributes:
        script: A training script that takes `--deepspeed_config FILE`.
        arguments: Its other arguments.
        base: The DeepSpeed configuration that it is given, but for what is tuned.
    """

    script: Path
    arguments: tuple[str, ...]
    base: dict[str, Any]

    def command(self, config: Path | str) -> list[str]:
        """The script and its arguments."""
        return [str(self.script), *self.arguments, "--deepspeed", "--deepspeed_config", str(config)]


def torchrun(training: Training, config: dict[str, Any], folder: Path, steps: int) -> tuple[float, float] | None:
    """Median step time and samples of a step under plain torchrun; None where it fails."""
    file = folder / "judged.json"
    write_record(file, config)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        str(LAUNCH),
    ]
    command += ["--measure", str(steps), *training.command(file)]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if "MEASURED " in line), None)
    if line is None:
        print(done.stderr[-500:], file=sys.stderr)
        return None
    found = json.loads(line.partition("MEASURED ")[2])
    return statistics.median(found["times_s"][SETUP:]), found["samples_per_step"]


def loop(training: Training, folder: Path, sampler: str) -> dict[str, Any]:
    """Optuna with a process for each trial, over the incumbent's space."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    configs: dict[int, dict[str, Any]] = {}

    def objective(asked: Any) -> float:
        micro, stage = asked.suggest_categorical("micro", MICRO), asked.suggest_categorical("stage", STAGES)
        accumulation = asked.suggest_categorical("accumulation", ACCUMULATION)
        if micro * accumulation > MOST_SAMPLES:
            raise optuna.TrialPruned
        candidate = Candidate(micro_batch_size=micro, gradient_accumulation_steps=accumulation, zero_stage=stage)
        configs[asked.number] = candidate.to_deepspeed(training.base)
        found = torchrun(training, configs[asked.number], folder, TRIAL_STEPS)
        if found is None:
            raise optuna.TrialPruned
        return found[1] / found[0]

    study = optuna.create_study(direction="maximize", sampler=getattr(optuna.samplers, sampler)(seed=0))
    while sum(t.state.name == "COMPLETE" for t in study.trials) < TRIALS:
        study.optimize(objective, n_trials=1)
    best = study.best_trial
    return {"config": configs[best.number], "claimed_samples_per_s": best.value, "trials": len(configs)}


def deepspeed(training: Training, folder: Path) -> dict[str, Any]:
    """DeepSpeed's autotuner, fast mode, given what it takes to run on a CPU."""
    if find_spec("tabulate") is None:
        sys.exit("DeepSpeed's autotuner needs the package tabulate, which it does not ask for: pip install tabulate")
    results, experiments = folder / "results", folder / "experiments"
    tuning = {
        "enabled": True, "fast": True, "metric": "throughput", "start_profile_step": SETUP, "end_profile_step": TRIAL_STEPS,
        "overwrite": True, "results_dir": str(results), "exps_dir": str(experiments), "mp_size": 1,
        "max_train_batch_size": RANKS * MOST_SAMPLES, "arg_mappings": {},
    }  # fmt: skip
    config = {key: value for key, value in training.base.items() if key != "gradient_accumulation_steps"}
    config |= {"autotuning": tuning, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": "all"}}
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
        sys.exit(
            f"DeepSpeed's autotuner came to no answer; see {folder / 'log.txt'}: {(done.stdout + done.stderr)[-800:]}"
        )
    metrics = [json.loads(path.read_text())["throughput"] for path in results.glob("*/metrics.json")]
    return {"config": json.loads(best.read_text()), "claimed_samples_per_s": max(metrics), "trials": len(metrics)}


def ours(training: Training, folder: Path, space: list[Any], **changes: Any) -> dict[str, Any]:
    """`autotune run` of the same script."""
    import yaml

    study = {
        "target": os.path.relpath(training.script, folder / "studies" / "peers"), "ranks": RANKS, "base_config": training.base,
        "space": space, "global_batch": f"{RANKS}..{RANKS * MOST_SAMPLES}", "objectives": ["throughput"], "trials": TRIALS,
        "trial_budget_s": 1.0, "script_args": training.command("{ds_config}")[1:],
        "branch": False,  # as the others, which take what is fastest
        **changes,
    }  # fmt: skip
    path = folder / "studies" / "peers" / "study.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOTUNE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "autotune.cli", "run", str(path), "--fresh", "--json"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"autotune came to no answer: {done.stderr[-800:]}")
    pick = json.loads((path.parent / "recommended.json").read_text())["picks"]["recommended"]
    n = len(list(path.parent.glob("trials/[0-9]*/result.json")))
    changes = [change for change in pick["script_side_changes"] if change.startswith("Activation checkpointing")]
    claimed = pick["metrics"]["samples_per_s"]
    return {"config": pick["ds_config"], "claimed_samples_per_s": claimed, "trials": n, "not_in_the_json": changes}


SIZES = {"micro_batch_size": {"choices": list(MICRO)}, "gradient_accumulation_steps": {"choices": list(ACCUMULATION)}}
# The incumbent's space.
KNOBS = [{**SIZES, "zero_stage": {"choices": list(STAGES)}}]


# The incumbent's space; the same for who wants an answer now: the baseline, three trials, nothing measured again; ours.
TUNERS: dict[str, Callable[[Training, Path], dict[str, Any]]] = {
    "deepspeed": deepspeed,
    "tpe": lambda training, folder: loop(training, folder, "TPESampler"),
    "random": lambda training, folder: loop(training, folder, "RandomSampler"),
    "autotune": lambda training, folder: ours(training, folder, KNOBS),
    "autotune-quick": lambda training, folder: ours(training, folder, KNOBS, trials=4, finalists=0),
    "autotune-all": lambda training, folder: ours(training, folder, [SIZES, "zero", "precision"]),
}


def judge(folder: Path, rounds: int) -> None:
    """Measures every answer again, in turns, and writes the comparison."""
    answers = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    answers = {name: answer for name, answer in answers.items() if name in TUNERS}
    if not answers:
        sys.exit(
            f"{folder}: no tuner has answered; run one first: python benchmarks/peers.py run autotune --into {folder}"
        )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in answers}
    for _ in range(rounds):
        for name, answer in answers.items():
            tuned = answer["training"]
            training = Training(Path(tuned["script"]), tuple(tuned["arguments"]), tuned["base"])
            one = torchrun(training, answer["config"], folder, JUDGED_STEPS)
            if one is not None:
                found[name].append(one)
    figures: dict[str, Any] = {}
    for name, answer in answers.items():
        answer["training"] = Path(answer["training"]["script"]).name
        if not found[name]:
            figures[name] = {**answer, "error": "its answer does not run under torchrun"}
            continue
        step = statistics.median(seconds for seconds, _ in found[name])
        rate = statistics.median(samples / seconds for seconds, samples in found[name])
        figures[name] = {
            **answer, "step_time_s": step, "samples_per_s": rate, "claim_over_measured": answer["claimed_samples_per_s"] / rate,
            "rounds": len(found[name]),
        }  # fmt: skip
    base = figures.get("deepspeed", {})
    for row in figures.values():
        if base.get("samples_per_s") and row.get("samples_per_s"):
            row["throughput_over_deepspeed"] = row["samples_per_s"] / base["samples_per_s"]
            row["seconds_of_deepspeed_over_own"] = base["wall_s"] / row["wall_s"]
    script = Path(next(iter(answers.values()))["training"])
    write("peers" if script.name == SCRIPT.name else f"peers-{script.stem}", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("tuner", choices=list(TUNERS))
    running.add_argument("--into", type=Path, required=True)
    running.add_argument(
        "--script", type=Path, default=SCRIPT, help="what is trained; it takes --deepspeed_config FILE"
    )
    running.add_argument("--arguments", default="", help="its other arguments, as one string")
    running.add_argument("--base", type=Path, help="its DeepSpeed JSON (default: micro-batch 8, AdamW at 1e-3)")
    judging = commands.add_parser("judge")
    judging.add_argument("folder", type=Path)
    judging.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.command == "judge":
        judge(arguments.folder.absolute(), arguments.rounds)
        return
    folder = arguments.into.absolute() / f"{arguments.tuner}.files"
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads(arguments.base.read_text()) if arguments.base else BASE
    training = Training(arguments.script.absolute(), tuple(shlex.split(arguments.arguments)), base)
    start = time.perf_counter()
    answer = TUNERS[arguments.tuner](training, folder)
    answer["wall_s"] = time.perf_counter() - start
    answer["training"] = {"script": str(training.script), "arguments": training.arguments, "base": base}
    write_record(arguments.into / f"{arguments.tuner}.json", answer)
    print(json.dumps({key: value for key, value in answer.items() if key not in ("config", "training")}))


if __name__ == "__main__":
    main()
