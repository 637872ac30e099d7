"""The state that the parts of a run share: the plan, the Optuna study, and what the baseline decided."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.scoring import objective
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.convergence.learning_rate import LearningRate
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.scoring.estimates import Estimates, estimate
from autotune.scoring.measured import Measured
from autotune.scoring.metrics import METRICS
from autotune.scoring.objective import Objective
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.space import SearchSpace
from autotune.study.fingerprint import Fingerprint, changes
from autotune.study.folder import check_paths, studies_of, trial_path, warm_path
from autotune.study.setup.plan import Plan, target_digest
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import analysed, project, records
from autotune.study.storage.database import StoreMissing
from autotune.study.storage.generations import generation_of
from autotune.study.storage.leases import StudyLeases
from autotune.study.storage.optuna_tables import trial_id, write_failed
from autotune.study.storage.records import SearchRecord, StudyRecord
from autotune.system import files
from autotune.trial.folder import TrialDir, record_in, result_in
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

# Parts of a fingerprint in which two runs of one study must be alike, beside its settings: model and data may come from other files.
FOUND = ("model", "parameters", "samples", "data size")
# Those that times depend on, and that no user configures.
MACHINE = ("device", "cores", "threads", "torch", "cuda", "rocm", "deepspeed")
# A file that is being saved may be empty, or away, for a moment.
SAVED_S = 0.3


class TargetEdited(UserError):
    """The target is no longer what the study's trials so far ran."""


