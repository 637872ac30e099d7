"""Studies of training scripts and of launch commands."""

from pathlib import Path

import pytest

from autotune.errors import SpecError, UserError
from autotune.study.spec.spec import StudySpec, stated_command
from autotune.trial.command import Invocation

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


def test_a_script_of_a_study_keeps_arguments_constants_and_folder(script):
    given = {"script_args": ("--bsz", "{micro_batch_size}"), "script_set": ["BATCH={micro_batch_size}"]}
    wanted = StudySpec.of(script, given)
    script.with_name("study.yaml").write_text(wanted.to_yaml(script.parent))
    again = StudySpec.of(script.with_name("study.yaml"))
    assert again == wanted and again.global_batch == "keep" and again.working_dir == Path.cwd()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"script_set": ["BACH={micro_batch_size}"]}, "Did you mean 'BATCH'"),
        ({"script_set": ["BATCH"]}, "NAME=VALUE"),
        ({"arg_mappings": {"train_micro_batch": "--bsz"}}, "Did you mean 'train_micro_batch_size_per_gpu'"),
        ({"arg_mappings": {"train_micro_batch_size_per_gpu": "bsz"}}, "a flag of the script"),
        ({"arg_mappings": ["--bsz"]}, "a mapping of settings to flags"),
        ({"script_args": ("--bsz", "{micro_batchsize}")}, "Did you mean 'micro_batch_size'"),
        ({"base_config": {"train_batch_size": 8}}, "brings its own DeepSpeed configuration"),
        ({"base_config": {"train_batch_size": 8}}, "only where {ds_config} stands for its path"),
        ({"invocation": 3}, "unknown key 'invocation'"),
    ],
)
def test_what_a_script_does_not_take_is_refused(script, overrides, said):
    with pytest.raises(UserError) as error:
        StudySpec.of(script, overrides)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "templates"),
    [
        ({"script_args": ("--kwargs", '{"a": {b}}')}, ()),
        (
            {"script_args": ("--ds", "{ds_config}"), "base_config": {"train_micro_batch_size_per_gpu": 2}},
            ("ds_config",),
        ),
    ],
)
def test_templates_are_told_from_the_scripts_own_braces(script, overrides, templates):
    assert StudySpec.of(script, overrides).templated() == templates


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
    given = {"arg_mappings": {"gradient_accumulation_steps": "--gas"}, "trials": 3}
    wanted = StudySpec.of_command(invocation(script), given)
    assert (wanted.name, wanted.target, wanted.ranks, wanted.global_batch) == ("train", script, 2, "keep")
    file = tmp_path / "studies" / "train" / "study.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(wanted.to_yaml(file.parent))
    assert "target" not in file.read_text() and "ranks: null" in file.read_text()
    assert stated_command(str(file)) == (COMMAND, tmp_path)
    assert StudySpec.of_command(invocation(script), None, file) == wanted
    alone = StudySpec.of_command(invocation(script), {"ranks": 1})  # before the launcher's
    assert alone.ranks == 1 and "ranks: 1" in alone.to_yaml(tmp_path)


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
