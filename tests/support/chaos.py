"""Kills processes at random in small real studies, and checks that nothing is lost, doubled or left behind.

`python tests/support/chaos.py [--kills 200] [--seed 0] [--minutes 60] [--only N] [--keep]`. Struck are the
driver (SIGKILL, Ctrl-C or SIGTERM), the warm server, single ranks, the database (PostgreSQL killed and started again;
an SQLite file removed), the dashboard, and the scheduler with or without the re-tuning that it began. A study takes up
to four kills; `--only N` plays the study of kill N again, up to that kill. Which process is struck, and when, follows
from the seed, as closely as a clock allows. The first broken invariant ends it with status 1, its name, and how to see
it again; the folder of that study is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import psutil
import sqlalchemy
from common import write
from optuna.trial import TrialState

from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.folder import trial_path
from autotune.study.storage import leases, records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.system.toolkit import extensions_dir
from autotune.trial.folder import result_in
from support import postgres

MODEL = Path(__file__).parents[1] / "models" / "ok.py"
TRIALS = 8
STUDY = f"""
target: ok.py
name: NAME
ranks: 2
base_config: {{train_micro_batch_size_per_gpu: 8}}
space: [{{micro_batch_size: [4, 8, 16], precision: [fp32, bf16], zero_stage: [0, 1, 2]}}]
global_batch: free
objectives: [latency, throughput, memory]
sampler: random
trials: {TRIALS}
trial_budget_s: 0.3
trial_deadline_s: 60
stop_below: 0
stop_trials: false
memory_filter: false
finalists: 1
repeats: 1
"""
KILLS_A_STUDY = 4
# How often each is struck, where it is there to be struck.
VICTIMS = {"driver": 6, "server": 4, "rank": 4, "database": 3, "dashboard": 1, "scheduler": 2}
SIGNALS = {"KILL": 6, "INT": 1, "TERM": 1}
STATUS = {"INT": 130, "TERM": 143}
# What a person may see at the end of a run that came to grief: one sentence.
PATIENCE_S = 150.0
MARK = "AUTOTUNE_CHAOS"


class Broken(Exception):
    """Something that must hold does not."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One strike.

    Attributes:
        number: Counted over all studies of a seed.
        victim: What is struck.
        signal: By what; only a driver is asked politely now and then.
        early: Counted from the start of the driver, not from its first trial.
        after_s: When.
        outcome: What came of it.
    """

    number: int
    victim: str
    signal: str = "KILL"
    early: bool = False
    after_s: float = 0.0
    outcome: str = "not struck"


def plan(seed: int, study: int, backends: Sequence[str]) -> tuple[str, list[Kill]]:
    """The database and the kills of a study; nothing else decides."""
    rng = random.Random(f"{seed}:{study}")
    backend = backends[study % len(backends)]
    kills = []
    for n in range(KILLS_A_STUDY):
        victim = rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        early = rng.random() < 0.25 and victim == "driver"
        kills.append(
            Kill(
                number=study * KILLS_A_STUDY + n, victim=victim, early=early, after_s=round(rng.uniform(0.0, 6.0 if early else 2.5), 2),
                signal=rng.choices(list(SIGNALS), list(SIGNALS.values()))[0] if victim == "driver" else "KILL",
            )
        )  # fmt: skip
    # A scheduler has something to do only when the study has ended.
    return backend, sorted(kills, key=lambda kill: (kill.victim == "scheduler", kill.number))


class Play:
    """One study, its processes, and who is struck.

    Args:
        folder: Where it runs.
        name: The study.
        server: PostgreSQL, where that is its database.
        seed: Decides which of several ranks is struck.
    """

    def __init__(self, folder: Path, name: str, server: postgres.Postgres | None, seed: str) -> None:
        self.folder, self.name, self.server, self.rng = folder, name, server, random.Random(seed)
        self.url = server.url if server is not None else records.default_url(folder / "studies")
        self.study = folder / "studies" / name
        self.mark = uuid.uuid4().hex
        self.shared = set(os.listdir("/dev/shm"))
        self.driver: subprocess.Popen[str] | None = None
        self.started = 0.0
        self.said_from = 0
        self.over_and_done = False
        self.struck: Counter[str] = Counter()
        (folder / "tmp").mkdir(parents=True)
        (folder / "studies").mkdir()
        shutil.copyfile(MODEL, folder / "ok.py")
        (folder / "study.yaml").write_text(STUDY.replace("NAME", name))

    # Processes

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of autotune, whose processes can be told from all others."""
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.folder / "tmp"), "AUTOTUNE_STORAGE": self.url}
        with open(self.folder / "answer.log", "a") as answer, open(self.folder / "said.log", "a") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", *arguments], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=answer, stderr=said, start_new_session=True, text=True,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """All living processes of this play."""
        found, wanted = [], f"{MARK}={self.mark}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                marked = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if marked and psutil.Process(pid).status() != "zombie":
                    found.append(pid)
        return found

    def run(self) -> subprocess.Popen[str]:
        """The driver; started where it is not under way."""
        if self.driver is None:
            self.said_from = len(self.said())
            self.driver, self.started = self.command("run", "study.yaml"), time.monotonic()
        return self.driver

    def end(self) -> None:
        """Ends whatever is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.driver is not None:
            self.driver.wait()

    # Strikes

    def strike(self, kill: Kill) -> str:
        """Waits for the moment and strikes; returns what came of it."""
        if self.over_and_done:
            return "no run was left to strike"
        driver = self.run()
        if not self.moment(kill, driver):
            return self.over(driver)
        victim = self.struck_by(kill, driver)
        if victim.startswith("no "):
            return victim
        self.struck[kill.victim] += 1
        return victim

    def moment(self, kill: Kill, driver: subprocess.Popen[str]) -> bool:
        """Sleeps until it is time; False if the run ends before."""
        if not kill.early:
            self.until(lambda: driver.poll() is not None or self.is_searching(), "a trial begins", 60)
        end = (self.started if kill.early else time.monotonic()) + kill.after_s
        while time.monotonic() < end and driver.poll() is None:
            time.sleep(0.01)
        return driver.poll() is None

    def is_searching(self) -> bool:
        """Whether the driver has come to its trials."""
        assert self.driver is not None
        with contextlib.suppress(OSError, IndexError, ValueError):
            lines = (self.study / "trials" / "journal.jsonl").read_text().splitlines()
            return json.loads(lines[0])["run"] == self.driver.pid and any('"trial_started"' in line for line in lines)
        return False

    def struck_by(self, kill: Kill, driver: subprocess.Popen[str]) -> str:
        if kill.victim == "driver":
            driver.send_signal(getattr(signal, f"SIG{kill.signal}"))
            status = self.ended(driver)
            polite = kill.signal != "KILL" and not kill.early  # who has hardly begun need not say much
            if polite and status not in (STATUS[kill.signal], 0):
                raise Broken(f"SIG{kill.signal} ended the driver with status {status}: {self.last_words()}")
            if polite and status and "To go on" not in self.last_words() and "nothing to keep" not in self.last_words():
                raise Broken(f"after SIG{kill.signal} the driver does not say how to go on: {self.last_words()}")
            self.over_and_done = status == 0
            self.gone()
            return f"driver ended with {status}"
        if kill.victim in ("server", "rank"):
            found = below(driver.pid)
            if kill.victim == "rank":
                there = lambda: not found or not found[0].is_running() or bool(below(found[0].pid))  # noqa: E731
                self.until(there, "a rank runs", 20)
                found = below(found[0].pid) if found else []
            if not found:
                return f"no {kill.victim} was there"
            with contextlib.suppress(psutil.NoSuchProcess):
                self.rng.choice(found).kill()
            return f"{kill.victim} killed"
        if kill.victim == "database":
            return self.take_database()
        assert kill.victim == "dashboard"
        dashboard = self.command("dashboard", "--port", "0")
        time.sleep(kill.after_s)
        dashboard.kill()
        dashboard.wait()
        return "dashboard killed"

    def take_database(self) -> str:
        if self.server is not None:
            self.server.kill()
            time.sleep(self.rng.uniform(0.2, 2.0))
            self.server.start()
            return "server killed and started again"
        file = self.folder / "studies" / "autotune.db"
        driver = self.run()
        file.unlink()
        self.until(lambda: file.exists() or driver.poll() is not None, "the file is written anew", 60)
        return "file removed"

    def schedule(self, kill: Kill) -> str:
        """Begins a re-tuning by a daemon, strikes the daemon (and now and then the re-tuning too), and has another daemon end it."""
        if "recommended" not in json.loads((self.study / "recommended.json").read_text())["picks"]:
            return "no answer was there to be re-tuned"
        history = History(open_storage(self.url, create=False).engine)
        if not history.schedules(self.name):
            history.add_schedule(study=self.name, every_s=7 * 86400.0, cron=None, on_change=False, next_run_at=0.0)
        else:
            history.update_schedule(history.schedules(self.name)[0]["id"], next_run_at=0.0)
        before = len(history.decisions(self.name))
        daemon = self.command("schedule", "run")
        self.until(lambda: len(history.decisions(self.name)) > before, "a re-tuning begins", 60)
        time.sleep(kill.after_s * 2)
        both = self.rng.random() < 0.5
        begun = below(daemon.pid) if both else []
        daemon.kill()
        for process in begun:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()
        self.struck["scheduler"] += 1
        second = self.command("schedule", "run")
        self.until(lambda: history.interrupted(self.name) is None, "the re-tuning ends", PATIENCE_S)
        made = history.decisions(self.name)[: len(history.decisions(self.name)) - before]
        self.until(lambda: lockable(self.study / ".lock"), "the re-tuning's process ends", 30)
        second.terminate()
        status = second.wait(30)
        if status:
            raise Broken(f"the scheduler ended with status {status} after SIGTERM")
        verdicts = [row["verdict"] for row in made]
        if verdicts not in (["unchanged"], ["improved"]):
            raise Broken(f"the re-tuning was decided as {verdicts}: {[row['evidence'].get('reason') for row in made]}")
        return "daemon killed" + (" with its re-tuning" if both else "")

    # Ends

    def over(self, driver: subprocess.Popen[str]) -> str:
        """What it means that the run is over before the kill."""
        status = self.ended(driver)
        if status == 0:
            self.over_and_done = True
            return "no run was left to strike"
        self.refused(status)
        return "no run: the one before ended for what had been struck"

    def ended(self, driver: subprocess.Popen[str]) -> int:
        status = driver.wait(PATIENCE_S)
        self.driver = None
        return status

    def refused(self, status: int) -> None:
        """Accepts the end of a run only where something was struck that it cannot do without, and only in a sentence."""
        said = self.said()[self.said_from :]
        in_words = "Traceback" not in said and self.last_words().startswith("autotune: ")
        if status not in (1, 2) or not in_words or not sum(self.struck.values()):
            raise Broken(f"the run ended with status {status}: {said[-1500:]}")

    def said(self) -> str:
        log = self.folder / "said.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def last_words(self) -> str:
        return (self.said().strip().splitlines() or [""])[-1]

    def finish(self) -> None:
        """Runs the study to its end, again where what was struck has ended a run."""
        for _ in range(3):
            if self.over_and_done:
                return
            status = self.ended(self.run())
            # The baseline's rank may have been struck.
            self.over_and_done = status == 0 or (status == 1 and self.struck["rank"] > 0)
            if not self.over_and_done:
                self.refused(status)
        if not self.over_and_done:
            raise Broken(f"the study does not come to its end: {self.last_words()}")

    def gone(self) -> None:
        def who() -> str:
            return str([psutil.Process(pid).cmdline() for pid in self.processes()])

        self.until(lambda: not self.processes(), "every process is gone", 30, who)

    def until(self, fact: Callable[[], bool], what: str, timeout_s: float, why: Callable[[], str] = lambda: "") -> None:
        end = time.monotonic() + timeout_s
        while not fact():
            if time.monotonic() > end:
                raise Broken(f"waited {timeout_s:.0f} s in vain until {what}: {why() or self.last_words()}")
            time.sleep(0.05)

    # Invariants

    def check(self) -> dict[str, int]:
        """Everything that must hold of a study that has ended; what was run again."""
        self.gone()
        storage = open_storage(self.url, create=False)
        study = records.load_study(storage, self.name)
        trials, told = study.get_trials(deepcopy=False), records.told_trials(study)
        keys = [t.user_attrs[CANDIDATE_ATTR] for t in told]
        lost = [t for t in trials if t.state is TrialState.FAIL and CANDIDATE_ATTR in t.user_attrs]
        facts = {
            f"{TRIALS} trials are told": len(told) == TRIALS,
            "no trial is told twice": len(set(keys)) == len(keys),
            "numbers have no gap": sorted(t.number for t in trials) == list(range(len(trials))),
            "no row is left running": not records.running(study),
            "only what ran is run again": len(lost)
            <= self.struck["driver"] + self.struck["server"] + self.struck["database"],
            "nobody holds a lease": leases.leases(storage, self.name) == [],
            "each told trial has its result": all(self.has_result(t) for t in told),
            "the lock is free": lockable(self.study / ".lock")
            and all(map(lockable, (self.folder / "tmp").glob("autotune-*.lock"))),
            "no compiler's lock is left": not list(extensions_dir().glob("**/lock")),
            "nothing is left in /dev/shm": not self.left_in_shared_memory(),
            "no temporary folder is left": not list((self.folder / "tmp").glob("autotune-*/")),
            "files are whole": not broken_files(self.folder / "studies"),
            "the database is whole": is_whole(storage),
        }
        storage.engine.dispose()
        for name, holds in facts.items():
            if not holds:
                states = [(t.number, t.state.name) for t in trials]
                raise Broken(f"{name}: told {keys}, trials {states}, files {broken_files(self.study)}")
        return {"told": len(told), "run_again": len(lost)}

    def has_result(self, told: Any) -> bool:
        if records.told_data(told)["reason"].startswith("twice: "):  # its server was killed twice, so it has none
            return True
        result = result_in(trial_path(self.study, told.number))
        return result is not None and result.candidate == records.told_candidate(told).values()

    def left_in_shared_memory(self) -> set[str]:
        prefixes = ("torch_", "psm_", "sem.", "nccl-", "deepspeed")
        return {name for name in os.listdir("/dev/shm") if name.startswith(prefixes)} - self.shared


