"""The optimizer steps of a script: count its passes, time its steps, and end the trial when it has been measured."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autotune.trial import folder
from autotune.worker import random_fills, rank
from autotune.worker.containers import coarse_dtype, number_in
from autotune.worker.measure.batches import N_CHECKSUMS, BatchObserver
from autotune.worker.measure.groups import sequence_size
from autotune.worker.measure.ledger import MIN_STEPS, TooFewSteps, Window
from autotune.worker.measure.meter import Meter
from autotune.worker.model import weights
from autotune.worker.profile.script import ForwardProfile
from autotune.worker.script import pipeline, probe
from autotune.worker.script.context import ScriptContext, ScriptError, depends_on_micro_batch
from autotune.worker.script.engine import PreparedModel
from autotune.worker.script.evaluation import Evaluations
from autotune.worker.script.patching import patch, patch_everywhere
from autotune.worker.script.tail import ScriptTail

PROBE_STEPS = 3
# Where the samples of a step vary: their mean is the micro-batch that is stated.
UNEVEN_PROBE_STEPS = 16
# Steps of other models in a row, with more of which the first one's training is taken to be over: some scripts alternate so.
MOST_BESIDE = 100
UNCALLED = (
    "the script trains without calling the engine, whose calls count its batches: call `engine(batch)` in place of"
    " `engine.module(batch)` or of a method of the model, as DeepSpeed's autocast needs it too"
)
NO_ENGINE = (
    "the script ended without calling deepspeed.initialize with an optimizer: give it the flags with which it trains with"
    " DeepSpeed, transformers' Trainer, Accelerate or Lightning, or write the model and its data as a model.py (`autotune init`)"
)
NO_STEP = (
    "the script ended without calling the engine's step(): its loop leaves that out, had no data or no steps left (as where it goes"
    " on from the checkpoint of a finished training: give it more steps, or another folder), or ended by an exception that it caught"
)
DIFFERENTIATES = (
    "the script takes gradients of the engine's output itself (torch.autograd.grad, as for a gradient penalty), which DeepSpeed"
    " divides by the accumulation, and refuses at ZeRO 0: each other micro-batch is checked, and none is drop-in; take them in the"
    " model's forward(), which then returns what the loss needs"
)
NO_LOSS = (
    "the script calls the engine's step() after no backward pass from a loss that the engine's call gave: go backward by"
    " `engine.backward(loss)`, where the loss is a single number"
)


class OtherModels:
    """Counts the steps of other models than the measured one, to notice where the script no longer trains that.

    Args:
        over: Called where it does not, with what the script did.
        plain: Gets what `_note_plain` notes of models that follow a trial's stage and precision.
    """

    def __init__(self, context: ScriptContext, over: Callable[[str], None], plain: set[bool]) -> None:
        self._context, self._over, self._plain = context, over, plain
        self.n_steps = -math.inf  # none counts before the measured model's first, which sets it to 0

    def attach(self, engine: Any) -> None:
        """Counts an engine's steps, and sees where another model's loss goes backward through it."""
        engine._take_model_step = functools.partial(self._step, engine._take_model_step)
        if hasattr(engine, "_backward_prologue"):
            engine._backward_prologue = functools.partial(self._on_prologue, engine, engine._backward_prologue)

    def _on_prologue(self, engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._context.meter is not None and _follows(engine, self._context.meter.engine):
            _note_plain(engine, self._plain)
        return original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.n_steps += 1
        if self.n_steps > MOST_BESIDE:
            try:
                self._over("went on to train another model than its first one, which is measured,")
            except BaseException as error:  # the script must not catch it
                self._context.abort(error)


class StepHooks:
    """Hooks on the trained engine's forward, backward and step."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._prepared: PreparedModel | None = None
        self._profile: ForwardProfile | None = None
        self._window: Window | None = None
        self._afterwards: Iterator[None] | None = None
        self._total: torch.Tensor | float | None = None
        self._n_backward, self._plain = 0, set[bool]()  # of plain passes, whether the loss was scaled, as in fp16
        self._tail: ScriptTail | None = None
        self._begun = self._reached = self._summed = self._asked = self._called = False
        self._evaluations = Evaluations(context)
        self.others = OtherModels(context, self._end_before_its_time, self._plain)

    def install(self) -> None:
        """Patches the backward functions that a script may call."""
        import deepspeed

        patch(deepspeed.DeepSpeedEngine, "backward", self._any_backward)
        patch_everywhere(torch.autograd, {"backward": self._autograd_backward})  # `loss.backward()` calls it

    def attach(self, engine: Any, prepared: PreparedModel) -> None:
        """Starts to measure an engine."""
        context, self._prepared = self._context, prepared
        uneven = context.script.probed.uneven is not None or context.in_rows
        batches = BatchObserver(engine, forgiving=not uneven, uneven=uneven, shards=sequence_size(engine))
        meter = context.meter = Meter(
            context.recorder, context.request, engine, batches, context.memory, prepared.watch, prepared.noise,
            prepared.gradients,
        )  # fmt: skip
        if hasattr(engine, "train_batch"):
            pipeline.attach(context, meter, engine, self._stepped, lambda: self._window)
        else:
            engine.register_forward_pre_hook(self._on_forward, with_kwargs=True, prepend=True)
            if context.candidate is None and not getattr(engine, "is_compiled", False):
                self._profile = ForwardProfile(engine, prepared.blocks, lambda: batches.trains, prepared.watch)
            engine.forward = functools.partial(self._engine_forward, engine.forward)
            engine.backward = functools.partial(self._engine_backward, engine.backward)
            if hasattr(engine, "_backward_prologue"):
                engine._backward_prologue = functools.partial(self._on_prologue, engine._backward_prologue)
            engine.step = functools.partial(self._engine_step, engine.step)
        random_fills.flush()
        context.recorder.enter("warmup")
        self._window = self._next_window()

    def script_ended(self) -> None:
        """Ends the trial of a script that ran to its end."""
        if self._context.meter is None:
            raise ScriptError(NO_ENGINE)
        if not self._asked:
            raise ScriptError(NO_STEP)
        self._end_before_its_time("ended by itself")

    def _end_before_its_time(self, how: str) -> None:
        """Ends the trial with the steps that the script has made, where they are enough; all ranks get here at the same step."""
        context = self._context
        if self._afterwards is None and self._window is not None:
            self._window.gather_rest()
        n, needed = len(context.report.step_times_s), min(context.request.max_steps, MIN_STEPS)
        if n < needed:  # in a probe, too: trials of the user's own configuration would all end so
            raise _too_few(context, how, n, needed)
        context.report.caveats.append(f"the script {how} after {n} optimizer steps")
        self._end()

    @property
    def _meter(self) -> Meter:
        assert self._context.meter is not None
        return self._context.meter

    def _on_forward(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._called = True
        trains = self._meter.batches.trains
        self._evaluations.forward(self._window, self._meter.batches, args, kwargs)
        self._context.loaders.went_forward(trains=trains)
        if trains:
            self._meter.enter("forward")
            if self._tail is not None:
                self._tail.forward(args, kwargs)
        return self._context.cast(engine, args, kwargs)

    def _engine_forward(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._called:  # `engine.forward(...)`, past the hooks
            return self._meter.engine(*args, **kwargs)
        self._called = False
        with self._context.memory_errors_end_it():
            return original(*args, **kwargs)

    def _any_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._profile is not None:
            self._profile.close()
        with self._context.inside_backward():  # of any engine: a critic's passes do not count
            return original(*args, **kwargs)

    def _engine_backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        # A framework that scales micro-batches itself passes parts of the step's loss.
        self._summed = kwargs.get("scale_wrt_gas") is False
        self._begin_backward()
        with self._context.inside_backward():
            result = original(loss, *args, **kwargs)
        self._went_backward(loss)
        return result

    def _autograd_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        meter = self._context.meter
        if meter is None or self._context.in_backward:
            return original(tensors, *args, **kwargs)
        with self._context.inside_backward():
            if not meter.batches.may_go_backward:  # another model's, or once more through a graph that was kept
                return original(tensors, *args, **kwargs)
            # DeepSpeed calls the prologue when a pass reaches the engine's output; versions without one count every pass.
            self._reached = not hasattr(meter.engine, "_backward_prologue")
            self._begin_backward()
            result = original(tensors, *args, **kwargs)
        if self._reached:
            self._plain |= self._plain or {meter.engine.fp16_enabled()}
            self._went_backward(_loss_of(tensors))
        return result

    def _begin_backward(self) -> None:
        if self._profile is not None:
            self._profile.goes_backward()
        if (gradients := self._meter.gradients) is not None:
            n_micro, summed = self._meter.engine.gradient_accumulation_steps(), self._context.sums_losses
            # A script that adds up states its gradients per micro-batch, as its losses.
            gradients.divided_by = 1 / n_micro if self._context.script.probed.adds_up else n_micro if summed else 1
        self._meter.enter("backward")

    def _on_prologue(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reached = True
        _note_pass(self._context, self._meter.engine, self._plain)
        return original(*args, **kwargs)

    def _went_backward(self, loss: Any) -> None:
        self._meter.backward()
        self._note_loss(loss)
        self._meter.enter("step")
        if self._tail is not None and self._tail.reached():
            self._end_tail()

    def _note_loss(self, loss: Any) -> None:
        self._n_backward += 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._context.report.loss_dtype = coarse_dtype(loss)
            # A copy from the first micro-batch on, since scripts reduce the loss over ranks in place to print it.
            self._total = number_in(loss.float()) + (0.0 if self._total is None else self._total)

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._meter.enter("step")
        with self._context.memory_errors_end_it():
            result = self._meter.update(functools.partial(original, *args, **kwargs))
        self._stepped()
        self._meter.enter("script")
        return result

    def _stepped(self, loss: Any = None) -> None:
        """Handles a call of the engine's step; `loss` is that of engines whose backward calls are not seen."""
        self._asked, self.others.n_steps = True, 0
        if loss is not None:
            self._note_loss(loss)
        if not self._meter.batches.step():
            return
        try:
            self._boundary()
        except BaseException as error:  # the script must not catch it
            self._context.abort(error)

    def _boundary(self) -> None:
        """Handles the end of an optimizer step."""
        if self._tail is not None:
            if self._tail.step():
                self._end_tail()
            return
        if self._afterwards is not None:
            self._go_on()
            return
        meter, window = self._meter, self._window
        assert window is not None
        if self._total is None:
            raise ScriptError(NO_LOSS)
        summed = (self._summed or self._context.sums_losses) and not self._context.script.probed.adds_up
        n_micro = 1 if summed else max(1, min(self._n_backward, meter.batches.last.n_micro))
        window.add(self._total / n_micro, meter.batches.last)
        self._total, self._n_backward = None, 0
        if not window.full:
            return
        meter.enter("")
        window.gather(len(window))
        self._consider_ending()
        self._window = self._next_window()

    def _consider_ending(self) -> None:
        """Ends the warm-up or the trial when enough steps were seen."""
        meter, n, prepared = self._meter, len(self._context.report.step_times_s), self._prepared
        assert prepared is not None
        if self._context.candidate is None:
            if not (meter.batches.sizes() or hasattr(meter.engine, "train_batch")):
                raise ScriptError(UNCALLED)
            meter.batches.uneven = meter.ledger.uneven
            if n >= (UNEVEN_PROBE_STEPS if meter.ledger.uneven else PROBE_STEPS):
                self._end()
            return
        if not self._begun and n >= min(2, self._context.request.max_steps):
            meter.begin()
            prepared.watch.stop()
            self._begun = True
        if self._begun and meter.ledger.done():
            self._afterwards = meter.afterwards()
            self._go_on()

    def _next_window(self) -> Window:
        window = Window(self._meter.engine, self._meter.ledger)
        if self._context.candidate is not None and len(self._context.report.step_times_s) == 1:
            self._meter.take_apart()
        return window

    def _go_on(self) -> None:
        """Starts the next step that is taken apart or traced, or ends the trial after the last of them."""
        assert self._afterwards is not None
        if next(self._afterwards, self) is self:
            self._tail = ScriptTail.of(self._context)
            if self._tail is None:
                self._end()

    def _end_tail(self) -> NoReturn:
        """Completes the tail check after the worst batch went backward, and ends the process."""
        assert self._tail is not None
        try:
            self._tail.finish()
        except BaseException as error:  # the script must not catch it
            self._context.abort(error)
        self._end()

    def _end(self) -> NoReturn:
        """Writes what was measured and ends the process; all ranks get here at the same step."""
        context, meter, prepared = self._context, self._meter, self._prepared
        assert prepared is not None
        compare_data(context, meter)
        context.at_end()
        if context.candidate is not None:
            meter.finish()
            if context.request.save_weights is not None:
                weights.save(meter.engine, Path(context.request.save_weights))
        else:
            found = probe.workload_of(context, meter, prepared, self._profile, self._plain)
            if context.report.rank == 0:
                folder.write_record(context.recorder.folder.workload, found)
        rank.complete(context.recorder)


def _note_plain(engine: Any, plain: set[bool]) -> None:
    """Notes of a pass that reaches an engine otherwise than by its `backward`, as another engine's does, whether its loss was scaled."""
    if not getattr(engine, "_running_engine_backward", True):
        plain.add(engine.fp16_enabled() or getattr(engine, "_manual_backward_expected", False))


def _note_pass(context: ScriptContext, engine: Any, plain: set[bool]) -> None:
    """Notes a pass that reaches the measured engine: `torch.autograd.grad` is not within a backward call of the script."""
    if not context.in_backward and context.candidate is None:
        depends_on_micro_batch(context, DIFFERENTIATES)
    _note_plain(engine, plain)


def _follows(engine: Any, first: Any) -> bool:
    """Returns whether an engine has the first one's stage and scaling of the loss, and so follows it in these."""
    names = ("zero_optimization_stage", "fp16_enabled", "torch_autocast_enabled")  # the last one from DeepSpeed 0.17 on
    return all(getattr(engine, name, bool)() == getattr(first, name, bool)() for name in names)


def _loss_of(tensors: Any) -> Any:
    """Returns the loss that went backward from one tensor or several; 0, no tensor, where none of them is a single number."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    losses = [each for each in given if isinstance(each, torch.Tensor) and each.numel() == 1]
    return losses[0] if len(losses) == 1 else sum(loss.detach() for loss in losses)


def _too_few(context: ScriptContext, how: str, n: int, needed: int) -> TooFewSteps:
    n_micro = context.candidate.gradient_accumulation_steps if context.candidate is not None else 1
    each = f" of {n_micro} micro-batches" if n_micro > 1 else ""
    return TooFewSteps(
        f"the script {how} after {n} optimizer steps{each}, and {needed} are needed: give it more steps or more data"
    )


def compare_data(context: ScriptContext, meter: Meter) -> None:
    """Notes it if all ranks were fed the same batches."""
    # Only the first stages of a pipeline take in data.
    checksums = meter.batches.noted.checksums if getattr(meter.engine, "stage_id", 0) == 0 else []
    own = torch.tensor((checksums + [0] * N_CHECKSUMS)[:N_CHECKSUMS], dtype=torch.float64)
    rows = [torch.empty_like(own, device=meter.device) for _ in range(context.request.world_size)]
    dist.all_gather(rows, own.to(meter.device))
    rows = [row for row in rows if row.any()]
    if len(rows) > 1 and all(torch.equal(row, rows[0]) for row in rows) and context.report.rank == 0:
        text = "all ranks are fed the same data: no DistributedSampler, or one seed for all of them"
        context.report.caveats.append(text)
