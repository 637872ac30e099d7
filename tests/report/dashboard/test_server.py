"""The dashboard's server: whom it lets in, what may be changed, and which files it serves."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

import optuna
import pytest
from support.dashboard import TOKEN, ask, overlay_of, stop
from support.instant import Instant, runner_of

from autotune.cli.dashboard import TOKEN_VARIABLE
from autotune.errors import UserError
from autotune.report.dashboard import overlay
from autotune.report.dashboard import server as dashboard_server
from autotune.report.dashboard.server import COOKIE, Application, is_strong, make_server
from autotune.study.folder import trial_path
from autotune.study.storage import records
from autotune.study.storage.database import open_storage

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/api/studies/1"), ("POST", "/api/studies/1/rename"), ("POST", "/api/trials/1/tell"), ("POST", "/api/studies"),
     ("POST", "/api/artifacts/1"), ("DELETE", "/api/artifacts/1/1/abc"), ("PUT", "/api/studies/1/preference_feedback_component")],
)  # fmt: skip
def test_nothing_but_a_note_can_be_changed(app, studies, method, path):
    refused = ask(app, path, method=method, body={"dst_study_name": "stolen", "state": "Fail"})
    assert refused.status == HTTPStatus.METHOD_NOT_ALLOWED and "changes nothing" in refused.json["reason"]
    assert records.study_names(open_storage(records.default_url(studies))) == ["not ours", "s"]


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


def test_our_style_is_put_into_pages_alone(tmp_path):
    """A name with `</head>` in it came back from the API with the style in the middle, which is no JSON."""
    url = records.default_url(tmp_path)
    optuna.create_study(study_name="</head>", storage=url, direction="minimize")
    app = Application(overlay_of(tmp_path), "127.0.0.1", None)
    assert [each["study_name"] for each in ask(app, "/api/studies").json["study_summaries"]] == ["</head>"]
    assert dashboard_server.STYLE in ask(app, "/dashboard").body


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
    (trial_path(tmp_path / "s", 0) / "rank-0.log").symlink_to(tmp_path / "secret")
    first = ask(Application(overlay_of(tmp_path), "127.0.0.1", None), "/api/studies/1").json["trials"][0]
    assert [each["filename"] for each in first["artifacts"]] == ["ds_config.json"]


FOREIGN = ("evil.example", "evil.example:8080", "192.0.2.7:8080", "", "localhost.evil.example")
OWN = ("localhost:9999", "127.0.0.1", "[::1]:8080", "LOCALHOST")


def test_loopback_names_are_let_in_at_any_forwarded_port_and_others_refused_even_with_the_token(app, guarded):
    assert {ask(app, "/api/studies", host=host).status for host in OWN} == {HTTPStatus.OK}
    assert {ask(app, "/api/studies", host=host).status for host in FOREIGN} == {HTTPStatus.MISDIRECTED_REQUEST}
    got = ask(guarded, "/api/studies", host="evil.example", authorization=f"Bearer {TOKEN}")
    assert got.status == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize(
    "path", ["/", "/dashboard", "/api/studies", "/autotune/1/picks/recommended.json", "/artifacts/1/1/abc", "/csv/1"]
)
@pytest.mark.parametrize(
    "given",
    [{}, {"authorization": "Bearer wrong"}, {"cookie": f"{COOKIE}127_0_0_1_8080=wrong"}, {"query": "token=wrong"}],
)
def test_without_the_token_nothing_is_shown(guarded, path, given):
    refused = ask(guarded, path, **given)
    assert refused.status == HTTPStatus.UNAUTHORIZED and "token" in refused.json["reason"]


def test_the_printed_address_lets_in_and_leaves_the_token_out_of_the_browsers_history(guarded):
    got = ask(guarded, "/dashboard", query=f"x=1&token={TOKEN}")
    assert got.status == HTTPStatus.SEE_OTHER and got.headers["location"] == "/dashboard?x=1"
    cookie = got.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    own = cookie.partition(";")[0]
    # A browser sends those of other programs at this address, too: http.cookies reads nothing behind these.
    for before in ("", 'theme={"dark": true}; ', "a,b=1; "):
        assert ask(guarded, "/api/studies", cookie=before + own).status == HTTPStatus.OK
    assert ask(guarded, "/api/studies", authorization=f"Bearer {TOKEN}").status == HTTPStatus.OK


def test_two_dashboards_of_one_host_keep_two_cookies(guarded):
    """A browser sends a host's cookies to all of its ports, and the second dashboard's took the place of the first one's."""
    ports = [ask(guarded, "/", query=f"token={TOKEN}", host=f"localhost:{port}") for port in (8080, 8081)]
    assert len({got.headers["set-cookie"].partition("=")[0] for got in ports}) == 2


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
        stop(server)
        thread.join(30)
        assert not thread.is_alive()


def test_a_server_is_stopped_while_the_end_of_a_request_wakes_its_loop_first(studies, monkeypatch):
    with make_server(records.default_url(studies), studies, "127.0.0.1", 0, None) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        wake = server._waitress.trigger._physical_pull

        def woken_before() -> None:
            wake()
            thread.join(30)
            wake()

        monkeypatch.setattr(server._waitress.trigger, "_physical_pull", woken_before)
        stop(server)
        assert not thread.is_alive()


def test_a_foreign_address_and_a_missing_database_are_said_in_a_sentence(studies, tmp_path):
    with pytest.raises(UserError, match="no address of this machine"):
        make_server(records.default_url(studies), studies, "192.0.2.1", 0, "t")
    with pytest.raises(UserError, match="no database"):
        make_server(records.default_url(tmp_path), tmp_path, "127.0.0.1", 0, None)


def test_a_missing_extra_is_said_with_the_command_that_installs_it(studies, monkeypatch):
    monkeypatch.setattr(dashboard_server, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install optuna-dashboard"):
        make_server(records.default_url(studies), studies, "127.0.0.1", 0, None)


def dashboard(studies, *options):
    """The command line of a dashboard at a free port."""
    own = ["--storage", records.default_url(studies), "--port", "0", *options]
    return [sys.executable, "-m", "autotune", "dashboard", *own]


@pytest.mark.system
def test_the_command_serves_until_it_is_stopped(studies):
    command = dashboard(studies)
    with subprocess.Popen(command, cwd=studies, stdout=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}api/studies", timeout=60) as got:
            names = {study["study_name"] for study in json.load(got)["study_summaries"]}
        server.send_signal(signal.SIGINT)
        assert names == {"s", "not ours"} and server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def open_to_all(studies):
    """`autotune dashboard` at every address of this machine: the address that it printed, its port, its token, its warnings."""
    command = dashboard(studies, "--host", "0.0.0.0")
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
    assert all(text in warned for text in ("can read every study", TOKEN_VARIABLE, "not encrypted"))
    assert token not in warned
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
    ["/", "/static/", "/img/", "/dashboard/", "/artifacts/1/", "/artifacts/1/1/", "/autotune/1/picks/", "/csv/", "/api/studies/"],
)  # fmt: skip
def test_a_path_that_climbs_leads_nowhere_over_the_wire(open_to_all, start):
    _, port, token, _ = open_to_all
    befores = ("", f"http://127.0.0.1:{port}")
    for target in map("".join, itertools.product(befores, [start], ("", "../" * 8), CLIMBS)):
        status, answer = say(port, target, f"Authorization: Bearer {token}")
        # Below /dashboard every path is one of the page's own, which reads it itself.
        page = start == "/dashboard/" and status == HTTPStatus.OK and b"<!doctype html>" in answer.lower()
        assert page or status in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND), target
        assert b"root:" not in answer
