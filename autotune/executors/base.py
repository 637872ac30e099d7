"""What every engine offers, and the life of one trial on any of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from autotune import files, masking, trial
from autotune.trial import Exit, Outcome, TrialDir, TrialRequest, TrialResult

POLL_S = 0.01
# Beyond its deadline a trial is the agent's to kill; this much later the agent itself is given up.
AGENT_GRACE_S = 30.0


class Status(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    REFUSED = "refused"


class Job(Protocol):
    """One trial that an engine was given.

    Attributes:
        reason: Why it waits, was lost or refused, in the engine's own words.
    """

    reason: str

    def poll(self) -> Status:
        """Where the job stands now; does not wait."""

    def cancel(self) -> None:
        """Ends every rank; returns when none is left. May be called twice."""


class Executor(Protocol):
    """An engine that runs trials; its trial folder is the protocol.

    Attributes:
        mark: What the processes that it started on this machine carry in their environment; empty where there are none.
        cold_reason: Why ranks are not forked from a warm server; empty where they are.
    """

    mark: str

    @property
    def cold_reason(self) -> str:  # noqa: D102
        ...

    def start(self) -> None:
        """Gets the engine ready, as far as that costs no waiting in a queue.

        Raises:
            UserError: It cannot be used, and why.
        """

    def submit(self, folder: TrialDir) -> Job:
        """Starts the ranks of the trial whose `request.json` is in the folder."""

    def find(self, folder: TrialDir) -> Job | None:
        """The job of a trial that an earlier run submitted, if the engine can still say what became of it."""

    def build_ops(self, names: Sequence[str]) -> str | None:
        """Compiles DeepSpeed ops ahead of the trials that need them; returns what went wrong, if something did."""

    def turn(self, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Waits until nothing else is measured on the same machine, and keeps others waiting meanwhile."""

    def close(self) -> None:
        """Ends whatever the engine keeps running."""


def run(
    executor: Executor, path: Path, request: TrialRequest, on_tick: Callable[[], None] = lambda: None
) -> TrialResult:
    """Runs one trial to its end and returns that end as data; `result.json` is written.

    Args:
        executor: The engine.
        path: The trial's folder; what an earlier, lost attempt left in it is removed. If the same trial still runs there on
            behalf of a coordinator that died, it is carried on.
        request: What to run.
        on_tick: Called some times a second while it runs (heartbeats, progress).

    Raises:
        KeyboardInterrupt: Passed on after the ranks were stopped.
        OSError: The disk is full, or refused a file; that is no end of the trial's own.
    """
    folder = TrialDir(path)
    if (left := _left(executor, folder)) is not None and left[1] == request:
        return _watch(left[0], folder, request, on_tick)
    forget(executor, path)
    # The ranks need a secret that the user put on the command line; nobody else does.
    secret = request.script is not None and masking.masked(request.script.arguments) != request.script.arguments
    trial.write(folder.request, request, sync=False, private=secret)
    trial.write(folder.ds_config, request.ds_config, sync=False)
    return _watch(executor.submit(folder), folder, request, on_tick)


def resume(executor: Executor, path: Path, on_tick: Callable[[], None] = lambda: None) -> TrialResult | None:
    """Carries on a trial whose coordinator died; None if the engine knows nothing of it or lost it."""
    folder = TrialDir(path)
    left = _left(executor, folder)
    return _watch(left[0], folder, left[1], on_tick) if left is not None else None


def forget(executor: Executor, path: Path) -> None:
    """Removes a trial's folder, after ending what an earlier coordinator may have left running in it."""
    if (left := _left(executor, TrialDir(path))) is not None:
        left[0].cancel()
    shutil.rmtree(path, ignore_errors=True)


def _left(executor: Executor, folder: TrialDir) -> tuple[Job, TrialRequest] | None:
    """The job that a dead coordinator left, under way or ended and not concluded yet, and what was asked of it."""
    if not folder.job.exists() or folder.result.exists():
        return None
    try:
        request = trial.read(folder.request, TrialRequest)
    except (FileNotFoundError, ValueError):
        return None
    job = executor.find(folder)
    return (job, request) if job is not None and job.poll() not in (Status.LOST, Status.REFUSED) else None


def _watch(job: Job, folder: TrialDir, request: TrialRequest, on_tick: Callable[[], None]) -> TrialResult:
    status, started, ticked, over = Status.RUNNING, None, 0.0, False
    try:
        while (status := job.poll()) in (Status.QUEUED, Status.RUNNING):
            now = time.monotonic()
            if status is Status.RUNNING:
                started = started or now  # neither starting an engine nor waiting in its queue is the trial's time
            if now - ticked > 0.2:
                ticked = now
                on_tick()
            if started is not None and now - started > request.deadline_s + AGENT_GRACE_S:
                break
            time.sleep(POLL_S)
        over = True
    finally:
        if status in (Status.QUEUED, Status.RUNNING):
            job.cancel()
            if not over:  # the user stopped it: nothing to carry on
                folder.job.unlink(missing_ok=True)
    shutil.rmtree(folder.scratch, ignore_errors=True)
    result = conclude(folder, request, job.reason if status in (Status.LOST, Status.REFUSED) else "")
    if status is Status.REFUSED:
        result = replace(result, outcome=Outcome.CRASHED)
    if result.outcome in (Outcome.CRASHED, Outcome.LOST):
        files.check_space(folder.path, result.reason)
    trial.write(folder.result, result)
    return result


def conclude(folder: TrialDir, request: TrialRequest, lost: str = "") -> TrialResult:
    """Reads what ranks and agents left in a trial's folder into one result.

    Args:
        folder: The trial's folder.
        request: What was asked for.
        lost: Why the engine gave the trial up, if it did: unless the ranks had all come to their end, nothing else counts.
    """
    if request.nodes > 1:
        end = trial.joined(trial.ends(folder, request.nodes), request.nodes, lost)
        trial.write(folder.exit, end)
    else:
        try:
            end = trial.read(folder.exit, Exit)
        except (FileNotFoundError, ValueError):
            end = Exit(codes={}, killed="lost")
    if lost:
        end = replace(end, killed="lost", note=lost)
    result = trial.merge(request, trial.reports(folder, request.world_size), end, trial.phases(folder))
    texts = ("reason", "caveats", "side_changes", "unreproducible")
    return replace(
        result, **{name: masking.masked(getattr(result, name)) for name in texts}
    )  # an exception may quote a token
