"""Telling a trial: its score and forecast go to the database, its end and the study's progress to the events."""

import contextlib
import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.errors import UserError
from autotune.executors.base import MachinesGone
from autotune.forecast.predictor import Predictor, generic_prior
from autotune.forecast.regression import STOPPED_SD
from autotune.scoring import objective, recommend
from autotune.scoring.convergence.branch import Run
from autotune.scoring.convergence.first_losses import (
    ANOTHER_OBJECTIVE,
    AVERAGE,
    first_losses_off,
    off_at_another_batch,
    sums_samples,
)
from autotune.scoring.estimates import WITHIN_NOISE, Estimates
from autotune.scoring.measured import Measured, set_apart
from autotune.scoring.objective import Objective, Score
from autotune.search.observation import MEASURED_ATTR, observed
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.study import autocast, placement
from autotune.study.budget import Budget
from autotune.study.events import EventSink, Leader, Progress
from autotune.study.parallel import ClaimedTrial
from autotune.study.setup.remedies import remedy
from autotune.study.state import StudyState
from autotune.study.storage import records
from autotune.study.storage.leases import Lease
from autotune.study.storage.optuna_tables import trial_id, write_dates
from autotune.system.signals import undisturbed
from autotune.system.units import rounded
from autotune.trial import failures
from autotune.trial.folder import TrialDir, ran, result_in
from autotune.trial.result import RAN, Outcome, TrialResult

# The constraint that a trial has completed, in Optuna's study.
COMPLETED = "completed"
# Share of a study's time that the leader in its progress may cost (the estimates are cubic in the trials), where once is more than CHEAP_S.
STANDING_SHARE, CHEAP_S = 0.02, 0.1
# Phases of ordinary steps, in which memory is read.
ORDINARY_PHASES = ("steady", "data", "forward", "backward", "step")
ABANDONED = "the run ended before the trial did"
# Metrics that become short attributes of a trial: metric, attribute, its unit, decimals.
READABLE = (
    ("step_time_s", "step time (ms)", 1e-3), ("samples_per_s", "throughput (samples/s)", 1.0),
    ("peak_memory_bytes", "peak memory (MiB)", 2**20),
)  # fmt: skip


class _Snapshot(NamedTuple):
    """Where a study stands.

    Attributes:
        best: The best trial so far.
        gain: Its gain over the baseline.
        lacks: What it lacks to be the answer.
        noise_sd: The noise of one reading.
        metrics: What all measurements together say of each trial, by number, as the answer's tables do.
    """

    best: Measured | None = None
    gain: float | None = None
    lacks: str = ""
    noise_sd: float = 0.0
    metrics: Mapping[int, Mapping[str, float]] = {}


