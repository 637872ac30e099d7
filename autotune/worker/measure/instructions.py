"""The instructions of a pipeline's schedule: the phases that they belong to, and the micro-batches in them."""

import contextlib
import functools
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

    def run(name: str, original: Callable[..., None], engine: Any, **kwargs: Any) -> None:
        phase, training = PHASES.get(name), torch.is_grad_enabled()
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

    engine._INSTRUCTION_MAP = {
        instruction: functools.partial(run, instruction.__name__, original)
        for instruction, original in engine._INSTRUCTION_MAP.items()
    }
