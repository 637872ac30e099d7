"""Events of a run: one record, the sinks that receive it, and the journal file that another terminal replays."""

import contextlib
import json
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.system import files, redaction
from autotune.system.units import format_duration
from autotune.trial.result import Outcome

# How the reason begins for which a search ended: nothing more was expected of it, or its time was over.
STOPPED, OUT_OF_TIME = "stopped after", "the time budget of"
ENDED_BY_CALLBACK = "a callback ended the search"
# What stands in place of the reason until a study's end is over.
UNFINISHED = "the search is over, but its best were not checked and measured again to the end"
# Where the best so far needs checks, without which it is no answer: share of a time budget that these may cost and reserve.
DECIDING_SHARE = 0.5
# What a run is that is no trial, by its role; it is shown under a number that no trial has.
CHECKS = {
    "gate": "quality gate",
    "branch": "branch",
    "noise": "noise scale",
    "warm": "weights for a branch",
    "round": "comparison",
}
CHECK = -1


def n_spent(outcomes: Sequence[str], wanted: int | None = None) -> int:
    """The number of trials that count towards the budget of trials; those predicted not to fit are free.

    Args:
        wanted: The budget, which also limits how many are free; None if there is no budget and thus no limit.
    """
    n_unfit = sum(outcome == Outcome.PREDICTED_OOM for outcome in outcomes)
    return len(outcomes) - min(n_unfit, n_unfit if wanted is None else wanted)


class Kind(StrEnum):
    """What kind of event happened."""

    NOTE = "note"  # a message worth a line
    PHASE = "phase"  # the activity between trials has changed
    TRIAL_STARTED = "trial_started"
    TRIAL_ENDED = "trial_ended"
    WAIT = "wait"  # a trial waits for a machine, or for another study's turn on it
    TICK = "tick"  # the running trial still runs; sent several times a second


# In JSON a candidate is its flat knob values: secrets are recognised by their names.
Configuration = Annotated[
    Candidate,
    BeforeValidator(lambda given: given if isinstance(given, Candidate) else Candidate.of(given)),
    PlainSerializer(Candidate.values),
]


class Leader(NamedTuple):
    """The best compromise so far."""

    trial: int
    candidate: Configuration


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a study after a trial.

    Attributes:
        role: `baseline`, `search` or `repeat`.
        n_told: Trials told so far.
        best_gain: Its gain over the baseline by the goal: the weighted geometric mean over the objectives; None where that
            says nothing.
        best_open: What may keep it from being the answer: `unchecked`, `within noise`.
        left_s: Estimated seconds until the end of the study.
    """

    number: int
    role: str
    candidate: Configuration
    outcome: Outcome
    reason: str
    metrics: dict[str, float]
    n_told: int
    n_trials: int
    best: Leader | None
    best_gain: float | None
    left_s: float
    best_open: str = ""

    def best_words(self) -> str:
        """The best so far in words; the configuration last, since what does not fit a terminal is cut."""
        if self.best is None:
            return "nothing to recommend yet"
        left_open = f" ({self.best_open})" if self.best_open else ""
        gain = f", {self.best_gain:.2f}x the baseline by the goal" if self.best_gain and self.best.trial else ""
        return f"best so far: trial {self.best.trial}{left_open}{gain}, {self.best.candidate.describe()}"

    def left_words(self, left_s: float) -> str:
        """The time left in words; before its last trial a search may end at any time, when nothing more is to be gained."""
        searching = self.role != "repeat" and self.n_told < self.n_trials
        return f"{'up to' if searching else 'about'} {format_duration(round(left_s))} left"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        time_s: When, in Unix seconds.
        text: The message of a note, a phase or a wait.
        progress: The state of the study, where a trial ended.
    """

    kind: Kind
    time_s: float = field(default_factory=time.time)
    text: str = ""
    trial: int | None = None
    role: str = ""
    candidate: Configuration | None = None
    progress: Progress | None = None

    def note_under_way(self, shown: dict[int, str]) -> None:
        """Adds the trial that started to those that are shown as under way; a check, whose end is no event, until the next starts."""
        shown.pop(CHECK, None)
        if self.trial is None or self.candidate is None:
            return
        what = self.candidate.describe()
        if (check := CHECKS.get(self.role)) is not None:
            shown[CHECK] = f"{check}: {what}"
        else:
            shown[self.trial] = f"trial {self.trial}{' again' if self.role == 'repeat' else ''}: {what}"


