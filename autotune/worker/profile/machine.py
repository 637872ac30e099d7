"""Speed of the machine, measured by all ranks at once: matrix products, memory, messages, optimizer, data.

The mode `rates` takes seconds and measures what forecasts need; `machine` does so by precision, collective and size.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from autotune.system.machine import n_cores
from autotune.trial import folder
from autotune.trial.links import RINGS, Link, LoaderRate, Probe, fit
from autotune.trial.profile import Machine
from autotune.trial.request import TrialRequest
from autotune.worker.containers import DTYPES
from autotune.worker.data.loader import Loader
from autotune.worker.device import device_of
from autotune.worker.measure import malloc
from autotune.worker.measure.laps import synchronize
from autotune.worker.measure.memory import resident_bytes
from autotune.worker.model import model_file
from autotune.worker.profile.op_counter import OpCounter
from autotune.worker.rank import connect, device_name, prepare_device

if TYPE_CHECKING:
    from autotune.worker.measure.recorder import Recorder


# Each rate is measured for this time: a device needs some of it to raise its clock, and a CPU shows the same in half of it.
BUDGET_S = {"cpu": 0.12, "cuda": 0.25}
MATRIX = {"cpu": 512, "cuda": 4096}
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
# Links between devices take as long for 4 MiB as for nothing at all: the rate shows in a bucket of gradients.
MESSAGES = {"cpu": (1 << 10, 1 << 14, 1 << 18, 1 << 22), "cuda": (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)}
OPTIMISED = {"cpu": 1 << 20, "cuda": 1 << 25}
TINY = 64
HOST = torch.device("cpu")
# In mode `machine`: products of several sizes, messages up to the size of a bucket of gradients.
MATRICES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}
# A CPU without fp16 arithmetic takes seconds for such a product.
QUICK_TYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16", "tf32")}
LARGEST_MESSAGE = {"cpu": 1 << 24, "cuda": 1 << 28}
MESSAGE_S = 0.3
# A larger product is not tried after one that takes longer.
SLOW_PRODUCT_S = 0.3
# A synthetic sample is a small picture; the loader is timed with each number of workers.
SAMPLE_SHAPE, LOADER_BATCH, LOADER_WORKERS, LOADER_S = (3, 64, 64), 32, (0, 1, 2), 0.5


def measure_machine(recorder: "Recorder", request: TrialRequest) -> None:
    """Measures in every rank of the request; rank 0 writes the means."""
    memory, rank = prepare_device(request, recorder.report), recorder.report.rank
    recorder.enter("build")
    connect(request)
    device = torch.device(memory.accelerator)
    at_length = request.mode == "machine"
    # First, since its memory is counted from the rank's start.
    workspace, kernels = _host_memory(memory.start_bytes) if memory.on_cpu else (0.0, 0.0)
    caveats: list[str] = []
    products = _products(device, caveats, at_length=at_length)
    flops = {name: rate for name, (_, rate) in products.items()}
    links = _links(device, request.world_size, at_length=at_length)
    machine = _machine(device, request.world_size, _by_precision(flops), links, workspace, kernels)
    if not at_length:
        if rank == 0:
            folder.write_record(recorder.folder.machine, machine)
        return
    loader = tuple(_loader_rates(device, caveats))
    data = _own_data(request, rank, device) if request.target else None
    if rank == 0:
        found = Probe(
            machine=machine, device_name=device_name(),
            threads=torch.get_num_threads() if memory.on_cpu else 0,
            flops=flops,
            sizes={name: n for name, (n, _) in products.items()},
            links=tuple(links), loader=loader, data=data, caveats=tuple(caveats),
        )  # fmt: skip
        folder.write_record(recorder.folder.probe, found)


def _kind(device: torch.device) -> str:
    """The column of sizes for a device: all but CPUs take those of CUDA."""
    return "cpu" if device.type == "cpu" else "cuda"


def _by_precision(flops: dict[str, float]) -> dict[str, float]:
    """Returns the rates of a candidate's precisions, from those of the types that the device multiplies in."""
    sixteen = flops.get("bf16", flops.get("fp16", flops["fp32"]))  # old devices multiply in no bf16
    return {"fp16": sixteen, "torch_autocast": sixteen, "torch_autocast_fp16": flops.get("fp16", sixteen)} | flops


