"""Re-tuning: measure whether a study's recommendation still holds, search again in few trials if not, and decide."""

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune.errors import UserError
from autotune.executors.base import Executor
from autotune.report import files, load
from autotune.report.data import differences
from autotune.report.readme import recommended_words
from autotune.retune import comparison
from autotune.retune.comparison import Comparison, DriftCheck, Reading
from autotune.retune.decision import Decision, Difference, RetuneVerdict, explain
from autotune.scoring.convergence.noise_scale import NoiseScale
from autotune.scoring.estimates import slowed
from autotune.scoring.metrics import remeasured
from autotune.scoring.shared_cores import SLOPE
from autotune.session import OpenStudy
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study import fingerprint, warm_start
from autotune.study.events import EventSink
from autotune.study.fingerprint import Change, Fingerprint
from autotune.study.folder import retuning_of, retuning_path
from autotune.study.runner import Runner
from autotune.study.setup.plan import Plan
from autotune.study.state import forget_runs
from autotune.study.storage import analysed, records
from autotune.study.storage.generations import generation_name
from autotune.study.storage.history import GoneError, History
from autotune.study.storage.records import StudyRecord
from autotune.study.warm_start import WarmStart
from autotune.trial.folder import record_in, result_in, write_record
from autotune.trial.result import Outcome, TrialResult

# A search that starts from the study's results needs this share of its trials, and at least this number.
SHARE, FEWEST = 0.2, 6
# Trials of the search for each configuration that is measured again since it was the best by an objective.
BEST_EVERY = 8
MIN_GAIN = 0.03
MOST_ATTEMPTS = 3  # starts of one re-tuning, each of which was killed, before it counts as failed
AT_WORK = "at-work"  # file in a re-tuning's folder while an attempt runs: it stays where that was killed
ASKED = "asked.json"  # file there with its options: a command that runs comes from no database
FILES = ("ds_config.json", "recommended.json", "front.json", "environment.json", "README.md")
STDERR = 2  # file descriptor
CANNOT_RUN = "what is in use cannot run here any more: {}"


class AttemptsError(UserError):
    """A re-tuning that was killed at each attempt."""


class CommandError(UserError):
    """The user's `--on-change` command failed; the configuration stays replaced, by the decision."""

    def __init__(self, said: str, decision: Decision) -> None:
        super().__init__(said)
        self.decision = decision


@dataclass(frozen=True, kw_only=True)
class RetuneRequest:
    """The user's options for a re-tuning.

    Attributes:
        cause: Why it runs: `asked`, `due`, `stale` or `forced`.
        min_gain: Gain, as a share, from which a better configuration replaces the present one; None for `MIN_GAIN`.
        trials: Trials of the search; None for a fifth of the study's.
        on_change: Shell command that runs after the configuration was replaced; None for none.
        ranks: Ranks to tune for; None for the study's.
        checkpoint: State that the noise scale is measured from; None for the study's.
    """

    cause: str = "asked"
    min_gain: float | None = None
    trials: int | None = None
    on_change: str | None = None
    ranks: int | None = None
    checkpoint: str | None = None

    def taking_up(self, begun: "RetuneRequest") -> "RetuneRequest":
        """The request where it takes up an interrupted re-tuning, for no less and with its options, but for those that it states itself.

        A schedule states none, and `--if-stale` would end one that was begun for more.
        """
        counts = begun if begun.cause == "forced" or self.cause == "stale" else self
        return replace(begun, **self.stated(), cause=counts.cause)

    def stated(self) -> dict[str, Any]:
        """The options that it states besides its cause."""
        return {key: value for key, value in vars(self).items() if key != "cause" and value is not None}


