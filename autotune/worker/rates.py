"""What this machine does in a second, measured by all ranks at once as they will share it: products, memory, messages, an optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from autotune import trial
from autotune.predict.profile import Machine
from autotune.trial import TrialRequest
from autotune.worker import observe
from autotune.worker import run as rank_run

if TYPE_CHECKING:
    from autotune.worker.run import Recorder

# Each rate is the best of what fits into this time, which is short enough that nobody waits and long enough for a quiet moment.
BUDGET_S = 0.25
MATRIX = {"cpu": 512, "cuda": 4096}
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
MESSAGES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
OPTIMISED = {"cpu": 1 << 20, "cuda": 1 << 25}
TINY = 64


def measure_machine(recorder: Recorder, request: TrialRequest, rank: int, listener: int) -> None:
    """Measures in every rank of the request; rank 0 writes what all of them agree on."""
    memory = rank_run.prepare_device(request)
    recorder.enter("build")
    rank_run.connect(request, rank, listener, cuda=memory.cuda)
    device = torch.device("cuda" if memory.cuda else "cpu")
    kind = device.type
    workspace, kernels = (0.0, 0.0) if memory.cuda else _host_memory(request, memory.start_bytes)
    n = MATRIX[kind]
    flops = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        flops[name] = 2.0 * n**3 / _best(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    flops |= {"fp16": flops["bf16"], "torch_autocast": flops["bf16"], "torch_autocast_fp16": flops["bf16"]}
    source = torch.empty(COPIED_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2.0 * COPIED_BYTES[kind] / _best(lambda: target.copy_(source), device)
    small = torch.ones(16, device=device)
    op_s = _best(lambda: [small.add(1.0) for _ in range(100)], device) / 100
    alpha, link = _messages(device, request.world_size)
    machine = Machine(
        accelerator=kind,
        world_size=request.world_size,
        flops={name: _agreed(rate, device) for name, rate in flops.items()},
        memory_bytes_per_s=_agreed(copied, device),
        link_alpha_s=alpha,
        link_bytes_per_s=link,
        host_bytes_per_s=_host_link(device) if memory.cuda else _agreed(copied, device),
        # Autograd and Python come on top of what the operation itself costs.
        op_s=2.0 * op_s,
        optimizer_bytes_per_s=_agreed(_optimizer(device, OPTIMISED[kind]), device),
        workspace_bytes=_agreed(workspace, device),
        kernel_bytes=_agreed(kernels, device),
        measured=True,
    )
    if rank == 0:
        trial.write(recorder.folder.machine, machine)


def _best(run: Callable[[], Any], device: torch.device) -> float:
    """Shortest time of one run, after one that warms up."""
    run()
    best, until = float("inf"), time.perf_counter() + BUDGET_S
    while time.perf_counter() < until:
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _agreed(value: float, device: torch.device) -> float:
    """The mean over the ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _messages(device: torch.device, world_size: int) -> tuple[float, float]:
    """Latency and bandwidth of all-reduces: t = 2 (N - 1) alpha + 2 (N - 1) / N bytes / beta, from the smallest and the largest."""
    usual = Machine.guess(device.type, world_size)
    if world_size == 1:
        return usual.link_alpha_s, usual.link_bytes_per_s
    times = []
    for size in MESSAGES:
        tensor = torch.ones(size // 4, device=device)
        found = []
        for _ in range(8):  # the same number in every rank, or one would wait for ever
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            _synchronize(device)
            found.append(time.perf_counter() - start)
        slowest = torch.tensor(min(found), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(float(slowest))
    hops, ring = 2.0 * (world_size - 1), 2.0 * (world_size - 1) / world_size
    slope = max((times[-1] - times[0]) / (MESSAGES[-1] - MESSAGES[0]), 1e-13)
    return max(times[0] - slope * MESSAGES[0], 1e-7) / hops, ring / slope


def _optimizer(device: torch.device, size: int) -> float:
    """Bytes per second at which Adam moves the 28 bytes of each parameter."""
    parameter = nn.Parameter(torch.zeros(size, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    return 28.0 * size / _best(optimizer.step, device)


def _host_link(device: torch.device) -> float:
    size = 1 << 28
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _best(lambda: there.copy_(pinned, non_blocking=True), device)


def _host_memory(request: TrialRequest, start_bytes: int) -> tuple[float, float]:
    """Resident memory that training takes besides tensors, and what 16-bit arithmetic adds: from a tiny model under DeepSpeed.

    The tiny model's own tensors are some hundred kilobytes.
    """
    import deepspeed

    model = nn.Sequential(nn.Linear(TINY, TINY), nn.GELU(), nn.LayerNorm(TINY), nn.Linear(TINY, TINY))
    config = {
        "train_micro_batch_size_per_gpu": TINY,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 16},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed(dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(TINY, TINY)
    grown = []
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                y = engine(x)
            engine.backward(y.float().square().mean())
            engine.step()
        observe.hand_back_freed_memory()
        grown.append(float(max(0, observe.resident_bytes() - start_bytes)))
    return grown[0], max(0.0, grown[1] - grown[0])
