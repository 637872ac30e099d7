"""Where trials ran and what that cost: machines, waits, and attempts that were lost."""

from collections.abc import Sequence

from autotune.errors import printable
from autotune.report.data import Data, StudyReport
from autotune.system.units import format_duration

# Shorter waits are not worth a word.
LEAST_WAIT_S = 1.0
# Lost attempts that are listed one by one.
MOST_LOST = 12
HEADS = ("machines", "device and libraries", "trials", "lost attempts", "waited")


def rows(report: StudyReport) -> list[list[str]]:
    """A row of `HEADS` for each set of machines; none where one machine ran all trials at once and lost none."""
    found: dict[tuple[str, str], list[Data]] = {}
    for trial in report.trials:
        if trial.get("hosts"):
            found.setdefault((", ".join(trial["hosts"]), trial.get("machine", "")), []).append(trial)
    if len(found) < 2 and not lost(report) and not _waited_s(report.trials):
        return []
    return [
        [printable(hosts), printable(machine), str(len(ran)), str(_n_lost(ran)), format_duration(_waited_s(ran))]
        for (hosts, machine), ran in found.items()
    ]


def lost(report: StudyReport) -> list[tuple[int, str]]:
    """The attempts that were lost: number of the trial and why, in the words of the engine or of the run."""
    again = [(trial["trial"], why) for trial in report.trials for why in trial.get("lost_attempts") or ()]
    told = [(each["trial"], each["reason"]) for each in report.study.get("lost") or ()]
    return [(number, printable(str(why))) for number, why in sorted([*again, *told])]


def lines(report: StudyReport) -> list[str]:
    """Machines, waits and lost attempts in words; empty where there is nothing to say."""
    said = []
    if found := rows(report):
        machines = "; ".join(f"{hosts} ({trials} trial{'s' * (trials != '1')})" for hosts, _, trials, *_ in found)
        waited_s = _waited_s(report.trials)
        waited = f"; waited {format_duration(waited_s)} for machines" if waited_s else ""
        said.append(f"ran on {machines}{waited}")
    gone = lost(report)
    said += [f"trial {number} lost an attempt, which is held against no configuration: {why}" for number, why in gone]
    if len(gone) > MOST_LOST:
        said = [*said[: len(said) - len(gone) + MOST_LOST], f"{len(gone) - MOST_LOST} more attempts were lost"]
    return said


def _n_lost(trials: Sequence[Data]) -> int:
    return sum(len(trial.get("lost_attempts") or ()) for trial in trials)


def _waited_s(trials: Sequence[Data]) -> float:
    waits = (float(trial.get("waited_s") or 0.0) for trial in trials)
    return sum(each for each in waits if each >= LEAST_WAIT_S)