@dataclass(frozen=True)
class Rounds:
    """Measures two configurations once per round; one that stands on both sides, as a baseline in use, once for both.

    Attributes:
        sides: The configurations, by name.
    """

    folder: Path
    sides: Mapping[str, Candidate]
    runner: Runner

    def __call__(self, n: int) -> dict[str, Reading]:
        """Measure round n, or read it if an interrupted run completed it: half of one would be from another time."""
        paths = {candidate: self.folder / f"{n:02d}" / name for name, candidate in self.sides.items()}
        found = {candidate: result_in(path) for candidate, path in paths.items()}
        # The study may have been run on meanwhile, and have another answer than before the interruption.
        results = {c: result for c, result in found.items() if result is not None and result.candidate == c.values()}
        if len(results) < len(paths):
            # The order alternates, so that drift affects both alike.
            for candidate in list(paths) if n % 2 else list(paths)[::-1]:
                results[candidate] = self.runner.measure_again(candidate, paths[candidate])
        beside = results[list(paths)[-1]].log_slowdown
        return {name: self._reading(results[candidate], beside) for name, candidate in self.sides.items()}

    def _reading(self, result: TrialResult, beside: float | None) -> Reading:
        """The reading of a trial as beside the load by other processes that the last side of the round had."""
        if result.outcome is not Outcome.COMPLETE:
            return Reading(outcome=result.outcome, reason=result.reason)
        metrics, own = remeasured(result, self.runner.state.reference), result.log_slowdown
        if own is not None and beside is not None:
            metrics, _ = slowed(metrics, {}, SLOPE * (beside - own))
        return Reading(outcome=result.outcome, metrics=metrics)


