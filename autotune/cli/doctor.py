"""What this machine has, what would fail in a trial, and DeepSpeed's ops built ahead."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.system.machine import extensions_dir
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.workload import Workload

OPS = ("fused_adam", "cpu_adam")
PROBE = '''\
"""The smallest target there is: shows that a trial can run here."""
import torch


def model():
    return torch.nn.Linear(4, 1)


def batch(n):
    return torch.randn(n, 4), torch.randn(n, 1)
'''


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        verdict: `ok`, `warn` or `fail`.
        what: What was looked at.
        detail: What was found, and what to do about it.
    """

    verdict: str
    what: str
    detail: str


def examine(*, build: bool, on_step: Callable[[str], None]) -> list[Finding]:
    """Looks at everything that a trial needs, and runs the smallest possible one.

    Args:
        build: Compile DeepSpeed's ops too, which takes a minute or two the first time.
        on_step: Told what is done next.
    """
    findings = [_python(), *_libraries(), _compiler(), _shared_memory(), _memory()]
    on_step("running the smallest possible trial")
    with tempfile.TemporaryDirectory(prefix="autotune-doctor-") as name:
        findings += _trial(Path(name), build=build, on_step=on_step)
    return findings


def _python() -> Finding:
    return Finding("ok", "python", f"{sys.version.split()[0]} in {sys.prefix}")


def _libraries() -> list[Finding]:
    return [Finding("ok", name, metadata.version(name)) for name in ("torch", "deepspeed", "optuna")]


def _compiler() -> Finding:
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    missing = [name for name in ("c++", "ninja") if shutil.which(name, path=path) is None]
    if missing:
        return Finding(
            "warn",
            "compiler",
            f"{' and '.join(missing)} not found: DeepSpeed cannot compile its ops (its own Adam, offload)",
        )
    return Finding("ok", "compiler", "c++ and ninja found")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("warn", "shared memory", "/dev/shm is missing: data loaders with workers will fail")
    free = shutil.disk_usage(folder).free
    left = list(folder.glob("deepspeed_allreduce_buffer_*"))
    if left:
        return Finding(
            "warn",
            "shared memory",
            f"{len(left)} files of dead DeepSpeed runs in /dev/shm hold memory; remove deepspeed_allreduce_buffer_*",
        )
    return Finding("ok" if free > 64 << 20 else "warn", "shared memory", f"{free / 2**20:,.0f} MiB free in /dev/shm")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    return Finding("ok", "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available")


def _trial(folder: Path, *, build: bool, on_step: Callable[[str], None]) -> list[Finding]:
    target = folder / "model.py"
    target.write_text(PROBE)
    executor = LocalExecutor(["torch"], folder / "server.log")
    try:
        executor.start()
    except UserError as error:
        return [Finding("fail", "server", str(error))]
    try:
        result = base.run(executor, folder / "inspect", TrialRequest(target=str(target), mode="inspect"))
        if result.outcome is not Outcome.COMPLETE:
            return [Finding("fail", "worker", result.reason)]
        environment = read_record(TrialDir(folder / "inspect").workload, Workload).environment
        findings = [
            Finding("ok", "device", f"{environment.n_devices} x {environment.accelerator}: {environment.device_name}")
        ]
        types = ["fp32", *(["bf16"] if environment.bf16 else []), *(["fp16"] if environment.fp16 else [])]
        findings.append(Finding("ok", "precisions", ", ".join(types)))
        warm = (
            Finding("warn", "warm server", executor.cold_reason)
            if executor.cold_reason
            else Finding("ok", "warm server", "ranks are forked")
        )
        findings.append(warm)
        ranks = environment.n_devices if environment.accelerator == "cuda" else 2
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        request = TrialRequest(
            target=str(target),
            candidate={"micro_batch_size": 2},
            ds_config=config,
            world_size=ranks,
            budget_s=1.0,
            deadline_s=120,
        )
        result = base.run(executor, folder / "trial", request)
        good = result.outcome is Outcome.COMPLETE
        detail = f"{ranks} rank(s), {result.wall_s:.1f} s" if good else f"{result.outcome}: {result.reason}"
        findings.append(Finding("ok" if good else "fail", "trial", detail))
        if build:
            on_step(f"building DeepSpeed's {' and '.join(OPS)} (the first time takes a minute or two)")
            findings += [_built(executor, op) for op in OPS]
        return findings
    finally:
        executor.close()


def _built(executor: LocalExecutor, op: str) -> Finding:
    failure = executor.build_ops([op])
    if failure:
        return Finding("warn", op, f"cannot be built, so configurations that need it fail: {failure}")
    return Finding("ok", op, f"built in {extensions_dir()}")


def doctor(*, build: bool, as_json: bool) -> int:
    """`autotune doctor`: what this machine has and what would fail; compiles DeepSpeed's ops once.

    Returns:
        Exit status: 0 trials can run, 1 they cannot.
    """
    findings = examine(build=build, on_step=lambda text: print(f"- {text}", file=sys.stderr))
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.verdict:<5} {finding.what:<{width}}  {finding.detail}")
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0
