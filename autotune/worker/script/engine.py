"""The DeepSpeed engine of a script: give it the trial's configuration, weights, recomputation and learning rate."""

import copy
import functools
import inspect
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DTYPES, RATE_KEYS, SIDE_EFFECT_KEYS, ZERO, DsConfig, at_path
from autotune.trial.workload import Probed, Workload
from autotune.worker import project
from autotune.worker.measure import experts, recompute
from autotune.worker.measure.buffers import BufferWatch
from autotune.worker.measure.gradient_check import GradientWatch, draw_otherwise, perturb
from autotune.worker.measure.noise import NoiseMeter
from autotune.worker.model import model_file, weights
from autotune.worker.model.inspect import with_experts, workload_of
from autotune.worker.profile.model import built_bytes
from autotune.worker.script import ds_config, pipeline
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.frameworks import huggingface
from autotune.worker.script.patching import patch, patch_everywhere, users_caller, users_frame

# Arguments of torch's checkpoint that it does not pass on to the function.
CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
# Where torch wraps modules for a user, and the change that leaves that out.
WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
UNWRAPPED = "Activation checkpointing: leave out `apply_activation_checkpointing`, or the calls of torch's `checkpoint_wrapper`."
# Interval of DeepSpeed's progress lines; trials want none.
NEVER_STEPS = 10**9
# What makes a model in shards, by DeepSpeed or by transformers; frameworks make it so without a word in the script.
SHARDING = re.compile(r"\bzero(?:\.| import .*\b)Init\b|DeepSpeedConfig\b")

Rates = tuple[float | None, ...]
FURTHER = (
    "the script trains more than one model with DeepSpeed: the first is measured and shown; the others follow a trial in batch, ZeRO"
    " stage and precision where their configuration has what the first's has, and else stay as they are"
)


@dataclass
class PreparedModel:
    """The script's model before DeepSpeed took it, with the instruments that watch it.

    Attributes:
        config_source: Path of that configuration; empty for a dict.
        workload: Describes the model; None but in a probe, which alone reads it.
        written_config: The file that the script writes it into by itself; empty if it writes none.
        initialized_at: File and line of the script's call; empty if a framework calls.
        watch: Notes which blocks are recomputed.
        buffers: Notes which modules change a buffer as they go forward; None but in a probe.
        noise: Measures gradient noise, where the request asks for it.
        gradients: Checks the first gradient, where the request asks for it.
        own_rates: Learning rate of each parameter group as the script sets it.
        built_bytes: As in `Profile`.
    """

    own_config: DsConfig
    config_source: str
    workload: Workload | None
    blocks: list[nn.Module]
    watch: recompute.Recomputations
    noise: NoiseMeter | None = None
    gradients: GradientWatch | None = None
    own_rates: Rates = ()
    buffers: BufferWatch | None = None
    built_bytes: float | None = None
    written_config: str = ""
    initialized_at: str = ""


