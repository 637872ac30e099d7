"""The interface of an executor, and the life of one trial on any of them: submit, watch, conclude."""

import contextlib
import fcntl
import math
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from autotune.errors import LONGEST_REASON, Unavailable, UserError, printable, shortened
from autotune.executors.conclude import joined, merge
from autotune.system import files, redaction
from autotune.system.machine import lock_path
from autotune.trial import stood
from autotune.trial.failures import means_out_of_memory
from autotune.trial.folder import TrialDir, ends, phases, record_in, reports, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, Outcome, TrialResult

POLL_S = 0.01
# Compiling DeepSpeed's ops takes minutes; after this time the compiler is given up.
BUILD_DEADLINE_S = 1800.0
TICK_S = 0.2
# The agent kills a trial at its deadline; this much later the agent itself is given up.
AGENT_GRACE_S = 30.0
# While machines are away, the engine is asked for others at these intervals, from the first to the last.
RETRY_S = (2.0, 60.0)
# How the reason of a candidate begins that was lost as often as is believed to be chance, and once more.
TWICE = "twice: "


class Status(StrEnum):
    """State of a job, and by it what follows the end of an attempt at a trial, alike for all engines.

    `EXITED`: the ranks ended by themselves, and the result is told. `LOST`: an agent or a warm server died, which the
    configuration may have caused; the trial runs once more, and a second such end is the configuration's crash.
    `TAKEN`: the engine says that it took the machines away, or has none at present; the trial runs again without being
    counted, until the attempts have cost `patience_s`. `REFUSED`: the engine can never run the job; the study ends.
    """

    QUEUED = "queued"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    TAKEN = "taken"
    REFUSED = "refused"


UNDER_WAY = (Status.QUEUED, Status.RUNNING)


class MachinesGone(Unavailable):
    """The engine took the machines of a trial away, or has none; the trial was not measured and runs again later.

    Args:
        reason: Why, in the engine's words.
        ran_s: Time that the attempt has cost, that in a queue left out.
    """

    def __init__(self, reason: str, ran_s: float = 0.0) -> None:
        super().__init__(reason)
        self.ran_s = ran_s


class TimeOver(Exception):
    """The time that an executor was given is over; the trial that ran was ended, and was not measured."""


class Job(Protocol):
    """One trial in the hands of an engine.

    Attributes:
        reason: Why the trial waits, was lost, taken away or refused, in the engine's words.
    """

    reason: str

    def poll(self) -> Status:
        """Returns the state of the job, without waiting."""

    def cancel(self) -> None:
        """Ends all ranks and waits for that. May be called twice."""


