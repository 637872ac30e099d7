"""Follows one forward and backward op by op: what is alive when, what is computed, what is moved. On fake tensors it costs no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autotune.predictors.profile import Pass

aten = torch.ops.aten
# Micro-batches and bytes of a complete gradient's element among which the highest instants are looked for.
LOOKED_AT_MICRO = 2.0 ** np.arange(15)
LOOKED_AT_GRADIENT = np.array([0.0, 1.0, 2.0, 4.0, 6.0])


def _attention(*shapes: int) -> Callable[..., int]:
    """FLOPs of attention from the shapes of its tensors at these places among the arguments."""

    def count(*args: Any, **_: Any) -> int:
        found = [args[place].shape for place in shapes]
        return int(sdpa_flop_count(*found) if len(found) == 3 else sdpa_backward_flop_count(*found))

    return count


# Attention on a CPU has kernels of its own, which torch's table leaves out.
FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(0, 1, 2, 3),
}


@dataclass
class Trace:
    """What one pass with one micro-batch did."""

    moments: list[tuple[int, int]] = field(default_factory=list)
    kept_bytes: int = 0
    largest_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    n_ops: int = 0
    peak_bytes: int = 0


class Follower(TorchDispatchMode):
    """Sees every operation below autograd; counts the bytes of tensors that were made since it began and still live.

    Args:
        known: Tensors whose memory does not count: parameters, buffers, the batch.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.gradient_elements = 0
        self._live = 0
        self._forward = True
        self._alive: dict[int, Any] = {}
        # The storages themselves are held, or a new one could get the address of a dead one.
        self._known = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in known)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, trace = func._overloadpacket, self.trace
        trace.n_ops += 1
        count = FLOPS.get(packet)
        if count is not None:
            trace.flops += count(*args, **kwargs)
        elif packet in flop_registry:
            trace.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif not func.is_view:
            trace.moved_bytes += sum(
                tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs, result))
            )
        made = sum(self._made(tensor) for tensor in _tensors(result))
        if made:
            trace.moments.append((self._live, self.gradient_elements))
            trace.peak_bytes = max(trace.peak_bytes, self._live)
        return result

    def live(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes that are alive now.

        Args:
            without: Tensors that do not count, as weights that ZeRO-3 has gathered meanwhile.
        """
        gathered = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in without}
        return self._live - sum(int(storage.nbytes()) for key, storage in gathered.items() if key in self._alive)

    def forward_ended(self, without: Iterable[Tensor] = ()) -> None:
        """Notes what forward leaves; see `live`."""
        self.trace.kept_bytes = self.live(without)
        self._forward = False

    def _made(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors, and wrappers around others
            return 0
        key = storage._cdata
        if key in self._known or key in self._alive:
            return 0
        size = int(storage.nbytes())

        def gone(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._live -= size

        self._alive[key] = weakref.ref(storage, gone)
        self._live += size
        if self._forward:
            self.trace.largest_bytes = max(self.trace.largest_bytes, size)
        return size


def follow(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any) -> Trace:
    """One forward and backward; gradients are dropped as soon as they are complete.

    Args:
        model: The model.
        loss: From model and batch.
        batch: The batch, on the model's device and of its type.
    """
    follower = Follower([*model.parameters(), *model.buffers(), *_tensors(batch)])

    def complete(parameter: Tensor) -> None:
        follower.gradient_elements += parameter.numel()
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(complete) for parameter in trained]
    try:
        with follower:
            value = loss(model, batch)
            follower.forward_ended()
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return follower.trace


def combine(first: Trace, second: Trace, sizes: tuple[int, int]) -> Pass:
    """The pass as a function of the micro-batch, from two of them.

    Args:
        first: With the smaller micro-batch.
        second: With the larger one.
        sizes: The micro-batches.
    """

    def affine(a: float, b: float) -> tuple[float, float]:
        slope = (b - a) / (sizes[1] - sizes[0])
        # A constant below zero is curvature, not memory: proportional then, through the larger one.
        return (a - slope * sizes[0], slope) if slope * sizes[0] <= a else (0.0, b / sizes[1])

    if [elements for _, elements in first.moments] == [elements for _, elements in second.moments]:
        pairs = zip(first.moments, second.moments, strict=True)
        moments = [(*affine(a, b), float(elements)) for (a, elements), (b, _) in pairs]
    else:  # the two did not run alike: only their highest instants compare
        whole = max(elements for _, elements in second.moments)
        moments = [(*affine(first.peak_bytes, second.peak_bytes), 0.0), (0.0, 0.0, float(whole))]
    return Pass(
        moments=_highest(moments),
        kept_bytes=affine(first.kept_bytes, second.kept_bytes),
        largest_bytes=affine(first.largest_bytes, second.largest_bytes),
        flops=affine(first.flops, second.flops),
        moved_bytes=affine(first.moved_bytes, second.moved_bytes),
        n_ops=float(second.n_ops),
    )


def _highest(moments: list[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """The instants that are the highest for some micro-batch and some bytes of a gradient."""
    table = np.array(moments)
    kept: dict[int, None] = {}
    for width in LOOKED_AT_GRADIENT:
        heights = table[:, 0] + np.outer(LOOKED_AT_MICRO, table[:, 1]) + width * table[:, 2]
        kept |= dict.fromkeys(int(row) for row in heights.argmax(axis=1))
    return tuple(moments[row] for row in sorted(kept))


def optimizer_needs(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: torch.device | None = None
) -> tuple[float, float, bool]:
    """Bytes of state and of scratch of an optimizer per fp32 element, and whether it takes the scratch for all tensors at once.

    Args:
        make: Makes it for parameters.
        device: Where they are: on CUDA torch's optimizers take all tensors at once, on a CPU one after the other.
    """
    size = 64 * 64
    scratch = []
    state = 0.0
    for n in (1, 2):
        parameters = [nn.Parameter(torch.zeros(64, 64, device=device)) for _ in range(n)]
        optimizer = make(parameters)
        for step in range(2):  # states appear in the first
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            known = [tensor for values in optimizer.state.values() for tensor in _tensors(values)]
            follower = Follower([*parameters, *(p.grad for p in parameters if p.grad is not None), *known])
            with follower:
                optimizer.step()
            if step:
                scratch.append(follower.trace.peak_bytes / size)
        held = sum(
            t.numel() * t.element_size()
            for values in optimizer.state.values()
            for t in _tensors(values)
            if t.numel() >= size
        )
        state = held / (n * size)
    return state, scratch[0], scratch[1] > 1.5 * scratch[0]


@contextmanager
def recomputing(blocks: list[nn.Module], every: int) -> Iterator[None]:
    """Has every k-th block recomputed, and puts things back."""
    from autotune.worker.observe import Checkpointer

    wrapped = Checkpointer(blocks, every).wrapped if every else []
    try:
        yield
    finally:
        for block in wrapped:
            del block.__dict__["forward"]


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))
