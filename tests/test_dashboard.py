"""The Optuna dashboard in our own server: what it shows of a study, and whom it lets in."""

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from http import HTTPStatus
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from instant import Instant, failed, report, runner_of

from autotune import UserError, store
from autotune.candidate import Candidate
from autotune.report import dashboard, overlay, readme, summary
from autotune.report.dashboard import Application
from autotune.report.overlay import Overlay
from autotune.trial import Outcome

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
TOKEN = "correct-horse"
EVIL = "<img src=x onerror=alert(1)>"


def sometimes_failing(candidate: Candidate):
    if candidate.micro_batch_size == 16:
        return failed(Outcome.OOM, f"rank 0 grew over the limit {EVIL}")
    return report(candidate)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A folder with the study `s`, some of its trials out of memory, and a study that is not ours."""
    folder = tmp_path_factory.mktemp("studies")
    runner_of(
        folder,
        Instant(sometimes_failing),
        trials=14,
        memory_filter=False,
        space=[{"micro_batch_size": [2, 4, 8, 16], "precision": ["fp32", "bf16"]}],
    ).run()
    log = store.trial_path(folder / "s", 0) / "rank-0.log"
    log.write_text(f"step 1\n{EVIL}\n")
    foreign = optuna.create_study(study_name="not ours", storage=store.default_url(folder), direction="minimize")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    return folder


def overlay_of(folder) -> Overlay:
    url = store.default_url(folder)
    return Overlay(store.open_storage(url, create=False), partial(store.study_folder, studies=folder, url=url))


@pytest.fixture(scope="module")
def app(studies) -> Application:
    return Application(overlay_of(studies), "127.0.0.1", None)


@pytest.fixture(scope="module")
def guarded(studies) -> Application:
    return Application(overlay_of(studies), "0.0.0.0", TOKEN)


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, {name.lower(): value for name, value in headers}, body

    @property
    def json(self):
        return json.loads(self.body)


def ask(app, path, *, method="GET", host="127.0.0.1:8080", query="", body=None, **headers) -> Answer:
    """What the application answers, without a socket."""
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "HTTP_HOST": host, "HTTP_ACCEPT_ENCODING": "gzip"}
    environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    sent = json.dumps(body).encode() if body is not None else b""
    environ |= {"wsgi.input": io.BytesIO(sent), "CONTENT_LENGTH": str(len(sent)), "CONTENT_TYPE": "application/json"}
    setup_testing_defaults(environ)
    got = {}

    def start(status, headers, exc_info=None):
        got["status"], got["headers"] = int(status.split()[0]), headers

    found = app(environ, start)
    whole = b"".join(found)
    if hasattr(found, "close"):
        found.close()
    return Answer(got["status"], got["headers"], whole)


@pytest.fixture(scope="module")
def study(app):
    """The study as the page of Optuna's dashboard gets it."""
    number = next(s["study_id"] for s in ask(app, "/api/studies").json["study_summaries"] if s["study_name"] == "s")
    return {"id": number} | ask(app, f"/api/studies/{number}").json


@pytest.fixture(scope="module")
def answer(studies):
    return summary.load("s", store.default_url(studies), studies / "s")


def test_the_study_note_names_the_recommendation_and_links_every_picks_json(study, answer):
    note = study["note"]["body"]
    assert f"trial {answer.picks['recommended']['trial']}" in note and "against the baseline" in note
    assert set(re.findall(r"\(/autotune/\d+/picks/(\w+)\.json\)", note)) == set(answer.picks)


def test_every_picks_json_arrives_in_one_click_as_it_was_recommended(app, study, answer):
    for name, pick in answer.picks.items():
        got = ask(app, f"/autotune/{study['id']}/picks/{name}.json")
        assert got.status == HTTPStatus.OK and got.json == pick["ds_config"]
        assert got.headers["content-disposition"].startswith("attachment") and f"s-{name}.json" in got.headers["content-disposition"]


def test_our_front_is_a_graph_of_the_study_with_the_baseline_and_the_picks_marked(study):
    graphs = {graph["id"]: json.loads(graph["graph_object"]) for graph in study["plotly_graph_objects"]}
    names = {trace["name"] for trace in graphs["autotune-front"]["data"]}
    assert "pick" in names and "baseline" in names
    assert any(trace["error_x"]["array"] for trace in graphs["autotune-front"]["data"])


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
            assert attrs[row["trial"]]["failure"].startswith("oom in build: rank 0 grew") and "**oom** in phase build" in note
    assert any(row["outcome"] == "oom" for row in answer.trials)


