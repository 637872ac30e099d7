"""The command `check`: run two steps of the baseline and show what a study would tune."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import AsJson, Target, takes_settings
from autotune.cli.terminal import fitted
from autotune.system.files import shown

if TYPE_CHECKING:
    from autotune.study.setup.plan import Plan
    from autotune.trial.result import TrialResult


@takes_settings(
    "space", "goal", "objectives", "ranks", "executor", "nodes", "executor_options", "hostfile", "base_config", "global_batch",
    "device_memory_bytes", "script_set", "trial_deadline_s",
)  # fmt: skip
def check(target: Target, settings: Mapping[str, Any], *, as_json: AsJson = False) -> int:
    """Load a target, run two steps of its baseline, and print what would be tuned.

    Returns:
        Exit status: 0 the baseline runs, 1 it does not.
    """
    from autotune.report.progress import ProgressView

    with ProgressView() as view:
        view.opening(target)
        from autotune.study.setup.capture import wanted_study

        wanted, notes = wanted_study(target, settings, view)

    from autotune.executors import base
    from autotune.study.measure import build_ops, ops_of
    from autotune.study.setup.engine import executor_for
    from autotune.study.setup.plan import plan
    from autotune.study.setup.request import studies_folder
    from autotune.system import temporary
    from autotune.trial import failures
    from autotune.trial.folder import TrialDir
    from autotune.trial.result import Outcome

    # Other machines do not see this one's temporary files.
    around = studies_folder(Path(target)) if wanted.runs_elsewhere else None
    if around is not None:
        around.mkdir(parents=True, exist_ok=True)
    with temporary.log_folder(".check" if around else "autotune-check", around) as folder:
        with ProgressView() as view:
            view.doing(f"loading {shown(wanted.target)}")
            with executor_for(wanted, folder, view.waits) as executor:
                found = plan(wanted, executor, folder, view)
                found.notes[:0] = notes
                request = replace(found.request(found.baseline), max_steps=2, budget_s=0.0)
                with executor.turn(view.waiting):
                    build_ops(executor, ops_of(request.ds_config), view)  # of one that fails the trial tells
                    view.doing("running two steps of the baseline")
                    result = base.run(executor, folder / "trials" / "check", request, view.tick)
        if result.outcome is Outcome.COMPLETE:  # else its logs are shown
            shutil.rmtree(folder, ignore_errors=True)
    on_device = found.workload.environment.accelerator != "cpu"
    if advice := failures.advice(result.outcome, result.reason, on_device=on_device):
        result = replace(result, reason=f"{result.reason}. {advice}")
    data = check_data(found, result, TrialDir(folder / "trials" / "check").log(result.failed_rank or 0))
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        print(fitted("\n".join(lines(data))))
    return 0 if result.outcome is Outcome.COMPLETE else 1


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """The findings of `check` for people."""
    from autotune.report.trial_notes import ended

    workload = data["workload"]
    trainable = (
        "" if workload["n_trainable"] == workload["n_parameters"] else f" ({workload['n_trainable']:,} trainable)"
    )
    yield f"model      {workload['n_parameters']:,} parameters{trainable}"
    if workload["script"]:
        yield from _start(data["invocation"])
        yield from _script(workload["script"])
    samples = (
        f"{workload['n_samples']:,} samples" if workload["n_samples"] is not None else "an unknown number of samples"
    )
    yield f"data       {samples}"
    if workload["n_blocks"]:
        blocks = f"{workload['n_blocks']} x {workload['block_class']}, {workload['block_share']:.0%} of the parameters"
        yield f"blocks     {blocks}: their activations can be recomputed"
    environment = workload["environment"]
    yield f"machine    {_machine(environment)}; {data['ranks']} rank(s)"
    baseline = data["baseline"]
    peak = (
        f", {baseline['peak_memory_bytes'] / 2**20:,.0f} MiB at the peak of two steps"
        if baseline["peak_memory_bytes"]
        else ""
    )
    reason = f"; {baseline['reason']}" if baseline["reason"] else ""
    yield f"baseline   {baseline['description']}: {ended(baseline['outcome'])}{peak}{reason}"
    if baseline["log"]:
        yield f"           see {baseline['log']}"
    about = "" if data["exact"] else "about "
    # A crash says nothing of the others, which may all crash with it.
    what = "can run here" if baseline["log"] is None else "would be proposed"
    what = f"candidate{'s' * (data['n_legal'] != 1)} {what}"
    yield f"\n{about}{data['n_legal']:,} {what}, of {data['n_candidates']:,} in the space. Tuned:\n"
    # The baseline's values need not be among those that are searched: one of each may be left.
    knobs = [knob for knob in data["knobs"] if knob["n_values"] > 1] or data["knobs"]
    width = max(len(knob["name"]) for knob in knobs)
    for knob in knobs:
        yield f"  {knob['name']:<{width}}  {knob['values']}{_condition(knob['when'])}"
    if data["not_proposed"]:
        yield "\nNot proposed here:"
        values: dict[tuple[str, str], list[str]] = {}
        for item in data["not_proposed"]:
            values.setdefault((item["knob"], item["reason"]), []).append(str(item["value"]))
        for (knob, reason), dead in values.items():
            yield f"  {knob} {', '.join(dead)}: {reason.removeprefix(f'{knob}: ')}"
    for note in data["notes"]:
        yield f"\nNote: {note}"


def _start(invocation: Mapping[str, Any]) -> Iterator[str]:
    """The script, ranks and folder of a launch command."""
    if not invocation["command"]:
        return
    what = ["-m", invocation["module"]] if invocation["module"] else [str(shown(Path(invocation["script"])))]
    yield f"starts     `{shlex.join([*what, *invocation['arguments']])}`"
    names = ", ".join(invocation["environment"])
    ranks = f"{invocation['world_size']} rank(s)" if invocation["world_size"] else "no launcher"
    yield f"           {ranks}; in {shown(Path(invocation['working_dir']))}" + (f"; with {names}" if names else "")


def _script(script: Mapping[str, Any]) -> Iterator[str]:
    """The findings of a probe of a training script."""
    backward = "backward past engine.backward(loss)" if script["plain_backward"] else "engine.backward(loss)"
    batch = f"micro-batch {script['micro_batch_size']}, accumulation {script['gradient_accumulation_steps']}"
    yield f"script     {script['family']}, {backward}; {batch}"
    yield f"can move   {', '.join(script['movable']) or 'neither micro-batch nor accumulation'}"
    for n, change in enumerate(script["moved_by"]):
        yield f"{'' if n else 'tried with':<10} {change}"


def _condition(when: Mapping[str, Sequence[Any]]) -> str:
    """The condition of a knob in words."""
    terms = [
        f"{name} is {' or '.join('default' if value is None else str(value) for value in values)}"
        for name, values in when.items()
    ]
    return f"   when {', '.join(terms)}" if terms else ""


def check_data(found: Plan, result: TrialResult, log: Path) -> dict[str, Any]:
    """The findings of `check` for programs."""
    from autotune.space import feasibility
    from autotune.trial.result import Outcome

    n_legal, exact = feasibility.count_legal(found.space, found.baseline, found.setting)
    dead = feasibility.dead_values(found.full_space, found.baseline, found.setting)
    baseline = {
        "candidate": found.baseline.values(), "description": found.baseline.describe(),
        "ds_config": found.ds_config(found.baseline), "outcome": str(result.outcome), "reason": result.reason,
        "log": None if result.outcome is Outcome.COMPLETE else str(log),
        "peak_memory_bytes": result.peak_memory_bytes, "memory_by_phase_bytes": result.memory_by_phase_bytes,
    }  # fmt: skip
    knobs = [
        {"name": each.name, "values": each.describe(), "n_values": len(each.all_values()), "when": dict(each.when)}
        for each in found.space.parameters
        if any((each.name, value) not in dead for value in each.all_values())
    ]
    follows, overruled = _kept_batch(found)
    not_proposed = [
        {"knob": knob, "value": "default" if value is None else value, "reason": reason}
        for (knob, value), reason in {**dead, **overruled}.items()
    ]
    return {
        "target": str(shown(found.spec.target)), "ranks": found.world_size, "workload": asdict(found.workload),
        "invocation": asdict(found.spec.how().shown) if found.workload.script else None, "baseline": baseline,
        "n_candidates": found.full_space.size(found.baseline), "n_legal": n_legal, "exact": exact,
        "knobs": [*knobs, *follows],
        "not_proposed": not_proposed, "notes": found.notes,
    }  # fmt: skip


def _kept_batch(found: Plan) -> tuple[list[dict[str, Any]], dict[tuple[str, Any], str]]:
    """The accumulation as a knob that follows from the micro-batch, and the stated values that a kept global batch overrules."""
    from autotune.space.candidate import BATCH
    from autotune.space.parameter import LONG_RANGE

    micro, steps = BATCH
    space, stated, script = found.full_space, found.spec.space, found.workload.script
    if space.samples_per_rank is None or (script is not None and set(script.movable) < set(BATCH)):
        return [], {}
    kept = f"the global batch of {found.baseline.global_batch_size(found.setting.world_size)} is kept (--global-batch free lets it vary)"
    left = {
        micro: space[micro].all_values() if micro in space else (),
        steps: (found.baseline.gradient_accumulation_steps,),
    }
    follows = []
    if len(left[micro]) > 1:
        values = f"follows from the micro-batch, since {kept}"
        follows = [{"name": steps, "values": values, "n_values": len(left[micro]), "when": {}}]
        left[steps] = stated[steps].all_values() if steps in stated else ()
    named = [(name, value) for name in BATCH if name in stated for value in stated[name].all_values()[:LONG_RANGE]]
    return follows, {(name, value): kept for name, value in named if value not in left[name]}


def _machine(environment: dict[str, Any]) -> str:
    """What trials compute on; of devices their number, capability and memory, too."""
    if environment["accelerator"] == "cpu":
        return f"cpu: {environment['device_name']}"
    capability = f", capability {environment['capability']}" if environment["capability"] else ""
    memory = f", {environment['device_memory_bytes'] / 2**30:.1f} GiB each"
    return (
        f"{environment['accelerator']}: {environment['n_devices']} x {environment['device_name']}{capability}{memory}"
    )
