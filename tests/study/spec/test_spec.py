"""Study files: defaults, paths, flags over files, amounts, and the file that is written back."""

import subprocess
import sys

import pytest
import yaml

from autotune.errors import SpecError, UserError
from autotune.executors.ssh import read_hostfile
from autotune.scoring.objective import Constraint
from autotune.study.spec.presets import GOALS
from autotune.study.spec.settings import SETTINGS
from autotune.study.spec.spec import StudySpec


def test_a_bare_model_gets_the_documented_defaults(target):
    spec = StudySpec.of(target)
    assert (spec.name, spec.target, spec.trials, spec.global_batch) == ("tiny", target, 30, "free")
    assert (spec.executor, spec.n_nodes) == ("local", 1)
    assert not {"executor", "nodes", "hostfile", "executor_options"} & set(yaml.safe_load(spec.to_yaml()))
    assert [objective.name for objective in spec.objectives] == ["latency", "throughput", "convergence"]
    assert spec.goal == "balanced"
    assert {"micro_batch_size", "zero_stage", "precision", "checkpoint_every"} <= set(spec.space.to_data())
    with pytest.raises(ValueError, match="frozen"):
        spec.trials = 3


def test_a_study_is_named_for_its_file_unless_that_is_what_such_files_are_called(target, study):
    other, package = target.with_name("my gpt.py"), target.with_name("__main__.py")
    for path in (other, package):
        path.write_text(target.read_text())
    named = StudySpec.of_target(other).name, StudySpec.of_target(package).name, study().name, study("name: mine").name
    assert named == ("my-gpt", "tiny", "tiny", "mine")


def test_paths_in_a_study_are_relative_to_it_and_those_of_flags_to_the_shell(target, study, monkeypatch):
    (target.parent / "ds.json").write_text('{"train_batch_size": 8}')
    monkeypatch.chdir(target.parent.parent)
    assert study("base_config: ds.json").base_config == {"train_batch_size": 8}
    assert study("", {"base_config": "tiny/ds.json"}).base_config == {"train_batch_size": 8}


def test_flags_go_before_the_file_and_absent_flags_change_nothing(target, study):
    text = "trials: 7\nseed: 3\nexecutor: slurm\n"
    executor = {"executor": "ray", "executor_options": ["address=host:6379", "resources=a:1,b:2"]}
    spec = study(text, {"trials": 9, "seed": None, "space": "zero,precision", **executor})
    assert (spec.trials, spec.seed, spec.executor) == (9, 3, "ray") and "micro_batch_size" not in spec.space
    assert spec.executor_options == {"address": "host:6379", "resources": "a:1,b:2"}
    assert StudySpec.of(target.with_name("study.yaml")).trials == 7


def test_presets_files_and_inline_values_compose(target, study):
    (target.parent / "mine.yaml").write_text("checkpoint_every: [0, 2]\n")
    (target.parent / "tokens.yaml").write_text("metric: tokens_per_s\n")
    spec = study("space: [zero, mine.yaml, {gradient_accumulation_steps: [1, 2]}]")
    assert spec.space["checkpoint_every"].choices == (0, 2)
    assert {"zero_stage", "gradient_accumulation_steps"} <= set(spec.space.to_data())
    spec = study("objectives: [latency, tokens.yaml, {metric: cpu_s_per_step, weight: 2}]")
    assert [(objective.name, objective.metric) for objective in spec.objectives] == [
        ("latency", "step_time_s"), ("tokens", "tokens_per_s"), ("cpu_s_per_step", "cpu_s_per_step"),
    ]  # fmt: skip


def test_a_goal_sets_the_objectives_and_a_flag_replaces_what_the_file_says(study):
    spec = study("goal: memory")
    assert {o.name: o.weight for o in spec.objectives} == {"memory": 1.0, "throughput": 0.5}
    again = spec.target.with_name("again.yaml")
    again.write_text(spec.to_yaml(again.parent))
    assert StudySpec.load(again).objectives == spec.objectives  # the file states both
    assert [o.name for o in study("goal: memory", {"objectives": "latency"}).objectives] == ["latency"]
    flagged = study("objectives: [latency]", {"goal": "cost"})
    assert flagged.goal == "cost" and {o.name for o in flagged.objectives} == set(GOALS["cost"].weights)


