"""Checks torch's CUDA build on a machine without a device: it is one sentence or nothing, ranks fork, and a trial completes."""

import os
import sys
import tempfile
from pathlib import Path

import torch

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.system import device
from autotune.trial.request import TrialRequest

MODEL = Path(__file__).parent.parent / "tests" / "models" / "ok.py"


def main() -> None:
    """Ends with a sentence where something is not as it should be."""
    if not torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is no CUDA build")
    here = device.here()
    if here.accelerator == "cpu" and not device.unused_device() and here.problem:
        sys.exit(f"no device is here, and that is called a problem: {here.problem}")
    if torch.cuda.is_initialized():
        sys.exit("the driver initialised CUDA")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    request = TrialRequest(
        target=str(MODEL), candidate={"micro_batch_size": 2, "zero_stage": 1}, world_size=1, ds_config=config, budget_s=0.3
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        executor = LocalExecutor(["torch"], Path(name) / "server.log")
        try:
            executor.start()
            assert executor._server is not None
            threads = len(os.listdir(f"/proc/{executor._server.pid}/task"))
            result = base.run(executor, Path(name) / "trial", request)
        finally:
            executor.close()
    if executor.cold_reason or threads != 1:
        sys.exit(f"ranks cannot be forked from the server, which has {threads} threads: {executor.cold_reason}")
    if result.outcome != "complete":
        sys.exit(f"a trial ended with {result.outcome}: {result.reason}")
    print(
        f"torch {torch.__version__} with CUDA {torch.version.cuda}: {threads} thread in the server, a trial completes"
    )


if __name__ == "__main__":
    main()
