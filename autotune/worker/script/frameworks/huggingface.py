"""Adapter of transformers' Trainer: TrainingArguments, models that recompute themselves, saving and uploading."""

import copy
import functools
import inspect
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch

from autotune.errors import UserError
from autotune.trial.workload import TRAINER
from autotune.worker.measure.ledger import MIN_STEPS
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.frameworks import accelerate
from autotune.worker.script.frameworks.trainer_data import TrainerData
from autotune.worker.script.patching import after_import, patch, patch_everywhere

# More steps than any trial takes: evaluation and saving stay configured for callbacks, but never happen.
NEVER = 10**9
FLAGS = {
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
TRAINER_SAVERS = ("save_model", "_save_checkpoint", "create_model_card", "push_to_hub", "init_hf_repo")
# Classes with their own `save_pretrained` and `push_to_hub`.
SAVED_CLASSES = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.configuration_utils", "PretrainedConfig"),
    ("transformers.configuration_utils", "PreTrainedConfig"),
    ("transformers.generation.configuration_utils", "GenerationConfig"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.processing_utils", "ProcessorMixin"),
    ("transformers.image_processing_base", "ImageProcessingMixin"),
    ("transformers.feature_extraction_utils", "FeatureExtractionMixin"),
    ("peft.peft_model", "PeftModel"),
)
HUB_VERBS = ("create_", "upload_", "delete_", "update_", "move_")
# As transformers looks for a GPU's process group, and finds none; with DeepSpeed it counts one process, too.
APART = accelerate.APART.format("transformers", "`--use_cpu` alone, beside DeepSpeed, too")
PREDICTS = (
    "the script calls Trainer.predict before it trains, which transformers refuses beside DeepSpeed below ZeRO 3: leave that out"
    " while it is tuned"
)


def install(context: ScriptContext) -> None:
    """Patches transformers, peft and huggingface_hub when they are imported."""
    adapter = _Adapter(context)
    os.environ["DISABLE_MLFLOW_INTEGRATION"] = "TRUE"
    adapter.data.install()
    after_import("transformers.training_args", adapter.on_arguments)
    after_import("transformers.trainer", adapter.on_trainer)
    for module, name in SAVED_CLASSES:
        after_import(module, lambda found, name=name: adapter.on_saved_class(found, name))  # type: ignore[misc]
    after_import("huggingface_hub.hf_api", adapter.on_hub)


def _is_off(kind: Any, name: str) -> bool:
    """Returns whether a class of arguments leaves a switch off; TRL's turn bf16 on where nothing is said."""
    return bool(kind.__dataclass_fields__[name].default is False)


def recompute(model: torch.nn.Module, every: int) -> bool:
    """Recomputes every k-th layer of transformers models by their own method.

    Args:
        model: A transformers model, or one that contains some.
        every: k; 0 for no recomputation.

    Returns:
        Whether some of these models can do it; if none can, recomputation is now off.
    """
    found: list[Any] = []
    for module in model.modules():
        own = getattr(module, "supports_gradient_checkpointing", False) and hasattr(
            module, "gradient_checkpointing_disable"
        )
        if own and not any(module is inner for outer in found for inner in outer.modules()):
            found.append(module)
    # Method names of transformers 5, else the older ones.
    enable = [
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable) for module in found
    ]
    able = every <= 1 or all("every_n_layers" in inspect.signature(method).parameters for method in enable)
    for module, method in zip(found, enable, strict=True):
        if every and able:
            method({"use_reentrant": False}, **({"every_n_layers": every} if every > 1 else {}))
        else:
            getattr(module, "activation_checkpointing_disable", module.gradient_checkpointing_disable)()
    return bool(found) and able


class Unmeasured(dict[str, float]):
    """Metrics of an evaluation that did not take place, of whatever name."""

    def __missing__(self, _name: str) -> float:
        return math.nan


