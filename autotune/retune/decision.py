"""The decision of a re-tuning: verdict, evidence, and the difference between old and new configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.report.series import level_text
from autotune.retune.comparison import Comparison, DriftCheck
from autotune.study import fingerprint
from autotune.study.fingerprint import Change
from autotune.trial.folder import adapter


class RetuneVerdict(StrEnum):
    """How a re-tuning ended."""

    UNCHANGED = "unchanged"
    IMPROVED = "improved"
    FAILED = "failed"


@dataclass(frozen=True)
class Difference:
    """A knob of the configuration that differs between the old one and the new one."""

    knob: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of a re-tuning with its evidence.

    Attributes:
        check: Result of the first measurements; None if they were not needed.
        duel: The new configuration against the old one; None if there was no new one.
        explained: Which change explains which of these knobs.
    """

    verdict: RetuneVerdict
    reason: str
    generation: int
    folder: Path
    changes: Sequence[Change] = ()
    check: DriftCheck | None = None
    duel: Comparison | None = None
    differences: Sequence[Difference] = ()
    explained: Sequence[str] = ()
    n_trials: int = 0
    notes: Sequence[str] = ()

    @classmethod
    def of_data(cls, data: Mapping[str, Any], folder: Path) -> "Decision":
        """Read the data that `to_data` made."""
        return adapter(cls).validate_python({**data, "folder": folder})

    def to_data(self) -> dict[str, Any]:
        """The decision with its evidence, for programs and for the history."""
        data: dict[str, Any] = adapter(Decision).dump_python(self, mode="json", exclude={"folder"})
        return data

    def lines(self) -> list[str]:
        """The decision for people: a diff, not a dump."""
        found = [f"{self.verdict}: {self.reason}"]
        if self.check:
            found += [f"  {line}" for line in self.check.lines()]
        if self.changes:
            found += ["changed since it was found:", *(f"  {change.words}" for change in self.changes)]
        if self.differences:
            found += ["old against new configuration:"]
            width = max(len(each.knob) for each in self.differences)
            found += [
                f"  {each.knob:<{width}}  {level_text(each.before)} -> {level_text(each.after)}"
                for each in self.differences
            ]
        if self.duel:
            found += [f"  {line}" for line in self.duel.lines()]
        return [*found, *self.explained, *self.notes]


def explain(differences: Sequence[Difference], changes: Sequence[Change]) -> list[str]:
    """Sentences that name the changes which touch each knob that differs; causes are not measured."""
    found = []
    for change in changes:
        touches = fingerprint.PARTS[change.part].touches
        moved = [each.knob for each in differences if touches and each.knob.startswith(touches)]
        if moved:
            found.append(f"{', '.join(moved)}: may follow from {change.words}")
    rest = [
        each.knob
        for each in differences
        if not any(each.knob.startswith(fingerprint.PARTS[c.part].touches or ("\0",)) for c in changes)
    ]
    if rest:
        found.append(f"{', '.join(rest)}: no change that was found touches it")
    return found
