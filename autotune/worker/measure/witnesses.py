"""The witnesses: for each DeepSpeed setting a predicate that shows in the running engine whether it acted."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autotune.space.deepspeed import SECTION_KEYS, ZERO, Scalar
from autotune.space.degree import EXPERT_DEGREE, PARTITION, PIPELINE_DEGREE, TENSOR_DEGREE
from autotune.worker.containers import DTYPES
from autotune.worker.data import witness as loading
from autotune.worker.device import accelerator, multiplies_in_tf32
from autotune.worker.measure import groups, sizes
from autotune.worker.measure.stages import stages
from autotune.worker.measure.wire import CallCount, wire

# Says why a setting did not act, or nothing where it did. It raises AttributeError, KeyError or IndexError where this
# release of DeepSpeed, or this stage, does not show what it asks for.
Witness = Callable[[Any, Scalar], str | None]


class Idle(str):
    """Reason why a setting made no difference: the trial is the one without it, and no worse."""

    __slots__ = ()


def _only_where(holds: Callable[[Any], object], otherwise: str) -> Callable[[str], Witness]:
    """A witness of a section's settings, which act only where something holds; if it does, nothing shows more."""

    def ask(engine: Any, value: Scalar) -> str | None:
        if not holds(engine):
            return otherwise
        raise KeyError(otherwise)

    return lambda name: ask


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
    return Idle("gradients have that type anyway") if found == next(engine.module.parameters()).dtype else None


def _offloaded_optimizer(engine: Any, value: Scalar) -> str | None:
    where, device = {state.device.type for state in _states(engine)}, torch.device(engine.device).type
    if value == "none":
        # Plain SGD keeps none.
        return None if where <= {device} else f"the optimizer's states are on {', '.join(where)}"
    return None if where <= {"cpu", "meta"} else "the optimizer's states stayed on the device"


def _offloaded_parameters(engine: Any, value: Scalar) -> str | None:
    where = {parameter.ds_tensor.device.type for parameter in engine.module.parameters()}
    if value == "none":
        return None if where == {torch.device(engine.device).type} else f"the parameters are on {', '.join(where)}"
    return None if "cpu" in where else "the parameters stayed on the device"


def _pinned_states(engine: Any) -> Any:
    """Whether the optimizer of stage 3, or of stages 1 and 2, pins what it moves to the host."""
    zero = engine.optimizer
    return zero.offload_optimizer_pin_memory if engine.zero_optimization_stage() == 3 else zero.cpu_offload_pin_memory


def _optimizer_class(engine: Any, value: Scalar) -> str | None:
    found = type(engine.basic_optimizer).__name__
    return None if value in ("keep", found) else f"{found} ran"


def _reducer(engine: Any, name: str) -> Any:
    """What holds a setting of the reduction: the ZeRO optimizer, or the engine, which reduces for BF16_Optimizer, too."""
    of_zero = engine.zero_optimization_stage() and hasattr(engine.optimizer, name)
    return engine.optimizer if of_zero else engine


def _wire_dtype(engine: Any, value: Scalar) -> str | None:
    if engine.dp_world_size == 1:
        return "one rank sends nothing"
    holder = _reducer(engine, "communication_data_type")
    found, own = holder.communication_data_type, next(engine.module.parameters()).dtype
    if found != _dtype(value):
        return f"gradients travel as {_names({found})}"
    sent = wire.types("backward", "step")  # empty where no step was taken apart
    if sent and found not in sent:
        return f"what ranks sent in backward and step was {_names(sent)}"
    return Idle("gradients have that type anyway") if found == own else None


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
    expected = sizes.n_up_to(engine, float(str(value)))
    kept = len(engine.optimizer.parameter_offload.persistent_parameters)
    # A second limit, on all kept parameters together, may leave some of them split.
    return None if 0 < kept <= expected or expected == kept else f"{kept} parameters are kept whole"


def _reduce_bucket(engine: Any, value: Scalar) -> str | None:
    why = _equal(_zero("reduce_bucket_size"))(engine, value)
    return why or sizes.missing_collectives(engine, float(str(value)))


def _overlap(engine: Any, value: Scalar) -> str | None:
    if accelerator().is_synchronized_device():
        why = "this device has no streams, so nothing can overlap"
        return why if value else Idle(why)
    if engine.zero_optimization_stage() == 3:
        stream, own = engine.optimizer.reduce_and_partition_stream, accelerator().default_stream()
        return None if (stream != own) == value else "gradients are reduced in the stream of the computation"
    return _equal(_zero("overlap_comm"))(engine, value)


