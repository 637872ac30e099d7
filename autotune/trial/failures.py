"""Causes of a rank's failure by its error message: out of memory, a peer that died, another type, a fault of the machine."""

import re

from autotune.trial.result import Outcome

# Memory that ran out, by every name that torch, CUDA, NCCL, the C++ library and Linux give it.
_OUT_OF_MEMORY = re.compile(
    r"out of ((device|host|gpu|cuda) )?memory\b|out_of_((device|host|gpu|cuda)_)?memory\b(?!['\"])"
    r"|(not enough|insufficient) (free |device |gpu |host )?(memory|V?RAM)\b|enough GPU RAM to fit|memory (is )?exhausted"
    r"|OutOfMemory(Error)?(:|\(|\s*\Z)|(cuda|hip)ErrorOutOfMemory|more memory than is available|running low on memory|memory not available"
    r"|(can't|cannot|could not|unable to|failed to) allocate (?!memory in static TLS).*(memory|byte|\d ?[KMG]i?B)"
    r"|error allocating .*byte|(error|failure) (in|of|during) memory allocation|allocation of (size ?:*)?[\d.]+ ?\w* ?(bytes )?failed"
    r"|\boom[-_ ]?kill|\boom_score_adj|exceeded ((job|step) )?memory limit|TERM_MEMLIMIT|\bmem \d+kb exceeded limit"
    r"|memalign\(?\)? failed|HSA_STATUS_ERROR_OUT_OF_RESOURCES|could not create a memory\b(?! desc)"
    r"|std::bad_alloc|bad allocation|memory allocation (fail|error)|PT_DEVMEM.*allocation.* failed|resource allocation failed"
    r"|(m|c|re)alloc of size \d+ failed|large alloc \d+ bytes == \((nil|0x0|nullptr)\)|zeMemAlloc\w* failed|CUDA driver error: 2\b"
    r"|failed to apply for memory|memory limit exceeded|(error code is|result ?=|error code,?) ?207001\b"
    r"|\bERR\d{5} \w+ memory error|Invalid buffer size: [\d.]+ ?[KMGT]i?B|\w_?alloc(ation)?_?fail(ed|ure)"
    r"|(ROCBLAS|MIOPEN)_?(STATUS_?)?MEMORY_ERROR"
    r"|(cuda|hip)ErrorMemoryAllocation|ERROR_RT_MEMORY_ALLOCATION|\b(PI|UR|CL)(_RESULT)?(_ERROR)?_OUT_OF_RESOURCES"
    r"|(cuda|hip)(Malloc|HostAlloc|MallocHost|HostMalloc|HostRegister)\w* failed"
    r"|Failed to (CUDA|HIP) (c|m|host )?alloc|NCCL.*malloc failed"
    r"|Unable to allocate .* for an array|defaultCPUAllocator|pin(ned|_)? ?memory.*(alloc|resource)"
    r"|\[Errno 12\]|\bENOMEM\b|\bMemoryError\b|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
# Libraries that keep workspaces beside torch's cache report a full device so; a broken driver or library does, too.
_MAYBE_OUT_OF_MEMORY = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|CUFFT)_(STATUS_)?(NOT_INITIALIZED|INTERNAL_ERROR|INSUFFICIENT_RESOURCES)"
    r"|cublasLt ran into an error|no execution plans support the graph"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED"  # torch's allocator asks NVML only when it has failed
    r"|unable to find an engine|Unable to find a valid cuDNN algorithm|miopenStatus(InternalError|UnknownError)",
    re.IGNORECASE,
)
# Memory of the host rather than of an accelerator: pinned, of loaders and offloaded states, or under the kernel's or a
# scheduler's limit.
_HOST_MEMORY = re.compile(
    r"defaultCPUAllocator|alloc_cpu|(?<!driver\.)(?<!memory\.)\b(Array|Arrow)?MemoryError\b(?!: std::bad_alloc: \w)|_ArrayMemoryError"
    r"|std::bad_alloc(?!: (out_of_memory|cuda|hip))|\[Errno 12\]|os error 12\b|\bENOMEM\b"
    r"|m(em)?align\b|\bmmap\b|\bmlock\b|\bibv_\w+|\bfork\b|\bpin(ned|ning)?\b(?! memory thread)|MallocHost|Host(M?Alloc|Register)"
    r"|host[ _]alloc|host[ _]memory|for an array with shape|oom[-_ ]?kill|by the kernel|killed process|cgroup|memory limit\b(?! exceeded)"
    r"|TERM_MEMLIMIT|exceeded limit|\bsrun: |running low on memory|alloc of size|large alloc|jemalloc|\bmalloc(\(\)| failed)"
    r"|\boomd\b|libgomp|OpenMP|virtual memory|(?<!cuda )(?<!device )(?<!gpu )memory allocation of \d+ bytes",
    re.IGNORECASE,
)
# A device with a larger free share is not full.
FULL_FREE_SHARE = 0.05

