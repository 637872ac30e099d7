"""The traced run of a trial."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from support.paths import MODELS

from autotune.study import tracing
from autotune.study.folder import trial_path
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.workload import Script


@pytest.fixture
def asked(monkeypatch):
    """The requests of traced runs."""
    asked = []

    def ran(_executor, _folder, request, _on_tick):
        asked.append(request)
        return TrialResult(outcome=Outcome.COMPLETE)

    engine = SimpleNamespace(start=lambda: None, turn=lambda _: nullcontext(), close=lambda: None)
    monkeypatch.setattr(tracing, "LocalExecutor", lambda *_: engine)
    monkeypatch.setattr(tracing.base, "run", ran)
    return asked


def test_a_trial_that_took_its_whole_deadline_has_time_for_the_traced_steps(tmp_path, asked):
    """Where steps take a minute it was killed at its deadline, and `diagnose --profile` told nothing."""
    request = TrialRequest(target=str(MODELS / "gpt_tiny.py"), deadline_s=300.0, budget_s=60.0)
    trace(tmp_path, request)
    assert asked[0].traced_steps > 0 and asked[0].deadline_s >= 2 * request.deadline_s


def test_a_launched_program_that_trains_in_a_library_is_traced(tmp_path, asked):
    """As what `torchrun $(which trl)` starts: its text shows no training, and its name ends in no `.py`."""
    program = tmp_path / "program"
    program.write_text("from library.cli import main\n\nmain()\n")
    trace(tmp_path, TrialRequest(target=str(program), script=Script(arguments=(), working_dir=str(tmp_path))))
    assert len(asked) == 1


def trace(folder, request):
    """Has trial 3, which had this request, run again and traced."""
    path = TrialDir(trial_path(folder, 3))
    path.path.mkdir(parents=True)
    write_record(path.request, request)
    tracing.run(folder, 3, {}, lambda: None, lambda: None)
