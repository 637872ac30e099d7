"""The compiler's side of DeepSpeed's ops: CUDA toolkit, headers that pip installed, and the folder of what was built."""

import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from autotune.system import device
from autotune.system.machine import cache_dir

USUAL_TOOLKITS = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda")


def toolkit(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder of the CUDA toolkit, with `bin/nvcc`: where the user says, as torch does, else by search.

    The `nvcc` on the path may be a script that calls another one, so a folder that has headers, too, goes first.
    """
    stated = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    searched = [Path(nvcc).resolve().parent.parent] if nvcc else []
    places = stated[:1] or [*searched, *map(Path, USUAL_TOOLKITS), *_by_pip("bin/nvcc")]
    found = [place for place in places if os.access(place / "bin" / "nvcc", os.X_OK)]
    return min(found, key=lambda place: not (place / "include" / "cuda_runtime.h").is_file(), default=None)


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables under which ops are compiled: the toolkit, and pip's headers and libraries after its own.

    The compiler looks into `CPLUS_INCLUDE_PATH` last, so that a toolkit's own headers win.
    """
    found: dict[str, str] = {}
    place = toolkit(environment)
    if place is not None and not environment.get("CUDA_HOME"):
        found["CUDA_HOME"] = str(place)
    offered = {"CPLUS_INCLUDE_PATH": "include", "C_INCLUDE_PATH": "include", "LIBRARY_PATH": "lib"}
    for variable, folder in offered.items():
        if theirs := [str(each / folder) for each in _by_pip(folder)]:
            found[variable] = os.pathsep.join([*filter(None, [environment.get(variable)]), *theirs])
    return found


def has_header(name: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a header is in the toolkit or among those that pip installed."""
    place = toolkit(environment)
    folders = [*([place] if place else []), *_by_pip("include")]
    return any((folder / "include" / name).is_file() for folder in folders)


def extensions_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of DeepSpeed's compiled ops: one per Python, set of libraries, toolkit and kind of device."""
    environment = os.environ if environment is None else environment
    place = toolkit(environment)
    parts = [
        sys.prefix,
        sys.version,
        os.uname().machine,
        str(shutil.which("ninja", path=str(Path(sys.prefix) / "bin"))),
    ]
    parts += [metadata.version(name) for name in ("torch", "deepspeed")]
    devices = device.here(environment)
    parts += [devices.accelerator, devices.platform, *sorted({each.capability for each in devices.each})]
    if devices.accelerator != "cpu":
        version = place / "version.json" if place else None
        parts += [str(place), version.read_text() if version and version.is_file() else ""]
    return cache_dir() / "torch_extensions" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def is_built(name: str, folder: Path) -> bool:
    """Whether an op lies compiled in a folder of ops, and nobody is compiling it (torch leaves a lock meanwhile)."""
    return (folder / name / f"{name}.so").is_file() and not (folder / name / "lock").exists()


def _by_pip(what: str) -> list[Path]:
    """Folders of NVIDIA's packages for pip that hold this."""
    site = Path(sysconfig.get_path("purelib")) / "nvidia"
    return sorted(path for path in site.glob("*") if (path / what).exists())
