"""A study as Markdown: the README of its folder, without paths of this machine, and notes for Optuna's dashboard."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from autotune.report import attempts, tables
from autotune.report.data import Data, StudyReport, measured, title, titles, words
from autotune.report.gains import NO_SPEEDUP, pick_words
from autotune.report.next_steps import next_steps, reproduce
from autotune.report.started import CONFIG_PARAMETERS, started
from autotune.report.trial_notes import end_words
from autotune.scoring.metrics import METRICS
from autotune.scoring.reasons import kept
from autotune.system.units import format_bytes, format_count, format_duration
from autotune.trial.command import EXPORTED_CONFIG

if TYPE_CHECKING:
    from optuna.study import Study

LEGEND = """A configuration reads micro-batch x accumulation, precision, ZeRO stage, then what else differs from the \
defaults; speed-up is throughput over the baseline's."""
# Of a trial in optuna-dashboard.
LONGEST_NOTE_CHARS = 2000


def render(report: StudyReport) -> str:
    """The study as Markdown."""
    return _joined([
        f"# {_plain(report.name)}",
        _lead(report),
        _answer(report),
        _front(report),
        *_chosen(report),
        "## Reproducing it",
        f"```\n{reproduce(report)}\n```",
        f"Measured {measured_on(report)}with {_plain(_versions(report))}.",
    ]) + "\n"  # fmt: skip


def _chosen(report: StudyReport) -> list[str]:
    """The picks and how the recommended one is used; without picks what there is to know, and what to do next."""
    if not report.picks:
        return [_bullets("What to know:", report.caveats()), _bullets("What to do next:", next_steps(report))]
    picks = [_pick(report, names, pick) for names, pick in report.picks_by_trial()]
    return ["## The picks", *picks, "## Using it", *_use(report)]


def study_note(report: StudyReport, link: Callable[[str], str] | None) -> str:
    """The answer for Optuna's dashboard: the recommendation against the baseline, and every pick's JSON in one click.

    Args:
        link: Address of a pick's JSON; None where nothing serves it.
    """
    rows = [
        [
            f"[{title(name)}]({link(name)})" if link else title(name),
            str(pick["trial"]),
            _code(words(pick["candidate"])),
            pick_words(report, [name], pick),
        ]
        for name, pick in report.picks.items()
    ]
    head = ["download the JSON" if link else "pick", "trial", "configuration", "against the baseline"]
    recommended = report.picks.get("recommended")
    figures = [  # between two tables, which would be shown as one
        f"Trial {recommended['trial']} in figures:",
        _metrics_table(report, recommended),
        *_reasons(recommended),
    ] if recommended else []  # fmt: skip
    picks = _table(head, rows, numeric=[1]) if rows else ""
    know = [*report.caveats(), *attempts.lines(report)]
    steps = _bullets("What to do next:", next_steps(report))
    return _joined([_lead(report), _answer(report), picks, *figures, steps, _bullets("What to know:", know)])


def trial_note(report: StudyReport, row: Data, link: str) -> str:
    """One trial for Optuna's dashboard: its configuration, what it yielded, how it failed; `link` leads to its JSON, if any."""
    marks, (end, why) = report.mark(row["trial"]), end_words(row)
    return _joined([
        _code(words(row["candidate"])) + (f" **{', '.join(marks)}**" if marks else ""),
        "" if row["outcome"] == "complete" else f"**{end}**" + (f": {_plain(why)}" if why else ""),
        _metrics_table(report, row) if measured(row) else "",
        _bullets("What to know:", row.get("caveats")),
        f"[Download its ds_config.json]({link})" if link else "",
    ])  # fmt: skip


def _joined(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block)


def _metrics_table(report: StudyReport, point: Data) -> str:
    """Every metric with its unit and interval, beside the baseline's."""
    found = tables.compared(report, point, report.metric_names())
    base = any(each.reference is not None for each in found)
    rows = []
    for each in found:
        cells = [
            each.label,
            each.scale.quantity(each.value),
            each.scale.interval(*each.ends, " to ") if each.ends else "",
        ]
        if base:
            change = each.change.words() if each.change else ""
            cells += ["" if each.reference is None else each.scale.quantity(each.reference), change]
        rows.append(cells)
    header = ["metric", f"trial {point['trial']}", "95 % interval", *(["baseline", "change"] if base else [])]
    return _table(header, rows, numeric=range(1, len(header)))


def _bullets(heading: str, items: Sequence[str] | None) -> str:
    lines = [f"- {_plain(item)}" for item in items or ()]
    return "\n".join([heading, "", *lines]) if lines else ""


def _reasons(pick: Data, heading: str = "Why:") -> list[str]:
    changes = pick.get("script_side_changes")
    return [_bullets(heading, pick.get("reasons")), _bullets("Besides the JSON it takes:", changes)]


def subject(report: StudyReport) -> str:
    """What was tuned: the target and its model."""
    target = PurePath(str(report.study.get("target", ""))).name
    workload = report.workload
    parts = []
    if workload.get("n_parameters"):
        parts.append(f"{format_count(workload['n_parameters'])} parameters")
    if workload.get("n_blocks"):
        parts.append(f"{workload['n_blocks']} x {workload['block_class']}")
    return f"{target} ({', '.join(parts)})" if parts else target


def machine(report: StudyReport) -> str:
    """Where it was measured: ranks, device, memory."""
    environment, ranks = report.environment, report.world_size
    found = [f"{ranks} rank{'s' if ranks > 1 else ''}"]
    if environment.get("device_name"):
        devices = f"{environment['n_devices']} x " if environment.get("n_devices", 1) > 1 else ""
        found.append(
            f"{devices}{environment['device_name']} ({environment['accelerator']},"
            f" {format_bytes(environment['device_memory_bytes'])})"
        )
    if environment.get("n_cores"):
        found.append(f"{environment['n_cores']} cores")
    return ", ".join(found)


