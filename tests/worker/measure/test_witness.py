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

from autotune.space.candidate import FIELDS
from autotune.trial.result import Outcome
from autotune.worker.measure import witness
from autotune.worker.measure.wire import Wire

ZERO = "zero_optimization."
ACTING: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bf16", {f"{ZERO}reduce_bucket_size": 4096, f"{ZERO}contiguous_gradients": False, "gradient_clipping": 0.5}),
    (1, "bf16", {"data_types.grad_accum_dtype": "fp32"}),
    (2, "fp32", {f"{ZERO}allgather_bucket_size": 4096, "communication_data_type": "bf16"}),
    (2, "bf16", {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}),
    (0, "fp32", {"communication_data_type": "bf16"}),
    (3, "bf16", {f"{ZERO}stage3_prefetch_bucket_size": 1024, f"{ZERO}stage3_param_persistence_threshold": 64}),
    (3, "fp32", {f"{ZERO}stage3_max_live_parameters": 9999, f"{ZERO}stage3_max_reuse_distance": 999}),
]  # fmt: skip
INERT: list[tuple[int, str, dict[str, Any], str]] = [
    (1, "fp32", {"sequence_parallel_size": 2}, "sequence_parallel_size: "),
    (2, "bf16", {"compile.deepcompile": True}, "the loop does not call engine.compile"),
    (0, "fp32", {"activation_checkpointing.partition_activations": True}, "the model never calls deepspeed.checkpointing"),
    (1, "bf16", {"communication_data_type": "bf16"}, "gradients have that type anyway"),
    (2, "bf16", {"data_types.grad_accum_dtype": "bf16"}, "gradients have that type anyway"),
]  # fmt: skip


def run(zoo: Zoo, stage: int, precision: str, what: dict[str, Any]) -> Any:
    changed = dict.fromkeys(what)
    return zoo.run("ok", zero_stage=stage, precision=precision, changed_from=changed, **CLEAN, **what)


@pytest.mark.process
@pytest.mark.parametrize(("stage", "precision", "what"), ACTING)
def test_a_setting_that_acts_is_seen_to_act(zoo: Zoo, stage: int, precision: str, what: dict[str, Any]) -> None:
    result = run(zoo, stage, precision, what)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed is not None and result.observed.unwitnessed == ()


@pytest.mark.process
@pytest.mark.parametrize(("stage", "precision", "what", "said"), INERT)
def test_an_inert_setting_is_not_applied(zoo: Zoo, stage: int, precision: str, what: dict[str, Any], said: str) -> None:
    result = run(zoo, stage, precision, what)
    assert result.outcome is Outcome.NOT_APPLIED
    assert said in result.reason and next(iter(what)) in result.reason


@pytest.fixture
def sent() -> Iterator[Wire]:
    """What a rank sent in its second step."""
    witness.wire.clear()
    yield witness.wire
    witness.wire.clear()


def test_a_collective_is_known_by_its_phase_type_and_bytes(sent: Wire) -> None:
    sent.note("backward", ([torch.zeros(4), torch.zeros(8, dtype=torch.bfloat16)], {"options": None}))
    sent.note("step", ((torch.zeros(2, dtype=torch.int8),), {}))
    sent.note("step", ((), {}))
    assert sent.types("backward") | sent.types("step") == {torch.float32, torch.int8}
    assert sent.sent_bytes["backward", torch.float32] == 16 and sum(sent.calls.values()) == 2


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
    result = run(zoo, 1, "fp32", {f"{ZERO}load_from_fp32_weights": False})
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed is not None and result.observed.unwitnessed == (f"{ZERO}load_from_fp32_weights",)


def test_a_key_left_out_is_judged_by_the_value_it_had() -> None:
    class Engine:
        def gradient_clipping(self) -> float:
            return 1.0

    same = witness.judge(Engine(), {"gradient_clipping": None}, {"gradient_clipping": 1.0})
    other = witness.judge(Engine(), {"gradient_clipping": None}, {"gradient_clipping": 2.0})
    assert "same as with 1.0" in same.inert["gradient_clipping"] and not other.inert


def test_every_knob_of_the_presets_has_a_witness() -> None:
    named = {knob for path in (ROOT / "search_spaces").glob("*.yaml") for knob in safe_load(path.read_text())}
    named -= {name for name in named if name.startswith("data.")}  # tests/worker/data/test_loader.py
    assert named - witness.SEEN_BY_OBSERVED - witness.WITNESSES.keys() == set()
    assert set(FIELDS) <= witness.SEEN_BY_OBSERVED | witness.WITNESSES.keys()


def test_a_rate_is_held_against_the_optimizer_that_runs() -> None:
    class Engine:
        class optimizer:
            param_groups = ({"lr": 0.01, "weight_decay": 0.1},)

    asked = {"optimizer.params.lr": 0.01, "optimizer.params.weight_decay": 0.2, "optimizer.params.beta3": 1.0}
    found = witness.judge(Engine(), asked, {})
    assert found.inert == {"optimizer.params.weight_decay": "the optimizer has 0.1"}
    assert found.unwitnessed == ("optimizer.params.beta3",)
