"""Memory and step time from formulas: the tables of ZeRO, DeepSpeed's real allocations, what grows with what."""

import itertools
import random
from dataclasses import fields, replace

import numpy as np
import pytest

from autotune.forecast import memory, step_time
from autotune.forecast.communication import in_groups_s
from autotune.forecast.knobs import Knobs
from autotune.forecast.prediction import Prediction
from autotune.forecast.predictor import AnalyticPrior, Predictor, probability_below
from autotune.forecast.regression import Data, Design, fit
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import set_path
from autotune.space.legality import inherited_settings
from autotune.trial.profile import Machine, Pass, Profile

P, N = 1_000_000, 4
ZERO = "zero_optimization."
PROFILE = Profile(
    n_parameters=P, n_trainable=P, flops_per_sample=6e9, activation_bytes_per_sample=4e6, checkpointed_bytes_per_sample=1e6, n_blocks=4,
    sequence=128,
)  # fmt: skip
GPU = Machine(
    accelerator="cuda",
    world_size=N,
    flops={"fp32": 1e13, "bf16": 1e14},
    memory_bytes_per_s=1e12,
    link_alpha_s=1e-5,
    link_bytes_per_s=1e10,
)


def memory_terms(knobs, profile, machine):
    return memory.at_peak(memory.memory_phases(knobs, profile, machine), guessed=profile.guessed)


def of(*candidates, terms=memory_terms, profile=PROFILE, machine=GPU):
    return terms(Knobs.of(candidates), profile, machine)


def states(**values):
    """Weights, gradients, master and optimizer states in the second of two micro-steps, in bytes per parameter."""
    found = of(Candidate.of({"micro_batch_size": 1000, "gradient_accumulation_steps": 2, **values}))
    return [round(float(found[name][0]) / P, 6) for name in ("weights", "gradients", "master", "states")]


def seconds(name, **values):
    return float(of(Candidate.of({"micro_batch_size": 8, **values}), terms=step_time.step_time_terms)[name][0])


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, [2, 2, 4, 8]), (1, [2, 2, 1, 2]), (2, [2, 0.5, 1, 2]), (3, [0.5, 0.5, 1, 2])]
)  # 16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N
def test_mixed_precision_adam_takes_the_bytes_of_the_zero_paper(stage, expected):
    assert states(zero_stage=stage, precision="bf16") == expected


@pytest.mark.parametrize(("stage", "total"), [(0, 16), (1, 8 + 12 / N), (2, 4 + 16 / N), (3, 20 / N)])
def test_in_fp32_zero_clones_a_master_shard_and_stage_0_does_not(stage, total):
    assert sum(states(zero_stage=stage)) == pytest.approx(total)


def test_fp32_sums_of_16_bit_gradients_are_unsharded_at_stage_1():
    accumulating = {"precision": "bf16", "data_types.grad_accum_dtype": "fp32"}
    assert states(zero_stage=1, **accumulating)[1] == 6
    assert states(zero_stage=2, **accumulating)[1] == 4 / N


