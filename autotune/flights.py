"""Trials under way: one in the thread of who started it, or several in threads of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, replace

from optuna.trial import Trial

from autotune.candidate import Candidate
from autotune.executors.base import Executor
from autotune.trial import TrialResult

# How often a wait looks whether Ctrl-C was pressed.
TICK_S = 0.2
BESIDE = "ran on this host at the same time"


class Stopped(BaseException):
    """Raised in the thread of a trial that is to end; not an error, so that nobody handles it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A trial that is this coordinator's to run and to tell.

    Attributes:
        asked: The trial.
        candidate: What it measures.
        role: `search`.
        result: Its end, where it needs no run.
    """

    asked: Trial
    candidate: Candidate
    role: str = "search"
    result: TrialResult | None = None


# Runs a claimed trial on an engine; the second argument is to be called now and then, and ends the trial by raising.
Run = Callable[[Executor, Callable[[], None]], TrialResult]


@dataclass
class _Flight:
    claim: Claim
    executor: Executor
    future: futures.Future[TrialResult]
    most: int


class Flights:
    """The trials that one coordinator runs at once.

    Args:
        executors: One for each of them; may be the same one several times.
        side_by_side: Whether they share a host, so that they disturb one another.
    """

    def __init__(self, executors: Sequence[Executor], *, side_by_side: bool = False) -> None:
        self._free, self._side_by_side = list(executors), side_by_side
        self._pool = (
            futures.ThreadPoolExecutor(len(self._free), thread_name_prefix="trial") if len(self._free) > 1 else None
        )
        self._flights: list[_Flight] = []
        self._stop = threading.Event()

    @property
    def n_free(self) -> int:
        """How many more may start."""
        return len(self._free)

    @property
    def claims(self) -> list[Claim]:
        """The trials that were started and have not been returned by `landed`."""
        return [flight.claim for flight in self._flights]

    def start(self, claim: Claim, run: Run) -> None:
        """Starts a trial; where only one may run, runs it to its end."""
        executor = self._free.pop()
        future: futures.Future[TrialResult] = futures.Future()
        flight = _Flight(claim, executor, future, 0)
        self._flights.append(flight)
        under_way = [other for other in self._flights if not other.future.done()]
        for other in under_way:
            other.most = max(other.most, len(under_way))
        if claim.result is not None:
            future.set_result(claim.result)
        elif self._pool is None:
            future.set_result(run(executor, lambda: None))
        else:
            flight.future = self._pool.submit(run, executor, self._tick)

    def landed(self, timeout_s: float | None = 0.0) -> list[tuple[Claim, TrialResult]]:
        """Trials that have ended; waits for the first one, None for as long as it takes.

        Raises:
            BaseException: Whatever ended the thread of one of them.
        """
        flying = {flight.future for flight in self._flights}
        while (
            flying
            and not futures.wait(flying, TICK_S if timeout_s is None else timeout_s, futures.FIRST_COMPLETED).done
        ):
            if timeout_s is not None:
                return []
        ended = [flight for flight in self._flights if flight.future.done()]
        results = [(flight.claim, self._noted(flight, flight.future.result())) for flight in ended]
        for flight in ended:
            self._flights.remove(flight)
            self._free.append(flight.executor)
        return results

    def stop(self) -> None:
        """Ends every trial under way, and returns when none is."""
        self._stop.set()
        if self._pool is not None:
            futures.wait([flight.future for flight in self._flights])
            self._pool.shutdown()

    def close(self) -> None:
        """Ends the threads, where all trials have landed."""
        if self._pool is not None:
            self._pool.shutdown()

    def results(self) -> dict[int, TrialResult]:
        """By trial number, what ended well just before `stop`."""
        found = {}
        for flight in self._flights:
            if flight.future.done():
                with contextlib.suppress(BaseException):
                    found[flight.claim.asked.number] = self._noted(flight, flight.future.result())
        return found

    def _tick(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _noted(self, flight: _Flight, result: TrialResult) -> TrialResult:
        if flight.most < 2 or not self._side_by_side or not result.wall_s:
            return result
        note = f"up to {flight.most} trials {BESIDE}, so that they disturbed one another"
        return replace(result, caveats=[*result.caveats, note])
