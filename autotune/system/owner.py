"""Identity of a process that other machines read of (the holder of leases, or of machines), and whether it still exists."""

import contextlib
import functools
import os
import platform
import uuid
from dataclasses import dataclass

from autotune.system import processes
from autotune.system.machine import boot_id


@dataclass(frozen=True)
class Owner:
    """A process that holds something; `str` gives the text that says so.

    Attributes:
        kernel: Its kernel and PID namespace; the PID means this process only there.
        started: Start time of the process, since PIDs are reused.
        mark: Tells several owners within one process apart.
    """

    host: str
    kernel: str
    pid: int
    started: str
    mark: str

    @classmethod
    def here(cls) -> "Owner":
        """A new owner in this process."""
        return cls(platform.node(), _kernel(), os.getpid(), processes.started(os.getpid()) or "", uuid.uuid4().hex[:8])

    @classmethod
    def read(cls, text: str) -> "Owner":
        """The owner that `str` wrote."""
        host, kernel, pid, started, mark = text.split("|")
        return cls(host, kernel, int(pid), started, mark)

    def __str__(self) -> str:
        return "|".join((self.host, self.kernel, str(self.pid), self.started, self.mark))

    @property
    def shown(self) -> str:
        """The owner in a message."""
        return f"process {self.pid} on {self.host}"

    def lives(self) -> bool | None:
        """Whether the process exists; None on another host, where its PID says nothing."""
        return None if self.kernel != _kernel() else processes.started(self.pid) == self.started


@functools.cache
def _kernel() -> str:
    parts = list(filter(None, [boot_id()]))
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return f"{platform.node()} {' '.join(parts)}"
