"""What a script changes by itself of gradients and weights, which DeepSpeed goes on with at some stages alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from autotune.worker.script.context import ScriptContext, depends_on_micro_batch
from autotune.worker.script.patching import patch_everywhere, place_of, users_frame

GRADIENTS, WEIGHTS = "gradients", "weights"
CLIP, CLIP_VALUE = "clip_grad_norm_", "clip_grad_value_"
# Norms of weights that nothing has changed are equal; what is merged and taken out again is rounded.
SAME_NORM = 1e-6
CLIPS = (
    "the script clips gradients itself ({place}), which DeepSpeed heeds at ZeRO 0 alone: trials, and the configuration of the"
    " answer, have `gradient_clipping: {norm:g}` in place of that, which clips at each stage; leave the call out as you train with it"
)
CLIPS_IN_VAIN = (
    "the script's `{name}` ({place}) has no effect at ZeRO {stage}, where DeepSpeed keeps the gradients elsewhere: state"
    " `gradient_clipping` in the configuration; ZeRO 0, where the call would take effect, is not tried"
)
CLIPS_LATE = (
    "the script's `{name}` ({place}) has no effect: DeepSpeed has updated the weights by then, as it does in Accelerate's `backward`;"
    " state `gradient_clipping` in the configuration"
)
CHANGES = {
    GRADIENTS: "the script changes gradients itself between `backward` and `step`, which DeepSpeed heeds at ZeRO 0 alone, so the"
    " stage is not moved to or from 0; what a hook of a parameter does (`register_hook`), or `gradient_clipping` in the"
    " configuration, acts at each stage",
    WEIGHTS: "the script changes weights itself between the steps, which DeepSpeed heeds at ZeRO 0 without 16-bit weights alone, and"
    " elsewhere undoes with its next update, so stage and type are not moved to or from there; what the model does to a weight as"
    " it goes forward acts at each stage",
}
PERTURBS = (
    "the script moves the weights for a micro-batch and puts them back before the step, as sharpness-aware minimization (SAM) does:"
    " each other micro-batch is checked, and none is drop-in"
)


def leave_clipping_out(context: ScriptContext) -> None:
    """Has the script's own clipping only measure the norm in a trial, whose configuration clips: else it would clip each micro-batch."""
    trained = set[int]()

    def measure(original: Callable[..., Any], parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if context.meter is not None and not trained:
            trained.update(map(id, context.meter.engine.module.parameters()))
        engines = users_frame() is not None and not trained.isdisjoint(map(id, given))
        return original(given, math.inf if engines else max_norm, *args, **kwargs)

    patch_everywhere(torch.nn.utils, {CLIP: measure})


class ByHand:
    """Notes, in a probe, what the script's own code changes in place of an engine's gradients and weights."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._engine: Any = None
        self._trained: list[torch.Tensor] = []
        self._gradients: list[tuple[int, int]] = []
        self._weights: tuple[torch.Tensor, list[int]] | None = None
        self._waits = False  # a pass has gone backward that no step has followed yet
        self._moved = False  # the weights of a micro-batch that goes backward are others than after the latest update

    def install(self, attach: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Patches torch's functions that clip gradients; returns what attaches this to an engine, and then calls `attach`."""
        patch_everywhere(torch.nn.utils, {name: functools.partial(self._clips, name) for name in (CLIP, CLIP_VALUE)})

        def looked_at(engine: Any, prepared: Any) -> None:
            self._look_at(engine)
            attach(engine, prepared)

        return looked_at

    def _look_at(self, engine: Any) -> None:
        """Starts to look at an engine, before others wrap its methods."""
        self._engine, self._trained = engine, [each for each in engine.module.parameters() if each.requires_grad]
        if not self._trained:  # the script lets them be trained later
            return
        engine._take_model_step = functools.partial(self._update, engine._take_model_step)
        if not hasattr(engine, "train_batch"):  # else one call does all of a step
            engine.backward = functools.partial(self._backward, engine.backward)
            engine.step = functools.partial(self._step, engine.step)
            # DeepSpeed calls the prologue in each pass, also in that of `loss.backward()`; older versions have none.
            name = "_backward_prologue" if hasattr(engine, "_backward_prologue") else "backward"
            setattr(engine, name, functools.partial(self._pass, getattr(engine, name)))

    def _note(self, what: str, said: str) -> None:
        if what not in self._context.by_hand:
            self._context.by_hand.append(what)
            self._context.once(said)

    # Gradients

    def _versions(self) -> list[tuple[int, int]]:
        """Returns what changes with each change in place of a gradient."""
        gradients = [each.grad for each in self._trained if each.grad is not None]
        return [(id(each), each._version) for each in gradients]

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._gradients = self._versions()
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._gradients and self._versions() != self._gradients:
            self._note(GRADIENTS, CHANGES[GRADIENTS])
        self._gradients, self._waits = [], False
        return original(*args, **kwargs)

    def _clips(self, name: str, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes at which norm the script clips the engine's gradients, or that it tries to."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        before, frame = self._versions(), users_frame()
        result = original(given, *args, **kwargs)
        trained, clipped = {id(each) for each in self._trained}, {id(each) for each in given}
        if frame is None or not trained & clipped:
            return result
        norm = float(kwargs.get("max_norm", next(iter(args), math.inf)))
        plain = name == CLIP and len(args) < 2 and kwargs.get("norm_type", 2.0) == 2.0 and trained <= clipped
        own, place = float(self._engine.gradient_clipping() or math.inf), place_of(frame)
        if plain and own <= norm:  # DeepSpeed clips at a lower norm, at each stage
            pass
        elif not before and not self._waits:
            if self._context.clipping is None:  # else Accelerate's adapter has DeepSpeed clip
                self._context.once(CLIPS_LATE.format(name=name, place=place))
        elif not before:
            stage = self._engine.zero_optimization_stage()
            self._note(GRADIENTS, CLIPS_IN_VAIN.format(name=name, place=place, stage=stage))
        elif plain and self._engine.is_gradient_accumulation_boundary() and before == self._gradients:
            self._context.clipping = norm
            self._context.once(CLIPS.format(place=place, norm=norm))
        else:
            return result
        self._gradients = self._versions()
        return result

    # Weights

    def _pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._waits = True
        if self._weights is not None and self._engine.zero_optimization_stage() < 3:  # there weights come and go
            self._moved = self._moved or self._changed(*self._weights)
        return original(*args, **kwargs)

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._weights is not None and self._changed(*self._weights):
            self._note(WEIGHTS, CHANGES[WEIGHTS])
        elif self._moved:
            depends_on_micro_batch(self._context, PERTURBS)
        self._moved = False
        result = original(*args, **kwargs)
        self._weights = self._norms(), [each._version for each in self._trained]
        return result

    def _norms(self) -> torch.Tensor:
        norms = torch._foreach_norm([each.detach() for each in self._trained])
        return torch.stack([norm.float().cpu() for norm in norms])

    def _changed(self, norms: torch.Tensor, versions: list[int]) -> bool:
        """Returns whether weights are others than after the latest update; of those of ZeRO 3, which are elsewhere, by their versions."""
        if not torch.allclose(self._norms(), norms, rtol=SAME_NORM, atol=0.0, equal_nan=True):
            return True
        return any(
            each.numel() == 0 and each._version != before for each, before in zip(self._trained, versions, strict=True)
        )
