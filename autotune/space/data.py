"""Settings of the data and its loader, which DeepSpeed does not know: their values, and what each changes in words."""

from collections.abc import Mapping
from typing import NamedTuple

from autotune.errors import nearest
from autotune.space.deepspeed import ConfigError, Scalar, is_int

PREFIX = "data."


class Knob(NamedTuple):
    """One setting of the data.

    Attributes:
        change: How a user makes the change, with the value as a template.
        least: The smallest whole number that it takes; None for a switch.
        retrains: It changes which tokens are trained on together, so the quality gate checks how it trains.
    """

    change: str
    least: int | None = None
    retrains: bool = False


KNOBS: dict[str, Knob] = {
    "num_workers": Knob("the DataLoader with `num_workers={value}`", 0),
    "prefetch_factor": Knob("the DataLoader with `prefetch_factor={value}`", 1),
    "pin_memory": Knob("the DataLoader with `pin_memory={value}`"),
    "persistent_workers": Knob("the DataLoader with `persistent_workers={value}`"),
    "pad_to_multiple_of": Knob("pad each batch to a multiple of {value} tokens", 1),
    "max_length": Knob("cut samples to {value} tokens", 1, retrains=True),
    "packing": Knob(
        "batches without padding: the samples of a micro-batch one after the other in one row, with `position_ids` that"
        " begin anew at each (transformers' DataCollatorWithFlattening; TRL's `padding_free=True` with `max_length=None`,"
        " which cuts no sample)",
        retrains=True,
    ),
    "token_budget": Knob(
        "a batch sampler that fills each micro-batch with samples of similar length up to {value:,} tokens, padding included"
        " (rows times the longest); `train_micro_batch_size_per_gpu` states the mean number of samples", retrains=True,
    ),
    "group_by_length": Knob(
        "sort the samples of each rank's optimizer step by length before they are divided into micro-batches",
        retrains=True,
    ),
}  # fmt: skip


# Arguments of torch's DataLoader.
OF_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
# Arguments of transformers' TrainingArguments that carry them; `group_by_length` has another name in each version.
TRAINER_ARGUMENTS = {name: f"dataloader_{name}" for name in OF_LOADER}
# Settings that change only which samples are trained on together, and when.
REORDERING = frozenset({"group_by_length", "token_budget"})
# Settings against padding, and what becomes of the samples of a micro-batch.
AGAINST_PADDING = ("packing", "pad_to_multiple_of", "group_by_length", "token_budget")


def is_data(name: str) -> bool:
    """Whether a knob is one of the data."""
    return name.startswith(PREFIX)


def check_knob(name: str) -> None:
    """Refuses a setting of the data that does not exist."""
    short = name.removeprefix(PREFIX)
    if short not in KNOBS:
        known = ", ".join(PREFIX + each for each in KNOBS)
        near = nearest(name, [PREFIX + each for each in KNOBS])
        raise ConfigError(f"unknown setting of the data {name!r}.{near} Known: {known}")


def check_value(name: str, value: Scalar) -> None:
    """Refuses a value that a setting of the data does not take."""
    if value is None:
        return
    least = KNOBS[name.removeprefix(PREFIX)].least
    if least is None and not isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} is not true or false")
    if least is not None and not (is_int(value) and value >= least):
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least {least}")


def changes(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings of the data among a candidate's, without their prefix; left out is what is as without it."""
    named = {name.removeprefix(PREFIX): value for name, value in config.items() if is_data(name) and value is not None}
    return {name: value for name, value in named.items() if value is not False or name in OF_LOADER}


def retraining(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Those that change which tokens are trained on together."""
    return {name: value for name, value in changes(config).items() if KNOBS[name].retrains}


def in_words(name: str, value: Scalar) -> str:
    """How a user makes a change."""
    return f"Data: {KNOBS[name].change.format(value=value)}."
