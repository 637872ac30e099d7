"""The branch check: trains a finalist and the baseline from one state on equal data, if their global batches differ."""

import math
from collections.abc import Sequence
from pathlib import Path

from autotune.scoring import recommend
from autotune.scoring.convergence.branch import Branch, Run, compare, of_another
from autotune.scoring.measured import Measured, baseline_of
from autotune.scoring.metrics import GOODPUT
from autotune.study.budget import Budget
from autotune.study.events import EventSink
from autotune.study.folder import branch_path, warm_path
from autotune.study.measure import ENDLESS_SAMPLES, TrialMeasurer
from autotune.study.numerics_check import MIN_STEPS
from autotune.study.state import StudyState
from autotune.system.units import format_duration
from autotune.trial.folder import result_in, write_record
from autotune.trial.result import Outcome, TrialResult

# A branch is this many times as long as the baseline's training in a trial.
BRANCH_BUDGETS = 2
# A branch that did not decide is followed by one 4 times as long, or at least twice.
LONGER = 4
# A branch that saw less than this share of its samples ended before its time.
ENDED_SHARE = 0.8


def largest_batch(room_s: float, samples_per_s: float, rest_s: float) -> int:
    """The largest global batch whose branch takes no longer than that, if its candidate is twice as fast as the baseline.

    Of a branch with the fewest steps the interval is often too wide, so this one has twice as many.

    Args:
        room_s: Seconds that the branch may take.
        samples_per_s: Throughput of the baseline.
        rest_s: Seconds of it that are no training.
    """
    return int(max(0.0, room_s - rest_s) * samples_per_s / 1.5 / (2 * MIN_STEPS))