def test_bf16_master_and_states_take_two_bytes_each():
    settings = {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    assert states(zero_stage=1, precision="bf16", **settings)[2:] == [2 / N, 4 / N]


def test_an_offloaded_optimizer_leaves_the_device():
    assert states(zero_stage=2, precision="bf16", offload_optimizer="cpu") == [2, 0, 0, 0]


@pytest.mark.parametrize(("stage", "largest"), [(1, 2 * 600_000), (2, 2 * 600_000), (3, 0)])
def test_what_stages_1_and_2_offload_passes_a_buffer_of_the_largest_gradient(stage, largest):
    own, apart = replace(PROFILE, sizes=((600_000, 1), (400_000, 1))), ({"offload_optimizer": "cpu"}, {})
    candidates = [Candidate(micro_batch_size=1, zero_stage=stage, precision="bf16", **each) for each in apart]
    with_it, without = memory.memory_phases(Knobs.of(candidates), own, GPU)["step"]["buckets"]
    assert with_it - without == largest


@pytest.mark.parametrize(("offload", "held"), [("none", 1 / N + 1 / 2), ("cpu", 0)])
def test_the_second_copy_of_the_weights_is_where_the_first_is(offload, held):
    assert states(zero_stage=3, precision="bf16", offload_param=offload, **{HPZ: 2})[0] == 2 * held


def test_weights_of_4_bits_are_shared_and_gathered_as_they_are_held_and_their_scales_stay():
    """As with bitsandbytes 0.50 and two ranks: 512 x 512 weights are 65,536 elements in bfloat16, their 4096 scales in each rank."""
    four = replace(PROFILE, quantized=900_000, n_trainable=1000)
    candidate = Candidate.of({"micro_batch_size": 1, "zero_stage": 3, "precision": "bf16", SMALL: 0})
    share = (100_000 * 2 + 900_000 * 0.5) / 2 / P
    weights = phase("backward", candidate, profile=four)["weights"]
    assert weights == pytest.approx(share * 2 * P / N + 900_000 / 64 * 4)
    (few, _), (many, _) = (step_time.gathered_elements(Knobs.of([candidate]), each) for each in (four, PROFILE))
    assert few[0] == pytest.approx(share * many[0])
    few, many = (phase("backward", candidate, profile=each)["gathered"] for each in (four, PROFILE))
    assert few == pytest.approx(share * many)


def test_frozen_parameters_cost_their_weights_only_and_are_sharded_at_stage_3_only():
    frozen = Profile(
        n_parameters=P, n_trainable=P // 10, flops_per_sample=1e9, activation_bytes_per_sample=1e9, checkpointed_bytes_per_sample=1e9,
        n_blocks=4, sequence=1,
    )  # fmt: skip
    at_2, at_3 = (
        of(Candidate(micro_batch_size=1, zero_stage=stage, precision="bf16"), profile=frozen) for stage in (2, 3)
    )
    assert at_2["weights"][0] == 2 * P and at_3["weights"][0] == 2 * P / N
    assert at_2["states"][0] == 8 * P / 10 / N


@pytest.mark.parametrize(
    ("settings", "elements"),
    [({}, 5e8), ({ZERO + "overlap_comm": True}, 1e9), ({ZERO + "contiguous_gradients": False}, 0)],
)
def test_a_device_holds_the_whole_bucket_even_for_a_smaller_model(settings, elements):
    found = of(Candidate.of({"micro_batch_size": 100, "zero_stage": 2, "precision": "bf16", **settings}))
    assert found["buckets"][0] == 2 * elements


@pytest.mark.parametrize(("stage", "per_element"), [(1, 4 + 4), (2, 4 + 4), (3, 2 + 4)])
def test_under_autocast_a_device_holds_a_bucket_for_each_type_that_gradients_travel_in(stage, per_element):
    """Those of linear layers travel in 16 bits, those of norms and embeddings in 32."""
    autocast = Candidate(micro_batch_size=1, zero_stage=stage, precision="torch_autocast")
    assert phase("backward", autocast)["buckets"] == per_element * 5e8
    on_cpu = phase("backward", autocast, replace(GPU, accelerator="cpu", world_size=1))["buckets"]
    assert on_cpu <= 4 * P  # what is touched


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"precision": "bf16", "offload_optimizer": "cpu"}])
def test_fp32_sums_at_stage_1_without_bf16_optimizer_are_whole_and_fill_a_bucket(settings):
    summed = {"micro_batch_size": 1, "zero_stage": 1, "data_types.grad_accum_dtype": "fp32", **settings}
    found = phase("backward", Candidate.of({**summed, "gradient_accumulation_steps": 2}))
    through = 2 * PROFILE.largest_parameter if "offload_optimizer" in settings else 0
    assert (found["gradients"], found["buckets"]) == (4 * P, 4 * 5e8 + through)
    # What is not in the bucket, and the own part of the sums; the bucket, its flat copy and what travels of it.
    small = phase("reduce", Candidate.of({**summed, ZERO + "reduce_bucket_size": P // 2}))
    assert (small["gradients"], small["buckets"]) == (4 * P / 2 + 4 * P / N, (4 + 4 + 2) * P / 2 + through)


def test_fp32_sums_of_stage_2_stay_on_the_device_where_the_optimizer_is_offloaded():
    assert states(
        zero_stage=2, precision="bf16", offload_optimizer="cpu", **{"data_types.grad_accum_dtype": "fp32"}
    ) == [2, 4 / N, 0, 0]


def phase(name, candidate, machine=GPU, profile=PROFILE):
    return {
        key: float(column[0])
        for key, column in memory.memory_phases(Knobs.of([candidate]), profile, machine)[name].items()
    }


def test_on_a_cpu_only_the_touched_part_of_a_bucket_counts():
    reduced = phase("reduce", Candidate(micro_batch_size=1, zero_stage=1), Machine.guess("cpu", 2))
    assert reduced["buckets"] == 2 * 4 * P  # the bucket, and the flat copy that travels
    assert reduced["gradients"] == 4 * P / 2  # the own part, copied out of it


def test_an_optimizer_steps_on_a_flat_copy_of_its_shard_and_needs_scratch_for_it():
    # torch's AdamW: sqrt(v) and sqrt(v) / c, 4 bytes each; with 16-bit weights the gradients are cast to fp32 first.
    assert phase("step", Candidate(micro_batch_size=1, zero_stage=1, precision="bf16"))["step"] == (4 + 8) * P / N
    assert phase("step", Candidate(micro_batch_size=1, precision="bf16"))["gradients"] == 2 * P


@pytest.mark.parametrize(
    ("built", "setting", "expected"),
    [
        (0.0, {"precision": "bf16"}, 2),  # it waits on the host, where it is cast
        (0.0, {"precision": "bf16", "offload_param": "cpu", "offload_optimizer": "cpu"}, 2),
        (0.0, {}, 4),
        (4.0, {"precision": "bf16"}, 4),  # the script had moved it in fp32
    ],
)
def test_without_zero_init_the_whole_model_is_on_each_device_before_stage_3_shards_it(built, setting, expected):
    adapters = replace(PROFILE, n_trainable=P // 100, built_bytes=built)
    whole = phase("loading", Candidate.of({"micro_batch_size": 1, "zero_stage": 3, **setting}), profile=adapters)
    assert whole["weights"] + whole["loading"] == expected * P
    assert whole["gradients"] == whole["master"] == whole["states"] == whole["allocator"] == 0


def test_the_whole_model_is_the_peak_of_stage_3_where_many_ranks_train_little():
    """Traced with 12 ranks: 2.02 bytes a parameter while the engine is made, then 1.31 (decision 14)."""
    adapters = replace(PROFILE, n_trainable=P // 8, activation_bytes_per_sample=0, sizes=((P // 8, 8),))
    settings = {f"stage3_{name}": 0 for name in ("max_reuse_distance", "prefetch_bucket_size")}
    settings = {ZERO + name: value for name, value in {**settings, "reduce_bucket_size": 1000}.items()}
    candidate = Candidate.of({"micro_batch_size": 1, "zero_stage": 3, "precision": "bf16", **settings})
    many = replace(GPU, world_size=12, workspace_bytes=1.0)
    whole, in_shards = (
        of(candidate, profile=replace(adapters, built_bytes=built), machine=many) for built in (0.0, None)
    )
    assert sum(whole.values())[0] == pytest.approx(2 * P, rel=1e-3) and in_shards["loading"][0] == 0
    assert sum(in_shards.values())[0] < 1.5 * P


@pytest.mark.parametrize(("stage", "elements"), [(0, 0), (1, 0.5), (2, 0.5), (3, 0)])
def test_stages_1_and_2_flatten_what_is_trained_beside_the_originals_where_the_device_has_room(stage, elements):
    half, candidate = replace(PROFILE, n_trainable=P // 2), Candidate(micro_batch_size=1, zero_stage=stage)
    room = (memory.WORKSPACE_BYTES["cuda"] + 4 * P + 4 * P / 2) / memory.ROOMY + 1
    found = [
        phase("loading", candidate, replace(GPU, device_bytes=size), half)["loading"] for size in (room, room - 2, 0)
    ]
    assert found == [4 * elements * P, 0, 0]  # else on the host


def test_an_optimizer_that_takes_all_tensors_at_once_needs_scratch_for_every_parameter_at_stage_0():
    # torch's AdamW on CUDA: sqrt(v) of all tensors.
    at_once = replace(PROFILE, optimizer_scratch=4.0, scratch_for_all=True, sizes=((P // 10, 10),))
    one = replace(at_once, optimizer_scratch=8.0, scratch_for_all=False)
    steps = [
        phase("step", Candidate(micro_batch_size=1, zero_stage=stage, precision="bf16"), profile=each)["step"]
        for stage in (0, 1)
        for each in (at_once, one)
    ]
    assert steps == [(4 + 4) * P, (4 + 8 / 10) * P, (4 + 4) * P / N, (4 + 8) * P / N]
    adapters = phase("step", Candidate(micro_batch_size=1, precision="bf16"), profile=replace(one, n_trainable=1000))
    assert adapters["step"] == (4 + 8) * 1000  # beside larger ones that are frozen


def test_stage_3_keeps_small_parameters_whole_and_what_is_used_again_soon():
    sized = replace(PROFILE, sizes=((100, 8000), (200_000, 1)))
    settings = {"zero_stage": 3, ZERO + "stage3_prefetch_bucket_size": 0, ZERO + "stage3_max_reuse_distance": 0}
    gathered = [
        phase("backward", Candidate.of({"micro_batch_size": 1, **settings, **more}), profile=sized)["gathered"]
        for more in ({ZERO + "stage3_param_persistence_threshold": 0}, {}, {ZERO + "stage3_max_reuse_distance": 2 * P})
    ]
    # Two of four blocks and what is outside them; the 800,000 elements of small ones; the whole model.
    assert gathered == [4 * (2 * 0.9 / 4 + 0.1) * P, pytest.approx(4 * 800_000), 4 * P]


def a_pass(*moments):
    return Pass(
        moments=moments, kept_bytes=(0, 0), largest_bytes=(0, 0), flops=(0, 1e9), moved_bytes=(1e6, 1e6), n_ops=100
    )


def test_the_peak_of_backward_weighs_activations_against_the_gradients_that_are_complete_by_then():
    # Early much is alive and no gradient is complete; late it is the other way round.
    followed = replace(PROFILE, passes={"fp32/0": a_pass((0, 10e6, 0), (1e6, 1e6, P))})
    few, many = (phase("backward", Candidate(micro_batch_size=b), profile=followed) for b in (0.1, 8))
    assert (few["activations"], few["gradients"]) == (1e6 + 0.1e6, 4 * P)
    assert (many["activations"], many["gradients"]) == (80e6, 0)
    again = phase("backward", Candidate(micro_batch_size=8, gradient_accumulation_steps=2), profile=followed)
    assert (again["activations"], again["gradients"]) == (
        80e6,
        4 * P,
    )  # those of the first micro-step are there all the time


def test_a_pass_that_was_not_followed_lies_between_those_that_were():
    followed = replace(PROFILE, passes={"fp32/0": a_pass((0, 4e6, 0)), "fp32/1": a_pass((0, 1e6, 0))})
    every = [
        phase("backward", Candidate(micro_batch_size=10, checkpoint_every=k), profile=followed)["activations"]
        for k in (0, 1, 2)
    ]
    assert every == [40e6, 10e6, 25e6]
    assert phase("backward", Candidate(micro_batch_size=10, precision="bf16"), profile=followed)["activations"] == 20e6


@pytest.mark.parametrize(
    ("flops", "precision", "tf32", "times"),
    [
        ({"tf32": 8e13}, "fp32", None, 0.5 + 0.5 / 8),
        ({"tf32": 8e13}, "fp32", True, 1 / 8),
        ({"tf32": 8e13}, "bf16", None, 1 / 10),
        ({}, "fp32", None, 1.0),  # a CPU, and what came before Ampere
    ],
)
def test_convolutions_in_fp32_have_the_rate_of_tf32_where_the_device_has_it(flops, precision, tf32, times):
    """cuDNN takes it by default, other than products of matrices."""
    half = replace(PROFILE, passes={"fp32/0": replace(a_pass((0, 1e6, 0)), tf32_share=0.5)})
    candidate = Candidate.of({"micro_batch_size": 8, "precision": precision, "torch.allow_tf32": tf32})
    machine = replace(GPU, flops={**GPU.flops, **flops})
    found = of(candidate, terms=step_time.step_time_terms, profile=half, machine=machine)["compute"]
    assert float(found[0]) == pytest.approx(times * 8e9 / 1e13)


def test_activations_are_linear_in_the_micro_batch_and_do_not_see_accumulation():
    found = of(
        *(Candidate(micro_batch_size=b, gradient_accumulation_steps=k) for b, k in ((100, 1), (200, 1), (200, 8)))
    )["activations"]
    assert found[1] == 2 * found[0] == found[2]


def test_recomputing_every_block_keeps_what_the_profile_says_and_every_second_half_of_it():
    every = [float(of(Candidate(micro_batch_size=100, checkpoint_every=k))["activations"][0]) for k in (0, 1, 2)]
    assert every[0] == 4e8 and every[1] == 1e8 and every[2] == pytest.approx(2.5e8)


def test_recomputation_costs_a_third_of_the_blocks_compute():
    assert seconds("recompute", checkpoint_every=1) == pytest.approx(PROFILE.block_share / 3 * seconds("compute"))


# Stage 3 keeps nothing whole from forward to backward, and so gathers each weight twice in a micro-step.
KEEPS_NOTHING = {ZERO + "stage3_prefetch_bucket_size": 0, ZERO + "stage3_max_reuse_distance": 0}


@pytest.mark.parametrize(
    ("stage", "more", "volumes"),
    [(0, {}, (2, 2)), (1, {}, (3, 3)), (2, {}, (3, 9)), (3, KEEPS_NOTHING, (3, 12)), (3, {}, (2, 8))],
)
def test_communication_follows_the_table_of_volumes(stage, more, volumes):
    settings = {"zero_stage": stage} | ({ZERO + "overlap_comm": False, **more} if stage else {})
    for steps, volume in zip((1, 4), volumes, strict=True):
        wire_s = seconds("communication", gradient_accumulation_steps=steps, **settings)
        assert wire_s == pytest.approx(
            step_time.WITHIN_A_STEP["cuda"] * volume * P * 4 * (N - 1) / N / GPU.link_bytes_per_s
        )


def test_a_second_copy_of_the_weights_is_gathered_within_its_group_on_one_node_too():
    settings = {"zero_stage": 3, ZERO + "overlap_comm": False, **KEEPS_NOTHING}
    volumes = [
        seconds("communication", **settings, **more) * GPU.link_bytes_per_s / step_time.WITHIN_A_STEP["cuda"] / P / 4
        for more in ({}, {ZERO + "zero_hpz_partition_size": 2})
    ]
    assert volumes == pytest.approx([3 * (N - 1) / N, 2 * (N - 1) / N + 1 / 2])


# As counted with two ranks over gloo (DeepSpeed 0.19.8): a network of 6 layers of 4,160 elements, and a transformer of 8 blocks of
# 10 matrices of 4,096, whose modules without weights fetch ahead, too. Elements gathered by all ranks, and within a group.
LAYERS = ((4096, 6), (64, 6))
AHEAD, REUSED, LIVE = (
    ZERO + f"stage3_{name}" for name in ("prefetch_bucket_size", "max_reuse_distance", "max_live_parameters")
)
HPZ, SMALL = ZERO + "zero_hpz_partition_size", ZERO + "stage3_param_persistence_threshold"


@pytest.mark.parametrize(
    ("sizes", "values", "counted"),
    [
        (LAYERS, {**KEEPS_NOTHING, SMALL: 0, "gradient_accumulation_steps": 2}, (4 * 24_960, 0)),
        (LAYERS, {SMALL: 0, "gradient_accumulation_steps": 2}, (2 * 24_960, 0)),
        (LAYERS, {SMALL: 100, "gradient_accumulation_steps": 2}, (2 * 24_576 + 384, 0)),
        (LAYERS, {SMALL: 5000, "gradient_accumulation_steps": 2}, (24_960, 0)),
        (LAYERS, {**KEEPS_NOTHING, SMALL: 0, HPZ: 2, "gradient_accumulation_steps": 2}, (24_960, 3 * 24_960)),
        (LAYERS, {**KEEPS_NOTHING, SMALL: 0, HPZ: 2, "gradient_accumulation_steps": 3}, (24_960, 5 * 24_960)),
        (((4096, 80),), {SMALL: 0, AHEAD: 40, REUSED: 0, LIVE: 30 * 4096}, (130.5 * 4096, 0)),
        (((4096, 80),), {SMALL: 0, AHEAD: 4 * 4096, REUSED: 20 * 4096, LIVE: 30 * 4096}, (130.5 * 4096, 0)),
        (((4096, 80),), {SMALL: 0, AHEAD: 0, REUSED: 60 * 4096, LIVE: 30 * 4096}, (130.5 * 4096, 0)),
    ],
)
def test_stage_3_gathers_what_deepspeed_was_counted_to_gather(sizes, values, counted):
    own = replace(PROFILE, n_parameters=sum(size * n for size, n in sizes), sizes=sizes)
    knobs = Knobs.of([Candidate.of({"micro_batch_size": 2, "zero_stage": 3, **values})])
    found = [float(each[0]) for each in step_time.gathered_elements(knobs, own)]
    assert found == pytest.approx(counted, rel=0.01)


def test_weights_that_are_fetched_ahead_pile_up_to_what_may_be_whole_or_are_kept_for_their_reuse():
    """As counted on the transformer above: 30 of its 80 matrices were whole at most, and without either a few."""
    own = replace(PROFILE, n_parameters=80 * 4096, sizes=((4096, 80),), n_blocks=80, block_share=1.0)
    cases = ((40, 0, 30), (0, 60, 1), (40, 0, 1000), (0, 0, 1000))
    candidates = [
        Candidate.of(
            {"micro_batch_size": 1, "zero_stage": 3, SMALL: 0, AHEAD: ahead, REUSED: reused * 4096, LIVE: live * 4096}
        )
        for ahead, reused, live in cases
    ]
    whole = memory.memory_phases(Knobs.of(candidates), own, GPU)["backward"]["gathered"] / 4 / 4096
    assert whole.tolist() == [30, 30, 80, 2]


def test_groups_of_the_second_copy_that_span_nodes_are_as_fast_as_the_link_between_these():
    nodes = replace(GPU, world_size=8, ranks_per_node=2, node_bytes_per_s=GPU.link_bytes_per_s / 10)
    within, over = (float(in_groups_s(nodes, np.array([1e9]), np.array([group]))[0]) for group in (2.0, 4.0))
    assert within == pytest.approx(0.5 * 1e9 / GPU.link_bytes_per_s)
    assert over == pytest.approx(0.75 * 1e9 / nodes.node_bytes_per_s)


def test_quantised_gradients_cross_the_nodes_once_in_4_bits():
    """As DeepSpeed's `all_to_all_quant_reduce` moves them; they were forecast as those of 16 bits."""
    nodes = replace(GPU, world_size=8, ranks_per_node=2, node_bytes_per_s=GPU.link_bytes_per_s / 10)
    values = {"zero_stage": 3, "precision": "fp16", ZERO + "overlap_comm": False, **KEEPS_NOTHING}
    knobs = [
        Candidate.of({"micro_batch_size": 8, **values, **more}) for more in ({}, {ZERO + "zero_quantized_gradients": 1})
    ]
    plain, exchanged = of(*knobs, terms=step_time.step_time_terms, machine=nodes)["communication"]
    within, between = step_time.WITHIN_A_STEP["cuda"], step_time.BETWEEN_NODES["cuda"]
    scattered = 2 * P * 7 / 8 / nodes.node_bytes_per_s * between
    in_4_bits = P / 2 * (within / 2 / nodes.link_bytes_per_s + between * 3 / 4 / nodes.node_bytes_per_s)
    assert plain - exchanged == pytest.approx(scattered - in_4_bits)
    alone = of(*knobs, terms=step_time.step_time_terms)["communication"]
    assert alone[0] == alone[1], "on one node DeepSpeed scatters them as they are"


@pytest.mark.parametrize(("stage", "bytes_sent"), [(0, 2 * 4), (1, 2 * 2 + 4), (2, 2 * 2 + 4), (3, 3 * 2)])
def test_under_autocast_zero_sends_gradients_and_stage_3_weights_in_16_bits(stage, bytes_sent):
    """As counted with two ranks over gloo; stages 1 and 2 gather the weights in the 32 bits that they have."""
    settings = {"zero_stage": stage, "precision": "torch_autocast"}
    settings |= {ZERO + "overlap_comm": False, **KEEPS_NOTHING} if stage else {}
    at_rate = step_time.WITHIN_A_STEP["cuda"] * P * (N - 1) / N / GPU.link_bytes_per_s
    assert seconds("communication", **settings) == pytest.approx(bytes_sent * at_rate)


def test_on_a_gpu_the_host_costs_only_what_the_device_does_not_hide_and_on_a_cpu_all():
    counted = replace(PROFILE, passes={"fp32/0": a_pass((0, 1e6, 0))}, sizes=((1000, 50),))
    few, many = Candidate(micro_batch_size=1, zero_stage=3), Candidate(micro_batch_size=4096, zero_stage=3)
    for machine, hidden in ((GPU, True), (Machine.guess("cpu", N), False)):
        found = step_time.step_time_terms(Knobs.of([few, many]), counted, machine)
        host = found["partitioning"] + found["launches"]
        assert (host[1] < 0.5 * host[0]) == hidden


def test_frozen_tensors_cost_no_reduction_and_no_step_but_are_fetched_at_stage_3():
    sizes = {"passes": {"fp32/0": a_pass((0, 1e6, 0))}, "sizes": ((1000, 50),)}
    knobs = Knobs.of([Candidate.of({"micro_batch_size": 1, "zero_stage": stage}) for stage in (1, 2, 3)])
    machine = Machine.guess("cpu", N)
    whole, adapters, none = (
        step_time.step_time_terms(knobs, replace(PROFILE, n_frozen=frozen, **sizes), machine) for frozen in (0, 40, 50)
    )
    saved = [whole["bookkeeping"] - found["bookkeeping"] for found in (adapters, none)]
    assert saved[0] == pytest.approx(0.8 * saved[1]) and (saved[0][:2] > 0).all() and saved[0][2] == 0
    assert (adapters["partitioning"] == whole["partitioning"]).all()


def test_over_gloo_a_scatter_is_an_all_reduce():
    flat = {ZERO + "overlap_comm": False, "zero_stage": 3, "micro_batch_size": 8, **KEEPS_NOTHING}
    on_cpu = of(Candidate.of(flat), terms=step_time.step_time_terms, machine=replace(GPU, accelerator="cpu"))[
        "communication"
    ][0]
    slower = step_time.WITHIN_A_STEP["cpu"] / step_time.WITHIN_A_STEP["cuda"]
    assert on_cpu == pytest.approx(4 / 3 * slower * seconds("communication", **flat))


@pytest.mark.parametrize(
    ("stage", "settings", "once", "eight"),
    [
        (1, {"precision": "bf16"}, 4 + 2, 4 + 2 + 2 * 2),
        (2, {"precision": "bf16"}, 4 + 2, 4 + 2 + 15 * 2),
        (3, {"precision": "bf16"}, 4 + 2 + 2 * 2, 4 + 2 + 16 * 2),
        (2, {}, 4 + 4, 4 + 4 + 15 * 4),
        (2, {"precision": "bf16", "data_types.grad_accum_dtype": "fp32"}, 4 + 2, 4 + 2),
    ],
)
def test_an_offloaded_optimizer_moves_sums_of_gradients_in_each_micro_step(stage, settings, once, eight):
    for steps, each in ((1, once), (8, eight)):
        said = seconds(
            "offload", zero_stage=stage, offload_optimizer="cpu", gradient_accumulation_steps=steps, **settings
        )
        assert said == pytest.approx(each * P / N / GPU.host_bytes_per_s)


def test_small_buckets_send_more_messages():
    small, large = (
        seconds("messages", **{"zero_stage": 2, ZERO + "reduce_bucket_size": size}) for size in (10_000, 1_000_000)
    )
    assert small > 10 * large


def test_one_rank_communicates_nothing():
    alone = Machine.guess("cuda", 1)
    found = of(
        *(Candidate(micro_batch_size=1, zero_stage=s) for s in range(4)), terms=step_time.step_time_terms, machine=alone
    )
    assert not found["communication"].any() and not found["messages"].any()


def test_terms_are_finite_and_not_negative_for_any_candidate():
    rng = random.Random(0)
    candidates = [
        Candidate(
            micro_batch_size=rng.choice([1, 7, 4096]), gradient_accumulation_steps=rng.choice([1, 64]), zero_stage=rng.randrange(4),
            precision=rng.choice(["fp32", "bf16", "torch_autocast"]), checkpoint_every=rng.randrange(5),
            offload_optimizer=rng.choice(["none", "cpu"]), offload_param=rng.choice(["none", "cpu"]),
        )
        for _ in range(300)
    ]  # fmt: skip
    for profile in (PROFILE, Profile.guess(10, 5, 0)):
        for terms in (memory_terms, step_time.step_time_terms):
            table = np.column_stack(list(of(*candidates, terms=terms, profile=profile).values()))
            assert np.isfinite(table).all() and (table >= 0).all() and (table.sum(axis=1) > 0).all()


def test_a_forecast_adds_up_and_its_interval_holds_it():
    predictor = Predictor(PROFILE, GPU)
    candidate = Candidate(micro_batch_size=8, zero_stage=2, precision="bf16")
    for said in (predictor.memory(candidate), predictor.step_time(candidate)):
        assert said.total.value == pytest.approx(sum(term.value for term in said.terms))
        assert all(term.low <= term.value <= term.high for term in [*said.terms, said.total])
        assert said.total.low < said.total.value < said.total.high
        assert probability_below(said, said.total.value) == pytest.approx(0.5)
        assert probability_below(said, said.total.high) == pytest.approx(0.95, abs=0.001)


def test_a_high_throughput_is_written_out():
    """It read as 1.235e+04 samples/s."""
    predictor, candidate = Predictor(PROFILE, GPU), Candidate(micro_batch_size=512, precision="bf16")
    said = Prediction(
        configuration=candidate, ranks=1000, data_parallel=1000, memory=predictor.memory(candidate),
        step_time=predictor.step_time(candidate), device_memory_bytes=1e12, fits_probability=1.0,
        largest_micro_batch_size=None, largest_tensor_bytes=0.0, tokens_per_sample=None, measured={}, study="",
        notes=(), device="H100",
    )  # fmt: skip
    assert said.samples_per_s.value > 10_000 and f"throughput  {said.samples_per_s.value:,.0f} samples/s (" in str(said)


def test_measurements_scale_the_terms_that_are_off_and_narrow_the_interval():
    """A machine whose runtime takes twice what is usual, and whose activations are 10 % larger."""
    machine = Machine.guess("cpu", 2)
    predictor = Predictor(PROFILE, machine)
    candidates = [Candidate(micro_batch_size=b, zero_stage=z) for b in (2, 8, 32) for z in (0, 1, 2)]
    other = Candidate(micro_batch_size=64, zero_stage=2)

    def truth(candidate):
        terms = dict(zip(memory.SPREADS, AnalyticPrior(PROFILE, machine)([candidate]).memory_terms[0], strict=True))
        return float(sum(v * {"workspace": 2.0, "activations": 1.1}.get(name, 1.0) for name, v in terms.items()))

    before = predictor.memory(other)
    for candidate in candidates:
        predictor.learn(candidate, peak_memory_bytes=truth(candidate), step_time_s=None)
    after = predictor.memory(other)
    assert abs(before.total.value / truth(other) - 1) > 0.08
    assert after.total.value == pytest.approx(truth(other), rel=0.03) and after.log_sd < before.log_sd
    assert after.n_measured == len(candidates)


def test_what_stages_1_and_2_do_for_each_parameter_says_nothing_of_stage_3():
    """A machine on which the bookkeeping of stages 1 and 2 takes ten times what is expected."""
    deep, at = replace(PROFILE, n_blocks=48), list(step_time.SPREADS).index("bookkeeping")
    predictor, whole = Predictor(deep, GPU), Candidate(micro_batch_size=8, zero_stage=3)
    before = predictor.step_time(whole).total.value
    for stage, micro, steps in itertools.product((0, 1, 2), (2, 8, 32), (1, 4)):
        one = Candidate(micro_batch_size=micro, zero_stage=stage, gradient_accumulation_steps=steps)
        terms = AnalyticPrior(deep, GPU)([one]).time_terms[0]
        predictor.learn(one, peak_memory_bytes=None, step_time_s=float(terms.sum() + 9 * terms[at]))
    assert predictor.step_time(whole).total.value == pytest.approx(before, rel=0.3)


def calibrated(terms, measured):
    """The model of some totals of three terms, asked about the same rows."""
    n = len(measured)
    design = Design(terms=terms, linear=np.ones((n, 1)), smooth=terms, levels=np.zeros((n, 0)))
    return fit(Data.of(design, np.log(measured)), np.array([0.1]), np.full(3, 0.1), 0.03).predict(design, noise=True)


def test_intervals_widen_where_the_measurements_scatter_more_than_was_expected():
    rng = np.random.default_rng(0)
    terms = rng.uniform(1, 2, (20, 3))
    widths = [
        calibrated(terms, terms.sum(axis=1) * np.exp(scatter * rng.standard_normal(20)))[1].mean()
        for scatter in (0.02, 0.1, 0.2)
    ]
    assert 0.01 < widths[0] < 0.04 and widths[1] > 0.07 and widths[2] > 0.15


def test_one_spoiled_measurement_does_not_bend_the_rest():
    terms = np.random.default_rng(0).uniform(1, 2, (20, 3))
    measured = terms.sum(axis=1)
    measured[3] *= 2
    mean, _ = calibrated(terms, measured)
    assert np.delete(np.abs(np.exp(mean) / measured - 1), 3).max() < 0.05


def test_settings_of_a_configuration_hold_where_a_candidate_says_nothing():
    base = dict(inherited_settings({"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": "auto"}}))
    assert base == {ZERO + "reduce_bucket_size": 1000}
    said, own = (
        Candidate.of({"micro_batch_size": 1, "zero_stage": 2} | more) for more in ({}, {ZERO + "reduce_bucket_size": 5})
    )
    assert Knobs.of([said, own], base).reduce_bucket.tolist() == [1000, 5]
    in_bf16 = {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    others = [
        Candidate(micro_batch_size=1, zero_stage=2, precision=name) for name in ("fp32", "fp16", "torch_autocast")
    ]
    kept, plain = (Knobs.of(others, base) for base in (in_bf16 | {"data_types.grad_accum_dtype": "fp32"}, {}))
    for name in ("master_16", "states_16"):
        assert getattr(kept, name).tolist() == getattr(plain, name).tolist() == [0, 0, 0]
    narrow = Knobs.of(others, {"data_types.grad_accum_dtype": "bf16"})
    assert narrow.gradient_bytes.tolist() == [4, 2, 4] and kept.gradient_bytes.tolist() == [4, 4, 4]
    assert Knobs.of(others, {"fp16.fp16_master_weights_and_grads": True}).master_16.tolist() == [0, 1, 0]


def test_a_setting_counts_alike_in_a_candidate_and_in_the_configuration():
    plain = {"micro_batch_size": 4, "zero_stage": 3, "precision": "bf16"}
    settings = {
        ZERO + "sub_group_size": 1000, ZERO + "zero_quantized_weights": True, ZERO + "zero_quantized_gradients": True,
        ZERO + "zero_hpz_partition_size": 2, ZERO + "stage3_prefetch_bucket_size": 7, ZERO + "contiguous_gradients": False,
        "communication_data_type": "fp32", "data_types.grad_accum_dtype": "fp32", "bf16.bf16_optimizer_states": True,
    }  # fmt: skip
    for path, value in settings.items():
        config: dict = {}
        set_path(config, path, value)
        has_own, default = Candidate.of(plain | {path: value}), Candidate.of(plain)
        columns = Knobs.of([has_own]), Knobs.of([default], dict(inherited_settings(config))), Knobs.of([default])
        own, inherited, unset = ([getattr(each, field.name).tolist() for field in fields(each)] for each in columns)
        assert own == inherited != unset


def test_a_guessed_workload_is_less_sure_of_its_activations():
    guessed = Profile.guess(P, P, 4)
    assert memory.spreads(guessed)["activations"] > memory.spreads(PROFILE)["activations"]
    assert guessed.flops_per_sample == 6 * P * guessed.sequence


def test_where_no_recomputing_pass_was_followed_its_memory_is_not_that_of_the_plain_one():
    plain = {"fp32/0": a_pass((0, 100e6, 0))}
    short = replace(PROFILE, passes=plain, cut_short=True)
    live = [
        float(short.highest("fp32", every, float(every > 0), np.array([4.0]), np.array([4.0]), np.zeros(1))[0][0])
        for every in (0, 1)
    ]
    assert live[1] < 0.5 * live[0]
    assert memory.spreads(short)["activations"] > memory.spreads(PROFILE)["activations"]


def test_recomputing_costs_a_forward_more_where_no_such_pass_was_followed():
    short = replace(PROFILE, passes={"fp32/0": a_pass((0, 100e6, 0))}, block_share=0.9)
    for plain, again in zip(*(short.work("bf16", every, np.array([4.0])) for every in (0, 1)), strict=True):
        assert float(again[0]) == pytest.approx(1.3 * float(plain[0]))


def test_samples_that_are_stated_to_be_longer_need_more_memory_unless_they_are_cut():
    plain, cut = Candidate(micro_batch_size=8), Candidate(micro_batch_size=8, config=(("data.max_length", 128),))
    longer = PROFILE.reaching(512)
    activations = [float(of(plain, profile=each)["activations"][0]) for each in (PROFILE, longer)]
    assert activations[1] == pytest.approx(4 * activations[0])
    assert float(of(cut, profile=longer)["activations"][0]) == pytest.approx(activations[0])
    assert replace(PROFILE, lengths=((10.0, 3), (50.0, 1))).tokens_per_sample == 20, "of an average sample"
    assert PROFILE.reaching(100) is PROFILE, "what was seen is longer than what is stated"
