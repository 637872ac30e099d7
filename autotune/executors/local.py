"""Runs trials on this machine: one warm server, which forks the ranks of each trial."""

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.executors.base import Executor, Status, built
from autotune.system import device, files, shared_memory, temporary
from autotune.system.machine import limit_on_addresses
from autotune.system.processes import MARK, new_mark, sweep
from autotune.system.toolkit import build_environment, extensions_dir, is_built
from autotune.trial.folder import TrialDir

START_TIMEOUT_S = 300.0
CANCEL_TIMEOUT_S = 10.0


class LocalExecutor(Executor):
    """Executor that runs trials on this machine.

    Args:
        modules: Modules that the user's target imports; the server imports them once.
        environment: Variables that the user's launch command sets, for the server and its trials.

    Attributes:
        mark: Value of `MARK` in the environment of all processes that it started.
    """

    turns = fcntl.LOCK_EX  # two trials at a time on one machine would slow each other down

    def __init__(self, modules: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark = new_mark()
        self._shared_before: frozenset[tuple[str, int]] = frozenset()
        self._modules, self._log, self._own = list(modules), log, dict(environment or {})
        self._server: subprocess.Popen[bytes] | None = None
        self._ready, self._cold_reason = False, ""
        self._n_ordered = self._n_ended = 0

    @property
    def hosts(self) -> frozenset[str]:
        """The name of this machine."""
        return frozenset({socket.gethostname()})

    @property
    def cold_reason(self) -> str:
        """Why the warm server cannot fork ranks, as it said; empty if it can."""
        return self._cold_reason

    def launch(self) -> None:
        """Starts the warm server, unless one runs, and does not wait for what it imports."""
        if self._server is not None:
            if self._server.poll() is None or not self._ready:  # of one that died over its imports `start` tells
                return
            self.lose(self._server)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "autotune.worker", "serve", *self._modules]
        self._shared_before, self._ready = frozenset(shared_memory.there()), False
        self._n_ordered = self._n_ended = 0
        with open(self._log, "ab") as log:
            # In a new session, Ctrl-C in the terminal reaches only the driver, which then stops the ranks in order.
            pipe, environment = subprocess.PIPE, self._environment()
            self._server = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, env=environment, start_new_session=True
            )

    def start(self) -> None:
        """Starts the warm server, unless one runs, and waits until it has imported everything."""
        self.launch()
        if self._ready:
            return
        assert self._server is not None
        answer = self._answer(START_TIMEOUT_S)
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)  # its pipe closes shortly before it has an exit status
            code = self._server.poll()
            how = "no answer" if code is None else f"exit status {code}"
            self.close()
            said = "; ".join(filter(None, (files.last_line(self._log), limit_on_addresses())))
            raise UserError(f"the trial server did not start ({how}); see {self._log}: {said}")
        self._cold_reason, self._ready = str(answer.get("reason", "")), True

    def submit(self, folder: TrialDir) -> "LocalJob":
        """Orders the trial from the server, which is started again if it has died."""
        return self.submit_part(folder, folder.exit, {})

    def submit_part(self, folder: TrialDir, end: Path, part: Mapping[str, str | int]) -> "LocalJob":
        """Orders this machine's part of a trial.

        Args:
            end: File that the server writes when this machine's ranks have ended.
            part: `node`, the machine's number, and `address` of the first machine.
        """
        order = json.dumps({"run": str(folder.path.resolve()), **part}).encode() + b"\n"
        self.start()
        try:
            return self._job(order, end)
        except BrokenPipeError:  # it died since `start`
            assert self._server is not None
            self.lose(self._server)
            self.start()
            return self._job(order, end)

    def build_op(self, op: str, on_tick: Callable[[], None] = lambda: None) -> str | None:
        """Compiles an op, unless it lies there; returns the error, if any."""
        folder = Path(self._environment()["TORCH_EXTENSIONS_DIR"])  # of these very libraries
        if is_built(op, folder):
            return None
        return built(self, self._log.with_name(f"{self._log.stem}-build"), op, 1, on_tick)

    def close(self) -> None:
        """Ends the server and all processes that it or a trial started."""
        server, self._server = self._server, None
        if server is None:
            return
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # While it imports, it does not notice that its pipe is closed.
            server.wait(CANCEL_TIMEOUT_S if self._ready else 0.0)
        if server.poll() is None:
            server.kill()
            server.wait()
        sweep(self.mark)
        if server.returncode:  # it did not clean up after its trial
            temporary.remove_left(self.mark)
            for path in shared_memory.abandoned(self._shared_before):
                with contextlib.suppress(OSError):
                    path.unlink()

    def lose(self, server: subprocess.Popen[bytes]) -> None:
        """Ends a server that died or does not answer; does nothing if another one has replaced it."""
        if server is self._server:
            self.close()
            self.mark = new_mark()

    def n_ended(self, server: subprocess.Popen[bytes]) -> int:
        """Returns how many orders a server has reported as done."""
        if server is self._server and server.stdout is not None:
            while select.select([server.stdout], [], [], 0)[0] and (said := os.read(server.stdout.fileno(), 4096)):
                self._n_ended += said.count(b"\n")
            return self._n_ended
        return 0

    def _job(self, order: bytes, end: Path) -> "LocalJob":
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
        if not environment.get("DS_ACCELERATOR"):  # an empty one makes DeepSpeed fail
            environment.pop("DS_ACCELERATOR", None)
            found = device.here(environment)
            if found.accelerator == "cpu" and not found.problem:  # saves DeepSpeed the search; ranks tell a problem
                environment["DS_ACCELERATOR"] = "cpu"
        return (
            environment
            | build_environment(environment)
            | {
                MARK: self.mark,
                "TORCH_EXTENSIONS_DIR": str(extensions_dir(environment)),
                # Another version of ninja than the one that built an op would build it again.
                "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), environment.get("PATH", os.defpath)]),
                # numpy starts threads at import, and a process with threads must not fork.
                "OPENBLAS_NUM_THREADS": "1",
                # Lets torch count devices without initialising CUDA, which would not survive the fork.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                # All ranks are on this machine, or `network.environment` says otherwise; NCCL uses it only to find its peers.
                "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo"),
                "NCCL_SOCKET_IFNAME": environment.get("NCCL_SOCKET_IFNAME", "lo"),
                "PYTHONUNBUFFERED": "1",
                "TOKENIZERS_PARALLELISM": environment.get("TOKENIZERS_PARALLELISM", "false"),
            }
        )


class LocalJob:
    """A trial that the local server runs."""

    reason = ""

    def __init__(self, executor: LocalExecutor, server: subprocess.Popen[bytes], number: int, end: Path) -> None:
        self._executor, self._server, self._number, self._end = executor, server, number, end

    def poll(self) -> Status:
        """Returns `exited` once the server has reported the order as done, `lost` if it died before it wrote the exit.

        The file alone does not tell: other machines may have seen it first, and the folder may hold the next trial.
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
