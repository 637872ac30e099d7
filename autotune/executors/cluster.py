"""Runs trials on the machines of a cluster: an engine starts an agent on each; orders and results are shared files."""

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import UNDER_WAY, MachinesGone, Status
from autotune.executors.node_agent import Settings, Spool
from autotune.system import files
from autotune.system.owner import Owner
from autotune.trial.folder import TrialDir, ends, read_record, record_in, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit

# Intervals at which a trial's folder is read, the engine is asked, and the agents are told that a coordinator lives.
LOOK_S, ASK_S, ALIVE_S = 0.05, 1.0, 5.0
LEAST_IDLE_S = 30.0  # for an `idle` of less, agents would end between two signs of a coordinator
CANCEL_TIMEOUT_S = 15.0
# Shorter waits are not reported.
PATIENCE_S = 2.0
# Exit statuses of ranks that an engine ended: such a rank may have lost its machine instead of failing.
TAKEN_AWAY = (-15, -9, 143, 137)
# Time that an engine gets to report that it took a machine away.
SETTLE_S = 5.0
# If the coordinator on another machine has been silent for this time, its allocation may be taken over.
SILENT_S = 120.0
# File beside the spools: machines that the engine has granted, by what it was asked for.
GRANTED = "granted.json"
# Prefixes of the user's variables that are passed on to other machines.
EXPORTED = (
    "PYTHON", "AUTOTUNE_", "DS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "UCX_", "FI_", "OFI_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_",
    "TOKENIZERS_", "OMP_", "MKL_", "CUDA_HOME", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_", "LD_LIBRARY_PATH", "TRITON_",
    "XDG_CACHE_HOME",
)  # fmt: skip


class Refused(Exception):
    """The engine does not accept a job; the message is the engine's.

    Args:
        at_present: Whether the engine says that it may accept the job later.
    """

    def __init__(self, reason: str, *, at_present: bool = False) -> None:
        super().__init__(reason)
        self.at_present = at_present


@dataclass(frozen=True)
class JobState:
    """State of an engine's job.

    Attributes:
        status: `queued`, `running`, `exited` (the agents ended), `lost` (an agent failed), `taken` (the engine took the
            machines away) or `refused` (it can never start).
        reason: Why, in the engine's words.
    """

    status: Status
    reason: str = ""


class Engine(Protocol):
    """Base of an engine: starts an agent on each of several machines, and tells what became of them.

    Attributes:
        name: Name in messages and records.
        hold: Keep the machines between trials.
        turns: As of `Executor`.
    """

    name: str
    options: dict[str, str]
    hold: bool = True
    turns: int = 0

    def check(self, nodes: int) -> None:
        """Checks that the engine can be used."""

    def launch(self, spool: Spool, nodes: int) -> str:
        """Starts an agent for the spool on each of `nodes` machines; returns the engine's name of the job."""

    def standing(self, job: str) -> JobState:
        """Returns the state of a job."""

    def end(self, job: str) -> None:
        """Ends a job with all its processes."""

    def exchange(self, job: str, spool: Spool, folder: TrialDir) -> None:
        """Copies files between a trial's folder and its machines; not needed where they share a file system."""
        return


class Allocation:
    """Machines that an engine has granted or will grant."""

    def __init__(self, engine: Engine, spool: Spool, job: str, nodes: int) -> None:
        self.engine, self.spool, self.job, self.nodes = engine, spool, job, nodes
        self.at_work: ClusterJob | None = None
        self._asked, self._standing = 0.0, JobState(Status.QUEUED)
        self._touched = 0.0

    def standing(self, *, now: bool = False) -> JobState:
        """Returns the state of the engine's job, at most `ASK_S` old; with `now` the engine is asked again."""
        final = self._standing.status not in UNDER_WAY
        if not final and (now or time.monotonic() - self._asked > ASK_S):
            self._standing, self._asked = self.engine.standing(self.job), time.monotonic()
        return self._standing

    def is_busy(self) -> bool:
        """Returns whether a trial of this process runs on it."""
        return self.at_work is not None and self.at_work.poll() in UNDER_WAY

    def is_usable(self, nodes: int) -> bool:
        """Returns whether it has at least `nodes` machines and has not ended."""
        return nodes <= self.nodes and self.standing(now=True).status in UNDER_WAY

    def end(self) -> None:
        """Gives the machines back; the variables that their agents have read do not stay."""
        self.engine.end(self.job)
        self.spool.forget()

    def touch(self) -> None:
        """Tells the agents that a coordinator lives."""
        if time.monotonic() - self._touched > ALIVE_S:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                self.spool.alive.touch()

    def why_lost(self) -> str:
        """Returns why the machines are gone: the failure of an agent, else the engine's reason."""
        failed = next((said["failed"] for n in range(self.nodes) if (said := self.spool.said(n)).get("failed")), None)
        return failed or self.standing().reason or f"{self.engine.name} ended the job"