def _machine(
    device: torch.device,
    world_size: int,
    flops: dict[str, float],
    links: Sequence[Link],
    workspace: float,
    kernels: float,
) -> Machine:
    usual, kind = Machine.guess(device.type, world_size), _kind(device)
    source = torch.empty(COPIED_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2.0 * COPIED_BYTES[kind] / _seconds(lambda: target.copy_(source), device)
    reduced = next((link for link in links if link.collective == "all_reduce"), None)
    addition_s = _addition_s(device)
    return Machine(
        accelerator=device.type,
        world_size=world_size,
        flops=flops,
        memory_bytes_per_s=_agreed(copied, device),
        link_alpha_s=reduced.alpha_s if reduced else usual.link_alpha_s,
        link_bytes_per_s=reduced.bytes_per_s if reduced else usual.link_bytes_per_s,
        host_bytes_per_s=_agreed(copied if kind == "cpu" else _host_link(device), device),
        host_memory_bytes_per_s=_agreed(
            copied if kind == "cpu" else _optimizer(HOST, OPTIMISED[kind], fused=True), device
        ),
        op_s=_agreed(_operation_s(device, addition_s), device),
        host_op_s=_agreed(2.0 * (addition_s if kind == "cpu" else _addition_s(HOST)), device),
        # As by default in studies; an offloaded optimizer keeps `fused`.
        optimizer_bytes_per_s=_agreed(_optimizer(device, OPTIMISED[kind], fused=device.type == "cuda"), device),
        workspace_bytes=_agreed(workspace, device),
        kernel_bytes=_agreed(kernels, device),
        device_bytes=0.0 if kind == "cpu" else float(device_of(device.type, 0).memory_bytes),
        n_cores=n_cores() if kind == "cpu" else 0,
        measured=True,
    )


def _addition_s(device: torch.device) -> float:
    small = torch.ones(16, device=device)
    return _seconds(lambda: [small.add(1.0) for _ in range(100)], device) / 100


def _operation_s(device: torch.device, addition_s: float) -> float:
    """Returns the seconds that an operation of a training step takes at least, however small it is.

    Autograd and Python cost about as much as an addition itself; a device's other kernels cost the host more to launch.
    """
    layers = nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, device=device) for _ in range(4))
    )
    weights, batch = list(layers.parameters()), torch.ones(2, 4, 16, device=device)

    def train() -> object:
        return torch.autograd.grad(layers(batch).sum(), weights)

    with OpCounter(weights) as counter:
        train()
    return float(max(2.0 * addition_s, _seconds(train, device) / counter.trace.n_ops))


def _product(device: torch.device, name: str, n: int) -> float:
    """Returns the FLOP/s of a square product, the mean over the ranks."""
    a, b = (torch.randn(n, n, device=device).to(DTYPES[name.removeprefix("tf32") or "fp32"]) for _ in range(2))
    return _agreed(2.0 * n**3 / _seconds(lambda: a @ b, device), device)


def _products(device: torch.device, caveats: list[str], *, at_length: bool) -> dict[str, tuple[int, float]]:
    """Returns size and rate of the fastest product of each type that the device multiplies in."""
    kind = _kind(device)
    names, sizes = list(QUICK_TYPES[kind]), [MATRIX[kind]]
    if at_length:
        names, sizes = [*DTYPES, *(["tf32"] if device.type == "cuda" else [])], list(MATRICES[kind])
    found: dict[str, tuple[int, float]] = {}
    for name in names:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        for n in sizes:
            try:
                rate = _product(device, name, n)
            except RuntimeError as error:
                if name == "fp32" and name not in found:
                    raise  # a device that multiplies in no fp32 trains nothing
                if n == sizes[0]:
                    caveats.append(f"no matrix product in {name}: {str(error).splitlines()[0]}")
                break
            if rate > found.get(name, (0, 0.0))[1]:
                found[name] = n, rate
            if 2.0 * (2 * n) ** 3 / rate > SLOW_PRODUCT_S:  # the same decision on all ranks, since the rate is
                break
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Returns the time of a run in seconds, after a warm-up run: on a device the shortest, on a CPU the mean.

    Ranks that share cores, or a core's matrix unit, take turns, which a mean shows and the shortest of many runs does not.
    """
    run()
    times, until = [], time.perf_counter() + BUDGET_S[_kind(device)]
    while time.perf_counter() < until:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return max(sum(times) / len(times) if device.type == "cpu" else min(times), 1e-9)


def _agreed(value: float, device: torch.device) -> float:
    """Returns the mean over the ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _links(device: torch.device, world_size: int, *, at_length: bool) -> list[Link]:
    """Returns latency and bandwidth of each collective, fitted to messages of several sizes; none for one rank."""
    if world_size == 1:
        return []
    names, sizes, budget_s = ["all_reduce"], list(MESSAGES[_kind(device)]), 0.0
    if at_length:
        names, budget_s = list(RINGS), MESSAGE_S
        sizes = [1 << n for n in range(10, LARGEST_MESSAGE[_kind(device)].bit_length(), 2)]
    found = []
    for name in names:
        times = [(size, _message_s(device, world_size, name, size, budget_s)) for size in sizes]
        found.append(fit(name, world_size, times))
    return found


