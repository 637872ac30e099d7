"""What `autotune report` writes for programs, and what it says where it cannot."""

import contextlib
import csv
import errno
import io
import json
import os
import sys
from dataclasses import asdict, replace

import pandas
import pytest
from support.instant import ENVIRONMENT, WORKLOAD, Instant, answered, plan_of, recorded, runner_of, spec_of
from support.study_report import study_report

from autotune import session
from autotune.cli import app, presets
from autotune.cli.history import history
from autotune.cli.run import run
from autotune.errors import UserError
from autotune.report import figures, files, load, pictures, series
from autotune.report.page import render
from autotune.session import Tuned
from autotune.study.setup import request
from autotune.study.storage import database, records
from autotune.study.storage.history import History
from autotune.trial.workload import LIGHTNING, Probed

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(scope="module")
def report():
    return study_report()


def test_the_csv_holds_every_trial_and_pandas_reads_its_numbers(report):
    table = pandas.read_csv(io.StringIO(files.as_csv(report)))
    assert list(table["trial"]) == [trial["trial"] for trial in report.trials]
    assert table["samples_per_s"].dtype == float and table["samples_per_s"].isna().sum() == sum(
        not t["metrics"] for t in report.trials
    )
    complete = table[table["outcome"] == "complete"]
    assert (complete["samples_per_s_low"] <= complete["samples_per_s"]).all() and (complete["speedup"] > 0).all()
    assert set(table["candidate.precision"]) == {"fp32", "bf16", "torch_autocast"}


def test_a_reason_with_commas_and_lines_stays_one_cell(report):
    trials = [report.trials[0] | {"reason": 'a, "b"\nc'}, *report.trials[1:]]
    text = files.as_csv(replace(report, trials=trials))
    assert next(csv.DictReader(io.StringIO(text)))["reason"] == 'a, "b"\nc'


def test_a_text_in_the_csv_is_no_formula_for_a_spreadsheet(report):
    evil = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "fine"]
    trials = [trial | {"reason": text} for trial, text in zip(report.trials, evil, strict=False)]
    found = pandas.read_csv(io.StringIO(files.as_csv(replace(report, trials=trials))))
    assert list(found["reason"]) == [f"'{text}" for text in evil[:-1]] + ["fine"]
    assert found["samples_per_s"].dtype == float


def test_on_a_small_disk_the_answer_is_printed_and_the_small_files_are_written_first(
    report, tmp_path, monkeypatch, capsys
):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr(render, "write", refuse)
    answer = files.write_answer(report, tmp_path)
    written = [next(answer) for _ in range(5)]
    with pytest.raises(OSError, match="No space"):
        next(answer)
    names = ["ds_config.json", "recommended.json", "front.json", "environment.json", "README.md"]
    assert [path.name for path in written] == names
    refused = UserError("report.html: No space left on device. Free some space")
    monkeypatch.setattr(request, "requested", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(session, "tune", lambda *_, **__: Tuned(report=report, written=written, refused=refused))
    with pytest.raises(UserError, match="Free some space"):
        run("model.py", {}, fresh=False, as_json=False)
    said = capsys.readouterr().out.replace("\n", "")  # long paths are folded
    assert "recommended" in said and "ds_config.json" in said


@pytest.mark.system
def test_an_answer_that_does_not_stand_any_more_leaves_no_configuration_and_the_history_says_so(
    tmp_path, monkeypatch, capsys
):
    """After a resumed run refuted the pick, `ds_config.json` and `autotune ls` still held it."""
    folder = answered(tmp_path / "studies") / "s"
    monkeypatch.chdir(tmp_path)
    assert (folder / "ds_config.json").exists()
    nothing = {"picks": {}, "baseline": None}
    storage = database.open_storage(records.default_url(folder.parent))
    found = replace(load.from_storage(storage, "s", folder), recommended=nothing)
    for _ in range(2):
        list(files.write_answer(found, folder))
        History(storage.engine).recommended("s", 0, None, "")
    assert not (folder / "ds_config.json").exists()
    rows = History(storage.engine).recommendations("s")
    assert [row["withdrawn"] for row in rows] == [True, False] and rows[0]["trial"] == rows[1]["trial"]
    presets.ls("studies")
    assert "withdrawn, nothing is recommended any more; " in capsys.readouterr().out
    history("s")
    last, first = capsys.readouterr().out.splitlines()
    assert f"s trial {rows[0]['trial']}, " in last and "withdrawn" in last and "s recommends trial" in first


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("family", "use"), [(LIGHTNING, 'DeepSpeedStrategy(config="ds_config.json")'), ("raw DeepSpeed", "initialize(")]
)
def test_the_answer_of_a_script_is_as_its_framework_reads_it(tmp_path, family, use):
    """Lightning ends a training whose configuration states the accumulation."""
    probed = Probed(ds_config={}, micro_batch_size=2, gradient_accumulation_steps=2, family=family)
    planned = {"workload": replace(WORKLOAD, script=probed)}
    runner = recorded(tmp_path, Instant(), planned=planned, trials=2, finalists=1)
    runner.run()
    found = load.from_storage(runner.storage, "s", tmp_path / "s")
    list(files.write_answer(found, tmp_path / "s"))
    config = json.loads((tmp_path / "s" / "ds_config.json").read_text())
    assert ("gradient_accumulation_steps" in config) == (family != LIGHTNING)
    assert config["train_micro_batch_size_per_gpu"] == found.picks["recommended"]["candidate"]["micro_batch_size"]
    assert use in (tmp_path / "s" / "README.md").read_text()


