"""Adapter of Accelerate, alone or below transformers' Trainer: DeepSpeed plugin, accumulation, precision, saving."""

import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from autotune.errors import UserError
from autotune.space.deepspeed import DsConfig
from autotune.trial.workload import ACCELERATE, TRAINER
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import after_import, patch, patch_everywhere

# DeepSpeed configuration for a script that does not use DeepSpeed: no sharding, the rest from the script.
NO_DEEPSPEED: DsConfig = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
}
WITHOUT_CPU = "Accelerate: leave {}: beside it DeepSpeed is not used."
APART = "each process of the command trains on all samples, where in the trials it trains on its share: on a CPU {} shares them out with {}"
# Accelerate counts the processes by their backend, and names none for DeepSpeed on a CPU (state.py, PartialState).
BACKEND = '`Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])` (of accelerate.utils)'
TOGETHER = f"Accelerate: {BACKEND}: on a CPU each process else trains on all samples, in place of its share."
BY_HAND = (
    "the script calls accelerator.backward more than once for an optimizer.step(), but with DeepSpeed Accelerate updates the weights"
    " in each backward, so that {}; to accumulate, write `Accelerator(gradient_accumulation_steps=N)` and put `with"
    " accelerator.accumulate(model):` around forward, backward and step"
)
# Loading too: a state saved with another ZeRO stage or number of ranks could not be loaded.
SAVERS = ("save", "save_model", "save_state", "load_state")


def install(context: ScriptContext) -> None:
    """Patches accelerate when it is imported."""
    adapter = _Adapter(context)
    after_import("accelerate.state", adapter.on_state)
    after_import("accelerate.utils.deepspeed", adapter.on_config)
    after_import("accelerate.utils.dataclasses", adapter.on_plugin)
    after_import("accelerate.accelerator", adapter.on_accelerator)
    after_import("accelerate.utils.memory", adapter.on_memory)


def mixed_precision(context: ScriptContext) -> str:
    """Returns Accelerate's name of the candidate's precision."""
    assert context.candidate is not None
    return context.candidate.precision if context.candidate.precision in ("bf16", "fp16") else "no"


def asked_for(what: str) -> bool:
    """Returns whether `accelerate launch` turned on a way to train, such as `DEEPSPEED` or `FSDP`."""
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() in ("true", "1", "yes", "y", "t", "on")


def refuse_fsdp(context: ScriptContext) -> NoReturn:
    """Ends the trial of a script that trains with FSDP."""
    context.abort(
        UserError("the script trains with FSDP, beside which DeepSpeed cannot be used; run it without FSDP to tune it")
    )


