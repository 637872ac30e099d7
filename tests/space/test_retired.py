"""Retired names of DeepSpeed's settings, as old configurations state them."""

import pytest

from autotune.space.candidate import from_deepspeed

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