class StudyState:
    """A study while it runs.

    Attributes:
        plan: The plan, narrowed by `narrow` as the run learns.
        reference: The baseline's loss curve and noise scale; None before it completes.
        objectives: The objectives, without those that the baseline could not measure.
        learning_rate: How the learning rate follows the global batch.
    """

    def __init__(self, plan: Plan, folder: Path, leases: StudyLeases) -> None:
        self.plan, self.folder, self.leases, self.storage = plan, folder, leases, leases.storage
        self.reference: Reference | None = None
        self.objectives: list[Objective] = list(plan.spec.objectives)
        self.learning_rate: LearningRate = plan.learning_rate()
        self._fingerprint = plan.fingerprint  # of the target as it was probed, which may be edited meanwhile
        self._study: Study | None = None
        self._reading = analysed.Reading()
        self._estimates: Estimates | None = None

    @property
    def spec(self) -> StudySpec:
        """The study as the user stated it."""
        return self.plan.spec

    @property
    def exists(self) -> bool:
        """Whether the study is in the database."""
        return self._study is not None

    @property
    def study(self) -> Study:
        """The Optuna study, once it exists."""
        assert self._study is not None
        return self._study

    # Changes.

    def load(self, *, delete_empty: bool) -> bool:
        """Loads the study from the database if a run has told a trial of it; returns whether it did.

        Args:
            delete_empty: Delete a study whose run died before it told a trial.
        """
        name = self.spec.name
        try:
            study = records.load_study(self.storage, name)
        except StoreMissing:
            return False
        project.check_own(study, studies_of(name, self.folder))
        kept = records.record(study)
        if kept is None and study.get_trials(deepcopy=False):
            raise UserError(f"study {name!r} in this database was not made by autotune; choose another --study name")
        if kept is None or not records.told_trials(study):
            if delete_empty:
                records.delete_study(self.storage, name)
            return False
        if not delete_empty and lacks_trials(study, self.folder):  # its numbers are not settled yet
            return False
        self._check_same(kept)
        self._study = study
        self.take_over(kept)
        return True

    def differences(self, kept: StudyRecord) -> list[str]:
        """What a study that was kept has other than this one, with both values where these are short.

        That is settings, the text of the target, and what was found in it: model and data may come from other files.
        """
        named = [f"the text of {self.spec.target.name}" if name == "target" else name for name in self._stated(kept)]
        return [*named, *_changed(kept, self.plan, FOUND)]

    def _stated(self, kept: StudyRecord) -> list[str]:
        """The settings, and `target` for its text, that a study that was kept has other than this one."""
        return list(_differences(kept.fingerprint, json.loads(json.dumps(self._fingerprint))))

    def changed_machine(self) -> list[str]:
        """What times depend on and is not as when the study began: device, threads of a CPU, libraries."""
        kept = records.record(self.study)
        return _changed(kept, self.plan, MACHINE) if kept else []

    def check_unedited(self) -> None:
        """Refuses to go on with another text of the target than the run began with, which would not compare."""
        target = self.spec.target
        for _ in range(2):
            with contextlib.suppress(OSError):
                if target_digest(target) == self._fingerprint["target"]:
                    return
            time.sleep(SAVED_S)
        remedy = (
            "the next re-tuning is of the new text"
            if generation_of(self.spec.name)[1]
            else "to go on, put its earlier text back and run the same command again; the new one is another study (--fresh, or"
            " --study NAME)"
        )
        raise TargetEdited(
            f"{files.shown(target)} was edited while the study ran, so further trials would not compare with those before: {remedy}"
        )

    def _check_same(self, kept: StudyRecord) -> None:
        if changed := self.differences(kept):
            name = self.spec.name
            edited = set(self._stated(kept)) <= {"target"} and not generation_of(name)[1]
            retuned = f"; or `autotune retune {name}` tells whether its answer holds for what the target is now"
            raise UserError(
                f"study {name!r} exists, but differs in {', '.join(changed)}, so its trials cannot be"
                f" compared with new ones. Choose another --study name, or start over with --fresh{retuned * edited}"
            )

    def take_over(self, kept: StudyRecord) -> None:
        """Takes over what the baseline decided in an earlier run."""
        self.reference, self.objectives, self.learning_rate = kept.reference, kept.objectives, kept.learning_rate

    def create(self) -> None:
        """Creates the study in the database, with its record."""
        names = [f"{o.name} ({METRICS[o.metric].unit})" for o in self.objectives]
        directions = [o.direction for o in self.objectives]
        self._study = records.create_study(self.storage, self.spec.name, directions, names)
        records.keep(self._study, self.record(), self.folder)
        project.mark(self._study, studies_of(self.spec.name, self.folder))

    def keep_branches(self) -> None:
        """Stores whether this run wants branches, which decides what the report of the study bars."""
        kept, wanted = records.record(self.study), self._wants_branches
        if kept is not None and kept.branches != wanted:
            records.keep(self.study, replace(kept, branches=wanted), self.folder)

    def keep_reference(self, reference: Reference) -> None:
        """Takes over and stores the loss curve of a baseline that completed after the study had begun."""
        self.reference = reference
        if (kept := records.record(self.study)) is not None:
            records.keep(self.study, replace(kept, reference=reference), self.folder)

    @property
    def _wants_branches(self) -> bool:
        return self.spec.branch and self.plan.replicated

    def retry_timeouts(self, deadline_s: Callable[[Candidate], float]) -> list[int]:
        """Marks the trials as lost, and so to be run again, that timed out in less time than they have now; returns their numbers.

        The baseline's stays told, since a study has one.
        """
        found = [told for told in self.told() if told.number and self.has_more_time(told, deadline_s)]
        if found:
            with self.storage.engine.begin() as connection:
                write_failed(connection, [trial_id(told) for told in found])
            self._study = records.load_study(self.storage, self.spec.name)
        return [told.number for told in found]

    def has_more_time(self, told: FrozenTrial, deadline_s: Callable[[Candidate], float]) -> bool:
        """Whether a trial timed out in less time than it has now, or was interrupted as it was measured with more."""
        if records.told_data(told)["outcome"] != Outcome.TIMEOUT:
            return False
        path = self.trial_path(told.number)
        had_s, ended = _deadline_of(path), result_in(path) is not None
        return had_s is not None and (not ended or had_s < deadline_s(records.told_candidate(told)))

    def retry_checks(self) -> None:
        """Forgets the checks that timed out in less time than they have now, and what stayed undecided."""
        late = [path for path in check_paths(self.folder) if self._timed_out_sooner(path)]
        # All that is undecided: what had the time that it needed is judged alike again.
        for path in self.folder.glob("trials/*/*.json") if late else ():
            verdict = record_in(path, GateVerdict) if path.name == "verdict.json" else None
            branch = record_in(path, Branch) if path.name == "branch.json" else None
            if (verdict and verdict.passed is None) or (branch and branch.confirmed is None and not branch.n_samples):
                path.unlink()
        for path in late:  # last: by them a run that is killed here is seen to owe this
            shutil.rmtree(path)

    def _timed_out_sooner(self, path: Path) -> bool:
        """Whether a check timed out in less time than it has now."""
        result, had_s = result_in(path), _deadline_of(path)
        timed_out = result is not None and result.outcome is Outcome.TIMEOUT
        return timed_out and had_s is not None and had_s < self.spec.trial_deadline_s

    def narrow(self, space: SearchSpace | None = None, **setting: Any) -> None:
        """Searches only this space from now on, and what is legal where these fields of the setting are so."""
        self.plan = replace(self.plan, space=space or self.plan.space, setting=replace(self.plan.setting, **setting))

    # Reading.

    def record(self) -> StudyRecord:
        """The record that is kept with the study."""
        plan = self.plan
        return StudyRecord(
            fingerprint=self._fingerprint,
            target=os.path.relpath(plan.spec.target, self.folder),
            world_size=plan.world_size,
            base_config=plan.base_config,
            baseline=plan.baseline.key,
            objectives=self.objectives,
            reference=self.reference,
            workload=plan.workload,
            learning_rate=self.learning_rate,
            goal=plan.spec.goal,
            invocation=plan.spec.how() if plan.workload.script else None,
            branches=self._wants_branches,
            search=SearchRecord(
                space=plan.space.to_data(), samples_per_rank=plan.space.samples_per_rank, setting=plan.setting,
                memory_limit_bytes=plan.memory_limit_bytes,
                bounds=list(objective.bounds(self.objectives, plan.spec.constraints).values()),
            ),
        )  # fmt: skip

    def trials(self) -> list[FrozenTrial]:
        """All trials, lost and running ones included."""
        return self.study.get_trials(deepcopy=False)

    def told(self) -> list[FrozenTrial]:
        """The trials that ended as results."""
        return records.told_trials(self.study) if self.exists else []

    def outcomes(self) -> list[Outcome]:
        """The outcome of every told trial."""
        return [Outcome(records.told_data(told)["outcome"]) for told in self.told()]

    def known(self) -> set[str]:
        """Keys of the candidates that were told or are running."""
        return {
            t.user_attrs[CANDIDATE_ATTR]
            for t in self.trials()
            if t.state is not TrialState.FAIL and CANDIDATE_ATTR in t.user_attrs
        }

    def measured(self) -> list[Measured]:
        """Every told trial as the analysis takes it."""
        return analysed.measured(self.study, self.folder, self.record(), self._reading) if self.exists else []

    def estimates(self, *, first: bool = False) -> Estimates:
        """The estimates (`first`: without what was measured again), computed anew only where something was measured since."""
        found = [replace(m, repeats={}) if first else m for m in self.measured()]
        if self._estimates is None or list(self._estimates.raw.values()) != found:
            self._estimates = estimate(found)
        return self._estimates

    @contextlib.contextmanager
    def nothing_measured_again(self) -> Iterator[None]:
        """Lets `measured` read each trial's files once, while no trial is measured again."""
        self._reading = analysed.Reading(trials={}, foretold=self._reading.foretold)
        try:
            yield
        finally:
            self._reading = analysed.Reading(foretold=self._reading.foretold)

    def trial_path(self, number: int) -> Path:
        """The folder of a trial."""
        return trial_path(self.folder, number)


