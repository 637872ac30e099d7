"""The report of a study as one HTML page: the answer, the front, every trial. It needs no network and makes no request."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from autotune import __version__, files
from autotune.objective import METRICS
from autotune.report import (
    PICK_NOTES,
    Data,
    StudyReport,
    differences,
    gain,
    interval,
    measured,
    plots,
    sections,
    table,
    title,
    units,
    words,
)
from autotune.report.elements import Html, breakable, each, el, group, with_code
from autotune.report.plots import said
from autotune.report.quality import quality
from autotune.report.readme import machine, reproduce, subject

SCRIPTS = ("canvas.js", "page.js")
# What the page says elsewhere, or what is nobody's business but that of programs.
HIDDEN = ("name", "target", "wall s", "folder", "stored as")


def write(report: StudyReport, path: Path) -> None:
    """Writes the page, whole or not at all."""
    files.write_text(path, render(report), sync=False)


def render(report: StudyReport) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    folder = resources.files("autotune.report")
    scripts = [get_plotlyjs(), *((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    data = plots.data(report)
    shown = {
        "answer": ("Answer", _answer(report)),
        "picks": (None, _picks(report)),
        "front": ("Front", sections.front(report)),
        "knobs": ("Knobs", sections.knob(report)),
        "progress": ("Search", sections.progress(report)),
        "all": ("Trials", table.trials(report)),
        "steps": ("Steps", sections.step() if data["steps"] else None),
        "losses": ("Losses", sections.loss() if data["losses"] else None),
        "quality": ("Quality", quality(report)),
        "forecasts": ("Forecasts", sections.forecast(data["forecasts"]) if data["forecasts"] else None),
        "facts": ("Environment", _facts(report)),
    }
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{report.name}: autotune report"),
        el("style", Html((folder / "page.css").read_text(encoding="utf-8"))),
    )
    body = el(
        "body",
        _top(report, {anchor: label for anchor, (label, section) in shown.items() if label and section}),
        el("main", each(section for _, section in shown.values() if section), _footer()),
        el("script", Html(_json(data)), type="application/json", id="data"),
        *(el("script", Html(script)) for script in scripts),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _policy(scripts: Iterable[str]) -> str:
    """Only our two scripts run, and nothing is fetched: what slipped through the escaping could still do nothing."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _top(report: StudyReport, links: Mapping[str, str]) -> Html:
    n, wall = report.study.get("n_trials", len(report.trials)), report.study.get("wall_s")
    took = units.duration(wall or 0.0).replace(" ", "\u00a0")
    what = f"{subject(report)} on {machine(report)}. {n} trials{f' in {took}' if wall else ''}."
    return el(
        "header",
        el("h1", report.name),
        el("p", what, class_="muted"),
        el("nav", each(el("a", label, href=f"#{anchor}") for anchor, label in links.items()), aria_label="Sections"),
        class_="top",
    )


def _footer() -> Html:
    return el("footer", f"Made by autotune {__version__}. This page is one file and makes no request.")


def _answer(report: StudyReport) -> Html:
    pick = report.picks.get("recommended")
    if pick is None:
        ends = ", ".join(f"{n} {outcome}" for outcome, n in table.outcomes(report).items())
        left = el(
            "div",
            el("p", f"Nothing to recommend: {report.why_nothing}.", class_="verdict"),
            el("p", ends),
            _caveats(report),
        )
        return el("section", left, class_="card answer", id="answer")
    names = next(names for names, found in report.picks_by_trial() if "recommended" in names)
    also = ", ".join(title(name) for name in names if name != "recommended")
    left = el(
        "div",
        el("p", el("b", "Recommended"), f": trial {pick['trial']}{f', also {also}' if also else ''}", class_="eyebrow"),
        _verdict(report, pick),
        _knobs(report, pick),
        _values(report, pick),
        _list("Why", pick.get("reasons")),
        _caveats(report),
    )
    right = el(
        "div",
        _json_block("json-recommended", pick["ds_config"]),
        _list("Changes in the script, besides the JSON", pick.get("script_side_changes")),
    )
    return el("section", left, right, class_="card answer", id="answer")


