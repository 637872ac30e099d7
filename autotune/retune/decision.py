"""The decision of a re-tuning: verdict, evidence, and the difference between old and new configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.report.series import level_text
from autotune.retune import fingerprint
from autotune.retune.comparison import Comparison, DriftCheck
from autotune.retune.fingerprint import Change


class RetuneVerdict(StrEnum):
    """How a re-tuning ended."""

    UNCHANGED = "unchanged"
    IMPROVED = "improved"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of a re-tuning with its evidence.

    Attributes:
        standing: Result of the first measurements; None if they were not needed.
        duel: The new configuration against the old one; None if there was no new one.
        differences: Knobs that differ: name, before, after.
        explained: Which change explains which of these knobs.
    """

    verdict: RetuneVerdict
    reason: str
    generation: int
    folder: Path
    changes: Sequence[Change] = ()
    standing: DriftCheck | None = None
    duel: Comparison | None = None
    differences: Sequence[tuple[str, Any, Any]] = ()
    explained: Sequence[str] = ()
    n_trials: int = 0
    notes: Sequence[str] = ()

    @classmethod
    def of_data(cls, data: Mapping[str, Any], folder: Path) -> "Decision":
        """Read the data that `to_data` made of a decision to replace the configuration."""
        return cls(
            verdict=RetuneVerdict(data["verdict"]), reason=data["reason"], generation=data["generation"], folder=folder,
            changes=[Change(**change) for change in data["changes"]], standing=DriftCheck.of_data(data["check"]),
            duel=Comparison.of_data(data["duel"]), explained=data["explained"], n_trials=data["n_trials"],
            differences=[(knob["knob"], knob["before"], knob["after"]) for knob in data["differences"]],
            notes=data["notes"],
        )  # fmt: skip

    def to_data(self) -> dict[str, Any]:
        """The decision with its evidence, for programs and for the history."""
        knobs = [{"knob": name, "before": before, "after": after} for name, before, after in self.differences]
        return {
            "verdict": str(self.verdict), "reason": self.reason, "generation": self.generation,
            "changes": [change.to_data() for change in self.changes],
            "check": self.standing.to_data() if self.standing else None,
            "duel": self.duel.to_data() if self.duel else None,
            "differences": knobs, "explained": list(self.explained), "n_trials": self.n_trials,
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The decision for people: a diff, not a dump."""
        found = [f"{self.verdict}: {self.reason}"]
        if self.standing:
            found += [f"  {line}" for line in self.standing.lines()]
        if self.changes:
            found += ["changed since it was found:", *(f"  {line}" for line in fingerprint.lines(self.changes))]
        if self.differences:
            found += ["old against new configuration:"]
            width = max(len(name) for name, _, _ in self.differences)
            found += [
                f"  {name:<{width}}  {level_text(before)} -> {level_text(after)}"
                for name, before, after in self.differences
            ]
        if self.duel:
            found += [f"  {line}" for line in self.duel.lines()]
        return [*found, *self.explained, *self.notes]


def explain(differences: Sequence[tuple[str, Any, Any]], changes: Sequence[Change]) -> list[str]:
    """Sentences that name the changes which touch each knob that differs; causes are not measured."""
    found = []
    for change in changes:
        touches = fingerprint.PARTS[change.part].touches
        moved = [name for name, _, _ in differences if touches and name.startswith(touches)]
        if moved:
            found.append(f"{', '.join(moved)}: may follow from {change.words}")
    rest = [
        name
        for name, _, _ in differences
        if not any(name.startswith(fingerprint.PARTS[c.part].touches or ("\0",)) for c in changes)
    ]
    if rest:
        found.append(f"{', '.join(rest)}: no change that was found touches it")
    return found
