"""A pick for other tools: DeepSpeed's JSON, an Accelerate config, flags for transformers, a command; with notes."""

import copy
import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UserError, nearest
from autotune.report.data import Data, StudyReport
from autotune.report.script_changes import DTYPES
from autotune.report.started import FIRST, ON_MACHINES, Started, started
from autotune.report.trial_notes import ended
from autotune.scoring.recommend import pick_name
from autotune.space import own_tuner
from autotune.space.candidate import Candidate, every_nth
from autotune.space.data import TRAINER_ARGUMENTS
from autotune.space.deepspeed import SIDE_EFFECT_KEYS, DsConfig, at_path, without_auto
from autotune.study.storage.database import StoreError
from autotune.system import files, redaction
from autotune.trial.command import (
    DS_CONFIG,
    EXPORTED_CONFIG,
    STATED,
    SWITCHES,
    has_flag,
    pasted,
    template_values,
    templates_in,
    with_flag,
    without_flag,
)
from autotune.trial.target import is_yaml
from autotune.trial.workload import LIGHTNING, TOTAL, TRAINER

# What DeepSpeed's JSON and transformers' TrainingArguments both say, and must say alike
# (HfTrainerDeepSpeedConfig.trainer_config_process).
HF_TWINS = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
TRAINING_FIELDS = {
    "--per_device_train_batch_size": "micro_batch_size",
    "--gradient_accumulation_steps": "gradient_accumulation_steps",
}
# What an Accelerate config says where nobody asked for something else.
MACHINE = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
}
# Its other ways to train, and what the JSON states; of its section on DeepSpeed the fields on starting ranks stay.
REPLACED_BY_DEEPSPEED = {
    "deepspeed_config",
    "fp8_config",
    "fsdp_config",
    "megatron_lm_config",
    "mixed_precision",
    "parallelism_config",
}
LAUNCH_FIELDS = {
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
}
RATE_FLAG, ACCELERATE_CONFIG = "--learning_rate", "accelerate.yaml"
# Begin of a side change that a command started with an Accelerate config makes: it has no --cpu.
WITHOUT_CPU = "Accelerate: leave `--cpu`"
# A change of the data by a flag of SFTConfig, which is one of TrainingArguments.
DATA_FLAG = re.compile(r"Data: `(--\w+) (\S+)` instead of")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A pick in the form that another tool takes.

    Attributes:
        text: What belongs into a file, or into a terminal.
        notes: What someone who uses it has to know and cannot read in it.
        tuned: The configuration that the study tuned, whose file is not written over; None where there is none.
        own_files: The files that the user's command and script read, as far as they are known; none is written over.
    """

    text: str
    notes: Sequence[str]
    tuned: DsConfig | None = None
    own_files: frozenset[Path] = frozenset()

    def write(self, path: Path) -> None:
        """Writes the text to a file, whole or not at all.

        Args:
            path: The file; its folder is made.

        Raises:
            UserError: It cannot be written, or is a file that the tuned command reads.
        """
        tuned = path.resolve() in self.own_files or (self.tuned and _holds(path, self.tuned))
        why = "belongs to the command that the study tuned, its baseline" if tuned else "is a study or a program"
        if tuned or _is_source(path):
            raise UserError(f"export: {path} {why}; write to another file")
        try:
            files.write_text(path, self.text, named=True)
        except OSError as error:
            raise UserError(f"export: {files.words(error)}") from None

    def __str__(self) -> str:
        return self.text


def _holds(path: Path, config: DsConfig) -> bool:
    """Whether a file is there that holds a configuration."""
    try:
        return bool(files.json_of(files.read_regular(path)) == config)
    except (OSError, ValueError):
        return False


def _is_source(path: Path) -> bool:
    """Whether a file is there that people write and an export never is: Python, or a study."""
    text = path.read_text(errors="replace") if is_yaml(path) and path.is_file() else ""
    study = re.search(r"^(target|command)\s*:", text, re.MULTILINE) is not None
    return study or (path.suffix == ".py" and path.exists())


def export(
    pick: Data,
    base: Data,
    format: str,  # noqa: A002
    world_size: int,
    started: Started | None = None,
    file: str = "",
) -> str:
    """A pick as the text of a file.

    Args:
        pick: As it stands in `recommended.json`.
        format: One of `FORMATS`.
        world_size: Ranks that it was measured with.
        started: How the script is started; None if a model.py was tuned.
        file: The file that takes the text, as its user's command names it; empty for the usual name.

    Raises:
        UserError: The format is unknown, or does not suit what was tuned.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}.{nearest(format, FORMATS)} Known: {', '.join(FORMATS)}")
    return FORMATS[format](pick, base, world_size, started, file)


