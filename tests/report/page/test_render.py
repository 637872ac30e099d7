"""The report: one HTML page, the study's README, the answer in the terminal."""

import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from rich.console import Console
from support.study_report import ENVIRONMENT, EVIL, MIB, OBJECTIVES, Tags, study_report, with_picks

from autotune.report import figures, fronts, series
from autotune.report.answer import render_answer
from autotune.report.data import StudyReport, metric_scale, speedup
from autotune.report.page import render as report_page
from autotune.report.page.render import write
from autotune.report.readme import render
from autotune.system.units import format_duration


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return study_report()


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_page.render(report)


def printed(report: StudyReport, width: int, written=()) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(render_answer(report, written))
    return capture.get()


def failed_study() -> StudyReport:
    report = study_report(3)
    trials = [
        t
        | {
            "outcome": "crashed",
            "reason": "ImportError: no module named 'flash'",
            "metrics": {},
            "ci95": {},
            "losses": [],
        }
        for t in report.trials
    ]
    return replace(report, trials=trials, front=[], recommended={"picks": {}, "baseline": None})


def test_the_page_loads_nothing_from_anywhere(page):
    addresses = [
        value
        for _, attributes in Tags(page).found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset")
    ]
    assert addresses and all(address.startswith("#") for address in addresses)


def test_the_page_forbids_every_request_and_foreign_script(page):
    policy = next(
        attributes["content"]
        for tag, attributes in Tags(page).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe-inline" not in policy.split("style-src")[0]
    )


def test_a_study_name_with_html_in_it_is_inert(report):
    trials = [dict(report.trials[0]) | {"caveats": [EVIL]}, *(t | {"reason": EVIL} for t in report.trials[1:])]
    pick = {
        **report.picks["recommended"],
        "reasons": [EVIL],
        "script_side_changes": [f"`{EVIL}`"],
        "ds_config": {EVIL: EVIL},
    }
    values = {
        "study": {**report.study, "name": EVIL, "target": EVIL},
        "workload": {**report.workload, "block_class": EVIL},
        "trials": trials,
    }
    tags = Tags(
        report_page.render(
            replace(with_picks(report, recommended=pick), **values, environment={**ENVIRONMENT, "device_name": EVIL})
        )
    )
    assert [tag for tag, _ in tags.found].count("script") == 3 and "img" not in [tag for tag, _ in tags.found]
    assert EVIL in tags.texts["h1"]
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


def test_the_table_holds_every_trial_with_outcome_and_reason(page, report):
    rows = re.findall(r'<tr class="(?:complete|failed)">.*?</tr>', page)
    assert len(rows) == len(report.trials)
    crashed = next(t for t in report.trials if t["outcome"] == "crashed")
    assert "must have the same dtype" in rows[crashed["trial"]] and "(in initialize)" in rows[crashed["trial"]]


def test_values_that_are_missing_sort_last_because_they_are_empty(page, report):
    rows = re.findall(r'<tr class="failed">.*?</tr>', page)
    assert rows and all('class="n" data-v=""' in row for row in rows)


def test_extrapolated_values_are_marked(page, report):
    censored = [t for t in report.trials if t["censored"] and t["metrics"]]
    assert censored and page.count('title="extrapolated">~') == len(censored)


def test_the_figures_get_the_values_that_the_recommendation_rests_on(report):
    again = {
        **report.picks["recommended"],
        "metrics": {**report.picks["recommended"]["metrics"], "samples_per_s": 123.0},
    }
    front = [again if point["trial"] == again["trial"] else point for point in report.front]
    changed = replace(with_picks(report, recommended=again, lowest_latency=again), front=front)
    picks = next(t for t in fronts.front(changed, "step_time_s", "samples_per_s")["data"] if t["name"] == "pick")
    names = dict(zip(picks["text"], picks["y"], strict=True))
    assert names["recommended, lowest latency"] == 123.0


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


def test_a_trial_is_compared_with_the_baseline_as_it_was_measured_then():
    report = study_report()
    # Measured again at the end, when the machine ran twice as fast; only the recommended trial was measured again with
    # it.
    faster = {
        name: value * (2 if name.endswith("per_s") else 0.5) for name, value in report.baseline["metrics"].items()
    }
    again = {
        **report.picks["recommended"],
        "metrics": {**report.picks["recommended"]["metrics"], "samples_per_s": 700.0},
    }
    recommended = {"picks": {**report.picks, "recommended": again}, "baseline": {**report.baseline, "metrics": faster}}
    report = replace(report, recommended=recommended)
    alone, own = report.picks["highest_throughput"], report.trials[0]["metrics"]["samples_per_s"]
    unsaid = {name: value for name, value in alone.items() if name != "speedup"}
    assert report.comparable(alone)["metrics"]["samples_per_s"] == own
    assert report.comparable(again)["metrics"]["samples_per_s"] == 2 * own
    assert (
        speedup(replace(report, recommended={**recommended, "picks": {}}), unsaid)
        == alone["metrics"]["samples_per_s"] / own
    )


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


def test_a_study_in_which_nothing_completed_says_why():
    report = failed_study()
    page = report_page.render(report)
    assert (
        "Nothing to recommend: no configuration completed." in page
        and "3 crashed" in page
        and "no module named" in page
    )
    assert "Nothing to recommend" in printed(report, 80) and "Nothing to recommend" in render(report)


def test_without_a_baseline_no_speedup_is_stated():
    report = study_report()
    bare = {name: pick | {"speedup": None, "speedup_ci95": None, "reasons": []} for name, pick in report.picks.items()}
    trials = [
        report.trials[0] | {"outcome": "oom", "reason": "over the memory limit", "metrics": {}},
        *report.trials[1:],
    ]
    report = replace(report, recommended={"picks": bare, "baseline": None}, trials=trials)
    for text in (report_page.render(report).partition("<script")[0], render(report), printed(report, 80)):
        assert "the baseline did not complete (oom: over the memory limit)" in " ".join(text.split())
        assert not re.search(r"\d[×x] better|\d\.\d\d[×x]", text)


