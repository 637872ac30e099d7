"""The dashboard of a study: notes, figures, marks and files; and how copies of a study are renewed."""

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html import unescape
from http import HTTPStatus

import plotly.graph_objects as go
import pytest
from support.dashboard import EVIL, ask, overlay_of
from support.instant import Instant, Watcher, finished, plan_of, runner_of, spec_of

from autotune.report import load, readme
from autotune.report.dashboard import storage
from autotune.report.dashboard.server import Application
from autotune.report.notebook import headline
from autotune.study.folder import retuning_path
from autotune.study.lock import study_lock
from autotune.study.runner import Runner
from autotune.study.storage import database, records

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


def test_the_study_note_names_the_recommendation_and_links_every_picks_json(study, answer):
    note = study["note"]["body"]
    assert f"trial {answer.picks['recommended']['trial']}" in note and "against the baseline" in note
    assert set(re.findall(r"\(/autotune/\d+/picks/(\w+)\.json\)", note)) == set(answer.picks)


def test_every_picks_json_arrives_in_one_click_as_it_was_recommended(app, study, answer):
    for name, pick in answer.picks.items():
        got = ask(app, f"/autotune/{study['id']}/picks/{name}.json")
        assert got.status == HTTPStatus.OK and got.json == pick["ds_config"]
        assert (
            got.headers["content-disposition"].startswith("attachment")
            and f"s-{name}.json" in got.headers["content-disposition"]
        )


def test_our_front_is_drawn_over_each_two_objectives_with_the_baseline_and_the_picks_marked(study, answer):
    assert len(answer.study["objectives"]) == 3 and not answer.runs  # this study ran without processes
    assert [graph["id"] for graph in study["plotly_graph_objects"]] == [f"autotune-front-{n}" for n in range(1, 4)]
    for graph in study["plotly_graph_objects"]:
        figure = json.loads(graph["graph_object"])
        traces = go.Figure(figure).to_plotly_json()["data"]  # plotly refuses what it does not know
        assert {"pick", "baseline"} <= {trace["name"] for trace in traces}
        assert {trace["type"] for trace in traces} == {"scatter"}  # three dimensions would need WebGL
        assert any(trace.get("error_x", {}).get("array") for trace in traces)


def test_each_trial_says_what_it_is_and_how_it_ended(study, answer):
    shown = {trial["number"]: trial for trial in study["trials"]}
    attrs = {number: {a["key"]: a["value"] for a in trial["user_attrs"]} for number, trial in shown.items()}
    assert "baseline" in attrs[0]["mark"]
    for row in answer.trials:
        note = shown[row["trial"]]["note"]["body"]
        assert attrs[row["trial"]]["configuration"] in note and f"trials/{row['trial']}.json" in note
        if row["outcome"] == "complete":
            assert float(attrs[row["trial"]]["throughput (samples/s)"]) > 0 and "samples/s" in note
        else:
            failure = attrs[row["trial"]]["failure"]
            assert failure.startswith("oom: rank 0 grew") and failure.endswith("(in build)")
            assert note.count("**oom**: rank 0 grew") == 1 and "(in build)" in note
    assert any(row["outcome"] == "oom" for row in answer.trials)


def test_what_is_for_programs_is_not_shown(study):
    keys = {a["key"] for trial in study["trials"] for a in trial["user_attrs"]} | {
        a["key"] for a in study["user_attrs"]
    }
    assert not keys & storage.OWN_ATTRS


def test_a_trials_configuration_and_log_are_its_artifacts(app, study, answer):
    first = next(trial for trial in study["trials"] if trial["number"] == 0)
    files = {a["filename"]: a["artifact_id"] for a in first["artifacts"]}
    assert set(files) == {"ds_config.json", "rank-0.log"}
    link = f"/artifacts/{study['id']}/{first['trial_id']}/"
    assert ask(app, link + files["ds_config.json"]).json == answer.baseline["ds_config"]
    log = ask(app, link + files["rank-0.log"])
    assert b"step 1" in log.body and log.headers["content-type"].startswith("text/plain")


def test_a_foreign_page_can_neither_read_nor_guess_the_type_of_an_artifact(app, study):
    artifact = study["trials"][0]["artifacts"][0]["artifact_id"]
    got = ask(
        app, f"/artifacts/{study['id']}/{study['trials'][0]['trial_id']}/{artifact}", origin="http://evil.example"
    )
    assert got.status == HTTPStatus.OK and "access-control-allow-origin" not in got.headers
    assert (
        got.headers["x-content-type-options"] == "nosniff"
        and got.headers["cross-origin-resource-policy"] == "same-origin"
    )


