"""The C library's allocator: how it hands freed memory back to the system, once or from now on.

glibc keeps freed memory for later, and learns from the sizes of freed blocks how much, up to 32 MiB a block. A step pays for
each fresh page, so timed steps need the allocator as a training has it. If it keeps memory, resident memory shows the most
that was ever in use, in pieces; only if it keeps none, the memory in use, as on a GPU.
"""

import contextlib
import ctypes
import mmap
import threading
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_TEST, M_ARENA_MAX = -1, -3, -7, -8  # malloc.h
LEAST_BYTES, MOST_BYTES, MOST_HOLES = 128 << 10, 4 << 30, 100_000
# Threads that reach the heaps of this process's other threads: gloo has a few for each group of ranks.
N_HELPERS = 32
MANY = 1000
IS_MMAPPED, HEADER_BYTES, PAGE_BYTES = 2, 16, 4096


def hand_back() -> None:
    """Returns freed memory to the system."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def leave_heaps_open() -> None:
    """Has the C library not yet settle how many heaps there may be, which it does for good at the ninth: see `keep_none`."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_TEST, MANY)


def keep_none() -> None:
    """Makes blocks of 128 KiB and more return to the system as soon as they are freed; for good, since glibc learns no more.

    That costs up to 40 % more CPU time for page faults. Blocks that are freed later are their own mappings; the holes of
    earlier ones would take new blocks and stay resident with them, so they are taken first, untouched, and never given back.
    So are those in the heaps (arenas) of other threads: new threads get a share in them where no further heap may be made.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError):  # RuntimeError: no more threads may be started
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LEAST_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, LEAST_BYTES)
        libc.malloc_trim(0)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if not _fill_holes(libc, MOST_BYTES):
            return
        _fill_heap(libc)
        libc.mallopt(M_ARENA_MAX, 1)
        together = threading.Barrier(N_HELPERS)
        helpers = [threading.Thread(target=_fill_heap, args=(libc, together), daemon=True) for _ in range(N_HELPERS)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()


def _fill_heap(libc: Any, together: threading.Barrier | None = None) -> None:
    """Takes all holes in the heap of this thread, the largest first; waits for other threads, or they would share one heap."""
    if together is not None:
        together.wait()
    n_bytes = MOST_BYTES // 2
    while n_bytes >= LEAST_BYTES:
        _fill_holes(libc, n_bytes)
        n_bytes //= 2


def _fill_holes(libc: Any, n_bytes: int) -> bool:
    """Takes all holes of some size; returns whether it met their end: a block that glibc mapped by itself, for lack of one.

    Such a block begins a header after the start of a page, and says so there; another allocator's would have no header.
    """
    for _ in range(MOST_HOLES):
        if not (block := libc.malloc(n_bytes)):
            break
        own_page = block % PAGE_BYTES == HEADER_BYTES
        if own_page and ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & IS_MMAPPED:
            libc.free(block)
            return True
        if n_bytes == MOST_BYTES:  # no hole is as large, so this is no glibc
            libc.free(block)
            return False
        # The end of a thread's heap is not trimmed with the rest.
        first = -(-block // PAGE_BYTES) * PAGE_BYTES
        libc.madvise(first, (block + n_bytes - first) // PAGE_BYTES * PAGE_BYTES, mmap.MADV_DONTNEED)
    return False
