"""Whether each DeepSpeed setting of a trial acted, by a witness for every knob in the running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.space.deepspeed import Scalar
from autotune.worker.data import witness as loading
from autotune.worker.measure.wire import wire

# Says why a setting did not act, or nothing where it did. It raises AttributeError, KeyError or IndexError where this
# release of DeepSpeed, or this stage, does not show what it asks for.
Witness = Callable[[Any, Scalar], str | None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the witnesses say of a candidate's settings.

    Attributes:
        inert: Why a setting did not act, by setting.
        unwitnessed: Settings that nothing in the engine shows.
    """

    inert: Mapping[str, str]
    unwitnessed: tuple[str, ...]


def judge(engine: Any, settings: Mapping[str, Scalar], base: Mapping[str, Scalar]) -> Verdict:
    """Asks the witness of each setting.

    Args:
        engine: The DeepSpeed engine after its first steps.
        settings: What was asked for and is not the baseline's, by knob; None leaves the key out.
        base: The baseline's values of these knobs.
    """
    inert, unwitnessed = {}, []
    for name, value in settings.items():
        if name in SEEN_BY_OBSERVED:
            continue
        try:
            if value is not None:
                why = _witness(name)(engine, value)
            elif base.get(name) is not None and _witness(name)(engine, base[name]) is None:
                why = f"without the key DeepSpeed does the same as with {base[name]}"
            else:
                why = None
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            unwitnessed.append(name)
            continue
        if why is not None:
            inert[name] = why
    return Verdict(inert=inert, unwitnessed=tuple(unwitnessed))


def _witness(name: str) -> Witness:
    if name in WITNESSES:
        return WITNESSES[name]
    section, _, rest = name.partition(".")
    return SECTIONS[section](rest)


def _equal(read: Callable[[Any], Any], expect: Callable[[Scalar], Any] = lambda value: value) -> Witness:
    """A witness that compares what the running engine holds with what was asked for."""

    def ask(engine: Any, value: Scalar) -> str | None:
        found, wanted = read(engine), expect(value)
        return None if found == wanted else f"{wanted} was asked for, {found} ran"

    return ask


def _dtype(value: Scalar) -> Any:
    return DTYPES[str(value)]


def _zero(name: str) -> Callable[[Any], Any]:
    """Reads an attribute of the ZeRO optimizer; stage 0 has none, so nothing acts there."""

    def read(engine: Any) -> Any:
        if engine.zero_optimization_stage() == 0:
            return "no ZeRO optimizer"
        return getattr(engine.optimizer, name)

    return read


def _offload(name: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.optimizer.parameter_offload, name)


def _master_weights(engine: Any, value: Scalar) -> str | None:
    zero = engine.optimizer
    flat = zero.fp32_partitioned_groups_flat if hasattr(zero, "fp32_partitioned_groups_flat") else None
    found = {part.dtype for part in flat or zero.single_partition_of_fp32_groups}
    wanted = torch.bfloat16 if value else torch.float32
    return None if found == {wanted} else f"the master weights are {_names(found)}"


def _states(engine: Any) -> list[torch.Tensor]:
    """The moments that the optimizer keeps, without its step counts."""
    states = engine.optimizer.optimizer.state.values()
    return [each for state in states for each in state.values() if torch.is_tensor(each) and each.numel() > 1]


def _state_dtype(engine: Any, value: Scalar) -> str | None:
    found = {state.dtype for state in _states(engine)}
    if not found:
        return "the optimizer keeps no states"
    wanted = torch.bfloat16 if value else torch.float32
    return None if found == {wanted} else f"the optimizer's states are {_names(found)}"


def _accumulation_dtype(engine: Any, value: Scalar) -> str | None:
    zero = engine.optimizer
    found = zero.grad_acc_dtype if hasattr(zero, "grad_acc_dtype") else zero.gradient_accumulation_dtype
    if found != _dtype(value):
        return f"gradients are summed in {_names({found})}"
    return "gradients have that type anyway" if found == next(engine.module.parameters()).dtype else None


def _offloaded_optimizer(engine: Any, value: Scalar) -> str | None:
    where = {state.device.type for state in _states(engine)}
    if value == "none":
        return (
            None if where == {torch.device(engine.device).type} else f"the optimizer's states are on {', '.join(where)}"
        )
    return None if where <= {"cpu", "meta"} else "the optimizer's states stayed on the device"


