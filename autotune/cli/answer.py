"""The commands that tell a study's findings: `explain`, `export`, `report`, `diagnose`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, Storage, StudyName, option, read_settings
from autotune.cli.terminal import fitted
from autotune.errors import UserError
from autotune.system.files import shown

if TYPE_CHECKING:
    from autotune.report.data import StudyReport

QUICK_S = 1.0  # a shorter command shows no progress


def explain(
    study: StudyName,
    why_not: Annotated[str | None, option("KEY=VALUE", "Why is nothing with that value recommended?")] = None,
    what_if: Annotated[
        list[str] | None,
        option("KEY=VALUE", "The recommendation with that changed; several times for several changes."),
    ] = None,
    storage: Storage = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Print the evidence for a study's answer."""
    from autotune.report.explain import Evidence
    from autotune.session import open_study
    from autotune.study.spec.yaml_file import read_setting

    if why_not is not None and what_if:
        raise UserError("explain: give --why-not or --what-if, not both")
    opened = open_study(study, storage)
    evidence = Evidence(opened.answer, opened.report)
    if why_not is not None:
        said = evidence.why_not(*read_setting(why_not))
    elif what_if:
        said = evidence.what_if(read_settings(what_if))
    else:
        said = evidence.choice()
    print(json.dumps(said.to_data(), indent=1) if as_json else fitted("\n".join(said.lines())))


def export(
    study: StudyName,
    pick: Annotated[str | None, option("NAME", "Which pick (default: recommended).")] = None,
    trial: Annotated[int | None, option("N", "This trial instead of a pick.")] = None,
    form: Annotated[str, option("FORMAT", "deepspeed, accelerate, hf-args or command.", "--format")] = "deepspeed",
    output: Annotated[Path | None, option("FILE", "Write to FILE.", "-o", "--output")] = None,
    storage: Storage = None,
) -> None:
    """Print or write a configuration of a study in the form that a training takes."""
    from autotune.report.export import export_pick
    from autotune.session import open_study

    if pick is not None and trial is not None:
        raise UserError("export: give --pick or --trial, not both")
    found = export_pick(open_study(study, storage).report, pick, trial, form, output)
    if output is None:
        print(found.text, end="" if found.text.endswith("\n") else "\n")
    else:
        found.write(output)
        print(f"wrote {output}", file=sys.stderr)
    for line in found.notes:
        print(f"note: {line}", file=sys.stderr)


def report(
    study: StudyName,
    output: Annotated[
        Path | None,
        option(
            "PATH",
            "Write into this folder, or the page alone as this .html (default: the study's folder).",
            "-o",
            "--output",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Only the page, no JSON and CSV beside it.")
    ] = False,
    png: Annotated[Path | None, option("FOLDER", "Draw the plots as PNG, too; takes an installed Chromium.")] = None,
    storage: Storage = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Write the page, JSON, CSV and PNG of a study's findings, or print the JSON."""
    from autotune.report.files import as_data, draw, write_report
    from autotune.report.progress import ProgressView
    from autotune.session import open_study
    from autotune.study.events import SILENT

    if as_json and (output is not None or png is not None or open_it or single_file):
        raise UserError("report: --json prints the JSON and writes no file; leave out the other options, or --json")
    opened = open_study(study, storage)
    # Outside a terminal a command of some seconds shows no progress.
    with ProgressView(after_s=QUICK_S) if sys.stderr.isatty() else contextlib.nullcontext(SILENT) as view:
        view.doing(f"reading the trials of {study}")
        found = opened.report
        view.doing(f"working out the report of {len(found.trials)} trials")
        data = as_data(found) if as_json else {}
        written = [] if as_json else write_report(found, output or opened.folder, single_file=single_file)
    if as_json:
        print(json.dumps(data, indent=1))
        return
    for path in written:
        print(f"wrote {shown(path)}")
    if png is not None:
        print("drawing the figures; takes some seconds", file=sys.stderr)
        for path in draw(found, png):
            print(f"wrote {shown(path)}")
    if open_it:
        import webbrowser

        if not webbrowser.open(written[0].absolute().as_uri()):
            print(f"no browser could be started here; open {written[0].absolute().as_uri()}", file=sys.stderr)


def diagnose(
    study: StudyName,
    trial: Annotated[int | None, option("N", "Which trial (default: the recommended one).")] = None,
    storage: Storage = None,
    *,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run it again and trace some steps; the trace is kept.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a trial is bound by; with `profile`, after running it again with a trace."""
    from autotune.report import diagnosis
    from autotune.report.export import pick_or_trial
    from autotune.report.progress import ProgressView
    from autotune.report.trial_notes import ended
    from autotune.session import open_study
    from autotune.study import tracing

    report = open_study(study, storage).report
    chosen = pick_or_trial(report, None, trial)
    row = next(row for row in report.trials if row["trial"] == chosen["trial"])
    if row["outcome"] != "complete":
        reason = f": {row['reason']}" if row["reason"] else ""
        end = f"trial {row['trial']} did not complete ({ended(row['outcome'])}{reason})"
        raise UserError(f"diagnose: {end}, so there is no step to take apart")
    folder = Path(report.study["stored_in"])
    if profile:
        environment = report.invocation.fixed_environment if report.invocation else {}
        with ProgressView() as view:
            view.doing(f"running trial {row['trial']} again, {tracing.TRACED_STEPS} steps of it traced")
            tracing.run(folder, row["trial"], environment, view.waiting, view.tick)
    found = diagnosis.of_trial(report, folder, row["trial"])
    if as_json:
        print(json.dumps(diagnosis.as_data(report, found, folder), indent=1))
        return
    traced = diagnosis.trace_lines(folder, row["trial"], report.world_size)
    print(fitted("\n".join([*diagnosis.lines(report, found), *traced])))


def print_answer(report: StudyReport, written: Sequence[Path], *, as_json: bool) -> None:
    """Print the recommendation and the front, and the files that state them."""
    from autotune.report import answer
    from autotune.report.console import AnswerConsole

    if as_json:
        print(json.dumps({**report.recommended, "front": list(report.front), "study": dict(report.study)}, indent=1))
    else:
        AnswerConsole(highlight=False, soft_wrap=False).print(
            answer.Answer(report, [str(path) for path in written]), crop=False
        )
