"""The script's own flags: those that carry what is tuned are moved where argparse has parsed them, defaults too."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What scripts call these flags; the first one whose value is the one that ran is taken.
DESTINATIONS = {
    "micro_batch_size": """per_device_train_batch_size train_micro_batch_size_per_gpu train_micro_batch_size micro_batch_size
        per_gpu_train_batch_size train_batch_size batch_size batchsize bsz bs""".split(),
    "gradient_accumulation_steps": """gradient_accumulation_steps accumulation_steps grad_accumulation_steps grad_accum_steps
        grad_acc_steps accum_steps gradient_accumulation grad_accum accum gas""".split(),
}
# The path of DeepSpeed's JSON: DeepSpeed's own flag, transformers' flag, and what people write themselves.
CONFIG_DESTINATIONS = "deepspeed_config deepspeed ds_config ds_config_file deepspeed_config_file".split()
# Those of transformers' TrainingArguments that a configuration needs besides, where a script parses them.
TRAINING_ARGUMENTS = (
    "deepspeed bf16 fp16 gradient_checkpointing activation_checkpointing activation_checkpointing_kwargs".split()
)


class Arguments:
    """Moves the parsed arguments of a script to a candidate.

    Args:
        value: What a field is in the untouched script and what it is to be; None if it stays.
        ds_config: The trial's own JSON; None in a probe.
        changed: Takes what was changed, in words.
        flags: Where the flags are noted that carry something.
    """

    def __init__(
        self,
        value: Callable[[str], tuple[int, int] | None],
        ds_config: Path | None,
        changed: Callable[..., None],
        flags: dict[str, list[str]],
    ) -> None:
        self._value, self._ds_config, self._changed, self._flags = value, ds_config, changed, flags

    def parse(self, original: Callable[..., Any], parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        """`parse_known_args` of a parser, with the candidate's values."""
        parsed, rest = original(parser, *args, **kwargs)
        values = vars(parsed)
        if isinstance(values.get("local_rank", ""), int | None):
            parsed.local_rank = int(os.environ["LOCAL_RANK"])  # as the deepspeed launcher passes it
        own = args[0] if args else kwargs.get("args")
        typed = own is None or list(own) == sys.argv[1:]
        for field, names in DESTINATIONS.items():
            change = self._value(field)
            name = next((name for name in names if change and values.get(name) in (change[0], str(change[0]))), None)
            if change and name:
                setattr(parsed, name, type(values[name])(change[1]))  # a script may keep texts until it needs a number
                self._moved(parser, field, name, *change, typed=typed)
        for name in CONFIG_DESTINATIONS:
            given = isinstance(values.get(name), str) and values[name].endswith(".json")
            if typed and (given or (name in values and name == "deepspeed_config")):
                self._flags["ds_config"] = _options(parser, name)
            if (
                given and self._ds_config is not None and name != "deepspeed"
            ):  # transformers' flag, which its adapter sees to
                setattr(parsed, name, str(self._ds_config))  # a script may open the file itself
        if typed and {"per_device_train_batch_size", "deepspeed"} <= values.keys():
            self._flags.update({name: found for name in TRAINING_ARGUMENTS if (found := _options(parser, name))})
        return parsed, rest

    def _moved(
        self, parser: argparse.ArgumentParser, field: str, name: str, was: int, wanted: int, *, typed: bool
    ) -> None:
        options = _options(parser, name)
        if options and typed:
            self._flags[field] = options
            self._changed(f"Command line: `{options[0]} {wanted}` instead of {was}.")
        elif options:
            self._changed(
                f"Arguments: the script parses a list of its own; `{options[0]} {wanted}` in it instead of {was}."
            )
        else:
            self._changed(f"Arguments: `{name}` is {wanted} instead of {was} once they are parsed.")


def _options(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The names of the flag with a destination: long ones first, then the one that reads like it."""
    found = [option for action in parser._actions if action.dest == name for option in action.option_strings]
    return sorted(found, key=lambda option: (not option.startswith("--"), option.lstrip("-") != name))