class EngineHooks:
    """Hooks on `deepspeed.initialize`, `zero.Init`, and torch's and DeepSpeed's activation checkpointing."""

    def __init__(
        self, context: ScriptContext, attach: Callable[[Any, PreparedModel], None], beside: Callable[[Any], None]
    ) -> None:
        self._context, self._attach, self._attach_beside = context, attach, beside
        self._script_recomputes = True
        self._unrecomputed = ""  # caller whose recomputation was skipped
        self._watch: recompute.Recomputations | None = None
        self._pid = os.getpid()
        self._first: tuple[Any, DsConfig] = None, {}  # what the script gave for the first model, and that configuration
        self._first_at: str | None = None

    def install(self) -> None:
        """Patches the entry points."""
        import deepspeed

        # Everywhere: libraries that the server has imported may have bound them already.
        patch_everywhere(deepspeed, {"initialize": self._initialize})
        patch(deepspeed.zero.Init, "__init__", self._zero_init)
        for module, name in (
            (checkpointing, "checkpoint"),
            (deepspeed.checkpointing, "checkpoint"),
            (deepspeed.checkpointing, "non_reentrant_checkpoint"),
        ):
            patch_everywhere(module, {name: self._checkpoint})

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self._context
        if os.getpid() != self._pid:  # a process that the script forked, which must not write this rank's report
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        namespace: Any = given.get("args")
        if getattr(namespace, "device_rank", 0) is None:  # Lightning's, where the device is a CPU
            namespace.device_rank = int(os.environ["LOCAL_RANK"])
        source = given.get("config") or given.get("config_params")
        source, written = (source, "") if source else self._by_flag(namespace)
        if isinstance(source, str | os.PathLike) and (flag := context.json_flags.get(str(Path(source).absolute()))):
            context.report.flags.setdefault("ds_config", flag)
        try:
            own = ds_config.read(source)
            if given.get("optimizer") is None and "optimizer" not in own:
                return original(*args, **kwargs)  # a model that is not trained, as a frozen reference
            if context.candidate is None:
                ds_config.refuse_auto(own)
            prepared = self._prepare(given, own, source) if context.meter is None else None
        except UserError as error:  # the script must not catch it
            context.abort(error)
        if prepared is not None:
            self._tell_count(own)
            self._tell_file(own, prepared)
            self._first, self._first_at, config = (source, prepared.own_config), users_caller(), context.config(own)
            if context.request.replicate:
                perturb(given["model"], context.request.replicate)
        else:
            config = self._beside(source, own)
        config = {key: value for key, value in config.items() if key not in SIDE_EFFECT_KEYS}
        config["steps_per_print"] = NEVER_STEPS
        if isinstance(source, dict):  # the script may look into it later
            ds_config.put(source, config)
            config = source
        given["config"] = config
        given.pop("config_params", None)
        with ds_config.without_config_flag(namespace):
            result = original(*bound.args, **bound.kwargs)
        if prepared is not None:
            prepared.own_rates = learning_rates(result[0].basic_optimizer)
            prepared.initialized_at, prepared.written_config = self._first_at or "", written
            # The script would write over an exported file there.
            prepared.config_source = "" if written else prepared.config_source
            factor = follow_rate(context, result[0], prepared.own_rates)
            experts.watch(result[0].module)
            if context.request.replicate:
                draw_otherwise(result[0], context.request.replicate)
            self._attach(result[0], prepared)
            if context.meter is not None:
                context.meter.rate_factor = factor
        else:
            result[0].register_forward_pre_hook(context.cast, with_kwargs=True)
            self._attach_beside(result[0])
        return result

    def _by_flag(self, namespace: Any) -> tuple[Any, str]:
        """Returns the configuration among parsed arguments, and its path where the script sets it to a file that it writes."""
        context, source = self._context, getattr(namespace, ds_config.FLAG, None)
        if not source or not context.left_out:  # beside another source DeepSpeed refuses the flag
            return source, ""
        if not ds_config.sets_flag_itself(Path(context.request.target)):
            context.report.flags["ds_config"] = context.left_out
            return source, ""
        is_path = isinstance(source, str | os.PathLike)  # DeepSpeed takes a dict there, too
        written = is_path and os.path.exists(source) and os.stat(source).st_mtime > context.began
        return source, os.path.relpath(source) if written else ""

    def _tell_count(self, own: DsConfig) -> None:
        """Notes what the script has its accumulation from, where only the configuration is changed: its loop may count by that."""
        change = self._context.value(ds_config.ACCUMULATION)
        if change is None or own.get(ds_config.ACCUMULATION) != change[0]:  # a flag has moved it
            return
        if said := ds_config.accumulation_in_code(users_frame()):
            self._context.changed(
                f"Accumulation: the script's configuration has it from `{said}`: set that to {change[1]} instead of"
                f" {change[0]}, as the script may count its micro-batches by it."
            )

    def _tell_file(self, own: DsConfig, prepared: PreparedModel) -> None:
        """Notes the file from which a script fills the dict that it passes, and what no such file carries, as the script sets it itself."""
        context = self._context
        found = (
            ds_config.filled_from(own, context.json_flags) if not (prepared.config_source or context.family) else None
        )
        if found is None:
            return
        file, changed = found
        flag = context.json_flags[file]
        context.report.flags.setdefault("ds_config", flag)
        prepared.config_source = os.path.relpath(file)
        config, unmoved = context.config(own), ds_config.in_trials(own, context.request.world_size)
        elsewhere = {"train_batch_size"}
        if any(text.startswith("Accumulation:") for text in context.report.side_changes):
            elsewhere.add(ds_config.ACCUMULATION)
        for path in sorted(changed.keys() - elsewhere):
            wanted = at_path(config, path)
            moved = wanted not in (changed[path], at_path(unmoved, path))
            if moved and path.partition(".")[0] not in SIDE_EFFECT_KEYS:
                to = "leave that out" if wanted is None else f"set it to {json.dumps(wanted)} there"
                context.changed(
                    f"Configuration: the script sets `{path}` itself once it has read the file of `{flag[0]}`: {to}, in place of"
                    f" {json.dumps(changed[path])}."
                )

    def _beside(self, source: Any, own: DsConfig) -> DsConfig:
        """Returns the configuration of a model that is trained beside the first one, and notes what changes in it."""
        given, first = self._first
        self._context.once(FURTHER)
        # One dict for both of them has been changed for the first one by now.
        own = {**own, **first} if source is given else own
        config, changes = self._context.config_beside(own, first)
        if changes and (isinstance(source, dict) or source != given):  # else the exported file is read for both
            place = users_caller()
            call = f"`deepspeed.initialize`{f' at {place}' if place else ''}"
            whose = f"the configuration that {call} gets"
            if place == self._first_at is not None and own != first:  # as for a pretraining and a finetuning
                whose = f"{call} makes them, too: give it the exported file for the first alone, and for them their own"
            self._context.changed(f"Other models: {whose} with {', '.join(changes)}, and else as it is.")
        return config

    def _prepare(self, given: dict[str, Any], own: DsConfig, source: Any) -> PreparedModel:
        """Inspects the model and changes it as the candidate needs, before DeepSpeed gets it."""
        from deepspeed.runtime.pipe.module import PipelineModule

        context, model = self._context, given["model"]
        context.check_devices()
        context.recorder.enter("initialize")
        whose = "the optimizer given to deepspeed.initialize"
        if partly := model_file.check_optimizer(model, given.get("optimizer"), whose):
            context.once(partly)
        # Frameworks write infinity into steps_per_print, which is not valid JSON.
        own_config = copy.deepcopy({key: value for key, value in own.items() if value != math.inf})
        config_source = "" if isinstance(source, dict) else str(source)
        blocks = model_file.find_blocks(model, None)
        workload = buffers = None
        if context.candidate is None:
            buffers = BufferWatch(model)
            workload = workload_of(model, blocks, n_samples=None, client_optimizer=given.get("optimizer") is not None)
            workload = with_experts(workload, model)
        if isinstance(model, PipelineModule):
            context.family = context.family or "DeepSpeed PipelineModule"
            workload = pipeline.whole(workload, model) if workload is not None else None
            watch = pipeline.recompute(context, model, own)
            own_config = pipeline.without_stages(own_config)
            return PreparedModel(own_config, config_source, workload, blocks, watch, buffers=buffers)
        self._change_model(model, blocks)
        self._watch = recompute.Recomputations(blocks)
        prepared = PreparedModel(own_config, config_source, workload, blocks, self._watch, buffers=buffers)
        if workload is not None and (at_path(own, f"{ZERO}stage") == 3 or not (context.family or _names_sharding())):
            prepared.built_bytes = built_bytes(model)
        request, candidate = context.request, context.candidate
        if request.noise and candidate is not None:
            prepared.noise = NoiseMeter(model, request.world_size, candidate.gradient_accumulation_steps)
        if request.check_gradient and candidate is not None:
            prepared.gradients = GradientWatch(model, request.world_size)
        return prepared

    def _change_model(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        candidate, request = self._context.candidate, self._context.request
        if candidate is not None and candidate.precision not in DTYPES:
            self._widen(model)
        if request.weights is not None:
            weights.load(model, Path(request.weights))
        if candidate is not None and candidate.checkpoint_every != self._context.script.probed.checkpoint_every:
            self._recompute(model, blocks, candidate.checkpoint_every)

    def _widen(self, model: nn.Module) -> None:
        """Gives a model that was loaded in 16 bits the 32-bit weights that the candidate needs."""
        narrow = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
        if narrow and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            model.float()
            self._context.changed("Model: load its weights in 32 bits, with `dtype=torch.float32`.")

    def _recompute(self, model: nn.Module, blocks: list[nn.Module], every: int) -> None:
        """Recomputes every k-th block, and nothing else that the script recomputes."""
        if huggingface.recompute(model, every):
            return
        self._script_recomputes = not self._context.script.probed.checkpoint_every
        if every:
            model_file.turn_off_cache(model)
            recompute.Checkpointer(blocks, every)

    def _checkpoint(self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._script_recomputes:
            return original(self._watch.noting(function) if self._watch is not None else function, *args, **kwargs)
        if not self._unrecomputed:
            self._unrecomputed = users_caller() or "a library"
            caller = sys._getframe(2)  # of the function that stands in for torch's
            if caller.f_globals.get("__name__") == WRAPPER:
                self._context.changed(UNWRAPPED)
            elif self._unrecomputed == "a library":
                text = "Activation checkpointing: calls of `checkpoint(function, ...)` inside a library are skipped."
                self._context.changed(text, reproducible=False)
        return function(*args, **{name: value for name, value in kwargs.items() if name not in CHECKPOINT_OPTIONS})

    def _zero_init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        if self._context.candidate is not None:
            bound.arguments.pop("dtype", None)
            if self._context.candidate.zero_stage < 3:
                # A model that is given it shares out all the same.
                bound.arguments |= {"enabled": False, "module": None}
            else:
                bound.arguments.pop("config", None)
                bound.arguments["config_dict_or_path"] = copy.deepcopy(self._context.request.ds_config)
        original(*bound.args, **bound.kwargs)


def _splits_otherwise(candidate: Candidate | None, own: Probed) -> bool:
    """Returns whether a trial cuts the script's own global batch into other micro-batches."""
    if candidate is None or candidate.micro_batch_size == own.micro_batch_size:
        return False
    return candidate.samples_per_rank == (own.micro_batch_size or 0) * (own.gradient_accumulation_steps or 0)


def _names_sharding() -> bool:
    """Returns whether the user's code may have its model in shards from the start, once it trains with stage 3."""
    places = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    files = [Path(place) for place in places if project.holds(place) and Path(place).is_file()]
    return any(SHARDING.search(file.read_text(errors="replace")) for file in files)


def follow_rate(context: ScriptContext, engine: Any, own_rates: Rates) -> float:
    """Multiplies the learning rate of every update by the trial's factor, whatever schedule sets the rate; returns by what.

    Also where the global batch stays, and the script sets its rate by the micro-batch alone.
    """
    optimizer = engine.basic_optimizer
    factor = context.request.learning_rate_factor
    if factor == 1 and not _splits_otherwise(context.candidate, context.script.probed):
        return 1.0
    if all(group.get("lr") is None for group in optimizer.param_groups):
        if factor != 1:
            context.once("the optimizer finds its learning rate itself, so none follows the batch")
        return 1.0
    settings = context.candidate.config if context.candidate is not None else ()
    if not any(path.rpartition(".")[2] in RATE_KEYS for path, _ in settings):  # else the trial asks for another rate
        factor = _corrected(context, factor, own_rates)
    if factor != 1:
        scale_rate(optimizer, factor)
    return factor


def _corrected(context: ScriptContext, factor: float, own_rates: Rates) -> float:
    """Returns a factor on the script's rates without what the script has changed of them by itself at this batch."""
    pairs = zip(own_rates, context.script.probed.learning_rates, strict=False)
    ratios = [now / was for now, was in pairs if now and was]
    if ratios and max(ratios) < 1.01 * min(ratios) and not math.isclose(ratios[0], 1, rel_tol=0.01):
        why = "the global batch stays" if factor == 1 else f"the rule asks for {factor:.3g}"
        factor /= ratios[0]
        context.changed(
            f"Learning rate: at this batch the script sets {ratios[0]:.3g} times its own by itself,"
            f" and {why}: multiply what it sets by {factor:.3g}, as the trial did."
        )
    return factor


def scale_rate(optimizer: Any, factor: float) -> None:
    """Makes every `step` of an optimizer use its learning rates times `factor`; schedules see the unscaled ones."""
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
                group["lr"] = rate

    optimizer.step = types.MethodType(scaled, optimizer)


def learning_rates(optimizer: Any) -> Rates:
    """Returns the learning rate of each parameter group before any schedule."""
    found = (group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups)
    return tuple(None if rate is None else float(rate) for rate in found)
