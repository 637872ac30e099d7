"""The user's training script in a rank: run unchanged, its DeepSpeed configuration and batch moved, its steps measured.

Everything is done at the entry points that the script itself calls: `deepspeed.initialize`, the engine's methods, `argparse`
and torch's `DataLoader`. They are patched before the script runs, so that it binds the patched ones.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import math
import os
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils import checkpoint as checkpointing

from autotune import UserError, masking, stats, trial
from autotune.candidate import DTYPES, OWNED_PATHS, SIDE_EFFECT_KEYS, Candidate, DsConfig, precision_of, without_auto
from autotune.trial import Probed, TrialRequest, Workload
from autotune.worker import contract, frameworks, observe, pipeline, samples, script, stated, weights
from autotune.worker import run as rank_run
from autotune.worker.arguments import Arguments
from autotune.worker.gradients import GradientWatch, perturb
from autotune.worker.loaders import Loaders, users_caller
from autotune.worker.meter import Laps, Meter
from autotune.worker.noise import NoiseMeter
from autotune.worker.patching import patch
from autotune.worker.sketch import Sketch
from autotune.worker.traces import Traces

PROBE_STEPS = 3
# What torch's checkpoint takes for itself.
CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


class ScriptError(UserError):
    """The script does something that cannot be tuned."""


def run_script(recorder: rank_run.Recorder, request: TrialRequest, rank: int, listener: int) -> None:
    """Runs the script until it has been measured, or to its end; comes back only in the latter case.

    Raises:
        ScriptError: It ended, or could not go on, before it had been measured.
    """
    memory = rank_run.prepare_device(request)
    recorder.enter("build")
    rank_run.connect(request, rank, listener, cuda=memory.cuda)
    hooks = Hooks(recorder, request, memory)
    hooks.install()
    try:
        script.execute(Path(request.target), hooks.script)
    except SystemExit as end:
        if end.code not in (None, 0):
            hooks.abort(ScriptError(f"the script exited with status {end.code}"))
    except BaseException as error:
        hooks.abort(error)
    hooks.script_ended()


class Hooks:
    """What is patched, and what it has seen. Without a candidate (a probe) it only looks.

    Adapters of frameworks use `candidate`, `request`, `script`, `recorder`, `scratch`, `value`, `changed`, `once`, `abort`, and
    set `family`.

    Attributes:
        candidate: What is tried; None in a probe.
        family: What a person calls such a script, as the framework that it uses says; empty for one that only uses DeepSpeed.
        scratch: A folder of the trial's own, for what a framework writes whatever it is told.
        recomputers: Frameworks' own ways to recompute every k-th block of a model (none for 0); each tells whether it could.
        casts_inputs: Floating-point inputs are given the type of 16-bit weights, which a framework may do itself.
        sums_losses: What goes backward are parts of a step's loss, as a framework divides it, not the losses of micro-batches.
        batch_factor: Micro-batches in the batch of a loader, where a framework splits it between the ranks.
    """

    def __init__(self, recorder: rank_run.Recorder, request: TrialRequest, memory: observe.Memory) -> None:
        assert request.script is not None
        self.recorder, self.request, self.memory = recorder, request, memory
        self.script = script.in_rank(request.script, recorder.folder.ds_config)
        self.report = recorder.report
        self.candidate = Candidate.of(request.candidate) if request.candidate else None
        self.family = self.config_source = ""
        self.scratch = recorder.folder.scratch
        self.meter: Meter | None = None
        self.workload: Workload | None = None
        self.own_config: DsConfig = {}
        self._own_rates: tuple[float | None, ...] = ()
        self.plain_backward = False
        self.recomputers: list[Callable[[torch.nn.Module, int], bool]] = []
        self.batch_factor = 1
        self.casts_inputs = True
        self.sums_losses = False
        self._script_recomputes = True
        self._unrecomputed = ""  # where recomputation was asked for and not carried out
        self._begun = self._reached = self._inside_backward = self._summed = False
        self._skipped_before = 0
        self._afterwards: Iterator[None] | None = None
        self._laps: Laps | None = None
        self._losses: list[torch.Tensor] = []
        self._skipped: list[bool] = []
        self._ragged: list[bool] = []
        self._blocks: list[torch.nn.Module] = []
        self._sketch: Sketch | None = None
        self._noise: NoiseMeter | None = None
        self._gradients: GradientWatch | None = None
        self._total: torch.Tensor | None = None
        self._n_backward = 0
        self._cpu_start = time.process_time()
        self._traces = Traces(self, users_caller)

    def install(self) -> None:
        """Patches every entry point; nothing is ever put back, since the process ends with the trial."""
        import deepspeed

        for text in self.script.side_changes:
            self.changed(text)
        patch(deepspeed, "initialize", self._initialize)
        patch(deepspeed.zero.Init, "__init__", self._zero_init)
        patch(deepspeed.DeepSpeedEngine, "backward", self._any_backward)
        patch(checkpointing, "checkpoint", self._checkpoint)
        patch(torch.Tensor, "backward", self._tensor_backward)
        trial_config = self.recorder.folder.ds_config.absolute() if self.candidate is not None else None
        arguments = Arguments(self.value, trial_config, self.changed, self.report.flags)
        patch(argparse.ArgumentParser, "parse_known_args", arguments.parse)
        Loaders(self).install()
        # The ranks are joined already, over a socket that nobody can take.
        patch(dist, "init_process_group", lambda _original, *_args, **_kwargs: None)
        patch(dist, "destroy_process_group", lambda _original, *_args, **_kwargs: None)
        frameworks.install(self)
        self._traces.install()

    def script_ended(self) -> None:
        """The script came to its end by itself.

        Raises:
            ScriptError: Before enough of it had been seen.
        """
        if self.meter is None:
            raise ScriptError("the script ended without calling deepspeed.initialize with an optimizer")
        self._gather_rest(self.meter)
        n = len(self.report.step_times_s)
        needed = (
            1 if self.candidate is None else min(self.request.max_steps, stats.SETUP_STEPS + stats.LEAST_TIMED_STEPS)
        )
        if n < needed:
            raise ScriptError(
                f"the script ended after {n} optimizer steps, and {needed} are needed: give it more steps or more data"
            )
        self._end(f"the script ended by itself after {n} optimizer steps")

    # The configuration

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        namespace: Any = given.get("args")
        if getattr(namespace, "device_rank", 0) is None:  # Lightning's, where the device is a CPU
            namespace.device_rank = int(os.environ["LOCAL_RANK"])
        source = given.get("config") or given.get("config_params") or stated.config_flag(namespace)
        try:
            own = stated.read(source)
        except UserError as error:  # the script must not catch it
            self.abort(error)
        if not isinstance(source, dict):
            self.config_source = str(source)
        if given.get("optimizer") is None and "optimizer" not in own:
            return original(*args, **kwargs)  # a model that is not trained, as a frozen reference
        first = self.meter is None
        watch = self._before(given, own) if first else None
        config = {key: value for key, value in self._config(own, first=first).items() if key not in SIDE_EFFECT_KEYS}
        config["steps_per_print"] = 10**9
        if isinstance(source, dict):  # the script may look into it later
            source.clear()
            source.update(config)
            config = source
        given["config"] = config
        given.pop("config_params", None)
        with stated.without_config_flag(namespace):
            result = original(*bound.args, **bound.kwargs)
        if watch is not None:
            self._own_rates = _rates(getattr(result[0], "basic_optimizer", None))
            self._follow_rate(result[0])
            self._attach(result[0], watch)
        return result

    def _follow_rate(self, engine: Any) -> None:
        """Has every update made with the trial's share of the learning rate, whoever sets that, and however a schedule moves it."""
        factor, optimizer = self.request.learning_rate_factor, getattr(engine, "basic_optimizer", None)
        if factor == 1:
            return
        if optimizer is None:
            self.abort(
                ScriptError("no optimizer whose learning rate could follow the batch; choose --learning-rate-rule none")
            )
        if all(group.get("lr") is None for group in optimizer.param_groups):
            self.once("the optimizer finds its learning rate itself, so none follows the batch")
            return
        ratios = [
            now / was for now, was in zip(self._own_rates, self.script.learning_rates, strict=False) if now and was
        ]
        if ratios and max(ratios) < 1.01 * min(ratios) and not math.isclose(ratios[0], 1, rel_tol=0.01):
            wanted, factor = factor, factor / ratios[0]
            self.changed(
                f"Learning rate: at this batch the script sets {ratios[0]:.3g} times its own by itself, and the rule asks for {wanted:.3g}:"
                f" multiply what it sets by {factor:.3g}, as the trial did."
            )

        original = optimizer.step

        # A method, and with the marks of the one it replaces: torch's schedules look at both.
        @functools.wraps(original)
        def scaled(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            rates = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
            for group, rate in rates:
                group["lr"] = rate * factor
            try:
                return original(*args, **kwargs)
            finally:
                for group, rate in rates:
                    group["lr"] = rate  # a schedule goes on from its own

        optimizer.step = types.MethodType(scaled, optimizer)

    def _config(self, own: DsConfig, *, first: bool) -> DsConfig:
        if self.candidate is None:
            return own
        # A second trained model (a critic) keeps its own settings, but for what is tuned.
        config = copy.deepcopy(self.request.ds_config) if first else self.candidate.to_deepspeed(own)
        config.setdefault("zero_optimization", {"stage": 0})  # a framework may look there
        return config

    def early_config(self, own: DsConfig) -> DsConfig:
        """The trial's configuration for a framework that reads it before `deepspeed.initialize`, what it fills in left "auto".

        Args:
            own: The script's configuration before anything was filled in.
        """
        if self.candidate is None:
            return own
        config = self._config(own, first=True)
        stated.keep_auto(config, own, OWNED_PATHS)
        # Counted from the batch, and refused by transformers where the two differ.
        for name in ("total_num_steps", "warmup_num_steps"):
            if name in config.get("scheduler", {}).get("params", {}):
                config["scheduler"]["params"][name] = "auto"
        return config

    def _before(self, given: dict[str, Any], own: DsConfig) -> observe.Recomputations | pipeline.Recomputed:
        """Looks at the model before DeepSpeed changes it."""
        from deepspeed.runtime.pipe.module import PipelineModule

        self.recorder.enter("initialize")
        # Frameworks write infinity here, which is no JSON.
        self.own_config = copy.deepcopy({key: value for key, value in own.items() if key != "steps_per_print"})
        model = given["model"]
        self._blocks = blocks = contract.find_blocks(model, None)
        client = given.get("optimizer") is not None
        self.workload = rank_run.workload_of(model, blocks, n_samples=None, client_optimizer=client)
        if isinstance(model, PipelineModule):
            self.family = self.family or "DeepSpeed PipelineModule"
            self.workload = pipeline.whole(self.workload, model)
            return pipeline.recompute(self, model, own)
        if self.candidate is not None and self.candidate.precision not in DTYPES:
            self._widen(model)
        if self.request.weights is not None:
            self._start_from(model, Path(self.request.weights))
        if self.candidate is not None and self.candidate.checkpoint_every != self.script.checkpoint_every:
            self._recompute(model, blocks, self.candidate.checkpoint_every)
        if self.request.replicate:
            perturb(model, self.request.replicate)
        if self.request.noise and self.candidate is not None:
            self._noise = NoiseMeter(model, self.request.world_size, self.candidate.gradient_accumulation_steps)
        if self.request.check_gradient and self.candidate is not None:
            self._gradients = GradientWatch(model, self.request.world_size)
        return observe.Recomputations(blocks)

    def _start_from(self, model: torch.nn.Module, path: Path) -> None:
        """Puts the weights of a checkpoint into the script's model, whatever the script has put there."""
        try:
            weights.load(model, path)
        except UserError as error:  # the script must not catch it
            self.abort(error)

    def _widen(self, model: torch.nn.Module) -> None:
        """Gives a model that was loaded in 16 bits the weights that a candidate without them needs."""
        narrow = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
        if narrow and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            model.float()
            self.changed("Model: load its weights in 32 bits, with `dtype=torch.float32`.")

    def _recompute(self, model: torch.nn.Module, blocks: list[torch.nn.Module], every: int) -> None:
        """Has every k-th block recomputed, and nothing else, whatever the script does."""
        if any(recomputer(model, every) for recomputer in self.recomputers):
            return
        self._script_recomputes = not self.script.checkpoint_every
        if every:
            config: Any = getattr(model, "config", None)
            if getattr(config, "use_cache", None):
                config.use_cache = False  # a recomputed block would append to the cache twice
            observe.Checkpointer(blocks, every)

    def _checkpoint(self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._script_recomputes:
            return original(function, *args, **kwargs)
        if not self._unrecomputed:
            self._unrecomputed = users_caller() or "a library"
            if self._unrecomputed == "a library":
                self.changed(
                    "Activation checkpointing: calls of `torch.utils.checkpoint` inside a library are skipped.",
                    reproducible=False,
                )
        return function(*args, **{name: value for name, value in kwargs.items() if name not in CHECKPOINT_OPTIONS})

    def _zero_init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        if self.candidate is not None:
            bound.arguments.pop("dtype", None)
            if self.candidate.zero_stage < 3:
                bound.arguments["enabled"] = False
            else:
                bound.arguments.pop("config", None)
                bound.arguments["config_dict_or_path"] = copy.deepcopy(self.request.ds_config)
        original(*bound.args, **bound.kwargs)

    # The batch

    def value(self, field: str) -> tuple[int, int] | None:
        """What a field is in the untouched script and what it is to be; None if it stays, or the user carries it himself."""
        if self.candidate is None or field in self.script.carried:
            return None
        was, wanted = getattr(self.script, field), getattr(self.candidate, field)
        return (was, wanted) if was and was != wanted else None

    # The steps

    def _attach(self, engine: Any, watch: observe.Recomputations | pipeline.Recomputed) -> None:
        batches = observe.BatchObserver(engine, forgiving=True)
        self._watch = watch
        self.meter = meter = Meter(
            self.recorder, self.request, engine, batches, self.memory, watch, self._noise, self._gradients
        )
        if hasattr(engine, "train_batch"):
            pipeline.attach(self, meter, engine)
        else:
            engine.register_forward_pre_hook(self._on_forward, with_kwargs=True, prepend=True)
            if self.candidate is None and not getattr(engine, "is_compiled", False):
                self._sketch = Sketch(engine, self._blocks)
            engine.backward = functools.partial(self._engine_backward, engine.backward)
            if hasattr(engine, "_backward_prologue"):
                engine._backward_prologue = functools.partial(self._on_prologue, engine._backward_prologue)
            engine.step = functools.partial(self._engine_step, engine.step)
        self.recorder.enter("warmup")
        self._restart_clock()

    def _on_forward(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.meter is not None and torch.is_grad_enabled() and engine.training:
            self.meter.enter("forward")
        return self.cast(engine, args, kwargs)

    def cast(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Gives 16-bit weights 16-bit inputs, which a script written for another precision does not."""
        if self.candidate is None or not self.casts_inputs or self.candidate.precision == self.script.precision:
            return None  # the script knows what its own precision needs
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(self.candidate.precision)
        others = {torch.bfloat16, torch.float16, torch.float32} - {dtype}
        if dtype is None or not any(tensor.dtype in others for tensor in _tensors((args, kwargs))):
            return None
        self.changed(
            f"Inputs: cast floating-point inputs to `{str(dtype).removeprefix('torch.')}` before the engine's forward."
        )
        cast: tuple[Any, Any] = contract.to_device((args, kwargs), torch.device(engine.device), dtype)
        return cast

    @contextlib.contextmanager
    def inside_backward(self) -> Iterator[None]:
        """What is called meanwhile is a part of an engine's backward pass, and no pass of the script's own."""
        before, self._inside_backward = self._inside_backward, True
        try:
            yield
        finally:
            self._inside_backward = before

    def _any_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.inside_backward():  # of any engine: a critic's passes are none of ours
            return original(*args, **kwargs)

    def _engine_backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        # A framework that scales the micro-batches itself gives parts of the step's loss, not losses of their own.
        self._summed = self.sums_losses or kwargs.get("scale_wrt_gas") is False
        assert self.meter is not None
        if self.sums_losses and self.meter.gradients is not None:
            self.meter.gradients.divided_by = self.meter.engine.gradient_accumulation_steps()
        self.meter.enter("backward")
        with self.inside_backward():
            result = original(loss, *args, **kwargs)
        self._went_backward(loss)
        return result

    def _tensor_backward(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.meter is None or self._inside_backward or not self.meter.batches.went_forward:
            return original(tensor, *args, **kwargs)
        # DeepSpeed tells when a pass comes to what its engine gave; versions that do not are taken to be meant.
        self._reached = not hasattr(self.meter.engine, "_backward_prologue")
        self.meter.enter("backward")
        with self.inside_backward():
            result = original(tensor, *args, **kwargs)
        if self._reached:
            self.plain_backward = True
            self._went_backward(tensor)
        return result

    def _went_backward(self, loss: Any) -> None:
        assert self.meter is not None
        self.meter.backward()
        self._note_loss(loss)
        self.meter.enter("step")

    def _on_prologue(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reached = True
        return original(*args, **kwargs)

    def _note_loss(self, loss: Any) -> None:
        self._n_backward += 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            value = loss.detach().float().reshape(())
            self._total = value if self._total is None else self._total + value

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.meter is not None
        self.meter.enter("step")
        result = self.meter.update(functools.partial(original, *args, **kwargs))
        self.stepped()
        self.meter.enter("data")
        return result

    def stepped(self, loss: Any = None) -> None:
        """Notes that the engine may have taken an optimizer step, with its loss where that is not known from backward passes."""
        meter = self.meter
        assert meter is not None
        if loss is not None:
            self._note_loss(loss)
        if not meter.batches.step():
            return
        try:
            self._boundary(meter)
        except BaseException as error:  # the script must not catch it
            self.abort(error)

    def _boundary(self, meter: Meter) -> None:
        if self._afterwards is not None:
            self._go_on()
            return
        assert self._laps is not None
        self._laps.lap()
        total = self._total if self._total is not None else torch.full((), float("nan"), device=meter.device)
        self._losses.append(total.to(meter.device) / (1 if self._summed else max(1, self._n_backward)))
        self._total, self._n_backward = None, 0
        self._skipped.append(meter.engine.skipped_steps > self._skipped_before)
        self._skipped_before = meter.engine.skipped_steps
        self._ragged.append(meter.batches.ragged)
        if len(self._losses) < meter.window_steps():
            return
        meter.enter("")
        self._gather(meter, len(self._losses))
        n = len(self.report.step_times_s)
        if self.candidate is None:
            if n >= PROBE_STEPS:
                self._end()
        else:
            if not self._begun and n >= min(2, self.request.max_steps):
                meter.begin()
                self._watch.stop()
                self._begun = True
            if self._begun and meter.done():
                self._afterwards = meter.afterwards()
                self._go_on()
        self._restart_clock()

    def _gather(self, meter: Meter, n: int) -> None:
        """Compares the first n steps of the window with the other ranks'; all of them take part."""
        assert self._laps is not None
        meter.synchronize()
        cpu_s = time.process_time() - self._cpu_start
        meter.gather(
            self._laps.seconds()[:n], cpu_s, self._losses[:n], skipped=self._skipped[:n], ragged=self._ragged[:n]
        )

    def _gather_rest(self, meter: Meter) -> None:
        """Where the script ends in the middle of a window: what all ranks have seen of it counts too."""
        if self._afterwards is not None:
            return
        n = torch.tensor(len(self._losses), device=meter.device)
        dist.all_reduce(n, op=dist.ReduceOp.MIN)
        if int(n):
            self._gather(meter, int(n))

    def _go_on(self) -> None:
        """Has the next step taken apart or traced; ends the process when that is done."""
        assert self._afterwards is not None
        if next(self._afterwards, self) is self:
            self._end()

    def _restart_clock(self) -> None:
        meter = self.meter
        assert meter is not None
        self._losses, self._skipped, self._ragged = [], [], []
        self._laps, self._cpu_start = Laps(meter.device), time.process_time()
        self._laps.start()
        if self.candidate is not None and len(self.report.step_times_s) == 1:
            meter.take_apart()

    def _end(self, caveat: str = "") -> None:
        """Writes what was seen and ends the process; all ranks come here at the same step."""
        meter = self.meter
        assert meter is not None and self.workload is not None
        if caveat:
            self.report.caveats.append(caveat)
        self._compare_data(meter)
        self._traces.close()
        if self.candidate is not None:
            meter.finish()
            if self.request.save_weights is not None:
                weights.save(meter.engine, Path(self.request.save_weights))
        else:
            seen = meter.observe()
            counted = seen.loader_batch_size or seen.micro_batch_size
            if counted != seen.micro_batch_size:
                self.report.caveats.append(
                    f"samples are counted where the loader draws them, {counted} at a time: the leading dimension at the engine's forward"
                    f" is {seen.micro_batch_size or 'not constant'}"
                )
            probed = Probed(
                ds_config=masking.without_secrets(self._with_dtype(seen.dtype)),
                micro_batch_size=counted,
                gradient_accumulation_steps=seen.gradient_accumulation_steps,
                family=self.family or "raw DeepSpeed",
                checkpoint_every=self._watch.every,
                plain_backward=self.plain_backward,
                flags=self.report.flags,
                config_source=self.config_source,
                configured_accumulation=meter.engine.gradient_accumulation_steps(),
                model_parallel_size=self.request.world_size // meter.data_parallel,
                pipeline_stages=getattr(meter.engine, "num_stages", 0),
                expert_parallel=any(
                    getattr(parameter, "allreduce", True) is False for parameter in meter.engine.module.parameters()
                ),
                learning_rates=self._own_rates,
            )
            if self.report.rank == 0:
                caveats = [*self.workload.caveats, *self.report.caveats]
                optimizer = type(getattr(meter.engine, "basic_optimizer", None)).__name__
                workload = replace(
                    self.workload,
                    script=probed,
                    optimizer=optimizer,
                    caveats=caveats,
                    data=samples.describe(iter(meter.batches.shapes)),
                )
                if self._sketch is not None:
                    workload = replace(
                        workload, profile=self._sketch.profile(workload, self.own_config, seen.micro_batch_size)
                    )
                trial.write(self.recorder.folder.workload, workload)
        rank_run.complete(self.recorder)

    def _with_dtype(self, dtype: str) -> DsConfig:
        """The script's configuration, which says what type the weights are even where the script does not tell DeepSpeed."""
        section = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
        if section is None or precision_of(without_auto(self.own_config)) != "fp32":
            return self.own_config
        self.once(
            f"the script trains {dtype} weights that DeepSpeed is not told of, without an fp32 copy;"
            f" the baseline says `{section}` in its configuration, and has one"
        )
        return {**self.own_config, section: {"enabled": True}}

    def _compare_data(self, meter: Meter) -> None:
        # Of a pipeline only the first stages take data in.
        checksums = meter.batches.checksums if getattr(meter.engine, "stage_id", 0) == 0 else []
        own = torch.tensor((checksums + [0] * observe.N_CHECKSUMS)[: observe.N_CHECKSUMS], dtype=torch.float64)
        rows = [torch.empty_like(own, device=meter.device) for _ in range(self.request.world_size)]
        dist.all_gather(rows, own.to(meter.device))
        rows = [row for row in rows if row.any()]
        if len(rows) > 1 and all(torch.equal(row, rows[0]) for row in rows) and self.report.rank == 0:
            self.report.caveats.append(
                "all ranks are fed the same data: no DistributedSampler, or one seed for all of them"
            )

    def abort(self, error: BaseException) -> NoReturn:
        """Reports an error and ends the process, so that the script cannot catch it."""
        self._traces.close()
        rank_run.abort(self.recorder, error)

    def changed(self, text: str, *, reproducible: bool = True) -> None:
        """Notes what a trial needed besides the DeepSpeed configuration, as a sentence with code in backticks.

        Args:
            text: The sentence; `Command line:` before what a flag carries.
            reproducible: The user can change it too, by a flag, a constant or a line of his own.
        """
        if text not in self.report.side_changes:
            self.report.side_changes.append(text)
            if not reproducible:
                self.report.unreproducible.append(text)

    def saver(self, name: str) -> Callable[..., Any]:
        """A hook for a function that would save or upload: it only notes that it was called."""

        def not_saved(*_args: Any, **_kwargs: Any) -> bool:
            self.once(f"{name} is not carried out in trials")
            return True

        return not_saved

    def once(self, caveat: str) -> None:
        """Notes what the user should know about this trial."""
        if caveat not in self.report.caveats:
            self.report.caveats.append(caveat)


def _rates(optimizer: Any) -> tuple[float | None, ...]:
    """The learning rate that each group of an optimizer starts from, before any schedule."""
    found = (group.get("initial_lr", group.get("lr")) for group in getattr(optimizer, "param_groups", ()))
    return tuple(None if rate is None else float(rate) for rate in found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
