"""Data of varying lengths: do claims hold for long trainings, and are padding and a slow loader found and removed?

python benchmarks/data.py replayed    50 corpora: late out-of-memory, tail peak and claimed rate against 10,000 steps
python benchmarks/data.py packing     a real study of an instruction-like corpus
python benchmarks/data.py loader      a real study of a loader that takes 20 ms a sample, and what diagnose says
python benchmarks/data.py tail        what the check of the worst batch costs a real study of an instruction-like corpus
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write

import autotune
from autotune.report import diagnosis
from autotune.scoring import step_times
from autotune.scoring.rates import rate_of
from autotune.session import open_study
from autotune.study.folder import trial_path
from autotune.trial.folder import TrialDir, events
from autotune.trial.result import Outcome, TrialResult
from autotune.worker.data import padding, samples

CORPORA = Path(__file__).parent / "corpora"
SEEDS, N_SAMPLES, LONGEST, LONGEST_OF_STREAM = 10, 20_000, 4096, 1024
GLOBAL_BATCH, MICRO_BATCHES = 64, (1, 2, 4, 8, 16, 32)
TRIAL_STEPS, REPLAYED_STEPS, CLAIM_STEPS = 30, 10_000, 2_000
NOISE = 0.025
# Of a simulated machine: seconds of a micro-step, of a token, and of a pair of tokens of a row; bytes likewise.
STEP_S, TOKEN_S, PAIR_S = 2e-3, 2e-6, 4e-10
FIXED_BYTES, TOKEN_BYTES, PAIR_BYTES, LIMIT_BYTES = 4e9, 4e5, 40.0, 24e9


@dataclass
class Corpus:
    """The lengths of a data set's samples, in its own order; a stream is read in that order, and states its longest."""

    kind: str
    lengths: np.ndarray
    streamed: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> Any:
        return np.empty(int(self.lengths[position]), dtype=np.int8)


def corpora(seed: int) -> list[Corpus]:
    rng = np.random.default_rng(seed)
    usual = np.exp(rng.normal(4.5, 0.8, N_SAMPLES))
    two = np.where(rng.random(N_SAMPLES) < 0.8, rng.normal(80, 15, N_SAMPLES), rng.normal(900, 100, N_SAMPLES))
    rare = np.where(rng.random(N_SAMPLES) < 1 / 500, 32.0, 1.0) * rng.integers(48, 80, N_SAMPLES)
    found = {
        "log-normal": usual,
        "bimodal": two,
        "rare": rare,
        "sorted": np.sort(usual),
        "streamed": np.minimum(usual[::-1], LONGEST_OF_STREAM),
    }
    whole = {kind: np.clip(each, 4, LONGEST).astype(int) for kind, each in found.items()}
    return [Corpus(kind, each, kind == "streamed") for kind, each in whole.items()]


