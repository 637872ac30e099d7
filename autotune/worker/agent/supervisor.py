"""The supervisor of one machine: starts the ranks of a trial, watches them, and removes their remains."""

import contextlib
import functools
import json
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.system import processes, shared_memory
from autotune.trial.folder import TrialDir, ends, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit
from autotune.worker.agent import memory_watch, network, ops, rank_start, stacks, temporary
from autotune.worker.agent.logs import Log
from autotune.worker.agent.memory_watch import MemoryWatch
from autotune.worker.agent.rank import Rank
from autotune.worker.script.saved_files import made_folders, remove_empty

# Descriptor that commands come from; its end means that the driver has died.
COMMANDS = 0
# After one rank failed, the others get this long to end by themselves.
PEER_GRACE_S = 1.5
# Interval of looks for failures on other machines.
LOOK_INTERVAL_S = 0.3
# Longest sleeps of the loop: when nothing happens, and when a rank may wait for its log to be read.
WAIT_S, BUSY_WAIT_S = 0.1, 0.002
# Seconds to kill the processes that a trial left, and the longest list of what it left.
SWEEP_S, MAX_SWEPT = 20.0, 100


def _kernel_ooms() -> int:
    """Returns the kills by the kernel's out-of-memory killer on this machine since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class RankSupervisor:
    """Runs one trial at a time.

    Attributes:
        orphaned: The driver has died.
        imported: Library modules that the last trial imported besides those of this process.
        woken: Descriptor that tells of a signal, as of the end of a rank.

    Args:
        warm: Fork the ranks from this process instead of starting a new Python for each.
        answers: Descriptor for answers, which ranks must not write to.
        variables: Variables of ranks alone.
    """

    def __init__(self, *, warm: bool, answers: int, variables: Mapping[str, str]) -> None:
        self.warm, self.answers, self.variables = warm, answers, variables
        self.orphaned = False
        self.imported: list[str] = []
        self.woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        # Orphans of a rank become children of this process, which so can find and end them.
        rank_start.prctl(rank_start.PR_SET_CHILD_SUBREAPER, 1)

    def run(self, path: Path, node: int, address: str) -> None:
        """Runs this machine's ranks of a trial to their end, and writes their exits.

        Args:
            node: Number of this machine among the trial's.
            address: Where other machines reach machine 0.
        """
        folder = TrialDir(path)
        request = read_record(folder.request, TrialRequest)
        end = _Part(self, folder, request, node).run(address)
        write_record(folder.node_exit(node, request.nodes), end, sync=request.nodes > 1)


@dataclass
class _Part:
    """This machine's part of a trial: its ranks, from their start to the removal of what they leave."""

    supervisor: RankSupervisor
    folder: TrialDir
    request: TrialRequest
    node: int
    started_at: float = field(default_factory=time.monotonic)
    kernel_ooms_before: int = field(default_factory=_kernel_ooms)
    ranks: dict[int, Rank] = field(default_factory=dict)
    first_failed: int | None = None
    first_failed_at: float = 0.0
    failed_at: float | None = None
    looked_at: float = 0.0
    killed: str | None = None
    note: str = ""
    pids: set[int] = field(default_factory=set)
    temporary: Path | None = None
    # Processes and shared memory of imported modules, which are not the trial's.
    others: frozenset[int] = frozenset()
    shared_before: frozenset[tuple[str, int]] = frozenset()
    max_processes: int = 0
    max_tasks: int = 0

    @property
    def ended(self) -> bool:
        """Returns whether all ranks have ended."""
        return not self.under_way()

    def under_way(self) -> list[Rank]:
        """Returns the ranks that have not ended."""
        return [rank for rank in self.ranks.values() if rank.code is None]

    def wait_s(self) -> float:
        """Returns the longest sleep until a rank's memory is to be looked at."""
        due = min((rank.watch.due for rank in self.under_way()), default=math.inf)
        return min(WAIT_S, max(memory_watch.MIN_INTERVAL_S, due - time.monotonic()))

    def failed_elsewhere(self) -> bool:
        """Returns whether the trial failed on another machine."""
        others = ends(self.folder, self.request.nodes)
        return any(end.killed or end.first_failed is not None for node, end in others.items() if node != self.node)

    def too_many_processes(self) -> bool:
        """Returns whether the trial has too many processes; they are counted only if the machine's tasks have grown."""
        n_tasks = processes.n_tasks()
        if n_tasks <= self.max_tasks:
            return False
        self.max_tasks = n_tasks + self.max_processes
        return len(processes.descendants(os.getpid())) - len(self.others) > self.max_processes

    def run(self, address: str) -> Exit:
        """Runs the ranks to their end; returns how they ended."""
        self._start(address if self.request.nodes > 1 else network.LOOPBACK)
        try:
            busy = False
            while not self.ended:
                self._wait(BUSY_WAIT_S if busy else self.wait_s())
                self._reap()
                self._judge()
                for rank in self.under_way():
                    rank.watch.look(rank.pid)
                if self.killed == "processes":  # by the time the ranks are dead there would be many more
                    self._kill_descendants()
                busy = sum(rank.log.take() for rank in self.ranks.values()) > 0
        finally:
            swept = self._sweep()
            for rank in self.ranks.values():
                rank.log.close()
                rank.watch.drop()
        return Exit(
            codes={number: rank.code for number, rank in self.ranks.items() if rank.code is not None},
            first_failed=self.first_failed,
            failed_at=self.failed_at,
            killed=self.killed,
            note=self.note,
            kernel_oom=_kernel_ooms() > self.kernel_ooms_before,
            wall_s=time.monotonic() - self.started_at,
            swept=swept,
        )

    def _start(self, address: str) -> None:
        """Starts the ranks, unless the trial ends before this machine knows where they meet."""
        folder, request = self.folder, self.request
        listener = network.listen(address) if self.node == 0 else None
        if listener is not None:
            host, port = address, listener.getsockname()[1]
            if request.nodes > 1:
                write_record(folder.master, {"host": host, "port": port})
        else:
            found = self._wait_for_meeting_point()
            if found is None:
                return
            host, port = found
        self.temporary = temporary.make_folder()
        variables = network.environment(host, port, request.nodes) | temporary.environment(self.temporary)
        variables |= {network.LISTENER: str(listener.fileno())} if listener is not None else {}
        self.others = frozenset(processes.descendants(os.getpid(), dead=True))
        self.shared_before = frozenset(shared_memory.there())
        self.max_processes = processes.most(request.ranks_per_node)
        self.max_tasks = processes.n_tasks() + self.max_processes
        sys.stdout.flush()
        sys.stderr.flush()
        with listener or contextlib.nullcontext():
            for local_rank in range(request.ranks_per_node):
                self._fork(self.node * request.ranks_per_node + local_rank, variables)

    def _fork(self, number: int, variables: dict[str, str]) -> None:
        rank = Rank(Log(self.folder.log(number)), MemoryWatch())
        detach = functools.partial(rank_start.detach, os.getpid(), self.supervisor.answers, rank, self.ranks.values())
        own = rank_start.rank_environment(number, self.request)
        variables = {**self.supervisor.variables, **own, **variables, **rank.watch.variables()}
        rank.pid = os.fork()
        if rank.pid == 0:
            rank_start.become_rank(self.folder.path, variables, detach, warm=self.supervisor.warm)
        self.ranks[number] = rank
        self.pids.add(rank.pid)

    def _wait_for_meeting_point(self) -> tuple[str, int] | None:
        """Waits for machine 0 to write host and port where the ranks meet; returns None if the trial ends before."""
        while not self.killed:
            if self.folder.master.name in self.folder.names():
                found = json.loads(self.folder.master.read_text())
                return str(found["host"]), int(found["port"])
            self._wait()
            self._judge()
        return None

    def _wait(self, seconds: float = WAIT_S) -> None:
        """Sleeps until a rank ends, a command comes, or the time is over."""
        supervisor = self.supervisor
        sources = [supervisor.woken] if supervisor.orphaned else [supervisor.woken, COMMANDS]
        ready, _, _ = select.select(sources, [], [], seconds)
        if supervisor.woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(supervisor.woken, 4096)
        if COMMANDS in ready:
            data = os.read(COMMANDS, 65536)
            supervisor.orphaned = not data
            if b'"cancel"' in data:  # somebody may read where ranks hung when the time was over, or Ctrl-C came
                stacks.ask(self.under_way())
            if supervisor.orphaned or b'"cancel"' in data:
                self._kill("cancel")

    def _reap(self) -> None:
        for pid, status in _dead_children():
            self.pids.add(pid)
            for number, rank in self.ranks.items():
                if rank.pid != pid:
                    continue
                rank.code = os.waitstatus_to_exitcode(status)
                failed = rank.code != 0 or not self.folder.report(number).exists()
                if failed and self.first_failed is None and self.killed is None:
                    self.first_failed, self.failed_at = number, time.time()
                    self.first_failed_at = time.monotonic()

    def _judge(self) -> None:
        """Kills the trial if a rank failed, its time is over, or it has too many processes."""
        now = time.monotonic()
        if self.request.nodes > 1 and not self.first_failed_at and now - self.looked_at > LOOK_INTERVAL_S:
            self.looked_at = now
            if self.failed_elsewhere():
                self.first_failed_at = now
        if (self.ranks and self.ended) or self.killed:
            return
        if self.first_failed_at and now - self.first_failed_at > PEER_GRACE_S:
            self._kill("peer")
        elif now - self.started_at > self.request.deadline_s:
            stacks.ask(self.under_way())
            self._kill("deadline")
        elif self.ranks and self.too_many_processes():
            limit, variable = self.max_processes, processes.VARIABLE
            self.note = f"it started more than {limit} processes ({variable} allows more)"
            self._kill("processes")

    def _kill(self, why: str) -> None:
        self.killed, self.failed_at = self.killed or why, self.failed_at or time.time()
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            if rank.code is None:  # it may not have opened its session yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _kill_descendants(self) -> list[int]:
        """Kills all processes of the trial, in any group or session; returns their PIDs."""
        left = [pid for pid in processes.descendants(os.getpid()) if pid not in self.others]
        self.pids.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _sweep(self) -> list[str]:
        """Kills all processes of the trial; removes its temporary files, shared memory, build locks and empty folders; lists them."""
        swept: list[str] = []
        until = time.monotonic() + SWEEP_S
        while time.monotonic() < until:
            left = self._kill_descendants()
            swept += [f"process {pid}" for pid in left]
            self.pids.update(pid for pid, _ in _dead_children())
            # A process that is just dying is neither alive nor to be reaped yet.
            if not left and self.others.issuperset(processes.descendants(os.getpid(), dead=True)):
                break
            time.sleep(0.001 if left else 0.01)  # short enough that a forking process cannot get ahead
        for path in shared_memory.left(self.pids, self.shared_before):
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(str(path))
        self.supervisor.imported = temporary.noted_imports(self.temporary)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        remove_empty(made_folders(self.folder.scratch))
        if self.supervisor.orphaned:  # else the driver does
            shutil.rmtree(self.folder.scratch, ignore_errors=True)
        return sorted({*swept, *ops.remove_stale_locks()})[:MAX_SWEPT]


def _dead_children() -> Iterator[tuple[int, int]]:
    """Yields PID and wait status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found