def _offloaded_parameters(engine: Any, value: Scalar) -> str | None:
    where = {parameter.ds_tensor.device.type for parameter in engine.module.parameters()}
    if value == "none":
        return None if where == {torch.device(engine.device).type} else f"the parameters are on {', '.join(where)}"
    return None if "cpu" in where else "the parameters stayed on the device"


def _optimizer_class(engine: Any, value: Scalar) -> str | None:
    found = type(engine.basic_optimizer).__name__
    return None if value in ("keep", found) else f"{found} ran"


def _wire_dtype(engine: Any, value: Scalar) -> str | None:
    if engine.dp_world_size == 1:
        return "one rank sends nothing"
    holder = engine.optimizer if engine.zero_optimization_stage() else engine
    found, own = holder.communication_data_type, next(engine.module.parameters()).dtype
    if found != _dtype(value):
        return f"gradients travel as {_names({found})}"
    sent = wire.types("backward", "step")  # empty where no step was taken apart
    if sent and found not in sent:
        return f"what ranks sent in backward and step was {_names(sent)}"
    return "gradients have that type anyway" if found == own else None


def _quantized(name: str, phases: tuple[str, ...], read: Callable[[Any], Any]) -> Witness:
    """A witness of a quantised collective: the engine is set to it, and integers of 8 bits were sent."""
    holds = _equal(read)

    def ask(engine: Any, value: Scalar) -> str | None:
        why, sent = holds(engine, value), wire.types(*phases)
        if why is None and value and sent and not sent & {torch.int8, torch.uint8}:
            return f"{name}: what ranks sent was {_names(sent)}"
        return why

    return ask


def _persistence(engine: Any, value: Scalar) -> str | None:
    offload = engine.optimizer.parameter_offload
    sizes = [parameter.ds_numel for parameter in engine.module.parameters()]
    expected = sum(size <= int(str(value)) for size in sizes)
    kept = len(offload.persistent_parameters)
    # A second limit, on all kept parameters together, may leave some of them split.
    return None if 0 < kept <= expected or expected == kept else f"{kept} parameters are kept whole"


def _tensor_parallel(engine: Any, value: Scalar) -> str | None:
    from deepspeed.module_inject import layers

    split = sum(isinstance(module, layers.TensorParallel_Layer) for module in engine.module.modules())
    if value in (0, 1):
        return f"{split} modules were split over ranks" if split else None
    if not split:
        return "no module was split over ranks"
    degree = int(engine.autotp_size())
    return None if degree == value else f"modules are split over {degree} ranks"


def _sequence_parallel(engine: Any, value: Scalar) -> str | None:
    from deepspeed.sequence.layer import DistributedAttention

    splitting = exchanges.calls or any(isinstance(module, DistributedAttention) for module in engine.module.modules())
    if value in (0, 1):
        return "attention is split over ranks" if splitting else None
    degree = int(getattr(engine, "sequence_parallel_size", 1) or 1)
    if degree != value:
        return f"the sequence groups have {degree} rank{'s' if degree > 1 else ''}"
    if not splitting:
        return "no module of the model splits its sequence (deepspeed.sequence.layer.DistributedAttention)"
    return None


def _compiled(name: str) -> Witness:
    def ask(engine: Any, value: Scalar) -> str | None:
        if name == "deepcompile" and value:
            active = engine.is_deepcompile_active()
            return None if active else "nothing was compiled: the loop does not call engine.compile()"
        if not engine.is_compiled:
            return "nothing was compiled: the loop does not call engine.compile()"
        raise KeyError(name)

    return ask


def _optimizer_param(name: str) -> Witness:
    key = name.removeprefix("params.")

    def ask(engine: Any, value: Scalar) -> str | None:
        if not name.startswith("params."):
            raise KeyError(name)
        found = {group[key] for group in engine.optimizer.param_groups if key in group}
        if not found:
            raise KeyError(name)
        # A schedule moves the rate from its first value; the others stay.
        started = {group.get("initial_lr", group[key]) for group in engine.optimizer.param_groups if key in group}
        agreed = value in found or (key == "lr" and value in started)
        return None if agreed else f"the optimizer has {', '.join(map(str, sorted(found)))}"

    return ask


