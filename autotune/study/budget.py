"""The budget of a study: trials and seconds spent and left; an error if all first trials fail."""

import math
import re
import statistics
import time
from collections.abc import Iterable
from typing import Any

from autotune.errors import UserError
from autotune.scoring import recommend
from autotune.scoring.estimates import Estimates
from autotune.study.events import DECIDING_SHARE, OUT_OF_TIME, n_spent
from autotune.study.folder import check_paths
from autotune.study.spec.settings import SETTINGS
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.study.storage.generations import generation_of
from autotune.system.files import shown
from autotune.system.machine import load_per_core
from autotune.trial.folder import TrialDir, result_in
from autotune.trial.result import FAILURES, Outcome

ABORT_AFTER_CRASHES = 4  # identical crashes from the first trial on; twice as many if their reasons differ
# Share of a time budget that the end of a study may reserve, for the finalists' repeats and the checks before them.
MAX_RESERVED_SHARE = 0.3
# Nothing is reserved before this number of trials: a slow baseline alone says little of how long others take.
FIRST_TRIALS = 3
# Share of a study's time that its checks (quality gate, branches) may cost; where one decides the answer, twice as much.
CHECK_SHARE, DECIDING_FACTOR = 0.15, 2
# A quick study has few trials, so its share is small, and without the check they were for nothing: the check that decides
# may take this many times as long as all else.
QUICK_FACTOR = 2.0
# A check may train for this multiple of a trial's time, since slower numerics make longer curves; where that is too short for
# the steps that are needed, for their time with the second factor to spare.
MAX_TRIAL_BUDGETS, SPARE = 4, 1.5
WITHIN_DEADLINE = 0.9  # at most this share of a trial's deadline without its startup
# At most this many times the rounds that the user states, while it is not settled who is best.
MOST_ROUNDS = 4
# Rounds of re-measurement until it is settled who is best, over those that are stated: without noise, and for each unit
# of noise. On simulated machines they are 2.0 at 2.5 % noise and 3.8 at 10 % (`benchmarks/estimates.py`).
USUAL_ROUNDS, ROUNDS_PER_NOISE = 1.4, 24.0
# A trial trains for this share of a time budget at most, unless the user states otherwise: one trial tells nothing.
TRIAL_SHARE, LEAST_TRIAL_S = 0.05, 1.0
# The noise probe may take this share of the time that is left: without trials there is nothing to compare.
PROBE_SHARE = 0.25
# Between the last trial and the end of the command the answer is worked out and written: seconds, and a share of the time
# budget, since a longer study has more to write; up to three times as long where other processes use the cores.
CLOSING_S, CLOSING_SHARE, MOST_CLOSING_S, MOST_SLOWER = 1.5, 0.02, 10.0, 3.0
# Reserved for checks: the time of this number of usual trials at most.
CHECK_TRIALS = 6
# What a check that decides may cost in a study however short, in training times of a trial: both sides of a branch.
CHECK_BUDGETS = 5
# Share of its trials after which a search usually ends, since no further one is worth its time (`benchmarks/stopping.py`).
USUAL_TRIALS_SHARE = 0.6
# Seconds before a study's first trial, at least: the imports of its server.
START_S = 5.0
# Beyond this share of a time budget nothing is measured again only since the machine was busy.
HURRY_SHARE = 0.1