def deepspeed_config(measured: DsConfig, base: Data, family: str = "") -> DsConfig:
    """The complete DeepSpeed configuration of a trial: what was measured, and the user's sections that trials leave out.

    It states the ZeRO stage even where that is DeepSpeed's default: Accelerate and transformers refuse a file without
    it. `train_batch_size` is left to DeepSpeed, so that the file is right for any number of ranks, unless the user's own
    states it. DeepSpeed's own tuner is off in it, with which a training ends. For Lightning (`family`) it leaves the
    accumulation out, which Lightning refuses beside its own `accumulate_grad_batches`.
    """
    left_out = {key: base[key] for key in sorted(SIDE_EFFECT_KEYS) if key in base and key not in measured}
    config = own_tuner.off(without_auto(copy.deepcopy({**measured, **left_out})))
    if family == LIGHTNING:
        config.pop("gradient_accumulation_steps", None)
    return {**config, "zero_optimization": {"stage": 0, **config.get("zero_optimization", {})}}


def _deepspeed(pick: Data, *_: Any) -> str:
    return json.dumps(pick["ds_config"], indent=2, allow_nan=False) + "\n"


def _accelerate(pick: Data, _: Data, world_size: int, started: Started | None, file: str) -> str:
    """`accelerate launch --config_file`, with the JSON inside.

    `deepspeed_config_file` takes a path, or the JSON itself (accelerate.utils.deepspeed.HfDeepSpeedConfig). Beside it
    Accelerate refuses `mixed_precision`, `gradient_accumulation_steps` and the offload fields, all of which the JSON
    states. What else the config of the tuned command says, as on devices, ports and machines, stays.
    """
    _check_family(started, "accelerate", "no Accelerate config")
    config = pick["ds_config"]
    inner = json.dumps(config, indent=2, allow_nan=False).replace("\n", "\n    ")
    usual = started.free_name(ACCELERATE_CONFIG) if started else ACCELERATE_CONFIG
    script = started.called if started else "train.py"
    its = ["Its arguments are those that --format command prints."] if started and started.invocation.arguments else []
    comments = "".join(f"# {text}\n" for text in [*its, *notes(pick, "accelerate", started)])
    own = started.own_accelerate_config if started else {}
    settings = {name: value for name, value in own.items() if name not in REPLACED_BY_DEEPSPEED}
    settings = MACHINE | settings | {"distributed_type": "DEEPSPEED", "num_processes": world_size, "use_cpu": False}
    launch = {name: value for name, value in (own.get("deepspeed_config") or {}).items() if name in LAUNCH_FIELDS}
    launch |= {"zero3_init_flag": config["zero_optimization"]["stage"] == 3}
    return f"""\
# Use: accelerate launch --config_file {shlex.quote(file or usual)} {script}
{comments}\
# Needs Accelerate 1.6 or newer; for older ones save the JSON as a file and put its path after deepspeed_config_file.
{yaml.safe_dump(settings)}\
deepspeed_config:
  deepspeed_config_file: |-
    {inner}
{textwrap.indent(yaml.safe_dump(launch), "  ")}"""


