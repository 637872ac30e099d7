"""What trials claim of a script, against plain torchrun runs of it: `python benchmarks/claims.py [--seconds N] [--cases N]`.

The judge knows nothing of autotune: it is the script (`judged.py`) under torchrun, which times its own unsynchronised steps.
Between two such runs of a case come the runs of autotune: an ordinary trial, which ends when it has measured enough (the
claim), and in the first round one that lasts until the script ends by itself and prints its own time (the hooks).

40 cases: four models of 8 ms to 1 s a step, each at ZeRO 1, ZeRO 2 and with accumulation 8, on an idle machine and with
one busy core, and the first of them once more. A run goes on where the last one stopped (`results/claims.json`), so that
it may be made in pieces; `--fresh` starts anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import judged
from common import RESULTS, complete, engine, plain_environment, request_of, write

from autotune.executors.base import Executor
from autotune.scoring.estimates import estimate
from autotune.scoring.measured import Measured
from autotune.scoring.metrics import measure
from autotune.space.candidate import Candidate
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.result import TrialResult
from autotune.trial.workload import Probed, Script

JUDGED = Path(__file__).parent / "judged.py"
RANKS, CASES = 2, 40
# What a plain run measures: about this much, and at least so many steps.
JUDGED_S, LEAST_STEPS = 6.0, 6
STEP_S = {"perceptron": 0.012, "convolutions": 0.04, "decoder": 0.2, "large decoder": 1.0}  # roughly, to count steps
SETTINGS = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 1, accumulation 8": {"zero_stage": 1, "gradient_accumulation_steps": 8},
}
Row = dict[str, Any]


def case(number: int) -> tuple[str, str, bool]:
    """The model, the setting and whether a core is busy."""
    kinds = [(model, setting, busy) for busy in (False, True) for setting in SETTINGS for model in judged.MODELS]
    return kinds[number % len(kinds)]


@contextlib.contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keeps one core busy, where asked for."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if spinning is not None:
            spinning.kill()
            spinning.wait()


def candidate_of(model: str, setting: str) -> Candidate:
    knobs = SETTINGS[setting]
    micro = judged.MODELS[model].micro_batch_size // knobs.get("gradient_accumulation_steps", 1)
    return Candidate(micro_batch_size=micro, **knobs)


def said(text: str) -> dict[str, float]:
    """What the script printed of itself."""
    lines = [line for line in text.splitlines() if line.startswith("JUDGED")]
    if not lines:
        raise RuntimeError(text[-2000:])
    return json.loads(lines[-1].removeprefix("JUDGED"))


def plain(model: str, candidate: Candidate, n_steps: int, folder: Path) -> dict[str, float]:
    config = folder / "plain.json"
    write_record(config, candidate.to_deepspeed())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(JUDGED), model, str(n_steps), "--deepspeed_config", str(config)]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
    return said(done.stdout + done.stderr)


def trial(executor: Executor, folder: Path, model: str, candidate: Candidate, n_steps: int, **limits: Any) -> Any:
    script = Script(
        arguments=(model, str(n_steps), "--deepspeed_config", "{ds_config}"), working_dir=str(folder.parent),
        probed=Probed(
            ds_config=candidate.to_deepspeed(), micro_batch_size=candidate.micro_batch_size,
            gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        ),
    )  # fmt: skip
    return complete(executor, folder, request_of(JUDGED, candidate, world_size=RANKS, script=script, **limits))


def claimed(result: TrialResult, candidate: Candidate) -> dict[str, float]:
    """What autotune prints for a trial that was measured once, as seconds a step with the ends of the 95 % interval."""
    found = measure(result, None)
    trial = Measured(
        trial=0, candidate=candidate, ds_config=candidate.to_deepspeed(), outcome=result.outcome,
        metrics={name: each.value for name, each in found.items()},
        ci95={name: (each.low, each.high) for name, each in found.items()},
    )  # fmt: skip
    (printed,) = estimate([trial]).measured
    low, high = printed.ci95["samples_per_s"]
    assert result.samples_per_step
    size = result.samples_per_step
    return {"step_s": size / printed.metrics["samples_per_s"], "low_s": size / high, "high_s": size / low}


def judge(number: int, executor: Executor, folder: Path, *, hooks: bool) -> Row:
    """Runs a case; returns what was claimed and what was measured, in seconds a step."""
    model, setting, busy = case(number)
    candidate = candidate_of(model, setting)
    n_steps = judged.SETTLING + max(LEAST_STEPS, round(JUDGED_S / STEP_S[model]))
    row: Row = {"model": model, "setting": setting, "busy core": busy, "load_before": os.getloadavg()[0]}
    with busy_core(busy):
        before = plain(model, candidate, n_steps, folder)
        result = trial(executor, folder / f"{number}-claim", model, candidate, 10**6, budget_s=10.0)
        if hooks:  # it ends with the script
            trial(executor, folder / f"{number}-hooks", model, candidate, n_steps, max_steps=10**6, min_samples=10**12)
            row["hooked"] = said(TrialDir(folder / f"{number}-hooks").log(0).read_text())
        after = plain(model, candidate, n_steps, folder)
    row["claim"] = claimed(result, candidate)
    return row | {"plain": [before, after]}


def figures(rows: Sequence[Row]) -> Row:
    """Sums up the cases: claims over what was measured, intervals that hold, and steps with hooks over plain ones."""
    claims, held, hooks = [], [], {}
    for row in rows:
        measured = statistics.fmean(each["wall_s"] for each in row["plain"])
        claims.append(row["claim"]["step_s"] / measured)
        held.append(row["claim"]["low_s"] <= measured <= row["claim"]["high_s"])
        if "hooked" in row:
            name = f"{row['model']}, {row['setting']}{', a busy core' if row['busy core'] else ''}"
            hooks[name] = {
                key: row["hooked"][key] / max(1e-9, statistics.fmean(each[key] for each in row["plain"]))
                for key in row["hooked"]
            }
    drift = [abs(row["plain"][0]["wall_s"] / row["plain"][1]["wall_s"] - 1) for row in rows]
    return {
        "cases": len(rows),
        "claim_over_measured": statistics.median(claims),
        "error_median": statistics.median(abs(each - 1) for each in claims),
        "held": sum(held),
        "plain_runs_apart_median": statistics.median(drift),
        "hooked_over_plain": statistics.median(each["wall_s"] for each in hooks.values()) if hooks else None,
        "hooks": hooks,
        "claims": claims,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after this many seconds")
    parser.add_argument("--cases", type=int, default=CASES, help="cases in all")
    parser.add_argument("--fresh", action="store_true", help="forget the cases that were run before")
    given = parser.parse_args()
    begun, stored = time.monotonic(), RESULTS / "claims.json"
    rows: list[Row] = json.loads(stored.read_text())["rows"] if stored.exists() and not given.fresh else []
    last_s = 0.0
    with engine("torch", "deepspeed") as (executor, folder):
        while len(rows) < given.cases and time.monotonic() - begun + last_s < given.seconds:
            start = time.monotonic()
            rows.append(judge(len(rows), executor, folder, hooks=len(rows) < 2 * len(SETTINGS) * len(judged.MODELS)))
            last_s = time.monotonic() - start
            write("claims", {**figures(rows), "rows": rows})


if __name__ == "__main__":
    main()
