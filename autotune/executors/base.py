"""What every engine offers, and the life of one trial on any of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from autotune import trial
from autotune.trial import Exit, Outcome, TrialDir, TrialRequest, TrialResult

POLL_S = 0.01
# Beyond its deadline a trial is the agent's to kill; this much later the agent itself is given up.
AGENT_GRACE_S = 30.0


class Status(StrEnum):
    """Where a job stands."""

    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"


class Job(Protocol):
    """One trial that an engine was given."""

    def poll(self) -> Status:
        """Where the job stands now; does not wait."""

    def cancel(self) -> None:
        """Ends every rank; returns when none is left. May be called twice."""


class Executor(Protocol):
    """An engine that runs trials; its trial folder is the protocol."""

    def submit(self, folder: TrialDir) -> Job:
        """Starts the ranks of the trial whose `request.json` is in the folder."""

    def turn(self, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Waits until nothing else is measured on the same machine, and keeps others waiting meanwhile."""

    def close(self) -> None:
        """Ends whatever the engine keeps running."""


def run(executor: Executor, path: Path, request: TrialRequest, on_tick: Callable[[], None] = lambda: None) -> TrialResult:
    """Runs one trial to its end and returns that end as data; `result.json` is written.

    Args:
        executor: The engine.
        path: The trial's folder; what an earlier, lost attempt left in it is removed.
        request: What to run.
        on_tick: Called some times a second while it runs (heartbeats, progress).

    Raises:
        KeyboardInterrupt: Passed on after the ranks were stopped.
    """
    if path.exists():
        shutil.rmtree(path)
    folder = TrialDir(path)
    trial.write(folder.request, request, sync=False)
    trial.write(folder.ds_config, request.ds_config, sync=False)
    job = executor.submit(folder)
    status, started, ticked = Status.RUNNING, time.monotonic(), 0.0  # starting an engine is not the trial's time
    try:
        while (status := job.poll()) is Status.RUNNING:
            now = time.monotonic()
            if now - ticked > 0.2:
                ticked = now
                on_tick()
            if now - started > request.deadline_s + AGENT_GRACE_S:
                break
            time.sleep(POLL_S)
    finally:
        if status is Status.RUNNING:
            job.cancel()
    shutil.rmtree(folder.scratch, ignore_errors=True)
    result = conclude(folder, request)
    trial.write(folder.result, result)
    return result


def conclude(folder: TrialDir, request: TrialRequest) -> TrialResult:
    """Reads what ranks and agent left in a trial's folder into one result."""
    try:
        end = trial.read(folder.exit, Exit)
    except (FileNotFoundError, ValueError):
        lost = TrialResult(outcome=Outcome.LOST, reason="the process that watched the ranks died", candidate=request.candidate)
        return replace(lost, world_size=request.world_size)
    return trial.merge(request, trial.reports(folder, request.world_size), end, trial.phases(folder))
