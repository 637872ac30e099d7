"""The table of all trials, which the page's script sorts and filters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autotune.objective import METRICS
from autotune.report import Data, StudyReport, measured, plots, speedup, units, words
from autotune.report.elements import Html, breakable, controls, each, el, section

# Least widths of the columns in rem; the configuration's is the style sheet's, as it depends on the screen.
TRIAL, OUTCOME, SPEEDUP, METRIC, WALL = 4.4, 9.6, 5.6, 6.1, 4.4
# A metric with a longer name than this many letters takes more.
LETTERS, LONG_METRIC = 20, 8.4


def outcomes(report: StudyReport) -> dict[str, int]:
    """How many trials ended how."""
    found: dict[str, int] = {}
    for one in report.trials:
        outcome = str(one["outcome"]).replace("_", " ")
        found[outcome] = found.get(outcome, 0) + 1
    return found


def _columns(names: Iterable[str]) -> str:
    """The widths of the columns, the same in every row: a row that is not seen need not be laid out to know them."""
    metrics = [LONG_METRIC if len(METRICS[name].label) > LETTERS else METRIC for name in names]
    least = TRIAL + OUTCOME + SPEEDUP + sum(metrics) + WALL
    shares = " ".join(f"minmax({width}rem, 1fr)" for width in metrics)
    columns = f"{TRIAL}rem minmax(var(--config), 4fr) minmax({OUTCOME}rem, 2fr) {SPEEDUP}rem {shares} {WALL}rem"
    return f"--columns: {columns}; --least: calc(var(--config) + {least:.1f}rem)"


def trials(report: StudyReport) -> Html:
    """Every trial with its configuration, its end, what it measured and why it failed."""
    points, marks, scales = report.points(), report.marks(), plots.scales(report)
    heads = [("trial", "", "n"), ("configuration", "", None), ("outcome", "", None), ("speed-up", "", "n")]
    heads += [(METRICS[name].label, scale.unit, "n") for name, scale in scales.items()]
    heads += [("wall", "s", "n")]
    header = each(
        el("th", el("button", label, el("br") if unit else None, unit, type="button"), scope="col", class_=kind)
        for label, unit, kind in heads
    )
    rows = each(
        _row(report, one, points.get(one["trial"], one), scales, marks.get(one["trial"], [])) for one in report.trials
    )
    ends = ", ".join(f"{n} {outcome}" for outcome, n in outcomes(report).items())
    note = (
        f"{ends}. A configuration reads micro-batch x accumulation, precision, ZeRO stage, then what else differs from the defaults."
        " Trials that were measured again show those values; ~ is extrapolated."
    )
    table = el(
        "table", el("thead", el("tr", header)), el("tbody", rows), class_="trials", id="trials", style=_columns(scales)
    )
    return section(
        "Trials",
        "all",
        note,
        controls(
            el("label", "Filter ", el("input", type="search", id="filter", placeholder="bf16 complete")),
            el("span", class_="muted", id="filtered", role="status"),
        ),
        el("div", table, class_="scroll", tabindex=0, role="region", aria_label="Trials"),
    )


def _row(report: StudyReport, one: Data, point: Data, scales: Mapping[str, units.Scale], marks: Sequence[str]) -> Html:
    complete = one["outcome"] == "complete"
    tags = each(el("span", mark, class_="mark base" if mark == "baseline" else "mark") for mark in marks)
    values, wall = measured(point), one.get("wall_s")
    factor = speedup(report, point) if values else None
    return el(
        "tr",
        el("th", str(one["trial"]), scope="row", data_v=one["trial"]),
        el("td", breakable(words(one["candidate"])), el("br") if marks else None, tags, class_="config"),
        el("td", el("span", str(one["outcome"]).replace("_", " ")), el("small", _why(one)), class_="outcome"),
        el("td", f"{factor:.2f}×" if factor else "", class_="n", data_v=f"{factor:.6f}" if factor else ""),
        *(
            _number(values.get(name), scale, extrapolated=name in (one.get("censored") or ()))
            for name, scale in scales.items()
        ),
        el("td", f"{wall:.1f}" if wall is not None else "", class_="n", data_v="" if wall is None else wall),
        class_="complete" if complete else "failed",
    )


def _number(value: float | None, scale: units.Scale, *, extrapolated: bool) -> Html:
    if value is None:
        return el("td", class_="n", data_v="")
    return el(
        "td",
        f"{'~' if extrapolated else ''}{scale.number(value)}",
        class_="n",
        data_v=value,
        title="extrapolated" if extrapolated else None,
    )


def _why(one: Data) -> str:
    complete = one["outcome"] == "complete"
    phase = f" (in {one['phase']})" if one.get("phase") not in (None, "", "done") and not complete else ""
    reason = f"{one['reason']}{phase}" if one.get("reason") else ""
    limits = ["breaks a constraint"] if one.get("feasible") is False and complete else []
    return "; ".join(text for text in [reason, *limits, *(one.get("caveats") or ())] if text)
