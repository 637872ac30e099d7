"""A worker runs the study as `autotune run` does, also where that took options beside the study's own file."""

import platform
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from support.instant import WORKLOAD, Instant, Watcher, plan_of, spec_of

from autotune import session
from autotune.cli import worker
from autotune.errors import UserError
from autotune.study import lock
from autotune.study.lock import study_lock
from autotune.study.setup import engine, plan
from autotune.study.setup.request import StudyRequest
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import database, records
from autotune.study.storage.leases import StudyLeases
from autotune.system import files


def test_a_worker_takes_the_options_of_a_run_of_the_studys_own_file(tmp_path, monkeypatch):
    """It was refused: the study differed in max_length and global_batch."""
    folder, file = tmp_path / "s", tmp_path / "s" / "study.yaml"
    files.write_text(file, spec_of().to_yaml(folder))
    monkeypatch.setattr(engine, "executor_for", lambda *_: nullcontext(Instant()))
    monkeypatch.setattr(plan, "plan", lambda spec, *_: plan_of(spec))

    def run(**given):
        """The fingerprint of the leader, and that of a worker."""
        wanted = StudySpec.of(file, given)
        session._keep_spec(StudyRequest(spec=wanted, target=file, overrides=given, folder=folder, executor=Instant()))
        record = SimpleNamespace(workload=WORKLOAD)
        with worker._planned(folder, record, {"trials": 6}, tmp_path, Watcher()) as (found, _):
            return plan_of(wanted).fingerprint, found.fingerprint

    plain = run()
    asked = run(max_length=64, global_batch="free", objectives=["latency", "memory"])
    assert plain[0] == plain[1] and asked[0] == asked[1] != plain[0]
    assert run() == plain


def test_a_worker_that_is_started_with_its_run_waits_for_it(tmp_path, monkeypatch):
    """It ended with `no study`: a run leads only once it has imported torch."""
    storage = database.open_storage(records.default_url(tmp_path))
    ledger = StudyLeases(storage, "s")
    monkeypatch.setattr(worker.time, "sleep", lambda _: (_ for _ in ()).throw(InterruptedError))
    said = SimpleNamespace(doing=lambda _: None, tick=lambda: None)
    with study_lock(tmp_path / "s"), pytest.raises(InterruptedError):
        worker._joined(tmp_path / "s", storage, ledger, said)
    with pytest.raises(UserError, match="no study 's'"):
        worker._joined(tmp_path / "s", storage, ledger, said)


def test_what_a_killed_worker_of_this_machine_left_is_ended_and_removed(tmp_path, monkeypatch):
    """Its folder stayed in the study's for ever, and nobody ended what it had started inside an allocation."""
    swept, trials = [], tmp_path / "trials"
    with pytest.raises(UserError, match=r"there is no .*study.yaml here"), worker._own_folder(tmp_path):
        pass
    assert [*tmp_path.iterdir()] == [], "it left a folder where no study is"
    (tmp_path / "study.yaml").touch()
    monkeypatch.setattr(lock, "sweep", swept.append)
    killed, at_work = (trials / f"worker-{platform.node()}-{n}" for n in (999999998, 999999999))
    elsewhere, another_users = (trials / f"worker-{platform.node()}-{n}" for n in ("b-1", "1"))
    (another_users / ".lock").mkdir(parents=True)  # which cannot be written to
    for folder in (killed, elsewhere):
        folder.mkdir()
        (folder / ".lock").write_text('{"process": "999999998:1", "agent": "killed"}')
    with study_lock(at_work):
        with worker._own_folder(tmp_path) as own:
            assert {*trials.iterdir()} == {own, at_work, elsewhere, another_users} and swept == ["killed"]
        assert not own.exists()
    for error, stays in ((KeyboardInterrupt, False), (UserError, True)):
        with pytest.raises(error), worker._own_folder(tmp_path) as own:
            raise error("see its log")
        assert own.exists() == stays
