"""Figures of a study as plotly objects, for notebooks: the ones of the report's page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.errors import UserError, unknown
from autotune.report import figures, fronts, series
from autotune.report.data import StudyReport
from autotune.scoring.metrics import METRICS

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT_PX = 460
ACROSS = ("samples", "seconds", "steps")


def front(report: StudyReport, x: str | None, y: str | None) -> go.Figure:
    """The trials over two metrics, by default the first two; a `UserError` if they were not measured."""
    found = report.compared_metrics()
    across = x or next((name for name in found if name != y), "")
    up = y or next((name for name in found if name != across), "")
    for name in (x, y):
        _check("metric", name, found)
    if not across or not up or across == up:
        raise UserError(
            f"study {report.name!r}: the front needs two metrics; measured here: {', '.join(found) or 'none'}"
        )
    return _drawn(report, fronts.front(report, across, up))


def parallel(report: StudyReport, metric: str | None) -> go.Figure:
    """The trials through their knobs and objectives, coloured by a metric, by default the first objective."""
    if len(report.compared) < 2:
        raise UserError(f"study {report.name!r}: fewer than two trials were measured, so there is nothing to compare")
    found = report.compared_metrics()
    _check("metric", metric, found)
    return _drawn(report, fronts.parallel(report, metric or found[0]))


def losses(report: StudyReport, across: str, *, difference: bool) -> go.Figure:
    """The loss curves, or how far they are from the baseline's."""
    curves = series.losses(report)
    if not curves:
        raise UserError(f"study {report.name!r}: no loss curves are kept; its trials' folders hold them")
    _check("axis", across or "", [name for name in ACROSS if any(curve.across[name] for curve in curves)])
    return _drawn(report, figures.losses(report, across, difference=difference))


def forecast(report: StudyReport, metric: str | None) -> go.Figure:
    """What was measured against what was forecast, by default of the first metric that is forecast."""
    found = series.forecasts(report)
    if not found:
        raise UserError(f"study {report.name!r}: no trial was forecast, so there is nothing to compare")
    _check("metric", metric, found)
    return _drawn(report, figures.forecasts(report, metric or next(iter(found))))


def _check(what: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in (known := list(known)):
        if name in METRICS:
            raise UserError(f"{what} {name!r} has no values here; {what}s that have: {', '.join(known) or 'none'}")
        raise UserError(unknown(name, known, f"{what} "))


def _drawn(report: StudyReport, figure: figures.Figure) -> go.Figure:
    import plotly.graph_objects as go

    if not figure.get("data"):
        raise UserError(f"study {report.name!r}: nothing was measured that could be drawn here")
    layout = {name: value for name, value in figure["layout"].items() if name != "meta"}
    drawn = go.Figure({"data": figure["data"], "layout": layout})
    return drawn.update_layout(template="plotly_white", height=HEIGHT_PX)