def lacks_trials(study: Study, folder: Path) -> bool:
    """Whether a study's folder holds results of trials that the database has not: it was lost, or it is an earlier copy."""
    # The folder first: a trial has a row before it has a result.
    numbers = [int(path.name) for path in (folder / "trials").glob("[0-9]*") if path.name.isdigit()]
    # A run that is killed while it takes results up leaves a row that says nothing.
    begun = {
        trial.number
        for trial in study.get_trials(deepcopy=False)
        if trial.state is not TrialState.RUNNING or CANDIDATE_ATTR in trial.user_attrs
    }
    return any(n not in begun and result_in(trial_path(folder, n)) is not None for n in numbers)


def forget_runs(executor: Executor, folder: Path, kept: Path | None = None) -> None:
    """Removes what a study ran: trials, and the references, weights and baselines elsewhere that would be read again.

    Args:
        kept: A trial's folder that stays; None removes all of them.
    """
    for pattern in ("[0-9]*", "baseline-*", "reference-*", "noise", "warm"):
        for path in (folder / "trials").glob(pattern):
            if path != kept:
                base.forget(executor, path)
    warm = warm_path(folder)
    for path in warm.parent.glob(f"*{warm.name}*"):  # drafts of it, too, which are as large
        path.unlink(missing_ok=True)


def _deadline_of(path: Path) -> float | None:
    """The deadline that a run had; None where nothing tells."""
    had = record_in(TrialDir(path).request, TrialRequest)
    return had.deadline_s if had is not None else None


def _changed(kept: StudyRecord, plan: Plan, parts: Sequence[str]) -> list[str]:
    found = changes(Fingerprint.of(kept), Fingerprint.now(plan))
    return [each.named for each in found if each.part in parts]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{above}{key}.")
        elif key != "target" and isinstance(old, str | int | float) and isinstance(new, str | int | float):
            yield f"{above}{key} ({json.dumps(new)} instead of {json.dumps(old)})"
        elif key == "objectives" and old and new:
            asked, had = (" and ".join(each["name"] for each in some) for some in (new, old))
            yield f"objectives ({asked} instead of {had})" if asked != had else "objectives (their weights or bounds)"
        else:
            yield f"{above}{key}"
