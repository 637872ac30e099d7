"""Trials on machines that an engine gives us: one agent on each, orders and results in shared folders."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune import UserError, liveness, trial
from autotune.executors import base
from autotune.executors.agent import Settings, Spool
from autotune.executors.base import Status
from autotune.trial import Outcome, TrialDir, TrialRequest

# How often the folder of a trial is looked into, the engine is asked, and the agents are told that somebody is there.
LOOK_S, ASK_S, ALIVE_S = 0.05, 1.0, 5.0
CANCEL_TIMEOUT_S = 15.0
# A wait that is over so soon is not worth a word.
PATIENCE_S = 2.0
BUILD_DEADLINE_S = 1800.0
# Signals by which an engine ends ranks; a rank that ended so may have been taken away, not have failed.
TAKEN_AWAY = (-15, -9, 143, 137)
# For so long the engine may take to own up to that.
SETTLE_S = 5.0
# An allocation whose coordinator on another machine has been silent for so long may be taken over.
SILENT_S = 120.0
# What the user's variables are called that hold on other machines as well.
EXPORTED = (
    "PYTHON", "AUTOTUNE_", "DS_", "TORCH", "NCCL_", "GLOO_", "UCX_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_",
    "CUDA_HOME", "LD_LIBRARY_PATH", "TRITON_", "XDG_CACHE_HOME",
)  # fmt: skip


class Refused(Exception):
    """The engine does not take a job, in its own words."""


@dataclass(frozen=True)
class Standing:
    """Where an engine's job stands.

    Attributes:
        status: `queued`, `running`, `exited` (it ended, whatever of), `lost` (the engine took it away) or `refused` (it can never start).
        reason: In the engine's own words.
    """

    status: Status
    reason: str = ""


class Engine(Protocol):
    """What an engine must be able to do: start an agent on each of some machines, and say what became of them.

    Attributes:
        name: What the user calls it.
        options: What the user asked of it.
        hold: The machines are kept between trials.
    """

    name: str
    options: dict[str, str]
    hold: bool

    def check(self, nodes: int) -> None:
        """Looks whether the engine can be used at all.

        Raises:
            UserError: It cannot, and why.
        """

    def launch(self, spool: Spool, nodes: int) -> str:
        """Starts an agent for the spool on each of some machines; returns the engine's own name of that.

        Raises:
            Refused: It does not.
        """

    def standing(self, job: str) -> Standing:
        """Where such a job stands."""

    def end(self, job: str) -> None:
        """Ends such a job with all its processes."""

    def exchange(self, job: str, spool: Spool, folder: TrialDir) -> None:
        """Carries files between a trial's folder and its machines, where they share no file system."""

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """As an executor's."""


class Allocation:
    """Machines that an engine gave us, or is about to."""

    def __init__(self, engine: Engine, spool: Spool, job: str, nodes: int) -> None:
        self.engine, self.spool, self.job, self.nodes = engine, spool, job, nodes
        self.at_work: AgentJob | None = None
        self._asked, self._standing = 0.0, Standing(Status.QUEUED)
        self._touched = 0.0

    def standing(self, *, now: bool = False) -> Standing:
        """Where it stands; the engine is asked once in a while, or now."""
        final = self._standing.status not in (Status.QUEUED, Status.RUNNING)
        if not final and (now or time.monotonic() - self._asked > ASK_S):
            self._standing, self._asked = self.engine.standing(self.job), time.monotonic()
        return self._standing

    def is_busy(self) -> bool:
        """Whether a trial of ours is under way on it."""
        return self.at_work is not None and self.at_work.poll() in (Status.QUEUED, Status.RUNNING)

    def is_usable(self, nodes: int) -> bool:
        """Whether it has so many machines, and they are or will be ours."""
        return nodes <= self.nodes and self.standing(now=True).status in (Status.QUEUED, Status.RUNNING)

    def touch(self) -> None:
        """Tells the agents that a coordinator is there."""
        if time.monotonic() - self._touched > ALIVE_S:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                self.spool.alive.touch()

    def why_lost(self) -> str:
        """Why the machines are gone: what an agent said of itself, else what the engine says."""
        failed = next((said["failed"] for n in range(self.nodes) if (said := self.spool.said(n)).get("failed")), None)
        return failed or self.standing().reason or f"{self.engine.name} ended the job"


