"""The report as one HTML page: its figures, its tables, and that nothing in it acts."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from types import SimpleNamespace

import plotly.graph_objects as go
import pytest
from support.study_report import ENVIRONMENT, EVIL, OBJECTIVES, Tags, study_report, unpacked, with_picks

from autotune.errors import UserError
from autotune.report import figures, fronts, plots, series
from autotune.report.data import StudyReport
from autotune.report.gains import price_words
from autotune.report.next_steps import next_steps
from autotune.report.page import content
from autotune.report.page import render as report_page
from autotune.report.page.render import write


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return study_report()


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_page.render(report)


def test_a_pick_by_one_metric_shows_that_metric_though_the_goal_has_it_not():
    report = study_report()
    spare = replace(report, study=report.study | {"objectives": ["samples_per_s"]})
    cards = {pick["title"]: pick for pick in content.page(spare, {})["picks"]}
    labels = [
        row["label"]
        for row in next(card for title, card in cards.items() if "memory" in title.lower())["metrics"]["rows"]
    ]
    assert "throughput" in labels and "peak memory" in labels


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
    assert f"{pick['speedup']:.2f}×" in answer and f"95 % interval {low:.2f} to {high:.2f}" in answer
    shown = re.search(r'<pre id="json-recommended"[^>]*>(.*?)</pre>', answer, re.DOTALL)
    assert json.loads(unescape(shown[1])) == pick["ds_config"]


def test_every_pick_has_its_json_to_copy_and_its_changes(page, report):
    targets = {attributes["data-copy"] for _, attributes in Tags(page).found if "data-copy" in attributes}
    ids = {attributes["id"] for _, attributes in Tags(page).found if "id" in attributes}
    others = {pick["trial"] for pick in report.picks.values()} - {report.picks["recommended"]["trial"]}
    assert targets == {"json-recommended", "again", *(f"json-{number}" for number in others)} and targets <= ids


def test_the_table_holds_every_trial_with_outcome_and_reason_and_marks_what_is_extrapolated(page, report):
    rows = re.findall(r'<tr class="(complete|failed)(?: bare)?">(.*?)</tr>', page)
    assert len(rows) == len(report.trials)
    crashed = next(t for t in report.trials if t["outcome"] == "crashed")
    assert "must have the same dtype (in initialize)" in re.sub(", but got.*BFloat16", "", rows[crashed["trial"]][1])
    # Missing values are empty, so that they sort last.
    assert all('class="n" data-v=""' in row for kind, row in rows if kind == "failed")
    censored = [t for t in report.trials if t["censored"] and t["metrics"]]
    assert censored and page.count('title="extrapolated">~') == len(censored)


def test_only_what_a_trial_was_picked_for_looks_like_a_pick(report):
    picked = {pick["trial"] for pick in report.picks.values()}
    point = {
        **next(point for point in report.front if point["trial"] not in picked),
        "doubt": "diverged",
        "barred": True,
    }
    page = report_page.render(replace(report, front=[*report.front, point]))
    assert (
        '<span class="mark base">checks not passed</span>' in page and '<span class="mark base">baseline</span>' in page
    )
    assert '<span class="mark">recommended</span>' in page


def test_a_stated_limit_of_memory_has_its_unit(report):
    page = report_page.render(replace(report, study={**report.study, "device_memory_bytes": 33 * 2**20}))
    assert "<dt>memory limit</dt><dd>33.0 MiB</dd>" in page and "34603008" not in page


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


def test_the_page_of_27_trials_is_below_one_and_a_half_megabytes_and_plotly_is_whole_in_it():
    page = report_page.render(study_report(27))
    assert len(page.encode()) < 1.5e6
    library = unpacked(page, "library")
    digest = base64.b64encode(hashlib.sha256(library.encode()).digest()).decode()
    assert "Plotly" in library and f"'sha256-{digest}'" in unescape(page)


def test_the_front_holds_only_what_was_compared(report):
    trials = [dict(trial) for trial in report.trials]
    done = [trial for trial in trials if trial["outcome"] == "complete" and trial["trial"] not in report.marks]
    done[0]["outcome"], done[1]["feasible"], done[2]["censored"] = "stopped_early", False, ["step_time_s"]
    changed = replace(report, trials=trials)
    traces = fronts.front(changed, "step_time_s", "samples_per_s")["data"]
    shown = [x for trace in traces if trace["name"] != "front of these two" for x in trace["x"]]
    before = fronts.front(report, "step_time_s", "samples_per_s")["data"]
    assert len(shown) == sum(len(trace["x"]) for trace in before if trace["name"] != "front of these two") - 3
    assert "Left out, since nothing compares with them: 1 stopped early, 1 over a constraint." in report_page.render(
        changed
    )


def test_two_metrics_that_no_trial_has_both_of_make_no_front(report):
    """As where the loss of all but one is extrapolated, and that one has no gradient noise scale: the page was not written."""
    trials = [
        {**trial, "censored": ["time_to_loss_s" if trial["trial"] else "peak_memory_bytes"]} for trial in report.trials
    ]
    apart = replace(report, trials=trials)
    drawn = fronts.fronts(apart)
    assert "step_time_s|samples_per_s" in drawn and not any("loss" in pair and "memory" in pair for pair in drawn)
    assert "Plotly" in unpacked(report_page.render(apart), "library")
    with pytest.raises(UserError, match="nothing was measured that could be drawn"):
        plots.front(apart, "time_to_loss_s", "peak_memory_bytes")


def test_the_axes_of_a_front_are_logarithmic(report):
    layout = fronts.front(report, "step_time_s", "samples_per_s")["layout"]
    assert {layout["xaxis"]["type"], layout["yaxis"]["type"]} == {"log"}


def test_the_answer_has_its_price_what_to_do_next_and_a_day(report):
    pick = report.picks["recommended"]
    costly = pick | {"gains": {**pick["gains"], "peak_memory_bytes": [0.8, 0.79, 0.81]}}
    study = {**report.study, "measured_on": ["2026-11-22", "2026-11-23"], "trials_wanted": 40}
    dated = replace(with_picks(report, recommended=costly), study=study)
    page = unescape(report_page.render(dated))
    answer = page[page.index('id="answer"') : page.index('id="front"')]
    (price,) = re.findall(r'<p class="price">([^<]*)</p>', answer)
    assert [price] == price_words(dated, costly, "samples_per_s") and "1.25x the peak memory" in price
    assert "measured from 2026-11-22 to 2026-11-23" in page
    assert "the search was stopped with 10 trials left" in answer
    assert "autotune export code-gpt -o ds_config.json" in answer


def test_with_many_knobs_the_axes_are_those_that_matter(report, monkeypatch):
    monkeypatch.setattr(series, "MOST_KNOBS", 2)
    kept = series.knobs(report)
    assert len(kept) == 2 and "micro_batch_size" in kept


def test_knobs_whose_names_end_alike_are_told_apart(report):
    """One of them had no menu, so that the menus after it chose values of another axis; both shared one bar."""
    kinds = ("offload_optimizer", "offload_param")
    pinned = [f"zero_optimization.{kind}.pin_memory" for kind in kinds]

    def with_knobs(point, n):
        return {**point, "candidate": {**point["candidate"], pinned[0]: n % 2 == 0, pinned[1]: n % 3 == 0}}

    trials = [with_knobs(trial, n) for n, trial in enumerate(report.trials)]
    rows = {trial["trial"]: trial["candidate"] for trial in trials}
    changed = replace(
        report, trials=trials, front=[{**point, "candidate": rows[point["trial"]]} for point in report.front]
    )
    knobs, short = series.knobs(changed), [f"{kind}.pin_memory" for kind in kinds]
    assert set(pinned) <= set(knobs)
    names = list(content.page(changed, {})["knobs"])
    assert len(names) == len(knobs) and set(short) <= set(names) and "micro_batch_size" in names
    titles = [
        text.replace("<br>", "") for text in fronts.parallel(changed, "step_time_s")["layout"]["xaxis"]["ticktext"]
    ]
    assert titles[: len(names)] == names
    effects = [
        replace(found, explained=0.9, knobs=[replace(found.knobs[0], knob=name) for name in pinned])
        for found in report.effects[:1]
    ]
    assert list(figures.effects(SimpleNamespace(effects=effects))["data"][0]["y"]) == short
    assert [each["knob"] for each in content._effects(effects[0])["knobs"]] == short


def failed_only(report):
    rows = [trial for trial in report.trials if trial["outcome"] in ("oom", "crashed")]
    return replace(report, trials=rows, front=[], recommended={})


def test_a_study_in_which_all_failed_says_what_to_do(report):
    rows = failed_only(report).trials
    ooms = [trial for trial in rows if trial["outcome"] == "oom"]
    for trials, advice in ((ooms, "Need less memory"), ([t for t in rows if t not in ooms], "Mend the target")):
        page = report_page.render(replace(failed_only(report), trials=trials))
        assert "Nothing to recommend" in page and advice in page and "nothing to compare" in page


@pytest.mark.parametrize(("stated", "said"), [(None, False), (2**20, True), (2**50, False)])
def test_where_nothing_fits_a_stated_limit_below_what_a_rank_may_have_is_named(report, stated, said):
    rows = [trial for trial in report.trials if trial["outcome"] == "oom"]
    study = report.study | {"device_memory_bytes": stated}
    steps = next_steps(replace(failed_only(report), trials=rows, study=study))
    assert sum("`--device-memory` allows 1.00 MiB a rank, which may have" in text for text in steps) == said


@pytest.mark.system
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
    titles = [text for text in tags.texts["b"] if text.endswith(("refused: diverged", "no difference seen"))]
    assert titles == [
        f"trial {chosen[1]['trial']}: refused: diverged",
        f"trial {chosen[0]['trial']}: no difference seen",
    ]
    drawn = figures.gate(report, chosen[1] | {"gate": refused}, difference=True)
    *again, reference, own = drawn["data"]
    assert [trace["name"] for trace in again] == ["the reference again"] * 2 and set(reference["y"]) == {0.0}
    assert own["y"] == pytest.approx([a - b for a, b in zip(chosen[1]["losses"], curve, strict=False)], abs=1e-4)
    assert not [attributes for tag, attributes in tags.found if tag == "img"]
    assert "quality" not in report_page.render(report).split('id="picks"')[0]


def test_the_gates_figure_places_equal_curves_upon_each_other_and_shows_the_one_that_was_compared(report):
    """A trial's own curve may be longer than what was compared, or be one at another batch."""
    curve = [3.0 - 0.4 * i / (i + 9) for i in range(600)]
    found = {"passed": True, "reason": "", "n_steps": 12, "losses": curve[:12], "replicates": [], "same_as": None}
    trial = report.trials[1] | {"losses": curve, "gate": found}
    reference, own = figures.gate(report, trial)["data"]
    assert (own["x"], own["y"]) == (reference["x"], reference["y"]) and own["x"] == list(range(1, 13))
    assert set(figures.gate(report, trial, difference=True)["data"][1]["y"]) == {0.0}
    alike = report.trials[2] | {"losses": [9.0] * 600, "gate": found | {"same_as": 1}}
    shown = replace(report, trials=[report.trials[0], trial, alike, *report.trials[3:]])
    drawn = figures.gate(shown, alike)["data"][1]
    assert drawn["y"] == reference["y"] and drawn["name"] == "trial 1, whose numerics are the same"
