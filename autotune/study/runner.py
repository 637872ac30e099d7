"""The loop of a study: claim a trial, run it, tell it, until the budget is spent; then check the finalists."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import sqlalchemy
from optuna.study import Study
from threadpoolctl import threadpool_limits

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.scoring import recommend
from autotune.space.candidate import Candidate
from autotune.study.baseline import BaselineTrial
from autotune.study.budget import Budget
from autotune.study.events import ENDED_BY_CALLBACK, OUT_OF_TIME, STOPPED, UNFINISHED, EventSink
from autotune.study.finalists import Finalists
from autotune.study.folder import retuning_path
from autotune.study.measure import TrialMeasurer
from autotune.study.parallel import ClaimedTrial, TrialPool
from autotune.study.proposals import Proposer
from autotune.study.restore import last_replacement, restore
from autotune.study.setup.plan import Plan
from autotune.study.state import StudyState, forget_runs, lacks_trials
from autotune.study.storage import database, records
from autotune.study.storage.generations import generation_name, generation_of
from autotune.study.storage.leases import StudyLeases, TurnLost
from autotune.study.storage.optuna_tables import GONE
from autotune.study.tell import Teller, why_stopped
from autotune.study.warm_start import WarmStart
from autotune.system import files
from autotune.system.signals import undisturbed
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

# Interval at which trials of other coordinators, or the baseline, are looked for.
NEWS_S = 1.0
CUT = "the time budget ended before the best were checked and measured again as often as wanted"
BEGUN_ANEW = (
    "study {!r} was deleted, begun anew or taken up from its folder meanwhile; to help it, start the worker again"
)
DELETED = (
    "study {!r} was deleted from the database meanwhile; the same command without --fresh takes up the trials that its"
    " folder holds"
)
SEARCH_DELETED = "the search of re-tuning {1} of study {0!r} was deleted from the database meanwhile; `autotune retune {0}` begins anew"


# A limit for each run of this process that is under way; the first one knows what was there before.
_LIMITS, _GUARD = list[threadpool_limits](), threading.Lock()


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """One thread for the matrices of the search, which are small: with several they take 10 times as long on a busy machine.

    The number is the whole process's. Of runs in several threads the last one to end puts back what the first one found.
    """
    with _GUARD:
        _LIMITS.append(threadpool_limits(1, "blas"))
    try:
        yield
    finally:
        with _GUARD:
            _LIMITS.pop().restore_original_limits()


@contextlib.contextmanager
def _at_work(leases: StudyLeases, *, leads: bool) -> Iterator[None]:
    """Keeps a coordinator's leases alive during the block; a study that is deleted meanwhile ends it in a sentence."""
    try:
        with _one_blas_thread(), leases.beating():
            yield
    except KeyError as error:
        if error.args != (GONE,):
            raise
        study, retuning = generation_of(leases.study_name)
        said = BEGUN_ANEW if not leads else SEARCH_DELETED if retuning else DELETED
        raise UserError(said.format(study, retuning)) from None


