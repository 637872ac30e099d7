"""The library: the same engine as the commands, typed results, one exact list of public names."""

import asyncio
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.instant import SPACE, Instant, failed, plan_of, report
from support.paths import MODELS, ROOT

import autotune
from autotune import api, session
from autotune.cli import answer
from autotune.cli import run as run_command
from autotune.errors import UserError
from autotune.report import files
from autotune.space.candidate import Candidate
from autotune.study.setup import request
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.system.processes import MARK
from autotune.trial.result import Outcome

TARGET = MODELS / "ok.py"
SETTINGS = {
    "name": "s", "space": SPACE, "trials": 6, "finalists": 2, "repeats": 1, "sampler": "random", "branch": False, "history": False,
}  # fmt: skip
SHORT = SETTINGS | {"trials": 2, "finalists": 1}


def instant_engine(folder, monkeypatch):
    """Trials that are over at once, for studies that begin in a folder; without a database of the user's."""
    instant = Instant()
    instant.mark = ""
    monkeypatch.setattr(request, "executor_for", lambda *_, **__: nullcontext(instant))
    monkeypatch.setattr(session, "plan", lambda spec, *_: plan_of(spec))
    monkeypatch.setattr(session, "profiled", lambda found, *_: found)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    monkeypatch.chdir(folder)
    return instant


