"""The report as one HTML page: its figures, its tables, and that nothing in it acts."""

import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from support.study_report import ENVIRONMENT, EVIL, OBJECTIVES, Tags, study_report, with_picks

from autotune.report import figures, fronts, series
from autotune.report.data import StudyReport
from autotune.report.page import render as report_page
from autotune.report.page.render import write


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return study_report()


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_page.render(report)


def test_the_page_loads_nothing_from_anywhere_and_forbids_every_request_and_foreign_script(page):
    tags = Tags(page).found
    named = ("src", "href", "action", "data", "srcset")
    addresses = [value for _, attributes in tags for name, value in attributes.items() if name in named]
    assert addresses and all(address.startswith("#") for address in addresses)
    policy = next(found["content"] for _, found in tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_a_study_name_with_html_in_it_is_inert(report):
    trials = [dict(report.trials[0]) | {"caveats": [EVIL]}, *(t | {"reason": EVIL} for t in report.trials[1:])]
    pick = report.picks["recommended"] | {
        "reasons": [EVIL],
        "script_side_changes": [f"`{EVIL}`"],
        "ds_config": {EVIL: EVIL},
    }
    values = {
        "study": {**report.study, "name": EVIL, "target": EVIL}, "trials": trials,
        "workload": {**report.workload, "block_class": EVIL}, "environment": {**ENVIRONMENT, "device_name": EVIL},
    }  # fmt: skip
    tags = Tags(report_page.render(replace(with_picks(report, recommended=pick), **values)))
    names = [tag for tag, _ in tags.found]
    assert names.count("script") == 3 and "img" not in names and EVIL in tags.texts["h1"]
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)


def test_the_answer_comes_first_with_its_interval_and_json(page, report):
    pick = report.picks["recommended"]
    answer = page[page.index('id="answer"') : page.index('id="front"')]
    low, high = pick["speedup_ci95"]
    assert f"{pick['speedup']:.2f}×" in answer and f"{low:.2f}× to {high:.2f}×" in answer
    shown = re.search(r'<pre id="json-recommended"[^>]*>(.*?)</pre>', answer, re.DOTALL)
    assert json.loads(unescape(shown[1])) == pick["ds_config"]


def test_every_pick_has_its_json_to_copy_and_its_changes(page, report):
    targets = {attributes["data-copy"] for _, attributes in Tags(page).found if "data-copy" in attributes}
    ids = {attributes["id"] for _, attributes in Tags(page).found if "id" in attributes}
    others = {pick["trial"] for pick in report.picks.values()} - {report.picks["recommended"]["trial"]}
    assert targets == {"json-recommended", "again", *(f"json-{number}" for number in others)} and targets <= ids


def test_the_table_holds_every_trial_with_outcome_and_reason_and_marks_what_is_extrapolated(page, report):
    rows = re.findall(r'<tr class="(complete|failed)">(.*?)</tr>', page)
    assert len(rows) == len(report.trials)
    crashed = next(t for t in report.trials if t["outcome"] == "crashed")
    assert "must have the same dtype (in initialize)" in re.sub(", but got.*BFloat16", "", rows[crashed["trial"]][1])
    # Missing values are empty, so that they sort last.
    assert all('class="n" data-v=""' in row for kind, row in rows if kind == "failed")
    censored = [t for t in report.trials if t["censored"] and t["metrics"]]
    assert censored and page.count('title="extrapolated">~') == len(censored)


def test_the_figures_get_the_values_that_the_recommendation_rests_on(report):
    pick = report.picks["recommended"]
    again = {"metrics": pick["metrics"] | {"samples_per_s": 123.0}}
    trials = [trial | again if trial["trial"] == pick["trial"] else trial for trial in report.trials]
    changed = replace(report, trials=trials)
    drawn = fronts.front(changed, "step_time_s", "samples_per_s")["data"]
    named = {text: y for trace in drawn if "text" in trace for text, y in zip(trace["text"], trace["y"], strict=True)}
    assert [y for text, y in named.items() if text.startswith("recommended")] == [123.0], named


