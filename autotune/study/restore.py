"""A study whose database is gone, taken up again from the record and the results in its folder."""

from __future__ import annotations

from optuna.trial import TrialState

from autotune.space.candidate import Candidate
from autotune.study.proposals import Proposer
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.study.tell import Teller
from autotune.system.signals import undisturbed
from autotune.trial.folder import result_in
from autotune.trial.result import TrialResult


def results_in(state: StudyState) -> dict[int, TrialResult]:
    """The results in a study's folder by trial number; none unless the baseline's is among them."""
    paths = (path for path in (state.folder / "trials").glob("[0-9]*") if path.name.isdigit())
    found = {int(path.name): result for path in paths if (result := result_in(path)) is not None and result.candidate}
    return found if 0 in found and found[0].candidate == state.plan.baseline.values() else {}


def restore(state: StudyState, proposer: Proposer, teller: Teller) -> int:
    """Tells the finished trials of the folder to a database that has no study of that name.

    A number without a result becomes a failed trial, since a trial's folder has its number.

    Returns:
        How many were told; 0 without a record, or where a different study has left it.
    """
    kept = records.kept_in(state.folder)
    found = results_in(state) if kept is not None else {}
    if kept is None or not found or state.differences(kept):
        return 0
    state.settle(kept.reference, kept.objectives, kept.learning_rate)
    state.create()
    for number in range(max(found) + 1):
        with undisturbed():
            if number not in found:
                state.leases.tell(state.leases.claim(state.study), TrialState.FAIL, None, {}, {})
                continue
            candidate = Candidate.of(found[number].candidate)
            role = "baseline" if number == 0 else "search"
            asked = proposer.claim_as(candidate, role)
            teller.tell(asked, candidate, role, teller.explained(candidate, found[number]), quiet=True)
    return len(found)
