"""One configuration: its DeepSpeed JSON, its legality, and the keys that DeepSpeed reads."""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.space.candidate import Candidate, check_knob, from_deepspeed
from autotune.space.deepspeed import SECTION_KEYS, TOP_LEVEL_KEYS, ConfigError, check_config, read_config
from autotune.space.legality import RULES, Setting, why_illegal
from autotune.space.parameter import parse_parameters
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import presets
from autotune.study.spec.spec import read_yaml

CPU = Setting(world_size=2, ranks_per_node=2, n_blocks=4, n_samples=10_000)
GPUS = Setting(accelerator="cuda", deepspeed_version="0.16.9", world_size=16, ranks_per_node=8, fp16=True, n_blocks=24)


@cache
def whole_space() -> SearchSpace:
    return SearchSpace.compose(
        [(name, parse_parameters(read_yaml(path), name)) for name, path in presets("search_spaces").items()]
    )


SETTINGS = st.builds(
    Setting,
    accelerator=st.sampled_from(["cpu", "cuda"]),
    deepspeed_version=st.sampled_from(["0.16.0", "0.19.6", "0.19.7", "0.19.8+cu12"]),
    world_size=st.sampled_from([1, 2, 4, 16]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    bf16=st.booleans(),
    fp16=st.booleans(),
    n_blocks=st.sampled_from([0, 2, 12]),
    n_samples=st.sampled_from([None, 10, 1000]),
    global_batch=st.sampled_from([None, (8, 64)]),
    plain_backward=st.booleans(),
)
BASES = st.sampled_from(
    [
        {},
        {
            "train_batch_size": 32,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10**6},
        },
        {
            "fp16": {"enabled": "auto", "loss_scale": 128},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        },
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": None,
            }
        },
        {
            "torch_autocast": {"enabled": True, "dtype": "float16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": 1.0,
        },
    ]
)


@settings(max_examples=150, deadline=None)
@given(setting=SETTINGS, base=BASES, seed=st.integers(0, 2**32 - 1))
def test_a_sampled_candidate_is_refused_with_a_reason_or_means_a_json_that_means_it(setting, base, seed):
    rng = random.Random(seed)
    baseline = Candidate(micro_batch_size=4)
    for _ in range(25):
        candidate = whole_space().sample(rng, baseline)
        reason = why_illegal(candidate, setting)
        if reason is not None:
            assert reason.strip() and "{" not in reason
            continue
        config = candidate.to_deepspeed(base)
        check_config(json.loads(json.dumps(config)), "candidate")
        back = from_deepspeed(config, setting.world_size)
        for name in (
            "micro_batch_size",
            "gradient_accumulation_steps",
            "zero_stage",
            "precision",
            "offload_optimizer",
            "offload_param",
        ):
            assert getattr(back, name) == getattr(candidate, name)


def test_flat_values_give_the_candidate_back():
    candidate = Candidate.of(
        {
            "micro_batch_size": 4,
            "zero_stage": 2,
            "zero_optimization.overlap_comm": True,
            "communication_data_type": "bf16",
        }
    )
    assert Candidate.of(candidate.values()) == candidate


def test_a_value_of_none_leaves_the_key_out():
    assert Candidate.of({"micro_batch_size": 4, "communication_data_type": None}).config == ()


def test_the_json_of_a_plain_candidate_is_minimal():
    config = Candidate(micro_batch_size=4, gradient_accumulation_steps=2).to_deepspeed()
    assert config == {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


def test_the_base_configuration_is_not_changed():
    base = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    before = json.dumps(base)
    Candidate.of({"micro_batch_size": 1, "zero_stage": 1, "zero_optimization.overlap_comm": True}).to_deepspeed(base)
    assert json.dumps(base) == before


def test_the_users_other_settings_stay():
    config = Candidate(micro_batch_size=4, zero_stage=2).to_deepspeed(
        {"gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR"}}
    )
    assert config["gradient_clipping"] == 1.0 and config["scheduler"] == {"type": "WarmupLR"}


def test_the_users_batch_is_replaced_as_a_group():
    config = Candidate(micro_batch_size=4).to_deepspeed({"train_batch_size": 64, "gradient_accumulation_steps": 8})
    assert "train_batch_size" not in config and config["gradient_accumulation_steps"] == 1


def test_the_users_precision_is_replaced_as_a_group():
    config = Candidate(micro_batch_size=4, precision="bf16").to_deepspeed({"fp16": {"enabled": True, "loss_scale": 8}})
    assert "fp16" not in config and config["bf16"] == {"enabled": True}


def test_details_of_the_users_precision_stay_with_that_precision():
    config = Candidate(micro_batch_size=4, precision="fp16").to_deepspeed({"fp16": {"enabled": True, "loss_scale": 8}})
    assert config["fp16"] == {"enabled": True, "loss_scale": 8}


