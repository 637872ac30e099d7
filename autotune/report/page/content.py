"""The report's texts and tables as plain data, for the templates."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from autotune.report import attempts, samples, series, tables
from autotune.report.data import THROUGHPUT, Data, StudyReport, differences, times, title, titles, words
from autotune.report.figures import LEAST_EXPLAINED
from autotune.report.gains import NO_SPEEDUP, Change, pick_words, stated
from autotune.report.next_steps import next_steps, reproduce
from autotune.report.readme import extent, machine, measured_on, no_speedup_words, subject
from autotune.report.series import level_text
from autotune.report.trial_notes import counted, end_words
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.effects import Effect, Effects
from autotune.scoring.metrics import METRICS
from autotune.scoring.reasons import kept
from autotune.scoring.recommend import PICKS
from autotune.system.units import Scale, format_bytes, format_duration

Context = dict[str, Any]
PICK_NOTES = {
    "recommended": "the best by the objectives",
    "drop_in": "keeps the baseline's global batch and numerics",
    "lowest_latency": "the shortest optimizer step",
    "highest_throughput": "the most samples per second",
    "fastest_convergence": "the soonest at any target, by goodput",
    "lowest_memory": "the least memory at its peak",
    "out_of_reach": "the best of what only a trial can run",
}
# Fields of the study that the page lists; others stand elsewhere, or only programs need them.
STUDY_FIELDS = ("ranks", "nodes", "data_parallel", "goal", "n_trials", "threads_per_rank", "quick", "ended")
# Cards and rows beyond these are in the JSON only.
MOST_GATED, MOST_KNOBS, MOST_LEVELS = 8, 8, 6
# Least widths of the table's columns; the configuration's is the style sheet's, as it depends on the screen.
TRIAL_REM, OUTCOME_REM, SPEEDUP_REM, METRIC_REM, LONG_METRIC_REM, WALL_REM = 3.8, 9.0, 6.0, 5.9, 7.6, 3.8
LONG_LABEL = 20
LOSS_WORDS = {"loss": "loss", "difference": "difference to the baseline's"}


def page(report: StudyReport, drawn: Mapping[str, Any]) -> Context:
    """Everything that the template of the report shows; `drawn` are the figures by plot and choice."""
    labels = {name: METRICS[name].label for name in report.metric_names()}

    def parts(plot: str, i: int = 0) -> dict[str, str]:
        return {key.split("|")[i]: key.split("|")[i] for key in drawn.get(plot, ())}

    knobs = series.knobs(report)
    day = f", measured {found}" if (found := measured_on(report).strip()) else ""
    return {
        "name": report.name,
        "lead": f"{subject(report)} on {machine(report)}. {extent(report)}{day}.",
        "next_steps": next_steps(report),
        "left_out": _left_out(report),
        "answer": _answer(report),
        "picks": _picks(report),
        "choices": {
            "front": {key: " × ".join(labels[name] for name in key.split("|")) for key in drawn.get("front-plot", ())},
            "parallel": {key: labels[key] for key in drawn.get("parallel", ())},
            "progress": {key: labels.get(key, "compromise of the objectives") for key in parts("progress-plot")},
            "loss": {key: LOSS_WORDS[key] for key in parts("loss-plot")},
            "loss_across": parts("loss-plot", 1),
            "quality": {key: f"trial {key}" for key in parts("quality-plot")},
            "forecast": {key: labels[key] for key in drawn.get("forecast-plot", ())},
        },
        "knobs": {
            short: [level_text(level) for level in knobs[name]] for name, short in series.short_names(knobs).items()
        },
        "effects": [_effects(found) for found in report.effects],
        "table": _table(report),
        "has_runs": bool(report.runs),
        "gate": _gate(report) if any(trial.get("gate") for trial in report.trials) else None,
        "samples": samples.notes(report),
        "forecasts": [_forecast_note(name, points) for name, points in series.forecasts(report).items()],
        "attempts": {"heads": attempts.HEADS, "rows": attempts.rows(report), "lost": attempts.lost(report)},
        "facts": {heading: found for heading, found in _facts(report).items() if found},
        "reproduce": reproduce(report),
    }


def _answer(report: StudyReport) -> Context:
    pick, caveats = report.picks.get("recommended"), report.caveats()
    if pick is None:
        return {"pick": None, "why_nothing": report.why_nothing, "ends": counted(report.outcomes), "caveats": caveats}
    names, metrics = report.picked_for(pick), report.metric_names()
    said, text = pick_words(report, names, pick), ""
    if report.is_baseline(pick):
        text = f"Keep your configuration: {kept(len(report.points))}."
    elif NO_SPEEDUP in said:
        text = no_speedup_words(report, said)
    return {
        "pick": _pick(report, pick, metrics),
        "also": ", ".join(title(name) for name in names if name != "recommended"),
        "text": text,
        "stated": stated(report, names, pick),
        "caveats": caveats,
    }


def _pick(report: StudyReport, pick: Data, metrics: Sequence[str]) -> Context:
    """A pick with its configuration, its changes, its metrics beside the baseline's, and its JSON."""
    changed = differences(pick["candidate"], report.baseline["candidate"]) if report.baseline is not None else []
    short = series.short_names(name for name, _, _ in changed)
    return {
        "trial": pick["trial"],
        "configuration": words(pick["candidate"]),
        "changes": [(short[name], level_text(old), level_text(new)) for name, old, new in changed],
        "metrics": _values(report, pick, metrics),
        "json": json.dumps(pick["ds_config"], indent=2),
        "reasons": pick.get("reasons") or (),
        "script_side_changes": pick.get("script_side_changes") or (),
    }


