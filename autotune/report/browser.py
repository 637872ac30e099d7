"""An installed Chromium, driven over a pipe: draws the page's plots as PNG, and lets the tests look at pages as a user does."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from select import select
from typing import Any

from autotune import UserError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# It must neither ask the user nor the network anything. No sandbox: containers often forbid the one that it would make, and
# it only ever opens pages of ours.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync --disable-default-apps --disable-extensions --disable-dev-shm-usage --mute-audio --hide-scrollbars"
    " --remote-debugging-pipe"
).split()
DEADLINE_S = 60.0
# The browser reads commands from descriptor 3 and answers on 4; moved out of the way first, as ours may be these themselves.
START = """
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for descriptor, wanted in zip(high, (3, 4)):
    os.dup2(descriptor, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(UserError):
    """There is no browser, or it does not do what it should."""


def find() -> str | None:
    """An installed Chromium or Chrome."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One open page.

    Attributes:
        requests: Addresses that it asked for.
        complaints: Errors and warnings on its console, and exceptions.
    """

    session: _Session
    id: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loaded: bool = False

    def send(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the DevTools protocol."""
        return self.session.send(method, parameters, self.id)

    def view(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Sets the size of the window, and the colours that its user prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Loads a page and waits until it is there."""
        self.loaded = False
        self.send("Page.navigate", url=address)
        self.session.wait(lambda: self.loaded, f"{address} did not load")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited.

        Raises:
            BrowserError: It threw.
        """
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            said = found["exceptionDetails"]
            raise BrowserError(f"the page failed: {said.get('exception', {}).get('description') or said['text']}")
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        self.session.wait(lambda: bool(self.run(expression)), f"the page did not come to {expression}", pause_s=0.05)

    def picture(self, selector: str | None = None) -> bytes:
        """A PNG of what is seen, or of one element, wherever on the page it is."""
        clip: dict[str, Any] = {}
        if selector is not None:
            box = self.run(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}; })()"
            )
            clip = {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **clip)["data"])

    def note(self, event: Mapping[str, Any]) -> None:
        """Keeps what the browser tells of its own accord."""
        given = event["params"]
        match event["method"]:
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            case "Runtime.exceptionThrown":
                said = given["exceptionDetails"]
                self.complaints.append(said.get("exception", {}).get("description") or said["text"])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.complaints.append(
                    " ".join(str(one.get("value", one.get("description", ""))) for one in given["args"])
                )
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{given['entry']['text']} {given['entry'].get('url', '')}".strip())


class _Session:
    """The protocol: JSON messages that end in a zero byte, over two pipes."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer, self._next = b"", 0
        self._answers: dict[int, Mapping[str, Any]] = {}
        self.pages: dict[str, Page] = {}

    def send(self, method: str, parameters: Mapping[str, Any], page: str | None = None) -> Any:
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": page} if page else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self.wait(lambda: number in self._answers, f"the browser did not answer {method}")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait(self, done: Any, what: str, *, pause_s: float = 0.0) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                raise BrowserError(f"{what} within {DEADLINE_S:.0f} s")
            self._take(pause_s or 0.5)

    def _take(self, seconds: float) -> None:
        """Reads what has come, waiting a little for it."""
        if not select([self._read], [], [], seconds)[0]:
            return
        piece = os.read(self._read, 1 << 20)
        if not piece:
            raise BrowserError("the browser ended unexpectedly")
        *messages, self._buffer = (self._buffer + piece).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self.pages:
                self.pages[message["sessionId"]].note(message)


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A browser with one empty page; gone with all its files at the end.

    Raises:
        BrowserError: None is installed, or it does not start.
    """
    program = find()
    if program is None:
        raise BrowserError("no Chromium or Chrome is installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="autotune-browser-", ignore_cleanup_errors=True) as profile:
        there_read, here_write = os.pipe()
        here_read, there_write = os.pipe()
        command = [
            sys.executable,
            "-S",
            "-c",
            START,
            str(there_read),
            str(there_write),
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            command,
            pass_fds=(there_read, there_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there_read)
        os.close(there_write)
        session = _Session(here_write, here_read)
        try:
            target = session.send("Target.createTarget", {"url": "about:blank"})["targetId"]
            page = Page(
                session, session.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            )
            session.pages[page.id] = page
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            yield page
        finally:
            with contextlib.suppress(OSError, BrowserError):
                session.send("Browser.close", {})
            os.close(here_write)
            os.close(here_read)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
