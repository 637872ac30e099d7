"""The actor of Ray on each machine of a study: it runs the agent, and carries files where no file system is shared."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.executors.node_agent import Spool
from autotune.system import files
from autotune.trial.folder import TrialDir, write_record

ANSWER_TIMEOUT_S = 15.0
LINGER_S = 20.0
# What an actor says whose driver was killed before it had asked for an agent; Ray drops the calls of a dead driver.
NEVER_STARTED = "the run that asked for machines ended before it had started its agents"


class Machine:
    """Ray actor on each machine: starts the agent, and copies files if there is no shared file system."""

    def __init__(self, group: str, node: int) -> None:
        self._group, self._node = group, node
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Path | None = None
        self._log = Path(os.devnull)
        self._sent: dict[Path, tuple[int, int]] = {}

    def address(self) -> str:
        """Returns the address of this machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, spool: str, settings: Mapping[str, Any], address: str, shared: bool) -> bool:
        """Starts the agent; returns `is_apart()`."""
        place = Spool(Path(spool))
        if not (shared and place.settings.exists()):
            self._root = Path(tempfile.mkdtemp(prefix="autotune-ray-"))
            place = Spool(self._root / "spool")
            write_record(place.settings, dict(settings), private=True)  # variables may hold tokens
            place.alive.touch()
        exported = dict(settings["exported"])
        environment = os.environ | exported
        if "OMP_NUM_THREADS" not in exported:
            environment.pop("OMP_NUM_THREADS", None)  # set by Ray from `cpus_per_rank`
        command = place.agent("--lifeline", "--node", str(self._node), "--address", address)
        self._log = place.path / f"agent-{self._node}.log"
        with open(self._log, "ab") as log:
            # The agent ends when its standard input is closed, so with this actor.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        threading.Thread(target=self._give_back, daemon=True).start()
        return self._root is not None

    def is_apart(self) -> bool:
        """Returns whether this machine shares no file system with the coordinator."""
        return self._root is not None

    def state(self) -> str:
        """Returns why the agent ended, or that there never was one; empty while it runs."""
        if self._process is None:
            return NEVER_STARTED
        if (code := self._process.poll()) is None:
            return ""
        said = files.last_line(self._log)
        return f"the agent of machine {self._node} ended with status {code}: {said}"

    def stop(self) -> None:
        """Ends the agent and everything that it runs."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ANSWER_TIMEOUT_S)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def exchange(self, key: str, orders: Sequence[Mapping[str, Any]], new: Mapping[str, bytes]) -> dict[str, bytes]:
        """Writes the coordinator's files of a trial, and returns the files that are new here.

        Args:
            orders: All orders of the spool.
            new: Files that are new or have changed, by name; the target and its modules under `target/`.
        """
        assert self._root is not None
        spool, folder = Spool(self._root / "spool"), TrialDir(self._root / "trials" / key)
        for name, data in new.items():
            files.write_bytes(folder.path / name, data, sync=False)
        if "request.json" in new:
            for old in folder.path.parent.iterdir():
                if old != folder.path:
                    shutil.rmtree(old, ignore_errors=True)
            request = json.loads(folder.request.read_text())
            beside = folder.path / "target" / Path(request["target"]).name
            if beside.is_file():
                write_record(folder.request, {**request, "target": str(beside)})
        spool.alive.touch()
        trials = self._root / "trials"
        own = [{**order, "run": str(trials / order["key"])} if "run" in order else dict(order) for order in orders]
        if spool.ordered() != own:
            write_record(spool.orders, own)
        return self._news(spool, folder, new)

    def _news(self, spool: Spool, folder: TrialDir, known: Mapping[str, bytes]) -> dict[str, bytes]:
        there = {f"spool/{spool.node(self._node).name}": spool.node(self._node)}
        for _ in range(2):  # an exit seen by the first pass was written after the reports, which the second one sees
            found_now = [path for path in sorted(folder.path.iterdir()) if path.is_file()]
            there |= {path.name: path for path in found_now if not path.name.startswith(".")}
        found = {}
        for name, path in there.items():
            if name in ("request.json", "ds_config.json", "job.json", "cancel") or name in known or not path.exists():
                continue
            if self._sent.get(path) != (now := stamp(path)):
                self._sent[path] = now
                found[name] = path.read_bytes()
        return found

    def _give_back(self) -> None:
        """Gives the machines back to Ray when the agent has ended by itself, because it was idle."""
        assert self._process is not None
        self._process.wait()
        time.sleep(LINGER_S)  # until then a coordinator can ask why the agent ended
        import ray.util

        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(ray.util.get_placement_group(self._group))


def stamp(path: Path) -> tuple[int, int]:
    """Returns what changes with a file: its time of writing, and its size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size
