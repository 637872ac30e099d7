"""The numerics check: compares the loss curves of finalists with references trained by the baseline's numerics."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.scoring.convergence import quality_gate
from autotune.scoring.convergence.first_losses import ANOTHER_OBJECTIVE
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.measured import Measured, baseline_of
from autotune.space import data
from autotune.space.candidate import Candidate
from autotune.study.budget import Budget
from autotune.study.events import EventSink
from autotune.study.folder import gate_path, reference_path
from autotune.study.measure import TrialMeasurer
from autotune.study.state import StudyState
from autotune.trial.folder import result_in, write_record
from autotune.trial.result import Outcome, TrialResult

# Steps of a reference's curve: fewer say little, more cost time.
MIN_STEPS, MAX_STEPS = 12, 60
REPLICATES = 2


class NumericsCheck:
    """Checks how finalists with other numerics than the baseline train; earlier checks are read from the folder."""

    def __init__(self, state: StudyState, measurer: TrialMeasurer, budget: Budget, events: EventSink) -> None:
        self._state, self._measurer, self._budget, self._events = state, measurer, budget, events
        self._baseline = state.plan.baseline
        self._world = state.plan.data_parallel
        self._own_batch = self._baseline.global_batch_size(self._world)
        self._left: set[str] = set()

    def run(self, found: Sequence[Measured]) -> bool:
        """Checks candidates, the best first; returns whether one failed.

        Those with the baseline's batch, for which its own trial is the reference, are checked while the time budget has
        room for it, the others while the checks keep to their share of the study's time. Where a branch follows, or a
        batch is too large for that, their numerics are checked at the baseline's batch.
        """
        baseline = baseline_of(self._state.measured())
        if baseline is None:
            return False
        unchecked = [
            m for m in found if not m.numerics_kept and m.verdict is None and not self._sums_right(m, baseline)
        ]
        by_batch: dict[int, list[Measured]] = {}
        for m in unchecked:
            # That of the baseline next to theirs: where ranks share samples, some batches are none of its.
            near = with_batch(self._baseline, m.candidate.global_batch_size(self._world), self._world)
            by_batch.setdefault(near.global_batch_size(self._world), []).append(m)
        failed, left = False, dict[str, list[str]]()
        for n, (batch, group) in enumerate(by_batch.items()):
            names = [str(m.trial) for m in group]
            decides = n == 0 and group[0].trial == found[0].trial
            at, needed_s = self._affordable(batch, group, baseline, decides=decides)
            if at is None:
                left.setdefault(self._budget.why_unchecked(needed_s), []).extend(names)
                if decides:
                    self._budget.leave_unchecked(needed_s + self._branch_s(group[0], baseline))
                continue
            self._events.say(
                f"quality gate: comparing the loss of {_trials(names)} with the baseline's numerics at a global batch of {at}"
            )
            reference, *replicates = self._references(at, baseline)
            for m in group:
                verdict = self._verdict(m, baseline, at, reference, replicates)
                write_record(gate_path(self._state.folder, m.trial), verdict)
                if not verdict.passed:
                    failed = True
                    self._events.say(f"trial {m.trial}{':' * (verdict.passed is None)} {verdict.reason}")
        for why, names in left.items():
            if unsaid := [name for name in names if name not in self._left]:
                self._events.say(f"no quality gate for {_trials(unsaid)} so far: it would take {why}")
                self._left.update(unsaid)
        return failed

    def _affordable(
        self, batch: int, group: Sequence[Measured], baseline: Measured, *, decides: bool
    ) -> tuple[int | None, float]:
        """The global batch at which to check candidates with a batch, theirs or the baseline's, and the seconds it takes.

        None where there is no time for either. The baseline's is cheap, and comes first where a branch follows, which trains
        them at their own. Sums over many micro-steps are not seen there, so it is only for those whose own trial compared its
        gradient.
        """
        theirs_s, own_s = self._needed_s(batch, baseline), self._needed_s(self._own_batch, baseline)
        if batch == self._own_batch:
            return batch if self._budget.affords(own_s) else None, own_s
        room_s = self._budget.check_room_s(decides=decides)
        results = (result_in(self._state.trial_path(m.trial)) for m in group)
        if any(result is None or result.gradient is None for result in results):
            return batch if theirs_s <= room_s else None, theirs_s
        if not group[0].branch_wanted and theirs_s <= room_s:
            return batch, theirs_s
        own_s += len(group) * self._curve_s(self._own_batch, baseline)  # their own trials are no curves at that batch
        affordable = self._budget.affords(own_s) if decides else own_s <= room_s
        return self._own_batch if affordable else None, own_s

    def _sums_right(self, m: Measured, baseline: Measured) -> bool:
        """Whether a candidate differs in sums of 16 bits alone, and its trial showed that they are right; kept if so."""
        alike = m.candidate.other_numerics == baseline.candidate.other_numerics
        workload, pair = self._state.plan.workload, (m.candidate, baseline.candidate)
        if (
            not alike
            or workload.scales_otherwise(*pair)
            or workload.updates_otherwise(*pair)
            or m.loss_micro_batch != baseline.loss_micro_batch
            or not quality_gate.differs_in_sums_alone(m.ds_config, baseline.ds_config)
        ):
            return False
        own = result_in(self._state.trial_path(m.trial))
        batch = m.candidate.global_batch_size(self._world)
        verdict = quality_gate.judge_sum(own.gradient if own is not None else None, batch)
        if verdict is not None:
            write_record(gate_path(self._state.folder, m.trial), verdict)
        return verdict is not None

    def refuse_other_losses(self) -> None:
        """Refuses the trials whose loss is another one than the baseline's, so that no curves compare."""
        reason = "trains with another loss than the baseline, since it depends on the micro-batch"
        for m in self._state.measured():
            if not m.usable or m.verdict is not None or abs(m.loss_off) < ANOTHER_OBJECTIVE:
                continue
            verdict = GateVerdict(passed=False, reason=reason, batch=m.candidate.global_batch_size(self._world))
            write_record(gate_path(self._state.folder, m.trial), verdict)
            self._events.say(f"trial {m.trial} {reason}")

    def _verdict(
        self, m: Measured, baseline: Measured, batch: int, reference: TrialResult, replicates: Sequence[TrialResult]
    ) -> GateVerdict:
        if reference.outcome is not Outcome.COMPLETE:
            how = reference.end
            why = f"the baseline's numerics at a global batch of {batch} ended with {how}"
            return GateVerdict(passed=None, reason=f"its numerics could not be checked: {why}", batch=batch)
        curves = [each.losses for each in (reference, *replicates)]
        if self._state.plan.workload.script is not None and (anew := quality_gate.starts_anew(curves)):
            return GateVerdict(passed=None, reason=f"its numerics could not be checked: {anew}", batch=batch)
        path = self._state.trial_path(m.trial)
        own = result_in(path) or TrialResult(outcome=Outcome.LOST)
        at_own_batch = m.candidate.global_batch_size(self._world) == batch
        like = reference.gradient if at_own_batch else None
        if wrong := quality_gate.judge_gradient(own.gradient, like, m.ds_config):
            return GateVerdict(passed=False, reason=wrong, batch=batch)
        if not at_own_batch or len(own.losses) < min(MIN_STEPS, len(reference.losses)):
            if (passed := self._passed_alike(m, batch)) is not None:
                return passed
            step_s = (at_own_batch and m.metrics.get("step_time_s")) or self._step_s(batch, baseline)
            candidate = m.candidate if at_own_batch else self._at_batch(m.candidate, batch)
            if candidate.global_batch_size(self._world) != batch:
                why = f"its ranks do not divide the global batch of {batch}, at which the baseline's numerics were seen"
                return GateVerdict(passed=None, reason=f"its numerics could not be checked: {why}", batch=batch)
            n_steps = min(len(each.losses) for each in (reference, *replicates))
            own = self._curve(candidate, path / "gate", n_steps, step_s)
            if own.outcome not in (Outcome.COMPLETE, Outcome.DIVERGED):
                why = f"its curve at a global batch of {batch} ended with {own.end}"
                return GateVerdict(passed=None, reason=f"its numerics could not be checked: {why}", batch=batch)
            if wrong := quality_gate.judge_gradient(own.gradient, reference.gradient, m.ds_config):
                return GateVerdict(passed=False, reason=wrong, batch=batch)
        if own.outcome is Outcome.DIVERGED:
            return GateVerdict(passed=False, reason=own.reason, batch=batch)
        # Other samples in a step are luck either way; numerics and learning rate are the reference's. A loss that is lower
        # before the weights have moved, as over fewer negatives, is another one.
        reordered = m.candidate.other_numerics.keys() <= data.REORDERING
        alike = quality_gate.numerics(m.ds_config) == quality_gate.numerics(baseline.ds_config)
        others = [each.losses for each in replicates]
        return quality_gate.judge(
            own.losses, reference.losses, others, batch,
            may_be_lower=reordered and alike and not m.loss_off, loss_dtype=own.loss_dtype or reference.loss_dtype,
        )  # fmt: skip

    def _at_batch(self, candidate: Candidate, batch: int) -> Candidate:
        """A candidate at another global batch.

        BatchNorm computes something else of smaller micro-batches, and nothing of one sample. A script keeps its number of
        micro-steps all the same: only with those does it show whether it sums what it should average.
        """
        of_script = self._state.plan.workload.script is not None
        least = 1 if of_script else min(candidate.micro_batch_size, self._baseline.micro_batch_size)
        return with_batch(candidate, batch, self._world, least)

    def _passed_alike(self, m: Measured, batch: int) -> GateVerdict | None:
        """The pass of another trial with the same numerics and global batch."""
        for other in self._state.measured():
            seen = other.verdict
            if seen is None or not seen.passed or seen.batch != batch or seen.same_as is not None:
                continue
            # DeepSpeed's stage 0 has its own optimizer.
            alike = bool(other.candidate.zero_stage) == bool(m.candidate.zero_stage)
            if other.trial != m.trial and alike and other.numerics == m.numerics:
                return replace(seen, same_as=other.trial)
        return None

    def _needed_s(self, batch: int, baseline: Measured) -> float:
        """Seconds that the references at a batch and a curve of their length take at least."""
        if result_in(reference_path(self._state.folder, batch) / str(REPLICATES)) is not None:
            return 0.0
        return (REPLICATES + 1) * self._curve_s(batch, baseline)

    def _branch_s(self, m: Measured, baseline: Measured) -> float:
        """Seconds that the branch takes at least which is to follow; 0 if none is."""
        rates = [each.metrics.get("samples_per_s") or 1.0 for each in (m, baseline)]
        n_samples = 2 * MIN_STEPS * m.candidate.global_batch_size(self._world)
        return sum(n_samples / rate for rate in rates) if m.branch_wanted else 0.0

    def _curve_s(self, batch: int, baseline: Measured) -> float:
        """Seconds that one curve with the baseline's numerics takes at least."""
        return MIN_STEPS * self._step_s(batch, baseline) + max(1.0, self._budget.startup_s())

    def _step_s(self, batch: int, baseline: Measured) -> float:
        """Estimated step time with the baseline's numerics."""
        return baseline.metrics["step_time_s"] * max(1.0, batch / self._baseline.global_batch_size(self._world))

    def _references(self, batch: int, baseline: Measured) -> list[TrialResult]:
        """The baseline's numerics at a global batch (its own trial where it has that batch), and replicates."""
        candidate = with_batch(self._baseline, batch, self._world)
        first = result_in(self._state.trial_path(baseline.trial))
        own = first if candidate == self._baseline and first is not None and len(first.losses) >= MIN_STEPS else None
        folder = reference_path(self._state.folder, batch)
        # Half of the time that is left, so that another batch can follow.
        left_s = self._budget.check_room_s() / 2
        step_s = self._step_s(batch, baseline)
        n_steps = round(min(MAX_STEPS, max(MIN_STEPS, left_s / (REPLICATES + (0 if own else 1)) / step_s)))
        reference = own or self._curve(candidate, folder / "0", n_steps, step_s)
        if reference.outcome is not Outcome.COMPLETE:
            return [reference]
        replicates = [
            self._curve(candidate, folder / str(n), n_steps, step_s, replicate=n) for n in range(1, REPLICATES + 1)
        ]
        return [reference, *(each for each in replicates if each.outcome is Outcome.COMPLETE)]

    def _curve(
        self, candidate: Candidate, path: Path, n_steps: int, step_s: float, *, replicate: int = 0
    ) -> TrialResult:
        """A loss curve of `n_steps` steps, each of about `step_s` seconds; read from the folder if it is there."""
        needed_s = min(n_steps, MIN_STEPS) * step_s
        return self._measurer.check(
            candidate, path, what="a run of the quality gate", role="gate", needed_s=needed_s,
            max_steps=n_steps, replicate=replicate,
        )  # fmt: skip


def _trials(numbers: Sequence[str]) -> str:
    """Some trials in words, as `trials 2, 5`."""
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def with_batch(candidate: Candidate, batch: int, world_size: int, least: int = 1) -> Candidate:
    """A candidate with another global batch: with its number of micro-steps, or else the largest micro-batches that surely fit.

    Args:
        least: Where its number of micro-steps would make micro-batches smaller than this, they are of this size if they can be.
    """
    per_rank = max(1, batch * candidate.ranks_per_replica // world_size)
    if per_rank == candidate.micro_batch_size * candidate.gradient_accumulation_steps:
        return candidate
    micro, rest = divmod(per_rank, candidate.gradient_accumulation_steps)
    if not rest and least <= micro <= candidate.micro_batch_size:
        return replace(candidate, micro_batch_size=micro)
    fitting = [m for m in range(1, min(candidate.micro_batch_size, per_rank) + 1) if per_rank % m == 0]
    micro = least if least > 1 and least in fitting else fitting[-1]
    return replace(candidate, micro_batch_size=micro, gradient_accumulation_steps=per_rank // micro)
