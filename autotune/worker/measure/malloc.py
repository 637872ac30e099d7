"""The C library's allocator: how much freed memory it keeps for later, which decides what a step pays for new pages.

glibc takes large blocks from the system and returns them when they are freed, and hands the end of its heap back when much of
it is free. From which sizes on, it learns while a process runs: from the largest block that was freed, up to 32 MiB. A step
whose tensors are just beyond pays for fresh pages each time: 38 % of the CPU time of a small convolutional net. So timed steps
need the thresholds that a training finds, no others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, NamedTuple

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LEAST_BYTES, MOST_BYTES = 128 << 10, 32 << 20  # glibc's own: where it starts, and where it ends learning
IS_MMAPPED = 2  # a flag in the word before a block
RESOLUTION = 1 / 64
# Blocks that may be found in the heap's holes before it has to grow.
MOST_HOLES = 64


class Thresholds(NamedTuple):
    """From how many bytes on blocks are taken from the system each, and free memory at the heap's end is handed back."""

    mmap_bytes: int
    trim_bytes: int


NOTHING_KEPT = Thresholds(LEAST_BYTES, LEAST_BYTES)
MOST_KEPT = Thresholds(MOST_BYTES, 2 * MOST_BYTES)


def set_thresholds(wanted: Thresholds) -> None:
    """Sets the thresholds; glibc learns no more from then on. Another C library is left as it is."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, wanted.mmap_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, wanted.trim_bytes)


def hand_back() -> None:
    """Makes the C library return freed memory to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def thresholds() -> Thresholds:
    """Finds the thresholds that this process has come to, by taking blocks of several sizes; none of them is touched.

    glibc does not tell them. Afterwards it learns no more.
    """
    held: list[int] = []
    try:
        libc = _libc()
        low, high = LEAST_BYTES // 2, MOST_BYTES
        while high - low > max(4096, low * RESOLUTION):
            middle = (low + high) // 2
            low, high = (low, middle) if _taken_from_system(libc, middle, held) else (middle, high)
    except (AttributeError, OSError):
        return MOST_KEPT
    found = Thresholds(high, _stated_trim() or (2 * high if high > LEAST_BYTES else LEAST_BYTES))
    set_thresholds(found)  # before the blocks are freed, from which it would learn
    for block in held:
        libc.free(block)
    return found


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version  # noqa: B018 - raises where it is another one
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    return libc


def _taken_from_system(libc: Any, n_bytes: int, held: list[int]) -> bool:
    """Returns whether a block of some bytes is taken from the system, where no hole in the heap fits."""
    for _ in range(MOST_HOLES):
        heap_end = libc.sbrk(0)
        block = libc.malloc(n_bytes)
        if not block:
            raise OSError("no memory")
        held.append(block)
        if block % 4096 == 0:
            raise OSError("not glibc's malloc: its blocks begin after a header")
        if ctypes.c_size_t.from_address(block - 8).value & IS_MMAPPED:
            return True
        if block + n_bytes > heap_end:
            return False
    return False


def _stated_trim() -> int | None:
    """Returns the threshold that the user's environment states."""
    stated = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = tunable.partition("=")
        stated = value if name == "glibc.malloc.trim_threshold" else stated
    return int(stated) if stated.isdigit() else None
