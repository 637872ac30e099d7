"""Mixtures of experts: those of a model, the ranks that they are shared out over, and the exchanges of tokens."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.space.candidate import Candidate
from autotune.trial.workload import Experts
from autotune.worker.containers import n_elements
from autotune.worker.measure.wire import CallCount
from autotune.worker.script.patching import patch

# The list of experts of a layer of deepspeed.moe, within the names of its parameters.
LISTED = "deepspeed_experts."
# What transformers' configurations call the number of experts of a layer.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Layers:
    """Builds every expert layer of deepspeed.moe in this process as a candidate says.

    Attributes:
        own: Ranks over which the target itself shares the experts out; 0 before it has built a layer.
    """

    def __init__(self) -> None:
        self.own = 0
        self._candidate: Candidate | None = None
        self._changed: Callable[[str], None] = lambda _: None

    def install(self, candidate: Candidate | None, changed: Callable[[str], None] = lambda _: None) -> None:
        """Wraps the constructor; for good, since the process ends with the trial.

        Args:
            candidate: What to build; None builds what the target asks for.
            changed: Called with what differs from the target's own call, as code.
        """
        from deepspeed.moe.layer import MoE

        self.own, self._candidate, self._changed = 0, candidate, changed
        patch(MoE, "__init__", self._build)

    def _build(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        own = int(given.get("ep_size", 1))
        if self._candidate is not None:
            given["ep_size"] = self._candidate.expert_degree
            if given["ep_size"] != own and not self.own:
                self._changed(f"Experts: `MoE(..., ep_size={given['ep_size']})`.")
        self.own = max(self.own, own)
        original(*bound.args, **bound.kwargs)


# Of this process, which trains one engine.
layers = Layers()
# Exchanges of tokens with the ranks of their experts.
sent = CallCount()


def watch(model: nn.Module) -> None:
    """Counts in `sent` where the experts of a model are shared out; call it before the model runs."""
    from deepspeed import comm

    if degree(model) > 1:
        sent.watch(comm, "all_to_all_single")


def facts(model: nn.Module) -> Experts | None:
    """Returns what a model has of mixtures of experts before DeepSpeed takes it; None where it has none."""
    own: list[Any] = [module for module in model.modules() if _is_own(module)]
    if own:
        # Layers may be shared out over several numbers of ranks; one that comes twice counts once.
        within = {
            id(p): n_elements(p) * module.ep_size for module in own for p in module.deepspeed_moe.experts.parameters()
        }
        return Experts(
            counts=tuple(sorted({module.num_experts for module in own})),
            layers=len(own),
            parameters=sum(within.values()),
            per_token=sum(module.deepspeed_moe.gate.k for module in own) / len(own),
            degree=max(1, layers.own),
            own=True,
        )
    return _found_by_autoep(model)


def _found_by_autoep(model: nn.Module) -> Experts | None:
    """Returns the mixtures that DeepSpeed's AutoEP finds in a model, or why it takes none of them."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not any(isinstance(getattr(text, name, None), int) for name in _COUNTS):
        return None
    try:
        from deepspeed.module_inject.auto_ep import AutoEP
        from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    except ImportError:
        return Experts(why_none="the installed DeepSpeed has no AutoEP")
    try:
        with torch.device("cpu"):  # it computes some values, also of a model without any
            specs = AutoEP(model, AutoEPConfig(enabled=True)).ep_parser()
    except Exception as error:  # it raises whatever it does not know
        return Experts(why_none=f"DeepSpeed's AutoEP refuses the model: {error}")
    if not specs:
        return Experts(why_none=f"DeepSpeed's AutoEP finds no mixture of experts in {type(model).__name__}")
    within: list[nn.Module] = [getattr(model.get_submodule(spec.moe_module_name), spec.experts_name) for spec in specs]
    return Experts(
        counts=tuple(sorted({spec.num_experts for spec in specs})),
        layers=len(specs),
        parameters=sum(n_elements(p) for module in within for p in module.parameters()),
        per_token=sum(spec.top_k for spec in specs) / len(specs),
    )


def _is_own(module: nn.Module) -> bool:
    from deepspeed.moe.layer import MoE

    return isinstance(module, MoE)


def degree(model: nn.Module) -> int:
    """Returns the ranks over which a running engine's experts are shared out, by deepspeed.moe or AutoEP; 1 without any."""
    found: list[Any] = [m for m in model.modules() if _is_own(m) or getattr(m, "_is_autoep_layer", False)]
    return max((int(layer.ep_size) for layer in found), default=1)


def of_this_rank(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a whole model's weights with the experts of this rank alone, under the names that they have in it.

    Neighbouring ranks hold the experts of one group, in order; weights of other models are returned as they are.
    """
    found = dict(state)
    module: Any
    for name, module in model.named_modules():
        if not _is_own(module) or module.ep_size == 1:
            continue
        prefix = f"{name}.deepspeed_moe.experts.{LISTED}"
        first = dist.get_rank() % module.ep_size * module.num_local_experts
        listed = {key: found.pop(key) for key in list(found) if key.startswith(prefix)}
        for key, value in listed.items():
            number, _, rest = key.removeprefix(prefix).partition(".")
            if 0 <= (own := int(number) - first) < module.num_local_experts:
                found[f"{prefix}{own}.{rest}"] = value
    return found
