"""The start of a rank: what a process does between the fork in its supervisor and the rank's own code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autotune.trial.request import TrialRequest
from autotune.worker.agent.logs import Log

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What a forked process needs to become a rank.

    Attributes:
        trial_dir: The trial's folder.
        rank: Number of the rank.
        request: The trial.
        variables: Environment variables for the place where ranks meet and for temporary files.
        listener: The socket for rank 0's store, on the machine of rank 0.
        group: Process group of the ranks; 0 if this one opens it.
        supervisor: PID of the supervisor.
        answers: Descriptor on which the supervisor answers the driver.
        warm: Run in this process rather than in a new Python.
    """

    trial_dir: Path
    rank: int
    request: TrialRequest
    variables: dict[str, str]
    listener: socket.socket | None
    group: int
    supervisor: int
    answers: int | None
    warm: bool

    def become_rank(self, logs: Sequence[Log]) -> NoReturn:
        """Turns this process into the rank.

        Args:
            logs: The logs of all ranks started so far; the last one is this rank's.
        """
        try:
            self._detach(logs)
            expose_to_oom_killer()
            os.environ.update(rank_environment(self.rank, self.request) | self.variables)
            tempfile.tempdir = None  # the server may have looked it up for itself
            descriptor = self.listener.fileno() if self.listener is not None else -1
            arguments = [str(self.trial_dir), str(self.rank), str(descriptor)]
            if not self.warm:
                if self.listener is not None:
                    os.set_inheritable(descriptor, True)
                os.execv(sys.executable, [sys.executable, "-m", "autotune.worker", "rank", *arguments])
            from autotune.worker import run

            run.main(str(self.trial_dir), self.rank, descriptor)
        except BaseException:  # nothing may return into the supervisor's loop
            with contextlib.suppress(BaseException):  # it may have closed its output
                traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(1)

    def _detach(self, logs: Sequence[Log]) -> None:
        """Gives the process a group, signal handlers and output of a rank, and closes the supervisor's descriptors."""
        with contextlib.suppress(OSError):
            os.setpgid(0, self.group)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.supervisor:  # it died before the call above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if self.answers is not None:
            os.close(self.answers)
        logs[-1].become_output()
        for log in logs:
            log.drop()


def rank_environment(rank: int, request: TrialRequest) -> dict[str, str]:
    """The variables that torchrun sets in a rank, except those for the place to meet."""
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


def expose_to_oom_killer() -> None:
    """Makes the kernel kill a rank first when memory runs out, not the tuner or the user's other work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def prctl(option: int, value: int) -> None:
    """Calls Linux's `prctl`; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
