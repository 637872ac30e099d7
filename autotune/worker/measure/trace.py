"""Trace of steps by torch's profiler: the file, and a summary of where the time went."""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.trial.result import Operation, Traced

MARK = "autotune: "
# Operations limited by arithmetic; all others are limited by memory traffic.
PRODUCTS = re.compile(
    r"^(aten|mkldnn|mkl)::_?(mm|addmm|bmm|baddbmm|mv|addmv|dot|linear|mkldnn_linear|mkl_linear|addbmm|einsum"
    r"|\w*convolution\w*|\w*conv[123]d\w*|\w*scaled_dot_product\w*|\w*flash_attention\w*|\w*efficient_attention\w*)$"
)
MESSAGES = re.compile(r"^(c10d::|gloo:|nccl:|record_param_comms|c10d_functional::)")
KERNEL_MESSAGES = re.compile(r"nccl|AllReduce|AllGather|ReduceScatter", re.IGNORECASE)
MAX_OPERATIONS = 12
# Below this time an operation is mostly fixed cost.
SHORT_US = {"cpu": 25.0, "cuda": 5.0}
KINDS = ("products", "traffic", "short", "messages")
Interval = tuple[float, float]


class Tracer:
    """Traces steps, phase by phase."""

    def __init__(self, folder: Path, rank: int, *, cuda: bool) -> None:
        self.path = folder / f"trace-rank-{rank}.json.gz"
        self._cuda = cuda
        self._span: Any = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def enter(self, phase: str) -> None:
        """Ends the current phase and starts another, unless its name is empty."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        if phase:
            self._span = record_function(MARK + phase)
            self._span.__enter__()

    def finish(self, n_steps: int) -> Traced:
        """Writes the trace for Chrome or Perfetto; returns its summary."""
        self.enter("")
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self.path))
        return summary(self._profile.events(), n_steps, cuda=self._cuda, file=self.path.name)


def summary(events: Sequence[Any], n_steps: int, *, cuda: bool, file: str) -> Traced:
    """Returns a summary of traced steps; on CUDA it counts the time of kernels, not of operations on the host."""

    def per_step_s(microseconds: float) -> float:
        return microseconds / 1e6 / n_steps

    hosted = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name.removeprefix(MARK)) for e in hosted if e.name.startswith(MARK)
    )
    starts = [start for start, _, _ in spans]
    kinds: dict[str, dict[str, float]] = {name: dict.fromkeys(KINDS, 0.0) for _, _, name in spans}
    calls: Counter[str] = Counter()
    own_s: dict[str, float] = defaultdict(float)
    for event in hosted:
        at = bisect.bisect_right(starts, event.time_range.start) - 1
        outside = at < 0 or event.time_range.start > spans[at][1]
        if outside or event.name.startswith((MARK, "ProfilerStep", "Optimizer.", "enumerate(")):
            continue
        own_us = sum(kernel.duration for kernel in event.kernels) if cuda else event.self_cpu_time_total
        kind = _kind(event.name)
        if kind != "messages":  # messages are counted below, by their intervals
            kind = "short" if own_us < SHORT_US["cuda" if cuda else "cpu"] else kind
            kinds[spans[at][2]][kind] += per_step_s(own_us)
        calls[event.name] += 1
        own_s[event.name] += per_step_s(own_us)
    messages, work = _messages_and_work(events, cuda=cuda)
    spans_s: dict[str, float] = defaultdict(float)
    for start, end, name in spans:
        spans_s[name] += per_step_s(end - start)
        within = [(max(a, start), min(b, end)) for a, b in messages if a < end and b > start]
        kinds[name]["messages"] += per_step_s(_length(within) - _common(within, work))
    return Traced(
        file=file,
        n_steps=n_steps,
        spans_s=dict(spans_s),
        kinds_s=kinds,
        messages_s=per_step_s(_length(messages)),
        hidden_s=per_step_s(_common(messages, work)),
        operations=[
            Operation(name=name, calls=calls[name] / n_steps, seconds=own_s[name])
            for name in sorted(own_s, key=lambda name: -own_s[name])[:MAX_OPERATIONS]
            if own_s[name] > 0
        ],
    )


def _kind(name: str) -> str:
    if MESSAGES.match(name):
        return "messages"
    return "products" if PRODUCTS.match(name) else "traffic"


def _messages_and_work(events: Sequence[Any], *, cuda: bool) -> tuple[list[Interval], list[Interval]]:
    """Returns the intervals of messages and the intervals of computation."""
    if cuda:
        kernels = [
            event
            for event in events
            # A range that somebody named, as the optimizer's step, spans what lies between kernels, too.
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        told = [(event, bool(KERNEL_MESSAGES.search(event.name))) for event in kernels]
    else:
        # gloo's threads record messages; operations that only call others do not count as work.
        leaves = [event for event in events if not event.cpu_children or MESSAGES.match(event.name)]
        told = [
            (event, bool(MESSAGES.match(event.name)))
            for event in leaves
            if event.name.startswith(("gloo:", "aten::", "autograd::", "mkldnn::"))
        ]
    split: dict[bool, list[Interval]] = {True: [], False: []}
    for event, is_message in told:
        split[is_message].append((event.time_range.start, event.time_range.end))
    return _union(split[True]), _union(split[False])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint ones, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Returns the total length of the intersection of two unions."""
    return _length(some) + _length(others) - _length(_union([*some, *others]))
