"""The traced run of a trial."""

from contextlib import nullcontext
from types import SimpleNamespace

from support.paths import MODELS

from autotune.study import tracing
from autotune.study.storage import records
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult


def test_a_trial_that_took_its_whole_deadline_has_time_for_the_traced_steps(tmp_path, monkeypatch):
    """Where steps take a minute it was killed at its deadline, and `diagnose --profile` told nothing."""
    asked = []

    def ran(_executor, _folder, request, _on_tick):
        asked.append(request)
        return TrialResult(outcome=Outcome.COMPLETE)

    engine = SimpleNamespace(start=lambda: None, turn=lambda _: nullcontext(), close=lambda: None)
    monkeypatch.setattr(tracing, "LocalExecutor", lambda *_: engine)
    monkeypatch.setattr(tracing.base, "run", ran)
    request = TrialRequest(target=str(MODELS / "gpt_tiny.py"), deadline_s=300.0, budget_s=60.0)
    path = TrialDir(records.trial_path(tmp_path, 3))
    path.path.mkdir(parents=True)
    write_record(path.request, request)
    tracing.run(tmp_path, 3, {}, lambda: None, lambda: None)
    assert asked[0].traced_steps > 0 and asked[0].deadline_s >= 2 * request.deadline_s
