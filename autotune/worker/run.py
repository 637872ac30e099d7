"""One rank of one trial: build, initialise, train, measure, report, leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from autotune import UserError, masking, trial
from autotune.candidate import SIDE_EFFECT_KEYS, Candidate
from autotune.convergence import NoiseTerms
from autotune.gate import GradientCheck
from autotune.trial import (
    OOM_EXIT_CODE,
    Environment,
    Observed,
    Outcome,
    RankReport,
    Traced,
    TrialDir,
    TrialRequest,
    Workload,
)
from autotune.worker import contract, observe, samples, weights
from autotune.worker.gradients import GradientWatch, perturb
from autotune.worker.meter import Diverged, Laps, Meter, NotApplied
from autotune.worker.noise import NoiseMeter

# Between the dropout seeds of two replicates: more than there are ranks.
REPLICATE_SEEDS = 1_000_003
# The last: cuBLAS and cuDNN, whose workspaces no allocator of torch's refuses (CUBLAS_STATUS_ALLOC_FAILED).
OOM_WORDS = ("can't allocate memory", "out of memory", "cannot allocate memory", "_status_alloc_failed")


def main(trial_dir: str, rank: int, listener: int) -> NoReturn:
    """Runs rank `rank` of the trial in `trial_dir` and ends the process.

    Args:
        trial_dir: The trial's folder.
        rank: Number of this rank.
        listener: Descriptor of the listening socket on which rank 0 keeps the ranks' store; -1 on another machine than its own.
    """
    recorder = Recorder(TrialDir(Path(trial_dir)), rank)
    try:
        request = trial.read(recorder.folder.request, TrialRequest)
        recorder.enter("import")
        _watch_memory(recorder, request)
        if request.mode == "inspect":
            trial.write(recorder.folder.workload, _inspect(request))
        elif request.mode == "build":
            _build(request)
        elif request.mode == "profile":
            from deepspeed.accelerator import get_accelerator

            from autotune.worker.profile import profile

            trial.write(recorder.folder.profile, profile(request, get_accelerator().device_name()))
        elif request.mode in ("rates", "machine"):
            from autotune.worker.rates import measure_machine

            measure_machine(recorder, request, rank, listener)
        elif request.script is not None:
            from autotune.worker.hooks import run_script

            run_script(recorder, request, rank, listener)
        else:
            _measure(recorder, request, rank, listener)
        complete(recorder)
    except BaseException as error:
        abort(recorder, error)


def _build(request: TrialRequest) -> None:
    from autotune.worker import ops

    if int(os.environ["LOCAL_RANK"]) == 0 and ops.build(request.ops):
        raise UserError(f"{', '.join(request.ops)} cannot be built; the log says why")


def complete(recorder: Recorder) -> NoReturn:
    """Reports that all went well, and ends the process when all ranks have."""
    recorder.last_look()
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
    """Reports what went wrong, and ends the process."""
    with contextlib.suppress(Exception):  # the user's code may have closed standard error
        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # a full disk; how the process ended is seen all the same
        recorder.fail(*_classify(error))
    _leave(OOM_EXIT_CODE if recorder.report.outcome is Outcome.OOM else 1)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # interpreter teardown costs seconds and may hang in native threads


@dataclass
class _Draft:
    """A `RankReport` in the making."""

    rank: int
    outcome: Outcome = Outcome.CRASHED
    phase: str = "start"
    reason: str = ""
    failed_at: float | None = None
    startup_s: dict[str, float] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)
    cpu_times_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    phase_times_s: dict[str, float] = field(default_factory=dict)
    micro_step_s: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    reserved_memory_bytes: int | None = None
    alloc_retries: int | None = None
    other_cores: float = 0.0
    observed: Observed | None = None
    caveats: list[str] = field(default_factory=list)
    side_changes: list[str] = field(default_factory=list)
    noise: NoiseTerms | None = None
    gradient: GradientCheck | None = None
    unreproducible: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    traced: Traced | None = None


class Recorder:
    """Keeps what the rank knows, so that whatever happens the report says how far it came."""

    def __init__(self, folder: TrialDir, rank: int) -> None:
        self.folder = folder
        self.report = _Draft(rank)
        self.last_look: Callable[[], object] = lambda: None  # at the memory, before all is well
        self._entered = time.monotonic()
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """Closes the phase under way, notes its length, and tells whoever watches `events.jsonl`."""
        now = time.monotonic()
        if self.report.phase in ("import", "build", "initialize"):
            self.report.startup_s[self.report.phase] = now - self._entered
        self.report.phase, self._entered = phase, now
        self.event(phase=phase)

    def event(self, **what: Any) -> None:
        """Appends one line to the trial's event stream, small enough to be written in one piece; no trial ends for want of it."""
        line = json.dumps({"time": time.time(), "rank": self.report.rank, **what}) + "\n"
        with contextlib.suppress(OSError):
            events = self.folder.events_of(int(os.environ.get("GROUP_RANK", "0")))
            descriptor = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def fail(self, outcome: Outcome, reason: str) -> None:
        """Writes the report of a failure."""
        reason = masking.masked(reason)  # an exception may quote a token
        self.report.outcome, self.report.reason, self.report.failed_at = outcome, reason, time.time()
        self.event(outcome=outcome, reason=reason)
        self.write()

    def write(self) -> None:
        """Writes the report as it stands."""
        with self._lock:
            trial.write(self.folder.report(self.report.rank), RankReport(**vars(self.report)), sync=False)


