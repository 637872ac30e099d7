"""The end of a study: the finalists are checked for how they train, and measured again beside the baseline."""

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.scoring import racing, recommend
from autotune.scoring.measured import Measured
from autotune.scoring.metrics import remeasured
from autotune.study.branch_check import BranchCheck
from autotune.study.budget import MOST_ROUNDS, Budget
from autotune.study.events import EventSink
from autotune.study.folder import repeat_path, repeat_paths
from autotune.study.measure import TrialMeasurer
from autotune.study.numerics_check import NumericsCheck
from autotune.study.state import StudyState
from autotune.study.tell import Teller
from autotune.trial.folder import result_in

# As many rounds at most where the user states none.
UNSTATED_ROUNDS = 2


class Finalists:
    """Confirms a study's recommendation; earlier checks and measurements are read from the study's folder."""

    def __init__(
        self, state: StudyState, measurer: TrialMeasurer, teller: Teller, budget: Budget, events: EventSink
    ) -> None:
        self._state, self._measurer, self._teller = state, measurer, teller
        self._budget, self._events = budget, events
        self._numerics = NumericsCheck(state, measurer, budget, events)
        self._branch = BranchCheck(state, measurer, budget, events)
        self.cut = False  # whether the time budget has no room for a round that is wanted

    def run(self) -> None:
        """Checks and measures until the recommended configurations pass every check."""
        if not self._state.spec.finalists:
            return
        self._budget.forget_unchecked()
        self._branch.lengthen()
        self._numerics.refuse_other_losses()
        found = self._finalists()
        # Where nothing is measured again without need, checks come last: they cost more.
        while self._state.spec.repeats and self._changed(found):
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
        plan = self._state.plan
        first = self._state.estimates(first=True)
        return recommend.finalists(first, self._state.objectives, plan.spec.finalists, plan.data_parallel)

    def _leaders(self) -> list[Measured]:
        """The repeated trials that beat the baseline, best first, down to the first without a doubt.

        Where nothing is measured again without need, those that are shown to beat it.
        """
        found, estimates, objectives = list[Measured](), self._state.estimates(), self._state.objectives
        for m in recommend.rank(estimates, objectives):
            if m.trial == 0:
                break
            unneeded = not self._state.spec.repeats and estimates.baseline is not None
            sure = recommend.shown_better(m, estimates, objectives) if unneeded else m.confirmed
            if sure and not m.barred:
                found.append(m)
                if not m.doubt:
                    break
        return found

    def _shown(self) -> list[Measured]:
        """The trials that the answer shows, or would if they passed their checks: the picks, then the front."""
        found = recommend.recommend(self._state.estimates(), self._state.objectives, self._state.plan.data_parallel)
        picked = [pick.measured for pick in found.picks.values()]
        return list({m.trial: m for m in [*picked, *found.unchecked, *found.front]}.values())

    def _measure_again(self, found: list[Measured]) -> None:
        """Measures the best and the baseline in turns, so that drift affects all of them alike, until that decides."""
        spec, plan = self._state.spec, self._state.plan
        numbers, most = [m.trial for m in found], max(UNSTATED_ROUNDS, MOST_ROUNDS * spec.repeats)
        # Without stated rounds all that is settled is whether the answer beats the baseline.
        below = max(racing.SETTLED, spec.stop_below) if spec.repeats else math.inf
        spent = not spec.repeats and self._budget.n_spent() >= spec.trials
        while True:
            estimates, tried = self._state.estimates(), self._tried()
            # What the time budget can no longer check can be no answer.
            hopeful = [m for m in estimates.measured if m.trial not in self._branch.too_late]
            estimates = replace(estimates, measured=hopeful)
            n_done = racing.rounds_done(estimates, tried)
            turn = racing.next_round(
                estimates, self._state.objectives, numbers, plan.data_parallel, spec.finalists, tried=tried,
                rounds=racing.Rounds(least=spec.repeats, most=most, below=below, unforeseen=spent),
            )  # fmt: skip
            base = [estimates.baseline] if estimates.baseline else []
            wanted = bool(turn)
            while turn and not self._budget.affords(self._budget.again_s(m.trial for m in [*turn, *base])):
                turn.pop()  # the best come first
            if not turn:
                self.cut = wanted
                return
            if n_done == 0:
                beside = "and the baseline " if base else ""
                self._events.say(f"measuring the best {len(turn)} {beside}again, in turns")
            elif n_done == spec.repeats:
                self._events.say(f"up to {most - n_done} more rounds: it is not settled yet which one is best")
            round_s = self._budget.again_s(m.trial for m in [*turn, *base])
            self._budget.expect_rounds(round_s, n_done, estimates.noise_sd)
            self._round([*turn, *base])

    def _round(self, turn: Sequence[Measured]) -> None:
        """Measures each of these trials once."""
        folder = self._state.folder
        number = 1 + max((n for m in self._state.measured() for n in repeat_paths(folder, m.trial)), default=0)
        for m in turn:
            path = repeat_path(folder, m.trial, number)
            if m.failed_again or not self._budget.affords(2 * self._budget.again_s([m.trial])):
                result = self._measurer.execute(m.candidate, path, role="repeat")
            else:
                result = self._measurer.execute_again(m.candidate, path, what=f"trial {m.trial}", role="repeat")
            self._teller.progress(m.trial, "repeat", m.candidate, result, remeasured(result, None))

    def _tried(self) -> dict[int, int]:
        """The re-measurements that have ended, by trial."""
        folder = self._state.folder
        return {
            m.trial: sum(result_in(path) is not None for path in repeat_paths(folder, m.trial).values())
            for m in self._state.measured()
        }