def _round_robin(engine: Any, value: Scalar) -> str | None:
    why = _equal(_zero("round_robin_gradients"))(engine, value)
    orders = engine.optimizer.round_robin_bit16_indices
    plain = [list(order) == sorted(order) for order in orders]
    return why or (Idle("the parameters keep their order") if value and all(plain) else None)


def _alignment(engine: Any, value: Scalar) -> str | None:
    why, padding = _equal(_zero("parameter_alignment"))(engine, value), engine.optimizer.round_robin_bit16_padding
    return why or (Idle("no parameter has to be moved") if value and not any(map(any, padding)) else None)


def _multi_rank_buckets(engine: Any, value: Scalar) -> str | None:
    if not engine.optimizer.reduce_scatter:
        return "only reduce_scatter reads it, which is off"
    return _equal(_zero("use_multi_rank_bucket_allreduce"))(engine, value)


def _read_by(name: str, reader: str) -> Witness:
    """A witness of a setting that one of DeepSpeed's optimizers alone reads, and holds."""
    holds = _equal(_zero(name))
    return lambda engine, value: holds(engine, value) if hasattr(engine.optimizer, name) else f"only {reader} reads it"


def _efficient_linear(engine: Any, value: Scalar) -> str | None:
    patched = torch.nn.functional.linear.__module__.startswith("deepspeed.")
    return None if patched == value else f"torch's linear function is {'' if patched else 'not '}replaced"


def _buffer_dtype(engine: Any, value: Scalar) -> str | None:
    found = {buffer.dtype for buffer in engine.module.buffers() if buffer.is_floating_point()}
    if not found:
        return "the model has no buffer of floating-point numbers"
    return None if found == {_dtype(value)} else f"the buffers are {_names(found)}"


def _scaled(name: str) -> Callable[[Any], Any]:
    """Reads how gradients are scaled."""

    def read(engine: Any) -> Any:
        found = getattr(_reducer(engine, name), name)
        return found() if callable(found) else found

    return read


def _predivide(engine: Any, value: Scalar) -> str | None:
    if not _scaled("postscale_gradients")(engine):
        return "prescale_gradients is on, and then nothing reads it"
    return _equal(_scaled("gradient_predivide_factor"))(engine, value)


def _sequence_parallel(_engine: Any, value: Scalar) -> str | None:
    return None if value in (0, 1) or groups.exchanges.calls else "no attention of the model splits its sequence"


def _leaves(engine: Any, value: Scalar) -> str | None:
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    names = {id(m): (type(m).__name__, f"{type(m).__module__}.{type(m).__qualname__}") for m in engine.module.modules()}
    asked, usual = (
        {key for key, own in names.items() if not set(own).isdisjoint(classes)}
        for classes in ([value], DEFAULT_LEAF_MODULE_CLASSES)
    )
    flagged = {id(module) for module in engine.module.modules() if getattr(module, "_z3_leaf", False)}
    if not asked or flagged != asked:
        return f"{len(flagged)} modules are gathered at once, and the model has {len(asked)} of class {value}"
    return Idle("DeepSpeed does the same without the key") if asked == usual else None


def _partition(engine: Any, value: Scalar) -> str | None:
    if stages.partition != value:
        return f"{value} was asked for, {stages.partition} ran"
    return Idle(f"the stages are those by {stages.own[1]}") if stages.same_parts(engine.module) else None


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
        if name not in SECTION_KEYS["activation_checkpointing"]:
            return "DeepSpeed reads no such key here"
        if name == "cpu_checkpointing" and value and torch.device(engine.device).type == "cpu":
            return "on a CPU there is nowhere else to move activations"
        raise KeyError(name)

    return ask


# DeepSpeed's own checkpointing.
recomputations = CallCount()


def _names(types: Iterable[Any]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in types))


