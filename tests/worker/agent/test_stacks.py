"""Where the ranks of a trial stood when it was ended, in their logs."""

import time

import pytest

from autotune.executors.base import TimeOver
from autotune.trial import stood
from autotune.trial.result import Outcome
from autotune.worker.agent import stacks
from autotune.worker.agent.logs import Log
from autotune.worker.agent.memory_watch import MemoryWatch
from autotune.worker.agent.rank import Rank


@pytest.mark.system
def test_the_log_of_each_rank_of_a_trial_that_hung_ends_with_where_it_stood(zoo):
    """Nothing was in the log that the message names, and the one remedy it gave was more time."""
    assert zoo.run("hang", deadline_s=8.0).outcome is Outcome.TIMEOUT
    at = [zoo.log(rank).partition(stood.HEAD)[2] for rank in (0, 1)]
    assert 'hang.py", line 12 in fault' in at[1] and 'hang.py", line' not in at[0].splitlines()[1]
    assert all("in train_and_measure" in stack for stack in at)


@pytest.mark.process
def test_the_log_of_each_rank_of_a_trial_that_is_stopped_says_where_it_stood(zoo):
    """A study whose time budget ended before its baseline did named a log, to see in it where ranks hang, that was empty."""

    def stop_once_it_trains():
        if zoo.entered("warmup"):
            raise TimeOver

    with pytest.raises(TimeOver):
        zoo.run("hang", stop_once_it_trains)
    assert all("in train_and_measure" in zoo.log(rank).partition(stood.HEAD)[2] for rank in (0, 1))


def test_a_rank_that_has_just_ended_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    log = Log(tmp_path / "log")
    stacks.ask([Rank(log, MemoryWatch(), pid=2**22 + 1)])  # beyond the largest PID
    log.close()
    assert (tmp_path / "log").read_bytes() == stood.HEAD.encode()
