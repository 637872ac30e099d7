"""Peak memory, host memory and step time of candidates on devices, with 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.advise.constants import CONSTANTS, Constants
from autotune.advise.devices import Devices
from autotune.forecast.degrees import cost_terms
from autotune.forecast.knobs import Knobs
from autotune.forecast.memory import SCALE_BYTES, held_bytes, second_share, staying_share
from autotune.space.candidate import Candidate
from autotune.trial.profile import Floats, Profile

OFFLOADS = ("offload_optimizer", "offload_param")
# Host memory of a process that trains: Python, libraries, CUDA's and NCCL's own.
PROCESS_BYTES = 4.5e9
# The next power of two is 1.39 times a size on average (2 ln 2).
PINNED = 1.39


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """Forecasts of candidates, one entry each in every column.

    Attributes:
        memory: Bytes of a device at its peak, by part.
        host: Bytes of a node's host, by part.
        time: Seconds of an optimizer step, by part.
        fits_device: Probability that the memory of a device suffices.
        fits_host: The same for the memory of a node's host.
        tokens_per_s: Over all devices; samples/s where samples are no sequences of tokens.
    """

    candidates: Sequence[Candidate]
    memory: Mapping[str, Floats]
    host: Mapping[str, Floats]
    time: Mapping[str, Floats]
    fits_device: Floats
    fits_host: Floats
    tokens_per_s: Floats

    @property
    def fits(self) -> Floats:
        """Probability that both memories suffice."""
        return self.fits_device * self.fits_host

    @property
    def peak_bytes(self) -> Floats:
        """Peak of a device."""
        return np.asarray(sum(self.memory.values()), dtype=float)

    @property
    def step_s(self) -> Floats:
        """Time of an optimizer step."""
        return np.asarray(sum(self.time.values()), dtype=float)


def forecast(
    candidates: Sequence[Candidate],
    profile: Profile,
    devices: Devices,
    base: Mapping[str, Any] | None = None,
    constants: Constants = CONSTANTS,
) -> Forecasts:
    """Forecasts of candidates on devices.

    Args:
        base: Settings by dotted path that hold where a candidate says nothing.
    """
    machine, knobs = devices.machine(constants), Knobs.of(candidates, base or {})
    memory, time = cost_terms(candidates, profile, machine, base)
    in_host = {name: np.array([getattr(c, name) == "cpu" for c in candidates], float) for name in OFFLOADS}
    host = host_terms(replace(knobs, **in_host), profile, devices)
    margin = np.log(devices.memory_bytes / np.asarray(sum(memory.values()))) / constants.memory_log_sd
    host_margin = np.log(devices.host_bytes / np.asarray(sum(host.values()))) / constants.memory_log_sd
    shared = np.array([candidate.ranks_per_replica for candidate in candidates], dtype=float)
    tokens = knobs.micro * knobs.accumulation * devices.count / shared * profile.counted_per_sample
    return Forecasts(
        candidates=candidates, memory=memory, host=host, time=time, fits_device=normal(margin), fits_host=normal(host_margin),
        tokens_per_s=tokens / np.asarray(sum(time.values())),
    )  # fmt: skip


def host_terms(knobs: Knobs, profile: Profile, devices: Devices) -> dict[str, Floats]:
    """Bytes of a node's host by part.

    An optimizer in host memory holds master weights and states (12 bytes a parameter for Adam). Gradients in the master
    weights' type, the 16-bit copy that travels, at stages 1 and 2 the sums of several micro-steps, and offloaded parameters
    are pinned there (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py) unless `pin_memory` is false, which
    PyTorch rounds up to a power of two. While loading, each rank holds the whole model; at stage 3 only one at a time.
    """
    n, on_node = len(knobs.micro), devices.local / devices.count
    Pt = float(profile.n_trainable)
    share = np.where(knobs.stage >= 1, on_node, devices.local) * knobs.offload_optimizer
    master, w, g = np.where(knobs.master_16 > 0, 2.0, 4.0), knobs.weight_bytes, knobs.gradient_bytes
    states = np.where(knobs.states_16 > 0, 0.5, 1.0) * profile.optimizer_bytes
    # `accumulated_grads_in_cpu`; 16-bit master weights have their gradients in its place, sums in another type stay on the device.
    apart = (knobs.accumulation > 1) & (g == w) & (knobs.master_16 == 0)
    staged = np.where(knobs.stage == 3, g, w * (1.0 + apart))
    pinned = np.where(knobs.pin_optimizer > 0, PINNED, 1.0)
    moved = 1.0 - staying_share(knobs, profile, devices.count)
    held, copies = held_bytes(knobs, profile), on_node + devices.local * second_share(knobs)
    return {
        "states": (states + master) * Pt * share * moved,
        "gradients": pinned * master * Pt * share * moved,
        "staging": pinned * staged * Pt * share,
        "parameters": np.where(knobs.pin_param > 0, PINNED, 1.0) * held * copies * knobs.offload_param,
        "processes": np.full(n, PROCESS_BYTES * devices.local),
        "loading": (held + SCALE_BYTES * profile.quantized) * np.where(knobs.stage == 3, 1.0, devices.local),
    }


def normal(z: Floats) -> Floats:
    """The standard normal distribution function, without scipy, whose import takes as long as all of `advise`."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in np.atleast_1d(z)])