def _command(pick: Data, base: Data, world_size: int, started: Started | None, _: str) -> str:
    """The whole command line to paste, below comments on what no flag of it carries."""
    if started is None:
        raise UserError("the study tuned a model.py, which no command line starts; use --format deepspeed")
    candidate, how, flags = Candidate.of(pick["candidate"]), started.invocation, started.flags
    changes = pick.get("script_side_changes", ())
    values = template_values(candidate.values()) | {DS_CONFIG: started.exported}
    arguments: tuple[str, ...] = how.arguments
    for name, value in candidate.values().items():
        if name in flags and (has_flag(arguments, flags[name]) or value != started.baseline.get(name)):
            arguments = with_flag(arguments, flags[name], str(value))
    carried = started.carried
    if "bf16" in flags:
        arguments = _with_training_flags(arguments, pick, base, started, values)
        for found in filter(None, map(DATA_FLAG.match, changes)):
            arguments = with_flag(arguments, (found[1],), found[2])
        changes = [text for text in changes if not DATA_FLAG.match(text)]
    comments, launcher = [started.written(started.exported)], list[str]()
    to_launch = any(text.startswith("DeepSpeed:") and "accelerate launch" in text for text in changes)
    to_launch = to_launch or how.environment.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if to_launch or any(text.startswith(WITHOUT_CPU) for text in changes):  # without --cpu it would start no DeepSpeed
        carried += (WITHOUT_CPU,)
        file = started.free_name(ACCELERATE_CONFIG)
        launcher = ["accelerate", "launch", "--config_file", file]
        comments = [started.written(file, "--format accelerate "), *(() if to_launch else comments)]
    if to_launch:
        carried += ("DeepSpeed:",)
    elif ("deepspeed" in flags or DS_CONFIG in flags) and not started.sets_config_itself(changes):
        arguments = with_flag(arguments, flags.get("deepspeed") or flags[DS_CONFIG], started.exported)
    elif DS_CONFIG in templates_in([*arguments, *how.environment.values()]):
        pass
    elif candidate == Candidate.of(started.baseline) and not changes:
        comments = []  # the command as it was, which reads no exported file
    elif (named := started.with_exported(arguments)) != arguments:
        arguments = named
    else:
        file = started.config_source
        comments.append(
            f"No flag carries it: {started.exported} takes the place of {file}, which the script reads."
            if file
            else f"Before it trains so, {started.in_arguments or f'change the script: {started.in_code}'}."
        )
    more, command = pasted(how, arguments, values, world_size, launcher)
    comments += more
    if redaction.holds_mask(command):
        hidden = f"{redaction.HIDDEN} stands for a secret, which autotune does not keep"
        comments.append(f"{hidden}: put it back, or leave it to the environment.")
    comments += [text for text in changes if not text.startswith(carried)]
    entered = f"cd {shlex.quote(started.way)} && " if started.way else ""
    return "".join(f"# {text}\n" for text in comments) + entered + command + "\n"


def _with_training_flags(
    arguments: tuple[str, ...], pick: Data, base: Data, started: Started, values: Data
) -> tuple[str, ...]:
    """The arguments with the flags of TrainingArguments that the pick needs, and without those of the baseline."""
    flags = started.flags
    for name in SWITCHES:
        arguments = without_flag(arguments, flags.get(name, ()))
    in_rows = "token_budget" in Candidate.of(pick["candidate"]).data_changes  # then a micro-batch is one row
    for flag, *rest in _training_flags(Candidate.of(pick["candidate"]), pick["ds_config"], started):
        field = TRAINING_FIELDS.get(flag, "")
        stays = started.baseline.get(field) == values.get(field, "") and not (in_rows and rest == ["1"])
        if not stays or has_flag(arguments, (flag,)):
            arguments = with_flag(arguments, (flag,), rest[0] if rest else None)
    rate = training_rate(pick["ds_config"])
    if rate != training_rate(dict(base)):  # transformers refuses a JSON that differs from the flag
        arguments = with_flag(arguments, flags.get("learning_rate") or (RATE_FLAG,), str(rate))
    return arguments


def _check_family(started: Started | None, form: str, what: str) -> None:
    """Refuses a format that the tuned script cannot read; a model.py may stand for a script of any framework."""
    if started is not None and not started.reads(form):
        alternatives = f"--format command shows how to start it, --format deepspeed is its {EXPORTED_CONFIG}"
        raise UserError(f"the script reads {what}, since it trains with {started.family}; {alternatives}")


def _hf_args(pick: Data, _: Data, __: int, started: Started | None, ___: str) -> str:
    """Flags for a script that parses transformers' TrainingArguments, one a line, quoted for a shell.

    `torch_autocast` and fp32 need no flag: --bf16 would have transformers switch DeepSpeed's own bf16 on.
    """
    _check_family(started, "hf-args", "no TrainingArguments")
    flags = _training_flags(Candidate.of(pick["candidate"]), pick["ds_config"], started)
    flags += [(f"--{name}", str(value)) for name, value in _hf_twins(pick["ds_config"])]
    if started is None or not started.sets_config_itself(pick.get("script_side_changes", ())):
        flags.append(("--deepspeed", started.exported if started else EXPORTED_CONFIG))
    return "\n".join(shlex.join(flag) for flag in flags) + "\n"


