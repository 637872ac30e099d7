"""Scripts of Lightning in real ranks: a strategy by name, by object, by LightningCLI, or none at all."""

import pytest
from support.bench import losses_without_hooks

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]
BOTH = {"micro_batch_size", "gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("arguments", "stage", "precision"),
    [
        (("--strategy", "deepspeed_stage_2"), 2, "fp32"),
        pytest.param(("--strategy", "object", "--precision", "bf16-mixed"), 3, "bf16", marks=pytest.mark.system),
        pytest.param(("--strategy", "auto"), 0, "fp32", marks=pytest.mark.system),
    ],
    ids=["name", "object", "none"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 3, "precision": "bf16", "checkpoint_every": 1,
         "micro_batch_size": 4, "gradient_accumulation_steps": 1},
        pytest.param(
            {"zero_stage": 1, "precision": "torch_autocast", "micro_batch_size": 3, "gradient_accumulation_steps": 3},
            marks=pytest.mark.system,
        ),
    ],
    ids=["z3", "z1"],
)  # fmt: skip
def test_what_was_asked_for_runs(bench, arguments, stage, precision, changes):
    found = bench.plan("lightning_fit.py", *arguments, ranks=2)
    assert found.workload.script.family == "Lightning" and set(found.workload.script.movable) == BOTH
    baseline = found.baseline
    assert (baseline.zero_stage, baseline.precision, baseline.gradient_accumulation_steps) == (stage, precision, 2)
    result = bench.applied(found, **changes)
    assert f"accumulate_grad_batches={changes['gradient_accumulation_steps']}" in str(result.side_changes)
    assert f"batch_size={changes['micro_batch_size']}` instead of 8" in str(result.side_changes)
    # Lightning and DeepSpeed both divide the loss by the accumulation.
    times = 2 / changes["gradient_accumulation_steps"]
    assert f"Gradient: it is {times:.3g} times as large" in str(result.side_changes)
    assert any("as Lightning does" in note for note in found.workload.caveats)


def test_a_batch_in_a_container_says_what_the_data_is(bench):
    """Lightning passes the whole batch to the engine: nothing was known of any script's data."""
    data = bench.plan("lightning_fit.py", "--strategy", "deepspeed_stage_2", ranks=2).workload.data
    assert data is not None and data.n_samples == 512 and data.fields


@pytest.mark.system
def test_another_number_of_devices_than_the_trials_ranks_is_said(bench):
    """A script that starts its two processes by itself was tuned on one rank, without a word."""
    name = "lightning_fit.py"
    two, one = (bench.plan(name, "--strategy", "deepspeed_stage_2", ranks=n).workload.caveats for n in (2, 1))
    said = "the script asks Lightning for 1 device, and trials have 2 ranks: `--ranks 1` trains as the script does"
    assert said in two and not any("asks Lightning" in text for text in one)


def test_a_presets_own_settings_stay(bench):
    config = bench.plan("lightning_fit.py", "--strategy", "deepspeed_stage_2", ranks=2).base_config["zero_optimization"]
    assert (config["stage"], config["allgather_bucket_size"], config["overlap_comm"]) == (2, 200_000_000, True)


def test_a_script_without_deepspeed_is_told_how_to_use_it(bench):
    result = bench.applied(bench.plan("lightning_fit.py", "--strategy", "auto"))
    assert any("DeepSpeedStrategy(config=" in change for change in result.side_changes)


@pytest.mark.system
def test_a_precision_plugin_gives_way(bench):
    found = bench.plan("lightning_fit.py", "--strategy", "deepspeed_stage_1", "--precision", "plugin", ranks=1)
    assert found.baseline.precision == "bf16"
    assert "precision plugin" in str(bench.applied(found, precision="fp32").side_changes)


@pytest.mark.system
def test_the_command_line_of_lightning_is_a_script_too(bench):
    found = bench.plan("lightning_cli.py", "fit", ranks=1)
    assert (found.baseline.zero_stage, found.baseline.precision, found.baseline.micro_batch_size) == (2, "bf16", 4)
    assert set(found.workload.script.movable) == BOTH
    bench.applied(found, zero_stage=3, micro_batch_size=6, precision="fp32")


@pytest.mark.system
def test_hooks_change_no_loss_of_a_script_without_deepspeed(bench, tmp_path):
    own = losses_without_hooks("lightning_fit.py", "--ordered", "--steps", "6", ranks=1, cwd=tmp_path)
    steps = [(first + second) / 2 for first, second in zip(own[::2], own[1::2], strict=True)]
    result = bench.applied(bench.plan("lightning_fit.py", "--ordered"), steps=6)
    # Adam's epsilon sees that Lightning and DeepSpeed both divide by the accumulation.
    assert result.losses == pytest.approx(steps, rel=1e-5) and len(steps) == 6
