"""Settings that acted are told from those that did not: in real trials, one of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.zoo import CLEAN, Zoo
from yaml import safe_load

from autotune.space import installed
from autotune.space.candidate import FIELDS
from autotune.space.deepspeed import OWNED_PATHS, RETIRED_KEYS, SECTION_KEYS, TOP_LEVEL_KEYS
from autotune.space.ineffective import why_no_effect
from autotune.trial.result import Outcome
from autotune.worker.measure import sizes, witness, witnesses
from autotune.worker.measure.wire import Wire

ZERO = "zero_optimization."
ACTING: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bf16", {f"{ZERO}reduce_bucket_size": 4096, f"{ZERO}contiguous_gradients": False, "gradient_clipping": 0.5}),
    (1, "bf16", {"data_types.grad_accum_dtype": "fp32", f"{ZERO}reduce_bucket_size": 4096, "prescale_gradients": True}),
    (1, "bf16", {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}),
    (2, "fp32", {f"{ZERO}reduce_scatter": False, "communication_data_type": "bf16"}),
    (2, "bf16", {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}),
    (0, "fp32", {"communication_data_type": "bf16"}),
    (0, "fp32", {"timers.throughput.synchronized": False}),
    (3, "bf16", {f"{ZERO}stage3_prefetch_bucket_size": 1024, f"{ZERO}stage3_param_persistence_threshold": 64}),
    (3, "fp32", {f"{ZERO}stage3_max_live_parameters": 9999, f"{ZERO}stage3_max_reuse_distance": 999}),
]  # fmt: skip
INERT: list[tuple[int, str, dict[str, Any], str]] = [
    (1, "fp32", {"sequence_parallel_size": 2}, "sequence_parallel_size: "),
    (2, "bf16", {"compile.deepcompile": True}, "the loop does not call engine.compile"),
    (0, "fp32", {"activation_checkpointing.partition_activations": True}, "the model never calls deepspeed.checkpointing"),
    (1, "bf16", {"communication_data_type": "bf16"}, "gradients have that type anyway"),
    (2, "bf16", {"data_types.grad_accum_dtype": "bf16"}, "gradients have that type anyway"),
    (1, "bf16", {f"{ZERO}contiguous_gradients": False, "data_types.grad_accum_dtype": "fp32"}, "BF16_Optimizer, which ran, does not"),
    (1, "fp32", {f"{ZERO}reduce_bucket_size": 10**9, f"{ZERO}overlap_comm": False}, "with a model of this size it does the same"),
    (3, "fp32", {f"{ZERO}zero_hpz_partition_size": 1, "prescale_gradients": False}, "the same without the key"),
]  # fmt: skip


def run(zoo: Zoo, stage: int, precision: str, what: dict[str, Any]) -> Any:
    changed = dict.fromkeys(what)
    return zoo.run("ok", zero_stage=stage, precision=precision, changed_from=changed, **CLEAN, **what)


@pytest.mark.cells(5)
@pytest.mark.process
@pytest.mark.parametrize(("stage", "precision", "what"), ACTING)
def test_a_setting_that_acts_is_seen_to_act(zoo: Zoo, stage: int, precision: str, what: dict[str, Any]) -> None:
    result = run(zoo, stage, precision, what)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed is not None and result.observed.unwitnessed == ()


@pytest.mark.cells(5)
@pytest.mark.process
@pytest.mark.parametrize(("stage", "precision", "what", "said"), INERT)
def test_an_inert_setting_is_not_applied(zoo: Zoo, stage: int, precision: str, what: dict[str, Any], said: str) -> None:
    result = run(zoo, stage, precision, what)
    assert result.outcome is Outcome.NOT_APPLIED
    assert said in result.reason and next(iter(what)) in result.reason


@pytest.fixture
def sent() -> Iterator[Wire]:
    """What a rank sent in its second step."""
    witnesses.wire.clear()
    yield witnesses.wire
    witnesses.wire.clear()


def test_a_collective_is_known_by_its_phase_and_the_type_of_its_largest_tensor(sent: Wire) -> None:
    sent.note("backward", ([torch.zeros(4), torch.zeros(8, dtype=torch.bfloat16)], {"options": None}))
    sent.note("step", ((torch.zeros(2, dtype=torch.int8),), {}))
    sent.note("step", ((), {}))
    assert sent.types("backward") == {torch.float32} and sent.types("step") == {torch.int8}
    assert sum(sent.calls.values()) == 2


@pytest.mark.parametrize(("travelled", "said"), [(torch.bfloat16, None), (torch.float32, "float32")])
def test_a_wire_type_is_believed_where_it_travelled(sent: Wire, travelled: torch.dtype, said: str | None) -> None:
    sent.note("backward", torch.zeros(4, dtype=travelled))
    engine = SimpleNamespace(
        dp_world_size=2, zero_optimization_stage=lambda: 0, communication_data_type=torch.bfloat16,
        module=torch.nn.Linear(2, 2),
    )  # fmt: skip
    why = witness.judge(engine, {"communication_data_type": "bf16"}, {}).inert.get("communication_data_type")
    assert why is None if said is None else said in str(why)


@pytest.mark.parametrize(("travelled", "inert"), [(torch.int8, False), (torch.bfloat16, True)])
def test_quantised_weights_are_believed_where_integers_travelled(
    sent: Wire, travelled: torch.dtype, inert: bool
) -> None:
    sent.note("forward", torch.zeros(4, dtype=travelled))
    offload = SimpleNamespace(zero_quantized_weights=True)
    engine = SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))
    name = f"{ZERO}zero_quantized_weights"
    assert (name in witness.judge(engine, {name: True}, {}).inert) == inert


@pytest.mark.process
def test_what_nothing_shows_is_unwitnessed(zoo: Zoo) -> None:
    result = run(zoo, 1, "fp32", {f"{ZERO}override_module_apply": False})
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed is not None and result.observed.unwitnessed == (f"{ZERO}override_module_apply",)


def test_a_key_left_out_is_judged_by_the_value_it_had() -> None:
    class Engine:
        def gradient_clipping(self) -> float:
            return 0.5

    same = witness.judge(Engine(), {"gradient_clipping": None}, {"gradient_clipping": 0.5})
    other = witness.judge(Engine(), {"gradient_clipping": None}, {"gradient_clipping": 2.0})
    assert "same as with 0.5" in same.inert["gradient_clipping"] and not other.inert


def test_a_key_left_out_has_the_default_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu"})
    pins = zero.offload_optimizer.pin_memory
    engine = SimpleNamespace(
        _config=SimpleNamespace(zero_config=zero), zero_optimization_stage=lambda: 2, gradient_clipping=lambda: 0.25,
        optimizer=SimpleNamespace(cpu_offload_pin_memory=not pins),
    )  # fmt: skip
    for name, usual, other in (
        (f"{ZERO}offload_optimizer.pin_memory", pins, not pins),
        ("gradient_clipping", float(constants.GRADIENT_CLIPPING_DEFAULT), 0.25),
    ):
        same, acted = (witness.judge(engine, {name: value}, {name: None}) for value in (usual, other))
        assert "the same without the key" in same.inert[name] and not acted.inert
    assert installed.pins_by_default() == pins


# Settings that nothing shows, with the reason: a trial with one is measured and is never a pick.
UNWITNESSED: dict[str, str] = {
    f"{ZERO}stage3_use_all_reduce_for_fetch_params": "how parameters are fetched is kept in closures",
    f"{ZERO}stage3_allgather_sequential": "how parameters are fetched is kept in closures",
    f"{ZERO}stage3_module_granularity_threshold": "illegal: DeepSpeed fails with it",
    f"{ZERO}zero_quantized_nontrainable_weights": "needs frozen weights and a CUDA op",
    f"{ZERO}zeropp_loco_param": "a section, taken by old releases only",
    f"{ZERO}mics_shard_size": "taken by old releases only",
    f"{ZERO}mics_hierarchical_params_gather": "taken by old releases only",
    f"{ZERO}override_module_apply": "it acts while the model is built",
    f"{ZERO}leaf_module": "a section of lists",
    f"{ZERO}zenflow": "a section; the optimizer is another one",
    f"{ZERO}offload_optimizer": "further keys of the section say how states are moved, not whether",
    f"{ZERO}offload_param": "further keys of the section say how parameters are moved, not whether",
    "fp16.auto_cast": "it depends on the type of what the model is given",
    "fp16.loss_scale": "what is scaled is scaled back, but for overflows",
    "fp16.initial_scale_power": "what is scaled is scaled back, but for overflows",
    "fp16.loss_scale_window": "it shows when an update has overflowed",
    "fp16.hysteresis": "it shows when an update has overflowed",
    "fp16.consecutive_hysteresis": "it shows when an update has overflowed",
    "fp16.min_loss_scale": "it shows when an update has overflowed",
    "fp16.fp16_master_weights_and_grads": "needs an optimizer on the host",
    "torch_autocast.lower_precision_safe_modules": "a list",
    "data_types.keep_in_fp32_modules": "a list",
    "managed_gradient_accumulation": "it changes who ends a step, which the samples of a step show",
    "gradient_allreduce_op": "it changes what is trained, not how fast",
    "scheduler": "it changes the learning rate over a whole training",
    "weight_quantization": "it acts while the model is built",
    "aio": "needs offload to nvme",
    "timers": "a section of one section",
}


def has_witness(knob: str) -> bool:
    """Whether a setting is shown by a witness of its own or of its section, or by the data and the engine."""
    return (
        knob in witnesses.WITNESSES
        or knob in witnesses.SEEN_BY_OBSERVED
        or knob.partition(".")[0] in witnesses.SECTIONS
    )


def test_every_knob_of_the_presets_has_a_witness() -> None:
    named = {knob for path in (ROOT / "search_spaces").glob("*.yaml") for knob in safe_load(path.read_text())}
    assert [knob for knob in named | set(FIELDS) if not has_witness(knob)] == []


def test_every_setting_has_a_witness_or_a_written_reason() -> None:
    plain = TOP_LEVEL_KEYS - SECTION_KEYS.keys() - RETIRED_KEYS
    every = plain | {f"{section}.{key}" for section, keys in SECTION_KEYS.items() for key in keys}
    shown = {key for key in every if has_witness(key) or why_no_effect(key) or why_no_effect(f"{key}.")}
    left = every - shown - OWNED_PATHS.keys()
    assert {key.rpartition(".")[0] if key not in UNWITNESSED else key for key in left} == UNWITNESSED.keys()


def engine_of(*sizes_of_parameters: int, **optimizer: Any) -> Any:
    """As much of an engine at ZeRO 1 as witnesses look at."""
    module = torch.nn.Module()
    for n, size in enumerate(sizes_of_parameters):
        module.register_parameter(str(n), torch.nn.Parameter(torch.zeros(size)))
    zero_config = SimpleNamespace()
    return SimpleNamespace(
        module=module, device="cpu", optimizer=SimpleNamespace(**optimizer), zero_optimization_stage=lambda: 1,
        _config=SimpleNamespace(zero_config=zero_config), gradient_clipping=lambda: 1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("bucket", "n"), [(5, 6), (10, 5), (20, 3), (50, 1), (10**9, 1)])
def test_gradients_are_cut_into_buckets_last_parameter_first(bucket: int, n: int) -> None:
    assert sizes.n_buckets([10, 8, 8, 8, 8, 8], bucket) == n + (bucket == 10)


def test_a_bucket_larger_than_the_model_does_what_any_such_bucket_does(sent: Wire) -> None:
    name, engine = f"{ZERO}reduce_bucket_size", engine_of(100, 100, reduce_bucket_size=10**6)
    assert "does the same as 1000" in witness.judge(engine, {name: 10**6}, {name: 1000}).inert[name]
    assert not witness.judge(engine, {name: 10**6}, {name: 100}).inert
    # Beside a setting that acts, it makes the trial no other one.
    both = witness.judge(engine, {name: 10**6, "micro_batch_size": 8}, {name: 1000, "micro_batch_size": 4})
    assert not both.inert and not both.unwitnessed


@pytest.mark.parametrize(
    ("name", "now", "before", "held"),
    [
        ("stage3_max_live_parameters", 10**5, 10**6, "_max_available_parameters_in_numel"),
        ("stage3_param_persistence_threshold", 500, 50, "persistent_parameters"),
    ],
)
def test_zero_3_gathers_frozen_weights_too(name: str, now: int, before: int, held: str) -> None:
    """As those of a model with adapters, of which hardly any are trained."""
    runs = now if held.startswith("_") else [None] * 2
    engine = engine_of(10**6, 100, 10, parameter_offload=SimpleNamespace(**{held: runs}))
    for parameter in [*engine.module.parameters()][:2]:
        parameter.requires_grad = False
    assert not witness.judge(engine, {f"{ZERO}{name}": now}, {f"{ZERO}{name}": before}).inert
    groups = f"{ZERO}sub_group_size"  # of trained weights alone
    assert "it does the same" in witness.judge(engine, {groups: 10**5}, {groups: 10**4}).inert[groups]


def test_buckets_that_were_not_sent_are_not_believed(sent: Wire) -> None:
    name, engine = f"{ZERO}reduce_bucket_size", engine_of(*[100] * 8, reduce_bucket_size=100)
    for _ in range(2):
        sent.note("backward", torch.zeros(400))
    assert "8 buckets of that size, and 2 collectives" in witness.judge(engine, {name: 100}, {name: 800}).inert[name]
    for _ in range(6):
        sent.note("backward", torch.zeros(100))
    assert not witness.judge(engine, {name: 100}, {name: 800}).inert


def test_keys_of_deepspeeds_own_recomputation_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witnesses.recomputations, "calls", 3)
    misspelt, known = "activation_checkpointing.partition_activatons", "activation_checkpointing.profile"
    found = witness.judge(engine_of(1), {misspelt: True, known: True}, {})
    assert "reads no such key" in found.inert[misspelt] and found.unwitnessed == (known,)


def test_a_rate_is_held_against_the_optimizer_that_runs() -> None:
    class Engine:
        class optimizer:
            param_groups = ({"lr": 0.01, "weight_decay": 0.1},)

    asked = {"optimizer.params.lr": 0.01, "optimizer.params.weight_decay": 0.2, "optimizer.params.beta3": 1.0}
    found = witness.judge(Engine(), asked, {})
    assert found.inert == {"optimizer.params.weight_decay": "the optimizer has 0.1"}
    assert found.unwitnessed == ("optimizer.params.beta3",)


@pytest.mark.parametrize(("kept_on", "said"), [(None, None), ("meta", "the optimizer's states are on meta")])
def test_an_optimizer_without_states_has_none_on_the_host(kept_on: str | None, said: str | None) -> None:
    """As plain SGD, where the baseline offloads and a candidate does not."""
    states = {} if kept_on is None else {"weight": {"moment": torch.zeros(2, device=kept_on)}}
    engine = SimpleNamespace(device="cuda:0", optimizer=SimpleNamespace(optimizer=SimpleNamespace(state=states)))
    assert witnesses.WITNESSES["offload_optimizer"](engine, "none") == said
