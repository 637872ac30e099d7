"""The command `doctor`: the state of this machine, what would fail in a trial, and DeepSpeed's ops built ahead."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from autotune.cli.options import AsJson
from autotune.cli.terminal import fitted
from autotune.errors import UserError
from autotune.system import shared_memory, temporary
from autotune.system.machine import cache_dir, lock_path, memory_bytes, why_bf16_is_slow

if TYPE_CHECKING:
    from autotune.executors.local import LocalExecutor
    from autotune.trial.workload import Environment

OPS = ("fused_adam", "cpu_adam")
MOST_NAMED = 4  # files
WIDTH = 13  # of the longest name of a finding
LEAST_SHARED_BYTES = 64 << 20
LONGEST_BUILD_SECONDS = 30 * 60  # of an op, on a slow machine
PROBE = '''\
"""The smallest target there is: shows that a trial can run here."""
import torch


def model():
    return torch.nn.Linear(4, 1)


def batch(n):
    return torch.randn(n, 4), torch.randn(n, 1)
'''


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        verdict: `ok`, `warn` or `fail`.
        detail: Its state, and the remedy where it is not `ok`.
    """

    verdict: str
    what: str
    detail: str


def doctor(
    *,
    build: Annotated[bool, typer.Option("--build", help="Compile DeepSpeed's ops once.")] = False,
    as_json: AsJson = False,
) -> int:
    """Examine this machine, run the smallest possible trial, and print the findings.

    Returns:
        Exit status: 0 trials can run, 1 they cannot.
    """
    findings = []
    for finding in _examined(build=build):
        findings.append(finding)
        if not as_json:
            print(fitted(f"{finding.verdict:<5} {finding.what:<{WIDTH}}  {finding.detail}"), flush=True)
    runs = all(finding.verdict != "fail" for finding in findings)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        print("\nTrials can run here." if runs else "\nTrials cannot run here; put right what says `fail`.")
    return 0 if runs else 1


def _examined(*, build: bool) -> Iterator[Finding]:
    """The findings, each as soon as it is known."""
    yield Finding("ok", "python", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from (Finding("ok", name, metadata.version(name)) for name in ("torch", "deepspeed", "optuna"))
    yield from (_compiler(), *_left_locks(), _cache(), _shared_memory(), _memory())
    from autotune.system.toolkit import toolkit

    if (place := toolkit(os.environ)) is not None:
        yield Finding("ok", "CUDA toolkit", f"nvcc in {place}")
    print("- importing torch and DeepSpeed once, then running the smallest possible trial", file=sys.stderr)
    with temporary.folder("autotune-doctor") as folder:
        yield from _trial(folder, build=build)


def _compiler() -> Finding:
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    missing = [name for name in ("c++", "ninja") if shutil.which(name, path=path) is None]
    if missing:
        lost = "DeepSpeed cannot compile its ops (its own Adam, offload)"
        return Finding("warn", "compiler", f"{' and '.join(missing)} not found: {lost}")
    return Finding("ok", "compiler", "c++ and ninja found")


def _left_locks() -> Iterator[Finding]:
    """Locks of builds of ops that stopped half-way: a training without autotune waits for each without end.

    They are torch's (torch.utils.file_baton); trials build in a folder apart.
    """
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch_extensions")
    folder = Path(os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or cache))
    until = time.time() - LONGEST_BUILD_SECONDS
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):  # its build ends
            if lock.stat().st_mtime < until:
                yield Finding(
                    "warn", "op builds", f"{lock} is of a build that was stopped: trainings wait for it; remove it"
                )


def _cache() -> Finding:
    """The folder without which no study begins: it holds the lock of this machine, and profiles."""
    try:
        lock_path()
    except UserError as error:
        return Finding("fail", "cache", str(error))
    return Finding("ok", "cache", str(cache_dir()))


def _shared_memory() -> Finding:
    what = "shared memory"
    if not shared_memory.FOLDER.is_dir():
        return Finding("warn", what, "/dev/shm is missing: data loaders with workers will fail")
    if left := shared_memory.buffers():
        held = f"{len(left)} file(s) of dead DeepSpeed runs hold shared memory"
        more = f", and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        return Finding("warn", what, f"{held}; remove {', '.join(map(str, left[:MOST_NAMED]))}{more}")
    free = shutil.disk_usage(shared_memory.FOLDER).free
    detail = f"{free / 2**20:,.0f} MiB free in /dev/shm"
    if free > LEAST_SHARED_BYTES:
        return Finding("ok", what, detail)
    few = "too little for data loaders with workers, and for NCCL between GPUs that are not linked"
    return Finding("warn", what, f"{detail}, {few}: give a container more (`--shm-size=8g` or `--ipc=host`)")


