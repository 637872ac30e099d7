"""Cache of profiles and machine rates, which ranks measure once before the first trial."""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from autotune.executors import base
from autotune.executors.base import Executor
from autotune.executors.ssh import read_hostfile
from autotune.study.events import SILENT, EventSink
from autotune.study.spec.spec import StudySpec
from autotune.system import device
from autotune.system.machine import CPU_VARIABLES, cache_dir, n_cores, processor_name
from autotune.system.provenance import installed
from autotune.trial.folder import TrialDir, read_record, record_in, write_record
from autotune.trial.links import Probe
from autotune.trial.profile import Machine, Profile
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.target import sources
from autotune.trial.workload import Workload

# Part of every key; increase it when the records change.
FORMAT = 13
PROFILE_DEADLINE_S = 180.0
# Computing time of a profile in seconds, and the share of the time left that it may take.
PROFILE_S, PROFILE_SHARE = 60.0, 0.1
# Files that a script may read its configuration from, and their largest size in bytes.
SETTINGS, LARGEST_SETTINGS = (".json", ".yaml", ".yml", ".toml"), 2**20
# A text in a source, which may be the name of a file or a variable.
QUOTED = re.compile(r"""["']([^"'\n]+)["']""")
T = TypeVar("T", Profile, Machine, Workload, Probe)


@dataclass(frozen=True)
class Place:
    """The machines that trials run on.

    Attributes:
        nodes: Number of machines.
        where: What they are and how they are reached, as part of the cache's keys; empty for this machine.
    """

    nodes: int = 1
    where: tuple[Any, ...] = ()


HERE = Place()


def place_of(spec: StudySpec, world_size: int, workload: Workload) -> Place:
    """Returns the machines of a study."""
    hosts = list(read_hostfile(spec.hostfile)) if spec.hostfile is not None else None  # an edited file names others
    engine = (spec.executor, sorted(spec.executor_options.items()), hosts, workload.environment.device_name)
    return Place(spec.nodes_for(world_size), engine if spec.runs_elsewhere else ())


def workload_key(target: Path, given: Any = None, where: Sequence[Any] = ()) -> str:
    """Returns the cache key of a target: its sources, what these name, its arguments, the libraries, and the kind of device."""
    texts = {path: path.read_text(errors="replace") for path in sources(target)}
    named = [_named(text, path.parent) for path, text in texts.items()]
    found = [*where, *texts.values(), *filter(None, named)]
    libraries = platform.python_version(), installed()
    return _digest(FORMAT, libraries, device.here().identity, given, str(target.absolute()), *found)


def _named(source: str, folder: Path) -> dict[str, str]:
    """Returns the variables of the environment and the files below its folder or the working directory that a source names."""
    words = set(QUOTED.findall(source))
    found = {f"${word}": os.environ[word] for word in words & os.environ.keys()}
    return found | _settings(place / word for place in (folder, Path.cwd()) for word in words)