class AgentExecutor:
    """Runs trials through agents that an engine starts.

    Args:
        engine: What starts them.
        root: Folder, shared with the machines, where the spools go.
        settings: What the agents are told.
        nodes: Machines of a trial.
        on_queue: Told why a trial waits in the engine's queue, whenever that changes.
    """

    mark = ""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        settings: Settings,
        nodes: int,
        on_queue: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.engine, self.root, self.settings, self.nodes, self._on_queue = engine, root, settings, nodes, on_queue
        self._said = ""
        self._held: list[Allocation] = []
        self._own: list[Allocation] = []
        self._lock = threading.Lock()

    @property
    def cold_reason(self) -> str:
        """Why the agents' servers cannot fork ranks, as the first of them said."""
        return str(self._held[0].spool.said(0).get("cold_reason", "")) if self._held else ""

    def start(self) -> None:
        """Sees that the engine can be used, and takes over the machines that a dead run of this study held."""
        self.engine.check(self.nodes)
        for path in sorted(self.root.glob("*/allocation.json")):
            self._take_over(path)

    def submit(self, folder: TrialDir) -> base.Job:
        """Puts the trial in order on held machines, or asks the engine for some."""
        request = trial.read(folder.request, TrialRequest)
        key = uuid.uuid4().hex
        with self._lock:  # several trials may be asked for at once
            try:
                allocation = self._allocation(request.nodes)
            except Refused as refusal:
                return RefusedJob(f"{self.engine.name}: {refusal}")
            job = AgentJob(allocation, folder, request.nodes, self.waits, held=self.engine.hold)
            allocation.at_work = job
        said = {"engine": self.engine.name, "id": allocation.job, "spool": str(allocation.spool.path), "key": key}
        trial.write(folder.job, said)
        allocation.spool.order({"run": str(folder.path.resolve()), "nodes": request.nodes, "key": key})
        if not self.engine.hold:
            allocation.spool.order({"end": True})
        return job

    def find(self, folder: TrialDir) -> AgentJob | None:
        """The job that the folder names, if it is this engine's and its spool is there."""
        try:
            said = json.loads(folder.job.read_text())
            request = trial.read(folder.request, TrialRequest)
        except (FileNotFoundError, ValueError):
            return None
        spool = Spool(Path(said["spool"]))
        if said["engine"] != self.engine.name or not spool.settings.exists():
            return None
        held = next((each for each in self._held if each.job == said["id"]), None)
        allocation = held or Allocation(self.engine, spool, said["id"], request.nodes)
        if held is None:
            self._own.append(allocation)
        allocation.at_work = AgentJob(allocation, folder, request.nodes, self.waits, held=held is not None)
        return allocation.at_work

    def waits(self, why: str) -> None:
        """Passes on why a trial waits, once."""
        if why != self._said:
            self._said = why
            self._on_queue(why)

    def build_ops(self, names: Sequence[str]) -> str | None:
        """Compiles on all machines of a trial, each under the lock of its own cache."""
        request = TrialRequest(
            target="",
            mode="build",
            ops=tuple(names),
            world_size=self.nodes,
            nodes=self.nodes,
            deadline_s=BUILD_DEADLINE_S,
        )
        result = base.run(self, self.root / "build", request)
        return None if result.outcome is Outcome.COMPLETE else result.reason

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """What else runs on the machines is the engine's to say."""
        return self.engine.turn(on_wait)

    def close(self) -> None:
        """Gives the machines back."""
        for allocation in (*self._own, *self._held):
            if allocation.standing(now=True).status in (Status.QUEUED, Status.RUNNING):
                self.engine.end(allocation.job)
        self._own, self._held = [], []

    def _allocation(self, nodes: int) -> Allocation:
        for held in [each for each in self._held if not each.is_busy()]:
            if held.is_usable(nodes):
                return held
            self.engine.end(held.job)
            self._held.remove(held)
        wanted = self.nodes if self.engine.hold else nodes
        spool = Spool(self.root / uuid.uuid4().hex[:12])
        # The variables may hold tokens that the ranks need on other machines.
        trial.write(spool.settings, self.settings, private=True)
        spool.orders.touch()
        spool.alive.touch()
        job = self.engine.launch(spool, wanted)
        trial.write(spool.path / "allocation.json", self._owner() | {"id": job, "nodes": wanted})
        allocation = Allocation(self.engine, spool, job, wanted)
        (self._held if self.engine.hold else self._own).append(allocation)
        return allocation

    def _owner(self) -> dict[str, object]:
        return {
            "engine": self.engine.name,
            "options": self.engine.options,
            "host": socket.gethostname(),
            "process": liveness.mark(),
        }

    def _take_over(self, path: Path) -> None:
        """Goes on with machines whose coordinator is dead; forgets them if they are gone."""
        try:
            said = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return
        spool = Spool(path.parent)
        at_work = (
            liveness.lives(said.get("process", ""))
            if said.get("host") == socket.gethostname()
            else spool.quiet_s() < SILENT_S
        )
        if said.get("engine") != self.engine.name or at_work:
            return
        allocation = Allocation(self.engine, spool, said["id"], said["nodes"])
        if not allocation.is_usable(1):
            return
        same = said.get("options") == self.engine.options and trial.read(spool.settings, Settings) == self.settings
        if self.engine.hold and same and allocation.nodes >= self.nodes:
            allocation.touch()
            trial.write(path, said | self._owner())
            self._held.append(allocation)


