"""Sixteen coordinators on one study in PostgreSQL, killed at random: what asking and telling takes, and whether a trial is lost.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import write
from optuna.trial import TrialState
from sqlalchemy import text
from support import postgres
from support.coordinate import coordinate

from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.storage import leases, records

FORK = multiprocessing.get_context("fork")
LAST = 100


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
    storage = records.open_storage(url)
    until(lambda: n_told(storage) > 0)
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
    return {
        "wall_s": wall_s,
        "kills": killed,
        "told": len(told),
        "told_twice_or_duplicate": len(keys) - len(set(keys)),
        "begun_and_never_told": len(begun - set(keys)),
        "left_running": sum(t.state is TrialState.RUNNING for t in trials),
        "failed_and_run_again": sum(t.state is TrialState.FAIL and CANDIDATE_ATTR in t.user_attrs for t in trials),
        "numbers_twice": len(trials) - len({t.number for t in trials}),
        "leases_left": [lease.name for lease in leases.leases(storage, "s")],
        "outcomes": Counter(records.told_data(t)["outcome"] for t in told),
        "exit_codes": Counter(process.exitcode for process in workers),
        **times(folder, options.trials),
    }


def times(folder: Path, n_trials: int) -> dict[str, Any]:
    """Medians over all trials, and over the last hundred."""
    rows = [
        json.loads(line)
        for path in folder.glob("times-*.jsonl")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    found: dict[str, Any] = {}
    for label, first in (("all", 0), (f"last_{LAST}", n_trials - LAST)):
        asked, told = (
            [r for r in rows if "claim_s" in r and r["n"] >= first],
            [r for r in rows if "tell_s" in r and r["n"] >= first],
        )
        names = dict.fromkeys(("wait_s", "decide_s", "claim_s"), asked) | {"tell_s": told}
        medians = {name: statistics.median(r[name] for r in where) for name, where in names.items() if where}
        found[label] = medians | {"ask_and_tell_s": medians["decide_s"] + medians["tell_s"]}
    return {"median_s": found}


def n_told(storage: Any) -> int:
    """Trials that ended as results, counted by the database."""
    try:
        study = records.load_study(storage, "s")
    except records.StoreError:
        return 0
    count = text("select count(*) from trials where study_id = :study and state in ('COMPLETE', 'PRUNED')")
    with storage.engine.connect() as connection:
        return int(connection.execute(count, {"study": study._study_id}).scalar())


def until(fact: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1.0)
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
