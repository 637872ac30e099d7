"""What `autotune report` writes for programs, and what it says where it cannot."""

import csv
import io
import json

import pandas
import pytest
from instant import Instant, runner_of
from test_report import study_report

from autotune import UserError, cli, store
from autotune.report import browser, html, plots, takeaway

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(scope="module")
def report():
    return study_report()


def test_the_csv_holds_every_trial_and_pandas_reads_its_numbers(report):
    table = pandas.read_csv(io.StringIO(takeaway.as_csv(report)))
    assert list(table["trial"]) == [trial["trial"] for trial in report.trials]
    assert table["samples_per_s"].dtype == float and table["samples_per_s"].isna().sum() == sum(
        not t["metrics"] for t in report.trials
    )
    complete = table[table["outcome"] == "complete"]
    assert (complete["samples_per_s_low"] <= complete["samples_per_s"]).all() and (complete["speedup"] > 0).all()
    assert set(table["candidate.precision"]) == {"fp32", "bf16", "torch_autocast"}


def test_a_reason_with_commas_and_lines_stays_one_cell(report):
    trials = [report.trials[0] | {"reason": 'a, "b"\nc'}, *report.trials[1:]]
    text = takeaway.as_csv(
        html.StudyReport(study=report.study, recommended=report.recommended, front=report.front, trials=trials)
    )
    assert next(csv.DictReader(io.StringIO(text)))["reason"] == 'a, "b"\nc'


def test_the_json_says_what_the_page_shows(report, tmp_path):
    written = takeaway.write(report, tmp_path, single_file=False)
    found = json.loads((tmp_path / "report.json").read_text())
    assert [path.name for path in written] == ["report.html", "report.json", "trials.csv"]
    assert found["recommended"]["picks"].keys() == report.picks.keys() and len(found["trials"]) == len(report.trials)
    assert {each["metric"] for each in found["effects"]} == set(report.study["objectives"])


def test_a_single_file_is_one_file(report, tmp_path):
    takeaway.write(report, tmp_path / "one", single_file=True)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["report.html"]


def test_the_command_writes_the_report_of_a_study_and_prints_it_as_json(tmp_path, monkeypatch, capsys):
    runner_of(tmp_path / "studies", Instant(), trials=4).run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autotune", "report", "s", "-o", "out"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code and {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html",
        "report.json",
        "trials.csv",
    }
    assert capsys.readouterr().err == ""  # no progress where nobody looks at a terminal
    monkeypatch.setattr("sys.argv", ["autotune", "report", "s", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert len(json.loads(capsys.readouterr().out)["trials"]) == 4


def test_without_a_browser_png_is_refused_with_the_remedy(report, tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "NAMES", ())
    with pytest.raises(UserError, match="apt-get install chromium"):
        takeaway.draw(tmp_path / "report.html", tmp_path)


def test_the_search_is_drawn_over_the_time_that_trials_took(report):
    progress = plots.data(report)["progress"]
    assert [p["trial"] for p in progress] == [t["trial"] for t in report.trials]
    assert progress[-1]["at"] == pytest.approx(sum(t["wall_s"] for t in report.trials), abs=0.1)
    assert progress[0]["gain"] == 1.0 and all(
        (p["gain"] is None) == (not t["metrics"]) for p, t in zip(progress, report.trials, strict=True)
    )


def test_an_outlier_among_the_steps_is_not_averaged_away(report):
    trials = [dict(report.trials[0], step_times_s=[0.1] * 500 + [3.0] + [0.1] * 500), *report.trials[1:]]
    steps = plots.data(
        html.StudyReport(study=report.study, recommended=report.recommended, front=report.front, trials=trials)
    )["steps"]
    first = next(s for s in steps if s["trial"] == 0)
    assert max(first["high"]) == 3000 and max(first["ms"]) == 100 and len(first["ms"]) <= plots.STEP_PIECES


def test_every_trial_of_a_large_study_has_its_steps(report):
    timed = [row for row in report.trials if row.get("step_times_s")]
    trials = [timed[n % len(timed)] | {"trial": n, "step_times_s": [0.1] * 900} for n in range(1000)]
    steps = plots.data(html.StudyReport(study=report.study, recommended=report.recommended, front=[], trials=trials))[
        "steps"
    ]
    assert {found["trial"] for found in steps} == set(range(1000))
    assert all(
        60 <= len(found["ms"]) <= 80 and (len(found["ms"]) - 1) * found["size"] < found["n"] == 900 for found in steps
    )


def test_the_study_keeps_the_weights_of_its_objectives(tmp_path):
    from autotune.report import summary

    runner_of(tmp_path, Instant(), trials=2).run()
    found = summary.load("s", store.default_url(tmp_path), tmp_path / "s")
    assert set(found.study["weights"]) == set(found.study["objectives"])


def test_forecasts_stand_beside_what_their_own_trial_measured(report):
    again = {**report.picks["recommended"], "metrics": {**report.picks["recommended"]["metrics"], "step_time_s": 99.0}}
    changed = html.StudyReport(
        study=report.study,
        recommended={**report.recommended, "picks": {"recommended": again}},
        front=[],
        trials=report.trials,
    )
    found = plots.forecasts(changed)["step_time_s"]
    own = {trial["trial"]: trial["metrics"].get("step_time_s") for trial in report.trials}
    assert len(found) == sum(bool(trial["metrics"]) for trial in report.trials) and all(
        point["was"] == own[point["trial"]] for point in found
    )


def test_the_page_says_how_good_the_forecasts_were(report):
    trials = [{**trial, "forecast": {"step_time_s": [1.0, 0.5, 2.0]}, "metrics": {"step_time_s": 1.5 if n else 3.0}, "outcome": "complete"}
              for n, trial in enumerate(report.trials[:4])]  # fmt: skip
    page = html.render(html.StudyReport(study=report.study, recommended=report.recommended, front=[], trials=trials))
    assert "step time: half of the forecasts were within 50%; 3 of 4 intervals held what was measured" in page


def test_a_study_of_before_there_were_forecasts_has_no_such_section(report):
    trials = [{name: value for name, value in trial.items() if name != "forecast"} for trial in report.trials]
    page = html.render(
        html.StudyReport(study=report.study, recommended=report.recommended, front=report.front, trials=trials)
    )
    assert 'id="forecasts"' not in page and 'id="forecast-plot"' not in page


def test_a_study_that_ran_keeps_its_forecasts(tmp_path):
    from autotune.report import summary

    runner_of(tmp_path, Instant(), trials=3).run()
    found = summary.load("s", store.default_url(tmp_path), tmp_path / "s")
    assert {"peak_memory_bytes", "step_time_s"} <= set(plots.forecasts(found))
