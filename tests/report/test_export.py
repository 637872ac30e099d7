"""A pick for other tools: DeepSpeed's JSON, an Accelerate config, flags, and the command to paste."""

import json
import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.commands import read_by_deepspeed
from support.instant import Instant, failed, report, runner_of
from support.study_report import study_report

from autotune.errors import UserError
from autotune.report.export import FORMATS, Exported, deepspeed_config, export, export_pick, notes, pick_or_trial
from autotune.report.load import load
from autotune.report.started import Started
from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.deepspeed import check_config
from autotune.study.storage import records
from autotune.trial.command import STATED, Invocation
from autotune.trial.result import Outcome
from autotune.trial.workload import ACCELERATE, TRAINER

BASE = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
    "tensorboard": {"enabled": True, "output_path": "runs"},
}  # fmt: skip
CANDIDATES = [
    {"micro_batch_size": 4},
    {"micro_batch_size": 3, "gradient_accumulation_steps": 5, "zero_stage": 1, "precision": "bf16"},
    {"micro_batch_size": 4, "zero_stage": 2, "precision": "bf16", "checkpoint_every": 1,
     "zero_optimization.overlap_comm": True},
    {"micro_batch_size": 16, "zero_stage": 3, "precision": "fp16", "offload_optimizer": "cpu", "offload_param": "cpu",
     "checkpoint_every": 2},
    {"micro_batch_size": 2, "precision": "torch_autocast", "gradient_accumulation_steps": 4,
     "communication_data_type": "bf16"},
    {"micro_batch_size": 2, "zero_stage": 1, "precision": "bf16", "data_types.grad_accum_dtype": "fp32"},
]  # fmt: skip
FIELDS = (
    "micro_batch_size", "gradient_accumulation_steps", "zero_stage", "precision", "offload_optimizer", "offload_param",
)  # fmt: skip
# Accelerate refuses these beside a JSON.
REFUSED = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "mixed_precision",
}  # fmt: skip

STARTED = Started(
    invocation=Invocation(script="/home/me/train.py", working_dir="/home/me", arguments=("--bs", "8", "--lr", "1e-3")),
    flags={"micro_batch_size": ["--batch_size", "--bs"], "ds_config": ["--deepspeed_config"]}, config_source="",
    baseline=Candidate.of(CANDIDATES[0]).values(), study="s",
)  # fmt: skip


def pick(values: dict, base: dict = BASE) -> dict:
    """A pick as `recommended.json` has it; trials leave out what writes files."""
    candidate = Candidate.of(values)
    measured = {key: value for key, value in candidate.to_deepspeed(base).items() if key != "tensorboard"}
    ds_config = deepspeed_config(measured, base)
    return {"trial": 7, "candidate": candidate.values(), "ds_config": ds_config, "metrics": {}, "ci95": {}}


def exported(values: dict, form: str, base: dict = BASE) -> str:
    return export(pick(values, base), base, form, world_size=2)


every_candidate = pytest.mark.parametrize("values", CANDIDATES, ids=lambda values: Candidate.of(values).describe())


@every_candidate
def test_the_deepspeed_json_means_the_candidate_in_keys_that_deepspeed_reads(values):
    config = json.loads(exported(values, "deepspeed"))
    check_config(config, "export")
    assert '"auto"' not in json.dumps(config) and config["optimizer"] == BASE["optimizer"]
    found, wanted = from_deepspeed(config, world_size=2), Candidate.of(values)
    assert [getattr(found, name) for name in FIELDS] == [getattr(wanted, name) for name in FIELDS]


def test_the_deepspeed_json_keeps_what_trials_leave_out_and_states_stage_0_since_hugging_face_wants_it():
    config = json.loads(exported(CANDIDATES[0], "deepspeed"))
    assert config["tensorboard"] == BASE["tensorboard"] and config["zero_optimization"] == {"stage": 0}