# `Observed.mismatch` compares these with what the data and the engine showed.
SEEN_BY_OBSERVED = frozenset((
    "micro_batch_size", "gradient_accumulation_steps", "zero_stage", "precision", "checkpoint_every",
    TENSOR_DEGREE, EXPERT_DEGREE, PIPELINE_DEGREE,
))  # fmt: skip
WITNESSES: dict[str, Witness] = {
    f"{ZERO}reduce_bucket_size": _reduce_bucket,
    f"{ZERO}overlap_comm": _overlap,
    f"{ZERO}contiguous_gradients": _equal(_zero("contiguous_gradients")),
    f"{ZERO}reduce_scatter": _equal(_zero("reduce_scatter")),
    f"{ZERO}round_robin_gradients": _round_robin,
    f"{ZERO}use_multi_rank_bucket_allreduce": _multi_rank_buckets,
    f"{ZERO}parameter_alignment": _alignment,
    f"{ZERO}compute_grad_norm": _equal(_zero("compute_grad_norm")),
    f"{ZERO}memory_efficient_linear": _efficient_linear,
    f"{ZERO}enable_sanity_checks": _equal(_zero("enable_sanity_checks")),
    f"{ZERO}save_muon_momentum_buffer_in_memory": _equal(_zero("save_muon_momentum_buffer_in_memory")),
    f"{ZERO}sub_group_size": _equal(_zero("sub_group_size")),
    f"{ZERO}stage3_prefetch_bucket_size": _equal(_zero("prefetch_elements")),
    f"{ZERO}stage3_max_live_parameters": _equal(_offload("_max_available_parameters_in_numel")),
    f"{ZERO}stage3_max_reuse_distance": _equal(_offload("_max_reuse_distance_in_numel")),
    f"{ZERO}stage3_param_persistence_threshold": _persistence,
    f"{ZERO}stage3_model_persistence_threshold": _equal(_offload("model_persistence_threshold")),
    f"{ZERO}leaf_module.classes": _leaves,
    f"{ZERO}zero_hpz_partition_size": _equal(_zero("zero_hpz_partition_size")),
    f"{ZERO}zero_quantized_weights": _quantized("weights", ("forward", "backward"), _offload("zero_quantized_weights")),
    f"{ZERO}zero_quantized_gradients": _quantized(
        "gradients", ("backward",), lambda engine: engine.optimizer.all2all_process_group is not None
    ),
    "bf16.bf16_master_weights_and_grads": _master_weights,
    "bf16.bf16_optimizer_states": _state_dtype,
    "bf16.immediate_grad_update": _read_by("immediate_grad_update", "DeepSpeed's BF16_Optimizer"),
    "bf16.check_grad_overflow": _read_by("check_grad_overflow", "the optimizer of ZeRO 1 and 2"),
    "data_types.buffer_dtype": _buffer_dtype,
    "torch.allow_tf32": _equal(lambda engine: multiplies_in_tf32()),
    "timers.throughput.enabled": _equal(lambda engine: engine.tput_timer.config.enabled),
    "timers.throughput.synchronized": _equal(lambda engine: engine.tput_timer.config.synchronized),
    "disable_python_gc": _equal(lambda engine: not gc.isenabled()),
    "prescale_gradients": _equal(_scaled("postscale_gradients"), lambda value: not value),
    "gradient_predivide_factor": _predivide,
    "data_types.grad_accum_dtype": _accumulation_dtype,
    "communication_data_type": _wire_dtype,
    "offload_optimizer": _offloaded_optimizer,
    "offload_param": _offloaded_parameters,
    f"{ZERO}offload_optimizer.pin_memory": _equal(_pinned_states),
    f"{ZERO}offload_param.pin_memory": _equal(_zero("offload_param_pin_memory")),
    "optimizer": _optimizer_class,
    "gradient_clipping": _equal(lambda engine: float(engine.gradient_clipping()), lambda value: float(str(value))),
    "sequence_parallel_size": _sequence_parallel,
    PARTITION: _partition,
}
_OF_EXPERTS = _only_where(lambda engine: engine.has_moe_layers, "the model has no expert layers")
# Sections whose settings share one witness; it is made from the name within the section.
SECTIONS: dict[str, Callable[[str], Witness]] = {
    "compile": _compiled,
    "optimizer": _optimizer_param,
    "activation_checkpointing": _recomputing,
    "data": loading.witness,
    "pipeline": _only_where(lambda engine: hasattr(engine, "stage_id"), "the model is no PipelineModule"),
    "data_efficiency": _only_where(
        lambda engine: engine.training_dataloader is not None, "DeepSpeed makes no loader: the script has its own"
    ),
    "hybrid_engine": _only_where(
        lambda engine: "Hybrid" in type(engine).__name__, "the engine is no DeepSpeedHybridEngine"
    ),
    "expert_parallel": _OF_EXPERTS,
    "use_data_before_expert_parallelism": _OF_EXPERTS,
    "tensor_parallel": _only_where(lambda engine: engine.autotp_size() > 1, "no module is split over ranks"),
    "seq_parallel_communication_data_type": _only_where(
        lambda engine: groups.sequence_size(engine) > 1, "no sequence is split over ranks"
    ),
}
