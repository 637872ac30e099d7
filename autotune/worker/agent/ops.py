"""DeepSpeed's compiled operations: build them before trials, and remove the locks of builds that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def build(names: Sequence[str]) -> int:
    """Compiles and loads DeepSpeed ops, so that trials find them built; returns an exit status.

    A trial that is killed while it builds would leave torch's `lock` file, on which later trials wait for ever.

    Args:
        names: Names of their builders, as `cpu_adam`.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with open(folder / ".building", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        remove_stale_locks()
        for name in names:
            start = time.monotonic()
            try:
                _builder(name)().load(verbose=False)
                print(f"built {name} in {time.monotonic() - start:.1f} s")
            except Exception as error:
                failed = 1
                print(f"cannot build {name}: {error}", file=sys.stderr)
    return failed


def _builder(name: str) -> type:
    from deepspeed.accelerator import get_accelerator

    class_name = "".join(part.capitalize() for part in name.split("_")) + "Builder"
    class_name = class_name.replace("Cpu", "CPU")
    builder = get_accelerator().get_op_builder(class_name)
    if builder is None:
        raise ValueError(f"DeepSpeed has no op {name} ({class_name}) on this accelerator")
    return builder  # type: ignore[no-any-return]


def remove_stale_locks(folder: Path | None = None) -> list[str]:
    """Removes torch's build locks whose builder is dead; a living one keeps its file open.

    Args:
        folder: Where ops are built; by default the one that torch is told of, if any.

    Returns:
        Paths of the locks.
    """
    if folder is None and "TORCH_EXTENSIONS_DIR" in os.environ:
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    locks = [lock for lock in folder.glob("**/lock") if lock.is_file()] if folder else []
    held = _open_files() if locks else set()
    removed = []
    for lock in locks:
        if str(lock.resolve()) not in held:
            with contextlib.suppress(OSError):
                lock.unlink()
                removed.append(str(lock))
    return removed


def _open_files() -> set[str]:
    """Paths that living processes have open, as far as this user may see."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor))
    return found