def test_quick_is_a_set_of_defaults(study, target):
    spec = study("finalists: 2", {"quick": True})
    assert (spec.trials, spec.finalists, spec.repeats, spec.stop_below, spec.trial_budget_s) == (8, 2, 0, 0.03, 1.0)
    assert "quick: true" in spec.to_yaml()
    written = study("finalists: 2").to_yaml()  # which states what is as by default, too
    (target.parent / "written.yaml").write_text(written)
    again = StudySpec.load(target.parent / "written.yaml", {"quick": True, "repeats": 2})
    assert (again.trials, again.finalists, again.repeats, again.trial_budget_s) == (8, 2, 2, 1.0)
    assert study("quick: true\ntrials: 30", {"quick": True}).trials == 30, (
        "a quick study's file states what is otherwise"
    )


def test_amounts_carry_units(study):
    spec = study(
        "time_budget_s: 1h30m\ntrial_budget_s: 4s\ndevice_memory_bytes: 4GiB\nconstraints: {peak_memory_bytes: {max: 2GiB}}\n"
    )
    assert (spec.time_budget_s, spec.trial_budget_s, spec.device_memory_bytes) == (5400, 4, 4 * 2**30)
    assert spec.constraints == (Constraint(metric="peak_memory_bytes", max=2 * 2**30),)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", "free"),
        ("base_config: {train_batch_size: 8}", "keep"),
        ("base_config: {train_micro_batch_size_per_gpu: 8}", "keep"),
        ("base_config: {train_batch_size: auto}", "free"),
        ("base_config: {bf16: {enabled: true}}", "free"),
        ("base_config: {train_batch_size: 8}\nglobal_batch: free", "free"),
        ("global_batch: 8..64", (8, 64)),
        ("global_batch: 32", (32, 32)),
    ],
)
def test_the_global_batch_is_kept_if_the_user_set_one(study, text, mode):
    assert study(text).global_batch == mode


WHOLE = """
name: everything
space: [batch, zero, buckets, {communication_data_type: [null, fp16], data_types.grad_accum_dtype: [null, "fp32"],
  optimizer.params.lr: [1e-3, 3.0e-4]}]
objectives: [latency, {name: mine, metric: samples_per_s, weight: 2, min: 4, description: "a: b # c"}]
constraints: {peak_memory_bytes: {max: 4GiB}, step_time_s: {min: 1ms, max: 2}}
trials: 12
time_budget_s: 10m
ranks: 8
nodes: 2
executor: slurm
executor_options: {partition: gpu, hold: no}
base_config: {train_batch_size: 8, zero_optimization: {stage: 2, reduce_bucket_size: 5e8}, optimizer: {type: AdamW, params: {lr: 1e-5}}}
global_batch: 8..64
device_memory_bytes: 4GiB
sampler: random
storage: sqlite:///x.db
seed: 5
trial_budget_s: 4s
trial_deadline_s: 1m
min_samples: 100
finalists: 2
repeats: 3
"""


@pytest.mark.parametrize(
    "text", ["", WHOLE, "space: [batch, zero, precision, checkpointing, compression, buckets, offload]"]
)
def test_a_study_is_written_whole_and_read_back_as_it_was(study, target, tmp_path, text):
    spec = study(text)
    for folder in (None, tmp_path / "elsewhere", target.parent):
        path = (folder or tmp_path / "absolute") / "study.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(spec.to_yaml(folder))
        again = StudySpec.load(path, {"name": spec.name})
        assert again == spec and again.to_yaml(folder) == spec.to_yaml(folder)


