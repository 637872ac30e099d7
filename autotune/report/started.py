"""How a tuned script is started by its user, and which files its command reads."""

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import SpecError
from autotune.report.data import StudyReport
from autotune.space.deepspeed import Scalar
from autotune.study.spec.yaml_file import read_yaml
from autotune.system.files import shown, tail
from autotune.trial.command import EXPORTED_CONFIG, Invocation, has_flag, joined
from autotune.trial.workload import ACCELERATE, LIGHTNING, TRAINER

# The formats of `autotune export` that not every script reads, with the frameworks that do.
READERS = {"accelerate": (ACCELERATE, TRAINER), "hf-args": (TRAINER,)}
# Beginnings of side changes that the flags of a command carry, the second with flags of TrainingArguments.
CARRIED = ("Command line:",)
CARRIED_BY_TRAINING_ARGUMENTS = ("TrainingArguments:", "Activation checkpointing:", "DeepSpeed:", "Precision:")
# Names of Accelerate's launcher, the flag of its config, and the one that it reads by itself (accelerate.commands.config.config_args).
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
CONFIG_FLAG = "--config_file"
HF_HOME = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
DEFAULT_ACCELERATE_CONFIG = Path(os.path.expanduser(HF_HOME), "accelerate", "default_config.yaml")
# A longer word of a command names no file.
LONGEST_PATH = 4096
# Keys that a YAML or JSON file of TrainingArguments has, and one of DeepSpeed's has not; a larger file holds data.
TRAINING_KEY = re.compile(r"\b(per_device_train_batch_size|output_dir)[\"']?\s*:")
DEEPSPEED_KEY = re.compile(r"\bdeepspeed[\"']?\s*:")
LARGEST_ARGUMENTS_BYTES = 1 << 20
# Begin of the comment of a command that reads an exported file; the user's own command has none.
FIRST = "First:"
# What an exported text leaves open, by format, where the study ran on several machines.
ON_MACHINES = {
    "command": "It ran on {} machines: start it on each of them, with what its launcher needs to join them (torchrun:"
    " --nnodes, --node_rank and --master_addr, no --standalone).",
    "accelerate": "It ran on {} machines: set num_machines, main_process_ip and main_process_port, and on each machine its"
    " machine_rank.",
}
# Where frameworks take a DeepSpeed configuration in code.
CONFIG_PARAMETERS = {
    TRAINER: 'pass `deepspeed="{}"` to `TrainingArguments`',
    ACCELERATE: 'pass `DeepSpeedPlugin(hf_ds_config="{}")` to `Accelerator`',
    LIGHTNING: 'pass `DeepSpeedStrategy(config="{}")` to `Trainer`',
}


