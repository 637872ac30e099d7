"""What the commands do: call the layers below, print what they return."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from autotune import UserError, claims, experience, files, fingerprint, launch, masking, slots, spec, store, watching
from autotune.analysis.scaling import Mode
from autotune.candidate import nearest
from autotune.console import ProgressView, viewer
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.invocation import check_templates
from autotune.journal import Journal
from autotune.lock import Terminated, run_under_way, status_of, study_lock
from autotune.plan import Plan, executor_for, plan, profiled, shown, studies_folder
from autotune.projection import Cluster, Question
from autotune.report import StudyReport, summary
from autotune.search import SAMPLERS, check_sampler
from autotune.spec import StudySpec
from autotune.study import Runner
from autotune.trial import Outcome, TrialDir, TrialRequest, TrialResult

STUDIES = Path("studies")
# What is over sooner shows no progress.
QUICK_S = 1.0
TOKEN_VARIABLE = "AUTOTUNE_DASHBOARD_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a run of a study came to.

    Attributes:
        report: What the study found so far; None where the user stopped it before a trial ended.
        written: The files that say so.
        stopped: How the user stopped it, if so.
    """

    report: StudyReport | None
    written: Sequence[Path] = ()
    stopped: KeyboardInterrupt | None = None


def run(target: str, overrides: Mapping[str, Any], *, fresh: bool, as_json: bool, learn: bool = True) -> int:
    """`autotune run`: tunes the target and writes what was found.

    Returns:
        Exit status: 0 a configuration can be recommended, 1 none can, 130 the user stopped it, 143 SIGTERM did.
    """
    tuned = tune(target, overrides, fresh=fresh, learn=learn)
    if tuned.report is None:
        print("autotune: stopped before the first trial ended; nothing to keep", file=sys.stderr)
        assert tuned.stopped is not None
        return status_of(tuned.stopped)
    _print_answer(tuned.report, [shown(path) for path in tuned.written], as_json=as_json)
    if tuned.stopped is not None:
        again = shlex.join(
            ["autotune", *masking.masked([argument for argument in sys.argv[1:] if argument != "--fresh"])]
        )
        print(f"autotune: stopped; this is the best so far. To go on, run: {again}", file=sys.stderr)
        return status_of(tuned.stopped)
    if not tuned.report.recommended["picks"]:
        print(f"autotune: {tuned.report.why_nothing}, so there is nothing to recommend", file=sys.stderr)
        return 1
    return 0


def tune(target: str, overrides: Mapping[str, Any], *, fresh: bool, learn: bool, show: bool = True) -> Tuned:
    """Runs a study to the end of its budget, or until the user stops it, and writes what was found.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command.
        overrides: Fields of `StudySpec` that go before those of the file; None where nothing is said.
        fresh: Forget the study's earlier trials.
        learn: Start from what related studies found.
        show: Tell the terminal how far it is; else nothing is printed.

    Raises:
        UserError: The study cannot be run, and why.
    """
    try:
        wanted, notes = wanted_study(target, overrides, show=show)
    except KeyboardInterrupt as stop:  # while a launch command ran, of which nothing is left
        return Tuned(report=None, stopped=stop)
    check_sampler(wanted.sampler)
    studies = studies_folder(Path(target))
    folder = studies / wanted.name
    url = wanted.storage or store.default_url(studies)
    interrupted: KeyboardInterrupt | None = None
    storage = store.open_storage(url)  # what is wrong with it is said before seconds of imports
    storage.keeps = True
    with (
        viewer(show) as view,
        terminable(),
        store.failing_in_words(url),
        study_lock(folder),
        contextlib.ExitStack() as stack,
    ):
        ledger = claims.Ledger(storage, wanted.name)
        stack.enter_context(ledger.leading(view.say))
        view.doing(f"study {wanted.name}: importing torch and DeepSpeed once")
        try:
            with executor_for(wanted, folder, view.waits) as executor:
                found = plan(wanted, executor, folder)
                watched = Journal(view, folder)
                watched.doing("profiling the model and the machine, once")
                found = profiled(found, executor, folder, view.waiting)
                if fresh:
                    _forget(wanted.name, url, folder, executor)
                at_once = stack.enter_context(slots.opened(found, executor, folder, view.say))
                runner = Runner(found, executor, folder, ledger, watched, at_once)
                runner.open()
                _keep_spec(wanted, Path(target), folder)
                for note in (*notes, *found.notes):
                    watched.say(note)
                experience.attach(runner, learn=learn)
                runner.run()
        except KeyboardInterrupt as stop:
            interrupted = stop
    with store.failing_in_words(url):
        there = wanted.name in store.study_names(
            storage
        )  # asked of what is open: also where the file was removed meanwhile
        if interrupted is not None and not there:
            return Tuned(report=None, stopped=interrupted)
        report = summary.load(wanted.name, url, folder)
        written = summary.write(report, folder)
        if report.study["stored_as"] == wanted.name:
            experience.keep_recommendation(store.open_storage(url), wanted.name, 0, report.recommended)
    return Tuned(report=report, written=written, stopped=interrupted)