class Budget:
    """Counts what a study has spent; time runs from the moment at which its command began, imports included.

    Args:
        leads: Whether this coordinator leads the study, so that its time is the study's.
        at_once: Trials that it runs at once.
    """

    def __init__(self, state: StudyState, *, leads: bool = True, at_once: int = 1) -> None:
        self._state, self._leads, self._at_once = state, leads, at_once
        began_s = state.plan.began
        self._began_s = time.monotonic() if began_s is None else began_s
        self._earlier_s, self._n_earlier = 0.0, 0
        self._expected_s: float | None = None
        self._resumed = self._measures = False

    def resume(self) -> None:
        """Adds the time that earlier runs took."""
        self._earlier_s, self._n_earlier = records.WALL_S.of(self._state.study), len(self._state.told())

    def keep(self, left_s: float = 0.0) -> None:
        """Stores with the study the time that it has taken, and when it is expected to end.

        A run that measures nothing, as of a study that is over, makes no answer dearer.
        """
        if self._state.exists and self._leads:
            wall_s = self.spent_s() if self._measures else self._earlier_s
            records.WALL_S.store(self._state.study, wall_s)
            records.ENDS_S.store(self._state.study, time.time() + left_s)

    def measures(self) -> None:
        """Notes that this run measures something, so that its time counts."""
        self._measures = True

    def spent_s(self) -> float:
        """Seconds that the study has taken so far."""
        return self._earlier_s + time.monotonic() - self._began_s

    def search_ended(self) -> None:
        """Notes that the search is over: repeats and checks follow."""
        estimates = self._state.estimates()
        rounds = self._usual_rounds(estimates.noise_sd)
        decides = self._leader_needs_checks(estimates)
        self._expected_s = self.spent_s() + self._end_s(decides=decides, rounds=rounds)
        self.keep(self.left_s(decides=decides, noise_sd=estimates.noise_sd))

    def resumes_search(self) -> bool:
        """Whether the end of the study left time for another trial and its re-measurement, so that the search goes on."""
        self._resumed, self._expected_s = True, None
        return not self.out_of_time()

    def expect_rounds(self, round_s: float, n_done: int, noise_sd: float) -> None:
        """Notes that rounds of re-measurement follow, each of which takes about `round_s` seconds."""
        left = max(1.0, self._usual_rounds(noise_sd) - n_done)
        self._expected_s = self.spent_s() + left * round_s

    def _usual_rounds(self, noise_sd: float) -> float:
        return self._state.spec.repeats * min(MOST_ROUNDS, USUAL_ROUNDS + ROUNDS_PER_NOISE * noise_sd)

    def n_spent(self) -> int:
        """Trials that count towards the budget of trials."""
        return n_spent(self._state.outcomes(), self._state.spec.trials)

    @property
    def trial_s(self) -> float:
        """Training time of one trial: as the user states it; by default no more than a share of the time budget."""
        spec = self._state.spec
        if spec.time_budget_s is None or spec.trial_budget_s != SETTINGS["trial_budget_s"].default:
            return spec.trial_budget_s
        return min(spec.trial_budget_s, max(LEAST_TRIAL_S, TRIAL_SHARE * spec.time_budget_s))

    def room_s(self) -> float:
        """Seconds that are left of the time budget for trials; without one they have no end."""
        budget_s = self._state.spec.time_budget_s
        if budget_s is None:
            return math.inf
        return budget_s - closing_s(budget_s) - self.spent_s()

    def affords(self, needed_s: float) -> bool:
        """Whether the time budget has room for something that takes so long."""
        return needed_s <= self.room_s()

    def out_of_time(self) -> bool:
        """Whether the time budget has no room for another trial, apart from the reserve for the end of the study."""
        if self._state.spec.time_budget_s is None:
            return False
        # A short budget serves the search first: without it there is nothing to confirm.
        decides = self._leader_needs_checks(self._state.estimates())
        share = DECIDING_SHARE if decides else MAX_RESERVED_SHARE
        repeats = self._state.spec.repeats
        # After the finalists only what a further trial needs is left to do: it is measured again, beside the baseline.
        end_s = 2 * repeats * self.usual_s() if self._resumed else self._end_s(decides=decides, rounds=repeats)
        reserve_s = min(end_s, share * self._state.spec.time_budget_s)
        # Time that is left unused is lost for sure, and a trial that is cut only perhaps: it may be one of the quick ones.
        walls = sorted(data["wall_s"] for data in self._ran())
        quick_s = walls[len(walls) // 4] if walls else 0.0
        return not self.affords(quick_s + (reserve_s if self.n_spent() >= FIRST_TRIALS else 0.0))

    def words(self) -> str:
        """What is said when the time budget ends the search."""
        n, budget_s = self.n_spent(), self._state.spec.time_budget_s or 0.0
        spent = f"{OUT_OF_TIME} {budget_s:.0f} s has no room for a further trial after {n} trial{'s' * (n != 1)}"
        return f"{spent}; a larger --time-budget goes on"

    def startup_s(self) -> float:
        """Seconds that a trial takes beside its training, as the baseline took them."""
        first = result_in(self._state.trial_path(0))
        return max(0.0, first.wall_s - sum(first.step_times_s)) if first is not None else 0.0

    def hurries(self) -> bool:
        """Whether the time budget has no room for measuring something again only since the machine was busy."""
        budget_s = self._state.spec.time_budget_s
        return budget_s is not None and self.spent_s() > HURRY_SHARE * budget_s

    def leave_unchecked(self, needed_s: float) -> None:
        """Stores with the study how long all checks take with the one that decides the answer, for advice on a longer run."""
        records.UNCHECKED_S.store(self._state.study, needed_s + self._checked_s())

    def forget_unchecked(self) -> None:
        """Forgets what an earlier run left unchecked."""
        if records.UNCHECKED_S.of(self._state.study):
            records.UNCHECKED_S.store(self._state.study, 0.0)

    def why_unchecked(self, needed_s: float) -> str:
        """What a check would take too much of, for a message."""
        if not self.affords(needed_s):
            return "more than is left of the time budget"
        return "more than the checks' share of the study's time"

    def check_room_s(self, *, decides: bool = False) -> float:
        """Seconds that are left of the checks' share and of the time budget.

        Args:
            decides: Whether the answer depends on the check, which may then take a larger share.
        """
        return max(0.0, min(self._checks_may_take_s(decides=decides) - self._checked_s(), self.room_s()))

    def _checks_may_take_s(self, *, decides: bool) -> float:
        """Seconds that all checks of the study may take: a share of its time, or of its whole time budget."""
        spec = self._state.spec
        share_s = CHECK_SHARE * max(self._worked_s(), spec.time_budget_s or 0.0)
        if not decides:
            return share_s
        quick_s = QUICK_FACTOR * (self._worked_s() - self._checked_s()) if spec.quick else 0.0
        return max(
            DECIDING_FACTOR * share_s,
            CHECK_BUDGETS * self.trial_s,
            DECIDING_SHARE * (spec.time_budget_s or 0.0),
            quick_s,
        )

    def expected_check_room_s(self, trial_wall_s: float) -> float:
        """Seconds that the check which decides the answer will be given, as expected where trials take so long.

        The same for each run and each helper of a study.
        """
        spec = self._state.spec
        if spec.time_budget_s is not None:
            return DECIDING_SHARE * spec.time_budget_s
        works_s = START_S + (1 + USUAL_TRIALS_SHARE * spec.trials) * trial_wall_s
        return max(
            works_s * (QUICK_FACTOR if spec.quick else DECIDING_FACTOR * CHECK_SHARE), CHECK_BUDGETS * self.trial_s
        )

    def _worked_s(self) -> float:
        """Seconds that the runs of the study took which told a trial: another look at it buys no further checks."""
        looks = self._n_earlier > 0 and len(self._state.told()) == self._n_earlier
        return self._earlier_s if looks else self.spent_s()

    def _checked_s(self) -> float:
        """Seconds that the checks of all runs took."""
        results = map(result_in, check_paths(self._state.folder))
        return sum(result.wall_s for result in results if result is not None)

    def check_trains_s(self, needed_s: float) -> float:
        """Seconds that a check may train which needs `needed_s`."""
        return min(max(MAX_TRIAL_BUDGETS * self.trial_s, SPARE * needed_s), self.within_deadline_s())

    def within_deadline_s(self) -> float:
        """Seconds that a check may train before a trial's deadline, which counts from the start of its ranks, ends it."""
        return WITHIN_DEADLINE * max(0.0, self._state.spec.trial_deadline_s - self.startup_s())

    def left_s(self, *, decides: bool, noise_sd: float) -> float:
        """Estimated seconds until the end of the study, with repeats and checks.

        Args:
            decides: Whether the best so far becomes the answer only after a check.
            noise_sd: Standard deviation of a measurement's logarithm.
        """
        if self._expected_s is not None:
            left_s = max(0.0, self._expected_s - self.spent_s())
        else:
            n_left = max(0, self._state.spec.trials - self.n_spent())
            search_s = n_left * self.usual_s() / self._at_once
            left_s = search_s + self._end_s(decides=decides, rounds=self._usual_rounds(noise_sd))
        return min(left_s, max(0.0, self.room_s()))

    def _end_s(self, *, decides: bool, rounds: float) -> float:
        """Estimated seconds of the end of the study: rounds of repeats, and checks where candidates need any."""
        spec, ran = self._state.spec, self._ran()
        if not spec.finalists or not ran:
            return 0.0
        checks_s = min(CHECK_TRIALS * self.usual_s(), self._checks_may_take_s(decides=decides))
        doubtful = any(m.doubt and not m.barred for m in self._state.measured())
        # The baseline is in every round, and trials that were stopped early are in none.
        walls = [data["wall_s"] for data in ran[1:] if data["outcome"] == Outcome.COMPLETE]
        round_s = ran[0]["wall_s"] + spec.finalists * (statistics.median(walls) if walls else ran[0]["wall_s"])
        return float(rounds * round_s + (checks_s if doubtful else 0.0))

    def _leader_needs_checks(self, estimates: Estimates) -> bool:
        """Whether the best trial so far is better than the baseline, and may be the answer only once it was checked."""
        ranked = recommend.rank(estimates, self._state.objectives)
        return bool(ranked) and ranked[0].trial != 0 and bool(ranked[0].doubt) and not ranked[0].barred

    def again_s(self, trials: Iterable[int]) -> float:
        """Seconds that measuring some trials again takes, as they took before."""
        walls = {told.number: float(records.told_data(told)["wall_s"]) for told in self._state.told()}
        return sum(walls.get(number, 0.0) for number in trials)

    def usual_s(self) -> float:
        """Seconds of a usual trial so far."""
        walls = [data["wall_s"] for data in self._ran()]
        return statistics.median(walls) if walls else 0.0

    def _ran(self) -> list[dict[str, Any]]:
        told = map(records.told_data, self._state.told())
        return [data for data in told if data["outcome"] != Outcome.PREDICTED_OOM]

    def check_target_works(self) -> None:
        """Checks that not all trials from the first on failed; a study that did is over until it starts over."""
        ends = self._ran()
        if len(ends) < ABORT_AFTER_CRASHES or any(end["outcome"] not in FAILURES for end in ends):
            return
        # What follows names details, and of the baseline what to do.
        alike = len({re.split("[:;]", re.sub(r"[0-9]+", "", end["reason"]))[0] for end in ends}) == 1
        if alike or len(ends) >= 2 * ABORT_AFTER_CRASHES:
            how = f"{ends[0]['outcome'].replace('_', ' ')}: {ends[0]['reason']}"
            log = shown(TrialDir(self._state.trial_path(0)).log(0))
            said = f"all ended the same way: {how}" if alike else f"all failed; the baseline: {how}"
            first = f"the first {len(ends)} trials, the baseline among them,"
            records.note_end(self._state.study, f"{first} all failed")
            # A re-tuning has no such option: the next one searches anew.
            is_retuning = generation_of(self._state.spec.name)[1]
            remedy = "" if is_retuning else "; mend that, then start over with --fresh"
            raise UserError(f"{first} {said} (see {log}){remedy}")


def closing_s(budget_s: float) -> float:
    """Seconds at the end of a time budget in which the answer is written, as busy as the machine is."""
    slower = min(MOST_SLOWER, max(1.0, load_per_core()))
    return min(MOST_CLOSING_S, slower * (CLOSING_S + CLOSING_SHARE * budget_s))


def apart_s(spans: Iterable[tuple[float, float]], pause_s: float) -> float:
    """Seconds that runs took; the time of those that ran side by side counts once.

    Args:
        spans: When each began, and how long it took: a clock that was set meanwhile would make a trial years long.
        pause_s: What lies between two runs counts, too, unless it is longer.
    """
    total_s, until_s = 0.0, -math.inf
    for began_s, took_s in sorted(spans):
        from_s = until_s if began_s - until_s <= pause_s else began_s
        total_s += max(0.0, began_s + took_s - from_s)
        until_s = max(until_s, began_s + took_s)
    return total_s