class _Adapter:
    def __init__(self, context: ScriptContext) -> None:
        self._context, self._injected, self._launched_on_cpu = context, False, False
        self._unanswered = False  # an update that no `optimizer.step()` has followed yet

    # On a CPU, which Accelerate does not know as a device of DeepSpeed

    def on_state(self, module: ModuleType) -> None:
        if not self._context.memory.on_cpu:
            return
        # Set by `accelerate launch --cpu`: Accelerate would not use DeepSpeed.
        self._launched_on_cpu = asked_for("CPU")
        os.environ.pop("ACCELERATE_USE_CPU", None)

        def prepare_backend(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
            # Else every rank would train as if alone, and all on the same data.
            return "gloo", module.DistributedType.MULTI_CPU

        def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            n_threads = torch.get_num_threads()
            original(*args, **kwargs)
            torch.set_num_threads(n_threads)

        patch(module.PartialState, "_prepare_backend", prepare_backend)
        patch(module.PartialState, "__init__", init)

    # The configuration

    def on_config(self, module: ModuleType) -> None:
        def init(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> None:
            original(config, *args, **kwargs)
            if self._context.candidate is None:
                return
            config.config = self._context.early_config(config.config)
            # The Trainer compares these with its arguments, and refuses a difference.
            if hasattr(config, "trainer_config_process"):
                config.config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
            config.set_stage_and_offload()

        patch(module.HfDeepSpeedConfig, "__init__", init)
        if self._context.candidate is None:
            patch(module.DeepSpeedEngineWrapper, "backward", self._backward)
            patch(module.DeepSpeedOptimizerWrapper, "step", self._step)

    def _backward(self, original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks for updates within a script's own accumulation, which DeepSpeed knows nothing of."""
        if self._unanswered and self._injected:
            self._context.abort(UserError(BY_HAND.format("it trains otherwise than without DeepSpeed")))
        if self._unanswered and self._context.family == ACCELERATE:
            self._context.once(BY_HAND.format("it does not accumulate"))
        n_updates = wrapper.engine.global_steps
        result = original(wrapper, *args, **kwargs)
        self._unanswered = wrapper.engine.global_steps > n_updates
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._unanswered = False
        return original(*args, **kwargs)

    def on_plugin(self, module: ModuleType) -> None:
        def post_init(original: Callable[..., Any], plugin: Any) -> None:
            original(plugin)
            if self._context.candidate is None:
                return
            # It copies arguments into the configuration, but not the configuration back into them.
            zero = plugin.deepspeed_config["zero_optimization"]
            plugin.zero_stage = zero.get("stage", 0)
            plugin.gradient_accumulation_steps = plugin.deepspeed_config["gradient_accumulation_steps"]
            for section in ("offload_optimizer", "offload_param"):
                setattr(plugin, f"{section}_device", (zero.get(section) or {}).get("device", "none"))
            plugin.zero3_init_flag = plugin.zero_stage == 3

        patch(module.DeepSpeedPlugin, "__post_init__", post_init)

    def on_memory(self, module: ModuleType) -> None:
        def should_reduce(original: Callable[..., Any], error: Exception) -> bool:
            if original(error):  # `find_executable_batch_size` would go on with a smaller one
                self._context.abort(error)
            return False

        patch(module, "should_reduce_batch_size", should_reduce)

    # The accelerator

    def on_accelerator(self, module: ModuleType) -> None:
        patch(module.Accelerator, "__init__", self._accelerator)
        patch(module.Accelerator, "init_trackers", self._no_trackers)
        patch(module.Accelerator, "clip_grad_norm_", self._clips)
        for name in SAVERS:
            folder = "output_dir" if name == "save_state" else ""
            patch(module.Accelerator, name, self._context.saver(f"accelerator.{name}", folder))

    def _accelerator(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> None:
        if self._context.family == TRAINER:  # it has set everything, and counts micro-batches itself
            original(accelerator, *args, **kwargs)
            return
        self._context.family = ACCELERATE
        names = ("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given["log_with"] = None
        self._inject_deepspeed(given)
        self._accumulation(given)
        if self._context.candidate is not None:
            self._precision(given)
        original(accelerator, **given)
        if accelerator.split_batches:
            self._context.batch_factor = self._context.request.world_size

    def _inject_deepspeed(self, given: dict[str, Any]) -> None:
        plugged = given.get("deepspeed_plugin") or given.get("deepspeed_plugins")
        if plugged is None and not asked_for("DEEPSPEED"):
            if given.get("fsdp_plugin") or asked_for("FSDP"):
                refuse_fsdp(self._context)
            file = self._context.scratch / f"ds_config.{self._context.report.rank}.json"
            file.parent.mkdir(exist_ok=True)
            # Accelerate makes 1 of "auto"; at which norm the script clips gradients itself shows when it does so.
            file.write_text(json.dumps(NO_DEEPSPEED | {"gradient_clipping": 0.0}))
            self._injected = True
            patch_everywhere(torch.nn.utils, {"clip_grad_norm_": self._clips})
            os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
            self._context.changed(
                "DeepSpeed: the script is run without it; launch it with"
                " `accelerate launch --config_file accelerate.yaml` (`autotune export --format accelerate`)."
            )
        self._share_out(given)
        if given.get("cpu") and self._context.memory.on_cpu:
            given["cpu"] = False
            self._context.changed(WITHOUT_CPU.format("`cpu=True` out of `Accelerator(...)`"))
        if self._launched_on_cpu:
            self._context.changed(
                WITHOUT_CPU.format("`--cpu` (`use_cpu` of its file, `ACCELERATE_USE_CPU`) out of `accelerate launch`")
            )

    def _share_out(self, given: dict[str, Any]) -> None:
        """Tells what has Accelerate share out the samples among processes on a CPU, as it does in trials."""
        named = any(getattr(handler, "backend", "") == "gloo" for handler in given.get("kwargs_handlers") or ())
        if not self._context.memory.on_cpu or self._context.request.world_size == 1 or named:
            return
        self._context.changed(TOGETHER)
        if not (given.get("cpu") or self._launched_on_cpu):
            self._context.once(APART.format("Accelerate", BACKEND))

    def _clips(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Notes the norm at which the script clips gradients, by an Accelerator or by torch; DeepSpeed's engine will do it."""
        limit = kwargs.get("max_norm", next((each for each in args if isinstance(each, (int, float))), None))
        if limit is not None and self._injected:
            self._context.clipping = float(limit)
        return original(*args, **kwargs)

    def _accumulation(self, given: dict[str, Any]) -> None:
        change = self._context.value("gradient_accumulation_steps")
        if change is None:
            return
        was, wanted = change
        plugin = given.get("gradient_accumulation_plugin")
        name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        if given.get("gradient_accumulation_steps") == wanted and os.environ.get(name, str(wanted)) == str(wanted):
            return  # a flag of the script carries it
        if plugin is not None:
            plugin.num_steps = wanted
        elif os.environ.get(name, "").isdigit():
            os.environ[name] = str(wanted)
        else:
            given["gradient_accumulation_steps"] = wanted
        self._context.changed(f"Accelerate: `Accelerator(gradient_accumulation_steps={wanted})` instead of {was}.")

    def _precision(self, given: dict[str, Any]) -> None:
        wanted = mixed_precision(self._context)
        own = str(given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        if own not in ("no", wanted):  # beside "no" the JSON decides
            given["mixed_precision"] = wanted
            self._context.changed(f'Accelerate: `mixed_precision="{wanted}"` instead of "{own}".')

    def _no_trackers(self, _original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> None:
        self._context.once("trackers are not started in trials")
