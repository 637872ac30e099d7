"""What degrees do to memory and step time: shares of the model, messages in groups, and the order on two tiers of links."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.forecast.degrees import cost_terms, held_share
from autotune.forecast.step_time import _within_a_step
from autotune.space.candidate import Candidate
from autotune.trial.profile import Machine, Pass, Profile

TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"
STAGES = "pipeline.stages"
EXPERTS = "expert_parallel.autoep_size"
MODEL = Profile.guess(7_000_000_000, 7_000_000_000, 32, sequence=4096)
NODE = Machine.guess("cuda", 8)


def totals(machine=NODE, **knobs):
    candidate = Candidate.of({"micro_batch_size": 1, "precision": "bf16", **knobs})
    memory, time = cost_terms([candidate], MODEL, machine)
    return {name: float(column[0]) for name, column in memory.items()}, {k: float(v[0]) for k, v in time.items()}


def test_rows_of_several_degrees_come_back_in_their_order():
    candidates = [Candidate.of({"micro_batch_size": m, TENSOR: t}) for m, t in ((1, 2), (1, 1), (2, 2), (2, 4))]
    memory, time = cost_terms(candidates, MODEL, NODE)
    for row, candidate in enumerate(candidates):
        alone = cost_terms([candidate], MODEL, NODE)
        assert [column[row] for column in (*memory.values(), *time.values())] == pytest.approx(
            [column[0] for terms in alone for column in terms.values()]
        )


def test_a_tensor_group_shares_weights_states_and_work_and_pays_in_messages():
    (whole, time), (parted, parted_time) = totals(zero_stage=1), totals(zero_stage=1, **{TENSOR: 8})
    share = held_share(MODEL, 8)
    assert 0.1 < share < 0.2 and parted["weights"] == pytest.approx(share * whole["weights"], rel=1e-6)
    # Master weights and states are sharded over 8 ranks either way: by ZeRO, or by the group.
    assert parted["states"] == pytest.approx(8 * share * whole["states"], rel=1e-6)
    assert parted["activations"] < 0.5 * whole["activations"]
    assert parted_time["compute"] < 0.2 * time["compute"]
    assert parted_time["groups"] > 0


def test_a_stage_of_a_pipeline_launches_its_own_operations_alone():
    counted = Pass(
        moments=((0, 1e6, 0),),
        kept_bytes=(0, 1e6),
        largest_bytes=(0, 1e6),
        flops=(0, 1.0),
        moved_bytes=(0, 1.0),
        n_ops=1e6,
    )
    profile, machine = replace(MODEL, passes={"fp32/0": counted}), Machine.guess("cpu", 8)
    candidates = [
        Candidate.of({"micro_batch_size": 1, "gradient_accumulation_steps": 4, STAGES: stages}) for stages in (1, 4)
    ]
    launches = cost_terms(candidates, profile, machine)[1]["launches"]
    # A quarter of them for each micro-batch, in 4 + 3 turns in place of 4.
    assert launches[1] / launches[0] == pytest.approx(7 / 4 / 4)


def test_an_expert_group_shares_experts_and_pays_in_tokens_sent():
    mixture = replace(MODEL, n_expert=5_000_000_000, expert_layers=32, experts_per_token=2.0)
    whole, grouped = ({"micro_batch_size": 1, "zero_stage": s} for s in (1, 1))
    grouped[EXPERTS] = 4
    (memory, time) = cost_terms([Candidate.of(values) for values in (whole, grouped)], mixture, NODE)
    weights, states = memory["weights"], memory["states"]
    assert weights[1] / weights[0] == pytest.approx(1 - 0.75 * 5 / 7)
    assert states[1] == pytest.approx(states[0], rel=1e-3)  # ZeRO shards an expert over the ranks that hold it
    assert memory["activations"][1] == pytest.approx(memory["activations"][0])
    assert time["compute"][1] == time["compute"][0] and time["groups"][1] > time["groups"][0] == 0
    # Instants are compared without the experts that are gone: the flat copy of weights is the highest either way.
    roomy = replace(NODE, world_size=64, device_bytes=1e12)
    flattened = replace(mixture, guessed=False, activation_bytes_per_sample=0, checkpointed_bytes_per_sample=0)
    candidates = [Candidate.of({**values, "zero_stage": 2, "precision": "bf16"}) for values in (whole, grouped)]
    loading = cost_terms(candidates, flattened, roomy)[0]["loading"]
    assert loading == pytest.approx([2 * 7e9, 2 * (7e9 - 0.75 * 5e9)])
    at_stage_0 = cost_terms([Candidate.of({**grouped, "zero_stage": 0})], mixture, NODE)[0]
    assert at_stage_0["states"][0] == pytest.approx(8 * (7e9 - 0.75 * 5e9), rel=1e-3)


def test_messages_within_groups_wait_where_ranks_are_more_than_cores():
    own, shared, enough = (replace(Machine.guess("cpu", 4), n_cores=n) for n in (0, 2, 4))
    for degree, hops in ((TENSOR, 4 * 32 * 2 * 3), (SEQUENCE, 8 * 32)):
        plain, waiting, roomy = (totals(machine, **{degree: 4})[1]["groups"] for machine in (own, shared, enough))
        # A slice of 1.5 ms on two cores, half of it for each hop, as half of the ranks have a core.
        assert waiting - plain == pytest.approx(hops * 0.75e-3) and roomy == plain


def test_a_sequence_group_shares_activations_and_not_weights():
    (whole, time), (parted, parted_time) = totals(zero_stage=1), totals(zero_stage=1, **{SEQUENCE: 4})
    assert parted["weights"] == whole["weights"] and parted["states"] == whole["states"]
    assert parted["activations"] == pytest.approx(whole["activations"] / 4)
    assert parted_time["compute"] == pytest.approx(time["compute"] / 4)


def test_a_tensor_group_pays_where_nodes_are_far_apart_and_costs_where_they_are_near():
    near = replace(
        NODE, world_size=16, ranks_per_node=8, link_bytes_per_s=4e11, node_bytes_per_s=4e11, node_alpha_s=1e-5
    )
    far = replace(near, node_bytes_per_s=2e9)
    sharded = Candidate.of(
        {"micro_batch_size": 1, "gradient_accumulation_steps": 8, "zero_stage": 3, "precision": "bf16"}
    )
    grouped = Candidate.of({**sharded.values(), "micro_batch_size": 8, "zero_stage": 1, TENSOR: 8})
    assert sharded.global_batch_size(16) == grouped.global_batch_size(16) == 128

    def step_s(machine, candidate):
        return float(np.sum([column[0] for column in cost_terms([candidate], MODEL, machine)[1].values()]))

    assert step_s(near, sharded) < step_s(near, grouped)
    assert step_s(far, sharded) > 2 * step_s(far, grouped)


def test_a_stage_has_its_layers_only_and_waits_while_the_pipeline_fills():
    (whole, time), (parted, parted_time) = totals(zero_stage=1), totals(zero_stage=1, **{STAGES: 4})
    assert parted["weights"] == pytest.approx(whole["weights"] / 4)
    assert parted["activations"] == pytest.approx(whole["activations"] / 4)
    # One micro-batch passes four stages, of which three wait: as slow as one rank, and nothing is gained.
    assert parted_time["compute"] == pytest.approx(time["compute"]) and parted_time["groups"] > 0
    deep, deep_time = totals(zero_stage=1, gradient_accumulation_steps=12, **{STAGES: 4})
    alone = totals(zero_stage=1, gradient_accumulation_steps=12)[1]
    assert deep_time["compute"] == pytest.approx(alone["compute"] / 4 * 15 / 12)
    # The first stage holds four micro-batches of its quarter of the layers.
    assert deep["activations"] == pytest.approx(whole["activations"])


def test_stages_in_bf16_share_out_their_states_without_zero_as_deepspeed_takes_its_optimizer_of_stage_1():
    """`type(engine.optimizer)` is BF16_Optimizer there, which was seen with a PipelineModule of one rank (DeepSpeed 0.19.8)."""
    (plain, _), (first, _), (single, _) = (
        totals(**{STAGES: 2, **more}) for more in ({}, {"zero_stage": 1}, {"precision": "fp32"})
    )
    assert plain["states"] == first["states"] and plain["master"] == first["master"]
    assert single["states"] == pytest.approx(4 * plain["states"])  # of each of the four copies of a stage
    # A sum in 16 bits is kept beside each gradient of a backward, and there are no buckets.
    assert plain["gradients"] >= plain["weights"] and plain["buckets"] < first["buckets"]


def test_another_accelerator_is_forecast_as_a_device_rather_than_as_a_cpu():
    other, gpu = (_within_a_step(Machine.guess(kind, 2)) for kind in ("xpu", "cuda"))
    assert replace(other, accelerator="cuda") == gpu