def test_the_deepspeed_json_does_not_end_the_training_as_deepspeeds_own_tuner_has_it_do():
    """A JSON with `autotuning.enabled` trained for five steps and exited with status 0."""
    section = {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"}}
    base = {**BASE, "autotuning": section}
    assert json.loads(exported(CANDIDATES[0], "deepspeed", base))["autotuning"] == {**section, "enabled": False}
    assert section["enabled"]


def test_exporting_changes_neither_the_pick_nor_the_base():
    chosen = pick(CANDIDATES[0])
    before = json.dumps([chosen, BASE])
    for form in FORMATS:
        export(chosen, BASE, form, 2, STARTED)
    deepspeed_config(chosen["ds_config"], BASE)["optimizer"]["params"]["lr"] = 0
    assert json.dumps([chosen, BASE]) == before


@pytest.mark.process
def test_deepspeed_reads_every_exported_json(zoo, tmp_path):
    paths = []
    for i, values in enumerate(CANDIDATES):
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(exported(values, "deepspeed"))
    assert read_by_deepspeed(zoo, paths) == [Candidate.of(values).global_batch_size(1) for values in CANDIDATES]


@every_candidate
def test_the_accelerate_config_holds_the_whole_json_and_nothing_that_accelerate_refuses_beside_it(values):
    config = yaml.safe_load(exported(values, "accelerate"))
    own = config["deepspeed_config"]
    assert config["distributed_type"] == "DEEPSPEED" and config["num_processes"] == 2
    assert json.loads(own["deepspeed_config_file"]) == json.loads(exported(values, "deepspeed"))
    assert own["zero3_init_flag"] is (Candidate.of(values).zero_stage == 3)
    assert not REFUSED & {*config, *own}


def test_accelerate_reads_every_exported_config(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, so that it reads its config was not tried")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    file = tmp_path / "accelerate.yaml"
    for values in CANDIDATES:
        file.write_text(exported(values, "accelerate"))
        config = load_config_from_file(str(file))
        assert (
            config.distributed_type == DistributedType.DEEPSPEED
            and config.num_processes == 2
            and config.mixed_precision is None
        )
        found = HfDeepSpeedConfig(config.deepspeed_config["deepspeed_config_file"])
        assert found.config == json.loads(exported(values, "deepspeed")) and found.is_zero3() is (
            Candidate.of(values).zero_stage == 3
        )


def hugging_face():
    return pytest.importorskip("transformers", reason="transformers is not installed: its reading was not tried")


def hf_namespace(values: dict, base: dict = BASE):
    transformers = hugging_face()
    # Parsed, not instantiated: with --deepspeed that needs Accelerate and a device.
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    return parser.parse_args(["--output_dir", "out", *shlex.split(exported(values, "hf-args", base))])


@every_candidate
def test_transformers_reads_every_flag(values):
    transformers = hugging_face()
    known = {field.name for field in fields(transformers.TrainingArguments)}
    flags = [word.removeprefix("--") for word in shlex.split(exported(values, "hf-args")) if word.startswith("--")]
    found, candidate = hf_namespace(values), Candidate.of(values)
    assert set(flags) <= known and len(set(flags)) == len(flags)
    assert found.per_device_train_batch_size == candidate.micro_batch_size
    assert found.gradient_accumulation_steps == candidate.gradient_accumulation_steps
    assert (found.bf16, found.fp16) == (candidate.precision == "bf16", candidate.precision == "fp16")
    assert found.deepspeed == "ds_config.json"


def test_flags_repeat_what_the_json_says_of_the_optimizer_since_transformers_compares():
    found = hf_namespace(CANDIDATES[1])
    assert (found.learning_rate, found.weight_decay, found.adam_beta2, found.max_grad_norm) == (3e-4, 0.1, 0.95, 0.5)
    assert "learning_rate" not in exported(CANDIDATES[1], "hf-args", base={})


def test_checkpointing_becomes_flags_and_autocast_none_since_bf16_weights_would_follow():
    assert hf_namespace(CANDIDATES[2]).gradient_checkpointing is True
    found = hf_namespace(CANDIDATES[3])
    assert found.activation_checkpointing is True
    assert json.loads(found.activation_checkpointing_kwargs) == {"every_n_layers": 2}
    assert "bf16" not in exported(CANDIDATES[4], "hf-args")


def test_what_loads_the_data_becomes_flags_that_the_trainer_reads():
    workers = {"data.num_workers": 2, "data.prefetch_factor": 4, "data.persistent_workers": True}
    found = hf_namespace(CANDIDATES[0] | workers)
    assert (found.dataloader_num_workers, found.dataloader_prefetch_factor) == (2, 4)
    assert found.dataloader_persistent_workers is True


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"'acelerate'.*Did you mean 'accelerate'.*deepspeed, accelerate, hf-args, command"
    ):
        exported(CANDIDATES[0], "acelerate")


def test_notes_say_what_the_exported_text_cannot():
    assert any("batch_size=16" in note for note in notes(pick(CANDIDATES[3]), "accelerate"))
    assert any("every 2nd" in note for note in notes(pick(CANDIDATES[3]), "accelerate"))
    assert any("DummyOptim" in note for note in notes(pick(CANDIDATES[0]), "accelerate"))
    assert any("transformers 5" in note for note in notes(pick(CANDIDATES[3]), "hf-args"))
    assert notes(pick(CANDIDATES[3]), "deepspeed") == []
    (only,) = notes(pick(CANDIDATES[3]), "accelerate", replace(STARTED, family=TRAINER))  # which makes its own loader
    assert "--format hf-args` too, except deepspeed" in only
    own = pick(CANDIDATES[0])
    stated = {**own, "ds_config": {**own["ds_config"], "train_batch_size": 8}}
    assert any("another number of ranks" in note for note in notes(stated, "deepspeed"))


# The command to paste.


def command(values: dict, *, changes: tuple[str, ...] = (), ranks: int = 2, **invocation) -> tuple[list[str], str]:
    """Its comments and its last line."""
    started = replace(STARTED, invocation=replace(STARTED.invocation, **invocation))
    *comments, line = export(
        pick(values) | {"script_side_changes": changes}, BASE, "command", ranks, started
    ).splitlines()
    assert all(comment.startswith("# ") for comment in comments)
    return comments, line


TORCHRUN = {
    "command": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py --bs 8 --lr 1e-3",
    "world_size": 2,
}


def test_the_users_own_launcher_stays_with_the_flags_of_the_winner():
    assert command(CANDIDATES[1], **TORCHRUN)[1] == (
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py --bs 3 --lr 1e-3 --deepspeed_config ds_config.json"
    )


def test_a_script_that_was_named_alone_is_started_by_torchrun():
    assert command(CANDIDATES[1])[1] == (
        "torchrun --standalone --nproc_per_node=2 train.py --bs 3 --lr 1e-3 --deepspeed_config ds_config.json"
    )


@pytest.mark.parametrize(
    "text", ["bash train.sh", "cd /home/me && torchrun --nproc_per_node 2 train.py --bs 8 --lr 1e-3"]
)
def test_what_only_a_shell_can_read_is_written_out(text):
    comments, line = command(CANDIDATES[1], command=text, world_size=2, environment={"HF_HOME": "/data"})
    assert line.startswith("HF_HOME=/data torchrun --standalone --nproc_per_node=2 train.py --bs 3")
    assert any(text in comment for comment in comments)


def test_what_a_shell_script_starts_in_another_folder_is_entered_first(tmp_path, monkeypatch):
    """It was printed as seen from there, and pasted where the shell script had been started no path in it was right."""
    (tmp_path / "my conf").mkdir()
    here = {"working_dir": str(tmp_path / "my conf"), "script": str(tmp_path / "train.py")}
    text = {"command": "bash train.sh", "world_size": 2, "environment": {"X": "1"}}
    monkeypatch.chdir(tmp_path)
    begun = replace(STARTED, invocation=replace(STARTED.invocation, **here, **text)).pasted_here
    assert begun.written("ds_config.json").startswith("First: `autotune export s -o 'my conf/ds_config.json'`")
    assert (
        export(pick(CANDIDATES[1]), BASE, "command", 2, begun)
        .splitlines()[-1]
        .startswith("cd 'my conf' && X=1 torchrun --standalone --nproc_per_node=2 ../train.py ")
    )
    monkeypatch.chdir(tmp_path / "my conf")
    assert replace(begun, way="").pasted_here.way == ""
    gone = replace(STARTED, invocation=replace(STARTED.invocation, working_dir="/no/such/folder"))
    assert gone.pasted_here.way == ""


def test_another_number_of_ranks_is_another_launcher():
    comments, line = command(CANDIDATES[1], **TORCHRUN | {"world_size": 4})
    assert line.startswith("CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc_per_node=2")
    assert any("another number of ranks" in text for text in comments)


@pytest.mark.parametrize("before", ["X=1", "env X=1"])
def test_variables_before_the_users_launcher_stay_before_another(before):
    text = f"{before} torchrun --nproc_per_node 4 train.py --bs 8 --lr 1e-3"
    line = command(CANDIDATES[1], command=text, world_size=4)[1]
    assert line.startswith("X=1 torchrun --standalone --nproc_per_node=2 train.py")


def test_modules_are_found_where_the_users_own_command_has_them_found():
    """Accelerate adds the working directory, for itself."""
    how = STARTED.invocation.working_dir
    for launcher, places, said in [
        ("torchrun", f"{how}:/src", f"PYTHONPATH={how}:/src "),
        ("accelerate", f"/src:{how}", "PYTHONPATH=/src "),
        ("accelerate", how, ""),
    ]:
        environment = {"PYTHONPATH": places} | (
            {"ACCELERATE_USE_DEEPSPEED": "true"} if launcher == "accelerate" else {}
        )
        line = command(CANDIDATES[1], command="bash train.sh", world_size=2, environment=environment)[1]
        assert line.startswith(f"{said}{launcher} ")


def test_templates_are_filled_in_with_the_winner_and_the_exported_json():
    text = "BS={micro_batch_size} deepspeed --num_gpus 2 train.py --zero {zero_stage} --config {ds_config}"
    arguments = ("--local_rank={local_rank}", "--zero", "{zero_stage}", "--config", "{ds_config}")
    started = replace(
        STARTED, flags={}, invocation=replace(STARTED.invocation, command=text, arguments=arguments, world_size=2)
    )
    line = export(pick(CANDIDATES[1]), BASE, "command", 2, started).splitlines()[-1]
    assert line == "BS=3 deepspeed --num_gpus 2 train.py --zero 1 --config ds_config.json"


def test_a_module_is_started_as_one():
    line = command(
        CANDIDATES[1],
        module="pkg.train",
        command="torchrun --nproc_per_node 2 -m pkg.train --bs 8 --lr 1e-3",
        world_size=2,
    )[1]
    assert line.startswith("torchrun --nproc_per_node 2 -m pkg.train --bs 3")
    assert command(CANDIDATES[1], module="pkg.train")[1].startswith(
        "torchrun --standalone --nproc_per_node=2 -m pkg.train --bs 3"
    )


def test_what_no_flag_carries_is_a_comment_and_what_one_carries_is_not():
    comments, _ = command(
        CANDIDATES[1], changes=("Command line: `--bs 3` instead of 8.", "Data: the DataLoader at train.py:9.")
    )
    assert any("train.py:9" in text for text in comments) and not any("--bs" in text for text in comments)


def test_whichever_argument_names_the_configuration_that_the_script_reads_names_the_exported_one():
    """The command kept `--config ds.json` and trained by the user's own configuration with the winner's batch."""
    how = replace(STARTED.invocation, command="", arguments=("--config", "./conf/ds.json", "--again=conf/ds.json"))
    own = replace(STARTED, flags={}, invocation=how, config_source="conf/ds.json")
    text = export(pick(CANDIDATES[1]), BASE, "command", 2, own)
    assert text.endswith(f"--config {own.exported} --again={own.exported}\n") and "No flag carries it" not in text


def test_a_command_for_deepspeed_does_not_set_the_variable_beside_which_accelerate_leaves_it_out():
    how = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    started = "OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true accelerate launch train.py --bs 8 --lr 1e-3"
    line = command(CANDIDATES[1], command=started, world_size=2, environment=how)[1]
    assert line.startswith("OMP_NUM_THREADS=1 accelerate launch --config_file accelerate.yaml train.py")


def test_without_a_flag_for_the_configuration_it_is_said_what_it_replaces():
    at = {"initialized_at": "train.py:40"}
    call = 'pass `config="ds_config.json"` to `deepspeed.initialize` at train.py:40, instead of the dict that it passes now'
    for changes, said in (
        ({"config_source": "conf/ds.json"}, "takes the place of conf/ds.json"),
        (at, call),
        (
            {"written_config": "out/ds.json"},
            "instead of out/ds.json, which it writes itself (and leave `args.deepspeed_config` unset",
        ),
        ({"written_config": "ds_config.json"}, "-o tuned_ds_config.json`"),  # the script would write over the other
        ({}, "to `deepspeed.initialize`, instead of the dict that it passes now"),
        ({**at, "family": "Lightning"}, "`DeepSpeedStrategy("),
        ({"family": "Accelerate"}, "`DeepSpeedPlugin("),
    ):
        text = export(pick(CANDIDATES[1]), BASE, "command", 2, replace(STARTED, flags={}, **changes))
        assert said in text and "--deepspeed_config" not in text


def test_no_flag_names_the_json_of_a_trainer_whose_code_sets_another():
    """The command had `--deepspeed ds_config.json`, which the script's own dict overrode in silence."""
    own = replace(STARTED, family=TRAINER, flags={"deepspeed": ["--deepspeed"], "bf16": ["--bf16"]})
    for form in ("command", "hf-args"):
        text = export(pick(CANDIDATES[1]), BASE, form, 2, own)
        said = [text, *notes(pick(CANDIDATES[1]), form, own)]
        assert "--deepspeed " not in text and any('pass `deepspeed="ds_config.json"` to `Tr' in line for line in said)
    without = pick(CANDIDATES[1]) | {"script_side_changes": ["DeepSpeed: the script is run without it; add ..."]}
    told = replace(own, invocation=replace(own.invocation, arguments=("--deepspeed", "ds.json")))
    for chosen, started in ((without, own), (pick(CANDIDATES[1]), told)):
        assert "--deepspeed ds_config.json" in export(chosen, BASE, "command", 2, started)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("output_dir: out\n", "in exp.yaml, and pass `deepspeed="),
        ('{"output_dir": "out", "deepspeed": "ds.json"}', ", `deepspeed: ds_config.json` in exp.yaml."),
        ("lr: 1\n", "in its code, or the file that it reads them from, and pass `deepspeed="),
    ],
)
def test_a_script_that_parses_no_training_arguments_is_told_where_to_set_them(text, where, tmp_path):
    """Flags were printed without a word for a script that reads a YAML or JSON file (HfArgumentParser.parse_yaml_file)."""
    (tmp_path / "exp.yaml").write_text(text)
    how = replace(STARTED.invocation, working_dir=str(tmp_path), arguments=("exp.yaml", "x" * 9000))
    started, chosen = replace(STARTED, family=TRAINER, flags={}, invocation=how), pick(CANDIDATES[2])
    for form in ("hf-args", "command"):  # the command's comments named neither the file nor the batch
        (said,) = [note for note in notes(chosen, form, started) if "parses no flags" in note]
        assert (
            where in said and "`per_device_train_batch_size: 4`, " in said and "`gradient_checkpointing: true`" in said
        )
    assert not any("parses no" in note for note in notes(chosen, "hf-args", replace(started, flags=HF)))
    command = export(
        chosen, BASE, "command", 2, replace(started, config_source="")
    )  # it sent one with such a file to the code
    there = "deepspeed" in text
    assert ("Before it trains so, set `deepspeed: ds_config.json` in exp.yaml." in command) == there
    assert ("Before it trains so, change the script: pass `deepspeed=" in command) != there


