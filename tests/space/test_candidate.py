"""One configuration: its knobs, and the DeepSpeed JSON that it means."""

import json
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.space.candidate import AT_LEAST, Candidate, check_knob, differing, every_nth, from_deepspeed
from autotune.space.deepspeed import LARGEST_BATCH, ConfigError, check_config
from autotune.space.legality import why_illegal
from autotune.space.parameter import parse_parameters
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import presets
from autotune.study.spec.spec import read_yaml


@cache
def whole_space() -> SearchSpace:
    return SearchSpace.compose(
        [(name, parse_parameters(read_yaml(path), name)) for name, path in presets("search_spaces").items()]
    )


SETTINGS = st.builds(
    Setting,
    accelerator=st.sampled_from(["cpu", "cuda"]),
    deepspeed_version=st.sampled_from(["0.16.0", "0.18.2", "0.19.8+cu12"]),
    world_size=st.sampled_from([1, 2, 4, 16]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    bf16=st.booleans(),
    fp16=st.booleans(),
    n_blocks=st.sampled_from([0, 2, 12]),
    n_samples=st.sampled_from([None, 10, 1000]),
    global_batch=st.sampled_from([None, (8, 64)]),
    plain_backward=st.booleans(),
)
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": None}
STAGE_3 = {"stage": 3, "stage3_max_live_parameters": 10**6}
BASES = st.sampled_from(
    [
        {},
        {"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": STAGE_3},
        {"fp16": {"enabled": "auto", "loss_scale": 128}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        {"zero_optimization": OFFLOADED},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "data_types": {"grad_accum_dtype": "fp32"}},
    ]
)
READ_BACK = "micro_batch_size gradient_accumulation_steps zero_stage precision offload_optimizer offload_param".split()


@settings(max_examples=150, deadline=None)
@given(setting=SETTINGS, base=BASES, seed=st.integers(0, 2**32 - 1))
def test_a_sampled_candidate_is_refused_with_a_reason_or_means_a_json_that_means_it(setting, base, seed):
    rng = random.Random(seed)
    baseline = Candidate(micro_batch_size=4)
    for _ in range(25):
        space = whole_space()
        candidate = space.candidate(space.suggest(lambda knob: rng.choice(knob.all_values()), baseline), baseline)
        reason = why_illegal(candidate, setting)
        if reason is not None:
            assert reason.strip() and "{" not in reason
            continue
        config = candidate.to_deepspeed(base)
        check_config(json.loads(json.dumps(config)), "candidate")
        back = from_deepspeed(config, setting.world_size)
        assert all(getattr(back, name) == getattr(candidate, name) for name in READ_BACK)


VALUES = {
    "micro_batch_size": 4,
    "zero_stage": 2,
    "zero_optimization.overlap_comm": True,
    "communication_data_type": "bf16",
}


def test_flat_values_and_the_key_give_the_candidate_back():
    candidate = Candidate.of(VALUES)
    assert Candidate.of(candidate.values()) == Candidate.from_key(candidate.key) == candidate
    assert candidate.config == (("communication_data_type", "bf16"), ("zero_optimization.overlap_comm", True))
    assert Candidate.of({**VALUES, "communication_data_type": None}).config == (
        ("zero_optimization.overlap_comm", True),
    )


def test_a_candidate_is_described_in_words():
    assert (
        Candidate.of(VALUES).describe()
        == "micro-batch 4 x 1, fp32, ZeRO 2, communication_data_type=bf16, overlap_comm=true"
    )
    full = Candidate(
        micro_batch_size=8, gradient_accumulation_steps=2, zero_stage=3, precision="torch_autocast",
        checkpoint_every=2, offload_optimizer="cpu", offload_param="nvme",
    )  # fmt: skip
    words = "micro-batch 8 x 2, bf16 autocast, ZeRO 3, every 2nd block recomputed, optimizer on the host, parameters on NVMe"
    assert full.describe() == words
    words = "every, every 2nd, every 3rd, every 4th, every 11th, every 12th, every 21st, every 113th".split(", ")
    assert [every_nth(n) for n in (1, 2, 3, 4, 11, 12, 21, 113)] == words


def test_a_change_is_said_in_words():
    before = Candidate(micro_batch_size=2, gradient_accumulation_steps=4, zero_stage=3, checkpoint_every=1)
    after = Candidate.of(
        {"micro_batch_size": 8, "precision": "bf16", "offload_optimizer": "cpu", "communication_data_type": "fp16"}
    )
    assert after.changes_from(before) == [
        "micro-batch 8 x 1 instead of 2 x 4", "ZeRO 0 instead of 3", "precision bf16 instead of fp32",
        "recomputation of no block instead of every block", "optimizer on the host instead of the device",
        "communication_data_type fp16 instead of DeepSpeed's default",
    ]  # fmt: skip
    assert before.changes_from(before) == []


def test_candidates_differ_in_the_knobs_whose_values_do():
    baseline = Candidate(micro_batch_size=2, checkpoint_every=1)
    assert differing(baseline.values(), Candidate.of(VALUES).values()) == [
        "micro_batch_size", "zero_stage", "checkpoint_every", "communication_data_type", "zero_optimization.overlap_comm",
    ]  # fmt: skip
    assert Candidate(micro_batch_size=3, gradient_accumulation_steps=5).global_batch_size(2) == 30


ZERO_3 = {"stage": 3, "stage3_max_live_parameters": 5, "overlap_comm": True}
ON_CPU = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
IN_PART = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CUT, Z = {"enabled": True, "loss_scale": 8}, "zero_optimization"
# What of the user's own configuration a candidate keeps and what it replaces: knobs, the user's, and the outcome.
MERGED = {
    "a plain candidate is minimal": ({}, {}, {}),
    "other settings stay": (
        {}, {"gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR"}},
        {"gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR"}},
    ),
    "the batch is replaced as a group": ({}, {"train_batch_size": 64, "gradient_accumulation_steps": 8}, {}),
    "the precision is replaced as a group, whose stated sections scripts read": (
        {"precision": "bf16"}, {"fp16": CUT}, {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
    ),
    "which is off for fp32, and amp's gone, that DeepSpeed refuses": (
        {}, {"bf16": {"enabled": True}, "amp": {"enabled": False}}, {"bf16": {"enabled": False}},
    ),
    "details of a precision stay with it": ({"precision": "fp16"}, {"fp16": CUT}, {"fp16": CUT}),
    "autocast has a type": ({"precision": "torch_autocast"}, {}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "of autocast in fp16 too": ({"precision": "torch_autocast_fp16"}, {}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}),
    "a stated type of the weights that is another one, which DeepSpeed refuses": (
        {"precision": "bf16"}, {"data_types": {"param_dtype": "fp16"}}, {"bf16": {"enabled": True}},
    ),
    "accumulation types need 16 bits": ({}, {"data_types": {"grad_accum_dtype": "fp32"}}, {}),
    "other types of data do not": (
        {}, {"data_types": {"grad_accum_dtype": "fp32", "param_dtype": "fp32"}}, {"data_types": {"param_dtype": "fp32"}},
    ),
    "with 16 bits they stay": (
        {"precision": "bf16"}, {"data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "buffers follow 16-bit weights": (
        {"precision": "bf16"}, {"data_types": {"buffer_dtype": "auto"}},
        {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    ),
    "but no others": ({}, {"data_types": {"buffer_dtype": "auto"}}, {}),
    "zero settings go with stage 0, which scripts read": ({}, {Z: ZERO_3}, {Z: {"stage": 0}}),
    "stage-3 settings go with stage 3": ({"zero_stage": 2}, {Z: ZERO_3}, {Z: {"stage": 2, "overlap_comm": True}}),
    "and stay with it": ({"zero_stage": 3}, {Z: ZERO_3}, {Z: ZERO_3}),
    "details of offloading stay with the device": ({"zero_stage": 2, "offload_optimizer": "cpu"}, {Z: ON_CPU}, {Z: ON_CPU}),
    "and go with it": ({"zero_stage": 2}, {Z: ON_CPU}, {Z: {"stage": 2}}),
    "a part is offloaded at stage 3": ({"zero_stage": 3, "offload_optimizer": "cpu"}, {Z: IN_PART}, {Z: IN_PART}),
    "and all of it at others": (
        {"zero_stage": 2, "offload_optimizer": "cpu"}, {Z: IN_PART}, {Z: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    "settings of stages 1 and 2 go with them": (
        {"zero_stage": 3}, {Z: {"stage": 2, "compute_grad_norm": False, "overlap_comm": True}},
        {Z: {"stage": 3, "overlap_comm": True}},
    ),
    "another device has its own": (
        {"zero_stage": 2, "offload_optimizer": "nvme"}, {Z: ON_CPU},
        {Z: {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
    ),
    "what only nvme reads may stand beside another device": (
        {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
        {Z: {"stage": 3, "offload_optimizer": {**ON_CPU["offload_optimizer"], "nvme_path": "/fast"},
             "offload_param": {"device": "none", "nvme_path": "/fast", "buffer_size": 5}}},
        {Z: {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
             "offload_param": {"device": "nvme", "nvme_path": "/fast", "buffer_size": 5}}},
    ),
    "a section of null is none": (
        {"zero_stage": 2, "offload_optimizer": "cpu"}, {Z: {"stage": 2, "offload_optimizer": None}},
        {Z: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    "auto is dropped": ({}, {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}, {}),
    "a scheduler whose parameters are auto has none": (
        {}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {}}},
    ),
    "paths are set": ({"communication_data_type": "fp16"}, {}, {"communication_data_type": "fp16"}),
}  # fmt: skip


@pytest.mark.parametrize(("knobs", "base", "wanted"), MERGED.values(), ids=MERGED)
def test_the_json_is_the_users_with_the_candidates_settings(knobs, base, wanted):
    before = json.dumps(base)
    config = Candidate.of({"micro_batch_size": 4, **knobs}).to_deepspeed(base)
    assert json.dumps(base) == before
    # A client optimizer that DeepSpeed did not make is allowed wherever ZeRO runs, and not replaced where it is offloaded.
    own = {"zero_allow_untested_optimizer": True} if knobs.get("zero_stage") else {}
    own |= {"zero_force_ds_cpu_optimizer": False} if knobs.get("offload_optimizer") else {}
    assert config == {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, **wanted, **own}


def test_an_optimizer_of_deepspeeds_own_is_under_its_rules():
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = Candidate(micro_batch_size=1, zero_stage=1, offload_optimizer="cpu").to_deepspeed(base)
    assert config["optimizer"] == base["optimizer"] and not [
        key for key in config if key.startswith("zero_") and key[5] in "af"
    ]


def test_an_optimizer_that_zero_was_not_tested_with_is_allowed_where_zero_runs():
    base = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    configs = [Candidate(micro_batch_size=1, zero_stage=stage).to_deepspeed(base) for stage in (0, 1)]
    assert [config.get("zero_allow_untested_optimizer") for config in configs] == [None, True]


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"train_batch_size": 32}, (16, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, (4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (4, 3)),
    ],
)
def test_the_batch_is_resolved_as_deepspeed_resolves_it(config, batch):
    candidate = from_deepspeed(config, 2)
    assert (candidate.micro_batch_size, candidate.gradient_accumulation_steps) == batch
    assert (candidate.zero_stage, candidate.offload_optimizer, candidate.offload_param) == (0, "none", "none")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "base config: train_micro_batch_size_per_gpu is missing"),
        ({"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4}, "2 ranks"),
        ({"train_batch_size": 1}, "2 ranks"),
        ({"train_batch_size": "32"}, "train_batch_size: '32' is not a whole number"),
        ({"train_batch_size": 0, "train_micro_batch_size_per_gpu": 4}, "train_batch_size: 0 is not a whole number"),
        ({"train_micro_batch_size_per_gpu": True}, "train_micro_batch_size_per_gpu: True is not"),
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 is not"),
        ({"train_micro_batch_size_per_gpu": LARGEST_BATCH + 1}, "at most 2,147,483,647"),
        ({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}, "base config: zero_stage: 4 is not one of 0, 1, 2, 3"),
    ],
)  # fmt: skip
def test_a_batch_or_a_stage_that_cannot_be_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        from_deepspeed(config, 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_stag", "'zero_stage'"),
        ("zero_optimization.overlap_com", "'overlap_comm'"),
        ("zero_optimisation.overlap_comm", "'zero_optimization'"),
        ("train_batch_size", "micro_batch_size and gradient_accumulation_steps"),
        ("bf16.enabled", "'precision'"),
        ("optimizer.type", "'base_config'"),
        ("optimizer", "is a section of settings"),
        ("bf16", "as in `bf16.bf16_master_weights_and_grads`"),
    ],
)
def test_a_knob_that_is_none_is_refused_with_the_one_that_was_meant(name, said):
    with pytest.raises(ConfigError, match=said):
        check_knob(name)
    with pytest.raises(ConfigError, match=said):
        Candidate.of({"micro_batch_size": 1, name: 1})


WRONG = [("zero_stage", True), ("zero_stage", "1"), ("zero_stage", 1.0), ("zero_stage", 4), ("precision", "fp8")]
WRONG += [(name, value) for name, least in AT_LEAST.items() for value in (least - 1, True, 2.0, "2", LARGEST_BATCH + 1)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_that_a_field_does_not_take_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Candidate.of({"micro_batch_size": 1, name: value})


def test_the_largest_and_the_smallest_amounts_are_taken_and_a_candidate_has_a_micro_batch():
    for amounts in (AT_LEAST, dict.fromkeys(AT_LEAST, LARGEST_BATCH)):
        assert Candidate.of(amounts).values().items() >= amounts.items()
    with pytest.raises(ConfigError, match="micro_batch_size is missing"):
        Candidate.of({"zero_stage": 1})


TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"


def test_ranks_that_share_a_copy_of_the_model_share_its_samples():
    candidate = Candidate.of({"micro_batch_size": 4, "gradient_accumulation_steps": 2, TENSOR: 2})
    assert (candidate.tensor_degree, candidate.sequence_degree, candidate.ranks_per_replica) == (2, 1, 2)
    assert candidate.global_batch_size(4) == 16
    assert Candidate.of({"micro_batch_size": 4, TENSOR: 1}) == Candidate.of({"micro_batch_size": 4})


def test_a_degree_of_the_users_own_configuration_belongs_to_the_candidate():
    own = {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}
    candidate = from_deepspeed(own, 4)
    assert (candidate.tensor_degree, candidate.micro_batch_size) == (2, 8)
    assert candidate.to_deepspeed(own)["tensor_parallel"] == {"autotp_size": 2, "preset_model": "llama"}
    plain = Candidate(micro_batch_size=4).to_deepspeed({**own, SEQUENCE: 2})
    assert plain["tensor_parallel"] == {"preset_model": "llama"} and SEQUENCE not in plain


def test_ranks_that_share_experts_train_on_samples_of_their_own():
    own = {"train_batch_size": 16, "expert_parallel": {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}}
    candidate = from_deepspeed(own, 4)
    assert (candidate.expert_degree, candidate.ranks_per_replica, candidate.micro_batch_size) == (2, 1, 4)
    assert candidate.to_deepspeed(own)["expert_parallel"] == own["expert_parallel"] and not candidate.is_whole
    assert Candidate(micro_batch_size=4).to_deepspeed(own)["expert_parallel"] == {"use_grouped_mm": False}
    assert candidate.to_deepspeed({})["expert_parallel"] == {"enabled": True, "autoep_size": 2}
    idle = {**own, "expert_parallel": {"enabled": False, "autoep_size": 2}}
    assert from_deepspeed(idle, 4).expert_degree == 1


@pytest.mark.parametrize("value", [-2, 1.5, "two", True])
def test_what_is_no_degree_is_refused_in_a_sentence(value):
    with pytest.raises(ConfigError, match="is no degree: a whole number of ranks"):
        check_config({"tensor_parallel": {"autotp_size": value}}, "base config")
