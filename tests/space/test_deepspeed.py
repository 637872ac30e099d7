"""The user's DeepSpeed JSON: what is refused before anything starts, and what the installed DeepSpeed itself takes."""

import json
import subprocess
import sys

import pytest
from support.zoo import Zoo

from autotune.space import installed
from autotune.space.deepspeed import (
    RETIRED_KEYS,
    SECTION_KEYS,
    TOP_LEVEL_KEYS,
    ConfigError,
    check_setting,
    precision_of,
    read_config,
)
from autotune.space.retired import SPELLINGS

REFUSED = [
    ("{", "not JSON"),
    ("[1]", "not list"),
    ('{"gradient_acumulation_steps": 2}', "gradient_accumulation_steps"),
    ('{"zero_optimization": {"stge": 2}}', "'stage'"),
    ('{"zero_optimization": {"stage": "two"}}', "zero_optimization.stage: 'two' is not one of 0, 1, 2, 3"),
    ('{"zero_optimization": 2}', "'zero_optimization' is a section"),
    ('{"zero_optimization": "auto"}', "'zero_optimization' is a section"),
    ('{"zero_optimization": {"cpu_offload": true, "offload_optimizer": true}}', "'zero_optimization.offload_optimizer' is a section"),
    ('{"optimizer": "Adam"}', "'optimizer' is a section"),
    ('{"optimizer": {"type": "Adam", "params": [1]}}', "'optimizer.params' is a section"),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16.enabled and fp16.enabled are both true"),
    ('{"gradient_clipping": -1}', "gradient_clipping: -1 is not at least 0"),
    ('{"fp16": {"loss_scale": -2}}', "fp16.loss_scale: -2 is not at least 0"),
    ('{"optimizer": {"type": "Adamm"}}', "optimizer.type: DeepSpeed knows no 'Adamm'. Did you mean 'Adam'?"),
    ('{"scheduler": {"type": "WarmUpp"}}', "scheduler.type: DeepSpeed knows no 'WarmUpp'. Did you mean 'WarmupLR'?"),
    ('{"communication_data_type": "fp64"}', "communication_data_type: DeepSpeed knows no 'fp64'."),
    ('{"data_types": {"grad_accum_dtype": "fp33"}}', "data_types.grad_accum_dtype: DeepSpeed knows no 'fp33'. Did you mean 'fp32'?"),
    ('{"data_types": {"grad_accum_dtype": "FP16"}}', "data_types.grad_accum_dtype: DeepSpeed knows no 'FP16'."),
    ('{"torch_autocast": {"enabled": true, "dtype": "fp8"}}', "torch_autocast.dtype: DeepSpeed knows no 'fp8'."),
    ('{"steps_per_print": 0}', "steps_per_print: 0 is not allowed, it must differ from 0"),
    ('{"prescale_gradients": "false"}', "prescale_gradients: true or false is needed, not 'false'"),
    ('{"bfloat16": {"enabled": "yes"}}', "bf16.enabled: true or false is needed"),
    ('{"fp16": {"fp16_master_weights_and_grads": "true"}}', "fp16.fp16_master_weights_and_grads: true or false is needed"),
    ('{"zero_optimization": {"reduce_bucket_size": -5}}', "zero_optimization.reduce_bucket_size: -5 is not above 0"),
    ('{"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}', "offload_optimizer.ratio: 1.5 is not at most 1"),
    ('{"zero_optimization": {"stage3_prefetch_bucket_size": -1}}', "stage3_prefetch_bucket_size: -1 is not at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_a_json_that_deepspeed_would_misread_or_refuse_is_refused_with_its_key(text, said):
    with pytest.raises(ConfigError) as error:
        read_config(text, "ds.json")
    assert str(error.value).startswith("ds.json: ") and said in str(error.value)


TAKEN = [
    {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
    {"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}, "gradient_clipping": "auto"},
    {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}, "communication_data_type": "FP16"},
    {"optimizer": {"type": "ADAMW"}, "scheduler": {"type": "CosineAnnealingLR"}},
    {"optimizer": {"type": "SGD", "params": "auto"}, "zero_optimization": {"reduce_bucket_size": 5e8}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": None, "allgather_bucket_size": 0}},
    {"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "torch.float32", "keep_in_fp32_modules": []}},
]


@pytest.mark.parametrize("config", TAKEN)
def test_a_json_that_deepspeed_takes_is_read(config):
    assert read_config(json.dumps(config), "ds.json") == config


def test_where_no_source_can_be_read_names_are_left_to_deepspeed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert installed.optimizers.__wrapped__() == installed.schedulers.__wrapped__() == frozenset()
    assert installed.bounds.__wrapped__() == installed.OTHER_BOUNDS
    monkeypatch.setitem(sys.modules["autotune.space.deepspeed"].NAMES, "optimizer.type", (frozenset, True))
    check_setting("optimizer.type", "Adamm", "ds.json")


@pytest.mark.process
def test_reading_what_is_installed_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from autotune.space import installed; installed.optimizers(), installed.schedulers(), installed.bounds();"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "set()"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float16", "torch_autocast_fp16"), ("torch.float16", "torch_autocast_fp16"), ("bfloat16", "torch_autocast"),
     ("bf16", "torch_autocast"), (None, "torch_autocast")],
)  # fmt: skip
def test_the_type_of_autocast_is_read(dtype, precision):
    assert precision_of({"torch_autocast": {"enabled": True, "dtype": dtype}}) == precision
    assert precision_of({"torch_autocast": {"dtype": dtype}}) == "fp32"


# Names that DeepSpeed looks for only in order to refuse them, or that its own `bf16` has replaced.
RETIRED = {"bfloat16", "quantize_training"}
ASK_DEEPSPEED = '''
import json, torch
SEEN = set()
class Recorder(dict):
    """Notes every key that is asked for."""
    def __getitem__(self, key): SEEN.add(key); return super().__getitem__(key)
    def get(self, key, default=None): SEEN.add(key); return super().get(key, default)
    def __contains__(self, key): SEEN.add(key); return super().__contains__(key)
    def keys(self): return self
    def __copy__(self): return Recorder(self)
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
keys = lambda model: sorted(field.alias or name for name, field in model.model_fields.items())
sections = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
bounded = {"zero_optimization": DeepSpeedZeroConfig, "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
           "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig}
limits = lambda field: {sign: getattr(one, sign) for one in field.metadata for sign in ("gt", "ge", "lt", "le") if hasattr(one, sign)}
bounds = {f"{section}.{field.alias or name}": limits(field) for section, model in bounded.items()
          for name, field in model.model_fields.items() if limits(field)}
optim = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
rates = torch.optim.lr_scheduler
kinds = [n for n, c in vars(rates).items() if isinstance(c, type) and issubclass(c, rates.LRScheduler) and n[0] != "_"]
types = {kind.name: kind._all_values[1:] for kind in DtypeEnum}
found = {"top": sorted(SEEN)} | {name: keys(model) for name, model in sections.items()}
print(json.dumps({"types": types, "removed": sorted(_REMOVED_TOP_LEVEL_CONFIG_KEYS), "keys": found, "bounds": bounds,
  "optimizers": sorted({*DEEPSPEED_OPTIMIZERS, *optim} - {"Optimizer"}),
  "schedulers": sorted({*lr_schedules.VALID_LR_SCHEDULES, *kinds})}))
'''


@pytest.fixture(scope="module")
def deepspeed_itself(executor, tmp_path_factory):
    return json.loads(Zoo(executor, tmp_path_factory.mktemp("keys")).printed(ASK_DEEPSPEED).splitlines()[-1])


@pytest.mark.process
def test_every_key_of_the_installed_deepspeed_is_known(deepspeed_itself):
    top = set(deepspeed_itself["keys"].pop("top"))
    assert len(top) > 40 and top - RETIRED <= TOP_LEVEL_KEYS
    assert TOP_LEVEL_KEYS & set(deepspeed_itself["removed"]) == RETIRED_KEYS
    for section, keys in deepspeed_itself["keys"].items():
        assert set(keys) <= SECTION_KEYS[section]


@pytest.mark.process
def test_names_and_bounds_read_from_the_source_are_those_of_the_installed_deepspeed(deepspeed_itself):
    found = {path: limits for path, limits in installed.bounds().items() if path not in installed.OTHER_BOUNDS}
    assert {path: set(limits) for path, limits in found.items()} and found.items() <= deepspeed_itself["bounds"].items()
    assert {"zero_optimization.reduce_bucket_size", "zero_optimization.sub_group_size"} <= found.keys()
    assert installed.optimizers() == set(deepspeed_itself["optimizers"])
    assert set(deepspeed_itself["schedulers"]) <= installed.schedulers()


@pytest.mark.process
def test_types_are_spelt_as_the_installed_deepspeed_reads_them(deepspeed_itself):
    of_weights = {name: set(all_) for name, all_ in deepspeed_itself["types"].items() if name != "int8"}
    assert of_weights == {name: {s for s in SPELLINGS if SPELLINGS[s] == name} for name in SPELLINGS.values()}


@pytest.mark.parametrize(
    ("path", "value", "needed"),
    [
        ("zero_optimization.reduce_bucket_size", 500.5, "a whole number"),
        ("zero_optimization.sub_group_size", "abc", "a whole number"),
        ("zero_optimization.sub_group_size", "1e9", "a whole number"),
        ("zero_optimization.reduce_scatter", "maybe", "true or false"),
        ("zero_optimization.round_robin_gradients", 2, "true or false"),
        ("zero_optimization.offload_optimizer.ratio", "half", "a number"),
        ("zero_optimization.sub_group_size", 1e9, ""),
        ("zero_optimization.sub_group_size", "1000", ""),
        ("zero_optimization.reduce_scatter", 1, ""),
        ("zero_optimization.overlap_comm", None, ""),
    ],
)
def test_a_value_of_a_kind_that_deepspeed_refuses_takes_no_trial(path, value, needed):
    """Each such value of a search space cost a trial, which ended in pydantic's error."""
    if not needed:
        check_setting(path, value, path)
        return
    with pytest.raises(ConfigError, match=f"{path}: {needed} is needed"):
        check_setting(path, value, path)
