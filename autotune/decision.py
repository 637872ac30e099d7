"""What a re-tuning came to: the verdict, the difference between old and new configuration, and what explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune import fingerprint
from autotune.candidate import Candidate
from autotune.duel import Duel, Standing
from autotune.fingerprint import Change


class Verdict(StrEnum):
    """How a re-tuning ended."""

    UNCHANGED = "unchanged"
    IMPROVED = "improved"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a re-tuning came to.

    Attributes:
        verdict: How it ended.
        reason: Why, in a sentence.
        changes: What is not as it was when the configuration was found.
        standing: What the first measurements said; None where they were not needed.
        duel: New against old configuration; None where there was none to compare.
        differences: Knobs that differ: name, before, after.
        explained: What of the environment each of them follows from, in words.
        n_trials: Trials of the search.
        notes: What else it found.
        generation: Number of the re-tuning.
        folder: Where its files lie.
    """

    verdict: Verdict
    reason: str
    generation: int
    folder: Path
    changes: Sequence[Change] = ()
    standing: Standing | None = None
    duel: Duel | None = None
    differences: Sequence[tuple[str, Any, Any]] = ()
    explained: Sequence[str] = ()
    n_trials: int = 0
    notes: Sequence[str] = ()

    def to_data(self) -> dict[str, Any]:
        """The decision with its evidence, for programs and for the history."""
        return {
            "verdict": str(self.verdict), "reason": self.reason, "generation": self.generation,
            "changes": [change.to_data() for change in self.changes],
            "check": self.standing.to_data() if self.standing else None,
            "duel": self.duel.to_data() if self.duel else None,
            "differences": [{"knob": name, "before": before, "after": after} for name, before, after in self.differences],
            "explained": list(self.explained), "n_trials": self.n_trials, "notes": list(self.notes),
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
                f"  {name:<{width}}  {_said(before)} -> {_said(after)}" for name, before, after in self.differences
            ]
        if self.duel:
            found += [f"  {line}" for line in self.duel.lines()]
        return [*found, *self.explained, *self.notes]


def explain(differences: Sequence[tuple[str, Any, Any]], changes: Sequence[Change]) -> list[str]:
    """What of the environment the knobs that differ follow from, in words."""
    found = []
    for change in changes:
        touches = fingerprint.PARTS[change.part].touches
        moved = [name for name, _, _ in differences if touches and name.startswith(touches)]
        if moved:
            found.append(f"{', '.join(moved)}: {change.words}")
    rest = [
        name
        for name, _, _ in differences
        if not any(name.startswith(fingerprint.PARTS[c.part].touches or ("\0",)) for c in changes)
    ]
    if rest:
        found.append(f"{', '.join(rest)}: nothing that is known of the environment explains it")
    return found


def differences(before: Candidate, after: Candidate) -> list[tuple[str, Any, Any]]:
    """The knobs in which two configurations differ: name, before, after."""
    old, new = before.values(), after.values()
    return [
        (name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)
    ]


def _said(value: Any) -> str:
    return "default" if value is None else str(value)