@dataclass(frozen=True, kw_only=True)
class Started:
    """How a tuned script is started, and what of its command line carries what.

    Attributes:
        invocation: How its user starts it.
        flags: The flag that carries a candidate field, or `ds_config`, or one of transformers' arguments; by all its
            names.
        config_source: The file that it reads its configuration from; empty for a dict in its code.
        baseline: The candidate that it is untouched, as flat knob values.
        family: The framework that it uses.
        written_config: The file that the script writes it into by itself; empty if it writes none.
        initialized_at: File and line where it calls `deepspeed.initialize` itself.
        uneven: Its batches vary in size, as its own sampler makes them.
        study: The study's name, as a word of a command.
        which: The options of `autotune export` that name the pick, with a blank after them; empty for the recommended one.
        way: The path from where its command is pasted to the folder that it runs in; empty where that is the same.
    """

    invocation: Invocation
    flags: Mapping[str, Sequence[str]]
    config_source: str
    baseline: Mapping[str, Scalar]
    family: str = ""
    written_config: str = ""
    initialized_at: str = ""
    uneven: bool = False
    study: str = ""
    which: str = ""
    way: str = ""

    @property
    def called(self) -> str:
        """The script as a launcher is given it, in the folder that it runs in."""
        how = self.invocation
        return f"-m {how.module}" if how.module else shlex.quote(os.path.relpath(how.script, how.working_dir))

    @property
    def in_code(self) -> str:
        """How a script whose configuration is written in its code gets the exported one."""
        if self.family in CONFIG_PARAMETERS:
            return CONFIG_PARAMETERS[self.family].format(self.exported)
        where = f" at {self.initialized_at}" if self.initialized_at else ""
        instead = "the dict that it passes now"
        if self.written_config:
            instead = f"{self.written_config}, which it writes itself (and leave `args.deepspeed_config` unset, or DeepSpeed refuses both)"
        return f'pass `config="{self.exported}"` to `deepspeed.initialize`{where}, instead of {instead}'

    @property
    def in_arguments(self) -> str:
        """How a file of TrainingArguments that names a configuration gets the exported one; empty without such a file."""
        files = [name for name, text in self._argument_files.items() if DEEPSPEED_KEY.search(text)]
        return f"set `deepspeed: {self.exported}` in {' or '.join(files)}" if files and self.family == TRAINER else ""

    def sets_config_itself(self, changes: Sequence[str]) -> bool:
        """Whether the code of a Trainer script sets its configuration, so that --deepspeed would be overridden.

        Args:
            changes: What differs from the unchanged script, which says where that one does not use DeepSpeed.
        """
        how, names = self.invocation, self.flags.get("deepspeed", ()) if self.family == TRAINER else ()
        told = has_flag(how.arguments, names) or how.environment.get("ACCELERATE_USE_DEEPSPEED") == "true"
        return bool(names) and not told and not any(text.startswith("DeepSpeed:") for text in changes)

    @property
    def pasted_here(self) -> "Started":
        """The same for a command that is pasted in the current folder: a shell script may enter another one first."""
        folder = self.invocation.working_dir
        there = os.path.isdir(folder) and not os.path.samefile(folder, os.curdir)
        return replace(self, way=str(shown(Path(folder)))) if there else self

    def without_flags(self, flags: Sequence[Sequence[str]]) -> str:
        """Where a script that parses no TrainingArguments from its command line gets them, and what to set there.

        Args:
            flags: Those of the pick, each with its value if it has one.
        """
        parsed, texts = {option for options in self.flags.values() for option in options}, self._argument_files
        names_config = any(map(DEEPSPEED_KEY.search, texts.values()))
        keys = [
            f"`{flag.removeprefix('--')}: {''.join(value) or 'true'}`"
            for flag, *value in flags
            if flag not in parsed and (names_config or flag != "--deepspeed")
        ]
        where = " or ".join(texts) or "its code, or the file that it reads them from"
        config = "" if names_config else f", and {self.in_code}"
        return f"The script parses no flags of TrainingArguments: set {', '.join(keys)} in {where}{config}."

    @property
    def _argument_files(self) -> dict[str, str]:
        """The texts of the files of TrainingArguments that the command names, as HfArgumentParser reads them."""
        arguments, texts = self.invocation.arguments, dict[str, str]()
        for name in (word.partition("=")[2] or word for word in arguments if word.endswith((".json", ".yaml", ".yml"))):
            found = tail(Path(self.invocation.working_dir, name), LARGEST_ARGUMENTS_BYTES, whole=True)
            text = (found or b"").decode(errors="replace")
            texts |= {name: text} if TRAINING_KEY.search(text) else {}
        return texts

    def reads(self, form: str) -> bool:
        """Whether the script reads a format of `autotune export`."""
        return not self.family or self.family in READERS.get(form, (self.family,))

    @property
    def carried(self) -> tuple[str, ...]:
        """The beginnings of the side changes that the flags of its command make."""
        return CARRIED + (CARRIED_BY_TRAINING_ARGUMENTS if "bf16" in self.flags else ())

    @property
    def exported(self) -> str:
        """The name of the exported configuration, which is not the name of a file of the user's."""
        return self.free_name(EXPORTED_CONFIG)

    def free_name(self, usual: str) -> str:
        """The usual name of an exported file, or another one where the user's command reads a file of that name or ending."""
        own = max((path.name for path in self.own_files if path.name.endswith(usual)), key=len, default="")
        return f"tuned_{own}" if own else usual

    def written(self, file: str, form: str = "") -> str:
        """What writes the configuration that a printed command reads."""
        file = shlex.quote(os.path.join(self.way, file))
        return f"{FIRST} `autotune export {self.study} {self.which}{form}-o {file}`, the configuration that it reads."

    @property
    def beside_accelerate(self) -> str:
        """What a Trainer needs beside an Accelerate config: its own flag takes precedence over the config's JSON."""
        flags = f"autotune export {self.study} {self.which}--format hf-args"
        return f"It needs the TrainingArguments of `{flags}` too, except deepspeed, which would take this file's place."

    def with_exported(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Arguments that name the exported file in place of the one that the script reads, whatever the flag is called."""
        folder = self.invocation.working_dir
        own = Path(folder, self.config_source).resolve()

        def renamed(word: str) -> str:
            flag = "".join(word.partition("=")[:2]) if word.startswith("-") and "=" in word else ""
            value = word[len(flag) :]
            same = 0 < len(value) < LONGEST_PATH and Path(folder, value).resolve() == own
            return flag + self.exported if same else word

        return tuple(map(renamed, arguments)) if self.config_source else arguments

    @cached_property
    def own_files(self) -> frozenset[Path]:
        """The files that the command names and the script reads its configuration from."""
        how = self.invocation
        words = [*self._words, *how.arguments, *how.environment.values(), self.config_source, self.written_config]
        named = filter(None, (word.partition("=")[2] or word for word in words))
        return frozenset(Path(how.working_dir, name).resolve() for name in named if len(name) < LONGEST_PATH)

    @cached_property
    def own_accelerate_config(self) -> dict[str, Any]:
        """The Accelerate config of the tuned command, the default one where it names none; empty if it has none."""
        how = self.invocation
        script = {Path(how.script).name, how.module or how.script}  # it may have a --config_file, too
        launch = itertools.dropwhile(lambda word: Path(word).name not in LAUNCHERS, self._words)
        words = list(itertools.takewhile(lambda word: not {Path(word).name, word} & script, launch))
        if not words:
            return {}
        named = [pair[1] for pair in itertools.pairwise(words) if pair[0] == CONFIG_FLAG]
        named += [word.partition("=")[2] for word in words if word.startswith(f"{CONFIG_FLAG}=")]
        own = os.path.expanduser(named[-1]) if named else DEFAULT_ACCELERATE_CONFIG
        try:
            found = read_yaml(Path(how.working_dir, own))
        except SpecError:  # the template serves without it
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def _words(self) -> list[str]:
        """The words of the user's command."""
        command = joined(self.invocation.command)
        try:
            return shlex.split(command)
        except ValueError:
            return command.split()


def started(report: StudyReport, which: str = "") -> Started | None:
    """How the study's script is started; None where a model.py was tuned.

    Args:
        which: The options of `autotune export` that name the pick; empty for the recommended one.
    """
    script = report.workload.get("script")
    if report.invocation is None or not script:
        return None
    return Started(
        invocation=report.invocation,
        flags=script["flags"],
        config_source=script["config_source"],
        baseline=report.study["baseline"],
        family=script.get("family", ""),
        written_config=script.get("written_config", ""),
        initialized_at=script.get("initialized_at", ""),
        uneven=script.get("uneven") is not None,
        study=shlex.quote(report.name),
        which=which,
    )
