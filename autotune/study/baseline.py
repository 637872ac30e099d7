"""The baseline's trial: decides which objectives can be measured, and measures the gradient noise scale."""

import math
import random
from dataclasses import replace

from autotune.errors import UserError
from autotune.executors.base import TWICE, TimeOver
from autotune.forecast.predictor import generic_prior
from autotune.scoring import objective
from autotune.scoring.convergence.noise_scale import LEAST_STEPS, NoiseScale, noise_scale_of
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.scoring.metrics import GOODPUT, measure
from autotune.scoring.objective import Objective
from autotune.scoring.step_times import FEWEST_STEPS
from autotune.space import feasibility
from autotune.space.legality import OP_RULES, why_illegal
from autotune.space.space import global_batches
from autotune.study.branch_check import largest_batch
from autotune.study.budget import PROBE_SHARE, Budget
from autotune.study.events import EventSink
from autotune.study.folder import warm_path
from autotune.study.measure import TrialMeasurer
from autotune.study.setup.plan import Plan
from autotune.study.spec.presets import DEFAULT_GOAL, SCARCE
from autotune.study.spec.readers import objective_of
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.study.storage.generations import generation_of
from autotune.study.tell import Teller
from autotune.system.units import format_bytes
from autotune.trial import failures
from autotune.trial.folder import result_in
from autotune.trial.result import Outcome, TrialResult

# Steps that the noise probe takes at least, of which the first third does not count, and micro-gradients of each.
PROBE_STEPS = math.ceil(1.5 * LEAST_STEPS)
MIN_NOISE_MICROS = 4
# Random candidates among which the fastest of each global batch is sought.
DRAWS = 2_000
# Why larger global batches are not tried.
LONG_STEPS = "a trial's deadline leaves no time for their steps; --trial-deadline with more time includes them"
LONG_BRANCH = (
    "the branch that checks what one is worth would take longer than this study can give it; --time-budget with more time"
    " includes them, --no-branch tries them unchecked"
)
# Memory is scarce, and becomes an objective, where the baseline's peak takes this share of the device's.
SCARCE_SHARE = 0.6


