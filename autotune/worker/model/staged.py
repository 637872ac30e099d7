"""A `model.py` whose model is a `PipelineModule`: its facts, its loss, and the optimizer steps of its engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotune.trial.workload import Workload
from autotune.worker.measure import instructions
from autotune.worker.measure.meter import Meter
from autotune.worker.measure.recompute import Recomputations
from autotune.worker.measure.stages import stages
from autotune.worker.model.model_file import WorkloadError

SPLIT_BY_STAGES = "a PipelineModule is split by its stages (`pipeline.stages`)"


def is_staged(model: nn.Module) -> bool:
    """Returns whether a model is a `PipelineModule`."""
    from deepspeed.runtime.pipe.module import PipelineModule

    return isinstance(model, PipelineModule)


def described(workload: Workload, module: Any) -> Workload:
    """Returns the workload with what is known of a pipeline: its layers, which can be recomputed, and its stages."""
    return replace(
        workload,
        n_blocks=len(module._layer_specs),
        block_class="pipeline layer",
        block_share=1.0,
        caveats=[],
        pipeline=stages.facts(module),
    )


def recompute(module: Any, every: int) -> Recomputations:
    """Recomputes runs of as many layers, as `pipeline` in the configuration does, and notes which are."""
    module.activation_checkpoint_interval = every
    layers = dict.fromkeys(layer for layer in module.forward_funcs if isinstance(layer, nn.Module))
    return Recomputations(list(layers), every)


def pair(batch: Any) -> tuple[Any, Any]:
    """Returns inputs and labels of a batch."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise WorkloadError("a PipelineModule takes batches of (inputs, labels); let data() return such pairs")
    return batch[0], batch[1]


def whole_loss(module: Any) -> Callable[[Any, Any], Tensor]:
    """Returns the loss function of a module whose one stage has all layers."""
    if module.loss_fn is None:
        raise WorkloadError("a PipelineModule computes its own loss: give it a `loss_fn`")

    def loss(engine: Any, batch: Any) -> Tensor:
        inputs, labels = pair(batch)
        value: Tensor = module.loss_fn(engine(inputs), labels)
        return value

    return loss


class StagedSteps:
    """The optimizer steps of a `PipelineEngine`, which draws a micro-batch where a stage takes one in."""

    def __init__(self, meter: Meter, draw: Callable[[], Any]) -> None:
        self._meter, self._draw = meter, draw
        instructions.watch(meter, meter.engine)

    def __iter__(self) -> "StagedSteps":
        return self

    def __next__(self) -> tuple[Any, Any]:
        return pair(self._draw())

    def step(self) -> torch.Tensor:
        """Trains one optimizer step; returns its mean loss."""
        loss: Tensor = self._meter.engine.train_batch(data_iter=self)
        self._meter.batches.step()
        return loss.detach().float().reshape(())
