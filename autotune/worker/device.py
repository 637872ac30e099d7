"""The devices that a rank sees, through DeepSpeed's accelerator and torch; run in a separate process or in a rank."""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autotune.errors import UserError
from autotune.system.device import MEAN_CPU, Device, Devices, hidden, stated_choice, unused_device

# Versions of kernel drivers, by the file that states them.
_DRIVERS = {
    "/proc/driver/nvidia/version": r"Kernel Module\b.*?\s([0-9]+\.[0-9.]+)",
    "/sys/module/amdgpu/version": r"(\S+)",
}


def accelerator() -> Any:
    """Returns DeepSpeed's layer over the devices; outside of a rank its import takes seconds."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def kind() -> str:
    """Returns DeepSpeed's name of the devices that this process computes on: `cpu`, `cuda` and others."""
    return str(accelerator().device_name())


def main() -> int:
    """Prints the devices as one line of JSON; returns an exit status."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output, too
    try:
        found = found_devices()
    except UserError as error:
        found = Devices(problem=str(error))
    os.write(answers, json.dumps(asdict(found)).encode() + b"\n")
    return 0


def found_devices() -> Devices:
    """Returns the devices that trials compute on here; initialises the accelerator.

    Raises:
        UserError: DeepSpeed is to compute on devices of which none is visible, or that torch cannot use.
    """
    if (here := kind()) == "cpu":
        return Devices(problem=_why_cpu())
    each = tuple(device_of(here, index) for index in range(accelerator().device_count()))
    if not each:
        why = f" ({choice})" if (choice := stated_choice(os.environ)) else ""
        raise UserError(f"DeepSpeed is to compute on {here!r}, but no such device is visible{why}; {MEAN_CPU}")
    # The management library, by which devices are counted, does not look at the driver's version.
    if here == "cuda" and (why := _why_unusable()):
        raise UserError(f"this machine has {unused_device() or 'a GPU'}, but {why}; or {MEAN_CPU}")
    return Devices(accelerator=here, each=each, driver=driver_version(), platform=_platform())


def device_of(kind: str, index: int) -> Device:
    """Returns one device of DeepSpeed's accelerator; what its library does not state stays empty."""
    properties: Any = None
    with contextlib.suppress(Exception):
        properties = getattr(torch, kind).get_device_properties(index)
    name = str(getattr(properties, "name", "") or kind)
    capability = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    if not torch.version.hip:
        major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
        capability = f"{major}.{minor}" if major is not None else ""
    memory = getattr(properties, "total_memory", 0)
    if not memory:
        with contextlib.suppress(Exception):
            memory = accelerator().total_memory(index)
    return Device(name=name, uuid=uuid_of(properties), capability=capability, memory_bytes=int(memory or 0))


def uuid_of(properties: Any) -> str:
    """Returns the identifier of a device as NVIDIA's tools write it; empty where torch does not tell."""
    uuid = str(getattr(properties, "uuid", "") or "")
    mig = " MIG " in str(getattr(properties, "name", ""))
    return f"{'MIG' if mig else 'GPU'}-{uuid}" if uuid and "-" in uuid and not uuid.startswith(("GPU", "MIG")) else uuid


def multiplies_in_tf32() -> bool:
    """Whether CUDA multiplies fp32 matrices in TensorFloat-32.

    Torch 2.9 brought a setting for each backend; where a script uses that, the older question raises.
    """
    own = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(own == "tf32" if own is not None else torch.get_float32_matmul_precision() != "highest")


def convolves_in_tf32() -> bool:
    """Whether convolutions in fp32 take TensorFloat-32 where the device has it, as cuDNN does by default."""
    own = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
    return not torch.version.hip and bool(own == "tf32" if own is not None else torch.backends.cudnn.allow_tf32)


def free_bytes(devices: Iterable[int]) -> tuple[int, ...]:
    """Returns the free memory of CUDA devices, on each of which that starts a context; nothing where torch does not tell."""
    with contextlib.suppress(Exception):
        return tuple(int(torch.cuda.mem_get_info(index)[0]) for index in devices)
    return ()


def driver_version() -> str:
    """Returns the version of the kernel's driver for NVIDIA's or AMD's devices; empty without one."""
    for path, pattern in _DRIVERS.items():
        with contextlib.suppress(OSError):
            if found := re.search(pattern, Path(path).read_text()):
                return found[1]
    return ""


def _platform() -> str:
    version = torch.version
    for name in ("hip", "cuda", "xpu"):
        if value := getattr(version, name, None):
            return f"{'rocm' if name == 'hip' else name} {value}"
    return ""


def _why_cpu() -> str:
    """Why DeepSpeed computes on the CPU although there is a device; empty without one, or where the user wants that."""
    found = unused_device()
    if not found or hidden(os.environ) or os.environ.get("DS_ACCELERATOR") == "cpu":
        return ""
    why = f"torch {torch.__version__} is not built for it: install a build that is"
    if choice := stated_choice(os.environ):
        why = f"{choice} leaves none visible: name one that is here"
    elif torch.version.cuda or torch.version.hip:
        why = _why_unusable() or "DeepSpeed does not take it: set DS_ACCELERATOR=cuda"
    return f"this machine has {found}, but {why}; or {MEAN_CPU}"


def _why_unusable() -> str:
    """Why torch cannot start CUDA here, as where the driver is too old for it; empty if it can."""
    try:
        torch.cuda.init()
    except Exception as error:
        return f"torch {torch.__version__} ({_platform()}) cannot use it: {str(error).strip().splitlines()[0]}"
    return ""