class Executor(Protocol):
    """Base of an executor: runs trials, and exchanges files with their ranks in the trial's folder.

    Attributes:
        cold_reason: Why trials start more slowly than ranks forked from a warm server that has imported everything;
            empty if they do not.
        patience_s: Time that attempts which lost their machines, and waits for others, may cost a trial.
        on_queue: Called with the reason why a trial waits in an engine's queue, whenever it changes.
        ends_at_s: When whatever runs or waits is ended, in seconds of the monotonic clock.
        turns: The lock under which its trials take turns with those of the user's other studies on this machine: `fcntl.LOCK_EX`,
            `LOCK_SH` beside others that share it; 0 where an engine gives a machine to one job at a time.
    """

    patience_s: float = 0.0
    ends_at_s: float = math.inf
    turns: int = 0
    on_queue: Callable[[str], None] = staticmethod(lambda _: None)

    @property
    def hosts(self) -> frozenset[str]:
        """Names of the machines that it holds; trials on the same ones disturb each other."""
        return frozenset()

    @property
    def cold_reason(self) -> str:  # noqa: D102
        return ""

    def start(self) -> None:
        """Gets the engine ready, as far as that needs no waiting in a queue; a `UserError` says why it cannot be used."""
        return

    def submit(self, folder: TrialDir) -> Job:
        """Starts the trial whose `request.json` is in the folder; raises as `run` if there is no machine for it."""

    def find(self, folder: TrialDir) -> Job | None:
        """Returns the job of a trial that an earlier run submitted, if the engine still knows it."""
        return None

    def build_op(self, op: str, on_tick: Callable[[], None] = lambda: None) -> str | None:
        """Compiles one of DeepSpeed's ops before the trials that need it; returns the error, if any, `on_tick` meanwhile."""
        return None

    @contextlib.contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Waits until no other study measures on the same machine, but no longer than its time, and keeps others waiting meanwhile.

        Not filelock: its lock that several holders can share is a SQLite file, which neither a fork nor NFS may touch.

        Args:
            on_wait: Called repeatedly while another study measures.
        """
        if not self.turns:
            yield
            return
        with open(lock_path(), "ab") as file:
            while True:
                try:
                    fcntl.flock(file, self.turns | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    check_time(self)
                    on_wait()
                    time.sleep(0.05)
                except OSError as error:  # a home folder on Lustre that is mounted without `-o flock`
                    remedy = "set AUTOTUNE_CACHE to a folder on another file system"
                    raise UserError(f"{file.name} cannot be locked ({error.strerror}): {remedy}") from None
            yield

    def close(self) -> None:
        """Ends everything that the engine keeps running."""
        return


def run(
    executor: Executor,
    path: Path,
    request: TrialRequest,
    on_tick: Callable[[], None] = lambda: None,
    on_retry: Callable[[str], None] = lambda _: None,
) -> TrialResult:
    """Runs one trial by the policy of `Status`, writes `result.json`, and returns it.

    Args:
        path: The trial's folder. If the same trial still runs there for a coordinator that died, it is resumed; other
            files of an earlier attempt are removed.
        on_tick: Called five times a second while it runs (heartbeats, progress).
        on_retry: Called with the reason when it runs once more.

    Raises:
        UserError: The engine can never run it.
        MachinesGone: Attempts that lost their machines, and waits for others, have cost `patience_s`.
        TimeOver: The executor's time is over, and the ranks were stopped.
        KeyboardInterrupt: Passed on after the ranks were stopped.
        OSError: The disk is full, or refused a file; that says nothing about the trial.
    """
    folder, cost_s, pause_s, n_lost, failed = TrialDir(path), 0.0, RETRY_S[0], 0, list[str]()
    left = _left(executor, folder)
    job = left[0] if left is not None and left[1] == request else None
    while True:
        try:
            check_time(executor)
            job = job or _submitted(executor, folder, request)
            result = _watch(executor, job, folder, request, on_tick)
        except MachinesGone as gone:
            cost_s += gone.ran_s + pause_s
            if cost_s > executor.patience_s:
                raise MachinesGone(f"{gone}; the same command continues the study once they are back") from None
            failed.append(str(gone))
            _pause(executor, pause_s, on_tick)
            pause_s = min(2 * pause_s, RETRY_S[1])
        else:
            if result.outcome is Outcome.LOST and n_lost:
                if job.poll() is Status.LOST and not has_begun(folder):
                    at_fault = "no rank was started, so the machines are at fault, not what they run"
                    raise UserError(f"{result.reason}: {at_fault}")
                # No coincidence: this configuration kills its supervisor.
                result = replace(result, outcome=Outcome.CRASHED, reason=f"{TWICE}{result.reason}")
            if result.outcome is not Outcome.LOST:
                if failed:
                    result.lost_attempts = failed
                    write_record(folder.result, result)
                return result
            n_lost += 1
            failed.append(result.reason)
            on_retry(result.reason)
        job = None


def built(executor: Executor, path: Path, op: str, nodes: int, on_tick: Callable[[], None]) -> str | None:
    """Compiles one of DeepSpeed's ops by a trial in which each machine does only that; see `Executor.build_op`."""
    request = TrialRequest(target="", mode="build", op=op, world_size=nodes, nodes=nodes, deadline_s=BUILD_DEADLINE_S)
    result = run(executor, path, request, on_tick)
    return None if result.outcome is Outcome.COMPLETE else result.reason


def check_time(executor: Executor) -> None:
    """Raises `TimeOver` once the executor's time is over."""
    if time.monotonic() >= executor.ends_at_s:
        raise TimeOver


def has_begun(folder: TrialDir) -> bool:
    """Returns whether a rank or the agent of a machine has left a sign of its start."""
    return any(re.match(r"(rank|node|events|exit)\b", name) for name in folder.names())


def _submitted(executor: Executor, folder: TrialDir, request: TrialRequest) -> Job:
    """Starts a trial; each has its own folder."""
    forget(executor, folder.path)
    # Only the ranks may read a secret that the user put on the command line.
    secret = request.script is not None and redaction.redact(request.script.arguments) != request.script.arguments
    write_record(folder.request, request, sync=False, private=secret)
    write_record(folder.ds_config, request.ds_config, sync=False)
    return executor.submit(folder)


