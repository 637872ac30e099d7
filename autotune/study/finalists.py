"""The end of a study: the finalists are checked for how they train, and measured again beside the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.scoring import recommend
from autotune.scoring.measured import Measured
from autotune.scoring.metrics import measure
from autotune.study.branch_check import BranchCheck
from autotune.study.budget import Budget
from autotune.study.events import EventSink
from autotune.study.measure import TrialMeasurer
from autotune.study.numerics_check import NumericsCheck
from autotune.study.state import StudyState, baseline_of
from autotune.study.storage import records
from autotune.study.tell import Teller
from autotune.trial.folder import result_in

# More rounds follow while the rounds differ by more than this (standard deviation of the log ratios).
MAX_SPREAD = 0.03


class Finalists:
    """Confirms a study's recommendation; earlier checks and measurements are read from the study's folder.

    Args:
        state: The study.
        measurer: Runs the trials.
        teller: States the progress.
        budget: Ends the repeats.
        events: Receives messages about checks and measurements.
    """

    def __init__(
        self, state: StudyState, measurer: TrialMeasurer, teller: Teller, budget: Budget, events: EventSink
    ) -> None:
        self._state, self._measurer, self._teller = state, measurer, teller
        self._budget, self._events = budget, events
        self._numerics = NumericsCheck(state, measurer, budget, events)
        self._branch = BranchCheck(state, measurer, budget, events)

    def run(self) -> None:
        """Checks and measures until the recommended configurations pass every check."""
        if not self._state.spec.finalists:
            return
        found = self._finalists()
        while self._changed(found):
            found = self._finalists()  # others have moved up
        if found:
            self._measure_again(found)
        while (leaders := self._leaders()) and self._changed(leaders):
            pass  # after repeats another trial may lead, and must pass the same checks
        while self._numerics.run(self._shown()):
            pass

    def _changed(self, found: Sequence[Measured]) -> bool:
        """Checks candidates; whether the ranking may have changed."""
        return self._numerics.run(found) or self._branch.run(found)

    def _finalists(self) -> list[Measured]:
        measured, plan = self._state.measured(), self._state.plan
        baseline, n = baseline_of(measured), plan.spec.finalists
        return recommend.finalists(measured, baseline, self._state.objectives, n, plan.data_parallel)

    def _leaders(self) -> list[Measured]:
        """The repeated trials that beat the baseline, best first, down to the first without a doubt."""
        measured, found = self._state.measured(), list[Measured]()
        for m in recommend.rank(measured, baseline_of(measured), self._state.objectives):
            if m.trial == 0:
                break
            if m.repeats and not m.barred:
                found.append(m)
                if not m.doubt:
                    break
        return found

    def _shown(self) -> list[Measured]:
        """The trials that the answer shows, or would if they passed their checks: the picks, then the front."""
        measured = self._state.measured()
        found = recommend.recommend(
            measured, baseline_of(measured), self._state.objectives, self._state.plan.data_parallel
        )
        picked = [pick.measured for pick in found.picks.values()]
        return list({m.trial: m for m in [*picked, *found.unchecked, *found.front]}.values())

    def _measure_again(self, found: list[Measured]) -> None:
        """Measures the finalists and the baseline in turns, so that drift affects all of them alike."""
        folder, spec = self._state.folder, self._state.spec
        while True:
            measured = self._state.measured()
            baseline = baseline_of(measured)
            left = recommend.in_race(found, measured, baseline, self._state.objectives, self._state.plan.world_size)
            if beaten := [f"trial {m.trial}" for m in found if m not in left]:
                self._events.say(f"{', '.join(beaten)}: clearly beaten, so not measured again")
            found = left
            turn = [*found, *([baseline] if baseline else [])]
            # Only whole rounds count: parts of interrupted ones were measured at another time.
            rounds = [{n for n, path in records.repeat_paths(folder, m.trial).items() if result_in(path)} for m in turn]
            n_done, last = len(set.intersection(*rounds)), max(set.union(*rounds), default=0)
            if n_done >= spec.repeats and not (n_done < 2 * spec.repeats and self._unsettled()):
                return
            if not self._budget.affords(len(turn) * self._budget.usual_s()):
                return
            if n_done == 0:
                beside = "and the baseline " if baseline else ""
                self._events.say(f"measuring the best {len(found)} {beside}again, in turns")
            for m in turn:
                path = records.repeat_path(folder, m.trial, last + 1)
                result = self._measurer.execute(m.candidate, path, role="repeat")
                metrics = {name: estimate.value for name, estimate in measure(result, None).items()}
                self._teller.progress(m.trial, "repeat", m.candidate, result, metrics)

    def _unsettled(self) -> bool:
        """Whether the rounds differ enough, and time is left, for more of them."""
        measured = self._state.measured()
        return not self._budget.out_of_time() and recommend.spread(measured, baseline_of(measured)) > MAX_SPREAD
