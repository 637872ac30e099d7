"""Starts a PostgreSQL server for tests: in a temporary folder, on loopback, as an unprivileged user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PASSWORD = "se/cret%"  # has to be quoted in a URL, and must never be seen
QUOTED = "se%2Fcret%25"


def binaries() -> Path | None:
    """The folder of the server's programs; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if found:
        return found[-1].parent
    program = shutil.which("postgres")
    return Path(program).resolve().parent if program else None


class Postgres:
    """One server with its data.

    Attributes:
        url: Database URL of the user `ann`, with her password.
        port: On 127.0.0.1.
    """

    def __init__(self, programs: Path, *, durable: bool = False) -> None:
        self._programs, self._durable = programs, durable
        self.folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
        self._user = pwd.getpwnam("postgres" if _exists("postgres") else "nobody") if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"postgresql://ann:{QUOTED}@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        (self.folder / "password").write_text(PASSWORD)
        os.chmod(self.folder / "password", 0o644)
        command = [str(programs / "initdb"), "-U", "ann", "--auth=scram-sha-256", "-E", "UTF8"]
        command += [f"--pwfile={self.folder}/password", "-D", f"{self.folder}/data"]
        subprocess.run(command, check=True, capture_output=True, **self._as_user())

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        options = ["-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1"]
        # Without it a commit survives a kill of the server all the same, but not the loss of power.
        options += [
            "-c",
            "dynamic_shared_memory_type=mmap",
        ]  # in its own folder: what is killed leaves nothing in /dev/shm
        options += ["-c", f"fsync={'on' if self._durable else 'off'}", "-c", "max_connections=200"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), *options], stdout=log, stderr=log, **self._as_user()
            )
        until = time.monotonic() + 30
        while subprocess.run(
            [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
        ).returncode:
            assert self._process.poll() is None and time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Ends the server as a crash does, with everything it started."""
        assert self._process is not None
        every = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(every, timeout=10)

    def close(self) -> None:
        """Stops the server and removes its data."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # disconnects whoever is there
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": self.folder}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": [], "cwd": self.folder}


@contextlib.contextmanager
def running(programs: Path, *, durable: bool = False) -> Iterator[Postgres]:
    """A server that is there for the block; a durable one waits for the disk, as in earnest."""
    server = Postgres(programs, durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _exists(user: str) -> bool:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(user) is not None
    return False
