"""The choice of a configuration, its forecast and its DeepSpeed JSON."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.advise import architecture
from autotune.advise.answer import Advice, ds_config
from autotune.advise.choose import Question, best, fewest_devices, forecast_all
from autotune.advise.devices import GIB, Devices, device_card, read_gpus
from autotune.advise.forecast import PINNED, forecast
from autotune.advise.shape import Training, block_bytes, profile_of
from autotune.errors import UserError
from autotune.forecast.words import SURE
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import check_config
from autotune.space.rule import Setting


def asked(model="Qwen/Qwen3-8B", gpus="8xA100-80", **changed) -> Question:
    count, per_node, name = read_gpus(gpus)
    how = {key: changed.pop(key) for key in list(changed) if key in Training.__dataclass_fields__}
    profile = profile_of(architecture.find(model), Training(**how))
    return Question(
        profile=profile, devices=Devices(card=device_card(name, {}), count=count, per_node=per_node), **changed
    )


def peak(candidate: Candidate, question: Question) -> float:
    return forecast([candidate], question.profile, question.devices).peak_bytes[0]


def test_states_are_those_of_the_zero_paper():
    question = asked("Llama-2-7b", "8xA100-80")
    P = question.profile.n_parameters
    for stage, bytes_a_parameter in ((1, 2 + 12 / 8), (2, 2 + 12 / 8), (3, 14 / 8 + 2 / 8)):
        one = Candidate(micro_batch_size=1, zero_stage=stage, precision="bf16")
        terms = forecast([one], question.profile, question.devices).memory
        held = sum(terms[name][0] for name in ("weights", "master", "states"))
        assert held == pytest.approx((bytes_a_parameter - (2 / 8 if stage == 3 else 0)) * P, rel=0.01)


def test_large_vocabularies_length_and_eager_attention_cost_memory_and_recomputing_saves_it():
    model = architecture.find("llama 3.1 8b")
    plain, fused, none = (asked("llama 3.1 8b", loss=loss) for loss in ("plain", "fused", "none"))
    again = Candidate(micro_batch_size=8, zero_stage=3, precision="bf16", checkpoint_every=1)
    assert peak(again, plain) - peak(again, none) > 8 * 8 * 4096 * model.vocab > peak(again, fused) - peak(again, none)
    kept = replace(again, checkpoint_every=0)
    assert peak(again, plain) < peak(replace(again, checkpoint_every=2), plain) < peak(kept, plain)
    assert block_bytes(model, Training(attention="eager")) > block_bytes(model, Training()) + 5 * 32 * 4096


def test_stage_3_steps_in_groups_and_keeps_its_books_on_one_rank_too():
    question = asked("Llama-2-7b", "8xA100-80")
    whole = Candidate(micro_batch_size=1, zero_stage=3, precision="bf16", checkpoint_every=1)
    grouped = replace(whole, config=(("zero_optimization.sub_group_size", 100_000_000),))
    assert peak(whole, question) - peak(grouped, question) > 5e9
    alone = replace(question, devices=question.devices.of(1))
    assert forecast([whole], alone.profile, alone.devices).time["partitioning"][0] > 0


def test_each_expert_of_a_mixture_has_adapters_of_its_own():
    """Counted as one wide layer they were a third of what they are."""
    found = architecture.find("Qwen/Qwen3-30B-A3B")
    adapters = profile_of(found, Training(method="lora", lora_rank=16)).n_trainable
    h, f = found.hidden, found.expert_intermediate
    attention = sum(a + b for a, b in found.attention_matrices())
    assert adapters == 16 * found.layers * (attention + found.experts * 3 * (h + f))


@pytest.mark.parametrize(
    ("how", "n_trained"), [({}, 291), ({"method": "lora"}, 448), ({"method": "lora", "train_embeddings": True}, 450)]
)
def test_sizes_are_those_of_all_parameters_and_the_base_of_adapters_is_frozen(how, n_trained):
    """ZeRO was taken to reduce all tensors of the base, and none of the adapters."""
    profile = profile_of(architecture.find("Llama-2-7b"), Training(**how))
    assert sum(size * count for size, count in profile.sizes) == profile.n_parameters
    assert sum(count for _, count in profile.sizes) - profile.n_frozen == n_trained


def test_the_cheapest_number_of_devices_is_sought_among_those_that_can_run_it():
    chosen, _ = best(asked("llama 3.1 8b", "8xH100", goal="cost", settings={"tensor_parallel.autotp_size": 2}))
    assert chosen.devices.count % 2 == 0


def test_where_nothing_surely_fits_the_goal_decides_among_what_is_as_likely():
    plain = {"zero_stage": 3, "checkpoint_every": 1, "offload_optimizer": "none", "offload_param": "none"}
    questions = {
        goal: asked("15B", "4x8x4090", goal=goal, settings=plain) for goal in ("throughput", "latency", "cost")
    }
    found = {goal: best(question)[0] for goal, question in questions.items()}
    assert all(0.5 < one.fits < SURE and one.devices.count == 32 for one in found.values())  # two have no room at all
    assert found["latency"].candidate.gradient_accumulation_steps == 1
    assert found["latency"].total("time") < found["throughput"].total("time") / 2


def test_adapters_need_no_states_and_four_bits_a_quarter_of_the_weights():
    one = Candidate(micro_batch_size=1, zero_stage=0, precision="bf16", checkpoint_every=1)
    full, lora, qlora = (peak(one, asked("Llama-2-7b", "1xA100-80", method=m)) for m in ("full", "lora", "qlora"))
    assert full > 5 * lora and lora - qlora == pytest.approx((2 - 0.5625) * 6.48e9 * 1.06, rel=0.05)


def test_weights_of_4_bits_are_written_out_once_for_each_pass():
    times = [
        profile_of(architecture.find("Llama-2-7b"), Training(method=m)).passes["bf16/1"] for m in ("lora", "qlora")
    ]
    assert times[0].moved_bytes == times[1].moved_bytes  # what that moves is in `step_time_terms`


def test_muon_leaves_embeddings_and_vectors_to_adam():
    plain, adapted = (
        profile_of(architecture.find("Qwen3-0.6B"), Training(optimizer="muon", method=how)) for how in ("full", "lora")
    )
    assert plain.optimizer_bytes == pytest.approx(4 + 4 * 0.26, abs=0.01) and adapted.optimizer_bytes == 4


def test_the_host_holds_sums_of_several_micro_steps_and_master_weights_of_16_bits_as_they_are():
    question = asked("Llama-2-7b", "8xA100-80")
    master = {"bf16.bf16_master_weights_and_grads": True}
    pageable = {"zero_optimization.offload_optimizer.pin_memory": False}
    one, several, narrow, least, plain = (
        forecast([Candidate.of({"micro_batch_size": 1, "zero_stage": 2, "precision": "bf16", "offload_optimizer": "cpu"} | more)],
                 question.profile, question.devices).host
        for more in ({}, {"gradient_accumulation_steps": 4}, master, master | {"bf16.bf16_optimizer_states": True}, pageable)
    )  # fmt: skip
    P = question.profile.n_parameters
    assert several["staging"] == 2 * one["staging"] and several["gradients"] == one["gradients"]
    assert [each["states"][0] / P for each in (one, narrow, least)] == pytest.approx([12, 10, 6])
    assert narrow["gradients"] == one["gradients"] / 2
    assert plain["gradients"] == one["gradients"] / PINNED and plain["states"] == one["states"]


def test_what_a_ratio_leaves_on_the_device_is_counted_there_and_not_on_the_host():
    """The forecast of a part of an optimizer was that of the whole."""
    question, name = asked("Llama-2-7b", "8xA100-80"), "zero_optimization.offload_optimizer.ratio"
    known = {
        "micro_batch_size": 1,
        "zero_stage": 3,
        "precision": "bf16",
        "offload_optimizer": "cpu",
        "zero_optimization.sub_group_size": 1e8,
    }
    more = ({}, {name: 0.5}, {name: 0.5, "zero_optimization.sub_group_size": 1e9}, {"offload_optimizer": "none"})
    found = forecast([Candidate.of(known | each) for each in more], question.profile, question.devices)
    whole, part, one_group, none = found.memory["master"]
    assert none * 0.4 < part < none * 0.6 and whole == one_group == 0
    assert found.host["states"][1] == pytest.approx(found.host["states"][0] * (1 - part / none))
    all_s, part_s, _, none_s = found.time["optimizer"]
    assert part_s == pytest.approx(all_s + (none_s - all_s) * part / none) and none_s < part_s < all_s


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory", "cost"])
def test_the_chosen_configuration_is_the_best_for_its_goal_among_those_that_surely_fit(goal):
    chosen, others = best(asked(goal=goal))
    table = chosen.table
    sure = table.fits >= SURE
    assert chosen.fits >= SURE and 1 <= len(others) <= 3 and all(other.why_not for other in others)
    worth = {
        "throughput": table.tokens_per_s,
        "latency": 1 / table.step_s,
        "memory": 1 / table.peak_bytes,
        "cost": table.tokens_per_s,
    }
    assert worth[goal][chosen.row] >= 0.99 * worth[goal][sure].max()


def test_no_devices_reach_more_than_their_peak():
    """The JSON had shares above 1 where the page had 100 %."""
    question = asked()
    chosen = SimpleNamespace(
        devices=question.devices, candidate=SimpleNamespace(precision="bf16"), tokens_per_s=8 * 312e12 * 0.9
    )
    mfu = Advice.mfu.fget(SimpleNamespace(chosen=chosen, flops_per_token=1.0))
    assert mfu.low < mfu.value == pytest.approx(0.9) and mfu.high == 1.0


def test_a_global_batch_is_kept_and_one_that_does_not_divide_is_refused():
    chosen, _ = best(asked(global_batch=48))
    assert chosen.candidate.global_batch_size(8) == 48
    with pytest.raises(UserError, match="multiple of 8"):
        best(asked(global_batch=12))


@pytest.mark.parametrize("gpus", ["64xH100", "8xH100", "1xH100"])
def test_a_free_global_batch_has_a_million_tokens_a_step_at_most(gpus):
    question = asked("SmolLM2-135M", gpus)
    chosen = best(question)[0]
    batch = chosen.candidate.global_batch_size(question.devices.count)
    assert batch * question.profile.sequence <= 2**20


def test_samples_that_are_no_sequences_of_tokens_are_counted_themselves():
    question = asked("SmolLM2-135M", "8xH100")
    question = replace(question, profile=replace(question.profile, of_tokens=False))
    chosen, others = best(question)
    assert chosen.candidate.global_batch_size(8) <= 4096
    assert chosen.tokens_per_s * chosen.total("time") == pytest.approx(chosen.candidate.global_batch_size(8))
    assert not any("tokens" in other.why_not for other in others) and any(
        "samples/s" in other.why_not for other in others
    )


def test_blocks_are_not_recomputed_where_that_gains_nothing():
    """Of ties the one that needed a little less memory was taken, and recomputed every block."""
    question = asked("SmolLM2-135M", "8xH100", sequence=64)
    slow_data = replace(question, profile=replace(question.profile, input_s_per_sample=1.0))
    assert best(slow_data)[0].candidate.checkpoint_every == 0


def test_many_devices_have_a_sample_each_though_that_is_more_than_a_million_tokens():
    chosen = best(asked("Qwen/Qwen3-8B", "1024xH100"))[0].candidate
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (1, 1)


def test_one_device_without_bfloat16_needs_no_offload_for_what_fits_by_far():
    question = asked("gpt2", "T4", sequence=1024)
    chosen = best(question)[0].candidate
    assert (chosen.precision, chosen.zero_stage, chosen.offload_optimizer) == ("fp16", 1, "none")
    assert fewest_devices(question) == (1, 1)


@pytest.mark.parametrize("gpus", ["T4", "A100-80"])
def test_a_stage_that_is_settled_runs_on_one_device_without_offload(gpus):
    settled = {"zero_stage": 1, "offload_optimizer": "none"}
    chosen = best(asked("gpt2", gpus, sequence=1024, settings=settled))[0].candidate
    assert (chosen.zero_stage, chosen.offload_optimizer) == (1, "none")


def test_what_is_settled_stays_and_what_is_illegal_is_refused_with_its_reason():
    settings = {
        "zero_stage": 2,
        "micro_batch_size": 5,
        "offload_optimizer": "cpu",
        "zero_optimization.reduce_bucket_size": 123,
    }
    chosen, _ = best(asked(settings=settings))
    assert settings.items() <= chosen.candidate.values().items()
    with pytest.raises(UserError, match="offload_optimizer needs ZeRO stage 1"):
        best(asked(settings={"zero_stage": 0, "offload_optimizer": "cpu"}))


def test_what_the_target_states_and_the_card_has_counts():
    """A script's configuration was passed over, its refusals but those of degrees, too, and every card had no TensorFloat-32."""
    sums = Setting(base=(("data_types.grad_accum_dtype", "fp32"),))
    settled = {"zero_stage": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "offload_optimizer": "none"}
    plain, own = (forecast_all(asked(target=target, settings=settled)) for target in (Setting(), sums))
    assert max(own.memory["gradients"]) >= 2 * max(plain.memory["gradients"])
    one = {"micro_batch_size": 1, "checkpoint_every": 1}
    for target, stages in ((Setting(sparse="Embedding"), {0}), (Setting(pipeline_stages=2), {0, 1})):
        found = forecast_all(asked(target=target, settings=one)).candidates
        assert {candidate.zero_stage for candidate in found} == stages
    tf32 = settled | {"precision": "fp32", "torch.allow_tf32": True}
    assert forecast_all(asked(settings=tf32)).candidates
    with pytest.raises(UserError, match="no TensorFloat-32"):
        forecast_all(asked(gpus="8xV100", settings=tf32))
    # It was said to have no block to recompute, as most of what was looked at would.
    own = asked(target=Setting(plain_backward=True), settings={"zero_stage": 0})
    with pytest.raises(UserError, match=r"refuses loss\.backward\(\) there"):
        forecast_all(replace(own, profile=replace(own.profile, n_blocks=0)))