def _pause(executor: Executor, seconds: float, on_tick: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check_time(executor)
        on_tick()
        time.sleep(TICK_S)


def resume(executor: Executor, path: Path, on_tick: Callable[[], None] = lambda: None) -> TrialResult | None:
    """Resumes a trial whose coordinator died, as `run` would; None if the engine does not know it or lost it."""
    folder = TrialDir(path)
    left = _left(executor, folder)
    try:
        return _watch(executor, left[0], folder, left[1], on_tick) if left is not None else None
    except MachinesGone:
        return None


def forget(executor: Executor, path: Path) -> None:
    """Removes a trial's folder, after ending the job that an earlier coordinator may have left running in it."""
    if (left := _left(executor, TrialDir(path))) is not None:
        left[0].cancel()
    shutil.rmtree(path, ignore_errors=True)


def _left(executor: Executor, folder: TrialDir) -> tuple[Job, TrialRequest] | None:
    """Returns job and request that a dead coordinator left, still running or ended without a result."""
    if not folder.job.exists() or folder.result.exists():
        return None
    request = record_in(folder.request, TrialRequest)
    if request is None or (job := executor.find(folder)) is None:
        return None
    return (job, request) if job.poll() in (*UNDER_WAY, Status.EXITED) else None


def _watch(
    executor: Executor, job: Job, folder: TrialDir, request: TrialRequest, on_tick: Callable[[], None]
) -> TrialResult:
    status, started, ticked, over, entered = Status.RUNNING, None, 0.0, False, time.monotonic()
    try:
        while (status := job.poll()) in UNDER_WAY:
            now = time.monotonic()
            if status is Status.RUNNING:
                started = started or now  # neither the engine's start nor its queue counts
            if now - ticked > TICK_S:
                ticked = now
                check_time(executor)
                on_tick()
            if started is not None and now - started > request.deadline_s + AGENT_GRACE_S:
                break
            time.sleep(POLL_S)
        over = True
    finally:
        if status in UNDER_WAY:
            job.cancel()
            if not over:  # the user stopped it: nothing to resume
                folder.job.unlink(missing_ok=True)
        shutil.rmtree(folder.scratch, ignore_errors=True)
    if status is Status.REFUSED:
        raise UserError(shown(job.reason))
    # A job that is still under way has passed its deadline.
    result = conclude(folder, request, job.reason if status in (Status.LOST, Status.TAKEN) else "")
    if over and status in UNDER_WAY and result.outcome is Outcome.LOST:
        reason = f"no end within {request.deadline_s:g} s, nor {AGENT_GRACE_S:g} s later, when it was given up"
        result = replace(result, outcome=Outcome.TIMEOUT, reason=reason)
    if result.outcome is Outcome.LOST and status is Status.TAKEN:
        raise MachinesGone(shown(job.reason), time.monotonic() - started if started is not None else 0.0)
    if result.outcome in (Outcome.CRASHED, Outcome.LOST):
        files.check_space(folder.path, result.reason)
    result.waited_s = (started or entered) - entered
    if result.outcome is not Outcome.LOST:
        write_record(folder.result, result)
    return result


def conclude(folder: TrialDir, request: TrialRequest, lost: str = "") -> TrialResult:
    """Returns the result of a trial from the files that ranks and agents left in its folder.

    Args:
        lost: Why the engine gave the trial up, if it did; the result is `lost` unless all ranks had reported.
    """
    if request.nodes > 1:
        end = joined(ends(folder, request.nodes), request.nodes)
    else:
        end = record_in(folder.exit, Exit) or Exit(codes={}, killed="lost")
    if lost:
        end = replace(end, killed="lost", note=lost)
    if request.nodes > 1:
        write_record(folder.exit, end)
    found = reports(folder, request.world_size)
    result = merge(request, found, end, phases(folder))
    rank = result.failed_rank
    if rank is not None and rank not in found and end.codes.get(rank) == -signal.SIGABRT:
        # An exception of C++ that nobody catches aborts the process; only its log says which.
        said = _end_of_log(folder, rank, 4096)
        if lines := [line.strip() for line in said.splitlines() if means_out_of_memory(line)]:
            result = replace(
                result, outcome=Outcome.OOM, reason=shortened(f"rank {rank} was aborted: {lines[-1]}", LONGEST_REASON)
            )
    if result.outcome is Outcome.TIMEOUT:
        logs = {each: _end_of_log(folder, each, stood.TAIL_BYTES) for each in range(request.world_size)}
        result.reason = "; ".join(filter(None, (result.reason, stood.waited_for(logs))))
    # Texts of the user's code: an exception may quote a token, or hold control characters.
    result.reason = shown(result.reason)
    for texts in (result.caveats, result.side_changes, result.unreproducible):
        texts[:] = map(shown, texts)
    return result


def _end_of_log(folder: TrialDir, rank: int, n_bytes: int) -> str:
    return (files.tail(folder.log(rank), n_bytes) or b"").decode(errors="replace")


def shown(text: str) -> str:
    """Returns a text of a rank or an engine without secrets and control characters, for terminals and pages."""
    return printable(redaction.redact(text))
