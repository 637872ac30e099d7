"""What the error messages of a failed rank mean: out of memory, a peer that died, a tensor of another type."""

from __future__ import annotations

import re

# Memory that ran out, by every name that torch, CUDA, NCCL, the C++ library and Linux give it.
_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _]((device|host|gpu|cuda)[ _])?memory\b|(not enough|insufficient) (free |device |gpu |host )?memory"
    r"|OutOfMemory(Error)?:|(cuda|hip)ErrorOutOfMemory|more memory than is available|running low on memory"
    r"|(can't|cannot|could not|unable to|failed to) allocate (?!memory in static TLS).*(memory|byte|\d ?[KMG]i?B)"
    r"|error allocating .*byte|(error|failure) (in|of|during) memory allocation|allocation of [\d.]+ ?\w* ?(bytes )?failed"
    r"|\boom[-_ ]kill|exceeded (job|step) memory limit|memalign\(?\)? failed|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
    r"|std::bad_alloc|bad allocation|memory allocation fail|PT_DEVMEM.*allocation failed"
    r"|(CUBLAS|CUSOLVER|CUSPARSE|CUDNN|CUFFT|HIPBLAS|ROCBLAS|MIOPEN|HIPFFT)_?(STATUS_?)?\w*"
    r"(ALLOC(ATION)?_?FAILED|MEMORY_ERROR)"
    r"|(cuda|hip)ErrorMemoryAllocation|ERROR_RT_MEMORY_ALLOCATION|\b(PI|UR)(_RESULT)?_ERROR_OUT_OF_RESOURCES"
    r"|(cuda|hip)(Malloc|HostAlloc|MallocHost|HostMalloc|HostRegister)\w* failed"
    r"|Failed to (CUDA|HIP) (c|m|host )?alloc|NCCL.*malloc failed"
    r"|Unable to allocate .* for an array|defaultCPUAllocator|pin(ned|_)? ?memory.*(alloc|resource)"
    r"|\[Errno 12\]|\bENOMEM\b|\bMemoryError\b|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
# Libraries that keep workspaces beside torch's cache report a full device so; a broken driver or library does, too.
_MAYBE_OUT_OF_MEMORY = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|CUFFT)_(STATUS_)?(NOT_INITIALIZED|INTERNAL_ERROR)"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED"  # torch's allocator asks NVML only when it has failed
    r"|unable to find an engine|Unable to find a valid cuDNN algorithm|miopenStatus(InternalError|UnknownError)",
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
    "low precision dtypes not supported",
)  # fmt: skip


def means_out_of_memory(text: str, free_share: float | None = None) -> bool:
    """Returns whether an error message says that memory ran out.

    Args:
        text: The message, all lines.
        free_share: Free share of the device's memory after the error; None if unknown. Messages that a full device
            shares with a broken driver count only if the device is full, or if that is unknown.
    """
    if _OUT_OF_MEMORY.search(text):
        return True
    full = free_share is None or free_share < FULL_FREE_SHARE
    return full and _MAYBE_OUT_OF_MEMORY.search(text) is not None


def means_lost_peer(text: str) -> bool:
    """Returns whether an error message only reports that another rank has died."""
    return any(words in text.lower() for words in _LOST_PEER)


def means_other_dtype(text: str) -> bool:
    """Returns whether an error message says that a tensor has another type than the 16-bit weights."""
    return any(words in text.lower() for words in _OTHER_DTYPE)


def headline(text: str) -> str:
    """Returns the line of an error message that names the cause; NCCL states it below `Last error:`."""
    lines = text.strip().splitlines() or [""]
    first = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    cause = re.search(r"^Last error:\s*(\S.*)$", text, re.MULTILINE)
    return f"{first} ({cause[1].strip()})" if cause and cause[1] not in first else first
