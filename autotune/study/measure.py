"""Measuring a trial: the request that its ranks get, and its run on an engine."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.executors import base
from autotune.executors.base import Executor
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig, Scalar, at_path, ops_needed
from autotune.space.legality import OP_RULES, why_illegal
from autotune.study import placement
from autotune.study.budget import Budget
from autotune.study.events import CHECKS, EventSink
from autotune.study.setup.script import compiling
from autotune.study.state import StudyState
from autotune.trial.folder import TrialDir, result_in, write_record
from autotune.trial.request import TailCheck, TrialRequest, TrialToBeat
from autotune.trial.result import Outcome, TrialResult

# Times that a baseline or a repeat is measured while other processes use the cores: all trials are compared with it.
MAX_BUSY_TRIES = 3
# A number of samples that no trial reaches: it trains until its steps or its time are over.
ENDLESS_SAMPLES = 10**15
MIN_DEADLINE_S = 60.0


def ops_of(ds_config: DsConfig) -> list[str]:
    """DeepSpeed's compiled ops that a configuration needs."""
    return ops_needed(lambda path: at_path(ds_config, path))


def build_ops(executor: Executor, needed: Iterable[str], events: EventSink) -> dict[str, str]:
    """Compiles ops before a trial, which would be timed or killed meanwhile.

    Returns:
        Why each op failed that cannot be compiled.
    """
    failed = {op: executor.build_op(op, _telling(op, events)) for op in needed}
    return {op: why for op, why in failed.items() if why}


def _telling(op: str, events: EventSink) -> Callable[[], None]:
    """What ticks while an op is compiled, and says so first: one that is there already takes no time."""
    said = list[str]()

    def tick() -> None:
        if not said:
            said.append(op)
            events.doing(compiling(op))
        events.tick()

    return tick


