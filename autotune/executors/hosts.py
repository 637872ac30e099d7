"""Machines of a hostfile, reached over the user's own ssh: `--executor local --hostfile FILE`."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence

from autotune import UserError, files, trial
from autotune.executors.agent import Settings, Spool
from autotune.executors.agents import Standing
from autotune.executors.base import Status
from autotune.executors.local import machine_turn
from autotune.trial import TrialDir

OPTIONS = {
    "ssh": "the command that reaches a host, with its options (default: ssh -o BatchMode=yes)",
    "python": "the interpreter on the hosts (default: this one)",
    "address": "where the others reach the first host (default: its name in the hostfile)",
    "idle": "seconds after which agents whose coordinator is gone end (default: 600)",
}
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
END_TIMEOUT_S = 15.0


class Hosts:
    """Agents over ssh; each ends as soon as its connection does, so that nothing outlives this process.

    Args:
        options: Of the user's, by the names in `OPTIONS`.
        hosts: The machines, in order; they share our file system, and autotune is installed on them at the same place.
    """

    name = "ssh"
    hold = True

    def __init__(self, options: dict[str, str], hosts: Sequence[str]) -> None:
        self.options, self.hosts = options, list(hosts)
        self._running: dict[str, tuple[Spool, list[subprocess.Popen[bytes]]]] = {}

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Studies that are run from here take turns: nobody else watches over the hosts."""
        return machine_turn(on_wait)

    def check(self, nodes: int) -> None:
        """Looks whether there are hosts enough.

        Raises:
            UserError: There are not.
        """
        if nodes > len(self.hosts):
            raise UserError(f"--nodes: {nodes} machines are asked for, and the hostfile names {len(self.hosts)}")

    def launch(self, spool: Spool, nodes: int) -> str:
        """Starts an agent on each of the first hosts."""
        job = uuid.uuid4().hex[:12]
        ssh = shlex.split(self.options.get("ssh", SSH))
        address = shlex.quote(self.options.get("address", self.hosts[0].rpartition("@")[2]))
        exported = trial.read(spool.settings, Settings).exported
        processes = []
        for node, host in enumerate(self.hosts[:nodes]):
            # A file, not an argument: what the remote shell makes of quotation marks is not ours to guess.
            script = spool.path / f"start-{node}.sh"
            python = shlex.quote(self.options.get("python", sys.executable))
            agent = f"{python} -m autotune.executors.agent {shlex.quote(str(spool.path))} --node {node} --address {address} --lifeline"
            variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exported.items())
            files.write_text(script, f"{variables}exec {agent}\n", private=True)  # the variables may hold tokens
            with open(_log(spool, node), "ab") as log:
                processes.append(
                    subprocess.Popen(
                        [*ssh, host, "sh", shlex.quote(str(script))],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        self._running[job] = spool, processes
        return job

    def standing(self, job: str) -> Standing:
        """Running, unless a connection has ended."""
        if job not in self._running:
            return Standing(Status.LOST, "ssh: the run that held the connections is over")
        spool, processes = self._running[job]
        for node, process in enumerate(processes):
            if (code := process.poll()) is not None:
                words = f"ssh: the connection to {self.hosts[node]} ended with status {code}: {_last_line(spool, node)}"
                return Standing(Status.LOST, words)
        return Standing(Status.RUNNING)

    def end(self, job: str) -> None:
        """Closes the connections; the agents end with them."""
        _, processes = self._running.pop(job, (None, []))
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def exchange(self, job: str, spool: Spool, folder: TrialDir) -> None:
        """The hosts share our file system."""


def _log(spool: Spool, node: int) -> str:
    return str(spool.path / f"ssh-{node}.log")


def _last_line(spool: Spool, node: int) -> str:
    with contextlib.suppress(OSError), open(_log(spool, node), errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"
    return "it said nothing"