def wanted_study(target: str, overrides: Mapping[str, Any], *, show: bool = True) -> tuple[StudySpec, list[str]]:
    """The study that a TARGET means, whether file or launch command, and what to say about it; `show` as for `tune`."""
    stated = spec.stated_command(target, overrides)
    if stated is None:
        return StudySpec.of(Path(target), overrides), []
    command, folder = stated
    if overrides.get("script_args"):
        command = f"{command} {shlex.join(overrides['script_args'])}"
    check_templates([command], f"`{command}`")
    with viewer(show) as view, terminable():
        view.doing("running your command up to its training script, once")
        invocation, notes = launch.capture(command, folder, view.tick)
    overrides = {**overrides, "script_args": None, "command": command}
    return StudySpec.of_command(invocation, overrides, Path(target) if os.path.exists(target) else None), notes


def check(target: str, overrides: Mapping[str, Any], *, as_json: bool) -> int:
    """`autotune check`: loads the target, runs two real steps of the baseline, and says what would be tuned.

    Returns:
        Exit status: 0 the baseline runs, 1 it does not.
    """
    wanted, notes = wanted_study(target, overrides)
    around = (
        studies_folder(Path(target)) if wanted.runs_elsewhere else None
    )  # other machines see no temporary files of this one
    if around is not None:
        around.mkdir(parents=True, exist_ok=True)
    folder = Path(
        tempfile.mkdtemp(prefix=".check-" if around else "autotune-check-", dir=around)
    )  # kept if something fails: logs tell why
    with ProgressView() as view, terminable():
        view.doing(f"loading {shown(wanted.target)}")
        with executor_for(wanted, folder, view.waits) as executor:
            found = plan(wanted, executor, folder)
            found.notes[:0] = notes
            view.doing("running two steps of the baseline")
            request = TrialRequest(
                target=str(wanted.target), candidate=found.baseline.values(), ds_config=found.ds_config(found.baseline),
                world_size=found.world_size, nodes=wanted.nodes_for(found.world_size), seed=wanted.seed,
                max_steps=2, budget_s=0.0, deadline_s=wanted.trial_deadline_s,
                device_memory_bytes=wanted.device_memory_bytes, script=found.script(found.baseline),
            )  # fmt: skip
            with executor.turn(view.waiting):
                result = base.run(executor, folder / "trials" / "check", request, view.tick)
    if result.outcome is Outcome.COMPLETE:
        shutil.rmtree(folder, ignore_errors=True)
    data = check_data(found, result, TrialDir(folder / "trials" / "check").log(result.failed_rank or 0))
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        print_check(data, Console(highlight=False, soft_wrap=True, markup=False))
    return 0 if result.outcome is Outcome.COMPLETE else 1


