"""The Optuna dashboard in our own server: what it shows of a study, and whom it lets in."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit
from wsgiref.util import setup_testing_defaults

import optuna
import plotly.graph_objects as go
import pytest
from support.instant import Instant, failed, finished, report, runner_of

from autotune.cli.dashboard import TOKEN_VARIABLE
from autotune.errors import UserError
from autotune.report import load, readme
from autotune.report.dashboard import overlay, storage
from autotune.report.dashboard import server as dashboard_server
from autotune.report.dashboard.server import COOKIE, Application, is_strong, make_server
from autotune.report.dashboard.storage import DashboardStorage
from autotune.space.candidate import Candidate
from autotune.study.lock import study_lock
from autotune.study.storage import records
from autotune.trial.result import Outcome

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
    log = records.trial_path(folder / "s", 0) / "rank-0.log"
    log.write_text(f"step 1\n{EVIL}\n")
    foreign = optuna.create_study(study_name="not ours", storage=records.default_url(folder), direction="minimize")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    return folder


def overlay_of(folder) -> DashboardStorage:
    url = records.default_url(folder)
    return DashboardStorage(
        records.open_storage(url, create=False), partial(records.study_folder, studies=folder, url=url)
    )


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


def ask(app, path, *, method="GET", host="127.0.0.1:8080", query="", body=None, sent=b"", **headers) -> Answer:
    """What the application answers, without a socket."""
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "HTTP_HOST": host,
        "HTTP_ACCEPT_ENCODING": "gzip",
    }
    environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    sent = json.dumps(body).encode() if body is not None else sent
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
    return load.load("s", records.default_url(studies), studies / "s")


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
    assert len(answer.study["objectives"]) == 4
    assert [graph["id"] for graph in study["plotly_graph_objects"]] == [f"autotune-front-{n}" for n in range(1, 7)]
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
            assert (
                attrs[row["trial"]]["failure"].startswith("oom in build: rank 0 grew")
                and "**oom** in phase build" in note
            )
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
    base = records.open_storage(records.default_url(studies))
    assert study["note"]["body"] and not [
        key for key in base.get_study_system_attrs(study["id"]) if key.startswith("dashboard:")
    ]


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/api/studies/1"), ("POST", "/api/studies/1/rename"), ("POST", "/api/trials/1/tell"), ("POST", "/api/studies"),
     ("POST", "/api/artifacts/1"), ("DELETE", "/api/artifacts/1/1/abc"), ("PUT", "/api/studies/1/preference_feedback_component")],
)  # fmt: skip
def test_nothing_but_a_note_can_be_changed(app, studies, method, path):
    refused = ask(app, path, method=method, body={"dst_study_name": "stolen", "state": "Fail"})
    assert refused.status == HTTPStatus.METHOD_NOT_ALLOWED and "changes nothing" in refused.json["reason"]
    assert records.study_names(records.open_storage(records.default_url(studies))) == ["not ours", "s"]


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
    for path, note in (
        ("/api/studies/1/note", before["note"]),
        (f"/api/studies/1/{trial['trial_id']}/note", trial["note"]),
    ):
        body = {"version": note["version"] + 1, "body": "mine"}
        assert ask(app, path, method="PUT", body=body).status == HTTPStatus.NO_CONTENT
    after = ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json
    assert after["note"]["body"] == "mine" and after["trials"][1]["note"]["body"] == "mine"
    assert after["trials"][0]["note"]["body"] == before["trials"][0]["note"]["body"] != ""


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[1]", b'{"version": 1}', b'{"version": "1", "body": "x"}', b'{"version": 1, "body": null}', b"[" * 100_000]
)  # fmt: skip
def test_what_is_no_note_is_refused_in_a_sentence(app, study, body):
    got = ask(app, f"/api/studies/{study['id']}/note", method="PUT", sent=body)
    assert got.status == HTTPStatus.BAD_REQUEST and got.json["reason"].startswith("a note is a JSON object")


def test_links_out_of_the_folder_pipes_and_missing_files_are_not_served(tmp_path):
    folder, secret = tmp_path / "s", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("root:")
    (folder / "rank-0.log").write_text("step 1")
    (folder / "inner").symlink_to(folder / "rank-0.log")
    (folder / "link").symlink_to(secret)
    (folder / "out").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder / "circle")
    os.mkfifo(folder / "pipe")
    assert [overlay.read_inside(folder / name, folder) for name in ("rank-0.log", "inner")] == [b"step 1", b"step 1"]
    assert not any(
        overlay.read_inside(folder / name, folder) for name in ("link", "out/secret", "circle", "pipe", "none", ".")
    )


def test_a_log_that_is_a_link_to_another_file_is_no_artifact(tmp_path):
    runner_of(tmp_path, Instant(), trials=2).run()
    (tmp_path / "secret").write_text("root:")
    (records.trial_path(tmp_path / "s", 0) / "rank-0.log").symlink_to(tmp_path / "secret")
    first = ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json["trials"][0]
    assert [each["filename"] for each in first["artifacts"]] == ["ds_config.json"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A study of three trials, of which every look asks for another copy."""
    monkeypatch.setattr(storage, "REFRESH_S", 0.0)
    monkeypatch.setattr(storage, "REFRESH_SHARE", 0.0)
    runner_of(tmp_path, Instant(), trials=3).run()
    return tmp_path