class BaselineTrial:
    """Measures the baseline and decides what the study can measure at all.

    Args:
        state: The study, which does not exist in the database yet.
        budget: Says whether there is time to measure the noise as well.
        known_noise: The gradient noise scale of an earlier study of the same model, which counts where it cannot be measured.
    """

    def __init__(
        self, state: StudyState, measurer: TrialMeasurer, events: EventSink, budget: Budget, known_noise: NoiseScale | None = None
    ) -> None:  # fmt: skip
        self._state, self._measurer, self._events, self._budget = state, measurer, events, budget
        self._known_noise = known_noise
        self._tried_again = False

    def run(self) -> TrialResult:
        """Runs the baseline's trial and settles objectives, reference and learning rate.

        Raises:
            UserError: None of the objectives can be measured.
        """
        result = self._measurer.execute(self._state.plan.baseline, self._state.trial_path(0), role="baseline")
        complete = result.outcome is Outcome.COMPLETE
        dropped = self._unmeasurable(result) if complete else self._without_baseline(result)
        objectives = [o for o in self._state.objectives if o not in dropped]
        self._state.objectives = [*objectives, *self._scarce(result)]
        return result

    def _scarce(self, result: TrialResult) -> list[Objective]:
        """The objective of memory, where a balanced goal has none and the baseline leaves little of it."""
        state, limit = self._state, self._state.plan.memory_limit_bytes
        if state.spec.goal != DEFAULT_GOAL or not limit:
            return []
        if result.outcome is Outcome.OOM:
            if failures.ended_by_host(result.outcome, result.reason, on_device=state.plan.setting.accelerator != "cpu"):
                return []
            how = "the baseline runs out of it"
        elif result.peak_memory_bytes and result.peak_memory_bytes >= SCARCE_SHARE * limit:
            how = f"the baseline takes {result.peak_memory_bytes / limit:.0%} of the {format_bytes(limit)} of a rank"
        else:
            return []
        self._events.say(f"memory is scarce here ({how}), so less of it is an objective, too")
        return [objective_of(*SCARCE)]

    def _unmeasurable(self, result: TrialResult) -> list[Objective]:
        """The objectives that a complete baseline does not measure; measures the noise scale on the way."""
        state = self._state
        state.reference = Reference.of(result)
        self._measure_noise()
        found = objective.score(result, state.objectives, state.spec.constraints, state.reference)
        dropped = [o for o in state.objectives if o.metric in found.missing]
        left = [o for o in state.objectives if o not in dropped]
        objective.check_measurable(result, left or state.objectives, state.spec.constraints, state.reference)
        for each in dropped:
            self._events.say(f"objective {each.name!r} is left out: {found.missing[each.metric]}")
        return dropped

    def _without_baseline(self, result: TrialResult) -> list[Objective]:
        """The objectives that only a comparison with a complete baseline measures."""
        how, objectives = result.end, self._state.objectives
        dropped = [o for o in objectives if o.metric in (GOODPUT, "time_to_loss_s")]
        if len(dropped) == len(objectives):
            raise UserError(f"convergence is measured against the baseline, which did not complete ({how})")
        later = "; it is measured once more after another trial has completed" * (result.outcome is Outcome.CRASHED)
        self._events.say(f"the baseline did not complete ({how}), so no speed-up can be stated{later}")
        return dropped

    def run_again(self, teller: Teller) -> None:
        """Measures a baseline that did not complete once more in each run where it may complete: else no speed-up can be stated."""
        state, baseline = self._state, self._state.plan.baseline
        why = "" if self._tried_again else self._why_again()
        if not why or not self._budget.affords(self._budget.usual_s()):
            return
        self._tried_again = True
        self._events.say(f"the baseline {why}, so it is measured once more")
        try:
            result = teller.explained(baseline, self._measurer.execute(baseline, state.trial_path(0), role="baseline"))
        except TimeOver:
            return
        if result.outcome is Outcome.COMPLETE:
            state.keep_reference(Reference.of(result))
            teller.tell_baseline(baseline, result)
            # The database has the study with as many objectives as it began with.
            kept = {each.metric for each in state.objectives}
            if lost := [repr(each.name) for each in state.spec.objectives if each.metric not in kept]:
                self._events.say(
                    f"the study began without the baseline, so {' and '.join(lost)} stays left out; --fresh begins anew with it"
                )
        else:
            self._events.say(f"the baseline did not complete again ({result.end}); --fresh begins anew")

    def _why_again(self) -> str:
        """Why the baseline, which did not complete, may complete now; empty if it did, or nothing says so."""
        state, told = self._state, self._state.told()[:1]
        if not told or told[0].number:
            return ""
        if state.has_more_time(told[0], self._measurer.deadline_s):
            return "timed out and has more time now"
        found, setting = records.told_data(told[0]), state.plan.setting
        if found["outcome"] != Outcome.CRASHED or Outcome.COMPLETE not in state.outcomes():
            return ""
        again = found["reason"].startswith(TWICE) or failures.means_other_dtype(found["reason"])
        would = again or why_illegal(state.plan.baseline, setting, OP_RULES)
        return "" if would else "crashed and other trials complete"

    def restore(self) -> None:
        """Narrows the space of a resumed study, if its noise scale could not be measured."""
        reference = self._state.reference
        if reference is not None and reference.noise is None and self._state.spec.global_batch != "keep":
            self._keep_batch(reference.noise_problem)
        self.leave_out_batches()

    def leave_out_batches(self) -> None:
        """Searches no global batch that the study has no time for: for its steps in a trial, or for the branch that checks it.

        The study's record keeps the whole space, since a run with more time searches it.
        """
        most_samples = self._most_samples()
        for key, why in (("long steps", LONG_STEPS), ("branch", LONG_BRANCH)):
            plan = self._state.plan
            most = max(most_samples.get(key, math.inf), plan.baseline.global_batch_size(plan.setting.world_size))
            said = f"global batches above {most:.0f} are not tried: {why}" if self._leaves_some_out(most) else ""
            records.note_left_out(self._state.study, key, said)
            if said:
                self._events.say(said)
                low = plan.setting.global_batch[0] if plan.setting.global_batch else 1
                # With all values, as Optuna wants the same ones in every trial.
                self._state.narrow(global_batch=(low, int(most)))

    def _most_samples(self) -> dict[str, float]:
        """The samples of the largest step for which there is time, in a trial and in a branch; of neither without a throughput."""
        plan, spec, result = self._state.plan, self._state.spec, result_in(self._state.trial_path(0))
        rate = measure(result, None).get("samples_per_s") if result is not None else None
        if result is None or rate is None or result.outcome is not Outcome.COMPLETE:
            return {}
        found = {"long steps": rate.value * spec.trial_deadline_s / FEWEST_STEPS}
        if self._leaves_some_out(found["long steps"]):  # at the baseline's throughput, which others may exceed by far
            baseline_s = plan.baseline.global_batch_size(plan.setting.world_size) / rate.value
            in_time = [
                b
                for b, times in _fastest_by_batch(plan).items()
                if FEWEST_STEPS * times * baseline_s <= spec.trial_deadline_s
            ]
            found["long steps"] = max([found["long steps"], *in_time])
        if spec.branch and plan.replicated and spec.finalists and spec.branch_tokens is None:
            rest_s = 3 * self._budget.startup_s() + self._budget.trial_s  # weights to start from, and both sides
            found["branch"] = largest_batch(self._budget.expected_check_room_s(result.wall_s), rate.value, rest_s)
        return found

    def _leaves_some_out(self, most: float) -> bool:
        """Returns whether some global batches that may be searched have more samples than that, and others have not."""
        plan = self._state.plan
        baseline, world = plan.baseline, plan.setting.world_size
        low, high = plan.setting.global_batch or (1, math.inf)
        if not any(most < batch <= high for batch in global_batches(plan.space, baseline, world)):
            return False
        setting = replace(plan.setting, global_batch=(int(low), int(most)))
        return feasibility.holds_another(plan.space, baseline, setting)

    def _measure_noise(self) -> None:
        """Measures the gradient noise scale once, if an objective needs it."""
        state = self._state
        reference = state.reference
        assert reference is not None
        wanted = any(o.metric == GOODPUT for o in state.objectives)
        if state.spec.global_batch == "keep" or not wanted:
            return
        problem = self._probe(reference)
        if not problem:
            return
        noise = self._known_noise
        state.reference = replace(reference, noise_problem=problem, noise=noise)
        if noise is None:
            self._keep_batch(problem)
        else:
            self._events.say(f"{problem}; what was measured before counts: {noise}")

    def _probe(self, reference: Reference) -> str:
        """Measures the noise scale and settles it; returns why it could not, or an empty text."""
        state = self._state
        plan, spec, candidate, world = state.plan, state.spec, state.plan.baseline, state.plan.world_size
        if plan.splits_batch:
            steps = max(candidate.gradient_accumulation_steps, math.ceil(MIN_NOISE_MICROS / world))
            micro = max(1, candidate.global_batch_size(world) // (steps * world))
            candidate = replace(candidate, micro_batch_size=micro, gradient_accumulation_steps=steps)
        if not plan.replicated:
            return "the gradient noise scale is not measured where a model is split between ranks"
        if candidate.gradient_accumulation_steps * world < 2:
            return "the gradient noise scale needs two micro-batches a step, and the script's batch cannot be split"
        own = result_in(state.trial_path(0))
        if own is not None and own.steps is not None and PROBE_STEPS * own.steps.median_s > spec.trial_deadline_s:
            return _remedied(
                "a trial's deadline leaves no time for the steps of the probe of the gradient noise scale", "a longer --trial-deadline",
                spec.name,
            )  # fmt: skip
        if not self._budget.affords((2 * self._budget.trial_s + self._budget.startup_s()) / PROBE_SHARE):
            return self._with_more_time(
                "the time budget has no room for the probe of the gradient noise scale", ended=True
            )
        self._events.say("measuring the gradient noise scale, which says what a larger global batch is worth")
        start = spec.from_checkpoint
        try:
            result = self._measurer.execute_again(
                candidate,
                state.folder / "trials" / "noise",
                what="the probe of the gradient noise scale",
                role="noise",
                weights=str(start) if start else None,
                save_weights=str(warm_path(state.folder)) if spec.branch and start is None else None,
            )
        except TimeOver:
            return self._with_more_time("the time budget ended in the probe of the gradient noise scale", ended=True)
        noise = noise_scale_of(result.noise) if result.noise is not None else None
        if noise is None:
            return f"its probe ended with {result.end}"
        if not noise.compares:
            return self._with_more_time(str(noise))
        self._events.say(str(noise))
        state.reference = replace(reference, noise=noise)
        return ""

    def _with_more_time(self, problem: str, *, ended: bool = False) -> str:
        """A problem of the noise probe that more time would solve, with what sets that time: the time budget that ended, or the trial's."""
        short = ended or self._budget.trial_s < self._state.spec.trial_budget_s
        what = "the time budget" if short else "trial_budget_s in study.yaml"
        return _remedied(problem, f"more of {what}", self._state.spec.name)

    def _keep_batch(self, problem: str) -> None:
        """Searches the baseline's global batch alone, if goodput needs the noise scale that could not be measured."""
        plan = self._state.plan
        name = next((o.name for o in self._state.objectives if o.metric == GOODPUT), None)
        if name is None:
            return
        baseline, world = plan.baseline, plan.setting.world_size
        batch, kept = baseline.global_batch_size(world), plan.full_space.keeping(baseline, world)
        leave = _left_out(name, self._state)
        setting = replace(plan.setting, global_batch=(batch, batch))  # accumulation cannot make up for every degree
        space = feasibility.pruned(kept, baseline, setting)
        if not feasibility.holds_another(space, baseline, setting):
            raise UserError(
                f"{problem}, so that other global batches cannot be compared by {name!r}, and the space varies nothing else;"
                f" {leave}, or vary more, as --space batch,zero does"
            )
        self._events.say(
            f"{problem}: what other global batches are worth is not known, so the baseline's {batch} is kept; {leave}"
            " to vary it all the same"
        )
        self._state.narrow(space, global_batch=setting.global_batch)


def _left_out(name: str, state: StudyState) -> str:
    """Advice to leave an objective out, with the options that do it; a re-tuning has none."""
    others = ",".join(each.name for each in state.objectives if each.name != name) or "throughput"
    how = "" if generation_of(state.spec.name)[1] else f" (--fresh --objective {others})"
    return f"leave {name!r} out of the objectives{how}"


def _remedied(problem: str, remedy: str, study: str) -> str:
    """A problem of the noise probe with its remedy; a re-tuning takes it from study.yaml, and has no options for it."""
    if generation_of(study)[1]:
        return f"{problem} ({remedy.replace('--trial-deadline', 'trial_deadline_s in study.yaml')} measures it)"
    return f"{problem} (--fresh with {remedy} measures it)"


def _fastest_by_batch(plan: Plan) -> dict[int, float]:
    """By global batch how many times as long as the baseline's the shortest step is forecast to be, of what fits."""
    drawn = plan.space.draw(random.Random(0), plan.baseline, DRAWS)
    legal = [plan.baseline, *dict.fromkeys(each for each in drawn if why_illegal(each, plan.setting) is None)]
    forecast = generic_prior(plan.workload, plan.setting)(legal)
    times, sizes = forecast.time_terms.sum(axis=1), forecast.memory_terms.sum(axis=1)
    found: dict[int, float] = {}
    for candidate, ratio, size in zip(legal, times / times[0], sizes, strict=True):
        if size <= (plan.memory_limit_bytes or math.inf):
            batch = candidate.global_batch_size(plan.setting.world_size)
            found[batch] = min(ratio, found.get(batch, math.inf))
    return found
