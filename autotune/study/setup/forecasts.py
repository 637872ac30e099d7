"""Forecasts of a configuration from the profile of its target and the rates of the machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import UserError
from autotune.forecast.predictor import Forecast, ForecastInputs, Predictor, probability_below, settings_of
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig, Scalar, check_setting
from autotune.space.legality import why_illegal
from autotune.study.events import SILENT, EventSink
from autotune.study.setup import profile_cache
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import grounds
from autotune.study.setup.script import inspect_workload
from autotune.study.spec.spec import StudySpec
from autotune.system.machine import n_devices
from autotune.system.units import format_bytes, format_seconds
from autotune.trial.folder import TrialDir
from autotune.trial.profile import Machine, Profile
from autotune.trial.result import Outcome
from autotune.trial.target import Target
from autotune.trial.workload import Workload

# A micro-batch that fits this surely is offered as the largest that does.
SURE = 0.95
MOST_SAMPLES = 4096
# What takes this share of a step binds it; below, several things do.
BINDING_SHARE = 0.5
BINDS = {
    "compute": "compute: the matrix products",
    "traffic": "the memory bandwidth of the device",
    "recompute": "recomputation: checkpoint less if memory allows",
    "communication": "communication between the ranks",
    "messages": "the latency of many messages between the ranks: larger buckets",
    "optimizer": "the optimizer's step: accumulate more micro-batches, or shard it",
    "offload": "the link between host and device",
    "launches": "the fixed cost of each operation: a larger micro-batch",
    "bookkeeping": "what ZeRO does for each parameter: a lower stage",
    "input": "drawing the samples",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `autotune predict` found.

    Attributes:
        candidate: The configuration.
        world_size: Ranks.
        memory: Peak bytes of a rank.
        step_time: Seconds of an optimizer step.
        limit_bytes: What a rank may use.
        fits: Probability that it fits.
        largest_micro_batch_size: The largest that surely fits, all else the same; None if none does.
        largest_tensor_bytes: Of the activations, forward's largest tensor: often the logits.
        tokens_per_sample: None where samples are not token sequences.
        measured: What the study measured of this very configuration, if it did.
        study: Whose trials corrected the forecast.
        notes: What the user should know.
    """

    candidate: Candidate
    world_size: int
    memory: Forecast
    step_time: Forecast
    limit_bytes: float
    fits: float
    largest_micro_batch_size: int | None
    largest_tensor_bytes: float
    tokens_per_sample: int | None
    measured: Mapping[str, float]
    study: str
    notes: Sequence[str]

    @property
    def samples_per_s(self) -> tuple[float, float, float]:
        """Throughput: value, low, high."""
        samples, time = self.candidate.global_batch_size(self.world_size), self.step_time.total
        return samples / time.value, samples / time.high, samples / time.low

    @property
    def binds(self) -> dict[str, str]:
        """What limits memory and time."""
        space, time = (max(said.terms, key=lambda term: term.value) for said in (self.memory, self.step_time))
        share = time.value / self.step_time.total.value
        alone = "" if share >= BINDING_SHARE else " (among others)"
        return {
            "memory": f"{space.name}, {space.value / self.memory.total.value:.0%} of the peak",
            "time": f"{BINDS[time.name]}, {share:.0%} of the step{alone}",
        }

    def to_data(self) -> dict[str, Any]:
        """The answer for programs."""
        value, low, high = self.samples_per_s
        rate = {"value": value, "low": low, "high": high}
        tokens = self.tokens_per_sample
        return {
            "candidate": self.candidate.values(),
            "ranks": self.world_size,
            "peak_memory_bytes": _data(self.memory),
            "step_time_s": _data(self.step_time),
            "samples_per_s": rate,
            "tokens_per_s": {key: amount * tokens for key, amount in rate.items()} if tokens else None,
            "device_memory_bytes": self.limit_bytes,
            "fits_probability": self.fits,
            "largest_micro_batch_size": self.largest_micro_batch_size,
            "largest_tensor_bytes": self.largest_tensor_bytes,
            "binds": self.binds,
            "measured": dict(self.measured),
            "corrected_by": {
                "study": self.study,
                "memory": self.memory.n_measured,
                "step_time": self.step_time.n_measured,
            },
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """The answer for people."""
        total, time, limit = self.memory.total, self.step_time.total, self.limit_bytes
        yield f"{self.candidate.describe()}, {self.world_size} rank(s)"
        yield ""
        verdict = "fits" if self.fits >= SURE else "may not fit" if self.fits > 1 - SURE else "does not fit"
        needed = f"{format_bytes(total.value)} ({format_bytes(total.low)} to {format_bytes(total.high)})"
        yield f"memory      {needed} of a rank's {format_bytes(limit)}: {verdict}"
        scale = max(term.value for term in self.memory.terms)
        for term in sorted(self.memory.terms, key=lambda term: -term.value):
            if term.value >= 0.005 * total.value:
                bar = "#" * max(1, round(30 * term.value / scale))
                shown = term.name == "activations" and self.largest_tensor_bytes > 0.1 * term.value
                note = f"  (the largest tensor {format_bytes(self.largest_tensor_bytes)})" if shown else ""
                yield f"  {term.name:<12}{format_bytes(term.value):>10}  {bar}{note}"
        yield ""
        yield f"step time   {format_seconds(time.value)} ({format_seconds(time.low)} to {format_seconds(time.high)})"
        for term in sorted(self.step_time.terms, key=lambda term: -term.value):
            if term.value >= 0.02 * sum(term.value for term in self.step_time.terms):
                yield f"  {term.name:<14}{format_seconds(term.value):>10}"
        value, low, high = self.samples_per_s
        yield f"throughput  {value:,.4g} samples/s ({low:,.4g} to {high:,.4g})"
        yield ""
        yield f"binds       memory: {self.binds['memory']}"
        yield f"            time: {self.binds['time']}"
        largest = self.largest_micro_batch_size
        at_least = "at least " if largest == MOST_SAMPLES else ""
        yield f"largest micro-batch that surely fits: {at_least}{largest}" if largest else "no micro-batch surely fits"
        if self.measured:
            measured = self.measured
            yield (
                f"measured    {format_bytes(measured['peak_memory_bytes'])}, {format_seconds(measured['step_time_s'])}"
                f" in study {self.study}, which this forecast knows"
            )
        n = self.memory.n_measured
        yield (
            f"corrected by {n} trial(s) of study {self.study}"
            if n
            else "corrected by no trial: `autotune run` makes it surer"
        )
        yield from (f"note: {note}" for note in self.notes)


def foresee(spec: StudySpec, settings: Mapping[str, Scalar], studies: Path, view: EventSink = SILENT) -> Answer:
    """The forecast for a configuration of a target.

    Args:
        spec: The study that the target means.
        settings: Knobs that differ from the baseline's.
        studies: Where the studies lie, whose trials correct the forecast.
        view: Told that the target is profiled, where it has to be.

    Raises:
        UserError: A knob or value is wrong, or the configuration cannot run here.
    """
    for name, value in settings.items():
        check_setting(name, value, name)
    Candidate.of({"micro_batch_size": 1, **settings})  # what is wrong with a knob is said before anything is profiled
    found = foresee_workload(spec, view)
    candidate = Candidate.of({**found.baseline.values(), **settings})
    if (reason := why_illegal(candidate, replace(found.setting, global_batch=None))) is not None:
        raise UserError(f"this cannot run here: {reason}")
    predictor = Predictor(found.profile, found.machine, settings_of(found.base_config))
    measured = measured_in(studies / spec.name, spec.target, found.world_size)
    for other, metrics in measured.items():
        predictor.learn(other, peak_memory_bytes=metrics["peak_memory_bytes"], step_time_s=metrics["step_time_s"])
    limit = float(spec.device_memory_bytes or found.share_bytes)
    said = predictor.memory(candidate)
    return Answer(
        candidate=candidate, world_size=found.world_size, memory=said, step_time=predictor.step_time(candidate), limit_bytes=limit,
        fits=probability_below(said, limit), largest_micro_batch_size=_largest(predictor, candidate, limit),
        largest_tensor_bytes=found.profile.largest_tensor_bytes(candidate.precision, candidate.micro_batch_size),
        tokens_per_sample=found.profile.sequence if found.profile.sequence > 1 else None, measured=measured.get(candidate, {}),
        study=spec.name, notes=found.notes,
    )  # fmt: skip


def foresee_workload(spec: StudySpec, view: EventSink = SILENT) -> ForecastInputs:
    """What is known of a target and this machine; found out in the ranks where the cache does not know it; `view` as for `foresee`.

    Raises:
        UserError: The target cannot be profiled, and why.
    """
    target = spec.inspected
    workload, notes = _known(spec, target, view)
    if workload.script is not None and workload.script.pipeline_stages:
        raise UserError(
            f"{spec.target}: what the stages of a pipeline need is not predicted; `autotune run` finds it by measuring"
        )
    environment, world_size = workload.environment, _world_size(spec, workload)
    local = _local_ranks(workload, world_size)
    base_config, baseline, setting = grounds(spec, target, replace(workload, n_samples=None), world_size)
    machine = workload.machine or Machine.guess(environment.accelerator, local, environment.n_cores)
    if local != world_size:
        machine = replace(machine, world_size=world_size)
        notes = [
            *notes,
            f"rates are those of {local} rank(s) on this machine; between more of them, or other machines, links differ",
        ]
    return ForecastInputs(
        profile=workload.profile or Profile.guess(workload.n_parameters, workload.n_trainable, workload.n_blocks),
        machine=machine, world_size=world_size, base_config=base_config, baseline=baseline, setting=setting,
        share_bytes=environment.share_bytes(local), notes=notes,
    )  # fmt: skip


def measured_in(folder: Path, target: Path, world_size: int) -> dict[Candidate, dict[str, float]]:
    """Metrics of the completed trials of a study with this target and number of ranks, by candidate."""
    found: dict[Candidate, dict[str, float]] = {}
    for path in sorted((folder / "trials").glob("[0-9]*")):
        trial_dir = TrialDir(path)
        try:
            request, result = (json.loads(file.read_bytes()) for file in (trial_dir.request, trial_dir.result))
            if (
                request["target"] != str(target)
                or result["world_size"] != world_size
                or result["outcome"] != Outcome.COMPLETE
            ):
                continue
            metrics = {
                "peak_memory_bytes": float(result["peak_memory_bytes"]),
                "step_time_s": float(result["steps"]["median_s"]),
            }
            found[Candidate.of(result["candidate"])] = metrics
        except (OSError, ValueError, KeyError, TypeError, UserError):
            continue  # lost, cut short, or of another version
    return found


def _known(spec: StudySpec, target: Target, view: EventSink) -> tuple[Workload, list[str]]:
    """The workload with profile and rates: from the cache, else from the ranks."""
    script = target.kind == "script"
    key = (
        profile_cache.script_key(spec.how(), spec.script_set, spec.ranks)
        if script
        else profile_cache.workload_key(target.path)
    )
    workload = profile_cache.load(Workload, key)
    if workload is not None:
        found = profile_cache.known(
            workload, target.path, _base_config(spec, target, workload), _ranks_here(spec, workload)
        )
        if found.profile is not None and found.machine is not None:
            return found, list(found.profile.caveats)
    folder = Path(tempfile.mkdtemp(prefix="autotune-predict-"))  # kept if something fails: its logs tell why
    view.doing(f"{'running' if script else 'profiling'} {target.path.name}, once")
    with executor_for(spec, folder) as executor:
        ranks = min(spec.ranks or 1, n_devices()) if script else 1
        workload = inspect_workload(spec, executor, folder / "trials" / "inspect", ranks)
        base_config, trials = _base_config(spec, target, workload), folder / "trials"
        found, notes = profile_cache.measure_missing(
            workload, target.path, base_config, _ranks_here(spec, workload), executor, trials
        )
    if script:
        profile_cache.save(replace(found, machine=None), key)
    shutil.rmtree(folder, ignore_errors=True)
    return found, notes


def _base_config(spec: StudySpec, target: Target, workload: Workload) -> DsConfig:
    # How many samples there are does not matter to what one step needs.
    return grounds(spec, target, replace(workload, n_samples=None), _world_size(spec, workload))[0]


def _world_size(spec: StudySpec, workload: Workload) -> int:
    return spec.ranks or (workload.environment.n_devices if _cuda(workload) else 1)


def _ranks_here(spec: StudySpec, workload: Workload) -> int:
    return _local_ranks(workload, _world_size(spec, workload))


def _local_ranks(workload: Workload, world_size: int) -> int:
    """How many of the ranks this machine can stand in for."""
    environment = workload.environment
    return min(world_size, environment.n_devices if _cuda(workload) else max(2, environment.n_cores))


def _cuda(workload: Workload) -> bool:
    return workload.environment.accelerator == "cuda"


def _largest(predictor: Predictor, candidate: Candidate, limit: float) -> int | None:
    """The largest micro-batch that fits with probability `SURE`, all else the same."""
    sizes = list(range(1, MOST_SAMPLES + 1))
    mean, sd = predictor.log_memory([replace(candidate, micro_batch_size=size) for size in sizes])
    fitting = np.flatnonzero(mean + 1.6449 * sd <= np.log(limit))  # the quantile of `SURE`
    return sizes[int(fitting[-1])] if len(fitting) else None


def _data(said: Forecast) -> dict[str, Any]:
    total = said.total
    return {"value": total.value, "low": total.low, "high": total.high, "terms": [asdict(term) for term in said.terms]}
