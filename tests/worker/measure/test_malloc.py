"""The C library's heaps at the end of a trial: what a thread frees is handed back."""

import subprocess
import sys

import pytest

# A thread frees 36 MiB, before a living block or at the end of its heap, and later takes and frees 5 MiB.
PROGRAM = """
import ctypes, resource, sys, threading
from pathlib import Path
from autotune.worker.measure import malloc

MIB = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
freed, go, taken, end = (threading.Event() for _ in range(4))

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def used(n_bytes):
    block = libc.malloc(n_bytes)
    ctypes.memset(block, 1, n_bytes)
    return block

def thread():
    blocks = [used(6 * MIB) for _ in range(6)]
    if sys.argv[2] == "hole":
        used(4000)
    for block in blocks:
        libc.free(block)
    freed.set()
    go.wait()
    libc.free(used(5 * MIB))
    taken.set()
    end.wait()

malloc.leave_heaps_open()
libc.mallopt(malloc.M_MMAP_THRESHOLD, 32 * MIB)  # what glibc learns: blocks of this size lie in heaps, whose ends stay
libc.mallopt(malloc.M_TRIM_THRESHOLD, 64 * MIB)
before = resident()
others = [threading.Thread(target=lambda: (used(100), end.wait())) for _ in range(int(sys.argv[1]))]
for other in [*others, threading.Thread(target=thread)]:
    other.start()
freed.wait()
if sys.argv[3] == "none":
    malloc.keep_none()
else:
    malloc.hand_back()
go.set()
taken.wait()
print((resident() - before) / MIB)
end.set()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("n_others", "where", "keeps", "mib"),
    [
        (2, "hole", "some", 5),
        (2, "end", "some", 36),
        (2, "hole", "none", 0),
        (2, "end", "none", 0),
        (14, "hole", "none", 0),
    ],
)
def test_what_a_thread_frees_is_handed_back_once_none_is_to_be_kept(n_others, where, keeps, mib):
    command = [sys.executable, "-c", PROGRAM, str(n_others), where, keeps]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(mib, abs=2.0)