class EventSink:
    """Receives the events of a run in `emit`; this one drops them. The other methods build an event each."""

    _waited = False

    @property
    def ends_search(self) -> bool:
        """Whether it wants no further trial, as a callback may."""
        return False

    def emit(self, event: Event) -> None:
        """Handles an event."""

    def say(self, text: str) -> None:
        """Emits a message that is worth a line."""
        self.emit(Event(kind=Kind.NOTE, text=text))

    def doing(self, text: str) -> None:
        """Emits what the run does from now on."""
        self.emit(Event(kind=Kind.PHASE, text=text))

    def began(self, number: int, candidate: Candidate, role: str) -> None:
        """Emits the start of a trial."""
        self.emit(Event(kind=Kind.TRIAL_STARTED, trial=number, candidate=candidate, role=role))

    def ended(self, progress: Progress) -> None:
        """Emits the end of a trial."""
        self.emit(Event(kind=Kind.TRIAL_ENDED, progress=progress))

    def waiting(self) -> None:
        """Emits once that another study measures on this machine; may be called again and again."""
        if not self._waited:
            self._waited = True
            self.waits("another study measures on this machine; the two take turns, trial by trial")

    def waits(self, why: str) -> None:
        """Emits why a trial does not begin yet."""
        self.emit(Event(kind=Kind.WAIT, text=why))

    def tick(self) -> None:
        """Emits that the running trial still runs."""
        self.emit(Event(kind=Kind.TICK))


SILENT = EventSink()


class Broadcast(EventSink):
    """Hands every event to several sinks, in order."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    @property
    def ends_search(self) -> bool:
        """Whether one of them wants no further trial."""
        return any(sink.ends_search for sink in self._sinks)

    def emit(self, event: Event) -> None:
        """Hands on an event."""
        for sink in self._sinks:
            sink.emit(event)


_EVENT = TypeAdapter(Event)


def path_in(folder: Path) -> Path:
    """The journal of the latest run of a study."""
    return folder / "trials" / "journal.jsonl"


class Journal(EventSink):
    """Appends the events of a run to a file, one JSON object a line; ticks are left out.

    Args:
        folder: The study's folder; the journal of an earlier run is replaced.
    """

    def __init__(self, folder: Path) -> None:
        path = path_in(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a process that reads the old file keeps it
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        weakref.finalize(self, os.close, self._file)  # a notebook makes one for each call
        self._torn = False
        self._append({"run": os.getpid()})

    def emit(self, event: Event) -> None:
        """Writes an event down."""
        if event.kind is not Kind.TICK:
            self._append(_EVENT.dump_python(event, mode="json", exclude_defaults=True))

    def _append(self, data: dict[str, object]) -> None:
        """Appends one line in one write; a full disk must not end a study."""
        line = json.dumps(redaction.redact(data)).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        try:
            self._torn = os.write(self._file, line) < len(line)
        except OSError:
            return


class JournalReader:
    """Reads the journal of the run of process `pid` while it grows; that of another process is ignored."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._path, self._pid = path_in(folder), pid
        self._descriptor: int | None = None
        self._rest = b""

    def events(self) -> Iterator[Event]:
        """Yields the events added since the last call; skips lines that are cut short or of another version."""
        if self._descriptor is None and not self._open():
            return
        assert self._descriptor is not None
        while piece := os.read(self._descriptor, 1 << 16):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError, UserError):
                    yield _EVENT.validate_python(files.json_of(line))

    def _open(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            first = os.read(descriptor, 4096).partition(b"\n")
            found = first[1] and files.json_of(first[0]).get("run") == self._pid
        except (ValueError, AttributeError, OSError):
            found = False
        if not found:
            os.close(descriptor)
            return False
        os.lseek(descriptor, len(first[0]) + 1, os.SEEK_SET)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
