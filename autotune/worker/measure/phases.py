"""Phase timer of one step: the clock stops after each phase and at each collective."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autotune.worker.measure.wire import wire

ENGINE = ("data", "forward", "backward", "step")
# `script`: what a training script does between the calls of its engine and its loader.
PHASES = ("script", *ENGINE)
# Collectives in forward and backward; those in the optimizer's step; waiting until all ranks have come to them.
BETWEEN_RANKS = ("reduce", "gather", "wait")
COLLECTIVES = (
    "allreduce", "reduce", "broadcast", "allgather", "_allgather_base", "all_gather_single", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single",
)  # fmt: skip


class PhaseClock:
    """Times the phases of one step, and the collectives in them separately; all ranks time the same step.

    Ranks meet in a barrier before each collective, so that its time holds no wait for a slow rank.
    """

    def __init__(self, synchronize: Callable[[], None], world_size: int) -> None:
        self.phase = ""
        self.times_s = dict.fromkeys(ENGINE if world_size == 1 else (*ENGINE, *BETWEEN_RANKS), 0.0)
        self._synchronize = synchronize
        self._inside = False
        self._start = 0.0
        self._originals: dict[str, Any] = {}
        wire.clear()
        if world_size > 1:
            # All collectives of torch.distributed end here; DeepSpeed binds the functions above them.
            for name in COLLECTIVES:
                self._patch(name)

    def _patch(self, name: str) -> None:
        kept = vars(dist.ProcessGroup).get(name)
        if kept is not None:
            # vars() gives the descriptor to restore, getattr() the function to call.
            original = getattr(dist.ProcessGroup, name)
            self._originals[name] = kept
            # A function rather than a bound method, so that it gets the group.
            setattr(dist.ProcessGroup, name, lambda *args, **kwargs: self._collective(original, *args, **kwargs))

    def end(self) -> dict[str, float]:
        """Ends the current phase and restores the collectives; returns seconds by phase."""
        self.close()
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals = {}
        return self.times_s

    def open(self, phase: str) -> None:
        """Starts a phase."""
        self._synchronize()
        self.phase, self._start = phase, time.perf_counter()

    def close(self) -> None:
        """Ends the current phase."""
        if self.phase:
            self._synchronize()
            self.times_s[self.phase] = self.times_s.get(self.phase, 0.0) + time.perf_counter() - self._start
        self.phase = ""

    def recompute(self, run: Callable[[], Any]) -> Any:
        """Runs a recomputation in backward, timed as the phase `recompute`."""
        phase = self.phase
        self.times_s.setdefault("recompute", 0.0)
        self.close()
        self.open("recompute")
        try:
            return run()  # raises where the rest of a block is not needed
        finally:
            self.close()
            self.open(phase)

    def _collective(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.phase or self._inside or group.size() == 1:
            return original(group, *args, **kwargs)
        phase = self.phase
        wire.note(phase, (args, kwargs))
        self.close()
        self._inside = True
        try:
            start = time.perf_counter()
            group.barrier().wait()
            self._synchronize()
            met = time.perf_counter()
            work = original(group, *args, **kwargs)
            if work is not None:
                work.wait()
            self._synchronize()
            self.times_s["wait"] += met - start
            self.times_s["gather" if phase == "step" else "reduce"] += time.perf_counter() - met
        finally:
            self._inside = False
            self.open(phase)
        return work