def test_the_fewest_devices_are_fewer_with_offload_and_grow_with_the_model():
    small, large = (fewest_devices(asked(model, "8xA100-80")) for model in ("Qwen3-8B", "Llama-3.3-70B"))
    assert small[0] < small[1] < large[1] and large[0] < large[1]


def test_the_fewest_devices_count_what_fits_with_a_degree_alone():
    question = asked("llama-3.1-8b", "8xH100", sequence=65_536)
    assert best(question)[0].candidate.sequence_degree > 1
    with_offload, without = fewest_devices(question)
    assert without == with_offload <= 8


def test_too_little_host_memory_rules_offload_out():
    question = asked("Qwen3-8B", "1x4090")
    assert best(question)[0].fits < SURE
    rich = replace(question, devices=replace(question.devices, stated={"host_bytes": 512 * GIB}))
    chosen, _ = best(rich)
    assert chosen.fits >= SURE and chosen.candidate.offload_optimizer == "cpu"


def test_the_experts_of_a_mixture_are_shared_out_where_a_degree_says_so():
    mixture, dense = asked("mixtral-8x7b"), asked()
    assert mixture.profile.n_expert == 32 * 8 * 3 * 4096 * 14336 and mixture.profile.experts_per_token == 2
    assert dense.profile.n_expert == 0
    sharded = Candidate(micro_batch_size=1, zero_stage=2, precision="bf16")
    grouped = Candidate.of({**sharded.values(), "expert_parallel.autoep_size": 8})
    assert peak(grouped, mixture) < peak(sharded, mixture) - 2 * 0.8 * mixture.profile.n_expert


