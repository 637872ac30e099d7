"""The page's section on how candidates with other numerics train: their loss curves on the reference's."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report import Data, StudyReport, words
from autotune.report.elements import Html, each, el, group

WIDTH, HEIGHT = 360, 150
# More cards than this are left to the JSON.
MOST_CARDS = 8


def quality(report: StudyReport) -> Html | None:
    """A card for each trial that the quality gate looked at, the refused ones first; None where it was not asked."""
    marks = report.marks()
    checked = [one for one in report.trials if one.get("gate")]
    checked.sort(
        key=lambda one: (one["gate"]["passed"] is True, "recommended" not in marks.get(one["trial"], []), one["trial"])
    )
    if not checked:
        return None
    n_refused = sum(one["gate"]["passed"] is False for one in checked)
    note = (
        f"{len(checked)} trials compute other numbers than the baseline; {n_refused} of them were refused. Solid is the trial, dashed the"
        " baseline's numerics at the trial's global batch and learning rate (same weights, same order of data), thin their replicates."
    )
    return group(
        el("h2", "Quality", id="quality"),
        el("p", note, class_="note"),
        el("div", each(map(_card, checked[:MOST_CARDS])), class_="effects", id="quality-plot"),
    )


def _card(one: Data) -> Html:
    found = one["gate"]
    said = {True: "trains alike", False: "refused: diverged", None: "not decided"}[found["passed"]]
    what = (
        found["reason"]
        or f"over {found['n_steps']} steps {found['excess']:+.2g} to the reference's loss; up to {found['limit']:.2g} is chance"
    )
    return el(
        "article",
        el("h3", f"trial {one['trial']}: {said}"),
        el("p", words(one["candidate"]), class_="muted"),
        _curves(one["losses"], found["losses"], found["replicates"]),
        el("p", what, class_="muted"),
        class_="card",
    )


def _curves(
    own: Sequence[float | None], reference: Sequence[float], replicates: Sequence[Sequence[float]]
) -> Html | None:
    n = len(reference) or len(own)
    curves = [[float(loss) for loss in curve[:n] if loss is not None] for curve in (*replicates, reference, own)]
    every = [loss for curve in curves for loss in curve]
    if len(every) < 2 or n < 2:
        return None
    low, high = min(every), max(every)
    span = (high - low) or 1.0

    def line(curve: Sequence[float], colour: str, width: float, dash: str | None = None) -> Html | None:
        at = " ".join(
            f"{8 + i * (WIDTH - 16) / (n - 1):.1f},{8 + (high - loss) / span * (HEIGHT - 16):.1f}"
            for i, loss in enumerate(curve)
        )
        style = f"fill:none;stroke:{colour};stroke-width:{width}{f';stroke-dasharray:{dash}' if dash else ''}"
        return el("polyline", points=at, style=style) if curve else None

    return el(
        "svg",
        each(line(curve, "var(--point)", 1) for curve in curves[: len(replicates)]),
        line(curves[-1], "var(--c1)", 2),
        line(curves[-2], "var(--text)", 1.5, "5 4"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"Loss from {high:.3g} to {low:.3g} over {n} steps: the trial beside its reference",
        style="width:100%;height:auto",
    )