def _classify(error: BaseException) -> tuple[Outcome, str]:
    text = str(error).strip()
    lines = text.splitlines() or [""]
    first = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text.lower() for words in OOM_WORDS):
        return Outcome.OOM, f"{type(error).__name__}: {first}"[:500]
    if isinstance(error, Diverged):
        return Outcome.DIVERGED, first
    if isinstance(error, NotApplied):
        return Outcome.NOT_APPLIED, first
    if isinstance(error, UserError):
        return Outcome.CRASHED, first
    return Outcome.CRASHED, f"{type(error).__name__}: {first}"[:500]


def _watch_memory(recorder: Recorder, request: TrialRequest) -> None:
    """On CPU: holds the rank to the stated limit, or to its share of what the machine has."""
    from deepspeed.accelerator import get_accelerator

    limit = request.device_memory_bytes
    if get_accelerator().device_name() == "cuda":
        if limit is not None:
            device = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return
    stated = limit is not None
    share = limit if limit is not None else int(0.9 * observe.available_bytes() / request.ranks_per_node)
    start = observe.resident_bytes()

    def on_excess(growth: int) -> None:
        whose = "the stated device memory" if stated else "its share of this machine's free memory"
        recorder.fail(
            Outcome.OOM,
            f"rank {recorder.report.rank} grew to {growth / 2**20:.0f} MiB, over {whose} of {share / 2**20:.0f} MiB",
        )
        os._exit(OOM_EXIT_CODE)

    recorder.last_look = observe.limit_host_memory(start, share, on_excess)


def _inspect(request: TrialRequest) -> Workload:
    """Loads the target and finds what legality and the report need to know of it."""
    target = contract.load(Path(request.target))
    try:
        with torch.device("meta"):
            model = contract.build_model(target)
    except UserError:
        raise
    except Exception:  # a model that looks at its values while it is built
        model = contract.build_model(target)
    blocks = contract.find_blocks(model, target.blocks)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise contract.WorkloadError(f"{target.path.name}: model() has no trainable parameter")
    loader = contract.Loader(target, micro_batch_size=1, rank=0, world_size=1, seed=request.seed)
    found = workload_of(model, blocks, n_samples=loader.n_samples, client_optimizer=target.optimizer is not None)
    return replace(found, optimizer=_optimizer_class(target, model), data=samples.data_shape(loader))


def _optimizer_class(target: contract.Target, model: torch.nn.Module) -> str:
    if target.optimizer is None:
        return ""
    with contextlib.suppress(Exception):  # one that looks at its values: the trials will make it from real weights
        return type(
            target.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        ).__name__
    return ""


def workload_of(
    model: torch.nn.Module, blocks: list[torch.nn.Module], *, n_samples: int | None, client_optimizer: bool
) -> Workload:
    """What legality and the report need to know of a model that DeepSpeed has not touched yet."""
    parameters = dict.fromkeys(model.parameters())
    # Under `zero.Init` a parameter is empty; DeepSpeed keeps its size beside it.
    sizes = {parameter: int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters}
    n_parameters = sum(sizes.values())
    in_blocks = dict.fromkeys(p for block in blocks for p in block.parameters())
    return Workload(
        n_parameters=n_parameters,
        n_trainable=sum(size for parameter, size in sizes.items() if parameter.requires_grad),
        n_samples=n_samples,
        n_blocks=len(blocks),
        block_class=", ".join(sorted({type(block).__name__ for block in blocks})),
        block_share=sum(sizes[parameter] for parameter in in_blocks) / max(1, n_parameters),
        float_buffers=_has_float_buffers(model),
        client_optimizer=client_optimizer,
        environment=_environment(),
        structure=_structure(model, sizes),
        caveats=[] if blocks else ["the model has no repeated block, so activation checkpointing is not tuned"],
    )