class Retuning:
    """One re-tuning of a study, new or interrupted, to its end."""

    def __init__(self, opened: OpenStudy, asked: RetuneRequest, observer: EventSink) -> None:
        self.opened, self.asked, self.observer = opened, asked, observer
        self.name, self.folder, self.storage, self.history = opened.name, opened.folder, opened.storage, opened.history
        self.report, self.kept, self.current = opened.report, opened.record, opened.answer
        self.number, self.generation, self.evidence = 0, 0, dict[str, Any]()
        self.history.drop_orphans()
        if (left := self.history.interrupted(self.name)) is not None:
            self.number, self.generation, self.evidence = left["id"], left["generation"], dict(left["evidence"])
            begun = record_in(self.path / ASKED, RetuneRequest) or RetuneRequest(cause=left["cause"])
            self.asked = asked.taking_up(begun)
        self.min_gain = MIN_GAIN if self.asked.min_gain is None else self.asked.min_gain

    @property
    def path(self) -> Path:
        """Folder of this re-tuning's files."""
        return retuning_path(self.folder, self.generation)

    @property
    def _current_folder(self) -> Path:
        """Folder of the study that holds the answer."""
        return Path(self.report.study["stored_in"])

    def begin(self) -> None:
        """Begin, or continue an interrupted re-tuning; an AttemptsError if it was killed `MOST_ATTEMPTS` times."""
        if (pick := self.report.picks.get("recommended")) is None:
            why = self.report.why_nothing
            raise UserError(f"study {self.name!r} recommends nothing yet ({why}), so there is nothing to re-tune")
        self.incumbent = Candidate.of(pick["candidate"])
        if self.number:
            attempts = int(self.evidence.get("attempts", 1)) + (self.path / AT_WORK).exists()
            if attempts > MOST_ATTEMPTS and "replacing" not in self.evidence:
                reason = self.fail(f"it was killed {MOST_ATTEMPTS} times before it was done; see {self.path}").reason
                raise AttemptsError(f"re-tuning {self.generation} of {self.name!r}: {reason}. The next one starts anew")
            said = replace(self.asked, on_change=None).stated()  # a command may hold a secret, and what is said is kept
            own = shlex.join(f"--{key.replace('_', '-')}={value}" for key, value in said.items())
            self.observer.say(f"going on with re-tuning {self.generation}{own and f' ({own})'}, which was interrupted")
            self._note(attempts=attempts)
            self.excuse()  # it is counted now; a full disk may end this attempt before it begins
        else:
            # A database that was lost no longer knows of those whose folders are there.
            there = max(map(retuning_of, (self.folder / "retunes").glob("*")), default=0)
            self.number = self.history.begin(self.name, self.asked.cause, there)
            self.generation = self.history.decisions(self.name)[0]["generation"]  # the newest
            shutil.rmtree(self.path, ignore_errors=True)
        write_record(self.path / ASKED, self.asked, private=True)
        write_record(self.path / AT_WORK, {})

    def excuse(self) -> None:
        """Do not count this attempt: machines or the database were away or taken away, or the user stopped it."""
        (self.path / AT_WORK).unlink(missing_ok=True)

    def run(self, found: Plan, executor: Executor) -> Decision:
        """Measure, search if necessary, decide, and store the decision with its evidence.

        Raises:
            GoneError: The study was deleted meanwhile.
            CommandError: The decision is stored, and `--on-change` failed.
        """
        now = Fingerprint.now(found)
        digest = now.digest(found)
        decided = "replacing" in self.evidence  # which stays, whatever has changed since: the answer may be the new one
        if not decided and self.evidence.get("fingerprint", digest) != digest:
            self.observer.say("machine, target or settings changed since it was interrupted, so it starts again")
            # Not the whole folder: in it the engine, which is at work, and its agents exchange their files.
            forget_runs(executor, self.path)
            for role in ("check", "duel"):
                shutil.rmtree(self.path / role, ignore_errors=True)
            records.delete_study(self.storage, generation_name(self.name, self.generation))
            self.evidence = {"attempts": self.evidence.get("attempts", 1)}
        if not decided:
            self._note(fingerprint=digest, looked_at=dict(now.values))
        changes = fingerprint.changes(Fingerprint.of(self.kept), now)
        # A change that an earlier re-tuning has examined is no reason to search again.
        news = fingerprint.changes(last_looked_at(self.history, self.name, self.kept), now)
        try:
            decision = self._decide(found, executor, changes, news)
        except CommandError as error:
            self._close(error.decision)
            raise
        finally:
            self._clear_if_gone()
        self._close(decision)
        return decision

    def fail(self, reason: str) -> Decision:
        """Store the failure and its reason."""
        decision = Decision(verdict=RetuneVerdict.FAILED, reason=reason, generation=self.generation, folder=self.path)
        self._close(decision)
        return decision

    def _decide(self, found: Plan, executor: Executor, changes: list[Change], news: list[Change]) -> Decision:
        if "replacing" in self.evidence:  # killed between the decision and its last file
            self.observer.say("the decision had been made; finishing it")
            return self._replay()
        made: dict[str, Any] = {"generation": self.generation, "folder": self.path, "changes": changes}
        if self.asked.cause == "stale" and not news:
            return Decision(
                verdict=RetuneVerdict.UNCHANGED,
                reason="the device, libraries, model, data, ranks and space are what they were",
                **made,
            )
        runner = self._runner(found, executor, changes)
        standing = self._standing(runner)
        made["check"] = standing
        opens = fingerprint.opened(news)
        # The noise scale grows during training, so larger batches may pay.
        later = found.spec.from_checkpoint is not None
        if not standing.moved and not opens and not later and self.asked.cause != "forced":
            return Decision(verdict=RetuneVerdict.UNCHANGED, reason=f"{standing.reason}; no search was started", **made)
        asked = "the training has gone on" if later else "--force asks for it"
        why = standing.reason if standing.moved else "something better may exist now" if opens else asked
        self.observer.say(
            f"searching, since {why}: {runner.state.plan.spec.trials} trials, starting from study {self.current.study_name}"
        )
        runner.run()
        return self._compared(runner, found, made)

    def _compared(self, runner: Runner, found: Plan, made: dict[str, Any]) -> Decision:
        """Compare the best of the search with the configuration in use."""
        assert runner.study is not None
        made["n_trials"] = len(records.told_trials(runner.study))
        before, now = (r.noise if r is not None else None for r in (self.kept.reference, runner.state.reference))
        made["notes"] = [f"{now}; it was: {before or 'not measured'}"] if now is not None else []
        later = load.read(runner.study, self.path)
        if (pick := later.picks.get("recommended")) is None:
            return Decision(verdict=RetuneVerdict.FAILED, reason=later.why_nothing, **made)
        challenger = Candidate.of(pick["candidate"])
        if challenger == self.incumbent:
            return Decision(
                verdict=RetuneVerdict.UNCHANGED, reason="what is in use is still the best that was found", **made
            )
        illegal = why_illegal(self.incumbent, found.setting)  # not by what this search was narrowed to meanwhile
        walkover = Comparison(gain=None, won=True, failed=CANNOT_RUN.format(illegal)) if illegal else None
        outcome = walkover or self._duel(runner, challenger)
        changed = [Difference(*each) for each in differences(challenger.values(), self.incumbent.values())]
        made |= {"duel": outcome, "differences": changed}
        if not outcome.decides(self.min_gain):
            return Decision(verdict=RetuneVerdict.UNCHANGED, reason=outcome.why_not(self.min_gain), **made)
        explained = explain(changed, made["changes"])
        reason = f"{challenger.describe()} replaces {self.incumbent.describe()}: {outcome.words}"
        decision = Decision(verdict=RetuneVerdict.IMPROVED, reason=reason, explained=explained, **made)
        self._note(replacing=decision.to_data())
        return self._replace(runner.study, decision)

    def _replace(self, later: Study, decision: Decision) -> Decision:
        """Replace the old answer by the new one; every step may be repeated."""
        _keep_previous(self.folder, self.path)
        records.succeed(self.opened.study, later.study_name)
        report = load.from_storage(self.storage, self.name, self.folder)
        list(files.write_answer(report, self.folder))
        write_record(self.path / "decision.json", decision.to_data())
        self.history.recommended(self.name, self.generation, report.picks.get("recommended"), recommended_words(report))
        if (command := self.asked.on_change) and self.evidence.get("attempts", 1) > MOST_ATTEMPTS:
            self.observer.say(f"--on-change is not run again: this was killed {MOST_ATTEMPTS} times before it was done")
        elif command:
            _run_command(command, self.name, self.folder, decision)
        return decision

    def _replay(self) -> Decision:
        """Replace the old answer, as decided before an interruption."""
        later = records.load_study(self.storage, generation_name(self.name, self.generation))
        return self._replace(later, Decision.of_data(self.evidence["replacing"], self.path))

    # Measuring

    def _runner(self, found: Plan, executor: Executor, changes: list[Change]) -> Runner:
        """The runner of the search, which knows the study's trials and varies only knobs that the changes touch."""
        n = self.asked.trials or max(FEWEST, math.ceil(SHARE * found.spec.trials))
        spec = found.spec.model_copy(
            update={
                "name": generation_name(self.name, self.generation),
                "trials": n,
                "sampler": "physics",
                "time_budget_s": None,  # that of the run; its trials bound this one
            }
        )
        best = [self.incumbent, *(Candidate.of(point["candidate"]) for point in self.report.front)]
        touched = fingerprint.touched(changes)
        space = fingerprint.narrowed(found.space, touched, [c.values() for c in (*best, found.baseline)])
        known = warm_start.from_study(self.storage, self.current.study_name, self._current_folder, "the study itself")
        # The front is known; the search needs one configuration that is better than the present one.
        warm = WarmStart(prior=lambda prior: prior)
        if known is not None:  # as much of what was best as the trials allow; the search may propose the rest
            first = [c for c in known.best if space.contains(c, found.baseline)][: n // BEST_EVERY]
            warm = replace(known.warm_start(found, [self.incumbent, *first]), compromise=True)
        warm = replace(warm, noise=noise_scale(self.kept, records.record(self.opened.study)))
        later = replace(found, spec=spec, space=space)
        return Runner(later, executor, self.path, self.opened.url, self.observer, warm=warm)

    def _standing(self, runner: Runner) -> DriftCheck:
        """Measure the configuration in use and the baseline in turns, until it is clear whether their ratio changed."""
        plan = runner.state.plan
        if (reason := why_illegal(self.incumbent, plan.setting)) is not None:
            return DriftCheck(moved=True, reason=CANNOT_RUN.format(reason))
        then = comparison.earlier_ratio(
            analysed.measured(self.current, self._current_folder, self.kept), self.incumbent, plan.baseline
        )
        sides = {"incumbent": self.incumbent, "baseline": plan.baseline}
        beside = "again: it is the baseline" if self.incumbent == plan.baseline else "and the baseline again, in turns"
        self.observer.say(f"measuring what is in use ({self.incumbent.describe()}) {beside}")
        return comparison.check_drift(then, Rounds(self.path / "check", sides, runner))

    def _duel(self, runner: Runner, challenger: Candidate) -> Comparison:
        self.observer.say(f"measuring {challenger.describe()} against what is in use, in turns")
        assert runner.study is not None
        measured = {m.candidate: m for m in runner.state.measured()}
        both = measured.get(challenger), measured.get(self.incumbent)
        sides = {"challenger": challenger, "incumbent": self.incumbent}
        return comparison.compare(
            runner.state.objectives, both, self.min_gain, Rounds(self.path / "duel", sides, runner)
        )

    # What is kept

    def _note(self, **what: Any) -> None:
        self.evidence |= what
        self.history.decide(self.name, self.number, evidence=self.evidence)

    def _close(self, decision: Decision) -> None:
        data = decision.to_data() | {"attempts": self.evidence.get("attempts", 1)}
        data["looked_at"] = self.evidence.get("looked_at", {})
        values = {"verdict": str(decision.verdict), "ended_at": time.time(), "evidence": data}
        self.history.decide(self.name, self.number, fingerprint=str(self.evidence.get("fingerprint", "")), **values)
        self.excuse()

    def _clear_if_gone(self) -> None:
        """Remove everything of a re-tuning whose study was deleted, and say so."""
        if self.name not in records.study_names(self.storage):
            records.delete_study(self.storage, self.name)
            records.delete_study(self.storage, generation_name(self.name, self.generation))
            shutil.rmtree(self.path, ignore_errors=True)
            raise GoneError(self.name)


def noise_scale(*kept: StudyRecord | None) -> NoiseScale | None:
    """The first gradient noise scale in the records of a study and its re-tunings."""
    references = (each.reference for each in kept if each is not None)
    return next((each.noise for each in references if each is not None and each.noise is not None), None)


def last_looked_at(history: History, study: str, kept: StudyRecord) -> Fingerprint:
    """Fingerprint of the last re-tuning of a study; of the study itself if there was none."""
    done = (
        row for row in history.decisions(study) if row["verdict"] in (RetuneVerdict.UNCHANGED, RetuneVerdict.IMPROVED)
    )
    values = next((row["evidence"].get("looked_at") for row in done), None)
    return Fingerprint(values=values) if values else Fingerprint.of(kept)


def _keep_previous(folder: Path, path: Path) -> None:
    """Copy the study's files into the re-tuning's folder, unless an interrupted attempt has done so."""
    if (path / "previous").exists():
        return
    draft = path / ".previous"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(folder / name, draft / name)
    draft.rename(path / "previous")


def _run_command(command: str, name: str, folder: Path, decision: Decision) -> None:
    """Run the user's `--on-change` command.

    Raises:
        CommandError: The command failed.
    """
    gain = decision.duel.gain if decision.duel else None
    variables = {
        "AUTOTUNE_STUDY": name,
        "AUTOTUNE_VERDICT": str(decision.verdict),
        "AUTOTUNE_GAIN": "" if gain is None else f"{gain:.4f}",
        "AUTOTUNE_NEW_CONFIG": str(folder / "ds_config.json"),
        "AUTOTUNE_OLD_CONFIG": str(decision.folder / "previous" / "ds_config.json"),
        "AUTOTUNE_DECISION": str(decision.folder / "decision.json"),
    }
    # Standard output is the decision's, which --json gives to a program.
    done = subprocess.run(command, shell=True, env={**os.environ, **variables}, stdout=STDERR, check=False)
    if done.returncode:
        raise CommandError(
            f"the configuration is replaced, but --on-change ended with status {done.returncode}: {command}", decision
        )
