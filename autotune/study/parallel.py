"""Trials at once: the pool that runs them, and the engines that they run on."""

import contextlib
import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path

from optuna.trial import Trial

from autotune.errors import UserError
from autotune.executors.base import Executor
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.study.events import EventSink
from autotune.study.setup import engine
from autotune.study.setup.plan import Plan
from autotune.system import device
from autotune.system.machine import n_cores
from autotune.trial.result import BESIDE, TrialResult

TICK_S = 0.2  # interval at which a wait checks for Ctrl-C


class Stopped(BaseException):
    """Ends the thread of a trial; no `Exception`, so that no handler catches it."""


@dataclass(frozen=True, kw_only=True)
class ClaimedTrial:
    """A trial that this coordinator runs and tells.

    Attributes:
        role: `search`, or the role that a dead coordinator gave it.
        result: Its result if it need not be run; None if it must be.
    """

    asked: Trial
    candidate: Candidate
    role: str = "search"
    result: TrialResult | None = None


# Runs a claimed trial on an engine; calls its second argument now and then, which raises to end the trial.
Run = Callable[[Executor, Callable[[], None]], TrialResult]


@dataclass
class _Running:
    claim: ClaimedTrial
    executor: Executor
    future: futures.Future[TrialResult]
    beside: list[Executor]  # of the trials that ran at the same time


