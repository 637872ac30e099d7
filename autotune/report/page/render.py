"""The report of a study as one HTML page that needs no network and makes no request."""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from autotune import __version__
from autotune.report import figures, fronts, samples, series
from autotune.report.data import StudyReport
from autotune.report.page import content
from autotune.system import files

# plotly.js with scatter and bar only, a quarter of the whole; `make plotly` refreshes it.
PLOTLY = "assets/plotly-basic.min.js"
# Code up to this length is kept on one line; words longer than that break at their joints.
SHORT_CODE, LONG_WORD = 34, 12


def write(report: StudyReport, path: Path) -> None:
    """Writes the page, whole or not at all."""
    files.write_text(path, render(report), sync=False)


def render(report: StudyReport) -> str:
    """The page as text."""
    drawn = {name: found for name, found in _figures(report).items() if found}
    data, shown = _data(report, drawn), content.page(report, drawn)
    has_steps = bool(data["steps"]["curves"])
    return fill("report.html", title=f"{report.name}: autotune report", data=data, has_steps=has_steps, **shown)


def fill(template: str, *, title: str, data: Mapping[str, Any], **values: Any) -> str:
    """A template with the page's style, script and figures.

    Args:
        template: Its file name in `templates/`.
        data: What the page's script reads: `figures` by plot and choice.
    """
    scripts = [_asset(PLOTLY), _asset("page.js")]  # the page holds the first one compressed, and the second unpacks it
    # Only our two scripts run, and nothing is fetched: text that slipped through the escaping could still do nothing.
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none';"
        " form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            policy=policy,
            style=Markup(_asset("page.css")),
            library=_library(),
            script=Markup(_asset("page.js")),
            data=_packed(json.dumps(data, allow_nan=False, separators=(",", ":"))),
            version=__version__,
            **values,
        )
    )


def studies(answers: list[dict[str, Any]]) -> str:
    """The dashboard's first page: the studies with their answers."""
    return _environment().get_template("studies.html").render(answers=answers, style=Markup(_asset("page.css")))


def notebook(macro: str, found: Mapping[str, Any]) -> str:
    """What a notebook shows, by a macro of its template."""
    return str(getattr(_environment().get_template("notebook.html").module, macro)(found))


def _figures(report: StudyReport) -> dict[str, dict[str, figures.Figure]]:
    """The figures of the page by plot, each plot with one figure for every choice of its reader."""
    compared = report.compared_metrics()
    objectives = [name for name in report.objectives if name in compared]
    measures = [*(["gain"] if report.baseline is not None else []), *objectives]
    curves = series.losses(report)
    across = [name for name in ("samples", "seconds", "steps") if any(curve.across[name] for curve in curves)]
    return {
        "front-plot": fronts.fronts(report) if len(report.compared) > 1 else {},
        "parallel": {name: fronts.parallel(report, name) for name in objectives} if len(report.compared) > 1 else {},
        "progress-plot": {
            f"{metric}|{axis}": figures.progress(report, metric, axis)
            for metric in measures
            for axis in ("time", "trial")
        }
        if len(report.trials) > 1
        else {},
        "timeline-plot": {"": figures.timeline(report)} if report.runs else {},
        "loss-plot": {
            f"{kind}|{name}": figures.losses(report, name, difference=kind == "difference")
            for kind in (("loss", "difference") if report.baseline is not None else ("loss",))
            for name in across
        },
        "quality-plot": {
            f"{trial['trial']}|{kind}": figures.gate(report, trial, difference=kind == "difference")
            for trial in content.gated(report)
            for kind in ("loss", "difference")
        },
        "lengths-plot": {"": figures.lengths(report)} if samples.varies(report) else {},
        "forecast-plot": {name: figures.forecasts(report, name) for name in series.forecasts(report)},
    }


def _data(report: StudyReport, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script reads."""
    knobs = series.knobs(report)
    return {
        "figures": drawn,
        "steps": {
            "layout": figures.step_layout(),
            "colors": figures.CYCLE,
            "curves": [
                {
                    "trial": each.trial,
                    "named": bool(each.marks),
                    "traces": figures.step_traces(report, each, figures.BLUE),
                }
                for each in series.steps(report)
            ],
        },
        "levels": {
            number: [levels.index(point["candidate"].get(name)) for name, levels in knobs.items()]
            for number, point in report.compared.items()
        },
    }


@cache
def _asset(name: str) -> str:
    return (resources.files("autotune.report.page") / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """plotly.js, packed: half a megabyte instead of 1.2."""
    return _packed(_asset(PLOTLY))


def _packed(text: str) -> str:
    """A text as the page's script unpacks it; figures have much in common, so that they shrink to a tenth."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


@cache
def _environment() -> Environment:
    loader = PackageLoader("autotune.report.page")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.filters |= {"with_code": _with_code, "breakable": _breakable, "level": series.level_text}
    return environment


def _with_code(text: str) -> Markup:
    """Escaped text; parts in backticks become code, which is kept on one line if it is short."""
    short, code = Markup('<code class="short">{}</code>'), Markup("<code>{}</code>")
    parts = re.split(r"`([^`]+)`", str(text))
    for i in range(1, len(parts), 2):
        parts[i] = (short if len(parts[i]) <= SHORT_CODE else code).format(parts[i])
    return Markup("").join(parts)


def _breakable(text: str) -> Markup:
    """Words that stay whole; a long one (`bf16_master_weights=True`, `TransformerEncoderLayer`) may break at its joints."""

    def one(word: str) -> Markup:
        return Markup("<span>{}</span>").format(Markup(re.sub(r"([_=]|[a-z](?=[A-Z]))", r"\1<wbr>", str(escape(word)))))

    return Markup(" ").join(one(word) if len(word) > LONG_WORD else escape(word) for word in text.split())
