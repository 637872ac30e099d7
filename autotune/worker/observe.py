"""What really happens in a rank: batches, backward calls, recomputed blocks, memory, and how busy the machine is."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import platform
import resource
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.worker import samples

# Which tensor of a batch counts its samples, before any other: names as Hugging Face models take them.
PREFERRED = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "inputs", "x")
# DeepSpeed reserves buckets of 5e8 elements that small models hardly touch: two in fp32 are 4 GB of addresses, not of memory.
RLIMIT_SLACK_BYTES = 8 << 30
WATCH_INTERVAL_S, TRIM_INTERVAL_S = 0.01, 0.2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Batches of each rank that are compared between ranks.
N_CHECKSUMS = 2
# Batches of which a sample's shape is noted, for what the data look like.
N_SHAPES = 32
# Draws of a loader that may lie between a batch and its use.
MOST_AHEAD = 1024


class BatchObserver:
    """Counts samples at the engine's forward and backward calls per optimizer step.

    Args:
        engine: The DeepSpeed engine; it is hooked, not changed.
        forgiving: Leave out steps with fewer samples than the first one's, as the end of an epoch brings them.
    """

    def __init__(self, engine: Any, *, forgiving: bool = False) -> None:
        self.micro_batch_sizes: set[int] = set()
        self.loader_batch_sizes: set[int] = set()
        self.backward_counts: set[int] = set()
        self.samples_per_step: set[int] = set()
        self.tokens_per_step: set[int] = set()
        self.ragged = False
        self.checksums: list[int] = []
        self.shapes: list[Any] = []
        self._engine, self._forgiving = engine, forgiving
        self._micro = self._tokens = 0
        self._sizes: list[int] = []
        self._draws: list[int | None] = []
        self._drawn: collections.deque[int | None] = collections.deque(maxlen=MOST_AHEAD)
        self._fresh = True
        self._steps = engine.global_steps
        engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @property
    def went_forward(self) -> bool:
        """Whether a micro-batch went forward and not yet backward."""
        return not self._fresh

    def _on_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not self._engine.training:
            if self._drawn:
                self._drawn.pop()  # evaluation: it was the last to draw
            return
        if not self._fresh:
            return  # a loss may call the model more than once for one micro-batch
        self.micro_batch(args, kwargs)

    def micro_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a micro-batch that goes forward."""
        self._fresh = False
        # A framework may draw the micro-batches of a whole step, or one of the next step, before the first goes forward.
        self._draws.append(self._drawn.popleft() if self._drawn else None)
        tensor = counted_tensor(args, kwargs)
        if tensor is None or tensor.dim() == 0:
            return
        self._sizes.append(tensor.shape[0])
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            self._tokens += tensor.numel()
        if self._forgiving and len(self.shapes) < N_SHAPES:
            self.shapes += samples.of_batch(args, kwargs, tensor.shape[0])[:1]
        if self._forgiving and len(self.checksums) < N_CHECKSUMS:
            self.checksums.append(zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()))

    def drew(self, n_samples: int | None) -> None:
        """Notes the samples that the loader drew for a coming micro-batch."""
        self._drawn.append(n_samples)

    def forget_draws(self) -> None:
        """What was drawn so far is none of the coming micro-batches."""
        self._drawn.clear()

    def backward(self) -> None:
        """Notes a backward call."""
        self._micro += 1
        self._fresh = True

    def step(self) -> bool:
        """Notes a call of `engine.step`; True if the engine took an optimizer step."""
        if self._engine.global_steps == self._steps:
            return False
        self._steps = self._engine.global_steps
        # A loader decides only if each micro-batch was one draw: else the script cuts up or joins what it draws.
        draws = [n for n in self._draws if n is not None]
        drawn = draws if len(draws) == len(self._draws) else []
        if len(set(drawn)) > 1 and len(set(self._sizes)) == 1:
            drawn = []  # something else drew in between
        samples = sum(drawn or self._sizes)
        self.ragged = self._forgiving and samples < max(self.samples_per_step, default=0)
        if not self.ragged:
            self.micro_batch_sizes.update(self._sizes)
            self.loader_batch_sizes.update(drawn)
            self.backward_counts.add(self._micro)
            self.samples_per_step.add(samples)
            self.tokens_per_step.add(self._tokens)
        self._micro = self._tokens = 0
        self._sizes, self._draws = [], []
        self._drawn.clear()
        return True


