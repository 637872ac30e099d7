"""The agent of a machine in a cluster: runs the orders in a shared folder on a warm server, and writes how they ended.

    python -m autotune.executors.node_agent SPOOL [--node N] [--address HOST] [--lifeline]

It is the same for every engine; an engine only starts one on each machine.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.errors import UserError
from autotune.executors.base import Status
from autotune.executors.local import LocalExecutor
from autotune.system import files
from autotune.trial.folder import TrialDir, read_record, record_in, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit

TICK_S = 0.05
LOST = "the process that watched the ranks died"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the agents of a study.

    Attributes:
        modules: Modules that the user's target imports; the warm servers import them once.
        environment: Variables that the user's launch command sets.
        exported: Variables of the coordinator that are passed on to other machines.
        idle_s: An agent ends after this time without a sign of a coordinator.
    """

    modules: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    working_dir: str = ""
    idle_s: float = 600.0


class Spool:
    """Folder that a coordinator and its agents share: orders, and files that the agents write about themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.json"
        self.orders = path / "orders.json"
        self.alive = path / "alive"

    def start(self, node: int) -> Path:
        """Returns the script that starts the agent of a machine, where a command line cannot hold its variables."""
        return self.path / f"start-{node}.sh"

    def forget(self) -> None:
        """Removes what holds the user's variables, which may be tokens."""
        for path in (self.settings, *self.path.glob("start-*.sh")):
            path.unlink(missing_ok=True)

    def node(self, node: int) -> Path:
        """Returns the file in which the agent of a machine describes itself."""
        return self.path / f"node-{node}.json"

    def log(self, node: int) -> Path:
        """Returns the log of a machine's warm server."""
        return self.path / f"node-{node}.log"

    def agent(self, *arguments: str, python: str = sys.executable) -> list[str]:
        """Returns the command of a machine's agent."""
        return [python, "-m", "autotune.executors.node_agent", str(self.path), *arguments]

    def order(self, what: Mapping[str, Any]) -> None:
        """Adds an order; only the coordinator does."""
        write_record(self.orders, [*self.ordered(), what])

    def ordered(self) -> list[dict[str, Any]]:
        """Returns all orders so far."""
        try:
            return list(json.loads(self.orders.read_text()))
        except FileNotFoundError:
            return []

    def beat(self) -> int | None:
        """Returns a number that changes whenever a coordinator touches `alive`."""
        try:
            return self.alive.stat().st_mtime_ns
        except OSError:
            return None

    def quiet_s(self) -> float:
        """Returns the seconds since a coordinator touched `alive`, by the file server's clock."""
        now = self.path / f".now-{uuid.uuid4().hex[:8]}"
        try:
            now.touch()
            return max(0.0, now.stat().st_mtime - self.alive.stat().st_mtime)
        except OSError:
            return float("inf")
        finally:
            with contextlib.suppress(OSError):
                now.unlink()

    def said(self, node: int) -> dict[str, Any]:
        """Returns what the agent of a machine wrote about itself; empty if it has not."""
        return files.json_object(self.node(node))


class Terminated(BaseException):
    """A signal of the engine ends this agent."""


class NodeAgent:
    """Runs the orders of a spool on this machine; with `lifeline` until standard input is closed."""

    def __init__(self, spool: Spool, node: int, address: str, *, lifeline: bool) -> None:
        self.spool, self.node, self.address, self.lifeline = spool, node, address, lifeline
        self.settings = read_record(spool.settings, Settings)
        self.executor = LocalExecutor(self.settings.modules, spool.log(node), self.settings.environment)
        # By this machine's monotonic clock; the coordinator's may be wrong, or be set.
        self._heard, self._beat = time.monotonic(), spool.beat()

    def serve(self) -> int:
        """Runs orders until none will come; returns the exit status."""
        try:
            self.executor.start()
        except UserError as error:
            write_record(self.spool.node(self.node), {"failed": str(error)})
            print(error, file=sys.stderr)
            return 1
        try:
            return self._serve()
        finally:
            self.executor.close()

    def _serve(self) -> int:
        cold = self.executor.cold_reason
        write_record(
            self.spool.node(self.node), {"host": socket.gethostname(), "pid": os.getpid(), "cold_reason": cold}
        )
        n_done = 0
        while True:
            orders = self.spool.ordered()
            for order in orders[n_done:]:
                n_done += 1
                if "end" in order:
                    return 0
                if self.node < order["nodes"]:
                    self._run(TrialDir(Path(order["run"])), order["key"])
                    self._heard = time.monotonic()
            if (beat := self.spool.beat()) != self._beat:
                self._heard, self._beat = time.monotonic(), beat
            if self._is_orphaned() or time.monotonic() - self._heard > self.settings.idle_s:
                return 0
            time.sleep(TICK_S)

    def _run(self, folder: TrialDir, key: str) -> None:
        """Runs this machine's part of a trial, unless the coordinator has given it up."""
        request = record_in(folder.request, TrialRequest)
        if request is None or key_of(folder) != key:
            return
        end = folder.node_exit(self.node, request.nodes)
        write_record(folder.node(self.node), {"host": socket.gethostname(), "since": time.time()})
        job = None
        try:
            job = self.executor.submit_part(
                folder, end, {"node": self.node, "address": self.address} if request.nodes > 1 else {}
            )
            status = self._watch(job, folder)
            if status is Status.LOST:
                write_record(end, Exit(codes={}, killed="lost", note=LOST))
        except UserError as error:
            write_record(end, Exit(codes={}, killed="lost", note=str(error)))
        except Terminated:
            if job is not None:
                job.cancel()
            if folder.path.exists():
                found = read_record(end, Exit) if end.exists() else Exit(codes={})
                # The engine's signal may have reached the ranks too.
                if found.killed is not None or any(found.codes.values()) or not found.codes:
                    write_record(end, Exit(codes=found.codes, killed="cancel", wall_s=found.wall_s, swept=found.swept))
            raise

    def _watch(self, job: Any, folder: TrialDir) -> Status:
        while (status := job.poll()) is Status.RUNNING:
            if self._is_orphaned() or folder.cancel.name in folder.names():
                job.cancel()
            time.sleep(TICK_S)
        return Status(status)

    def _is_orphaned(self) -> bool:
        if not self.lifeline:
            return False
        ready, _, _ = select.select([0], [], [], 0)
        return bool(ready) and not os.read(0, 4096)


def key_of(folder: TrialDir) -> str:
    """Returns the key of the order that a trial's folder belongs to; empty without one."""
    return str(files.json_object(folder.job).get("key", ""))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise Terminated

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    yield


def main(arguments: list[str] | None = None) -> int:
    """Runs the agent of this machine."""
    parser = argparse.ArgumentParser(prog="python -m autotune.executors.node_agent")
    parser.add_argument("spool", type=Path)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--lifeline", action="store_true")
    given = parser.parse_args(arguments)
    spool = Spool(given.spool)
    settings = read_record(spool.settings, Settings)
    os.environ.update(settings.exported)
    if settings.working_dir and Path(settings.working_dir).is_dir():
        os.chdir(settings.working_dir)
    try:
        with _terminable():
            return NodeAgent(spool, given.node, given.address, lifeline=given.lifeline).serve()
    except Terminated:
        return 143


if __name__ == "__main__":
    sys.exit(main())
