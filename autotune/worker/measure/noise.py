"""Gradient noise: squared norms of the gradients of each micro-batch and of each optimizer step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.trial.result import NoiseTerms
from autotune.worker.measure.gradient_check import AUTOCAST_SCALER, loss_scale

# The optimizer of fp16 at stage 0 with an optimizer other than DeepSpeed's: its norm is that of the scaled gradients
# (runtime/fp16/unfused_optimizer.py, `step`), as under torch's autocast to fp16, where all others divide the scale out.
SCALED_NORMS = ("FP16_UnfusedOptimizer",)


class NoiseMeter:
    """Measures |g_i|^2 of every micro-batch and |G|^2 of every optimizer step, at every ZeRO stage and precision.

    Hooks see the gradient of one micro-batch before it is accumulated, reduced or sharded, if they are set before
    `deepspeed.initialize`.

    Steps with another number of micro-batches than `accumulation` do not count.
    """

    def __init__(self, model: nn.Module, world_size: int, accumulation: int) -> None:
        self.world_size, self.accumulation = world_size, accumulation
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._micro: Tensor | None = None
        self._steps: list[tuple[Tensor, Tensor] | None] = []
        self._gathered = 0
        self._in_step: list[Tensor] = []
        self._scale = 1.0
        for parameter in self.parameters:
            parameter.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        square = gradient.detach().float().square().sum()
        self._micro = square if self._micro is None else self._micro + square

    def backward(self) -> None:
        """Ends a micro-batch."""
        if self._micro is not None:
            self._in_step.append(self._micro)
        self._micro = None

    def before_step(self, engine: Any) -> Tensor | None:
        """Returns |G|^2, by now averaged over ranks, at stage 0, where in fp32 the engine has no norm; else None.

        The loss scale is noted here, since a step may double it at its end.
        """
        self._scale = loss_scale(engine)
        if not engine.is_gradient_accumulation_boundary() or engine.zero_optimization_stage() > 0:
            return None
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum() if gradients else None

    def after_step(self, engine: Any, own: Tensor | None, *, skipped: bool) -> None:
        """Ends an optimizer step.

        Args:
            own: |G|^2 from `before_step`; None where it returned none.
            skipped: Whether loss scaling skipped the update, so the step does not count.
        """
        micro, self._in_step = self._in_step, []
        norm = engine.get_global_grad_norm()
        optimizer, scale = engine.optimizer, self._scale
        scaled = type(optimizer).__name__ in SCALED_NORMS or getattr(optimizer, AUTOCAST_SCALER, None) is not None
        # A norm that is a tensor is not waited for.
        whole = torch.as_tensor(norm, device=engine.device).float().square() if norm is not None else own
        if whole is not None and (scaled or norm is None):
            whole = whole / scale**2
        if skipped or whole is None or len(micro) != self.accumulation:
            self._steps.append(None)
            return
        # The engine divides the loss by the accumulation steps, and fp16 multiplies it by its scale.
        self._steps.append((torch.stack(micro).mean() * (len(micro) / scale) ** 2, whole))

    def leave_out(self, steps: Sequence[bool]) -> None:
        """Counts the steps that ended since the last call, except those marked true; the same on all ranks.

        The end of an epoch is left out: its smaller micro-batches are noisier.
        """
        for out in steps:
            if out:
                self._steps[self._gathered] = None
            self._gathered += 1

    def terms(self, micro_batch_size: int) -> NoiseTerms:
        """Returns the norms of all steps that count, averaged over ranks; all ranks take part."""
        steps = [step for step in self._steps[: self._gathered] if step is not None]
        table = torch.tensor([[float(micro), float(whole)] for micro, whole in steps], dtype=torch.float64)
        if len(table):
            table = table.to(steps[0][0].device)
            dist.all_reduce(table)
        columns = (table.reshape(-1, 2) / self.world_size).T.tolist()
        n_micro = self.accumulation * self.world_size
        return NoiseTerms(micro_batch_size=micro_batch_size, n_micro=n_micro, micro_sq=columns[0], mean_sq=columns[1])
