"""Hooks for a `PipelineModule`, whose `engine.train_batch` runs an optimizer step from a schedule of instructions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autotune.space.deepspeed import DsConfig
from autotune.space.degree import PARTITION, PIPELINE_DEGREE
from autotune.trial.workload import Workload
from autotune.worker.measure import instructions
from autotune.worker.measure.ledger import Window
from autotune.worker.measure.meter import Meter
from autotune.worker.measure.recompute import Recomputations
from autotune.worker.model import staged
from autotune.worker.script.context import ScriptContext

STAGES_CAVEAT = "{} pipeline stages: throughput and global batch count the data-parallel ranks only"


def without_stages(config: DsConfig) -> DsConfig:
    """Returns a configuration without the stages and the partition in it, which DeepSpeed does not read."""
    unread = {path.partition(".")[2] for path in (PIPELINE_DEGREE, PARTITION)}
    section = {key: value for key, value in config.get("pipeline", {}).items() if key not in unread}
    rest = {key: value for key, value in config.items() if key != "pipeline"}
    return rest | ({"pipeline": section} if section else {})


def whole(workload: Workload, module: Any) -> Workload:
    """Returns the workload of all stages together, from that of one stage; all ranks take part."""
    from deepspeed.accelerator import get_accelerator

    own = [parameter for parameter in module.parameters() if not getattr(parameter, "ds_pipe_replicated", False)]
    counts = torch.tensor(
        [sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)], dtype=torch.float64
    )
    counts = counts.to(get_accelerator().current_device_name())
    dist.all_reduce(counts)
    copies = module.mpu().get_data_parallel_world_size() * module.mpu().get_slice_parallel_world_size()
    n_stages = module.num_pipeline_stages()
    return replace(
        staged.described(workload, module),
        n_parameters=int(counts[0]) // copies,
        n_trainable=int(counts[1]) // copies,
        caveats=[STAGES_CAVEAT.format(n_stages)] if n_stages > 1 else [],
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
    return staged.recompute(module, every)


def attach(
    context: ScriptContext,
    meter: Meter,
    engine: Any,
    stepped: Callable[[Any], None],
    window: Callable[[], Window | None],
) -> None:
    """Hooks an engine: its micro-batches where a stage takes them in, its steps and evaluations where they end.

    Args:
        stepped: Called with the loss of each step.
        window: Returns the window of steps that is under way.
    """

    def cast(inputs: Any) -> Any:
        found = context.cast(engine, (inputs,), {})
        return inputs if found is None else found[0][0]

    instructions.watch(meter, engine, context.inside_backward, cast)
    train_batch = engine.train_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        loss = train_batch(*args, **kwargs)
        stepped(loss)
        return loss

    eval_batch = engine.eval_batch

    def aside(*args: Any, **kwargs: Any) -> Any:
        output = eval_batch(*args, **kwargs)
        if (now := window()) is not None:
            now.cut(aside=True)
        return output

    engine.train_batch, engine.eval_batch = counted, aside
