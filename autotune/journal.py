"""What a run says while it runs, kept as a file, so that another terminal sees the same."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune import masking
from autotune.candidate import Candidate
from autotune.console import ProgressView
from autotune.study import Leader, Progress
from autotune.trial import Outcome


def path_in(folder: Path) -> Path:
    """Where the journal of a study's latest run lies."""
    return folder / "trials" / "journal.jsonl"


class Journal:
    """Watches a run for others: passes on what it is told, and writes it down.

    Args:
        view: Whoever watches here.
        folder: The study's folder; the journal of an earlier run is replaced.
    """

    def __init__(self, view: ProgressView, folder: Path) -> None:
        self._view = view
        path = path_in(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # whoever reads the old one keeps it
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._torn = False
        self._note(run=os.getpid())

    def say(self, text: str) -> None:
        """Something worth a line."""
        self._note(say=text)
        self._view.say(text)

    def doing(self, text: str) -> None:
        """What goes on now."""
        self._note(doing=text)
        self._view.doing(text)

    def began(self, number: int, candidate: Candidate, role: str) -> None:
        """A trial starts."""
        self._note(began=number, candidate=candidate.values(), role=role)
        self._view.began(number, candidate, role)

    def waiting(self) -> None:
        """Another study measures on this machine."""
        if not self._view.is_waiting:
            self._note(waiting=True)
        self._view.waiting()

    def tick(self) -> None:
        """The trial under way still runs."""
        self._view.tick()

    def ended(self, progress: Progress) -> None:
        """A trial was told."""
        best = progress.best and {"trial": progress.best.trial, "candidate": progress.best.candidate.values()}
        self._note(
            **{**vars(progress), "ended": progress.number, "candidate": progress.candidate.values(), "best": best}
        )
        self._view.ended(progress)

    def _note(self, **what: Any) -> None:
        """Appends one line, in one piece; that a disk is full must not end a study."""
        line = json.dumps({"time": time.time(), **masking.masked(what)}, default=str).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        try:
            self._torn = os.write(self._file, line) < len(line)
        except OSError:
            return


class Follower:
    """Reads the journal of a run as it grows.

    Args:
        folder: The study's folder.
        pid: The process that runs it; an older journal is passed by.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._path, self._pid = path_in(folder), pid
        self._descriptor: int | None = None
        self._rest = b""

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was added since the last call."""
        if self._descriptor is None and not self._open():
            return
        assert self._descriptor is not None
        while piece := os.read(self._descriptor, 1 << 16):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError):  # a full disk may have cut one short
                    yield json.loads(line)

    def _open(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        first = os.read(descriptor, 4096).partition(b"\n")
        try:
            found = first[1] and json.loads(first[0]).get("run") == self._pid
        except ValueError:
            found = False
        if not found:
            os.close(descriptor)
            return False
        os.lseek(descriptor, len(first[0]) + 1, os.SEEK_SET)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Lets the file go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def replay(line: dict[str, Any], view: ProgressView) -> None:
    """Shows a line of a journal as the run itself showed it."""
    ago_s = max(0.0, time.time() - float(line["time"]))
    if "say" in line:
        view.say(line["say"])
    elif "doing" in line:
        view.doing(line["doing"], ago_s=ago_s)
    elif "began" in line:
        view.began(line["began"], Candidate.of(line["candidate"]), line["role"], ago_s=ago_s)
    elif "waiting" in line:
        view.waiting()
    elif "ended" in line:
        view.ended(_progress(line))


def _progress(line: dict[str, Any]) -> Progress:
    best = line["best"]
    return Progress(
        number=line["number"], role=line["role"], candidate=Candidate.of(line["candidate"]), outcome=Outcome(line["outcome"]),
        reason=line["reason"], metrics=line["metrics"], wall_s=line["wall_s"], n_told=line["n_told"], n_trials=line["n_trials"],
        best=Leader(best["trial"], Candidate.of(best["candidate"])) if best else None, best_speedup=line["best_speedup"],
        left_s=line["left_s"],
    )  # fmt: skip
