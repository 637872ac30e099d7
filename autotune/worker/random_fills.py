"""Random weights are drawn once: the first trial keeps large random fills in a file, from which later ones copy them.

Drawing the weights of a model of 10^9 parameters takes a CPU some eight seconds in every rank, copying them one. A fill
is a pure function of the generator's state, the distribution, the shape and the type; where these are equal the values
and the state that follows are too, whatever the program does between two fills. The file has no name: it ends with the
server that opened it, and is reached only by the ranks forked from that server.
"""

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.worker.measure.recorder import Recorder
from autotune.worker.script.patching import patch

# Smaller fills are drawn anew: looking them up takes about as long.
LEAST_BYTES = 1 << 20
# Part of the free disk that the file may take.
MOST_OF_DISK = 0.25
FILLS = ("normal_", "uniform_")
PHASES = ("import", "build", "initialize")
KEY_BYTES, NUMBER_BYTES = 32, 8


@dataclass
class _Store:
    """The files of values and of their index, and the fills that the index named when this process first looked.

    A record of the index is a key, the offset of the values, and the generator's state after the fill.
    """

    values: int
    index: int
    most_bytes: int
    found: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    grew: bool = False

    def read_index(self, n_state: int) -> None:
        """Reads the index."""
        size = KEY_BYTES + NUMBER_BYTES + n_state
        data = os.pread(self.index, os.fstat(self.index).st_size, 0)
        for start in range(0, len(data) - size + 1, size):
            key, rest = data[start : start + KEY_BYTES], data[start + KEY_BYTES : start + size]
            self.found[key] = int.from_bytes(rest[:NUMBER_BYTES], "little"), rest[NUMBER_BYTES:]

    def add(self, key: bytes, values: memoryview, state: bytes) -> None:
        """Keeps a fill; the record is written last, so that a killed rank leaves none without values."""
        offset = -(-os.fstat(self.values).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if offset + len(values) > self.most_bytes:
            return
        written = 0
        while written < len(values):
            written += os.pwrite(self.values, values[written:], offset + written)
        os.pwrite(self.index, key + offset.to_bytes(NUMBER_BYTES, "little") + state, os.fstat(self.index).st_size)
        self.grew = True


_store: _Store | None = None


def open_store() -> None:
    """In the server: opens the files, which forked ranks inherit; without a disk for them every rank draws."""
    global _store  # noqa: PLW0603
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as values, tempfile.TemporaryFile() as index:
        free = os.fstatvfs(values.fileno())
        most = int(MOST_OF_DISK * free.f_bavail * free.f_frsize)
        _store = _Store(os.dup(values.fileno()), os.dup(index.fileno()), most)


def install(recorder: Recorder) -> None:
    """In a rank: keeps and repeats the random fills of tensors, up to the first step."""
    if _store is None:
        return
    _store.read_index(torch.get_rng_state().numel())
    keeps = os.environ.get("LOCAL_RANK") == "0"
    for name in FILLS:
        patch(torch.Tensor, name, _Fill(name, recorder, _store, keeps=keeps))


def flush() -> None:
    """Writes what was kept to the disk before steps are timed, so that it is not written meanwhile."""
    if _store is not None and _store.grew:
        _store.grew = False
        with contextlib.suppress(OSError):
            os.fdatasync(_store.values)


class _Fill:
    """A hook on one of torch's functions that fill a tensor with random numbers."""

    def __init__(self, name: str, recorder: Recorder, store: _Store, *, keeps: bool) -> None:
        self._name, self._recorder, self._store, self._keeps = name, recorder, store, keeps

    def __call__(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_large(tensor) or kwargs.get("generator") is not None:
            return original(tensor, *args, **kwargs)
        before = bytes(torch.get_rng_state().numpy())
        what = repr((self._name, args, sorted(kwargs.items()), tuple(tensor.shape), str(tensor.dtype)))
        key = hashlib.sha256(before + what.encode()).digest()
        if key in self._store.found:
            self._repeat(tensor, *self._store.found[key])
            return tensor
        result = original(tensor, *args, **kwargs)
        if self._keeps:
            flat = tensor.detach().view(-1).view(torch.uint8).numpy()
            with contextlib.suppress(OSError):  # a full disk costs the time of drawing again
                self._store.add(key, memoryview(flat), bytes(torch.get_rng_state().numpy()))
        return result

    def _is_large(self, tensor: Any) -> bool:
        return (
            self._recorder.report.phase in PHASES
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and tensor.numel() * tensor.element_size() >= LEAST_BYTES
        )

    def _repeat(self, tensor: Any, offset: int, state: bytes) -> None:
        n_bytes = tensor.numel() * tensor.element_size()
        with mmap.mmap(
            self._store.values, n_bytes, offset=offset, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE
        ) as kept:
            values = torch.frombuffer(kept, dtype=tensor.dtype)
            tensor.detach().view(-1).copy_(values)
            del values
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
