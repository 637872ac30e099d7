"""Whether the gradient that the optimizer gets is the mean of the micro-gradients that were computed, and what a replicate is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.gate import GradientCheck

# Elements of each parameter that are looked at; larger parameters are left out, since looking takes a copy of them.
SAMPLES, LARGEST = 4096, 2**20
# Rounding weights to bfloat16 moves them by up to this share: a run that starts from there is as good as another.
ROUNDING = 2**-9


class GradientWatch:
    """Follows some elements of every parameter through the first optimizer step: micro-gradients in fp32, then what became of them.

    Hooks see the gradient of one micro-batch before it is accumulated, reduced or sharded; like those of the noise scale
    they must be set before `deepspeed.initialize`.

    Args:
        model: The model, not yet in the engine's hands.
        world_size: Ranks.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.world_size, self.n_micro = world_size, 0
        self.found: GradientCheck | None = None
        generator = torch.Generator().manual_seed(0)
        self._parameters: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in model.parameters():
            if parameter.requires_grad and 0 < parameter.numel() <= LARGEST:
                n = parameter.numel()
                chosen = torch.arange(n) if n <= SAMPLES else torch.randint(n, (SAMPLES,), generator=generator)
                self._parameters.append((parameter, chosen))
        self._sums: dict[int, Tensor] = {}
        self._handles = [parameter.register_hook(self._hook(i)) for i, (parameter, _) in enumerate(self._parameters)]

    def _hook(self, i: int) -> Any:
        def add(gradient: Tensor) -> None:
            seen = self._sampled(i, gradient)
            self._sums[i] = self._sums[i] + seen if i in self._sums else seen

        return add

    def _sampled(self, i: int, gradient: Tensor) -> Tensor:
        chosen = self._parameters[i][1].to(gradient.device)
        return gradient.detach().flatten()[chosen].float()

    def before_step(self, engine: Any) -> None:
        """After each backward pass: at the end of the first optimizer step looks at what will be applied; all ranks take part."""
        self.n_micro += 1
        if not engine.is_gradient_accumulation_boundary():
            return
        for handle in self._handles:
            handle.remove()
        from deepspeed.utils import safe_get_full_grad

        wrong = torch.zeros(3, dtype=torch.float64, device=engine.device)
        for i, (parameter, _) in enumerate(self._parameters):
            if i not in self._sums:
                continue  # no gradient came; the same on all ranks, which run the same graph
            expected = self._sums.pop(i)
            dist.all_reduce(expected)
            expected /= self.world_size
            whole = safe_get_full_grad(parameter)
            if whole is None or (whole.numel() != parameter.numel() and not hasattr(parameter, "ds_id")):
                return
            applied = self._sampled(i, whole)
            wrong += torch.stack([(applied - expected).square().sum(), expected.square().sum(), applied.square().sum()])
        error, size, norm = (float(value) ** 0.5 for value in wrong)
        if size > 0:
            scale = _loss_scale(engine)
            self.found = GradientCheck(error=error / size, norm=norm / scale, n_micro=self.n_micro * self.world_size)


def _loss_scale(engine: Any) -> float:
    return float(getattr(engine.optimizer, "cur_scale", None) or getattr(engine.optimizer, "loss_scale", None) or 1.0)


def perturb(model: nn.Module, replicate: int) -> None:
    """Rounds the weights otherwise, as another precision or another order of sums would; the same on all ranks."""
    generator = torch.Generator().manual_seed(replicate)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                share = torch.rand(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
                parameter.mul_(1 + ROUNDING * (2 * share - 1))