class Teller:
    """Ends the trials of a study."""

    def __init__(self, state: StudyState, budget: Budget, events: EventSink) -> None:
        self._state, self._budget, self._events = state, budget, events
        self._learned: set[int] = set()
        self._stood = _Snapshot()
        self._stands_until_s = 0.0

    def tell(
        self, asked: Trial | FrozenTrial, candidate: Candidate, role: str, result: TrialResult, *,
        quiet: bool = False, earlier: bool = False,
    ) -> None:  # fmt: skip
        """Ends a trial with its result; a lost trial is left to be run again.

        Args:
            quiet: Do not say how far the study is.
            earlier: It ran before now, as the baseline, which runs before its study has a row in the database.
        """
        state, result = self._state, placement.like_with_like(self._state.folder, self.explained(candidate, result))
        # The loss curve of a trial that was stopped early does not show the time to the target.
        reference = state.reference if result.outcome is not Outcome.STOPPED_EARLY else None
        score = objective.score(result, state.objectives, state.spec.constraints, reference)
        done = result.outcome is Outcome.COMPLETE and score.values is not None
        attrs: dict[str, Any] = {"outcome": str(result.outcome)} | ({"reason": result.reason} if result.reason else {})
        with records.snapshot(state.study, news=False):
            off = self._first_losses_off(candidate, result)
            measured = _measured_data(result, score) | {"forecast": self._forecast(candidate), "loss_off": off}
            attrs[MEASURED_ATTR] = json.dumps(measured)
            attrs |= _readable_attrs(candidate, measured)
        constraints = {COMPLETED: 0.0 if done else 1.0}
        constraints |= {name: violation if done else 1.0 for name, violation in score.violations.items()}
        ended = TrialState.COMPLETE if done else TrialState.PRUNED
        ended = TrialState.FAIL if result.outcome is Outcome.LOST else ended
        values = list(score.values) if done and score.values is not None else None
        told = state.leases.tell(asked, ended, values, attrs, constraints)
        # Pauses, days and the time that it took follow from when it ran.
        if told and (times := ran(state.trial_path(asked.number)) if earlier else None) is not None:
            # A clock may have been set to a day that there is not.
            with contextlib.suppress(ValueError, OverflowError), state.storage.engine.begin() as connection:
                write_dates(connection, trial_id(asked), *map(datetime.fromtimestamp, (times[0], sum(times))))
        if not told:
            self._events.say(
                f"trial {asked.number} was taken for lost, since this process was not heard of for a long time;"
                " another process has it now, and this measurement is not used"
            )
        elif not quiet:
            with records.snapshot(state.study):
                self.progress(asked.number, role, candidate, result, score.metrics)

    def tell_baseline(self, candidate: Candidate, result: TrialResult) -> None:
        """Stores the measurements of a baseline that crashed at first."""
        state, result = self._state, placement.like_with_like(self._state.folder, result)
        score = objective.score(result, state.objectives, state.spec.constraints, state.reference)
        records.note_baseline(state.study, _measured_data(result, score) | {"forecast": self._forecast(candidate)})
        self.progress(0, "baseline", candidate, result, score.metrics)

    def recover(self, abandoned: Sequence[tuple[FrozenTrial, Lease | None]], room: int) -> list[ClaimedTrial]:
        """Takes over trials of dead coordinators: tells those with a result, and marks those that do not run as lost.

        Args:
            abandoned: These trials, with the dead coordinator's leases on them.
            room: Number of trials that can be carried on.

        Returns:
            Trials that still run in their engine, to be carried on: at most `room`.
        """
        carried_on: list[ClaimedTrial] = []
        for left, lease in abandoned:
            path = self._state.trial_path(left.number)
            runs = TrialDir(path).job.exists() and result_in(path) is None
            if (runs and len(carried_on) >= room) or not self._state.leases.take_over(left, lease):
                continue
            key = left.user_attrs.get(CANDIDATE_ATTR)
            if key is None:
                self._state.leases.tell(left, TrialState.FAIL, None, {"reason": ABANDONED}, {})
                continue
            candidate, role = Candidate.from_key(key), left.user_attrs.get(records.ROLE_ATTR, "search")
            if runs:
                asked = Trial(self._state.study, left._trial_id)
                carried_on.append(ClaimedTrial(asked=asked, candidate=candidate, role=role))
                continue
            result = result_in(path)
            if result is None or result.candidate != candidate.values():
                result = self.lost(candidate)
            with undisturbed():
                self.tell(left, candidate, role, result, earlier=True)
        return carried_on

    def lost(self, candidate: Candidate) -> TrialResult:
        """The result of a trial whose coordinator died without a trace, which says nothing about the candidate."""
        return TrialResult(outcome=Outcome.LOST, reason=ABANDONED, candidate=candidate.values())

    def explained(self, candidate: Candidate, result: TrialResult) -> TrialResult:
        """The result; a failure's reason also names the remedy."""
        if result.outcome is Outcome.NOT_APPLIED and self._state.plan.target.kind == "script":
            return replace(result, reason=result.reason + remedy(result.reason))
        if result.outcome is Outcome.TIMEOUT and candidate == self._state.plan.baseline:
            return replace(result, reason=f"{result.reason}; {failures.more_time(result.phase)}")
        on_device = self._state.plan.workload.environment.accelerator != "cpu"
        if advice := failures.advice(result.outcome, result.reason, on_device=on_device):
            return replace(result, reason=f"{result.reason}. {advice}")
        return autocast.with_remedy(self._state, candidate, result)

    def progress(
        self, number: int, role: str, candidate: Candidate, result: TrialResult, metrics: Mapping[str, float]
    ) -> None:
        """Emits that a trial ended, and the state of the study."""
        stands = self._standing()
        best, estimated = stands.best, {} if role == "repeat" else stands.metrics.get(number, {})
        decides = best is not None and best.trial != 0 and bool(best.doubt)
        left_s = self._budget.left_s(decides=decides, noise_sd=stands.noise_sd)
        self._budget.keep(left_s)
        event = Progress(
            number=number,
            role=role,
            candidate=candidate,
            outcome=result.outcome,
            reason=result.reason or ("" if role == "repeat" else self._set_apart(result)),
            metrics={**metrics, **estimated},
            n_told=self._budget.n_spent(),
            n_trials=self._state.spec.trials,
            best=Leader(best.trial, best.candidate) if best else None,
            best_gain=stands.gain,
            best_open=stands.lacks,
            left_s=left_s,
        )
        self._events.ended(event)

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the logarithm of one reading of a step time, as of the last trial that was told."""
        return self._stood.noise_sd or self._standing().noise_sd

    def _set_apart(self, result: TrialResult) -> str:
        """Says of a complete trial that it cannot be recommended, whatever it measured; empty if it can."""
        if result.outcome is not Outcome.COMPLETE:
            return ""
        own = result_in(self._state.trial_path(0)) if result.unreproducible else None
        return set_apart(_unwitnessed(result), set(result.unreproducible) - set(own.unreproducible if own else ()))

    def _standing(self) -> _Snapshot:
        """Where the study stands, in a large one as of some trials ago."""
        if time.monotonic() < self._stands_until_s:
            return self._stood
        began_s = time.thread_time()
        estimates, objectives = self._state.estimates(), self._state.objectives
        best = next((m for m in recommend.rank(estimates, objectives) if not m.barred), None)
        baseline = estimates.baseline
        gain = recommend.goal_gain(best, baseline, estimates, objectives) if best and baseline else None
        lacks = _left_open(best, estimates, objectives) if best and baseline and best.trial != baseline.trial else ""
        self._stood = _Snapshot(best, gain, lacks, estimates.noise_sd, {m.trial: m.metrics for m in estimates.measured})
        took_s = time.thread_time() - began_s
        self._stands_until_s = time.monotonic() + took_s / STANDING_SHARE if took_s > CHEAP_S else 0.0
        return self._stood

    def _first_losses_off(self, candidate: Candidate, result: TrialResult) -> float:
        """By what share the first losses lie off the baseline's because of the micro-batch; said once."""
        state, plan, baseline = self._state, self._state.plan, self._state.plan.baseline
        own, base = (each.global_batch_size(plan.data_parallel) for each in (candidate, baseline))
        alike = plan.same_numerics(candidate)
        if candidate.micro_batch_size == baseline.micro_batch_size or not (
            plan.same_samples(candidate) if own == base else alike
        ):
            return 0.0
        first = result_in(state.trial_path(0)) if result.outcome is Outcome.COMPLETE else None
        if first is None:
            return 0.0
        if own == base:
            off = first_losses_off(result.losses, first.losses, same_numerics=alike)
        else:
            sides = ((result, own), (first, base))
            off = off_at_another_batch(*(Run(losses=each.losses, batch=n, samples_per_s=1.0) for each, n in sides))
        if off and not any(records.told_data(told).get("loss_off") for told in state.told()):
            rest = "" if abs(off) >= ANOTHER_OBJECTIVE else ". Other micro-batches have to pass the quality gate"
            if sums_samples(off, candidate.micro_batch_size, baseline.micro_batch_size):
                rest = f"; {AVERAGE}"
            self._events.say(
                f"the loss depends on the micro-batch, as contrastive losses and batch norm do: on the same samples it begins"
                f" {abs(off):.0%} {'higher' if off > 0 else 'lower'} with {candidate.micro_batch_size} than with the"
                f" baseline's {baseline.micro_batch_size}{rest}"
            )
        return off

    def _forecast(self, candidate: Candidate) -> dict[str, list[float]]:
        """What the trials before this one led to expect of it: value, low and high end of a 90 % interval by metric."""
        predictor = self._predictor
        for told in self._state.told():
            if told.number in self._learned:
                continue
            seen = observed(records.told_candidate(told), records.told_data(told), self._state.plan.setting)
            if seen.outcome not in (*RAN, Outcome.OOM):
                continue
            self._learned.add(told.number)
            if seen.outcome is Outcome.OOM:
                predictor.learn(seen.candidate, exceeded_bytes=self._state.plan.memory_limit_bytes)
            else:
                peak, step_s = seen.metrics.get("peak_memory_bytes"), seen.metrics.get("step_time_s")
                sd = math.hypot(seen.own_noise(), STOPPED_SD if seen.outcome is Outcome.STOPPED_EARLY else 0.0)
                predictor.learn(seen.candidate, peak_memory_bytes=peak, step_time_s=step_s, step_time_sd=sd)
        totals = {
            "peak_memory_bytes": predictor.memory(candidate).total,
            "step_time_s": predictor.step_time(candidate).total,
        }
        return {name: [total.value, total.low, total.high] for name, total in totals.items()}

    @functools.cached_property
    def _predictor(self) -> Predictor:
        """Forecasts from the profile, corrected by the trials that were told."""
        plan = self._state.plan
        prior = generic_prior(plan.workload, plan.setting)
        return Predictor(prior.profile, prior.machine, plan.base_config)


