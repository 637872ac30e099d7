"""The life of a rank: prepare the device, join the other ranks, report, and end the process."""

import contextlib
import os
import platform
import random
import re
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from autotune.errors import LONGEST_REASON, UserError, shortened
from autotune.space import torch_settings
from autotune.system.device import stated_choice
from autotune.system.machine import memory_left, n_cores, processor_name
from autotune.trial import workload
from autotune.trial.failures import FULL_FREE_SHARE, headline, means_out_of_memory
from autotune.trial.request import TrialRequest
from autotune.trial.result import OOM_EXIT_CODE, Outcome, RankReport
from autotune.worker.agent import network, temporary
from autotune.worker.device import accelerator, device_of, driver_version, kind
from autotune.worker.measure.device_load import DeviceWatch
from autotune.worker.measure.ledger import Diverged, NotApplied, TooFewSteps
from autotune.worker.measure.memory import Memory, limit_host_memory, resident_bytes
from autotune.worker.measure.recorder import Recorder
from autotune.worker.measure.witnesses import recomputations
from autotune.worker.script import patching

# What DeepSpeed's dynamic loss scaling ends a training of fp16 with, before the ledger has counted as many skips as it allows
# (runtime/fp16/loss_scaler.py).
AT_LEAST_SCALE = "loss scale already at minimum"


def complete(recorder: Recorder) -> NoReturn:
    """Reports success, and ends the process when all ranks have done so."""
    recorder.check_memory()
    temporary.note_imports(patching.imported_since())
    if recorder.report.outcome is not Outcome.STOPPED_EARLY:
        recorder.report.outcome = Outcome.COMPLETE
    recorder.enter("done")
    recorder.write()
    if dist.is_initialized():
        # Peers may still be in a collective; an early exit would kill them there.
        with contextlib.suppress(Exception):
            dist.barrier()
    _leave(0)


def abort(recorder: Recorder, error: BaseException) -> NoReturn:
    """Reports an error and ends the process."""
    with contextlib.suppress(Exception):  # the user's code may have closed standard error
        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # a full disk; the exit status tells as much
        recorder.fail(*classify(error))
    _leave(OOM_EXIT_CODE if recorder.report.outcome is Outcome.OOM else 1)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # interpreter teardown costs seconds and may hang in native threads


def classify(error: BaseException) -> tuple[Outcome, str]:
    """Returns the outcome of a trial that ends with an error, and the reason."""
    text = str(error).strip()
    first, free = headline(text) or _statement(error), _free_share()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or means_out_of_memory(text, free):
        what = " (host memory that was to be pinned)" if _was_pinning(error, text, free) else ""
        return Outcome.OOM, shortened(f"{type(error).__name__}: {first}", LONGEST_REASON) + what
    if isinstance(error, Diverged):
        return Outcome.DIVERGED, first
    if AT_LEAST_SCALE in text:
        return Outcome.DIVERGED, f"updates were skipped at every loss scale because gradients were not finite ({first})"
    if isinstance(error, NotApplied):
        return Outcome.NOT_APPLIED, first
    if isinstance(error, TooFewSteps):
        return Outcome.TOO_FEW_STEPS, first
    if isinstance(error, UserError):
        return Outcome.CRASHED, first
    return Outcome.CRASHED, shortened(f"{type(error).__name__}: {first}".removesuffix(": "), LONGEST_REASON)


def _statement(error: BaseException) -> str:
    """Returns the line of code that raised an error without a text, as a bare `assert` does; empty if it is not known."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f"`{frame.line}` at {Path(frame.filename).name}:{frame.lineno}" for frame in last if frame.line)


def _was_pinning(error: BaseException, text: str, free_share: float | None) -> bool:
    """Whether host memory that was to be pinned ran out, of which CUDA says no more than of a device: `out of memory`.

    Torch's allocator for devices says more. A loader's thread that pins has only its message, which may mean a full device, too.
    """
    if isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():
        return False
    called = traceback.extract_tb(error.__traceback__)[-1:]
    asked = any(re.search(r"pin_memory|pinned", f"{frame.name} {frame.line}") for frame in called)
    return asked or ("in pin memory thread" in text and (free_share or 0.0) >= FULL_FREE_SHARE)


def _free_share() -> float | None:
    """Free share of this rank's GPU; None without one, and 1 where a fault has left CUDA without an answer."""
    if not torch.cuda.is_initialized():
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except Exception:  # a full device still answers
        return 1.0
    return float(free / total)


def watch_memory(recorder: Recorder, request: TrialRequest) -> None:
    """Limits the rank's memory on a CPU to the stated size, otherwise to its share of the free memory."""
    if kind() != "cpu":
        return  # `prepare_device` does so, once it has looked at the device
    limit = request.device_memory_bytes
    stated = limit is not None
    share = limit if limit is not None else int(0.9 * memory_left() / request.ranks_per_node)
    start = resident_bytes()

    def on_excess(growth: int) -> None:
        whose = "the stated device memory" if stated else "its share of this machine's free memory"
        recorder.fail(
            Outcome.OOM,
            f"rank {recorder.report.rank} grew to {growth / 2**20:.0f} MiB, over {whose} of {share / 2**20:.0f} MiB",
        )
        os._exit(OOM_EXIT_CODE)

    recorder.check_memory = limit_host_memory(start, share, on_excess)


