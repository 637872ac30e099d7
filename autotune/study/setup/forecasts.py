"""The forecast of `autotune predict`: memory and step time of one configuration, for people and programs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from autotune.advise.devices import Devices
from autotune.errors import UserError, nearest
from autotune.forecast.prediction import MOST_SAMPLES, Prediction
from autotune.forecast.predictor import ForecastInputs, Predictor, probability_below
from autotune.forecast.regression import STOPPED_SD, interval_sd
from autotune.forecast.words import SURE_Z
from autotune.scoring.measured import Measured
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar, check_setting
from autotune.space.legality import why_illegal
from autotune.study.events import SILENT, EventSink
from autotune.study.folder import trial_path
from autotune.study.setup import profile_cache
from autotune.study.setup.devices import of_ranks
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import completed, grounds
from autotune.study.setup.script import inspect_workload
from autotune.study.spec.spec import StudySpec
from autotune.study.spec.yaml_file import stated_storage
from autotune.system import device, files, temporary
from autotune.system.machine import n_cores
from autotune.system.units import format_bytes
from autotune.trial.failures import ended_by_host
from autotune.trial.folder import TrialDir, record_in, result_in
from autotune.trial.profile import Machine, Profile
from autotune.trial.request import TrialRequest
from autotune.trial.result import RAN, Outcome
from autotune.trial.target import Target
from autotune.trial.workload import Environment, Workload


def foresee(
    spec: StudySpec, settings: Mapping[str, Scalar], studies: Path, view: EventSink = SILENT, on: Devices | None = None
) -> Prediction:
    """Returns the forecast for a configuration of a target.

    Args:
        spec: The default study of the target.
        settings: Knobs that differ from the baseline's.
        studies: Folder of the studies, whose trials correct the forecast.
        on: Devices to answer for by their data sheet, in place of this machine's.
    """
    for name, value in settings.items():
        check_setting(name, value, name)
    Candidate.of({"micro_batch_size": 1, **settings})  # refuses a wrong knob before anything is profiled
    found = foresee_workload(spec, view, on)
    candidate = Candidate.of({**found.baseline.values(), **settings})
    if (reason := why_illegal(candidate, replace(found.setting, global_batch=None))) is not None:
        raise UserError(f"this cannot run {f'on {on.describe()}' if on else 'here'}: {reason}")
    predictor = Predictor(found.profile, found.machine, found.base_config)
    known = {} if on else measured_in(studies / spec.name, spec.target, found)
    measured = known.get(found.world_size, {})
    for other, metrics in measured.items():
        predictor.learn(other, **metrics, machine=found.machine)
    limit = float(spec.device_memory_bytes or found.share_bytes)
    memory, own, notes = predictor.memory(candidate), dict(measured.get(candidate, {})), list(found.notes)
    if (exceeded := own.pop("exceeded_bytes", None)) is not None:
        notes.insert(
            0, f"it ran out of {format_bytes(exceeded)} of memory in study {spec.name}, which this forecast knows"
        )
    return Prediction(
        configuration=candidate, ranks=found.world_size, data_parallel=found.setting.world_size,
        memory=memory, step_time=predictor.step_time(candidate),
        device_memory_bytes=limit, fits_probability=probability_below(memory, limit),
        largest_micro_batch_size=_largest(predictor, candidate, limit),
        largest_tensor_bytes=found.profile.largest_tensor_bytes(candidate.precision, candidate.micro_batch_size),
        tokens_per_sample=found.profile.tokens_per_sample,
        measured=own, study=spec.name, notes=tuple(notes),
        device=found.device + (f", as if it had {format_bytes(limit)}" if spec.device_memory_bytes else ""),
    )  # fmt: skip


def check_named(name: str | None, studies: Path) -> None:
    """Refuses a name, if one is given, that no study has: its trials were to correct the forecast."""
    if name and not (studies / name).is_dir():
        there = [path.parent.name for path in studies.glob("*/study.yaml")]
        raise UserError(f"--study: there is no study {name!r} in {files.shown(studies)}.{nearest(name, there)}")


def foresee_workload(spec: StudySpec, view: EventSink = SILENT, on: Devices | None = None) -> ForecastInputs:
    """Returns the inputs of forecasts for a target, measured by ranks on this machine where the cache lacks them.

    Args:
        spec: The default study of the target.
        on: Devices whose data sheet takes the place of this machine's rates.
    """
    target = spec.inspected
    workload, notes = _known(spec, target, view)
    if workload.script is not None and workload.script.pipeline_stages:
        raise UserError(f"{spec.target}: pipelines cannot be predicted; `autotune run` measures them")
    if on is not None:
        on = on.of(spec.ranks or on.count)
        spec = spec.model_copy(update={"ranks": on.count, "nodes": on.nodes})
        workload = replace(workload, machine=on.machine(), environment=_of_card(workload.environment, on))
        notes = [*notes, f"rates and memory are those of the data sheet ({on.card.source}): nothing was measured on it"]
    world_size, local = _ranks(spec, workload)
    environment = of_ranks(workload.environment, local)
    workload = replace(workload, environment=environment)
    base_config, baseline, setting = grounds(spec, target, replace(workload, n_samples=None), world_size)
    machine = workload.machine or Machine.guess(environment.accelerator, local, environment.n_cores)
    if local != world_size and on is None:
        machine = replace(machine, world_size=world_size)
        notes = [
            *notes,
            f"rates are those of {local} rank(s) on this machine; between more ranks or machines links differ",
        ]
    profile = workload.profile or Profile.guess(workload.n_parameters, workload.n_trainable, workload.n_blocks)
    reaching = profile.reaching(spec.max_length or 0)
    notes = [*notes, *reaching.caveats[len(profile.caveats) :]]
    return ForecastInputs(
        profile=reaching,
        machine=machine, world_size=world_size, base_config=base_config, baseline=baseline, setting=setting,
        # On devices of a data sheet the forecast holds what context and NCCL take.
        share_bytes=on.memory_bytes if on else environment.share_bytes(local, world_size), notes=notes,
        device=on.describe() if on else f"{environment.device_name} ({environment.accelerator})",
    )  # fmt: skip


def _of_card(here: Environment, on: Devices) -> Environment:
    """The environment of a study on other devices, with this machine's libraries."""
    return replace(
        here, accelerator="cuda", device_name=on.card.name, n_devices=on.local, device_memory_bytes=on.card.memory_bytes,
        bf16="bf16" in on.card.flops, fp16=True, capability=on.card.capability, each=(), free_bytes=(), missing_ops={},
        remarks=(),
    )  # fmt: skip


