"""What a user is told of a batch that does not move in a script, and of settings without effect there, with the remedy."""

import ast
import re
from pathlib import Path

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import is_int
from autotune.study.spec.spec import StudySpec
from autotune.system import files
from autotune.trial.command import templates_in
from autotune.trial.result import Observed, Outcome, TrialResult
from autotune.trial.target import module_constants
from autotune.trial.workload import ACCELERATE, Probed

MICRO, ACCUMULATION = "micro_batch_size", "gradient_accumulation_steps"
SCRIPT_BATCH = {MICRO: "micro-batch", ACCUMULATION: "accumulation"}
# Advice where the tuner cannot move a knob.
REMEDY = {
    name: f"To tune it, pass it by a flag (`--flag {{{name}}}` on the command line), a constant of the script"
    f" (`--set NAME={{{name}}}`) or a variable of the launch command (`autotune run 'NAME={{{name}}} torchrun ...'`)"
    for name in SCRIPT_BATCH
}
# Files of settings that a script may read; a larger one holds data.
SETTINGS_ENDINGS, LARGEST_SETTINGS_BYTES = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg"), 1 << 20
# What tells a script of raw DeepSpeed the value of its configuration, which is the trial's.
ENGINE_METHODS = {MICRO: "train_micro_batch_size_per_gpu", ACCUMULATION: "gradient_accumulation_steps"}
# What was seen where a template carries the field, and yet the script trains as before; with the remedy.
PASSED_IN_VAIN = {
    "micro_batch_size": "the first dimension of what its engine is fed stayed the same. To tune it, pass it to what makes the batches, and"
    " have the samples in their first dimension, or drawn by a DataLoader, which tells how many they are",
    "gradient_accumulation_steps": "it steps after as many micro-batches as before. To tune it, pass it to what counts them",
}
# Advice where a trial did not apply a setting, by the first word of its reason.
UNSEEN_REMEDIES = {
    **REMEDY,
    "global batch": REMEDY["micro_batch_size"],
    "dtype": "If the script chooses the type of its weights, leave that to DeepSpeed, or `precision` out of the space",
    "checkpoint_every": "If the script recomputes activations, pass the interval by a flag (`--flag {checkpoint_every}`"
    " on the command line), or leave `checkpointing` out of the space",
}


def remedy(reason: str) -> str:
    """Returns advice where a setting had no effect on a script; empty without any."""
    found = next((text for what, text in UNSEEN_REMEDIES.items() if reason.startswith(f"{what}:")), "")
    return "" if not found or found in reason else f". {found}"


def beside(micro: int, others: tuple[int, ...]) -> str:
    """Returns why a micro-batch stays whose other loaders do not follow, and the remedy."""
    times = "".join(f"*{n // micro}" for n in others[:1] if n % micro == 0 and n > micro)
    return (
        f"the micro-batch stays {micro}: each also takes {' and '.join(map(str, others))} samples of another DataLoader, which did"
        f" not follow, so a step would train on another share of them. To tune it, pass both sizes by flags"
        f" (`--flag {{micro_batch_size}} --other {{micro_batch_size}}{times}` on the command line) or constants of the script (`--set`)"
    )


def ended(spec: StudySpec, result: TrialResult, name: str, tried: int, was: int) -> str:
    """Returns why a knob is not tuned with whose value the script ended, and the remedy where the script may hold the old one."""
    why = f"with {SCRIPT_BATCH[name]} {tried} the script ended with {result.end}"
    crashed = result.outcome is Outcome.CRASHED and name not in spec.templated()
    return f"{why}; so it stays {was}" + f". {_remedy(spec, name, was)}" * crashed


def alone(name: str, baseline: Candidate) -> str:
    """Returns that one of micro-batch and accumulation stays, since the other one does."""
    return f"the {SCRIPT_BATCH[name]} stays {getattr(baseline, name)}, too: the global batch is kept (--global-batch free lets it vary)"


