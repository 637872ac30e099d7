"""A study whose database is gone is taken up again from its folder, also where that was itself interrupted."""

import json
import shutil
from dataclasses import replace
from datetime import datetime

import pytest
from support.instant import Instant, Watcher, plan_of, runner_of, spec_of

from autotune.errors import UserError
from autotune.study import restore
from autotune.study.folder import retuning_path, trial_path
from autotune.study.proposals import Proposer
from autotune.study.runner import Runner
from autotune.study.state import lacks_trials
from autotune.study.storage import records
from autotune.study.storage.leases import StudyLeases
from autotune.study.tell import Teller


class Killed(BaseException):
    """In place of SIGKILL: nothing is tidied up after it."""


def dies_at(monkeypatch, owner, name, n, *, after):
    """Has the n-th call of a method kill the process, before or after it did its work."""
    method, calls = getattr(owner, name), []

    def call(*arguments, **named):
        calls.append(1)
        if len(calls) == n and not after:
            raise Killed
        found = method(*arguments, **named)
        if len(calls) == n:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, call)


def lose_database(runner, folder):
    """Removes the database of a run, which has ended."""
    runner.storage.engine.dispose()
    for path in folder.glob("autotune.db*"):
        path.unlink()


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(Teller, "tell", True), (Proposer, "describe", True), (StudyLeases, "claim", True), (StudyLeases, "claim", False)],
    ids=["between two", "before its end", "before its configuration", "before a claim"],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_run_that_is_killed_while_it_restores_loses_nothing(tmp_path, monkeypatch, owner, name, after, n):
    first = runner_of(tmp_path, Instant(), trials=5, finalists=0)
    first.run()
    told = [(m.trial, m.candidate) for m in first.state.measured()]
    lose_database(first, tmp_path)
    with monkeypatch.context() as patch:
        dies_at(patch, owner, name, n, after=after)
        with pytest.raises(Killed):
            runner_of(tmp_path, Instant(), trials=5, finalists=0).run()
    executor, watcher = Instant(), Watcher()
    again = runner_of(tmp_path, executor, watcher=watcher, trials=5, finalists=0)
    again.run()
    assert executor.ran == [] and [(m.trial, m.candidate) for m in again.state.measured()] == told
    assert not lacks_trials(again.study, tmp_path / "s") and not records.running(again.study)
    assert any("are taken up again" in text for text in watcher.said)


def test_trials_that_an_earlier_copy_of_the_database_lacks_are_taken_up(tmp_path):
    """A further run began at the numbers of the copy, and overwrote what it did not know of."""
    first = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    first.run()
    first.storage.engine.dispose()
    shutil.copy(tmp_path / "autotune.db", tmp_path / "copy")
    later = runner_of(tmp_path, Instant(), trials=5, finalists=0)
    later.run()
    told = [(m.trial, m.candidate) for m in later.state.measured()]
    lose_database(later, tmp_path)
    (tmp_path / "copy").rename(tmp_path / "autotune.db")
    executor = Instant()
    again = runner_of(tmp_path, executor, trials=5, finalists=0)
    again.run()
    assert executor.ran == [] and [(m.trial, m.candidate) for m in again.state.measured()] == told


def test_a_re_tuning_on_other_terms_keeps_no_trials_from_being_taken_up(tmp_path):
    """As one from a checkpoint; the study whose answer it had replaced could not be run: it "exists, but differs in"."""
    study, name = runner_of(tmp_path, Instant(), trials=2, finalists=0), "s.retune-1"
    study.run()
    other, folder = plan_of(spec_of(trials=1, finalists=0, seed=7)), retuning_path(tmp_path / "s", 1)
    other = replace(other, spec=other.spec.model_copy(update={"name": name}))
    Runner(other, Instant(), folder, StudyLeases(study.storage, name), Watcher()).run()
    (folder / "decision.json").write_text('{"verdict": "improved"}')
    records.succeed(study.study, name)
    shutil.copytree(trial_path(tmp_path / "s", 1), trial_path(tmp_path / "s", 2))
    later = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    later.open()
    assert len(later.state.told()) == 3 and records.current(later.study) == name


@pytest.mark.parametrize("there", ["", "restoring"], ids=["deleted", "being restored"])
def test_a_worker_that_comes_in_between_says_so(tmp_path, there):
    """It ended in an AssertionError without a text."""
    if there:
        first = runner_of(tmp_path, Instant(), trials=2, finalists=0)
        first.run()
        shutil.copytree(trial_path(tmp_path / "s", 1), trial_path(tmp_path / "s", 2))
    plan = plan_of(spec_of(trials=2))
    worker = Runner(plan, Instant(), tmp_path / "s", records.default_url(tmp_path), Watcher(), leads=False)
    with pytest.raises(UserError, match=r"study 's' was deleted, begun anew or taken up .* start the worker again"):
        worker.help()


def test_the_trials_of_another_study_are_not_removed_without_a_word(tmp_path):
    """They were where the database was removed, or another one named, and what is tuned had changed."""
    first = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    first.run()
    lose_database(first, tmp_path)
    with pytest.raises(UserError, match=r"holds the trials of another study, which differs in seed .*--fresh"):
        runner_of(tmp_path, Instant(), trials=3, finalists=0, seed=1).run()
    again = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    again.run()
    assert again._measurer.executor.ran == []


def test_a_number_without_a_result_stays_free_of_results(tmp_path):
    first = runner_of(tmp_path, Instant(), trials=4, finalists=0)
    first.run()
    (trial_path(tmp_path / "s", 2) / "result.json").unlink()
    lose_database(first, tmp_path)
    executor = Instant()
    again = runner_of(tmp_path, executor, trials=4, finalists=0)
    again.run()
    assert [m.trial for m in again.state.measured()] == [0, 1, 3, 4] and len(executor.ran) == 1
    assert restore.restore(again.state, again.proposer, again._teller) == 4  # nothing is told twice
    assert [m.trial for m in again.state.measured()] == [0, 1, 3, 4]


def test_what_is_taken_up_ran_when_it_ran_and_took_what_it_took(tmp_path):
    """All trials passed for begun at the restoration: side by side, in the time of one, and after no pause."""
    first = runner_of(tmp_path, Instant(), trials=3, finalists=1)
    first.run()
    began_s = datetime(2026, 11, 21, 12).timestamp()
    for n in range(3):
        path = trial_path(tmp_path / "s", n)
        (path / "events.jsonl").write_text(
            json.dumps({"time": began_s + 1000 * n, "rank": 0, "phase": "import"}) + "\n"
        )
    (path / "repeat-1").mkdir(exist_ok=True)
    (path / "repeat-1" / "events.jsonl").write_text(json.dumps({"time": began_s + 2020, "rank": 0, "phase": "import"}))
    (path / "repeat-1" / "exit.json").write_text(json.dumps({"wall_s": 30.0}))
    (path / "scratch").mkdir()  # what a script wrote there is no run
    (path / "scratch" / "events.jsonl").write_text(json.dumps({"time": began_s + 9000}))
    (path / "scratch" / "exit.json").write_text(json.dumps({"wall_s": 700.0}))
    lose_database(first, tmp_path)
    again = runner_of(tmp_path, Instant(), trials=3, finalists=1)
    again.open()
    told = records.told_trials(again.study)
    assert [each.datetime_start.timestamp() - began_s for each in told] == [0, 1000, 2000]
    assert [m.sitting for m in again.state.measured()] == [0, 1, 2]
    assert records.WALL_S.of(again.study) == 1 + 1 + 50 <= again._budget.spent_s()