def measured_in(folder: Path, target: Path, inputs: ForecastInputs) -> dict[int, dict[Candidate, dict[str, float]]]:
    """What a study's trials of this target measured, by number of ranks and candidate, as `Predictor.learn` takes it.

    Where the study is in its database these are the estimates from all measurements, which its report shows too. A trial
    that was stopped early counts with more noise, and only where no other trial of its candidate was complete; of one that
    ran out of its device's memory counts what it exceeded: a rank's share, where it was given no other.
    """
    on_device = inputs.setting.accelerator != "cpu"
    found: dict[int, dict[Candidate, dict[str, float]]] = {}
    paths = sorted((folder / "trials").glob("[0-9]*"))
    estimates = _estimates(folder) if paths else {}
    for path in paths:
        request, result = record_in(TrialDir(path).request, TrialRequest), result_in(path)
        if request is None or result is None or request.target != str(target):
            continue
        if result.outcome not in (*RAN, Outcome.OOM) or ended_by_host(
            result.outcome, result.reason, on_device=on_device
        ):
            continue
        try:
            candidate = Candidate.of(result.candidate)
        except UserError:  # written by another version
            continue
        alike, stopped = found.setdefault(result.world_size, {}), result.outcome is not Outcome.COMPLETE
        if stopped and candidate in alike:
            continue
        if result.outcome is Outcome.OOM:
            alike[candidate] = {"exceeded_bytes": float(request.device_memory_bytes or inputs.share_bytes)}
        elif (steps := result.steps) is not None and result.peak_memory_bytes is not None:
            sd = interval_sd(steps.median_s - steps.ci95_s, steps.median_s + steps.ci95_s)
            alike[candidate] = {
                "peak_memory_bytes": float(result.peak_memory_bytes),
                "step_time_s": steps.median_s,
                "step_time_sd": math.hypot(sd, STOPPED_SD * stopped),
            }
            if (known := estimates.get(path.name)) is not None and known.candidate == candidate:
                names = alike[candidate].keys() & known.metrics.keys()
                alike[candidate] |= {name: known.metrics[name] for name in names}
    return found


