"""The Optuna dashboard in our own server: who may ask, the downloads of our own, and Optuna's application for the rest."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib.util import find_spec
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from autotune import UserError, store
from autotune.report.overlay import File, Overlay, Shown, config_json, pick_file

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]

COOKIE = "autotune_token"
LEAST_TOKEN = 16
DOWNLOAD = re.compile(r"/autotune/(?P<study>[0-9]{1,9})/(?P<what>picks|trials)/(?P<name>[a-z_]{1,40}|[0-9]{1,9})\.json")
STUDY = re.compile(r"/api/studies/(?P<study>[0-9]{1,9})")
NOTE = re.compile(r"/api/studies/[0-9]+(?:/[0-9]+)?/note")
# Whatever Optuna's application says: a foreign page may not read, frame or guess the type of what is here.
HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "SAMEORIGIN"),
    ("Referrer-Policy", "same-origin"),
]
DROPPED = {"access-control-allow-origin"}
# Optuna's pages grow as wide as the widest thing in them. With this they fit a phone: text breaks, what is wider scrolls in its own
# card, and what stands beside each other comes below each other.
STYLE = b"""<style>
main { min-width: 0; }
main p, main li { overflow-wrap: anywhere; }
@media (max-width: 700px) { main [class*="MuiGrid-grid-xs-"] { flex-basis: 100%; max-width: 100%; } }
</style>
"""


class DashboardError(UserError):
    """The dashboard cannot be served as asked."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_installed() -> None:
    """Refuses to go on without Optuna's dashboard.

    Raises:
        DashboardError: It says how to install it.
    """
    if find_spec("optuna_dashboard") is None:
        raise DashboardError("the dashboard needs the package optuna-dashboard: pip install 'autotune[dashboard]'")