# Messages of gloo, NCCL and torch's store in a rank whose peer died.
_LOST_PEER = (
    "closed by peer", "reset by peer", "connection refused", "broken pipe", "remote process exited",
    "nccl communicator was aborted", "socket timeout", "failed to recv", "diststoreerror", "distnetworkerror",
    "distbackenderror",
)  # fmt: skip
# Messages of torch if 16-bit weights meet tensors of another type, or an operation has no 16-bit version.
_OTHER_DTYPE = (
    "expected scalar type", "expected both tensors to have", "same dtype", "same data type", "and bias type",
    "and weight type", "not implemented for 'bfloat16'", "not implemented for 'half'",
    "low precision dtypes not supported", "expected dtype ",
)  # fmt: skip
HOST_MEMORY = (
    "The host's memory ran out, not the device's: offload less, use fewer loader workers, or give the job more memory"
)
# What the machine refuses, or a kernel does wrong, by the words of its message: what to do about it. The first one counts.
_REMEDIES = (
    (r"out of resource: (shared memory|threads|registers)",
     "A kernel wants more of the chip than it has: another kernel (attention, optimizer), or smaller blocks of it"),
    (r"shared memory segment|out of shared memory|insufficient shared memory|bus error|signal 7\b"
     r"|shared memory object .*No space|/dev/shm.*No space|posix_fallocate.*No space",
     "Shared memory (/dev/shm) is full or small: give a container more (`--shm-size=8g` or `--ipc=host`), remove what ended"
     " processes left in it (`autotune doctor`), or use fewer loader workers"),
    (r"stack expects each tensor to be equal size",
     "Samples differ in size: pad them to one where they are put together, by a function collate(samples) in model.py or the"
     " loader's collate_fn"),
    (r"DeepSpeedEngine' object (is not (subscriptable|iterable)|has no attribute '(logits|loss|shape|size|view|flatten|squeeze|mean)')"
     r"|non-iterable DeepSpeedEngine|operand type\(s\) for .*'DeepSpeedEngine'|, not DeepSpeedEngine",
     "A model.py's loss(model, batch) gets the model, not its output: call the model in it, as `output = model(batch[0])`"),
    (r"support sparse gradients|Sparse(CPU|CUDA)|between dense and sparse|\w_sparse_\w+\" not implemented|for sparse tensors",
     "A parameter has sparse gradients, which Adam, ZeRO 1 to 3 and 16 bits do not take: leave out sparse=True of its nn.Embedding"),
    (r"unsupported grad type: torch\.(float64|double)",
     "DeepSpeed reduces no gradients in double precision: make the model float32 (`model.float()`), and what it is given"),
    (r"unsupported grad type",
     "DeepSpeed reduces no gradients of this type: hold complex parameters as real ones, and make them complex in forward"
     " (`torch.view_as_complex`)"),
    (r"Direct calls to tensor\.backward",
     "In a script call engine.backward(loss), not loss.backward(). A loss that goes through a second engine, as a GAN's through its"
     " discriminator's, needs ZeRO 1 there, or that one's `engine.module(x)`. Gradients that the loss takes itself of the engine's output"
     " (torch.autograd.grad) pass for the backward pass: take them in the model's forward(), which then returns what the loss needs"),
    (r"has already been reduced\.\s+Gradient computed twice",
     "ZeRO 2 and 3 take in a parameter's gradient once: freeze a model (`requires_grad_(False)`) while another model's loss goes"
     " backward through it, as a GAN's does, or train it at ZeRO 1"),
    (r"No space left on device|\[Errno 28\]|file write failed", "A disk is full: free space, or move the study or the cache"),
    (r"quota exceeded", "The disk quota is used up: free space, or move the study or the cache"),
    (r"Too many open files|0 items of ancdata",
     "The limit on open files is too low: raise it (`ulimit -n 65536`), or use fewer loader workers"),
    (r"can't start new thread|pthread_create|Resource temporarily unavailable",
     "The limit on processes and threads is reached: raise it (`ulimit -u` and `-v`, a container's `--pids-limit`), or use fewer ranks"
     " and loader workers"),
    (r"ECC error|fallen off the bus|\bXid\b",
     "The device is faulty: see `nvidia-smi -q`, and leave it out by CUDA_VISIBLE_DEVICES until it was reset or replaced"),
    (r"illegal memory access|misaligned address|Memory access fault by GPU|illegal instruction|unspecified launch failure",
     "A kernel is at fault, not the amount of memory: CUDA_LAUNCH_BLOCKING=1 shows which one"),
    (r"device-side assert", "Mostly an index or a label out of range: CUDA_LAUNCH_BLOCKING=1 shows where"),
    (r"no kernel image|unsupported toolchain|ARCH_MISMATCH|NoKernelImageForDevice",
     "torch, or a package with kernels, was not built for this device: install a build with its compute capability"),
    (r"driver version is insufficient|STATUS_VERSION_MISMATCH|system not yet initialized",
     "The driver and torch's CUDA do not match: update the driver, or install torch for its CUDA version"),
    (r"busy or unavailable", "Another process holds the device for itself: end it, or set the compute mode to default"),
    (r"invalid literal for int\(\) with base 10: '(GPU|MIG)-",
     "DeepSpeed's ZeRO 1 and 2 read CUDA_VISIBLE_DEVICES as numbers where pynvml is installed: name devices so, or uninstall nvidia-ml-py"),
    # Both engine.py, at every stage, and zero.Init broadcast each parameter as bytes.
    (r"self\.dim\(\) cannot be 0 to view \w+ as Byte",
     "DeepSpeed, with which every trial trains, fails on parameters without dimensions, at each ZeRO stage: give them the shape [1],"
     " as `nn.Parameter(torch.ones(1))` in place of `nn.Parameter(torch.tensor(1.0))`"),
    (r"Optimizer\w* is not an Optimizer",
     "torch's schedules take no optimizer of DeepSpeed's: make the schedule from `optimizer.optimizer`, which is torch's"),
    (r"Torch not compiled with CUDA|_cuda_setDevice|No CUDA GPUs are available|Found no NVIDIA driver",
     "It asks for a GPU, and its process sees none: run it where it trains, or have it use one only where"
     " torch.cuda.is_available()"),
    (r"invalid device ordinal", "There are more ranks than visible devices: lower `ranks`, or widen CUDA_VISIBLE_DEVICES"),
    (r"no socket interface found", "NCCL found no network interface: name one by NCCL_SOCKET_IFNAME"),
)  # fmt: skip