@pytest.fixture
def engine(tmp_path, monkeypatch):
    return instant_engine(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study; tests only read it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        instant_engine(tmp_path_factory.mktemp("finished"), monkeypatch)
        return autotune.run(TARGET, **SETTINGS)


@pytest.fixture
def tuned(finished, monkeypatch):
    """That study, in the working directory."""
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    monkeypatch.chdir(finished.folder.parents[1])
    return finished


# The public names.


@pytest.mark.process
def test_the_public_names_are_exactly_these():
    names = "UserError __version__ export load_study predict run".split()
    assert autotune.__all__ == names and set(names) <= set(dir(autotune))
    for name in names:
        assert getattr(autotune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        autotune.tune  # noqa: B018


def test_no_module_has_the_name_of_a_public_function():
    """Importing one would put it in the function's place."""
    assert [name for name in autotune.__all__ if importlib.util.find_spec(f"autotune.{name}")] == []


@pytest.mark.process
def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import autotune; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["autotune"]


def test_every_key_of_a_study_file_is_an_argument_and_its_default_is_that_nothing_is_said():
    parameters = dict(inspect.signature(autotune.run).parameters)
    keys = set(StudySpec.model_fields) - {"target", "command", "invocation"}
    assert set(parameters) == keys | {"target", "fresh", "history", "progress", "callbacks"}
    assert all(parameters[key].default is None for key in keys)
    documented = inspect.getdoc(autotune.run)
    assert [name for name in parameters if f"\n    {name}: " not in documented] == []


@pytest.mark.parametrize("given", [print, 3, ["print"]])
def test_callbacks_that_are_no_list_of_functions_are_refused_before_a_study_begins(engine, given):
    with pytest.raises(autotune.UserError, match="set: knobs by name are needed"):
        autotune.predict("model.py", set=["zero_stage=3"])
    with pytest.raises(autotune.UserError, match="callbacks: give a list of functions"):
        autotune.run(TARGET, callbacks=given)
    assert not list(Path.cwd().iterdir())


# A study.


@pytest.mark.process
def test_a_study_is_run_without_a_word_and_read_back_the_same(tuned, capfd):
    again = autotune.load_study("s")
    assert again.picks == tuned.picks and again.recommended == tuned.recommended
    by_path = autotune.load_study(Path.cwd() / "studies" / "s")
    assert (
        by_path.trials_dataframe().equals(tuned.trials_dataframe())
        and by_path.folder == tuned.folder == Path.cwd() / "studies" / "s"
    )
    assert autotune.load_study("studies/s").picks == tuned.picks
    assert capfd.readouterr() == ("", "")


@pytest.mark.process
def test_it_leaves_the_files_of_the_command_and_the_command_finds_nothing_left_to_do(engine, capsys):
    tuned = autotune.run(TARGET, **SHORT)
    names = {path.name for path in tuned.folder.iterdir()}
    assert {"study.yaml", "recommended.json", "front.json", "ds_config.json", "README.md", "report.html"} <= names
    ran = list(engine.ran)
    overrides = {key: value for key, value in SHORT.items() if key != "history"}
    assert run_command.run(str(TARGET), overrides, as_json=True, no_history=True) == 0
    said = json.loads(capsys.readouterr().out)
    trials = {name: pick.trial for name, pick in tuned.picks.items()}
    assert {name: pick["trial"] for name, pick in said["picks"].items()} == trials
    assert said["study"]["n_trials"] == 2 == len(tuned.trials_dataframe()) and engine.ran == ran


@pytest.mark.process
def test_progress_is_told_only_when_asked_for_and_never_on_standard_output(engine, capfd):
    autotune.run(TARGET, **SHORT, progress=True)
    said = capfd.readouterr()
    assert said.out == "" and "configuration" in said.err and "measured again" in said.err


@pytest.mark.process
def test_a_pick_says_what_was_measured_with_intervals_and_why(tuned):
    best = tuned.recommended
    data = json.loads((tuned.folder / "recommended.json").read_text())["picks"]["recommended"]
    assert [best.name, best.trial, best.candidate] == ["recommended", data["trial"], data["candidate"]]
    assert list(best.reasons) == data["reasons"]
    assert best.ds_config == data["ds_config"] == tuned.ds_config()
    for metric, (value, low, high) in best.scores.items():
        assert value == data["metrics"][metric] and low <= value <= high
    assert best.speedup.value == data["speedup"] and best.speedup.low <= best.speedup.value <= best.speedup.high
    assert tuned.baseline.trial == 0 and tuned.baseline.name == "baseline"
    best.ds_config["train_micro_batch_size_per_gpu"] = -1
    assert tuned.ds_config()["train_micro_batch_size_per_gpu"] > 0


@pytest.mark.process
def test_trials_and_front_are_tables(tuned):
    header = files.as_csv(tuned._report).splitlines()[0].split(",")
    assert [tuned.trials_dataframe().index.name, *tuned.trials_dataframe().columns] == header
    assert list(tuned.trials_dataframe().index) == list(range(6)) and set(tuned.trials_dataframe()["outcome"]) == {
        "complete"
    }
    assert set(tuned.trials_dataframe()["candidate.precision"]) <= {"fp32", "bf16"}
    assert pd.api.types.is_float_dtype(tuned.trials_dataframe()["step_time_s"])
    front = json.loads((tuned.folder / "front.json").read_text())
    assert list(tuned.front.index) == [point["trial"] for point in front]
    assert (tuned.trials_dataframe()["step_time_s_low"] <= tuned.trials_dataframe()["step_time_s"]).all()


@pytest.mark.process
def test_as_text_it_is_the_answer_and_in_a_notebook_one_line(tuned):
    assert str(tuned).startswith("s: ok.py") and re.search(r"^recommended.*: trial \d", str(tuned), flags=re.MULTILINE)
    assert repr(tuned).startswith("<StudyResult 's': 6 trials; recommended trial ") and "\n" not in repr(tuned)


@pytest.mark.process
def test_a_pick_is_exported_as_the_command_does(tuned, tmp_path, capsys):
    answer.export("s", trial=2, form="hf-args")
    printed = capsys.readouterr()
    exported = autotune.export("s", trial=2, format="hf-args")
    assert printed.out == str(exported) == exported.text
    assert printed.err.splitlines() == [f"note: {note}" for note in exported.notes]
    autotune.export(tuned, tmp_path / "new" / "ds_config.json")
    assert json.loads((tmp_path / "new" / "ds_config.json").read_text()) == tuned.ds_config()
    assert tuned.ds_config("baseline")["train_micro_batch_size_per_gpu"] == 8
    with pytest.raises(UserError, match=r"no pick 'best'\. Known: recommended"):
        tuned.ds_config("best")
    with pytest.raises(UserError, match="not both"):
        autotune.export(tuned, pick="drop_in", trial=1)
    with pytest.raises(UserError, match="no finished trial '1'; it has 0 to"):
        tuned.ds_config(trial="1")
    with pytest.raises(UserError, match="unknown format 'yaml'"):
        autotune.export(tuned, format="yaml")
    with pytest.raises(UserError, match="irectory"):
        autotune.export(tuned, tmp_path)


@pytest.mark.process
def test_an_export_goes_through_a_link_or_a_pipe_and_never_takes_its_place(tuned, tmp_path):
    file, link, pipe = tmp_path / "file.json", tmp_path / "link.json", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    autotune.export(tuned, link)
    assert link.is_symlink() and json.loads(file.read_text()) == tuned.ds_config()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    got = []
    reader.start()
    autotune.export(tuned, pipe)
    reader.join(10)
    assert json.loads(got[0]) == tuned.ds_config() and pipe.is_fifo()


@pytest.mark.process
def test_the_report_goes_where_it_is_wanted(tuned, tmp_path):
    assert tuned.report(tmp_path / "out.html") == tmp_path / "out.html"
    assert (tmp_path / "out.html").stat().st_size > 10_000
    assert tuned.report(tmp_path / "folder") == tmp_path / "folder" / "report.html"
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"report.html", "report.json", "trials.csv"}
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        tuned.report(tmp_path / "file" / "below.html")


# What stops a study.


@pytest.mark.process
def test_an_interrupt_leaves_the_best_so_far_and_the_same_call_goes_on(engine):
    engine.stop_at, given = 3, SETTINGS | {"trials": 4, "finalists": 1}
    with pytest.raises(KeyboardInterrupt, match=r"autotune\.load_study\('.*studies/s'\)"):
        autotune.run(TARGET, **given)
    so_far = autotune.load_study("s")
    assert len(so_far.trials_dataframe()) == 3 and so_far.recommended.trial in range(3)
    engine.stop_at = -1
    assert len(autotune.run(TARGET, **given).trials_dataframe()) == 4


@pytest.mark.process
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_scheduler_s_word_and_a_lost_terminal_are_an_interrupt_too(engine, number, status):
    """It was a TypeError, which nothing that waits for an interrupt catches."""
    engine.behaviour = lambda _: os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt, match=r"autotune\.load_study|nothing to keep") as stop:
        autotune.run(TARGET, **SHORT)
    assert stop.value.status == status