@pytest.mark.parametrize(
    ("form", "families"),
    [("hf-args", {"transformers' Trainer"}), ("accelerate", {"transformers' Trainer", "Accelerate"})],
)
def test_a_format_that_the_tuned_script_cannot_read_is_refused_with_the_right_one(form, families):
    for family in ("raw DeepSpeed", "DeepSpeed PipelineModule", "Lightning", "Accelerate", "transformers' Trainer"):
        started = replace(STARTED, family=family)
        if family in families:
            assert export(pick(CANDIDATES[1]), BASE, form, 2, started)
        else:
            with pytest.raises(UserError, match=f"trains with {family}; --format command"):
                export(pick(CANDIDATES[1]), BASE, form, 2, started)


HF = {
    name: [f"--{name}"] for name in ("deepspeed", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing")
}


def test_the_accelerate_config_names_the_script_that_was_tuned():
    how = replace(STARTED.invocation, script="/home/me/src/train_clip.py")
    text = export(pick(CANDIDATES[1]), BASE, "accelerate", 2, replace(STARTED, invocation=how))
    assert text.startswith(
        "# Use: accelerate launch --config_file accelerate.yaml src/train_clip.py\n# Its arguments are"
    )
    named = export(pick(CANDIDATES[1]), BASE, "accelerate", 2, replace(STARTED, invocation=how), "some/na me.yaml")
    assert named.startswith("# Use: accelerate launch --config_file 'some/na me.yaml' src/train_clip.py\n")
    module = replace(STARTED, invocation=replace(how, module="pkg.train"))
    assert "accelerate.yaml -m pkg.train\n" in export(pick(CANDIDATES[1]), BASE, "accelerate", 2, module)


def test_the_baselines_own_command_needs_no_change_of_the_script():
    started = replace(STARTED, flags={})
    own = export(pick(STARTED.baseline), BASE, "command", 2, started)
    assert "change the script" not in own and "First:" not in own  # it reads no exported file
    moved = pick({**STARTED.baseline, "zero_stage": 3 - int(STARTED.baseline.get("zero_stage", 0))})
    assert "change the script" in export(moved, BASE, "command", 2, started)


def test_notes_on_the_exported_file_go_with_a_command_that_reads_it_alone(monkeypatch):
    """Below a Trainer script's own command stood that its code has to name the exported file."""
    monkeypatch.setattr("autotune.report.export.started", lambda *_: replace(STARTED, family=TRAINER, flags={}))
    for candidate, told in ((STARTED.baseline, False), (CANDIDATES[2], True)):
        chosen = pick(candidate) | {"trial": 0}
        monkeypatch.setattr("autotune.report.export.pick_or_trial", lambda *_, chosen=chosen: chosen)
        found = replace(study_report(2), study={"name": "s", "base_config": BASE})
        assert any("parses no flags" in note for note in export_pick(found, None, None, "command").notes) == told


def test_training_arguments_are_those_of_the_winner_and_no_others():
    how = replace(
        STARTED.invocation, arguments=("--bf16", "true", "--per_device_train_batch_size=8", "--gradient_checkpointing")
    )
    started = replace(STARTED, flags=HF, invocation=how)
    line = export(pick(CANDIDATES[4]), BASE, "command", 2, started).splitlines()[-1]
    assert line == (
        "torchrun --standalone --nproc_per_node=2 train.py --per_device_train_batch_size=2 --gradient_accumulation_steps 4"
        " --deepspeed ds_config.json"
    )
    assert "--bf16" in export(pick(CANDIDATES[1]), BASE, "command", 2, started).splitlines()[-1]
    # What is the script's default already is not said.
    assert "accumulation" not in export(pick(CANDIDATES[2]), BASE, "command", 2, started)


def test_every_layer_is_stated_where_the_baselines_command_recomputes_every_second_one():
    """Its kwargs stayed beside --gradient_checkpointing, and went on leaving out every second layer."""
    own = ("--activation_checkpointing", "--activation_checkpointing_kwargs", '{"every_n_layers": 2}')
    started = replace(STARTED, flags=HF, invocation=replace(STARTED.invocation, arguments=own))
    line = export(pick(CANDIDATES[2]), BASE, "command", 2, started).splitlines()[-1]
    assert "--gradient_checkpointing" in line and "'{\"every_n_layers\": 1}'" in line


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        (CANDIDATES[0], "--bf16 False --gradient_checkpointing False"),
        (CANDIDATES[1], "--bf16 True --gradient_checkpointing False"),
        (CANDIDATES[2], "--bf16 True --gradient_checkpointing True"),
        (CANDIDATES[3], "--bf16 False --fp16 --activation_checkpointing --activation_checkpointing_kwargs"),
    ],
)
def test_switches_that_trl_turns_on_by_itself_are_stated_either_way(values, flags):
    """Left out they stayed on: a winner that recomputes nothing was exported as one that does."""
    how = replace(STARTED.invocation, arguments=("--gradient_checkpointing", "True", "--bf16=True"))
    stated = {STATED: ["--bf16", "--gradient_checkpointing"]}
    started = replace(STARTED, flags=HF | stated, invocation=how, family=TRAINER)
    for form in ("command", "hf-args"):
        text = export(pick(values), BASE, form, 2, started).replace("\n", " ")
        assert flags in text and text.count("--gradient_checkpointing") == flags.count("--gradient_checkpointing")


