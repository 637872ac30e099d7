"""What ran when in a study: trials, their re-measurements, checks, and what goes before them."""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from autotune.trial.folder import TrialDir, ended_in, ran

# By the name of a run's folder below `trials/`: what it was for. The first that matches; lanes stand in this order.
LANES = {
    r"(inspect|probe|profile|rates|machine)\b.*": "preparation",
    r"\d+": "trials",
    r"\d+/repeat-\d+": "measured again",
    r"noise": "noise scale",
    r"(\d+/gate|reference-\d+/\d+)": "quality gate",
    r"(\d+/branch-\d+|warm)": "branches",
    r".*": "other",
}
LONGEST_PAUSE_S = 60.0  # a longer one between two runs, as where a study was stopped, is cut out


class Run(NamedTuple):
    """One run of ranks.

    Attributes:
        lane: What it was for: one of `LANES`.
        trial: The trial that it belongs to; None for what belongs to the whole study.
        name: Its folder, relative to the study's trials.
        began_s: When its ranks began, in seconds since the first run, without long pauses.
        wall_s: How long it took.
    """

    lane: str
    trial: int | None
    name: str
    began_s: float
    wall_s: float


def runs(folder: Path) -> list[Run]:
    """The runs in a study's folder, the first one first; one that left no time behind is left out."""
    trials = folder / "trials"
    every = (_run(path, trials, changed_ns(TrialDir(path).exit)) for path in ended_in(trials))
    found = sorted((run for run in every if run is not None), key=lambda run: run.began_s)
    placed, cut_s, reached_s = list[Run](), 0.0, None
    for run in found:
        reached_s = run.began_s if reached_s is None else reached_s
        cut_s += max(0.0, run.began_s - reached_s - LONGEST_PAUSE_S)
        reached_s = max(reached_s, run.began_s + run.wall_s)
        placed.append(run._replace(began_s=run.began_s - found[0].began_s - cut_s))
    return placed


def changed_ns(path: Path) -> int:
    """When a file of a run was written; 0 where it is gone again, as where a trial is run anew."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=20_000)  # the dashboard reads a study every ten seconds
def _run(path: Path, trials: Path, _changed_ns: int) -> Run | None:
    """A run by its folder, with the time of the clock at which it began."""
    name = path.relative_to(trials).as_posix()
    number = re.match(r"(\d+)(/|$)", name)
    if (found := ran(path)) is None:
        return None
    lane = next(lane for pattern, lane in LANES.items() if re.fullmatch(pattern, name))
    return Run(lane, int(number[1]) if number else None, name, *found)
