"""Proposals: which candidate the next trial measures, or why there is none."""

import math
import zlib
from collections import Counter

from optuna.trial import Trial, TrialState

from autotune.forecast.features import Prior
from autotune.forecast.predictor import generic_prior
from autotune.scoring import objective
from autotune.scoring.convergence.first_losses import ANOTHER_OBJECTIVE, AVERAGE, sums_samples
from autotune.search import stopping
from autotune.search.physics import PhysicsSampler
from autotune.search.samplers import LegalSampler, encoded
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.legality import why_illegal
from autotune.study import autocast
from autotune.study.baseline import LONG_STEPS
from autotune.study.budget import Budget
from autotune.study.events import STOPPED, EventSink
from autotune.study.parallel import ClaimedTrial
from autotune.study.state import StudyState
from autotune.study.storage import analysed, records
from autotune.study.tell import Teller, why_stopped
from autotune.study.warm_start import WarmStart
from autotune.system.signals import undisturbed
from autotune.trial.request import TrialToBeat
from autotune.trial.result import Outcome, TrialResult

# A candidate whose trials were lost so often is no longer the first that a run takes up.
MAX_LOST = 3
# What a further trial may gain is told from here on: below, the model does not know it after a few trials.
LEAST_TOLD_GAIN = 0.03
# Why larger global batches are not tried.
WHY_DROPPED = {"few steps": "the script is over after too few of their steps to time them", "long steps": LONG_STEPS}


