"""The server of one machine: runs the trials whose folders are named on standard input.

Commands and answers are JSON lines on standard input and output. A warm server has imported torch and DeepSpeed and
forks the ranks, so that a trial starts in tenths of a second; it runs no torch operation and never initialises CUDA,
which would not survive a fork. A cold one starts a new Python for each rank. When standard input closes, the driver
has died: the server kills the trial and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.worker.agent import network, ops
from autotune.worker.agent.preload import preload
from autotune.worker.agent.supervisor import RankSupervisor


def serve(modules: Sequence[str]) -> int:
    """Serves until standard input closes; returns the exit status.

    Args:
        modules: What the user's target imports, as `module` or `module:name,name`, so that ranks find it loaded.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    ops.remove_stale_locks()
    reason = preload(modules)
    supervisor = RankSupervisor(warm=reason is None, commands=0, answers=answers)
    _answer(answers, {"ready": True, "warm": supervisor.warm, "reason": reason or ""})
    for command in _commands(0):
        if "run" in command:
            supervisor.run(Path(command["run"]), int(command.get("node", 0)), command.get("address", network.LOOPBACK))
            _answer(answers, {"ended": command["run"]})
        if supervisor.orphaned:
            break
    return 0


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