def _values(report: StudyReport, pick: Data, metrics: Sequence[str]) -> Context:
    """The metrics of a pick beside the baseline's, with change."""
    found = tables.compared(report, pick, metrics)
    base, rows = any(each.reference is not None for each in found), []
    for each in found:
        cells = [_cell(each.scale.number(each.value), each.scale.interval(*each.ends) if each.ends else "")]
        if base:
            known, ends = each.reference, each.reference_ends
            before = "" if known is None else each.scale.number(known)
            cells = [_cell(before, each.scale.interval(*ends) if ends else ""), *cells, _change(each.change)]
        rows.append({"label": each.label, "unit": each.scale.unit, "cells": cells})
    head = ["", *(["baseline"] if base else []), f"trial {pick['trial']}", *(["change"] if base else [])]
    return {"head": head, "rows": rows}


def _cell(text: str, small: str = "", kind: str = "") -> Context:
    return {"text": text, "small": small, "kind": kind}


def _change(change: Change | None) -> Context:
    if change is None:
        return _cell("")
    text, _, how = change.words("×").partition(" ")
    return _cell(text, how, "better" if change.better and change.told else "muted")


def _picks(report: StudyReport) -> list[Context]:
    """The picks beside the recommended one, each with the place of its speed-up on a common bar."""
    found = report.picks_by_trial()
    ends = [end for _, pick in found for end in (pick.get("speedup_ci95") or [pick.get("speedup")]) if end is not None]
    low, high = min([1.0, *ends]) - 0.05, max([1.0, *ends]) + 0.05
    cards = []
    for names, pick in found:
        if "recommended" in names:
            continue
        said, bare = stated(report, names, pick), report.is_baseline(pick)
        speedup = pick["speedup"] if said.metric == METRICS[THROUGHPUT].label and not bare else None
        marks = (*(pick.get("speedup_ci95") or (speedup, speedup)), 1.0, speedup) if speedup else ()
        card = {
            "title": titles(names),
            "text": pick_words(report, names, pick) if bare or not said.metric else "",
            "stated": said,
            "why": "; ".join(PICK_NOTES[name] for name in names if name in PICK_NOTES),
            "bar": [f"{100 * (value - low) / (high - low):.1f}%" for value in marks],
        }
        own_metrics = [PICKS[name] for name in names if name in PICKS]  # of which the goal may know nothing
        cards.append(_pick(report, pick, list(dict.fromkeys([*report.objectives, *own_metrics]))) | card)
    return cards