@pytest.mark.process
def test_an_interrupt_before_the_first_trial_leaves_nothing(engine):
    engine.stop_at = 0
    with pytest.raises(KeyboardInterrupt, match="nothing to keep"):
        autotune.run(TARGET, **SETTINGS)
    with pytest.raises(UserError, match="no study 's'"):
        autotune.load_study("s")


@pytest.mark.process
def test_it_runs_outside_the_main_thread(engine):
    found = []
    thread = threading.Thread(target=lambda: found.append(autotune.run(TARGET, **SHORT)))
    thread.start()
    thread.join(120)
    assert len(found[0].trials_dataframe()) == 2


@pytest.mark.process
def test_it_runs_as_in_a_notebook(engine, monkeypatch):
    """Within an event loop that runs already, and with streams that are no files."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    async def cell():
        return autotune.run(TARGET, **SHORT, progress=True)

    assert len(asyncio.run(cell()).trials_dataframe()) == 2
    assert out.getvalue() == "" and "configuration" in err.getvalue()


@pytest.mark.process
def test_what_the_readme_shows_runs(engine, tmp_path, capsys):
    page = (ROOT / "README.md").read_text()
    [block] = [text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "import autotune" in text]
    shutil.copyfile(TARGET, tmp_path / "model.py")
    (tmp_path / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    names = {}
    exec(compile(block.replace("trials=8", "trials=4, branch=False, history=False"), "README.md", "exec"), names)
    assert names["config"]["train_micro_batch_size_per_gpu"] > 0 and "micro_batch_size" in capsys.readouterr().out


@pytest.mark.process
def test_where_nothing_fits_that_is_what_is_said(engine):
    engine.behaviour = lambda candidate: failed(Outcome.OOM, "full")
    found = autotune.run(TARGET, **SETTINGS)
    assert found.picks == {} and found.baseline is None and "nothing to recommend" in repr(found)
    with pytest.raises(UserError, match="no configuration fits the device memory"):
        _ = found.recommended


@pytest.mark.process
def test_a_file_that_begins_a_study_while_a_trial_imports_it_is_refused(engine, monkeypatch):
    monkeypatch.setenv(MARK, "some mark")
    with pytest.raises(UserError, match="if __name__ == '__main__'"):
        autotune.run(TARGET, **SETTINGS)
    with pytest.raises(UserError, match="if __name__ == '__main__'"):
        autotune.predict(TARGET)
    assert engine.ran == []


MISTAKES = {
    "a module for a file": ({"target": json}, "not module: trials import the file"),
    "no such file": ({"target": "nothing.py"}, "nothing.py"),
    "a set, which has no order": ({"space": {"zero_stage": {0, 1}}}, "space: zero_stage: .*not set"),
    "an unknown preset": ({"space": ["bath"]}, "'bath'"),
    "a function": ({"objectives": [max]}, "objectives: .*not builtin_function"),
    "a duration": ({"time_budget_s": "10 apples"}, "--time-budget"),
    "a number of trials": ({"trials": 0}, "--trials"),
    "a name that leaves the folder": ({"name": "../up"}, "name"),
    "a DeepSpeed key": ({"base_config": {"gradient_acumulation_steps": 2}}, "gradient_accumulation_steps"),
    "a quotation mark": ({"script_args": "--text 'open"}, "script_args"),
    "arguments for a model": ({"script_args": ["--bs", 4]}, "takes no arguments"),
    "a number for the arguments": ({"script_args": 4}, "script_args: a list of arguments or a text is needed, not 4"),
    "flags whose values would be lost": ({"script_args": {"--bs": 4}}, "script_args: a list .*not {'--bs': 4}"),
    "an engine": ({"executor": "cloud"}, "executor"),
}


@pytest.mark.process
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, engine):
    given, said = MISTAKES[mistake]
    arguments = {"target": TARGET, **SETTINGS, **given}
    with pytest.raises(UserError, match=said) as error:
        autotune.run(arguments.pop("target"), **arguments)
    assert "\n" not in str(error.value) and engine.ran == []


@pytest.mark.process
def test_an_unknown_study_is_said_with_those_that_are_known(tuned):
    with pytest.raises(UserError, match=r"no study 't'.*Known: s"):
        autotune.load_study("t")
    for name in ("", ".", "..", "/", "a b"):
        with pytest.raises(UserError, match="cannot name a study"):
            autotune.load_study(name)
    for wrong in (None, 3, b"s"):
        with pytest.raises(UserError, match=r"load_study: .* is needed, not"):
            autotune.load_study(wrong)
    with pytest.raises(UserError, match="storage: the URL of a database is needed"):
        autotune.load_study("s", storage=Path("autotune.db"))
    with pytest.raises(UserError, match=r"load_study: .*study\.yaml is a file; give the study's name"):
        autotune.load_study(tuned.folder / "study.yaml")
    with contextlib.chdir(tuned.folder):
        assert autotune.load_study("./").name == "s"


class PathInBytes:
    """What `os.scandir(b".")` yields: a path that is given as bytes."""

    def __init__(self, path):
        self.path = os.fsencode(path)

    def __fspath__(self):
        return self.path


@pytest.mark.process
def test_a_path_or_name_of_another_type_is_one_sentence_and_a_path_in_bytes_is_taken(tuned, tmp_path):
    assert autotune.load_study(PathInBytes(tuned.folder)).name == "s" == api._target(PathInBytes("s"))
    autotune.export(tuned, PathInBytes(tmp_path / "x.json"))
    assert tuned.report(PathInBytes(tmp_path / "x.html")).is_file() and (tmp_path / "x.json").is_file()
    with pytest.raises(UserError, match=r"pick: the name of a pick is needed, not 5"):
        autotune.export(tuned, pick=5)
    with pytest.raises(UserError, match=r"path: the name of a file is needed, not 7"):
        autotune.export(tuned, 7)
    with pytest.raises(UserError, match=r"path: the name of a page or a folder is needed, not b'x.html'"):
        tuned.report(b"x.html")


@pytest.mark.process
def test_a_folder_that_cannot_be_written_is_one_sentence(engine, tmp_path):
    (tmp_path / "studies").write_text("a file")
    with pytest.raises(UserError, match="studies"):
        autotune.run(TARGET, **SETTINGS)


@pytest.mark.system
def test_the_database_is_the_one_of_the_environment(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_STORAGE", records.default_url(tmp_path / "elsewhere"))
    autotune.run(TARGET, **SHORT)
    assert (tmp_path / "elsewhere" / "autotune.db").exists() and not (tmp_path / "studies" / "autotune.db").exists()
    assert len(autotune.load_study("s").trials_dataframe()) == 2


@pytest.mark.system
def test_arguments_may_be_what_python_makes_of_numbers_and_lists(engine):
    space = {"micro_batch_size": range(2, 9, 2), "precision": ("fp32", "bf16"), "checkpoint_every": np.array([0, 1])}
    settings = {"trials": np.int64(4), "trial_budget_s": np.float64(3.5), "global_batch": (2, 64)}
    found = autotune.run(TARGET, **{**SETTINGS, "space": space, **settings})
    assert len(found.trials_dataframe()) == 4 and set(found.trials_dataframe()["candidate.micro_batch_size"]) <= {
        2,
        4,
        6,
        8,
    }
    kept = StudySpec.load(found.folder / "study.yaml")
    assert (kept.trials, kept.trial_budget_s, kept.global_batch) == (4, 3.5, (2, 64))


@pytest.mark.process
def test_a_study_that_a_file_states_is_run_beside_it(engine, tmp_path):
    (tmp_path / "study.yaml").write_text(
        f"target: {TARGET}\nname: written\nspace: [{{micro_batch_size: [2, 4, 8]}}]\ntrials: 2\nsampler: random\n"
    )
    found = autotune.run("study.yaml", trials=3, finalists=0, branch=False, history=False)
    assert found.name == "written" and len(found.trials_dataframe()) == 3


def test_an_arguments_text_is_split_as_a_shell_does():
    assert api._words("--text 'two words' -n 3") == ("--text", "two words", "-n", "3")
    assert api._words(["-n", 3]) == ("-n", "3") and api._words([]) is None is api._words(None)


@pytest.mark.process
def test_the_baseline_may_have_failed(engine):
    own = Candidate(micro_batch_size=8)
    engine.behaviour = lambda candidate: failed(Outcome.OOM, "full") if candidate == own else report(candidate)
    found = autotune.run(TARGET, **SETTINGS, objectives=["latency", "memory"], memory_filter=False)
    assert found.baseline is None and found.recommended.speedup is None
    assert any("the baseline did not complete" in text for text in found.caveats)
