"""Count the memory, FLOPs and bytes moved of one forward and backward, operation by operation."""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotune.trial.profile import Pass
from autotune.worker.containers import tensors_in
from autotune.worker.device import convolves_in_tf32

aten = torch.ops.aten
# Micro-batches and bytes per gradient element for which the instants of highest memory are kept.
LOOKED_AT_MICRO = 2.0 ** np.arange(15)
LOOKED_AT_GRADIENT = np.array([0.0, 1.0, 2.0, 4.0, 6.0])


def _attention(first: int, times: tuple[int, int], keys: int = -2) -> Callable[..., int]:
    """Returns a function for the FLOPs of attention, also of several query heads to one of keys.

    Args:
        first: Place of the queries among the arguments; keys and values follow.
        times: Products over the width of the queries, and of the values.
        keys: Dimension of the keys that is their number.
    """

    def count(*args: Any, **_: Any) -> int:
        query, key, value = (tensor.shape for tensor in args[first : first + 3])
        return int(2 * math.prod(query[:-1]) * key[keys] * (times[0] * query[-1] + times[1] * value[-1]))

    return count


def _packed_attention(first: int, times: tuple[int, int], ends: int) -> Callable[..., int]:
    """Returns the same for samples in one row, one after the other.

    Args:
        ends: Place of the ends of their queries among the arguments; those of their keys follow.
    """

    def count(*args: Any, **_: Any) -> int:
        query, _key, value = (tensor.shape for tensor in args[first : first + 3])
        n_queries, n_keys = (each.long().diff() for each in args[ends : ends + 2])
        pairs = int((n_queries * n_keys).sum())
        return int(2 * pairs * query[-2] * (times[0] * query[-1] + times[1] * value[-1]))

    return count