def drawn(corpus: Corpus, n_steps: int, rng: np.random.Generator) -> np.ndarray:
    """The lengths of the samples of some steps, [steps, samples]."""
    n = n_steps * GLOBAL_BATCH
    if corpus.streamed:  # from the first sample on, again and again
        return np.resize(corpus.lengths, n).reshape(n_steps, GLOBAL_BATCH)
    epochs = [rng.permutation(corpus.lengths) for _ in range(-(-n // N_SAMPLES))]
    return np.concatenate(epochs)[:n].reshape(n_steps, GLOBAL_BATCH)


def steps(lengths: np.ndarray, micro: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of each step, padded lengths of its micro-batches, and their peak bytes."""
    widths = lengths.reshape(len(lengths), -1, micro).max(axis=2).astype(float)
    seconds = (STEP_S + micro * (TOKEN_S * widths + PAIR_S * widths**2)).sum(axis=1)
    return seconds * np.exp(rng.normal(0, NOISE, len(lengths))), widths, peak(widths, micro)


def peak(widths: Any, micro: int) -> Any:
    return FIXED_BYTES + micro * (TOKEN_BYTES * widths + PAIR_BYTES * widths**2)


def claim(corpus: Corpus, table: Any, lengths: np.ndarray, micro: int, rng: np.random.Generator) -> tuple[float, float]:
    """The samples a second that a trial claims, and what its own steps alone would say."""
    seconds, widths, _ = steps(lengths, micro, rng)
    rows = lengths.reshape(-1, micro)
    seen = [(torch.tensor(row), int(row.max())) for row in rows]
    tokens = (widths.sum(axis=1) * micro).astype(int).tolist()
    result = TrialResult(
        outcome=Outcome.COMPLETE, step_times_s=seconds.tolist(), steps=step_times.summarise(seconds.tolist()),
        taken_in={"samples": [GLOBAL_BATCH], "tokens": tokens, "elements": tokens, "real_tokens": lengths.sum(axis=1).tolist()},
        expected=padding.expected(table, seen, micro, GLOBAL_BATCH // micro, {}),
    )  # fmt: skip
    found, own = rate_of(result, "samples"), rate_of(replace(result, expected={}), "samples")
    assert found is not None and own is not None
    return found.value, own.value


def replayed(corpus: Corpus, seed: int) -> dict[str, Any]:
    """A study of the micro-batch on one corpus, and what becomes of its answer over a long training."""
    rng = np.random.default_rng(seed)
    described = samples.describe(iter(corpus[i] for i in range(2048)) if corpus.streamed else corpus)
    assert described is not None
    longest = LONGEST_OF_STREAM if corpus.streamed else described.longest  # as --max-length states it
    first, long = drawn(corpus, TRIAL_STEPS, rng), drawn(corpus, REPLAYED_STEPS, np.random.default_rng(seed + 1000))
    claims = {micro: claim(corpus, described.table, first, micro, rng) for micro in MICRO_BATCHES}
    fits = [micro for micro in MICRO_BATCHES if peak(float(longest), micro) <= LIMIT_BYTES]
    in_trial = [micro for micro in MICRO_BATCHES if steps(first, micro, rng)[2].max() <= LIMIT_BYTES]
    best = max(fits, key=lambda micro: claims[micro][0])
    seconds, _, peaks = steps(long, best, rng)
    plain = max(in_trial, key=lambda micro: claims[micro][0])
    rate = CLAIM_STEPS * GLOBAL_BATCH / seconds[:CLAIM_STEPS].sum()
    return {
        "corpus": corpus.kind, "micro_batch_size": best, "late_oom": bool(peaks.max() > LIMIT_BYTES),
        "late_oom_without_tail": bool(steps(long, plain, rng)[2].max() > LIMIT_BYTES),
        "tail_over_peak": round(float(peak(float(longest), best) / peaks.max()), 4),
        "claim_over_rate": round(float(claims[best][0] / rate), 4),
        "own_steps_over_rate": round(float(claims[best][1] / rate), 4),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "late_oom": sum(row["late_oom"] for row in rows),
        "late_oom_without_tail": sum(row["late_oom_without_tail"] for row in rows),
        "worst_tail_error": round(max(abs(row["tail_over_peak"] - 1) for row in rows), 4),
    }


def write_replayed() -> None:
    rows = [replayed(corpus, seed) for seed in range(SEEDS) for corpus in corpora(seed)]
    kinds = dict.fromkeys(row["corpus"] for row in rows)
    by_kind = {kind: summary([row for row in rows if row["corpus"] == kind]) for kind in kinds}
    write("data_replayed", {"corpora": len(rows), "steps": REPLAYED_STEPS, "by_kind": by_kind, "rows": rows})


def study(name: str, folder: Path, **settings: Any) -> Any:
    """The report of a real study of one of the corpora's models, and its folder."""
    os.chdir(folder)
    autotune.run(CORPORA / f"{name}.py", name="data", history=False, progress=True, **settings)
    return open_study("data", studies=folder / "studies").report, folder / "studies" / "data"


def write_packing(folder: Path) -> None:
    space = {"data.packing": [None, True], "gradient_accumulation_steps": [1]}
    report, _ = study(
        "instructions", folder, space=space, goal="throughput", trials=2, trial_budget_s=8, finalists=1, repeats=2
    )
    found, rows = report.picks["recommended"], {row["trial"]: row for row in report.trials}
    gains = {
        name: found["gains"][name]
        for name in ("samples_per_s", "tokens_per_s", "step_time_s")
        if name in found["gains"]
    }
    gate = rows[found["trial"]]["gate"]
    write("data_packing", {
        "candidate": found["candidate"], "gains": gains, "trials": len(rows),
        "padding": {number: row.get("padding") for number, row in rows.items()},
        "gate": gate and {name: gate[name] for name in ("passed", "n_steps", "excess", "limit")},
    })  # fmt: skip


def write_loader(folder: Path) -> None:
    space = {"data.num_workers": [None, 2, 4, 8], "data.prefetch_factor": [None, 4]}
    report, where = study(
        "slow_samples", folder, space=space, goal="throughput", trials=12, trial_budget_s=4, finalists=1, repeats=1
    )
    found, said = report.picks["recommended"], diagnosis.of_trial(report, where, 0)
    share = next(part.share for part in said.parts if part.name == "input pipeline")
    write("data_loader", {
        "trials": len(report.trials), "candidate": found["candidate"], "gain": found["gains"]["samples_per_s"],
        "first_trial_with_workers": next((row["trial"] for row in report.trials if row["candidate"].get("data.num_workers")), None),
        "bound_by": said.bound_by, "waiting": share, "notes": said.notes[:3],
    })  # fmt: skip


def write_tail(folder: Path) -> None:
    finalists = 2
    space = {"micro_batch_size": [4, 8, 16], "zero_stage": [0, 1]}
    report, where = study(
        "instructions",
        folder,
        space=space,
        goal="throughput",
        trials=6,
        trial_budget_s=4,
        finalists=finalists,
        repeats=1,
    )
    tails = [tail_s(TrialDir(trial_path(where, row["trial"]))) for row in report.trials]
    walls = [row["wall_s"] for row in report.trials]
    write("data_tail", {
        "trials": len(walls), "finalists": finalists, "tail_s": tails, "wall_s": walls,
        "trials_a_finalist": sum(tails) / statistics.median(walls) / finalists,
    })  # fmt: skip


def tail_s(trial: TrialDir) -> float:
    """Seconds that a trial's first rank spent on the worst batch."""
    phases = [(event["phase"], event["time"]) for event in events(trial) if event.get("rank") == 0 and "phase" in event]
    return sum(end - began for (phase, began), (_, end) in pairwise(phases) if phase == "tail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("replayed", "packing", "loader", "tail"))
    what = parser.parse_args().what
    if what == "replayed":
        write_replayed()
        return
    with tempfile.TemporaryDirectory() as name:
        {"packing": write_packing, "loader": write_loader, "tail": write_tail}[what](Path(name))


if __name__ == "__main__":
    main()
