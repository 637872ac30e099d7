"""The command line as a user types it: real studies on the smallest model, to their end, stopped, killed and resumed."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.commands import autotune, called, one_sentence, processes_of, told
from support.paths import BENCHMARKS, MODELS
from support.zoo import wait_until

from autotune.cli.app import COMMANDS
from autotune.errors import UserError
from autotune.executors import local
from autotune.space.candidate import Candidate
from autotune.study import measure
from autotune.study.lock import study_lock
from autotune.study.setup import engine, plan, profile_cache, request
from autotune.study.spec.spec import StudySpec
from autotune.trial.request import TrialRequest

pytestmark = pytest.mark.process

STUDY = """
target: ok.py
name: small
ranks: 2
base_config: {train_micro_batch_size_per_gpu: 8}
space: [{micro_batch_size: [4, 8, 16]}, {precision: [fp32, bf16]}, {zero_stage: [0, 1, 2]}]
global_batch: free
objectives: [latency, throughput, memory]
trials: 3
trial_budget_s: 0.3
branch: false
stop_trials: false # whether a trial is beaten depends on what else the machine does
trial_deadline_s: 60
finalists: 1
repeats: 1
"""
# So long a trial can be interrupted.
LONG = """
{target: ok.py, name: small, ranks: 2, base_config: {train_micro_batch_size_per_gpu: 8}, space: [{zero_stage: [0, 1, 2, 3]}],
 objectives: [latency], trials: 4, trial_budget_s: 1, stop_trials: false, sampler: grid, trial_deadline_s: 60, finalists: 0}
