"""Inspects a target before the first trial: loads a model, or runs a script and finds out which knobs move."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import UserError, shortened
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.deepspeed import DsConfig, Scalar, without_auto
from autotune.study.setup import remedies, sums
from autotune.study.setup.remedies import ACCUMULATION, MICRO, SCRIPT_BATCH
from autotune.study.spec.spec import StudySpec
from autotune.system import redaction
from autotune.system.files import shown
from autotune.trial import failures
from autotune.trial.command import DS_CONFIG, MAPPED_KEYS, Invocation, fill, template_values, templates_in, with_flag
from autotune.trial.flags import word_that_holds
from autotune.trial.folder import TrialDir, events, read_record, result_in
from autotune.trial.request import TrialRequest
from autotune.trial.result import Observed, Outcome, TrialResult
from autotune.trial.workload import UNPROBED, Probed, Script, Workload

DEFAULT_MICRO_BATCH = 8
# An op that takes longer than this to load is being compiled.
COMPILED_S = 3.0
# End of a script whose arguments are missing or wrong, by argparse and most other parsers.
USAGE_STATUS = "exited with status 2"
# What a script fails with that trains without DeepSpeed by itself, other than a sentence of ours.
RAISED = re.compile(r"\w+(Error|Exception)\b")
WITHOUT_DEEPSPEED = "DeepSpeed: the script is run without it"
GIVEN_DEEPSPEED = (
    "By itself the script runs without DeepSpeed, with which trials train: if it works so, it does something that DeepSpeed does not"
    " take, such as `optimizer.step(closure)`"
)
# How side changes begin that move the batch where the script's code has it.
IN_CODE = ("Data:", "Accumulation:")


def compiling(names: str) -> str:
    """Returns what a run does while DeepSpeed's ops are compiled."""
    return f"DeepSpeed's {names} is being compiled, once on this machine; it takes some minutes"


class _Builds:
    """Tells of the ops that a script has DeepSpeed compile, which takes minutes in which nothing else happens."""

    def __init__(self, folder: TrialDir, doing: Callable[[str], None]) -> None:
        self._folder, self._doing, self._told = folder, doing, ""

    def look(self) -> None:
        """Tells of an op that has been compiled for some seconds, once; one that is built already is loaded at once."""
        if (name := self.under_way()) and name != self._told:
            self._told = name
            self._doing(compiling(name))

    def under_way(self) -> str:
        """Returns the op that is being compiled; empty without one."""
        last: dict[str, Any] = next((event for event in reversed(events(self._folder)) if "compiling" in event), {})
        return str(last.get("compiling", "")) if time.time() - last.get("time", 0.0) > COMPILED_S else ""


def inspect_workload(
    spec: StudySpec, executor: Executor, path: Path, world_size: int, doing: Callable[[str], None] = lambda _: None
) -> Workload:
    """Loads a `model.py`, or runs a script unchanged for a few steps, and returns the findings.

    Args:
        doing: Called with what is being done if that takes minutes.
    """
    is_script = spec.inspected.kind == "script"
    own = _untouched(spec, world_size) if is_script else None
    request = TrialRequest(
        target=str(spec.target), mode="probe" if is_script else "inspect", seed=spec.seed, world_size=world_size,
        nodes=spec.nodes_for(world_size), deadline_s=spec.trial_deadline_s,
        # Loading a model takes host memory; the baseline shows whether it fits the device.
        device_memory_bytes=spec.device_memory_bytes if is_script else None,
        script=script_request(spec, None, own, own) if own is not None else None,
        ds_config=_untouched_config(spec) if is_script else spec.base_config or {},
    )  # fmt: skip
    builds = _Builds(TrialDir(path), doing)
    result = base.run(executor, path, request, builds.look)
    if result.outcome is Outcome.TIMEOUT and (op := builds.under_way()) and executor.build_op(op, builds.look) is None:
        result = base.run(executor, path, request, builds.look)  # the compiler had used up the script's time
    if result.outcome is not Outcome.COMPLETE:
        how = "run as it is" if is_script else "loaded"
        log = TrialDir(path).log(result.failed_rank or 0)
        hint = _usage(log, spec.target) if is_script and result.reason.endswith(USAGE_STATUS) else ""
        if result.outcome is Outcome.TIMEOUT and (op := builds.under_way()):
            hint = f": DeepSpeed's {op} was still being compiled; compile it first, with `autotune doctor --build`"
        if result.outcome is Outcome.TIMEOUT and not hint:
            hint = f"; {failures.more_time(result.phase)}"
        if result.outcome is Outcome.OOM and is_script:
            hint = ". Give the script a batch that fits: memory that runs out ends a trial, also where the script would lower it"
        if executor.cold_reason and "exited with status" in result.reason:  # it may not even import DeepSpeed
            hint = hint or f"; {executor.cold_reason}"
        if not hint and (advice := failures.advice(result.outcome, result.reason, on_device=False)):
            hint = f". {advice}"
        if (
            not hint
            and RAISED.match(result.reason)
            and any(text.startswith(WITHOUT_DEEPSPEED) for text in result.side_changes)
        ):
            hint = f". {GIVEN_DEEPSPEED}"
        raise UserError(f"{spec.target} cannot be {how}: {result.reason}{hint} (see {shown(log)})")
    workload = read_record(TrialDir(path).workload, Workload)
    if workload.script is not None:
        for name in SCRIPT_BATCH:
            if getattr(workload.script, name) is None:
                raise UserError(
                    f"{spec.target}: the {name} varies from step to step, so no trial could be checked: make it the same in"
                    " each step, with a loader that has `drop_last=True`, and data for several steps"
                )
    return workload


