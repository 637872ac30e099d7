"""The commonest mistakes as a user makes them: each ends in one sentence with a remedy, and in status 2."""

import contextlib
import errno
import json
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import called, one_sentence
from support.instant import ENVIRONMENT, WORKLOAD, Instant, Watcher, failed, report, runner_of, spec_of

from autotune import session
from autotune.cli import app
from autotune.errors import UserError
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.study.setup import request
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, Outcome, RankReport, TrialResult

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = "import torch\n\ndef model():\n    return torch.nn.Linear(2, 2)\n\ndef data():\n    return []\n"
FILES = {
    "model.py": MODEL,
    "train.py": "import deepspeed\nBATCH = 8\ndeepspeed.initialize()\n",
    "modle.py": "def modle(): ...\ndef data(): ...\n",
    "nodata.py": "def model(): ...\n",
    "value.py": "model = 3\ndef data(): ...\n",
    "broken.py": "def model(:\n",
    "model.ipynb": "{}",
    "key.yaml": "target: model.py\ntrails: 3\n",
    "bad.yaml": "target: model.py\n  trials: [3\n",
    "tab.yaml": "target: model.py\nbase_config:\n\ttrain_batch_size: 8\n",
    "twice.yaml": "target: model.py\ntrials: 3\ntrials: 4\n",
    "knob.yaml": "target: model.py\nspace: {zero_stag: [0, 1]}\n",
    "both.yaml": "target: model.py\nspace: {zero_stage: {choices: [0], range: [0, 1]}}\n",
    "empty.yaml": "target: model.py\nspace: {}\n",
    "bounds.yaml": "target: model.py\nobjectives: [{metric: step_time_s, min: 2}]\nconstraints: {step_time_s: {max: 1}}\n",
    "deadline.yaml": "target: model.py\ntrial_budget_s: 5m\ntrial_deadline_s: 1m\n",
    "metric.yaml": "target: model.py\nobjectives: [{metric: step_tim_s}]\n",
    "secret.yaml": "command: torchrun train.py --api-key ***\n",
    "nowhere.yaml": "command: torchrun train.py\nworking_dir: no-such-folder\n",
    "elsewhere.yaml": "target: train.py\nworking_dir: no-such-folder\n",
    "folder.yaml": "target: model.py\nworking_dir: .\n",
    "mapped.yaml": "target: model.py\narg_mappings: {train_micro_batch_size_per_gpu: --bs}\n",
    "long.yaml": "target: model.py\nspace: {zero_optimization.reduce_bucket_size: {range: [1, 500000000]}}\n",
    "unmanaged.json": '{"managed_gradient_accumulation": false}',
    "typo.json": '{"train_micro_batch_size_per_gpu": 8, "gradient_acumulation_steps": 2}',
    "comma.json": '{\n "train_batch_size": 8,\n}',
    "comment.json": '{"train_batch_size": 8 // samples\n}',
    "batch.json": '{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
    "fp16.json": '{"train_batch_size": 8, "fp16": {"enabled": true}}',
    "offload.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    "nvme.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
    "no.json": '{"train_batch_size": 8, "bf16": {"enabled": "false"}}',
    "hosts": "worker-1 slots=many\n",
    "studies.txt": "",
}  # fmt: skip