def test_stage_3_settings_of_the_user_go_with_stage_3():
    base = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5, "overlap_comm": True}}
    assert Candidate(micro_batch_size=1, zero_stage=2).to_deepspeed(base)["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
    }


def test_details_of_the_users_offloading_stay_while_the_device_does():
    base = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    stays = Candidate(micro_batch_size=1, zero_stage=2, offload_optimizer="cpu").to_deepspeed(base)
    leaves = Candidate(micro_batch_size=1, zero_stage=2).to_deepspeed(base)
    assert stays["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 0.5}
    assert "offload_optimizer" not in leaves["zero_optimization"]


def test_an_offloading_section_of_null_is_none():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "offload_optimizer": None}}
    assert from_deepspeed(config, 1).offload_optimizer == "none"
    candidate = Candidate(micro_batch_size=1, zero_stage=2, offload_optimizer="cpu")
    assert candidate.to_deepspeed(config)["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_values_of_auto_are_dropped():
    base = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    assert set(Candidate(micro_batch_size=1).to_deepspeed(base)) == {
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }


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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "train_micro_batch_size_per_gpu is missing"),
        ({"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4}, "2 ranks"),
        ({"train_batch_size": 1}, "2 ranks"),
        ({"train_batch_size": "32"}, "not a whole number"),
        ({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}, "not one of 0, 1, 2, 3"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        from_deepspeed(config, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not list"),
        ('{"gradient_acumulation_steps": 2}', "gradient_accumulation_steps"),
        ('{"zero_optimization": {"stge": 2}}', "'stage'"),
        ('{"zero_optimization": 2}', "is a section"),
        ('{"optimizer": "Adam"}', "is a section"),
    ],
)
def test_a_json_that_deepspeed_would_misread_is_refused(text, said):
    with pytest.raises(ConfigError, match=said) as error:
        read_config(text, "ds.json")
    assert str(error.value).startswith("ds.json: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_stag", "'zero_stage'"),
        ("zero_optimization.overlap_com", "'overlap_comm'"),
        ("zero_optimisation.overlap_comm", "'zero_optimization'"),
        ("train_batch_size", "micro_batch_size and gradient_accumulation_steps"),
        ("bf16.enabled", "'precision'"),
    ],
)
def test_an_unknown_knob_is_refused_with_the_one_that_was_meant(name, said):
    with pytest.raises(ConfigError, match=said):
        check_knob(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("zero_stage", True), ("zero_stage", "1"), ("zero_stage", 1.0), ("micro_batch_size", 0), ("precision", "fp8")],
)
def test_a_value_that_a_field_does_not_take_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Candidate.of({"micro_batch_size": 1, name: value})


ILLEGAL = [
    ({"precision": "fp16"}, CPU, "fp16"),
    ({"precision": "torch_autocast_fp16"}, CPU, "fp16"),
    ({"precision": "bf16"}, Setting(bf16=False), "bfloat16"),
    ({"precision": "bf16"}, Setting(unsafe_precisions=("bf16",)), "mixes types"),
    ({"zero_stage": 2}, Setting(pipeline_stages=2), "PipelineModule"),
    ({"precision": "torch_autocast", "checkpoint_every": 1}, Setting(pipeline_stages=2, n_blocks=4), "recomputes"),
    ({"checkpoint_every": 1}, Setting(n_blocks=0), "blocks"),
    ({"checkpoint_every": 5}, CPU, "only 4 blocks"),
    ({"micro_batch_size": 64}, Setting(world_size=2, n_samples=100), "only 100 samples"),
    ({"micro_batch_size": 64}, Setting(global_batch=(1, 32)), "outside 1..32"),
    ({"offload_optimizer": "cpu"}, GPUS, "stage 1"),
    ({"offload_param": "cpu", "zero_stage": 2}, GPUS, "stage 3"),
    ({"offload_optimizer": "cpu", "zero_stage": 2}, CPU, "nothing to move"),
    ({"zero_optimization.overlap_comm": True}, GPUS, "stage 0"),
    ({"zero_optimization.stage3_max_live_parameters": 1, "zero_stage": 2}, GPUS, "stage 3"),
    ({"zero_optimization.stage3_module_granularity_threshold": 9, "zero_stage": 3}, GPUS, "granularity"),
    ({"bf16.immediate_grad_update": True}, GPUS, "precision bf16"),
    ({"fp16.loss_scale": 1}, GPUS, "precision fp16"),
    ({"bf16.bf16_master_weights_and_grads": True, "precision": "bf16"}, GPUS, "stage 1, 2 or 3"),
    ({"bf16.bf16_optimizer_states": True, "precision": "bf16", "zero_stage": 1}, GPUS, "needs bf16_master"),
    ({"bf16.bf16_master_weights_and_grads": True, "precision": "bf16", "zero_stage": 1}, GPUS, "offloaded"),
    ({"data_types.grad_accum_dtype": "fp32"}, GPUS, "bf16 or fp16"),
    ({"data_types.grad_accum_dtype": "fp32", "precision": "bf16"}, GPUS, "stage 0"),
    ({"communication_data_type": "bf16"}, Setting(world_size=1), "one rank"),
    ({"zero_optimization.zero_quantized_weights": True, "zero_stage": 3}, CPU, "CUDA"),
    (
        {"zero_optimization.zero_quantized_gradients": True, "zero_stage": 3},
        Setting(accelerator="cuda", world_size=8, ranks_per_node=8),
        "one node",
    ),
    ({"zero_optimization.zero_hpz_partition_size": 3, "zero_stage": 3}, GPUS, "16 ranks"),
    ({"offload_optimizer": "nvme", "zero_stage": 2}, GPUS, "nvme_path"),
    ({"zero_optimization.overlap_comm": True, "zero_stage": 1}, CPU, "no streams"),
    ({"precision": "bf16"}, Setting(base=(("data_types.grad_accum_dtype", "fp32"),)), "stage 0"),
    ({"zero_stage": 0}, Setting(plain_backward=True), "refuses loss.backward()"),
    ({"precision": "torch_autocast"}, Setting(deepspeed_version="0.17.1"), "0.17.2"),
    (
        {
            "precision": "bf16",
            "zero_stage": 1,
            "bf16.bf16_master_weights_and_grads": True,
            "bf16.bf16_optimizer_states": True,
        },
        Setting(deepspeed_version="0.18.2"),
        "0.18.3",
    ),
]