def _verdict(report: StudyReport, pick: Data) -> Html:
    if report.baseline is not None and pick["trial"] == report.baseline["trial"]:
        return el("p", "Keep your configuration: nothing that was tried is measurably better.", class_="verdict")
    if pick.get("speedup") is None:
        return el("p", "The baseline did not run, so there is no speed-up to state.", class_="verdict")
    factor, ends = f"{pick['speedup']:.2f}×", pick.get("speedup_ci95")
    span = (
        el("p", f"95 % interval of the throughput {ends[0]:.2f}× to {ends[1]:.2f}×", class_="muted") if ends else None
    )
    gained = _best_gain(report, pick)
    if pick["speedup"] < 1 and gained:
        return group(el("p", f"{gained}, at {factor} the baseline’s throughput", class_="verdict"), span)
    return group(el("p", factor, el("small", "the baseline’s throughput"), class_="big"), span)


def _best_gain(report: StudyReport, pick: Data) -> str | None:
    """The objective that a pick improves most, in words."""
    own, base = measured(pick), measured(report.comparable(pick) or {})
    found = [
        (gain(name, own[name], base[name]), name)
        for name in report.metric_names(all_metrics=False)
        if name in own and name in base
    ]
    better = [(change[0], name) for change, name in found if change and change[1]]
    return (
        "{1} {0:.2f}× better".format(*(max(better)[0], METRICS[max(better)[1]].label.capitalize())) if better else None
    )


def _values(report: StudyReport, pick: Data, *, all_metrics: bool = True) -> Html:
    """The metrics of a pick beside the baseline's."""
    base = (
        report.comparable(pick) if report.baseline is not None and report.baseline["trial"] != pick["trial"] else None
    )
    names = [name for name in report.metric_names(all_metrics=all_metrics) if name in measured(pick)]
    head = ["", *(["baseline"] if base else []), f"trial {pick['trial']}", *(["change"] if base else [])]
    return el(
        "table",
        el("thead", el("tr", each(el("th", label, scope="col") for label in head))),
        el("tbody", each(_value_row(name, pick, base) for name in names)),
        class_="values",
    )


def _value_row(name: str, pick: Data, base: Data | None) -> Html:
    own, reference = measured(pick)[name], measured(base).get(name) if base else None
    scale = units.scale(name, [own, *([reference] if reference is not None else [])])
    cells = [_value(scale, point, name) for point in ([base, pick] if base else [pick])]
    if base:
        cells.append(_change(gain(name, own, reference) if reference is not None else None))
    return el("tr", el("th", METRICS[name].label, el("small", scale.unit), scope="row"), *cells)


def _change(change: tuple[float, bool] | None) -> Html:
    if change is None:
        return el("td")
    factor = f"{change[0]:.2f}×"
    if factor == "1.00×":
        return el("td", "equal", class_="muted")
    return el("td", factor, el("small", "better" if change[1] else "worse"), class_="better" if change[1] else "muted")


def _value(scale: units.Scale, point: Data, name: str) -> Html:
    value = measured(point).get(name)
    if value is None:
        return el("td")
    low, high = interval(point, name, value)
    wide = scale.number(low) != scale.number(high)
    return el("td", scale.number(value), el("small", scale.interval(low, high)) if wide else None)


def _picks(report: StudyReport) -> Html | None:
    found = report.picks_by_trial()
    others = [(names, pick) for names, pick in found if "recommended" not in names]
    if not others:
        return None
    ends = [end for _, pick in found for end in (pick.get("speedup_ci95") or [pick.get("speedup")]) if end is not None]
    reach = (min([1.0, *ends]) - 0.05, max([1.0, *ends]) + 0.05)
    note = (
        "For whoever weighs the objectives differently. The bar is the speed-up with its 95 % interval; the tick is the baseline."
        if ends
        else "For whoever weighs the objectives differently."
    )
    return group(
        el("h2", "Other picks", id="picks"),
        el("p", note, class_="note"),
        el("div", each(_pick(report, names, pick, reach) for names, pick in others), class_="picks"),
    )


def _pick(report: StudyReport, names: Sequence[str], pick: Data, reach: tuple[float, float]) -> Html:
    same = report.baseline is not None and pick["trial"] == report.baseline["trial"]
    factor, ends = (None, None) if same else (pick.get("speedup"), pick.get("speedup_ci95"))
    whys = "; ".join(PICK_NOTES[name] for name in names if name in PICK_NOTES)
    return el(
        "article",
        el("h3", ", ".join(title(name) for name in names)),
        el("p", f"trial {pick['trial']}{f': {whys}' if whys else ''}", class_="muted"),
        el("p", "the baseline itself", class_="factor") if same else None,
        el("p", f"{factor:.2f}× ", el("small", f"{ends[0]:.2f}× to {ends[1]:.2f}×") if ends else None, class_="factor")
        if factor
        else None,
        _bar(factor, ends or (factor, factor), reach) if factor else None,
        _knobs(report, pick),
        _values(report, pick, all_metrics=False),
        el(
            "details",
            el("summary", "JSON, reasons, changes in the script"),
            _list("Why", pick.get("reasons")),
            _list("Changes in the script, besides the JSON", pick.get("script_side_changes")),
            _json_block(f"json-{pick['trial']}", pick["ds_config"]),
        ),
        class_="card pick",
    )


