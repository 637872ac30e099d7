"""A run of a study that is submitted to an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """A run to be submitted.

    Attributes:
        name: Name of the study.
        arguments: What `autotune run` gets.
        folder: Working directory, on a file system that the machines share.
        log: File for its output.
        options: The user's `--executor-option`.
        nodes: Machines.
        ranks: Ranks of a trial; None for one per GPU.
        files: Files of the user's that the machines must see.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    log: Path
    options: Mapping[str, str]
    nodes: int = 1
    ranks: int | None = None
    files: Sequence[Path] = ()

    @property
    def command(self) -> list[str]:
        """The command of the job."""
        return [self.options.get("python", sys.executable), "-m", "autotune.cli", "run", *self.arguments]