def _grouped(a: Tensor, b: Tensor, *_args: Any, **_: Any) -> int:
    """Returns the FLOPs of products by groups of rows, as of the tokens of each expert; one tensor holds the rows of all groups."""
    return 2 * (len(a) if a.dim() == b.dim() == 3 else 1) * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _recurrent(sequence: Tensor, *args: Any, **_: Any) -> int:
    """Returns the FLOPs of recurrent layers: their weights are a list, or those of one layer two arguments."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    rows = sequence.numel() // max(1, sequence.shape[-1])
    return int(2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _twice(count: Callable[..., int]) -> Callable[..., int]:
    """Returns a function for the FLOPs of the backward of products, which has two for each."""
    return lambda *args, **kwargs: 2 * count(*args, **kwargs)


# FLOPs by operation, of those that are missing in torch's table, some versions of which refuse grouped queries, too.
FLOPS: dict[str, Callable[..., int]] = {
    "flex_attention": _attention(0, (1, 1)),
    "flex_attention_backward": _attention(0, (3, 2)),  # the scores are computed once more
    **dict.fromkeys(("aten._grouped_mm", "aten._scaled_grouped_mm", "transformers.grouped_mm_fallback"), _grouped),
    "transformers.grouped_mm_fallback_backward": _twice(_grouped),
    # Of FlashAttention 2, whose heads come after the positions (flash_attn/flash_attn_interface.py).
    "flash_attn._flash_attn_forward": _attention(0, (1, 1), keys=-3),
    "flash_attn._flash_attn_backward": _attention(1, (3, 2), keys=-3),
    "flash_attn._flash_attn_varlen_forward": _packed_attention(0, (1, 1), ends=3),
    "flash_attn._flash_attn_varlen_backward": _packed_attention(1, (3, 2), ends=9),
}
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    FLOPS[f"aten._scaled_dot_product_{_name}"] = _attention(0, (1, 1))
    FLOPS[f"aten._scaled_dot_product_{_name}_backward"] = _attention(1, (3, 2))
for _name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"):
    FLOPS[f"aten.{_name}"], FLOPS[f"aten.{_name}_backward"] = _recurrent, _twice(_recurrent)
# Of these, an argument is a table of which only some values are read: its place among the arguments.
TABLES = {
    aten.embedding: 0, aten.gather: 0, aten.index: 0, aten.index_select: 0, aten.nll_loss_forward: 0, aten.nll_loss2d_forward: 0,
    aten.nll_loss_backward: 1, aten.nll_loss2d_backward: 1,
}  # fmt: skip
CONVOLUTIONS = {packet for packet in flop_registry if "conv" in str(packet)}


@dataclass
class Trace:
    """Counts of one forward and backward with one micro-batch.

    Attributes:
        moments: Bytes alive and gradient elements complete, whenever tensors were made.
        kept_bytes: Bytes alive after forward.
        largest_bytes: Largest storage that forward made.
        flops: Of matrix products, convolutions and attention.
        tf32_flops: Of these, what may take TensorFloat-32 without being asked to: convolutions.
        moved_bytes: Size of arguments and results of all operations; of tables the results alone, of products no weights.
        peak_bytes: Most bytes alive.
        cast_bytes: Size of copies of weights in another type, where they count apart.
        n_casts: Number of these copies.
        written: Storages of what was there before that operations changed, as of buffers.
        backward: FLOPs, bytes moved and operations of the backward pass, estimated from forward's for scripts.
    """

    moments: list[tuple[int, int]] = field(default_factory=list)
    kept_bytes: int = 0
    largest_bytes: int = 0
    flops: int = 0
    tf32_flops: int = 0
    moved_bytes: int = 0
    n_ops: int = 0
    peak_bytes: int = 0
    cast_bytes: int = 0
    n_casts: int = 0
    written: set[int] = field(default_factory=set)
    backward: tuple[int, int, int] = (0, 0, 0)


class OpCounter(TorchDispatchMode):
    """Counts operations below autograd, and the living bytes that they make; `known` tensors do not count.

    Attributes:
        sharded: ZeRO 3 adds a bias apart from the product (runtime/zero/linear.py): that does not count.
        gathers: Operations gather its weights or drop them again: they do not count, and what they make are weights.
        off: Nothing counts any more.
        of_script: The model is as a script's baseline has it. Copies of weights in another type, as autocast makes, count
            apart: they do not grow with the batch. That a tensor is detached does not count, as ZeRO 3 does around each module.
    """

    supports_higher_order_operators = True  # else torch refuses flex_attention while operations are counted

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.gradient_elements = 0
        self.sharded = self.gathers = self.of_script = self.off = False
        self._live = 0
        self._forward = True
        self._alive: dict[int, Any] = {}
        self._gathered: dict[int, Any] = {}
        # Holds the storages, since a new one could get the address of a dead one.
        known = list(known)
        self._known = storages(known)
        self._weights = storages(tensor for tensor in known if isinstance(tensor, nn.Parameter)).keys()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return _asked(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if self.off:
            return result
        if self.gathers:
            self._note_gathered(result)
            return result
        packet, trace = getattr(func, "_overloadpacket", func), self.trace
        trace.written |= storages(_written(func, args, kwargs)).keys() & self._known.keys()
        if self.of_script and packet is aten._to_copy and self._is_weight(args[0]):
            self._note_gathered(result)
            trace.cast_bytes, trace.n_casts = trace.cast_bytes + result.nbytes, trace.n_casts + 1
            return result
        if (self.of_script and packet is aten.detach) or (
            self.sharded and packet is aten.add_ and self._is_weight(args[1])
        ):
            return result
        trace.n_ops += 1
        count, flops, moved = FLOPS.get(str(packet)) or flop_registry.get(packet), 0, 0
        product = count is not None
        if count is not None:
            with suppress(Exception):  # torch's functions refuse shapes that they do not know, which kernels may take
                flops = int(count(*args, **kwargs, out_val=result))
            trace.tf32_flops += flops if packet in CONVOLUTIONS and convolves_in_tf32() else 0
        if not getattr(func, "is_view", False) and packet is not aten._unsafe_view:
            table = TABLES.get(packet)
            read = args if table is None else args[:table] + args[table + 1 :]
            moved = sum(
                tensor.numel() * tensor.element_size()
                for tensor in tensors_in((read, kwargs, result))
                if not (product and self._is_weight(tensor))  # each weight is read once a pass: `step_time_terms`
            )
        trace.flops, trace.moved_bytes = trace.flops + flops, trace.moved_bytes + moved
        if self.of_script and (times := self._backward_of(tuple(tensors_in((args, kwargs))), product=product)):
            before = trace.backward
            trace.backward = before[0] + times * flops, before[1] + times * moved, before[2] + times
        made = sum(self._made(tensor, (args, kwargs)) for tensor in tensors_in(result))
        if made:
            trace.moments.append((self._live, self.gradient_elements))
            trace.peak_bytes = max(trace.peak_bytes, self._live)
        return result

    def live(self, without: Iterable[Tensor] = ()) -> int:
        """Returns the bytes alive now, without some tensors, such as weights gathered by ZeRO-3."""
        gathered = storages(without)
        return self._live - sum(int(storage.nbytes()) for key, storage in gathered.items() if key in self._alive)

    def forward_ended(self, without: Iterable[Tensor] = ()) -> None:
        """Notes the bytes alive after forward; see `live`."""
        self.trace.kept_bytes = self.live(without)
        self._forward = False

    def _backward_of(self, given: Sequence[Tensor], *, product: bool) -> int:
        """Returns how often an operation's work comes again in backward: twice, for each of a product's factors.

        Where gradients are off nothing tells that of a custom function, or of what is recomputed, from a teacher.
        """
        on = torch.is_grad_enabled()
        if on and not any(tensor.requires_grad for tensor in given):
            return 0
        owners = [tensor if tensor._base is None else tensor._base for tensor in given if self._is_weight(tensor)]
        frozen = any(not each.requires_grad and (on or isinstance(each, nn.Parameter)) for each in owners)
        return 1 if product and frozen else 2

    def _is_weight(self, tensor: object) -> bool:
        storage = _storage(tensor) if isinstance(tensor, Tensor) else None
        return storage is not None and (storage._cdata in self._weights or storage._cdata in self._gathered)

    def _note_gathered(self, result: Any) -> None:
        for key, storage in storages(tensors_in(result)).items():
            gone = functools.partial(self._gathered.pop, key)
            self._gathered[key] = weakref.ref(storage, gone)  # dropped once their module has run

    def _made(self, tensor: Tensor, given: Any) -> int:
        storage = _storage(tensor)
        if storage is None or any(
            (key := storage._cdata) in held for held in (self._known, self._alive, self._gathered)
        ):
            return 0
        # A view of what was there before, as of the weights of a teacher that the loss calls.
        if any(other is not None and other._cdata == key for other in map(_storage, tensors_in(given))):
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


def _asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What a tensor answers a question such as that for its device, which is no operation.

    A fake one is asked twice for each operation, and to dispatch these questions took a fifth of a profile's time; answered as
    it would (torch/_subclasses/fake_tensor.py, `FakeTensor.__torch_dispatch__`).
    """
    if func is torch.ops.prim.device.default and isinstance(tensor := args[0], FakeTensor):
        return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
    return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operation changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[at] if at < len(args) else kwargs.get(argument.name))


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None for sparse ones, and wrappers around others."""
    with suppress(NotImplementedError, RuntimeError):
        return tensor.untyped_storage()
    return None


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, by what tells one from another."""
    return {storage._cdata: storage for storage in map(_storage, tensors) if storage is not None}