def test_changes_of_the_data_that_flags_carry_are_in_the_command():
    how = replace(STARTED.invocation, arguments=("--bf16", "--max_length", "1024"))
    changed = ("Data: `--max_length 128` instead of 1024.", "Data: `--pad_to_multiple_of 8` instead of None.")
    started = replace(STARTED, flags=HF, invocation=how)
    text = export(pick(CANDIDATES[1]) | {"script_side_changes": changed}, BASE, "command", 2, started)
    assert "--max_length 128 " in text.splitlines()[-1] and "--pad_to_multiple_of 8" in text.splitlines()[-1]
    assert "# Data" not in text


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, False),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 4.24264e-4}}}, True),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 4.24264e-4}}, "optimizer": None}, True),
    ],
)
def test_training_arguments_state_the_rate_that_the_json_does(stated, said):
    """Transformers ends a training whose flag differs from its JSON."""
    started = replace(STARTED, flags=HF, invocation=replace(STARTED.invocation, arguments=("--learning_rate", "3e-4")))
    chosen = pick(CANDIDATES[1])
    chosen["ds_config"] = {key: value for key, value in (chosen["ds_config"] | stated).items() if value is not None}
    line = export(chosen, BASE, "command", 2, started).splitlines()[-1]
    assert ("--learning_rate 0.000424264" in line) == said and ("--learning_rate 3e-4" in line) != said