def print_check(data: Mapping[str, Any], console: Console) -> None:
    """Prints what `check` found."""
    workload = data["workload"]
    trainable = (
        "" if workload["n_trainable"] == workload["n_parameters"] else f" ({workload['n_trainable']:,} trainable)"
    )
    console.print(f"model      {workload['n_parameters']:,} parameters{trainable}")
    if workload["script"]:
        _print_start(data["invocation"], console)
        _print_script(workload["script"], console)
    samples = f"{workload['n_samples']:,} samples" if workload["n_samples"] is not None else "no fixed size"
    console.print(f"data       {samples}")
    if workload["n_blocks"]:
        share = f"{workload['block_share']:.0%} of the parameters"
        console.print(
            f"blocks     {workload['n_blocks']} x {workload['block_class']}, {share}: their activations can be recomputed"
        )
    environment = workload["environment"]
    console.print(f"machine    {environment['accelerator']}: {environment['device_name']}; {data['ranks']} rank(s)")
    console.print(f"baseline   {data['baseline']['description']}: {data['baseline']['outcome']}", end="")
    if data["baseline"]["peak_memory_bytes"]:
        console.print(f", {data['baseline']['peak_memory_bytes'] / 2**20:,.0f} MiB at the peak of two steps", end="")
    console.print(f"; {data['baseline']['reason']}" if data["baseline"]["reason"] else "")
    if data["baseline"]["log"]:
        console.print(f"           see {data['baseline']['log']}")
    about = "" if data["exact"] else "about "
    console.print(
        f"\n{about}{data['n_legal']:,} candidates can run here, of {data['n_candidates']:,} in the space. Tuned:\n"
    )
    knobs = [knob for knob in data["knobs"] if knob["n_values"] > 1]
    width = max(len(knob["name"]) for knob in knobs)
    for knob in knobs:
        console.print(f"  {knob['name']:<{width}}  {knob['values']}{_condition(knob['when'])}")
    if data["not_proposed"]:
        console.print("\nNot proposed here:")
        values: dict[tuple[str, str], list[str]] = {}
        for item in data["not_proposed"]:
            values.setdefault((item["knob"], item["reason"]), []).append(str(item["value"]))
        for (knob, reason), dead in values.items():
            console.print(f"  {knob} {', '.join(dead)}: {reason.removeprefix(f'{knob}: ')}")
    for note in data["notes"]:
        console.print(f"\nNote: {note}")


def _print_start(invocation: Mapping[str, Any], console: Console) -> None:
    """Prints what a launch command starts."""
    if not invocation["command"]:
        return
    what = f"-m {invocation['module']}" if invocation["module"] else str(shown(Path(invocation["script"])))
    console.print(f"starts     {shlex.join([what, *invocation['arguments']])}")
    names = ", ".join(invocation["environment"])
    ranks = f"{invocation['world_size']} rank(s)" if invocation["world_size"] else "no launcher"
    console.print(
        f"           {ranks}; in {shown(Path(invocation['working_dir']))}" + (f"; with {names}" if names else "")
    )


def _print_script(script: Mapping[str, Any], console: Console) -> None:
    """Prints what a probe of a training script found."""
    backward = "loss.backward()" if script["plain_backward"] else "engine.backward(loss)"
    batch = f"micro-batch {script['micro_batch_size']}, accumulation {script['gradient_accumulation_steps']}"
    console.print(f"script     {script['family']}, {backward}; {batch}")
    console.print(f"can move   {', '.join(script['movable']) or 'neither micro-batch nor accumulation'}")
    for change in script["moved_by"]:
        console.print(f"           {change}")


def _condition(when: Mapping[str, Sequence[Any]]) -> str:
    """The condition of a knob in words."""
    terms = [
        f"{name} is {' or '.join('default' if value is None else str(value) for value in values)}"
        for name, values in when.items()
    ]
    return f"   when {', '.join(terms)}" if terms else ""


