"""This machine: processor, cores, memory, cache folder, lock file, limit on ranks."""

import contextlib
import math
import os
import platform
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.system.units import format_bytes

# Ranks may share cores; with more than this per core they only wait for each other, and fill the machine's memory.
MAX_RANKS_PER_CORE, MIN_COUNTED_CORES = 8, 4
# The control groups of this process, and where their limits are.
GROUPS, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cache_dir() -> Path:
    """Returns the folder of data that can be computed again: `AUTOTUNE_CACHE`, or `autotune` in the user's cache.

    Raises:
        UserError: None is stated, and the user has no home folder, as one of a container that has no name.
    """
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autotune")
    found = os.path.expanduser(os.environ.get("AUTOTUNE_CACHE") or usual)
    if found.startswith("~"):
        raise UserError("This user has no home folder. Set AUTOTUNE_CACHE to a folder that you can write to")
    return Path(os.path.abspath(found))  # a script may change the working directory


def lock_path() -> Path:
    """Returns this user's lock file on this machine, in a folder of mode 0700: nobody else can hold it.

    It lies below the cache folder and not below `XDG_RUNTIME_DIR`: cron sets no such variable, and a logout
    removes that folder while a study may still run. The name is the machine's, because a home directory may be shared.

    Raises:
        UserError: The folder cannot be made, belongs to somebody else, or others may write to it.
    """
    folder = cache_dir() / f"locks-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}. Set AUTOTUNE_CACHE to a folder that you can write to") from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(f"{folder}: not a folder that only you can write to; remove it, or set AUTOTUNE_CACHE")
    return folder / f"{platform.node()}.lock"


# Flags of processors that compute products in bfloat16; without one it is emulated, up to 100 times slower than fp32.
FAST_BF16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}


# What holds oneDNN, which computes products on a CPU, to older instructions; and the values below which bfloat16 is emulated.
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
# Variables of the environment that products on a CPU are faster or slower by.
CPU_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *ISA_LIMITS, "ATEN_CPU_CAPABILITY")


def why_bf16_is_slow() -> str:
    """Returns why this machine's processor computes in bfloat16 only by emulation; empty where that is not known of it."""
    limit = next(((name, os.environ[name]) for name in ISA_LIMITS if os.environ.get(name)), ("", ""))
    if limit[1].upper() in WITHOUT_BF16:
        return f"{limit[0]}={limit[1]} allows no fast bf16"
    flags = processor_flags()
    return "this processor has no fast bf16" if flags and not FAST_BF16 & set(flags) else ""


def processor_flags() -> list[str]:
    """Returns the features of the processor; none where the system does not tell."""
    lines = (line for line in _cpuinfo() if line.lower().startswith(("flags", "features")))
    return sorted(next(lines, "").partition(":")[2].split())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def limit_on_addresses() -> str:
    """Returns that this process is limited in addresses, and what lifts that; empty where it is not."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    given = f"`ulimit -v` gives a process {format_bytes(limit)} of addresses"
    return f"{given}, of which torch takes more than of memory: `ulimit -v unlimited`"


def boot_id() -> str:
    """Returns the kernel's identifier of this machine since it started; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def n_cores() -> int:
    """Returns the cores that this process may keep busy: on more threads than its container's limit it would be held up."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_limit())))


def cpu_limit() -> float:
    """Returns the cores that this container or service may use at once, whatever others leave; infinite without a limit."""
    stated = _stated("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",))
    return min((quota / period for quota, period in stated if quota > 0), default=math.inf)


def memory_bytes() -> int:
    """Returns the machine's memory, or what this container or service may take of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stated = _stated("memory", ("memory.limit_in_bytes",), ("memory.max",))
    return min([physical, *(limit for (limit,) in stated)])


def memory_left() -> int:
    """Returns the memory that can still be taken here, of a limit without what the kernel cannot take back: all but cached files."""
    import psutil

    old = "memory.limit_in_bytes", "memory.stat total_rss", "memory.stat total_shmem"
    new = "memory.max", "memory.stat anon", "memory.stat shmem"
    left = (limit - sum(used) for limit, *used in _stated("memory", old, new))
    return max(0, min([psutil.virtual_memory().available, memory_bytes(), *left]))


def _stated(controller: str, old: Sequence[str], new: Sequence[str]) -> Iterator[list[int]]:
    """Yields the numbers in files of this process's control groups of either version and of those around them, where there are any.

    A container's are mounted without the path that the host knows them by. Some files have several numbers, each behind its key.
    """
    with contextlib.suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in GROUPS.read_text().splitlines()):
            if controllers and controller not in controllers.split(","):
                continue
            own, names = MOUNTED / (controllers and controller) / path.strip("/"), old if controllers else new
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # `max`
                    yield [int(word) for name in names for word in _words(folder, *name.split())]


def _words(folder: Path, name: str, key: str = "") -> list[str]:
    text = (folder / name).read_text()
    return re.findall(rf"^{key} (\d+)$", text, re.MULTILINE) if key else text.split()


def load_per_core() -> float:
    """Returns how many processes wanted each core in the last minute; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return 0.0


def processor_name() -> str:
    """Returns the model of the processor."""
    lines = _cpuinfo()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def check_ranks(ranks: int, where: str) -> None:
    """Refuses a number of ranks that must be a typing error."""
    most = MAX_RANKS_PER_CORE * max(MIN_COUNTED_CORES, len(os.sched_getaffinity(0)))
    if ranks > most:
        raise UserError(f"{where}: {ranks} ranks are more than this machine can hold at once ({most}); give fewer")
