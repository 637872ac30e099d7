"""The agent of one machine: starts the ranks of a trial, watches them, and leaves nothing behind.

It reads commands as JSON lines on standard input and answers on standard output; the trials themselves are folders.
Warm, it has imported torch and DeepSpeed once and forks the ranks, so that a trial starts in tenths of a second; it never
runs a torch operation and never initialises CUDA, which would not survive the fork. Cold, it executes a new Python.
When its standard input closes (the driver died) it kills what runs and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune import segments, trial
from autotune.trial import Exit, TrialDir, TrialRequest
from autotune.worker import network, processes
from autotune.worker.logs import Log

# DeepSpeed imports these lazily inside `initialize`, at 2.4 CPU-seconds a rank; imported here they cost nothing there.
LAZY_MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "torch.utils.checkpoint",
    "autotune.worker.run",
)
PEER_GRACE_S = 1.5
# How often an agent looks for the ends of a trial on other machines.
LOOK_S = 0.3
# How long an agent sleeps where nothing happens, and where a rank may wait for its log to be read.
WAIT_S, BUSY_WAIT_S = 0.1, 0.002
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# So long a trial's processes are hunted; so much of what it left behind is written down.
SWEEP_S, MOST_SWEPT = 20.0, 100


@dataclass
class _Running:
    """The processes of the trial under way."""

    folder: TrialDir
    request: TrialRequest
    node: int
    started_at: float
    ranks: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)
    first_failed: int | None = None
    first_failed_at: float = 0.0
    failed_at: float | None = None
    looked_at: float = 0.0
    killed: str | None = None
    pids: set[int] = field(default_factory=set)
    kernel_oom_before: int = 0
    others: frozenset[int] = frozenset()
    shared_before: frozenset[tuple[str, int]] = frozenset()
    logs: list[Log] = field(default_factory=list)
    watch: processes.Watch | None = None
    note: str = ""

    @property
    def group(self) -> int:
        """The ranks' process group, which the first of them opens."""
        return next(iter(self.ranks.values()), 0)