def _settings(files: Iterable[Path]) -> dict[str, str]:
    """Returns the texts of those files that may hold settings."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # a text that is no path
            if file.is_file() and file.stat().st_size <= LARGEST_SETTINGS:
                found[str(file)] = file.read_text(errors="replace")
    return dict(sorted(found.items()))


def script_key(spec: StudySpec) -> str:
    """Returns the cache key of a training script: as for a target, with the configuration files beside it."""
    how = spec.how()
    path, folder = Path(how.script), Path(how.working_dir)
    files = [folder / argument for argument in how.arguments]
    files += [file for place in {folder, path.parent} for file in place.glob("*") if file.suffix in SETTINGS]
    started = [how.arguments, how.working_dir, how.module, how.environment, how.world_size]
    return workload_key(path, [*started, spec.script_set, spec.ranks, spec.base_config, _settings(files)])


def machine_key(world_size: int, place: Place = HERE) -> str:
    """Returns the cache key of the rates of this machine, or of others, with this number of ranks."""
    if place.where:
        return _digest(FORMAT, *_libraries(), *place.where, place.nodes, world_size)
    # Devices of one model may be linked differently, so these are told apart, too.
    devices = device.here()
    machine = [
        devices.identity,
        [each.uuid for each in devices.each],
        platform.node() + processor_name(),
        [*sorted(os.sched_getaffinity(0)), n_cores()],
        [os.environ.get(name) for name in CPU_VARIABLES],
    ]
    return _digest(FORMAT, *_libraries(), *machine, world_size)


def load(kind: type[T], key: str) -> T | None:
    """Returns the record under a key; None without one that can be read."""
    return record_in(_path(kind, key), kind)


def save(value: Profile | Machine | Workload | Probe, key: str) -> None:
    """Writes a record into the cache, if that can be written, without what was free of the devices just then."""
    if isinstance(value, Workload):
        value = replace(value, environment=replace(value.environment, free_bytes=()))
    with contextlib.suppress(OSError):
        write_record(_path(type(value), key), value, sync=False)


def known(
    workload: Workload, target: Path, ds_config: Mapping[str, Any], world_size: int, place: Place = HERE
) -> Workload:
    """Returns the workload with profile and machine rates from the cache, as far as it has them."""
    profile = workload.profile or load(Profile, workload_key(target, ds_config.get("optimizer"), place.where))
    machine = workload.machine or load(Machine, machine_key(world_size, place))
    return replace(workload, profile=profile, machine=machine)


def measure_missing(
    workload: Workload, target: Path, ds_config: Mapping[str, Any], world_size: int, executor: Executor, folder: Path,
    view: EventSink = SILENT, place: Place = HERE,
) -> tuple[Workload, list[str]]:  # fmt: skip
    """Completes the workload with its profile and the machine's rates; ranks measure what the cache lacks.

    Args:
        view: Told what is measured, and of each wait for another study on this machine.

    Returns:
        The workload, and remarks for the user.
    """
    if workload.script is None:
        # A configuration's optimizer takes the place of a model.py's in all that was found out.
        save(replace(workload, profile=None, machine=None), workload_key(target, "optimizer" in ds_config, place.where))
    workload, notes = known(workload, target, ds_config, world_size, place), []
    if workload.profile is None and workload.script is None:
        request = TrialRequest(
            target=str(target), mode="profile", ds_config=dict(ds_config), deadline_s=PROFILE_DEADLINE_S,
            budget_s=min(PROFILE_S, max(0.0, PROFILE_SHARE * (executor.ends_at_s - time.monotonic()))),
        )  # fmt: skip
        view.doing("profiling the model, once")
        with executor.turn(view.waiting):  # it may take much of a device
            # Of the text that is profiled, not of a later one.
            key = workload_key(target, ds_config.get("optimizer"), place.where)
            result = base.run(executor, folder / "profile", request)
        if result.outcome is Outcome.COMPLETE:
            profile = read_record(TrialDir(folder / "profile").profile, Profile)
            if not profile.cut_short:
                save(profile, key)
            workload = replace(workload, profile=profile)
        else:
            notes.append(f"the model was not profiled ({result.reason}), so forecasts start from its size alone")
    if workload.profile is not None:
        notes += workload.profile.caveats
    if workload.machine is None:
        view.doing("measuring the machine's rates, once")
        with executor.turn(view.waiting):  # another study's trial would slow it down
            request = TrialRequest(target="", mode="rates", world_size=world_size, nodes=place.nodes)
            result = base.run(executor, folder / "rates", request)
        if result.outcome is Outcome.COMPLETE:
            machine = read_record(TrialDir(folder / "rates").machine, Machine)
            save(machine, machine_key(world_size, place))
            workload = replace(workload, machine=machine)
        else:
            notes.append(f"the machine's rates were not measured ({result.reason}), so usual ones are assumed")
    return _as_profiled(workload), notes


def _as_profiled(workload: Workload) -> Workload:
    """Returns the workload with what its profile has seen of buffers, as the probe of a script sees them itself."""
    if (profile := workload.profile) is None:
        return workload
    changed, by_micro_batch = workload.updates or profile.updates, workload.by_micro_batch or profile.by_micro_batch
    return replace(workload, updates=changed, by_micro_batch=by_micro_batch)


def _path(kind: type[Any], key: str) -> Path:
    return cache_dir() / "profiles" / f"{kind.__name__.lower()}-{key}.json"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:20]


def _libraries() -> list[str]:
    return [platform.python_version(), *(metadata.version(name) for name in ("torch", "deepspeed"))]
