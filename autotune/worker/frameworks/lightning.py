"""Lightning: its Trainer decides on batch, precision and devices beside DeepSpeed's configuration, and makes the loaders anew."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.candidate import DsConfig
from autotune.worker.patching import after_import, patch

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

# Both names under which it is distributed; each has all the code.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# DeepSpeed as a script that does not use it would get it: nothing sharded, everything else from the script.
NO_DEEPSPEED: DsConfig = {"zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
# What Lightning itself writes into the configuration, and refuses or leaves alone where it is there already.
FILLED_IN = ("gradient_accumulation_steps", "train_batch_size", "bf16", "fp16")
PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def install(hooks: Hooks) -> None:
    """Sets the hooks on Lightning, under whichever name it is imported."""
    for package in PACKAGES:
        adapter = _Adapter(hooks, package)
        after_import(f"{package}.trainer.trainer", adapter.on_trainer)
        after_import(f"{package}.strategies.deepspeed", adapter.on_strategy)


class _Adapter:
    def __init__(self, hooks: Hooks, package: str) -> None:
        self.hooks, self.package = hooks, package

    # The trainer

    def on_trainer(self, module: ModuleType) -> None:
        patch(module.Trainer, "__init__", self._trainer)
        patch(module.Trainer, "fit", self._fit)
        patch(module.Trainer, "save_checkpoint", self.hooks.saver("trainer.save_checkpoint"))

    def _trainer(self, original: Callable[..., Any], trainer: Any, **given: Any) -> None:
        self.hooks.family = "Lightning"
        self.hooks.casts_inputs = False  # its precision plugin does
        # The ranks are there already, as under torchrun.
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "autotune")
        os.environ.setdefault("GROUP_RANK", "0")
        given |= {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": 1}
        if not self.hooks.memory.cuda:
            given["accelerator"] = "cpu"
        self._inject_deepspeed(given)
        self._leave_no_traces(given)
        if self.hooks.candidate is not None:
            self._accumulation(given)
            self._precision(given)
        original(trainer, **given)

    def _inject_deepspeed(self, given: dict[str, Any]) -> None:
        strategy = given.get("strategy", "auto")
        kind = import_module(f"{self.package}.strategies").DeepSpeedStrategy
        if isinstance(strategy, kind) or (isinstance(strategy, str) and "deepspeed" in strategy.lower()):
            return
        if os.environ.get(
            kind.DEEPSPEED_ENV_VAR
        ):  # the user's configuration, of which nothing tells Lightning to use it
            given["strategy"] = "deepspeed"
        else:
            given["strategy"] = kind(config=copy.deepcopy(NO_DEEPSPEED))
        self.hooks.changed(
            'DeepSpeed: the script is run without it; pass `Trainer(strategy=DeepSpeedStrategy(config="ds_config.json"))`.'
        )

    def _accumulation(self, given: dict[str, Any]) -> None:
        change = self.hooks.value("gradient_accumulation_steps")
        if change is not None and given.get("accumulate_grad_batches", 1) == change[0]:
            given["accumulate_grad_batches"] = change[1]
            self.hooks.changed(f"Lightning: `Trainer(accumulate_grad_batches={change[1]})` instead of {change[0]}.")

    def _precision(self, given: dict[str, Any]) -> None:
        """Sets the flag, whoever set the precision: the flag, a plugin or the strategy's own plugin."""
        assert self.hooks.candidate is not None
        if self.hooks.candidate.precision == self.hooks.script.precision:
            return
        precision = import_module(f"{self.package}.plugins.precision").Precision
        plugins = given.get("plugins")
        listed = list(plugins) if isinstance(plugins, list | tuple | set) else [plugins] if plugins is not None else []
        kept = [plugin for plugin in listed if not isinstance(plugin, precision)]
        if len(kept) < len(listed):
            given["plugins"] = kept or None
            self.hooks.changed("Lightning: leave the precision plugin out of `Trainer(plugins=...)`.")
        strategy = given.get("strategy")
        if getattr(strategy, "_precision_plugin", None) is not None:
            strategy._precision_plugin = None  # type: ignore[union-attr]
            self.hooks.changed("Lightning: leave `precision_plugin` out of `DeepSpeedStrategy(...)`.")
        wanted, own = PRECISIONS.get(self.hooks.candidate.precision, "32-true"), given.get("precision") or "32-true"
        if str(own) != wanted:
            self.hooks.changed(f'Lightning: `Trainer(precision="{wanted}")` instead of "{own}".')
        given["precision"] = wanted

    def _leave_no_traces(self, given: dict[str, Any]) -> None:
        given["default_root_dir"] = str(self.hooks.scratch / "lightning")
        if given.get("logger") is not False:
            # Takes whatever a script logs, through `experiment` too, and keeps nothing; callbacks may ask for a folder.
            dummy = import_module(f"{self.package}.loggers.logger").DummyLogger
            given["logger"] = type("Logger", (dummy,), {"save_dir": given["default_root_dir"]})()
        callbacks = given.get("callbacks") or []
        saving = import_module(f"{self.package}.callbacks").Checkpoint
        listed = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        given["callbacks"] = [callback for callback in listed if not isinstance(callback, saving)]
        given |= {"enable_checkpointing": False, "profiler": None, "num_sanity_val_steps": 0}
        if given.get("limit_val_batches") != 0:
            given["limit_val_batches"] = 1  # what a callback or a scheduler waits for still comes

    def _fit(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        # It divides the loss by the accumulation before DeepSpeed does so again: what goes backward are parts of the step's loss.
        self.hooks.sums_losses = bool(getattr(model, "automatic_optimization", True))
        if kwargs.get("ckpt_path"):
            kwargs["ckpt_path"] = None
            self.hooks.once("trials begin with new weights, not with those of ckpt_path")
        return original(trainer, *args[:4], **kwargs)

    # The strategy

    def on_strategy(self, module: ModuleType) -> None:
        kind = module.DeepSpeedStrategy
        patch(kind, "_init_config_if_needed", self._config)
        if self.hooks.memory.cuda:
            return
        # On a CPU, which Lightning does not know as a device of DeepSpeed.
        patch(kind, "setup_environment", lambda _original, strategy: super(kind, strategy).setup_environment())  # type: ignore[misc]
        patch(module, "_validate_device_index_selection", lambda _original, _devices: None)

    def _config(self, original: Callable[..., Any], strategy: Any) -> None:
        """Merges the candidate in before Lightning decides on `zero.Init`; what the strategy's preset sets stays below it."""
        if not strategy._config_initialized and self.hooks.candidate is not None:
            wanted = copy.deepcopy(self.hooks.request.ds_config)
            strategy.config = {key: value for key, value in wanted.items() if key not in FILLED_IN}
        original(strategy)