class Agent:
    """Runs one trial at a time.

    Args:
        warm: Fork the ranks from this process instead of executing a new Python for each.
        commands: File descriptor that commands come from; its end means that the driver is gone.
        answers: The one that answers go to, which no rank may write to.
    """

    def __init__(self, *, warm: bool, commands: int | None, answers: int | None = None) -> None:
        self.warm = warm
        self.commands, self.answers = commands, answers
        self.orphaned = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        # Whatever a rank starts and leaves is handed to this process, so that it can be found and ended.
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self, path: Path, node: int = 0, address: str = network.LOOPBACK) -> Exit:
        """Runs this machine's ranks of one trial to their end, whatever that is, and writes how they ended.

        Args:
            path: The trial's folder.
            node: Number of this machine among the trial's.
            address: Where the others reach machine 0; ranks on one machine meet on its loopback.
        """
        folder = TrialDir(path)
        running = self._start(folder, trial.read(folder.request, TrialRequest), node, address)
        try:
            busy = False
            while len(running.codes) < len(running.ranks):
                self._wait(running, BUSY_WAIT_S if busy else WAIT_S)
                self._reap(running)
                self._judge(running)
                if running.killed == "processes":  # by the time the ranks are dead there would be many more
                    self._end_left(running)
                busy = sum(log.take() for log in running.logs) > 0
        finally:
            swept = self._sweep(running)
            for log in running.logs:
                log.close()
        end = Exit(
            codes=running.codes,
            first_failed=running.first_failed,
            failed_at=running.failed_at,
            killed=running.killed,
            note=running.note,
            kernel_oom=_kernel_ooms() > running.kernel_oom_before,
            wall_s=time.monotonic() - running.started_at,
            swept=swept,
        )
        trial.write(folder.node_exit(node, running.request.nodes), end, sync=running.request.nodes > 1)
        return end

    def _start(self, folder: TrialDir, request: TrialRequest, node: int, address: str) -> _Running:
        running = _Running(folder, request, node, time.monotonic(), {}, kernel_oom_before=_kernel_ooms())
        listener = None
        if node == 0:
            listener = network.listen(address if request.nodes > 1 else network.LOOPBACK)
            host, port = (address if request.nodes > 1 else network.LOOPBACK), listener.getsockname()[1]
            if request.nodes > 1:
                trial.write(folder.master, {"host": host, "port": port})
        else:
            found = self._master(running)
            if found is None:
                return running
            host, port = found
        environment = network.environment(host, port, request.nodes)
        # What lives below this process already, an imported module started; it is not the trial's to end.
        running.others, running.shared_before = (
            frozenset(processes.descendants(os.getpid(), dead=True)),
            frozenset(segments.there()),
        )
        running.watch = processes.Watch(processes.most(request.ranks_per_node), len(running.others))
        sys.stdout.flush()
        sys.stderr.flush()
        with listener or contextlib.nullcontext():
            agent = os.getpid()
            for local_rank in range(request.ranks_per_node):
                rank = node * request.ranks_per_node + local_rank
                running.logs.append(Log(folder.log(rank)))
                pid = os.fork()
                if pid == 0:
                    self._become_rank(running, rank, listener, environment, agent)
                running.logs[-1].release()
                running.ranks[rank] = pid
                running.pids.add(pid)
                # Set on both sides of the fork: whoever comes first, the group exists before anybody needs it.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, running.group)
        return running

    def _master(self, running: _Running) -> tuple[str, int] | None:
        """Waits until machine 0 has said where the ranks meet; None if the trial ended meanwhile."""
        while not running.killed:
            if running.folder.master.name in running.folder.names():
                said = json.loads(running.folder.master.read_text())
                return str(said["host"]), int(said["port"])
            self._wait(running)
            self._judge(running)
        return None

    def _become_rank(
        self, running: _Running, rank: int, listener: socket.socket | None, environment: dict[str, str], agent: int
    ) -> None:
        folder = running.folder
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, running.group)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:  # it died before we asked to be told
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self.answers is not None:
                os.close(self.answers)
            running.logs[-1].become_output()
            for log in running.logs:
                log.drop()
            _expose_to_oom_killer()
            os.environ.update(rank_environment(rank, running.request) | environment)
            descriptor = listener.fileno() if listener is not None else -1
            if not self.warm:
                if listener is not None:
                    os.set_inheritable(descriptor, True)
                command = [
                    sys.executable,
                    "-m",
                    "autotune.worker",
                    "rank",
                    str(folder.path),
                    str(rank),
                    str(descriptor),
                ]
                os.execv(sys.executable, command)
            from autotune.worker import run

            run.main(str(folder.path), rank, descriptor)
        except BaseException:  # nothing may return into the agent's own loop
            import traceback

            with contextlib.suppress(BaseException):  # it may have closed its output
                traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(1)

    def _wait(self, running: _Running, seconds: float = WAIT_S) -> None:
        """Sleeps until a rank ends, a command comes, or it is time to look at clocks and logs."""
        sources = [self._wake_read, *([self.commands] if self.commands is not None and not self.orphaned else [])]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self.commands in ready and self.commands is not None:
            data = os.read(self.commands, 65536)
            self.orphaned = not data
            if self.orphaned or b'"cancel"' in data:
                self._kill(running, "cancel")

    def _reap(self, running: _Running) -> None:
        for pid, status in _dead_children():
            rank = next((rank for rank, rank_pid in running.ranks.items() if rank_pid == pid), None)
            running.pids.add(pid)
            if rank is None:
                continue
            running.codes[rank] = os.waitstatus_to_exitcode(status)
            failed = running.codes[rank] != 0 or not running.folder.report(rank).exists()
            if failed and running.first_failed is None and running.killed is None:
                running.first_failed, running.first_failed_at, running.failed_at = rank, time.monotonic(), time.time()

    def _judge(self, running: _Running) -> None:
        now = time.monotonic()
        if running.request.nodes > 1 and not running.first_failed_at and now - running.looked_at > LOOK_S:
            running.looked_at = now
            if _failed_elsewhere(running):
                running.first_failed_at = now
        ended_early = running.first_failed_at and now - running.first_failed_at > PEER_GRACE_S
        if (running.ranks and len(running.codes) == len(running.ranks)) or running.killed:
            return
        if ended_early:
            self._kill(running, "peer")
        elif now - running.started_at > running.request.deadline_s:
            self._kill(running, "deadline")
        elif running.watch is not None and running.watch.too_many():
            running.note = f"it started more than {running.watch.limit} processes ({processes.VARIABLE} allows more)"
            self._kill(running, "processes")

    def _kill(self, running: _Running, why: str) -> None:
        running.killed, running.failed_at = running.killed or why, running.failed_at or time.time()
        if not running.ranks:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.group, signal.SIGKILL)
        for rank, pid in running.ranks.items():
            if rank not in running.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end_left(self, running: _Running) -> list[int]:
        """Kills whatever of the trial lives now, in whatever group or session."""
        left = [pid for pid in processes.descendants(os.getpid()) if pid not in running.others]
        running.pids.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _sweep(self, running: _Running) -> list[str]:
        """Ends every process and removes every shared-memory file and build lock that the trial left."""
        swept: list[str] = []
        until = time.monotonic() + SWEEP_S
        while time.monotonic() < until:
            left = self._end_left(running)
            swept += [f"process {pid}" for pid in left]
            running.pids.update(pid for pid, _ in _dead_children())
            # A process that is just dying is neither alive nor to be reaped yet.
            if not left and running.others.issuperset(processes.descendants(os.getpid(), dead=True)):
                break
            time.sleep(0.001 if left else 0.01)  # what forks must not have time to
        for path in segments.left(running.pids, running.shared_before):
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(str(path))
        return sorted({*swept, *_remove_stale_locks()})[:MOST_SWEPT]


