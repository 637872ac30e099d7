"""Runs a launch command up to its training script, and records how it starts the ranks."""

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpecError, UserError
from autotune.study.events import SILENT, EventSink
from autotune.study.spec.spec import StudySpec, stated_command
from autotune.system import files, processes, temporary
from autotune.system.processes import MARK, marked, sweep
from autotune.system.signals import terminable, undisturbed
from autotune.trial.command import (
    ALIASES,
    Invocation,
    check_templates,
    start_of,
    templates_in,
    with_placeholders,
    without_placeholders,
)
from autotune.trial.target import inspect_target

DEADLINE_S = 180.0
HOOK = Path(__file__).parent / "_capture"
BIN = Path(sys.prefix) / "bin"
# What of this environment starts Python for a user's command.
PROGRAMS = re.compile(r"python[0-9.]*|torchrun|deepspeed(\.pt)?|ds|accelerate(-launch)?|horovodrun")
CAPTURE = "AUTOTUNE_CAPTURE"
NAME_IT = "name the script to tune: autotune run train.py -- --its --args"
# Variables that a trial sets for its own ranks, or that say nothing about the script.
OURS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|CROSS_(RANK|SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|_|SHLVL|PWD|OLDPWD|PYTHONPATH|PYTORCH_NVML_BASED_CUDA_CHECK"
    rf"|(TORCHELASTIC|OMPI|PMIX?|BASH_FUNC)_.*|{CAPTURE}(_BY|_ASKED)?"
)


@dataclass(frozen=True)
class _Record:
    """A process that would have run a script, as `_capture/sitecustomize.py` wrote it down."""

    rank: int | None
    local_rank: int
    world_size: int
    local_world_size: int
    script: str
    module: str
    arguments: list[str]
    working_dir: str
    environment: dict[str, str]
    python: str

    @functools.cached_property
    def trains(self) -> bool:
        """Whether it is the training: a process with a rank, or a script that trains by its text."""
        try:
            return self.rank is not None or inspect_target(Path(self.script)).kind == "script"
        except SpecError:
            return False