def _knobs(report: StudyReport, pick: Data) -> Html:
    """A pick in a few words, and what it changes, knob by knob."""
    changed = differences(pick["candidate"], report.baseline) if report.baseline is not None else []
    knobs = (
        el("li", f"{name.rsplit('.', 1)[-1]} ", el("s", f"{said(before)} → "), said(after))
        for name, before, after in changed
    )
    return group(
        el("p", breakable(words(pick["candidate"])), class_="config"),
        el("ul", each(knobs), class_="knobs") if changed else None,
    )


def _bar(factor: float, ends: Sequence[float], reach: tuple[float, float]) -> Html:
    low, high = reach

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.1f}%"

    return el(
        "div",
        el("i", style=f"left:{place(ends[0])};right:calc(100% - {place(ends[1])})"),
        el("u", style=f"left:{place(1.0)}"),
        el("b", style=f"left:{place(factor)}"),
        class_="bar",
        aria_hidden="true",
    )


def _list(heading: str, items: Sequence[str] | None) -> Html | None:
    if not items:
        return None
    return group(el("h3", heading), el("ul", each(el("li", with_code(str(item))) for item in items), class_="plain"))


def _caveats(report: StudyReport) -> Html | None:
    return _list("What to know", report.caveats())


def _json_block(name: str, config: Data) -> Html:
    return el(
        "div",
        el("h3", "ds_config.json"),
        _copy_button(name),
        el("pre", json.dumps(config, indent=2), id=name, tabindex=0),
        class_="json",
    )


def _copy_button(name: str) -> Html:
    return el("button", "Copy", class_="copy", type="button", data_copy=name)


def _facts(report: StudyReport) -> Html:
    cards = {
        "Machine": _machine_facts(report.environment),
        "Workload": _workload_facts(report),
        "Study": _study_facts(report),
        "Versions": report.environment.get("versions") or {},
    }
    return group(
        el("h2", "Environment", id="facts"),
        el(
            "div",
            each(
                el("div", el("h3", heading), _definitions(found), class_="card")
                for heading, found in cards.items()
                if found
            ),
            class_="facts",
        ),
        el("h2", "Reproduce it"),
        el("div", el("pre", reproduce(report), id="again", tabindex=0), _copy_button("again"), class_="command"),
    )


def _machine_facts(environment: Data) -> dict[str, Any]:
    memory = environment.get("device_memory_bytes")
    return {
        "device": environment.get("device_name"),
        "devices": environment.get("n_devices"),
        "memory of one": units.memory(memory) if memory else None,
        "accelerator": environment.get("accelerator"),
        "processor cores": environment.get("n_cores"),
        "bf16": environment.get("bf16"),
        "fp16": environment.get("fp16"),
    }


def _workload_facts(report: StudyReport) -> dict[str, Any]:
    workload = report.workload
    if not workload:
        return {}
    blocks = workload.get("n_blocks")
    return {
        "target": PurePath(str(report.study.get("target", ""))).name,
        "parameters": f"{workload['n_parameters']:,}",
        "trainable": f"{workload['n_trainable']:,}",
        "samples": f"{workload['n_samples']:,}" if workload.get("n_samples") else "no end",
        "repeated blocks": f"{blocks} × {workload['block_class']}, {workload['block_share']:.0%} of the parameters"
        if blocks
        else "none",
        "optimizer": "the target's own" if workload.get("client_optimizer") else "from the JSON",
    }


def _study_facts(report: StudyReport) -> dict[str, Any]:
    study = report.study
    said = {
        name.replace("_", " ").removeprefix("n "): value
        for name, value in study.items()
        if isinstance(value, str | int | float)
    }
    own = {
        "objectives": ", ".join(METRICS[name].label for name in report.metric_names(all_metrics=False)),
        "wall time": units.duration(study["wall_s"]) if study.get("wall_s") else None,
    }
    return {name: value for name, value in said.items() if name not in HIDDEN and value != ""} | own


def _definitions(found: Data) -> Html:
    return el(
        "dl", each(group(el("dt", name), el("dd", said(value))) for name, value in found.items() if value is not None)
    )
