"""Check of the first gradient against its micro-gradients; and perturbed weights for replicates of a run."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.trial.result import NOT_FINITE, GradientCheck

# Elements compared of each parameter; larger parameters are left out, since comparing copies them.
MAX_SAMPLED, MAX_PARAMETER_SIZE = 4096, 2**20
AUTOCAST_SCALER = "torch_autocast_gradscaler"
# Rounding to bfloat16 changes weights by up to this share, so a run from there is as good as the original.
ROUNDING = 2**-9
# Between the dropout seeds of two replicates: more than there are ranks.
REPLICATE_SEEDS = 1_000_003


class GradientWatch:
    """Compares the gradient that the first optimizer step applies with the mean of its micro-gradients, where no ranks share a batch.

    Hooks see the gradient of one micro-batch before it is accumulated, reduced or sharded, if they are set before
    `deepspeed.initialize`.

    Attributes:
        found: The comparison; None if there is none.
        done: Whether the first optimizer step is over.
        divided_by: Factor by which gradients are too small, where a framework divides the loss by the accumulation, as
            DeepSpeed does again; below 1 where a script adds up the losses of its micro-batches.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.world_size, self.n_micro = world_size, 0
        self.found: GradientCheck | None = None
        self.done = False
        self.divided_by: float = 1
        generator = torch.Generator().manual_seed(0)
        self._parameters: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in model.parameters():
            # DeepSpeed marks experts so; they differ between ranks.
            own = getattr(parameter, "allreduce", True) is False
            if parameter.requires_grad and 0 < parameter.numel() <= MAX_PARAMETER_SIZE and not own:
                n = parameter.numel()
                chosen = (
                    torch.arange(n)
                    if n <= MAX_SAMPLED
                    else torch.randint(n, (MAX_SAMPLED,), generator=generator, device="cpu")
                )
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
        whole = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return whole.flatten()[chosen].float()

    def backward(self, engine: Any) -> None:
        """Ends a micro-batch, and at the end of the first optimizer step compares; all ranks take part."""
        self.n_micro += 1
        if engine.is_gradient_accumulation_boundary():
            self.compare(engine)

    def compare(self, engine: Any) -> None:
        """Compares the complete gradient of a step; all ranks take part.

        A step whose scaled gradients overflow is no optimizer step: fp16 skips some until it finds its scale.
        """
        if not self._parameters:
            self._end()
            return
        # One collective, the same on every rank, though ranks may use different parameters.
        kind: dict[str, Any] = {"dtype": torch.float32, "device": engine.device}  # a script may have set other defaults
        zeros = (torch.zeros(len(chosen), **kind) for _, chosen in self._parameters)
        unread = torch.full((1,), float(not self._readable(engine)), **kind)
        expected = torch.cat([*(self._sums.get(i, zero) for i, zero in enumerate(zeros)), unread])
        dist.all_reduce(expected)
        if loss_scale(engine) != 1.0 and not bool(expected.isfinite().all()):
            self._sums, self.n_micro = {}, 0
            return
        self._end()
        if float(expected[-1]):  # reading is a collective for each parameter, which one rank must not leave
            print("the first gradient could not be looked at: its parts are not where DeepSpeed looks for them")
            return
        expected = expected[:-1]
        try:
            self.found = self._compared(engine, expected / self.world_size)
        except Exception as error:  # this engine keeps gradients elsewhere: losses alone decide
            print(f"the first gradient could not be looked at: {type(error).__name__}: {error}")

    def _end(self) -> None:
        self.done = True
        for handle in self._handles:
            handle.remove()

    def _readable(self, engine: Any) -> bool:
        """Returns whether this rank's part of each gradient lies where DeepSpeed looks for it.

        It does not where the parameters were put into another order (`round_robin_gradients`).
        """
        orders = getattr(engine.optimizer, "round_robin_bit16_indices", ())
        if any(list(order) != sorted(order) for order in orders):
            return False
        try:
            return all(map(_holds_own_part, (parameter for parameter, _ in self._parameters)))
        except Exception:
            return False

    def _compared(self, engine: Any, expected: Tensor) -> GradientCheck | None:
        from deepspeed.utils import safe_get_full_grad

        sizes = [len(chosen) for _, chosen in self._parameters]
        sums = torch.zeros(3, dtype=torch.float64, device=expected.device)
        for i, mean in enumerate(expected.split(sizes)):
            parameter = self._parameters[i][0]
            whole = safe_get_full_grad(parameter)
            if whole is not None:
                applied = self._sampled(i, whole)
                sums += torch.stack([(applied - mean).square().sum(), mean.square().sum(), applied.square().sum()])
        error, size, norm = (float(value) ** 0.5 for value in sums)
        if size == 0:
            return None
        numbers = error / size, norm * self.divided_by / loss_scale(engine)
        # A report is JSON, which has neither infinity nor NaN.
        error, norm = (value if math.isfinite(value) else NOT_FINITE for value in numbers)
        return GradientCheck(error=error, norm=norm, n_micro=self.n_micro * self.world_size)


def _holds_own_part(parameter: Any) -> bool:
    """Returns whether the gradient that stages 1 and 2 keep for a parameter has the size of this rank's part, or all of it."""
    part = getattr(parameter, "_hp_mapping", None)
    if part is None:
        return True
    kept = part.get_lp_grad_fragment(parameter._index_in_param_group)
    return kept is None or kept.numel() in (parameter.numel(), part.lp_fragment_address.numel)


def autocast_scaler(engine: Any) -> Any:
    """Returns the scaler of torch's autocast to fp16; None in other precisions."""
    # At stage 0 the engine has it, from stage 1 on the optimizer.
    return getattr(engine.optimizer, AUTOCAST_SCALER, None) or getattr(engine, "torch_autocast_z0_gradscaler", None)


def loss_scale(engine: Any) -> float:
    """Returns the factor of fp16 on loss and gradients, DeepSpeed's or that of torch's autocast; 1 in other precisions."""
    optimizer = engine.optimizer
    if (scaler := autocast_scaler(engine)) is not None:
        return float(scaler.get_scale())
    return float(getattr(optimizer, "cur_scale", None) or getattr(optimizer, "loss_scale", None) or 1.0)


def draw_otherwise(engine: Any, replicate: int) -> None:
    """Has an engine's training draw other random numbers from its second step on, as for dropout and noise.

    A trial with another micro-batch draws them otherwise, too. The first step stands: its loss shows whether equal runs
    begin alike, and by then a loader has its order.
    """
    begun: list[int] = []  # that many steps were made before, where a checkpoint was loaded

    def seed(*_: Any) -> None:
        begun[:] = begun or [engine.global_steps]
        if engine.global_steps > begun[0] and torch.is_grad_enabled():
            # On top of the script's own seed, by which its ranks may differ.
            torch.manual_seed((torch.initial_seed() + REPLICATE_SEEDS * replicate) % 2**63)
            hook.remove()

    hook = engine.module.register_forward_pre_hook(seed)  # an engine of a pipeline is not called itself


def perturb(model: nn.Module, replicate: int) -> None:
    """Changes the weights by rounding errors, the same on all ranks; of weights that are shared out each rank its own part."""
    generator = torch.Generator().manual_seed(replicate)
    with torch.no_grad():
        for parameter in model.parameters():
            own = getattr(parameter, "ds_tensor", parameter)
            if own.is_floating_point():
                share = torch.rand(own.shape, generator=generator, device="cpu").to(own.device, own.dtype)
                own.mul_(1 + ROUNDING * (2 * share - 1))