class BranchCheck:
    """Confirms by training what a finalist's global batch is worth; earlier branches are read from the folder."""

    def __init__(self, state: StudyState, measurer: TrialMeasurer, budget: Budget, events: EventSink) -> None:
        self._state, self._measurer, self._budget, self._events = state, measurer, budget, events
        self._left: set[int] = set()
        self.too_late: set[int] = set()  # trials whose check the time budget has no room for any more

    def run(self, found: Sequence[Measured]) -> bool:
        """Checks the best of the candidates that still needs it; returns whether there was one."""
        measured = self._state.estimates().measured
        baseline, wanted = baseline_of(measured), {m.trial for m in found}
        unchecked = {m.trial: m for m in measured if m.trial in wanted and _needs_branch(m)}
        if baseline is None or not unchecked:
            return False
        best = next(unchecked[m.trial] for m in found if m.trial in unchecked)
        if (known := _known(best, measured)) is not None:
            write_record(branch_path(self._state.folder, best.trial), known)
            self._events.say(f"trial {best.trial}: {known.reason}")
            return True
        return self._train_until_decided(best, baseline, decides=best.trial == found[0].trial)

    def lengthen(self) -> None:
        """Goes on with the branch that did not decide about the best trial, where a longer one is asked for or has the time now."""
        estimates = self._state.estimates()
        if estimates.baseline is None:
            return
        for m in recommend.rank(estimates, self._state.objectives):
            if m.trial == 0:
                return
            if m.branch is not None and m.branch.confirmed is None and m.branch.n_samples:
                least, _ = self._n_samples(m, estimates.baseline)
                if least > max(self._lengths(m), default=0):
                    self._train_until_decided(m, estimates.baseline, decides=True)
                return
            if not m.barred:
                return

    def _train_until_decided(self, m: Measured, baseline: Measured, *, decides: bool) -> bool:
        """Branches, longer each time, until that decides or there is no time; whether there was time for one."""
        n_samples = self._affordable(m, baseline, decides=decides)
        start = self._start() if n_samples else None
        while n_samples and start is not None and not self._compare(m, baseline, n_samples, *start):
            n_samples = self._affordable(m, baseline, decides=decides)
        return start is not None

    def _affordable(self, m: Measured, baseline: Measured, *, decides: bool) -> int:
        """Samples of a branch that keeps to the checks' share of the study's time; 0 if none does, said once."""
        least, wanted = self._n_samples(m, baseline)
        if self._lengths(m) and least > self._most_samples(m, baseline):
            return 0  # a trial's deadline would cut it
        room_s, round_s = self._budget.check_room_s(decides=decides), self._budget.again_s([m.trial, baseline.trial])
        # A round of both is to follow; what does not decide the answer leaves the time to all the finalists' rounds.
        left_s = self._budget.room_s() - round_s if decides or not self._budget.out_of_time() else 0.0
        each_s, rest_s = self._seconds(m, baseline, wanted)
        n_samples = max(least, int(min(wanted, (min(room_s, left_s) - rest_s) / each_s)))
        needed_s = rest_s + each_s * n_samples
        if needed_s <= min(room_s, left_s):
            return n_samples
        if needed_s > self._budget.room_s() - round_s and m.branch is None:
            self.too_late.add(m.trial)
        if m.trial not in self._left:
            self._left.add(m.trial)
            longer = "longer " if self._lengths(m) else ""
            why = self._budget.why_unchecked(math.inf if room_s > left_s else needed_s)
            self._events.say(
                f"no {longer}branch for trial {m.trial} so far, so its global batch is unchecked: it would take"
                f" {format_duration(needed_s)}, {why}"
            )
        if decides:
            self._budget.leave_unchecked(needed_s)
        return 0

    def _seconds(self, m: Measured, baseline: Measured, n_samples: int) -> tuple[float, float]:
        """Seconds that a branch takes for each of its samples, and beside them."""
        sides = [m] if self._branch_of(baseline, n_samples).exists() else [m, baseline]
        warm = self._state.spec.from_checkpoint is None and self._warmed() is None
        rest_s = (len(sides) + warm) * self._budget.startup_s() + warm * self._budget.trial_s
        return sum(1 / (each.metrics.get("samples_per_s") or 1.0) for each in sides), rest_s

    def _branch_of(self, m: Measured, n_samples: int) -> Path:
        return self._state.trial_path(m.trial) / f"branch-{n_samples}"

    def _lengths(self, m: Measured) -> list[int]:
        """The samples of the branches that a trial has had."""
        paths = self._state.trial_path(m.trial).glob("branch-*")
        return [int(path.name.removeprefix("branch-")) for path in paths if result_in(path) is not None]

    def _compare(self, m: Measured, baseline: Measured, n_samples: int, weights: Path, first_sample: int) -> bool:
        """Branches once; whether that ends the check, since a longer branch would tell no more."""
        self._events.say(
            f"branch: training trial {m.trial} and the baseline from one state on the same data, to see what its global"
            " batch is worth"
        )
        path = branch_path(self._state.folder, m.trial)
        world = self._state.plan.data_parallel
        runs = []
        for each in (baseline, m):
            result = self._train(each, n_samples, weights, first_sample)
            if result.outcome is not Outcome.COMPLETE:
                why = f"the branch of trial {each.trial} ended with {result.end}"
                confirmed = False if result.outcome is Outcome.DIVERGED and each is m else None
                write_record(path, Branch(confirmed=confirmed, reason=why))
                self._events.say(f"trial {m.trial}: {why}")
                return True
            batch = each.candidate.global_batch_size(world)
            runs.append(Run(losses=result.losses, batch=batch, samples_per_s=each.metrics.get("samples_per_s") or 1.0))
        own, base = m.metrics.get(GOODPUT), baseline.metrics.get(GOODPUT)
        verdict = compare(runs[1], runs[0], base / own if own and base else None, first_sample or None)
        n_seen = min(len(run.losses) * run.batch for run in runs)
        cut = verdict.confirmed is None and n_seen < ENDED_SHARE * n_samples
        if cut:  # a longer one would end there, too
            why = f"its branch ended after {n_seen:,} of {n_samples:,} samples, with the training or at a trial's deadline"
            verdict = Branch(confirmed=None, reason=f"its global batch is unconfirmed: {why}; --no-branch does without")
        write_record(path, verdict)
        self._events.say(f"trial {m.trial}: {verdict.reason}")
        return verdict.confirmed is not None or cut or self._state.spec.branch_tokens is not None

    def _train(self, m: Measured, n_samples: int, weights: Path, first_sample: int) -> TrialResult:
        return self._measurer.check(
            m.candidate,
            self._branch_of(m, n_samples),
            what=f"the branch of trial {m.trial}",
            role="branch",
            needed_s=n_samples / (m.metrics.get("samples_per_s") or 1.0),
            max_steps=-(-n_samples // m.candidate.global_batch_size(self._state.plan.data_parallel)),
            weights=str(weights),
            first_sample=first_sample,
        )

    def _start(self) -> tuple[Path, int] | None:
        """The weights that branches start from (the user's or warmed-up ones), and the samples that these have seen."""
        if self._state.spec.from_checkpoint is not None:
            return self._state.spec.from_checkpoint, 0
        path = warm_path(self._state.folder)
        if self._warmed() is None:
            self._measurer.execute_again(
                self._state.plan.baseline,
                self._state.folder / "trials" / "warm",
                what="the run that warms up weights for branches",
                role="warm",
                min_samples=ENDLESS_SAMPLES,
                save_weights=str(path),
            )
        if (warmed := self._warmed()) is None:
            self._events.say("no branch could be begun: no weights were warmed up for it")
            return None
        return path, len(warmed.losses) * (warmed.samples_per_step or 0)

    def _warmed(self) -> TrialResult | None:
        """The run that saved weights for branches, which the noise probe does, too; None where it was cut, or there is none."""
        if not warm_path(self._state.folder).exists():
            return None
        trials = self._state.folder / "trials"
        return next((found for name in ("warm", "noise") if (found := result_in(trials / name)) is not None), None)

    def _most_samples(self, m: Measured, baseline: Measured) -> float:
        """Samples that the slower side can train on within a trial's deadline."""
        rates = (each.metrics.get("samples_per_s") or 1.0 for each in (m, baseline))
        return self._budget.within_deadline_s() * min(rates)

    def _n_samples(self, m: Measured, baseline: Measured) -> tuple[int, int]:
        """Samples of a branch, at least and wanted: as the user states, else enough steps, and a multiple of a trial's."""
        spec, plan = self._state.spec, self._state.plan
        if spec.branch_tokens is not None:
            tokens_per_s = baseline.metrics.get("tokens_per_s")
            tokens_per_sample = tokens_per_s / baseline.metrics["samples_per_s"] if tokens_per_s else 1.0
            stated = max(1, round(spec.branch_tokens / tokens_per_sample))
            return stated, stated
        batches = (each.candidate.global_batch_size(plan.data_parallel) for each in (m, baseline))
        fewest, longest = max(batches) * MIN_STEPS, max(self._lengths(m), default=0)
        usual = round(BRANCH_BUDGETS * self._budget.trial_s * baseline.metrics["samples_per_s"])
        least, wanted = max(fewest, 2 * longest), max(2 * fewest, LONGER * longest, usual)
        wanted = max(least, min(wanted, int(self._most_samples(m, baseline))))
        # A branch of the baseline that was trained for another candidate will do.
        kept = (n for n in self._lengths(baseline) if least <= n)
        return (n, n) if (n := min(kept, default=0)) else (least, wanted)


def _known(m: Measured, measured: Sequence[Measured]) -> Branch | None:
    """What the branch of another trial with the same batch and numerics says of a trial, if one has decided."""
    for other in measured:
        found = other.branch
        if found is not None and found.confirmed is not None and found.time_ratio and other.training == m.training:
            rates = [each.metrics.get("samples_per_s") or 1.0 for each in (m, other)]
            return of_another(found, other.trial, rates[0] / rates[1])
    return None


def _needs_branch(m: Measured) -> bool:
    trains_well = m.numerics_kept or (m.verdict is not None and bool(m.verdict.passed))
    return m.branch_wanted and m.branch is None and trains_well