def counted_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor whose leading dimension counts the samples of a forward call."""
    for name in PREFERRED:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]  # type: ignore[no-any-return]
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Mapping):
            pending = [*(value[name] for name in PREFERRED if name in value), *value.values(), *pending]
        elif isinstance(value, (list, tuple)):
            pending = [*value, *pending]
    return None


class Checkpointer:
    """Recomputes the activations of every k-th block, by overriding `forward` of the instance.

    Names, classes and state_dict stay as they are. It also sees that a recomputation really happened.

    Args:
        blocks: The blocks in the order of the model.
        every: 1 wraps every block, 2 every second one.
    """

    def __init__(self, blocks: list[nn.Module], every: int) -> None:
        self.recomputed: set[int] = set()
        # Whoever times what is recomputed; it is given what to run.
        self.timer: Callable[[Callable[[], Any]], Any] | None = None
        self.wrapped = blocks[::every]
        for block in self.wrapped:
            block.forward = self._recomputing(block, block.forward)

    def _recomputing(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        from torch.utils.checkpoint import checkpoint

        checkpoint = getattr(checkpoint, "original", checkpoint)  # a script's own calls may be turned off

        def observed(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # inside a backward pass: this is the recomputation
                self.recomputed.add(id(block))
                if self.timer is not None:
                    return self.timer(lambda: forward(*args, **kwargs))
            return forward(*args, **kwargs)

        def recomputing(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(observed, *args, use_reentrant=False, **kwargs)

        return recomputing


class Recomputations:
    """Sees which blocks are recomputed in a backward pass, whoever has them recomputed.

    Args:
        blocks: The repeated blocks of the model.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.recomputed: set[int] = set()
        self._n_blocks = len(blocks)
        # A block's own forward may be what is checkpointed, and then runs once only; what lies in it runs again.
        self._handles = [
            inner.register_forward_pre_hook(functools.partial(self._on_forward, id(block)))
            for block in blocks
            for inner in block.children()
        ]

    def _on_forward(self, block: int, _module: nn.Module, _args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.recomputed.add(block)

    @property
    def every(self) -> int:
        """What `Candidate.checkpoint_every` is, as far as seen."""
        return round(self._n_blocks / len(self.recomputed)) if self.recomputed else 0

    def stop(self) -> None:
        """Looks no longer, so that timed steps are not slowed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Memory:
    """Peak memory by phase: resident high-water growth on CPU, the caching allocator's on CUDA.

    On CPU the timed steps, phase `steady`, are not looked at: see `keep_freed_memory`.

    Args:
        accelerator: DeepSpeed's name of the device.
    """

    def __init__(self, accelerator: str) -> None:
        self.cuda = accelerator == "cuda"
        self.peaks: dict[str, int] = {}
        self._phase = "initialize"
        self._reserved = 0
        keep_freed_memory(False)
        self._reset()
        self.start_bytes = resident_bytes()

    def enter(self, phase: str) -> None:
        """Closes the phase under way and starts another one."""
        self._close()
        self._phase = phase
        keep_freed_memory(phase == "steady")
        self._reset()

    def finish(self) -> dict[str, int]:
        """Peak bytes by phase."""
        self._close()
        return self.peaks

    @property
    def reserved_bytes(self) -> int | None:
        """CUDA: high-water mark of what the caching allocator took from the device."""
        return max(self._reserved, torch.cuda.max_memory_reserved()) if self.cuda else None

    @property
    def alloc_retries(self) -> int | None:
        """CUDA: how often the allocator emptied its cache and tried again."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if self.cuda else None

    def _close(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        elif self._phase == "steady":
            return
        else:
            peak = max(0, _status_bytes("VmHWM") - self.start_bytes)
        self.peaks[self._phase] = max(peak, self.peaks.get(self._phase, 0))

    def _reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        # Freed memory that is still resident would count as in use, and when used again not as growth.
        hand_back_freed_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM of this process; ru_maxrss cannot be reset


def keep_freed_memory(keep: bool) -> None:
    """Lets the C library keep freed tensors for later, as it soon does by itself, or has it hand them back at once.

    Kept, resident memory shows what was ever in use, in pieces; handed back, what is in use, as a device's allocator would:
    265 MiB and 183 MiB for the example GPT at micro-batch 32, 265 and 100 MiB with checkpointing, but 40 % more CPU time for
    page faults. So memory is read the one way and time the other.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20 if keep else 128 << 10)  # 32 MiB is where glibc's own adaptation ends
        libc.mallopt(M_TRIM_THRESHOLD, 64 << 20 if keep else 128 << 10)


def hand_back_freed_memory() -> None:
    """Has the C library hand back the pages that it keeps for later."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def available_bytes() -> int:
    """Memory that this machine can still give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def limit_host_memory(start_bytes: int, limit_bytes: int, on_excess: Callable[[int], None]) -> Callable[[], bool]:
    """Holds this process to a growth of `limit_bytes`, as a device of that size would.

    A thread looks at the resident size, less what the C library only keeps for later; one huge allocation, which it could
    not see in time, is refused by RLIMIT_DATA.

    Args:
        start_bytes: Resident bytes that do not count.
        limit_bytes: Growth allowed.
        on_excess: Called with the growth; it must end the process.

    Returns:
        One look more, for the end: what is short, or starved of cores, may grow and be over between two looks of the thread.
    """
    ceiling = _status_bytes("VmData") + limit_bytes + RLIMIT_SLACK_BYTES
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))

    def look() -> bool:
        if resident_bytes() - start_bytes <= limit_bytes:
            return False
        hand_back_freed_memory()
        growth = resident_bytes() - start_bytes
        if growth > limit_bytes:
            on_excess(growth)
        return True

    def watch() -> None:
        while True:
            time.sleep(
                TRIM_INTERVAL_S if look() else WATCH_INTERVAL_S
            )  # trimmed more often, what is timed would be page faults

    threading.Thread(target=watch, name="autotune-memory", daemon=True).start()
    return look


def machine_id() -> str:
    """What all processes on a machine have in common, and none on another: the kernel's own mark since it was started."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


class Busyness:
    """How much of the machine others used while we measured."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores_used_by_others(self, own_cpu_s: float) -> float:
        """Cores that processes other than ours kept busy on average since this object was made."""
        (busy, wall), (busy_before, wall_before) = self._read(), self._start
        elapsed = wall - wall_before
        return max(0.0, (busy - busy_before - own_cpu_s) / elapsed) if elapsed > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float]:
        try:
            with open("/proc/stat") as file:
                ticks = [int(value) for value in file.readline().split()[1:]]
        except OSError:
            return 0.0, time.monotonic()
        user, nice, system, _idle, _iowait, irq, softirq, steal = (ticks + [0] * 8)[:8]
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), time.monotonic()
