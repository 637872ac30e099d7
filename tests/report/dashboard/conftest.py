"""The dashboard of a study, open and guarded by a token, and the study as it shows it."""

import optuna
import pytest
from support.dashboard import EVIL, TOKEN, ask, overlay_of
from support.instant import Instant, failed, report, runner_of

from autotune.report import load
from autotune.report.dashboard.server import Application
from autotune.space.candidate import Candidate
from autotune.study.folder import trial_path
from autotune.study.storage import records
from autotune.trial.result import Outcome


def sometimes_failing(candidate: Candidate):
    if candidate.micro_batch_size == 16:
        return failed(Outcome.OOM, f"rank 0 grew over the limit {EVIL}")
    return report(candidate)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A folder with the study `s`, some of its trials out of memory, and a study that is not ours."""
    folder = tmp_path_factory.mktemp("studies")
    runner_of(
        folder,
        Instant(sometimes_failing),
        trials=14,
        memory_filter=False,
        space=[{"micro_batch_size": [2, 4, 8, 16], "precision": ["fp32", "bf16"]}],
    ).run()
    log = trial_path(folder / "s", 0) / "rank-0.log"
    log.write_text(f"step 1\n{EVIL}\n")
    foreign = optuna.create_study(study_name="not ours", storage=records.default_url(folder), direction="minimize")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    return folder


@pytest.fixture(scope="module")
def app(studies) -> Application:
    return Application(overlay_of(studies), "127.0.0.1", None)


@pytest.fixture(scope="module")
def guarded(studies) -> Application:
    return Application(overlay_of(studies), "0.0.0.0", TOKEN)


@pytest.fixture(scope="module")
def study(app):
    """The study as the page of Optuna's dashboard gets it."""
    number = next(s["study_id"] for s in ask(app, "/api/studies").json["study_summaries"] if s["study_name"] == "s")
    return {"id": number} | ask(app, f"/api/studies/{number}").json


@pytest.fixture(scope="module")
def answer(studies):
    return load.load("s", records.default_url(studies), studies / "s")
