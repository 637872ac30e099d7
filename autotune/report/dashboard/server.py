"""The dashboard's web server: access control, our downloads, and optuna-dashboard's application for all other pages."""

import errno
import hmac
import io
import ipaddress
import json
import logging
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from autotune.errors import UserError
from autotune.report.dashboard.overlay import REPORT_LINK, File, StudyOverlay, config_file
from autotune.report.dashboard.storage import READ_ONLY, DashboardStorage
from autotune.report.notebook import headline, lead
from autotune.report.page import render
from autotune.study.storage import database, records
from autotune.study.storage.database import in_words
from autotune.system import error_log, files

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]

COOKIE = "autotune_token_"
LEAST_TOKEN = 16
N_THREADS = 8
MOST_ANSWERS = 30  # studies whose answers the first page shows; each is read from the database
LARGEST_NOTE_BYTES = 1 << 20
DOWNLOAD = re.compile(r"/autotune/(?P<study>[0-9]{1,9})/(?P<what>picks|trials)/(?P<name>[a-z_]{1,40}|[0-9]{1,9})\.json")
NOT_OURS = "this dashboard is not served under that name; use the address it printed"
NO_REPORT = "there is no report here: autotune did not make that study, or it holds no trial yet"
NO_TOKEN = "this dashboard asks for its token: open the whole address that `autotune dashboard` printed"
REPORT = re.compile(r"/autotune/(?P<study>[0-9]{1,9})/report\.html")
NO_NOTE = (
    f"a note is a JSON object with `version`, a number, and `body`, a text, of {LARGEST_NOTE_BYTES >> 20} MiB at most"
)
STUDY = re.compile(r"/api/studies/(?P<study>[0-9]{1,9})")
NOTE = re.compile(r"/api/studies/[0-9]+(?:/[0-9]+)?/note")
# Added to every answer of Optuna's application: foreign pages may not read or frame it, nor guess content types.
HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "SAMEORIGIN"),
    ("Referrer-Policy", "same-origin"),
]
DROPPED = {"access-control-allow-origin"}
# Optuna's pages grow with their widest element. With this they fit a phone: text breaks, wide tables scroll in their
# cards, and columns become rows. What is refused is not offered: to create, rename, delete and upload.
STYLE = b"""<style>
main { min-width: 0; }
main p, main li { overflow-wrap: anywhere; }
[aria-label="rename study"], [aria-label="delete study"], [aria-label="delete artifact"], button:has([data-testid="AddBoxIcon"]),
[class*="MuiCard-root"]:has(> .MuiCardActionArea-root [data-testid="UploadFileIcon"]) { display: none !important; }
@media (max-width: 700px) { main [class*="MuiGrid-grid-xs-"] { flex-basis: 100%; max-width: 100%; } }
</style>
"""


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server at that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_installed() -> None:
    """Checks that the packages of the extra `dashboard` are installed."""
    for module, package in (("optuna_dashboard", "optuna-dashboard"), ("waitress", "waitress")):
        if find_spec(module) is None:
            raise UserError(f"the dashboard needs the package {package}: pip install {package}")


