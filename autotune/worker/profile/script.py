"""Profile of a script, from one real forward; its backward is estimated, since no part can be run alone."""

import contextlib
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from autotune.trial.profile import ACTIVATION_SCALE, Pass, Profile
from autotune.trial.workload import Experts, Workload
from autotune.worker.containers import n_elements, tensors_in
from autotune.worker.data.worst import length_in
from autotune.worker.measure import batches
from autotune.worker.measure.recompute import Recomputations
from autotune.worker.profile.model import FUSED_STATES, of_parameters
from autotune.worker.profile.op_counter import OpCounter, Trace, optimizer_needs, storages

CAVEAT = "forecasts rest on one forward of the script in its own precision; the rest of a step is estimated"


@dataclass
class _Region:
    """What a script recomputes at once: the block that it is of, its operations, and its output, if that is kept for others."""

    block: int
    n_ops: int
    output: list[weakref.ref[torch.UntypedStorage]]
    output_bytes: int = 0


class ForwardProfile:
    """Counts the operations of an engine's first training forward, in a step that is not timed, with the loss after it.

    Of blocks that the script recomputes, the backward that follows shows what they would keep without that.

    Args:
        trains: Returns whether a forward call is part of the training.
        watch: Tells of what the script recomputes.
    """

    def __init__(
        self, engine: Any, blocks: list[nn.Module], trains: Callable[[], bool], watch: Recomputations | None = None
    ) -> None:
        self._engine, self._trains = engine, trains
        self._counter: OpCounter | None = None
        self._eager: Any = None
        self._done = self._open = self._alone = False
        self._shape: tuple[int, ...] = ()
        self._of_tokens = False
        self._trace = Trace()
        # By block: bytes that it keeps and bytes of its output; those alive when it was entered; those that it keeps besides
        # when it is recomputed. By call: what is recomputed; and the block of what is so now.
        self._inside: dict[int, tuple[int, int]] = {}
        self._entered: dict[int, int] = {}
        self._again: Counter[int] = Counter()
        self._recomputed: dict[Callable[..., Any], _Region] = {}
        self._within: int | None = None
        self._latest = 0
        if watch is not None:
            watch.around = self.around
        self._hooks = [
            engine.register_forward_pre_hook(self._begin, with_kwargs=True),
            engine.register_forward_hook(self._end),
            *(block.register_forward_pre_hook(self._enter_block) for block in blocks),
            *(block.register_forward_hook(self._leave_block) for block in blocks),
        ]

    def __deepcopy__(self, _memo: object) -> Self:
        """A deep copy of the model, as for an average of its weights, must not copy what its hooks hold."""
        return self

    def _begin(self, engine: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._open and self._trains():  # of the same micro-batch, as one for each of two views
            self._done = False
            return
        self.close()
        if self._done or self._counter is not None or not self._trains():
            return
        counted = batches.counted_tensor(args, kwargs)
        self._shape = tuple(counted.shape) if counted is not None else ()
        self._of_tokens = counted is not None and batches.are_tokens(counted)
        self._counter = OpCounter(
            [*engine.parameters(), *engine.buffers(), *(a for a in args if isinstance(a, Tensor))]
        )
        self._leave_out_gathering(self._counter)
        self._counter.of_script = True
        # Operations within what is compiled cannot be counted, and torch refuses a whole graph while they are.
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
        # What else follows operations may end while these are counted, and modes must end in order.
        self._alone = _python_dispatch._get_current_dispatch_mode() is None
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._counter is None or self._done:
            return
        self._done = self._open = True
        self._note_outputs()
        # As it is now, should the loss not be seen.
        self._trace = replace(self._counter.trace, kept_bytes=self._counter.live(self._engine.parameters()))
        if not self._alone:
            self.close()

    def goes_backward(self) -> None:
        """Notes that a backward begins: what was counted since the forward ended is the loss, as scripts compute it outside."""
        if self._open and self._counter is not None:
            self._counter.forward_ended(self._engine.parameters())
            self._trace = self._counter.trace
            self.close()

    def close(self) -> None:
        """Ends the counting, with what was counted up to the end of forward unless a backward has begun."""
        if self._counter is None or not (self._open or self._counter.off):
            return
        self._open, self._counter.trace = False, Trace()
        # A mode that the script has begun meanwhile must end first: its next forward tries again.
        self._counter.off = _python_dispatch._get_current_dispatch_mode() is not self._counter
        if self._counter.off:
            return
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _leave_out_gathering(self, counter: OpCounter) -> None:
        """Has the counter leave out what ZeRO 3 does around each module, which forecasts price by themselves."""
        offload = getattr(getattr(self._engine, "optimizer", None), "parameter_offload", None)
        counter.sharded = offload is not None

        def within(original: Callable[..., None], *args: Any) -> None:
            counter.gathers = True
            try:
                original(*args)
            finally:
                counter.gathers = False

        # The last of these compares the order of modules between ranks.
        of_modules = [(offload, f"{when}_sub_module_forward_function") for when in ("pre", "post")]
        for owner, name in (*of_modules, (getattr(offload, "param_coordinator", None), "reset_step")):
            if hasattr(owner, name):
                setattr(owner, name, functools.partial(within, getattr(owner, name)))

    def _enter_block(self, block: nn.Module, _args: Any) -> None:
        if self._counter is not None and not self._done:
            self._latest = id(block)
            self._entered[id(block)] = self._counter.live(self._engine.parameters())

    def _leave_block(self, block: nn.Module, _args: Any, output: Any) -> None:
        if self._counter is None or self._done or id(block) not in self._entered:
            return
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        size = first.numel() * first.element_size() if isinstance(first, Tensor) else 0
        kept = max(0, self._counter.live(self._engine.parameters()) - self._entered.pop(id(block)))
        before, outputs = self._inside.get(id(block), (0, 0))
        self._inside[id(block)] = before + kept, outputs + size

    def around(self, call: Callable[..., Any], run: Callable[[], Any], *, again: bool) -> Any:
        """Runs what a script recomputes, in its forward or `again` in its backward, where it counts what it then keeps."""
        counter = self._counter
        if counter is None or (self._open if again else self._done):
            return run()
        if (region := self._recomputed.pop(call, None)) is not None:
            return self._run_again(counter, region, run)
        if again and self._within is None:
            return run()
        n_before = counter.trace.n_ops
        result = run()
        # The block around it, or in it; what is recomputed may hold more that is.
        block = self._latest if self._within is None else self._within
        output = [weakref.ref(storage) for storage in storages(tensors_in(result)).values()]
        self._recomputed[call] = _Region(block, counter.trace.n_ops - n_before, output)
        return result

    def _run_again(self, counter: OpCounter, region: _Region, run: Callable[[], Any]) -> Any:
        """Counts what a region keeps while it is recomputed, without its output, which counts where it first was."""
        before, n_before, results = counter.live(self._engine.parameters()), counter.trace.n_ops, None
        outer, self._within = self._within, region.block
        off, counter.off = counter.off, False
        with counter:
            try:
                results = run()
            finally:  # it raises where the rest is not needed: after all of it where its last operation saves the output
                counter.off, self._within = off, outer
                kept = counter.live([*self._engine.parameters(), *tensors_in(results)]) - before
                whole = results is None and counter.trace.n_ops - n_before == region.n_ops
                self._again[region.block] += kept - (region.output_bytes if whole else 0)
                self._note_outputs()
        return results

    def _note_outputs(self) -> None:
        """Notes whether the output of each region that went forward is kept, before the backward pass frees it."""
        for region in self._recomputed.values():
            alive = {ref() for ref in region.output}
            region.output_bytes += sum(int(storage.nbytes()) for storage in alive if storage is not None)
            region.output = []

    def profile(self, workload: Workload, ds_config: Mapping[str, Any], micro_batch_size: int | None) -> Profile | None:
        """Returns the profile; None without a complete forward or a count of its samples."""
        self.close()
        if not self._done or not micro_batch_size or not self._trace.n_ops:
            return None
        samples = float(micro_batch_size)
        blocks = [(size + self._again[block], output) for block, (size, output) in self._inside.items()]
        kept, inside = self._trace.kept_bytes + self._again.total(), sum(size for size, _ in blocks)
        # Recomputed blocks keep their outputs, and one block's working set is alive at a time.
        outputs, largest = sum(output for _, output in blocks), max((size for size, _ in blocks), default=0)
        again = min(kept, kept - inside + outputs + largest)
        plain = self._pass(samples, kept, 1.0)
        passes = {"fp32/0": plain}
        if blocks and kept:
            passes["fp32/1"] = self._pass(samples, again, 1.0 + inside / kept)
        if self._arithmetic() == "autocast":
            passes |= {f"autocast/{name[-1]}": self._with_casts(each) for name, each in passes.items()}
        state, scratch, for_all = self._optimizer(str((ds_config.get("optimizer") or {}).get("type", "adam")).lower())
        return Profile(
            n_parameters=workload.n_parameters, n_trainable=workload.n_trainable,
            flops_per_sample=max(1.0, plain.flops[1]), activation_bytes_per_sample=plain.kept_bytes[1],
            checkpointed_bytes_per_sample=passes.get("fp32/1", plain).kept_bytes[1],
            n_blocks=workload.n_blocks, sequence=length_in(self._shape[:2], micro_batch_size) or 1, of_tokens=self._of_tokens,
            block_share=workload.block_share,
            optimizer_bytes=state, optimizer_scratch=scratch, scratch_for_all=for_all,
            passes=passes, caveats=(CAVEAT,), **of_parameters(self._engine, workload.experts or Experts()),
        )  # fmt: skip

    def _optimizer(self, kind: str) -> tuple[float, float, bool]:
        """Returns state and scratch of the optimizer; see `op_counter.optimizer_needs`.

        torch's are tried on the device with the script's own arguments: on CUDA they take all tensors at once unless they
        are fused (torch/optim/optimizer.py, `_default_to_fused_or_foreach`), and need scratch for all of them
        (torch/optim/adam.py, `_multi_tensor_adam`).
        """
        optimizer: Any = getattr(self._engine, "basic_optimizer", None)
        made, origin = type(optimizer), type(optimizer).__module__
        if origin.startswith("torch.optim."):
            known = inspect.signature(made).parameters.keys() - {"params"}
            given = {name: value for name, value in optimizer.param_groups[0].items() if name in known}
            device = next(self._engine.parameters()).device
            with contextlib.suppress(Exception):
                return optimizer_needs(lambda parameters: made(parameters, **given), device)
        fused = origin.startswith("deepspeed.ops.")
        return _state_bytes(optimizer) or FUSED_STATES.get(kind, 8.0), 0.0 if fused else 8.0, False

    def _pass(self, samples: float, kept: float, times: float) -> Pass:
        """Returns the pass as it would be in fp32, proportional to the samples; forward runs `times` times."""
        trace, trained = self._trace, [p for p in dict.fromkeys(self._engine.parameters()) if p.requires_grad]
        wide = 1.0 / ACTIVATION_SCALE[self._arithmetic()] / samples
        n_trained = float(sum(map(n_elements, trained)))
        return Pass(
            # Backward starts with the gradient of forward's output, which may be as large as its largest tensor; the first
            # gradient of a parameter comes when that is gone.
            moments=((0.0, (kept + trace.largest_bytes) * wide, 0.0), (0.0, kept * wide, 1.0), (0.0, 0.0, n_trained)),
            kept_bytes=(0.0, kept * wide),
            largest_bytes=(0.0, trace.largest_bytes * wide),
            flops=(0.0, (times * trace.flops + trace.backward[0]) / samples),
            tf32_share=trace.tf32_flops / max(1, trace.flops),
            moved_bytes=(0.0, (times * trace.moved_bytes + trace.backward[1]) * wide),
            n_ops=times * trace.n_ops + trace.backward[2],
        )

    def _with_casts(self, plain: Pass) -> Pass:
        """Returns a pass under autocast, as it was seen: with 16-bit copies of weights, however large the batch is."""
        cast, scale = float(self._trace.cast_bytes), ACTIVATION_SCALE["autocast"]
        moments = tuple((cast * (size > 0), size * scale, elements) for _, size, elements in plain.moments)
        return replace(
            plain, moments=moments, kept_bytes=(cast, plain.kept_bytes[1] * scale),
            largest_bytes=(0.0, plain.largest_bytes[1] * scale), n_ops=plain.n_ops + 2 * self._trace.n_casts,
            # 4 bytes are read and 2 are written for each; backward does the same with gradients.
            moved_bytes=(2 * 3 * cast, plain.moved_bytes[1] * scale),
        )  # fmt: skip

    def _arithmetic(self) -> str:
        if getattr(self._engine, "torch_autocast_enabled", bool)():
            return "autocast"
        dtypes = [p.dtype for p in self._engine.parameters() if p.is_floating_point()]
        return "bf16" if dtypes and dtypes[0] in (torch.bfloat16, torch.float16) else "fp32"


def _state_bytes(optimizer: Any) -> float:
    """Returns the bytes of an optimizer's states per fp32 parameter, as its steps left them; 0 without any."""
    states = [(p, values) for p, values in getattr(optimizer, "state", {}).items() if isinstance(p, Tensor)]
    held = sum(4.0 / p.element_size() * t.nbytes for p, values in states for t in tensors_in(values) if t.dim())
    return held / max(1, sum(p.numel() for p, _ in states))
