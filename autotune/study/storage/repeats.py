"""The re-measurements of a trial, as far as they are of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.scoring import metrics
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.space.candidate import Candidate
from autotune.trial.folder import result_in
from autotune.trial.result import Outcome


def metrics_of(
    paths: Mapping[int, Path], candidate: Candidate, reference: Reference | None, *, had_tail: bool
) -> dict[int, dict[str, float]]:
    """Returns the metrics of each complete re-measurement, by round.

    Args:
        paths: Their folders.
        candidate: What was measured.
        reference: The study's.
        had_tail: The trial itself trained on the worst batch, so that the memory of those that did not is none.
    """
    # Re-measurements time steps; they are too short for a loss curve.
    reference = replace(reference, loss_target=None) if reference is not None else None
    found = {}
    for n, path in paths.items():
        result = result_in(path)
        if result is not None and result.outcome is Outcome.COMPLETE and result.candidate == candidate.values():
            found[n] = {name: each.value for name, each in metrics.measure(result, reference).items()}
            if had_tail and not result.tail:
                found[n].pop("peak_memory_bytes", None)
    return found


def unfit(paths: Iterable[Path], candidate: Candidate) -> str:
    """Returns why the tail check of a re-measurement failed; empty if none did."""
    results = (result_in(path) for path in paths)
    failed = (r for r in results if r is not None and r.failed_check and r.candidate == candidate.values())
    return next((result.reason for result in failed), "")
