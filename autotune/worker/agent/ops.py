"""DeepSpeed's compiled operations: build them before trials, and remove the locks of builds that were killed."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import sysconfig
from pathlib import Path

from autotune.errors import UserError
from autotune.space.legality import OPS
from autotune.system import toolkit

# What a compiler, a linker or a shell says that cannot go on.
CAUSE = re.compile(r"error: |cannot find |not found")


def build(name: str) -> None:
    """Compiles and loads one of DeepSpeed's ops, such as `cpu_adam`, so that trials find it built.

    A trial that is killed while it builds would leave torch's `lock` file, for which later trials wait for ever.

    Raises:
        UserError: DeepSpeed has no such op here, or it cannot be compiled.
    """
    from deepspeed.ops.op_builder.all_ops import ALL_OPS  # by name, those of this accelerator

    if name not in ALL_OPS:
        raise UserError(f"DeepSpeed has no op {name} on this accelerator")
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".building", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        remove_stale_locks()
        try:
            ALL_OPS[name].load(verbose=False)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            said = next((line for line in lines if CAUSE.search(line)), lines[-1])  # the last one is ninja's
            raise UserError(f"cannot build {name}: {said}") from error


def missing() -> dict[str, str]:
    """Returns the ops that cannot be compiled here, each with why and what to install; compiles nothing."""
    return {name: why for name in OPS if (why := why_missing(name))}


def why_missing(name: str) -> str:
    """Returns why an op cannot be compiled here, as far as that shows without trying; empty if it can, or if it is."""
    import deepspeed
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    if name not in ALL_OPS:
        return "DeepSpeed has none for this accelerator"
    if installed_ops.get(name) or list(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/-")).glob(f"{name}/{name}*.so")):
        return ""
    if lacks := [program for program in ("c++", "ninja") if shutil.which(program) is None]:
        return f"no {' and no '.join(lacks)} here: install g++ and ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "no Python.h here: install Python's headers (python3-dev)"
    cuda = isinstance(ALL_OPS[name], CUDAOpBuilder) and not torch.version.hip and torch.version.cuda
    if cuda and (why := _why_no_cuda()):
        return why
    # DeepSpeed looks for libaio by compiling and linking; what it found when the server asked holds for forked ranks.
    return "" if name != "async_io" or deepspeed.ops.__compatible_ops__[name] else "no libaio: install libaio-dev"


@functools.cache
def _why_no_cuda() -> str:
    """Returns why nvcc cannot compile for this torch; empty if it can."""
    import torch
    from deepspeed.ops.op_builder import builder

    wanted = f"install the CUDA toolkit {torch.version.cuda}, which torch was built with"
    if toolkit.toolkit(os.environ) is None:
        return f"no CUDA toolkit here (nvcc): {wanted}, and set CUDA_HOME"
    for header in ("cuda_runtime.h", "cublas_v2.h", "cusparse.h"):  # what torch's own headers include
        if not toolkit.has_header(header, os.environ):
            return f"the CUDA toolkit here lacks {header}: {wanted}"
    try:
        builder.assert_no_cuda_mismatch()
    except Exception as error:
        return f"{' '.join(str(error).split())}: {wanted}"
    return ""


def remove_stale_locks() -> list[str]:
    """Removes torch's build locks whose builder is dead, and returns their paths; a living one keeps its file open."""
    place = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = [lock for lock in Path(place).glob("**/lock") if lock.is_file()] if place else []
    held = _open_files() if locks else set()
    removed = []
    for lock in locks:
        if str(lock.resolve()) not in held:
            with contextlib.suppress(OSError):
                lock.unlink()
                removed.append(str(lock))
    return removed


def _open_files() -> set[str]:
    """Returns the paths that living processes have open, as far as this user may see."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor))
    return found