def _usage(log: Path, target: Path) -> str:
    """Returns the last error of a script that ended as argparse does, and how to give it arguments."""
    with contextlib.suppress(OSError):
        said = [line for line in log.read_text(errors="replace").splitlines() if "error: " in line]
        last = f" ({shortened(said[-1].partition('error: ')[2], 300)})" if said else ""
        if "unrecognized" in last or "invalid" in last:  # it has its arguments, and one is wrong
            return last
        return f"{last}; if it needs arguments: autotune run {target.name} -- ITS ARGUMENTS"
    return ""


def _default_batch(spec: StudySpec) -> DsConfig:
    """Returns the batch before anything is tuned where the user's configuration leaves it open."""
    if spec.batch_is_configured:
        return {}
    return {"train_micro_batch_size_per_gpu": DEFAULT_MICRO_BATCH, "gradient_accumulation_steps": 1}


def _untouched(spec: StudySpec, world_size: int) -> Candidate:
    """Returns the candidate that fills the templates before anything is tuned: the user's own configuration."""
    return from_deepspeed(_default_batch(spec) | without_auto(spec.base_config or {}), world_size)


def _untouched_config(spec: StudySpec) -> DsConfig:
    """Returns the content of `{ds_config}` before anything is tuned."""
    return _default_batch(spec) | (spec.base_config or {}) if DS_CONFIG in spec.templated() else {}


def script_request(spec: StudySpec, probed: Probed | None, candidate: Candidate, baseline: Candidate) -> Script:
    """Returns how the script is run for a candidate; a probe, which learns what the script is, runs the user's own one."""
    how, templated, mappings = spec.how(), spec.templated(), mapped_flags(spec, probed)
    before, values = baseline.values(), candidate.values()
    stays = probed.stays if probed is not None else {}
    fillers = template_values(values | stays)
    arguments, changes = tuple(fill(argument, fillers) for argument in how.arguments), []
    moved = {name: value for name, value in values.items() if value != before.get(name) and name not in stays}
    if probed is not None:
        changes += sums.changes(probed, candidate.gradient_accumulation_steps / baseline.gradient_accumulation_steps)
    shown = templates_in([*how.arguments, *how.environment.values()])
    changes += [
        f"Command line: `{{{n}}}` in it is {value} instead of {before[n]}." for n, value in moved.items() if n in shown
    ]
    for name, flag in mappings.items():
        if name in moved:
            given = "=" if any(argument.startswith(f"{flag}=") for argument in arguments) else " "
            arguments = with_flag(arguments, (flag,), str(moved[name]))
            changes.append(f"Command line: `{flag}{given}{moved[name]}` instead of {before[name]}.")
    for name, text in spec.script_set.items():
        if set(templates_in([text])) & set(moved):
            was, now = (fill(text, some) for some in (template_values(before), fillers))
            changes.append(f"Constant: `{name} = {now}` in {spec.target.name} instead of {was}.")
    return Script(
        arguments=arguments,
        working_dir=how.working_dir,
        module=how.module,
        environment=_told({name: fill(value, fillers) for name, value in how.environment.items()}, how),
        # A probe does not replace constants that carry the batch, and so learns their values.
        assignments={k: fill(v, fillers) for k, v in spec.script_set.items() if _assigns(v, probed)},
        probed=probed or UNPROBED,
        carried=tuple(name for name in SCRIPT_BATCH if name in templated or name in mappings),
        side_changes=tuple(changes),
    )


def _assigns(text: str, probed: Probed | None) -> bool:
    """Returns whether a constant of the script is replaced by a text: not where its templates move nothing."""
    return "{" not in text if probed is None else not set(templates_in([text])) & set(probed.stays)