class _Adapter:
    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self.data = TrainerData(context)

    def on_arguments(self, module: ModuleType) -> None:
        def post_init(original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> None:
            self._prepare(arguments)
            original(arguments, *args, **kwargs)

        patch(module.TrainingArguments, "__post_init__", post_init)
        if self._context.memory.on_cpu:
            from deepspeed.accelerator import get_accelerator

            # transformers asks for a GPU; DeepSpeed computes in bfloat16 on CPUs too.
            patch(module, "is_torch_bf16_gpu_available", lambda _original: bool(get_accelerator().is_bf16_supported()))

    def _prepare(self, arguments: Any) -> None:
        """Changes the arguments before the Trainer derives anything from them."""
        output = self._context.scratch / "output"
        output.mkdir(parents=True, exist_ok=True)  # on all ranks, as a script may list its checkpoints on each
        arguments.output_dir = str(output)
        arguments.report_to = []
        arguments.push_to_hub = False
        arguments.resume_from_checkpoint = None
        for name in ("eval_strategy", "evaluation_strategy", "save_strategy"):  # the second one is that of old releases
            if str(getattr(arguments, name, None) or "no").rpartition(".")[2].lower() != "no":
                setattr(arguments, name, "steps")
                setattr(arguments, f"{name[:4]}_steps", NEVER)
        if hasattr(arguments, "eval_on_start"):
            arguments.eval_on_start = False
        if self._context.memory.on_cpu:
            if self._context.request.world_size > 1 and not arguments.use_cpu:
                self._context.once(APART)
            arguments.use_cpu = False  # else Accelerate would not use DeepSpeed
        self._inject_deepspeed(arguments)
        if 0 < arguments.max_steps < MIN_STEPS:
            self._context.lift("max_steps", arguments.max_steps)
            arguments.max_steps = self._context.request.max_steps
        for field, flag in FLAGS.items():
            change = self._context.value(field)
            if change and getattr(arguments, flag) == change[0]:
                setattr(arguments, flag, change[1])
                self._context.changed(f"TrainingArguments: `--{flag} {change[1]}` instead of {change[0]}.")
        if self._context.candidate is not None:
            arguments.auto_find_batch_size = False  # out of memory is an outcome here
            self.data.prepare(arguments)
            self._precision(arguments)

    def _inject_deepspeed(self, arguments: Any) -> None:
        if arguments.deepspeed or accelerate.asked_for("DEEPSPEED"):
            return
        if arguments.fsdp or accelerate.asked_for("FSDP"):
            accelerate.refuse_fsdp(self._context)
        precisions = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
        arguments.deepspeed = copy.deepcopy(accelerate.NO_DEEPSPEED | precisions)
        self._context.changed("DeepSpeed: the script is run without it; add `--deepspeed ds_config.json`.")

    def _precision(self, arguments: Any) -> None:
        wanted = accelerate.mixed_precision(self._context)
        for name in ("bf16", "fp16"):
            if bool(getattr(arguments, name)) != (name == wanted):
                setattr(arguments, name, name == wanted)
                off = f"leave out `--{name}`" if _is_off(type(arguments), name) else f"`--{name} False`"
                instead = f"add `--{name}`" if name == wanted else off
                if name == wanted and self._context.memory.on_cpu and wanted != self._context.script.probed.precision:
                    refused = (
                        f"On a CPU transformers refuses `--{name}` beside DeepSpeed; the trial made it accept that."
                    )
                    self._context.changed(refused, reproducible=False)
                self._context.changed(f"TrainingArguments: {instead}.")
            if name != wanted:
                setattr(arguments, f"{name}_full_eval", False)
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)

    def on_trainer(self, module: ModuleType) -> None:
        def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            self._context.family = TRAINER
            self._context.casts_inputs = False  # the Trainer does, and `num_items_in_batch` must stay exact
            original(*args, **kwargs)

        def train(
            original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if resume_from_checkpoint:
                self._context.once("trials train from the script's first weights, not from its checkpoint")
            # TRL's GRPO and RLOO draw what they generate from again for each of several micro-batches.
            self._context.trains_on_draws = not hasattr(trainer.args, "steps_per_generation")
            self.data.begin(trainer)
            self._lift_epochs(trainer)
            return original(trainer, None, *args, **kwargs)

        patch(module.Trainer, "__init__", init)
        patch(module.Trainer, "train", train)
        patch(module.Trainer, "evaluate", self._evaluate)
        patch(module.Trainer, "predict", self._predict)
        for name in TRAINER_SAVERS:
            patch(module.Trainer, name, self._context.saver(f"Trainer.{name.lstrip('_')}"))

    def _evaluate(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves out an evaluation before the training, which transformers refuses beside DeepSpeed below stage 3."""
        if trainer.is_in_train:
            return original(trainer, *args, **kwargs)
        self._context.once("Trainer.evaluate is not carried out in trials: its metrics are no numbers there")
        prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval")
        return Unmeasured({f"{prefix}_loss": math.nan})

    def _predict(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses a prediction before the training, whose outputs nothing could stand in for."""
        if not trainer.is_in_train:
            self._context.abort(UserError(PREDICTS))
        return original(trainer, *args, **kwargs)

    def _lift_epochs(self, trainer: Any) -> None:
        """Trains further epochs where the script's have too few steps to be measured."""
        arguments, data = trainer.args, cast("Any", getattr(trainer, "train_dataset", None))
        if arguments.max_steps > 0 or not hasattr(data, "__len__") or not len(data):
            return
        batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        n_epochs = batch * self._context.request.world_size / len(data)  # of one step
        if arguments.num_train_epochs < MIN_STEPS * n_epochs:
            self._context.lift("num_train_epochs", arguments.num_train_epochs)
            arguments.num_train_epochs = math.ceil(self._context.request.max_steps * min(1.0, n_epochs))

    def on_saved_class(self, module: ModuleType, name: str) -> None:
        saved = getattr(module, name, None)
        for method, folder in (("save_pretrained", "save_directory"), ("push_to_hub", "")):
            if saved is not None:
                patch(saved, method, self._context.saver(method, folder))

    def on_hub(self, module: ModuleType) -> None:
        names = [name for name in dir(module.HfApi) if name.startswith(HUB_VERBS)]
        hooks = {name: functools.partial(self._not_uploaded, module, name) for name in names}
        for name, hook in hooks.items():
            patch(module.HfApi, name, hook)
        patch_everywhere(module, hooks)

    def _not_uploaded(
        self, module: ModuleType, name: str, _original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._context.once("nothing is uploaded to the Hugging Face Hub in trials")
        if name != "create_repo":
            return None
        names = [arg for arg in args if isinstance(arg, str)]
        repo = kwargs.get("repo_id") or (names[0] if names else "repository")
        return module.RepoUrl(f"https://huggingface.co/{repo if '/' in repo else f'user/{repo}'}")