def _message_s(device: torch.device, world_size: int, collective: str, size: int, budget_s: float) -> float:
    """Returns the shortest time of a collective in seconds, as its slowest rank measures it."""
    part = torch.ones(max(1, size // 4 // world_size), device=device)
    whole = part.repeat(world_size)
    run: Callable[[], Any] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }[collective]

    def timed() -> float:
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    first = [timed() for _ in range(4)]
    # `first` is the same on all ranks, so all take the same number and none waits for the others.
    more = int(min(60.0, budget_s / max(min(first), 1e-6)))
    return min([*first[1:], *(timed() for _ in range(max(5, more)))])


def _loader_rates(device: torch.device, caveats: list[str]) -> Iterator[LoaderRate]:
    """Yields the speed of torch's loader by number of workers, while every rank loads."""
    n_bytes = 4 * torch.Size(SAMPLE_SHAPE).numel()
    pictures: Any = [*torch.zeros(64, *SAMPLE_SHAPE)] * (1 << 14)  # in memory, so that only the loader is timed
    for n_workers in LOADER_WORKERS:
        loader = DataLoader(pictures, batch_size=LOADER_BATCH, num_workers=n_workers)
        rate = 0.0
        with contextlib.suppress(RuntimeError, OSError):  # too little shared memory, no more processes
            rate = LOADER_BATCH * _draws_per_s(iter(loader))
        slowest = torch.tensor(rate, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MIN)  # also waits until all have loaded
        if float(slowest) == 0.0:
            caveats.append(
                f"no data was loaded by {n_workers} workers: too little shared memory, or too few processes allowed"
            )
            continue
        rate = _agreed(rate, device)
        yield LoaderRate(n_workers=n_workers, samples_per_s=rate, bytes_per_s=rate * n_bytes)


def _draws_per_s(batches: Iterator[Any]) -> float:
    next(batches)  # starts the workers
    n, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < LOADER_S or n < 2:
        next(batches)
        n += 1
    return n / seconds


def _own_data(request: TrialRequest, rank: int, device: torch.device) -> LoaderRate:
    """Returns the speed at which a rank draws the user's samples in its process, as trials do."""
    target = model_file.load(Path(request.target))
    loader = Loader(target, micro_batch_size=1, rank=rank, world_size=request.world_size, seed=request.seed)
    available = LOADER_BATCH if loader.n_samples is None else loader.n_samples // request.world_size
    loader.micro_batch_size = min(LOADER_BATCH, max(1, available))
    rate = loader.micro_batch_size * _draws_per_s(loader.next() for _ in iter(int, 1))
    return LoaderRate(n_workers=0, samples_per_s=_agreed(rate, device), bytes_per_s=0.0)


def _optimizer(device: torch.device, size: int, *, fused: bool) -> float:
    """Returns the bytes per second that Adam moves, at 28 bytes a parameter."""
    parameter = nn.Parameter(torch.zeros(size, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=fused)
    return 28.0 * size / _seconds(optimizer.step, device)


def _host_link(device: torch.device) -> float:
    """Returns the bytes per second of a copy from pinned memory of the host."""
    size = 1 << 28
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds(lambda: there.copy_(pinned, non_blocking=True), device)


def _host_memory(start_bytes: int) -> tuple[float, float]:
    """Returns the resident bytes that training takes besides tensors, and those that 16-bit arithmetic adds.

    Measured with a tiny model under DeepSpeed, whose tensors take some hundred kilobytes.
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
        malloc.hand_back()
        grown.append(float(max(0, resident_bytes() - start_bytes)))
    return grown[0], max(0.0, grown[1] - grown[0])