def _recomputing(name: str) -> Witness:
    def ask(engine: Any, value: Scalar) -> str | None:
        if recomputations.calls == 0:
            return "the model never calls deepspeed.checkpointing.checkpoint, which alone reads this section"
        raise KeyError(name)

    return ask


class _Exchanges:
    """Counts the calls in which attention exchanged heads for positions, once `watch` was called."""

    def __init__(self) -> None:
        self.calls, self._watching = 0, False

    def watch(self) -> None:
        """Wraps the forward of DeepSpeed's attention for split sequences; call it before the model runs."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        if self._watching:
            return
        self._watching, original = True, UlyssesSPAttentionHF.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        UlyssesSPAttentionHF.forward = forward


exchanges = _Exchanges()


class _Recomputations:
    """Counts calls of DeepSpeed's own checkpointing, once `watch` was called."""

    def __init__(self) -> None:
        self.calls, self._watching = 0, False

    def watch(self) -> None:
        """Wraps DeepSpeed's checkpoint function; call it before the model runs."""
        from deepspeed.runtime.activation_checkpointing import checkpointing

        if self._watching:
            return
        self._watching, original = True, checkpointing.CheckpointFunction.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        checkpointing.CheckpointFunction.forward = staticmethod(forward)


recomputations = _Recomputations()


def _names(types: Iterable[Any]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in types))


# `Observed.mismatch` compares these with what the data and the engine showed.
SEEN_BY_OBSERVED = frozenset(
    ("micro_batch_size", "gradient_accumulation_steps", "zero_stage", "precision", "checkpoint_every")
)
ZERO = "zero_optimization."
WITNESSES: dict[str, Witness] = {
    f"{ZERO}reduce_bucket_size": _equal(_zero("reduce_bucket_size")),
    f"{ZERO}allgather_bucket_size": _equal(_zero("allgather_bucket_size")),
    f"{ZERO}overlap_comm": _equal(_zero("overlap_comm")),
    f"{ZERO}contiguous_gradients": _equal(_zero("contiguous_gradients")),
    f"{ZERO}reduce_scatter": _equal(_zero("reduce_scatter")),
    f"{ZERO}round_robin_gradients": _equal(_zero("round_robin_gradients")),
    f"{ZERO}sub_group_size": _equal(_zero("sub_group_size")),
    f"{ZERO}stage3_prefetch_bucket_size": _equal(_zero("prefetch_elements")),
    f"{ZERO}stage3_max_live_parameters": _equal(_offload("_max_available_parameters_in_numel")),
    f"{ZERO}stage3_max_reuse_distance": _equal(_offload("_max_reuse_distance_in_numel")),
    f"{ZERO}stage3_param_persistence_threshold": _persistence,
    f"{ZERO}zero_hpz_partition_size": _equal(_zero("zero_hpz_partition_size")),
    f"{ZERO}zero_quantized_weights": _quantized("weights", ("forward", "backward"), _offload("zero_quantized_weights")),
    f"{ZERO}zero_quantized_gradients": _quantized(
        "gradients", ("backward",), lambda engine: engine.optimizer.all2all_process_group is not None
    ),
    "bf16.bf16_master_weights_and_grads": _master_weights,
    "bf16.bf16_optimizer_states": _state_dtype,
    "bf16.immediate_grad_update": _equal(_zero("immediate_grad_update")),
    "data_types.grad_accum_dtype": _accumulation_dtype,
    "communication_data_type": _wire_dtype,
    "offload_optimizer": _offloaded_optimizer,
    "offload_param": _offloaded_parameters,
    "optimizer": _optimizer_class,
    "gradient_clipping": _equal(lambda engine: float(engine.gradient_clipping()), lambda value: float(str(value))),
    "tensor_parallel.autotp_size": _tensor_parallel,
    "sequence_parallel_size": _sequence_parallel,
}
# Sections whose settings share one witness; it is made from the name within the section.
SECTIONS: dict[str, Callable[[str], Witness]] = {
    "compile": _compiled,
    "optimizer": _optimizer_param,
    "activation_checkpointing": _recomputing,
    "data": loading.witness,
}
