"""The dashboard's application asked without a socket."""

import io
import json
from functools import partial
from wsgiref.util import setup_testing_defaults

from autotune.report.dashboard.server import Server
from autotune.report.dashboard.storage import DashboardStorage
from autotune.study.storage import database, records

TOKEN = "correct-horse"
EVIL = "<img src=x onerror=alert(1)>"


def overlay_of(folder) -> DashboardStorage:
    url = records.default_url(folder)
    return DashboardStorage(
        database.open_storage(url, create=False), partial(records.study_folder, studies=folder, url=url)
    )


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, {name.lower(): value for name, value in headers}, body

    @property
    def text(self):
        return self.body.decode()

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


def stop(server: Server) -> None:
    """Ends `server.run`, which another thread is in."""
    trigger, channels = server._waitress.trigger, server._waitress._map

    def end():
        # The trigger stays open: the end of a request may run this before `pull_trigger` has written to it.
        for each in [each for each in channels.values() if each not in (trigger, server._waitress)]:
            each.close()
        channels.clear()

    trigger.pull_trigger(end)
