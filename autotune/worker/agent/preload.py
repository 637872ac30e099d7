"""Preloading: the server imports the modules that ranks need, and finds out whether ranks can be forked from it."""

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.errors import LONGEST_REASON, shortened
from autotune.system.device import CHOOSE
from autotune.trial import folder
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, RankReport
from autotune.trial.workload import Workload
from autotune.worker import project
from autotune.worker.agent import temporary

# DeepSpeed imports these inside `initialize`, at more than a CPU-second a rank. Releases differ in which they have.
LAZY_MODULES = (
    "torch._dynamo",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "torch.utils.checkpoint",
)
# A rank's entry point, and the modes that it imports on demand.
RANK_MODULES = (
    "autotune.worker.run",
    "autotune.worker.profile.machine",
    "autotune.worker.profile.model",
    "autotune.worker.script.run",
)
# Importing these libraries must start no thread, or no rank could be forked.
NO_THREADS = {
    "TORCH_WARM_POOL": "0",  # inductor's pool of compilers, with Triton
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # the allocator of pyarrow, which `datasets` imports
}
# NVIDIA's driver loads with its management library (NVML) and starts this thread, from release 580 at the latest. A forked
# process can start CUDA all the same, as long as this one has not; what was seen: docs/develop/gpu.md.
_DRIVER_THREAD = re.compile(r"cuda[0-9a-f]{8,}")


def import_rank_modules() -> None:
    """Imports what a rank would else import in its measured phases, as time and memory of the trial."""
    with compiled_when_called():
        for name in LAZY_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    for name in RANK_MODULES:
        importlib.import_module(name)
    folder.prepare(TrialRequest, RankReport, Exit, Workload)


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Within, `torch.compile` as a decorator waits until one of the functions is called, then compiles them all.

    Any training imports DeepSpeed's Muon, whose decorators import inductor: more than a second for what few use.
    """
    import torch

    own: Any = torch.compile
    waiting: dict[Callable[..., Any], Callable[..., Any]] = {}
    ready: dict[Callable[..., Any], Callable[..., Any]] = {}

    def decorate(*args: Any, **options: Any) -> Any:
        if options or not args:
            return own(*args, **options)
        (function,) = args

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            while waiting:
                each, standing_in = waiting.popitem()
                ready[each], names = own(each), vars(sys.modules[each.__module__])
                # Those of one module call one another by their names, and are compiled into one another.
                if names.get(each.__name__) is standing_in:
                    names[each.__name__] = ready[each]
            return ready[function](*args, **kwargs)

        waiting[function] = call
        return call

    torch.compile = decorate
    try:
        yield
    finally:
        torch.compile = own


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports within take a third less time: they make a million objects that stay, which each collection visits."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class Preloaded:
    """State of the server after its imports.

    Attributes:
        cold: Why ranks cannot be forked from this process; empty if they can.
        culprits: What a module did when it was imported that does not survive a fork, by the item that imported it.
    """

    cold: str = ""
    culprits: dict[str, str] = field(default_factory=dict)


def hide_parts() -> dict[str, str]:
    """Hides the names of parts of cards (MIG) from this process; returns the variables with which ranks see them.

    Torch counts whole cards by NVML, but to count parts it starts CUDA, which does not survive a fork.
    """
    stated = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not stated.startswith("MIG-"):
        return {}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    return {"CUDA_VISIBLE_DEVICES": stated}


@uncollected()
def preload(modules: Sequence[str], parts: Mapping[str, str]) -> Preloaded:
    """Imports everything that ranks need.

    Args:
        modules: What the user's target imports, and sets before; see `Target.imports`.
        parts: Variables of ranks alone; see `hide_parts`.
    """
    variables = list(itertools.takewhile(lambda item: "=" in item, modules))
    temporary.set_ahead(variables)
    modules = modules[len(variables) :]
    for variable, value in NO_THREADS.items():
        os.environ.setdefault(variable, value)
    before = _traces()
    try:
        with _capability_from_a_fork():
            import deepspeed

            # Probing the ops compiles and links a libaio test program, which takes 0.3 s; forked ranks keep the result.
            deepspeed.ops.__compatible_ops__  # noqa: B018
        import_rank_modules()
    except Exception as error:
        return Preloaded(f"DeepSpeed could not be imported ahead: {type(error).__name__}: {error}")
    found = _what_did("deepspeed", before)
    culprits = _import_all(modules)
    cold = _unsafe_to_fork(parts)
    if cold and before:
        cold = f"Python itself, as it is set up here, {_listed(before.values())}"
    elif cold and (found or culprits):
        cold = ", ".join(filter(None, [found, *dict.fromkeys(culprits.values())]))
    if not cold:
        _freeze()
    return Preloaded(cold, culprits)


@contextlib.contextmanager
def _capability_from_a_fork() -> Iterator[None]:
    """Within, a forked process tells what CUDA devices can do: to ask starts CUDA, after which no rank could be forked.

    DeepSpeed before 0.19.3 asks as it is imported, in `is_compatible` of its op builders.
    """
    import torch

    own, asking = (torch.cuda.get_device_capability, torch.cuda.get_device_properties), True

    @functools.cache
    def asked(index: int) -> tuple[int, int]:
        code, said = _in_a_fork(lambda: [str(number) for number in own[0](index)])
        if code:
            raise RuntimeError(next(iter(said), f"device {index} does not answer"))
        return int(said[0]), int(said[1])

    # A module that keeps one of these two has the true one afterwards.
    def capability(device: Any = None) -> tuple[int, int]:
        return asked(device if isinstance(device, int) else 0) if asking else own[0](device)

    def properties(device: Any = None) -> Any:
        if not asking:
            return own[1](device)
        major, minor = capability(device)
        return SimpleNamespace(major=major, minor=minor)

    torch.cuda.get_device_capability, torch.cuda.get_device_properties = capability, properties
    try:
        yield
    finally:
        asking = False
        torch.cuda.get_device_capability, torch.cuda.get_device_properties = own


def preload_more(modules: Sequence[str]) -> bool:
    """Imports further modules between two trials, except those after which ranks could not be forked.

    A forked process imports them first, to find those exceptions.

    Returns:
        Whether ranks can still be forked from this process.
    """
    missing = [name for name in modules if name not in sys.modules]
    code, culprits = _in_a_fork(lambda: list(_import_all(missing))) if missing else (1, [])
    if code == 0:
        _import_all([name for name in missing if name not in culprits])
        _freeze()
    return not _traces()


def _freeze() -> None:
    from autotune.worker.script import patching

    patching.index_copies()
    gc.collect()
    gc.freeze()


@uncollected()
def _import_all(items: Sequence[str]) -> dict[str, str]:
    """Imports items; returns those that did what does not survive a fork, and what that was."""
    culprits = {}
    for item in items:
        before = _traces()
        _import_for_target(item)
        if what := _what_did(item.partition(":")[0], before):
            culprits[item] = what
    return culprits


def _what_did(name: str, before: Mapping[int, str]) -> str:
    """Returns what the import of a module left that does not survive a fork, in words; empty without any."""
    left = [words for trace, words in _traces().items() if trace not in before]
    return f"importing `{name}` {_listed(left)}" if left else ""


def _import_for_target(item: str) -> None:
    name, _, attributes = item.partition(":")
    try:
        if _is_users(name.partition(".")[0]):
            return  # what it does may depend on the rank, or on arguments
        module = importlib.import_module(name)
        for attribute in filter(None, attributes.split(",")):
            getattr(module, attribute, None)  # packages that import lazily do so now
    except BaseException as error:  # the ranks will meet it again and report it
        print(f"autotune: not preloaded: {name}: {error}", file=sys.stderr)


def _is_users(package: str) -> bool:
    """Returns whether a package is of the user's project, to which the working folder belongs."""
    spec = importlib.util.find_spec(package) if package not in sys.modules else None
    return spec is not None and any(map(project.holds, [spec.origin or "", *(spec.submodule_search_locations or ())]))


