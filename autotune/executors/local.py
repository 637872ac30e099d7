"""Trials on this machine: one warm server, which forks the ranks of each trial."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from autotune import UserError, segments
from autotune.executors.base import Status
from autotune.executors.host import MARK, extensions_dir, has_cuda_device, new_mark, sweep
from autotune.trial import TrialDir

START_TIMEOUT_S = 300.0
CANCEL_TIMEOUT_S = 10.0


class LocalExecutor:
    """Runs trials on this machine.

    Args:
        modules: What the user's target imports; the server imports it once.
        log: Where the server's own output goes.
        environment: Variables that the user's launch command sets, for the server and all its trials.
    """

    def __init__(self, modules: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.cold_reason = ""
        self.mark = new_mark()
        self._shared_before: frozenset[tuple[str, int]] = frozenset()
        self._modules, self._log, self._own = list(modules), log, dict(environment or {})
        self._server: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._n_ordered = self._n_ended = 0

    def start(self) -> None:
        """Starts the warm server and waits until it has imported everything.

        Raises:
            UserError: It died on the way, with the last line that it wrote.
        """
        if self._server is not None:
            if self._server.poll() is None:
                return
            self.lose(self._server)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "autotune.worker", "serve", *self._modules]
        self._shared_before, self._ready = frozenset(segments.there()), False
        self._n_ordered = self._n_ended = 0
        with open(self._log, "ab") as log:
            # Its own session: Ctrl-C in the terminal is for the driver, which then stops the ranks in order.
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        answer = self._answer(START_TIMEOUT_S)
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)  # its end of the pipe closes a moment before its exit status is there
            code = self._server.poll()
            how = "no answer" if code is None else f"exit status {code}"
            self.close()
            raise UserError(f"the trial server did not start ({how}); see {self._log}: {_last_line(self._log)}")
        self.cold_reason, self._ready = str(answer.get("reason", "")), True

    def submit(self, folder: TrialDir) -> LocalJob:
        """Hands the folder to the server, which is started again if it has died."""
        return self.submit_part(folder, folder.exit, {})

    def submit_part(self, folder: TrialDir, end: Path, part: Mapping[str, str | int]) -> LocalJob:
        """The same for this machine's part of a trial.

        Args:
            folder: The trial's folder.
            end: What is written there when this machine's ranks have ended.
            part: `node`, the machine's number, and `address`, where the first one is reached.
        """
        order = json.dumps({"run": str(folder.path.resolve()), **part}).encode() + b"\n"
        self.start()
        try:
            return self._job(order, end)
        except BrokenPipeError:  # it died since we looked
            assert self._server is not None
            self.lose(self._server)
            self.start()
            return self._job(order, end)

    def find(self, folder: TrialDir) -> None:
        """Nothing of a local trial outlives the run that started it."""

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Two studies on one machine take turns, trial by trial: measured together, both would read slow."""
        return machine_turn(on_wait)

    def build_ops(self, names: Sequence[str]) -> str | None:
        """Compiles DeepSpeed ops ahead of the trials that need them; returns the compiler's last line if that failed."""
        command = [sys.executable, "-m", "autotune.worker", "build", *names]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        return (done.stderr.strip().splitlines() or ["unknown failure"])[-1] if done.returncode else None

    def close(self) -> None:
        """Ends the server and everything that it or a trial started."""
        server, self._server = self._server, None
        if server is None:
            return
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that still imports does not look whether it is wanted.
            server.wait(CANCEL_TIMEOUT_S if self._ready else 0.0)
        if server.poll() is None:
            server.kill()
            server.wait()
        sweep(self.mark)
        if server.returncode:  # it did not come to clear up after its trial
            for path in segments.abandoned(self._shared_before):
                with contextlib.suppress(OSError):
                    path.unlink()

    def lose(self, server: subprocess.Popen[bytes]) -> None:
        """Gives up a server that died or does not answer, with everything below it; one started since is left alone."""
        if server is self._server:
            self.close()
            self.mark = new_mark()

    def n_ended(self, server: subprocess.Popen[bytes]) -> int:
        """How many of its orders a server says that it has carried out, whatever became of what it wrote for them."""
        if server is self._server and server.stdout is not None:
            while select.select([server.stdout], [], [], 0)[0] and (said := os.read(server.stdout.fileno(), 4096)):
                self._n_ended += said.count(b"\n")
            return self._n_ended
        return 0

    def _job(self, order: bytes, end: Path) -> LocalJob:
        assert self._server is not None and self._server.stdin is not None
        self._server.stdin.write(order)
        self._server.stdin.flush()
        self._n_ordered += 1
        return LocalJob(self, self._server, self._n_ordered, end)

    def _answer(self, timeout_s: float) -> dict[str, object] | None:
        assert self._server is not None and self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        line = self._server.stdout.readline() if ready else b""
        return dict(json.loads(line)) if line else None

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ) | self._own
        environment.setdefault("DS_ACCELERATOR", "" if has_cuda_device() else "cpu")
        if not environment["DS_ACCELERATOR"]:
            del environment["DS_ACCELERATOR"]
        return (
            environment
            | {
                MARK: self.mark,
                "TORCH_EXTENSIONS_DIR": str(extensions_dir()),
                # Another ninja than the one that built an op finds its build dirty and builds it again.
                "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), environment.get("PATH", os.defpath)]),
                "OPENBLAS_NUM_THREADS": "1",  # numpy's thread pool starts at import; the server must have one thread to fork
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks for devices without initialising CUDA, which would not survive the fork
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": environment.get(
                    "NCCL_SOCKET_IFNAME", "lo"
                ),  # it only finds its peers by it, and they are all here
                "PYTHONUNBUFFERED": "1",
                "TOKENIZERS_PARALLELISM": environment.get("TOKENIZERS_PARALLELISM", "false"),
            }
        )


class LocalJob:
    """A trial in the hands of the local server."""

    reason = ""

    def __init__(self, executor: LocalExecutor, server: subprocess.Popen[bytes], number: int, end: Path) -> None:
        self._executor, self._server, self._number, self._end = executor, server, number, end

    def poll(self) -> Status:
        """Exited when the server says that it has carried out the order, lost when it died before it wrote how that ended.

        Its word, not the file: where others saw that first, the folder may be the next trial's by now.
        """
        if self._executor.n_ended(self._server) >= self._number:
            return Status.EXITED
        if self._server.poll() is not None:
            self._executor.lose(self._server)
            return Status.EXITED if self._end.exists() else Status.LOST
        return Status.RUNNING

    def cancel(self) -> None:
        """Asks the server to kill the ranks; kills the server if it does not."""
        if self.poll() is not Status.RUNNING:
            return
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(b'{"cancel": true}\n')
            self._server.stdin.flush()
        until = time.monotonic() + CANCEL_TIMEOUT_S
        while self.poll() is Status.RUNNING:
            if time.monotonic() > until:
                self._server.kill()
            time.sleep(0.01)


@contextlib.contextmanager
def machine_turn(on_wait: Callable[[], None], how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Holds the lock under which studies of one user take turns on this machine, alone or with others that share it (`LOCK_SH`)."""
    path = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}.lock"
    # In a folder that everybody writes to: never through somebody's link, and nothing is cut off.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+") as file:
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(0.05)
        yield


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    return lines[-1] if lines else "it wrote nothing"