class ClusterExecutor(base.Executor):
    """Executor that runs trials through agents, which an engine starts.

    Args:
        root: Folder for the spools, shared with the machines.
    """

    def __init__(self, engine: Engine, root: Path, settings: Settings, nodes: int, patience_s: float = 0.0) -> None:
        self.engine, self.root, self.settings, self.nodes = engine, root, settings, nodes
        self.patience_s, self.turns, self._said = patience_s, engine.turns, ""
        self._held: list[Allocation] = []
        self._own: list[Allocation] = []
        self._lock = threading.Lock()

    @property
    def cold_reason(self) -> str:
        """Returns why the warm server of the first machine cannot fork ranks; empty if it can."""
        return str(self._held[0].spool.said(0).get("cold_reason", "")) if self._held else ""

    @property
    def hosts(self) -> frozenset[str]:
        """The machines that are held, as their agents name them."""
        held = [each.spool.said(node).get("host", "") for each in self._held for node in range(each.nodes)]
        return frozenset(filter(None, held))

    def start(self) -> None:
        """Checks the engine, and takes over the machines that a dead run of this study holds."""
        self.engine.check(self.nodes)
        for path in sorted(self.root.glob("*/allocation.json")):
            self._take_over(path)

    def submit(self, folder: TrialDir) -> "ClusterJob":
        """Orders the trial on held machines, or on new ones from the engine."""
        request = read_record(folder.request, TrialRequest)
        key = uuid.uuid4().hex
        with self._lock:  # several threads may submit
            try:
                allocation = self._allocation(request.nodes)
            except Refused as refusal:
                reason = base.shown(f"{self.engine.name}: {refusal}")
                if not (refusal.at_present or self.was_granted(request.nodes)):
                    raise UserError(reason) from None
                self.waits(reason)
                raise MachinesGone(reason) from None
            job = ClusterJob(self, allocation, folder, request.nodes)
            allocation.at_work = job
        said = {"engine": self.engine.name, "id": allocation.job, "spool": str(allocation.spool.path), "key": key}
        write_record(folder.job, said)
        allocation.spool.order({"run": str(folder.path.resolve()), "nodes": request.nodes, "key": key})
        if not self.engine.hold:
            allocation.spool.order({"end": True})
        return job

    def find(self, folder: TrialDir) -> "ClusterJob | None":
        """Returns the job that the folder names, if this engine has it and its spool still exists."""
        said, request = files.json_object(folder.job), record_in(folder.request, TrialRequest)
        if not said or request is None:
            return None
        spool = Spool(Path(said["spool"]))
        if said["engine"] != self.engine.name or not spool.settings.exists():
            return None
        held = next((each for each in self._held if each.job == said["id"]), None)
        allocation = held or Allocation(self.engine, spool, said["id"], request.nodes)
        if held is None:
            self._own.append(allocation)
        allocation.at_work = ClusterJob(self, allocation, folder, request.nodes)
        return allocation.at_work

    def was_granted(self, nodes: int) -> bool:
        """Whether the engine has run a trial of this study on this number of machines, and can again once they are back.

        A later run of the study knows it, too.
        """
        return int(files.json_object(self.root / GRANTED).get(self._asked_for(), 0)) >= nodes

    def granted(self, nodes: int) -> None:
        """Notes that the engine runs a trial on this number of machines."""
        if not self.was_granted(nodes):
            granted = files.json_object(self.root / GRANTED)
            write_record(self.root / GRANTED, granted | {self._asked_for(): nodes})

    def _asked_for(self) -> str:
        return f"{self.engine.name} {json.dumps(self.engine.options, sort_keys=True)}"

    def waits(self, why: str) -> None:
        """Tells why a trial waits, whenever the reason changes."""
        why = base.shown(why)
        if why != self._said:
            self._said = why
            self.on_queue(why)

    def build_op(self, op: str, on_tick: Callable[[], None] = lambda: None) -> str | None:
        """Compiles an op on every machine; each machine locks its cache meanwhile."""
        return base.built(self, self.root / "build", op, self.nodes, on_tick)

    def close(self) -> None:
        """Gives the machines back, also those beside one that went away, whose agents may wait still."""
        for allocation in (*self._own, *self._held):
            allocation.end()
        self._own, self._held = [], []

    def _allocation(self, nodes: int) -> Allocation:
        for held in [each for each in self._held if not each.is_busy()]:
            if held.is_usable(nodes):
                return held
            held.end()
            self._held.remove(held)
        wanted = self.nodes if self.engine.hold else nodes
        spool = Spool(self.root / uuid.uuid4().hex[:12])
        # Private: the variables may hold tokens that ranks on other machines need.
        write_record(spool.settings, self.settings, private=True)
        spool.alive.touch()
        job = self.engine.launch(spool, wanted)
        write_record(spool.path / "allocation.json", self._owner() | {"id": job, "nodes": wanted})
        allocation = Allocation(self.engine, spool, job, wanted)
        (self._held if self.engine.hold else self._own).append(allocation)
        return allocation

    def _owner(self) -> dict[str, object]:
        return {"engine": self.engine.name, "options": self.engine.options, "owner": str(Owner.here())}

    def _take_over(self, path: Path) -> None:
        """Takes over an allocation whose coordinator is dead, if its machines are still there."""
        if not (said := files.json_object(path)):
            return
        spool, owner = Spool(path.parent), said.get("owner")
        lives = Owner.read(owner).lives() if owner else None
        if said.get("engine") != self.engine.name or (spool.quiet_s() < SILENT_S if lives is None else lives):
            return
        allocation = Allocation(self.engine, spool, said["id"], said["nodes"])
        if not allocation.is_usable(1):
            return
        same = said.get("options") == self.engine.options and record_in(spool.settings, Settings) == self.settings
        if self.engine.hold and same and allocation.nodes >= self.nodes:
            allocation.touch()
            write_record(path, said | self._owner())
            self._held.append(allocation)