def _training_flags(candidate: Candidate, config: DsConfig, started: Started | None) -> list[tuple[str, ...]]:
    """What TrainingArguments must say of a candidate besides the JSON."""
    stated = started.flags.get(STATED, ()) if started is not None else ()
    # A script whose batches vary in size keeps the number that it states.
    micro_batch_size = config.get("train_micro_batch_size_per_gpu", candidate.micro_batch_size)
    flags: list[tuple[str, ...]] = [
        ("--per_device_train_batch_size", str(micro_batch_size)),
        ("--gradient_accumulation_steps", str(candidate.gradient_accumulation_steps)),
    ]
    every, own = candidate.checkpoint_every, " ".join(started.invocation.arguments) if started else ""
    on = {f"--{candidate.precision}"} & {f"--{name}" for name in DTYPES}
    on |= {"--gradient_checkpointing" if every == 1 else "--activation_checkpointing"} if every else set()
    for flag in (f"--{name}" for name in SWITCHES):
        if flag in on:
            flags.append((flag, "True") if flag in stated else (flag,))
        elif flag in stated and not (every and "checkpointing" in flag):  # either of these two turns it on
            flags.append((flag, "False"))
    if every > 1 or (every and "every_n_layers" in own):  # a command that says every k-th would go on doing so
        flags.append(("--activation_checkpointing_kwargs", json.dumps({"every_n_layers": every})))
    changes = candidate.data_changes
    return flags + [(f"--{flag}", str(changes[name])) for name, flag in TRAINER_ARGUMENTS.items() if name in changes]


def _hf_twins(config: DsConfig) -> list[tuple[str, Any]]:
    found = [(flag, value) for path, flag in HF_TWINS.items() if (value := at_path(config, path)) is not None]
    if betas := at_path(config, "optimizer.params.betas"):
        found += [("adam_beta1", betas[0]), ("adam_beta2", betas[1])]
    warmup_lr = at_path(config, "scheduler.params.warmup_max_lr")
    if warmup_lr is not None and "learning_rate" not in dict(found):
        found.append(("learning_rate", warmup_lr))
    return found


def training_rate(config: DsConfig) -> float | None:
    """The learning rate that TrainingArguments must state beside a DeepSpeed configuration; None for any."""
    rate: float | None = dict(_hf_twins(config)).get("learning_rate")
    return rate


FORMATS: dict[str, Callable[[Data, Data, int, Started | None, str], str]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "hf-args": _hf_args,
    "command": _command,
}


def notes(pick: Data, format: str, started: Started | None = None, named: str = "") -> list[str]:  # noqa: A002
    """What someone who uses the exported text has to know and cannot read in it.

    Args:
        named: The words of `autotune export` that name study and pick, with a blank after them.
    """
    config, candidate = pick["ds_config"], Candidate.of(pick["candidate"])
    every, scheduler = candidate.checkpoint_every, at_path(config, "scheduler.params") or {}
    loader = f"The DataLoader needs batch_size={candidate.micro_batch_size}: the JSON states it and does not set it."
    recompute = f"Recompute the activations of {every_nth(every)} block in the script: no key of this file does."
    made = "The JSON makes the {}: the script passes accelerate.utils.Dummy{} in place of the script's."
    newer = "Recomputing every k-th layer needs transformers 5; with older ones every layer: --gradient_checkpointing."
    fixed = 'set them to "auto", or transformers refuses other --max_steps or --warmup_steps.'
    written = f"`autotune export {named}-o {EXPORTED_CONFIG}` writes the JSON."
    steps = scheduler.get("total_num_steps") or scheduler.get("warmup_num_steps")
    said: dict[str, list[tuple[Any, str]]] = {
        "accelerate": [
            (started is None or not started.uneven, loader),
            (every > 0, recompute),
            ("optimizer" in config, made.format("optimizer", "Optim")),
            ("scheduler" in config, made.format("scheduler", "Scheduler")),
        ],
        "hf-args": [
            (True, started.written(started.exported) if started else written),
            (every > 1, newer),
            (steps, f"The JSON fixes the scheduler steps: {fixed}"),
        ],
    }
    if started is not None and started.sets_config_itself(pick.get("script_side_changes", ())):
        said["hf-args"].append((True, f"No flag names the JSON, as the script's code sets another: {started.in_code}."))
    if TOTAL in config:
        said["deepspeed"] = [(True, f"It states {TOTAL}, as yours does: change it for another number of ranks.")]
    if started is not None and started.family == TRAINER:
        said |= {form: [(steps, f"The JSON fixes the scheduler steps: {fixed}")] for form in ("deepspeed", "command")}
        said["accelerate"] = [(True, started.beside_accelerate)]
    if format in ("hf-args", "command") and started and started.reads("hf-args") and "bf16" not in started.flags:
        flags = [shlex.split(line) for line in _hf_args(pick, {}, 0, started, "").splitlines()]
        said.setdefault(format, []).append((True, started.without_flags(flags)))
    return [text for applies, text in said.get(format, []) if applies]


