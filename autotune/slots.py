"""How many trials may run at once, and on what: on disjoint devices or nodes, and on one host only if the user allows it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autotune import UserError
from autotune.executors import choice
from autotune.executors.base import Executor
from autotune.executors.local import LocalExecutor, machine_turn
from autotune.plan import Plan


@contextlib.contextmanager
def opened(found: Plan, executor: Executor, folder: Path, say: Callable[[str], None]) -> Iterator[list[Executor]]:
    """The engines for as many trials at once as the study asks for and there is room for, one for each.

    Args:
        found: The study.
        executor: Its engine.
        folder: The study's folder.
        say: Told where there is room for fewer.

    Raises:
        UserError: Devices are too few for what the user allows.
    """
    wanted = found.spec.parallel
    if wanted == 1:
        yield [executor]
    elif found.spec.executor != "local":
        # Each asks the engine for machines of its own; where there are none, it waits in the engine's queue.
        with contextlib.ExitStack() as stack:
            others = [choice.executor_of(found.spec, folder / "trials" / f"slot-{n}", say) for n in range(1, wanted)]
            for other in others:
                stack.callback(other.close)
                other.start()
            yield [executor, *others]
    elif not isinstance(executor, LocalExecutor):
        say("trials run one at a time: each has all the hosts of the hostfile")
        yield [executor]
    elif not found.spec.overlap:
        say(
            "trials run one at a time: on one host they would disturb one another (--overlap lets them, and the report says so)"
        )
        yield [executor]
    else:
        with contextlib.ExitStack() as stack:
            slots = [
                Slot(found, share, folder / "trials" / f"server-{n}.log")
                for n, share in enumerate(shares(found, wanted))
            ]
            for slot in slots:
                stack.callback(slot.close)
                slot.start()
            say(
                f"{wanted} trials run at once on this host and disturb one another; only what is measured again at the end is undisturbed"
            )
            yield list(slots)


def shares(found: Plan, n: int) -> list[list[int]]:
    """Disjoint sets of this machine's devices, or of its cores where ranks run on them.

    Raises:
        UserError: There are not enough.
    """
    environment = found.workload.environment
    on_cpu = environment.accelerator == "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    units = sorted(os.sched_getaffinity(0)) if on_cpu else named or list(range(environment.n_devices))
    each = len(units) // n if on_cpu else found.world_size
    if not each or each * n > len(units):
        what = "cores" if on_cpu else "devices"
        raise UserError(
            f"--parallel {n}: trials of {found.world_size} rank(s) need disjoint {what}, and this machine has {len(units)}"
        )
    return [units[k * each : (k + 1) * each] for k in range(n)]


class Slot(LocalExecutor):
    """A warm server of its own, on some of this machine's devices or cores.

    Args:
        found: The study.
        share: Numbers of its devices, or cores.
        log: Where its output goes.
    """

    def __init__(self, found: Plan, share: Sequence[int], log: Path) -> None:
        environment = dict(found.spec.how().fixed_environment) if found.target.kind == "script" else {}
        self._cores = list(share) if found.workload.environment.accelerator == "cpu" else []
        if not self._cores:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, share))
        super().__init__(found.target.imports, log, environment)

    def start(self) -> None:
        """Starts the server, which keeps to the cores of the thread that starts it."""
        before = os.sched_getaffinity(0)
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        try:
            super().start()
        finally:
            os.sched_setaffinity(0, before)

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Waits only for studies that do not share the machine, and keeps them waiting."""
        return machine_turn(on_wait, fcntl.LOCK_SH)
