"""The instructions of a pipeline's schedule: the phases that they belong to, and the micro-batches in them."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from autotune.worker.measure.meter import Meter

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


def watch(
    meter: Meter,
    engine: Any,
    inside_backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    cast: Callable[[Any], Any] = lambda inputs: inputs,
) -> None:
    """Hooks the instructions of a `PipelineEngine`.

    Args:
        inside_backward: Entered around each backward pass.
        cast: Changes what the first stage takes in.
    """
    engine._INSTRUCTION_MAP = {
        instruction: _watched(meter, instruction.__name__, run, inside_backward, cast)
        for instruction, run in engine._INSTRUCTION_MAP.items()
    }


def _watched(
    meter: Meter,
    name: str,
    original: Callable[..., None],
    inside_backward: Callable[[], AbstractContextManager[None]],
    cast: Callable[[Any], Any],
) -> Callable[..., None]:
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
            with inside_backward():
                original(engine, **kwargs)
        else:
            original(engine, **kwargs)
        if name == "LoadMicroBatch" and engine.is_first_stage():
            inputs[kwargs["buffer_id"]] = cast(inputs[kwargs["buffer_id"]])

    return run