class Runner:
    """One run of a study, from its present state to its end.

    Args:
        storage: The database, as its URL or as this coordinator's leases in it.
        slots: Engines for the trials that run at once; by default one.
        leads: Whether this coordinator leads the study, or helps another coordinator.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        folder: Path,
        storage: str | StudyLeases,
        events: EventSink,
        slots: Sequence[Executor] = (),
        *,
        warm: WarmStart | None = None,
        leads: bool = True,
    ) -> None:
        if isinstance(storage, str):
            storage = StudyLeases(database.open_storage(storage), plan.spec.name)
        self.leases, self.storage = storage, storage.storage
        self.storage.patience_s, self.storage.on_wait = database.PATIENCE_S, events.say
        self._events, self._leads = events, leads
        self._slots = list(slots) or [executor]
        self._cut = False  # whether the end of the time budget cut a trial or a check
        self.state = state = StudyState(plan, folder, storage)
        self._budget = Budget(state, leads=leads, at_once=len(self._slots))
        self._teller = Teller(state, self._budget, events)
        self.proposer = Proposer(state, self._teller, self._budget, events, warm, leads=leads)
        self._measurer = TrialMeasurer(state, executor, events, self._budget, self.proposer.bounds_to_beat)
        self._baseline = BaselineTrial(state, self._measurer, events, self._budget, warm.noise if warm else None)
        self._finalists = Finalists(state, self._measurer, self._teller, self._budget, events)

    @property
    def study(self) -> Study | None:
        """The Optuna study; None before it is in the database."""
        return self.state.study if self.state.exists else None

    def measure_again(self, candidate: Candidate, path: Path) -> TrialResult:
        """Measures a configuration without telling a trial, to compare it with others measured in turns with it."""
        return self._measurer.execute_again(candidate, path, what=candidate.describe(), role="round")

    def open(self) -> None:
        """Opens the study if a run has begun it."""
        if self.state.exists:
            return
        found = self.state.load(delete_empty=self._leads)
        if self._leads and (not found or lacks_trials(self.state.study, self.state.folder)):
            found = self._restore() or found
        if not found:
            return
        if self._leads and (again := self.state.retry_timeouts(self._measurer.deadline_s)):
            which = f"trial{'s' * (len(again) > 1)} {', '.join(map(str, again))}"
            self._events.say(f"{which} timed out and will run again: there is more time for a trial now")
        if self._leads:
            self.state.retry_checks()
        self._budget.resume()
        self._baseline.restore()
        if self._leads and (n := self._budget.n_spent()):
            wanted = self.state.plan.spec.trials
            there = "trials are already there"
            self._events.say(
                f"resuming: {n} of {wanted} {there}"
                if n <= wanted
                else f"resuming: {n} {there}, {wanted} were asked for"
            )
            if not self.state.trial_path(0).is_dir():
                self._events.say(
                    f"the trials are in the database, but {files.shown(self.state.folder)} does not hold what they left: if that folder"
                    " was renamed, stop and name it so again; else what checks and repetitions found is measured again"
                )
            name, retuned = generation_of(self.state.plan.spec.name)
            if not retuned and (changed := self.state.changed_machine()):  # which `Retuning` looks at itself
                self._events.say(
                    f"not as when the study began: {', '.join(changed)}. Earlier trials may not compare with new ones:"
                    f" `autotune retune {name}` measures the answer again, --fresh begins anew"
                )

    def _restore(self) -> bool:
        if n := restore(self.state, self.proposer, self._teller, lambda: _restore_replacement(self)):
            trials, them = ("1 finished trial: it is", "it") if n == 1 else (f"{n} finished trials: they are", "them")
            self._events.say(
                f"the database lacks trials of study {self.state.plan.spec.name!r}, whose folder holds {trials} taken up again"
                f" (--fresh forgets {them})"
            )
        return bool(n)

    def run(self) -> None:
        """Runs the study to the end of its budget; told trials stay told whatever interrupts the run."""
        with _at_work(self.leases, leads=self._leads):
            self.open()
            for each in (self._measurer.executor, *self._slots):
                each.ends_at_s = time.monotonic() + self._budget.room_s()
            if not self.state.exists:
                self._begin()
            records.note_end(self.state.study, "")
            records.note_settings(self.state.study, self.state.plan.spec)
            self.state.keep_branches()
            try:
                self._baseline.run_again(self._teller)  # which an earlier run left crashed
                why, goes_on = self._searched()
                while goes_on:
                    records.note_end(self.state.study, "")
                    self._events.say(f"{goes_on}: the search goes on")
                    why, goes_on = self._searched()
                records.note_end(self.state.study, why)
            finally:
                self._budget.keep()

    def _searched(self) -> tuple[str, str]:
        """Searches, and confirms what was found; returns why the search ended, and why it is to go on, if it is."""
        why = self._search()
        self._baseline.run_again(self._teller)
        self._budget.search_ended()
        leader = self._leader()
        self._end_search()
        if self._cut:
            return why or CUT, ""
        if why.startswith(OUT_OF_TIME):
            return why, "the checks left time for further trials" if self._budget.resumes_search() else ""
        # Nothing was worth a trial beside that one; without it the answer would be the baseline.
        stopped_for = why.startswith(STOPPED) and leader in self.proposer.refused() and self._leader() == 0
        return why or CUT * self._finalists.cut, f"a check refused trial {leader}" if stopped_for else ""

    def _leader(self) -> int | None:
        """The best trial so far that no check has refused."""
        found = recommend.rank(self.state.estimates(), self.state.objectives)
        return next((m.trial for m in found if not m.barred), None)

    def _end_search(self) -> None:
        """Checks and measures the best again, until the time budget ends that."""
        if self.state.plan.spec.finalists:
            records.note_end(self.state.study, UNFINISHED)
        try:
            self._finalists.run()
        except base.TimeOver:
            self._cut = True
            self._events.say(CUT)

    def help(self) -> None:
        """Runs trials of a study that another coordinator leads, until there is none left to start."""
        with _at_work(self.leases, leads=self._leads):
            self.open()
            if not self.state.exists:
                raise UserError(BEGUN_ANEW.format(self.state.plan.spec.name))
            self._search()

    def _begin(self) -> None:
        """Measures the baseline, which decides what can be measured at all, and begins the study with it."""
        baseline = self.state.plan.baseline
        # Another study's results are not this one's.
        forget_runs(self._measurer.executor, self.state.folder, kept=self.state.trial_path(0))
        result = self._baseline.run()
        with undisturbed():
            self.state.create()
            asked = self.leases.claim(self.state.study)
            self.proposer.describe(asked, baseline, "baseline")
            self._teller.tell(asked, baseline, "baseline", result, earlier=True)
        self._baseline.leave_out_batches()

    def _search(self) -> str:
        """Runs trials until none is left to start; returns why that is before the budget is spent."""
        self.proposer.start()
        pool = TrialPool(self._slots)
        try:
            with self.state.nothing_measured_again():
                while (why := self._step(pool)) is None:
                    pass
                while pool.claims:
                    self._tell(pool.landed(None))
        except base.TimeOver:
            pool.stop()
            self._cut, why = True, self._budget.words()
            self._give_back(pool, why)
        except BaseException as error:
            pool.stop()
            if not isinstance(error, sqlalchemy.exc.SQLAlchemyError | optuna.exceptions.StorageInternalError):
                self._give_back(pool, why_stopped(error))
            raise
        pool.stop()
        self._budget.check_target_works()
        if why:
            self._events.say(why)
        return why

    def _step(self, pool: TrialPool) -> str | None:
        """Tells the trials that have ended and starts the next one; a text ends the search."""
        self._tell(pool.landed(0.0 if pool.n_free else None))
        self.state.check_unedited()
        study, leases = self.state.study, self.leases
        try:
            with leases.turn():
                with records.snapshot(study):
                    abandoned = leases.abandoned(records.running(study))
                    ended = ENDED_BY_CALLBACK if self._events.ends_search else ""
                    found = None if abandoned else ended or self.proposer.next()
                carried_on = self._teller.recover(abandoned, pool.n_free)
        except TurnLost:
            return None
        if abandoned:
            for claim in carried_on:
                pool.start(claim, functools.partial(self._carry_on, claim))
        elif isinstance(found, ClaimedTrial):
            with records.snapshot(study, news=False):
                request = self._measurer.request(found.candidate, found.role) if found.result is None else None
            pool.start(found, functools.partial(self._run, found, request))
        elif isinstance(found, str):
            return found
        elif pool.claims:
            self._tell(pool.landed(None if leases.alone else NEWS_S))
        else:  # another coordinator's trials are running
            base.check_time(self._measurer.executor)
            self._events.tick()
            time.sleep(NEWS_S)
        return None

    def _tell(self, ended: Iterable[tuple[ClaimedTrial, TrialResult]]) -> None:
        for claim, result in ended:
            with undisturbed():
                self._teller.tell(claim.asked, claim.candidate, claim.role, result)

    def _run(
        self, claim: ClaimedTrial, request: TrialRequest | None, executor: Executor, tick: Callable[[], None]
    ) -> TrialResult:
        assert request is not None
        path = self.state.trial_path(claim.asked.number)
        return self._measurer.run(request, claim.candidate, path, claim.role, executor, tick)

    def _carry_on(self, claim: ClaimedTrial, executor: Executor, tick: Callable[[], None]) -> TrialResult:
        """Waits for the end of a trial that went on in its engine after its coordinator died."""

        def ticked() -> None:
            tick()
            self._events.tick()

        self._events.began(claim.asked.number, claim.candidate, claim.role)
        path = self.state.trial_path(claim.asked.number)
        return base.resume(executor, path, ticked) or self._teller.lost(claim.candidate)

    def _give_back(self, pool: TrialPool, why: str) -> None:
        """Tells the trials that ended while the pool stopped, and marks the others to be run again."""
        ended = pool.results()
        stopped = TrialResult(outcome=Outcome.LOST, reason=why)
        with undisturbed():
            for claim in pool.claims:
                result = ended.get(claim.asked.number, stopped)
                self._teller.tell(claim.asked, claim.candidate, claim.role, result, quiet=True)


def _restore_replacement(runner: Runner) -> None:
    """Takes up the re-tuning, too, that last replaced the answer of a study, where the database does not know of it."""
    state, plan, folder = runner.state, runner.state.plan, runner.state.folder
    generation = last_replacement(folder)
    name, path = generation_name(plan.spec.name, generation), retuning_path(folder, generation)
    if not generation or records.current(state.study) == name:
        return
    later = replace(plan, spec=plan.spec.model_copy(update={"name": name}))
    again = Runner(later, runner._measurer.executor, path, StudyLeases(state.storage, name), runner._events)
    again.open()
    if again.study is not None:
        records.succeed(state.study, name)
    else:
        runner._events.say(
            f"re-tuning {generation}, which had replaced the answer, is not taken up again: target or ranks were others then, or"
            f" files are gone. What is found from here on is the study's own answer; `autotune retune {plan.spec.name}`"
            f" compares anew, and what there was lies in {files.shown(path)}"
        )
