"""What belongs to the machine that trials run on: its caches, its devices, and the processes that we started there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path

import psutil

MARK = "AUTOTUNE_AGENT"
# Ranks may share cores; beyond this they only wait for one another, and take the machine's memory.
RANKS_PER_CORE, FEWEST_CORES = 8, 4
_drawn: dict[int, str] = {}


def extensions_dir() -> Path:
    """DeepSpeed's compiled ops for exactly these libraries, this environment and this kind of machine."""
    parts = [
        sys.prefix,
        sys.version,
        os.uname().machine,
        str(shutil.which("ninja", path=str(Path(sys.prefix) / "bin"))),
    ]
    parts += [metadata.version(name) for name in ("torch", "deepspeed")]
    return cache_dir() / "torch_extensions" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_dir() -> Path:
    """Where what can be made again is kept: `AUTOTUNE_CACHE`, or the user's cache folder."""
    stated = os.environ.get("AUTOTUNE_CACHE")
    return Path(stated) if stated else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"


def run_mark() -> str:
    """What the marks of all executors of this process begin with, so that whoever comes after it finds what any of them started."""
    return _drawn.setdefault(os.getpid(), uuid.uuid4().hex)


def new_mark() -> str:
    """A mark for the processes of one server."""
    return f"{run_mark()}.{uuid.uuid4().hex[:8]}"


def sweep(mark: str) -> list[int]:
    """Kills every process of this user that carries a mark, or one that begins with it, in its environment; returns their numbers."""
    wanted = f"{MARK}={mark}".encode()
    killed: list[int] = []
    for _ in range(500):  # what is killed may just have started another one
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if pid != os.getpid() and any(each == wanted or each.startswith(wanted + b".") for each in variables):
                    os.kill(pid, signal.SIGKILL)
                    found.append(pid)
        if not found:
            break
        killed += found
        time.sleep(0.01)
    return sorted(set(killed))


def has_cuda_device() -> bool:
    """Whether this machine has an NVIDIA device, as far as that is to be seen without its libraries."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def n_devices() -> int:
    """How many ranks this machine can run at once, as far as that is to be seen without its libraries; on a CPU its cores, at least 2."""
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    return len(devices) or (1 if has_cuda_device() else max(2, len(os.sched_getaffinity(0))))


def most_ranks() -> int:
    """More ranks at once than that are a slip of the finger, and would take the machine down."""
    return RANKS_PER_CORE * max(FEWEST_CORES, len(os.sched_getaffinity(0)))
