"""The few constants of forecasts without a measurement, fitted on published runs by `benchmarks/published.py`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What counting does not tell.

    Attributes:
        context_bytes: Of a process on a device: CUDA's context, libraries and their workspaces.
        nccl_bytes: Of a process that talks to others: NCCL's channels.
        logit_bytes: Per logit at the loss: the 16-bit ones, fp32 copies, and their gradients.
        activation_factor: What blocks keep for backward, relative to what is counted of them.
        attention_factor: Time of a FLOP of attention relative to one of other products.
        efficiency: Share of the peak that matrix products reach, by generation of card, and `other`.
        memory_log_sd: Standard deviation of the logarithm of the peak.
        time_log_sd: The same of the step time.
    """

    context_bytes: float
    nccl_bytes: float
    logit_bytes: float
    activation_factor: float
    attention_factor: float
    efficiency: Mapping[str, float] = field(hash=False)
    memory_log_sd: float
    time_log_sd: float


CONSTANTS = Constants(**json.loads(FILE.read_text(encoding="utf-8")))
