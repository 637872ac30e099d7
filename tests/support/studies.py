"""A study run to its end with trials that take no time, and what is read of it."""

from autotune.study.storage import records
from support.instant import Instant, Watcher, runner_of


def run(folder, executor=None, **changes):
    """Runs (or resumes) the study of a folder to its end."""
    executor, watcher = executor or Instant(), Watcher()
    runner = runner_of(folder, executor, watcher=watcher, **changes)
    runner.run()
    return runner, executor, watcher


def states(runner):
    return [told.state.name for told in runner.study.get_trials(deepcopy=False)]


def candidates(runner):
    return [records.told_candidate(told) for told in records.told_trials(runner.study)]
