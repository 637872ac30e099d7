"""Settings of the data that the arguments of transformers' Trainer and of TRL's SFTTrainer carry."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from autotune.space.data import TRAINER_ARGUMENTS
from autotune.space.deepspeed import Scalar
from autotune.worker.data.samples import is_map_style
from autotune.worker.data.witness import watch
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import after_import, patch_everywhere

GROUPED = "group_by_length"
# Steps whose samples its sampler sorts together.
STEPS_GROUPED = 50
# Arguments of TRL's SFTConfig for the length that samples are cut to, by version, and for packing.
LENGTH_ARGUMENTS, PACKING = ("max_length", "max_seq_length"), "packing"
MULTIPLE = "pad_to_multiple_of"


class TrainerData:
    """Gives a Trainer's arguments the settings of the data, and tells which of them it cannot follow.

    Args:
        context: The script.

    """

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._trainer: Any = None

    def install(self) -> None:
        """Patches the sampler, and takes part in what the probe says of the data."""
        self._context.data_limits = self.limits
        after_import("transformers.trainer_pt_utils", self._on_samplers)

    def begin(self, trainer: Any) -> None:
        """Notes the Trainer that trains."""
        self._trainer, self._context.steps_grouped = trainer, STEPS_GROUPED

    def prepare(self, arguments: Any) -> None:
        """Sets a Trainer's arguments as the candidate asks, before it derives anything from them."""
        changes = self._context.candidate.data_changes if self._context.candidate is not None else {}
        for name, value in changes.items():
            for argument, wanted in _arguments_of(arguments, name, value).items():
                self._set(arguments, name, argument, wanted)
        if changes and not arguments.dataloader_num_workers:  # refused without workers
            arguments.dataloader_prefetch_factor, arguments.dataloader_persistent_workers = None, False

    def _set(self, arguments: Any, name: str, argument: str, wanted: Scalar) -> None:
        was = getattr(arguments, argument)
        setattr(arguments, argument, wanted)
        kind = "TrainingArguments" if name in TRAINER_ARGUMENTS else "Data"
        self._context.data_by_framework[name] = f"{kind}: `--{argument} {wanted}` instead of {was}."

    def limits(self, found: dict[str, str]) -> dict[str, str]:
        """Returns the settings of the data that cannot be followed, as the Trainer corrects those of its DataLoader."""
        if self._trainer is None:
            return found
        arguments = self._trainer.args
        found = {name: why for name, why in found.items() if name != GROUPED}
        if hasattr(arguments, MULTIPLE) and hasattr(self._trainer.data_collator, MULTIPLE):
            found.pop(MULTIPLE, None)
        if why := self._why_not_grouped():
            found[GROUPED] = why
        return found | _of_own_packing(arguments)

    def _why_not_grouped(self) -> str:
        """Why the Trainer's own sampler would not group samples by length; empty if it would."""
        from transformers import Trainer

        trainer, data = type(self._trainer), self._trainer.train_dataset
        own = next(
            (name for name in ("get_train_dataloader", "_get_train_sampler") if _overrides(trainer, Trainer, name)), ""
        )
        if own:
            return f"{trainer.__name__} has its own `{own}`; group by length there"
        if not is_map_style(data) or not len(data):
            return "its data set is a stream, which no sampler orders"
        tokens = getattr(getattr(self._trainer, "processing_class", None), "model_input_names", None) or ["input_ids"]
        if not isinstance(data[0], Mapping) or (tokens[0] not in data[0] and not _states_lengths(self._trainer)):
            return f"the Trainer's sampler needs samples with `{tokens[0]}`, or a column of lengths"
        return "the script groups by length already" if _groups(self._trainer.args) else ""

    def _on_samplers(self, module: ModuleType) -> None:
        patch_everywhere(module, "get_length_grouped_indices", self._grouped_indices)

    def _grouped_indices(
        self, original: Callable[..., Any], lengths: Any, batch_size: int, *args: Any, **kwargs: Any
    ) -> list[int]:
        """Returns the positions of samples in groups of one length, steps in random order.

        The sampler begins with the longest samples, and a trial is shorter than one of its groups, so that it would see
        no others. Steps keep their samples.
        """
        context, indices = self._context, list(original(lengths, batch_size, *args, **kwargs))
        if context.candidate is None:
            return indices
        n_groups = max(1, min(len(indices) // (4 * batch_size), STEPS_GROUPED))
        watch.grouped = max(1, n_groups * batch_size // context.candidate.micro_batch_size)
        return _shuffled(indices, batch_size * context.request.world_size)


def _of_own_packing(arguments: Any) -> dict[str, str]:
    """Returns the settings of the data that TRL's own packing rules out, each with the reason."""
    if getattr(arguments, PACKING, False) is True:
        packed = f"the script packs its samples already (`{PACKING}=True`)"
        length = "the length of the rows decides how many samples a step holds; set it in the script"
        return dict.fromkeys((PACKING, GROUPED, MULTIPLE), packed) | {"max_length": f"{packed}; {length}"}
    if getattr(arguments, "padding_free", False) is True:
        free = "batches have no padding (`padding_free=True`)"
        cut = "TRL cuts no samples for `padding_free=True`; cut them before the trainer gets them"
        return dict.fromkeys((PACKING, GROUPED, MULTIPLE), free) | {"max_length": cut}
    return {}


def _shuffled(indices: list[int], size: int) -> list[int]:
    """Returns whole blocks of a list in random order, the same on all ranks; the rest stays last."""
    whole = len(indices) // size * size
    blocks = [indices[i : i + size] for i in range(0, whole, size)]
    random.Random(0).shuffle(blocks)
    return [index for block in [*blocks, indices[whole:]] for index in block]


def _arguments_of(arguments: Any, name: str, value: Scalar) -> dict[str, Scalar]:
    """Returns the arguments by which a Trainer makes a change of the data; empty where it has none."""
    if name == GROUPED:
        # Renamed in transformers 5.
        return (
            {"train_sampling_strategy": GROUPED} if hasattr(arguments, "train_sampling_strategy") else {GROUPED: True}
        )
    prepared = not (getattr(arguments, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if name == "max_length" and hasattr(arguments, PACKING) and prepared:
        return {argument: value for argument in LENGTH_ARGUMENTS if hasattr(arguments, argument)}
    if name == MULTIPLE and hasattr(arguments, name):
        return {name: value}
    argument = TRAINER_ARGUMENTS.get(name, "")
    return {argument: value} if hasattr(arguments, argument) else {}


def _overrides(own: type, base: type, name: str) -> bool:
    return _source(own, name) is not _source(base, name)


def _source(owner: type, name: str) -> Any:
    found = getattr(owner, name, None)
    return getattr(found, "original", found)


def _groups(arguments: Any) -> bool:
    return bool(getattr(arguments, GROUPED, False)) or getattr(arguments, "train_sampling_strategy", "") == GROUPED


def _states_lengths(trainer: Any) -> bool:
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    return getattr(trainer.args, "length_column_name", None) in columns