def test_accelerates_launcher_takes_the_exported_config():
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "OMP_NUM_THREADS": "1"}
    text = "X=1 accelerate launch --config_file c.yaml train.py --bs 8 --lr 1e-3"
    line = command(CANDIDATES[1], command=text, world_size=2, environment=environment)[1]
    # Accelerate's other launcher leaves it to torch, which takes all cores for each rank.
    assert line == "X=1 OMP_NUM_THREADS=1 accelerate launch --config_file accelerate.yaml train.py --bs 3 --lr 1e-3"
    line = command(CANDIDATES[1], command="bash train.sh", world_size=2, environment=environment)[1]
    assert line == "OMP_NUM_THREADS=1 accelerate launch --config_file accelerate.yaml train.py --bs 3 --lr 1e-3"


def test_a_script_that_accelerate_compiles_is_compiled_as_it_was_measured():
    """`accelerate launch` compiles nothing where it starts DeepSpeed, whatever its config says."""
    change = (
        "DeepSpeed: the script is run without it; launch it with `accelerate launch --config_file accelerate.yaml`."
    )
    for backend, said in (("INDUCTOR", "ACCELERATE_DYNAMO_BACKEND=INDUCTOR "), ("NO", "")):
        how = {"environment": {"ACCELERATE_DYNAMO_BACKEND": backend}, "changes": (change,)}
        for text in ("accelerate launch train.py --bs 8 --lr 1e-3", "bash train.sh"):
            line = command(CANDIDATES[1], command=text, **how)[1]
            assert line == f"{said}accelerate launch --config_file accelerate.yaml train.py --bs 3 --lr 1e-3"


