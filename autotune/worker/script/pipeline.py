"""Hooks for a `PipelineModule`, whose `engine.train_batch` runs an optimizer step from a schedule of instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autotune.space.deepspeed import DsConfig
from autotune.space.degree import PARTITION, PIPELINE_DEGREE
from autotune.trial.workload import Workload
from autotune.worker.measure.meter import Meter
from autotune.worker.measure.recompute import Recomputations
from autotune.worker.measure.stages import stages
from autotune.worker.script.context import ScriptContext

# Phase of a step that each instruction of a schedule belongs to; waiting counts where a stage waits.
PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "SendActivation": "forward",
    "RecvActivation": "forward",
    "BackwardPass": "backward",
    "SendGrad": "backward",
    "RecvGrad": "backward",
    "ReduceTiedGrads": "step",
    "ReduceGrads": "step",
    "OptimizerStep": "step",
}

STAGES_CAVEAT = "{} pipeline stages: throughput and global batch count the data-parallel ranks only"


def without_stages(config: DsConfig) -> DsConfig:
    """Returns a configuration without the stages and the partition in it, which DeepSpeed does not read."""
    unread = {path.partition(".")[2] for path in (PIPELINE_DEGREE, PARTITION)}
    section = {key: value for key, value in config.get("pipeline", {}).items() if key not in unread}
    rest = {key: value for key, value in config.items() if key != "pipeline"}
    return rest | ({"pipeline": section} if section else {})


def whole(workload: Workload, module: Any) -> Workload:
    """Returns the workload of all stages together, from that of one stage; all ranks take part."""
    own = [parameter for parameter in module.parameters() if not getattr(parameter, "ds_pipe_replicated", False)]
    counts = torch.tensor(
        [sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)], dtype=torch.float64
    )
    counts = counts.to(next(module.parameters()).device if own else "cpu")
    dist.all_reduce(counts)
    copies = module.mpu().get_data_parallel_world_size() * module.mpu().get_slice_parallel_world_size()
    n_layers = len(module._layer_specs)
    return replace(
        workload,
        n_parameters=int(counts[0]) // copies,
        n_trainable=int(counts[1]) // copies,
        n_blocks=n_layers,
        block_class="pipeline layer",
        block_share=1.0,
        pipeline=stages.facts(module),
        caveats=[STAGES_CAVEAT.format(module.num_pipeline_stages())] if module.num_pipeline_stages() > 1 else [],
    )


def recompute(context: ScriptContext, module: Any, config: DsConfig) -> Recomputations:
    """Recomputes runs of as many layers as the candidate says; `pipeline` in the configuration does the same."""
    every = int(
        config.get("pipeline", {}).get("activation_checkpoint_interval") or module.activation_checkpoint_interval
    )
    if context.candidate is not None:
        every = context.candidate.checkpoint_every
        if module.activation_checkpoint_interval and not every:
            context.changed("Activation checkpointing: off, `PipelineModule(..., activation_checkpoint_interval=0)`.")
        module.activation_checkpoint_interval = every
    layers = dict.fromkeys(layer for layer in module.forward_funcs if isinstance(layer, torch.nn.Module))
    return Recomputations(list(layers), every)


def attach(context: ScriptContext, meter: Meter, engine: Any, stepped: Callable[[Any], None]) -> None:
    """Hooks an engine: its micro-batches where a stage takes them in, its steps where `train_batch` ends them."""
    instructions = {
        instruction: _watched(context, meter, instruction.__name__, run)
        for instruction, run in engine._INSTRUCTION_MAP.items()
    }
    engine._INSTRUCTION_MAP = instructions
    train_batch = engine.train_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        loss = train_batch(*args, **kwargs)
        stepped(loss)
        return loss

    engine.train_batch = counted


def _watched(context: ScriptContext, meter: Meter, name: str, original: Callable[..., None]) -> Callable[..., None]:
    phase = PHASES.get(name)

    def run(engine: Any, **kwargs: Any) -> None:
        training = torch.is_grad_enabled()
        if phase and training:
            meter.enter(phase)
        inputs = engine.pipe_buffers["inputs"]
        if name == "LoadMicroBatch":
            meter.batches.forget_draws()  # an evaluation's
        if name == "ForwardPass" and training:
            meter.batches.micro_batch((inputs[kwargs["buffer_id"]],), {})
        if name == "BackwardPass":
            meter.batches.backward()
            with context.inside_backward():
                original(engine, **kwargs)
        else:
            original(engine, **kwargs)
        if name == "LoadMicroBatch" and engine.is_first_stage():
            cast = context.cast(engine, (inputs[kwargs["buffer_id"]],), {})
            if cast is not None:
                inputs[kwargs["buffer_id"]] = cast[0][0]

    return run