def test_a_card_without_bfloat16_gets_fp16():
    assert best(asked("gpt2", "1xT4"))[0].candidate.precision == "fp16"


CONFIGS = [
    Candidate(micro_batch_size=2, gradient_accumulation_steps=4, zero_stage=stage, precision=precision, offload_optimizer=optimizer,
              offload_param=param)
    for stage, precision, optimizer, param in (
        (0, "bf16", "none", "none"), (1, "bf16", "none", "none"), (2, "fp16", "cpu", "none"), (3, "bf16", "cpu", "cpu"),
        (3, "fp32", "none", "none"),
    )
]  # fmt: skip


def test_the_json_states_what_changed_between_releases_and_keeps_the_users_own():
    config = ds_config(CONFIGS[3])
    check_config(config, "advice")
    assert config["gradient_clipping"] == 1.0
    for part in ("offload_optimizer", "offload_param"):
        assert config["zero_optimization"][part] == {"device": "cpu", "pin_memory": True}
    own = ds_config(CONFIGS[1], {"gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": False}})
    assert own["gradient_clipping"] == 0.5 and own["zero_optimization"]["overlap_comm"] is False


LOAD = """
import json
from deepspeed.runtime.config import DeepSpeedConfig
for config in %s:
    loaded = DeepSpeedConfig(config)
    print(json.dumps([loaded.zero_optimization_stage, loaded.gradient_accumulation_steps, loaded.gradient_clipping]))
"""


@pytest.mark.process
def test_deepspeed_loads_the_json(zoo):
    said = [
        json.loads(line)
        for line in zoo.printed(LOAD % [ds_config(c) for c in CONFIGS]).splitlines()
        if line.startswith("[") and line.endswith("]") and "WARN" not in line and "INFO" not in line
    ]
    assert said == [[c.zero_stage, 4, 1.0] for c in CONFIGS]
