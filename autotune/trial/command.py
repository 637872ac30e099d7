"""The command that starts a training script: its templates, the values that fill them, and its flags."""

import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.errors import UserError, nearest
from autotune.space.candidate import FIELDS
from autotune.space.deepspeed import OWNED_PATHS, Scalar, is_int
from autotune.system import redaction

# DeepSpeed's name of a field -> ours.
ALIASES = {"train_micro_batch_size_per_gpu": "micro_batch_size"}
DS_CONFIG = "ds_config"
TEMPLATES = (*FIELDS, *ALIASES, DS_CONFIG)
# Names of fields in DeepSpeed's `autotuning.arg_mappings`.
MAPPED_KEYS = {path: owner for path, owner in OWNED_PATHS.items() if owner in FIELDS and owner != "precision"}
MAPPED_KEYS |= {name: name for name in FIELDS}
# To run a launch command once, each template is replaced by a number, so large that it occurs nowhere else.
FIRST_NUMBER, NUMBER_STEP = 715_000_003, 1_000_003
EXPORTED_CONFIG = "ds_config.json"
# Flags of transformers' TrainingArguments that are on or off; and the key, beside their names, of those that have to be stated
# either way: they are on by default, as in TRL or by its `--config`, or need a value.
SWITCHES, STATED = ("bf16", "fp16", "gradient_checkpointing", "activation_checkpointing"), "stated"
THREADS, COMPILATION = "OMP_NUM_THREADS", "ACCELERATE_DYNAMO_"
# A command with one of these is for a shell and is not split into words.
SHELL_SIGNS = re.compile(r"[&|;<>()$`*?\n#~]")


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A training script and how it is started.

    Attributes:
        script: Absolute path of the file.
        arguments: Arguments; templates such as `{micro_batch_size}` are filled in for each trial.
        module: Name of the module, if it is started as `python -m NAME`.
        environment: Variables that the launch command sets for it; they may contain templates.
        world_size: Ranks that the launcher starts; None without a launcher.
        command: The launch command of the user; empty if only a script was named.
    """

    script: str
    working_dir: str
    arguments: tuple[str, ...] = ()
    module: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    command: str = ""

    @property
    def from_script(self) -> str:
        """Returns the working directory seen from the script's folder, which stays where a project is moved."""
        return os.path.relpath(self.working_dir, os.path.dirname(self.script))

    @property
    def fixed_environment(self) -> dict[str, str]:
        """Returns the variables that are the same in every trial, without those whose secret value was not kept."""
        kept = ((name, value) for name, value in self.environment.items() if not redaction.holds_mask(value))
        return {name: value for name, value in kept if not templates_in([value])}

    @property
    def shown(self) -> "Invocation":
        """Returns the same without secrets, to be printed and stored."""
        return replace(
            self,
            arguments=redaction.redact(self.arguments),
            environment=redaction.redact(self.environment),
            command=redaction.redact(self.command),
        )