def test_a_reason_with_html_in_it_is_inert_in_a_note(study):
    assert not any(EVIL in trial["note"]["body"] for trial in study["trials"])
    assert any("\\<img src=x" in trial["note"]["body"] for trial in study["trials"])


def test_a_study_that_is_not_ours_is_shown_as_it_is(app):
    number = next(
        s["study_id"] for s in ask(app, "/api/studies").json["study_summaries"] if s["study_name"] == "not ours"
    )
    found = ask(app, f"/api/studies/{number}").json
    assert len(found["trials"]) == 2 and found["note"]["body"] == "" and found["plotly_graph_objects"] == []


def test_looking_writes_nothing_into_the_database(studies, study):
    base = database.open_storage(records.default_url(studies))
    assert study["note"]["body"] and not [
        key for key in base.get_study_system_attrs(study["id"]) if key.startswith("dashboard:")
    ]


def test_the_notes_of_a_study_without_a_pick_say_why(answer):
    bare = answer.__class__(
        study=answer.study, recommended={"picks": {}, "baseline": None}, front=[], trials=answer.trials[-1:]
    )
    assert "Nothing to recommend" in readme.study_note(bare, lambda name: name)


def test_the_note_of_a_study_under_way_says_how_much_of_its_budget_is_left(tmp_path, monkeypatch):
    def note():
        return ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json["note"]["body"]

    executor = Instant()
    executor.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        runner_of(tmp_path, executor, trials=10).run()
    study = records.load_study(database.open_storage(records.default_url(tmp_path)), "s")
    with study_lock(tmp_path / "s"):
        assert note().startswith("**Under way**: 4 of 10 trials.")  # the end that was expected has passed
        records.ENDS_S.store(study, time.time() + 5459)
        assert note().startswith("**Under way**: 4 of 10 trials, up to 1 h 30 min left.")
        records.note_end(study, "nothing more is to be gained")
        assert "its answer is being checked, about 1 h 30 min left." in note()
    assert "Under way" not in note()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A study of three trials, of which every look asks for another copy."""
    monkeypatch.setattr(storage, "REFRESH_S", 0.0)
    monkeypatch.setattr(storage, "REFRESH_SHARE", 0.0)
    runner_of(tmp_path, Instant(), trials=3).run()
    return tmp_path


class Reading:
    """Stands in for `load.read`: lets go of a reader when it is told to, and fails if it is to.

    Attributes:
        by: The threads that have read.
        go: Set to let them go on.
        error: What they fail with.
    """

    def __init__(self, monkeypatch) -> None:
        self.by, self.go, self.error = [], threading.Event(), None
        self._read = load.read
        monkeypatch.setattr(load, "read", self)

    def __call__(self, *args, **kwargs):
        self.by.append(threading.current_thread())
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self._read(*args, **kwargs)

    def end(self) -> None:
        """Lets the readers go on, and waits for those in threads of their own; one at least has begun or will."""
        self.go.set()
        while not self.by:
            time.sleep(0.001)
        for thread in self.by:
            if thread is not threading.current_thread():
                thread.join(60)


@pytest.mark.system
def test_a_study_that_runs_on_is_seen_to_grow(small):
    shown = overlay_of(small)
    assert len(shown.shown(1).report.trials) == 3
    runner_of(small, Instant(), trials=5).run()
    deadline = time.monotonic() + 60
    while len(shown.shown(1).report.trials) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all("configuration" in trial.user_attrs for trial in shown.get_all_trials(1))


def test_readers_see_the_last_copy_while_one_thread_makes_the_next(small, monkeypatch):
    shown = overlay_of(small)
    first = shown.shown(1)
    reading = Reading(monkeypatch)
    assert all(shown.shown(1) is first for _ in range(5))
    monkeypatch.setattr(storage, "REFRESH_S", 3600.0)
    reading.end()
    assert shown.shown(1) is not first and len(reading.by) == 1 and reading.by[0] is not threading.current_thread()


@pytest.mark.system
def test_another_study_is_shown_while_one_is_read(small, monkeypatch):
    finished(small, "other", trials=3)
    shown = overlay_of(small)
    reading = Reading(monkeypatch)
    slow = threading.Thread(target=shown.shown, args=(1,), daemon=True)
    slow.start()
    while not reading.by:
        time.sleep(0.001)
    monkeypatch.setattr(load, "read", reading._read)
    assert shown.shown(2).report.name == "other" and slow.is_alive()
    reading.end()


def test_those_who_look_first_wait_for_one_reading(small, monkeypatch):
    monkeypatch.setattr(storage, "REFRESH_S", 3600.0)
    shown, seen = overlay_of(small), []
    reading = Reading(monkeypatch)
    readers = [threading.Thread(target=lambda: seen.append(shown.shown(1))) for _ in range(4)]
    for each in readers:
        each.start()
    reading.end()
    for each in readers:
        each.join(60)
    assert len(seen) == 4 and len(set(map(id, seen))) == 1 and seen[0] is not None and len(reading.by) == 1


@pytest.mark.system
def test_a_copy_that_says_nothing_of_today_is_waited_for(small, monkeypatch):
    monkeypatch.setattr(storage, "LONGEST_STALE_S", -1.0)
    shown = overlay_of(small)
    first = shown.shown(1)
    assert shown.shown(1) is not first


def test_what_a_thread_failed_with_is_told_to_whoever_looks_next(small, monkeypatch):
    shown = overlay_of(small)
    first = shown.shown(1)
    reading = Reading(monkeypatch)
    reading.error = RuntimeError("the study could not be read")
    assert shown.shown(1) is first
    reading.end()
    with pytest.raises(RuntimeError, match="could not be read"):
        shown.shown(1)
    reading.error = None
    assert len(shown.shown(1).report.trials) == 3


@pytest.mark.process
def test_a_reading_under_way_does_not_keep_the_process_alive():
    code = """