def check_data(found: Plan, result: TrialResult, log: Path) -> dict[str, Any]:
    """What `check` found, for programs."""
    from dataclasses import asdict

    n_legal, exact = found.space.count_legal(found.baseline, found.setting)
    dead = found.full_space.dead_values(found.baseline, found.setting)
    return {
        "target": str(shown(found.spec.target)),
        "ranks": found.world_size,
        "workload": asdict(found.workload),
        "invocation": asdict(found.spec.how().shown) if found.workload.script else None,
        "baseline": {
            "candidate": found.baseline.values(),
            "description": found.baseline.describe(),
            "ds_config": found.ds_config(found.baseline),
            "outcome": str(result.outcome),
            "reason": result.reason,
            "log": None if result.outcome is Outcome.COMPLETE else str(log),
            "peak_memory_bytes": result.peak_memory_bytes,
            "memory_by_phase_bytes": result.memory_by_phase_bytes,
        },
        "n_candidates": found.full_space.size(found.baseline),
        "n_legal": n_legal,
        "exact": exact,
        "knobs": [
            {
                "name": p.name,
                "values": p.describe(),
                "n_values": len(p.all_values()),
                "when": {k: list(v) for k, v in p.when.items()},
            }
            for p in found.space.parameters
        ],
        "not_proposed": [
            {"knob": knob, "value": "default" if value is None else value, "reason": reason}
            for (knob, value), reason in dead.items()
        ],
        "notes": found.notes,
    }


