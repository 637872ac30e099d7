"""`autotune status`: how far a study is, followed live while another terminal runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import UserError
from autotune.console import ProgressView, duration
from autotune.journal import Follower, replay
from autotune.lock import run_under_way

LOOK_S = 0.2
# Below a study's folder, where `autotune scale` measures.
SCALING = "scaling"


def running_studies(studies: Path) -> dict[str, int]:
    """The studies of a folder that a process runs now, or measures the scaling of, with its number."""
    found = {path.parent.name: run_under_way(path.parent) for path in sorted(studies.glob("*/.lock"))}
    scaled = {
        path.parent.parent.name: run_under_way(path.parent) for path in sorted(studies.glob(f"*/{SCALING}/.lock"))
    }
    both = [*scaled.items(), *found.items()]
    return {name: pid for name, pid in sorted(both) if pid is not None}


def only_running(studies: Path) -> str:
    """The name of the one study that runs.

    Raises:
        UserError: None does, or several do.
    """
    running = running_studies(studies)
    if len(running) == 1:
        return next(iter(running))
    if running:
        raise UserError(
            f"status: {len(running)} studies run now: {', '.join(running)}. Name one: autotune status {next(iter(running))}"
        )
    there = sorted(path.parent.name for path in studies.glob("*/study.yaml"))
    if not there:
        raise UserError(
            f"status: no study lies in {studies}; `autotune run TARGET` begins one, --storage names another database"
        )
    raise UserError(f"status: no study runs now; name one to see what it has found: {', '.join(there)}")


def follow(folder: Path, pid: int, view: ProgressView) -> None:
    """Shows what a run shows, from its beginning, until it ends.

    Args:
        folder: The study's folder.
        pid: The process that runs it.
        view: Where to show it.
    """
    follower = Follower(folder, pid)
    try:
        while True:
            # First whether it lives, then what it wrote: so nothing is missed between the two.
            runs = run_under_way(folder) == pid
            for line in follower.lines():
                replay(line, view)
            view.tick()
            if not runs:
                return
            time.sleep(LOOK_S)
    finally:
        follower.close()


def lines(data: Mapping[str, Any]) -> str:
    """How far a study is, in a line."""
    outcomes = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in data["outcomes"].items())
    process = f"; process {data['process']} runs it now" if data["process"] else ""
    left = (
        ""
        if data["process"] or not data["running"]
        else f"; {data['running']} begun and not told (lost, or run elsewhere)"
    )
    return f"study {data['name']}: {data['n_trials']} trials in {duration(data['wall_s'])} ({outcomes}){process}{left}"