def of_own_size(sizes: tuple[int, int] | None, mean: int) -> list[str]:
    """Returns why the micro-batch of a script whose batches vary in size is not tuned; empty where they do not vary."""
    if sizes is None:
        return []
    return [
        f"the micro-batch is not tuned: the script decides how many samples each batch holds ({sizes[0]} to {sizes[1]});"
        f" {mean}, their mean, stands for it, and the configuration keeps what the script states"
    ]


def unmoved(spec: StudySpec, probed: Probed, name: str, seen: Observed) -> str:
    """Returns why a knob did not move in a run, by what was seen there, and the remedy."""
    times = _micro_batches_per_constant(spec, probed) or probed.parts if name == "micro_batch_size" else 0
    cuts = times > 1 and 0 < seen.parts != probed.parts and seen.micro_batch_size == probed.micro_batch_size
    if times > 1 and not cuts:
        multiplied = f"`{{{name}}}*{times}`"
        return (
            f"the script makes {times} micro-batches of each batch. To tune it, pass {times} times its value:"
            f" {multiplied} in a flag on the command line, or for a constant `--set NAME={{{name}}}*{times}`"
        )
    if probed.family == ACCELERATE and name == "gradient_accumulation_steps":
        return (
            "the script steps in each backward. To tune it, put `with accelerator.accumulate(model):` around the step"
        )
    if name in spec.templated():
        return f"the script was given another `{{{name}}}`, and {PASSED_IN_VAIN[name]}"
    why = "the script cuts each batch into parts of that size" if cuts else "no flag, constant or DataLoader moves it"
    value = getattr(probed, name)
    own = [] if cuts else _own_files(spec, probed, value)
    if own and value not in dict(_constants(spec)).values():
        engine = f"the engine (`engine.{ENGINE_METHODS[name]}()`) or " * (probed.family == "raw DeepSpeed")
        return (
            f"{why}, and trials leave {' and '.join(own)} as {'they are' if len(own) > 1 else 'it is'}. To tune it, have the script"
            f" take it from {engine}a flag that wins over the file (`--flag {{{name}}}` on the command line)"
        )
    return f"{why}. {_remedy(spec, name, value)}"


def _own_files(spec: StudySpec, probed: Probed, value: int) -> list[str]:
    """Returns the files of settings that the command names and a value stands in, but for DeepSpeed's, which trials replace."""
    how, found = spec.how(), list[str]()
    for name in (word.partition("=")[2] or word for word in how.arguments):
        if name.endswith(SETTINGS_ENDINGS) and name != probed.config_source and value > 1:  # a 1 stands in each file
            text = files.tail(Path(how.working_dir, name), LARGEST_SETTINGS_BYTES, whole=True) or b""
            found += [name] * bool(re.search(rf"[:=]\s*{value}(?![\w.])".encode(), text))
    return found


def _remedy(spec: StudySpec, name: str, value: int) -> str:
    """Returns how to have a knob move, and which of the script's constants may be meant, by their value."""
    same = [f"`{constant}`" for constant, found in _constants(spec) if found == value]
    named = f". Of the script's constants {' and '.join(same)} {'have' if len(same) > 1 else 'has'} the value {value}"
    return f"{REMEDY[name]}{named if same else ''}"


def _constants(spec: StudySpec) -> list[tuple[str, int]]:
    """Returns the script's constants that are written out as whole numbers."""
    found = module_constants(ast.parse(Path(spec.target).read_bytes()).body)
    values = [(name, node.value.value) for name, node in found if isinstance(node.value, ast.Constant)]
    return [(name, value) for name, value in values if is_int(value)]


def _micro_batches_per_constant(spec: StudySpec, probed: Probed) -> int:
    """Returns how often the micro-batch goes into a constant of the script that was to carry it; 0 if it does not."""
    micro = probed.micro_batch_size or 0
    carriers = [name for name, text in spec.script_set.items() if templates_in([text]) == ("micro_batch_size",)]
    for name, value in _constants(spec):
        if name in carriers and micro and value % micro == 0:
            return value // micro
    return 0
