"""Parts of the formulas that only a device shows, held against what one rank took on an H100 (DeepSpeed 0.19.8)."""

from dataclasses import replace

import pytest

from autotune.forecast.knobs import Knobs
from autotune.forecast.memory import memory_phases
from autotune.forecast.step_time import STEP_OPS_16, step_time_terms
from autotune.space.candidate import Candidate
from autotune.trial.profile import Machine, Pass, Profile

TENSORS = 292
PASS = Pass(
    moments=((0.0, 1e6, 0.0),), kept_bytes=(0.0, 1e6), largest_bytes=(0.0, 1e6), flops=(0.0, 1e12), moved_bytes=(0.0, 1e9), n_ops=1000.0
)  # fmt: skip
H100 = Machine(
    accelerator="cuda", world_size=1, flops={"fp32": 5e13, "bf16": 7e14}, memory_bytes_per_s=3e12, link_alpha_s=2e-5, link_bytes_per_s=1e11,
    op_s=1.6e-5, host_op_s=4e-6, optimizer_bytes_per_s=2e12, workspace_bytes=1e8, device_bytes=8.5e10,
)  # fmt: skip


def profile(n):
    return Profile(
        n_parameters=n, n_trainable=n, flops_per_sample=1e12, activation_bytes_per_sample=1e6, checkpointed_bytes_per_sample=1e6,
        n_blocks=24, sequence=1024, passes={"fp32/0": PASS, "bf16/0": PASS}, sizes=((n // TENSORS, TENSORS),), optimizer_scratch=0.0,
    )  # fmt: skip


def in_step_bytes(n, **values):
    phases = memory_phases(Knobs.of([Candidate.of({"micro_batch_size": 1, **values})]), profile(n), H100)
    return sum(float(term[0]) for name, term in phases["step"].items() if name != "allocator")


def seconds(name, machine=H100, **values):
    terms = step_time_terms(Knobs.of([Candidate.of({"micro_batch_size": 1, **values})]), profile(350_000_000), machine)
    return float(terms[name][0])


@pytest.mark.parametrize(
    ("n", "values", "allocated"),
    [
        (1_315_819_520, {"zero_stage": 1}, 29.02e9),
        (354_871_296, {"zero_stage": 1}, 7.88e9),
        (354_871_296, {"zero_stage": 3}, 8.88e9),
        (124_475_904, {"zero_stage": 1}, 2.81e9),
        (124_475_904, {"zero_stage": 2}, 2.81e9),
        (124_475_904, {"zero_stage": 3}, 3.81e9),
        (124_475_904, {"zero_stage": 0}, 2.59e9),
        (
            124_475_904,
            {"zero_stage": 1, "bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True},
            1.62e9,
        ),
    ],
)
def test_what_a_step_holds_is_what_an_h100_allocated(n, values, allocated):
    assert in_step_bytes(n, precision="bf16", **values) == pytest.approx(allocated, rel=0.02)


@pytest.mark.parametrize(
    ("values", "per_element"),
    [
        ({"zero_stage": 1, "precision": "fp16", "data_types.grad_accum_dtype": "fp32"}, 2 + 4 + 8 + 4),
        ({"zero_stage": 2, "precision": "bf16", "data_types.grad_accum_dtype": "fp32"}, 2 + 4 + 8 + 4),
        ({"zero_stage": 3, "precision": "bf16", "data_types.grad_accum_dtype": "fp32"}, 2 + 4 + 8 + 4 + 4),
        ({"zero_stage": 3}, 4 + 4 + 8 + 4 + 4),
    ],
)
def test_what_a_step_holds_is_what_deepspeed_allocates_for_each_element(values, per_element):
    """Counted on one rank: weights, master weights (stage 3 clones those of 32 bits, too), states, gradients, their flat copy."""
    n, bucket = 350_000_000, 5e8 * (4 if "precision" not in values else 2) * (values["zero_stage"] == 3)
    assert in_step_bytes(n, **values) - 1e8 - bucket == pytest.approx(per_element * n, rel=0.001)


@pytest.mark.parametrize(
    ("values", "allocated"),
    [
        ({"zero_stage": 1}, 9.20e9),
        ({"zero_stage": 2}, 9.20e9),
        ({"zero_stage": 3}, 10.45e9),
        ({"zero_stage": 1, "gradient_accumulation_steps": 4}, 10.46e9),
        ({"zero_stage": 2, "gradient_accumulation_steps": 4}, 9.45e9),
    ],
)
def test_buckets_count_at_the_loss_only_where_they_are_there_before_the_first_gradient(values, allocated):
    """A GPT of 125 million parameters whose memory peaks at the loss; its pass as it was traced there."""
    traced = replace(PASS, moments=((0.0, 0.9241e9, 0.0), (0.0, 0.512e9, 768.0)))
    workload = replace(profile(124_475_904), passes={"fp32/0": traced, "bf16/0": traced})
    candidate = Candidate.of({"micro_batch_size": 8, "precision": "bf16", **values})
    found = memory_phases(Knobs.of([candidate]), workload, H100)["backward"]
    assert sum(float(term[0]) for name, term in found.items() if name != "allocator") == pytest.approx(
        allocated, rel=0.02
    )


def test_deepspeeds_steps_of_16_bit_weights_launch_for_each_tensor_and_torchs_do_not():
    assert seconds("bookkeeping", precision="torch_autocast") == 0.0
    lone, sharded = (seconds("bookkeeping", precision="bf16", zero_stage=stage) for stage in (0, 1))
    assert lone > sharded > 0.01
    # What the optimizer's own work takes of the device hides as much of the launches.
    slow = replace(H100, optimizer_bytes_per_s=1e9)
    assert seconds("bookkeeping", slow, precision="bf16") == pytest.approx(0.1 * STEP_OPS_16 * TENSORS * H100.op_s)


def test_zeros_step_launches_for_the_tensors_of_a_ranks_own_shard_and_bf16_optimizers_in_each_micro_step():
    """As counted on real steps of one and two ranks: 15 operations for each tensor of a shard, 2 where weights are of 32 bits."""
    names = ("16", "32", "sums")
    settings = ({"precision": "bf16"}, {}, {"precision": "bf16", "data_types.grad_accum_dtype": "fp32"})
    # All that is left is the step's.
    slow = replace(H100, accelerator="cpu", optimizer_bytes_per_s=1e30, host_op_s=1e-30)
    ops = {
        name: [
            seconds("bookkeeping", replace(slow, world_size=n), zero_stage=1, **values) / H100.op_s / TENSORS
            for n in (1, 4)
        ]
        for name, values in zip(names, settings, strict=True)
    }
    assert ops == {"16": pytest.approx([15, 15 / 4]), "32": pytest.approx([2, 2 / 4]), "sums": pytest.approx([2, 2])}


def test_stage_3_is_priced_by_the_hosts_python_and_not_by_the_devices_launches():
    twice = replace(H100, host_op_s=2 * H100.host_op_s)
    assert seconds("partitioning", twice, zero_stage=3) > 1.5 * seconds("partitioning", zero_stage=3)
    assert seconds("partitioning", replace(H100, op_s=3.2e-5), zero_stage=3) == pytest.approx(
        seconds("partitioning", zero_stage=3), rel=0.1
    )