"""


def begun(folder: Path, study: str, trial: int) -> subprocess.Popen[str]:
    """A run of a study whose trial of that number has begun."""
    (folder / "small.yaml").write_text(study)
    command = [sys.executable, "-m", "autotune", "run", "small.yaml"]
    driver = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert wait_until((folder / f"studies/small/trials/{trial:04d}/events.jsonl").exists, 120)
    return driver


@contextlib.contextmanager
def on_server(executor, models, folder) -> Iterator[Path]:
    """A folder with the model, whose studies run on the session's server, do not wait for an idle machine and profile one pass."""
    shutil.copyfile(models / "ok.py", folder / "ok.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "MAX_BUSY_TRIES", 1)
        patch.setattr(profile_cache, "PROFILE_S", 0.0)  # the other passes take 4 s
        for module in (request, engine):
            patch.setattr(module, "executor_for", lambda *_, **__: contextlib.nullcontext(executor))
        yield folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, executor, models) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a study that ran to its end; tests only read it."""
    with on_server(executor, models, tmp_path_factory.mktemp("cli")) as folder:
        (folder / "small.yaml").write_text(STUDY)
        return folder, called("run", "small.yaml", cwd=folder)


@pytest.fixture
def warm(executor, models, tmp_path):
    with on_server(executor, models, tmp_path) as folder:
        yield folder


def test_help_names_every_command_and_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autotune", "--help"], capture_output=True, text=True, check=True
    )
    assert all(path.split()[0] in done.stdout for path in COMMANDS)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "deepspeed", "optuna", "numpy", "pydantic", "rich", "sqlalchemy"}


def test_every_command_has_its_help_and_a_typo_its_nearest_name(tmp_path):
    for path, (_, text) in COMMANDS.items():
        shown = called(*path.split(), "--help", cwd=tmp_path)
        assert shown.returncode == 0 and text[:40] in " ".join(shown.stdout.split()), path
    assert "Did you mean 'status'" in called("statsu", cwd=tmp_path).stderr
    assert "--trials" in called("run", "model.py", "--trial", "3", cwd=tmp_path).stderr


@pytest.mark.system
@pytest.mark.smoke
def test_a_study_in_a_process_with_a_server_ends_with_its_answer_and_leaves_no_process(models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "small.yaml").write_text(STUDY)
    done = autotune("run", "small.yaml", cwd=tmp_path)
    assert done.returncode == 0 and "recommended" in done.stdout, done.stderr
    assert processes_of(tmp_path) == []


def test_a_study_ends_with_an_answer_and_its_files(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert "recommended" in done.stdout and "speed-up" in done.stdout
    study = folder / "studies" / "small"
    names = "study.yaml environment.json front.json recommended.json ds_config.json README.md report.html"
    assert set(names.split()) <= {path.name for path in study.iterdir()}
    found = json.loads((study / "recommended.json").read_text())
    pick = found["picks"]["recommended"]
    point = set(
        "trial candidate ds_config metrics ci95 gains luck speedup speedup_ci95 measurements doubt barred".split()
    )
    keys = point | {"reasons", "script_side_changes", "unchecked"}
    assert set(pick) == keys and "drop_in" in found["picks"] and set(found["baseline"]) == keys
    assert all(set(each) == point for each in json.loads((study / "front.json").read_text()))
    assert json.loads((study / "ds_config.json").read_text()) == pick["ds_config"]


def test_a_study_is_exported_for_other_tools(finished):
    folder, _ = finished
    config = json.loads(called("export", "small", cwd=folder).stdout)
    assert config["train_micro_batch_size_per_gpu"] in (4, 8, 16)
    assert "--per_device_train_batch_size" in called("export", "small", "--format", "hf-args", cwd=folder).stdout
    shown = called("export", "small", "--trial", "1", "--format", "accelerate", cwd=folder).stdout
    assert "distributed_type: DEEPSPEED" in shown
    assert "Known" in one_sentence(called("export", "small", "--pick", "best", cwd=folder))
    assert "not both" in one_sentence(called("export", "small", "--pick", "drop_in", "--trial", "1", cwd=folder))


@pytest.mark.system
def test_its_own_study_yaml_goes_on_from_anywhere_with_what_the_budget_lacks(finished, warm, tmp_path):
    folder, there = finished[0], tmp_path / "there"
    there.mkdir()
    shutil.copytree(folder, tmp_path / "copy")
    before = told(tmp_path / "copy")
    file = str(tmp_path / "copy" / "studies" / "small" / "study.yaml")
    done = called("run", file, "--trials", str(len(before) + 1), "--json", cwd=there)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["study"]
    assert (found["name"], found["n_trials"]) == ("small", len(before) + 1)
    assert told(tmp_path / "copy")[: len(before)] == before and not list(there.iterdir())


def test_a_check_first_compiles_what_its_baseline_needs_and_says_so(warm, executor, monkeypatch):
    """The trial did it without a word, and on a busy machine its deadline came first."""

    def build(op, tick):
        tick()
        raise UserError(f"asked for {op}")

    monkeypatch.setattr(executor, "build_op", build)
    adam = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    wanted = TrialRequest(target="ok.py", candidate={}, ds_config=adam, world_size=2)
    found = SimpleNamespace(notes=[], baseline=Candidate(micro_batch_size=2), request=lambda _: wanted)
    monkeypatch.setattr(plan, "plan", lambda *_: found)
    done = called("check", "ok.py", cwd=warm)
    assert done.returncode == 2 and "asked for fused_adam" in done.stderr
    assert "DeepSpeed's fused_adam is being compiled, once on this machine" in done.stdout + done.stderr


def test_a_second_run_at_the_same_time_is_refused_with_the_number_of_the_first(finished):
    folder, _ = finished
    with study_lock(folder / "studies" / "small"):
        assert f"process {os.getpid()}" in one_sentence(called("run", "small.yaml", cwd=folder))


@pytest.mark.system
@pytest.mark.smoke
def test_the_exported_json_trains_under_torchrun(finished, tmp_path):
    folder, file = finished[0], tmp_path / "ds_config.json"
    assert called("export", "small", "-o", str(file), cwd=folder).returncode == 0
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(BENCHMARKS / "plain_trial.py"), str(folder / "ok.py"), str(file), "5"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": scratch}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    times = json.loads(done.stdout.partition("STEPS ")[2].splitlines()[0])
    assert len(times) == 5 and json.loads(file.read_text())["gradient_accumulation_steps"] == 1


def test_status_and_ls_know_the_study(finished):
    folder, _ = finished
    assert json.loads(called("status", "small", "--json", cwd=folder).stdout)["outcomes"]["complete"] >= 1
    assert re.search("no study runs now.*: small", one_sentence(called("status", cwd=folder)))
    assert "no study lies in" in one_sentence(called("status", cwd=folder / "studies"))
    lines = (folder / "studies" / "small" / "trials" / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["run"] > 0
    assert called("ls", "studies", cwd=folder).stdout.split()[0] == "small"


def test_check_says_what_would_be_tuned_and_what_would_not(warm):
    done = called("check", "ok.py", "--ranks", "2", cwd=warm)
    assert done.returncode == 0 and "candidates can run here" in done.stdout and "fp16" in done.stdout
    assert not (warm / "studies").exists()


@pytest.mark.system
def test_a_study_that_was_stopped_goes_on_and_a_killed_server_costs_a_retry_and_no_trial(models, tmp_path):
    """Ctrl-C in trial 1, SIGTERM in trial 2, then the server's end in trial 3; SIGKILL of the driver: test_chaos.py."""
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    for trial, how, status in ((1, signal.SIGINT, 130), (2, signal.SIGTERM, 143)):
        driver = begun(tmp_path, LONG, trial)
        driver.send_signal(how)
        _, said = driver.communicate(timeout=60)
        assert driver.returncode == status and "this is the best so far. To go on, run" in said
        assert wait_until(lambda: processes_of(tmp_path) == [])
    driver = begun(tmp_path, LONG, 3)
    for server in psutil.Process(driver.pid).children():
        server.kill()
    _, said = driver.communicate(timeout=200)
    assert driver.returncode == 0, said
    assert "trial 3 is measured again: the process that watched the ranks died" in said
    # An interrupted trial is run again under a new number; the one that lost its server kept its own.
    assert [state for _, state in told(tmp_path)] == ["COMPLETE", "FAIL", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    with sqlite3.connect(tmp_path / "studies" / "autotune.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_a_model_that_always_crashes_stops_the_study_with_its_reason(warm):
    with (warm / "ok.py").open("a") as file:
        file.write("\n\ndef loss(model, batch):\n    raise RuntimeError('no such loss')\n")
    (warm / "small.yaml").write_text(STUDY.replace("trials: 3", "trials: 20"))
    assert "no such loss" in one_sentence(called("run", "small.yaml", cwd=warm))
    assert len(told(warm)) == 4


@pytest.mark.system
def test_over_a_stated_memory_some_trials_end_and_the_study_goes_on(models, warm):
    """The model takes 16 MiB for every sample of a micro-batch, and some 100 MiB besides."""
    shutil.copyfile(models / "oom.py", warm / "oom.py")
    (warm / "study.yaml").write_text(
        "{target: oom.py, name: oom, space: [{micro_batch_size: [1, 2, 16, 32]}], base_config: {train_micro_batch_size_per_gpu: 2},"
        " objectives: [latency, memory], global_batch: free, sampler: grid, trials: 6, trial_budget_s: 0.3, finalists: 0}"
    )
    done = called("run", "study.yaml", "--device-memory", "280MiB", "--no-filter", "--json", cwd=warm)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(called("status", "oom", "--json", cwd=warm).stdout)["outcomes"] == {"complete": 2, "oom": 2}
    assert {pick["candidate"]["micro_batch_size"] for pick in found["picks"].values()} <= {1, 2}
    assert all(pick["metrics"]["peak_memory_bytes"] < 280 * 2**20 for pick in found["picks"].values())


@pytest.mark.system
def test_a_model_that_does_not_fit_at_all_ends_with_status_1_and_one_sentence(warm):
    (warm / "small.yaml").write_text(STUDY)
    done = called("run", "small.yaml", "--ranks", "1", "--device-memory", "1KiB", cwd=warm)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("autotune: no configuration fits the device memory")


def test_a_check_that_is_refused_leaves_no_folder(warm, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(warm))
    (warm / "none.yaml").write_text("{target: ok.py, space: [{micro_batch_size: [4096]}]}")
    said = one_sentence(called("check", "none.yaml", "--ranks", "1", cwd=warm))
    assert "the data set has only" in said and not list(warm.glob("autotune-check-*"))


def test_check_of_a_broken_model_names_a_log_that_is_still_there(models, warm):
    said = one_sentence(called("check", str(models / "raises.py"), cwd=warm))
    assert "no pretrained weights" in said
    log = Path(re.search(r"\(see (.*)\)", said)[1])
    assert "FileNotFoundError" in log.read_text()
    shutil.rmtree(log.parents[2])


def test_check_of_a_baseline_that_crashes_says_what_to_do(warm):
    """The loss was given the model where its author took an output, and DeepSpeed's words named neither."""
    (warm / "ok.py").open("a").write("\n\ndef loss(output, batch):\n    return output[0].mean()\n")
    done = called("check", "ok.py", "--ranks", "1", cwd=warm)
    assert done.returncode == 1 and "is not subscriptable. A model.py's loss(model, batch)" in done.stdout
    assert "can run here" not in done.stdout and "would be proposed" in done.stdout
    shutil.rmtree(Path(re.search(r"see (.*)", done.stdout)[1]).parents[2])


@pytest.mark.system
def test_a_model_that_loads_longer_than_a_trial_may_take_is_told_what_gives_it_more_time(warm):
    (warm / "slow.py").write_text(
        "import time\n\n\ndef model():\n    time.sleep(60)\n\n\ndef data():\n    return [1]\n"
    )
    (warm / "slow.yaml").write_text("{target: slow.py, trial_budget_s: 0.5, space: [{micro_batch_size: [1, 2]}]}")
    said = one_sentence(called("check", "slow.yaml", "--ranks", "1", "--trial-deadline", "2s", cwd=warm))
    assert "no end within 2 s; --trial-deadline gives it more time" in said


@pytest.mark.cells(1)
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launch_command_that_is_interrupted_is_ended_with_all_that_it_started(how, status, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune", "run", "echo begun > begun; sleep 300 & sleep 301"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until((tmp_path / "begun").exists)
    driver.send_signal(how)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == status and said.endswith("autotune: stopped\n") and processes_of(tmp_path) == []


def test_a_rank_that_was_held_back_ends_when_its_holder_is_killed(tmp_path):
    """Two ranks are awaited, and one comes; it is not run, and must not wait for ever."""
    (tmp_path / "train.py").write_text("import deepspeed\nopen('it-ran', 'w')\ndeepspeed.initialize()\n")
    rank = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune", "run", f"{rank} {sys.executable} train.py & echo begun > begun; wait"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert wait_until(lambda: (tmp_path / "begun").exists() and len(processes_of(tmp_path)) >= 3)
    driver.kill()
    driver.wait()
    assert wait_until(lambda: processes_of(tmp_path) == []) and not (tmp_path / "it-ran").exists()


@pytest.fixture(scope="module")
def launched(tmp_path_factory, models) -> tuple[Path, str, subprocess.CompletedProcess[str]]:
    """A folder with a study of a launch command that ran to its end."""
    folder = tmp_path_factory.mktemp("launched")
    text = (models / "scripts" / "dict_config.py").read_text()
    # DeepSpeed's shared-memory op would be compiled first, and leave its files in /dev/shm for ever.
    without_op = "import deepspeed\n\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    (folder / "train.py").write_text(text.replace("import deepspeed\n", without_op, 1))
    (folder / "space.yaml").write_text("micro_batch_size: [2, 4]\nprecision: [torch_autocast]\n")
    command = "torchrun --standalone --nproc_per_node 2 train.py --batch_size 4 --steps 30"
    options = ["--space", "space.yaml", "--objective", "latency", "--trials", "2"]
    return folder, command, autotune("run", command, *options, cwd=folder)


@pytest.mark.system
def test_a_launch_command_is_tuned_and_its_study_runs_it_again(launched, warm):
    folder, command, done = launched
    assert done.returncode == 0, done.stderr
    assert processes_of(folder) == []
    written = (folder / "studies" / "train" / "study.yaml").read_text()
    assert f"command: {command}" in written and "target:" not in written
    before = told(folder)
    again = called("run", "studies/train/study.yaml", "--json", cwd=folder)
    assert again.returncode == 0 and told(folder) == before, again.stderr


@pytest.mark.system
def test_the_exported_command_trains_as_the_trial_did(launched):
    folder, _, _ = launched
    exported = called("export", "train", "--trial", "1", "--format", "command", cwd=folder)
    line = exported.stdout.splitlines()[-1]
    request = json.loads((folder / "studies" / "train" / "trials" / "0001" / "request.json").read_text())
    micro = request["candidate"]["micro_batch_size"]
    assert line == f"torchrun --standalone --nproc_per_node 2 train.py --batch_size {micro} --steps 30"
    said = re.search(r"to `deepspeed.initialize` at train.py:(\d+), instead of the dict", exported.stdout)
    script = (folder / "train.py").read_text().splitlines()
    assert said and "initialize(" in script[int(said[1]) - 1], exported.stdout
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "DS_ACCELERATOR": "cpu", "PRINT_LOSSES": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        ran = subprocess.run(
            line, shell=True, cwd=folder, env=environment | {"TMPDIR": scratch}, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip
    # Two ranks write into one pipe, unbuffered, so that lines mix.
    assert ran.returncode == 0 and ran.stdout.count("loss") == 2 * 30, ran.stderr[-2000:]


def test_init_writes_a_study_that_can_be_read_and_never_writes_over_one(tmp_path):
    assert called("init", "first", cwd=tmp_path).returncode == 0
    assert StudySpec.of(tmp_path / "first" / "study.yaml").target == tmp_path / "first" / "model.py"
    assert "exists" in one_sentence(called("init", "first", cwd=tmp_path))


def test_a_preset_is_copied_to_be_changed_and_never_over_a_file(tmp_path):
    assert "--space my.yaml" in called("cp", "batch", "my.yaml", cwd=tmp_path).stdout
    assert StudySpec.of(MODELS / "ok.py", {"space": str(tmp_path / "my.yaml")}).space.parameters
    assert "exists" in one_sentence(called("cp", "zero", "my.yaml", cwd=tmp_path))
    assert "Known" in one_sentence(called("cp", "nothing", "x.yaml", cwd=tmp_path))


@pytest.mark.parametrize("what", ["spaces", "objectives", "samplers", "metrics"])
def test_a_list_has_a_line_for_each_and_says_what_it_is(what, tmp_path):
    rows = json.loads(called("ls", what, "--json", cwd=tmp_path).stdout)
    lines = called("ls", what, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]
    assert all(len(line) < 150 and row["description"] in line for line, row in zip(lines, rows, strict=True))


@pytest.mark.parametrize("warm_server", ["the session's", pytest.param("its own", marks=pytest.mark.system)])
def test_the_doctor_finds_that_trials_can_run_here_and_which_builds_were_stopped(
    executor, tmp_path, monkeypatch, warm_server
):
    """A training without autotune waited without a word for the lock of a build that was killed."""
    if warm_server == "the session's":
        monkeypatch.setattr(executor, "close", lambda: None)
        monkeypatch.setattr(local, "LocalExecutor", lambda *_: executor)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    locks = [tmp_path / "torch_extensions" / "py311_cpu" / name / "lock" for name in ("cpu_adam", "async_io")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(locks[0], (0, 0))
    done = called("doctor", "--json", cwd=tmp_path)
    findings = json.loads(done.stdout)
    found = {finding["what"]: finding["verdict"] for finding in findings}
    assert done.returncode == 0, done.stdout
    assert found["trial"] == "ok" and found["warm server"] == "ok"
    builds = [finding["detail"] for finding in findings if finding["what"] == "op builds"]
    assert len(builds) == 1 and str(locks[0]) in builds[0]  # the other one may still go on


# Mistakes in a command that is to be launched; the others are in test_mistakes.py.
MISTAKES = {
    "no such launcher": (["run", "no-such-launcher --n 2 train.py"], "no-such-launcher: command not found"),
    "its words one by one": (["check", "--", "no-such-launcher", "--n", "2"], "no-such-launcher: command not found"),
    "a command that trains nothing": (["run", "echo 'nothing to do'"], "started no training script"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_launch_command_ends_in_one_sentence(mistake, tmp_path):
    arguments, said = MISTAKES[mistake]
    assert said in one_sentence(called(*arguments, cwd=tmp_path))


def test_a_wrong_option_is_refused_before_the_command_is_run(tmp_path):
    assert "unknown goal 'fast'" in one_sentence(called("run", "touch begun", "--goal", "fast", cwd=tmp_path))
    assert not (tmp_path / "begun").exists()


def test_a_mistake_ends_a_process_with_status_2_and_one_sentence(tmp_path):
    assert "nothing.py" in one_sentence(autotune("run", "nothing.py", cwd=tmp_path))