def _told(environment: dict[str, str], how: Invocation) -> dict[str, str]:
    """Returns the variables for a trial's file; secrets are only in the environment of its processes."""
    fixed, shown = how.fixed_environment, redaction.redact(environment)
    return {name: value for name, value in environment.items() if name not in fixed or shown[name] == value}


def mapped_flags(spec: StudySpec, probed: Probed | None) -> dict[str, str]:
    """Returns the flag of each field: from the study, else from `autotuning.arg_mappings` in the script's JSON, and words that move it.

    Fields with a template have none.
    """
    section = (probed.ds_config.get("autotuning") or {}).get("arg_mappings") if probed is not None else None
    own = {key: flag for key, flag in (section or {}).items() if key in MAPPED_KEYS and isinstance(flag, str)}
    templated = spec.templated()
    words = probed.words if probed is not None else {}
    flags = words | {MAPPED_KEYS[key]: flag for key, flag in (spec.arg_mappings or own).items()}
    return {name: flag for name, flag in flags.items() if name not in templated}


def with_movable(
    spec: StudySpec, executor: Executor, path: Path, workload: Workload, baseline: Candidate, world_size: int
) -> Workload:
    """Runs the script with another micro-batch and accumulation, and records which of them really changed.

    If that run fails, each of them is changed in a separate run.
    """
    probed, micro, steps = workload.script, baseline.micro_batch_size, baseline.gradient_accumulation_steps
    assert probed is not None
    wanted = _to_move(micro, steps, keeps=spec.global_batch == "keep")

    def run(names: Iterable[str], folder: str, probed: Probed) -> TrialResult:
        candidate = Candidate.of({**baseline.values(), **{name: wanted[name] for name in names}})
        config = replace(workload, script=probed).ds_config(candidate, probed.ds_config)
        request = TrialRequest(
            target=str(spec.target), candidate=candidate.values(), ds_config=config, world_size=world_size,
            nodes=spec.nodes_for(world_size), seed=spec.seed, max_steps=2, budget_s=0.0,
            deadline_s=spec.trial_deadline_s, device_memory_bytes=spec.device_memory_bytes,
            script=script_request(spec, probed, candidate, baseline),
        )  # fmt: skip
        return base.run(executor, path.with_name(folder), request)

    tried = [name for name in SCRIPT_BATCH if name != "micro_batch_size" or probed.uneven is None]
    untouched = _untouched(spec, world_size).values()
    probed = replace(probed, stays={name: untouched[name] for name in SCRIPT_BATCH if name not in tried})
    both = run(tried, path.name, probed)
    for way, (names, other) in _other_ways(spec, probed, steps).items():
        if _other_way_is_better(way, names, wanted, both):
            again = run(tried, f"{path.name}-{way}", other)
            probed, both = (other, again) if _all_ran(names, wanted, again.observed) else (probed, both)
    results = {
        name: both if both.observed is not None else run([name], f"{path.name}-{name}", probed) for name in tried
    }
    movable = list[str]()
    first, moved = result_in(path.with_name("inspect")), results["gradient_accumulation_steps"]
    growth = sums.growth(first, moved)
    if growth == -1 or (growth == 0 and probed.counts_itself):  # the loss of some falls with the micro-batch alone
        growth = sums.growth(first, run(["gradient_accumulation_steps"], f"{path.name}-alone", probed), off=0.5)
    probed, notes = sums.with_findings(probed, growth, first, moved)
    caveats = [*workload.caveats, *remedies.of_own_size(probed.uneven, micro), *notes, *_left_open(spec, baseline)]
    for name, result in results.items():
        word, was = SCRIPT_BATCH[name], getattr(baseline, name)
        if name == "micro_batch_size" and (behind := _left_behind(spec, first, result)):
            caveats.append(remedies.beside(was, behind))
        elif _ran(name, wanted, result.observed):
            movable.append(name)
        elif result.observed is not None:
            caveats.append(f"the {word} stays {was}: {remedies.unmoved(spec, probed, name, result.observed)}")
        else:
            caveats.append(remedies.ended(spec, result, name, wanted[name], was))
    caveats += [remedies.alone(name, baseline) for name in movable if spec.global_batch == "keep" and len(movable) == 1]
    flags = {name: names for result in results.values() for name, names in result.flags.items()}
    flags = probed.flags | flags | {name: [flag] for name, flag in mapped_flags(spec, probed).items()}
    stays = {name: untouched[name] for name in SCRIPT_BATCH if name not in movable}
    vain = Candidate.of({**baseline.values(), **{n: wanted[n] for n in stays}})
    in_vain = script_request(spec, probed, vain, baseline).side_changes
    said = (text for result in results.values() for text in result.side_changes)
    changes = tuple(text for text in dict.fromkeys(said) if text not in in_vain)
    script = replace(probed, flags=flags, movable=tuple(movable), moved_by=changes, stays=stays)
    return replace(workload, script=script, caveats=caveats)


