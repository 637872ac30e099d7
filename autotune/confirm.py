"""The end of a study: what may be recommended is checked for how it trains, and measured again beside the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotune import UserError, gate, objective, store, trial
from autotune.analysis import recommend
from autotune.analysis.recommend import Measured
from autotune.branch import Branch, Run, compare
from autotune.candidate import Candidate
from autotune.gate import Verdict
from autotune.objective import GOODPUT, Objective
from autotune.plan import Plan
from autotune.trial import Outcome, TrialResult

ENDLESS_SAMPLES = 10**15
# Where the rounds of re-measurement differ by more than this (standard deviation of the log ratios), more rounds follow.
WANTED_SPREAD = 0.03
# What checking numerics may cost, as a share of the study's time so far.
GATE_SHARE = 0.15
# Steps of a reference's curve: fewer say little, more cost time.
FEWEST_STEPS, MOST_STEPS = 12, 60
REPLICATES = 2
# A reference may train for so many times what a trial may: numerics that are slower make longer curves. Where steps are so slow that this
# is too little for the steps that are needed, for what those take, with this factor to spare.
LONGEST, SPARE = 4, 1.5
WITHIN_DEADLINE = 0.9
# A branch is so many times as long as what the baseline trains on in a trial.
BRANCH_BUDGETS = 2


class Host(Protocol):
    """What the end of a study needs of the study."""

    plan: Plan
    folder: Path
    objectives: list[Objective]

    def say(self, text: str) -> None:
        """Tells whoever watches."""

    def execute(self, candidate: Candidate, path: Path, *, role: str, **request: Any) -> TrialResult:
        """Runs a trial in a folder of its own; fields of its request may be set."""

    def measured(self) -> list[Measured]:
        """Every told trial."""

    def progress(
        self, number: int, role: str, candidate: Candidate, result: TrialResult, metrics: Mapping[str, float]
    ) -> None:
        """Tells whoever watches that a trial ended."""

    def out_of_time(self) -> bool:
        """Whether the time budget is spent."""

    def spent_s(self) -> float:
        """Seconds that the study has taken so far."""


class Confirmation:
    """Checks and measures again what a study is about to recommend; whatever was done already is read from the study's folder.

    Args:
        host: The study.
    """

    def __init__(self, host: Host) -> None:
        self.host, self.plan, self.spec, self.folder = host, host.plan, host.plan.spec, host.folder
        self._gate_s = 0.0

    def run(self) -> None:
        """Confirms until what is recommended has stood every check; nothing where no finalists are wanted."""
        if not self.spec.finalists:
            return
        self._gate_s = sum(
            result.wall_s for path in self.folder.glob("trials/*/*") if (result := _of_gate(path)) is not None
        )
        found = self._finalists()
        while self._gate(found) or self._branch(found):
            found = self._finalists()  # others have moved up
        if found:
            self._measure_again(found)
        while (left := self._contenders()) and (self._gate(left) or self._branch(left)):
            pass  # measured again, another one leads, and has to stand the same checks
        while self._gate(self._shown()):
            pass

    def _finalists(self) -> list[Measured]:
        measured = self.host.measured()
        return recommend.finalists(
            measured, baseline_of(measured), self.host.objectives, self.spec.finalists, self.plan.data_parallel
        )

    def _contenders(self) -> list[Measured]:
        """Who of those measured again reads better than the baseline, the best first, down to the first that nothing speaks against."""
        measured, found = self.host.measured(), list[Measured]()
        for m in recommend.rank(measured, baseline_of(measured), self.host.objectives):
            if m.trial == 0:
                break
            if m.repeats and not m.barred:
                found.append(m)
                if not m.doubt:
                    break
        return found

    def _shown(self) -> list[Measured]:
        """What the answer will show: the picks, then the front."""
        measured = self.host.measured()
        found = recommend.recommend(measured, baseline_of(measured), self.host.objectives, self.plan.data_parallel)
        return list({m.trial: m for m in [*(pick.measured for pick in found.picks.values()), *found.front]}.values())

    def _measure_again(self, found: list[Measured]) -> None:
        """Measures the finalists and the baseline in turns, so that what drifts meets all of them alike."""
        baseline, world = baseline_of(self.host.measured()), self.plan.world_size
        while True:
            left = recommend.in_race(
                found, self.host.measured(), baseline and self._now(baseline), self.host.objectives, world
            )
            if beaten := [f"trial {m.trial}" for m in found if m not in left]:
                self.host.say(f"{', '.join(beaten)}: clearly beaten, so not measured again")
            found = left
            # A round counts only whole: what an interrupted one or other finalists left was measured at another time.
            turn = [*found, *([baseline] if baseline else [])]
            rounds = [
                {n for n, path in store.repeat_paths(self.folder, m.trial).items() if trial.result_in(path)}
                for m in turn
            ]
            n_done, last = len(set.intersection(*rounds)), max(set.union(*rounds), default=0)
            if n_done >= self.spec.repeats and not (n_done < 2 * self.spec.repeats and self._unsettled()):
                return
            if n_done and self.spec.time_budget_s is not None and self.host.spent_s() >= self.spec.time_budget_s:
                return
            if n_done == 0:
                self.host.say(
                    f"measuring the best {len(found)} {'and the baseline ' if baseline else ''}again, in turns"
                )
            for m in turn:
                result = self.host.execute(
                    m.candidate, store.repeat_path(self.folder, m.trial, last + 1), role="repeat"
                )
                self.host.progress(
                    m.trial,
                    "repeat",
                    m.candidate,
                    result,
                    {k: e.value for k, e in objective.measure(result, None).items()},
                )

    def _now(self, measured: Measured) -> Measured:
        """The same trial with what was measured since."""
        return next(m for m in self.host.measured() if m.trial == measured.trial)

    def _unsettled(self) -> bool:
        """Whether the rounds so far differ so much that more are worth their time."""
        measured = self.host.measured()
        return not self.host.out_of_time() and recommend.spread(measured, baseline_of(measured)) > WANTED_SPREAD

    def _gate(self, found: Sequence[Measured]) -> bool:
        """Compares the loss curves of those with other numerics than the baseline's with references.

        The first one and those with the baseline's batch, for which its own trial is the reference, are checked whatever it costs,
        the others while the checks keep to their share of the study's time.

        Returns:
            Whether one was not passed.
        """
        baseline = baseline_of(self.host.measured())
        open_ = [m for m in found if not m.numerics_kept and m.verdict is None]
        if baseline is None or not open_:
            return False
        own_batch = self.plan.baseline.global_batch_size(self.plan.data_parallel)
        by_batch: dict[int, list[Measured]] = {}
        for m in open_:
            by_batch.setdefault(m.candidate.global_batch_size(self.plan.data_parallel), []).append(m)
        refused, left = list[Measured](), list[str]()
        for n, (batch, group) in enumerate(by_batch.items()):
            names = ", ".join(str(m.trial) for m in group)
            owed = batch == own_batch or (n == 0 and group[0].trial == found[0].trial)
            if not owed and not self._affordable(batch, baseline):
                left.append(names)
                continue
            self.host.say(
                f"checking how trial {names} trained, beside the baseline's numerics at a global batch of {batch}"
            )
            reference, *replicates = self._references(batch, baseline)
            for m in group:
                verdict = self._verdict(m, baseline, batch, reference, replicates)
                trial.write(store.gate_path(self.folder, m.trial), verdict)
                if not verdict.passed:
                    refused.append(m)
                    self.host.say(f"trial {m.trial} {verdict.reason}")
        if left:
            self.host.say(
                f"how trial {', '.join(left)} trained is not checked: that would take over {GATE_SHARE:.0%} of the study's time"
            )
        return bool(refused)

    def _branch(self, found: Sequence[Measured]) -> bool:
        """Trains the best with another global batch, and the baseline, from one state on equal data.

        Returns:
            Whether one did not stand it, so that others move up.
        """
        baseline = baseline_of(self.host.measured())
        done = sum(m.branch is not None for m in self.host.measured())
        found = [self._now(m) for m in found]
        open_ = [
            m
            for m in found
            if m.branch_wanted and m.branch is None and (m.numerics_kept or (m.verdict and m.verdict.passed))
        ]
        if baseline is None or not open_ or done >= self.spec.finalists or self.host.out_of_time():
            return False
        start = self._start()
        if start is None:
            return False
        m = open_[0]
        self.host.say(
            f"training trial {m.trial} and the baseline from one state on equal data, to see what its global batch is worth"
        )
        world, first_sample = self.plan.data_parallel, start[1]
        n_samples = self._branch_samples(baseline, m.candidate.global_batch_size(world))
        runs = []
        for each in (baseline, m):
            batch, path = (
                each.candidate.global_batch_size(world),
                store.trial_path(self.folder, each.trial) / f"branch-{n_samples}",
            )
            result = trial.result_in(path)
            if result is None or result.outcome is Outcome.LOST:
                result = self.host.execute(
                    each.candidate, path, role="branch", max_steps=-(-n_samples // batch), min_samples=ENDLESS_SAMPLES,
                    budget_s=self._budget_s(n_samples / (each.value("samples_per_s") or 1.0)), weights=str(start[0]),
                    first_sample=first_sample, deadline_s=self.spec.trial_deadline_s,
                )  # fmt: skip
            if result.outcome is not Outcome.COMPLETE:
                why = f"the branch of trial {each.trial} ended with {result.outcome}: {result.reason}"
                confirmed = False if result.outcome is Outcome.DIVERGED and each is m else None
                trial.write(store.branch_path(self.folder, m.trial), Branch(confirmed=confirmed, reason=why))
                return True
            runs.append(Run(losses=result.losses, batch=batch, samples_per_s=each.value("samples_per_s") or 1.0))
        verdict = compare(runs[1], runs[0], self._predicted(m, baseline), first_sample or None)
        trial.write(store.branch_path(self.folder, m.trial), verdict)
        self.host.say(f"trial {m.trial}: {verdict.reason}")
        return True

    def _start(self) -> tuple[Path, int] | None:
        """The weights that branches start from (the user's, the noise probe's, or a run's own), and the samples that they have seen."""
        if self.spec.from_checkpoint is not None:
            return self.spec.from_checkpoint, 0
        path, trials = store.warm_path(self.folder), self.folder / "trials"
        if not path.exists():
            self.host.execute(
                self.plan.baseline, trials / "warm", role="warm", min_samples=ENDLESS_SAMPLES, save_weights=str(path),
            )  # fmt: skip
        found = [result for name in ("warm", "noise") if (result := trial.result_in(trials / name)) is not None]
        if not path.exists() or not found:
            self.host.say("no branch could be begun: no weights were warmed up for it")
            return None
        return path, len(found[0].losses) * (found[0].samples_per_step or 0)

    def _branch_samples(self, baseline: Measured, batch: int) -> int:
        """Samples of a branch: as stated, else what the baseline trains on in a trial, but enough steps of a large batch."""
        if self.spec.branch_tokens is not None:
            tokens = baseline.metrics.get("tokens_per_s")
            per_sample = tokens / baseline.metrics["samples_per_s"] if tokens else 1.0
            return max(1, round(self.spec.branch_tokens / per_sample))
        least = max(batch, self.plan.baseline.global_batch_size(self.plan.data_parallel)) * FEWEST_STEPS
        wanted = max(least, round(BRANCH_BUDGETS * self.spec.trial_budget_s * baseline.metrics["samples_per_s"]))
        kept = [int(path.name.removeprefix("branch-")) for path in store.trial_path(self.folder, 0).glob("branch-*")]
        # What the baseline was trained on for another candidate will do.
        return min((n for n in kept if least <= n), default=wanted)

    def _predicted(self, m: Measured, baseline: Measured) -> float | None:
        own, base = m.metrics.get(GOODPUT), baseline.metrics.get(GOODPUT)
        return base / own if own and base else None

    def _alike(self, m: Measured, batch: int) -> Verdict | None:
        """The pass of another trial with the same numerics and global batch; DeepSpeed's stage 0 has an optimizer of its own."""
        for other in self.host.measured():
            seen, same = other.verdict, gate.numerics(other.ds_config) == gate.numerics(m.ds_config)
            if seen is None or not seen.passed or seen.batch != batch or seen.same_as is not None:
                continue
            if other.trial != m.trial and same and bool(other.candidate.zero_stage) == bool(m.candidate.zero_stage):
                return replace(seen, same_as=other.trial)
        return None

    def _verdict(
        self, m: Measured, baseline: Measured, batch: int, reference: TrialResult, replicates: Sequence[TrialResult]
    ) -> Verdict:
        if reference.outcome is not Outcome.COMPLETE:
            why = f"the baseline's numerics at a global batch of {batch} ended with {reference.outcome}: {reference.reason}"
            return Verdict(passed=None, reason=f"its numerics could not be checked: {why}", batch=batch)
        own = trial.result_in(store.trial_path(self.folder, m.trial)) or TrialResult(outcome=Outcome.LOST)
        if wrong := gate.judge_gradient(own.gradient, reference.gradient, m.ds_config):
            return Verdict(passed=False, reason=wrong, batch=batch)
        if len(own.losses) < min(FEWEST_STEPS, len(reference.losses)):
            if (seen := self._alike(m, batch)) is not None:
                return seen
            step_s = m.value("step_time_s") or self._step_s(batch, baseline)
            own = self._longer(
                m.candidate, store.trial_path(self.folder, m.trial) / "gate", len(reference.losses), step_s
            )
        if own.outcome is Outcome.DIVERGED:
            return Verdict(passed=False, reason=own.reason, batch=batch)
        return gate.judge(own.losses, reference.losses, [each.losses for each in replicates], batch)

    def _affordable(self, batch: int, baseline: Measured) -> bool:
        """Whether references at a batch keep to the checks' share of the time."""
        if trial.result_in(store.reference_path(self.folder, batch) / str(REPLICATES)) is not None:
            return True
        needs_s = (REPLICATES + 1) * (FEWEST_STEPS * self._step_s(batch, baseline) + 1)
        return self._gate_s + needs_s <= GATE_SHARE * self.host.spent_s()

    def _step_s(self, batch: int, baseline: Measured) -> float:
        """About what a step takes with the baseline's numerics."""
        return baseline.metrics["step_time_s"] * max(
            1.0, batch / self.plan.baseline.global_batch_size(self.plan.data_parallel)
        )

    def _references(self, batch: int, baseline: Measured) -> list[TrialResult]:
        """The baseline's numerics at a global batch, and replicates of that; the baseline's own trial where it has that batch."""
        world = self.plan.data_parallel
        candidate = reference_candidate(self.plan.baseline, batch, world)
        first = trial.result_in(store.trial_path(self.folder, baseline.trial))
        own = candidate == self.plan.baseline and first is not None and len(first.losses) >= FEWEST_STEPS
        folder = store.reference_path(self.folder, batch)
        # Half of what is left, so that another batch can follow.
        allowed_s = max(0.0, GATE_SHARE * self.host.spent_s() - self._gate_s) / 2 / (REPLICATES + (0 if own else 1))
        step_s = self._step_s(batch, baseline)
        n_steps = round(min(MOST_STEPS, max(FEWEST_STEPS, allowed_s / step_s)))
        found = [first] if own and first is not None else [self._longer(candidate, folder / "0", n_steps, step_s)]
        if found[0].outcome is Outcome.COMPLETE:
            found += [
                self._longer(candidate, folder / str(n), n_steps, step_s, replicate=n) for n in range(1, REPLICATES + 1)
            ]
        return [found[0], *(each for each in found[1:] if each.outcome is Outcome.COMPLETE)]

    def _longer(
        self, candidate: Candidate, path: Path, n_steps: int, step_s: float, *, replicate: int = 0
    ) -> TrialResult:
        """A loss curve of so many steps, which take about so long each; one that is there already is kept."""
        kept = trial.result_in(path)
        if kept is not None and kept.outcome is not Outcome.LOST:
            return kept
        try:
            result = self.host.execute(
                candidate, path, role="gate", max_steps=n_steps, min_samples=ENDLESS_SAMPLES, replicate=replicate,
                budget_s=self._budget_s(min(n_steps, FEWEST_STEPS) * step_s), deadline_s=self.spec.trial_deadline_s,
            )  # fmt: skip
        except UserError as error:  # an engine that only replays what was measured
            return TrialResult(outcome=Outcome.NOT_APPLIED, reason=str(error))
        self._gate_s += result.wall_s
        return result

    def _budget_s(self, needed_s: float) -> float:
        """How long a run of the checks may train that needs so long, within a trial's deadline."""
        return min(
            max(LONGEST * self.spec.trial_budget_s, SPARE * needed_s), WITHIN_DEADLINE * self.spec.trial_deadline_s
        )


def reference_candidate(baseline: Candidate, batch: int, world_size: int) -> Candidate:
    """The baseline with another global batch: with as much of it at once as is sure to fit, since numerics are all that counts."""
    per_rank = max(1, batch // world_size)
    micro = max(m for m in range(1, min(baseline.micro_batch_size, per_rank) + 1) if per_rank % m == 0)
    if per_rank == baseline.micro_batch_size * baseline.gradient_accumulation_steps:
        return baseline
    return Candidate.of(
        {**baseline.values(), "micro_batch_size": micro, "gradient_accumulation_steps": per_rank // micro}
    )


def baseline_of(measured: Sequence[Measured]) -> Measured | None:
    """The user's own configuration, if it completed."""
    return next((m for m in measured if m.trial == 0 and m.outcome is Outcome.COMPLETE), None)


def _of_gate(path: Path) -> TrialResult | None:
    own = path.name == "gate" or path.parent.name.startswith("reference-")
    return trial.result_in(path) if own else None
