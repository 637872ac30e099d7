"""What a run is asked to do: the study is locked and its engine begins, before anything waits for it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.instant import spec_of
from support.paths import MODELS

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.study.folder import RECORD_FILE
from autotune.study.lock import study_lock
from autotune.study.setup.request import requested, studies_folder
from autotune.study.setup.script import inspect_workload
from autotune.trial.result import Outcome, TrialResult


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What is done with the engine, in order, in a folder with a model."""
    said: list[str] = []
    for name in ("launch", "start", "close"):
        monkeypatch.setattr(LocalExecutor, name, lambda _, name=name: said.append(name))
    shutil.copyfile(MODELS / "ok.py", tmp_path / "model.py")
    monkeypatch.chdir(tmp_path)
    return said


def test_the_engine_is_launched_and_not_waited_for_and_closed_before_the_lock_is_given_up(said, monkeypatch):
    with requested("model.py", {"trials": 3}) as asked:
        assert said == ["launch"]
        assert (asked.spec.trials, asked.folder) == (3, Path("studies").absolute() / asked.spec.name)
        with pytest.raises(UserError, match="is being run by process"), study_lock(asked.folder):
            pass

        def close(_: LocalExecutor) -> None:
            with pytest.raises(UserError, match="is being run by process"), study_lock(asked.folder):
                pass
            said.append("close")

        monkeypatch.setattr(LocalExecutor, "close", close)
    assert said == ["launch", "close"]
    with study_lock(asked.folder):
        pass


def test_a_command_that_ends_in_a_yaml_file_below_another_folder_of_studies_has_its_study_in_the_working_directory():
    """Its folder was one of that folder's, with the whole command for a name."""
    command = Path("torchrun train.py --config conf/studies/a/ds.yaml")
    assert studies_folder(command) == Path("studies").absolute()


def test_no_engine_begins_for_a_study_that_another_process_runs(said):
    with requested("model.py", {}) as asked:
        with pytest.raises(UserError, match="is being run by process"), requested("model.py", {}):
            pass
        assert said == ["launch"]
        assert asked.folder.is_dir()


def test_a_target_that_cannot_be_run_comes_with_what_to_do(tmp_path, monkeypatch):
    reason = "RuntimeError: self.dim() cannot be 0 to view Float as Byte (different element sizes)"
    monkeypatch.setattr(base, "run", lambda *_: TrialResult(outcome=Outcome.CRASHED, reason=reason))
    with pytest.raises(UserError, match=r"cannot be loaded: RuntimeError.*sizes\)\. DeepSpeed.*shape \[1\]"):
        inspect_workload(spec_of(), SimpleNamespace(cold_reason=""), tmp_path, 1)


@pytest.mark.parametrize(
    ("reason", "hinted"),
    [("TypeError: step() takes 1 positional argument but 2 were given", True), ("the script did nothing", False)],
)
def test_a_script_that_fails_with_deepspeed_alone_is_not_said_to_fail_as_it_is(tmp_path, monkeypatch, reason, hinted):
    """A training with L-BFGS and Accelerate, which works by itself, read that it cannot be run as it is."""
    changes = ["DeepSpeed: the script is run without it; launch it with `accelerate launch`."]
    result = TrialResult(outcome=Outcome.CRASHED, reason=reason, side_changes=changes)
    monkeypatch.setattr(base, "run", lambda *_: result)
    with pytest.raises(UserError) as refused:
        inspect_workload(spec_of(), SimpleNamespace(cold_reason=""), tmp_path, 1)
    assert ("By itself the script runs without DeepSpeed" in str(refused.value)) is hinted


@pytest.mark.parametrize(("failure", "n_runs"), [(None, 2), ("no compiler", 1)])
def test_the_time_in_which_an_op_is_compiled_is_not_the_scripts(tmp_path, monkeypatch, failure, n_runs):
    """A script with DeepSpeed's own Adam ended at its deadline on a loaded machine, with advice for the next try."""
    runs, ops = [], []

    def run(_executor, path, *_):
        compiling = [{"time": 0.0, "compiling": "fused_adam"}] if not runs else []
        (path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in compiling))
        runs.append(path)
        return TrialResult(outcome=Outcome.TIMEOUT, reason="no end within 300 s")

    monkeypatch.setattr(base, "run", run)
    executor = SimpleNamespace(cold_reason="", build_op=lambda op, _: ops.append(op) or failure)
    with pytest.raises(UserError) as refused:
        inspect_workload(spec_of(), executor, tmp_path, 1)
    assert (len(runs), ops) == (n_runs, ["fused_adam"])
    assert ("still being compiled" in str(refused.value)) is (failure is not None)


def test_a_studys_folder_that_was_renamed_is_not_begun_anew_under_the_old_name(said, tmp_path):
    """The run made a folder of the old name, and its answer lacked all that had been measured again."""
    spec = spec_of(name="old").model_copy(update={"target": tmp_path / "model.py"})
    renamed = tmp_path / "studies" / "new"
    renamed.mkdir(parents=True)
    (renamed / "study.yaml").write_text(spec.to_yaml(renamed))
    with requested("studies/new/study.yaml", {}) as asked:  # a file of the user's own, in a folder of its own
        assert asked.folder.name == "old"
    (renamed / RECORD_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"renamed or copied.*--study new"), requested("studies/new/study.yaml", {}):
        pass
    with requested("studies/new/study.yaml", {"name": "new"}) as asked:
        assert asked.folder == renamed