def test_plotly_knows_every_part_of_every_figure(report):
    drawn = [
        *fronts.fronts(report).values(),
        fronts.parallel(report, "step_time_s"),
        figures.effects(report),
        figures.steps(report, [0, 4]),
        figures.progress(report, "step_time_s", "trial"),
        figures.forecasts(report, "step_time_s"),
        *(figures.losses(report, across) for across in ("samples", "seconds", "steps")),
    ]
    for figure in drawn:
        assert go.Figure(figure).data and {trace["type"] for trace in figure["data"]} <= {"scatter", "bar"}
        assert not any("{{" in trace.get("hovertemplate", "") for trace in figure["data"])


def test_names_of_picks_are_placed_where_they_hide_no_point():
    one = fronts._name_places([("a name", 0.0, 0.0)], [(0.0, 0.0), (0.01, 0.02), (1.0, 1.0)])
    assert one == ["bottom right"]
    two = fronts._name_places([("a", 0.0, 0.0), ("b", 0.0, 0.0)], [(0.0, 0.0), (1.0, 1.0)])
    assert two[0] != two[1]


def test_a_line_through_the_parallel_axes_has_a_place_on_each(report):
    figure = fronts.parallel(report, "samples_per_s")
    n_axes = len(figure["layout"]["xaxis"]["tickvals"])
    assert n_axes == len(series.knobs(report)) + len(OBJECTIVES)
    for trace in figure["data"]:
        assert len(trace["y"]) == len(trace["x"]) == len(trace["meta"]) * (n_axes + 1)
        assert all(y is None or -0.05 < y < 1.05 for y in trace["y"])


def test_loss_curves_are_averaged_into_few_points_on_three_axes(report):
    curves = series.losses(report)
    assert curves[0].marks and all(
        len(curve.loss) == len(across) <= series.MOST_LOSS_POINTS
        for curve in curves
        for across in curve.across.values()
    )
    assert all(a < b for curve in curves for a, b in pairwise(curve.across["seconds"]))


def test_a_loss_that_was_not_finite_leaves_a_gap():
    report = study_report()
    report.trials[0]["losses"][:2] = [None, None]
    report.trials[0]["losses"][2:] = [2.0] * (len(report.trials[0]["losses"]) - 2)
    curve = next(curve for curve in series.losses(report) if curve.trial == 0)
    assert set(curve.loss) <= {None, 2.0}


def test_the_page_of_a_thousand_trials_is_below_five_megabytes(tmp_path):
    write(study_report(1000), tmp_path / "report.html")  # how long it takes: benchmarks/views.py
    assert (tmp_path / "report.html").stat().st_size < 5e6


def test_the_page_shows_the_curves_of_what_the_quality_gate_refused_beside_the_reference(report):
    chosen = [trial for trial in report.trials if trial.get("losses")][:2]
    curve = [4.0 - 0.1 * i for i in range(12)]
    refused = {"passed": False, "reason": f"trains worse {EVIL}", "excess": 0.3, "limit": 0.05, "n_steps": 12, "losses": curve,
               "replicates": [curve, curve], "batch": 16}  # fmt: skip
    passed = refused | {"passed": True, "reason": "", "excess": -0.001}
    trials = [
        trial | {"gate": refused if trial is chosen[1] else passed if trial is chosen[0] else None}
        for trial in report.trials
    ]
    tags = Tags(report_page.render(replace(report, trials=trials)))
    titles = [text for text in tags.texts["h3"] if "train" in text or "refused" in text]
    assert titles == [f"trial {chosen[1]['trial']}: refused: diverged", f"trial {chosen[0]['trial']}: trains alike"]
    assert [tag for tag, _ in tags.found].count("polyline") == 2 * 4
    assert not [attributes for tag, attributes in tags.found if tag == "img"]
    assert "quality" not in report_page.render(report).split('id="picks"')[0]
