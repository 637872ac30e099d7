"""Runs a launch command up to its training script, and records how the ranks would have been started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpecError
from autotune.study.events import SILENT, EventSink
from autotune.study.spec.spec import StudySpec, stated_command
from autotune.system import processes
from autotune.system.processes import MARK, sweep
from autotune.system.signals import terminable
from autotune.trial.command import (
    ALIASES,
    Invocation,
    InvocationError,
    check_templates,
    start_of,
    templates_in,
    with_placeholders,
    without_placeholders,
)
from autotune.trial.target import inspect_target

DEADLINE_S = 180.0
HOOK = Path(__file__).parent / "_capture"
CAPTURE = "AUTOTUNE_CAPTURE"
# What a trial's own ranks get instead, and what says nothing about the script.
OURS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|CROSS_(RANK|SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|_|SHLVL|PWD|OLDPWD|PYTHONPATH|PYTORCH_NVML_BASED_CUDA_CHECK"
    rf"|(TORCHELASTIC|OMPI|PMIX?|BASH_FUNC)_.*|{CAPTURE}(_BY)?"
)


@dataclass(frozen=True)
class _Record:
    """A process that would have run a script; one with a rank from a launcher counts as training."""

    rank: int | None
    local_rank: int
    world_size: int
    local_world_size: int
    script: str
    module: str
    arguments: tuple[str, ...]
    working_dir: str
    environment: Mapping[str, str]
    python: str
    trains: bool


def wanted_study(target: str, overrides: Mapping[str, Any], view: EventSink = SILENT) -> tuple[StudySpec, list[str]]:
    """The study that a TARGET means, whether file or launch command, and what to say about it.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command.
        overrides: Fields of `StudySpec` that go before those of the file; None where nothing is said.
        view: Told that a launch command is run.

    Raises:
        UserError: It means none, and why.
    """
    stated = stated_command(target, overrides)
    if stated is None:
        return StudySpec.of(Path(target), overrides), []
    command, folder = stated
    if overrides.get("script_args"):
        command = f"{command} {shlex.join(overrides['script_args'])}"
    check_templates([command], f"`{command}`")
    with terminable():
        view.doing("running your command up to its training script, once")
        invocation, notes = capture(command, folder, view.tick)
    overrides = {**overrides, "script_args": None, "command": command}
    return StudySpec.of_command(invocation, overrides, Path(target) if os.path.exists(target) else None), notes


def capture(
    command: str, folder: Path, on_tick: Callable[[], None] = lambda: None, deadline_s: float = DEADLINE_S
) -> tuple[Invocation, list[str]]:
    """Runs a launch command until its ranks have started, without their script, and ends all its processes.

    Args:
        command: The user's command line, for a shell; templates in it are carried through.
        folder: Where it is run.
        on_tick: Called some times a second.
        deadline_s: How long it may take.

    Returns:
        How the script is started, and what the user should know about it.

    Raises:
        InvocationError: No rank came, or none that can run here, and why.
    """
    masked_command, numbers = with_placeholders(command)
    with (
        tempfile.TemporaryDirectory(prefix="autotune-launch-") as name,
        _running(masked_command, folder, Path(name)) as run,
    ):
        until = time.monotonic() + deadline_s
        while (code := run.process.poll()) is None and time.monotonic() < until and not _complete(run.records()):
            run.let_go()
            on_tick()
            time.sleep(0.05)
        records, log = run.records(), run.last_line()
    shown = f"`{command}`"
    if not records:
        if code is None:
            raise InvocationError(
                f"{shown} started no training script within {deadline_s:g} s; does it wait for something? It said: {log}"
            )
        if code:
            raise InvocationError(f"{shown} ended with status {code} and started no training script: {log}")
        raise InvocationError(
            f"{shown} started no training script that can be seen: a container, another machine, or Python's -I and -E hide it;"
            " name the script instead: autotune run train.py -- --its --args"
        )
    chosen, notes = _chosen(records, shown)
    found = _invocation(chosen, records, numbers, run.given, command)
    if start_of(found) is None:
        notes = [
            *notes,
            f"{Path(found.script).name} is the first training that your command starts, and the one that is tuned",
        ]
    missing = [name for name in numbers if name not in _names(found)]
    if missing:
        raise InvocationError(
            f"{shown}: {{{missing[0]}}} did not arrive: it stands neither in the arguments nor in the environment of"
            f" {Path(found.script).name}; write it where the script itself sees it"
        )
    return found, notes


class _Running:
    """A command under way, and what its processes have left."""

    def __init__(self, command: str, folder: Path, scratch: Path) -> None:
        self.folder, self.log = scratch / "records", scratch / "log"
        for path in (self.folder, scratch / "tmp"):
            path.mkdir()
        self.mark = uuid.uuid4().hex
        self._read: dict[Path, _Record] = {}
        own = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
        paths = [str(HOOK), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])]
        self.given = own | {
            "PYTHONPATH": os.pathsep.join(paths),
            CAPTURE: str(self.folder),
            f"{CAPTURE}_BY": processes.identity(),
            MARK: self.mark,
            "TMPDIR": str(scratch / "tmp"),
            # `python` and `torchrun` are those that trials run with, also where this environment is not activated.
            "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)]),
        }
        shell = shutil.which("bash") or "/bin/sh"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [shell, "-c", command],
                cwd=folder,
                env=self.given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def records(self) -> list[_Record]:
        """The processes seen so far, in their order; a launcher's refusal is raised."""
        for path in sorted(self.folder.glob("*.json")):
            if path not in self._read:
                data = json.loads(path.read_text())
                if "refused" in data:
                    raise InvocationError(f"the launch command cannot be tuned here: {data['refused']}")
                self._read[path] = _record(data)
        return [self._read[path] for path in sorted(self._read)]

    def let_go(self) -> None:
        """Let processes that are not the training end without an error, so that the command goes on."""
        for path in self._read:
            if not self._read[path].trains:
                path.with_name(f"{path.name}.go").touch()

    def last_line(self) -> str:
        """The last line that the command printed."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:500] if lines else "it printed nothing"

    def end(self) -> None:
        """Ends every process of the command."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        sweep(self.mark)
        self.process.wait()


