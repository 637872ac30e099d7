"""A script whose model is a `PipelineModule`: `engine.train_batch` runs a whole optimizer step from a schedule of instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autotune.candidate import DsConfig
from autotune.trial import Workload
from autotune.worker.meter import Meter

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

# Which instruction of a schedule belongs to which phase of a step; what a stage waits for counts where it waits.
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


class Recomputed:
    """Sees which layers of this stage are recomputed.

    Args:
        module: The `PipelineModule`.
        every: Layers that it recomputes together; 0 for none.

    Attributes:
        every: The same.
    """

    def __init__(self, module: Any, every: int) -> None:
        self.every, self.recomputed = every, set[int]()
        self._handles = [layer.register_forward_pre_hook(self._on_forward) for layer in _layers(module)]

    def _on_forward(self, layer: torch.nn.Module, _args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            self.recomputed.add(id(layer))

    def stop(self) -> None:
        """Looks no longer, so that timed steps are not slowed."""
        for handle in self._handles:
            handle.remove()


def _layers(module: Any) -> list[torch.nn.Module]:
    return list(dict.fromkeys(layer for layer in module.forward_funcs if isinstance(layer, torch.nn.Module)))


def whole(workload: Workload, module: Any) -> Workload:
    """What a stage's workload is for all stages together; all ranks take part."""
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
        caveats=[
            f"{module.num_pipeline_stages()} pipeline stages: throughput and global batch count the data-parallel ranks only"
        ]
        if module.num_pipeline_stages() > 1
        else [],
    )


def recompute(hooks: Hooks, module: Any, config: DsConfig) -> Recomputed:
    """Has runs of so many layers recomputed as the candidate says; the configuration's own `pipeline` section does the same."""
    own = int(config.get("pipeline", {}).get("activation_checkpoint_interval") or module.activation_checkpoint_interval)
    if hooks.candidate is None:
        return Recomputed(module, own)
    every = hooks.candidate.checkpoint_every
    if module.activation_checkpoint_interval and not every:
        hooks.changed("Activation checkpointing: off, `PipelineModule(..., activation_checkpoint_interval=0)`.")
    module.activation_checkpoint_interval = every
    return Recomputed(module, every)


def attach(hooks: Hooks, meter: Meter, engine: Any) -> None:
    """Watches an engine: its micro-batches where a stage takes them in, its steps where `train_batch` ends them."""
    instructions = {
        instruction: _watched(hooks, meter, instruction.__name__, run)
        for instruction, run in engine._INSTRUCTION_MAP.items()
    }
    engine._INSTRUCTION_MAP = instructions
    train_batch = engine.train_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        loss = train_batch(*args, **kwargs)
        hooks.stepped(loss)
        return loss

    engine.train_batch = counted


def _watched(hooks: Hooks, meter: Meter, name: str, original: Callable[..., None]) -> Callable[..., None]:
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
            with hooks.inside_backward():
                original(engine, **kwargs)
        else:
            original(engine, **kwargs)
        if name == "LoadMicroBatch" and engine.is_first_stage():
            cast = hooks.cast(engine, (inputs[kwargs["buffer_id"]],), {})
            if cast is not None:
                inputs[kwargs["buffer_id"]] = cast[0][0]

    return run
