"""The command line as a user types it: real studies on the smallest model, and every mistake as one sentence."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.commands import autotune, one_sentence, processes_of, told
from support.paths import BENCHMARKS, MODELS

from autotune.cli.app import commands_of
from autotune.study.lock import study_lock
from autotune.study.spec.spec import StudySpec

pytestmark = pytest.mark.process

STUDY = """
target: ok.py
name: small
ranks: 2
base_config: {train_micro_batch_size_per_gpu: 8}
space: [{micro_batch_size: [4, 8, 16]}, {precision: [fp32, bf16]}, {zero_stage: [0, 1, 2]}]
global_batch: free
objectives: [latency, throughput, memory]
trials: 4
trial_budget_s: 0.3
stop_trials: false # whether a trial is beaten depends on what else the machine does
trial_deadline_s: 60
finalists: 1
repeats: 1
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, models) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a study that ran to its end."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copyfile(models / "ok.py", folder / "ok.py")
    (folder / "small.yaml").write_text(STUDY)
    return folder, autotune("run", "small.yaml", cwd=folder)


def test_help_names_every_command_and_imports_nothing_heavy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autotune.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in commands_of())
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "deepspeed", "optuna", "numpy", "pydantic", "rich", "sqlalchemy"}


def test_a_study_ends_with_an_answer_and_its_files(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert "recommended" in done.stdout and "speed-up" in done.stdout
    study = folder / "studies" / "small"
    names = {path.name for path in study.iterdir()}
    assert {
        "study.yaml",
        "environment.json",
        "front.json",
        "recommended.json",
        "ds_config.json",
        "README.md",
        "report.html",
    } <= names
    found = json.loads((study / "recommended.json").read_text())
    pick = found["picks"]["recommended"]
    keys = {
        "trial",
        "candidate",
        "ds_config",
        "metrics",
        "ci95",
        "speedup",
        "speedup_ci95",
        "reasons",
        "script_side_changes",
    }
    assert set(pick) == keys and "drop_in" in found["picks"] and set(found["baseline"]) == keys
    assert all(
        set(point) == keys - {"speedup", "speedup_ci95", "reasons", "script_side_changes"}
        for point in json.loads((study / "front.json").read_text())
    )
    assert json.loads((study / "ds_config.json").read_text()) == pick["ds_config"]


def test_a_finished_study_leaves_no_process(finished):
    assert processes_of(finished[0]) == []


def test_running_again_adds_only_what_the_budget_lacks(finished):
    folder, _ = finished
    before = told(folder)
    done = autotune("run", "small.yaml", "--trials", str(len(before) + 1), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["study"]["n_trials"] == len(before) + 1
    assert told(folder)[: len(before)] == before


def test_a_study_is_exported_for_other_tools(finished):
    folder, _ = finished
    config = json.loads(autotune("export", "small", cwd=folder).stdout)
    assert config["train_micro_batch_size_per_gpu"] in (4, 8, 16)
    assert "--per_device_train_batch_size" in autotune("export", "small", "--format", "hf-args", cwd=folder).stdout
    assert (
        "distributed_type: DEEPSPEED"
        in autotune("export", "small", "--trial", "1", "--format", "accelerate", cwd=folder).stdout
    )
    assert "Known" in one_sentence(autotune("export", "small", "--pick", "best", cwd=folder))


def test_its_own_study_yaml_reproduces_it_from_anywhere(finished, tmp_path):
    folder, _ = finished
    before = told(folder)
    done = autotune("run", str(folder / "studies" / "small" / "study.yaml"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["study"]["name"] == "small"
    assert told(folder) == before and not list(tmp_path.iterdir())


def test_a_run_that_is_refused_leaves_the_study_as_it_was(finished):
    """`--fresh` forgets the trials of a study that can run, not those of one with a typo."""
    folder, _ = finished
    (folder / "batch.json").write_text('{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}')
    spec, before = (folder / "studies" / "small" / "study.yaml").read_text(), told(folder)
    assert re.search(
        "differs in space, .*--fresh", one_sentence(autotune("run", "small.yaml", "--space", "zero", cwd=folder))
    )
    assert "train_batch_size 7" in one_sentence(
        autotune("run", "small.yaml", "--fresh", "--base-config", "batch.json", cwd=folder)
    )
    assert (folder / "studies" / "small" / "study.yaml").read_text() == spec
    assert told(folder) == before


def test_a_second_run_at_the_same_time_is_refused_with_the_number_of_the_first(finished):
    folder, _ = finished
    with study_lock(folder / "studies" / "small"):
        assert f"process {os.getpid()}" in one_sentence(autotune("run", "small.yaml", cwd=folder))


def test_the_exported_json_trains_under_torchrun(finished):
    folder, _ = finished
    assert autotune("export", "small", "-o", "ds_config.json", cwd=folder).returncode == 0
    config = json.loads((folder / "ds_config.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        script = BENCHMARKS / "plain_trial.py"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": scratch}
        done = subprocess.run(
            [*command, str(folder / "ok.py"), str(folder / "ds_config.json"), "5"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    times = json.loads(done.stdout.partition("STEPS ")[2].splitlines()[0])
    assert len(times) == 5 and config["gradient_accumulation_steps"] == 1


def test_status_and_ls_know_the_study(finished):
    folder, _ = finished
    assert json.loads(autotune("status", "small", "--json", cwd=folder).stdout)["outcomes"]["complete"] >= 1
    assert re.search("no study runs now.*: small", one_sentence(autotune("status", cwd=folder)))
    assert "no study lies in" in one_sentence(autotune("status", cwd=folder / "studies"))
    lines = (folder / "studies" / "small" / "trials" / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["run"] > 0  # of whichever run was the last
    assert autotune("ls", "studies", cwd=folder).stdout.split() == ["small"]


def test_check_says_what_would_be_tuned_and_what_would_not(models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    done = autotune("check", "ok.py", "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 0 and "candidates can run here" in done.stdout and "fp16" in done.stdout
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])  # SIGKILL: test_chaos.py
def test_a_stopped_study_goes_on_where_it_was(how, status, models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "small.yaml").write_text(STUDY.replace("trial_budget_s: 0.3", "trial_budget_s: 2"))
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "run", "small.yaml"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and not (tmp_path / "studies/small/trials/0001/events.jsonl").exists():
        time.sleep(0.05)
    driver.send_signal(how)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == status and "this is the best so far. To go on, run" in said
    until = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
    done = autotune("run", "small.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["study"]["n_trials"] == 4
    assert [state for _, state in told(tmp_path)].count("RUNNING") == 0
    with sqlite3.connect(tmp_path / "studies" / "autotune.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_a_model_that_always_crashes_stops_the_study_with_its_reason(models, tmp_path):
    text = (models / "ok.py").read_text() + "\n\ndef loss(model, batch):\n    raise RuntimeError('no such loss')\n"
    (tmp_path / "ok.py").write_text(text)
    (tmp_path / "small.yaml").write_text(STUDY.replace("trials: 4", "trials: 20"))
    assert "no such loss" in one_sentence(autotune("run", "small.yaml", cwd=tmp_path))
    assert len(told(tmp_path)) == 4


def test_over_a_stated_memory_some_trials_end_and_the_study_goes_on(models, tmp_path):
    """The model takes 16 MiB for every sample of a micro-batch, and some 100 MiB besides."""
    shutil.copyfile(models / "oom.py", tmp_path / "oom.py")
    (tmp_path / "study.yaml").write_text(
        "{target: oom.py, name: oom, space: [{micro_batch_size: [1, 2, 16, 32]}], base_config: {train_micro_batch_size_per_gpu: 2},"
        " objectives: [latency, memory], global_batch: free, sampler: grid, trials: 6, trial_budget_s: 0.3, finalists: 1, repeats: 1}"
    )
    done = autotune("run", "study.yaml", "--device-memory", "280MiB", "--no-filter", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(autotune("status", "oom", "--json", cwd=tmp_path).stdout)["outcomes"] == {"complete": 2, "oom": 2}
    assert {pick["candidate"]["micro_batch_size"] for pick in found["picks"].values()} <= {1, 2}
    assert all(pick["metrics"]["peak_memory_bytes"] < 280 * 2**20 for pick in found["picks"].values())


def test_a_model_that_does_not_fit_at_all_ends_with_status_1_and_one_sentence(models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "small.yaml").write_text(STUDY)
    done = autotune("run", "small.yaml", "--ranks", "1", "--device-memory", "1KiB", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("autotune: no configuration fits the device memory")
    assert "Traceback" not in done.stderr + done.stdout


def test_a_killed_server_costs_a_retry_and_no_trial(models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "small.yaml").write_text(STUDY.replace("trial_budget_s: 0.3", "trial_budget_s: 2"))
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "run", "small.yaml"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and not (tmp_path / "studies/small/trials/0001/events.jsonl").exists():
        time.sleep(0.02)
    for server in psutil.Process(driver.pid).children():
        server.kill()
    _, said = driver.communicate(timeout=200)
    assert driver.returncode == 0, said
    assert "trial 1 is measured again: the process that watched the ranks died" in said
    assert told(tmp_path) == [(number, "COMPLETE") for number in range(4)]


def test_check_of_a_broken_model_names_a_log_that_is_still_there(models, tmp_path):
    said = one_sentence(autotune("check", str(models / "raises.py"), cwd=tmp_path))
    assert "no pretrained weights" in said
    log = Path(re.search(r"\(see (.*)\)", said)[1])
    assert "FileNotFoundError" in log.read_text()
    shutil.rmtree(log.parents[2])


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launch_command_that_is_interrupted_is_ended_with_all_that_it_started(how, status, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "run", "echo begun > begun; sleep 300 & sleep 301"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while time.monotonic() < until and not (tmp_path / "begun").exists():
        time.sleep(0.05)
    driver.send_signal(how)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == status and "nothing to keep" in said and processes_of(tmp_path) == []


def test_a_rank_that_was_held_back_ends_when_whoever_holds_it_is_killed(tmp_path):
    """Two ranks are awaited, and one comes; it is not run, and must not wait for ever."""
    (tmp_path / "train.py").write_text("import deepspeed\nopen('it-ran', 'w')\ndeepspeed.initialize()\n")
    rank = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    driver = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "run", f"{rank} {sys.executable} train.py & echo begun > begun; wait"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 60
    while time.monotonic() < until and not ((tmp_path / "begun").exists() and len(processes_of(tmp_path)) >= 3):
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    until = time.monotonic() + 15
    while time.monotonic() < until and processes_of(tmp_path):
        time.sleep(0.1)
    assert processes_of(tmp_path) == [] and not (tmp_path / "it-ran").exists()


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


def test_a_launch_command_is_tuned_and_its_study_runs_it_again(launched):
    folder, command, done = launched
    assert done.returncode == 0, done.stderr
    written = (folder / "studies" / "train" / "study.yaml").read_text()
    assert f"command: {command}" in written and "target:" not in written
    before = told(folder)
    again = autotune("run", "studies/train/study.yaml", "--json", cwd=folder)
    assert again.returncode == 0 and told(folder) == before, again.stderr
    assert processes_of(folder) == []


def test_the_exported_command_trains_as_the_trial_did(launched):
    folder, _, _ = launched
    exported = autotune("export", "train", "--trial", "1", "--format", "command", cwd=folder)
    line = exported.stdout.splitlines()[-1]
    micro = json.loads((folder / "studies" / "train" / "trials" / "0001" / "request.json").read_text())["candidate"][
        "micro_batch_size"
    ]
    assert line == f"torchrun --standalone --nproc_per_node 2 train.py --batch_size {micro} --steps 30"
    assert "# No flag carries it: ds_config.json takes the place of the configuration in the script." in exported.stdout
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "PRINT_LOSSES": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        ran = subprocess.run(
            line,
            shell=True,
            cwd=folder,
            env=environment | {"TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    # Two ranks write into one pipe, unbuffered, so that lines mix.
    assert ran.returncode == 0 and ran.stdout.count("loss") == 2 * 30, ran.stderr[-2000:]


def test_init_writes_a_study_that_can_be_read_and_never_writes_over_one(tmp_path):
    assert autotune("init", "first", cwd=tmp_path).returncode == 0
    assert StudySpec.of(tmp_path / "first" / "study.yaml").target == tmp_path / "first" / "model.py"
    assert "exists" in one_sentence(autotune("init", "first", cwd=tmp_path))


def test_a_preset_is_copied_to_be_changed_and_never_over_a_file(tmp_path):
    assert "--space my.yaml" in autotune("cp", "batch", "my.yaml", cwd=tmp_path).stdout
    assert StudySpec.of(MODELS / "ok.py", {"space": str(tmp_path / "my.yaml")}).space.parameters
    assert "exists" in one_sentence(autotune("cp", "zero", "my.yaml", cwd=tmp_path))


@pytest.mark.parametrize("what", ["spaces", "objectives", "samplers", "metrics"])
def test_a_list_has_a_line_for_each_and_says_what_it_is(what, tmp_path):
    rows = json.loads(autotune("ls", what, "--json", cwd=tmp_path).stdout)
    lines = autotune("ls", what, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]
    assert all(len(line) < 150 and row["description"] in line for line, row in zip(lines, rows, strict=True))


def test_the_doctor_finds_that_trials_can_run_here(tmp_path):
    done = autotune("doctor", "--no-build", "--json", cwd=tmp_path)
    found = {finding["what"]: finding["verdict"] for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["trial"] == "ok" and found["warm server"] == "ok"


MISTAKES = {
    "no such file": (["run", "nothing.py"], "nothing.py"),
    "a folder": (["run", "."], "folder"),
    "no model": (["run", "empty.py"], "model()"),
    "syntax": (["run", "broken.py"], "line 1"),
    "unknown key": (["run", "key.yaml"], "'trails'"),
    "bad yaml": (["run", "bad.yaml"], "line 2"),
    "unknown preset": (["run", "ok.py", "--space", "bath"], "'batch'"),
    "unknown objective": (["run", "ok.py", "--objective", "speed"], "latency"),
    "unknown sampler": (["run", "ok.py", "--sampler", "tpee"], "'tpe'"),
    "batch": (["run", "ok.py", "--global-batch", "many"], "keep"),
    "memory": (["run", "ok.py", "--device-memory", "4 apples"], "GiB"),
    "ranks": (["run", "ok.py", "--ranks", "0"], "--ranks"),
    "trials": (["run", "ok.py", "--trials", "0"], "--trials"),
    "a name that leaves the folder": (["run", "ok.py", "--study", "../up"], "name"),
    "typo in DeepSpeed's JSON": (["run", "ok.py", "--base-config", "typo.json"], "gradient_accumulation_steps"),
    "not JSON": (["run", "ok.py", "--base-config", "key.yaml"], "not JSON"),
    "storage": (["run", "ok.py", "--storage", "nosuchdb://x"], "storage"),
    "a database in memory": (["run", "ok.py", "--storage", "sqlite://"], "gone at the end"),
    "a database that is none": (["run", "ok.py", "--storage", "sqlite:///key.yaml"], "not a database"),
    "a name too long": (["run", "ok.py", "--study", "x" * 300], "too long"),
    "no study": (["status", "small"], "nothing has been tuned"),
    "no studies": (["ls"], "nothing has been tuned"),
    "pick and trial": (["export", "small", "--pick", "drop_in", "--trial", "1"], "not both"),
    "what to list": (["ls", "spacez"], "spaces"),
    "no such launcher": (["run", "no-such-launcher --n 2 train.py"], "no-such-launcher: command not found"),
    "the same in words of its own": (
        ["check", "--", "no-such-launcher", "--n", "2"],
        "no-such-launcher: command not found",
    ),
    "a command that trains nothing": (["run", "echo 'nothing to do'"], "started no training script"),
    "a script and its arguments in one": (["run", "ok.py --bs 4"], "autotune run ok.py -- --bs 4"),
    "preset to copy": (["cp", "nothing", "x.yaml"], "Known"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence(mistake, models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def model(:\n")
    (tmp_path / "key.yaml").write_text("target: ok.py\ntrails: 3\n")
    (tmp_path / "bad.yaml").write_text("target: ok.py\n  trials: [3\n")
    (tmp_path / "typo.json").write_text('{"train_micro_batch_size_per_gpu": 8, "gradient_acumulation_steps": 2}')
    arguments, said = MISTAKES[mistake]
    assert said in one_sentence(autotune(*arguments, cwd=tmp_path))
