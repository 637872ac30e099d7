"""A run of a study that is submitted to an engine."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The variable that tells a run which submission it belongs to.
SUBMISSION = "AUTOTUNE_SUBMISSION"


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """A run to be submitted.

    Attributes:
        arguments: What `autotune run` gets.
        folder: Working directory, on a file system that the machines share.
        nodes: Machines of a trial.
        at_once: Trials that run at once, each on machines or devices apart.
        ranks: Ranks of a trial; None for one per GPU.
        files: Files of the user's that the machines must see.
        id: A text that no other submission has.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    log: Path
    options: Mapping[str, str]
    nodes: int = 1
    at_once: int = 1
    ranks: int | None = None
    files: Sequence[Path] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def command(self) -> list[str]:
        """The command of the job; an engine that starts it anew does not have it forget the study's trials again."""
        once = ["env", f"{SUBMISSION}={self.id}"] if "--fresh" in self.arguments else []
        return [*once, self.options.get("python", sys.executable), "-m", "autotune", "run", *self.arguments]
