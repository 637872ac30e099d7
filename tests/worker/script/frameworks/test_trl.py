"""Scripts of TRL's SFTTrainer, which packs samples into rows, and of its GRPOTrainer, which generates what it trains on."""

import pytest
from support.paths import SCRIPTS

from autotune.trial.command import STATED
from autotune.trial.request import TailCheck
from autotune.trial.result import Outcome
from autotune.trial.target import inspect_target

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("home")]
IMPORTS = inspect_target(SCRIPTS / "trl_sft.py").imports


@pytest.mark.smoke
def test_rows_that_trl_packs_are_counted_as_samples_without_padding_up_to_the_worst_of_them(bench):
    found = bench.plan("trl_sft.py", "--packing", "--max_length", "128", "--per_device_train_batch_size", "4")
    cannot, data, profile = dict(found.setting.data_cannot), found.workload.data, found.workload.profile
    assert all("packs its samples already" in cannot[name] for name in ("packing", "max_length", "pad_to_multiple_of"))
    assert data.longest == 128 and 120 < profile.sequence <= 128 and "tokens/s compare" in " ".join(found.notes)
    # All rows are full, so that each rank's own batches have the shape of the worst one.
    check = TailCheck(longest_at=data.longest_at)
    result = bench.measure(found, steps=6, tail=check, lengths=data.table, zero_stage=1)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.tail["length"] == 128 and result.tail["samples"] == result.observed.loader_batch_size == 4
    assert result.taken_in["real_tokens"] == result.taken_in["tokens"]
    assert result.expected["tokens"] == pytest.approx(result.observed.tokens_per_step, rel=0.05)


def test_a_token_budget_is_trls_packing_with_as_many_samples_a_step_on_average(bench):
    found = bench.plan("trl_sft.py", "--max_length", "128", "--per_device_train_batch_size", "8")
    data, cannot = found.workload.data, dict(found.setting.data_cannot)
    assert not {"packing", "token_budget", "max_length", "pad_to_multiple_of"} & set(cannot)
    assert found.workload.script.flags[STATED] == ["--bf16", "--gradient_checkpointing"]
    mean = sum(length * n for length, n in data.table) / data.n_seen
    result = bench.measure(
        found, steps=8, tail=TailCheck(longest_at=data.longest_at), lengths=data.table, zero_stage=2,
        config=(("data.token_budget", True),), changed_from={"data.token_budget": None},
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    said, tokens = " ".join(result.side_changes), round(8 * mean)
    for flag in ("--packing True", f"--max_length {tokens}", "--per_device_train_batch_size 1"):
        assert f"`{flag}` instead of" in said
    assert result.observed.samples_per_step == 8 == pytest.approx(result.expected["samples"], rel=0.05)
    assert result.taken_in["tokens"] == result.taken_in["real_tokens"] and len(set(result.taken_in["samples"])) > 1
    assert result.tail["length"] == tokens and result.expected["tokens"] == pytest.approx(tokens, rel=0.05)


def test_what_is_generated_from_a_draw_is_counted_where_it_is_trained_on(bench):
    """Each micro-batch draws the prompts of a whole step again, and was taken for as many samples."""
    batch = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 4"
    found = bench.plan("trl_grpo.py", *batch.split(), "--max_completion_length", "4", "--bf16", "False")
    assert (found.baseline.micro_batch_size, found.baseline.gradient_accumulation_steps) == (4, 2)
    assert set(found.workload.script.movable) == {"micro_batch_size", "gradient_accumulation_steps"}
    result = bench.applied(found, micro_batch_size=8, gradient_accumulation_steps=1, tail=TailCheck())
    assert result.samples_per_step == 8 and not result.expected
