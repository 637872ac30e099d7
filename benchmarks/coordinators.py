"""Kills 50 of 16 coordinators of one study in PostgreSQL at random: times asking and telling, counts lost trials.

`python benchmarks/coordinators.py [--trials 1000] [--workers 16] [--kills 50] [--seconds 1] [--sampler random]`: starts
a server of its own on loopback. The trials do nothing for SECONDS each, give or take a half.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import write
from optuna.trial import TrialState
from sqlalchemy import text
from support import postgres
from support.coordinate import coordinate
from support.zoo import wait_until

from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.storage import leases, records
from autotune.study.storage.database import StoreError, open_storage

FORK = multiprocessing.get_context("fork")
LAST = 100
TIMES = ("wait_s", "decide_s", "claim_s", "tell_s")


def worker(role: str, folder: Path, options: argparse.Namespace, url: str) -> Any:
    """Starts a coordinator; forked, so that its imports are not measured."""

    def main() -> None:
        sys.stdout = sys.stderr = open(folder / f"{role}-{os.getpid()}.log", "w")  # noqa: SIM115
        coordinate(role, folder, options.trials, options.seconds, options.sampler, url, finalists=0)

    process = FORK.Process(target=main, daemon=True)
    process.start()
    return process


def run(folder: Path, options: argparse.Namespace, url: str) -> dict[str, Any]:
    """One study from its start to its end, its workers killed meanwhile and replaced."""
    rng, start = random.Random(0), time.perf_counter()
    workers = [worker("lead" if n == 0 else "help", folder, options, url) for n in range(options.workers)]
    storage = open_storage(url)
    wait_until(lambda: n_told(storage) > 0, 60)
    killed = 0
    # Spread over the study, by trials told; the leader is spared here, `test_shared.py` kills it.
    while killed < options.kills and n_told(storage) < options.trials - 2 * options.workers:
        if n_told(storage) >= options.trials * (killed + 1) / (options.kills + 3):
            victim = rng.randrange(1, options.workers)
            workers[victim].kill()
            workers[victim].join()
            killed += 1
            workers[victim] = worker("help", folder, options, url)
        time.sleep(0.05)
    for process in workers:
        process.join(600)
    wall_s = time.perf_counter() - start
    study = records.load_study(storage, "s")
    trials, told = study.get_trials(deepcopy=False), records.told_trials(study)
    keys = [t.user_attrs[CANDIDATE_ATTR] for t in told]
    begun = {t.user_attrs[CANDIDATE_ATTR] for t in trials if CANDIDATE_ATTR in t.user_attrs}
    numbers, states = {t.number for t in trials}, [t.state for t in trials if CANDIDATE_ATTR in t.user_attrs]
    return {
        "wall_s": wall_s, "kills": killed, "told": len(told), "told_twice_or_duplicate": len(keys) - len(set(keys)),
        "begun_and_never_told": len(begun - set(keys)), "failed_and_run_again": states.count(TrialState.FAIL),
        "left_running": sum(t.state is TrialState.RUNNING for t in trials), "numbers_twice": len(trials) - len(numbers),
        "leases_left": [lease.name for lease in leases.leases(storage, "s")],
        "outcomes": Counter(records.told_data(t)["outcome"] for t in told),
        "exit_codes": Counter(process.exitcode for process in workers), **times(folder, options.trials),
    }  # fmt: skip


def times(folder: Path, n_trials: int) -> dict[str, Any]:
    """Medians over all trials, and over the last hundred."""
    lines = [line for path in folder.glob("times-*.jsonl") for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    found: dict[str, Any] = {}
    for label, first in (("all", 0), (f"last_{LAST}", n_trials - LAST)):
        each = {name: [r[name] for r in rows if name in r and r["n"] >= first] for name in TIMES}
        medians = {name: statistics.median(seconds) for name, seconds in each.items() if seconds}
        found[label] = medians | {"ask_and_tell_s": medians["decide_s"] + medians["tell_s"]}
    return {"median_s": found}


def n_told(storage: Any) -> int:
    """Trials that ended as results, counted by the database."""
    try:
        study = records.load_study(storage, "s")
    except StoreError:
        return 0
    count = text("select count(*) from trials where study_id = :study and state in ('COMPLETE', 'PRUNED')")
    with storage.engine.connect() as connection:
        return int(connection.execute(count, {"study": study._study_id}).scalar())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, usual in {"trials": 1000, "workers": 16, "kills": 50, "seconds": 1.0}.items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    parser.add_argument("--sampler", default="random")
    options = parser.parse_args()
    programs = postgres.binaries()
    if programs is None:
        sys.exit("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory() as name, postgres.running(programs, durable=True) as server:
        figures = run(Path(name), options, server.url)
    write("coordinators", {**vars(options), **figures})


if __name__ == "__main__":
    main()