@pytest.mark.parametrize(
    "launch",
    [
        "accelerate launch --config_file my.yaml",
        "accelerate launch --config_file \\\n  my.yaml",
        "accelerate launch --config_file ~/my.yaml",
        "python train.py --prepare && accelerate launch --config_file my.yaml",
        "accelerate launch",
        "torchrun",
    ],
)
def test_the_accelerate_config_keeps_the_settings_of_the_users_own(launch, tmp_path, monkeypatch):
    own = {
        "distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4, "gpu_ids": "2,3",
        "main_process_port": 29511, "enable_cpu_affinity": True, "fsdp_config": {"fsdp_version": 2},
        "deepspeed_config": {"zero_stage": 2, "deepspeed_hostfile": "hosts", "gradient_clipping": 1.0},
    }  # fmt: skip
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(own))
    monkeypatch.setenv("HOME", str(tmp_path))
    if "config_file" not in launch:
        monkeypatch.setattr("autotune.report.started.DEFAULT_ACCELERATE_CONFIG", file)
    (tmp_path / "train.yaml").write_text("lr: 1e-3")
    arguments = ("--config_file", "train.yaml")  # of the script, and once taken for Accelerate's
    command = f"{launch} train.py {' '.join(arguments)}"
    how = replace(STARTED.invocation, working_dir=str(tmp_path), command=command, arguments=arguments)
    found = yaml.safe_load(export(pick(CANDIDATES[1]), BASE, "accelerate", 2, replace(STARTED, invocation=how)))
    section = found.pop("deepspeed_config")
    assert json.loads(section.pop("deepspeed_config_file")) and not {"fsdp_config", "mixed_precision"} & set(found)
    assert found["distributed_type"] == "DEEPSPEED" and found["num_processes"] == 2 and found["num_machines"] == 1
    if launch == "torchrun":
        assert "gpu_ids" not in found and set(section) == {"zero3_init_flag"}
    else:
        assert (
            found["gpu_ids"] == "2,3" and found["main_process_port"] == 29511 and found["enable_cpu_affinity"] is True
        )
        assert set(section) == {"deepspeed_hostfile", "zero3_init_flag"}


