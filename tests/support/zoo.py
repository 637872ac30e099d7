"""Runs trials of the models in `models/`, and sees that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.executors import base
from autotune.executors.base import Executor
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.system.toolkit import extensions_dir
from autotune.trial.folder import TrialDir
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult
from support.paths import MODELS

# DeepSpeed would compile its own Adam for a minute; torch's runs at once.
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}

MIB = 1 << 20
CLEAN: dict[str, Any] = {"max_steps": 4, "budget_s": 0.0}
# Six steps, however little time they take.
STEPS: dict[str, Any] = {"max_steps": 6, "min_samples": 10**9, "budget_s": 60.0}


@dataclass(frozen=True)
class End:
    """How a trial of the zoo must end."""

    model: str
    outcome: Outcome
    reason: str
    phase: str
    rank: int | None = None
    what: dict[str, Any] | None = None


ENDS = [
    End("oom", Outcome.OOM, r"^rank \d grew to 3\d\d MiB, over the stated device memory of 300 MiB$", "warmup",
        what={"micro": 64, "device_memory_bytes": 300 * MIB}),
    End("oom_alloc", Outcome.OOM, r"can't allocate memory: you tried to allocate 70368744177664 bytes", "warmup"),
    End("hang", Outcome.TIMEOUT, r"^no end within 4 s; rank 0 waited for rank 1, which stood at hang.py:12 \(fault\)$", "measure",
        what={"deadline_s": 4.0}),
    End("crash_rank1", Outcome.CRASHED, r"^ValueError: rank 1 dislikes this batch$", "measure", rank=1),
    End("segv", Outcome.CRASHED, r"^rank 1 was killed by signal 11$", "measure", rank=1),
    End("exit0", Outcome.CRASHED, r"^rank \d exited with status 0 but wrote no result$", "measure"),
    End("nan", Outcome.DIVERGED, r"^the loss was not finite at step 4$", "measure"),
    End("import_error", Outcome.CRASHED, r"^ModuleNotFoundError: No module named 'a_package_that_nobody_has'$", "import"),
    End("wrong_batch", Outcome.NOT_APPLIED, r"^micro_batch_size: 4 was asked for, 2 ran$", "warmup"),
    End("raises", Outcome.CRASHED, r"^FileNotFoundError: no pretrained weights at weights.pt$", "build"),
    End("dataloader", Outcome.CRASHED, r"^dataloader.py: data\(\) returned a DataLoader; return its dataset, since .*$", "build"),
    End("tiny_data", Outcome.CRASHED, r"^data\(\) has 6 samples, but one optimizer step needs 8$", "build"),
]  # fmt: skip


class Zoo:
    """Runs trials of the zoo's models on one executor, each in a folder of its own.

    Attributes:
        folder: The files of the latest trial.
    """

    def __init__(self, executor: Executor, root: Path) -> None:
        self.executor, self.root, self.n = executor, root, 0
        self.folder = TrialDir(root)

    def request(self, model: str | Path, *, micro: int = 4, **what: Any) -> TrialRequest:
        """A request for a zoo model by name, or for any file; fields of `TrialRequest` go there, other names are knobs."""
        target = model if isinstance(model, Path) else MODELS / f"{model}.py"
        own = {name: what.pop(name) for name in tuple(what) if name in TrialRequest.__dataclass_fields__}
        config = {} if "def optimizer" in target.read_text() else ADAMW
        candidate = Candidate.of({"micro_batch_size": micro, **what})
        defaults = {"world_size": 2, "budget_s": 0.3, "deadline_s": 60.0}
        return TrialRequest(
            target=str(target),
            candidate=candidate.values(),
            ds_config=candidate.to_deepspeed(config),
            **{**defaults, **own},
        )

    def run(self, model: str | Path, on_tick: Callable[[], None] = lambda: None, **what: Any) -> TrialResult:
        """Runs a trial to its end."""
        return base.run(self.executor, self.next_folder().path, self.request(model, **what), on_tick)

    def next_folder(self) -> TrialDir:
        """The folder of the next trial."""
        self.n += 1
        self.folder = TrialDir(self.root / f"{self.n:04d}")
        return self.folder

    def printed(self, code: str) -> str:
        """What code prints in a process forked from the warm server: importing torch and DeepSpeed anew takes seconds."""
        target = self.next_folder().path.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{code}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
        result = base.run(self.executor, self.folder.path, self.request(target, world_size=1))
        assert "exited with status 0" in result.reason, result.reason
        return self.log(0)

    def log(self, rank: int) -> str:
        """What a rank of the latest trial printed."""
        return self.folder.log(rank).read_text(errors="replace")

    @property
    def server(self) -> psutil.Process:
        """The local executor's warm server."""
        assert isinstance(self.executor, LocalExecutor) and self.executor._server is not None
        return psutil.Process(self.executor._server.pid)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks now running, in the order of the ranks."""
        return sorted(self.server.children(), key=lambda process: process.pid)

    def entered(self, phase: str) -> bool:
        """Whether all ranks of the latest trial have come as far as a phase."""
        events = "".join(path.read_text() for path in self.folder.path.glob("events*.jsonl"))
        return events.count(f'"phase": "{phase}"') >= 2


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def unused(names: set[str]) -> set[str]:
    """Those of some files in /dev/shm that no process maps: another worker's trial still needs its own."""
    maps: list[str] = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            maps += [line.partition("/dev/shm/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line]
    return names - {name.removesuffix(" (deleted)") for name in maps} if names else names


def build_locks() -> list[Path]:
    """Locks of compilers on DeepSpeed's ops."""
    return list(extensions_dir().glob("**/lock"))


def assert_nothing_left(zoo: Zoo, shared_before: set[str]) -> None:
    """No process below the server, no file in /dev/shm, no build lock."""
    if isinstance(zoo.executor, LocalExecutor) and zoo.executor._server is not None:
        assert wait_until(lambda: zoo.server.children(recursive=True) == []), zoo.server.children(recursive=True)
    assert wait_until(lambda: not unused(shared_memory() - shared_before)), (
        f"left in /dev/shm: {unused(shared_memory() - shared_before)}"
    )
    assert wait_until(lambda: build_locks() == []), build_locks()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether a condition came true in time."""
    until = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return met