import threading, time
from autotune.report.dashboard.storage import _CachedOverlay
from autotune.report.dashboard.overlay import StudyOverlay
never, calls = threading.Event(), []
shown = StudyOverlay(report=None, note={}, system_attrs={}, trial_attrs={}, trial_notes={})
kept = _CachedOverlay(lambda: (calls.append(1), len(calls) > 1 and never.wait(), shown)[-1], lambda: None)
kept.look()
kept._until = time.monotonic()
assert kept.look() is shown
print(threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_optunas_best_trials_are_our_front_with_our_values(study, answer):
    assert {trial["number"] for trial in study["best_trials"]} == {point["trial"] for point in answer.front}
    names = answer.objectives
    for trial in study["trials"]:
        if trial["state"] == "Complete":
            assert trial["values"] == [answer.points[trial["number"]]["metrics"][name] for name in names]


def test_importances_are_worked_out_from_the_trials_that_are_shown_as_complete(app, study):
    got = ask(app, f"/api/studies/{study['id']}/param_importances", query="evaluator=ped_anova")
    assert got.status == HTTPStatus.OK and len(got.json["param_importances"]) == 3


def test_the_first_page_holds_the_answers_and_leads_to_the_reports(app, study, answer):
    page = ask(app, "/")
    assert page.status == HTTPStatus.OK and headline(answer) in unescape(page.text)
    assert "not ours" in page.text and "<script" not in page.text
    report = ask(app, f"/autotune/{study['id']}/report.html")
    assert report.status == HTTPStatus.OK and 'id="answer"' in report.text and EVIL not in report.text
    assert ask(app, "/autotune/2/report.html").status == HTTPStatus.NOT_FOUND
    assert ask(app, "/autotune/99/report.html").status == HTTPStatus.NOT_FOUND


def test_what_is_refused_is_not_offered(app):
    style = ask(app, "/dashboard").text
    for hidden in ("rename study", "delete study", "delete artifact", "AddBoxIcon", "UploadFileIcon"):
        assert hidden in style


def test_a_study_whose_answer_was_replaced_says_so_on_every_page(tmp_path):
    """Its note and the first page recommended the old answer, and the report beside them showed the new one."""
    finished(tmp_path, "s", trials=2, finalists=0)
    plan = plan_of(spec_of(trials=4, finalists=0))
    later = replace(plan, spec=plan.spec.model_copy(update={"name": "s.retune-1"}))
    url = records.default_url(tmp_path)
    Runner(later, Instant(), retuning_path(tmp_path / "s", 1), url, Watcher()).run()
    records.succeed(records.load_study(database.open_storage(url), "s"), "s.retune-1")
    app = Application(overlay_of(tmp_path), "127.0.0.1", None)
    first = unescape(ask(app, "/").text)
    assert first.count("Replaced by the answer of s.retune-1.") == 1
    said = {"s": "replaced this answer by that of s.retune-1", "s.retune-1": "the search of re-tuning 1 of study s: "}
    for summary in ask(app, "/api/studies").json["study_summaries"]:
        note = ask(app, f"/api/studies/{summary['study_id']}").json["note"]["body"]
        for text in (note, ask(app, f"/autotune/{summary['study_id']}/report.html").text):
            assert said[summary["study_name"]] in text and "Train with it" not in text
            assert "studies/s.retune-1" not in text  # there is no such file