def below(pid: int) -> list[psutil.Process]:
    """Children of a process, in the order of their numbers: of a driver its warm server, of a server its ranks."""
    with contextlib.suppress(psutil.Error):
        return sorted(psutil.Process(pid).children(), key=lambda child: child.pid)
    return []


def lockable(path: Path) -> bool:
    """Whether nobody holds a lock."""
    if not path.exists():
        return True
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def broken_files(folder: Path) -> list[str]:
    """Files that cannot be read, and drafts of killed writers in a study's own folder."""
    found = [str(path) for path in folder.glob("*/.*") if re.fullmatch(r"\..+\.\d+", path.name)]
    for path in folder.rglob("*.json"):
        if not path.name.startswith("."):
            try:
                json.loads(path.read_text())
            except ValueError:
                found.append(str(path))
    for path in folder.rglob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        for line in lines:
            try:
                json.loads(line)
            except ValueError:
                if line.endswith("\n"):  # a killed process may leave its last one short
                    found.append(str(path))
    return found


def is_whole(storage: Any) -> bool:
    """Whether the database passes its own check, and every row can be read."""
    if storage.is_sqlite:
        with contextlib.closing(sqlite3.connect(sqlalchemy.make_url(str(storage.url)).database)) as database:
            whole = database.execute("pragma integrity_check").fetchall() == [("ok",)]
            return whole and database.execute("pragma foreign_key_check").fetchall() == []
    tables = sqlalchemy.MetaData()
    tables.reflect(storage.engine)
    with storage.engine.connect() as connection:
        for table in tables.sorted_tables:
            for key in table.foreign_keys:
                orphans = sqlalchemy.select(sqlalchemy.func.count()).select_from(
                    table.outerjoin(key.column.table, key.parent == key.column)
                )
                if connection.scalar(orphans.where(key.parent.is_not(None), key.column.is_(None))):
                    return False
            connection.execute(sqlalchemy.select(table)).fetchall()
    return True


