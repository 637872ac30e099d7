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
    """Compiles and loads DeepSpeed ops such as `cpu_adam`, so that trials find them built; returns an exit status.

    A trial that is killed while it builds would leave torch's `lock` file, for which later trials wait for ever.
    """
    from deepspeed.ops.op_builder.all_ops import ALL_OPS  # by name, those of this accelerator

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with open(folder / ".building", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        remove_stale_locks()
        for name in names:
            start = time.monotonic()
            try:
                if name not in ALL_OPS:
                    raise ValueError("DeepSpeed has no such op on this accelerator")
                ALL_OPS[name].load(verbose=False)
                print(f"built {name} in {time.monotonic() - start:.1f} s")
            except Exception as error:
                failed = 1
                print(f"cannot build {name}: {error}", file=sys.stderr)
    return failed


def remove_stale_locks(folder: Path | None = None) -> list[str]:
    """Removes torch's build locks whose builder is dead, and returns their paths; a living one keeps its file open."""
    place = folder or os.environ.get("TORCH_EXTENSIONS_DIR")
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