class Application:
    """The WSGI application.

    Args:
        token: The secret that every request must present; None, at a loopback address only, lets everybody in.
    """

    def __init__(self, overlay: DashboardStorage, host: str, token: str | None) -> None:
        from optuna_dashboard import wsgi

        if token is None and not is_loopback(host):
            raise UserError(f"a dashboard at {host} needs a token")
        self.overlay, self.token, self._local = overlay, token, is_loopback(host)
        self._optuna = wsgi(overlay, artifact_store=overlay)
        self._errors = error_log.Handler()
        logger = logging.getLogger("optuna_dashboard")
        logger.handlers, logger.propagate = [self._errors], False
        own = () if self._local else (socket.gethostname(), socket.getfqdn())
        self._names = {"localhost", host.lower(), *(name.lower() for name in own if name)}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(
                status, [*(each for each in headers if each[0].lower() not in DROPPED), *HEADERS], *rest
            )

        environ.setdefault("HTTP_ACCEPT_ENCODING", "")  # without one Optuna's files fail
        try:
            return self._refusal(environ, start) or self._download(environ, start) or self._answer(environ, start)
        except Exception as error:
            said = error if isinstance(error, UserError) else in_words(error)
            status = HTTPStatus.SERVICE_UNAVAILABLE if said else HTTPStatus.INTERNAL_SERVER_ERROR
            return _say(start, status, str(said or error_log.sentence(error)))
        finally:
            self.overlay.remove_session()

    def _refusal(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """The refusal of a request that is not allowed; None if it is."""
        if not self._knows(environ.get("HTTP_HOST", "")):
            # Against DNS rebinding: a foreign name that resolves to this machine would let a foreign page read studies.
            return _say(start, HTTPStatus.MISDIRECTED_REQUEST, NOT_OURS)
        if self.token is not None:
            entered = self._enter(environ, start)
            if entered is not None:
                return entered
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        if method in ("GET", "HEAD"):
            return None
        if method != "PUT" or not NOTE.fullmatch(path):
            return _say(start, HTTPStatus.METHOD_NOT_ALLOWED, READ_ONLY)
        if not _same_origin(environ):
            return _say(start, HTTPStatus.FORBIDDEN, "another page may not change notes here")
        return None if _holds_note(environ) else _say(start, HTTPStatus.BAD_REQUEST, NO_NOTE)

    def _knows(self, host: str) -> bool:
        """Returns whether a Host header is one of our names or an address, which cannot be rebound."""
        try:
            name = (urlsplit(f"//{host}").hostname or "") if host else ""
            if name in self._names:
                return True
            address = ipaddress.ip_address(name)
        except ValueError:  # no address, or not even a host, as in `[`
            return False
        return address.is_loopback or not self._local

    def _enter(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """The refusal of a request without the token, which stands in its query, a cookie or a header."""
        query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        for value in [value for name, value in query if name == "token"]:
            if self._is_token(value):
                left = urlencode([(name, value) for name, value in query if name != "token"])
                path = quote(environ.get("PATH_INFO") or "/")
                # Two slashes at the start would lead to another machine.
                headers = [("Location", "/" + path.lstrip("/") + (f"?{left}" if left else ""))]
                headers.append(
                    ("Set-Cookie", f"{_cookie_name(environ)}={self.token}; Path=/; HttpOnly; SameSite=Strict")
                )
                start("303 See Other", [*headers, ("Content-Length", "0")])
                return [b""]
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(given.strip())) or self._is_token(_cookie(environ)):
            return None
        return _say(start, HTTPStatus.UNAUTHORIZED, NO_TOKEN)

    def _is_token(self, given: str) -> bool:
        """Compares in constant time for every length."""
        assert self.token is not None
        return hmac.compare_digest(sha256(given.encode()).digest(), sha256(self.token.encode()).digest())

    def _download(self, environ: Environ, start: StartResponse) -> Iterable[bytes] | None:
        """The JSON of a pick or a trial; None for other paths."""
        path = environ.get("PATH_INFO", "")
        if path == "/":
            return _page(start, render.studies(self._answers()))
        if not path.startswith("/autotune/"):
            return None
        if asked := REPORT.fullmatch(path):
            if (shown := self.overlay.shown(int(asked["study"]))) is None:
                return _say(start, HTTPStatus.NOT_FOUND, NO_REPORT)
            return _page(start, render.render(self.overlay.report(shown.report.name)))
        found = DOWNLOAD.fullmatch(path)
        file = self._file(found.groupdict()) if found else None
        content = file.read() if file else None
        if file is None or content is None:
            return _say(start, HTTPStatus.NOT_FOUND, "there is no such file here")
        named = ("Content-Disposition", f"attachment; filename*=UTF-8''{quote(file.name, safe='')}")
        return _send(start, HTTPStatus.OK, file.mimetype, content, named)

    def _answer(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Optuna's answer, with our style in pages and our trial notes in studies.

        The notes are added here and not by the storage: Optuna looks through all notes for each trial, which took over
        a second for 1,000 trials.
        """
        path = environ.get("PATH_INFO", "") if environ["REQUEST_METHOD"] == "GET" else ""
        found = STUDY.fullmatch(path)
        shown = self.overlay.shown(int(found["study"])) if found else None
        if shown is None and not path.startswith(("/dashboard", "/api/")):
            plain: Iterable[bytes] = self._optuna(environ, start)
            return plain
        kept: list[Any] = []
        answer = self._optuna(environ, lambda *given: kept.extend(given))
        content = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        status, headers = kept[0], kept[1]
        if status.startswith("500"):
            return _say(start, HTTPStatus.INTERNAL_SERVER_ERROR, f"this cannot be shown; {self._errors.last()}")
        is_page = path.startswith("/dashboard")
        if status.startswith("200") and (shown or is_page):
            content = _with_notes(content, shown) if shown else content.replace(b"</head>", STYLE + b"</head>", 1)
            headers = [each for each in headers if each[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(content))))
        start(status, headers)
        return [content]

    def _answers(self) -> list[dict[str, Any]]:
        """The studies for the first page, the newest first, with the answers of the newest."""
        found = sorted(self.overlay.get_all_studies(), key=lambda each: -each._study_id)
        answers = []
        for n, each in enumerate(found):
            shown = self.overlay.shown(each._study_id) if n < MOST_ANSWERS else None
            answers.append(
                {
                    "name": each.study_name,
                    "optuna": f"/dashboard/studies/{each._study_id}",
                    "report": REPORT_LINK.format(each._study_id) if shown else "",
                    "headline": headline(shown.report) if shown else "",
                    "lead": lead(shown.report) if shown else "",
                }
            )
        return answers

    def _file(self, asked: Mapping[str, str]) -> File | None:
        shown = self.overlay.shown(int(asked["study"]))
        if shown is None:
            return None
        name, report = asked["name"], shown.report
        if asked["what"] == "picks":
            points, label = dict(report.picks), name
        else:
            points, label = {str(row["trial"]): row for row in report.trials}, f"trial-{name}"
        return config_file(f"{report.name}-{label}", points[name]) if name in points else None


def _send(
    start: StartResponse, status: HTTPStatus, kind: str, body: bytes, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start(f"{status.value} {status.phrase}", [("Content-Type", kind), ("Content-Length", str(len(body))), *headers])
    return [body]


def _page(start: StartResponse, text: str) -> Iterable[bytes]:
    return _send(start, HTTPStatus.OK, "text/html; charset=utf-8", text.encode(), ("Cache-Control", "no-store"))


def _with_notes(content: bytes, shown: StudyOverlay) -> bytes:
    told = json.loads(content)
    for trial in (*told["trials"], *told["best_trials"]):
        if not trial["note"]["version"]:
            trial["note"]["body"] = shown.trial_notes.get(trial["number"], "")
    told["plotly_graph_objects"].sort(key=lambda graph: graph["id"])  # Optuna's are in no order
    return json.dumps(told).encode()


def _say(start: StartResponse, status: HTTPStatus, text: str) -> Iterable[bytes]:
    """A refusal: JSON, which Optuna's page shows as it does its own errors."""
    asked = [("WWW-Authenticate", "Bearer")] if status is HTTPStatus.UNAUTHORIZED else []
    return _send(start, status, "application/json", json.dumps({"reason": text}).encode(), *asked)


def _cookie(environ: Environ) -> str:
    """The token's cookie. Those of other programs, which http.cookies may be unable to read, are passed over."""
    pairs = (each.strip().partition("=") for each in environ.get("HTTP_COOKIE", "").split(";"))
    return next((value for name, _, value in pairs if name == _cookie_name(environ)), "")


def _cookie_name(environ: Environ) -> str:
    """One for each host and port: a browser sends a host's cookies to all of its ports, and two dashboards have two tokens."""
    return COOKIE + re.sub(r"\W", "_", environ.get("HTTP_HOST", ""))


def _holds_note(environ: Environ) -> bool:
    """Returns whether the body of a request is a note as optuna-dashboard expects it."""
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if 0 < length <= LARGEST_NOTE_BYTES else b""
        note = files.json_of(body)
    except ValueError:
        return False
    environ["wsgi.input"] = io.BytesIO(body)
    return isinstance(note, dict) and type(note.get("version")) is int and isinstance(note.get("body"), str)


def _same_origin(environ: Environ) -> bool:
    """Returns whether a request comes from our own page, or from a program, which sends no origin."""
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
        return False
    origin = environ.get("HTTP_ORIGIN")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == environ.get("HTTP_HOST", "").lower()
    except ValueError:
        return False


class Server:
    """waitress with our application at a bound socket; a context manager that closes it."""

    def __init__(self, application: Application, listening: socket.socket) -> None:
        from waitress import create_server

        # It would warn on standard error whenever a page asks for more files at once than there are threads.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        self.port = int(listening.getsockname()[1])
        options = {"threads": N_THREADS, "ident": None, "max_request_body_size": 2 * LARGEST_NOTE_BYTES}
        self._waitress = create_server(application, sockets=[listening], **options)

    def run(self) -> None:
        """Serves until Ctrl-C."""
        self._waitress.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waitress.task_dispatcher.shutdown()
        self._waitress.close()


def make_server(url: str, studies: Path, host: str, port: int, token: str | None) -> Server:
    """A server that is bound and does not run yet; port 0 takes a free one."""
    check_installed()
    storage = database.open_storage(url, create=False)
    folder_of = partial(records.study_folder, studies=studies, url=url)
    application = Application(DashboardStorage(storage, folder_of), host, token)
    try:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OverflowError:
        raise UserError(f"port {port} is not one of 0 to 65535") from None
    except (socket.gaierror, UnicodeError, TypeError):  # the last two for names that no name server takes
        here = "leave --host out to serve this machine only"
        raise UserError(f"{host!r} is no address of this machine; {here}") from None
    except OSError as error:
        raise UserError(_why_not(error, host, port)) from None
    return Server(application, listening)


def _why_not(error: OSError, host: str, port: int) -> str:
    other = "name another one with --port, or --port 0 for any that is free"
    said = {
        errno.EADDRINUSE: f"port {port} is taken, perhaps by another dashboard; {other}",
        errno.EADDRNOTAVAIL: f"{host} is no address of this machine; leave --host out to serve this machine only",
        errno.EACCES: f"port {port} may not be opened by this user; name one above 1023 with --port",
    }
    return said.get(error.errno or 0, f"cannot listen at {host}, port {port}: {error.strerror}")


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def is_strong(token: str) -> bool:
    """Returns whether a token is long enough and needs no escaping in an address or a cookie."""
    return len(token) >= LEAST_TOKEN and re.fullmatch(r"[A-Za-z0-9._~-]+", token) is not None


def address(server: Server, host: str, token: str | None) -> str:
    """The address to open in a browser."""
    if host in ("0.0.0.0", "::"):  # every address of this machine: its name serves as one
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{server.port}/" + (f"?token={token}" if token else "")
