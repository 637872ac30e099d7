"""Settings of the data that the arguments of transformers' Trainer and of TRL's SFTTrainer carry."""

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from autotune.space.data import TRAINER_ARGUMENTS
from autotune.space.deepspeed import Scalar
from autotune.trial.workload import DataShape
from autotune.worker.data.samples import is_map_style
from autotune.worker.data.witness import watch
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.frameworks import trl_packing
from autotune.worker.script.patching import after_import, patch_everywhere

GROUPED = "group_by_length"
# Steps whose samples its sampler sorts together.
STEPS_GROUPED = 50
MULTIPLE, BUDGET = "pad_to_multiple_of", "token_budget"


class TrainerData:
    """Gives a Trainer's arguments the settings of the data, and tells which of them it cannot follow."""

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
        if watch.row_tokens:
            watch.per_row = trl_packing.samples_per_row(trainer)

    def prepare(self, arguments: Any) -> None:
        """Sets a Trainer's arguments as the candidate asks, before it derives anything from them."""
        changes = self._context.candidate.data_changes if self._context.candidate is not None else {}
        for name, value in changes.items():
            wanted = self._rows(arguments) if name == BUDGET else _arguments_of(arguments, name, value)
            self._context.data_by_framework |= {name: []} if wanted else {}
            for argument, each in wanted.items():
                self._set(arguments, name, argument, each)
        if changes and not arguments.dataloader_num_workers:  # refused without workers
            arguments.dataloader_prefetch_factor, arguments.dataloader_persistent_workers = None, False

    def _set(self, arguments: Any, name: str, argument: str, wanted: Scalar) -> None:
        was = getattr(arguments, argument)
        setattr(arguments, argument, wanted)
        kind = "TrainingArguments" if name in TRAINER_ARGUMENTS else "Data"
        self._context.data_by_framework[name].append(f"{kind}: `--{argument} {wanted}` instead of {was}.")

    def _rows(self, arguments: Any) -> dict[str, Scalar]:
        """Returns the arguments of TRL's packing, for rows that hold a micro-batch's samples on average."""
        context = self._context
        if context.candidate is None or not hasattr(arguments, trl_packing.STRATEGY):
            return {}
        watch.row_tokens = trl_packing.row_tokens(context.request.lengths, context.candidate.micro_batch_size)
        return trl_packing.in_rows(arguments, watch.row_tokens)

    def limits(self, found: dict[str, str], data: DataShape | None) -> dict[str, str]:
        """Returns the settings of the data that trials cannot follow, each with the reason.

        Args:
            found: The same for the Trainer's DataLoader alone, which the Trainer's own settings correct.
            data: The shape of the data set; None where it could not be read.
        """
        if self._trainer is None:
            return found
        arguments = self._trainer.args
        found = {name: why for name, why in found.items() if name != GROUPED}
        if hasattr(arguments, MULTIPLE) and hasattr(self._trainer.data_collator, MULTIPLE):
            found.pop(MULTIPLE, None)
        if why := self._why_not_grouped():
            found[GROUPED] = why
        no_rows = trl_packing.why_not(self._trainer, data)
        if no_rows is not None:
            found[BUDGET] = found.get("packing") or no_rows or self._why_no_rows()
        return {name: why for name, why in (found | trl_packing.of_own(arguments)).items() if why}

    def _why_no_rows(self) -> str:
        carried = "micro_batch_size" in self._context.script.carried
        return "each row is a micro-batch, and the command states the micro-batch" if carried else ""

    def _why_not_grouped(self) -> str:
        """Why the Trainer's own sampler would not group samples by length; empty if it would."""
        from transformers import Trainer

        trainer, data = type(self._trainer), self._trainer.train_dataset
        for name in ("get_train_dataloader", "_get_train_sampler"):
            if _source(trainer, name) is not _source(Trainer, name):
                return f"{trainer.__name__} has its own `{name}`; group by length there"
        if not is_map_style(data) or not len(data):
            return "its data set is a stream, which no sampler orders"
        tokens = getattr(getattr(self._trainer, "processing_class", None), "model_input_names", None) or ["input_ids"]
        if not isinstance(data[0], Mapping) or (tokens[0] not in data[0] and not _states_lengths(self._trainer)):
            return f"the Trainer's sampler needs samples with `{tokens[0]}`, or a column of lengths"
        return "the script groups by length already" if _groups(self._trainer.args) else ""

    def _on_samplers(self, module: ModuleType) -> None:
        patch_everywhere(module, {"get_length_grouped_indices": self._grouped_indices})

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
    packs = hasattr(arguments, trl_packing.PACKING)
    if (name == trl_packing.LENGTH and packs and prepared) or (name == MULTIPLE and hasattr(arguments, name)):
        return {name: value}
    argument = TRAINER_ARGUMENTS.get(name, "")
    return {argument: value} if hasattr(arguments, argument) else {}


def _source(owner: type, name: str) -> Any:
    """Returns a class's function, without what patches it."""
    found = getattr(owner, name, None)
    return getattr(found, "original", found)


def _groups(arguments: Any) -> bool:
    return bool(getattr(arguments, GROUPED, False)) or getattr(arguments, "train_sampling_strategy", "") == GROUPED


def _states_lengths(trainer: Any) -> bool:
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    return getattr(trainer.args, "length_column_name", None) in columns