def test_a_trial_that_ends_while_its_study_is_read_is_in_the_next_report(tmp_path, monkeypatch):
    """`autotune status` beside a run ended in an error of autotune itself."""
    runner_of(tmp_path, Instant(), trials=2, finalists=0).run()
    estimated = load.estimate

    def slowly(raw):
        runner_of(tmp_path, Instant(), trials=3, finalists=0).run()
        return estimated(raw)

    monkeypatch.setattr(load, "estimate", slowly)
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    assert len(found.trials) == found.study["n_trials"] == 2
    monkeypatch.undo()
    assert len(load.load("s", records.default_url(tmp_path), tmp_path / "s").trials) == 3


def test_a_configuration_that_autotune_did_not_write_stays(report, tmp_path):
    (tmp_path / "ds_config.json").write_text("{}")
    list(files.write_answer(replace(report, recommended={"picks": {}}), tmp_path))
    assert (tmp_path / "ds_config.json").read_text() == "{}"


def test_the_json_says_what_the_page_shows(report, tmp_path):
    written = files.write_report(report, tmp_path, single_file=False)
    found = json.loads((tmp_path / "report.json").read_text())
    assert [path.name for path in written] == ["report.html", "report.json", "trials.csv"]
    assert found["recommended"]["picks"].keys() == report.picks.keys() and len(found["trials"]) == len(report.trials)
    assert {each["metric"] for each in found["effects"]} == set(report.study["objectives"])


def test_a_single_file_is_one_file(report, tmp_path):
    files.write_report(report, tmp_path / "one", single_file=True)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["report.html"]
    page = tmp_path / "two" / "page.html"
    assert files.write_report(report, page) == [page] and page.is_file(), "not a folder of that name"
    assert list(page.parent.iterdir()) == [page]


def test_the_command_writes_the_report_of_a_study_and_prints_it_as_json(tmp_path, monkeypatch, capsys):
    runner_of(tmp_path / "studies", Instant(), trials=4).run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autotune", "report", "s", "-o", "out"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert not ended.value.code and {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html",
        "report.json",
        "trials.csv",
    }
    assert capsys.readouterr().err == ""  # no progress where nobody looks at a terminal
    monkeypatch.setattr("sys.argv", ["autotune", "report", "s", "--json"])
    with pytest.raises(SystemExit):
        app.main()
    assert len(json.loads(capsys.readouterr().out)["trials"]) == 4


@pytest.mark.parametrize(
    ("name", "remedy"), [("kaleido", r"pip install kaleido"), ("plotly.io", "apt-get install chromium")]
)
def test_without_kaleido_or_a_browser_png_is_refused_with_the_remedy(report, tmp_path, monkeypatch, name, remedy):
    def refuse(*_, **__):
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    if name == "kaleido":
        monkeypatch.setitem(sys.modules, "kaleido", None)
    else:
        pytest.importorskip("kaleido")
        monkeypatch.setattr("plotly.io.write_images", refuse)
    with pytest.raises(pictures.UserError, match=remedy):
        files.draw(report, tmp_path)


