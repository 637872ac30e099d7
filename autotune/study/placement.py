"""Like with like: trials on other machines than the baseline's are told by the baseline's pace on theirs."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from autotune.executors.base import Executor
from autotune.study.folder import trial_path
from autotune.study.storage.leases import StudyLeases
from autotune.trial.folder import result_in
from autotune.trial.request import TrialToBeat
from autotune.trial.result import Outcome, TrialResult

# Interval at which a right that another thread or coordinator holds is tried again.
WAIT_S = 0.2


def baseline_path(folder: Path, place: str) -> Path:
    """Folder of the baseline's trial on some machines."""
    return folder / "trials" / f"baseline-{place}"


class Turns:
    """Lets one thread of one coordinator at a time measure the baseline of a place."""

    def __init__(self, leases: StudyLeases) -> None:
        self._leases, self._guard, self._mutexes = leases, threading.Lock(), dict[str, threading.Lock]()

    @contextlib.contextmanager
    def at(self, place: str, tick: Callable[[], None]) -> Iterator[None]:
        """Waits until nobody measures there, and keeps others waiting during the block; `tick` meanwhile."""
        with self._guard:
            mutex = self._mutexes.setdefault(place, threading.Lock())
        while not mutex.acquire(timeout=WAIT_S):
            tick()
        try:
            with self._of_coordinators(f"place {place}", tick):
                yield
        finally:
            mutex.release()

    @contextlib.contextmanager
    def _of_coordinators(self, name: str, tick: Callable[[], None]) -> Iterator[None]:
        leases = self._leases
        if leases.alone:
            yield
            return
        while not leases.storage.patiently(lambda: leases.acquire(name)):
            tick()
            time.sleep(WAIT_S)
        try:
            yield
        finally:
            with contextlib.suppress(SQLAlchemyError):
                leases.give_back(name)


def is_elsewhere(folder: Path, place: str) -> bool:
    """Whether a place is one of other machines, or another driver or other libraries, than the study's baseline ran on."""
    home = result_in(trial_path(folder, 0))
    return home is not None and bool(home.place and place) and home.place != place


def wants_baseline(folder: Path, result: TrialResult, executor: Executor) -> bool:
    """Whether the baseline is to be measured where a trial ran: its machines are still held, and it has not been."""
    is_there = result_in(baseline_path(folder, result.place)) is not None
    return not is_there and result.steps is not None and set(result.hosts) <= executor.hosts


class _Pace(NamedTuple):
    """The baseline's step time at a place in times of that at home, and how much more other processes did to it there."""

    times: float
    log_slowdown: float | None


def _pace(folder: Path, place: str) -> _Pace | None:
    """The baseline's pace at a place; None where it was not measured there."""
    home, there = result_in(trial_path(folder, 0)), result_in(baseline_path(folder, place))
    if home is None or there is None or {home.outcome, there.outcome} != {Outcome.COMPLETE} or there.place != place:
        return None
    if home.steps is None or there.steps is None:
        return None
    loads = [each.log_slowdown for each in (there, home) if each.log_slowdown is not None]
    return _Pace(there.steps.median_s / home.steps.median_s, loads[0] - loads[1] if len(loads) == 2 else None)


def rivals_at(folder: Path, place: str, rivals: tuple[TrialToBeat, ...]) -> tuple[TrialToBeat, ...] | None:
    """What a trial at a place must beat; None where the baseline was not measured there, so that this is not known."""
    if not is_elsewhere(folder, place):
        return rivals
    if (pace := _pace(folder, place)) is None:
        return None
    more = pace.log_slowdown or 0.0
    return tuple(
        replace(rival, step_time_s=pace.times * rival.step_time_s, log_slowdown=rival.log_slowdown + more)
        for rival in rivals
    )


def like_with_like(folder: Path, result: TrialResult) -> TrialResult:
    """The result with its times as they would be on the baseline's machines.

    They are scaled by the baseline's own step times there and here. Where the baseline was not measured, the result
    stays as it is and says so.
    """
    if result.steps is None or not is_elsewhere(folder, result.place):
        return result
    where = f"{', '.join(result.hosts)} ({result.machine})"
    if (pace := _pace(folder, result.place)) is None:
        note = f"ran on {where}, where the baseline was not measured: its times do not compare"
        return replace(result, caveats=[*result.caveats, note])
    factor = 1 / pace.times
    note = f"ran on {where}, where the baseline takes {pace.times:.2f} times as long; its times are divided by that"
    own, more = result.log_slowdown, pace.log_slowdown  # the factor has what others did to the baseline there
    steps = replace(result.steps, median_s=result.steps.median_s * factor, ci95_s=result.steps.ci95_s * factor)
    return replace(
        result,
        steps=steps,
        step_times_s=[factor * each for each in result.step_times_s],
        phase_times_s={name: factor * each for name, each in result.phase_times_s.items()},
        micro_step_s={name: factor * each for name, each in result.micro_step_s.items()},
        cpu_s_per_step=result.cpu_s_per_step and factor * result.cpu_s_per_step,
        log_slowdown=None if own is None or more is None else own - more,
        caveats=[*result.caveats, note],
    )
