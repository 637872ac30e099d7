"""A rank as its supervisor has it."""

from dataclasses import dataclass

from autotune.worker.agent.logs import Log
from autotune.worker.agent.memory_watch import MemoryWatch


@dataclass
class Rank:
    """A process of a trial; the exit code is None until it has ended."""

    log: Log
    watch: MemoryWatch
    pid: int = 0
    code: int | None = None