def rank_environment(rank: int, request: TrialRequest) -> dict[str, str]:
    """The variables that torch, DeepSpeed and the user's code expect in a rank, as torchrun sets them, but for the place to meet."""
    local = request.ranks_per_node
    node, local_rank = divmod(rank, local)
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": request.world_size,
        "LOCAL_WORLD_SIZE": local,
        "LOCAL_SIZE": local,
    }
    return {name: str(value) for name, value in names.items()} | {"GROUP_RANK": str(node)}


def _failed_elsewhere(running: _Running) -> bool:
    """Whether another machine's agent has said that the trial ended badly there."""
    others = trial.ends(running.folder, running.request.nodes)
    return any(end.killed or end.first_failed is not None for node, end in others.items() if node != running.node)


def serve(modules: Sequence[str]) -> int:
    """The warm server: imports once, then runs the trials whose folders are named on standard input.

    Args:
        modules: What the user's target imports, as `module` or `module:name,name`, so that the ranks find it loaded.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    _remove_stale_locks()
    reason = _preload(modules)
    agent = Agent(warm=reason is None, commands=0, answers=answers)
    _answer(answers, {"ready": True, "warm": agent.warm, "reason": reason or ""})
    for command in _commands(0):
        if "run" in command:
            agent.run(Path(command["run"]), int(command.get("node", 0)), command.get("address", network.LOOPBACK))
            _answer(answers, {"ended": command["run"]})
        if agent.orphaned:
            break
    return 0


def _preload(modules: Sequence[str]) -> str | None:
    """Imports what the ranks need; returns why forking would be unsafe, or None."""
    if sys.platform != "linux":
        return f"forking after imports is not safe on {sys.platform}"
    sys.path.insert(0, os.getcwd())
    # With Triton, inductor would start a pool of compilers (threads and processes), which no fork survives.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    try:
        import deepspeed
        import torch

        import_lazy_modules()
        # Probing the ops compiles and links a libaio test program, 0.3 s in every process that has not done it.
        deepspeed.ops.__compatible_ops__  # noqa: B018
    except Exception as error:
        return f"DeepSpeed could not be imported ahead: {type(error).__name__}: {error}"
    for item in modules:
        name, _, attributes = item.partition(":")
        try:
            module = importlib.import_module(name)
            for attribute in filter(None, attributes.split(",")):
                getattr(module, attribute, None)  # packages that import lazily do so now
        except BaseException as error:  # the ranks will meet it again and report it
            print(f"autotune: not preloaded: {name}: {error}", file=sys.stderr)
    if torch.cuda.is_initialized():
        return "an imported module initialised CUDA, which does not survive a fork"
    if torch.cuda.is_available() and (failure := tried_in_a_fork(torch.cuda.init)) is not None:
        return f"CUDA does not start in a forked process: {failure}"
    if threading.active_count() > 1:
        return f"an imported module started threads: {', '.join(thread.name for thread in threading.enumerate()[1:])}"
    n_threads = len(os.listdir("/proc/self/task"))
    if n_threads > 1:
        return f"an imported module started {n_threads - 1} native threads"
    gc.collect()
    gc.freeze()
    return None


def tried_in_a_fork(run: Callable[[], object]) -> str | None:
    """Runs something in a forked process; returns why it failed, or None.

    Whether CUDA was touched in a way that does not survive a fork cannot be read from torch: counting devices without NVML is enough,
    and leaves `torch.cuda.is_initialized()` false. So a fork tries.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            os.write(write, f"{type(error).__name__}: {lines[0]}"[:500].encode())
        finally:
            os._exit(status)
    os.close(write)
    said = b""
    while data := os.read(read, 4096):
        said += data
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else said.decode(errors="replace") or f"exit status {code}"


def import_lazy_modules() -> None:
    """Imports what DeepSpeed would import inside `initialize`, where its time and memory would count as the trial's."""
    for name in LAZY_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _commands(source: int) -> Iterator[dict[str, Any]]:
    """Commands one by one; byte by byte, so that a cancel right behind a run stays in the pipe for whoever watches the run."""
    line = b""
    while byte := os.read(source, 1):
        line += byte
        if byte == b"\n":
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
            line = b""


def _answer(target: int, message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(target, json.dumps(message).encode() + b"\n")


def _dead_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _remove_stale_locks() -> list[str]:
    """Removes build locks whose builder is dead; every later trial would wait for them for ever."""
    from autotune.worker import ops

    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    return ops.remove_stale_locks(Path(extensions)) if extensions else []


def _kernel_ooms() -> int:
    """How often the kernel's out-of-memory killer has struck on this machine since boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _expose_to_oom_killer() -> None:
    """Under memory pressure the kernel is to take a trial, not the tuner or the user's other work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
