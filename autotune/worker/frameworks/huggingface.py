"""transformers: TrainingArguments beside DeepSpeed's configuration, models that recompute themselves, what would be saved or uploaded."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from autotune.trial import TRAINER
from autotune.worker.frameworks import accelerate
from autotune.worker.patching import after_import, patch, patch_everywhere

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

# More steps than any trial takes: evaluation and saving stay configured, as callbacks may ask for, and never come.
NEVER = 10**9
FLAGS = {
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
TRAINER_SAVERS = ("save_model", "_save_checkpoint", "create_model_card", "push_to_hub", "init_hf_repo")
# Where transformers keeps what has a `save_pretrained` and a `push_to_hub` of its own.
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


def install(hooks: Hooks) -> None:
    """Sets the hooks on transformers and huggingface_hub, wherever they are imported."""
    adapter = _Adapter(hooks)
    os.environ["DISABLE_MLFLOW_INTEGRATION"] = "TRUE"
    hooks.recomputers.append(recompute)
    after_import("transformers.training_args", adapter.on_arguments)
    after_import("transformers.trainer", adapter.on_trainer)
    for module, name in SAVED_CLASSES:
        after_import(module, lambda found, name=name: adapter.on_saved_class(found, name))  # type: ignore[misc]
    after_import("huggingface_hub.hf_api", adapter.on_hub)
    after_import("safetensors.torch", adapter.on_safetensors)


def recompute(model: torch.nn.Module, every: int) -> bool:
    """Has transformers models recompute every k-th layer, or none for 0, by the method that their users call.

    Args:
        model: Such a model, or one that holds some.
        every: As in a candidate.

    Returns:
        Whether there is one, and it knows how to; if not, it recomputes nothing any more.
    """
    found: list[Any] = []
    for module in model.modules():
        own = getattr(module, "supports_gradient_checkpointing", False) and hasattr(
            module, "gradient_checkpointing_disable"
        )
        if own and not any(module is inner for outer in found for inner in outer.modules()):
            found.append(module)
    # The names of transformers 5, else those that it has for older code.
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


class _Adapter:
    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def on_arguments(self, module: ModuleType) -> None:
        def post_init(original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> None:
            self._prepare(arguments)
            original(arguments, *args, **kwargs)

        patch(module.TrainingArguments, "__post_init__", post_init)
        if not self.hooks.memory.cuda:
            from deepspeed.accelerator import get_accelerator

            # transformers asks for a GPU; DeepSpeed computes in bfloat16 on CPUs too.
            patch(module, "is_torch_bf16_gpu_available", lambda _original: bool(get_accelerator().is_bf16_supported()))

    def _prepare(self, arguments: Any) -> None:
        """Sets what the Trainer is to do otherwise, before it derives anything from it."""
        arguments.output_dir = str(self.hooks.scratch / "output")
        arguments.report_to = []
        arguments.push_to_hub = False
        arguments.resume_from_checkpoint = None
        for kind in ("eval", "save"):
            if str(getattr(arguments, f"{kind}_strategy")).rpartition(".")[2].lower() != "no":
                setattr(arguments, f"{kind}_strategy", "steps")
                setattr(arguments, f"{kind}_steps", NEVER)
        if hasattr(arguments, "eval_on_start"):
            arguments.eval_on_start = False
        if not self.hooks.memory.cuda:
            arguments.use_cpu = False  # with which Accelerate would not use DeepSpeed
        self._inject_deepspeed(arguments)
        for field, flag in FLAGS.items():
            change = self.hooks.value(field)
            if change and getattr(arguments, flag) == change[0]:
                setattr(arguments, flag, change[1])
                self.hooks.changed(f"TrainingArguments: `--{flag} {change[1]}` instead of {change[0]}.")
        if self.hooks.candidate is not None:
            arguments.auto_find_batch_size = False  # out of memory is an outcome here
            self._precision(arguments)

    def _inject_deepspeed(self, arguments: Any) -> None:
        if arguments.deepspeed or accelerate.asked_for("DEEPSPEED"):
            return
        if arguments.fsdp or accelerate.asked_for("FSDP"):
            accelerate.refuse_fsdp(self.hooks)
        precisions = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
        arguments.deepspeed = copy.deepcopy(accelerate.NO_DEEPSPEED | precisions)
        self.hooks.changed("DeepSpeed: the script is run without it; add `--deepspeed ds_config.json`.")

    def _precision(self, arguments: Any) -> None:
        wanted = accelerate.mixed_precision(self.hooks)
        for name in ("bf16", "fp16"):
            if bool(getattr(arguments, name)) != (name == wanted):
                setattr(arguments, name, name == wanted)
                instead = f"add `--{name}`" if name == wanted else f"leave out `--{name}`"
                self.hooks.changed(f"TrainingArguments: {instead}.")
            if name != wanted:
                setattr(arguments, f"{name}_full_eval", False)
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)

    def on_trainer(self, module: ModuleType) -> None:
        def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            self.hooks.family = TRAINER
            self.hooks.casts_inputs = False  # it does so itself, and `num_items_in_batch` has to stay exact
            original(*args, **kwargs)

        def train(
            original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if resume_from_checkpoint:
                self.hooks.once("trials train from the script's first weights, not from its checkpoint")
            return original(trainer, None, *args, **kwargs)

        patch(module.Trainer, "__init__", init)
        patch(module.Trainer, "train", train)
        for name in TRAINER_SAVERS:
            patch(module.Trainer, name, self.hooks.saver(f"Trainer.{name.lstrip('_')}"))

    def on_saved_class(self, module: ModuleType, name: str) -> None:
        saved = getattr(module, name, None)
        for method in ("save_pretrained", "push_to_hub"):
            if saved is not None:
                patch(saved, method, self.hooks.saver(method))

    def on_hub(self, module: ModuleType) -> None:
        for name in [name for name in dir(module.HfApi) if name.startswith(HUB_VERBS)]:
            patch(module.HfApi, name, functools.partial(self._not_uploaded, module, name))
            patch_everywhere(module, name, functools.partial(self._not_uploaded, module, name))

    def _not_uploaded(
        self, module: ModuleType, name: str, _original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.hooks.once("nothing is uploaded to the Hugging Face Hub in trials")
        if name != "create_repo":
            return None
        names = [arg for arg in args if isinstance(arg, str)]
        repo = kwargs.get("repo_id") or (names[0] if names else "repository")
        return module.RepoUrl(
            f"https://huggingface.co/{repo}" if "/" in repo else f"https://huggingface.co/user/{repo}"
        )

    def on_safetensors(self, module: ModuleType) -> None:
        for name in ("save_file", "save_model"):
            patch_everywhere(module, name, self.hooks.saver(f"safetensors.{name}"))
