"""Scripts of transformers' Trainer and of Accelerate in real ranks: what is found, what runs, what is saved."""

import functools
import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from support.bench import losses_without_hooks

from autotune.errors import UserError
from autotune.report import export

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]
TRAINER, ACCELERATE = "transformers' Trainer", "Accelerate"
BOTH = {"micro_batch_size", "gradient_accumulation_steps"}
FULL = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": 512},
    },
    "zero_optimization": {
        "stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    },
}  # fmt: skip
SAVING = """--save_strategy steps --save_steps 1 --eval_strategy steps --eval_steps 1
    --load_best_model_at_end --push_to_hub --report_to all"""


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "ds.json"
    path.write_text(json.dumps(FULL))
    return path


@pytest.fixture(scope="module")
def script(bench, full):
    """The plan of a script by what it is called here."""
    arguments = {
        "trainer": ("hf_trainer.py", *shlex.split(SAVING)),
        "trainer with a configuration": (
            "hf_trainer.py", "--deepspeed", str(full), "--per_device_train_batch_size", "4",
            "--gradient_accumulation_steps", "2", "--num_train_epochs", "4", "--bf16", "--gradient_checkpointing",
            "--n_layer", "2",
        ),
        "accelerate": ("accelerate_loop.py", "--split_batches"),
        "plugin": ("accelerate_plugin.py",),
    }  # fmt: skip
    return lambda name: bench.plan(*arguments[name], ranks=2)


@pytest.mark.parametrize(
    ("name", "family", "batch", "stage", "precision", "every"),
    [
        ("trainer", TRAINER, (8, 1), 0, "fp32", 0),
        ("trainer with a configuration", TRAINER, (4, 2), 3, "bf16", 1),
        ("accelerate", ACCELERATE, (8, 2), 0, "fp32", 0),
        pytest.param("plugin", ACCELERATE, (4, 2), 3, "bf16", 1, marks=pytest.mark.system),
    ],
)
def test_a_probe_finds_the_baseline_and_everything_moves(script, name, family, batch, stage, precision, every):
    found = script(name)
    assert found.workload.script.family == family and set(found.workload.script.movable) == BOTH
    baseline = replace(found.baseline, micro_batch_size=batch[0], gradient_accumulation_steps=batch[1])
    assert found.baseline == replace(baseline, zero_stage=stage, precision=precision, checkpoint_every=every)


MICRO, ACCUM, EVERY = "micro_batch_size", "gradient_accumulation_steps", "checkpoint_every"
CELLS = {
    "z0": {"zero_stage": 0, "precision": "fp32", MICRO: 2, ACCUM: 3, EVERY: 2},
    "z1": {"zero_stage": 1, "precision": "bf16", MICRO: 3, ACCUM: 2, EVERY: 0},
    "z2": {"zero_stage": 2, "precision": "torch_autocast", MICRO: 5, EVERY: 1},
    "z3": {"zero_stage": 3, "precision": "bf16", MICRO: 4, ACCUM: 1, EVERY: 1},
}


@pytest.fixture(scope="module")
def applied(bench, script):
    """A trial of a cell, run once for all tests."""
    return functools.cache(lambda name, cell: bench.applied(script(name), **CELLS[cell]))


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("trainer", "z3"),
        # From ZeRO 3, bf16 and recomputation to none of them.
        ("trainer with a configuration", "z0"),
        ("accelerate", "z3"),
        *(("trainer", cell) for cell in ("z0", "z1", "z2")),
        *((name, "z1") for name in ("trainer with a configuration", "accelerate")),
        *(("plugin", cell) for cell in ("z0", "z2")),
    ],
)
def test_what_was_asked_for_runs_and_leaves_nothing(applied, name, cell):
    changes, result = CELLS[cell], applied(name, cell)
    assert bool(changes["checkpoint_every"]) == bool(result.observed.checkpointed_blocks)
    assert not any("same data" in caveat for caveat in result.caveats)