class AgentJob:
    """A trial in the hands of agents."""

    def __init__(
        self, allocation: Allocation, folder: TrialDir, nodes: int, on_queue: Callable[[str], None], *, held: bool
    ) -> None:
        self.reason = ""
        self._allocation, self._folder, self._nodes, self._held, self._on_queue = (
            allocation,
            folder,
            nodes,
            held,
            on_queue,
        )
        self._looked, self._status, self._began = 0.0, Status.QUEUED, time.monotonic()
        self._cancelled = False
        self._suspected_at: float | None = None

    def poll(self) -> Status:
        """Exited when every machine has said how its ranks ended; lost when the engine took the machines away before that."""
        now = time.monotonic()
        if self._status in (Status.QUEUED, Status.RUNNING) and now - self._looked > LOOK_S:
            self._looked = now
            self._allocation.touch()
            self._allocation.engine.exchange(self._allocation.job, self._allocation.spool, self._folder)
            self._status = self._look()
        return self._status

    def _look(self) -> Status:
        if self._has_ended():
            return self._end()
        standing = self._allocation.standing()
        if standing.status not in (Status.QUEUED, Status.RUNNING):
            if self._has_ended():  # between our look and the engine's word
                return self._end()
            self.reason = self._allocation.why_lost()
            return Status.REFUSED if standing.status is Status.REFUSED else Status.LOST
        if self._folder.node(0).name in self._folder.names():
            return Status.RUNNING
        self.reason = standing.reason or f"{self._allocation.engine.name}: the machines are there, and get ready"
        if time.monotonic() - self._began > PATIENCE_S:
            self._on_queue(self.reason)
        return Status.QUEUED

    def _has_ended(self) -> bool:
        names = self._folder.names()
        return all(self._folder.node_exit(node, self._nodes).name in names for node in range(self._nodes))

    def _end(self) -> Status:
        """How it ended: where ranks were killed from outside, the engine is given a moment to say that this was its doing."""
        if self._cancelled or not any(map(_may_be_taken_away, trial.ends(self._folder, self._nodes).values())):
            return Status.EXITED
        first = self._suspected_at is None
        self._suspected_at = self._suspected_at or time.monotonic()
        standing = self._allocation.standing(now=first)
        if standing.status is Status.LOST:
            self.reason = standing.reason
            return Status.LOST
        return Status.RUNNING if time.monotonic() - self._suspected_at < SETTLE_S else Status.EXITED

    def cancel(self) -> None:
        """Asks the agents to stop the ranks; ends their machines if they do not."""
        if self.poll() not in (Status.QUEUED, Status.RUNNING):
            return
        self._cancelled = True
        if self._status is Status.QUEUED and not self._held:
            self._allocation.engine.end(self._allocation.job)
        self._folder.cancel.touch()
        if self._status is Status.QUEUED:
            self._folder.job.unlink(missing_ok=True)  # no agent takes it up any more
            time.sleep(4 * LOOK_S)
        until = time.monotonic() + CANCEL_TIMEOUT_S
        while self.poll() is Status.RUNNING:
            if time.monotonic() > until:
                self._allocation.engine.end(self._allocation.job)
                return
            time.sleep(LOOK_S)


class RefusedJob:
    """A trial that the engine did not take."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def poll(self) -> Status:
        """Refused."""
        return Status.REFUSED

    def cancel(self) -> None:
        """There is nothing to end."""


def _may_be_taken_away(end: trial.Exit) -> bool:
    """Whether ranks ended as they do when an engine takes their machine away."""
    own = {-9} if end.killed else set()
    return end.killed in ("cancel", "lost") or (
        not end.kernel_oom and bool(set(end.codes.values()) & set(TAKEN_AWAY) - own)
    )


def settings_for(modules: Sequence[str], environment: dict[str, str], idle_s: float) -> Settings:
    """What the agents of a study are told, from this process's own place and variables."""
    exported = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    return Settings(
        modules=list(modules), environment=dict(environment), exported=exported, working_dir=str(Path.cwd()), idle_s=idle_s
    )  # fmt: skip


@contextlib.contextmanager
def no_turn(_: Callable[[], None]) -> Iterator[None]:
    """Nothing to wait for: the engine gives machines to one job at a time."""
    yield


def seconds(options: dict[str, str], name: str, usual: float) -> float:
    """An option that is a number of seconds.

    Raises:
        UserError: It is none.
    """
    try:
        return float(options.get(name, usual))
    except ValueError:
        raise UserError(f"--executor-option {name}={options[name]}: a number of seconds is needed") from None