def _estimates(folder: Path) -> dict[str, Measured]:
    """What all measurements of a study say of each trial, by its folder's name, as its report states it; empty if it is in no database."""
    from autotune.scoring.estimates import estimate
    from autotune.study.storage import analysed, database, records  # which import Optuna

    url = stated_storage(folder / "study.yaml") or records.default_url(folder.parent)
    try:
        with database.failing_in_words(url):
            study = records.load_study(database.open_storage(url, create=False), folder.name)
            kept = records.record(study)
            told = analysed.measured(study, folder, kept) if kept is not None else []
    except UserError:
        return {}
    return {trial_path(folder, m.trial).name: m for m in estimate(told).measured}


def _known(spec: StudySpec, target: Target, view: EventSink) -> tuple[Workload, list[str]]:
    """Returns the workload with profile and rates, from the cache or else from ranks, and notes."""
    script = target.kind == "script"
    # As in the completed configuration.
    configured = "optimizer" in (spec.base_config or {}) or "optimizer" not in target.defines
    key = profile_cache.script_key(spec) if script else profile_cache.workload_key(target.path, configured)
    workload = profile_cache.load(Workload, key)
    if workload is not None:
        found = profile_cache.known(workload, target.path, completed(spec, target, workload), _ranks(spec, workload)[1])
        if found.profile is not None and found.machine is not None:
            return found, list(found.profile.caveats)
    found, notes = _profiled(spec, target, view, workload)
    if script:
        profile_cache.save(replace(found, machine=None), key)
    return found, notes


def _profiled(
    spec: StudySpec, target: Target, view: EventSink, workload: Workload | None
) -> tuple[Workload, list[str]]:
    """Returns the workload with profile and rates, from ranks on this machine, as which the cache keeps them, and notes.

    Args:
        workload: What the cache knows of the target; None if nothing.
    """
    here = spec.model_copy(update={"executor": "local", "executor_options": {}, "hostfile": None, "nodes": None})
    with temporary.folder("autotune-predict") as folder:
        with executor_for(here, folder, view.waits) as executor:
            most = len(device.here().each) or max(2, n_cores())
            script, trials = target.kind == "script", folder / "trials"
            ranks = min(spec.ranks or 1, most) if script else 1
            if workload is None or (script and workload.profile is None):
                view.doing(f"{'running' if script else 'profiling'} {target.path.name}, once")
                with executor.turn(view.waiting):  # as for a study's plan
                    workload = inspect_workload(here, executor, trials / "inspect", ranks, view.doing)
            config, local = completed(spec, target, workload), _ranks(spec, workload)[1]
            found, notes = profile_cache.measure_missing(workload, target.path, config, local, executor, trials, view)
        return found, notes


def _ranks(spec: StudySpec, workload: Workload) -> tuple[int, int]:
    """Returns the ranks, as `plan` has them, and how many of those of a machine this one can run."""
    environment = workload.environment
    devices = environment.accelerator != "cpu"
    world_size = spec.stated_ranks or spec.n_nodes * (environment.n_devices if devices else 1)
    on_each = world_size // spec.nodes_for(world_size)
    return world_size, min(on_each, environment.n_devices if devices else max(2, environment.n_cores))


def _largest(predictor: Predictor, candidate: Candidate, limit: float) -> int | None:
    """Returns the largest micro-batch that surely fits, all else equal."""
    sizes = list(range(1, MOST_SAMPLES + 1))
    mean, sd = predictor.log_memory([replace(candidate, micro_batch_size=size) for size in sizes])
    fitting = np.flatnonzero(mean + SURE_Z * sd <= np.log(limit))
    return sizes[int(fitting[-1])] if len(fitting) else None
