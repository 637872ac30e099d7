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


@dataclass
class _Running:
    """This machine's part of the trial under way."""

    folder: TrialDir
    request: TrialRequest
    node: int
    started_at: float
    kernel_ooms_before: int
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


class RankSupervisor:
    """Runs one trial at a time.

    Attributes:
        imported: Library modules that the last trial imported besides those of this process.

    Args:
        warm: Fork the ranks from this process instead of starting a new Python for each.
        answers: Descriptor for answers, which ranks must not write to.
        variables: Variables of ranks alone.
    """

    def __init__(self, *, warm: bool, answers: int, variables: Mapping[str, str]) -> None:
        self.warm, self.answers, self._variables = warm, answers, variables
        self.orphaned = False
        self.imported: list[str] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
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
        running = _Running(folder, request, node, time.monotonic(), kernel_ooms_before=_kernel_ooms())
        self._start(running, address if request.nodes > 1 else network.LOOPBACK)
        try:
            busy = False
            while not running.ended:
                self._wait(running, BUSY_WAIT_S if busy else running.wait_s())
                self._reap(running)
                self._judge(running)
                for rank in running.under_way():
                    rank.watch.look(rank.pid)
                if running.killed == "processes":  # by the time the ranks are dead there would be many more
                    self._kill_descendants(running)
                busy = sum(rank.log.take() for rank in running.ranks.values()) > 0
        finally:
            swept = self._sweep(running)
            for rank in running.ranks.values():
                rank.log.close()
                rank.watch.drop()
        end = Exit(
            codes={number: rank.code for number, rank in running.ranks.items() if rank.code is not None},
            first_failed=running.first_failed,
            failed_at=running.failed_at,
            killed=running.killed,
            note=running.note,
            kernel_oom=_kernel_ooms() > running.kernel_ooms_before,
            wall_s=time.monotonic() - running.started_at,
            swept=swept,
        )
        write_record(folder.node_exit(node, request.nodes), end, sync=request.nodes > 1)

    def _start(self, running: _Running, address: str) -> None:
        """Starts the ranks, unless the trial ends before this machine knows where they meet."""
        folder, request = running.folder, running.request
        listener = network.listen(address) if running.node == 0 else None
        if listener is not None:
            host, port = address, listener.getsockname()[1]
            if request.nodes > 1:
                write_record(folder.master, {"host": host, "port": port})
        else:
            found = self._wait_for_meeting_point(running)
            if found is None:
                return
            host, port = found
        running.temporary = temporary.make_folder()
        variables = network.environment(host, port, request.nodes) | temporary.environment(running.temporary)
        variables |= {network.LISTENER: str(listener.fileno())} if listener is not None else {}
        running.others = frozenset(processes.descendants(os.getpid(), dead=True))
        running.shared_before = frozenset(shared_memory.there())
        running.max_processes = processes.most(request.ranks_per_node)
        running.max_tasks = processes.n_tasks() + running.max_processes
        sys.stdout.flush()
        sys.stderr.flush()
        with listener or contextlib.nullcontext():
            for local_rank in range(request.ranks_per_node):
                self._fork(running, running.node * request.ranks_per_node + local_rank, variables)

    def _fork(self, running: _Running, number: int, variables: dict[str, str]) -> None:
        rank = Rank(Log(running.folder.log(number)), MemoryWatch())
        detach = functools.partial(rank_start.detach, os.getpid(), self.answers, rank, running.ranks.values())
        own = rank_start.rank_environment(number, running.request)
        variables = {**self._variables, **own, **variables, **rank.watch.variables()}
        rank.pid = os.fork()
        if rank.pid == 0:
            rank_start.become_rank(running.folder.path, variables, detach, warm=self.warm)
        running.ranks[number] = rank
        running.pids.add(rank.pid)

    def _wait_for_meeting_point(self, running: _Running) -> tuple[str, int] | None:
        """Waits for machine 0 to write host and port where the ranks meet; returns None if the trial ends before."""
        while not running.killed:
            if running.folder.master.name in running.folder.names():
                found = json.loads(running.folder.master.read_text())
                return str(found["host"]), int(found["port"])
            self._wait(running)
            self._judge(running)
        return None

    def _wait(self, running: _Running, seconds: float = WAIT_S) -> None:
        """Sleeps until a rank ends, a command comes, or the time is over."""
        sources = [self._wake_read] if self.orphaned else [self._wake_read, COMMANDS]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if COMMANDS in ready:
            data = os.read(COMMANDS, 65536)
            self.orphaned = not data
            if self.orphaned or b'"cancel"' in data:
                if not self.orphaned:  # somebody may read where ranks hung when the time was over, or Ctrl-C came
                    stacks.ask(running.under_way())
                self._kill(running, "cancel")

    def _reap(self, running: _Running) -> None:
        for pid, status in _dead_children():
            running.pids.add(pid)
            for number, rank in running.ranks.items():
                if rank.pid != pid:
                    continue
                rank.code = os.waitstatus_to_exitcode(status)
                failed = rank.code != 0 or not running.folder.report(number).exists()
                if failed and running.first_failed is None and running.killed is None:
                    running.first_failed, running.failed_at = number, time.time()
                    running.first_failed_at = time.monotonic()

    def _judge(self, running: _Running) -> None:
        """Kills the trial if a rank failed, its time is over, or it has too many processes."""
        now = time.monotonic()
        if running.request.nodes > 1 and not running.first_failed_at and now - running.looked_at > LOOK_INTERVAL_S:
            running.looked_at = now
            if running.failed_elsewhere():
                running.first_failed_at = now
        if (running.ranks and running.ended) or running.killed:
            return
        if running.first_failed_at and now - running.first_failed_at > PEER_GRACE_S:
            self._kill(running, "peer")
        elif now - running.started_at > running.request.deadline_s:
            stacks.ask(running.under_way())
            self._kill(running, "deadline")
        elif running.ranks and running.too_many_processes():
            limit, variable = running.max_processes, processes.VARIABLE
            running.note = f"it started more than {limit} processes ({variable} allows more)"
            self._kill(running, "processes")

    def _kill(self, running: _Running, why: str) -> None:
        running.killed, running.failed_at = running.killed or why, running.failed_at or time.time()
        for rank in running.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            if rank.code is None:  # it may not have opened its session yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _kill_descendants(self, running: _Running) -> list[int]:
        """Kills all processes of the trial, in any group or session; returns their PIDs."""
        left = [pid for pid in processes.descendants(os.getpid()) if pid not in running.others]
        running.pids.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _sweep(self, running: _Running) -> list[str]:
        """Kills all processes of the trial; removes its temporary files, shared memory, build locks and empty folders; lists them."""
        swept: list[str] = []
        until = time.monotonic() + SWEEP_S
        while time.monotonic() < until:
            left = self._kill_descendants(running)
            swept += [f"process {pid}" for pid in left]
            running.pids.update(pid for pid, _ in _dead_children())
            # A process that is just dying is neither alive nor to be reaped yet.
            if not left and running.others.issuperset(processes.descendants(os.getpid(), dead=True)):
                break
            time.sleep(0.001 if left else 0.01)  # short enough that a forking process cannot get ahead
        for path in shared_memory.left(running.pids, running.shared_before):
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(str(path))
        self.imported = temporary.noted_imports(running.temporary)
        if running.temporary is not None:
            shutil.rmtree(running.temporary, ignore_errors=True)
        remove_empty(made_folders(running.folder.scratch))
        if self.orphaned:  # else the driver does
            shutil.rmtree(running.folder.scratch, ignore_errors=True)
        return sorted({*swept, *ops.remove_stale_locks()})[:MAX_SWEPT]


def _dead_children() -> Iterator[tuple[int, int]]:
    """Yields PID and wait status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _kernel_ooms() -> int:
    """Returns the kills by the kernel's out-of-memory killer on this machine since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
