"""The budget of a study: trials and seconds spent and left; an error if all first trials fail."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from optuna.trial import FrozenTrial

from autotune.errors import UserError
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.system.files import shown
from autotune.trial.folder import TrialDir
from autotune.trial.result import Outcome

ABORT_AFTER_CRASHES = 4  # identical crashes from the first trial on; twice as many if their reasons differ
# Share of a time budget that the end of a study may reserve, for the finalists' repeats and the checks before them.
MAX_RESERVED_SHARE = 0.4
# Reserved for those checks: the time of this number of usual trials, at most this share of the budget.
CHECK_TRIALS, MAX_CHECK_SHARE = 6, 0.25
FAILURES = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.NOT_APPLIED, Outcome.DIVERGED)


class Budget:
    """Counts what a study has spent; time runs from the construction on.

    Args:
        state: The study.
    """

    def __init__(self, state: StudyState) -> None:
        self._state = state
        self._started = time.monotonic()
        self._earlier_s = 0.0

    def resume(self) -> None:
        """Adds the time that the trials of earlier runs took."""
        self._earlier_s = measuring_s(self._state.told())

    def spent_s(self) -> float:
        """Seconds that the study has taken so far."""
        return self._earlier_s + time.monotonic() - self._started

    def n_spent(self) -> int:
        """Trials that count. Those predicted not to fit are free, until there are as many as the whole budget."""
        outcomes = self._state.outcomes()
        n_unfit = sum(outcome is Outcome.PREDICTED_OOM for outcome in outcomes)
        return len(outcomes) - min(n_unfit, self._state.spec.trials)

    def out_of_time(self) -> bool:
        """Whether the time budget is spent, apart from the reserve for the end of the study."""
        spec = self._state.spec
        if spec.time_budget_s is None:
            return False
        usual_s = self._usual_s()
        reserve_s = (spec.finalists + 1) * spec.repeats * usual_s / 2
        if spec.finalists:
            reserve_s += min(CHECK_TRIALS * usual_s, MAX_CHECK_SHARE * spec.time_budget_s)
        # A short budget serves the search first: without it there is nothing to confirm.
        reserve_s = min(reserve_s, MAX_RESERVED_SHARE * spec.time_budget_s)
        return self.spent_s() + reserve_s >= spec.time_budget_s

    def left_s(self) -> float:
        """Estimated seconds until the end of the study."""
        spec = self._state.spec
        n_left = max(0, spec.trials - self.n_spent()) + (spec.finalists + 1) * spec.repeats / 2
        left_s = n_left * self._usual_s()
        return left_s if spec.time_budget_s is None else min(left_s, max(0.0, spec.time_budget_s - self.spent_s()))

    def _usual_s(self) -> float:
        walls = [data["wall_s"] for data in self._ran()]
        return statistics.median(walls) if walls else 0.0

    def _ran(self) -> list[dict[str, Any]]:
        told = map(records.told_data, self._state.told())
        return [data for data in told if data["outcome"] != Outcome.PREDICTED_OOM]

    def check_target_works(self) -> None:
        """Checks that not all trials from the first on failed.

        Raises:
            UserError: They did, so the target is broken.
        """
        ends = self._ran()
        if len(ends) < ABORT_AFTER_CRASHES or any(end["outcome"] not in FAILURES for end in ends):
            return
        alike = len({re.sub(r"[0-9]+", "", end["reason"]).split(":")[0] for end in ends}) == 1
        if alike or len(ends) >= 2 * ABORT_AFTER_CRASHES:
            how = f"{ends[0]['outcome']}: {ends[0]['reason']}"
            log = shown(TrialDir(self._state.trial_path(0)).log(0))
            said = f"all ended the same way: {how}" if alike else f"all failed; the baseline: {how}"
            raise UserError(f"the first {len(ends)} trials, the baseline among them, {said} (see {log})")


def measuring_s(told: Sequence[FrozenTrial]) -> float:
    """Seconds that trials took; the time of trials that ran side by side counts once."""
    # The end follows from the duration: a clock that was set in between would make a trial years long.
    spans = sorted(
        (t.datetime_start, t.datetime_start + timedelta(seconds=_took_s(t))) for t in told if t.datetime_start
    )
    twice_s, until = 0.0, None
    for start, end in spans:
        if until is not None:
            twice_s += max(0.0, (min(until, end) - start).total_seconds())
        until = end if until is None else max(until, end)
    return max(0.0, sum(map(_took_s, told)) - twice_s)


def _took_s(told: FrozenTrial) -> float:
    return float(records.told_data(told)["wall_s"])