def init(folder: Path) -> None:
    """`autotune init`: writes the two files of a first study.

    Raises:
        UserError: One of them is there already.
    """
    templates = Path(__file__).parent / "_templates"
    names = ("model.py", "study.yaml")
    for name in names:
        if (folder / name).exists():
            raise UserError(f"{folder / name} exists; name another folder: autotune init FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        files.write_text(folder / name, (templates / name).read_text())
        print(f"wrote {folder / name}")
    print(f"Next: autotune check {folder / 'study.yaml'}, then autotune run {folder / 'study.yaml'}")


def ls(what: str, storage: str | None, *, as_json: bool) -> None:
    """`autotune ls`: lists what there is of a kind.

    Raises:
        UserError: There is no such kind.
    """
    rows: list[tuple[str, ...]]
    match what:
        case "spaces" | "objectives":
            kind: spec.Kind = "search_spaces" if what == "spaces" else "objectives"
            rows = [(name, spec.preset_summary(path)) for name, path in spec.presets(kind).items()]
        case "samplers":
            rows = list(SAMPLERS.items())
        case "metrics":
            rows = [(name, f"{label}, {unit}, {direction}") for name, unit, direction, label in summary.metric_rows()]
        case "studies":
            url = storage or store.default_url(STUDIES)
            rows = [(name,) for name in store.study_names(store.open_storage(url, create=False))]
        case _:
            known = ("spaces", "objectives", "samplers", "metrics", "studies")
            raise UserError(f"ls: unknown {what!r}.{nearest(what, known)} Known: {', '.join(known)}")
    if as_json:
        print(json.dumps([dict(zip(("name", "description"), row, strict=False)) for row in rows], indent=1))
        return
    width = max((len(row[0]) for row in rows), default=0)
    for row in rows:
        print(f"{row[0]:<{width}}  {row[1]}" if len(row) > 1 else row[0])


def cp(preset: str, file: Path) -> None:
    """`autotune cp`: copies a preset to a file of the user's.

    Raises:
        UserError: There is no such preset, or the file exists.
    """
    every = {**spec.presets("search_spaces"), **spec.presets("objectives")}
    if preset not in every:
        raise UserError(f"cp: unknown preset {preset!r}.{nearest(preset, every)} Known: {', '.join(every)}")
    if file.is_dir():
        file = file / f"{preset}.yaml"
    if file.exists():
        raise UserError(f"cp: {file} exists")
    try:
        files.write_text(file, every[preset].read_text())
    except OSError as error:
        raise UserError(f"cp: {files.words(error)}") from None
    flag = "--space" if preset in spec.presets("search_spaces") else "--objective"
    print(f"wrote {file}; use it with {flag} {file}")


def status(study: str | None, storage: str | None, *, once: bool, as_json: bool) -> int:
    """`autotune status`: how far a study is and what it has found; follows it, or the measuring of its scaling, while that runs.

    Returns:
        Exit status: 0, or 130 where the user stopped watching (143 by SIGTERM).
    """
    folder, url = locate(study or watching.only_running(STUDIES), storage)
    name, pid = folder.name, run_under_way(folder)
    scaled_by = run_under_way(folder / watching.SCALING) if pid is None and not (once or as_json) else None
    if scaled_by:
        stop = _watch("scaling", name, folder / watching.SCALING, scaled_by)
        if stop is not None:
            return status_of(stop)
        print(f"what it found: {shown(folder / 'scaling.html')}")
        return 0
    if pid and not (once or as_json):
        stop = _watch("study", name, folder, pid)
        if stop is not None:
            return status_of(stop)
        pid = None
    try:
        report = summary.load(name, url, folder)
    except store.StoreError:
        if pid is None:
            raise
        data = {"name": name, "n_trials": 0, "outcomes": {}, "running": 0, "process": pid}
        print(
            json.dumps(data, indent=1)
            if as_json
            else f"study {name}: process {pid} runs it now; no trial has ended yet"
        )
        return 0
    opened = store.open_storage(url, create=False)
    n_running = len(store.running(store.load_study(opened, name)))
    held = {lease.name: lease.owner.shown for lease in claims.leases(opened, name)}
    changed = fingerprint.lines(_changed(report, url))
    data = {**summary.status_data(report, n_running), "process": pid, "held": held, "changed": changed}
    if as_json:
        print(json.dumps(data, indent=1))
        return 0
    print(watching.lines(data))
    print("".join(f"{what}: {who}\n" for what, who in held.items()))
    _print_answer(report, [], as_json=False)
    if changed:
        print(
            "\n".join(
                [
                    "\nchanged since:",
                    *(f"  {line}" for line in changed),
                    f"is the answer still right? autotune retune {name}",
                ]
            )
        )
    return 0


def _watch(what: str, name: str, folder: Path, pid: int) -> KeyboardInterrupt | None:
    """Shows what a process shows until it ends; how the user stopped watching, if that came first."""
    with ProgressView() as view, terminable():
        view.say(f"{what} {name}, run by process {pid}; Ctrl-C ends the watching, not the {what}")
        try:
            watching.follow(folder, pid, view)
        except KeyboardInterrupt as stop:
            view.say(f"the {what} goes on")
            return stop
    return None


def _changed(report: StudyReport, url: str) -> list[fingerprint.Change]:
    """What of the study's circumstances is not as it was, as far as it shows at once."""
    kept = store.record(store.load_study(store.open_storage(url, create=False), report.study["stored_as"]))
    return (
        fingerprint.quick_changes(kept, (Path(report.study["folder"]) / kept.target).resolve())
        if kept is not None
        else []
    )


def explain(study: str, why_not: str | None, what_if: str | None, storage: str | None, *, as_json: bool) -> None:
    """`autotune explain`: the evidence for a study's answer in words."""
    from autotune.report import explain as explanations

    if why_not is not None and what_if is not None:
        raise UserError("explain: give --why-not or --what-if, not both")
    folder, url = locate(study, storage)
    report = summary.load(study, url, folder)
    evidence = explanations.Evidence(
        store.load_study(store.open_storage(url, create=False), report.study["stored_as"]), report
    )
    if why_not is not None:
        said = evidence.why_not(*explanations.read_setting(why_not))
    elif what_if is not None:
        said = evidence.what_if(*explanations.read_setting(what_if))
    else:
        said = evidence.choice()
    print(json.dumps(said.to_data(), indent=1) if as_json else "\n".join(said.lines()))


def export(
    study: str, pick: str | None, number: int | None, form: str, output: Path | None, storage: str | None
) -> None:
    """`autotune export`: the configuration that a study found, in the form that a training takes."""
    if pick is not None and number is not None:
        raise UserError("export: give --pick or --trial, not both")
    folder, url = locate(study, storage)
    found = summary.export(summary.load(study, url, folder), pick, number, form)
    if output is None:
        print(found.text, end="" if found.text.endswith("\n") else "\n")
    else:
        found.write(output)
        print(f"wrote {output}", file=sys.stderr)
    for line in found.notes:
        print(f"note: {line}", file=sys.stderr)


def report(
    study: str,
    storage: str | None,
    output: Path | None,
    png: Path | None,
    *,
    open_it: bool,
    single_file: bool,
    as_json: bool,
) -> None:
    """`autotune report`: writes the page, JSON, CSV and PNG; or prints the JSON."""
    from autotune.report import takeaway

    folder, url = locate(study, storage)
    # Elsewhere than in a terminal a command that takes seconds has nothing to say before it is done.
    with viewer(sys.stderr.isatty(), after_s=QUICK_S) as view:
        view.doing(f"reading the trials of {study}")
        found = summary.load(study, url, folder)
        view.doing(f"working out the report of {len(found.trials)} trials")
        data = takeaway.as_data(found) if as_json else {}
        written = [] if as_json else takeaway.write(found, output or folder, single_file=single_file)
    if as_json:
        print(json.dumps(data, indent=1))
        return
    for path in written:
        print(f"wrote {shown(path)}")
    if png is not None:
        print("drawing the plots; takes some seconds", file=sys.stderr)
        for path in takeaway.draw(written[0], png):
            print(f"wrote {shown(path)}")
    if open_it:
        import webbrowser

        if not webbrowser.open(written[0].absolute().as_uri()):
            print(f"no browser could be started here; open {written[0].absolute().as_uri()}", file=sys.stderr)


def diagnose(study: str, number: int | None, storage: str | None, *, profile: bool, as_json: bool) -> None:
    """`autotune diagnose`: what a trial is bound by; with `profile` it is run again and traced."""
    from autotune import tracing
    from autotune.report import diagnosis

    folder, url = locate(study, storage)
    report = summary.load(study, url, folder)
    chosen = summary.pick_or_trial(report, None, number)
    row = next(row for row in report.trials if row["trial"] == chosen["trial"])
    if row["outcome"] != "complete":
        reason = f": {row['reason']}" if row["reason"] else ""
        raise UserError(
            f"diagnose: trial {row['trial']} did not complete ({row['outcome']}{reason}), so there is no step to take apart"
        )
    folder = Path(report.study["folder"])
    if profile:
        environment = report.invocation.fixed_environment if report.invocation else {}
        with ProgressView() as view, terminable():
            view.doing(f"running trial {row['trial']} again, {tracing.TRACED_STEPS} steps of it traced")
            tracing.run(folder, row["trial"], environment, view.waiting, view.tick)
    found = diagnosis.of_trial(report, folder, row["trial"])
    if as_json:
        print(json.dumps(diagnosis.as_data(report, found, folder), indent=1))
        return
    for line in (*diagnosis.lines(report, found), *diagnosis.trace_lines(folder, row["trial"], report.world_size)):
        print(line)


def scale(
    target: str, overrides: Mapping[str, Any], ranks: str, mode: Mode, rounds: int, png: Path | None, *, as_json: bool
) -> int:
    """`autotune scale`: measures a configuration on several numbers of ranks, in turns.

    Returns:
        Exit status: 0 all of them ran, 1 not.
    """
    from dataclasses import asdict

    from autotune import scale as measuring
    from autotune.analysis import scaling
    from autotune.report import scaling as page

    counts = measuring.rank_counts(ranks)
    wanted, notes = wanted_study(target, {**overrides, "ranks": max(counts)})
    folder = studies_folder(Path(target)) / wanted.name / watching.SCALING
    with (
        ProgressView() as view,
        terminable(),
        measuring.equal_threads(max(counts)) as threads,
        study_lock(folder, wanted.name),
    ):
        shutil.rmtree(folder / "trials", ignore_errors=True)
        watched = Journal(view, folder)
        watched.doing(f"scaling of {wanted.name}: importing torch and DeepSpeed once")
        with executor_for(wanted, folder, view.waits) as executor:
            found = plan(wanted, executor, folder)
            environment = found.workload.environment
            if environment.accelerator != "cpu" and environment.n_devices < max(counts):
                raise UserError(
                    f"scale: {max(counts)} ranks need as many devices; this machine has {environment.n_devices}"
                )
            notes += [*found.notes, *found.workload.caveats, *([threads] if environment.accelerator == "cpu" else [])]
            configurations = scaling.candidates(found.baseline, counts, mode)
            runs, failures = measuring.measure(found, executor, folder, configurations, rounds, watched)
    scales = scaling.scaling(runs, found.workload.n_samples)
    notes += failures
    if scales:
        page.write(scales, mode, wanted.name, notes, folder.parent / "scaling.html")
    if as_json:
        print(json.dumps({"mode": mode, "scales": [asdict(each) for each in scales], "notes": notes}, indent=1))
    elif scales:
        for line in page.lines(scales, mode):
            print(line)
        print(f"\nwrote {shown(folder.parent / 'scaling.html')}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if scales and png is not None:
        page.draw(folder.parent / "scaling.html", png)
    return 1 if failures or not scales else 0


def project(study: str | None, cluster: Cluster, question: Question, *, as_json: bool) -> int:
    """`autotune project`: a study's configurations on a larger cluster.

    Returns:
        Exit status: 0, or 1 where the configuration could not run there.
    """
    from autotune import projection

    found = projection.project(projection.study_folder(study, STUDIES.absolute()), cluster, question)
    print(json.dumps(found.to_data(), indent=1) if as_json else "\n".join(found.lines()))
    return 1 if found.rows[-1].impossible else 0


def dashboard(storage: str | None, host: str, port: int) -> None:
    """`autotune dashboard`: serves until Ctrl-C."""
    from autotune.report import dashboard as server

    token = os.environ.get(TOKEN_VARIABLE) or (None if server.is_loopback(host) else server.new_token())
    if token is not None and not server.is_strong(token):
        raise UserError(
            f"{TOKEN_VARIABLE}: at least {server.LEAST_TOKEN} letters, digits, '-', '_', '.' or '~' are needed; python -c"
            " 'import secrets; print(secrets.token_urlsafe(24))' makes one"
        )
    with server.make_server(storage or store.default_url(STUDIES), STUDIES.absolute(), host, port, token) as served:
        print(f"dashboard at {server.address(served, host, token)}", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr)
        if not server.is_loopback(host):
            print(f"Whoever has this address can read every study. {TOKEN_VARIABLE} sets the token.", file=sys.stderr)
            print(
                "The connection is not encrypted: in a network that you do not trust, keep to the loopback and use ssh -L.",
                file=sys.stderr,
            )
        with terminable(), contextlib.suppress(KeyboardInterrupt):
            served.serve_forever()


def doctor(*, build: bool, as_json: bool) -> int:
    """`autotune doctor`: what this machine has and what would fail; compiles DeepSpeed's ops once.

    Returns:
        Exit status: 0 trials can run, 1 they cannot.
    """
    from autotune import doctor as examination

    findings = examination.examine(build=build, on_step=lambda text: print(f"- {text}", file=sys.stderr))
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.verdict:<5} {finding.what:<{width}}  {finding.detail}")
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def locate(study: str, storage: str | None, studies: Path = STUDIES) -> tuple[Path, str]:
    """The folder of a study and its database: the one named, else what its study.yaml names, else the usual one.

    Args:
        study: Its name.
        storage: Its database, where the user names it.
        studies: Where the studies lie.

    Raises:
        UserError: Nothing can have that name.
    """
    with contextlib.suppress(ValueError):
        spec.check_name(study)
        url = storage or spec.stated_storage(studies / study / "study.yaml") or store.default_url(studies)
        return store.study_folder(study, studies.absolute(), url), url
    raise UserError(f"{study!r} cannot name a study; `autotune ls studies` lists them")


def _print_answer(report: StudyReport, written: Sequence[Path], *, as_json: bool) -> None:
    from autotune.report import console

    if as_json:
        print(json.dumps({**report.recommended, "front": list(report.front), "study": dict(report.study)}, indent=1))
    else:
        Console(highlight=False, soft_wrap=False).print(console.render_answer(report, [str(path) for path in written]))


def _forget(name: str, url: str, folder: Path, executor: Executor) -> None:
    """Removes a study's trials, from the database and from its folder."""
    store.delete_study(store.open_storage(url), name)
    for path in (folder / "trials").glob("[0-9]*"):
        base.forget(executor, path)


def _keep_spec(wanted: StudySpec, target: Path, folder: Path) -> None:
    """Writes the study as it was understood, unless the user's own file lies there."""
    file = folder / "study.yaml"
    if target.absolute() != file.absolute():
        files.write_text(file, wanted.to_yaml(folder))


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a study as Ctrl-C does: ranks stopped, what was told kept, the best so far printed."""

    def interrupt(*_: object) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # a library may be called from anywhere; signals go to the main thread
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
