"""Preloading: the server imports the modules that ranks need, and finds out whether ranks can be forked from it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

# DeepSpeed imports these inside `initialize`, at 2.4 CPU-seconds a rank. Releases differ in which they have.
LAZY_MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
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


def import_rank_modules() -> None:
    """Imports what a rank would else import in its measured phases, as time and memory of the trial."""
    for name in LAZY_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in RANK_MODULES:
        importlib.import_module(name)


def preload(modules: Sequence[str]) -> str | None:
    """Imports everything that ranks need.

    Args:
        modules: What the user's target imports, as `module` or `module:name,name`.

    Returns:
        Why ranks cannot be forked from this process; None if they can.
    """
    sys.path.insert(0, os.getcwd())
    for variable, value in NO_THREADS.items():
        os.environ.setdefault(variable, value)
    try:
        import deepspeed
        import torch

        import_rank_modules()
        # Probing the ops compiles and links a libaio test program, which takes 0.3 s; forked ranks keep the result.
        deepspeed.ops.__compatible_ops__  # noqa: B018
    except Exception as error:
        return f"DeepSpeed could not be imported ahead: {type(error).__name__}: {error}"
    starter = "DeepSpeed" if torch.cuda.is_initialized() else ""
    for item in modules:
        _import_for_target(item)
        if not starter and torch.cuda.is_initialized():
            starter = item.partition(":")[0]
    reason = _unsafe_to_fork(starter)
    if reason is None:
        gc.collect()
        gc.freeze()
    return reason


def _import_for_target(item: str) -> None:
    name, _, attributes = item.partition(":")
    try:
        module = importlib.import_module(name)
        for attribute in filter(None, attributes.split(",")):
            getattr(module, attribute, None)  # packages that import lazily do so now
    except BaseException as error:  # the ranks will meet it again and report it
        print(f"autotune: not preloaded: {name}: {error}", file=sys.stderr)


def _unsafe_to_fork(starter: str) -> str | None:
    """Why ranks cannot be forked.

    Args:
        starter: What had initialised CUDA once it was imported, if anything had.
    """
    import torch

    if torch.cuda.is_initialized():
        what = f"importing {starter}" if starter else "an imported module"
        return f"{what} initialised CUDA, which does not survive a fork"
    if torch.cuda.is_available() and (failure := tried_in_a_fork(torch.cuda.init)) is not None:
        return f"CUDA does not start in a forked process: {failure}"
    if threading.active_count() > 1:
        return f"an imported module started threads: {', '.join(thread.name for thread in threading.enumerate()[1:])}"
    n_threads = len(os.listdir("/proc/self/task"))
    if n_threads > 1:
        return f"an imported module started {n_threads - 1} native threads"
    return None


def tried_in_a_fork(run: Callable[[], object]) -> str | None:
    """Runs a function in a forked process; returns why it failed, or None.

    Torch does not tell whether CUDA was used in a way that does not survive a fork: counting devices without NVML is
    enough, and leaves `torch.cuda.is_initialized()` false.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            os.write(write, f"{type(error).__name__}: {lines[0]}"[:500].encode())
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        message = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else message.decode(errors="replace") or f"exit status {code}"