def _memory() -> Finding:
    import psutil

    most = memory_bytes()
    free = min(psutil.virtual_memory().available, most)
    return Finding("ok", "memory", f"{free / 2**30:.1f} of {most / 2**30:.1f} GiB available")


def _trial(folder: Path, *, build: bool) -> Iterator[Finding]:
    """Findings of a warm server, a trial in it, and the ops that it builds."""
    from autotune.executors import base
    from autotune.executors.local import LocalExecutor
    from autotune.study.setup.devices import of_ranks
    from autotune.trial import failures
    from autotune.trial.folder import TrialDir, read_record
    from autotune.trial.request import TrialRequest
    from autotune.trial.result import Outcome
    from autotune.trial.workload import Workload

    target = folder / "model.py"
    target.write_text(PROBE)
    executor = LocalExecutor(["torch"], folder / "server.log")
    try:
        try:
            executor.start()
        except UserError as error:
            yield Finding("fail", "server", str(error))
            return
        result = base.run(executor, folder / "inspect", TrialRequest(target=str(target), mode="inspect"))
        if result.outcome is not Outcome.COMPLETE:
            yield Finding("fail", "worker", result.reason)
            return
        here = read_record(TrialDir(folder / "inspect").workload, Workload).environment
        here = of_ranks(here, here.n_devices)
        yield from _devices(here)
        types = ["fp32", *(["bf16"] if here.bf16 else []), *(["fp16"] if here.fp16 else [])]
        slow = why_bf16_is_slow() if here.accelerator == "cpu" and here.bf16 else ""
        note = f"; bf16 is emulated: {slow}, so it is slower than fp32" if slow else ""
        yield Finding("warn" if slow else "ok", "precisions", ", ".join(types) + note)
        cold = executor.cold_reason
        yield Finding("warn" if cold else "ok", "warm server", cold or "ranks are forked")
        ranks = here.n_devices if here.accelerator != "cpu" else 2
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        request = TrialRequest(
            target=str(target), candidate={"micro_batch_size": 2}, world_size=ranks, budget_s=1.0, deadline_s=120,
            ds_config={"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer},
        )  # fmt: skip
        result = base.run(executor, folder / "trial", request)
        good = result.outcome is Outcome.COMPLETE
        detail = f"{ranks} rank(s), {result.wall_s:.1f} s" if good else result.end
        if advice := failures.advice(result.outcome, result.reason, on_device=here.accelerator != "cpu"):
            detail += f". {advice}"
        yield Finding("ok" if good else "fail", "trial", detail)
        for op in OPS:
            if why := here.missing_ops.get(op):
                yield Finding("warn", op, f"cannot be built, so configurations that need it are not tried: {why}")
            elif build:
                print(f"- building DeepSpeed's {op} (a minute or two the first time)", file=sys.stderr)
                yield _built(executor, op)
            else:
                yield Finding("ok", op, "can be built, as far as its compiler and headers tell (--build tries)")
    finally:
        executor.close()


def _devices(here: Environment) -> list[Finding]:
    """Findings about the device: what it is, how much of it is free, what speaks against it."""
    capability = f", capability {here.capability}" if here.capability else ""
    uuid = f", {here.each[0].uuid}" if here.each and here.each[0].uuid else ""
    name = f"{here.n_devices} x {here.accelerator}: {here.device_name}{capability}{uuid}"
    found = [Finding("ok", "device", name), *(Finding("warn", "device", remark) for remark in here.remarks)]
    if here.free_bytes:
        free, held = min(here.free_bytes), here.held_by_others_bytes(here.n_devices)
        detail = f"{free / 2**30:.1f} of {here.device_memory_bytes / 2**30:.1f} GiB free on the fullest device"
        found.append(Finding("warn" if held else "ok", "device memory", detail))
    return found


def _built(executor: LocalExecutor, op: str) -> Finding:
    from autotune.system.toolkit import extensions_dir

    if failure := executor.build_op(op):
        return Finding("warn", op, f"cannot be built, so configurations that need it fail: {failure}")
    return Finding("ok", op, f"built in {extensions_dir()}")