def templates_in(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the fields whose templates occur in some texts."""
    joined = "\0".join(texts)
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in TEMPLATES if f"{{{name}}}" in joined))


def check_templates(texts: Iterable[str], where: str) -> None:
    """Refuses a misspelt template; other braces belong to the script."""
    for text in texts:
        for name in re.findall(r"\{([A-Za-z_]+)\}", text):
            hint = nearest(name, TEMPLATES) if name not in TEMPLATES else ""
            if hint:
                raise UserError(f"{where}: {{{name}}} is no template.{hint} Known: {', '.join(TEMPLATES)}")


def fill(text: str, values: Mapping[str, Scalar]) -> str:
    """Replaces templates, as `{micro_batch_size}` or `{micro_batch_size}*4`, by values; others stay."""
    for name, value in values.items():
        text = re.sub(rf"\{{{name}\}}(?:\*(\d+))?", functools.partial(_product, value), text)
    return text


def _product(value: Scalar, template: re.Match[str]) -> str:
    factor = template[1]
    if factor is None or not is_int(value):
        return f"{value}*{factor}" if factor else str(value)
    return str(value * int(factor))


def template_values(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns values of candidate fields by all names of their templates."""
    return {**values, **{alias: values[name] for alias, name in ALIASES.items() if name in values}}


def with_placeholders(command: str) -> tuple[str, dict[str, str]]:
    """Returns a command with a number in place of each template, so that it can be run, and the numbers by template."""
    numbers = {
        name: str(FIRST_NUMBER + n * NUMBER_STEP) for n, name in enumerate(TEMPLATES) if f"{{{name}}}" in command
    }
    return fill(command, dict(numbers)), numbers


def without_placeholders(text: str, numbers: Mapping[str, str]) -> str:
    """Puts the templates back into a text that the launcher made of the command; inverse of `with_placeholders`."""
    for name, number in numbers.items():
        text = re.sub(rf"(?<!\d){number}(?!\d)", f"{{{name}}}", text)
    return text


def with_flag(arguments: Sequence[str], names: Sequence[str], value: str | None) -> tuple[str, ...]:
    """Returns a command line with a flag set.

    The last occurrence of the flag gets the value; without one, the flag is appended. A switch is always appended.

    Args:
        names: Names of the flag; the first one is appended.
        value: The flag's value; None for a switch, which has none.
    """
    if value is None:  # it may be there as `--bf16=False`
        return (*without_flag(arguments, names), names[0])
    found = list(arguments)
    for n in reversed(range(len(found))):
        name, assigned, _ = found[n].partition("=")
        if name not in names:
            continue
        if assigned:
            found[n] = f"{name}={value}"
        else:
            found[n + 1 :] = [value, *found[n + 2 :]]
        return tuple(found)
    return (*found, names[0], value)


def without_flag(arguments: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Returns a command line without a flag whose value is absent, `true` or `false`."""
    found: list[str] = []
    skip = False
    for argument in arguments:
        skip = (skip and argument.lower() in ("true", "false")) or argument.partition("=")[0] in names
        if not skip:
            found.append(argument)
    return tuple(found)


def has_flag(arguments: Sequence[str], names: Sequence[str]) -> bool:
    """Returns whether a command line contains a flag, under any of its names."""
    return any(argument.partition("=")[0] in names for argument in arguments)


def joined(command: str) -> str:
    """Returns a command with each line that ends in a backslash joined to the next one, as a shell reads it."""
    return command.replace("\\\n", "").strip()


def start_of(invocation: Invocation) -> tuple[str, ...] | None:
    """Returns the words of the user's command before the script's arguments; None if only a shell can split it."""
    command = joined(invocation.command)
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if "\n" in command:  # several commands, or a text of several lines
        return None
    local_rank = re.compile(r"--local[-_]rank=\{local_rank\}")
    own = [argument for argument in invocation.arguments if not local_rank.fullmatch(argument)]
    start = words[: len(words) - len(own)]
    if words[len(start) :] != own or any(SHELL_SIGNS.search(word) for word in start):
        return None
    named = (Path(invocation.script).name, invocation.module, *invocation.module.split("."))
    return tuple(start) if start and (Path(start[-1]).name in named or start[-1] == invocation.module) else None


def pasted(
    invocation: Invocation,
    arguments: Sequence[str],
    values: Mapping[str, Scalar],
    world_size: int,
    launcher: Sequence[str],
) -> tuple[list[str], str]:
    """Returns a command for a shell that starts the script with other arguments.

    It uses the user's launcher if the command can be split into words and starts as many ranks, else torchrun.

    Returns:
        Comments, and the command.
    """
    start = start_of(invocation) if invocation.command else None
    arguments = [argument for argument in arguments if "{local_rank}" not in argument]
    if start is not None and world_size == (invocation.world_size or 1) and not launcher:
        return [], _line(fill(word, values) for word in (*start, *arguments))
    comments = []
    if invocation.command and (start is None or not launcher):
        why = "starts another number of ranks" if start is not None else "can only be read by a shell"
        comments.append(f"In place of your command, which {why}: {' '.join(invocation.command.split())}")
    environment = _environment(invocation, start, values, replaced=bool(launcher))
    launcher = launcher or ["torchrun", "--standalone", f"--nproc_per_node={world_size}"]
    script = os.path.relpath(invocation.script, invocation.working_dir)
    what = ["-m", invocation.module] if invocation.module else [script]
    return comments, _line([*environment, *launcher, *what, *(fill(argument, values) for argument in arguments)])


def _line(words: Iterable[str]) -> str:
    """Returns words as a shell reads them; of an assignment only the value is quoted, or it would be a command's name."""
    parts = (re.fullmatch(r"((?:\w+=)?)(.*)", word, re.DOTALL) for word in words)
    return " ".join(part[1] + shlex.quote(part[2]) for part in parts if part)


def _environment(
    invocation: Invocation, start: Sequence[str] | None, values: Mapping[str, Scalar], *, replaced: bool
) -> list[str]:
    """Returns the assignments of variables before a pasted command.

    Args:
        start: The words of the user's command before the script's arguments; None if only a shell can split it.
        replaced: A launcher that was asked for takes the place of the user's.
    """
    own = invocation.environment
    # Where `accelerate launch` starts DeepSpeed, it hands on none of its settings of torch.compile.
    compiled = own.get(f"{COMPILATION}BACKEND", "NO").upper() != "NO"
    kept = {name: value for name, value in own.items() if compiled and replaced and name.startswith(COMPILATION)}
    if start is None:
        # `accelerate launch`, where it takes the place of the user's, sets its own, and adds the working directory to the path.
        left_out, added = ("ACCELERATE_", invocation.working_dir) if replaced else ((), "")
        given = {name: value for name, value in own.items() if name.isidentifier() and not name.startswith(left_out)}
        places = [place for place in given.pop("PYTHONPATH", "").split(os.pathsep) if place and place != added]
        given |= {"PYTHONPATH": os.pathsep.join(places)} if places else {}
        return [f"{name}={fill(value, values)}" for name, value in (given | kept).items()]
    # Other variables come from the launcher.
    stated_first = itertools.takewhile(re.compile(r"\w+=").match, start[start[:1] == ("env",) :])
    # Beside `ACCELERATE_USE_CPU` Accelerate does not use DeepSpeed.
    found = [fill(word, values) for word in stated_first if not (replaced and word.startswith("ACCELERATE_USE_CPU="))]
    # Another launcher leaves it to torch, which then takes all cores for each rank.
    if replaced and THREADS in own:
        kept[THREADS] = own[THREADS]
    stated = {word.partition("=")[0] for word in found}
    return found + [f"{name}={value}" for name, value in kept.items() if name not in stated]
