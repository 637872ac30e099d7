"""Re-tuning: is what a study recommends still right? Measured first; searched, in few trials, only where something moved."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune import UserError, duel, experience, fingerprint, objective, store, trial
from autotune.candidate import Candidate
from autotune.decision import Decision, Verdict, differences, explain
from autotune.duel import Duel, Standing
from autotune.executors.base import Executor
from autotune.experience import Experience, Recorder
from autotune.fingerprint import Change, Fingerprint
from autotune.history import GoneError, History
from autotune.plan import Plan
from autotune.report import StudyReport, summary
from autotune.spec import StudySpec
from autotune.store import StudyRecord
from autotune.study import Observer, Runner
from autotune.trial import Outcome, TrialResult

# Of a study's trials so large a share is enough for a search that starts from what it found, and no fewer than these.
SHARE, FEWEST = 0.2, 6
# Of so many trials one goes to a configuration of the old front, beside the one in use.
FRONT_EVERY = 8
MIN_GAIN = 0.03
# So many times a re-tuning is begun again after it was killed, before it counts as failed.
MOST_ATTEMPTS = 3
FILES = ("ds_config.json", "recommended.json", "front.json", "environment.json", "README.md")


class AttemptsError(UserError):
    """A re-tuning that was killed whenever it was begun."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asks of a re-tuning.

    Attributes:
        cause: Why it runs: `asked`, `due`, `stale` or `forced`.
        min_gain: A better configuration replaces the present one from this gain on.
        trials: Trials of the search; None for a fifth of the study's.
        on_change: Command that runs where the configuration was replaced.
    """

    cause: str = "asked"
    min_gain: float = MIN_GAIN
    trials: int | None = None
    on_change: str = ""

    @property
    def forced(self) -> bool:
        """Whether to search although nothing moved."""
        return self.cause == "forced"


@dataclass
class Retuning:
    """One re-tuning of a study, from wherever it stands to its end.

    Args:
        name: The study.
        folder: Its folder.
        url: Its database.
        asked: What the user asks for.
        observer: Whoever watches.
    """

    name: str
    folder: Path
    url: str
    asked: Asked
    observer: Observer
    number: int = 0
    generation: int = 0
    evidence: dict[str, Any] = field(default_factory=dict)
    looked_at: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storage = store.open_storage(self.url, create=False)
        self.base: Study = store.load_study(self.storage, self.name)
        self.history = History(self.storage.engine)
        self.report: StudyReport = summary.load(self.name, self.url, self.folder)
        pick = self.report.picks.get("recommended")
        if pick is None:
            raise UserError(
                f"study {self.name!r} recommends nothing yet ({self.report.why_nothing}), so there is nothing to re-tune"
            )
        self.incumbent = Candidate.of(pick["candidate"])
        stored_as = str(self.report.study["stored_as"])
        self.current: Study = store.load_study(self.storage, stored_as)
        kept = store.record(self.current)
        assert kept is not None  # or there were no report
        self.kept: StudyRecord = kept

    @property
    def path(self) -> Path:
        """Where this re-tuning's files go."""
        return self.folder / "retunes" / f"{self.generation:04d}"

    def begin(self) -> None:
        """Begins, or takes up what was interrupted.

        Raises:
            AttemptsError: It was interrupted again and again.
        """
        self.history.drop_orphans()
        left = self.history.interrupted(self.name)
        if left is not None:
            self.number, self.generation, self.evidence = left["id"], left["generation"], dict(left["evidence"])
            attempts = int(self.evidence.get("attempts", 1)) + 1
            if attempts > MOST_ATTEMPTS:
                reason = f"it was killed {MOST_ATTEMPTS} times before it was done; see {self.path}"
                self._close(
                    Decision(verdict=Verdict.FAILED, reason=reason, generation=self.generation, folder=self.path)
                )
                raise AttemptsError(
                    f"re-tuning {self.generation} of study {self.name!r}: {reason}. The next one starts anew"
                )
            self.observer.say(f"going on with re-tuning {self.generation}, which was interrupted")
            self._note(attempts=attempts)
            return
        self.number = self.history.begin(self.name, self.asked.cause)
        self.generation = next(
            row["generation"] for row in self.history.decisions(self.name) if row["id"] == self.number
        )
        shutil.rmtree(self.path, ignore_errors=True)

    def run(self, found: Plan, executor: Executor) -> Decision:
        """Measures, searches if need be, and decides; the decision is kept with its evidence.

        Args:
            found: The study's target, planned anew.
            executor: The engine.

        Raises:
            GoneError: The study was deleted meanwhile.
        """
        now = Fingerprint.now(found)
        if self.evidence.get("fingerprint", now.digest()) != now.digest():
            self.observer.say("the machine or the target changed since it was interrupted, so it starts anew")
            shutil.rmtree(self.path, ignore_errors=True)
            store.delete_study(self.storage, store.generation_name(self.name, self.generation))
            self.evidence = {"attempts": self.evidence.get("attempts", 1)}
        self._note(fingerprint=now.digest())
        changes = fingerprint.changes(Fingerprint.of(self.kept), now)
        # What an earlier re-tuning has looked at already is no reason to search again.
        news = fingerprint.changes(last_looked_at(self.history, self.name, self.kept), now)
        self.looked_at = dict(now.values)
        try:
            decision = self._decide(found, executor, changes, news)
        except KeyError:  # Optuna's word for a study that someone deleted under our feet
            self._check_alive()
            raise
        finally:
            self._clear_if_gone()
        self._close(decision)
        return decision

    def fail(self, reason: str) -> Decision:
        """Notes that it could not be done, and why."""
        decision = Decision(verdict=Verdict.FAILED, reason=reason, generation=self.generation, folder=self.path)
        self._close(decision)
        return decision

    def _decide(self, found: Plan, executor: Executor, changes: list[Change], news: list[Change]) -> Decision:
        made: dict[str, Any] = {"generation": self.generation, "folder": self.path, "changes": changes}
        if self.asked.cause == "stale" and not news and "replacing" not in self.evidence:
            return Decision(verdict=Verdict.UNCHANGED, reason="nothing that it depends on has changed", **made)
        runner = self._runner(found, executor, changes)
        if "replacing" in self.evidence:  # killed between the decision and its last file
            self.observer.say("the decision had been made; finishing it")
            return self._replay(runner, changes)
        standing = self._standing(runner)
        made["standing"] = standing
        opens = fingerprint.opened(news)
        later = (
            getattr(found.spec, "from_checkpoint", None) is not None
        )  # the noise scale has grown since, so that larger batches pay
        if not standing.moved and not opens and not later and not self.asked.forced:
            return Decision(
                verdict=Verdict.UNCHANGED, reason=f"{standing.reason}; searching would gain nothing", **made
            )
        opened = "something better may exist now" if opens else "the training has gone on" if later else "as asked for"
        why = standing.reason if standing.moved else opened
        self.observer.say(
            f"searching, since {why}: {runner.plan.spec.trials} trials, starting from study {self.current.study_name}"
        )
        runner.run()
        return self._compared(runner, made, standing)

    def _compared(self, runner: Runner, made: dict[str, Any], standing: Standing) -> Decision:
        """Best of the search against what is in use."""
        assert runner.study is not None
        made["n_trials"] = len(store.told_trials(runner.study))
        before, now = (r.noise if r is not None else None for r in (self.kept.reference, runner.reference))
        made["notes"] = [f"{now}; it was: {before or 'not measured'}"] if now is not None else []
        later = summary.read(runner.study, self.path)
        pick = later.picks.get("recommended")
        if pick is None:
            return Decision(verdict=Verdict.FAILED, reason=f"no configuration ran: {later.why_nothing}", **made)
        challenger = Candidate.of(pick["candidate"])
        if challenger == self.incumbent:
            return Decision(verdict=Verdict.UNCHANGED, reason="what is in use is still the best that was found", **made)
        outcome = self._duel(runner, challenger) if standing.runs else Duel.walkover(standing.reason)
        changed = differences(self.incumbent, challenger)
        made |= {"duel": outcome, "differences": changed}
        if not outcome.decides(self.asked.min_gain):
            return Decision(verdict=Verdict.UNCHANGED, reason=outcome.why_not(self.asked.min_gain), **made)
        explained = explain(changed, made["changes"])
        reason = f"{challenger.describe()} replaces {self.incumbent.describe()}: {outcome.words}"
        decision = Decision(verdict=Verdict.IMPROVED, reason=reason, explained=explained, **made)
        self._note(
            replacing={**decision.to_data(), "challenger": challenger.values(), "incumbent": self.incumbent.values()}
        )
        self._replace(runner.study, decision)
        return decision

    def _replace(self, later: Study, decision: Decision) -> None:
        """Puts the new answer in the old one's place; every step may be done twice."""
        self._check_alive()
        previous = self.path / "previous"
        if not previous.exists():  # a second attempt would keep what the first one wrote
            draft = self.path / ".previous"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            for name in FILES:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(self.folder / name, draft / name)
            draft.rename(previous)
        store.succeed(self.base, later.study_name)
        report = summary.load(self.name, self.url, self.folder)
        summary.write(report, self.folder)
        trial.write(self.path / "decision.json", decision.to_data())
        experience.keep_recommendation(self.storage, self.name, self.generation, report.recommended)
        if self.asked.on_change:
            self._tell_user(decision)

    def _replay(self, runner: Runner, changes: list[Change]) -> Decision:
        data = self.evidence["replacing"]
        challenger = Candidate.of(data["challenger"])
        self.incumbent = Candidate.of(data["incumbent"])
        changed = differences(self.incumbent, challenger)
        decision = Decision(
            verdict=Verdict.IMPROVED, reason=data["reason"], generation=self.generation, folder=self.path, changes=changes,
            standing=Standing.of_data(data["check"]), duel=Duel.of_data(data["duel"]), differences=changed,
            explained=data["explained"], n_trials=data["n_trials"], notes=data["notes"],
        )  # fmt: skip
        runner.open()
        assert runner.study is not None
        self._replace(runner.study, decision)
        return decision

    def _tell_user(self, decision: Decision) -> None:
        """Runs the user's command.

        Raises:
            UserError: It failed; the configuration stays replaced.
        """
        gain = decision.duel.gain if decision.duel else None
        own = {
            "STUDY": self.name,
            "VERDICT": str(decision.verdict),
            "GAIN": "" if gain is None else f"{gain:.4f}",
            "NEW_CONFIG": str(self.folder / "ds_config.json"),
            "OLD_CONFIG": str(self.path / "previous" / "ds_config.json"),
            "DECISION": str(self.path / "decision.json"),
        }
        own = {f"AUTOTUNE_{name}": value for name, value in own.items()}
        done = subprocess.run(self.asked.on_change, shell=True, env={**os.environ, **own}, check=False)
        if done.returncode:
            raise UserError(
                f"the configuration is replaced, but --on-change ended with status {done.returncode}: {self.asked.on_change}"
            )

    # Measuring

    def _runner(self, found: Plan, executor: Executor, changes: list[Change]) -> Runner:
        """The search: told what the study found, and held to what the change touches."""
        n = self.asked.trials or max(FEWEST, math.ceil(SHARE * found.spec.trials))
        spec = found.spec.model_copy(
            update={"name": store.generation_name(self.name, self.generation), "trials": n, "sampler": "physics"}
        )
        good = [Candidate.of(point["candidate"]) for point in self.report.front]
        best = [self.incumbent, *good]
        touched = fingerprint.touched(changes)
        space = fingerprint.narrowed(found.space, touched, [c.values() for c in (*best, found.baseline)])
        runner = Runner(replace(found, spec=spec, space=space), executor, self.path, self.url, self.observer)
        known = experience.of_study(self.storage, self.current.study_name, "the study itself")
        # Of the old front as much as the trials allow; the search expects the rest of it as well as anything else.
        first = (self.incumbent, *_by_worth(good, known)[: n // FRONT_EVERY])
        if known is not None:
            # The front is known; what is sought is one configuration that is better than the present one.
            runner.warm = replace(known.warm_start(found, first), compromise=True)
        self.recorder = Recorder(
            self.observer, self.history, self.name, self.generation, found.workload, found.world_size
        )
        runner.observer = self.recorder
        return runner

    def _standing(self, runner: Runner) -> Standing:
        """Measures what is in use and the baseline in turns, until it is clear whether one has moved against the other."""
        plan = runner.plan
        reason = self.incumbent.illegal(plan.setting)
        if reason is not None:
            return Standing.cannot_run(f"what is in use cannot run here any more: {reason}")
        then = duel.then_of(
            store.measured(self.current, Path(self.report.study["folder"]), self.kept), self.incumbent, plan.baseline
        )
        sides = {"incumbent": self.incumbent, "baseline": plan.baseline}
        self.observer.say(f"measuring what is in use ({self.incumbent.describe()}) and the baseline again, in turns")
        return duel.check(then, self._measurer(runner, "check", sides))

    def _duel(self, runner: Runner, challenger: Candidate) -> Duel:
        self.observer.say(f"measuring {challenger.describe()} against what is in use, in turns")
        assert runner.study is not None
        measured = {m.candidate: m for m in runner.measured()}
        both = measured.get(challenger), measured.get(self.incumbent)
        sides = {"challenger": challenger, "incumbent": self.incumbent}
        return duel.fight(runner.objectives, both, self.asked.min_gain, self._measurer(runner, "duel", sides))

    def _measurer(
        self, runner: Runner, what: str, sides: Mapping[str, Candidate]
    ) -> Callable[[int], dict[str, duel.Taken]]:
        """Measures each side once, in turns; what an interrupted run left of a round counts if the round is whole."""

        def taken(n: int) -> dict[str, duel.Taken]:
            self._check_alive()
            folder = self.path / what / f"{n:02d}"
            paths = {name: folder / name for name in sides}
            left = {name: trial.result_in(path) for name, path in paths.items()}
            whole = all(left.values())
            order = list(sides) if n % 2 else list(sides)[::-1]  # so that what drifts meets both alike
            results: dict[str, TrialResult] = {}
            for name in order:
                kept = left[name]
                results[name] = kept if whole and kept is not None else runner.measure_again(sides[name], paths[name])
                if not whole:
                    self._keep(n, what, sides[name], results[name], runner)
            return {name: duel.Taken.of(result, _metrics(result, runner)) for name, result in results.items()}

        return taken

    def _keep(self, n: int, role: str, candidate: Candidate, result: TrialResult, runner: Runner) -> None:
        self.recorder.keep(n, role, candidate, str(result.outcome), _metrics(result, runner), result.wall_s)

    # What is kept

    def _note(self, **what: Any) -> None:
        self.evidence |= what
        self.history.decide(self.name, self.number, evidence=self.evidence)

    def _close(self, decision: Decision) -> None:
        data = decision.to_data() | {"attempts": self.evidence.get("attempts", 1), "looked_at": self.looked_at}
        values = {"verdict": str(decision.verdict), "ended_at": time.time(), "evidence": data}
        self.history.decide(self.name, self.number, fingerprint=str(self.evidence.get("fingerprint", "")), **values)

    def _check_alive(self) -> None:
        if self.name not in store.study_names(self.storage):
            raise GoneError(self.name)

    def _clear_if_gone(self) -> None:
        """Leaves nothing of a re-tuning whose study was deleted."""
        if self.name not in store.study_names(self.storage):
            store.delete_study(self.storage, self.name)
            store.delete_study(self.storage, store.generation_name(self.name, self.generation))
            shutil.rmtree(self.path, ignore_errors=True)


def last_looked_at(history: History, study: str, kept: StudyRecord) -> Fingerprint:
    """The circumstances that a study's answer was last held against: those of its last re-tuning, else its own."""
    done = (row for row in history.decisions(study) if row["verdict"] in (Verdict.UNCHANGED, Verdict.IMPROVED))
    values = next((row["evidence"].get("looked_at") for row in done), None)
    return Fingerprint(values=values) if values else Fingerprint.of(kept)


def spec_file(folder: Path, name: str) -> Path:
    """The study as the user stated it.

    Raises:
        UserError: It is gone.
    """
    file = folder / "study.yaml"
    if not file.is_file():
        raise UserError(
            f"study {name!r}: {file} is missing, so what to run is not known; put it back, or tune anew with `autotune run`"
        )
    return file


def same_name(spec: StudySpec, name: str) -> StudySpec:
    """The study as its file states it, under the name that it has in the database."""
    return spec if spec.name == name else spec.model_copy(update={"name": name})


def _metrics(result: TrialResult, runner: Runner) -> dict[str, float]:
    if result.outcome is not Outcome.COMPLETE:
        return {}
    reference = replace(runner.reference, loss_target=None) if runner.reference is not None else None
    return {name: estimate.value for name, estimate in objective.measure(result, reference).items()}


def _by_worth(candidates: Sequence[Candidate], known: Experience | None) -> list[Candidate]:
    """Candidates as a search believes in them: the fastest in samples first."""
    unique = list(dict.fromkeys(candidates))
    if known is None or not unique:
        return unique
    believed = known.guide.beliefs(known.told, unique)
    worth = [
        float(mean) - math.log(c.global_batch_size(1))
        for c, mean in zip(unique, believed.log_step_time[0], strict=True)
    ]
    return [c for _, c in sorted(zip(worth, unique, strict=True), key=lambda pair: pair[0])]