@pytest.mark.parametrize(("values", "setting", "said"), ILLEGAL)
def test_what_cannot_run_is_refused_with_its_reason(values, setting, said):
    reason = why_illegal(Candidate.of({"micro_batch_size": 1} | values), setting)
    assert reason is not None and said in reason


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({}, CPU),
        ({"precision": "bf16", "zero_stage": 3, "checkpoint_every": 4}, CPU),
        (
            {
                "precision": "bf16",
                "zero_stage": 1,
                "bf16.bf16_master_weights_and_grads": True,
                "bf16.bf16_optimizer_states": True,
            },
            CPU,
        ),
        ({"precision": "torch_autocast"}, Setting(deepspeed_version="0.17.2")),
        ({"communication_data_type": "fp16"}, CPU),
        ({"precision": "fp16"}, GPUS),
        ({"precision": "fp32"}, Setting(base=(("data_types.grad_accum_dtype", "fp32"),))),
        (
            {
                "zero_stage": 3,
                "offload_param": "cpu",
                "offload_optimizer": "cpu",
                "zero_optimization.zero_quantized_gradients": True,
            },
            GPUS,
        ),
    ],
)
def test_what_ran_is_not_refused(values, setting):
    assert why_illegal(Candidate.of({"micro_batch_size": 1} | values), setting) is None


def test_every_rule_can_be_met():
    cases = [(Candidate.of({"micro_batch_size": 1} | values), setting) for values, setting, _ in ILLEGAL]
    never = [
        rule.why
        for rule in RULES
        if not any(rule.broken(candidate, dict(candidate.config), setting) for candidate, setting in cases)
    ]
    # What is left is the far side of a rule that is met in another way above.
    assert never == [
        why for why in never if why.startswith(("communication_data_type fp16", "grad_accum_dtype contradicts"))
    ]


# Names that DeepSpeed looks for only in order to refuse them, or that its own `bf16` has replaced.
RETIRED = {"bfloat16", "quantize_training"}
ASK_DEEPSPEED = '''
import json
SEEN = set()
class Recorder(dict):
    """Notes every key that is asked for."""
    def __getitem__(self, key): SEEN.add(key); return super().__getitem__(key)
    def get(self, key, default=None): SEEN.add(key); return super().get(key, default)
    def __contains__(self, key): SEEN.add(key); return super().__contains__(key)
    def keys(self): return self
    def __copy__(self): return Recorder(self)
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
keys = lambda model: sorted(field.alias or name for name, field in model.model_fields.items())
sections = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
print(json.dumps({"top": sorted(SEEN)} | {name: keys(model) for name, model in sections.items()}))
'''


@pytest.fixture(scope="module")
def installed_keys(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("keys")
    run = subprocess.run(
        [sys.executable, "-c", ASK_DEEPSPEED], capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )
    assert run.returncode == 0, run.stderr
    return {name: set(keys) for name, keys in json.loads(run.stdout.splitlines()[-1]).items()}


@pytest.mark.process
@pytest.mark.slow
def test_every_top_level_key_of_the_installed_deepspeed_is_known(installed_keys):
    assert len(installed_keys["top"]) > 40
    assert installed_keys["top"] - RETIRED <= TOP_LEVEL_KEYS


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("section", ["zero_optimization", "bf16", "fp16"])
def test_every_key_of_a_section_of_the_installed_deepspeed_is_known(installed_keys, section):
    assert installed_keys[section] <= SECTION_KEYS[section]
