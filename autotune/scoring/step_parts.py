"""Dataclasses of a diagnosis: the evidence it reads, the parts of a step, the advice, the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.trial.device_load import DeviceLoad
from autotune.trial.lengths import Table
from autotune.trial.result import Traced


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """One trial of the study, as far as a diagnosis of another one needs it.

    Attributes:
        samples_per_s: Its throughput; None if it did not complete.
        outcome: How it ended; `infeasible` where it completed and breaks a constraint.
        log_reach: Half-width of the 95 % interval of the throughput's logarithm.
        phases_s: The step that was taken apart, slowest rank.
    """

    trial: int
    candidate: Mapping[str, Any]
    samples_per_s: float | None
    outcome: str
    phases_s: Mapping[str, float] = field(default_factory=dict)
    log_reach: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of the trial that is diagnosed.

    Attributes:
        ranks: The step that was taken apart, by rank; one such table for the trial and each time that it was measured
            again.
        step_s: Median time of the steps that were timed.
        beside_s: Median step time in the run with phase timing, if that was a separate run.
        memory_limit_bytes: What a rank may use; None if nothing says so.
        alloc_retries: How often the CUDA allocator had to free its cache.
        allocated_bytes: The most that tensors took of a CUDA device.
        reserved_bytes: The most that the CUDA allocator took for them.
        device_load: The devices, where NVIDIA's management library was there.
        joules_per_sample: Energy of a sample, as the metric has it; None where it was not measured.
        tf32: Whether fp32 products used TensorFloat-32; None if unknown.
        optimizer_bytes: What an unsharded optimizer's step reads and writes; None where its states are not known.
        n_blocks: Repeated blocks, of which every k-th may be recomputed.
        tokens_per_step: Tokens of a step over all ranks; None where samples are no token sequences.
        flops_per_step: FLOPs of a step over all ranks, nothing recomputed; None to count six for each parameter and
            token.
        peak_flops: FLOP/s that products in this precision reach on this machine; None where that was not measured.
        expected_s: Seconds that forward and backward should take by the machine's measured rates: `products`, `traffic`
            (what other operations move) and `launches` (the fixed cost of each operation); empty where these are
            unknown.
        traced: What traced steps showed, by rank.
        padding: Share of the tokens that are padding; None where samples are no sequences.
        lengths: Lengths of the data set's samples; see `trial.lengths.table`.
        loader: Arguments of the target's own loader.
        data_cannot: Settings of the data that the target cannot follow, each with the reason.
        steps_grouped: Optimizer steps whose samples are sorted together where samples are grouped by length.
    """

    seen: StepObservation
    world_size: int
    ranks: Sequence[Mapping[int, Mapping[str, float]]]
    step_s: float | None = None
    beside_s: float | None = None
    peak_memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    alloc_retries: int | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    device_load: DeviceLoad | None = None
    joules_per_sample: float | None = None
    tf32: bool | None = None
    n_parameters: int = 0
    optimizer_bytes: float | None = None
    n_blocks: int = 0
    tokens_per_step: int | None = None
    device_name: str = ""
    flops_per_step: float | None = None
    peak_flops: float | None = None
    expected_s: Mapping[str, float] = field(default_factory=dict)
    traced: Mapping[int, Traced] = field(default_factory=dict)
    padding: float | None = None
    lengths: Table = ()
    loader: Mapping[str, Any] = field(default_factory=dict)
    data_cannot: Mapping[str, str] = field(default_factory=dict)
    steps_grouped: int = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the step.

    Attributes:
        seconds: Its time; None if it could not be found out.
        share: Its share of the step that was taken apart.
        known: How it is known, in words.
    """

    name: str
    seconds: float | None
    share: float | None
    known: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change, and what that is worth.

    Attributes:
        factor: Throughput over this trial's.
        why: Where the factor comes from.
    """

    knob: str
    value: Any
    before: Any
    factor: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Where a trial's time goes.

    Attributes:
        bound_by: The bottleneck; empty where phases were not measured.
        parts: The parts of the step, the largest first, then what could not be found out.
        advice: What the other trials say, the best first.
    """

    trial: int
    bound_by: str
    parts: Sequence[Part]
    advice: Sequence[Advice]
    notes: Sequence[str]