def test_what_is_for_programs_is_not_shown(study):
    keys = {a["key"] for trial in study["trials"] for a in trial["user_attrs"]} | {a["key"] for a in study["user_attrs"]}
    assert not keys & overlay.OWN_ATTRS


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
    got = ask(app, f"/artifacts/{study['id']}/{study['trials'][0]['trial_id']}/{artifact}", origin="http://evil.example")
    assert got.status == HTTPStatus.OK and "access-control-allow-origin" not in got.headers
    assert got.headers["x-content-type-options"] == "nosniff" and got.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_reason_with_html_in_it_is_inert_in_a_note(study):
    assert not any(EVIL in trial["note"]["body"] for trial in study["trials"])
    assert any("\\<img src=x" in trial["note"]["body"] for trial in study["trials"])


def test_a_study_that_is_not_ours_is_shown_as_it_is(app):
    number = next(s["study_id"] for s in ask(app, "/api/studies").json["study_summaries"] if s["study_name"] == "not ours")
    found = ask(app, f"/api/studies/{number}").json
    assert len(found["trials"]) == 2 and found["note"]["body"] == "" and found["plotly_graph_objects"] == []


def test_looking_writes_nothing_into_the_database(studies, study):
    base = store.open_storage(store.default_url(studies))
    assert study["note"]["body"] and not [key for key in base.get_study_system_attrs(study["id"]) if key.startswith("dashboard:")]


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/api/studies/1"), ("POST", "/api/studies/1/rename"), ("POST", "/api/trials/1/tell"), ("POST", "/api/studies"),
     ("POST", "/api/artifacts/1"), ("DELETE", "/api/artifacts/1/1/abc"), ("PUT", "/api/studies/1/preference_feedback_component")],
)  # fmt: skip
def test_nothing_but_a_note_can_be_changed(app, studies, method, path):
    refused = ask(app, path, method=method, body={"dst_study_name": "stolen", "state": "Fail"})
    assert refused.status == HTTPStatus.METHOD_NOT_ALLOWED and "changes nothing" in refused.json["reason"]
    assert store.study_names(store.open_storage(store.default_url(studies))) == ["not ours", "s"]


def test_the_storage_itself_refuses_to_write(studies, study):
    shown = overlay_of(studies)
    with pytest.raises(UserError, match="changes nothing"):
        shown.delete_study(study["id"])
    with pytest.raises(UserError, match="changes nothing"):
        shown.set_study_system_attr(study["id"], "autotune", "x")


def test_a_note_of_the_users_own_is_kept_and_stays(tmp_path):
    runner_of(tmp_path, Instant(), trials=3).run()
    app = Application(overlay_of(tmp_path), "127.0.0.1", None)
    before = ask(app, "/api/studies/1").json
    trial = before["trials"][1]
    for path, note in (("/api/studies/1/note", before["note"]), (f"/api/studies/1/{trial['trial_id']}/note", trial["note"])):
        body = {"version": note["version"] + 1, "body": "mine"}
        assert ask(app, path, method="PUT", body=body).status == HTTPStatus.NO_CONTENT
    after = ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json
    assert after["note"]["body"] == "mine" and after["trials"][1]["note"]["body"] == "mine"
    assert after["trials"][0]["note"]["body"] == before["trials"][0]["note"]["body"] != ""


def test_another_page_may_not_change_a_note(app, study):
    body = {"version": study["note"]["version"] + 1, "body": "theirs"}
    path = f"/api/studies/{study['id']}/note"
    for headers in ({"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert ask(app, path, method="PUT", body=body, **headers).status == HTTPStatus.FORBIDDEN
    assert ask(app, f"/api/studies/{study['id']}").json["note"]["body"] != "theirs"


def test_a_study_that_runs_on_is_seen_to_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(overlay, "REFRESH_S", 0.0)
    monkeypatch.setattr(overlay, "REFRESH_SHARE", 0.0)
    runner_of(tmp_path, Instant(), trials=3).run()
    shown = overlay_of(tmp_path)
    assert len(shown.shown(1).report.trials) == 3
    runner_of(tmp_path, Instant(), trials=5).run()
    assert len(shown.shown(1).report.trials) == 5
    assert all("configuration" in trial.user_attrs for trial in shown.get_all_trials(1))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "192.0.2.7:8080", "", "localhost.evil.example"])
