"""Sinks that tell programs what happens in a run: the logger `autotune`, and callbacks as Optuna defines them."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.study.events import Event, EventSink, Kind, Progress
from autotune.study.storage import optuna_tables, records
from autotune.study.storage.database import Storage
from autotune.system import redaction
from autotune.trial.result import Outcome

# What `optuna.study.Study.optimize` takes as `callbacks`.
Callback: TypeAlias = Callable[[Study, FrozenTrial], None]

# Optuna's callback for MLflow, which refuses a run with a name that holds any of these characters.
MLFLOW, NOT_IN_MLFLOW = "optuna_integration.mlflow", re.compile(r"[^\w\-. :/]")

LOGGER = logging.getLogger("autotune")
LOGGER.addHandler(logging.NullHandler())  # a library says nothing unless its user sets logging up


class LogSink(EventSink):
    """Logs a run: trials and notes as INFO, waits as WARNING, what happens between trials as DEBUG."""

    def emit(self, event: Event) -> None:
        """Logs an event."""
        match event.kind:
            case Kind.NOTE:
                LOGGER.info("%s", redaction.redact(event.text))
            case Kind.WAIT:
                LOGGER.warning("waiting: %s", redaction.redact(event.text))
            case Kind.PHASE:
                LOGGER.debug("%s", redaction.redact(event.text))
            case Kind.TRIAL_STARTED:
                event.note_under_way(started := dict[int, str]())
                LOGGER.debug("started %s", "".join(started.values()))
            case Kind.TRIAL_ENDED if event.progress is not None:
                LOGGER.info("%s", redaction.redact(_end(event.progress)))


def _end(progress: Progress) -> str:
    """The end of a trial in one line."""
    again = " again" if progress.role == "repeat" else ""
    why = f": {progress.reason}" if progress.reason and progress.outcome is not Outcome.COMPLETE else ""
    left = f"{progress.n_told} of {progress.n_trials} trials, {progress.left_words(progress.left_s)}"
    return f"trial {progress.number}{again} ({progress.candidate.describe()}) {progress.outcome.words}{why}; {left}"


class CallbackSink(EventSink):
    """Calls Optuna's callbacks after each trial; a repeated measurement is not counted as a trial.

    `study.stop()` of one ends the search; the best are checked and measured again all the same.

    Args:
        callbacks: What to call, in order. An exception of theirs ends the run; told trials stay told.
    """

    def __init__(self, callbacks: Sequence[Callback], storage: Storage, name: str) -> None:
        self._callbacks, self._storage, self._name = callbacks, storage, name

    @cached_property
    def _study(self) -> Study:
        return records.load_study(self._storage, self._name)

    @property
    def ends_search(self) -> bool:
        """Whether a callback has called `study.stop()`."""
        return optuna_tables.was_stopped(self._study)

    def emit(self, event: Event) -> None:
        """Hands the study and its trial on."""
        progress = event.progress
        if event.kind is not Kind.TRIAL_ENDED or progress is None or progress.role == "repeat":
            return
        for callback in self._callbacks:
            trial = next(t for t in self._study.get_trials(deepcopy=False) if t.number == progress.number)
            to_mlflow = type(callback).__module__.startswith(MLFLOW)
            with optuna_tables.stoppable(self._study):
                callback(self._study, _plainly_named(trial) if to_mlflow else trial)


def _plainly_named(trial: FrozenTrial) -> FrozenTrial:
    """A copy of a trial whose knobs and attributes have names that MLflow takes: `peak memory MiB`."""
    named = copy.copy(trial)
    for part in ("params", "distributions", "user_attrs"):
        found = {NOT_IN_MLFLOW.sub("", name): value for name, value in getattr(trial, part).items()}
        setattr(named, f"_{part}" if hasattr(named, f"_{part}") else part, found)
    return named