def test_a_baseline_that_nothing_beats_is_kept():
    report = study_report()
    base = {**report.baseline, "speedup": 1.0, "speedup_ci95": [1.0, 1.0]}
    report = replace(report, recommended={"picks": {"recommended": base, "drop_in": base}, "baseline": base})
    assert "Keep your configuration" in report_page.render(report)
    assert "the baseline itself" in render(report) and "the baseline itself" in printed(report, 80)


def test_one_objective_is_enough_for_a_report():
    report = study_report()
    keep = {"samples_per_s"}
    trials = [t | {"metrics": {k: v for k, v in t["metrics"].items() if k in keep}} for t in report.trials]
    cut = {
        name: p | {"metrics": {k: v for k, v in p["metrics"].items() if k in keep}} for name, p in report.picks.items()
    }
    report = replace(report, study={**report.study, "objectives": ["samples_per_s"]}, trials=trials, front=[cut["highest_throughput"]],
                     recommended={"picks": cut, "baseline": report.baseline})  # fmt: skip
    assert (
        "samples/s" in report_page.render(report)
        and "samples/s" in render(report)
        and "samples/s" in printed(report, 80)
    )


def test_the_page_of_a_thousand_trials_is_below_five_megabytes(tmp_path):
    write(study_report(1000), tmp_path / "report.html")  # how long it takes: benchmarks/views.py
    assert (tmp_path / "report.html").stat().st_size < 5e6


def test_the_readme_names_machine_front_picks_and_the_way_back(report):
    text = render(report)
    assert "AMD EPYC 9654" in text and "2 ranks" in text and "30 trials in 3 min 42 s" in text
    assert "autotune run studies/code-gpt/study.yaml" in text
    assert all(f"| {point['trial']} |" in text for point in report.front)
    assert all(change in text for pick in report.picks.values() for change in pick["script_side_changes"])
    assert all(f"{pick['speedup']:.2f}x" in text for pick in report.picks.values())


def test_the_readme_holds_no_path_of_this_machine_and_is_small(report):
    text = render(report)
    assert "/home" not in text and "/tmp" not in text and len(text) < 10_000


def test_the_readme_table_has_one_cell_a_column(report):
    rows = [line for line in render(report).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1 and len(rows) == 2 + len(report.table())


def test_a_readme_of_a_study_with_html_in_its_name_is_inert(report):
    text = render(replace(report, study={**report.study, "name": EVIL}))
    assert "\\<img" in text.splitlines()[0] and "<script>" not in text.replace("\\<script", "").split("```")[0]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_answer_cuts_no_number_at_any_width(report, width):
    lines = printed(report, width).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    for name in OBJECTIVES:
        scale = metric_scale(name, [point["metrics"][name] for point in report.table()])
        assert all(scale.number(point["metrics"][name]) in shown for point in report.table())


def test_the_answer_reads_without_colour_and_in_ascii(report):
    text = printed(report, 80)
    assert "\x1b" not in text and text.isascii()


def test_the_answer_shows_picks_speedup_interval_and_what_was_written(report):
    text = " ".join(printed(report, 80, ["studies/code-gpt/ds_config.json"]).split())
    pick = report.picks["highest_throughput"]
    assert (
        f"{pick['speedup']:.2f}x ({pick['speedup_ci95'][0]:.2f} to {pick['speedup_ci95'][1]:.2f}) the baseline's throughput"
        in text
    )
    assert "<- baseline" in text and "recommended" in text and "studies/code-gpt/ds_config.json" in text


def test_a_path_longer_than_the_line_goes_on_in_the_next(report):
    path = "/very" + "/long" * 30 + "/ds_config.json"
    assert path in printed(report, 80, [path]).replace("\n", "")


def test_a_path_below_the_working_directory_is_printed_relative(report, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "\n  studies/x/README.md" in printed(report, 80, [str(tmp_path / "studies/x/README.md")])


def test_a_name_with_rich_markup_is_printed_as_it_is(report):
    assert "[red]x[/red]" in printed(replace(report, study={**report.study, "name": "[red]x[/red]"}), 80)


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("step_time_s", [0.0482, 0.131], ["48.2 ms", "131.0 ms"]),
        ("step_time_s", [2.5], ["2.50 s"]),
        ("time_to_loss_s", [0.761, 3.66], ["0.761 s", "3.660 s"]),
        ("step_time_s", [0.9, 31.0], ["0.900 s", "31.000 s"]),
        ("peak_memory_bytes", [326 * MIB, 700 * MIB], ["326 MiB", "700 MiB"]),
        ("peak_memory_bytes", [1.5 * 2**30, 70 * 2**30], ["1.50 GiB", "70.00 GiB"]),
        ("samples_per_s", [12.34, 436.5], ["12.3 samples/s", "436.5 samples/s"]),
        ("tokens_per_s", [27_936.0], ["27,936 tokens/s"]),
        ("time_to_loss_s", [0.0], ["0.00 s"]),
    ],
)
def test_values_that_are_compared_share_unit_and_decimals(metric, values, shown):
    scale = metric_scale(metric, values)
    assert [scale.quantity(value) for value in values] == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(8.42, "8.4 s"), (59.97, "1 min"), (222.4, "3 min 42 s"), (7500, "2 h 5 min")]
)
def test_a_wall_time_is_said_in_two_units(seconds, shown):
    assert format_duration(seconds) == shown


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
