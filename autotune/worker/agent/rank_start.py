"""The start of a rank: what a process does between the fork in its supervisor and the rank's own code."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from autotune.trial.request import TrialRequest
from autotune.worker.agent import network
from autotune.worker.agent.rank import Rank

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def become_rank(trial_dir: Path, variables: Mapping[str, str], detach: Callable[[], None], *, warm: bool) -> NoReturn:
    """Turns a forked process into a rank.

    Args:
        variables: Environment variables to add.
        detach: Closes what belongs to the supervisor.
        warm: Run in this process rather than in a new Python.
    """
    try:
        detach()
        _expose_to_oom_killer()
        os.environ.update(variables)
        tempfile.tempdir = None  # the server may have looked up its own
        if not warm:
            if network.LISTENER in variables:
                os.set_inheritable(int(variables[network.LISTENER]), True)
            os.execv(sys.executable, [sys.executable, "-m", "autotune.worker", "rank", str(trial_dir)])
        from autotune.worker import run
        from autotune.worker.agent.preload import restart_nvml

        restart_nvml()
        run.main(str(trial_dir))
    except BaseException:  # nothing may return into the supervisor's loop
        with contextlib.suppress(BaseException):  # it may have closed its output
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(1)


def detach(supervisor: int, answers: int, own: Rank, others: Iterable[Rank]) -> None:
    """Gives the process a session, signal handlers and output of a rank, and closes the supervisor's descriptors.

    Linux shares a busy machine's cores between sessions (autogroups). torchrun gives each rank one, so that two ranks in
    one session would get half of what they get there.

    Args:
        supervisor: PID of the supervisor.
        answers: Descriptor on which the supervisor answers the driver.
        others: The ranks that were started before.
    """
    with contextlib.suppress(OSError):
        os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the call above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(answers)
    own.log.become_output()
    own.log.drop()
    own.watch.become_rank()
    for other in others:
        other.log.drop()
        other.watch.drop()


def rank_environment(rank: int, request: TrialRequest) -> dict[str, str]:
    """Returns the variables that torchrun sets in a rank, except those of `network.environment`."""
    node, local_rank = divmod(rank, request.ranks_per_node)
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": request.world_size,
        "LOCAL_WORLD_SIZE": request.ranks_per_node,
        "LOCAL_SIZE": request.ranks_per_node,
        "GROUP_RANK": node,
    }
    return {name: str(value) for name, value in names.items()}


def _expose_to_oom_killer() -> None:
    """Makes the kernel kill a rank first when memory runs out, not the tuner or the user's other work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def prctl(option: int, value: int) -> None:
    """Calls Linux's `prctl`."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
