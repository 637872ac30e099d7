"""What the user asks for: study files, presets, flags, targets."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

from autotune.errors import SpecError, UserError
from autotune.executors.ssh import read_hostfile
from autotune.scoring.objective import Constraint, Objective
from autotune.space.candidate import Candidate
from autotune.space.space import SearchSpace
from autotune.study.setup.engine import executor_of
from autotune.study.spec import presets as presets_module
from autotune.study.spec.presets import find_preset, load_preset, preset_folder, preset_summary, presets
from autotune.study.spec.settings import SETTINGS
from autotune.study.spec.spec import StudySpec, read_yaml, stated_command
from autotune.trial.command import Invocation
from autotune.trial.target import inspect_target

MODEL = "import torch\n\ndef model():\n    return torch.nn.Linear(2, 2)\n\ndef data():\n    return []\n"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "tiny" / "model.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    return path


@pytest.fixture
def study(target):
    """Writes a study.yaml beside the target and loads it."""

    def load(text="", overrides=None):
        path = target.parent / "study.yaml"
        path.write_text("target: model.py\n" + text)
        return StudySpec.load(path, overrides)

    return load


def test_a_bare_model_gets_the_documented_defaults(target):
    spec = StudySpec.of_target(target)
    assert (spec.name, spec.target, spec.trials, spec.global_batch) == ("tiny", target, 30, "free")
    assert [objective.name for objective in spec.objectives] == ["latency", "throughput", "convergence", "memory"]
    assert {"micro_batch_size", "zero_stage", "precision", "checkpoint_every"} <= {
        parameter.name for parameter in spec.space.parameters
    }


def test_a_study_is_named_for_its_file_unless_that_is_what_such_files_are_called(target, study):
    other = target.with_name("my gpt.py")
    other.write_text(MODEL)
    assert (StudySpec.of_target(other).name, study().name, study("name: mine").name) == ("my-gpt", "tiny", "mine")


def test_paths_in_a_study_are_relative_to_it_and_those_of_flags_to_the_shell(target, study, monkeypatch):
    (target.parent / "ds.json").write_text('{"train_batch_size": 8}')
    monkeypatch.chdir(target.parent.parent)
    assert study("base_config: ds.json").base_config == {"train_batch_size": 8}
    assert study("", {"base_config": "tiny/ds.json"}).base_config == {"train_batch_size": 8}


def test_a_study_and_a_model_are_told_apart_by_their_suffix(target, study):
    study("trials: 7")
    assert (StudySpec.of(target).trials, StudySpec.of(target.with_name("study.yaml")).trials) == (30, 7)


def test_flags_go_before_the_file_and_absent_flags_change_nothing(study):
    spec = study("trials: 7\nseed: 3\n", {"trials": 9, "seed": None, "space": "zero,precision"})
    assert (spec.trials, spec.seed) == (9, 3) and "micro_batch_size" not in spec.space


def test_presets_files_and_inline_knobs_compose(target, study):
    (target.parent / "mine.yaml").write_text("checkpoint_every: [0, 2]\n")
    spec = study("space: [zero, mine.yaml, {gradient_accumulation_steps: [1, 2]}]")
    assert spec.space["checkpoint_every"].choices == (0, 2) and {"zero_stage", "gradient_accumulation_steps"} <= set(
        spec.space.to_data()
    )


def test_objectives_may_be_presets_files_or_inline(target, study):
    (target.parent / "tokens.yaml").write_text("metric: tokens_per_s\n")
    spec = study("objectives: [latency, tokens.yaml, {metric: cpu_s_per_step, weight: 2}]")
    assert [(objective.name, objective.metric) for objective in spec.objectives] == [
        ("latency", "step_time_s"), ("tokens", "tokens_per_s"), ("cpu_s_per_step", "cpu_s_per_step"),
    ]  # fmt: skip


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
space: [batch, zero, buckets, {communication_data_type: [null, "5e8", bf16], optimizer.params.lr: [1e-3, 3.0e-4]}]
objectives: [latency, {name: mine, metric: samples_per_s, weight: 2, min: 4, description: "a: b # c"}]
constraints: {peak_memory_bytes: {max: 4GiB}, step_time_s: {min: 1ms, max: 2}}
trials: 12
time_budget_s: 10m
ranks: 2
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


def test_a_written_study_names_no_preset(study):
    written = study("space: [zero]\nobjectives: [latency]").to_yaml()
    assert "zero_stage: {choices: [0, 1, 2, 3]}" in written and "metric: step_time_s" in written


def test_a_bucket_size_of_5e8_is_a_whole_number(study):
    value = study(WHOLE).base_config["zero_optimization"]["reduce_bucket_size"]
    assert value == 500_000_000 and isinstance(value, int)


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
        ("space: [zero, {zero_stage: [1]}]", "already defined by search_spaces/zero.yaml"),
        ("space: missing.yaml", "there is no file"),
        ("space: {}", "space: it is empty"),
        ("space: 3", "a mapping of knobs"),
        ("space: {zero_stage: [9]}", "zero_stage: choices: 9 is not one of"),
        ("objectives: []", "at least one"),
        ("objectives: [speed]", "Known: convergence, latency, memory, throughput"),
        ("objectives: [latency, latency]", "'latency' is there twice"),
        ("objectives: [latency, {metric: step_time_s}]", "metric 'step_time_s' is there twice"),
        ("objectives: [{metric: step_tim_s}]", "Did you mean 'step_time_s'?"),
        ("objectives: [{metric: step_time_s, wait: 2}]", "Did you mean 'weight'?"),
        ("objectives: [{name: x}]", "metric is missing"),
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
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(study, overrides, said):
    with pytest.raises(SpecError, match=said):
        study("", overrides)


@pytest.mark.parametrize("text", ["", "- a", "trials: 3"])
def test_a_study_without_a_target_is_refused(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"study\.yaml: (target is missing|a study is a mapping)"):
        StudySpec.load(tmp_path / "study.yaml")


def test_a_spec_cannot_be_changed(study):
    with pytest.raises(ValueError, match="frozen"):
        study().trials = 3


@pytest.mark.parametrize("name", presets("objectives"))
def test_every_objective_preset_loads(study, name):
    (objective,) = study(f"objectives: {name}").objectives
    assert objective.name == name and objective.description


@pytest.mark.parametrize("name", presets("search_spaces"))
def test_every_space_preset_can_be_named_alone(study, name):
    assert study(f"space: {name}").space.size(Candidate(micro_batch_size=1)) >= 1


@pytest.mark.parametrize("path", [*presets("search_spaces").values(), *presets("objectives").values()])
def test_every_preset_says_first_what_it_is(path):
    assert 20 < len(preset_summary(path)) < 200


def test_a_preset_that_is_copied_and_changed_is_used_as_a_file(study, target):
    (target.parent / "zero.yaml").write_text(
        presets("search_spaces")["zero"].read_text().replace("[0, 1, 2, 3]", "[0, 1]")
    )
    assert study("space: zero.yaml").space["zero_stage"].choices == (0, 1)


def test_what_ends_in_yaml_or_has_a_separator_is_a_path(tmp_path):
    assert find_preset("search_spaces", "zero.yml", tmp_path, "x") == tmp_path / "zero.yml"
    assert find_preset("search_spaces", "a/zero", tmp_path, "x") == tmp_path / "a" / "zero"


@pytest.mark.parametrize("name", ["..", ".", "", "zero\0", "*", "ZERO"])
def test_the_name_of_a_preset_stays_in_its_folder(tmp_path, name):
    with pytest.raises(SpecError, match="Known: batch"):
        load_preset("search_spaces", name, tmp_path, "--space")


def test_installed_presets_go_before_those_of_the_checkout(tmp_path, monkeypatch):
    assert preset_folder("objectives") == ROOT / "objectives"
    packaged = tmp_path / "_presets" / "objectives"
    packaged.mkdir(parents=True)
    (packaged / "mine.yaml").write_text("metric: step_time_s\n")
    monkeypatch.setattr(presets_module, "__file__", str(tmp_path / "presets.py"))
    assert list(presets("objectives")) == ["mine"]


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [ls]", "a: *b", "{[1]: 2, [1]: 3}", "a: \x00"])
def test_yaml_that_is_not_plain_data_is_refused(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"x\.yaml"):
        read_yaml(tmp_path / "x.yaml")


def test_a_key_given_twice_below_the_top_is_refused_too(tmp_path):
    (tmp_path / "x.yaml").write_text("a:\n  b: 1\n  b: 2\n")
    with pytest.raises(SpecError, match="line 3: key 'b' is there twice"):
        read_yaml(tmp_path / "x.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        read_yaml(tmp_path / "x.yaml")


def test_a_target_is_read_not_run(target):
    target.write_text(MODEL + "raise SystemExit\n")
    found = inspect_target(target)
    assert (found.kind, found.batch_source, found.defines, found.imports) == ("model", "data", frozenset(), ("torch",))


def test_a_study_file_is_a_target_too(study, target):
    study()
    assert inspect_target(target.with_name("study.yaml")).kind == "study"


def test_the_optional_parts_of_a_target_are_found(target):
    target.write_text(
        "from mylib import model, optimizer\nblocks = 'Block'\nloss = lambda model, batch: 0\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\ndef batch(n): ...\nclass Unrelated:\n    def collate(self): ...\n"
    )
    found = inspect_target(target)
    assert found.batch_source == "batch" and found.defines == {"optimizer", "blocks", "loss"}


def test_imports_are_listed_without_what_lies_beside_the_target(target):
    (target.parent / "helpers.py").write_text("")
    target.write_text(
        "from __future__ import annotations\nimport helpers, torch.nn.functional as F\n"
        "from transformers.models import gpt2\nfrom . import sibling\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import heavy\nif __name__ == '__main__':\n    import script\n"
        + MODEL
    )
    assert inspect_target(target).imports == (
        "torch.nn.functional",
        "transformers.models:gpt2",
        "typing:TYPE_CHECKING",
        "torch",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def model(:", "line 1: not Python"),
        ("x = 1", "defines no model()"),
        ("def modle(): ...", "there is 'modle'"),
        ("import torch\nmodel = torch.nn.Linear(2, 2)\ndef data(): ...", "line 2: model is a value"),
        ("def model(): ...", "neither data() -> Dataset nor batch(n)"),
        ("def model(size): ...\ndef data(): ...", "line 1: model must be callable as model()"),
        ("def model(): ...\ndef data(split): ...", "line 2: data must be callable as data()"),
        ("def model(): ...\ndef batch(): ...", "batch must be callable as batch(n)"),
        ("def model(): ...\ndef batch(n, *, seed): ...", "batch(n)"),
        ("def model(): ...\ndef data(): ...\ndef loss(batch): ...", "loss(model, batch)"),
        ("import torch\nloss.backward()", "does not import deepspeed"),
        ("from transformers import AutoModel\nmodel = build()\nloss.backward()", "does not import deepspeed"),
        ("import lightning as L\nfabric = L.Fabric()\nfabric.backward(loss)", "Lightning Fabric cannot be tuned yet"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_tuned_is_refused_in_one_sentence(target, text, said):
    target.write_text(text)
    with pytest.raises(SpecError) as error:
        inspect_target(target)
    assert said in str(error.value) and str(error.value).startswith(str(target)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "import lightning as L\nL.Trainer(strategy='deepspeed_stage_2').fit(build())",
        "from pytorch_lightning.cli import LightningCLI\nLightningCLI()",
        "import deepspeed\nfrom deepspeed.pipe import PipelineModule\nengine, *_ = deepspeed.initialize(model=PipelineModule([]))",
    ],
)
def test_frameworks_are_told_from_the_text(target, text):
    target.write_text(text)
    assert inspect_target(target).kind == "script"


def test_the_training_may_be_in_a_module_that_a_script_imports(target):
    (target.parent / "training").mkdir()
    (target.parent / "training" / "__init__.py").write_text("from .loop import run\n")
    (target.parent / "training" / "loop.py").write_text(
        "import deepspeed\nimport wandb\ndef run(): deepspeed.initialize()\n"
    )
    target.write_text("BATCH: int = 2 * 4\nif True:\n    STEPS = 3\nfrom training import run\nrun()\n")
    found = inspect_target(target)
    assert (found.kind, found.constants) == ("script", ("BATCH", "STEPS"))
    assert set(found.imports) == {"deepspeed", "wandb"}


@pytest.mark.parametrize(
    "text",
    [
        "def model(size=3): ...\ndef batch(n, seed=0): ...",
        "def model(*args): ...\ndef batch(*args): ...",
        "from functools import partial\nmodel = partial(int, 3)\ndef data(): ...",
        "class model: ...\ndef data(): ...",
        "if True:\n    def model(): ...\nelse:\n    def model(): ...\ndef data(): ...",
        "def build(): ...\nmodel = build\ndata: object = lambda: []",
    ],
)
def test_there_is_more_than_one_way_to_write_a_target(target, text):
    target.write_text(text)
    assert inspect_target(target).kind == "model"


def test_a_script_that_calls_deepspeed_itself_is_a_target(target):
    target.write_text(
        "import deepspeed, torch\nBATCH = 8\nmodel = build()\nengine, *_ = deepspeed.initialize(model=model)\n"
    )
    found = inspect_target(target)
    assert found.kind == "script" and "BATCH" in found.constants and "torch" in found.imports


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer\nmodel = build()\nTrainer(model).train()",
        "import trl\ntrl.SFTTrainer(model=None).train()",
        "import transformers\nclass Mine(transformers.Trainer): ...\nMyTrainer(model=None).train()",
        "from accelerate import Accelerator\na = Accelerator()\na.backward(0)",
    ],
)
def test_scripts_of_frameworks_are_targets(target, text):
    target.write_text(text)
    assert inspect_target(target).kind == "script"


def test_a_script_of_a_study_keeps_arguments_constants_and_folder(target, tmp_path):
    target.write_text("import deepspeed\nBATCH = 8\ndeepspeed.initialize()\n")
    wanted = StudySpec.of(
        target, {"script_args": ("--bsz", "{micro_batch_size}"), "script_set": ["BATCH={micro_batch_size}"]}
    )
    (tmp_path / "study.yaml").write_text(wanted.to_yaml(tmp_path))
    again = StudySpec.of(tmp_path / "study.yaml")
    assert again == wanted and again.global_batch == "keep" and again.working_dir == Path.cwd()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"script_set": ["BACH={micro_batch_size}"]}, "Did you mean 'BATCH'"),
        ({"script_set": ["BATCH"]}, "NAME=VALUE"),
        ({"base_config": {"train_batch_size": 8}}, "brings its own DeepSpeed configuration"),
    ],
)
def test_what_a_script_does_not_take_is_refused(target, overrides, said):
    target.write_text("import deepspeed\nBATCH = 8\ndeepspeed.initialize()\n")
    with pytest.raises(SpecError, match=said):
        StudySpec.of(target, overrides)


def test_a_model_takes_no_arguments(target):
    with pytest.raises(SpecError, match="takes no arguments"):
        StudySpec.of(target, {"script_args": ("--lr", "1")})


COMMAND = "torchrun --nproc_per_node 2 train.py --bsz {micro_batch_size}"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import deepspeed\nBATCH = 8\ndeepspeed.initialize()\n")
    return path


def invocation(script, **changes):
    given = {"arguments": ("--bsz", "{micro_batch_size}"), "world_size": 2, "command": COMMAND}
    return Invocation(script=str(script), working_dir=str(script.parent), **given | changes)


@pytest.mark.parametrize(
    ("target", "overrides", "is_command"),
    [
        ("train.py", {}, False),
        ("nothing.py", {"script_args": ("--a",)}, False),
        ("nothing", {}, False),
        (COMMAND, {}, True),
        ("ENV=1 python train.py", {}, True),
        ("torchrun", {"script_args": ("--nproc_per_node", "2", "train.py")}, True),
        ("bash train.sh", {}, True),
        (f"python {'x' * 5000}", {}, True),
    ],
)
def test_a_target_is_a_file_or_else_a_command(script, target, overrides, is_command):
    assert stated_command(target, overrides) == ((target, script.parent) if is_command else None)


def test_a_script_and_its_arguments_in_one_word_are_taken_apart_for_the_user(script):
    with pytest.raises(SpecError, match=r"autotune run train\.py -- --bsz 4"):
        stated_command("train.py --bsz 4")


def test_a_study_keeps_its_command_and_finds_the_script_again(script, tmp_path):
    wanted = StudySpec.of_command(
        invocation(script), {"arg_mappings": {"gradient_accumulation_steps": "--gas"}, "trials": 3}
    )
    assert (wanted.name, wanted.target, wanted.ranks, wanted.global_batch) == ("train", script, 2, "keep")
    file = tmp_path / "studies" / "train" / "study.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(wanted.to_yaml(file.parent))
    assert "target" not in file.read_text() and "ranks: null" in file.read_text()
    assert stated_command(str(file)) == (COMMAND, tmp_path)
    assert StudySpec.of_command(invocation(script), None, file) == wanted


def test_stated_ranks_go_before_the_launchers(script, tmp_path):
    wanted = StudySpec.of_command(invocation(script), {"ranks": 1})
    assert wanted.ranks == 1 and "ranks: 1" in wanted.to_yaml(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command: [torchrun]", "a command line is needed"),
        ("command: torchrun train.py\ntarget: train.py", "leave out target"),
    ],
)
def test_a_command_in_a_study_is_one_line_and_stands_alone(script, text, said):
    script.with_name("study.yaml").write_text(text)
    with pytest.raises(SpecError, match=said):
        stated_command(str(script.with_name("study.yaml")))


def test_a_command_that_starts_a_model_is_refused(target):
    with pytest.raises(SpecError, match="no training script"):
        StudySpec.of_command(invocation(target, world_size=None))


def test_what_a_launcher_starts_is_a_script_though_its_training_lies_elsewhere(script):
    script.write_text("from somewhere import main\nmain()\n")
    wanted = StudySpec.of_command(invocation(script))
    assert wanted.inspected.kind == "script" and wanted.global_batch == "keep"
    with pytest.raises(SpecError, match="defines no model"):
        StudySpec.of(script)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"arg_mappings": {"train_micro_batch": "--bsz"}}, "Did you mean 'train_micro_batch_size_per_gpu'"),
        ({"arg_mappings": {"train_micro_batch_size_per_gpu": "bsz"}}, "a flag of the script"),
        ({"arg_mappings": ["--bsz"]}, "a mapping of settings to flags"),
        ({"script_args": ("--bsz", "{micro_batchsize}")}, "Did you mean 'micro_batch_size'"),
        ({"base_config": {"train_batch_size": 8}}, "only where {ds_config} stands for its path"),
        ({"invocation": 3}, "unknown key 'invocation'"),
    ],
)
def test_what_carries_a_setting_is_checked(script, overrides, said):
    with pytest.raises(UserError) as error:
        StudySpec.of(script, overrides)
    assert said in str(error.value)


def test_braces_of_the_scripts_own_are_left_alone(script):
    assert StudySpec.of(script, {"script_args": ("--kwargs", '{"a": {b}}')}).templated() == ()


def test_with_a_template_for_its_path_the_configuration_is_given_here(script):
    wanted = StudySpec.of(
        script, {"script_args": ("--ds", "{ds_config}"), "base_config": {"train_micro_batch_size_per_gpu": 2}}
    )
    assert wanted.templated() == ("ds_config",)


def test_a_missing_target_is_refused_with_the_nearest_file(target):
    with pytest.raises(SpecError, match=r"Did you mean 'model\.py'"):
        inspect_target(target.with_name("modle.py"))


def test_a_folder_is_refused_with_the_file_in_it(target):
    with pytest.raises(SpecError, match=r"is a folder; .*tiny/model\.py"):
        inspect_target(target.parent)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.ipynb").write_text("{}")
    with pytest.raises(SpecError, match=r"a model\.py or a study\.yaml"):
        inspect_target(tmp_path / "model.ipynb")


@pytest.mark.process
def test_reading_a_study_imports_neither_torch_nor_optuna(study, target):
    study()
    code = (
        "import sys; from pathlib import Path; from autotune.study.spec.spec import StudySpec; StudySpec.of(Path(sys.argv[1]));"
        " print([name for name in ('torch', 'deepspeed', 'optuna') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(target.with_name("study.yaml"))], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_what_is_not_text_may_be_given_ready_made(target):
    space = SearchSpace.parse({"zero_stage": [0, 1]}, "here")
    objective = Objective(name="latency", metric="step_time_s")
    spec = StudySpec.of_target(
        target, {"space": space, "objectives": [objective], "constraints": [Constraint(metric="step_time_s", max=1)]}
    )
    assert (spec.space, spec.objectives) == (space, (objective,))


class TestExecutors:
    """Where the trials of a study run."""

    def test_a_study_runs_here_on_one_machine_and_does_not_say_so(self, study):
        spec = study()
        assert (spec.executor, spec.n_nodes) == ("local", 1)
        assert not {"executor", "nodes", "hostfile", "executor_options"} & set(yaml.safe_load(spec.to_yaml()))

    def test_an_engine_and_its_options_are_kept(self, study):
        spec = study("executor: slurm\nnodes: 2\nranks: 8\nexecutor_options: {partition: gpu, hold: no}\n")
        assert spec.executor_options == {"partition": "gpu", "hold": "no"}
        again = study(spec.to_yaml().partition("\n")[2].replace("target: ", "# "))
        assert (again.executor, again.nodes, again.executor_options) == ("slurm", 2, spec.executor_options)

    def test_flags_go_before_the_file(self, study):
        spec = study(
            "executor: slurm\n", {"executor": "ray", "executor_options": ["address=host:6379", "resources=a:1,b:2"]}
        )
        assert (spec.executor, spec.executor_options) == ("ray", {"address": "host:6379", "resources": "a:1,b:2"})

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("nodes: 2\nranks: 3\n", "3 ranks cannot be spread evenly over 2 nodes"),
            ("executor: slurm\nhostfile: hosts\n", "slurm chooses the machines itself"),
            ("executor: lsf\n", "executor: .*local"),
            ("executor_options: [partition]\n", "'partition' is not NAME=VALUE, as in partition=gpu"),
        ],
    )
    def test_what_cannot_be_is_refused(self, study, target, text, said):
        (target.parent / "hosts").write_text("a\n")
        with pytest.raises(SpecError, match=said):
            study(text)

    def test_a_hostfile_is_read_as_deepspeed_reads_it(self, study, target):
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
    def test_a_wrong_hostfile_is_refused_with_its_line(self, tmp_path, text, said):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(SpecError, match=said):
            read_hostfile(tmp_path / "hosts")

    def test_fewer_ranks_than_machines_run_on_one(self, study):
        spec = study("executor: ray\nnodes: 2\n")
        assert [spec.nodes_for(ranks) for ranks in (1, 2, 3, 4)] == [1, 2, 1, 2]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                "executor: slurm\nexecutor_options: {partitions: gpu}\n",
                r"partitions: unknown to slurm\. Did you mean 'partition'",
            ),
            ("executor_options: {partition: gpu}\n", "partition: unknown to local"),
            ("nodes: 2\n", "several machines take --executor slurm or ray, or --hostfile"),
            ("executor: slurm\nexecutor_options: {idle: soon}\n", "idle=soon: a number of seconds is needed"),
        ],
    )
    def test_what_an_engine_does_not_know_is_refused_before_it_starts(self, study, tmp_path, text, said):
        with pytest.raises(UserError, match=said):
            executor_of(study(text), tmp_path)


def test_every_field_is_described_in_the_table_of_settings():
    assert set(SETTINGS) == set(StudySpec.model_fields) - {"invocation"}