def follow(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any) -> Trace:
    """Runs and counts one forward and backward; drops gradients as soon as they are complete."""
    counter = OpCounter([*model.parameters(), *model.buffers(), *tensors_in(batch)])

    def complete(parameter: Tensor) -> None:
        counter.gradient_elements += parameter.numel()
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(complete) for parameter in trained]
    try:
        with counter:
            value = loss(model, batch)
            counter.forward_ended()
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return counter.trace


def combine(first: Trace, second: Trace, sizes: tuple[int, int]) -> Pass:
    """Returns a pass as a linear function of the micro-batch, from the traces of a smaller and a larger one."""

    def affine(a: float, b: float) -> tuple[float, float]:
        slope = (b - a) / (sizes[1] - sizes[0])
        # A negative constant comes from curvature; then proportional, through the larger one.
        return (a - slope * sizes[0], slope) if slope * sizes[0] <= a else (0.0, b / sizes[1])

    if [elements for _, elements in first.moments] == [elements for _, elements in second.moments]:
        pairs = zip(first.moments, second.moments, strict=True)
        moments = [(*affine(a, b), float(elements)) for (a, elements), (b, _) in pairs]
    else:  # the two ran differently: only their peaks compare
        whole = max(elements for _, elements in second.moments)
        # One element stands for the first gradient, with which buckets come.
        moments = [(*affine(first.peak_bytes, second.peak_bytes), 1.0), (0.0, 0.0, float(whole))]
    return Pass(
        moments=_highest(moments),
        kept_bytes=affine(first.kept_bytes, second.kept_bytes),
        largest_bytes=affine(first.largest_bytes, second.largest_bytes),
        flops=affine(first.flops, second.flops),
        tf32_share=second.tf32_flops / max(1, second.flops),
        moved_bytes=affine(first.moved_bytes, second.moved_bytes),
        n_ops=float(second.n_ops),
    )


