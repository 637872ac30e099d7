"""A study whose database is gone, taken up again from the record and the results in its folder."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from optuna.trial import Trial, TrialState

from autotune.errors import UserError
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.study.budget import apart_s
from autotune.study.folder import retuning_of
from autotune.study.proposals import Proposer
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.study.storage.generations import generation_of
from autotune.study.tell import Teller
from autotune.system import files
from autotune.system.signals import undisturbed
from autotune.trial.folder import ended_in, ran, result_in
from autotune.trial.result import TrialResult

# Between two runs of a study it proposes and starts servers; what takes longer is a pause of the study.
LONGEST_PAUSE_S = 60.0


def results_in(state: StudyState) -> dict[int, TrialResult]:
    """The results in a study's folder by trial number; none unless the baseline's is among them."""
    paths = (path for path in (state.folder / "trials").glob("[0-9]*") if path.name.isdigit())
    found = {int(path.name): result for path in paths if (result := result_in(path)) is not None and result.candidate}
    return found if 0 in found and found[0].candidate == state.plan.baseline.values() else {}


def last_replacement(folder: Path) -> int:
    """The number of the last re-tuning that replaced the answer of a study, by its folder; 0 where none did."""
    decided = {retuning_of(path.parent): path for path in folder.glob("retunes/*/decision.json")}
    return max((n for n, path in decided.items() if _replaces(path)), default=0)


def _replaces(decision: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(files.json_of(files.read_regular(decision)).get("verdict") == "improved")
    return False


def restore(state: StudyState, proposer: Proposer, teller: Teller, besides: Callable[[], None] = lambda: None) -> int:
    """Tells the finished trials of the folder to a database that lacks the study, or some of its trials.

    A number without a result becomes a failed trial, since a trial's folder has its number. What a run that is killed
    meanwhile leaves, the next one restores.

    Args:
        besides: Restores what else belongs to the study; before its trials, by which a later run sees that all is done.

    Returns:
        How many finished trials the folder holds; 0 if it has no record, or a different re-tuning left it.

    Raises:
        UserError: A different study left them, which beginning this one would remove.
    """
    kept = records.kept_in(state.folder)
    changed = state.differences(kept) if kept is not None else []
    if changed and not generation_of(state.spec.name)[1] and result_in(state.trial_path(0)) is not None:
        raise UserError(
            f"{files.shown(state.folder)} holds the trials of another study, which differs in {', '.join(changed)}: choose another"
            " --study name, or forget them with --fresh"
        )
    found = results_in(state) if kept is not None and not changed else {}
    if kept is not None and found:
        state.take_over(kept)
        if not state.exists:
            state.create()
        besides()
        runs = filter(None, map(ran, ended_in(state.folder / "trials")))
        records.WALL_S.store(state.study, apart_s(runs, LONGEST_PAUSE_S))
        records.ENDS_S.store(state.study, time.time())
        for number, asked in _unfinished(state, max(found) + 1):
            with undisturbed():
                _tell(state, proposer, teller, asked or state.leases.claim(state.study), found.get(number))
    return len(found)


def _unfinished(state: StudyState, n: int) -> Iterator[tuple[int, Trial | None]]:
    """The numbers below `n` that have not ended, with the trial that a killed run has begun under one."""
    begun = {trial.number for trial in state.trials()}
    left = {trial.number: (trial, lease) for trial, lease in state.leases.abandoned(records.running(state.study))}
    for number in range(n):
        if number not in begun:
            yield number, None
        elif number in left and state.leases.take_over(*left[number]):
            yield number, Trial(state.study, left[number][0]._trial_id)


def _tell(state: StudyState, proposer: Proposer, teller: Teller, asked: Trial, result: TrialResult | None) -> None:
    if result is None:
        state.leases.tell(asked, TrialState.FAIL, None, {}, {})
        return
    candidate, role = Candidate.of(result.candidate), "search" if asked.number else "baseline"
    if CANDIDATE_ATTR not in asked.user_attrs:
        proposer.describe(asked, candidate, role)
    teller.tell(asked, candidate, role, result, quiet=True, earlier=True)