def wanted_study(target: str, overrides: Mapping[str, Any], view: EventSink = SILENT) -> tuple[StudySpec, list[str]]:
    """Returns the study of TARGET, and notes about it for the user.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command.
        overrides: Fields of `StudySpec` that replace those of the file; None for those not given.
    """
    stated = stated_command(target, overrides)
    if stated is None:
        return StudySpec.of(Path(target), overrides), []
    command, folder = stated
    if (given := overrides.get("working_dir")) is not None:
        folder = files.absolute(given, Path.cwd(), "working_dir")
    if not os.path.isdir(folder):
        raise SpecError(f"working_dir: there is no folder {folder}; the command has to run somewhere")
    if overrides.get("script_args"):
        command = f"{command.rstrip()} {shlex.join(overrides['script_args'])}"  # a block of YAML ends in a line break
    check_templates([command], f"`{command}`")
    StudySpec.check(overrides)
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
        command: The user's command line, for a shell; it may contain templates.
        on_tick: Called every 50 ms.

    Returns:
        The script with arguments, folder and environment, and notes for the user.

    Raises:
        UserError: The command started no rank, or none that can run here.
    """
    masked_command, numbers = with_placeholders(command)
    with temporary.folder("autotune-launch") as scratch, _Running(masked_command, folder, scratch) as run:
        process, until = run.start(), time.monotonic() + deadline_s
        while run.lives() and time.monotonic() < until and not _complete(run.records()):
            run.let_go()
            on_tick()
            time.sleep(0.05)
        code = None if run.lives() else process.poll()
        records, log = run.records(), files.last_line(run.log)
    shown = f"`{command}`"
    if not records:
        if code is None:
            said = f"does it wait for something? It said: {log}"
            raise UserError(f"{shown} started no training script within {deadline_s:g} s; {said}")
        if code:
            raise UserError(f"{shown} ended with status {code} and started no training script: {log}")
        raise UserError(
            f"{shown} started no training script that can be seen: code after -c is no file, and a container, another machine,"
            f" Python's -I and -E, or another PYTHONPATH for an interpreter that is named by its path hide it; {NAME_IT}"
        )
    chosen = _chosen(records, shown)
    found = _invocation(chosen, records, numbers, run, command)
    missing = [name for name in numbers if name not in _names(found)]
    if missing:
        raise UserError(
            f"{shown}: {{{missing[0]}}} did not arrive: it stands neither in the arguments nor in the environment of"
            f" {Path(found.script).name}; write it where the script itself sees it"
        )
    return found, _notes(records, chosen, found)


def _notes(records: Iterable[_Record], chosen: _Record, found: Invocation) -> list[str]:
    """Returns what of a command is not run, or not as it says."""
    notes = []
    others = sorted({Path(record.script).name for record in records if record.script != chosen.script})
    if others:
        names = ", ".join(others)
        notes.append(f"{names} of your command was not run; run it yourself first if the training needs it")
    if start_of(found) is None:
        name = Path(found.script).name
        notes.append(f"{name} is the first training that your command starts, and the one that is tuned")
    asked = int(chosen.environment.get(f"{CAPTURE}_ASKED", 1))
    if asked > 1 and chosen.rank is None:
        notes.append(
            f"the command asks for {asked} processes, but its launcher starts one: without `--ranks {asked}` trials have one"
            " rank, too"
        )
    return notes


def _write_programs(folder: Path) -> dict[str, str]:
    """Writes a program for each one that starts Python, which has it find the hook whatever PYTHONPATH the command sets.

    Returns:
        Variables by which bash has a function for each: a command may put folders before ours on the path of programs, as
        it does where it activates an environment.
    """
    hooked, functions = f"PYTHONPATH={shlex.quote(str(HOOK))}${{PYTHONPATH:+:$PYTHONPATH}}", {}
    for program in BIN.glob("*"):
        if PROGRAMS.fullmatch(program.name):
            (folder / program.name).write_text(f'#!/bin/sh\nexport {hooked}\nexec {shlex.quote(str(program))} "$@"\n')
            (folder / program.name).chmod(0o755)
            functions[f"BASH_FUNC_{program.name}%%"] = f'() {{ {hooked} command {program.name} "$@"; }}'
    return functions


class _Running:
    """A running command, and the records of its processes."""

    def __init__(self, command: str, folder: Path, scratch: Path) -> None:
        self.folder, self.log = scratch / "records", scratch / "log"
        self.programs = scratch / "bin"
        for path in (self.folder, scratch / "tmp", self.programs):
            path.mkdir()
        functions = _write_programs(self.programs)
        self.mark = uuid.uuid4().hex
        self._read: dict[Path, _Record] = {}
        own = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
        paths = [str(HOOK), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])]
        self.given = {
            **own,
            **functions,
            "PYTHONPATH": os.pathsep.join(paths),
            CAPTURE: str(self.folder),
            f"{CAPTURE}_BY": f"{os.getpid()}:{processes.started(os.getpid()) or ''}",
            MARK: self.mark,
            "TMPDIR": str(scratch / "tmp"),
            # `python` and `torchrun` of this environment, even if it is not activated.
            "PATH": os.pathsep.join([str(self.programs), str(BIN), os.environ.get("PATH", os.defpath)]),
        }
        self._command, self._cwd = command, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the command; a Ctrl-C meanwhile waits, so that what has begun is always ended."""
        shell = shutil.which("bash") or "/bin/sh"
        with open(self.log, "wb") as log, undisturbed():
            self._process = subprocess.Popen(
                [shell, "-c", self._command], cwd=self._cwd, env=self.given, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        return self._process

    def lives(self) -> bool:
        """Returns whether the command runs, or has left in the background what it started, as one that ends in `&`."""
        assert self._process is not None
        return self._process.poll() is None or (not self._process.returncode and any(marked(self.mark)))

    def records(self) -> list[_Record]:
        """Returns the processes seen so far, in order of time."""
        for path in sorted(self.folder.glob("*.json")):
            if path not in self._read:
                data = json.loads(path.read_text())
                if "refused" in data:
                    raise UserError(f"the launch command cannot be tuned here: {data['refused']}")
                self._read[path] = _Record(**data)
        return [self._read[path] for path in sorted(self._read)]

    def let_go(self) -> None:
        """Lets processes other than the training end without an error, so that the command goes on."""
        for path in self._read:
            if not self._read[path].trains:
                path.with_name(f"{path.name}.go").touch()

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        sweep(self.mark)
        self._process.wait()


def _complete(records: Sequence[_Record]) -> bool:
    """Whether all local ranks of a training have started."""
    training = [record for record in records if record.trains]
    return bool(training) and len({record.rank for record in training}) >= training[0].local_world_size


def _chosen(records: Sequence[_Record], shown: str) -> _Record:
    """Returns the record of the training, of its lowest rank."""
    ranks = sorted((record for record in records if record.rank is not None), key=lambda record: record.rank or 0)
    training = [record for record in ranks or records if record.trains]
    scripts = {record.script: record for record in reversed(training or ranks or records)}
    if len(scripts) > 1:
        names = ", ".join(sorted(os.path.relpath(path) for path in scripts))
        raise UserError(f"{shown} starts several scripts ({names}); {NAME_IT}")
    chosen = next(iter(scripts.values()))
    if chosen.world_size > chosen.local_world_size:
        raise UserError(
            f"{shown} starts {chosen.local_world_size} of {chosen.world_size} ranks here and the others on other"
            " machines; launch it for one machine, and give --nodes with --executor or --hostfile"
        )
    if not chosen.script:
        raise UserError(f"{shown}: there is no module {chosen.module!r} that {chosen.working_dir} could start")
    if not os.path.samefile(chosen.python, sys.prefix):
        raise UserError(
            f"{shown} trains with the Python environment {chosen.python}, autotune is installed in {sys.prefix};"
            " install autotune there and run it from there"
        )
    return chosen


def _invocation(
    chosen: _Record, records: Sequence[_Record], numbers: Mapping[str, str], run: _Running, command: str
) -> Invocation:
    peers = [record for record in records if record.script == chosen.script and record.rank is not None]
    environment = {
        name: without_placeholders(value, numbers)
        for name, value in chosen.environment.items()
        if run.given.get(name) != value and not OURS.fullmatch(name)
    }
    path = _without(chosen.environment.get("PYTHONPATH", ""), HOOK)
    if path != os.environ.get("PYTHONPATH", ""):
        environment["PYTHONPATH"] = path
    if "PATH" in environment:
        environment["PATH"] = _without(environment["PATH"], run.programs)
    return Invocation(
        script=chosen.script,
        module=chosen.module,
        working_dir=chosen.working_dir,
        arguments=tuple(
            without_placeholders(_argument(n, chosen, peers), numbers) for n in range(len(chosen.arguments))
        ),
        environment=environment,
        world_size=chosen.world_size if chosen.rank is not None else None,
        command=command,
    )


def _without(path: str, folder: Path) -> str:
    """Returns a search path without a folder of ours."""
    return os.pathsep.join(part for part in path.split(os.pathsep) if part and part != str(folder))


def _argument(n: int, chosen: _Record, peers: Sequence[_Record]) -> str:
    """Returns an argument, with `{local_rank}` in place of a number that differs by the local rank."""
    argument = chosen.arguments[n]
    if chosen.rank is not None and re.fullmatch(r"--local[-_]rank=\d+", argument):
        return f"{argument.partition('=')[0]}={{local_rank}}"
    said = {peer.rank: peer.arguments[n] for peer in peers if n < len(peer.arguments)}
    by_rank = {re.sub(rf"(?<!\d){peer.local_rank}(?!\d)", "{local_rank}", said.get(peer.rank, "")) for peer in peers}
    return by_rank.pop() if len(set(said.values())) > 1 and len(by_rank) == 1 else argument


def _names(found: Invocation) -> tuple[str, ...]:
    """Returns the templates that arrived, by all their names."""
    seen = templates_in([*found.arguments, *found.environment.values()])
    return (*seen, *(alias for alias, name in ALIASES.items() if name in seen))