class Proposer:
    """Claims the next trial of a study.

    Args:
        leads: Whether this coordinator leads the study; False if it helps the one that does.
    """

    def __init__(
        self,
        state: StudyState,
        teller: Teller,
        budget: Budget,
        events: EventSink,
        warm: WarmStart | None,
        *,
        leads: bool,
    ) -> None:
        self._state, self._teller, self._budget, self._events = state, teller, budget, events
        self._warm, self._leads = warm, leads
        self._physics: PhysicsSampler | None = None
        self._sampler: LegalSampler | None = None
        self._nothing_since: int | None = None
        self._setting = state.plan.setting

    def start(self) -> LegalSampler:
        """Makes the sampler of the study."""
        state, plan, spec = self._state, self._state.plan, self._state.spec
        if plan.setting != self._setting:
            self._physics, self._setting = None, plan.setting  # it holds the candidates that were legal before
        seed = spec.seed + len(state.trials())
        if not self._leads:  # coordinators that join together must not draw alike
            seed += zlib.crc32(str(state.leases.owner).encode())
        advisor = self.advisor()
        advisor.later = analysed.measured_later(state.told())
        # What failed a check can be no answer, and what has its settings will hardly be one; also of this run's own checks,
        # after which the search may go on.
        advisor.refused = self.refused()
        # A quick study with time for its checks tries the fewest trials that decide, until a check has refused one.
        if not spec.quick or spec.time_budget_s is not None or advisor.refused:
            advisor.search.drops_in = plan.drops_in
        if spec.sampler == "physics":
            self._sampler = advisor
        else:
            self._sampler = LegalSampler(spec.sampler, plan.space, plan.baseline, plan.setting, seed)
        state.study.sampler = self._sampler
        return self._sampler

    def refused(self) -> set[int]:
        """The trials that a check has refused."""
        return {m.trial for m in self._state.measured() if m.refused}

    def advisor(self) -> PhysicsSampler:
        """The physics sampler, which judges candidates also where another sampler proposes them."""
        if self._physics is None:
            plan, spec, warm = self._state.plan, self._state.spec, self._warm
            prior: Prior = generic_prior(plan.workload, plan.setting)
            self._physics = PhysicsSampler(
                plan.space,
                plan.baseline,
                plan.setting,
                spec.seed,
                prior=warm.prior(prior) if warm is not None else prior,
                metrics={o.metric: o.weight for o in self._state.objectives},
                memory_limit_bytes=plan.memory_limit_bytes,
                bounds=objective.bounds(self._state.objectives, spec.constraints).values(),
            )
            self._physics.proposes, search = spec.sampler == "physics", self._physics.search
            search.goal_only = warm is not None and warm.compromise
            search.quick, search.cautious = spec.quick, spec.memory_filter
        return self._physics

    def bounds_to_beat(self, candidate: Candidate) -> tuple[TrialToBeat, ...]:
        """The measurements that a candidate must beat while it runs; none before the baseline is complete."""
        state = self._state
        if not state.exists or state.reference is None or not state.spec.stop_trials:
            return ()
        advisor, plan = self.advisor(), state.plan
        return stopping.bounds_to_beat(
            advisor.guide, advisor.told(state.study), candidate, state.measured(), plan.baseline, self._teller.noise_sd,
            drops_in=plan.drops_in(candidate),
        )  # fmt: skip

    def describe(self, asked: Trial, candidate: Candidate, role: str) -> None:
        """Notes in the database which candidate a claimed trial measured, as the baseline whose result is there already."""
        (self._sampler or self.start()).force(candidate)
        self._drawn(asked, candidate, role)

    def next(self) -> ClaimedTrial | str | None:
        """Claims the next trial.

        Returns:
            None while that depends on running trials; a text if there is none: the reason, empty at the end of the
            budget.
        """
        state = self._state
        if not self._leads and (why := state.study.user_attrs.get(records.ENDED_ATTR)):
            return str(why)
        self._budget.check_target_works()
        n_running = len(records.running(state.study))
        n_ended = len(state.trials()) - n_running
        if self._budget.n_spent() + n_running >= state.spec.trials:
            return None if n_running else self._spent()
        if n_running and self._nothing_since == n_ended:
            return None
        self._drop_unsafe_precisions()
        self._drop_long_batches()
        self._drop_other_losses()
        if state.plan.setting != self._setting:
            self.start()
        assert self._sampler is not None
        if (first := self._first() or autocast.next_under_autocast(state)) is not None:
            self._sampler.force(first)
        claimed = self._claim_or_reason(self._sampler)
        if isinstance(claimed, str) and n_running:  # a running trial may change that
            self._nothing_since = n_ended
            return None
        return claimed

    def _spent(self) -> str:
        """What is said of a further trial where the budget of trials has ended the search; empty if it is not worth its time."""
        spec = self._state.spec
        if not self._leads or spec.sampler != "physics" or not spec.stop_below:
            return ""
        if why := self._settled():  # then a larger budget alone would not go on either
            return why
        with undisturbed():
            gain = self.advisor().next_gain(self._state.study)
        if not max(spec.stop_below, LEAST_TOLD_GAIN) <= gain < math.inf:  # infinite while no trial can be recommended
            return ""
        n = f"the {spec.trials} trials are" if spec.trials > 1 else "the only trial is"
        return (
            f"{n} spent, and a further one is expected to improve the answer by {gain:.0%}: a larger --trials goes on"
        )

    def _settled(self) -> str:
        """Why no further trial is worth its time, as the physics sampler expects; empty if one may be."""
        spec = self._state.spec
        with undisturbed():
            why = self.advisor().settled(self._state.study, spec.stop_below)
        return f"{STOPPED} {self._budget.n_spent()} of {spec.trials} trials: {why}" if why else ""

    def _claim_or_reason(self, sampler: LegalSampler) -> ClaimedTrial | str:
        state = self._state
        if self._leads and self._budget.out_of_time():
            return self._budget.words()
        if state.spec.sampler == "physics" and sampler.forced is None and (why := self._settled()):
            return why
        if claim := self.claim():
            return claim
        n_unfit = sum(outcome is Outcome.PREDICTED_OOM for outcome in state.outcomes())
        unfit = f", or is predicted not to fit the device memory ({n_unfit})" if n_unfit else ""
        return sampler.why_exhausted + unfit

    def claim(self) -> ClaimedTrial | None:
        """Begins the next trial; None if the sampler has nothing left."""
        state, sampler = self._state, self._sampler
        assert sampler is not None
        if not sampler.choose(state.study):
            return None
        forced, candidate, unfit = sampler.forced, None, None
        with undisturbed():
            asked = state.leases.claim(state.study)
        try:
            candidate = self._drawn(asked, forced, "search")
            # The physics sampler has weighed its own proposals already.
            if candidate and forced is None and state.spec.memory_filter and state.spec.sampler != "physics":
                unfit = self.advisor().unfit(state.study, candidate)
        except BaseException as error:
            with undisturbed():
                if candidate is None:
                    state.leases.tell(asked, TrialState.FAIL, None, {}, {})
                else:
                    lost = TrialResult(outcome=Outcome.LOST, reason=why_stopped(error))
                    self._teller.tell(asked, candidate, "search", lost, quiet=True)
            raise
        if candidate is None:
            state.leases.tell(asked, TrialState.FAIL, None, {}, {})
            return None
        result = None
        if unfit is not None:
            result = TrialResult(outcome=Outcome.PREDICTED_OOM, reason=unfit, candidate=candidate.values())
        return ClaimedTrial(asked=asked, candidate=candidate, result=result)

    def _drawn(self, asked: Trial, forced: Candidate | None, role: str) -> Candidate | None:
        """The candidate of a claimed trial, noted in the database; None if nothing is left to measure."""
        space, baseline = self._state.plan.space, self._state.plan.baseline
        drawn = asked.relative_params  # has the sampler draw, and so use up a forced candidate
        assert self._sampler is not None
        if forced is not None:
            candidate, params = forced, encoded(space, forced)
        elif self._sampler.exhausted:
            return None
        else:
            candidate = space.candidate(space.suggest(lambda p: p.decode(drawn[p.optuna_name]), baseline), baseline)
            params = {name: drawn[name] for name in encoded(space, candidate)}
        described = {
            p.optuna_name: (params[p.optuna_name], p.distribution())
            for p in space.parameters
            if p.optuna_name in params
        }
        self._state.leases.describe(asked, described, {CANDIDATE_ATTR: candidate.key, records.ROLE_ATTR: role})
        return candidate

    def _first(self) -> Candidate | None:
        """What is measured before anything is proposed: a lost trial's candidate, then the other study's best ones."""
        failed = [t for t in self._state.trials() if t.state is TrialState.FAIL]
        lost = Counter(key for t in failed if (key := t.user_attrs.get(CANDIDATE_ATTR)) is not None)
        # One that takes its coordinator down must not be the first trial of every later run.
        first = [Candidate.from_key(key) for key, n in lost.items() if n < MAX_LOST]
        first += self._warm.first if self._warm is not None else ()
        known, setting = self._state.known() if first else set(), self._state.plan.setting
        # What a trial has shown, or a run with less time, may leave out since.
        return next((c for c in first if c.key not in known and why_illegal(c, setting) is None), None)

    def _drop_unsafe_precisions(self) -> None:
        """Forbids a precision once trials have shown that the model cannot train in it."""
        unsafe = autocast.unsafe_precisions(self._state)
        if unsafe == self._state.plan.setting.unsafe_precisions:
            return
        self._events.say(
            f"{' and '.join(unsafe)} is no longer proposed: the model mixes number types that this cannot multiply, at which"
            f" {autocast.MAX_MISMATCHES} trials ended"
        )
        self._state.narrow(unsafe_precisions=unsafe)

    def _drop_long_batches(self) -> None:
        """Leaves out the global batches with which the script or its deadline ends a trial before its step time is known."""
        timed, over = _batches_by_end(self._state)
        for key, why in WHY_DROPPED.items():
            plan, found = self._state.plan, [batch for batch in over[key] if batch > timed]
            low, high = plan.setting.global_batch or (1, math.inf)
            if found and plan.baseline.global_batch_size(plan.setting.world_size) < min(found) <= high:
                said = f"global batches above {min(found) - 1} are not tried: {why}"
                self._events.say(said)
                records.note_left_out(self._state.study, key, said)
                self._state.narrow(global_batch=(int(low), min(found) - 1))

    def _drop_other_losses(self) -> None:
        """Keeps the baseline's micro-batch once a trial with another one has trained with another loss."""
        state, setting = self._state, self._state.plan.setting
        off = [(records.told_candidate(told), records.told_data(told).get("loss_off", 0.0)) for told in state.told()]
        far = [(candidate.micro_batch_size, each) for candidate, each in off if abs(each) >= ANOTHER_OBJECTIVE]
        if setting.only_micro_batch or not far:
            return
        said = "micro-batches other than the baseline's are not tried: they train with another loss"
        if all(sums_samples(each, micro, state.plan.baseline.micro_batch_size) for micro, each in far):
            said += f"; {AVERAGE}"
        self._events.say(said)
        records.note_left_out(state.study, "another loss", said)
        state.narrow(only_micro_batch=state.plan.baseline.micro_batch_size)


def _batches_by_end(state: StudyState) -> tuple[int, dict[str, list[int]]]:
    """The largest global batch that was timed, and those whose trials ended before they were, by a word for the reason.

    What ended a trial with no larger batch than one that was timed was not its batch.
    """
    timed, over, world = 0, {key: list[int]() for key in WHY_DROPPED}, state.plan.setting.world_size
    for told in state.told():
        data, batch = records.told_data(told), records.told_candidate(told).global_batch_size(world)
        late = data["wall_s"] >= state.spec.trial_deadline_s
        if data["outcome"] in (Outcome.COMPLETE, Outcome.STOPPED_EARLY):
            timed = max(timed, batch)
        elif data["outcome"] == Outcome.TOO_FEW_STEPS:
            over["few steps"].append(batch)
        elif (data["outcome"], data["phase"]) == (Outcome.TIMEOUT, "measure") and late:
            over["long steps"].append(batch)
    return timed, over
