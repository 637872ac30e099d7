"""What programs are told of a run: records of the logger, and Optuna's callbacks."""

import gc
import logging
import re
from pathlib import Path

import pytest
from support.instant import Instant, failed, report, runner_of

from autotune.cli import presets
from autotune.executors.base import MachinesGone
from autotune.space.candidate import Candidate
from autotune.study.events import ENDED_BY_CALLBACK, Broadcast, Event, Journal, Kind
from autotune.study.listeners import CallbackSink, LogSink
from autotune.study.storage import database, records
from autotune.study.tell import why_stopped
from autotune.trial.result import Outcome


def run(folder, *callbacks, **changes):
    """Runs a study of four trials, of which those in bf16 run out of memory."""
    database.open_storage(records.default_url(folder))
    behaviour = lambda c: failed(Outcome.OOM, "15.6 of 16 GiB") if c.precision == "bf16" else report(c)  # noqa: E731
    watcher = LogSink()
    runner = runner_of(folder, Instant(behaviour), watcher=watcher, trials=4, **changes)
    heard = Broadcast(watcher, CallbackSink(callbacks, runner.storage, "s"))
    runner._teller._events = runner._events = heard
    runner.run()
    return runner


def test_a_callback_is_called_once_for_each_trial_with_what_it_measured(tmp_path):
    seen = []
    runner = run(
        tmp_path, lambda study, trial: seen.append((study.study_name, trial.number, trial.state, trial.values))
    )
    told = runner.study.trials
    assert seen == [("s", trial.number, trial.state, trial.values) for trial in told] and len(seen) >= 4


def test_an_error_of_a_callback_ends_the_run_and_the_trial_stays_told(tmp_path):
    def broken(study, trial):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, broken)
    url = records.default_url(tmp_path)
    (told,) = records.load_study(database.open_storage(url), "s").trials
    assert told.state.is_finished()
    ((_, listed),) = presets._studies(url)  # what was found is there, so it is said where
    assert listed == "no answer yet; `autotune status s` says what was found so far"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "stopped by the user"),
        (ZeroDivisionError("no share"), "the run ended: ZeroDivisionError: no share"),
        (ZeroDivisionError(), "the run ended: ZeroDivisionError"),
        (MachinesGone("the node was drained"), "the node was drained"),
    ],
)
def test_a_trial_that_an_error_ends_says_which(error, said):
    """One that an error of a callback ended was said to be stopped by the user."""
    assert why_stopped(error) == said


def test_a_callback_ends_the_search_as_it_ends_that_of_optuna(tmp_path):
    """Optuna answered that a study can be stopped in a callback alone."""

    def enough(study, trial):
        if trial.number == 1:
            study.stop()

    runner = run(tmp_path, enough)
    assert len(runner.study.trials) == 2 and runner.study.user_attrs[records.ENDED_ATTR] == ENDED_BY_CALLBACK
    assert len(run(tmp_path).study.trials) > 2  # another run goes on


def test_trials_and_notes_are_logged_and_secrets_are_not(tmp_path, monkeypatch):
    logger, handler, records = logging.getLogger("autotune"), logging.Handler(), []
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        run(tmp_path)
        LogSink().began(0, Candidate(micro_batch_size=8), "noise")
        log = LogSink()
        log.emit(Event(kind=Kind.NOTE, text="export API_TOKEN=abcdef0123456789abcdef"))
        both = Broadcast(log)
        for _ in range(2):
            both.waiting()  # for another study, of which the log said nothing
    finally:
        logger.setLevel(level)
    said = [entry.getMessage() for entry in records]
    ends = [text for text in said if text.startswith("trial ")]
    assert len(ends) >= 4 and "of 4 trials" in ends[0]
    assert any(text.startswith("started trial 1: micro-batch") for text in said)
    assert said[-3].startswith("started noise scale: micro-batch 8"), "which is no trial"
    assert "abcdef0123456789abcdef" not in said[-2]
    assert said[-1].startswith("waiting: another study measures on this machine")


def test_nothing_is_printed_unless_logging_is_set_up(tmp_path, capfd):
    run(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.system
def test_the_callback_of_mlflow_gets_names_that_mlflow_takes(tmp_path):
    """MLflow and Optuna's integration were tried by hand: they are large. This is what MLflow checks of a name."""
    seen = []

    class MLflowCallback:
        def __call__(self, study, trial):
            seen.append((trial.number, [*trial.params, *trial.distributions, *trial.user_attrs]))

    MLflowCallback.__module__ = "optuna_integration.mlflow.mlflow"
    runner = run(tmp_path, MLflowCallback())
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for _, names in seen for name in names)
    assert "peak memory MiB" in seen[0][1] and "peak memory (MiB)" in runner.study.trials[0].user_attrs


@pytest.mark.system
def test_a_program_that_runs_many_studies_keeps_none_of_their_files_open(tmp_path):
    runner = runner_of(tmp_path, Instant(report), watcher=Broadcast(Journal(tmp_path / "s"), LogSink()), trials=2)
    runner.storage.on_wait = runner._events.say
    runner.run()
    del runner
    gc.collect()
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.resolve().is_relative_to(tmp_path)]