@contextlib.contextmanager
def _running(command: str, folder: Path, scratch: Path) -> Iterator[_Running]:
    run = _Running(command, folder, scratch)
    try:
        yield run
    finally:
        run.end()


def _record(data: Mapping[str, Any]) -> _Record:
    rank, local_rank, world_size, local_world_size = data["rank"] or (None, 0, 1, 1)
    return _Record(
        rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size, script=data["script"] or "",
        module=data["module"] or "", arguments=tuple(data["arguments"]), working_dir=data["working_dir"],
        environment=data["environment"], python=data["python"], trains=rank is not None or _trains(data["script"] or ""),
    )  # fmt: skip


def _complete(records: Sequence[_Record]) -> bool:
    """Whether all ranks of a training are there; what the command would do after that is not for us."""
    training = [record for record in records if record.trains]
    ranks = {record.rank for record in training}
    return bool(training) and len(ranks) >= training[0].local_world_size


def _chosen(records: Sequence[_Record], shown: str) -> tuple[_Record, list[str]]:
    """The record of the training, and what is said of the others.

    Raises:
        InvocationError: It cannot be told which one it is, or it cannot run here.
    """
    ranks = sorted((record for record in records if record.rank is not None), key=lambda record: record.rank or 0)
    training = [record for record in ranks or records if record.trains]
    scripts = {record.script: record for record in reversed(training or ranks or records)}
    if len(scripts) > 1:
        names = ", ".join(sorted(os.path.relpath(path) for path in scripts))
        raise InvocationError(
            f"{shown} starts several scripts ({names}); name the one to tune: autotune run train.py -- --its --args"
        )
    chosen = next(iter(scripts.values()))
    if chosen.world_size > chosen.local_world_size:
        raise InvocationError(
            f"{shown} starts {chosen.local_world_size} of {chosen.world_size} ranks here and the others on other machines,"
            " which a trial's ranks do not take from a launcher; launch it for one machine, and say --nodes with --executor or --hostfile"
        )
    if not chosen.script:
        raise InvocationError(f"{shown}: there is no module {chosen.module!r} that {chosen.working_dir} could start")
    if not os.path.samefile(chosen.python, sys.prefix):
        raise InvocationError(
            f"{shown} trains with the Python environment {chosen.python}, autotune is installed in {sys.prefix};"
            " install autotune there and run it from there"
        )
    others = sorted({Path(record.script).name for record in records if record.script != chosen.script})
    return chosen, [
        f"{', '.join(others)} of your command was not run; run it yourself first if the training needs it"
    ] if others else []


def _trains(path: str) -> bool:
    try:
        return inspect_target(Path(path)).kind == "script"
    except SpecError:
        return False


def _invocation(
    chosen: _Record, records: Sequence[_Record], numbers: Mapping[str, str], given: Mapping[str, str], command: str
) -> Invocation:
    peers = {record.rank: record for record in records if record.script == chosen.script and record.rank is not None}
    environment = {
        name: without_placeholders(value, numbers)
        for name, value in chosen.environment.items()
        if given.get(name) != value and not OURS.fullmatch(name)
    }
    path = os.pathsep.join(
        part for part in chosen.environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(HOOK)
    )
    if path != os.environ.get("PYTHONPATH", ""):
        environment["PYTHONPATH"] = path
    return Invocation(
        script=chosen.script,
        module=chosen.module,
        working_dir=chosen.working_dir,
        arguments=tuple(
            without_placeholders(argument, numbers) for argument in _arguments(chosen, list(peers.values()))
        ),
        environment=environment,
        world_size=chosen.world_size if chosen.rank is not None else None,
        command=command,
    )


def _arguments(chosen: _Record, peers: Sequence[_Record]) -> list[str]:
    """The arguments, with `{local_rank}` where a launcher puts that number."""
    return [_argument(n, argument, chosen, peers) for n, argument in enumerate(chosen.arguments)]


def _argument(n: int, argument: str, chosen: _Record, peers: Sequence[_Record]) -> str:
    if chosen.rank is not None and re.fullmatch(r"--local[-_]rank=\d+", argument):
        return f"{argument.partition('=')[0]}={{local_rank}}"
    said = {peer.rank: peer.arguments[n] for peer in peers if n < len(peer.arguments)}
    by_rank = {re.sub(rf"(?<!\d){peer.local_rank}(?!\d)", "{local_rank}", said.get(peer.rank, "")) for peer in peers}
    return by_rank.pop() if len(set(said.values())) > 1 and len(by_rank) == 1 else argument


def _names(found: Invocation) -> tuple[str, ...]:
    """The templates that arrived, by all their names."""
    seen = templates_in([*found.arguments, *found.environment.values()])
    return (*seen, *(alias for alias, name in ALIASES.items() if name in seen))