# What the user did: the command line, and what the sentence says, what to do among it.
MISTAKES = {
    "no such model": (["run", "mdel.py"], ["there is no file mdel.py", "Did you mean 'model.py'?"]),
    "no model()": (["run", "modle.py"], ["defines no model() (there is 'modle')", "model() -> torch.nn.Module"]),
    "no data": (["run", "nodata.py"], ["neither data() -> Dataset nor batch(n)", "`autotune init` shows how"]),
    "a model that is a value": (["run", "value.py"], ["line 1: model is a value", "make it a function"]),
    "a syntax error in Python": (["run", "broken.py"], ["broken.py: line 1: not Python"]),
    "a forecast by no study": (["predict", "model.py", "--study", "t"], ["--study: there is no study 't' in studies"]),
    "a notebook": (["run", "model.ipynb"], ["a target is a model.py or a study.yaml, or a training script"]),
    "a folder": (["run", "."], ["is a folder", "name the model.py"]),
    "a model with arguments": (["run", "model.py", "--", "--lr", "1"], ["a model.py takes no arguments", "leave out --lr 1"]),
    "a script and its arguments in one": (["run", "train.py --bs 4"], ["autotune run train.py -- --bs 4"]),
    "a configuration for a script": (["run", "train.py", "--base-config", "fp16.json"], ["a script brings its own DeepSpeed"]),
    "a constant that a script has not": (["run", "train.py", "--set", "BACH=4"], ["assigns no such constant", "Did you mean 'BATCH'?"]),
    "a template with a typo": (["run", "train.py", "--", "{micro_batchsize}"], ["is no template", "Did you mean 'micro_batch_size'?"]),
    "a key with a typo": (["run", "key.yaml"], ["key.yaml: line 2: unknown key 'trails'", "Did you mean 'trials'?"]),
    "a tab in YAML": (["run", "tab.yaml"], ["tab.yaml: line 3: not YAML", "indent with spaces"]),
    "brackets that stay open": (["run", "bad.yaml"], ["bad.yaml: line 2"]),
    "a key twice": (["run", "twice.yaml"], ["twice.yaml: line 3: key 'trials' is there twice"]),
    "a knob with a typo": (["run", "knob.yaml"], ["knob.yaml: line 2: space", "Did you mean 'zero_stage'?"]),
    "choices and a range": (["run", "both.yaml"], ["zero_stage: give either `choices: [..]` or `range: [low, high]`"]),
    "an empty space": (["run", "empty.yaml"], ["space: it is empty, so there is nothing to tune"]),
    "a range of every byte": (["run", "long.yaml"], ["more than 1,000,000 values", "power_of_two: true"]),
    "bounds that contradict": (["run", "bounds.yaml"], ["step_time_s: min 2 is above max 1", "change one of them"]),
    "a deadline before the end": (["run", "deadline.yaml"], ["trial_deadline_s: 60 s would end every trial", "a longer deadline"]),
    "a metric with a typo": (["run", "metric.yaml"], ["Did you mean 'step_time_s'?", "See `autotune ls metrics`"]),
    "a preset with a typo": (["run", "model.py", "--space", "bath"], ["--space: unknown 'bath'", "Did you mean 'batch'?", "ls spaces"]),
    "an objective with a typo": (["run", "model.py", "--objective", "latncy"], ["--objective: unknown", "Did you mean 'latency'?"]),
    "a preset's file that is not there": (["run", "model.py", "--space", "knobs.yaml"], ["there is no file", "Did you mean 'knob.yaml'?"]),
    "a comma too many": (["run", "model.py", "--objective", "latency,,"], ["--objective: 'latency,,' has a comma too many"]),
    "a preset in two options": (["run", "model.py", "--space", "zero", "--space", "batch,zero"], ["--space: 'zero' is there twice"]),
    "an option twice": (["run", "model.py", "--trials", "3", "--trials", "5"], ["--trials is there twice; give it once"]),
    "a flag and its opposite": (["run", "model.py", "--branch", "--no-branch"], ["--branch/--no-branch is there twice; give it once"]),
    "a pick and a trial": (["project", "--pick", "drop_in", "--trial", "1"], ["project: give --pick or --trial, not both"]),
    "a sampler with a typo": (["run", "model.py", "--sampler", "tpee"], ["--sampler: unknown 'tpee'", "Did you mean 'tpe'?"]),
    "a space without a name": (["run", "model.py", "--space", ""], ["--space: it is empty"]),
    "objectives without a name": (["run", "model.py", "--objective", ""], ["--objective: at least one is needed"]),
    "an objective twice": (["run", "model.py", "--objective", "latency,latency"], ["--objective: name 'latency' is there twice"]),
    "a constant of a model": (["run", "model.py", "--set", "BATCH={micro_batch_size}"], ["takes no arguments; leave out --set BATCH"]),
    "no ranks": (["run", "model.py", "--ranks", "0"], ["--ranks"]),
    "no trials": (["run", "model.py", "--trials", "0"], ["--trials: should be greater than or equal to 1"]),
    "a memory that is none": (["run", "model.py", "--device-memory", "4 apples"], ["--device-memory: '4 apples'", "as in '4GiB'", "MiB"]),
    "a memory without its unit": (["run", "model.py", "--device-memory", "8"], ["'8' is 8 bytes", "state a unit, as in 8GiB"]),
    "the same of cards": (["advise", "7B", "--gpus", "H100", "--device-memory", "80"], ["--device-memory: '80' is 80 bytes"]),
    "an engine that runs the driver": (
        ["run", "model.py", "--executor", "kubernetes"], ["--executor: in Kubernetes", "`autotune submit TARGET --executor kubernetes`"],
    ),
    "a duration that is none": (["run", "model.py", "--time-budget", "soon"], ["--time-budget: 'soon'", "as in '1h30m'"]),
    "a batch that is none": (["run", "model.py", "--global-batch", "64..8"], ["keep, free, or a range of samples such as 8..64"]),
    "a name that leaves its folder": (["run", "model.py", "--study", "../up"], ["--study: '../up' cannot name a study"]),
    "a name too long": (["run", "model.py", "--study", "x" * 300], ["too long"]),
    "a name that is an option": (["run", "model.py", "--study=-rf"], ["cannot name a study", "a dash"]),
    "a name that is the database": (["run", "model.py", "--study", "autotune.db"], ["choose one with another ending"]),
    "ranks that nodes cannot share": (
        ["run", "model.py", "--executor", "slurm", "--ranks", "3", "--nodes", "2"], ["3 ranks cannot be spread evenly", "give a multiple"],
    ),
    "an option of an engine": (["run", "model.py", "--executor-option", "partitoin=gpu"], ["unknown to local", "Known: none"]),
    "a hostfile": (["run", "model.py", "--hostfile", "hosts"], ["hosts:1: `HOST slots=N` is needed, not 'worker-1 slots=many'"]),
    "steps that a loop counts": (
        ["run", "model.py", "--base-config", "unmanaged.json"], ["managed_gradient_accumulation: it leaves to a loop of your own"],
    ),
    "a typo in DeepSpeed's JSON": (["run", "model.py", "--base-config", "typo.json"], ["Did you mean 'gradient_accumulation_steps'?"]),
    "a comma too many in JSON": (["run", "model.py", "--base-config", "comma.json"], ["not JSON", "remove the comma"]),
    "a comment in JSON": (["run", "model.py", "--base-config", "comment.json"], ["at line 1, column 24", "JSON has no comments"]),
    "YAML for JSON": (["run", "model.py", "--base-config", "key.yaml"], ["key.yaml: not JSON: Expecting value at line 1, column 1"]),
    "a truth value in quotation marks": (["run", "model.py", "--base-config", "no.json"], ["bf16.enabled: true or false is needed"]),
    "a secret that was not kept": (["run", "secret.yaml"], ["*** stands for a secret", "a variable of the environment"]),
    "a folder that is not there": (["run", "nowhere.yaml"], ["working_dir: there is no folder"]),
    "a folder that a model.py would not run in": (["run", "folder.yaml"], ["working_dir: it is for scripts; leave it out"]),
    "a flag that a model.py does not take": (["run", "mapped.yaml"], ["arg_mappings: it is for scripts; leave it out"]),
    "the same for a script": (["run", "elsewhere.yaml"], ["working_dir: there is no folder"]),
    "a database of no kind": (["run", "model.py", "--storage", "nosuchdb://x"], ["storage nosuchdb://x", "for example sqlite:///"]),
    "a database that is none": (["run", "model.py", "--storage", "sqlite:///key.yaml"], ["not a database"]),
    "a database without its driver": (["run", "model.py", "--storage", "oracle://ann:hunter2@x/y"], ["driver for oracle is not installed"]),
    "a database that would not stay": (["run", "model.py", "--storage", "sqlite://"], ["gone at the end of the run", "name a file"]),
    "a folder that cannot be made": (["run", "model.py", "--storage", "sqlite:///model.py/x.db"], ["name a folder that you may write"]),
    "nothing to tell of": (["explain", "x", "--storage", "sqlite:///none.db"], ["no database at none.db: nothing has been tuned"]),
    "a study that is not there": (["explain", "smal"], ["no study 'smal'", "Known: s."]),
    "the same in the history": (["history", "smal"], ["no study 'smal'", "Known: s."]),
    "advice into a file of the user's": (["advise", "7B", "--gpus", "A100-80", "-o", "model.py"], ["model.py exists; name another"]),
    "files of a report that is printed": (["report", "s", "--json", "-o", "rep"], ["--json prints", "leave out"]),
    "the same to export": (["export", "smal"], ["no study 'smal'", "Known: s."]),
    "a pick that is none": (["export", "s", "--pick", "best"], ["has no pick 'best'", "Known: recommended"]),
    "a format that is none": (["export", "s", "--format", "deepsped"], ["Did you mean 'deepspeed'?"]),
    "why not, of no knob": (["explain", "s", "--why-not", "zero_stag=3"], ["Did you mean 'zero_stage'?"]),
    "why not, of no value": (["explain", "s", "--why-not", "zero_stage"], ["KEY=VALUE is needed, as in zero_stage=3"]),
    "a list of no kind": (["ls", "spacez"], ["Did you mean 'spaces'?"]),
    "a rule that is none": (["schedule", "add", "s", "--every", "7 moons"], ["--every: '7 moons'", "1h30m"]),
    "a crontab of four fields": (["schedule", "add", "s", "--cron", "0 3 * *"], ["it takes minute, hour, day, month and weekday"]),
    "a token that is quickly guessed": (["dashboard", "--port", "0"], ["AUTOTUNE_DASHBOARD_TOKEN: at least 16"]),
    "a key without an option": (["run", "model.py", "--constraint", "memory<1"], ["state `constraints` in study.yaml", "{max: 4GiB}"]),
    "a number that is none, of ranks": (["scale", "model.py", "--ranks", "1-4"], ["as in --ranks 1,2,4"]),
    "a cluster without its network": (["project", "--devices", "16"], ["--inter-bandwidth, as in 50GB/s"]),
    "a command that is none": (["retune", "s", "--on-change", ""], ["--on-change: the command is empty", "leave the option out"]),
    "a gain that is none": (["retune", "s", "--min-gain", "much"], ["--min-gain: 'much' is not a share such as 0.01 or 1%"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study that has ended."""
    folder = tmp_path_factory.mktemp("finished")
    runner = runner_of(folder, Instant(), trials=3, objectives=["throughput"], finalists=0)
    runner.run()
    runner.storage.engine.dispose()
    return folder


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A working directory with the files of all mistakes, and with that study."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "studies").symlink_to(finished)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_DASHBOARD_TOKEN", "guess-me")
    monkeypatch.setattr(LocalExecutor, "launch", lambda _: None)  # which a run does before it looks at the database
    return tmp_path


def refused(*arguments: str) -> str:
    """Run a command that refuses its input; return the sentence with which it does."""
    done = called(*arguments, cwd=Path.cwd())
    sentence = one_sentence(done)
    assert sentence.startswith("autotune: ")
    assert all(line.startswith("- ") for line in done.stderr.strip().splitlines()[:-1]), done.stderr
    return sentence


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_a_sentence_that_says_what_to_do(mistake, place):
    arguments, fragments = MISTAKES[mistake]
    sentence = refused(*arguments)
    assert [fragment for fragment in fragments if fragment not in sentence] == [], sentence
    assert "hunter2" not in sentence


# Mistakes that show only once the target was loaded.


class Machine(Instant):
    """A machine that loads every target at once, and says of it what a test wants.

    Args:
        workload: What the target is.
        ending: How it ends where it cannot be loaded.
        log: What its rank then wrote.
        cold_reason: Why its trials start slowly.
    """

    mark = ""

    def __init__(
        self, workload=WORKLOAD, ending: RankReport | None = None, log: str = "", cold_reason: str = ""
    ) -> None:
        super().__init__()
        self.workload, self.ending, self.log, self.cold_reason = workload, ending, log, cold_reason

    def submit(self, folder: TrialDir) -> Instant:
        request = read_record(folder.request, TrialRequest)
        if request.mode == "measure":
            return super().submit(folder)
        loads = request.mode in ("inspect", "probe") and self.ending is None
        write_record(folder.workload, self.workload, sync=False)
        folder.log(0).write_text(self.log)
        ended = (
            RankReport(rank=0, outcome=Outcome.COMPLETE, phase="done")
            if loads
            else self.ending or failed(Outcome.CRASHED, "not here")
        )
        write_record(folder.report(0), ended, sync=False)
        write_record(folder.exit, Exit(codes={0: 0 if loads else 1}, wall_s=0.1), sync=False)
        return self


@pytest.fixture
def machine(monkeypatch):
    """Puts a machine in the place of the one that the tests run on."""

    def put(given: Machine) -> None:
        monkeypatch.setattr(request, "executor_for", lambda *_, **__: contextlib.nullcontext(given))

    return put


ONE_GPU = replace(WORKLOAD, environment=replace(ENVIRONMENT, accelerator="cuda", n_devices=1, fp16=True))
USAGE = "usage: train.py [-h] --data DATA\ntrain.py: error: the following arguments are required: --data\n"
LOADED = {
    "a batch that does not come out": (
        Machine(), ["model.py", "--base-config", "batch.json", "--ranks", "2"],
        ["train_batch_size 33 is not micro-batch 4 x accumulation 2 x 2 ranks", "change it or pass --ranks"],
    ),
    "fp16 on a CPU": (Machine(), ["model.py", "--base-config", "fp16.json"], ["no fp16 training", "use bf16 or torch_autocast"]),
    "offload on a CPU": (Machine(), ["model.py", "--base-config", "offload.json"], ["the baseline cannot run here", "nothing to move"]),
    "offload to nowhere": (Machine(ONE_GPU), ["model.py", "--base-config", "nvme.json"], ["needs its nvme_path in the base config"]),
    "more ranks than devices": (Machine(ONE_GPU), ["model.py", "--ranks", "4"], ["--ranks asks for 4 ranks: this machine has 1 devices"]),
    "more ranks than anything": (Machine(), ["model.py", "--ranks", "60000"], ["more than this machine can hold at once", "give fewer"]),
    "a batch that the ranks do not divide": (
        Machine(), ["model.py", "--ranks", "3", "--global-batch", "keep", "--base-config", "fp16.json"],
        ["train_batch_size 8 is no multiple of 3 ranks"],
    ),
    "a space of nothing that runs": (
        Machine(), ["model.py", "--space", "fp16.yaml"], ["no candidate of the search space can run here", "use bf16 or torch_autocast"],
    ),
    "data() that is a loader": (
        Machine(ending=failed(Outcome.CRASHED, "model.py: data() returned a DataLoader; return its dataset")), ["model.py"],
        ["model.py cannot be loaded", "return its dataset", "rank-0.log"],
    ),
    "a DeepSpeed that cannot be imported": (
        Machine(
            ending=failed(Outcome.CRASHED, "rank 0 exited with status 1"),
            cold_reason="DeepSpeed could not be imported ahead: MissingCUDAException: CUDA_HOME does not exist",
        ), ["model.py"], ["model.py cannot be loaded: rank 0 exited with status 1; DeepSpeed could not be imported", "CUDA_HOME"],
    ),
    "a script without its arguments": (
        Machine(ending=failed(Outcome.CRASHED, "the script exited with status 2"), log=USAGE), ["train.py"],
        ["the following arguments are required: --data", "autotune run train.py -- ITS ARGUMENTS"],
    ),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("mistake", LOADED)
def test_a_mistake_that_shows_in_the_target_ends_so_too(mistake, place, machine):
    given, arguments, fragments = LOADED[mistake]
    (place / "fp16.yaml").write_text("precision: [fp16]\n")
    machine(given)
    sentence = refused("run", *arguments, "--study", "another", "--storage", f"sqlite:///{place}/another.db")
    assert [fragment for fragment in fragments if fragment not in sentence] == [], sentence


def test_a_batch_that_is_not_what_was_asked_for_is_said_of_the_baseline(tmp_path):
    """What `batch(n)` of the zoo's `wrong_batch.py` ends with."""
    watcher = Watcher()

    def wrong(candidate: Candidate) -> RankReport:
        return report(candidate, outcome=Outcome.NOT_APPLIED, reason="micro_batch_size: 8 was asked for, 4 ran")

    with contextlib.suppress(UserError):
        runner_of(tmp_path, Instant(wrong), trials=3, objectives=["throughput"], watcher=watcher).run()
    assert any(
        "the baseline did not complete (not applied: micro_batch_size: 8 was asked for, 4 ran)" in text
        for text in watcher.said
    )


def test_the_same_name_for_another_study_is_refused_with_both_ways_out(finished):
    with pytest.raises(
        UserError, match=r"exists, but differs in space.*another --study name, or start over with --fresh"
    ):
        runner_of(finished, Instant(), space=[{"micro_batch_size": [2, 4]}], objectives=["throughput"]).open()


def test_a_folder_of_studies_that_is_a_file_is_named(place):
    (place / "studies").unlink()
    (place / "studies").write_text("")
    assert re.search(r"studies.*(folder|directory|exists)", refused("run", "model.py"))


def test_a_port_in_use_is_named_with_the_way_out(place, monkeypatch):
    monkeypatch.delenv("AUTOTUNE_DASHBOARD_TOKEN")
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sentence = refused("dashboard", "--port", str(taken.getsockname()[1]))
    assert "is taken" in sentence and "--port 0 for any that is free" in sentence


def test_values_that_hugging_face_fills_in_are_no_mistake(tmp_path):
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    (tmp_path / "hf.json").write_text(json.dumps(config))
    spec = spec_of(base_config=str(tmp_path / "hf.json"))
    assert spec.global_batch == "free" and not spec.batch_is_configured


def trials_of(folder: Path) -> list[int]:
    study = records.load_study(open_storage(records.default_url(folder)), "s")
    return [trial.number for trial in records.told_trials(study)]


@pytest.mark.process
def test_a_run_that_is_refused_leaves_the_study_as_it_was(finished, place, machine):
    """`--fresh` forgets the trials of a study that can run, not those of one with a typo."""
    before = trials_of(finished)
    refused("run", "key.yaml", "--study", "s", "--fresh")
    machine(Machine())
    assert "33" in refused("run", "model.py", "--study", "s", "--fresh", "--base-config", "batch.json", "--ranks", "2")
    said = refused("run", "model.py", "--study", "s", "--space", "zero")
    assert re.search(r"differs in .*--fresh", said), said
    assert trials_of(finished) == before and len(before) == 3 and not (finished / "s" / "study.yaml").exists()


@pytest.mark.parametrize(("quiet_s", "hangs"), [(20.0, True), (2.0, False)])
def test_a_time_budget_that_ranks_hung_through_is_not_said_to_be_too_short(quiet_s, hangs, tmp_path):
    folder = tmp_path / "trials" / "inspect"
    folder.mkdir(parents=True)
    assert session._too_little_time(30.0, tmp_path, 0.0).endswith("measured; give more time")
    events = folder / "events.jsonl"
    events.write_text('{"rank": 0, "phase": "warmup"}\n')
    os.utime(events, (time.time() - quiet_s,) * 2)
    said = session._too_little_time(30.0, tmp_path, 0.0)
    assert ("did and said nothing for the last 20 s" in said and "inspect/rank-0.log" in said) is hangs
    # What an earlier run left long ago is no sign of this one; where it measured, its time is what is spent.
    assert "hang" not in session._too_little_time(30.0, tmp_path, time.time())
    assert "(a number is seconds: 3m are minutes)" in session._too_little_time(3.0, tmp_path, time.time())
    write_record(tmp_path / "trials" / "0000" / "result.json", TrialResult(outcome=Outcome.COMPLETE))
    assert "in which earlier runs count, is spent; a larger --time-budget goes on" in session._too_little_time(
        30.0, tmp_path, time.time()
    )


def test_a_working_directory_that_was_removed_is_named(monkeypatch, capsys):
    """It was an error of autotune itself."""

    def gone():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2 and "autotune: the working directory was removed; change to" in capsys.readouterr().err
