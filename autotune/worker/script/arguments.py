"""The script's flags: those that hold tuned values are changed right after argparse, click or Typer has parsed them."""

import argparse
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from autotune.space.deepspeed import is_int
from autotune.trial.command import STATED, SWITCHES
from autotune.trial.flags import DESTINATIONS, known_names
from autotune.worker.script.context import ScriptContext

# Names of the flag with the path of DeepSpeed's JSON: DeepSpeed's, transformers', and common ones.
CONFIG_DESTINATIONS = "deepspeed_config deepspeed ds_config ds_config_file deepspeed_config_file".split()
# Further flags of transformers' TrainingArguments that a configuration needs.
TRAINING_ARGUMENTS = ("deepspeed", *SWITCHES, "activation_checkpointing_kwargs")


class Arguments:
    """Moves the parsed arguments of a script to a candidate, and notes in its context the flags that hold what."""

    def __init__(self, context: ScriptContext) -> None:
        self._context, self._flags = context, context.report.flags
        self._ds_config = context.recorder.folder.ds_config.absolute() if context.candidate is not None else None
        # Where the script cuts up its loader's batches: their samples in the untouched script and in the trial.
        self._draw_sizes = context.drawn() if context.draw_sizes else None
        self._parsers: list[argparse.ArgumentParser] = []  # that are parsing, a command's within its parent's
        self._left: list[str] | None = None  # of the command line, by a first parser, as of a configuration file

    def parse(self, original: Callable[..., Any], parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        """Parses as `parse_known_args` does, and sets the candidate's values."""
        self._parsers.append(parser)
        if len(self._parsers) > 1:  # of a command: the parent gets all values
            return original(parser, *args, **kwargs)
        try:
            parsed, rest = original(parser, *args, **kwargs)
        finally:
            parsers, self._parsers = self._parsers, []
        if isinstance(getattr(parsed, "local_rank", ""), int | None):
            parsed.local_rank = int(os.environ["LOCAL_RANK"])  # as the deepspeed launcher passes it
        own = args[0] if args else kwargs.get("args")
        actions = [action for each in parsers for action in each._actions]
        named = [(action.dest, action.option_strings) for action in actions]
        typed = own is None or own is self._left or _is_of_line(list(own))
        self._left = rest if typed else None
        self._move(vars(parsed), named, typed=typed)
        if "bf16" in self._flags and "bf16" in parsed:
            self._flags[STATED] = _stated(actions)
        return parsed, rest

    def parse_click(self, original: Callable[..., Any], command: Any, context: Any, args: list[str]) -> Any:
        """Parses as click's `Command.parse_args` does, and sets the candidate's values."""
        line = sys.argv[1:]
        if context.parent is not None:  # a command of a group gets the end of the line
            line = line[len(line) - len(args) :]
        typed = args == line  # before the parser takes out of the list what it knows
        rest = original(command, context, args)
        self._move(context.params, [(parameter.name, parameter.opts) for parameter in command.params], typed=typed)
        return rest

    def _move(
        self, values: MutableMapping[str, Any], named: Sequence[tuple[str, Sequence[str]]], *, typed: bool
    ) -> None:
        """Sets the candidate's values among those of parsed destinations.

        Args:
            named: Destinations with their option strings.
            typed: The user's command line was parsed, not a list that the script makes.
        """
        for field in DESTINATIONS:
            change = self._context.value(field)
            if field == "micro_batch_size" and self._draw_sizes is not None:
                change = self._draw_sizes
            name = next(
                (name for name in known_names(field, values) if change and _holds(values.get(name), change[0])), None
            )
            if change and name:
                values[name] = type(values[name])(change[1])  # a script may keep texts until it needs a number
                self._moved(_options(named, name), field, name, *change, typed=typed)
        files = {name: os.fsdecode(value) for name, value in values.items() if isinstance(value, str | os.PathLike)}
        files = {name: file for name, file in files.items() if file.endswith(".json")}
        for name in CONFIG_DESTINATIONS:
            given, options = name in files, _options(named, name)
            if typed and given and options:  # else it is no flag
                self._flags["ds_config"] = options
            elif typed and name == "deepspeed_config" and name in values and not given:
                self._context.left_out[:] = options
            # The adapter of transformers sees to its flag, `deepspeed`.
            if given and self._ds_config is not None and name != "deepspeed":
                values[name] = type(values[name])(self._ds_config)  # a script may open the file itself
        if typed:
            named_in = {str(Path(file).absolute()): _options(named, name) for name, file in files.items()}
            self._context.json_flags.update({file: options for file, options in named_in.items() if options})
        # A switch of that name is DeepSpeed's own, and takes no path.
        if typed and "per_device_train_batch_size" in values and not isinstance(values.get("deepspeed", False), bool):
            self._flags.update({name: found for name in TRAINING_ARGUMENTS if (found := _options(named, name))})

    def _moved(self, options: list[str], field: str, name: str, was: int, wanted: int, *, typed: bool) -> None:
        if options and typed and field == "micro_batch_size" and self._draw_sizes is not None:
            self._context.changed(f"Arguments: `{options[0]} {wanted}` instead of {was}, which the script cuts up.")
        elif options and typed:
            self._flags[field] = options
            self._context.changed(f"Command line: `{options[0]} {wanted}` instead of {was}.")
        elif options:
            text = f"Arguments: the script parses a list that it makes; `{options[0]} {wanted}` in it instead of {was}."
            self._context.changed(text)
        else:
            self._context.changed(f"Arguments: `{name}` is {wanted} instead of {was} once they are parsed.")


def _holds(value: Any, number: int) -> bool:
    """Returns whether a flag's value is a number; true and 1.0 are none that counts samples."""
    return value == str(number) or (is_int(value) and value == number)


def _is_of_line(words: list[str]) -> bool:
    """Returns whether words are the user's command line, as far as the script goes by it.

    It may take some words out, as TRL does `--config FILE`, or put those of a file before them, as transformers does.
    """
    line = sys.argv[1:]
    if words == line or (line and words[-len(line) :] == line):
        return True
    left = iter(line)
    return bool(words or "--config" in line) and all(word in left for word in words)


def _stated(actions: Sequence[argparse.Action]) -> list[str]:
    """Returns the switches of TrainingArguments that need a value, or are on by default."""
    found = [each for each in actions if each.nargs is None or (each.nargs == "?" and each.default is True)]
    return [flag for name in SWITCHES if any((flag := f"--{name}") in each.option_strings for each in found)]


def _options(named: Sequence[tuple[str, Sequence[str]]], name: str) -> list[str]:
    """Returns the option strings of a destination: long ones first, and the one of the same name before others."""
    found = [option for known, options in named if known == name for option in options if option.startswith("-")]
    return sorted(found, key=lambda option: (not option.startswith("--"), option.lstrip("-") != name))
