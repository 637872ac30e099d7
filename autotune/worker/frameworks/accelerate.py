"""Accelerate, alone and below transformers' Trainer: its DeepSpeed plugin, its counting of micro-batches, its saving."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from autotune import UserError
from autotune.candidate import DsConfig
from autotune.trial import ACCELERATE, TRAINER
from autotune.worker.patching import after_import, patch

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

# DeepSpeed as a script that does not use it would get it: nothing sharded, everything else from the script.
NO_DEEPSPEED: DsConfig = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
}
# A state that was saved by another ZeRO stage or number of ranks could not be loaded either.
SAVERS = ("save", "save_model", "save_state", "load_state")


def install(hooks: Hooks) -> None:
    """Sets the hooks on accelerate, wherever it is imported."""
    adapter = _Adapter(hooks)
    after_import("accelerate.state", adapter.on_state)
    after_import("accelerate.utils.deepspeed", adapter.on_config)
    after_import("accelerate.utils.dataclasses", adapter.on_plugin)
    after_import("accelerate.accelerator", adapter.on_accelerator)


def mixed_precision(hooks: Hooks) -> str:
    """What Accelerate calls the precision of the trial."""
    assert hooks.candidate is not None
    return hooks.candidate.precision if hooks.candidate.precision in ("bf16", "fp16") else "no"


def asked_for(what: str) -> bool:
    """Whether `accelerate launch` set a way to train."""
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() in ("true", "1", "yes", "y", "t", "on")


def refuse_fsdp(hooks: Hooks) -> NoReturn:
    """Ends a trial of a script that shards by FSDP."""
    hooks.abort(
        UserError("the script trains with FSDP, beside which DeepSpeed cannot be used; run it without FSDP to tune it")
    )


class _Adapter:
    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    # On a CPU, which Accelerate does not know as a device of DeepSpeed

    def on_state(self, module: ModuleType) -> None:
        if self.hooks.memory.cuda:
            return

        def prepare_backend(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
            # Else every rank would take itself for the only one, and all would train on the same data.
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
            if self.hooks.candidate is None:
                return
            config.config = self.hooks.early_config(config.config)
            if hasattr(
                config, "trainer_config_process"
            ):  # the Trainer compares these with its arguments, and refuses a difference
                config.config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
            config.set_stage_and_offload()

        patch(module.HfDeepSpeedConfig, "__init__", init)

    def on_plugin(self, module: ModuleType) -> None:
        def post_init(original: Callable[..., Any], plugin: Any) -> None:
            original(plugin)
            if self.hooks.candidate is None:
                return
            # It copies arguments into the configuration, but not the configuration back into them.
            zero = plugin.deepspeed_config["zero_optimization"]
            plugin.zero_stage = zero.get("stage", 0)
            plugin.gradient_accumulation_steps = plugin.deepspeed_config["gradient_accumulation_steps"]
            for section in ("offload_optimizer", "offload_param"):
                setattr(plugin, f"{section}_device", (zero.get(section) or {}).get("device", "none"))
            plugin.zero3_init_flag = plugin.zero_stage == 3

        patch(module.DeepSpeedPlugin, "__post_init__", post_init)

    # The accelerator

    def on_accelerator(self, module: ModuleType) -> None:
        patch(module.Accelerator, "__init__", self._accelerator)
        patch(module.Accelerator, "init_trackers", self._no_trackers)
        for name in SAVERS:
            patch(module.Accelerator, name, self.hooks.saver(f"accelerator.{name}"))

    def _accelerator(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> None:
        if self.hooks.family == TRAINER:  # which has seen to everything, and counts the micro-batches itself
            original(accelerator, *args, **kwargs)
            return
        self.hooks.family = ACCELERATE
        names = ("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given["log_with"] = None
        self._inject_deepspeed(given)
        self._accumulation(given)
        if self.hooks.candidate is not None:
            self._precision(given)
        original(accelerator, **given)
        if accelerator.split_batches:
            self.hooks.batch_factor = self.hooks.request.world_size

    def _inject_deepspeed(self, given: dict[str, Any]) -> None:
        plugged = given.get("deepspeed_plugin") or given.get("deepspeed_plugins")
        if plugged is None and not asked_for("DEEPSPEED"):
            if given.get("fsdp_plugin") or asked_for("FSDP"):
                refuse_fsdp(self.hooks)
            file = self.hooks.scratch / f"ds_config.{self.hooks.report.rank}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(NO_DEEPSPEED))
            os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
            self.hooks.changed(
                "DeepSpeed: the script is run without it; launch it with `accelerate launch --config_file accelerate.yaml`"
                " (`autotune export --format accelerate`)."
            )
        if given.get("cpu") and not self.hooks.memory.cuda:
            given["cpu"] = False  # with which Accelerate would not use DeepSpeed

    def _accumulation(self, given: dict[str, Any]) -> None:
        change = self.hooks.value("gradient_accumulation_steps")
        if change is None:
            return
        was, wanted = change
        plugin = given.get("gradient_accumulation_plugin")
        name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        if plugin is not None:
            plugin.num_steps = wanted
        elif os.environ.get(name, "").isdigit():
            os.environ[name] = str(wanted)
        else:
            given["gradient_accumulation_steps"] = wanted
        self.hooks.changed(f"Accelerate: `Accelerator(gradient_accumulation_steps={wanted})` instead of {was}.")

    def _precision(self, given: dict[str, Any]) -> None:
        wanted = mixed_precision(self.hooks)
        own = str(given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        if own not in ("no", wanted):  # beside "no" the JSON decides
            given["mixed_precision"] = wanted
            self.hooks.changed(f'Accelerate: `mixed_precision="{wanted}"` instead of "{own}".')

    def _no_trackers(self, _original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> None:
        self.hooks.once("trackers are not started in trials")