def device_name() -> str:
    """Returns the model of this rank's device, or of the processor if there is none."""
    here = kind()
    return processor_name() if here == "cpu" else device_of(here, accelerator().current_device()).name


def versions() -> dict[str, str]:
    """Returns the libraries that a measurement depends on, and the driver."""
    import deepspeed

    found = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if kind() == "cuda":
        name, version = ("rocm", torch.version.hip) if torch.version.hip else ("cuda", torch.version.cuda)
        found |= {name: str(version), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found |= {"driver": driver} if (driver := driver_version()) else {}
    return found


def _identify(report: RankReport) -> None:
    """Notes on which machine, device and libraries a rank runs."""
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items())
    cores = f", {n_cores()} cores" if kind() == "cpu" else ""
    report.host, report.machine = socket.gethostname(), f"{device_name()}{cores}, {libraries}"


def prepare_device(request: TrialRequest, report: RankReport) -> Memory:
    """Gives the rank its GPU and its share of the cores, notes in its report where it runs, and starts to measure its memory."""
    here = kind()
    watch = DeviceWatch() if here == "cuda" else None  # before this rank is on the device
    if here != "cpu":
        _take_device(request.device_memory_bytes)
    if any(name.startswith("activation_checkpointing.") for name in request.changed_from):
        from deepspeed.runtime.activation_checkpointing import checkpointing

        recomputations.watch(checkpointing.CheckpointFunction, "forward")
    if (tf32 := request.candidate.get(torch_settings.TF32)) is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # On CUDA too: an offloaded optimizer runs on the host, where each rank would take all cores.
    torch.set_num_threads(
        workload.threads_per_rank(n_cores(), request.ranks_per_node, os.environ.get("OMP_NUM_THREADS"))
    )
    memory = Memory(here, watch)
    _identify(report)
    return memory


def _take_device(limit_bytes: int | None) -> None:
    """Makes the rank's device the current one, and limits what its allocator may take of it."""
    device, n_devices = int(os.environ["LOCAL_RANK"]), accelerator().device_count()
    if device >= n_devices:
        choice = f" ({stated})" if (stated := stated_choice(os.environ)) else ""
        raise UserError(
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks on a machine with {n_devices} visible devices{choice}: start fewer ranks,"
            " or make more devices visible"
        )
    accelerator().set_device(device)
    cap = getattr(getattr(torch, kind(), None), "set_per_process_memory_fraction", None)
    if limit_bytes is not None and cap is not None:
        cap(min(1.0, limit_bytes / accelerator().total_memory(device)), device)


def connect(request: TrialRequest) -> None:
    """Joins the other ranks, over NCCL on CUDA devices, over gloo on the CPU."""
    rank, listener = int(os.environ["RANK"]), int(os.environ.pop(network.LISTENER, "-1"))
    timeout = timedelta(seconds=request.deadline_s + 60)  # the supervisor's deadline comes first
    # DeepSpeed's own groups do not take init_distributed's time-out; NCCL's default is another one, of ten minutes.
    dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = timeout
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # In torch 2.6 the default backend, libuv, takes no socket that listens already.
    own: dict[str, Any] = {"master_listen_fd": listener, "use_libuv": False} if rank == 0 else {}
    if rank > 0 and listener >= 0:
        socket.close(listener)
    store = dist.TCPStore(
        host, port, request.world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False, **own
    )
    options: dict[str, Any] = {"device_id": _bound_device(request.world_size)} if kind() == "cuda" else {}
    dist.init_process_group(
        _backend(), store=store, rank=rank, world_size=request.world_size, timeout=timeout, **options
    )


def join_on_host() -> None:
    """Has collectives of all ranks take tensors in host memory, too, over gloo; all ranks take part.

    torch does so where a script joins the ranks without naming a backend, or names both (distributed_c10d.py,
    BackendConfig). Groups that DeepSpeed makes stay as they are.
    """
    group: Any = dist.group.WORLD
    host, joined = torch.device("cpu"), dist.distributed_c10d
    if host in group._device_types:
        return
    store = dist.PrefixStore("cpu/", joined._get_default_store())
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), joined.default_pg_timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(host, dist.ProcessGroup.BackendType.GLOO, gloo)


def _bound_device(world_size: int) -> torch.device | None:
    """The device that NCCL is told, as DeepSpeed tells it where it starts NCCL itself.

    Without, a barrier guesses the device from the rank's number, which is wrong where trials leave devices of several
    machines free. Releases before 2.7.1 hang with it (pytorch issue 153960).
    """
    if world_size == 1 or torch.__version__ < "2.7.1":
        return None
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _backend() -> str:
    """The backend of the accelerator; DeepSpeed's for the CPU, ccl, is seldom there."""
    return "gloo" if kind() == "cpu" else str(accelerator().communication_backend_name())


def set_seed(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # DeepSpeed is asked, since torch 2.6 may start CUDA to tell whether it is there, also in a trial on the CPU.
    if kind() != "cpu":
        torch.manual_seed(seed)
    else:  # which would note the stack, with its source lines, for each kind of accelerator that may yet appear: 15 ms
        torch.default_generator.manual_seed(seed)
