"""The folder of a trial: names of its files, and reading and writing them as typed records."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from autotune.system import files
from autotune.trial.result import Exit, RankReport, TrialResult

# A larger file is no report. The end of an event stream tells how far a rank came.
LARGEST_REPORT_BYTES, EVENTS_TAIL_BYTES = 64 << 20, 4 << 20
T = TypeVar("T")


class TrialDir:
    """Paths of a trial's files: `request.json`, `ds_config.json`, report and log per rank, `exit.json`, `result.json`.

    With several machines, each has a `node-N.json` (its name, and when it began) and an `exit-N.json`; `master.json`
    holds the address where the ranks meet. `job.json` names the engine's job; `cancel` asks the agents to stop. A
    training script writes into `scratch`, which is removed when the trial has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / "request.json"
        self.ds_config = path / "ds_config.json"
        self.exit = path / "exit.json"
        self.result = path / "result.json"
        self.workload = path / "workload.json"
        self.profile = path / "profile.json"
        self.machine = path / "machine.json"
        self.probe = path / "probe.json"
        self.events = path / "events.jsonl"
        self.scratch = path / "scratch"
        self.master = path / "master.json"
        self.cancel = path / "cancel"
        self.job = path / "job.json"

    def report(self, rank: int) -> Path:
        """Returns the report of a rank."""
        return self.path / f"rank-{rank}.json"

    def log(self, rank: int) -> Path:
        """Returns the log of a rank, its standard output and error."""
        return self.path / f"rank-{rank}.log"

    def events_of(self, node: int) -> Path:
        """Returns the event stream of a machine's ranks; on NFS, only one machine can append to a file."""
        return self.path / f"events-{node}.jsonl" if node else self.events

    def node(self, node: int) -> Path:
        """Returns the file that a machine's agent writes when it starts the trial."""
        return self.path / f"node-{node}.json"

    def node_exit(self, node: int, nodes: int) -> Path:
        """Returns the exit of a machine's ranks."""
        return self.path / f"exit-{node}.json" if nodes > 1 else self.exit

    def names(self) -> set[str]:
        """Returns the names of all files; on NFS only listing a folder shows new files of other machines at once."""
        try:
            return set(os.listdir(self.path))
        except FileNotFoundError:
            return set()


def write_record(path: Path, value: Any, *, sync: bool = True, private: bool = False) -> None:
    """Writes a dataclass or plain data as JSON, atomically; see `files.write_bytes`."""
    data = adapter(type(value)).dump_python(value, mode="json") if hasattr(value, "__dataclass_fields__") else value
    files.write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", sync=sync, private=private)


def read_record(path: Path, kind: type[T]) -> T:
    """Reads a dataclass back from JSON.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold such a dataclass.
    """
    found: T = adapter(kind).validate_json(files.read_regular(path))
    return found


def record_in(path: Path, kind: type[T]) -> T | None:
    """Reads a dataclass back from JSON; None without a file that holds one."""
    try:
        return read_record(path, kind)
    except (FileNotFoundError, ValueError):
        return None


def prepare(*kinds: type[Any]) -> None:
    """Makes what reads and writes these dataclasses, which takes milliseconds, ahead of the first use; forks have it too."""
    for kind in kinds:
        adapter(kind)


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """What reads and writes dataclasses of a kind."""
    if kind not in _ADAPTERS:  # takes up to 0.1 s, and a trial has nine such files
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def result_in(path: Path) -> TrialResult | None:
    """Returns the result of the trial in a folder; None without one that can be read."""
    return record_in(TrialDir(path).result, TrialResult)


def ended_in(trials: Path) -> Iterator[Path]:
    """Yields the folders of runs that have ended, of whatever depth; what a run that goes on removes meanwhile is passed over."""
    for around, folders, names in os.walk(trials):
        folders[:] = [name for name in folders if name != "scratch"]  # holds what the user's code writes
        if "exit.json" in names:
            yield Path(around)


def ran(path: Path) -> tuple[float, float] | None:
    """Returns the Unix time at which the ranks of a run began, and the seconds that they took; None where nothing tells."""
    folder = TrialDir(path)
    try:
        wall_s = float(files.json_of(files.read_regular(folder.exit))["wall_s"])
        with folder.events.open("rb") as lines:
            return float(files.json_of(lines.readline(4096))["time"]), wall_s
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ends(trial_dir: TrialDir, nodes: int) -> dict[int, Exit]:
    """Returns the exits of the machines that have written one."""
    names, found = trial_dir.names(), {}
    for node in range(nodes):
        path = trial_dir.node_exit(node, nodes)
        if path.name in names and (end := record_in(path, Exit)) is not None:
            found[node] = end
    return found


def reports(trial_dir: TrialDir, world_size: int) -> dict[int, RankReport]:
    """Returns the reports of the ranks that wrote a valid one."""
    found = {}
    for rank in range(world_size):
        with contextlib.suppress(ValueError):
            report: RankReport = adapter(RankReport).validate_json(
                files.tail(trial_dir.report(rank), LARGEST_REPORT_BYTES, whole=True) or b""
            )
            if report.rank == rank:
                found[rank] = report
    return found


def phases(trial_dir: TrialDir) -> dict[int, str]:
    """Returns the last phase that each rank entered, from the event streams; a killed rank leaves no report."""
    last: dict[int, str] = {}
    for event in events(trial_dir):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # written by somebody else
            if "phase" in event:
                last[int(event["rank"])] = str(event["phase"])
    return last


def events(trial_dir: TrialDir) -> list[dict[str, Any]]:
    """Returns the last events of all ranks, those of each machine in order."""
    found, lines = [], list[str]()
    for path in sorted(trial_dir.path.glob("events*.jsonl")):
        lines += (files.tail(path, EVENTS_TAIL_BYTES) or b"").decode(errors="replace").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short by a kill
            event = files.json_of(line)
            found += [event] if isinstance(event, dict) else []
    return found