def _effects(found: Effects) -> Context:
    """A card on what the knobs do to one metric."""
    shown = [effect for effect in found.knobs if effect.share >= 0.01][:MOST_KNOBS]
    names = series.effect_names(shown)
    note = f"{found.n} trials; {found.explained:.0%} of the spread of trials left out is predicted."
    note += " The rest is chance or interplay."
    if found.explained < LEAST_EXPLAINED:
        note = f"{found.n} trials do not tell: the effects of the knobs in some of them do not hold in the others."
        shown = []
    return {
        "label": METRICS[found.metric].label,
        "note": note,
        "knobs": [_effect(found.metric, each, names[each.knobs]) for each in shown],
    }


def _effect(metric: str, effect: Effect, name: str) -> Context:
    smaller = METRICS[metric].direction == "minimize"
    reference, *others = effect.levels
    others = sorted(others, key=lambda level: level.factor if smaller else -level.factor)[:MOST_LEVELS]
    changes = (f"{level.factor - 1:+.0%}".replace("-0%", "±0%").replace("+0%", "±0%") for level in others)
    worth = (f"{level_text(level.value)} {change}" for level, change in zip(others, changes, strict=True))
    return {
        "knob": name,
        "share": f"{effect.share:.0%}",
        "width": f"{min(100.0, 100 * effect.share):.1f}%",
        "levels": f"beside {level_text(reference.value)}: {', '.join(worth)}",
    }


def _left_out(report: StudyReport) -> str:
    """The trials that the front leaves out, in words; empty if it has all that measured something."""
    ends = Counter(end_words(point)[0] for number, point in report.points.items() if number not in report.compared)
    said = ", ".join(f"{n} {'over a constraint' if end == 'complete' else end}" for end, n in ends.items())
    return f"Left out, since nothing compares with them: {said}." if said else ""


def _table(report: StudyReport) -> Context:
    """Every trial with its configuration, its end, its metrics and why it failed."""
    scales = tables.scales_of(list(report.points.values()), report.metric_names())
    heads = [("trial", "", "n"), ("speed-up", "", "n"), ("configuration", "", ""), ("outcome", "", "")]
    heads += [(METRICS[name].label, scale.unit, "n") for name, scale in scales.items()]
    rows = [_row(report, trial, scales) for trial in report.trials]
    return {
        "ends": counted(report.outcomes),
        "heads": [*heads, ("wall", "s", "n")],
        "rows": rows,
        "style": _columns(scales),
    }


def _columns(names: Iterable[str]) -> str:
    """The widths of the columns, the same in every row, so that rows out of sight need no layout."""
    metrics = [LONG_METRIC_REM if len(METRICS[name].label) > LONG_LABEL else METRIC_REM for name in names]
    least = TRIAL_REM + OUTCOME_REM + SPEEDUP_REM + sum(metrics) + WALL_REM
    shares = " ".join(f"minmax({width}rem, 1fr)" for width in metrics)
    columns = (
        f"{TRIAL_REM}rem {SPEEDUP_REM}rem minmax(var(--config), 4fr) minmax({OUTCOME_REM}rem, 2fr) {shares}"
        f" {WALL_REM}rem"
    )
    return f"--columns: {columns}; --least: calc(var(--config) + {least:.1f}rem)"


def _row(report: StudyReport, trial: Data, scales: dict[str, Scale]) -> Context:
    row = tables.row(report, trial, scales)
    picked = set(report.marks.get(row.trial, ())) - {"baseline"}
    wall_s, (outcome, why) = trial.get("wall_s"), end_words(trial)
    numbers = []
    for name in scales:
        text, guessed = row.cells.get(name, ""), bool(row.cells.get(name)) and name in (trial.get("censored") or ())
        numbers.append((f"~{text}" if guessed else text, str(row.values.get(name, "")), guessed))
    numbers.append(("", "", False) if wall_s is None else (f"{wall_s:.1f}", str(wall_s), False))
    return {
        "trial": row.trial,
        "speedup": (times(row.speedup, "×"), f"{row.speedup:.6f}" if row.speedup else ""),
        "complete": trial["outcome"] == "complete",
        "bare": not row.cells,
        "configuration": row.configuration,
        "marks": [(mark, mark in picked) for mark in row.marks],
        "outcome": outcome,
        "why": "; ".join(text for text in (why, *(trial.get("caveats") or ())) if text),
        "numbers": numbers,
    }