def play(
    kills: Sequence[Kill], folder: Path, name: str, server: postgres.Postgres | None, seed: str
) -> tuple[list[Kill], dict[str, int]]:
    """A study with its kills, run to its end and looked at.

    Raises:
        Broken: With the kill that it was noticed after.
    """
    at, struck = Play(folder, name, server, seed), list[Kill]()
    try:
        for kill in (kill for kill in kills if kill.victim != "scheduler"):
            struck.append(replace(kill, outcome=at.strike(kill)))
        at.finish()
        found = at.check()
        for kill in (kill for kill in kills if kill.victim == "scheduler"):
            struck.append(replace(kill, outcome=at.schedule(kill)))
            at.check()
    except (Broken, subprocess.TimeoutExpired) as error:
        after = kills[min(len(struck), len(kills) - 1)]
        raise Broken(f"kill {after.number} ({after.victim}, SIG{after.signal}): {error}") from None
    finally:
        at.end()
    return struck, found


@contextlib.contextmanager
def databases() -> Iterator[postgres.Postgres | None]:
    """A private PostgreSQL, where one is installed."""
    programs = postgres.binaries()
    if programs is None:
        print("PostgreSQL is not installed, so all studies are in SQLite", file=sys.stderr)
        yield None
    else:
        with postgres.running(programs, durable=True) as server:
            yield server


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200, help="strikes in all, those that came too late not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further study is begun after so long")
    parser.add_argument("--only", type=int, help="play the study of this kill, up to it, and write nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    options = parser.parse_args()
    began, rows, studies = time.monotonic(), list[dict[str, Any]](), list[dict[str, Any]]()
    number = (options.only or 0) // KILLS_A_STUDY
    with databases() as server:
        backends = ["sqlite", "postgresql"] if server is not None else ["sqlite"]
        while n_struck(rows) < options.kills and time.monotonic() - began < 60 * options.minutes:
            backend, kills = plan(options.seed, number, backends)
            if options.only is not None:
                kills = kills[: 1 + next(n for n, kill in enumerate(kills) if kill.number == options.only)]
            folder, start = Path(tempfile.mkdtemp(prefix="autotune-chaos-")), time.monotonic()
            own = server if backend == "postgresql" else None
            try:
                struck, found = play(kills, folder / "play", f"chaos-{number}", own, f"{options.seed}:{number}:who")
            except Broken as error:
                print(f"\nBROKEN, seed {options.seed}, {backend}, {error}\nfolder: {folder}", file=sys.stderr)
                last = int(str(error).split()[1])
                print(f"again: python tests/support/chaos.py --seed {options.seed} --only {last}", file=sys.stderr)
                return 1
            for kill in struck:
                rows.append({"database": backend, **asdict(kill)})
                words = f"{kill.number:>4}  {backend:<10}  {kill.victim:<9}  {kill.signal:<4}  {kill.after_s:>5.2f} s"
                print(f"{words}  {kill.outcome}", flush=True)
            wall_s = round(time.monotonic() - start, 1)
            studies.append({"study": number, "database": backend, "wall_s": wall_s, **found})
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
            number += 1
            if options.only is not None:
                return 0
    found = {"seed": options.seed, "struck": n_struck(rows), **table(rows, studies)}
    write("chaos", found | {"studies": studies, "rows": rows})
    return 0


def n_struck(rows: Sequence[dict[str, Any]]) -> int:
    return sum(not row["outcome"].startswith("no") for row in rows)


def table(rows: Sequence[dict[str, Any]], studies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was struck, and what it cost."""
    struck = [row for row in rows if not row["outcome"].startswith("no")]
    return {
        "by_victim": Counter(
            f"{row['victim']} SIG{row['signal']}" if row["victim"] == "driver" else row["victim"] for row in struck
        ),
        "by_database": Counter(row["database"] for row in struck),
        "came_too_late": len(rows) - len(struck),
        "invariants_broken": 0,
        "n_studies": len(studies),
        "trials_told": sum(each["told"] for each in studies),
        "trials_run_again": sum(each["run_again"] for each in studies),
        "wall_s": sum(each["wall_s"] for each in studies),
    }


if __name__ == "__main__":
    sys.exit(main())