class ClusterJob:
    """A trial in the hands of agents."""

    def __init__(self, executor: ClusterExecutor, allocation: Allocation, folder: TrialDir, nodes: int) -> None:
        self.reason = ""
        self._executor, self._allocation, self._folder, self._nodes = executor, allocation, folder, nodes
        self._looked, self._status, self._began = 0.0, Status.QUEUED, time.monotonic()
        self._cancelled = False
        self._suspected_at: float | None = None
        self._queued_at: float | None = None

    def poll(self) -> Status:
        """Returns `exited` once every machine has written its exit, `lost` if the engine took one away before."""
        now = time.monotonic()
        if self._status in UNDER_WAY and now - self._looked > LOOK_S:
            self._looked = now
            self._allocation.touch()
            self._allocation.engine.exchange(self._allocation.job, self._allocation.spool, self._folder)
            self._status = self._look()
        return self._status

    def _look(self) -> Status:
        if self._has_ended():
            return self._end()
        standing = self._allocation.standing()
        if standing.status not in UNDER_WAY:
            if self._has_ended():  # between the two checks
                return self._end()
            self.reason = self._allocation.why_lost()
            if standing.status is Status.REFUSED and not self._executor.was_granted(self._nodes):
                return Status.REFUSED
            if standing.status in (Status.LOST, Status.EXITED):
                return Status.LOST
            self._executor.waits(self.reason)
            return Status.TAKEN
        if self._folder.node(0).name in self._folder.names():
            self._executor.granted(self._nodes)
            return self._begun(standing)
        self.reason = standing.reason or f"{self._allocation.engine.name}: the machines are there, and get ready"
        if time.monotonic() - self._began > PATIENCE_S:
            self._executor.waits(self.reason)
        return Status.QUEUED

    def _begun(self, standing: JobState) -> Status:
        """Returns `running`; `taken` where the engine has put the job of a trial that began back into its queue."""
        if standing.status is not Status.QUEUED:
            self._queued_at = None
            return Status.RUNNING
        self._queued_at = self._queued_at or time.monotonic()
        if time.monotonic() - self._queued_at < SETTLE_S:  # agents may be a moment ahead of the engine's word
            return Status.RUNNING
        self.reason = f"{standing.reason}, after its machines were taken away"
        self._allocation.end()  # its agents would find old orders
        self._executor.waits(self.reason)
        return Status.TAKEN

    def _has_ended(self) -> bool:
        names = self._folder.names()
        return all(self._folder.node_exit(node, self._nodes).name in names for node in range(self._nodes))

    def _end(self) -> Status:
        """Returns how it ended; if ranks were killed from outside, waits for the engine to say that it did that."""
        if self._cancelled or not any(map(_may_be_taken_away, ends(self._folder, self._nodes).values())):
            return Status.EXITED
        first = self._suspected_at is None
        self._suspected_at = self._suspected_at or time.monotonic()
        standing = self._allocation.standing(now=first)
        if standing.status in (Status.LOST, Status.TAKEN):
            self.reason = standing.reason
            return standing.status
        return Status.RUNNING if time.monotonic() - self._suspected_at < SETTLE_S else Status.EXITED

    def cancel(self) -> None:
        """Asks the agents to stop the ranks; gives the machines back if they do not."""
        if self.poll() not in UNDER_WAY:
            return
        self._cancelled = True
        if self._status is Status.QUEUED and not self._allocation.engine.hold:
            self._allocation.end()
        self._folder.cancel.touch()
        if self._status is Status.QUEUED:
            self._folder.job.unlink(missing_ok=True)  # no agent runs a trial without it
            time.sleep(4 * LOOK_S)
        until = time.monotonic() + CANCEL_TIMEOUT_S
        while self.poll() is Status.RUNNING:
            if time.monotonic() > until:
                self._allocation.end()
                return
            time.sleep(LOOK_S)


def _may_be_taken_away(end: Exit) -> bool:
    """Returns whether ranks ended in a way that may mean that the engine took their machine away."""
    own = {-9} if end.killed else set()
    return end.killed in ("cancel", "lost") or (
        not end.kernel_oom and bool(set(end.codes.values()) & set(TAKEN_AWAY) - own)
    )


def settings_for(modules: Sequence[str], environment: dict[str, str], idle_s: float) -> Settings:
    """Returns the settings of a study's agents, with this process's working directory and variables."""
    exported = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    where = str(Path.cwd())
    return Settings(
        modules=[*modules], environment={**environment}, exported=exported, working_dir=where, idle_s=idle_s
    )
