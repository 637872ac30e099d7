"""The loop: ask, execute, score, tell; resume what was interrupted; measure the finalists again; write down what was found."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from threadpoolctl import threadpool_limits

from autotune import UserError, objective, store, trial
from autotune.analysis import recommend
from autotune.analysis.recommend import Measured
from autotune.candidate import AUTOCAST, CANDIDATE_ATTR, Candidate, DsConfig
from autotune.claims import Lease, Ledger, TurnLost
from autotune.confirm import ENDLESS_SAMPLES, Confirmation, baseline_of
from autotune.convergence import NOISE_RULES
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.flights import Claim, Flights
from autotune.lock import undisturbed
from autotune.objective import GOODPUT, Reference, Score
from autotune.plan import Plan, remedy, shown
from autotune.predictors.forecast import Predictor, settings_of
from autotune.predictors.profile import Machine, Profile
from autotune.search import check_sampler
from autotune.search.catalogue import Prior
from autotune.search.legal import LegalSampler, encoded
from autotune.search.physics import PhysicsSampler, generic_prior
from autotune.store import SearchRecord, StudyRecord
from autotune.trial import Outcome, Rival, TrialDir, TrialRequest, TrialResult

COMPLETED = "completed"
# So many trials from the start that all crash for one reason (twice as many for several): the target is broken.
HOPELESS_TRIALS = 4
BUSY_TRIES = 3
# What the end of a study may keep back of a time budget; of that, checking the finalists takes so many trials, at most this share.
MOST_RESERVED = 0.4
CHECK_TRIALS, CHECK_SHARE = 6, 0.25
# Micro-gradients of a step that the noise probe takes at least.
NOISE_MICROS = 4
# So many trials of a precision end with a dtype mismatch, and none otherwise, before it is no longer proposed.
MISMATCHES = 2
# How often it is looked whether other coordinators have told something, or the baseline is there.
NEWS_S = 1.0
ABANDONED = "the run ended before the trial did"


class Observer(Protocol):
    """Whoever watches a study run."""

    def say(self, text: str) -> None:
        """Something worth a line."""

    def began(self, number: int, candidate: Candidate, role: str) -> None:
        """A trial starts."""

    def waiting(self) -> None:
        """Another study measures on this machine."""

    def tick(self) -> None:
        """The trial under way still runs."""

    def ended(self, progress: Progress) -> None:
        """A trial was told."""


class Leader(NamedTuple):
    """The best compromise so far."""

    trial: int
    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a study stands after a trial.

    Attributes:
        number: The trial.
        role: `baseline`, `search` or `repeat`.
        candidate: Its configuration.
        outcome: Its end.
        reason: Why, where it is not `complete`.
        metrics: What it yielded.
        wall_s: How long it took.
        n_told: Trials told so far.
        n_trials: Trials in all.
        best: The best compromise so far.
        best_speedup: Its throughput over the baseline's.
        left_s: Estimated seconds until the end.
    """

    number: int
    role: str
    candidate: Candidate
    outcome: Outcome
    reason: str
    metrics: dict[str, float]
    wall_s: float
    n_told: int
    n_trials: int
    best: Leader | None
    best_speedup: float | None
    left_s: float


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What a study begins with that another one has learned.

    Attributes:
        prior: Lays what was learned over the study's own prior.
        first: What is measured before anything is proposed: what was best before.
        compromise: Look for the best compromise alone, not for the whole front.
    """

    prior: Callable[[Prior], Prior]
    first: tuple[Candidate, ...] = ()
    compromise: bool = False


class Runner:
    """One run of a study: from wherever it stands to its end.

    Args:
        plan: The study.
        executor: The engine.
        folder: The study's folder.
        storage: The database, as its URL or as the claims on the study in it.
        observer: Whoever watches.
        slots: Engines for as many trials at once; by default one.

    Attributes:
        warm: What another study has learned; set before `run`.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        folder: Path,
        storage: str | Ledger,
        observer: Observer,
        slots: Sequence[Executor] = (),
    ) -> None:
        check_sampler(plan.spec.sampler)
        self.plan, self.executor, self.folder, self.observer = plan, executor, folder, observer
        self.spec = plan.spec
        self.ledger = storage if isinstance(storage, Ledger) else Ledger(store.open_storage(storage), plan.spec.name)
        self.storage = self.ledger.storage
        self.storage.patience_s, self.storage.keeps, self.storage.on_wait = store.PATIENCE_S, True, observer.say
        self.leads = True
        self._slots = list(slots) or [executor]
        self._nothing_since: int | None = None
        self._learned: set[int] = set()
        self._seen: dict[int, Measured] | None = None
        self.study: Study | None = None
        self.reference: Reference | None = None
        self.objectives = list(plan.spec.objectives)
        self.learning_rate = plan.learning_rate()
        self.warm: WarmStart | None = None
        self._built: set[str] = set()
        self._n_tries = BUSY_TRIES
        self._started = time.monotonic()
        self._spent_before_s = 0.0

    def run(self) -> None:
        """Runs the study to the end of its budget; what was told stays told whatever interrupts it.

        Raises:
            UserError: The study cannot go on, and why.
        """
        # The matrices of the search are small: several threads only wait for one another, 10 times as long on a busy machine.
        with threadpool_limits(1, "blas"), self.ledger.beating():
            self.open()
            if self.study is None:
                # The baseline runs first, since it decides what can be measured at all.
                self._begin(self.execute(self.plan.baseline, self._trial_path(0), role="baseline"))
            assert self.study is not None
            store.note_end(self.study, "")
            store.note_settings(self.study, self.spec)
            if why := self._search():
                store.note_end(self.study, why)
            Confirmation(self).run()

    def help(self) -> str:
        """Runs trials of a study that another coordinator leads, until there is none left to start.

        Returns:
            Why there is none.

        Raises:
            UserError: The study cannot go on, and why.
        """
        self.leads = False
        with threadpool_limits(1, "blas"), self.ledger.beating():
            self.open()
            assert self.study is not None
            return self._search() or f"the budget of {self.spec.trials} trials is spent"

    def _search(self) -> str:
        """Runs trials until the budget is spent, or there is no use in another one; returns why if that is so."""
        assert self.study is not None
        self.study.sampler = self._sampler()
        flights = Flights(self._slots, side_by_side=self.spec.overlap and len(self._slots) > 1)
        self._seen = {}  # until the end nobody measures a trial again
        try:
            while (why := self._step(flights)) is None:
                pass
            while flights.claims:
                self._land(flights, None)
        except BaseException as error:
            flights.stop()
            if not isinstance(error, sqlalchemy.exc.SQLAlchemyError | optuna.exceptions.StorageInternalError):
                self._give_up(flights)
            raise
        flights.close()
        self._seen = None
        self._stop_if_hopeless()
        if why:
            self.observer.say(why)
        return why

    def _step(self, flights: Flights) -> str | None:
        """Tells what has ended and starts what comes next; anything but None ends the search."""
        assert self.study is not None
        self._land(flights, 0.0 if flights.n_free else None)
        try:
            with self.ledger.turn():
                with store.still(self.study):
                    left = self.ledger.abandoned(store.running(self.study))
                    found = None if left else self._next()
                going_on = self._recover(left, flights.n_free)
        except TurnLost:
            return None
        if left:
            for claim in going_on:
                flights.start(claim, functools.partial(self._carry_on, claim))
            return None
        if isinstance(found, Claim):
            with store.still(self.study, news=False):
                request = self._request(found.candidate, found.role) if found.result is None else None
            flights.start(found, functools.partial(self._fly, found, request))
        elif found is None:  # something is under way, here or elsewhere
            if flights.claims:
                self._land(flights, None if self.ledger.alone else NEWS_S)
            else:
                self.observer.tick()
                time.sleep(NEWS_S)
        return found if isinstance(found, str) else None

    def _land(self, flights: Flights, timeout_s: float | None) -> None:
        for claim, result in flights.landed(timeout_s):
            with undisturbed():
                self._tell(claim.asked, claim.candidate, claim.role, self._judged(claim.candidate, result))

    def _fly(
        self, claim: Claim, request: TrialRequest | None, executor: Executor, tick: Callable[[], None]
    ) -> TrialResult:
        assert request is not None
        return self._measure(request, claim.candidate, self._trial_path(claim.asked.number), claim.role, executor, tick)

    def _carry_on(self, claim: Claim, executor: Executor, tick: Callable[[], None]) -> TrialResult:
        """Waits for the end of a trial that went on in its engine while nobody did."""
        self.observer.began(claim.asked.number, claim.candidate, claim.role)
        return base.resume(executor, self._trial_path(claim.asked.number), tick) or self._lost(claim.candidate)

    def _give_up(self, flights: Flights) -> None:
        """Tells the trials under way: those that ended meanwhile as they ended, the others to be run again."""
        ended = flights.results()
        with undisturbed():
            for claim in flights.claims:
                result = ended.get(claim.asked.number, TrialResult(outcome=Outcome.LOST, reason="stopped by the user"))
                self._tell(claim.asked, claim.candidate, claim.role, result, quiet=True)

    def _next(self) -> Claim | str | None:
        """The next trial; None while that depends on those under way; or why there is none, an empty text at the end of the budget."""
        assert self.study is not None and isinstance(self.study.sampler, LegalSampler)
        if not self.leads and (why := self.study.user_attrs.get(store.ENDED_ATTR)):
            return str(why)
        self._stop_if_hopeless()
        n_running, n_ended = (
            len(store.running(self.study)),
            len(self.study.get_trials(deepcopy=False)) - len(store.running(self.study)),
        )
        if self._n_spent() + n_running >= self.spec.trials:
            return None if n_running else ""
        if n_running and self._nothing_since == n_ended:
            return None
        sampler = self._without_unsafe(self.study.sampler)
        again = self._to_run_again() or next(iter(self._first()), None) or self._owed()
        if again is not None:
            sampler.force(again)
        claimed = self._over()
        if isinstance(claimed, str) and n_running:  # what is under way may change that
            self._nothing_since = n_ended
            return None
        return claimed

    def _over(self) -> Claim | str:
        """Begins the next trial, or says why there is none although the budget of trials is not spent."""
        assert self.study is not None and isinstance(self.study.sampler, LegalSampler)
        if self.leads and self.out_of_time():
            return f"the time budget of {self.spec.time_budget_s:.0f} s is spent after {self._n_spent()} trials"
        if self.spec.sampler == "physics" and self.study.sampler.forced is None:
            with undisturbed():
                if why := self._advisor.settled(self.study, self.spec.stop_below):
                    return f"stopped after {self._n_spent()} of {self.spec.trials} trials: {why}"
        if claim := self._claim():
            return claim
        n_unfit = sum(outcome is Outcome.PREDICTED_OOM for outcome in self._outcomes())
        return self.study.sampler.why_exhausted + (
            f", or is predicted not to fit the device memory ({n_unfit})" if n_unfit else ""
        )

    def open(self) -> None:
        """Opens the study if there is one to go on with.

        Raises:
            UserError: The study of that name is another one.
        """
        if self.study is not None:
            return
        try:
            study = store.load_study(self.storage, self.spec.name)
        except store.StoreError:
            return
        kept = store.record(study)
        if kept is None and study.get_trials(deepcopy=False):
            raise UserError(
                f"study {self.spec.name!r} in this database was not made by autotune; choose another --study name"
            )
        if kept is None or not store.told_trials(study):
            if self.leads:
                store.delete_study(self.storage, self.spec.name)  # the run that began it died at once
            return
        self._check_same(kept)
        self.study = study
        self.reference, self.objectives, self.learning_rate = kept.reference, kept.objectives, kept.learning_rate
        if self.reference is not None and self.reference.noise is None and self.spec.global_batch != "keep":
            self._keep_batch(self.reference.noise_problem)
        self._spent_before_s = _wall_s(self._told())
        if self.leads and (n := self._n_spent()):
            self.observer.say(f"resuming: {n} of {self.spec.trials} trials are already there")

    def _check_same(self, kept: StudyRecord) -> None:
        now = json.loads(json.dumps(self.plan.fingerprint()))
        changed = [name for name in {**kept.fingerprint, **now} if kept.fingerprint.get(name) != now.get(name)]
        if changed:
            raise UserError(
                f"study {self.spec.name!r} exists, but differs in {', '.join(changed)}, so its trials cannot be compared with new ones."
                " Choose another --study name, or start over with --fresh"
            )

    def _begin(self, result: TrialResult) -> None:
        complete = result.outcome is Outcome.COMPLETE
        self.reference = Reference.of(result) if complete else None
        if complete:
            self._measure_noise()
            found = objective.score(result, self.objectives, self.spec.constraints, self.reference)
            dropped = [o for o in self.objectives if o.metric in found.missing]
            left = [o for o in self.objectives if o not in dropped]
            objective.check_measurable(result, left or self.objectives, self.spec.constraints, self.reference)
            for each in dropped:
                self.observer.say(f"objective {each.name!r} is left out: {found.missing[each.metric]}")
        else:
            dropped = [o for o in self.objectives if o.metric in (GOODPUT, "time_to_loss_s")]
            if len(dropped) == len(self.objectives):
                raise UserError(
                    f"convergence is measured against the baseline, which did not complete ({result.outcome}: {result.reason})"
                )
            self.observer.say(
                f"the baseline did not complete ({result.outcome}: {result.reason}), so no speed-up can be stated"
            )
        self.objectives = [o for o in self.objectives if o not in dropped]
        names = [f"{o.name} ({objective.METRICS[o.metric].unit})" for o in self.objectives]
        with undisturbed():
            self.study = store.create_study(self.storage, self.spec.name, [o.direction for o in self.objectives], names)
            store.keep(self.study, self._record())
            sampler = self._sampler()
            sampler.force(self.plan.baseline)
            self.study.sampler = sampler
            asked = self._ask("baseline")
            self._drawn(asked, self.plan.baseline)
            self._tell(asked, self.plan.baseline, "baseline", self._judged(self.plan.baseline, result))

    def _measure_noise(self) -> None:
        """Measures the gradient noise scale once, where an objective or the rule for the learning rate needs it."""
        assert self.reference is not None
        wanted = next((o.name for o in self.objectives if o.metric == GOODPUT), None)
        needs_rate = self.learning_rate.rule in NOISE_RULES
        if self.spec.global_batch == "keep" or not (wanted or needs_rate):
            return
        world, candidate = self.plan.world_size, self.plan.baseline
        if self.plan.splits_batch:
            steps = max(candidate.gradient_accumulation_steps, math.ceil(NOISE_MICROS / world))
            micro = max(1, candidate.global_batch_size(world) // (steps * world))
            candidate = replace(candidate, micro_batch_size=micro, gradient_accumulation_steps=steps)
        if not self.plan.replicated:
            problem = "the gradient noise scale is not measured where a model is split between ranks"
        elif candidate.gradient_accumulation_steps * world < 2:
            problem = "the gradient noise scale needs two micro-batches a step, and the script's batch cannot be split"
        else:
            self.observer.say("measuring the gradient noise scale, for what other global batches are worth")
            start = self.spec.from_checkpoint
            result = self.execute(
                candidate, self.folder / "trials" / "noise", role="noise", weights=str(start) if start else None,
                save_weights=str(store.warm_path(self.folder)) if self.spec.branch and start is None else None,
            )  # fmt: skip
            noise = result.noise.noise_scale() if result.noise is not None else None
            problem = str(noise) if noise is not None else f"its probe ended with {result.outcome}: {result.reason}"
            if noise is not None and noise.resolved:
                self.observer.say(problem)
                self.reference = replace(self.reference, noise=noise)
                self.learning_rate = self.plan.learning_rate(noise.samples)
                return
        self.reference = replace(self.reference, noise_problem=problem)
        if needs_rate:
            raise UserError(
                f"--learning-rate-rule {self.learning_rate.rule} needs the gradient noise scale: {problem}. Choose `sqrt`"
            )
        self._keep_batch(problem)

    def _keep_batch(self, problem: str) -> None:
        """What other global batches are worth is not known, so that only the baseline's is searched.

        Raises:
            UserError: Then there is nothing to search.
        """
        plan = self.plan
        if not any(o.metric == GOODPUT for o in self.objectives):
            return
        name = next(o.name for o in self.objectives if o.metric == GOODPUT)
        batch, world = plan.baseline.global_batch_size(plan.setting.world_size), plan.setting.world_size
        space = plan.full_space.keeping(batch, world, plan.baseline.micro_batch_size).pruned(
            plan.baseline, plan.setting
        )
        if (
            next(
                (c for c in space.candidates(plan.baseline) if c != plan.baseline and c.illegal(plan.setting) is None),
                None,
            )
            is None
        ):
            raise UserError(
                f"{problem}, so that other global batches cannot be compared by {name!r}, and the space varies nothing else"
            )
        self.observer.say(
            f"{problem}: what other global batches are worth is not known, so the baseline's {batch} is kept; raise trial_budget_s, or"
            f" leave {name!r} out of the objectives to vary it all the same"
        )
        self.plan = replace(plan, space=space)

    def _record(self) -> StudyRecord:
        plan = self.plan
        return StudyRecord(
            fingerprint=plan.fingerprint(),
            target=os.path.relpath(plan.spec.target, self.folder),
            world_size=plan.world_size,
            base_config=plan.base_config,
            baseline=plan.baseline.key,
            objectives=self.objectives,
            reference=self.reference,
            workload=plan.workload,
            learning_rate=self.learning_rate,
            invocation=plan.spec.how() if plan.workload.script else None,
            branches=plan.spec.branch and plan.replicated,
            search=SearchRecord(
                space=plan.space.to_data(), samples_per_rank=plan.space.samples_per_rank, setting=plan.setting,
                memory_limit_bytes=plan.memory_limit_bytes,
                bounds=list(objective.bounds(self.objectives, plan.spec.constraints).values()),
            ),
        )  # fmt: skip

    def _sampler(self) -> LegalSampler:
        seed = self.spec.seed + (len(self.study.get_trials(deepcopy=False)) if self.study else 0)
        if not self.leads:  # coordinators that join together must not draw alike
            seed += zlib.crc32(str(self.ledger.owner).encode())
        plan, spec = self.plan, self.spec
        if spec.sampler != "physics":
            return LegalSampler(spec.sampler, plan.space, plan.baseline, plan.setting, seed)
        return self._advisor

    @functools.cached_property
    def _advisor(self) -> PhysicsSampler:
        """What is believed of candidates, whoever proposes them."""
        plan, spec = self.plan, self.spec
        prior: Prior = generic_prior(plan.workload, plan.setting)
        advisor = PhysicsSampler(
            plan.space, plan.baseline, plan.setting, spec.seed, prior=self.warm.prior(prior) if self.warm is not None else prior,
            metrics=[o.metric for o in self.objectives], memory_limit_bytes=plan.memory_limit_bytes,
            bounds=objective.bounds(self.objectives, spec.constraints).values(),
        )  # fmt: skip
        if self.warm is not None and self.warm.compromise:
            advisor.weights = [o.weight for o in self.objectives]
        advisor.proposes, advisor.cautious = spec.sampler == "physics", spec.memory_filter
        return advisor

    def _first(self) -> list[Candidate]:
        """What was good elsewhere and is still to be measured here."""
        known = self._known()
        first = self.warm.first if self.warm is not None else ()
        return [c for c in first if c.key not in known and c.illegal(self.plan.setting) is None]

    def _recover(self, abandoned: Sequence[tuple[FrozenTrial, Lease | None]], room: int) -> list[Claim]:
        """Trials that a dead coordinator left behind: told if their result is there, else marked lost, to be run again once.

        Args:
            abandoned: These trials, with the dead one's claims on them.
            room: How many can be carried on.

        Returns:
            Those that may go on in their engine, to be carried on.
        """
        assert self.study is not None
        going_on: list[Claim] = []
        for left, lease in abandoned:
            path = self._trial_path(left.number)
            goes_on = TrialDir(path).job.exists() and trial.result_in(path) is None
            if (goes_on and len(going_on) >= room) or not self.ledger.take_over(left, lease):
                continue
            text = left.user_attrs.get(CANDIDATE_ATTR)
            if text is None:
                self.ledger.tell(left, TrialState.FAIL, None, {"reason": ABANDONED}, {})
                continue
            candidate, role = Candidate.from_key(text), left.user_attrs.get("role", "search")
            if goes_on:
                going_on.append(Claim(asked=Trial(self.study, left._trial_id), candidate=candidate, role=role))
                continue
            result = trial.result_in(path)
            if result is None or result.outcome is Outcome.LOST or result.candidate != candidate.values():
                result = self._lost(candidate)
            with undisturbed():
                self._tell(left, candidate, role, result)
        return going_on

    def _lost(self, candidate: Candidate) -> TrialResult:
        """The end of a trial whose coordinator died, and of which nothing is left."""
        assert self.study is not None
        lost = TrialResult(outcome=Outcome.LOST, reason=ABANDONED, candidate=candidate.values())
        for before in self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
            if before.user_attrs.get(CANDIDATE_ATTR) == candidate.key and before.user_attrs.get("reason") == ABANDONED:
                # Not chance then: this configuration takes whoever watches it along.
                return replace(lost, outcome=Outcome.CRASHED, reason=f"twice: {ABANDONED}")
        return lost

    def _to_run_again(self) -> Candidate | None:
        """A candidate whose trial was lost, and which nobody has run or runs since."""
        assert self.study is not None
        trials = self.study.get_trials(deepcopy=False)
        lost = [
            text
            for t in trials
            if t.state is TrialState.FAIL and (text := t.user_attrs.get(CANDIDATE_ATTR)) is not None
        ]
        if not lost:
            return None
        known = self._known()
        return next((Candidate.from_key(text) for text in lost if text not in known), None)

    def _known(self) -> set[str]:
        """The candidates that were told or are under way, by key."""
        assert self.study is not None
        trials = self.study.get_trials(deepcopy=False)
        return {
            t.user_attrs[CANDIDATE_ATTR]
            for t in trials
            if t.state is not TrialState.FAIL and CANDIDATE_ATTR in t.user_attrs
        }

    def _ask(self, role: str) -> Trial:
        assert self.study is not None
        return self.ledger.claim(self.study, role)

    def _drawn(self, asked: Trial, forced: Candidate | None) -> Candidate | None:
        """The trial's candidate, its knobs noted as Optuna parameters; None if nothing is left to measure."""
        assert self.study is not None and isinstance(self.study.sampler, LegalSampler)
        space, baseline = self.plan.space, self.plan.baseline
        drawn = asked.relative_params
        if forced is None and self.study.sampler.exhausted:
            return None
        if forced is not None:
            candidate, params = forced, encoded(space, forced)
        else:
            candidate = space.candidate(space.suggest(lambda p: p.decode(drawn[p.optuna_name]), baseline), baseline)
            params = {name: drawn[name] for name in encoded(space, candidate)}
        distributions: dict[str, BaseDistribution] = {
            p.optuna_name: p.distribution() for p in space.parameters if p.optuna_name in params
        }
        self.ledger.describe(asked, params, distributions, {CANDIDATE_ATTR: candidate.key})
        return candidate

    def _claim(self) -> Claim | None:
        """Begins the next trial; None if the sampler has nothing left."""
        assert self.study is not None and isinstance(self.study.sampler, LegalSampler)
        forced, candidate = self.study.sampler.forced, None
        self.study.sampler.exhausted = False
        with undisturbed():
            asked = self._ask("search")
        try:
            candidate = self._drawn(asked, forced)
            if candidate is None:
                self.ledger.tell(asked, TrialState.FAIL, None, {}, {})
                return None
            asks = (
                self.spec.memory_filter and self.spec.sampler != "physics" and forced is None
            )  # physics has weighed it already
            unfit = self._advisor.unfit(self.study, candidate) if asks else None
        except BaseException:
            with undisturbed():
                if candidate is None:
                    self.ledger.tell(asked, TrialState.FAIL, None, {}, {})
                else:
                    self._tell(
                        asked,
                        candidate,
                        "search",
                        TrialResult(outcome=Outcome.LOST, reason="stopped by the user"),
                        quiet=True,
                    )
            raise
        result = (
            TrialResult(outcome=Outcome.PREDICTED_OOM, reason=unfit, candidate=candidate.values())
            if unfit is not None
            else None
        )
        return Claim(asked=asked, candidate=candidate, result=result)

    def _judged(self, candidate: Candidate, result: TrialResult) -> TrialResult:
        """The result; where 16-bit weights met another type, with what becomes of that, and what can be done about the unseen."""
        if result.outcome is Outcome.NOT_APPLIED and self.plan.target.kind == "script":
            return replace(result, reason=result.reason + remedy(result.reason))
        if not trial.is_dtype_mismatch(result):
            return result
        found = self._under_autocast(candidate)
        what = found if isinstance(found, str) else f"the same is tried under {found.precision}"
        return replace(result, reason=f"{result.reason}; {what}")

    def _owed(self) -> Candidate | None:
        """What is still to be tried under autocast, since its 16-bit weights met another type; each at most once."""
        for told in self._told():
            if _met_mismatch(told) and isinstance(found := self._under_autocast(store.told_candidate(told)), Candidate):
                return found
        return None

    def _under_autocast(self, candidate: Candidate) -> Candidate | str:
        """The same configuration with fp32 weights and 16-bit arithmetic, or why it is not tried."""
        plan, wanted = self.plan, AUTOCAST[candidate.precision]
        if "precision" not in plan.space or not plan.space["precision"].contains(wanted):
            wanted = "torch_autocast"
        if "precision" not in plan.space or not plan.space["precision"].contains(wanted):
            return (
                f"{wanted} computes in 16 bits over fp32 weights and would take it: add it to `precision` in the study's space,"
                " or have the model use one type"
            )
        other = plan.space.candidate({**plan.space.values_of(candidate), "precision": wanted}, plan.baseline)
        reason = other.illegal(plan.setting)
        if reason is not None:
            return f"the same under {wanted} cannot run here: {reason}"
        if other.key in self._known():
            return f"the same under {wanted} was measured already"
        return other

    def _without_unsafe(self, sampler: LegalSampler) -> LegalSampler:
        """The sampler; another one where trials have shown that the model cannot train in a precision."""
        ends: dict[str, list[bool]] = {}
        for told in self._told():
            ends.setdefault(store.told_candidate(told).precision, []).append(_met_mismatch(told))
        unsafe = tuple(name for name, mismatches in ends.items() if all(mismatches) and len(mismatches) >= MISMATCHES)
        if unsafe == self.plan.setting.unsafe_precisions:
            return sampler
        self.observer.say(
            f"{' and '.join(unsafe)} is no longer proposed: the model mixes types of numbers, {MISMATCHES} trials ended at that"
        )
        self.plan = replace(self.plan, setting=replace(self.plan.setting, unsafe_precisions=unsafe))
        assert self.study is not None
        self.__dict__.pop("_advisor", None)  # it holds the candidates that were legal before
        self.study.sampler = sampler = self._sampler()
        return sampler

    def _tell(
        self, asked: Trial | FrozenTrial, candidate: Candidate, role: str, result: TrialResult, *, quiet: bool = False
    ) -> None:
        assert self.study is not None
        # A loss curve that was cut off says nothing of the time to the target.
        reference = self.reference if result.outcome is not Outcome.STOPPED_EARLY else None
        score = objective.score(result, self.objectives, self.spec.constraints, reference)
        done = result.outcome is Outcome.COMPLETE and score.values is not None
        attrs: dict[str, Any] = {"outcome": str(result.outcome)} | ({"reason": result.reason} if result.reason else {})
        with store.still(self.study, news=False):
            attrs[store.MEASURED_ATTR] = json.dumps(
                _measured_data(result, score) | {"forecast": self._foreseen(candidate)}
            )
        constraints = {COMPLETED: 0.0 if done else 1.0}
        constraints |= {name: violation if done else 1.0 for name, violation in score.violations.items()}
        state = (
            TrialState.FAIL if result.outcome is Outcome.LOST else TrialState.COMPLETE if done else TrialState.PRUNED
        )
        values = list(score.values) if done and score.values is not None else None
        if not self.ledger.tell(asked, state, values, attrs, constraints):
            self.observer.say(
                f"trial {asked.number} was taken for lost, since this process was not heard of for long, and is another one's now:"
                " what was measured here is not used"
            )
        elif not quiet:
            with store.still(self.study):
                self.progress(asked.number, role, candidate, result, score.metrics)

    def _foreseen(self, candidate: Candidate) -> dict[str, list[float]]:
        """What the trials before this one led to expect of it, with 90 % intervals, to be read beside what it measured."""
        predictor = self._predictor
        for told in self._told():
            data = store.told_data(told)
            if told.number not in self._learned and data["outcome"] == Outcome.COMPLETE:
                self._learned.add(told.number)
                metrics = {name: data["metrics"].get(name) for name in ("peak_memory_bytes", "step_time_s")}
                predictor.learn(store.told_candidate(told), **metrics)
        said = {
            "peak_memory_bytes": predictor.memory(candidate).total,
            "step_time_s": predictor.step_time(candidate).total,
        }
        return {name: [total.value, total.low, total.high] for name, total in said.items()}

    @functools.cached_property
    def _predictor(self) -> Predictor:
        """Forecasts from the profile, corrected by what was told before."""
        plan, workload = self.plan, self.plan.workload
        profile = workload.profile or Profile.guess(workload.n_parameters, workload.n_trainable, workload.n_blocks)
        machine = workload.machine or Machine.guess(
            plan.setting.accelerator, plan.world_size, workload.environment.n_cores
        )
        return Predictor(profile, machine, settings_of(plan.base_config))

    def measure_again(self, candidate: Candidate, path: Path) -> TrialResult:
        """One more measurement of a configuration, told to nobody: to be compared with others that are taken in turns with it."""
        return self.execute(candidate, path, role="repeat")

    def say(self, text: str) -> None:
        """Tells whoever watches."""
        self.observer.say(text)

    def execute(self, candidate: Candidate, path: Path, *, role: str, **request_fields: Any) -> TrialResult:
        """Runs a trial in a folder of its own.

        Args:
            candidate: What to run.
            path: The folder.
            role: `baseline`, `search`, `repeat`, `noise` or `gate`.
            request_fields: Fields of the request that are to differ from what the study's trials have.
        """
        return self._measure(
            replace(self._request(candidate, role), **request_fields), candidate, path, role, self.executor
        )

    def _request(self, candidate: Candidate, role: str) -> TrialRequest:
        """What the ranks of a trial are asked to do."""
        batch = candidate.global_batch_size(self.plan.data_parallel)
        ds_config = self.plan.ds_config(candidate)
        if self.plan.workload.script is None:  # a script's rates, stated or not, are followed where they are applied
            ds_config = self.learning_rate.scaled(ds_config, batch)
        self._build_ops(ds_config)
        converging = any(o.metric == "time_to_loss_s" for o in self.objectives)
        n_baseline = self._baseline_samples()
        min_samples = {
            "baseline": ENDLESS_SAMPLES if converging else self.spec.min_samples,
            "search": max(self.spec.min_samples, n_baseline) if converging else self.spec.min_samples,
        }.get(role, 0)
        return TrialRequest(
            target=str(self.spec.target),
            candidate=candidate.values(),
            ds_config=ds_config,
            world_size=self.plan.world_size,
            nodes=self.spec.nodes_for(self.plan.world_size),
            seed=self.spec.seed,
            budget_s=self.spec.trial_budget_s * (2 if role == "noise" else 1),
            noise=role == "noise",
            check_gradient=role in ("baseline", "search", "gate") and self.plan.data_parallel == self.plan.world_size,
            min_samples=min_samples,
            deadline_s=self._deadline_s(candidate),
            device_memory_bytes=self.spec.device_memory_bytes,
            script=self.plan.script(candidate),
            learning_rate_factor=self.learning_rate.factor(batch),
            rivals=self._rivals(candidate) if role == "search" else (),
        )

    def _measure(
        self,
        request: TrialRequest,
        candidate: Candidate,
        path: Path,
        role: str,
        executor: Executor,
        tick: Callable[[], None] = lambda: None,
    ) -> TrialResult:
        """Runs a trial to its end, again where its watcher died; the only part of a run that may be in a thread of its own."""

        def ticked() -> None:
            tick()
            self.observer.tick()

        def waiting() -> None:
            tick()
            self.observer.waiting()

        number = next((int(part) for part in (path.name, path.parent.name) if part.isdigit()), 0)
        # Everything is compared with these, so they are worth another try where something else had the machine.
        n_left, lost = self._n_tries if role in ("baseline", "repeat") else 1, False
        while True:
            with executor.turn(waiting):
                self.observer.began(number, candidate, role)
                result = base.run(executor, path, request, ticked)
            if result.outcome is Outcome.LOST:
                if lost:  # not chance then: this configuration takes whoever watches it along
                    return replace(result, outcome=Outcome.CRASHED, reason=f"twice: {result.reason}")
                lost, why = True, result.reason
            else:
                n_left -= 1
                busy = result.other_cores > trial.BUSY_CORES
                if not n_left and busy and role in ("baseline", "repeat"):
                    self._n_tries = 1  # waiting does not help here
                if not n_left or not busy or self.out_of_time():
                    return result
                why = f"other processes used {result.other_cores:.1f} cores meanwhile"
            self.observer.say(f"trial {number} is measured again: {why}")

    def _rivals(self, candidate: Candidate) -> tuple[Rival, ...]:
        """Whom a trial is compared with while it runs; nobody before there is a baseline to be better than."""
        if self.study is None or self.reference is None or not self.spec.stop_trials:
            return ()
        return self._advisor.rivals(self.study, candidate, self.measured())

    def _baseline_samples(self) -> int:
        result = trial.result_in(self._trial_path(0))
        return len(result.step_times_s) * (result.samples_per_step or 0) if result is not None else 0

    def _deadline_s(self, candidate: Candidate) -> float:
        """A hang must not cost what the user allowed for the slowest trial: ten times what the baseline leads to expect."""
        result = trial.result_in(self._trial_path(0))
        if result is None or result.steps is None:
            return self.spec.trial_deadline_s
        world = self.plan.world_size
        growth = max(1.0, candidate.global_batch_size(world) / self.plan.baseline.global_batch_size(world))
        expected = result.wall_s + 20 * result.steps.median_s * growth + self.spec.trial_budget_s
        return min(self.spec.trial_deadline_s, max(60.0, 10 * expected))

    def _build_ops(self, ds_config: DsConfig) -> None:
        """Compiles the ops that a configuration needs before its trial, which would be timed or killed meanwhile."""
        needed = [op for op in ops_needed(ds_config) if op not in self._built]
        if not needed:
            return
        self._built.update(needed)
        self.observer.say(f"building DeepSpeed's {', '.join(needed)} (once on this machine; may take a minute or two)")
        failure = self.executor.build_ops(needed)
        if failure:
            self.observer.say(
                f"DeepSpeed's {', '.join(needed)} cannot be built here, so configurations that need it will fail: {failure}"
            )

    def measured(self) -> list[Measured]:
        """Every told trial as the analysis sees it."""
        return store.measured(self.study, self.folder, self._record(), self._seen) if self.study is not None else []

    def _told(self) -> list[FrozenTrial]:
        return store.told_trials(self.study) if self.study is not None else []

    def _outcomes(self) -> list[Outcome]:
        return [Outcome(store.told_data(told)["outcome"]) for told in self._told()]

    def _n_spent(self) -> int:
        """Trials that count: what was predicted not to fit cost nothing, until it is as much as the whole budget."""
        outcomes = self._outcomes()
        n_unfit = sum(outcome is Outcome.PREDICTED_OOM for outcome in outcomes)
        return len(outcomes) - min(n_unfit, self.spec.trials)

    def _walls_s(self) -> list[float]:
        """Seconds of each trial that ran."""
        ran = [store.told_data(told) for told in self._told()]
        return [data["wall_s"] for data in ran if data["outcome"] != Outcome.PREDICTED_OOM]

    def _trial_path(self, number: int) -> Path:
        return store.trial_path(self.folder, number)

    def out_of_time(self) -> bool:
        """Whether the time budget is spent, but for what the end of the study takes."""
        if self.spec.time_budget_s is None:
            return False
        walls = self._walls_s()
        # The finalists' turns at the end come out of the same budget, and how they train is checked before.
        usual_s = statistics.median(walls) if walls else 0.0
        reserve = (self.spec.finalists + 1) * self.spec.repeats * usual_s / 2
        if self.spec.finalists:
            reserve += min(CHECK_TRIALS * usual_s, CHECK_SHARE * self.spec.time_budget_s)
        # A short budget is for the search first: there is nothing to confirm of what was not found.
        reserve = min(reserve, MOST_RESERVED * self.spec.time_budget_s)
        return self.spent_s() + reserve >= self.spec.time_budget_s

    def spent_s(self) -> float:
        """Seconds that the study has taken so far."""
        return self._spent_before_s + time.monotonic() - self._started

    def _stop_if_hopeless(self) -> None:
        ends = [data for t in self._told() if (data := store.told_data(t))["outcome"] != Outcome.PREDICTED_OOM]
        if len(ends) < HOPELESS_TRIALS:
            return
        crashed = [
            Outcome(e["outcome"]) in (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.NOT_APPLIED, Outcome.DIVERGED)
            for e in ends
        ]
        alike = len({re.sub(r"[0-9]+", "", e["reason"]).split(":")[0] for e in ends}) == 1
        if all(crashed) and (alike or len(ends) >= 2 * HOPELESS_TRIALS):
            how, log = f"{ends[0]['outcome']}: {ends[0]['reason']}", shown(TrialDir(self._trial_path(0)).log(0))
            said = f"all ended the same way: {how}" if alike else f"all failed; the baseline: {how}"
            raise UserError(f"the first {len(ends)} trials, the baseline among them, {said} (see {log})")

    def progress(
        self, number: int, role: str, candidate: Candidate, result: TrialResult, metrics: Mapping[str, float]
    ) -> None:
        """Tells whoever watches that a trial ended, and where the study stands."""
        measured = self.measured()
        baseline = baseline_of(measured)
        ranked = recommend.rank(measured, baseline, self.objectives)
        best = ranked[0] if ranked else None
        speedup = None
        if best is not None and baseline is not None:
            speedup = math.exp(recommend.log_ratio(best, baseline, "samples_per_s"))
        walls, n_spent = self._walls_s(), self._n_spent()
        n_left = max(0, self.spec.trials - n_spent)
        left = (n_left + (self.spec.finalists + 1) * self.spec.repeats / 2) * (
            statistics.median(walls) if walls else 0.0
        )
        if self.spec.time_budget_s is not None:
            left = min(left, max(0.0, self.spec.time_budget_s - self.spent_s()))
        self.observer.ended(
            Progress(
                number=number, role=role, candidate=candidate, outcome=result.outcome, reason=result.reason, metrics=dict(metrics),
                wall_s=result.wall_s, n_told=n_spent, n_trials=self.spec.trials, best=Leader(best.trial, best.candidate) if best else None,
                best_speedup=speedup, left_s=left,
            )
        )  # fmt: skip


def _wall_s(told: Sequence[FrozenTrial]) -> float:
    """Seconds that trials took; what ran beside something else counts once."""
    # Where a trial ended follows from what it took: a clock that was set in between would make it years long.
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
    return float(store.told_data(told)["wall_s"])


def _met_mismatch(told: FrozenTrial) -> bool:
    data = store.told_data(told)
    if data["outcome"] != Outcome.CRASHED:  # nearly all, and every trial is asked at every step
        return False
    values = store.told_candidate(told).values()
    return trial.is_dtype_mismatch(TrialResult(outcome=Outcome.CRASHED, reason=data["reason"], candidate=values))


def ops_needed(ds_config: DsConfig) -> list[str]:
    """DeepSpeed's compiled ops that a configuration calls for, by builder name."""
    optimizer = ds_config.get("optimizer") or {}
    zero = ds_config.get("zero_optimization") or {}
    if str(optimizer.get("type", "")).lower() not in ("adam", "adamw") or (optimizer.get("params") or {}).get(
        "torch_adam"
    ):
        return []
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    return ["cpu_adam" if offloaded else "fused_adam"]


def _measured_data(result: TrialResult, score: Score) -> dict[str, Any]:
    return {
        "outcome": str(result.outcome), "reason": result.reason, "phase": result.phase, "wall_s": result.wall_s,
        "metrics": {k: v for k, v in score.metrics.items() if math.isfinite(v)},
        "ci95": {k: list(v) for k, v in score.ci95.items() if all(map(math.isfinite, v))},
        "censored": list(score.censored), "feasible": score.feasible, "caveats": result.caveats,
        "phase_times_s": result.phase_times_s, "micro_step_s": result.micro_step_s,
        "side_changes": result.side_changes,
        "unreproducible": result.unreproducible,
    }  # fmt: skip