def test_a_script_of_accelerate_that_used_no_deepspeed_is_launched_so_that_it_does():
    change = (
        "DeepSpeed: the script is run without it; launch it with `accelerate launch --config_file accelerate.yaml`."
    )
    comments, line = command(CANDIDATES[1], changes=(change,))
    assert line.startswith("accelerate launch --config_file accelerate.yaml train.py --bs 3")
    assert comments == [
        "# First: `autotune export s --format accelerate -o accelerate.yaml`, the configuration that it reads."
    ]


def test_the_json_for_lightning_leaves_the_accumulation_to_its_trainer():
    """`DeepSpeedStrategy` ends a training whose configuration states it."""
    measured = pick(CANDIDATES[1])["ds_config"]
    stated = {family: deepspeed_config(measured, BASE, family) for family in ("Lightning", "")}
    assert "gradient_accumulation_steps" in stated[""]
    assert "gradient_accumulation_steps" not in stated["Lightning"]


def test_a_command_with_cpu_is_launched_so_that_deepspeed_trains():
    """Beside --cpu no DeepSpeed is used, and without it the launcher starts a process that finds no other rank."""
    change = (
        "Accelerate: leave `--cpu` (`use_cpu` of its file) out of `accelerate launch`: beside it DeepSpeed is not used."
    )
    text = "accelerate launch --num_processes 2 --cpu train.py --bs 8 --lr 1e-3"
    comments, line = command(CANDIDATES[1], command=text, changes=(change,))
    assert line.startswith("accelerate launch --config_file accelerate.yaml train.py") and "--cpu" not in line
    first, second, *rest = comments
    assert "--format accelerate -o accelerate.yaml`" in first and "-o ds_config.json`" in second
    assert not any("--cpu" in each for each in rest)


def test_no_file_of_the_tuned_command_is_written_over_or_named():
    """Frameworks hand DeepSpeed a dict, so that the file is known from the command alone; "auto" in it matched nothing."""
    how = Invocation(
        script="/home/me/train.py", working_dir="/home/me", arguments=("--deepspeed", "conf/ds_config.json"),
        command="accelerate launch --config_file=accelerate.yaml train.py --deepspeed conf/ds_config.json",
    )  # fmt: skip
    own = replace(STARTED, invocation=how, family=TRAINER)
    assert {Path("/home/me/conf/ds_config.json"), Path("/home/me/accelerate.yaml")} <= own.own_files
    assert own.exported == "tuned_ds_config.json" and own.free_name("accelerate.yaml") == "tuned_accelerate.yaml"
    text = export(pick(CANDIDATES[1]), BASE, "command", 2, replace(own, which="--trial 3 "))
    assert "# First: `autotune export s --trial 3 -o tuned_ds_config.json`" in text
    assert own.reads("hf-args") and not replace(own, family=ACCELERATE).reads("hf-args")