def export_pick(
    report: StudyReport, pick: str | None, number: int | None, form: str, path: Path | None = None
) -> Exported:
    """A pick, or any trial, in the form that another tool takes.

    Args:
        pick: Name of the pick; None for `recommended`.
        number: Number of a trial to export instead of a pick; None exports the pick.
        form: One of `FORMATS`.
        path: The file that takes it, whose name stands in the text; None for the usual name.

    Raises:
        StoreError: The study has no such pick or finished trial.
        UserError: The format is unknown, or does not suit what was tuned.
    """
    chosen, base = pick_or_trial(report, pick, number), report.study["base_config"]
    which = f"--pick {shlex.quote(pick)} " if pick else f"--trial {number} " if number is not None else ""
    begun = started(report, which)
    file = "" if path is None else os.path.relpath(path, begun.invocation.working_dir) if begun else str(path)
    begun = begun.pasted_here if begun else None
    nodes, named = report.study.get("nodes", 1), f"{shlex.quote(report.name)} {which}"
    text = export(chosen, base, form, report.world_size // (nodes if form == "command" else 1), begun, file)
    joined = [ON_MACHINES[form].format(nodes)] if nodes > 1 and form in ON_MACHINES else []
    changes = [] if form == "command" else chosen.get("script_side_changes", [])  # its comments say so
    known = notes(chosen, form, begun, named) if form != "command" or FIRST in text else []
    return Exported(
        text=text,
        notes=[*_warnings(chosen), *known, *joined, *changes],
        tuned=base,
        own_files=begun.own_files if begun else frozenset(),
    )


def _warnings(chosen: Data) -> list[str]:
    """Why a trial that is no pick may not run as exported, or should not be trained with."""
    number, outcome = chosen["trial"], chosen.get("outcome", "complete")
    if outcome != "complete":
        return [f"trial {number} ended with {ended(outcome)}: {chosen.get('reason')}"]
    missing = [f"no flag, constant or line of yours makes this: {text}" for text in chosen.get("unreproducible") or ()]
    return [*missing, *([f"trial {number} is not recommended: {chosen['doubt']}"] if chosen.get("doubt") else [])]


def pick_or_trial(report: StudyReport, pick: str | None, number: int | None) -> dict[str, Any]:
    """The point to export."""
    name, picks, baseline = report.name, report.picks, report.baseline
    if number is not None:
        # Of one trial each says what others leave out; of its picks the first counts.
        every = [*report.trials, *report.front, *list(picks.values())[::-1]]
        found = {name: value for point in every if point["trial"] == number for name, value in point.items()}
        if not found:
            numbers = [row["trial"] for row in report.trials]
            known = f"it has {min(numbers)} to {max(numbers)}" if numbers else "it has none"
            raise StoreError(f"study {name!r} has no finished trial {number!r}; {known}")
        return found
    named = dict(picks) | ({"baseline": baseline} if baseline else {})
    pick = pick or "recommended"
    if pick_name(pick) not in named:
        known, why = ", ".join(named) or "none", "" if picks else f": {report.why_nothing}"
        raise StoreError(f"study {name!r} has no pick {pick!r}{why}. Known: {known}")
    return dict(named[pick_name(pick)])
