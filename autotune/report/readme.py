"""The README of a study's folder: small, committable, without a path of this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

from autotune.report.data import Data, StudyReport, gain, interval, measured, metric_scale, speedup, title, words
from autotune.scoring.metrics import METRICS
from autotune.system.units import format_bytes, format_count, format_duration


def render(report: StudyReport) -> str:
    """The study as Markdown."""
    blocks = [
        f"# {_plain(report.name)}",
        _lead(report),
        *_answer(report),
        "## The front",
        _front(report),
        "## The picks",
        *_picks(report),
        "## Using it",
        *_use(report),
        "## Reproducing it",
        f"```\n{reproduce(report)}\n```",
        f"Measured with {_plain(_versions(report.environment))}{_threads(report)}.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def study_note(report: StudyReport, link: Callable[[str], str]) -> str:
    """The answer for Optuna's dashboard: the recommendation against the baseline, and every pick's JSON in one click.

    Args:
        report: The study.
        link: Address of a pick's JSON.
    """
    rows = []
    for name, pick in report.picks.items():
        factor = speedup_words(pick)
        rows.append([f"[{title(name)}]({link(name)})", str(pick["trial"]), _code(words(pick["candidate"])), factor])
    picks = (
        _table(["download the JSON", "trial", "configuration", "throughput over the baseline's"], rows, numeric=[1])
        if rows
        else ""
    )
    recommended, caveats = report.picks.get("recommended"), report.caveats()
    blocks = [
        _lead(report),
        *_answer(report),
        picks,
        f"Trial {recommended['trial']} in figures:"
        if recommended
        else "",  # tables that follow each other are shown as one
        _metrics_table(report, recommended) if recommended else "",
        _bullets("Why:", (recommended or {}).get("reasons")),
        _bullets("Besides the JSON it takes:", (recommended or {}).get("script_side_changes"), plain=False),
        _bullets("What to know:", caveats),
    ]
    return "\n\n".join(block for block in blocks if block)


def trial_note(report: StudyReport, row: Data, link: str) -> str:
    """One trial for Optuna's dashboard: its configuration, what it yielded, how it failed.

    Args:
        report: The study.
        row: The trial, as the report has it.
        link: Address of its JSON.
    """
    point, marks = report.points().get(row["trial"], row), report.marks().get(row["trial"], [])
    head = _code(words(row["candidate"])) + (f" **{', '.join(marks)}**" if marks else "")
    ended = ""
    if row["outcome"] != "complete":
        phase = f" in phase {_plain(row['phase'])}" if row.get("phase") not in (None, "", "done") else ""
        reason = f": {_plain(str(row['reason'])[:500])}" if row.get("reason") else ""
        ended = f"**{str(row['outcome']).replace('_', ' ')}**{phase}{reason}"
    blocks = [
        head,
        ended,
        _metrics_table(report, point) if measured(point) else "",
        _bullets("What to know:", row.get("caveats")),
        f"[Download its ds_config.json]({link})",
    ]
    return "\n\n".join(block for block in blocks if block)


def _metrics_table(report: StudyReport, point: Data) -> str:
    """Every metric with its unit and interval, beside the baseline's."""
    same = report.baseline is not None and report.baseline["trial"] == point["trial"]
    base = None if same else report.comparable(point)
    rows = []
    for name in report.metric_names():
        value, reference = measured(point).get(name), measured(base).get(name) if base else None
        if value is None:
            continue
        scale = metric_scale(name, [value, *([reference] if reference is not None else [])])
        low, high = interval(point, name, value)
        change = gain(name, value, reference) if reference is not None else None
        rows.append([
            METRICS[name].label, scale.quantity(value),
            scale.interval(low, high, " to ") if scale.number(low) != scale.number(high) else "",
            *([scale.quantity(reference) if reference is not None else "", _changed(change)] if base else []),
        ])  # fmt: skip
    header = ["metric", f"trial {point['trial']}", "95 % interval", *(["baseline", "change"] if base else [])]
    return _table(header, rows, numeric=range(1, len(header)))


def _changed(change: tuple[float, bool] | None) -> str:
    return "" if change is None else f"{change[0]:.2f}x {'better' if change[1] else 'worse'}"


def _bullets(heading: str, items: Sequence[str] | None, *, plain: bool = True) -> str:
    return (
        "\n".join([heading, "", *(f"- {_plain(item) if plain else _marked(item)}" for item in items)]) if items else ""
    )


def reproduce(report: StudyReport) -> str:
    """The command that runs the study again."""
    return shlex.join(["autotune", "run", f"studies/{report.name}/study.yaml"])


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


def _lead(report: StudyReport) -> str:
    labels = [METRICS[name].label for name in report.metric_names(all_metrics=False)]
    n, wall = report.study.get("n_trials", len(report.trials)), report.study.get("wall_s")
    took = f" in {format_duration(wall)}" if wall else ""
    return f"{_plain(subject(report))}, tuned for {_and(labels)} on {_plain(machine(report))}: {n} trials{took}."


