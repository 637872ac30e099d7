"""The server of one machine: runs the trials whose folders are named on standard input.

Commands and answers are JSON lines on standard input and output. A warm server has imported torch and DeepSpeed and
forks the ranks, so that a trial starts in tenths of a second; it runs no torch operation and never initialises CUDA,
which would not survive a fork. A cold one starts a new Python for each rank. When standard input closes, the driver
has died: the server kills the trial and ends.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune.worker import project
from autotune.worker.agent import network, ops
from autotune.worker.agent.preload import Preloaded, hide_parts, preload, preload_more
from autotune.worker.agent.supervisor import COMMANDS, RankSupervisor


def serve(modules: Sequence[str], left_out: str = "") -> int:
    """Serves until standard input closes; returns the exit status.

    Args:
        modules: What the user's target imports, as `module` or `module:name,name`, so that ranks find it loaded.
        left_out: Why an earlier start, in this process, left out some of them.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    ops.remove_stale_locks()
    parts = hide_parts()
    project.settle(Path.cwd() / "target")
    found = preload(modules, parts)
    if found.cold and found.culprits:
        os.environ.update(parts)
        _start_without(modules, found, left_out, answers)
    if not found.cold:
        from autotune.worker import random_fills

        random_fills.open_store()
    supervisor = RankSupervisor(warm=not found.cold, answers=answers, variables=parts)
    _answer(answers, {"ready": True, "warm": supervisor.warm, "reason": _slow_start(found.cold, left_out)})
    for command in _commands(COMMANDS):
        if "run" in command:
            supervisor.run(Path(command["run"]), int(command.get("node", 0)), command.get("address", network.LOOPBACK))
            _answer(answers, {"ended": command["run"]})
            supervisor.warm = supervisor.warm and preload_more(supervisor.imported)
        if supervisor.orphaned:
            break
    return 0


def _start_without(modules: Sequence[str], found: Preloaded, left_out: str, answers: int) -> NoReturn:
    """Starts this process anew without the modules after which no rank could be forked; without any the second time."""
    kept = [] if left_out else [item for item in modules if item not in found.culprits]
    why = "; ".join(filter(None, [left_out, found.cold]))
    os.dup2(answers, 1)
    os.execv(sys.executable, [sys.executable, "-m", "autotune.worker", "serve", f"--without={why}", *kept])


def _slow_start(cold: str, left_out: str) -> str:
    """Returns why trials start more slowly than they could; empty if they do not."""
    if cold:
        return f"every rank starts a new Python, which costs seconds, since {cold}"
    return f"every rank imports it anew: {left_out}, which no fork survives" if left_out else ""


def _commands(source: int) -> Iterator[dict[str, Any]]:
    """Commands, read byte by byte so that a cancel right behind a run stays in the pipe for the supervisor."""
    line = b""
    while byte := os.read(source, 1):
        line += byte
        if byte == b"\n":
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
            line = b""


def _answer(target: int, message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(target, json.dumps(message).encode() + b"\n")
