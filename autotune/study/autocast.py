"""Dtype mismatches: finds precisions that a model cannot train in, and retries those candidates under autocast."""

from dataclasses import replace

from optuna.trial import FrozenTrial

from autotune.executors import conclude
from autotune.space.candidate import AUTOCAST, Candidate
from autotune.space.legality import why_illegal
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.trial.result import Outcome, TrialResult

# A precision is no longer proposed after this many trials, if all of its trials ended with a dtype mismatch.
MAX_MISMATCHES = 2


def under_autocast(state: StudyState, candidate: Candidate) -> Candidate | str:
    """The same configuration with fp32 weights and 16-bit arithmetic, or the reason why it is not tried."""
    plan, wanted = state.plan, AUTOCAST[candidate.precision]
    if "precision" not in plan.space or not plan.space["precision"].contains(wanted):
        wanted = "torch_autocast"
    if "precision" not in plan.space or not plan.space["precision"].contains(wanted):
        return (
            f"{wanted} computes in 16 bits over fp32 weights and would take it: add it to `precision` in the study's"
            " space, or have the model use one type"
        )
    other = plan.space.candidate({**plan.space.values_of(candidate), "precision": wanted}, plan.baseline)
    reason = why_illegal(other, plan.setting)
    if reason is not None:
        return f"the same under {wanted} cannot run here: {reason}"
    return f"the same under {wanted} was measured already" if other.key in state.known() else other


def next_under_autocast(state: StudyState) -> Candidate | None:
    """The next candidate whose trial met a dtype mismatch, to be tried under autocast; each at most once."""
    for told in state.told():
        if _is_mismatch(told):
            found = under_autocast(state, records.told_candidate(told))
            if isinstance(found, Candidate):
                return found
    return None


def with_remedy(state: StudyState, candidate: Candidate, result: TrialResult) -> TrialResult:
    """The result of a trial; if it met a dtype mismatch, the reason names the configuration tried instead."""
    if not conclude.is_dtype_mismatch(result):
        return result
    found = under_autocast(state, candidate)
    what = found if isinstance(found, str) else f"the same is tried under {found.precision}"
    return replace(result, reason=f"{result.reason}; {what}")


def unsafe_precisions(state: StudyState) -> tuple[str, ...]:
    """The precisions that the model cannot train in, as its trials have shown."""
    ends: dict[str, list[bool]] = {}
    for told in state.told():
        ends.setdefault(records.told_candidate(told).precision, []).append(_is_mismatch(told))
    return tuple(name for name, mismatches in ends.items() if all(mismatches) and len(mismatches) >= MAX_MISMATCHES)


def _is_mismatch(told: FrozenTrial) -> bool:
    data = records.told_data(told)
    if data["outcome"] != Outcome.CRASHED:  # cheap, for it is asked of every trial at every step
        return False
    values = records.told_candidate(told).values()
    return conclude.is_dtype_mismatch(TrialResult(outcome=Outcome.CRASHED, reason=data["reason"], candidate=values))
