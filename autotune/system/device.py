"""The accelerator devices that trials see here: DeepSpeed is asked in a separate process, once per boot."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from autotune.system.files import json_of, write_text
from autotune.system.machine import boot_id, cache_dir

ASK_TIMEOUT_S = 180.0
# Variables that choose among devices, by DeepSpeed's name of the accelerator; ROCm's is `cuda`, too.
CHOOSE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "hpu": ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
}
# Their values that hide all devices; the word is Slurm's, where a job was given none.
NO_DEVICE = ("", "-1", "NoDevFiles")
MEAN_CPU = "set DS_ACCELERATOR=cpu to mean the CPU"
VARIABLES = ("DS_ACCELERATOR", *(name for names in CHOOSE.values() for name in names))
# Packages that bring torch an accelerator, beside those that its own build may have.
_PLUGINS = ("intel_extension_for_pytorch", "torch_npu", "torch_mlu", "torch_sdaa", "torch_supa", "torch_xmlir",
            "habana_frameworks")  # fmt: skip
# Files that a kernel driver makes for a device, and whose device that is.
_DRIVER_FILES = {
    "/dev/nvidia[0-9]*": "an NVIDIA GPU", "/dev/kfd": "an AMD GPU", "/dev/dxg": "a GPU of Windows",
    "/dev/davinci[0-9]*": "an Ascend NPU", "/dev/accel/accel*": "an accelerator",
}  # fmt: skip
TESTED = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device that trials see.

    Attributes:
        name: Its model, as the driver names it; a part of a card (MIG) says so.
        uuid: Its identifier; empty where the driver gives none.
        capability: CUDA compute capability as in `9.0`, AMD's architecture as in `gfx942`; else empty.
    """

    name: str
    uuid: str = ""
    capability: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The accelerator and the devices that trials compute on.

    Attributes:
        accelerator: DeepSpeed's name: `cpu`, `cuda` (ROCm too), `xpu`, `npu`, `hpu` and others.
        each: The visible devices in order; none on a CPU.
        driver: Version of the kernel's driver; empty if unknown.
        platform: What torch was built for: `cuda 12.8`, `rocm 6.2`, `xpu 20250`; empty for a CPU.
        problem: Why a device that this machine has is not used, and the remedy, in one sentence.
    """

    accelerator: str = "cpu"
    each: tuple[Device, ...] = ()
    driver: str = ""
    platform: str = ""
    problem: str = ""

    @property
    def identity(self) -> list[Any]:
        """What rates and profiles depend on: accelerator, driver and each device's model, without which one it is."""
        return [self.accelerator, self.driver, *([d.name, d.capability, d.memory_bytes] for d in self.each)]

    @property
    def untested(self) -> str:
        """A sentence that this kind of accelerator was never tested; empty for those that were."""
        if self.accelerator in TESTED and not self.platform.startswith("rocm"):
            return ""
        what = "ROCm" if self.platform.startswith("rocm") else f"the accelerator {self.accelerator!r}"
        return f"{what} was never tested with autotune: trials run through DeepSpeed's own layer, figures need care"


def from_data(data: Mapping[str, Any]) -> Devices:
    """Returns the record from its JSON.

    Raises:
        ValueError, TypeError, KeyError: The data is not such a record.
    """
    return Devices(**{**data, "each": tuple(Device(**device) for device in data["each"])})


def here(environment: Mapping[str, str] | None = None) -> Devices:
    """Returns the devices that trials compute on; kept until the machine starts again.

    Args:
        environment: Environment variables of the trials; None for those of this process.
    """
    variables = dict(os.environ if environment is None else environment)
    if (stated := variables.get("DS_ACCELERATOR")) == "cpu":
        return Devices()
    if not stated and not _may_use_accelerator():
        return Devices(problem="" if hidden(variables) else _cpu_build_problem())
    path = cache_dir() / "devices" / f"{_key(variables)}.json"
    try:
        return from_data(json_of(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        found = ask(variables)
    if not found.problem:
        with contextlib.suppress(OSError):  # of a cache that cannot be written: asked again the next time
            write_text(path, json.dumps(asdict(found)), sync=False)
    return found


def ask(variables: Mapping[str, str]) -> Devices:
    """Asks DeepSpeed in a separate process, so that this one never touches a device."""
    command = [sys.executable, "-m", "autotune.worker", "device"]
    environment = {**variables, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
        return from_data(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Devices(problem=f"torch did not answer within {ASK_TIMEOUT_S:.0f} s when it was asked for its devices")
    except (IndexError, ValueError, TypeError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Devices(problem=f"torch could not be asked for its devices: {last}")


def chosen(accelerator: str, n_devices: int, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns the variable that chooses devices, and the names of the visible ones: numbers, UUIDs, parts of a card.

    Args:
        accelerator: DeepSpeed's name of the accelerator.
        n_devices: Number of devices that a rank saw.
        environment: The environment variables under which it saw them.
    """
    names = CHOOSE.get(accelerator, ("CUDA_VISIBLE_DEVICES",))
    variable = next((name for name in names if environment.get(name)), names[0])
    listed = [part.strip() for part in environment.get(variable, "").split(",") if part.strip()]
    return variable, (listed or list(map(str, range(n_devices))))[:n_devices]


def stated_choice(environment: Mapping[str, str]) -> str:
    """Returns the variables that choose among devices with the user's values; empty where there are none."""
    return ", ".join(f"{name}={environment[name]!r}" for name in VARIABLES[1:] if name in environment)


def hidden(environment: Mapping[str, str]) -> bool:
    """Returns whether the user hides all devices."""
    return any(environment.get(name, "?").strip() in NO_DEVICE for name in VARIABLES[1:])


def unused_device() -> str:
    """Returns what kind of device this machine has by the files of its driver; empty without one."""
    return next((what for files, what in _DRIVER_FILES.items() if any(_glob(files))), "")


def _cpu_build_problem() -> str:
    found, version = unused_device(), _torch_build()["version"]
    return found and (
        f"this machine has {found}, but torch {version} is built for CPUs only: install a build of torch for it"
        f" (https://pytorch.org/get-started), or {MEAN_CPU}"
    )


def _may_use_accelerator() -> bool:
    """Whether torch, as it is installed, could use a device at all; read from its files, for importing it is slow."""
    build = _torch_build()
    return any(build[name] for name in ("cuda", "hip", "xpu")) or any(map(util.find_spec, _PLUGINS))


def _torch_build() -> dict[str, str]:
    """Version and platforms of torch by its `version.py`; all platforms where it cannot be read."""
    unknown = {"version": "", "cuda": "?", "hip": "?", "xpu": "?"}
    try:
        spec = util.find_spec("torch")
        text = Path(str(spec and spec.origin)).with_name("version.py").read_text()
    except (OSError, ValueError):
        return unknown
    values = dict(re.findall(r"^_*(\w+?)_*(?:: [^=\n]+)? = '([^']*)'", text, re.MULTILINE))
    return {name: values.get(name, "") for name in unknown}


def _glob(pattern: str) -> Iterable[Path]:
    return Path("/").glob(pattern.lstrip("/"))


def _key(variables: Mapping[str, str]) -> str:
    """What the visible devices depend on, as far as it shows without asking."""
    files = sorted(
        str(path) for pattern in (*_DRIVER_FILES, "/dev/nvidia-caps/*", "/dev/dri/*") for path in _glob(pattern)
    )
    libraries = [metadata.version(name) for name in ("torch", "deepspeed")]
    parts = [
        boot_id(),
        files,
        [variables.get(name) for name in VARIABLES],
        libraries,
        sys.prefix,
        os.environ.get("PYTHONPATH"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