def _highest(moments: list[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Returns the instants with the highest memory for some micro-batch and gradient type, before the first gradient and after.

    Buckets come with the first gradient, so that the highest instant with them may be another.
    """
    table = np.array(moments)
    kept: dict[int, None] = {}
    for rows in (np.arange(len(table)), np.flatnonzero(table[:, 2])):
        for width in LOOKED_AT_GRADIENT if len(rows) else ():
            heights = table[rows, 0] + np.outer(LOOKED_AT_MICRO, table[rows, 1]) + width * table[rows, 2]
            kept |= dict.fromkeys(int(rows[row]) for row in heights.argmax(axis=1))
    return tuple(moments[row] for row in sorted(kept))


def optimizer_needs(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: torch.device
) -> tuple[float, float, bool]:
    """Returns bytes of state and scratch per fp32 element of an optimizer, and whether scratch is for all at once.

    On CUDA torch's optimizers update all tensors at once, on a CPU one by one.
    """
    size = 64 * 64
    scratch = []
    state = 0.0
    for n in (1, 2):
        parameters = [nn.Parameter(torch.zeros(64, 64, device=device, dtype=torch.float32)) for _ in range(n)]
        optimizer = make(parameters)
        for step in range(2):  # states appear in the first
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            known = [tensor for values in optimizer.state.values() for tensor in tensors_in(values)]
            counter = OpCounter([*parameters, *(p.grad for p in parameters if p.grad is not None), *known])
            with counter:
                optimizer.step()
            if step:
                scratch.append(counter.trace.peak_bytes / size)
        held = sum(
            t.numel() * t.element_size()
            for values in optimizer.state.values()
            for t in tensors_in(values)
            if t.numel() >= size
        )
        state = held / (n * size)
    return state, scratch[0], scratch[1] > 1.5 * scratch[0]


@contextmanager
def recomputing(blocks: list[nn.Module], every: int) -> Iterator[None]:
    """Recomputes every k-th block within the context."""
    from autotune.worker.measure.recompute import Checkpointer

    wrapped = Checkpointer(blocks, every).wrapped if every else []
    try:
        yield
    finally:
        for block in wrapped:
            del block.__dict__["forward"]