class TrialMeasurer:
    """Runs trials of a study, each in its own folder.

    Args:
        executor: The engine for trials that run alone.
        bounds_to_beat: Returns the measurements that a candidate must beat; a trial that cannot beat them stops early.
    """

    def __init__(
        self,
        state: StudyState,
        executor: Executor,
        events: EventSink,
        budget: Budget,
        bounds_to_beat: Callable[[Candidate], tuple[TrialToBeat, ...]],
    ) -> None:
        self._state, self.executor, self._events, self._budget = state, executor, events, budget
        self._bounds_to_beat = bounds_to_beat
        self._built: set[str] = set()
        self._places = dict[Executor, str]()  # where the last trial of each engine ran
        self._turns = placement.Turns(state.leases)
        self._n_tries = 1 if state.spec.quick else MAX_BUSY_TRIES

    def execute(self, candidate: Candidate, path: Path, *, role: str, **request_fields: Any) -> TrialResult:
        """Runs a trial alone.

        Args:
            role: `baseline`, `search`, `repeat`, `noise`, `gate`, `branch`, `warm`, or `round`, of a re-tuning.
            request_fields: Fields of the request that differ from those of the study's trials.
        """
        self._state.check_unedited()
        request = replace(self.request(candidate, role), **request_fields)
        return self.run(request, candidate, path, role, self.executor)

    def execute_again(self, candidate: Candidate, path: Path, *, what: str, role: str, **fields: Any) -> TrialResult:
        """Runs a candidate whose trial has run, as `execute` does; once more if it crashes.

        Args:
            what: The run in words.
        """
        result = self.execute(candidate, path, role=role, **fields)
        if result.outcome is not Outcome.CRASHED:
            return result
        self._events.say(f"{what} begins again: it crashed, which it did not before ({result.reason})")
        return self.execute(candidate, path, role=role, **fields)

    def check(
        self, candidate: Candidate, path: Path, *, what: str, role: str, needed_s: float, **fields: Any
    ) -> TrialResult:
        """Runs a check, which trains for as long as it needs; read from its folder if it has ended there.

        Args:
            needed_s: Seconds of training that it needs.
        """
        # A check that is made again may be at another global batch.
        if (kept := result_in(path)) is not None and kept.candidate == candidate.values():
            return kept
        trains_s, deadline_s = self._budget.check_trains_s(needed_s), self._state.spec.trial_deadline_s
        own = {"min_samples": ENDLESS_SAMPLES, "budget_s": trains_s, "deadline_s": deadline_s}
        return self.execute_again(candidate, path, what=what, role=role, **own, **fields)

    def request(self, candidate: Candidate, role: str) -> TrialRequest:
        """Returns the request for a trial; DeepSpeed ops that it needs are compiled before."""
        plan, rate = self._state.plan, self._state.learning_rate
        batch = candidate.global_batch_size(plan.data_parallel)
        shared = plan.request(candidate)
        ds_config = shared.ds_config
        if plan.workload.script is None:  # a script's rates are followed where the script applies them
            ds_config = rate.scaled(ds_config, batch)
        self._build_ops(ds_config)
        return replace(
            shared,
            ds_config=ds_config,
            budget_s=self._budget.trial_s * (2 if role == "noise" else 1),
            noise=role == "noise",
            check_gradient=role in ("baseline", "search", "gate")
            and plan.data_parallel == plan.world_size
            and candidate.is_whole
            and plan.workload.pipeline is None,  # its engine completes gradients where they are not looked at
            min_samples=self._min_samples(role),
            deadline_s=self.deadline_s(candidate),
            learning_rate_factor=rate.factor(batch),
            changed_from=self._changed_from(candidate),
            rivals=self._bounds_to_beat(candidate) if role == "search" else (),
            tail=self._tail_check(role, candidate),
            lengths=plan.workload.data.table if plan.workload.data is not None else (),
        )

    def _tail_check(self, role: str, candidate: Candidate) -> TailCheck | None:
        """The check of the worst batch: in trials and re-tunings where lengths vary, with evaluation and saving in what comes last."""
        spec, data = self._state.spec, self._state.plan.workload.data
        # The finalists', where each is surely measured again.
        last = role in ("repeat", "round") or (role in ("baseline", "search") and not (spec.finalists and spec.repeats))
        more = {"evaluate": last and spec.with_eval, "save": last and spec.with_save}
        seen, stated = data.longest if data is not None else 0, spec.max_length or 0
        # The memory of a re-tuning's round is compared with that of the trial.
        varies = role in ("baseline", "search", "round") and (stated > seen or (data is not None and data.varies))
        if not varies and not any(more.values()):
            return None
        positions = data.longest_at if data is not None else ()
        length = stated if stated > seen else 0
        limit = candidate.data_changes.get("max_length", length)  # that it cuts all samples to
        return TailCheck(longest_at=positions, length=min(length, int(str(limit))), **more)

    def _changed_from(self, candidate: Candidate) -> dict[str, Scalar]:
        """The baseline's values of the knobs in which a candidate differs from it."""
        own, base = self._state.plan.baseline.values(), self._state.plan.base_config
        loader = self._state.plan.setting.loader
        base = base | {"data": dict(loader)} if loader else base
        before = {name: own[name] if name in own else at_path(base, name) for name in candidate.values()}
        return {name: before[name] for name, value in candidate.values().items() if value != before[name]}

    def _min_samples(self, role: str) -> int:
        if role not in ("baseline", "search"):
            return 0
        converging = any(o.metric == "time_to_loss_s" for o in self._state.objectives)
        if not converging:
            return self._state.spec.min_samples
        if role == "baseline":
            return ENDLESS_SAMPLES
        baseline = result_in(self._state.trial_path(0))
        n_baseline = len(baseline.step_times_s) * (baseline.samples_per_step or 0) if baseline is not None else 0
        return max(self._state.spec.min_samples, n_baseline)

    def deadline_s(self, candidate: Candidate) -> float:
        """Ten times the duration that the baseline leads to expect, at most the user's deadline: a hang ends sooner."""
        plan, spec, result = self._state.plan, self._state.spec, result_in(self._state.trial_path(0))
        if result is None or result.steps is None:
            return spec.trial_deadline_s
        growth = max(1.0, candidate.samples_per_rank / plan.baseline.samples_per_rank)
        expected_s = result.wall_s + 20 * result.steps.median_s * growth + self._budget.trial_s
        return min(spec.trial_deadline_s, max(MIN_DEADLINE_S, 10 * expected_s))

    def _build_ops(self, ds_config: DsConfig) -> None:
        """Compiles the ops that a configuration needs, each once in a run; what needs one that fails is not tried."""
        known = {*self._built, *dict(self._state.plan.setting.missing_ops)}
        needed = [op for op in ops_of(ds_config) if op not in known]
        self._built.update(needed)
        for op, failure in build_ops(self.executor, needed, self._events).items():
            self._events.say(
                f"DeepSpeed's {op} cannot be built here, so configurations that need it are not tried: {failure}"
            )
            missing = {**dict(self._state.plan.setting.missing_ops), op: failure}
            self._state.narrow(missing_ops=tuple(missing.items()))

    def run(
        self,
        request: TrialRequest,
        candidate: Candidate,
        path: Path,
        role: str,
        executor: Executor,
        tick: Callable[[], None] = lambda: None,
    ) -> TrialResult:
        """Runs a trial to its end, again if others used its cores; the part of a run that other threads may call."""

        def ticked() -> None:
            tick()
            self._events.tick()

        def waiting() -> None:
            tick()
            self._events.waiting()

        if reason := why_illegal(candidate, self._state.plan.setting, OP_RULES):
            result = TrialResult(outcome=Outcome.CRASHED, reason=reason, candidate=candidate.values())
            write_record(TrialDir(path).result, result)  # as of any other trial: what left no result is measured again
            return result
        self._budget.measures()
        number = next((int(part) for part in (path.name, path.parent.name) if part.isdigit()), 0)
        compared = role in ("baseline", "repeat", "round")
        n_left = self._n_tries if compared else 1

        def again(why: str) -> None:
            what = f"{CHECKS[role]}: {candidate.describe()}" if role in CHECKS else f"trial {number}"
            self._events.say(f"{what} is measured again: {why}")

        # As they are where this engine's last trial ran: its next one mostly runs there, too.
        rivals, place = request.rivals, self._places.get(executor, "")
        request = replace(request, rivals=placement.rivals_at(self._state.folder, place, rivals) or rivals)
        while True:
            with executor.turn(waiting):
                self._events.began(number, candidate, role)
                result = base.run(executor, path, request, ticked, again)
            self._places[executor] = result.place or self._places.get(executor, "")
            beaten = request.rivals if result.outcome is Outcome.STOPPED_EARLY else ()
            if beaten and placement.rivals_at(self._state.folder, result.place, rivals) != beaten:
                again("it was stopped early by measurements from other machines")
                request, rivals = replace(request, rivals=()), ()
                continue
            if role == "search" and placement.is_elsewhere(self._state.folder, result.place):
                self._measure_baseline_there(result, executor, ticked, waiting)
            n_left -= 1
            busy = result.disturbed
            if not n_left and busy and compared:
                self._n_tries = 1  # waiting does not help on this machine
            if not n_left or not busy or self._budget.hurries():
                return result
            again(f"{busy} while it was timed")

    def _measure_baseline_there(
        self, result: TrialResult, executor: Executor, ticked: Callable[[], None], waiting: Callable[[], None]
    ) -> None:
        """Measures the baseline on a trial's machines, with which `placement.like_with_like` compares the trial."""
        folder, baseline = self._state.folder, self._state.plan.baseline
        with self._turns.at(result.place, ticked):
            if placement.wants_baseline(folder, result, executor):
                where = f"{', '.join(result.hosts)} ({result.machine})"
                self._events.say(f"the baseline is measured on {where}, too: trials run there now")
                path = placement.baseline_path(folder, result.place)
                request = self.request(baseline, "repeat")
                with executor.turn(waiting):
                    base.run(executor, path, request, ticked)