def means_out_of_memory(text: str, free_share: float | None = None) -> bool:
    """Returns whether an error message says that memory ran out.

    Args:
        free_share: Free share of the device's memory after the error; None if unknown. Messages that a full device
            shares with a broken driver count only if the device is full, or if that is unknown.
    """
    if _OUT_OF_MEMORY.search(text):
        return True
    full = free_share is None or free_share < FULL_FREE_SHARE
    return full and _MAYBE_OUT_OF_MEMORY.search(text) is not None


def means_host_memory(text: str) -> bool:
    """Returns whether a message that says that memory ran out means the host's, not an accelerator's."""
    return _HOST_MEMORY.search(text) is not None


def ended_by_host(outcome: str, reason: str, *, on_device: bool) -> bool:
    """Returns whether a trial ended as the host's memory ran out beside an accelerator, of whose memory that says nothing."""
    return outcome == Outcome.OOM and on_device and means_host_memory(reason)


def advice(outcome: Outcome, reason: str, *, on_device: bool) -> str:
    """Returns what to do where the machine or a kernel made a trial fail; empty where no advice is known.

    Args:
        on_device: Whether trials compute on an accelerator, whose memory is not the host's.
    """
    if outcome is Outcome.CRASHED:
        return next((text for words, text in _REMEDIES if re.search(words, reason, re.IGNORECASE)), "")
    return HOST_MEMORY if ended_by_host(outcome, reason, on_device=on_device) else ""


def means_lost_peer(text: str) -> bool:
    """Returns whether an error message only reports that another rank has died."""
    return any(words in text.lower() for words in _LOST_PEER)


def means_other_dtype(text: str) -> bool:
    """Returns whether an error message says that a tensor has another type than the 16-bit weights."""
    return any(words in text.lower() for words in _OTHER_DTYPE)


def more_time(phase: str) -> str:
    """Returns advice for what came to no end, by the phase that it was in."""
    if phase == "first_evaluation":
        return "it was evaluating, and had not begun to train: leave that out while it is tuned, or give it more time (--trial-deadline)"
    if phase == "script_ended":
        return (
            "it had ended on one rank while others still trained: give all ranks equally many batches, as a"
            " DistributedSampler does, and more of them"
        )
    if phase in ("warmup", "measure"):
        return "it had loaded and begun to train: if it neither hangs nor leaves step() out, --trial-deadline gives it more time"
    load = "--trial-deadline gives it more time, if it takes that long to load"
    if phase == "other_process":
        return f"it had started another process, whose training no trial sees, and not begun to train itself; {load}"
    return load


def headline(text: str) -> str:
    """Returns the line of an error message that names the cause, without a full stop, since sentences go on after it.

    NCCL states the cause below `Last error:`.
    """
    lines = text.strip().splitlines() or [""]
    first = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    cause = re.search(r"^Last error:\s*(\S.*)$", text, re.MULTILINE)
    found = f"{first} ({cause[1].strip()})" if cause and cause[1] not in first else first
    return re.sub(r"(?<![.])[.]$", "", found.rstrip())