def test_a_written_study_names_no_preset_and_keeps_numbers_and_switches(study):
    spec = study(WHOLE)
    bucket = spec.base_config["zero_optimization"]["reduce_bucket_size"]
    assert bucket == 500_000_000 and isinstance(bucket, int)
    assert spec.executor_options == {"partition": "gpu", "hold": "no"}
    written = study("space: [zero]\nobjectives: [latency]").to_yaml()
    assert "zero_stage: {choices: [0, 1, 2, 3]}" in written and "metric: step_time_s" in written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trails: 3", "unknown key 'trails'. Did you mean 'trials'?"),
        ("trials: many", "trials: should be a valid integer, not 'many'"),
        ("trials: 0", "trials: should be greater than or equal to 1"),
        ("trials: 1.5", "trials: "),
        ("trials: 3\ntrials: 4", "line 3: key 'trials' is there twice"),
        ("seed: [", "not YAML"),
        ("\tseed: 1", "line 2"),
        ("time_budget_s: soon", "time_budget_s: 'soon' is not a number"),
        ("trial_budget_s: 0", "greater than 0"),
        ("trial_budget_s: null", "trial_budget_s: None is not"),
        ("device_memory_bytes: true", "device_memory_bytes: True"),
        ("name: ../x", "'../x' cannot name a study"),
        ("name: .hidden", "not starting with a dot"),
        ("name: ''", "cannot name a study"),
        ("name: 'a\n\n  b'", "cannot name a study"),
        ("space: [zer0]", "space: unknown 'zer0'. Did you mean 'zero'?"),
        ("space: [zero, zero]", "'zero' is there twice"),
        ("space: ['']", "space: unknown ''"),
        ("space: [zero, {zero_stage: [1]}]", "already defined by search_spaces/zero.yaml"),
        ("space: missing.yaml", "there is no file"),
        ("space: {}", "space: it is empty"),
        ("space: 3", "a mapping of knobs"),
        ("space: {zero_stage: [9]}", "zero_stage: choices: 9 is not one of"),
        ("objectives: []", "at least one"),
        ("goal: throughputs", "Did you mean 'throughput'?"),
        ("goal: memory\nobjectives: [latency]", "says otherwise; leave one of the two out"),
        ("objectives: [speed]", "Known: convergence, energy, latency, memory, throughput"),
        ("objectives: [latency, latency]", "'latency' is there twice"),
        ("objectives: [latency, {metric: step_time_s}]", "metric 'step_time_s' is there twice"),
        ("objectives: [{metric: step_tim_s}]", "Did you mean 'step_time_s'?"),
        ("objectives: [{metric: step_time_s, wait: 2}]", "Did you mean 'weight'?"),
        ("objectives: [{name: x}]", "metric is missing"),
        ("objectives: [{metric: step_time_s, direction: minimize}]", "the metric says which way is better"),
        ("objectives: [{metric: step_time_s, weight: heavy}]", "weight: "),
        ("objectives: [3]", "a mapping with a metric"),
        ("constraints: {step_time_s: 3}", "step_time_s: a mapping with `min` or `max`"),
        ("constraints: {step_time_s: {most: 3}}", "Did you mean"),
        ("constraints: {step_time_s: {}}", "`min` or a `max`"),
        ("constraints: 3", "a mapping of metrics"),
        ("base_config: {train_batch_sze: 8}", "Did you mean 'train_batch_size'?"),
        ("base_config: missing.json", "there is no file"),
        ("base_config: [1]", "a JSON object"),
        ("global_batch: 64..8", "'64..8' is not keep, free, or a range"),
        ("global_batch: most", "'most' is not keep"),
        ("global_batch: 0", "0 is not keep"),
        ("ranks: '2'", "ranks: should be a valid integer"),
        ("target: [1]", "key 'target' is there twice"),
        ("1: 2", "unknown key 1"),
        ("nodes: 2\nranks: 3\n", "3 ranks cannot be spread evenly over 2 nodes"),
        ("executor: slurm\nhostfile: hosts\n", "slurm chooses the machines itself"),
        ("executor: lsf\n", "executor: should be 'local', 'slurm' or 'ray'"),
        ("executor_options: [partition]\n", "'partition' is not NAME=VALUE, as in partition=gpu"),
        ("executor_options: [partition=a, time=1, partition=b]\n", "partition is there twice"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_study_is_named_in_one_sentence_with_file_and_key(study, target, text, said):
    with pytest.raises(UserError) as error:
        study(text)
    message = str(error.value)
    assert said.lower().replace("did you mean", "") in message.lower().replace("did you mean", "")
    assert "\n" not in message and (str(target.parent) in message or message.startswith("search_spaces/"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"space": "batch,zer0"}, "--space: unknown 'zer0'"),
        ({"objectives": "speed"}, "--objective: unknown 'speed'"),
        ({"device_memory_bytes": "4XB"}, "--device-memory: '4XB'"),
        ({"global_batch": "keeep"}, "--global-batch: 'keeep'"),
        ({"name": "a/b"}, "--study: 'a/b'"),
        ({"time_budget_s": "-4s"}, "--time-budget: "),
        ({"base_config": "no.json"}, "--base-config: there is no file"),
        ({"finalists": -1}, "^finalists: should be"),
        ({"constraints": {"speed": {"max": 1}}}, "^constraints: unknown metric"),
        ({"goal": ["throughput"]}, "--goal: unknown goal"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag_and_one_in_a_key_without_a_flag_the_key(study, overrides, said):
    with pytest.raises(SpecError, match=said):
        study("", overrides)


@pytest.mark.parametrize("text", ["", "- a", "trials: 3"])
def test_a_study_without_a_target_is_refused(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"study\.yaml: (target is missing|a study is a mapping)"):
        StudySpec.load(tmp_path / "study.yaml")


@pytest.mark.parametrize("name", ["study.yaml", "other.yaml"])
def test_a_study_is_no_target_of_a_study(tmp_path, name):
    (tmp_path / "other.yaml").write_text("target: model.py\n")
    (tmp_path / "study.yaml").write_text(f"target: {name}\n")
    with pytest.raises(
        SpecError, match=rf"study\.yaml: line 1: target: .*{name} is a study itself; name the model\.py"
    ):
        StudySpec.load(tmp_path / "study.yaml")


def test_a_model_takes_no_arguments(target):
    with pytest.raises(SpecError, match="takes no arguments"):
        StudySpec.of(target, {"script_args": ("--lr", "1")})


def test_a_hostfile_says_how_many_machines_and_ranks_there_are(study, target):
    (target.parent / "hosts").write_text("# two\nworker-1 slots=4\n\nuser@worker-2 slots = 4 # spare\n")
    assert read_hostfile(target.parent / "hosts") == {"worker-1": 4, "user@worker-2": 4}
    assert (study("hostfile: hosts\n").n_nodes, study("hostfile: hosts\n").stated_ranks) == (2, 8)
    assert study("hostfile: hosts\nnodes: 1\n").stated_ranks == 4
    assert study("hostfile: hosts\nranks: 2\n").stated_ranks == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=0\n", r"hosts:1: `HOST slots=N` is needed, not 'a slots=0'"),
        ("a\na\n", "hosts:2: a is there twice"),
        ("#\n", "it names no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(SpecError, match=said):
        read_hostfile(tmp_path / "hosts")


def test_fewer_ranks_than_machines_run_on_one(study):
    spec = study("executor: ray\nnodes: 2\n")
    assert [spec.nodes_for(ranks) for ranks in (1, 2, 3, 4)] == [1, 2, 1, 2]


@pytest.mark.process
def test_reading_a_study_imports_neither_torch_nor_optuna(study, target):
    study()
    code = (
        "import sys; from pathlib import Path; from autotune.study.spec.spec import StudySpec; StudySpec.of(Path(sys.argv[1]));"
        " print([name for name in ('torch', 'deepspeed', 'optuna') if name in sys.modules])"
    )
    run = [sys.executable, "-c", code, str(target.with_name("study.yaml"))]
    assert subprocess.check_output(run, text=True).strip() == "[]"


def test_every_field_is_described_in_the_table_of_settings():
    assert set(SETTINGS) == set(StudySpec.model_fields) - {"invocation"}
