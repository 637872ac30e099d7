"""The engine inside of a JobSet of Kubernetes: its pods wait for calls in a shared folder, and run the agents.

    python -m autotune.executors.pods BOARD

runs in the pod of each machine, whose number is in `JOB_COMPLETION_INDEX`. The driver, in another pod, calls them.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.errors import UserError
from autotune.executors.base import Status
from autotune.executors.cluster import Engine, JobState, Refused
from autotune.executors.node_agent import Spool
from autotune.system import files, processes
from autotune.trial.folder import write_record

# Variables of the pods: the folder of calls, the number of machines, and the pod's own address.
BOARD, MACHINES, ADDRESS = "AUTOTUNE_PODS", "AUTOTUNE_MACHINES", "AUTOTUNE_ADDRESS"
INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it
OPTIONS = {"idle": "seconds after which agents whose driver is gone end (default: 600)"}
TICK_S, BEAT_S = 0.2, 2.0
# A pod that has been silent for this time is gone: Kubernetes notices a lost node only after minutes.
SILENT_S = 60.0
STOP_TIMEOUT_S = 15.0
TAKEN = "taken"


class Board:
    """Folder in which driver and pods find each other: one call, and what each pod says of itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.call = path, path / "call.json"

    def machine(self, number: int) -> Path:
        """Returns the file in which a pod says which call it serves; it is touched while the pod lives."""
        return self.path / f"machine-{number}.json"

    def read(self, path: Path) -> dict[str, Any]:
        """Returns what a file says; empty if it is not there or is being replaced."""
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError):
            return {}


class Pods(Engine):
    """Engine of a study over several machines in Kubernetes: the pods are there already, and are called."""

    name = "kubernetes"

    def __init__(self, options: dict[str, str]) -> None:
        self.options, self.board = options, Board(Path(os.environ[BOARD]))
        self._beats: dict[int, tuple[int, float]] = {}
        self._joined: set[tuple[str, int]] = set()

    def check(self, nodes: int) -> None:
        """Checks that the JobSet has enough machines."""
        if nodes > (there := int(os.environ.get(MACHINES, "0"))):
            raise UserError(f"--nodes: {nodes} machines are asked for, and the JobSet has {there}; submit it anew")

    def launch(self, spool: Spool, nodes: int) -> str:
        """Calls the pods to a spool; returns the call's id."""
        job = uuid.uuid4().hex[:12]
        try:
            write_record(self.board.call, {"id": job, "spool": str(spool.path.absolute()), "nodes": nodes})
        except OSError as error:
            raise Refused(f"the pods cannot be called: {error}", at_present=True) from None
        return job

    def standing(self, job: str) -> JobState:
        """Returns `queued` until every pod has come, then `running` until one is gone."""
        call = self.board.read(self.board.call)
        if call.get("id") != job:
            return JobState(Status.TAKEN, "kubernetes: the pods were called by another run of the study")
        waiting = []
        for number in range(call["nodes"]):
            said, pod = self.board.read(self.board.machine(number)), f"the pod of machine {number}"
            if said.get("job") != job:
                if (job, number) in self._joined:
                    return JobState(Status.TAKEN, f"kubernetes: {pod} was replaced")
                waiting.append(str(number))
                continue
            self._joined.add((job, number))
            if (ended := said.get("ended")) == TAKEN:
                return JobState(Status.TAKEN, f"kubernetes: {pod} was taken away")
            if ended is not None:
                words = f"kubernetes: the agent in {pod} ended with status {ended}"
                return JobState(Status.EXITED if ended == 0 else Status.LOST, words)
            if self._silent_s(number) > SILENT_S:
                return JobState(Status.TAKEN, f"kubernetes: {pod} has said nothing for {SILENT_S:.0f} s")
        if waiting:
            return JobState(Status.QUEUED, f"kubernetes: waiting for the pods of machines {', '.join(waiting)}")
        return JobState(Status.RUNNING)

    def end(self, job: str) -> None:
        """Sends the pods of a call back to waiting."""
        if self.board.read(self.board.call).get("id") == job:
            write_record(self.board.call, {})

    def _silent_s(self, number: int) -> float:
        """Seconds since a pod was last heard, by this process's clock."""
        try:
            with open(self.board.machine(number), "rb") as file:  # on NFS only opening it shows when it was touched
                beat = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            beat = -1
        if number not in self._beats or beat != self._beats[number][0]:
            self._beats[number] = beat, time.monotonic()
        return time.monotonic() - self._beats[number][1]


class Machine:
    """A pod's process: runs an agent for each call; other pods reach it at `address`."""

    def __init__(self, board: Board, number: int, address: str) -> None:
        self.board, self.number, self.address = board, number, address
        self.file = board.machine(number)
        self._agent: subprocess.Popen[bytes] | None = None
        self._beaten = 0.0
        self._said: dict[str, Any] = {}

    def serve(self) -> None:
        """Takes up calls, for ever."""
        # A pod before this one, whose agent and ranks are gone, had taken up this call.
        if (before := self.board.read(self.file)).get("job"):
            self._say(before | {"ended": TAKEN})
        while True:
            with contextlib.suppress(OSError):  # the volume may be away for a moment
                self.look()
            time.sleep(TICK_S)

    def look(self) -> None:
        """Follows the call that is on the board now."""
        call = files.json_object(self.board.call)  # a volume that is away for a moment takes back no call
        wanted = call if self.number < call.get("nodes", 0) else {}
        if wanted.get("id") != self._said.get("job"):
            self._leave()
            self._join(wanted) if wanted else self._say({})
        status = self._agent.poll() if self._agent is not None else None
        if status is not None and self._said["ended"] is None:
            self._say(self._said | {"ended": status})
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            with contextlib.suppress(FileNotFoundError):  # it has not been called yet
                os.utime(self.file)

    def taken(self) -> None:
        """Ends the agent of a pod that is taken away."""
        self._leave()
        if self._said.get("job"):
            self._say(self._said | {"ended": TAKEN})

    def _leave(self) -> None:
        """Ends the agent and its ranks."""
        agent, self._agent = self._agent, None
        if agent is not None:
            processes.stop(agent, STOP_TIMEOUT_S)

    def _join(self, call: dict[str, Any]) -> None:
        """Starts the agent, once the first machine has said where the ranks meet."""
        first = self.board.read(self.board.machine(0)) if self.number else {"job": call["id"], "address": self.address}
        if first.get("job") != call["id"]:
            return
        spool = Spool(Path(call["spool"]))
        command = spool.agent("--node", str(self.number), "--address", first["address"])
        with open(spool.path / f"agent-{self.number}.log", "ab") as log:
            self._agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._say({"job": call["id"], "address": self.address, "ended": None})

    def _say(self, said: dict[str, Any]) -> None:
        self._said = said
        write_record(self.file, said)


def main(arguments: list[str] | None = None) -> int:
    """Runs the process of a pod until it is taken away; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m autotune.executors.pods")
    parser.add_argument("board", type=Path)
    given = parser.parse_args(arguments)
    address = os.environ.get(ADDRESS) or socket.gethostname()
    machine = Machine(Board(given.board), int(os.environ.get(INDEX, "0")), address)

    def end(*_: int | FrameType | None) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, end)
    try:
        machine.serve()
    finally:
        machine.taken()
    return 0


if __name__ == "__main__":
    sys.exit(main())