def test_the_search_is_drawn_over_the_time_that_trials_took(report):
    progress = series.progress(report)
    assert [p.trial for p in progress] == [t["trial"] for t in report.trials]
    assert progress[-1].ended_s == pytest.approx(sum(t["wall_s"] for t in report.trials), abs=0.1)
    assert progress[0].gain == 1.0
    assert all((p.gain is None) == (not t["metrics"]) for p, t in zip(progress, report.trials, strict=True))
    # What a check refused is no best, which stays that of the others.
    by_gain = sorted((p for p in progress if p.gain is not None), key=lambda p: p.gain)
    refused = [t | {"doubt": "it diverged"} if t["trial"] == by_gain[-1].trial else t for t in report.trials]
    ends = [figures.progress(shown)["data"][0]["y"][-1] for shown in (report, replace(report, trials=refused))]
    assert ends == [pytest.approx(p.gain, rel=1e-4) for p in by_gain[:-3:-1]]


def test_an_outlier_among_the_steps_is_not_averaged_away(report):
    trials = [dict(report.trials[0], step_times_s=[0.1] * 500 + [3.0] + [0.1] * 500), *report.trials[1:]]
    steps = series.steps(replace(report, trials=trials))
    first = next(curve for curve in steps if curve.trial == 0)
    assert max(first.longest_ms) == 3000 and max(first.median_ms) == 100
    assert len(first.median_ms) <= series.MOST_STEP_POINTS


@pytest.mark.system
def test_every_trial_of_a_large_study_has_its_steps(report):
    timed = [row for row in report.trials if row.get("step_times_s")]
    trials = [timed[n % len(timed)] | {"trial": n, "step_times_s": [0.1] * 900} for n in range(1000)]
    steps = series.steps(replace(report, trials=trials, front=[]))
    assert {found.trial for found in steps} == set(range(1000))
    assert all(
        60 <= len(found.median_ms) <= 80 and (len(found.median_ms) - 1) * found.size < found.n == 900 for found in steps
    )


def test_forecasts_stand_beside_what_their_own_trial_measured(report):
    again = {**report.picks["recommended"], "metrics": {**report.picks["recommended"]["metrics"], "step_time_s": 99.0}}
    changed = replace(report, front=[], recommended={**report.recommended, "picks": {"recommended": again}})
    found = series.forecasts(changed)["step_time_s"]
    own = {trial["trial"]: trial["metrics"].get("step_time_s") for trial in report.trials}
    assert len(found) == sum(bool(trial["metrics"]) for trial in report.trials) and all(
        point.measured == own[point.trial] for point in found
    )


def test_the_page_says_how_good_the_forecasts_were(report):
    trials = [{**trial, "forecast": {"step_time_s": [1.0, 0.5, 2.0]}, "metrics": {"step_time_s": 1.5 if n else 3.0}, "outcome": "complete"}
              for n, trial in enumerate(report.trials[:4])]  # fmt: skip
    page = render.render(replace(report, front=[], trials=trials))
    assert "step time: half of the forecasts were within 50%; 3 of 4 intervals held what was measured" in page


def test_a_study_of_before_there_were_forecasts_has_no_such_section(report):
    trials = [{name: value for name, value in trial.items() if name != "forecast"} for trial in report.trials]
    page = render.render(replace(report, trials=trials))
    assert 'id="forecasts"' not in page and 'id="forecast-plot"' not in page


def test_a_study_that_ran_keeps_its_forecasts_and_the_weights_of_its_objectives(tmp_path):
    runner_of(tmp_path, Instant(), trials=3).run()
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    assert {"peak_memory_bytes", "step_time_s"} <= set(series.forecasts(found))
    assert set(found.study["weights"]) == set(found.study["objectives"])


def test_the_memory_of_a_rank_is_what_the_search_took_it_for_where_trials_run_at_once(tmp_path):
    """The report spoke of the whole host, of which each of the trials had a half."""
    asked = {"trials": 2, "parallel": 2, "overlap": True, "finalists": 0}
    answered(tmp_path, **asked)
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    assert (
        found.memory_limit_bytes == plan_of(spec_of(**asked)).memory_limit_bytes == ENVIRONMENT.device_memory_bytes / 2
    )
    card = replace(ENVIRONMENT, accelerator="cuda")
    larger = replace(found, environment=asdict(card), study={**found.study, "device_memory_bytes": 2**36})
    assert larger.memory_limit_bytes == card.share_bytes(1)