def test_a_name_that_is_not_ours_is_refused_at_a_loopback_address(app, host):
    assert ask(app, "/api/studies", host=host).status == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
def test_a_loopback_name_is_let_in_whatever_port_is_forwarded(app, host):
    assert ask(app, "/api/studies", host=host).status == HTTPStatus.OK


def test_a_foreign_name_is_refused_even_with_the_token(guarded):
    assert ask(guarded, "/api/studies", host="evil.example", authorization=f"Bearer {TOKEN}").status == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("path", ["/", "/dashboard", "/api/studies", "/autotune/1/picks/recommended.json", "/artifacts/1/1/abc", "/csv/1"])
@pytest.mark.parametrize(
    "given", [{}, {"authorization": "Bearer wrong"}, {"cookie": f"{dashboard.COOKIE}=wrong"}, {"query": "token=wrong"}]
)
def test_without_the_token_nothing_is_shown(guarded, path, given):
    refused = ask(guarded, path, **given)
    assert refused.status == HTTPStatus.UNAUTHORIZED and "token" in refused.json["reason"]


def test_the_printed_address_lets_in_and_leaves_the_token_out_of_the_browsers_history(guarded):
    got = ask(guarded, "/dashboard", query=f"x=1&token={TOKEN}")
    assert got.status == HTTPStatus.SEE_OTHER and got.headers["location"] == "/dashboard?x=1"
    cookie = got.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(guarded, "/api/studies", cookie=cookie.partition(";")[0]).status == HTTPStatus.OK
    assert ask(guarded, "/api/studies", authorization=f"Bearer {TOKEN}").status == HTTPStatus.OK


def test_the_way_in_leads_to_no_other_machine(guarded):
    assert ask(guarded, "//evil.example/", query=f"token={TOKEN}").headers["location"].startswith("/evil.example")


@pytest.mark.parametrize(
    "path",
    ["/autotune/1/picks/../../../../etc/passwd.json", "/autotune/1/trials/../0.json", "/static/../../../../../../etc/passwd",
     "/static/..%2f..%2fetc%2fpasswd", "/artifacts/1/1/..%2f..%2fetc%2fpasswd", "/artifacts/1/../../../etc/passwd",
     "/autotune/999/picks/a.json",
     "/autotune/1/picks/no_such.json", "/autotune/1/trials/999.json"],
)  # fmt: skip
def test_a_path_that_climbs_leads_nowhere(app, path):
    got = ask(app, path)
    assert got.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN) and b"root:" not in got.body


def test_an_address_of_this_machine_is_never_served_without_a_token(studies):
    with pytest.raises(UserError, match="needs a token"):
        Application(overlay_of(studies), "0.0.0.0", None)


def test_a_port_that_is_taken_is_said_in_a_sentence(studies):
    url = store.default_url(studies)
    with dashboard.make_server(url, studies, "127.0.0.1", 0, None) as first, pytest.raises(UserError, match=r"is taken.*--port"):
        dashboard.make_server(url, studies, "127.0.0.1", first.server_port, None)


def test_an_address_that_is_not_ours_is_said_in_a_sentence(studies):
    with pytest.raises(UserError, match="no address of this machine"):
        dashboard.make_server(store.default_url(studies), studies, "192.0.2.1", 0, "t")


def test_a_database_that_is_not_there_is_said_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no database"):
        dashboard.make_server(store.default_url(tmp_path), tmp_path, "127.0.0.1", 0, None)


def test_a_missing_extra_is_said_with_the_command_that_installs_it(studies, monkeypatch):
    monkeypatch.setattr(dashboard, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'autotune\[dashboard\]'"):
        dashboard.make_server(store.default_url(studies), studies, "127.0.0.1", 0, None)


def test_the_notes_of_a_study_without_a_pick_say_why(answer):
    bare = answer.__class__(study=answer.study, recommended={"picks": {}, "baseline": None}, front=[], trials=answer.trials[-1:])
    assert "Nothing to recommend" in readme.study_note(bare, lambda name: name)


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(studies):
    command = [sys.executable, "-m", "autotune.cli", "dashboard", "--storage", store.default_url(studies), "--port", "0"]
    with subprocess.Popen(command, cwd=studies, stdout=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}api/studies", timeout=60) as got:
            names = {study["study_name"] for study in json.load(got)["study_summaries"]}
        server.send_signal(signal.SIGINT)
        assert names == {"s", "not ours"} and server.wait(timeout=60) == 0