def gated(report: StudyReport) -> list[Data]:
    """The trials that the quality gate looked at, the refused ones first, then the recommended one."""
    marks = report.marks
    checked = [trial for trial in report.trials if trial.get("gate")]
    checked.sort(
        key=lambda one: (one["gate"]["passed"] is True, "recommended" not in marks.get(one["trial"], []), one["trial"])
    )
    return [trial for trial in checked if len(trial["gate"]["losses"] or trial["losses"]) > 1][:MOST_GATED] or checked[
        :MOST_GATED
    ]


def _gate(report: StudyReport) -> Context:
    """What the quality gate said of each trial."""
    checked = [trial for trial in report.trials if trial.get("gate")]
    n_refused = sum(trial["gate"]["passed"] is False for trial in checked)
    return {"n_checked": len(checked), "n_refused": n_refused, "said": [_gate_said(trial) for trial in gated(report)]}


def _gate_said(trial: Data) -> Context:
    found = GateVerdict(**trial["gate"])
    verdict = {True: "no difference seen", False: "refused: diverged", None: "not decided"}[found.passed]
    return {
        "title": f"trial {trial['trial']}: {verdict}",
        "configuration": words(trial["candidate"]),
        "reason": found.reason or found.compared,
    }


def _forecast_note(name: str, points: Sequence[series.ForecastPoint]) -> str:
    errors = [abs(point.measured / point.value - 1) for point in points if point.value > 0]
    held = sum(point.low <= point.measured <= point.high for point in points)
    typical = f"half of the forecasts were within {statistics.median(errors):.0%}; " if errors else ""
    return f"{METRICS[name].label}: {typical}{held} of {len(points)} intervals held what was measured"


def _facts(report: StudyReport) -> dict[str, dict[str, Any]]:
    """Machine, workload, study and versions, each as names and values."""
    environment, study = report.environment, report.study
    memory_bytes = environment.get("device_memory_bytes")
    machine_facts = {
        "device": environment.get("device_name"),
        "devices": environment.get("n_devices"),
        "memory of one": format_bytes(memory_bytes) if memory_bytes else None,
        "accelerator": environment.get("accelerator"),
        "processor cores": environment.get("n_cores"),
        "bf16": environment.get("bf16"),
        "fp16": environment.get("fp16"),
    }
    stated = {name: study[name] for name in STUDY_FIELDS if study.get(name, "") != ""}
    shown = {name.replace("_", " ").removeprefix("n "): value for name, value in stated.items()}
    limit_bytes = study.get("device_memory_bytes")
    own = {
        "memory limit": format_bytes(limit_bytes) if limit_bytes else None,
        "objectives": ", ".join(METRICS[name].label for name in report.objectives),
        "wall time": format_duration(study["wall_s"]) if study.get("wall_s") else None,
    }
    versions = dict(environment.get("versions") or {})
    return {"Machine": machine_facts, "Workload": _workload(report), "Study": shown | own, "Versions": versions}


def _workload(report: StudyReport) -> dict[str, Any]:
    workload = report.workload
    n = workload.get("n_blocks")
    blocks = f"{n} × {workload['block_class']}, {workload['block_share']:.0%} of the parameters" if n else "none"
    return {
        "target": PurePath(str(report.study.get("target", ""))).name,
        "parameters": f"{workload['n_parameters']:,}",
        "trainable": f"{workload['n_trainable']:,}",
        "samples": f"{workload['n_samples']:,}" if workload.get("n_samples") else "not known",
        "repeated blocks": blocks,
        "optimizer": "the target's own" if workload.get("client_optimizer") else "from the JSON",
    }
