"""The engine for the machines of a hostfile, reached over ssh: `--executor local --hostfile FILE`."""

import fcntl
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import SpecError, UserError
from autotune.executors.base import Status
from autotune.executors.cluster import Engine, JobState
from autotune.executors.node_agent import Settings, Spool
from autotune.system import device, files
from autotune.trial.folder import read_record

OPTIONS = {
    "ssh": "the command that reaches a host, with its options (default: ssh -o BatchMode=yes)",
    "python": "the interpreter on the hosts (default: this one)",
    "address": "where the others reach the first host (default: its name in the hostfile)",
    "idle": "seconds after which agents whose coordinator is gone end (default: 600)",
}
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
END_TIMEOUT_S = 15.0
LINK_FAILED = 255
# Devices as `CUDA_VISIBLE_DEVICES` numbers them.
NUMBERS = re.compile(r"\d+(\s*,\s*\d+)*")
# What ssh says of a connection that was there and broke: the host can be reached. A host that cannot has a reason.
BROKE = re.compile(r"closed by|connection reset|broken pipe|not responding|it said nothing", re.IGNORECASE)


class Hosts(Engine):
    """Engine that starts agents over ssh; each ends with its connection, so that nothing outlives this process.

    Args:
        hosts: The machines, in order; they share this file system, and autotune is installed at the same path.
    """

    name = "ssh"
    turns = fcntl.LOCK_EX  # among the studies of this machine; nothing else manages the hosts

    def __init__(self, options: dict[str, str], hosts: Sequence[str]) -> None:
        self.options, self.hosts = options, list(hosts)
        self._running: dict[str, tuple[Spool, list[subprocess.Popen[bytes]]]] = {}
        self._reached: set[str] = set()

    def check(self, nodes: int) -> None:
        """Checks that there are enough hosts."""
        if nodes > len(self.hosts):
            raise UserError(f"--nodes: {nodes} machines are asked for, and the hostfile names {len(self.hosts)}")

    def launch(self, spool: Spool, nodes: int) -> str:
        """Starts an agent on each of the first hosts."""
        job = uuid.uuid4().hex[:12]
        ssh = shlex.split(self.options.get("ssh", SSH))
        python, address = self.options.get("python", sys.executable), self.options.get("address")
        address = address or self.hosts[0].rpartition("@")[2]
        exported = read_record(spool.settings, Settings).exported | _chosen_devices()
        processes = []
        for node, host in enumerate(self.hosts[:nodes]):
            # A file, because the remote shell would interpret quotation marks in an argument in its own way.
            script = spool.start(node)
            agent = spool.agent("--node", str(node), "--address", address, "--lifeline", python=python)
            variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exported.items())
            # Private, since variables may hold tokens.
            files.write_text(script, f"{variables}exec {shlex.join(agent)}\n", private=True)
            command = [*ssh, host, "sh", shlex.quote(str(script))]
            with open(_log(spool, node), "ab") as log:
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
                )
        self._running[job] = spool, processes
        return job

    def standing(self, job: str) -> JobState:
        """Returns `running`, or `lost` once a connection has ended."""
        if job not in self._running:
            return JobState(Status.TAKEN, "ssh: the run that held the connections is over")
        spool, processes = self._running[job]
        for node, process in enumerate(processes):
            if (code := process.poll()) is not None:
                said = files.last_line(_log(spool, node))
                words = f"ssh: the connection to {self.hosts[node]} ended with status {code}: {said}"
                if code != LINK_FAILED and code > 0:
                    return JobState(Status.LOST, words)  # the agent's own status
                reached = self.hosts[node] in self._reached or BROKE.search(said)
                return JobState(Status.TAKEN if reached else Status.REFUSED, words)
            if spool.said(node):
                self._reached.add(self.hosts[node])
        return JobState(Status.RUNNING)

    def end(self, job: str) -> None:
        """Closes the connections, with which the agents end."""
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


def _chosen_devices() -> dict[str, str]:
    """Returns the user's choice of devices by number, which no scheduler makes on these hosts; a UUID is one machine's."""
    names = [name for each in device.CHOOSE.values() for name in each]
    return {name: value for name in names if NUMBERS.fullmatch(value := os.environ.get(name, ""))}


def _log(spool: Spool, node: int) -> Path:
    return spool.path / f"ssh-{node}.log"


# `HOST` or `USER@HOST`.
HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_\[:][\w.:\]%-]*")


def read_hostfile(path: Path) -> dict[str, int | None]:
    """Returns the machines of a DeepSpeed hostfile and their slots: `HOST slots=N` per line, `#` begins a comment."""
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(files.read_text(path, "--hostfile").splitlines(), 1):
        text = line.partition("#")[0].strip()
        found = re.fullmatch(r"(\S+)(?:\s+slots\s*=\s*([1-9]\d{0,4}))?", text)
        if text and (found is None or not HOST.fullmatch(found[1])):  # ssh takes -oProxyCommand=... as an option
            raise SpecError(f"{path}:{number}: `HOST slots=N` is needed, not {text!r}")
        if found and found[1] in hosts:
            raise SpecError(f"{path}:{number}: {found[1]} is there twice")
        if found:
            hosts[found[1]] = int(found[2]) if found[2] else None
    if not hosts:
        raise SpecError(f"{path}: it names no host")
    return hosts