def test_the_configuration_that_was_tuned_is_not_written_over(tmp_path):
    """The next step named the user's own file: the study's baseline was lost."""
    own = replace(STARTED, config_source="conf/ds_config.json")
    text = export(pick(CANDIDATES[1]), BASE, "command", 2, own)
    assert "--deepspeed_config tuned_ds_config.json" in text
    assert replace(own, config_source="tuned_ds_config.json").exported == "tuned_tuned_ds_config.json"
    found = Exported(
        text="{}",
        notes=[],
        tuned={"zero_optimization": {"stage": 3}},
        own_files=frozenset({tmp_path / "ds_config.json"}),
    )
    (tmp_path / "ds_config.json").write_text("mine")
    (tmp_path / "base.json").write_text('{"zero_optimization": {"stage": 3}}')  # of a model.py, wherever it lies
    with pytest.raises(UserError, match="its baseline; write to another file"):
        found.write(tmp_path / "base.json")
    with pytest.raises(UserError, match="its baseline; write to another file"):
        found.write(tmp_path / "." / "ds_config.json")
    found.write(tmp_path / "tuned_ds_config.json")
    for name, text in (
        ("model.py", "mine"),
        ("study.yaml", "target: model.py\n"),
        ("sh.yaml", "command: ./train.sh\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=r"is a study or a program; write to another file"):
            found.write(tmp_path / name)
        assert (tmp_path / name).read_text() == text
    (tmp_path / "accelerate.yaml").write_text("num_processes: 2\n")  # of an earlier export
    found.write(tmp_path / "accelerate.yaml")
    os.mkfifo(tmp_path / "pipe")  # written to, and never read from: nobody would ever answer
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    found.write(tmp_path / "pipe")
    assert os.read(reader, 9) == b"{}"
    os.close(reader)
    assert (tmp_path / "ds_config.json").read_text() == "mine"


def test_a_trial_that_is_no_pick_is_exported_with_what_is_wrong_with_it(tmp_path):
    def behaviour(candidate):
        if candidate.checkpoint_every:
            return failed(Outcome.NOT_APPLIED, "no block was checkpointed")
        return report(candidate)

    space = [{"precision": ["fp32", "bf16"], "checkpoint_every": [0, 1]}]
    runner_of(tmp_path, Instant(behaviour), trials=4, sampler="grid", space=space, finalists=0).run()
    found = load("s", records.default_url(tmp_path), tmp_path / "s")
    said = {row["trial"]: export_pick(found, None, row["trial"], "deepspeed").notes for row in found.trials}
    by_kind = {
        (row["candidate"]["precision"], row["candidate"]["checkpoint_every"]): said[row["trial"]]
        for row in found.trials
    }
    assert not any("trial" in note for note in by_kind["fp32", 0])
    assert any("is not recommended: how it trains with other numerics" in note for note in by_kind["bf16", 0])
    assert any("ended with not applied: no block was checkpointed" in note for note in by_kind["fp32", 1])
    flags = export_pick(found, None, 1, "hf-args").notes  # go with that trial's JSON, not with the recommended one's
    assert any("`autotune export s --trial 1 -o ds_config.json`" in note for note in flags)
    text = export_pick(found, None, 1, "accelerate", Path("some/name.yaml")).text
    assert text.startswith("# Use: accelerate launch --config_file some/name.yaml train.py\n")


def test_a_trial_of_the_front_that_is_no_pick_is_exported_with_what_it_takes_besides_the_json():
    """Its point on the front alone was exported: the command said nothing of a batch that TrainingArguments carry."""
    row = {"trial": 1, "outcome": "complete", "script_side_changes": ["Gradient: it is twice as large."]}
    point = {"trial": 1, "doubt": "was not checked"}
    found = SimpleNamespace(name="s", picks={}, baseline=None, front=[point], trials=[{"trial": 0}, row])
    assert pick_or_trial(found, None, 1) == row | point


def test_a_trial_that_is_no_pick_is_exported_with_the_learning_rate_that_it_ran_with(tmp_path):
    """Its JSON stated the baseline's, beside the note that it states another one."""
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    changes = {"space": [{"micro_batch_size": [8, 16], "checkpoint_every": [0, 1]}], "global_batch": "free"}
    changes |= {"learning_rate_rule": "linear", "sampler": "grid", "trials": 4, "finalists": 0}
    runner_of(tmp_path, Instant(), planned={"base_config": base}, **changes).run()
    found = load("s", records.default_url(tmp_path), tmp_path / "s")
    shown = {point["trial"] for point in (*found.picks.values(), *found.front)}
    larger = {row["trial"] for row in found.trials if row["candidate"]["micro_batch_size"] == 16}
    exported = export_pick(found, None, min(larger - shown), "deepspeed")
    assert json.loads(exported.text)["optimizer"]["params"]["lr"] == 2e-3
    assert any("the JSON states 2 times your learning rate" in note for note in exported.notes)


@pytest.mark.parametrize("said", ["drop_in", "drop-in", "Drop-in", "lowest memory", "baseline"])
def test_a_pick_goes_by_the_words_of_the_answer_too(said):
    report = study_report()
    expected = report.baseline if said == "baseline" else report.picks[said.lower().replace("-", "_").replace(" ", "_")]
    assert pick_or_trial(report, said, None)["trial"] == expected["trial"]


def test_what_ran_on_several_machines_is_started_on_each_of_them(monkeypatch):
    """16 ranks of two machines were printed as `torchrun --standalone --nproc_per_node=16`, which starts them on one."""
    own = replace(STARTED.invocation, command="torchrun --nproc_per_node 8 train.py --bs 8 --lr 1e-3", world_size=8)
    monkeypatch.setattr("autotune.report.export.started", lambda *_: replace(STARTED, invocation=own))
    monkeypatch.setattr("autotune.report.export.pick_or_trial", lambda *_: pick(CANDIDATES[1]) | {"trial": 1})
    found = replace(study_report(2), study={"name": "s", "nodes": 2, "ranks": 16, "base_config": BASE})
    command, file = (export_pick(found, None, None, form) for form in ("command", "accelerate"))
    assert command.text.splitlines()[-1].startswith("torchrun --nproc_per_node 8 train.py --bs ")
    assert "num_processes: 16" in file.text
    said = [" ".join(each.notes) for each in (command, file)]
    assert "2 machines: start it on each" in said[0] and "2 machines: set num_machines" in said[1]


def test_a_model_has_no_command():
    with pytest.raises(UserError, match="no command line starts"):
        export(pick(CANDIDATES[0]), BASE, "command", 2)


def test_a_study_that_recommends_nothing_says_why_where_its_pick_is_asked_for(tmp_path):
    runner_of(tmp_path, Instant(), trials=2, finalists=0, constraints={"peak_memory_bytes": {"max": "1KiB"}}).run()
    found = load("s", records.default_url(tmp_path), tmp_path / "s")
    with pytest.raises(
        UserError, match=r"no pick 'recommended': 2 configurations completed, but none keeps .* Known: "
    ):
        export_pick(found, None, None, "deepspeed")
