"""Retired names of DeepSpeed's settings, as old configurations state them, and the spellings of types."""

import pytest

from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.parameter import parse_parameters

BATCH = {"train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize("old", [True, False, None])
def test_a_retired_offload_is_read_under_its_present_name_and_never_stands_beside_it(old):
    """Its baseline counted as not offloaded and ran offloaded, and DeepSpeed refused every candidate that offloads."""
    zero = {"stage": 3, "cpu_offload": old, "cpu_offload_param": old, "cpu_offload_use_pin_memory": True}
    base = BATCH | {"zero_optimization": zero}
    found = from_deepspeed(base, 1)
    assert (found.offload_optimizer, found.offload_param) == (("cpu", "cpu") if old else ("none", "none"))
    moved = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if old else {}
    assert found.to_deepspeed(base)["zero_optimization"] == {"stage": 3, **moved}
    assert base["zero_optimization"] is zero and "cpu_offload" in zero


def test_the_older_name_of_bf16_counts_where_the_present_one_says_nothing():
    """DeepSpeed trained in bfloat16 what was refused as an unknown key, and in a script passed for fp32."""
    for base, precision in [({}, "bf16"), ({"bf16": None}, "bf16"), ({"bf16": {"enabled": False}}, "fp32")]:
        config = BATCH | {"bfloat16": {"enabled": True, "check_grad_overflow": False}} | base
        found = from_deepspeed(config, 1)
        assert found.precision == precision
        made = found.to_deepspeed(config)
        assert "bfloat16" not in made
        on = precision == "bf16"
        assert made["bf16"] == ({"enabled": True, "check_grad_overflow": False} if on else {"enabled": False})


@pytest.mark.parametrize(
    ("path", "given", "name"),
    [("data_types.grad_accum_dtype", "float32", "fp32"), ("data_types.grad_accum_dtype", "torch.bfloat16", "bf16"),
     ("communication_data_type", "FP16", "fp16")],
)  # fmt: skip
def test_a_type_has_one_name_however_it_is_spelt(path, given, name):
    """Rules, forecasts and witnesses compare with that one, and passed `float32` by."""
    assert dict(Candidate.of({"micro_batch_size": 1, path: given}).config)[path] == name
    (parameter,) = parse_parameters({path: [None, given, name]}, "x")
    assert parameter.choices == (None, name)
    section, _, key = path.rpartition(".")
    base = BATCH | {"bf16": {"enabled": True}} | ({section: {key: given}} if section else {key: given})
    made = from_deepspeed(base, 1).to_deepspeed(base)
    assert (made[section] if section else made)[key] == name


def test_null_leaves_a_setting_of_the_configuration_to_deepspeed():
    """As in a search space; DeepSpeed refuses it for most settings, which ended the baseline in pydantic's error."""
    base = BATCH | {"steps_per_print": None, "zero_optimization": {"stage": 1, "contiguous_gradients": None}}
    assert from_deepspeed(base, 1).to_deepspeed(base)["zero_optimization"] == {"stage": 1}