@pytest.mark.system
def test_losses_that_a_trainer_adds_up_are_compared_per_micro_batch(bench, script):
    """Each other accumulation was refused as diverged, its losses and gradients being those of a sum."""
    assert not script("trainer").workload.script.adds_up
    found = bench.plan("hf_trainer.py", "--adds_up", "--gradient_accumulation_steps", "2", "--report_to", "none")
    assert found.workload.script.adds_up and any("adds up the losses" in text for text in found.workload.caveats)
    batch = found.baseline.global_batch_size(1)
    whole, parts = (
        bench.applied(found, micro_batch_size=batch // n, gradient_accumulation_steps=n, check_gradient=True)
        for n in (1, 4)
    )
    assert whole.losses[0] == pytest.approx(parts.losses[0], rel=0.02)
    assert whole.gradient.norm == pytest.approx(parts.gradient.norm, rel=0.1)
    assert any(text.startswith("Gradient: it is 2 times as large") for text in parts.side_changes)


def steps_of_two(losses):
    """Sums of the first six pairs, in the type that a rank sums them in on a CPU."""
    numbers = np.array(losses[:12])
    return (numbers[::2] + numbers[1::2]).tolist()


def picked(plan, **changes):
    """A candidate as the report gives it to an export."""
    candidate = replace(plan.baseline, **changes)
    config = export.deepspeed_config(plan.ds_config(candidate), plan.base_config, plan.workload.script.family)
    return {"candidate": candidate.values(), "ds_config": config}


@pytest.mark.system
def test_the_exported_flags_train_a_trainer_as_the_trial_did(bench, tmp_path):
    found = bench.plan("hf_trainer.py", "--max_steps", "6", "--save_strategy", "no", "--report_to", "none")
    changes = {"zero_stage": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "checkpoint_every": 2}
    result = bench.applied(found, steps=6, **changes)
    pick = picked(found, **changes)
    flags = shlex.split(export.export(pick, found.base_config, "hf-args", 1).replace("\n", " "))
    (tmp_path / "ds_config.json").write_text(export.export(pick, found.base_config, "deepspeed", 1))
    own = losses_without_hooks(
        "hf_trainer.py", *found.spec.script_args, "--output_dir", "out", *flags, ranks=1, cwd=tmp_path
    )
    assert result.losses == steps_of_two(own)
    assert "add `--deepspeed ds_config.json`" in str(result.side_changes)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("clip", "norm"), [("torch", 0.5), ("accelerator", 1.0), ("no", 0.0)])
def test_a_script_without_deepspeed_keeps_the_norm_at_which_it_clips_gradients(bench, clip, norm, monkeypatch):
    """Accelerate would fill in 1. With `accelerate launch --cpu` it would not use DeepSpeed at all."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    found = bench.plan("accelerate_loop.py", "--clip", clip)
    assert found.base_config["gradient_clipping"] == norm
    assert found.ds_config(replace(found.baseline, zero_stage=1))["gradient_clipping"] == norm


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("accelerate_loop.py", ("--by_hand", "--gradient_accumulation_steps", "1"),
         "with DeepSpeed Accelerate updates the weights in each backward"),
        ("accelerate_loop.py", ("--largest", "4"), "CUDA out of memory.*Give the script a batch that fits"),
        ("hf_trainer.py", ("--predicts",), "Trainer.predict before it trains"),
    ],
)  # fmt: skip
def test_what_trials_would_train_otherwise_is_refused_in_a_sentence(bench, name, arguments, said):
    """An accumulation by hand was read as none; a batch that does not fit was lowered by the script."""
    with pytest.raises(UserError, match=said):
        bench.plan(name, *arguments)


@pytest.mark.system
def test_the_exported_json_trains_with_accelerate_as_the_trial_did(bench, tmp_path, monkeypatch):
    found = bench.plan("accelerate_loop.py")
    result = bench.applied(found, steps=6, zero_stage=1, micro_batch_size=4)
    pick = picked(found, zero_stage=1, micro_batch_size=4)
    (tmp_path / "ds.json").write_text(export.export(pick, found.base_config, "deepspeed", 1))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    own = losses_without_hooks("accelerate_loop.py", "--batch_size", "4", "--epochs", "1", ranks=1, cwd=tmp_path)
    assert result.losses == [loss / 2 for loss in steps_of_two(own)]
    assert "accelerate launch --config_file" in str(result.side_changes)


@pytest.mark.system
def test_bf16_that_transformers_refuses_on_a_cpu_is_out_of_reach(bench, script):
    result = bench.applied(script("trainer"), precision="bf16")
    (refused,) = result.unreproducible
    assert "On a CPU transformers refuses `--bf16`" in refused
    assert bench.applied(script("trainer with a configuration"), precision="bf16").unreproducible == []


def test_what_has_to_be_changed_beside_the_json_is_told(applied):
    changes = str(applied("trainer with a configuration", "z0").side_changes)
    assert "`--per_device_train_batch_size 2` instead of 4" in changes and "leave out `--bf16`" in changes
    assert "--deepspeed" not in changes


def test_weights_loaded_in_16_bits_are_the_baselines_and_are_widened_where_a_candidate_needs_it(bench):
    found = bench.plan("hf_trainer.py", "--half", "--resume_from_checkpoint", "nowhere")
    assert found.baseline.precision == "bf16" and any("without an fp32 copy" in note for note in found.notes)
    assert "add `--bf16`" in str(bench.applied(found).side_changes)
    assert "load its weights in 32 bits" in str(bench.applied(found, precision="torch_autocast").side_changes)


def test_fsdp_is_refused_in_one_sentence(bench):
    said = "the script trains with FSDP, beside which DeepSpeed cannot be used; run it without FSDP"
    with pytest.raises(UserError, match=said):
        bench.plan("hf_trainer.py", "--fsdp", "full_shard")


@pytest.mark.parametrize(
    ("name", "cell", "said"),
    [
        ("trainer", "z3", "Trainer.save_model is not"),
        pytest.param("plugin", "z0", "nothing is uploaded to the Hugging Face Hub", marks=pytest.mark.system),
    ],
)
def test_saving_and_uploading_are_not_carried_out(applied, name, cell, said):
    assert said in str(applied(name, cell).caveats)