class Application:
    """The WSGI application.

    Args:
        overlay: What is shown.
        host: The address that it is served at.
        token: What everyone who asks must present; None asks for nothing, which only a loopback address may.
    """

    def __init__(self, overlay: Overlay, host: str, token: str | None) -> None:
        from optuna_dashboard import wsgi

        if token is None and not is_loopback(host):
            raise DashboardError(f"a dashboard at {host} needs a token")
        self.overlay, self.token, self._local = overlay, token, is_loopback(host)
        self._optuna = wsgi(overlay, artifact_store=overlay)
        self._names = {"localhost", host.lower(), *(() if self._local else _own_names())}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(
                status, [*(each for each in headers if each[0].lower() not in DROPPED), *HEADERS], *rest
            )

        environ.setdefault("HTTP_ACCEPT_ENCODING", "")  # without one Optuna's files fail
        try:
            return self._refusal(environ, start) or self._download(environ, start) or self._answer(environ, start)
        finally:
            self.overlay.remove_session()

    def _refusal(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """What a request is told that is not let in; None if it is."""
        if not self._knows(environ.get("HTTP_HOST", "")):
            # A name of someone else's that resolves to this machine: a page of theirs would else read the dashboard (DNS rebinding).
            return _say(
                start,
                HTTPStatus.MISDIRECTED_REQUEST,
                "this dashboard is not served under that name; use the address it printed",
            )
        if self.token is not None:
            entered = self._enter(environ, start)
            if entered is not None:
                return entered
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        if method in ("GET", "HEAD"):
            return None
        if method != "PUT" or not NOTE.fullmatch(path):
            return _say(
                start,
                HTTPStatus.METHOD_NOT_ALLOWED,
                "this dashboard shows what autotune measured and changes nothing but notes",
            )
        if not _same_origin(environ):
            return _say(start, HTTPStatus.FORBIDDEN, "another page may not change notes here")
        return None

    def _knows(self, host: str) -> bool:
        """Whether a request means this server: its own names, or an address, which nobody can rebind."""
        try:
            name = (urlsplit(f"//{host}").hostname or "") if host else ""
            if name in self._names:
                return True
            address = ipaddress.ip_address(name)
        except ValueError:  # no address, or not even a host, as in `[`
            return False
        return address.is_loopback or not self._local

    def _enter(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """Asks for the token: from the address that was printed, once, then from a cookie; programs send a header."""
        query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        for value in [value for name, value in query if name == "token"]:
            if self._is_token(value):
                left = urlencode([(name, value) for name, value in query if name != "token"])
                path = quote(environ.get("PATH_INFO") or "/")
                # Two slashes at the start would lead to another machine.
                headers = [("Location", "/" + path.lstrip("/") + (f"?{left}" if left else ""))]
                headers.append(("Set-Cookie", f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"))
                start("303 See Other", [*headers, ("Content-Length", "0")])
                return [b""]
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(given.strip())) or self._is_token(_cookie(environ)):
            return None
        return _say(
            start,
            HTTPStatus.UNAUTHORIZED,
            "this dashboard asks for its token: open the whole address that `autotune dashboard` printed",
        )

    def _is_token(self, given: str) -> bool:
        """Compared in constant time, whatever its length."""
        assert self.token is not None
        return hmac.compare_digest(sha256(given.encode()).digest(), sha256(self.token.encode()).digest())

    def _download(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """The JSON of a pick or a trial; None if something else is asked for."""
        path = environ.get("PATH_INFO", "")
        if not path.startswith("/autotune/"):
            return None
        found = DOWNLOAD.fullmatch(path)
        file = self._file(found.groupdict()) if found else None
        content = file.read() if file else None
        if file is None or content is None:
            return _say(start, HTTPStatus.NOT_FOUND, "there is no such file here")
        headers = [
            ("Content-Type", file.mimetype),
            ("Content-Length", str(len(content))),
            ("Content-Disposition", f"attachment; filename*=UTF-8''{quote(file.name, safe='')}"),
        ]
        start("200 OK", headers)
        return [content]

    def _answer(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Optuna's answer; a page gets our style, and a study the notes of its trials.

        Optuna keeps them with the study and looks through all of them for each trial, which for 1,000 trials took over a second.
        """
        path = environ.get("PATH_INFO", "") if environ["REQUEST_METHOD"] == "GET" else ""
        found = STUDY.fullmatch(path)
        shown = self._shown(int(found["study"])) if found else None
        if shown is None and not path.startswith("/dashboard"):
            plain: Iterable[bytes] = self._optuna(environ, start)
            return plain
        kept: list[Any] = []
        answer = self._optuna(environ, lambda *given: kept.extend(given))
        content = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        status, headers = kept[0], kept[1]
        if status.startswith("200"):
            content = (
                content.replace(b"</head>", STYLE + b"</head>", 1) if shown is None else _with_notes(content, shown)
            )
            headers = [
                (name, str(len(content)) if name.lower() == "content-length" else value) for name, value in headers
            ]
        start(status, headers)
        return [content]

    def _shown(self, study_id: int) -> Shown | None:
        try:
            return self.overlay.shown(study_id)
        except KeyError:
            return None

    def _file(self, asked: Mapping[str, str]) -> File | None:
        shown = self._shown(int(asked["study"]))
        if shown is None:
            return None
        name, report = asked["name"], shown.report
        if asked["what"] == "picks":
            return pick_file(report, name, report.picks[name]) if name in report.picks else None
        row = next((row for row in report.trials if str(row["trial"]) == name), None)
        if row is None:
            return None
        return File(
            name=f"{report.name}-trial-{name}.json", mimetype="application/json", read=lambda: config_json(report, row)
        )


def _with_notes(content: bytes, shown: Shown) -> bytes:
    told = json.loads(content)
    for trial in (*told["trials"], *told["best_trials"]):
        if not trial["note"]["version"]:
            trial["note"]["body"] = shown.trial_notes.get(trial["number"], "")
    told["plotly_graph_objects"].sort(key=lambda graph: graph["id"])  # Optuna's are in no order
    return json.dumps(told).encode()


def _say(start: StartResponse, status: HTTPStatus, text: str) -> Iterable[bytes]:
    """A refusal: JSON, which Optuna's page shows as it does its own errors."""
    body = json.dumps({"reason": text}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    start(f"{status.value} {status.phrase}", headers)
    return [body]


def _cookie(environ: Environ) -> str:
    try:
        morsel = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _same_origin(environ: Environ) -> bool:
    """Whether a change is asked for by our own page, or by a program, which sends no origin."""
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
        return False
    origin = environ.get("HTTP_ORIGIN")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == environ.get("HTTP_HOST", "").lower()
    except ValueError:
        return False


def _own_names() -> set[str]:
    return {name.lower() for name in (socket.gethostname(), socket.getfqdn()) if name}


class _Quiet(WSGIRequestHandler):
    """Says nothing of each request: a page makes one every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def address_string(self) -> str:
        """The address, unresolved: a lookup may take seconds."""
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, as wsgiref does."""
        super(WSGIServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


def make_server(url: str, studies: Path, host: str, port: int, token: str | None) -> _Server:
    """A server that is bound and not yet served.

    Args:
        url: The database.
        studies: The folder of the studies' folders.
        host: Address to listen at.
        port: Port; 0 takes a free one.
        token: See `Application`.

    Raises:
        UserError: What stands against it, and what to do.
    """
    check_installed()
    storage = store.open_storage(url, create=False)
    application = Application(Overlay(storage, partial(store.study_folder, studies=studies, url=url)), host, token)
    try:
        server = (_Server6 if ":" in host else _Server)((host, port), _Quiet)
    except OverflowError:
        raise DashboardError(f"port {port} is not one of 0 to 65535") from None
    except (socket.gaierror, UnicodeError, TypeError):  # the latter two for what no name server could be asked for
        raise DashboardError(
            f"{host!r} is no address of this machine; leave --host out to serve this machine only"
        ) from None
    except OSError as error:
        raise DashboardError(_why_not(error, host, port)) from None
    server.set_app(application)
    return server


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken, perhaps by another dashboard; name another one with --port, or --port 0 for any that is free"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; leave --host out to serve this machine only"
    if error.errno == errno.EACCES:
        return f"port {port} may not be opened by this user; name one above 1023 with --port"
    return f"cannot listen at {host}, port {port}: {error.strerror}"


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def is_strong(token: str) -> bool:
    """Whether a token that somebody chose may be one: not quickly guessed, and whole in an address and in a cookie."""
    return len(token) >= LEAST_TOKEN and re.fullmatch(r"[A-Za-z0-9._~-]+", token) is not None


def address(server: _Server, host: str, token: str | None) -> str:
    """What to open in a browser."""
    if host in ("0.0.0.0", "::"):  # every address of this machine: its name serves as one
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{server.server_port}/" + (f"?token={token}" if token else "")
