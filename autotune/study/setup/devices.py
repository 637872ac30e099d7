"""The devices of a trial: those of its ranks, which need not be all of a machine."""

from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import UserError
from autotune.study.spec.spec import StudySpec
from autotune.system.device import MEAN_CPU, Device
from autotune.system.machine import limit_on_addresses
from autotune.system.units import format_bytes
from autotune.trial.workload import Environment

UNLIKE = "the devices of a trial differ"


def of_ranks(environment: Environment, ranks: int) -> Environment:
    """Returns the environment of trials that have this number of ranks on a machine at a time: they can do what all their devices can.

    Rank n has device n; a display's card behind them is none of theirs.
    """
    used = environment.each[:ranks]
    if not used:
        return environment
    least = min((each.capability for each in used), key=_by_age)
    major = least.partition(".")[0]
    remarks = [*(each for each in environment.remarks if not each.startswith(UNLIKE)), *_unlike(used)]
    return replace(
        environment,
        capability=least,
        device_memory_bytes=min(each.memory_bytes for each in used),
        # torch counts emulation on older ones, too.
        bf16=int(major) >= 8 if major.isdigit() else environment.bf16,
        remarks=tuple(remarks),
    )


def _by_age(capability: str) -> tuple[float, str]:
    """Compute capabilities in order, 9.0 before 10.0."""
    number = capability.replace(".", "", 1).isdigit()
    return (float(capability) if number else 0.0, capability)


def _unlike(used: Sequence[Device]) -> list[str]:
    models = list(dict.fromkeys(each.name for each in used))
    if len(models) < 2 and len({each.memory_bytes for each in used}) < 2:
        return []
    return [
        f"{UNLIKE} ({', '.join(models)}): it is as slow as its slowest and has the memory of its smallest; choose like ones by"
        " CUDA_VISIBLE_DEVICES"
    ]


def check_devices(spec: StudySpec, environment: Environment, world_size: int) -> None:
    """Refuses more ranks than there are devices on the machines that they run on."""
    nodes = spec.nodes_for(world_size)
    if environment.accelerator == "cpu" or world_size <= nodes * environment.n_devices:
        return
    whose = "the launch command" if spec.invocation and spec.invocation.world_size == world_size else "--ranks"
    have = "this machine has" if spec.n_nodes == 1 else f"each of the {spec.n_nodes} machines has"
    if nodes < spec.n_nodes:
        have = f"they cannot be spread evenly over {spec.n_nodes} machines, and one has"
    raise UserError(
        f"{whose} asks for {world_size} ranks: {have} {environment.n_devices} devices; ask for fewer, or {MEAN_CPU}"
    )


def limit_bytes(environment: Environment, stated: float | None, on_each: int, ranks: int, at_once: int) -> float | None:
    """Returns what a rank may use of memory: the stated limit, up to its device's; on a CPU else its share of the host's.

    Args:
        stated: The user's own limit in bytes.
        on_each: Ranks of a trial on a machine, of `ranks` in all.
        at_once: Trials that share this machine at a time.
    """
    share = environment.share_bytes(on_each, ranks, at_once)
    if environment.accelerator == "cpu":
        return stated or share or None
    return min(filter(None, (share, stated)), default=None)


def limit_notes(spec: StudySpec, environment: Environment) -> list[str]:
    """Returns what is to be said of a stated memory that no device has, and of a limit on a process's addresses."""
    found, stated, total = [], spec.device_memory_bytes or 0, environment.device_memory_bytes
    if environment.accelerator != "cpu" and stated > total:
        more = f"--device-memory states {format_bytes(stated)}, and a device has {format_bytes(total)}, which counts"
        found.append(f"{more}: `autotune predict --device-memory` forecasts for a larger one")
    if (given := limit_on_addresses()) and not spec.runs_elsewhere:
        found.append(f"{given}, if trials run out of memory or threads")
    return found


def held_by_others(environment: Environment, on_each: int) -> list[str]:
    """Returns what is to be said where other processes hold memory of the ranks' devices."""
    if not (held := environment.held_by_others_bytes(on_each)):
        return []
    total = environment.device_memory_bytes / 2**30
    return [
        f"other processes hold {held / 2**30:.1f} of the {total:.1f} GiB of a device, so trials have only the rest: end them"
        " (`nvidia-smi` lists them), or leave that device out by CUDA_VISIBLE_DEVICES"
    ]