def _ran(name: str, wanted: dict[str, int], seen: Observed | None) -> bool:
    """Returns whether a run was seen to train with the value that was wanted."""
    own_draw = seen.loader_batch_size if seen is not None and name == "micro_batch_size" else None
    return seen is not None and wanted[name] in (getattr(seen, name), own_draw)


def _other_way_is_better(way: str, names: Iterable[str], wanted: dict[str, int], run: TrialResult) -> bool:
    """Returns whether another way is to be tried than that of a run: nothing moved, or code moved what a word of the command line may."""
    by_code = way == "words" and any(text.startswith(IN_CODE) for text in run.side_changes)
    return run.observed is not None and (by_code or not _all_ran(names, wanted, run.observed))


def _all_ran(names: Iterable[str], wanted: dict[str, int], seen: Observed | None) -> bool:
    return all(_ran(name, wanted, seen) for name in names)


def _other_ways(spec: StudySpec, probed: Probed, steps: int) -> dict[str, tuple[Sequence[str], Probed]]:
    """Returns what a script may be besides what its probe showed: by a word, the knobs that then move, and the script as such."""
    found: dict[str, tuple[Sequence[str], Probed]] = {}
    told, arguments = {*spec.templated(), *mapped_flags(spec, probed)}, spec.how().arguments
    words = {n: word_that_holds(n, getattr(probed, n) or 0, arguments) for n in SCRIPT_BATCH if n not in told}
    words = {name: word for name, word in words.items() if word}
    if MICRO in words:  # a script that counts its micro-batches itself may have its accumulation from another word
        found["words"] = (tuple(words), replace(probed, words=words))
        found["word"] = ((MICRO,), replace(probed, words={MICRO: words[MICRO]}))
    if probed.parts == steps:  # it may cut a batch into as many parts as it accumulates, or always into so many
        found["parts"] = ((MICRO,), replace(probed, parts_follow=True))
    if ACCUMULATION in told and not probed.counts_itself:  # of one micro-batch a step no probe shows it
        found["counted"] = ((ACCUMULATION,), replace(probed, counts_itself=True))
    return found


def _left_behind(spec: StudySpec, first: TrialResult | None, moved: TrialResult) -> tuple[int, ...]:
    """Returns the samples that loaders draw for each micro-batch as before, where those of another loader changed."""
    if "micro_batch_size" in spec.templated():  # the user says what follows
        return ()
    before, after = (r.observed.draws if r is not None and r.observed is not None else () for r in (first, moved))
    same = tuple(one for one, other in zip(before, after, strict=False) if one == other)
    return same if len(before) == len(after) > len(same) else ()


def _left_open(spec: StudySpec, baseline: Candidate) -> list[str]:
    """Returns a note where the user's command states no batch, so that the baseline has a default of ours."""
    if spec.batch_is_configured:
        return []
    how = spec.how()
    given = templates_in([*how.arguments, *how.environment.values()])
    by_config = DS_CONFIG in given
    ours = [f"{SCRIPT_BATCH[n]} {getattr(baseline, n)}" for n in SCRIPT_BATCH if by_config or n in given]
    own = "; if you train with another, state it in base_config" if by_config else ""
    words = "the command leaves the batch to autotune, so the baseline, which gains are compared with, has"
    return [f"{words} {' and '.join(ours)}{own}"] if ours else []


def _to_move(micro: int, steps: int, *, keeps: bool) -> dict[str, int]:
    """Returns the micro-batch and accumulation to try: where the global batch is kept, with the same one."""
    halves = steps // 2 if micro == 1 and steps % 2 == 0 else steps * 2
    # Else each must change without the other.
    return {
        "micro_batch_size": micro // 2 if micro > 1 else 2,
        "gradient_accumulation_steps": halves if keeps else steps + max(1, steps // 2),
    }


def frozen_knobs(spec: StudySpec, workload: Workload, baseline: Candidate) -> dict[str, Scalar]:
    """Returns the knobs that the script does not let move, with their values."""
    assert workload.script is not None
    fixed = [name for name in SCRIPT_BATCH if name not in workload.script.movable]
    if fixed and spec.global_batch == "keep":
        fixed = list(SCRIPT_BATCH)  # with the product and one factor fixed, so is the other
    return {name: baseline.values()[name] for name in fixed}