def why_stopped(error: BaseException) -> str:
    """Why a trial has not ended, by the error that ends its run."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the user"
    said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return said if isinstance(error, MachinesGone) else f"the run ended: {said}"


def _left_open(best: Measured, estimates: Estimates, objectives: Sequence[Objective]) -> str:
    """What may keep the best trial so far from being the answer; empty if nothing does."""
    assert estimates.baseline is not None
    tied = recommend.tied(best, estimates.baseline, estimates, objectives)
    return ", ".join(["unchecked"] * bool(best.doubt) + [WITHIN_NOISE] * tied)


def _unwitnessed(result: TrialResult) -> list[str]:
    return list(result.observed.unwitnessed) if result.observed else []


def _readable_attrs(candidate: Candidate, data: Mapping[str, Any]) -> dict[str, Any]:
    """Short user attributes of a trial, so that plain optuna-dashboard shows what it measured.

    A speed-up is not among them: it follows from all measurements of the study, and a told trial cannot be changed.

    Args:
        data: Its result, as in `told_data`.
    """
    found: dict[str, Any] = {"configuration": candidate.describe()}
    measured = data["metrics"]
    for name, key, scale in READABLE:
        if name in measured:
            found[key] = rounded(measured[name] / scale)
    return found


def _tail(result: TrialResult) -> dict[str, int]:
    """The worst batch, with the memory of its pass and of ordinary steps."""
    phases = result.memory_by_phase_bytes
    ordinary = max((phases[name] for name in ORDINARY_PHASES if name in phases), default=None)
    known = {"steady_bytes": ordinary, "tail_bytes": phases.get("tail")}
    return result.tail | {name: size for name, size in known.items() if size is not None} if result.tail else {}


def _measured_data(result: TrialResult, score: Score) -> dict[str, Any]:
    return {
        "outcome": str(result.outcome),
        "reason": result.reason,
        "phase": result.phase,
        "wall_s": result.wall_s,
        "metrics": {k: v for k, v in score.metrics.items() if math.isfinite(v)},
        "ci95": {k: list(v) for k, v in score.ci95.items() if all(map(math.isfinite, v))},
        "censored": list(score.censored),
        "feasible": score.feasible,
        "caveats": result.caveats,
        "phase_times_s": result.phase_times_s,
        "micro_step_s": result.micro_step_s,
        "side_changes": result.side_changes,
        "unreproducible": result.unreproducible,
        "tail": _tail(result),
        "padding": result.padding,
        "log_slowdown": result.log_slowdown,
        "unwitnessed": _unwitnessed(result),
    }