def _answer(report: StudyReport) -> list[str]:
    pick = report.picks.get("recommended")
    if pick is None:
        return [f"**Nothing to recommend**: {_plain(report.why_nothing)}."]
    found = f"**Recommended: trial {pick['trial']}**, {_code(words(pick['candidate']))}"
    if report.baseline is not None and pick["trial"] == report.baseline["trial"]:
        return [f"{found}, the baseline itself: nothing that was tried is measurably better."]
    factor = speedup_words(pick)
    why = "did not run" if report.baseline is None else "cannot be compared with it"
    said = (
        f": {factor} the baseline's throughput" if factor else f". The baseline {why}, so there is no speed-up to state"
    )
    return [f"{found}{said}."]


def speedup_words(pick: Data) -> str:
    """The speed-up with its interval: `2.31x (2.20 to 2.43)`; empty if the baseline did not run."""
    if pick.get("speedup") is None:
        return ""
    interval = pick.get("speedup_ci95")
    return f"{pick['speedup']:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _front(report: StudyReport) -> str:
    names = report.metric_names(all_metrics=False)
    points = report.table()
    scales = {name: metric_scale(name, (measured(point).get(name, 0.0) for point in points)) for name in names}
    header = [
        "trial",
        "configuration",
        *(f"{METRICS[name].label} ({scales[name].unit})" for name in names),
        "speed-up",
        "",
    ]
    rows = []
    for point in points:
        values, factor = measured(point), speedup(report, point)
        cells = [scales[name].number(values[name]) if name in values else "" for name in names]
        marks = ", ".join(report.marks().get(point["trial"], ()))
        rows.append(
            [str(point["trial"]), _code(words(point["candidate"])), *cells, f"{factor:.2f}x" if factor else "", marks]
        )
    if not rows:
        return "No configuration completed."
    legend = (
        "A configuration reads micro-batch x accumulation, precision, ZeRO stage, then what else differs from the"
        " defaults;"
        " speed-up is throughput over the baseline's."
    )
    return _table(header, rows, numeric=range(2, 3 + len(names))) + "\n\n" + legend


def _picks(report: StudyReport) -> list[str]:
    blocks = []
    for names, pick in report.picks_by_trial():
        same = report.baseline is not None and pick["trial"] == report.baseline["trial"]
        factor = "the baseline itself" if same else speedup_words(pick)
        head = (
            f"**{', '.join(title(name) for name in names).capitalize()}** (trial {pick['trial']}):"
            f" {_code(words(pick['candidate']))}" + (f", {factor}" if factor else "")
        )
        lines = [*(_plain(reason) for reason in pick.get("reasons") or ())]
        blocks.append("\n".join([head, "", *(f"- {line}" for line in lines)]))
        changes = pick.get("script_side_changes") or ()
        if changes:
            blocks.append(
                "\n".join(["Besides the JSON it takes:", "", *(f"- {_marked(change)}" for change in changes)])
            )
    return blocks


def _use(report: StudyReport) -> list[str]:
    if "recommended" not in report.picks:
        return []
    name = shlex.quote(report.name)
    others = [
        pick
        for pick in report.picks
        if pick != "recommended" and report.picks[pick]["trial"] != report.picks["recommended"]["trial"]
    ]
    other = f"Another pick: `autotune export {name} --pick {others[0]}`. " if others else ""
    caveats = report.caveats()
    return [
        "`ds_config.json` is the recommended configuration, complete: `deepspeed.initialize(...,"
        ' config="ds_config.json")`.',
        f"```\nautotune export {name} --format accelerate -o accelerate.yaml   # Accelerate\n"
        f"autotune export {name} --format hf-args                          # flags for transformers' Trainer\n"
        + (
            f"autotune export {name} --format command                          # the whole command line\n"
            if report.invocation
            else ""
        )
        + "```",
        other + "All of them, with intervals and reasons, are in `recommended.json`; the front is in `front.json`.",
        "\n".join(["What to know:", "", *(f"- {_plain(caveat)}" for caveat in caveats)]) if caveats else "",
    ]


def _threads(report: StudyReport) -> str:
    """On a CPU another launcher may give a rank another number of threads, which is another speed."""
    threads = report.study.get("threads_per_rank")
    return f", OMP_NUM_THREADS={threads}" if threads else ""


def _versions(environment: Data) -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in (environment.get("versions") or {}).items())
        or "unknown versions"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Iterable[int]) -> str:
    right = set(numeric)
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]
    )


def _code(text: str) -> str:
    """Text as code; a backtick in it would end that."""
    return "`" + text.replace("`", "'") + "`"


def _marked(text: str) -> str:
    """Text whose own backticks are code; nothing else in it means anything to Markdown or HTML."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([<\[])", r"\\\1", part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    """Text in which Markdown and HTML find nothing to act on, on one line."""
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", " ".join(str(text).split()))


def _and(labels: Sequence[str]) -> str:
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)
