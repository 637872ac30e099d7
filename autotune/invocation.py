"""How a training script is started: the user's command with its templates, what fills them, and the command to paste afterwards."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune import UserError, masking
from autotune.candidate import FIELDS, OWNED_PATHS, Scalar, nearest

# DeepSpeed's own name, for those who know it.
ALIASES = {"train_micro_batch_size_per_gpu": "micro_batch_size"}
DS_CONFIG = "ds_config"
TEMPLATES = (*FIELDS, *ALIASES, DS_CONFIG)
# What DeepSpeed's JSON calls a field, in its `autotuning.arg_mappings`.
MAPPED_KEYS = {path: owner for path, owner in OWNED_PATHS.items() if owner in FIELDS and owner != "precision"} | {
    n: n for n in FIELDS
}
# In a launch command that is run once, a number stands for each template: so large that nothing else is it, and no two overlap.
FIRST_NUMBER, NUMBER_STEP = 715_000_003, 1_000_003
EXPORTED_CONFIG = "ds_config.json"
# What only a shell can read; a command with one of these is not taken apart.
SHELL_SIGNS = re.compile(r"[&|;<>()$`*?\n#~]")


class InvocationError(UserError):
    """A command line that cannot be tuned."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A training script and how it is started.

    Attributes:
        script: The file, absolute.
        working_dir: The folder that it runs in.
        arguments: Its command line; templates such as `{micro_batch_size}` in it are filled in for each trial.
        module: Its name, where it is started as `python -m NAME`.
        environment: Variables that the launch command sets for it, templates among them.
        world_size: Ranks that the launcher starts; None without a launcher.
        command: The launch command as the user gave it; empty where a script was named.
    """

    script: str
    working_dir: str
    arguments: tuple[str, ...] = ()
    module: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    command: str = ""

    @property
    def fixed_environment(self) -> dict[str, str]:
        """The variables that are the same in every trial; not those that were not kept, which the user's own environment may have."""
        kept = ((name, value) for name, value in self.environment.items() if not masking.holds_mask(value))
        return {name: value for name, value in kept if not templates_in([value])}

    @property
    def shown(self) -> Invocation:
        """The same without its secrets, as it may be printed and kept."""
        return replace(
            self,
            arguments=masking.masked(self.arguments),
            environment=masking.masked(self.environment),
            command=masking.masked(self.command),
        )


def templates_in(texts: Iterable[str]) -> tuple[str, ...]:
    """The templates that stand in some texts, by the field that they mean."""
    joined = "\0".join(texts)
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in TEMPLATES if f"{{{name}}}" in joined))


def check_templates(texts: Iterable[str], where: str) -> None:
    """Refuses what is almost a template; other braces are the script's own.

    Raises:
        InvocationError: It names the template that may be meant.
    """
    for text in texts:
        for name in re.findall(r"\{([A-Za-z_]+)\}", text):
            hint = nearest(name, TEMPLATES) if name not in TEMPLATES else ""
            if hint:
                raise InvocationError(f"{where}: {{{name}}} is no template.{hint} Known: {', '.join(TEMPLATES)}")


def fill(text: str, values: Mapping[str, Scalar]) -> str:
    """Puts values in the place of templates; those without a value stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def template_values(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Candidate fields by every name that a template may have."""
    return {**values, **{alias: values[name] for alias, name in ALIASES.items() if name in values}}


def masked(command: str) -> tuple[str, dict[str, str]]:
    """A command with a number for each template, so that a launcher can run it; and the numbers by template."""
    numbers = {
        name: str(FIRST_NUMBER + n * NUMBER_STEP) for n, name in enumerate(TEMPLATES) if f"{{{name}}}" in command
    }
    return fill(command, dict(numbers)), numbers


def unmasked(text: str, numbers: Mapping[str, str]) -> str:
    """The inverse of `masked`, for a text that the launcher made of the command."""
    for name, number in numbers.items():
        text = re.sub(rf"(?<!\d){number}(?!\d)", f"{{{name}}}", text)
    return text


def with_flag(arguments: Sequence[str], names: Sequence[str], value: str | None) -> tuple[str, ...]:
    """A command line whose last flag of one of some names has another value; appended if it has none of them.

    Args:
        arguments: The command line.
        names: The flag's names; the first is the one to append.
        value: Its value; None for a flag that takes none.
    """
    found = list(arguments)
    for n in reversed(range(len(found))):
        name, assigned, _ = found[n].partition("=")
        if name not in names:
            continue
        if value is not None and assigned:
            found[n] = f"{name}={value}"
        elif value is not None and n + 1 < len(found):
            found[n + 1] = value
        elif value is not None:
            found.append(value)
        return tuple(found)
    return (*found, names[0], *([value] if value is not None else []))


def without_flag(arguments: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """A command line without a flag that takes no value, or `true` or `false`."""
    found: list[str] = []
    skip = False
    for argument in arguments:
        skip = (skip and argument.lower() in ("true", "false")) or argument.partition("=")[0] in names
        if not skip:
            found.append(argument)
    return tuple(found)


def has_flag(arguments: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a command line gives a flag, by any of its names."""
    return any(argument.partition("=")[0] in names for argument in arguments)


def start_of(invocation: Invocation) -> tuple[str, ...] | None:
    """The words of the user's command before the script's own arguments; None where only a shell can say which they are."""
    try:
        words = shlex.split(invocation.command)
    except ValueError:
        return None
    own = [
        argument for argument in invocation.arguments if not re.fullmatch(r"--local[-_]rank=\{local_rank\}", argument)
    ]
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
    launcher: Sequence[str] = (),
) -> tuple[list[str], str]:
    """The command line that starts the script with other arguments.

    The user's own launcher where its command can be taken apart and starts as many ranks, else torchrun.

    Args:
        invocation: How the user starts the script.
        arguments: What its command line is to be, with templates.
        values: What fills the templates.
        world_size: Ranks.
        launcher: What to start it with instead.

    Returns:
        Comments, and the command.
    """
    start = start_of(invocation) if invocation.command else None
    arguments = [argument for argument in arguments if "{local_rank}" not in argument]
    if start is not None and world_size == (invocation.world_size or 1) and not launcher:
        return [], shlex.join(fill(word, values) for word in (*start, *arguments))
    comments = []
    if invocation.command and (start is None or not launcher):
        why = "starts another number of ranks" if start is not None else "is for a shell to take apart"
        comments.append(f"As a command of its own, since yours {why}: {' '.join(invocation.command.split())}")
    script = os.path.relpath(invocation.script, invocation.working_dir)
    what = ["-m", invocation.module] if invocation.module else [script]
    if start is not None:  # what else the script was given is its launcher's doing
        environment = [fill(word, values) for word in itertools.takewhile(re.compile(r"\w+=").match, start)]
    else:
        left_out = ("ACCELERATE_", "PYTHONPATH") if launcher else ("PYTHONPATH",)
        given = {
            name: value
            for name, value in invocation.environment.items()
            if name.isidentifier() and not name.startswith(left_out)
        }
        environment = [f"{name}={fill(value, values)}" for name, value in given.items()]
    launcher = launcher or ["torchrun", "--standalone", f"--nproc_per_node={world_size}"]
    return comments, shlex.join([*environment, *launcher, *what, *(fill(argument, values) for argument in arguments)])
