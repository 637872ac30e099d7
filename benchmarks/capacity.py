"""Measures what studies cost beyond their trials (storage, driver time, messages), and extrapolates it.

`python benchmarks/capacity.py [--trials 2000]` measures (1) one study that grows, with trials that take no time:
processor seconds of the driver, statements to the database and bytes for each trial, by how many were told before; (2)
what real trials leave in the study's folder, by ranks; (3) studies side by side on one PostgreSQL server (where it is
installed). `figures.py` makes the tables of `docs/clusters.md` of it; what stands there beyond the measured range is
a straight line through it, and says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy
from common import ROOT, complete, engine, request_of, write
from support import postgres
from support.coordinate import SPACE
from support.instant import Instant, plan_of, spec_of

from autotune.space.candidate import Candidate
from autotune.study.events import EventSink, Progress
from autotune.study.runner import Runner
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.leases import StudyLeases

TARGET = ROOT / "studies" / "code-gpt" / "model.py"
# Sampler -> the share of the trials that it is measured over: one that learns from all of them takes long.
SAMPLERS = {"physics": 0.25, "random": 1.0}
WINDOW = 50
RANKS = (1, 2, 4)
SIDE_BY_SIDE, TRIALS_EACH = (1, 4, 16), 40
# What is extrapolated to.
TRIALS, DEVICES, STUDIES = 10_000, 1_000, 100
FORK = multiprocessing.get_context("fork")


class Meter(EventSink):
    """Notes after each trial what has been used up so far."""

    def __init__(self, database: Path | None = None) -> None:
        self.statements, self.database, self.rows = 0, database, list[dict[str, float]]()

    def count(self, *_: object) -> None:
        self.statements += 1

    def ended(self, progress: Progress) -> None:
        files = self.database.parent.glob(f"{self.database.name}*") if self.database else ()
        used = {"cpu_s": time.process_time(), "statements": self.statements}
        self.rows.append(used | {"bytes": sum(file.stat().st_size for file in files)})


@contextmanager
def counted(storage: Any, meter: Meter) -> Iterator[None]:
    sqlalchemy.event.listen(storage.engine, "after_cursor_execute", meter.count)
    try:
        yield
    finally:
        sqlalchemy.event.remove(storage.engine, "after_cursor_execute", meter.count)


def study(folder: Path, url: str, name: str, sampler: str, n_trials: int, meter: Meter) -> None:
    """A study whose trials take no time, until so many are told."""
    plain = {"memory_filter": False, "stop_trials": False, "stop_below": 0, "finalists": 0}
    objectives = ["latency", "throughput", "memory"]
    spec = spec_of(name=name, trials=n_trials, sampler=sampler, space=[SPACE], objectives=objectives, **plain)
    storage = open_storage(url)
    ledger = StudyLeases(storage, name)
    with counted(storage, meter), ledger.leading(lambda _: None):
        Runner(plan_of(spec), Instant(), folder / name, ledger, meter).run()


def growing(sampler: str, n_trials: int) -> dict[str, Any]:
    """(1): a study in SQLite."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meter = Meter(folder / "autotune.db")
        study(folder, records.default_url(folder), "s", sampler, n_trials, meter)
    marks = [n for n in (100, 200, 500, 1000, 2000, 5000) if n <= len(meter.rows)]
    found = {}
    for n in marks:
        first, last = meter.rows[n - WINDOW], meter.rows[n - 1]
        found[str(n)] = {key: (last[key] - first[key]) / (WINDOW - 1) for key in ("cpu_s", "statements", "bytes")}
    return found


def footprints() -> dict[str, Any]:
    """(2): files and bytes of a real trial, by ranks."""
    found: dict[str, Any] = {}
    with engine("torch") as (executor, root):
        for ranks in RANKS:
            folder = root / str(ranks)
            request = request_of(TARGET, Candidate(micro_batch_size=2, zero_stage=1), world_size=ranks, max_steps=10)
            complete(executor, folder, request)
            files = [path for path in folder.rglob("*") if path.is_file()]
            found[str(ranks)] = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    return found


def together(n_studies: int) -> dict[str, float]:
    """(3): so many studies at once on one server, each in a process of its own."""
    programs = postgres.binaries()
    assert programs is not None
    with tempfile.TemporaryDirectory() as name, postgres.running(programs, durable=True) as server:
        open_storage(server.url)  # makes the tables

        def main(n: int) -> None:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            study(Path(name), server.url, f"s{n}", "random", TRIALS_EACH, Meter())

        start = time.perf_counter()
        processes = [FORK.Process(target=main, args=(n,)) for n in range(n_studies)]
        most = 0
        for process in processes:
            process.start()
        engine = sqlalchemy.create_engine(open_storage(server.url).engine.url)
        with engine.connect() as connection:
            while any(process.is_alive() for process in processes):
                count = connection.execute(
                    sqlalchemy.text("select count(*) from pg_stat_activity where backend_type = 'client backend'")
                )
                most = max(most, int(count.scalar_one()) - 1)
                connection.rollback()
                time.sleep(0.2)
        engine.dispose()
        wall = time.perf_counter() - start
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed:
            raise RuntimeError(f"{len(failed)} of {n_studies} studies failed")
        rate = n_studies * TRIALS_EACH / wall
        return {"trials_per_s": rate, "connections": most, "connections_per_study": most / n_studies}


def extrapolated(found: dict[str, Any]) -> dict[str, Any]:
    """What the measured range leads to expect of many trials, devices and studies."""
    ahead: dict[str, Any] = {"to": {"trials": TRIALS, "devices": DEVICES, "studies": STUDIES}}
    for sampler, by in found["growing"].items():
        n = [float(key) for key in by]
        slope, offset = np.polyfit(n, [row["cpu_s"] for row in by.values()], 1).tolist()
        slope_b, offset_b = np.polyfit(n, [row["bytes"] for row in by.values()], 1).tolist()
        last = max(by, key=int)
        ahead[sampler] = {
            "cpu_s_of_the_last_trial": offset + slope * TRIALS, "cpu_s": TRIALS * offset + slope * TRIALS**2 / 2,
            "statements": TRIALS * by[last]["statements"], "bytes": TRIALS * offset_b + max(0.0, slope_b) * TRIALS**2 / 2,
        }  # fmt: skip
    prints = found["footprints"]
    for key in ("files", "bytes"):
        slope, offset = np.polyfit([float(n) for n in prints], [row[key] for row in prints.values()], 1).tolist()
        ahead[f"trial_{key}_per_rank"], ahead[f"trial_{key}"] = slope, offset + slope * DEVICES
    if found.get("together"):
        best = max(found["together"].values(), key=lambda row: row["trials_per_s"])
        most = max(found["together"], key=int)
        ahead["connections"] = STUDIES * found["together"][most]["connections_per_study"]
        ahead["seconds_between_trials_of_a_study"] = STUDIES / best["trials_per_s"]
    return ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "growing": {sampler: growing(sampler, int(share * arguments.trials)) for sampler, share in SAMPLERS.items()},
        "footprints": footprints(),
    }
    if postgres.binaries() is None:
        print("PostgreSQL is not installed, so studies side by side are left out", file=sys.stderr)
    else:
        found["together"] = {str(n): together(n) for n in SIDE_BY_SIDE}
    write("capacity", found | {"extrapolated": extrapolated(found)})


if __name__ == "__main__":
    main()
