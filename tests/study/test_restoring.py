"""A study whose database is gone is taken up again from its folder, also where that was itself interrupted."""

import pytest
from support.instant import Instant, Watcher, runner_of

from autotune.study import restore
from autotune.study.proposals import Proposer
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


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(StudyLeases, "claim", False), (StudyLeases, "claim", True), (Proposer, "describe", True), (Teller, "tell", True)],
    ids=["before a claim", "before its configuration", "before its end", "between two"],
)
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.system)])
def test_a_run_that_is_killed_while_it_restores_loses_nothing(tmp_path, monkeypatch, owner, name, after, n):
    first = runner_of(tmp_path, Instant(), trials=5, finalists=0)
    first.run()
    told = [(m.trial, m.candidate) for m in first.state.measured()]
    first.storage.engine.dispose()
    for path in tmp_path.glob("autotune.db*"):
        path.unlink()
    with monkeypatch.context() as patch:
        dies_at(patch, owner, name, n, after=after)
        with pytest.raises(Killed):
            runner_of(tmp_path, Instant(), trials=5, finalists=0).run()
    executor, watcher = Instant(), Watcher()
    again = runner_of(tmp_path, executor, watcher=watcher, trials=5, finalists=0)
    again.run()
    assert executor.ran == [] and [(m.trial, m.candidate) for m in again.state.measured()] == told
    assert not records.is_restoring(again.study) and not records.running(again.study)
    assert any("are taken up again" in text for text in watcher.said)


def test_a_number_without_a_result_stays_free_of_results(tmp_path):
    first = runner_of(tmp_path, Instant(), trials=4, finalists=0)
    first.run()
    (records.trial_path(tmp_path / "s", 2) / "result.json").unlink()
    first.storage.engine.dispose()
    (tmp_path / "autotune.db").unlink()
    executor = Instant()
    again = runner_of(tmp_path, executor, trials=4, finalists=0)
    again.run()
    assert [m.trial for m in again.state.measured()] == [0, 1, 3, 4] and len(executor.ran) == 1
    assert restore.restore(again.state, again.proposer, again._teller) == 4  # nothing is told twice
    assert [m.trial for m in again.state.measured()] == [0, 1, 3, 4]