class TrialPool:
    """The running trials of one coordinator: in its own thread if it has one engine, else in a thread each.

    Args:
        executors: One for each trial at once; may contain the same one several times.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._free = list(executors)
        n = len(executors)
        self._pool = futures.ThreadPoolExecutor(n, thread_name_prefix="trial") if n > 1 else None
        self._running: list[_Running] = []
        self._stop = threading.Event()

    @property
    def n_free(self) -> int:
        """The number of trials that may start now."""
        return len(self._free)

    @property
    def claims(self) -> list[ClaimedTrial]:
        """The trials that were started and not yet returned by `landed`."""
        return [running.claim for running in self._running]

    def start(self, claim: ClaimedTrial, run: Run) -> None:
        """Starts a trial; with one engine, runs it to its end."""
        executor = self._free.pop()
        future: futures.Future[TrialResult] = futures.Future()
        under_way = [other for other in self._running if not other.future.done()]
        running = _Running(claim, executor, future, [other.executor for other in under_way])
        self._running.append(running)
        for other in under_way:
            other.beside.append(executor)
        if claim.result is not None:
            future.set_result(claim.result)
        elif self._pool is None:
            future.set_result(run(executor, lambda: None))
        else:
            running.future = self._pool.submit(run, executor, self._tick)

    def landed(self, timeout_s: float | None) -> list[tuple[ClaimedTrial, TrialResult]]:
        """Waits for the first trial to end; returns all that have ended.

        Args:
            timeout_s: Longest wait in seconds; None for no limit.

        Raises:
            BaseException: The exception that ended the thread of a trial.
        """
        pending, wait_s = {running.future for running in self._running}, TICK_S if timeout_s is None else timeout_s
        while pending and not futures.wait(pending, wait_s, futures.FIRST_COMPLETED).done:
            if timeout_s is not None:
                return []
        ended = [running for running in self._running if running.future.done()]
        results = [(running.claim, self._noted(running, running.future.result())) for running in ended]
        for running in ended:
            self._running.remove(running)
            self._free.append(running.executor)
        return results

    def stop(self) -> None:
        """Ends every trial that still runs, waits for its end, and ends the threads."""
        self._stop.set()
        if self._pool is not None:
            futures.wait([running.future for running in self._running])
            self._pool.shutdown()

    def results(self) -> dict[int, TrialResult]:
        """The results, by trial number, of trials that ended just before `stop`."""
        found = {}
        for running in self._running:
            if running.future.done():
                with contextlib.suppress(BaseException):
                    found[running.claim.asked.number] = self._noted(running, running.future.result())
        return found

    def _tick(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _noted(self, running: _Running, result: TrialResult) -> TrialResult:
        hosts = frozenset(result.hosts) or running.executor.hosts
        n = 1 + sum(bool(hosts & other.hosts) for other in dict.fromkeys(running.beside))
        if n < 2 or not result.wall_s:
            return result
        note = f"up to {n} trials {BESIDE}, so that they disturbed one another"
        return replace(result, caveats=[*result.caveats, note])


@contextlib.contextmanager
def executors_for(found: Plan, executor: Executor, folder: Path, view: EventSink) -> Iterator[list[Executor]]:
    """Starts one engine for each trial that runs at once: as many as the study allows and there is room for.

    Args:
        view: Told a sentence for the user, for example if there is room for fewer, and why a trial waits.

    Yields:
        The engines, at least one; those started here are closed in the end.

    Raises:
        UserError: There are too few devices.
    """
    wanted = found.spec.parallel
    if wanted == 1:
        if found.spec.overlap:
            view.say("--overlap has no effect where one trial runs at a time; --parallel says how many run at once")
        yield [executor]
    elif found.spec.executor != "local":
        # Each asks the engine for its own machines, and waits in the engine's queue until there are some.
        with contextlib.ExitStack() as stack:
            others = [engine.executor_of(found.spec, folder / "trials" / f"slot-{n}", n) for n in range(1, wanted)]
            for other in reversed(others):  # inside an allocation the last one says how many nodes all of them need
                other.on_queue = view.waits
                stack.callback(other.close)
                other.start()
            yield [executor, *others]
    elif not isinstance(executor, LocalExecutor):
        view.say("trials run one at a time: all of them use the same machines")
        yield [executor]
    elif not found.spec.overlap:
        view.say(
            "trials run one at a time: on one host they would disturb one another (--overlap lets them, and the report"
            " says so)"
        )
        yield [executor]
    else:
        with contextlib.ExitStack() as stack:
            slots = [
                SlicedExecutor(found, share, folder / "trials" / f"server-{n}.log")
                for n, share in enumerate(device_shares(found, wanted))
            ]
            for slot in slots:
                stack.callback(slot.close)
                slot.launch()  # all import at the same time
            for slot in slots:
                slot.start()
            view.say(
                f"{wanted} trials run at once on this host and disturb one another; only what is measured again at the"
                " end is undisturbed"
            )
            yield list(slots)


def device_shares(found: Plan, n: int) -> list[list[str]]:
    """Returns disjoint sets of the visible devices, as the user names them, or of the cores if ranks run on these."""
    environment = found.workload.environment
    on_cpu = environment.accelerator == "cpu"
    _, named = device.chosen(
        environment.accelerator, environment.n_devices, {**os.environ, **engine.own_variables(found.spec)}
    )
    cores, n_usable = sorted(os.sched_getaffinity(0)), n_cores()
    # Any cores in a row: the first ones would also be those of the next container with a limit.
    first = random.SystemRandom().randrange(len(cores) - n_usable + 1)
    units = list(map(str, cores[first : first + n_usable])) if on_cpu else named
    each = len(units) // n if on_cpu else found.world_size
    if not each or each * n > len(units):
        what = "cores" if on_cpu else "devices"
        raise UserError(
            f"--parallel {n}: trials of {found.world_size} rank(s) need disjoint {what}, and this machine has"
            f" {len(units)}"
        )
    return [units[k * each : (k + 1) * each] for k in range(n)]


class SlicedExecutor(LocalExecutor):
    """A warm server on some of this machine's devices or cores.

    Args:
        share: Core numbers if trials run on the CPU, else device names as in `CUDA_VISIBLE_DEVICES`.
    """

    turns = fcntl.LOCK_SH  # it waits only for studies that take the whole machine, and keeps them waiting

    def __init__(self, found: Plan, share: Sequence[str], log: Path) -> None:
        environment, here = engine.own_variables(found.spec), found.workload.environment
        self._cores = list(map(int, share)) if here.accelerator == "cpu" else []
        if not self._cores:
            variable, _ = device.chosen(here.accelerator, here.n_devices, {**os.environ, **environment})
            environment[variable] = ",".join(share)
        super().__init__(found.target.imports, log, environment)

    def launch(self) -> None:
        """Starts the server, which inherits the cores of the thread that starts it."""
        before = os.sched_getaffinity(0)
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        try:
            super().launch()
        finally:
            os.sched_setaffinity(0, before)