def _traces() -> dict[int, str]:
    """Returns what this process has that does not survive a fork: threads by their numbers, a device by 0, and words."""
    threads = {thread.native_id: f"started the thread `{thread.name}`" for thread in threading.enumerate()}
    tasks = {int(task): _task_name(int(task)) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()}
    found = {
        task: threads.get(task) or f"started the native thread `{name}`"
        for task, name in tasks.items()
        if not _DRIVER_THREAD.fullmatch(name)
    }
    torch: Any = sys.modules.get("torch")
    for kind in CHOOSE:
        if getattr(getattr(torch, kind, None), "is_initialized", bool)():
            found[0] = f"initialised {kind.upper()}"
    if _driver_started():
        found[0] = "initialised CUDA"
    return found


def _driver_started() -> bool:
    """Whether CUDA runs in this process, by torch or past it, as some libraries start it on import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)  # else: not initialised
    except (OSError, AttributeError):  # not loaded
        return False


def _listed(words: Iterable[str]) -> str:
    """Returns words in a list, each once, with the number of times that it occurs."""
    return ", ".join(word if n == 1 else f"{word} ({n} times)" for word, n in Counter(words).items())


def _task_name(task: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return str(task)


def _unsafe_to_fork(parts: Mapping[str, str]) -> str:
    """Returns why a process forked from this one could not run a rank; empty if it can."""
    if found := _traces():
        return f"something {_listed(found.values())}"
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    if kind != "cpu" and (failure := tried_in_a_fork(lambda: _start_device(parts))) is not None:
        return f"{kind.upper()} does not start in a forked process: {failure}"
    return ""


def _start_device(parts: Mapping[str, str]) -> None:
    """Starts the accelerator in another process than the server: counting devices may be enough to start it."""
    os.environ.update(parts)
    import torch
    from deepspeed.accelerator import get_accelerator

    restart_nvml()
    accelerator = get_accelerator()
    start = getattr(getattr(torch, accelerator.device_name(), None), "init", None)
    if start is not None and accelerator.is_available():
        start()
        # ZeRO 1 and 2 ask NVML; a device's UUID they read in no process.
        with contextlib.suppress(ValueError):
            accelerator.available_memory()


def restart_nvml() -> None:
    """Starts NVIDIA's management library in a forked process: what DeepSpeed started in the server answers there alone."""
    if (nvml := sys.modules.get("pynvml")) is not None:
        with contextlib.suppress(Exception):  # no driver
            nvml.nvmlInit()


def tried_in_a_fork(run: Callable[[], None]) -> str | None:
    """Runs a function in a forked process; returns why it failed, or None.

    Torch does not tell whether CUDA was used in a way that does not survive a fork: counting devices without NVML is
    enough, and leaves `torch.cuda.is_initialized()` false.
    """
    code, said = _in_a_fork(run)
    return None if code == 0 else next(iter(said), "") or f"exit status {code}"


def _in_a_fork(run: Callable[[], Sequence[str] | None]) -> tuple[int, list[str]]:
    """Runs a function in a forked process; returns the exit status, and the texts it returned or its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            said = json.dumps(run() or [])
            status = 0
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            said = json.dumps([shortened(f"{type(error).__name__}: {lines[0]}", LONGEST_REASON)])
        try:
            with open(write, "w") as pipe:
                pipe.write(f"{said}\n")
        finally:
            os._exit(status)
    os.close(write)
    with open(read) as pipe:
        message = pipe.readline()  # not to its end: what the process has forked, and left behind, holds it open
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(message) if message else []
