"""TRL's own packing: rows of a number of tokens that SFTTrainer fills with whole samples, one row a micro-batch."""

from typing import Any

from autotune.space.deepspeed import Scalar
from autotune.trial import lengths
from autotune.trial.workload import DataShape

PACKING, STRATEGY, FREE = "packing", "packing_strategy", "padding_free"
# It fills rows with whole samples, best fit first, and cuts only those that are longer than a row.
WHOLE_SAMPLES = "bfd"
# Argument of TRL's SFTConfig for the length of samples, and of rows where it packs.
LENGTH = "max_length"
# Settings of the data that own packing leaves nothing to do for.
POINTLESS = ("packing", "group_by_length", "pad_to_multiple_of", "token_budget")


def row_tokens(known: lengths.Table, micro: int) -> int:
    """Returns the tokens of a row that holds `micro` samples on average, and the longest of them whole."""
    return max(lengths.longest(known), round(micro * lengths.expected(known)))


def in_rows(arguments: Any, tokens: int) -> dict[str, Scalar]:
    """Returns the arguments that pack training samples into rows of a number of tokens."""
    wanted: dict[str, Scalar] = {PACKING: True, STRATEGY: WHOLE_SAMPLES, LENGTH: tokens}
    if str(arguments.eval_strategy).rpartition(".")[2].lower() != "no" and arguments.eval_packing is None:
        wanted["eval_packing"] = False  # evaluation stays as it is
    return {name: value for name, value in wanted.items() if getattr(arguments, name) != value}


def samples_per_row(trainer: Any) -> float:
    """Returns the samples of a row on average over a data set that TRL has packed."""
    rows = trainer.train_dataset["seq_lengths"]
    return sum(map(len, rows)) / max(1, len(rows))


def of_own(arguments: Any) -> dict[str, str]:
    """Returns the settings of the data that a script's own packing rules out, each with the reason."""
    if getattr(arguments, PACKING, False) is True:
        packed = f"the script packs its samples already (`{PACKING}=True`)"
        length = "the length of the rows decides how many samples a step holds; set it in the script"
        return dict.fromkeys(POINTLESS, packed) | {LENGTH: f"{packed}; {length}"}
    if getattr(arguments, FREE, False) is True:
        cut = f"TRL cuts no samples for `{FREE}=True`; cut them before the trainer gets them"
        return dict.fromkeys(POINTLESS, f"batches have no padding (`{FREE}=True`)") | {LENGTH: cut}
    return {}


def why_not(trainer: Any, data: DataShape | None) -> str | None:
    """Returns why SFTTrainer cannot pack the same samples into rows, empty if it can; None for another trainer."""
    arguments, collator = trainer.args, trainer.data_collator
    if not hasattr(arguments, STRATEGY) or not hasattr(collator, FREE):
        return None
    if (getattr(arguments, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        return "`skip_prepare_dataset` leaves the samples as they are"
    limit = arguments.max_length
    if data is None or not data.table or not (data.whole or limit is None):
        return "the samples could not all be read, so rows may cut some"
    if limit is not None and data.longest >= limit:
        return f"samples are cut to {limit} tokens, which TRL does not do where it packs; cut them beforehand"
    return ""