class Reading:
    """Stands in for `summary.read`: lets go of a reader when it is told to, and fails if it is to.

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
    code = "import threading, time; from autotune.report.dashboard.storage import _CachedOverlay;"
    code += "from autotune.report.dashboard.overlay import StudyOverlay; never, calls = threading.Event(), [];"
    code += "shown = StudyOverlay(report=None, note={}, system_attrs={}, trial_attrs={}, trial_notes={});"
    code += (
        "kept = _CachedOverlay(lambda: (calls.append(1), len(calls) > 1 and never.wait(), shown)[-1], lambda: None);"
    )
    code += "kept.look(); kept._until = time.monotonic(); assert kept.look() is shown; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


@pytest.mark.parametrize(("time_budget_s", "left"), [(None, "6 s"), (9, "5 s")])
def test_the_note_of_a_study_under_way_says_how_much_of_its_budget_is_left(tmp_path, time_budget_s, left):
    def note():
        return ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json["note"]["body"]

    executor = Instant()
    executor.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        runner_of(tmp_path, executor, trials=10, time_budget_s=time_budget_s).run()
    with study_lock(tmp_path / "s"):
        assert note().startswith(f"**Under way**: 4 of 10 trials, about {left} left.")
    assert "Under way" not in note()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "192.0.2.7:8080", "", "localhost.evil.example"])
def test_a_name_that_is_not_ours_is_refused_at_a_loopback_address(app, host):
    assert ask(app, "/api/studies", host=host).status == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
def test_a_loopback_name_is_let_in_whatever_port_is_forwarded(app, host):
    assert ask(app, "/api/studies", host=host).status == HTTPStatus.OK


def test_a_foreign_name_is_refused_even_with_the_token(guarded):
    assert (
        ask(guarded, "/api/studies", host="evil.example", authorization=f"Bearer {TOKEN}").status
        == HTTPStatus.MISDIRECTED_REQUEST
    )


@pytest.mark.parametrize(
    "path", ["/", "/dashboard", "/api/studies", "/autotune/1/picks/recommended.json", "/artifacts/1/1/abc", "/csv/1"]
)
@pytest.mark.parametrize(
    "given", [{}, {"authorization": "Bearer wrong"}, {"cookie": f"{COOKIE}=wrong"}, {"query": "token=wrong"}]
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
    url = records.default_url(studies)
    with make_server(url, studies, "127.0.0.1", 0, None) as first, pytest.raises(UserError, match=r"is taken.*--port"):
        make_server(url, studies, "127.0.0.1", first.port, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_server_answers_at_both_loopback_addresses_and_ends_when_it_is_stopped(studies, host):
    with make_server(records.default_url(studies), studies, host, 0, None) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        with urllib.request.urlopen(f"{dashboard_server.address(server, host, None)}api/studies", timeout=60) as got:
            assert got.status == HTTPStatus.OK and json.load(got)["study_summaries"]
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_an_address_that_is_not_ours_is_said_in_a_sentence(studies):
    with pytest.raises(UserError, match="no address of this machine"):
        make_server(records.default_url(studies), studies, "192.0.2.1", 0, "t")


def test_a_database_that_is_not_there_is_said_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no database"):
        make_server(records.default_url(tmp_path), tmp_path, "127.0.0.1", 0, None)


def test_a_missing_extra_is_said_with_the_command_that_installs_it(studies, monkeypatch):
    monkeypatch.setattr(dashboard_server, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'autotune\[dashboard\]'"):
        make_server(records.default_url(studies), studies, "127.0.0.1", 0, None)


def test_the_notes_of_a_study_without_a_pick_say_why(answer):
    bare = answer.__class__(
        study=answer.study, recommended={"picks": {}, "baseline": None}, front=[], trials=answer.trials[-1:]
    )
    assert "Nothing to recommend" in readme.study_note(bare, lambda name: name)


@pytest.mark.process
def test_the_command_serves_until_it_is_stopped(studies):
    command = [
        sys.executable,
        "-m",
        "autotune.cli",
        "dashboard",
        "--storage",
        records.default_url(studies),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, cwd=studies, stdout=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}api/studies", timeout=60) as got:
            names = {study["study_name"] for study in json.load(got)["study_summaries"]}
        server.send_signal(signal.SIGINT)
        assert names == {"s", "not ours"} and server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def open_to_all(studies):
    """`autotune dashboard` at every address of this machine: the address that it printed, its port, its token, its warnings."""
    command = [
        sys.executable,
        "-m",
        "autotune.cli",
        "dashboard",
        "--storage",
        records.default_url(studies),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    ]
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    with subprocess.Popen(
        command, cwd=studies, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            address = urlsplit(server.stdout.readline().split()[-1])
            warned = ""
            while "ssh -L" not in warned and (line := server.stderr.readline()):
                warned += line
            yield address, address.port, dict(parse_qsl(address.query))["token"], warned
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()


def say(port: int, target: str, *headers: str) -> tuple[int, bytes]:
    """Status and answer to a request as it is, with no client that puts its path right first."""
    lines = [f"GET {target} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers, "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return int(answer.split()[1]), answer


@pytest.mark.process
def test_the_command_prints_a_token_and_a_warning_and_refuses_whoever_does_not_have_it(open_to_all):
    address, port, token, warned = open_to_all
    assert address.hostname == socket.gethostname().lower() and is_strong(token)
    assert (
        "can read every study" in warned
        and TOKEN_VARIABLE in warned
        and "not encrypted" in warned
        and token not in warned
    )
    for target, *headers in (["/api/studies"], ["/?token=wrong"], ["/api/studies", "Authorization: Bearer wrong"]):
        status, answer = say(port, target, *headers)
        assert status == HTTPStatus.UNAUTHORIZED and b"study_name" not in answer and token.encode() not in answer
    status, answer = say(port, f"/?{address.query}")
    cookie = re.search(rb"Set-Cookie: ([^;]+);", answer)[1].decode()
    assert status == HTTPStatus.SEE_OTHER and token.encode() not in re.search(rb"Location: (.+)", answer)[1]
    for header in (f"Cookie: {cookie}", f"Authorization: Bearer {token}"):
        status, answer = say(port, "/api/studies", header)
        assert status == HTTPStatus.OK and b"not ours" in answer


CLIMBS = (
    "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "..%2f..%2fetc%2fpasswd", "%252e%252e/etc/passwd", "..\\..\\etc\\passwd",
    "..%5c..%5cetc%5cpasswd", "/etc/passwd", "%2fetc%2fpasswd", "....//....//etc/passwd", "..;/..;/etc/passwd",
    "%c0%ae%c0%ae/etc/passwd", "..%00/etc/passwd",
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    "start",
    [
        "/",
        "/static/",
        "/img/",
        "/dashboard/",
        "/artifacts/1/",
        "/artifacts/1/1/",
        "/autotune/1/picks/",
        "/csv/",
        "/api/studies/",
    ],
)
def test_a_path_that_climbs_leads_nowhere_over_the_wire(open_to_all, start):
    _, port, token, _ = open_to_all
    for target in (
        f"{before}{start}{up}{climb}"
        for before in ("", f"http://127.0.0.1:{port}")
        for up in ("", "../" * 8)
        for climb in CLIMBS
    ):
        status, answer = say(port, target, f"Authorization: Bearer {token}")
        # Below /dashboard every path is one of the page's own, which reads it itself.
        page = start == "/dashboard/" and status == HTTPStatus.OK and b"<!doctype html>" in answer.lower()
        assert page or status in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND), target
        assert b"root:" not in answer
