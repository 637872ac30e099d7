"""Takes machines, links, engines and databases away from studies at random, and checks that no configuration pays for it.

`python tests/support/outages.py slurm|ssh|ray|kubernetes [--outages 60] [--seed 0] [--minutes 20]`. Engine and database (PostgreSQL where
it is installed) are real and on the loopback, driver and agents are the product's; only what ranks do takes half a second and
is made up (`light/sitecustomize.py`). After each study it must hold that every trial was told once, none was booked as a
failure, a run ended with 0 only with all trials told and else in one sentence, and nothing is left running. Results are added to
`benchmarks/results/outages.json`; the first broken fact ends it with status 1 and the study's folder is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import psutil
from common import RESULTS, write

from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.folder import trial_path
from autotune.study.storage import leases, records
from autotune.study.storage.database import open_storage
from autotune.trial.folder import result_in
from autotune.trial.result import Outcome
from support import clusters, postgres

DRIVER = Path(__file__).with_name("outage_driver.py")
LIGHT = Path(__file__).with_name("light")
TRIALS, OUTAGES_A_STUDY = 10, 5
# What strikes on every engine, with its weight. An agent is killed once a study: twice in a trial is the configuration's crash.
COMMON = {"driver": 3, "database": 2, "agent": 1}
RUNS = 25  # of one study
WAIT_S, SETTLE_S = 150.0, 5.0
TIME_LIMIT_S = 40.0  # Slurm looks every half a minute for jobs that are over time


class Broken(Exception):
    """Something that must hold does not."""


class Site(Protocol):
    """An engine on the loopback, and what can happen to it.

    Attributes:
        options: What the driver's engine is made of.
        kinds: Kinds of outages with their weights.
    """

    options: dict[str, Any]
    kinds: dict[str, int]

    def strike(self, kind: str, rng: random.Random) -> None:
        """Takes something away, and gives it back some time later."""

    def settle(self) -> None:
        """Does what a person does in the end, so that all machines are there."""


@dataclass
class SlurmSite:
    """Slurm: nodes fail or are drained, jobs are preempted or cancelled, the controller dies."""

    cluster: clusters.SlurmCluster
    options: dict[str, Any] = field(default_factory=lambda: {"engine": "slurm", "options": {"idle": "120"}})
    kinds: dict[str, int] = field(
        default_factory=lambda: (
            COMMON
            | {"node failed": 3, "node drained": 3, "preempted": 3, "cancelled": 2, "controller": 2, "time limit": 4}
        )
    )

    def strike(self, kind: str, rng: random.Random) -> None:
        call, node, away_s = self.cluster.call, rng.choice(["n1", "n2"]), rng.uniform(0.3, 2.0)
        match kind:
            case "node failed":
                call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
                time.sleep(away_s)
                call("scontrol", "update", f"NodeName={node}", "State=RESUME")
            case "node drained":
                call("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=test")
                self._cancel()
                time.sleep(away_s)
                call("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
            case "preempted":
                call("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
            case "cancelled":
                self._cancel()
            case "time limit":
                for line in self.cluster.jobs():
                    call("scontrol", "update", f"JobId={line.split()[0]}", "EndTime=now")
                clusters.wait_until(lambda: not any("RUNNING" in line for line in self.cluster.jobs()), TIME_LIMIT_S)
            case "controller":
                old = next(p for p in reversed(self.cluster.processes) if "slurmctld" in str(p.args))
                old.kill()
                old.wait()
                time.sleep(away_s)
                self.cluster._spawn(["slurmctld", "-D", "-f", str(self.cluster.conf)])

    def settle(self) -> None:
        """Gives nodes back that Slurm itself drained: a controller that is killed may forget that a job had begun there."""
        for node in ("n1", "n2"):
            if "drain" in self.cluster.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T"):
                self.cluster.call("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _cancel(self) -> None:
        self.cluster.call("scancel", "--name=autotune-outages")


@dataclass
class SshSite:
    """Two hosts: connections, sessions and daemons die, the link is cut."""

    hosts: clusters.Hosts
    options: dict[str, Any] = field(init=False)
    kinds: dict[str, int] = field(
        default_factory=lambda: COMMON | {"connection": 3, "session": 3, "daemon": 2, "link cut": 2}
    )

    def __post_init__(self) -> None:
        ssh = f"{self.hosts.ssh} -o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
        self.options = {"engine": "ssh", "options": {"ssh": ssh, "idle": "30"}, "hosts": ["host1", "host2"]}

    def settle(self) -> None:
        """Does nothing."""

    def strike(self, kind: str, rng: random.Random) -> None:
        number, away_s = rng.choice([1, 2]), rng.uniform(0.3, 2.0)
        match kind:
            case "connection":
                for process in running(f"host{number} sh ", "ServerAliveInterval"):
                    process.kill()
            case "session":
                for process in psutil.Process(self.hosts.processes[number - 1].pid).children(recursive=True):
                    if "sshd" in process.name():
                        process.kill()
            case "daemon":
                self.hosts.restart(number, away_s)
            case "link cut":
                link = f"{self.hosts.prefix}v{number}"
                subprocess.run(["ip", "link", "set", link, "down"], check=True)
                time.sleep(rng.uniform(3.0, 5.0))
                subprocess.run(["ip", "link", "set", link, "up"], check=True)


@dataclass
class RaySite:
    """Ray: nodes are lost and others join, actors and their workers are killed."""

    cluster: Any
    options: dict[str, Any] = field(init=False)
    kinds: dict[str, int] = field(default_factory=lambda: COMMON | {"node lost": 4, "worker killed": 3})

    def __post_init__(self) -> None:
        self.options = {"engine": "ray", "options": {"address": self.cluster.address, "idle": "60"}}

    def settle(self) -> None:
        """Does nothing."""

    def strike(self, kind: str, rng: random.Random) -> None:
        if kind == "node lost":
            node = rng.choice([each for each in self.cluster.list_all_nodes() if each is not self.cluster.head_node])
            self.cluster.remove_node(node, allow_graceful=False)
            time.sleep(rng.uniform(0.3, 2.0))
            self.cluster.add_node(
                num_cpus=1, node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=80 << 20
            )
        else:
            for process in running("ray::Machine"):
                process.kill()


@dataclass
class PodSite:
    """Pods of a JobSet, as processes: they are evicted, or vanish with their node; others take their numbers."""

    root: Path
    options: dict[str, Any] = field(init=False)
    kinds: dict[str, int] = field(default_factory=lambda: COMMON | {"pod evicted": 3, "node vanished": 3})
    pods: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = {"engine": "kubernetes", "options": {"idle": "60"}, "board": str(self.root / "board")}
        for number in (0, 1):
            self.start(number)

    def start(self, number: int) -> None:
        """Starts the pod of a machine."""
        environment = {**os.environ, "JOB_COMPLETION_INDEX": str(number), "AUTOTUNE_ADDRESS": "127.0.0.1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"pod-{number}.log", "ab") as log:
            self.pods[number] = subprocess.Popen(
                [sys.executable, "-m", "autotune.executors.pods", self.options["board"]], env=environment, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def settle(self) -> None:
        """Does nothing."""

    def strike(self, kind: str, rng: random.Random) -> None:
        number = rng.choice([0, 1])
        if kind == "pod evicted":
            self.pods[number].terminate()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self.pods[number].pid).children(recursive=True):
                    process.kill()
            self.pods[number].kill()
        self.pods[number].wait()
        time.sleep(rng.uniform(0.3, 2.0))
        self.start(number)

    def stop(self) -> None:
        """Ends the pods."""
        for pod in self.pods.values():
            clusters.end(pod)


def running(*words: str) -> list[psutil.Process]:
    """Processes of this machine whose command line holds all the words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if all(word in line for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


class Play:
    """One study, struck and run again until it is over.

    Args:
        folder: Where it lies.
        site: Its engine.
        server: PostgreSQL; None for SQLite.
        rng: Decides what strikes, and when.
        nodes: Machines of a trial.
    """

    def __init__(
        self, folder: Path, site: Site, server: postgres.Postgres | None, rng: random.Random, nodes: int
    ) -> None:
        self.folder, self.site, self.server, self.rng, self.nodes = folder, site, server, rng, nodes
        folder.mkdir(parents=True)
        self.url = server.url if server is not None else records.default_url(folder)
        given = {**site.options, "nodes": nodes, "url": self.url, "trials": TRIALS}
        (folder / "driver.json").write_text(json.dumps(given))
        self.driver: subprocess.Popen[bytes] | None = None
        self.statuses: list[int] = []
        self.struck: list[str] = []

    def run(self, outages: int) -> None:
        """Strikes so often, and lets the study come to its end.

        Raises:
            Broken: A fact does not hold.
        """
        try:
            for _ in range(outages):
                if not self._is_under_way():
                    break
                self._strike()
            while self.statuses[-1:] != [0]:
                self._restart()
                self._ended(self._wait())
            self._check()
        except subprocess.TimeoutExpired:
            raise Broken(f"a run does not end after {self.struck}: {self._said()[-6000:]}") from None
        finally:
            if self.driver is not None and self.driver.poll() is None:
                self.driver.kill()
                self.driver.wait()

    def _wait(self) -> int:
        """Waits for the driver's end."""
        assert self.driver is not None
        for _ in range(int(WAIT_S // SETTLE_S)):
            self.site.settle()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.driver.wait(SETTLE_S)
        os.kill(self.driver.pid, signal.SIGUSR1)  # its threads' tracebacks go to its log
        time.sleep(1.0)
        raise subprocess.TimeoutExpired("driver", WAIT_S)

    def _strike(self) -> None:
        kinds = {k: n for k, n in self.site.kinds.items() if not (k == "agent" and k in self.struck)}
        if self.server is None:
            del kinds["database"]
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        time.sleep(self.rng.uniform(0.0, 1.2))
        self.struck.append(kind)
        if kind == "driver":
            assert self.driver is not None
            self.driver.kill()
            self._ended(self.driver.wait())
        elif kind == "database":
            assert self.server is not None
            self.server.kill()
            time.sleep(self.rng.uniform(0.2, 2.0))
            self.server.start()
        elif kind == "agent":
            for process in running("autotune.executors.node_agent", str(self.folder))[-1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        else:
            self.site.strike(kind, self.rng)

    def _is_under_way(self) -> bool:
        """Waits until a trial is with the engine; False if the study is over before."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if self.statuses[-1:] == [0]:
                return False
            self._restart()
            assert self.driver is not None
            folders = (self.folder / "s" / "trials").glob("[0-9]*")
            if any((path / "job.json").exists() and not (path / "result.json").exists() for path in folders):
                return True
            if (status := self.driver.poll()) is not None:
                self._ended(status)
            time.sleep(0.03)
        raise Broken(f"no trial begins after {self.struck}: {self._said()[-600:]}")

    def _restart(self) -> None:
        if self.driver is not None and self.driver.poll() is None:
            return
        if self.driver is not None and len(self.statuses) < self._n_started:
            self._ended(self.driver.returncode)
            if self.statuses[-1] == 0:
                return
        if len(self.statuses) >= RUNS:
            raise Broken(f"the study does not come to its end: {self.statuses}, {self._said()[-600:]}")
        environment = {**os.environ, "AUTOTUNE_CACHE": str(self.folder / "cache")}
        environment["PYTHONPATH"] = os.pathsep.join([str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.folder / "said.log", "ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, str(DRIVER), str(self.folder)], env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self._n_started = len(self.statuses) + 1

    def _ended(self, status: int) -> None:
        if len(self.statuses) < self._n_started:
            self.statuses.append(status)
        last = (self._said().strip().splitlines() or [""])[-1]
        if "Traceback" in self._said() or (
            status not in (0, -9) and not (status == 75 and last.startswith("autotune: "))
        ):
            raise Broken(f"a run ended with status {status} after {self.struck}: {self._said()[-1500:]}")

    def _said(self) -> str:
        log = self.folder / "said.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _check(self) -> None:
        storage = open_storage(self.url, create=False)
        study = records.load_study(storage, "s")
        told = records.told_trials(study)
        keys = [each.user_attrs[CANDIDATE_ATTR] for each in told]
        ends = Counter(records.told_data(each)["outcome"] for each in told)
        results = [result_in(trial_path(self.folder / "s", each.number)) for each in told]
        facts = {
            f"{TRIALS} trials are told": len(told) == TRIALS,
            "none is told twice": len(set(keys)) == len(keys),
            "no candidate is blamed": set(ends) == {str(Outcome.COMPLETE)},
            "each has its own result": [r.candidate if r else None for r in results]
            == [records.told_candidate(each).values() for each in told],
            "no row is left running": not records.running(study),
            "nobody holds a lease": leases.leases(storage, "s") == [],
            "no agent is left": clusters.wait_until(
                lambda: not running("autotune.executors.node_agent", str(self.folder)), 40
            ),
        }
        storage.engine.dispose()
        for name, holds in facts.items():
            if not holds:
                why = {
                    each.number: records.told_data(each)["reason"] for each in told if records.told_data(each)["reason"]
                }
                raise Broken(f"{name}, after {self.struck}: {keys}, {ends}, {why}")


@contextlib.contextmanager
def site_of(engine: str, root: Path) -> Iterator[Site]:
    """An engine on the loopback."""
    match engine:
        case "slurm":
            with clusters.slurm(root) as cluster:
                yield SlurmSite(cluster)
        case "ssh":
            with clusters.two_hosts(root) as hosts:
                yield SshSite(hosts)
        case "kubernetes":
            site = PodSite(root)
            try:
                yield site
            finally:
                site.stop()
        case _:
            with clusters.ray_cluster(3) as cluster:
                yield RaySite(cluster)


def why_not(engine: str) -> str:
    """Why there is no such engine here; empty where there is."""
    known: dict[str, Callable[[], str]] = {
        "slurm": clusters.why_no_slurm, "ssh": clusters.why_no_hosts, "ray": clusters.why_no_ray,
        "kubernetes": str,
    }  # fmt: skip
    return known[engine]()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["slurm", "ssh", "ray", "kubernetes"])
    parser.add_argument("--outages", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="no further study is begun after so long")
    given = parser.parse_args(arguments)
    if why := why_not(given.engine):
        print(why, file=sys.stderr)
        return 2
    root, struck, n_studies, began = (
        Path(tempfile.mkdtemp(prefix="autotune-outages-")),
        list[str](),
        0,
        time.monotonic(),
    )
    programs = postgres.binaries()
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(site_of(given.engine, root / "site"))
        while len(struck) < given.outages and time.monotonic() - began < 60 * given.minutes:
            rng = random.Random(f"{given.seed}:{n_studies}")
            with contextlib.ExitStack() as one:
                own = n_studies % 2 == 0 and programs is not None
                server = one.enter_context(postgres.running(programs, durable=True)) if own and programs else None
                nodes = 1 if given.engine == "ray" else 1 + n_studies % 2
                play = Play(root / f"study-{n_studies}", site, server, rng, nodes)
                try:
                    play.run(OUTAGES_A_STUDY)
                except Broken as error:
                    print(
                        f"BROKEN, {given.engine}, seed {given.seed}, study {n_studies}: {error}\n{play.folder}",
                        file=sys.stderr,
                    )
                    return 1
            struck, n_studies = [*struck, *play.struck], n_studies + 1
            took_s = time.monotonic() - began
            print(
                f"{took_s:.0f} s, study {n_studies}: {', '.join(play.struck)}; runs ended with {play.statuses}",
                flush=True,
            )
            shutil.rmtree(play.folder, ignore_errors=True)
    keep(given.engine, struck, n_studies, time.monotonic() - began)
    shutil.rmtree(root, ignore_errors=True)
    return 0


def keep(engine: str, struck: Sequence[str], n_studies: int, wall_s: float) -> None:
    """Adds what was tried on an engine to the results; nothing was broken."""
    path = RESULTS / "outages.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get("engines", {}).get(engine, {"by_kind": {}, "studies": 0, "wall_s": 0.0})
    by_kind = dict(Counter(kept["by_kind"]) + Counter(struck))
    now = {"by_kind": by_kind, "studies": kept["studies"] + n_studies, "wall_s": round(kept["wall_s"] + wall_s, 1)}
    engines = {**before.get("engines", {}), engine: now}
    total = sum(sum(each["by_kind"].values()) for each in engines.values())
    facts = {"outages": total, "lost_or_told_twice": 0, "candidates_blamed": 0, "ended_as_if_done": 0}
    write("outages", {**facts, "trials_a_study": TRIALS, "engines": engines})


if __name__ == "__main__":
    sys.exit(main())
