"""Adapter of Lightning: the Trainer's strategy, accumulation, precision, devices, and the files it writes."""

import copy
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from autotune.space.deepspeed import DsConfig
from autotune.trial.workload import LIGHTNING
from autotune.worker.measure.ledger import MIN_STEPS
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import after_import, patch

# Both names under which Lightning is distributed; each package has all the code.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# DeepSpeed configuration for a script that does not use DeepSpeed: no sharding, the rest from the script.
NO_DEEPSPEED: DsConfig = {"zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
# Keys that Lightning writes into the configuration, and refuses or keeps if they are there already.
FILLED_IN = ("gradient_accumulation_steps", "train_batch_size", "bf16", "fp16")
PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def install(context: ScriptContext) -> None:
    """Patches Lightning when it is imported, under either name."""
    for package in PACKAGES:
        adapter = _Adapter(context, package)
        after_import(f"{package}.trainer.trainer", adapter.on_trainer)
        after_import(f"{package}.strategies.deepspeed", adapter.on_strategy)


class _Adapter:
    def __init__(self, context: ScriptContext, package: str) -> None:
        self._context, self.package = context, package

    # The trainer

    def on_trainer(self, module: ModuleType) -> None:
        patch(module.Trainer, "__init__", self._trainer)
        patch(module.Trainer, "fit", self._fit)
        patch(module.Trainer, "save_checkpoint", self._context.saver("trainer.save_checkpoint"))

    def _trainer(self, original: Callable[..., Any], trainer: Any, **given: Any) -> None:
        self._context.family = LIGHTNING
        self._context.casts_inputs = False  # its precision plugin does
        # The ranks are there already, as under torchrun.
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "autotune")
        self._devices(given)
        if self._context.memory.on_cpu:
            given["accelerator"] = "cpu"
        self._inject_deepspeed(given)
        self._leave_no_traces(given)
        self._lift_limits(given)
        if self._context.candidate is not None:
            self._accumulation(given)
            self._precision(given)
        original(trainer, **given)

    def _devices(self, given: dict[str, Any]) -> None:
        """Takes the ranks of the trial as devices, and says so where the script states another number of them."""
        own, stated, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), given.get("devices"), self._context.request.world_size
        n = len(stated) if isinstance(stated, list | tuple) else int(str(stated)) if str(stated).isdecimal() else own
        n *= int(given.get("num_nodes") or ranks // own)
        if n != ranks:
            self._context.once(
                f"the script asks Lightning for {n} device{'s' * (n > 1)}, and trials have"
                f" {ranks} rank{'s' * (ranks > 1)}: `--ranks {n}` trains as the script does"
            )
        given |= {"devices": own, "num_nodes": ranks // own}  # of which Lightning expects as many ranks as there are

    def _inject_deepspeed(self, given: dict[str, Any]) -> None:
        strategy = given.get("strategy", "auto")
        kind = import_module(f"{self.package}.strategies").DeepSpeedStrategy
        if isinstance(strategy, kind) or (isinstance(strategy, str) and "deepspeed" in strategy.lower()):
            return
        if os.environ.get(kind.DEEPSPEED_ENV_VAR):  # a configuration that nothing makes Lightning use
            given["strategy"] = "deepspeed"
        else:
            given["strategy"] = kind(config=copy.deepcopy(NO_DEEPSPEED))
        self._context.changed(
            "DeepSpeed: the script is run without it;"
            ' pass `Trainer(strategy=DeepSpeedStrategy(config="ds_config.json"))`.'
        )

    def _lift_limits(self, given: dict[str, Any]) -> None:
        """Takes away what ends a run before it can be measured."""
        few = MIN_STEPS * (given.get("accumulate_grad_batches") or 1)
        for name, instead, least in (
            ("fast_dev_run", False, few),
            ("limit_train_batches", None, few),
            ("max_steps", self._context.request.max_steps, MIN_STEPS),
        ):
            value = given.get(name)
            if isinstance(value, int) and 0 < value < least:
                self._context.lift(name, value)
                given[name] = instead

    def _accumulation(self, given: dict[str, Any]) -> None:
        change = self._context.value("gradient_accumulation_steps")
        if change is not None and given.get("accumulate_grad_batches", 1) == change[0]:
            given["accumulate_grad_batches"] = change[1]
            self._context.changed(f"Lightning: `Trainer(accumulate_grad_batches={change[1]})` instead of {change[0]}.")

    def _precision(self, given: dict[str, Any]) -> None:
        """Sets the precision flag, and removes plugins that would set another precision."""
        assert self._context.candidate is not None
        if self._context.candidate.precision == self._context.script.probed.precision:
            return
        precision = import_module(f"{self.package}.plugins.precision").Precision
        plugins = given.get("plugins")
        listed = list(plugins) if isinstance(plugins, list | tuple | set) else [plugins] if plugins is not None else []
        kept = [plugin for plugin in listed if not isinstance(plugin, precision)]
        if len(kept) < len(listed):
            given["plugins"] = kept or None
            self._context.changed("Lightning: leave the precision plugin out of `Trainer(plugins=...)`.")
        strategy = given.get("strategy")
        if getattr(strategy, "_precision_plugin", None) is not None:
            strategy._precision_plugin = None  # type: ignore[union-attr]
            self._context.changed("Lightning: leave `precision_plugin` out of `DeepSpeedStrategy(...)`.")
        wanted, own = PRECISIONS.get(self._context.candidate.precision, "32-true"), given.get("precision") or "32-true"
        if str(own) != wanted:
            self._context.changed(f'Lightning: `Trainer(precision="{wanted}")` instead of "{own}".')
        given["precision"] = wanted

    def _leave_no_traces(self, given: dict[str, Any]) -> None:
        given["default_root_dir"] = str(self._context.scratch / "lightning")
        if given.get("logger") is not False:
            # Accepts and drops everything that a script logs; callbacks may ask it for a folder.
            dummy = import_module(f"{self.package}.loggers.logger").DummyLogger
            given["logger"] = type("Logger", (dummy,), {"save_dir": given["default_root_dir"]})()
        callbacks = given.get("callbacks") or []
        saving = import_module(f"{self.package}.callbacks").Checkpoint
        listed = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        given["callbacks"] = [callback for callback in listed if not isinstance(callback, saving)]
        given |= {"enable_checkpointing": False, "profiler": None, "num_sanity_val_steps": 0}
        if given.get("limit_val_batches") != 0:
            given["limit_val_batches"] = 1  # callbacks and schedulers may wait for one

    def _fit(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        # Lightning divides the loss by the accumulation, and DeepSpeed does so again.
        self._context.sums_losses = bool(getattr(model, "automatic_optimization", True))
        if kwargs.get("ckpt_path"):
            kwargs["ckpt_path"] = None
            self._context.once("trials begin with new weights, not with those of ckpt_path")
        return original(trainer, *args[:4], **kwargs)

    # The strategy

    def on_strategy(self, module: ModuleType) -> None:
        kind = module.DeepSpeedStrategy
        patch(kind, "_init_config_if_needed", self._config)
        if not self._context.memory.on_cpu:
            return

        def set_up(_original: Callable[..., Any], strategy: Any) -> None:
            self._context.once(
                "Lightning takes DeepSpeedStrategy on GPUs alone: trials lift that, a training on this CPU does not"
            )
            super(kind, strategy).setup_environment()  # type: ignore[misc]

        patch(kind, "setup_environment", set_up)
        patch(module, "_validate_device_index_selection", lambda _original, _devices: None)

    def _config(self, original: Callable[..., Any], strategy: Any) -> None:
        """Sets the trial's configuration before Lightning decides on `zero.Init`."""
        if not strategy._config_initialized and self._context.candidate is not None:
            wanted = copy.deepcopy(self._context.request.ds_config)
            strategy.config = {key: value for key, value in wanted.items() if key not in FILLED_IN}
        original(strategy)