def extent(report: StudyReport) -> str:
    """How many trials there were, and the wall time of the study, kept on one line: `10 trials in 1 min 44 s`."""
    n, wall_s = report.study.get("n_trials", len(report.trials)), report.study.get("wall_s")
    took = format_duration(wall_s or 0.0).replace(" ", "\u00a0")
    return f"{n} trial{'s' * (n != 1)}" + (f" in {took}" if wall_s else "")


def measured_on(report: StudyReport) -> str:
    """The day, or the days, on which the trials ended: `on 2026-11-23 `; empty if that is not known."""
    first, last = report.study.get("measured_on") or ("", "")
    return f"{f'on {first}' if first == last else f'from {first} to {last}'} " if first else ""


def recommended_words(report: StudyReport) -> str:
    """What the recommended configuration gains; empty where there is none."""
    pick = report.picks.get("recommended")
    return pick_words(report, ["recommended"], pick) if pick else ""


def _lead(report: StudyReport) -> str:
    labels = [METRICS[name].label for name in report.objectives]
    goal = f"the goal `{report.study['goal']}`: " if report.study.get("goal") else ""
    took = extent(report).replace("\u00a0", " ")
    return f"{_plain(subject(report))}, tuned for {goal}{_and(labels)} on {_plain(machine(report))}: {took}."


def _answer(report: StudyReport) -> str:
    pick = report.picks.get("recommended")
    if pick is None:
        return f"**Nothing to recommend**: {_plain(report.why_nothing)}."
    found = f"**Recommended: trial {pick['trial']}**, {_code(words(pick['candidate']))}"
    if report.is_baseline(pick):
        return f"{found}, the baseline itself: {kept(len(report.points))}."
    said = pick_words(report, report.picked_for(pick), pick)
    return f"{found}. {no_speedup_words(report, said)}" if NO_SPEEDUP in said else f"{found}: {said}."


def no_speedup_words(report: StudyReport, said: str) -> str:
    """Why a pick of which `NO_SPEEDUP` is said has none, as a sentence, and what else is."""
    why = "did not complete" if report.baseline is None else "cannot be compared with it"
    return f"The baseline {why}, so there is {said.replace(', ', '; ', 1)}."


def _front(report: StudyReport) -> str:
    """The section with the front; empty where nothing can be shown, of which the answer says why."""
    header, rows = tables.listed(report)
    if not rows:
        return ""
    lines = [[trial, _code(configuration), *others] for trial, configuration, *others in rows]
    shown = _table(header, lines, numeric=range(2, len(header) - 1))
    return _joined(["## The front, the picks and the baseline", shown, LEGEND])


def _pick(report: StudyReport, names: Sequence[str], pick: Data) -> str:
    said, head = pick_words(report, names, pick), titles(names)
    head = f"**{head[0].upper()}{head[1:]}** (trial {pick['trial']}): {_code(words(pick['candidate']))}, {said}"
    why, changes = _reasons(pick, head)
    return _joined([why or head, changes])


def _use(report: StudyReport) -> list[str]:
    name, own = shlex.quote(report.name), report.picks["recommended"]["trial"]
    others = [pick for pick, found in report.picks.items() if found["trial"] != own]
    other = f"Another pick: `autotune export {name} --pick {others[0]}`. " if others else ""
    begun, yaml = started(report), "accelerate.yaml"
    yaml = begun.free_name(yaml) if begun is not None else yaml
    formats = {f"accelerate -o {yaml}": "Accelerate", "hf-args": "flags for transformers' Trainer"}
    if begun is not None:
        formats = {form: what for form, what in formats.items() if begun.reads(form.partition(" ")[0])}
        formats |= {"command": "the whole command line"}
    lines = [f"autotune export {name} --format {form:<30}# {what}" for form, what in formats.items()]
    use = (CONFIG_PARAMETERS.get(begun.family) if begun else None) or '`deepspeed.initialize(..., config="{}")`'
    return [
        f"`{EXPORTED_CONFIG}` is the recommended configuration, complete: {use.format(EXPORTED_CONFIG)}.",
        "\n".join(["```", *lines, "```"]),
        other + "All of them, with intervals and reasons, are in `recommended.json`; the front is in `front.json`.",
        _bullets("What to know:", report.caveats()),
    ]


def _versions(report: StudyReport) -> str:
    """The versions of the libraries, and the threads of a rank on a CPU, where another number is another speed."""
    versions, threads = report.environment.get("versions") or {}, report.study.get("threads_per_rank")
    found = ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown versions"
    return f"{found}, OMP_NUM_THREADS={threads}" if threads else found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Iterable[int]) -> str:
    right = set(numeric)
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]
    )


def _code(text: str) -> str:
    """Text as code; a backtick in it would end that."""
    return "`" + text.replace("`", "'") + "`"


def _plain(text: str) -> str:
    """Text on one line, in which what stands in backticks is code, and Markdown and HTML find nothing else to act on."""
    parts = re.split(r"(`[^`]+`)", " ".join(str(text).split()))
    return "".join(part if i % 2 else re.sub(r"([\\`*<>|\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def _and(labels: Sequence[str]) -> str:
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)


def store_notes(study: Study, report: StudyReport) -> None:
    """Store what optuna-dashboard shows of a study, and of each trial."""
    from autotune.study.storage import notes

    # Without links, as plain optuna-dashboard does not serve the JSON.
    trials = {row["trial"]: trial_note(report, row, "")[:LONGEST_NOTE_CHARS] for row in report.trials}
    notes.write_notes(study, study_note(report, None), trials)