def _structure(model: torch.nn.Module, sizes: Mapping[torch.nn.Parameter, int]) -> str:
    """A digest of what the model is made of: classes of modules, and names, shapes and types of parameters."""
    lines = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        lines.append(f"{name} {shape} {sizes[parameter]} {parameter.dtype} {parameter.requires_grad}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _has_float_buffers(model: torch.nn.Module) -> bool:
    """Whether the model has floating-point buffers that must follow its weights.

    Those that transformers does not save, as the frequencies of rotary embeddings, it casts itself where they are used, and in
    16 bits they would be wrong.
    """
    own = any(base.__name__ == "PreTrainedModel" for module in model.modules() for base in type(module).__mro__)
    return any(
        buffer is not None and buffer.is_floating_point() and not (own and name in module._non_persistent_buffers_set)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    )


def _environment() -> Environment:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    cuda = accelerator.device_name() == "cuda"
    n_cores = len(os.sched_getaffinity(0))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if cuda:
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        versions |= {"driver": driver} if (driver := trial.driver_version()) else {}
    return Environment(
        accelerator=accelerator.device_name(),
        device_name=device_name(cuda=cuda),
        n_devices=torch.cuda.device_count() if cuda else 1,
        device_memory_bytes=torch.cuda.get_device_properties(0).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bf16=bool(accelerator.is_bf16_supported()),
        fp16=bool(accelerator.is_fp16_supported()),
        n_cores=n_cores,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        versions=versions,
    )


def device_name(*, cuda: bool) -> str:
    """Model of the device; of the processor where there is none."""
    if cuda:
        return str(torch.cuda.get_device_name())
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def prepare_device(request: TrialRequest) -> observe.Memory:
    """Gives the rank its device, or its share of the cores, and starts to watch its memory."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # On CUDA too: an offloaded optimizer steps on the host, and each rank would take all cores for it.
    n_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(trial.threads_per_rank(n_cores, request.ranks_per_node, os.environ.get("OMP_NUM_THREADS")))
    # This op serves inference only, and on CPU leaks 66 MiB of /dev/shm per rank for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return observe.Memory(get_accelerator().device_name())


def _measure(recorder: Recorder, request: TrialRequest, rank: int, listener: int) -> None:
    candidate = Candidate.of(request.candidate)
    memory = prepare_device(request)
    target = contract.load(Path(request.target))
    recorder.enter("build")
    connect(request, rank, listener, cuda=memory.cuda)
    _seed(request.seed)
    model = contract.build_model(target)
    if request.weights is not None:
        weights.load(model, Path(request.weights))
    if request.replicate:
        perturb(model, request.replicate)
    blocks = contract.find_blocks(model, target.blocks)
    checkpointer = None
    if candidate.checkpoint_every:
        checkpointer = observe.Checkpointer(blocks, candidate.checkpoint_every)
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # a recomputed block would append to the cache twice
    # What batch(n) draws depends on how the batch is split, so that curves are not paired: replicates must show what that does.
    seed = request.seed + (request.replicate if target.data is None else 0)
    loader = contract.Loader(
        target, micro_batch_size=candidate.micro_batch_size, rank=rank, world_size=request.world_size, seed=seed,
        first_sample=request.first_sample,
    )  # fmt: skip
    loader.check(candidate.global_batch_size(request.world_size))
    recorder.enter("initialize")
    noise = NoiseMeter(model, request.world_size, candidate.gradient_accumulation_steps) if request.noise else None
    gradients = GradientWatch(model, request.world_size) if request.check_gradient else None
    engine = _initialize(request, target, model)
    _seed(
        request.seed + 1 + rank + REPLICATE_SEEDS * request.replicate
    )  # dropout differs between ranks, and is the same in every trial
    recorder.enter("warmup")
    meter = recorder, request, engine, observe.BatchObserver(engine), memory, checkpointer, noise, gradients
    _Trainer(contract.make_loss(target, model), loader, *meter).train()


def connect(request: TrialRequest, rank: int, listener: int, *, cuda: bool) -> None:
    """Joins the ranks over a store on the agent's own socket: no port is chosen, so none can be lost to others."""
    timeout = timedelta(seconds=request.deadline_s + 60)  # the agent's deadline comes first
    dist.distributed_c10d.default_pg_timeout = timeout  # DeepSpeed's own groups do not take init_distributed's time-out
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        # In torch 2.6 its other backend, the default, takes no socket that listens already.
        store = dist.TCPStore(
            host, port, request.world_size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener,
            use_libuv=False,
        )  # fmt: skip
    else:
        if listener >= 0:
            socket.close(listener)
        store = dist.TCPStore(host, port, request.world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=request.world_size, timeout=timeout)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _initialize(request: TrialRequest, target: contract.Target, model: torch.nn.Module) -> Any:
    import deepspeed

    config = {key: value for key, value in request.ds_config.items() if key not in SIDE_EFFECT_KEYS}
    config["steps_per_print"] = 10**9
    deepspeed.init_distributed(dist_init_required=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if target.optimizer is not None and "optimizer" not in config:
        optimizer = target.optimizer(parameters)
        for group in optimizer.param_groups:
            for key in {"lr", "initial_lr"} & group.keys():
                group[key] *= request.learning_rate_factor
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    else:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


class _Trainer(Meter):
    """The timed loop of a `model.py`."""

    def __init__(self, loss: Any, loader: contract.Loader, *meter: Any) -> None:
        super().__init__(*meter)
        self.loss, self.loader = loss, loader
        self.micro_clock = Laps(self.device)
        # 16-bit weights need 16-bit inputs; autocast and fp32 take them as they come.
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.candidate.precision)

    def train(self) -> None:
        """Trains until the step time is known well enough, the budget is spent, or something ends it."""
        self._window(1)
        self._taken_apart()
        self.begin()
        self.micro_clock.forget()
        while not self.done():
            self._window(self.window_steps())
        self.report.micro_step_s = self.micro_clock.medians_s()
        for _ in self.afterwards():
            self._phase_by_phase()
        self.finish()
        if self.request.save_weights is not None:
            weights.save(self.engine, Path(self.request.save_weights))

    def _window(self, n_steps: int) -> None:
        """Trains a window of steps; the device is synchronised and the ranks compared at its end only."""
        self.synchronize()
        self._timed([self._step] * n_steps)

    def _timed(self, steps: Sequence[Callable[[], torch.Tensor]]) -> None:
        laps, cpu_start = Laps(self.device), time.process_time()
        losses: list[torch.Tensor] = []
        skipped: list[bool] = []
        laps.start()
        for step in steps:
            before = self.engine.skipped_steps
            losses.append(step())
            laps.lap()
            skipped.append(self.engine.skipped_steps > before)
        self.synchronize()
        self.gather(
            laps.seconds(), time.process_time() - cpu_start, losses, skipped=skipped, ragged=[False] * len(losses)
        )

    def _step(self) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        self.micro_clock.start()
        while True:
            batch = self._draw()
            loss = self.loss(self.engine, batch)
            total += loss.detach().float()
            self.engine.backward(loss)
            self.backward()
            self.update(self.engine.step)
            boundary = self.batches.step()
            self.micro_clock.lap("boundary" if boundary else "inner")
            if boundary:
                return total / self.candidate.gradient_accumulation_steps

    def _draw(self) -> Any:
        batch, n_drawn = self.loader.next()
        self.batches.drew(n_drawn)
        return contract.to_device(batch, self.device, self.dtype)

    def _taken_apart(self) -> None:
        """One step with the clock and the memory counters stopped after each phase."""

        def apart() -> torch.Tensor:
            loss = self._phase_by_phase()
            self.enter("")
            return loss

        self.take_apart()
        self._timed([apart])

    def _phase_by_phase(self) -> torch.Tensor:
        """One step, whoever watches told of each phase; its loss."""
        total = torch.zeros((), device=self.device)
        done = False
        while not done:
            self.enter("data")
            batch = self._draw()
            self.enter("forward")
            loss = self.loss(self.engine, batch)
            total += loss.detach().float()
            self.enter("backward")
            self.engine.backward(loss)
            self.backward()
            self.enter("step")
            self.update(self.engine.step)
            done = self.batches.step()
        return total / self.candidate.gradient_accumulation_steps
