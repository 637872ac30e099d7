"""What earlier studies teach a new one: their measurements are kept as they come, and a related study is where the search starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune import UserError, store
from autotune.candidate import Candidate
from autotune.database import Storage
from autotune.history import History, Measurement
from autotune.plan import Plan
from autotune.search import transfer
from autotune.search.catalogue import Prior
from autotune.search.guide import Guide
from autotune.search.learned import RAN, Told
from autotune.search.physics import PhysicsSampler, generic_prior
from autotune.search.transfer import Transferred
from autotune.space import SearchSpace
from autotune.store import StudyRecord
from autotune.study import Observer, Progress, Runner, WarmStart
from autotune.trial import Workload

# A model of another size is related up to this factor, if its blocks are of the same class.
RELATED_SIZE = 4.0
# Of another study's best only so many are measured here before anything is proposed.
MOST_FIRST = 3


class Recorder:
    """Watches a study for someone else, and keeps every measurement in the history on the way.

    Args:
        observer: Whoever watches.
        history: Where it is kept.
        study: The study.
        generation: Which of its re-tunings; 0 for the study itself.
        workload: What is measured, and where.
        world_size: Ranks.

    Attributes:
        patiently: How it is written: again, where the database is away.
    """

    def __init__(
        self, observer: Observer, history: History, study: str, generation: int, workload: Workload, world_size: int
    ) -> None:
        self.patiently: Callable[[Callable[[], None]], None] = lambda write: write()
        self._observer, self._history, self._study, self._generation = observer, history, study, generation
        self._workload, self._world_size = workload, world_size

    def say(self, text: str) -> None:
        """Passed on."""
        self._observer.say(text)

    def began(self, number: int, candidate: Candidate, role: str) -> None:
        """Passed on."""
        self._observer.began(number, candidate, role)

    def waiting(self) -> None:
        """Passed on."""
        self._observer.waiting()

    def tick(self) -> None:
        """Passed on."""
        self._observer.tick()

    def ended(self, progress: Progress) -> None:
        """Keeps what was measured.

        Raises:
            GoneError: The study was deleted meanwhile.
        """
        self.keep(
            progress.number, progress.role, progress.candidate, str(progress.outcome), progress.metrics, progress.wall_s
        )
        self._observer.ended(progress)

    def keep(
        self, trial: int, role: str, candidate: Candidate, outcome: str, metrics: Mapping[str, float], wall_s: float
    ) -> None:
        """Keeps one measurement.

        Raises:
            GoneError: The study was deleted meanwhile.
        """
        measurement = Measurement(
            study=self._study, generation=self._generation, trial=trial, role=role, environment=asdict(self._workload.environment),
            structure=self._workload.structure, n_parameters=self._workload.n_parameters, world_size=self._world_size,
            candidate=candidate.key, outcome=outcome, metrics=dict(metrics), wall_s=wall_s,
        )  # fmt: skip
        self.patiently(lambda: self._history.measured(measurement))


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A study whose trials can be learned from.

    Attributes:
        name: The study, as it lies in the database.
        relation: What it has to do with the new one, in words.
        kept: Its record.
        told: Its trials.
        doubt: How far its corrections may be off elsewhere.
        guide: Its search.
    """

    name: str
    relation: str
    kept: StudyRecord
    told: list[Told]
    doubt: float
    guide: Guide

    @property
    def best(self) -> list[Candidate]:
        """The measured configurations that its search believes to be the best, one for each objective."""
        return list(dict.fromkeys(self.guide.best(self.told).values()))

    def prior(self, found: Plan) -> Callable[[Prior], Prior]:
        """Lays what it taught over the prior of a plan."""
        before, now = Candidate.from_key(self.kept.baseline), found.baseline
        scale = now.global_batch_size(found.data_parallel) / before.global_batch_size(self.kept.data_parallel)

        def laid(prior: Prior) -> Prior:
            return Transferred(prior, self.guide, self.told, self.doubt, scale)

        return laid

    def warm_start(self, found: Plan, first: tuple[Candidate, ...] = ()) -> WarmStart:
        """What a new study of that plan begins with."""
        return WarmStart(prior=self.prior(found), first=tuple(c for c in dict.fromkeys(first) if c != found.baseline))


def of_study(storage: Storage, name: str, relation: str, doubt: float = transfer.SAME_MODEL) -> Experience | None:
    """What a study taught; None if that is too little, or was kept by an earlier version."""
    try:
        study = store.load_study(storage, name)
        kept = store.record(study)
    except UserError:
        return None
    if kept is None or kept.search is None:
        return None
    space = replace(
        SearchSpace.parse(kept.search.space, f"study {name}"), samples_per_rank=kept.search.samples_per_rank
    )
    sampler = PhysicsSampler(
        space, Candidate.from_key(kept.baseline), kept.search.setting, 0, prior=generic_prior(kept.workload, kept.search.setting),
        metrics=[o.metric for o in kept.objectives], memory_limit_bytes=kept.search.memory_limit_bytes, bounds=kept.search.bounds,
    )  # fmt: skip
    sampler.proposes = False  # it is only asked about what others propose
    told = sampler.told(study)
    if sum(t.outcome in RAN for t in told) < transfer.ENOUGH:
        return None
    return Experience(name=name, relation=relation, kept=kept, told=told, doubt=doubt, guide=sampler.guide)


def related(storage: Storage, history: History, found: Plan) -> Experience | None:
    """The study to learn from: of the same model on this machine, else of one with the same blocks; None if there is none."""
    workload = found.workload
    for row in history.studies_alike(workload.structure, asdict(workload.environment)):
        if row["study"] == found.spec.name:
            continue
        same = bool(workload.structure) and row["structure"] == workload.structure
        ratio = max(row["n_parameters"], workload.n_parameters) / max(
            1, min(row["n_parameters"], workload.n_parameters)
        )
        if not same and ratio > RELATED_SIZE:
            continue
        name = store.generation_name(row["study"], row["generation"]) if row["generation"] else row["study"]
        words = "the same model" if same else f"a model of {row['n_parameters']:,} parameters with the same blocks"
        known = of_study(
            storage, name, f"{words} on this machine", transfer.SAME_MODEL if same else transfer.RELATED_MODEL
        )
        if known is not None and (
            same or (workload.block_class and known.kept.workload.block_class == workload.block_class)
        ):
            return known
    return None


def attach(runner: Runner, *, learn: bool = True) -> None:
    """Has a study keep its measurements in the history, and start from a related one's.

    Args:
        runner: The study, opened and not begun.
        learn: Look for a related study.
    """
    plan = runner.plan
    history = History(runner.storage.engine)
    history.drop_orphans()
    runner.observer = recorder = Recorder(runner.observer, history, plan.spec.name, 0, plan.workload, plan.world_size)
    recorder.patiently = runner.storage.patiently
    if runner.study is not None and runner.leads and runner.ledger.is_alone():
        _make_up(recorder, history, runner)
    # Whoever asks for another sampler asks for what it does by itself.
    known = related(runner.storage, history, plan) if learn and plan.spec.sampler == "physics" else None
    if known is None:
        return
    first = [c for c in known.best if runner.plan.space.contains(c)][:MOST_FIRST]
    runner.warm = known.warm_start(plan, tuple(first))
    if runner.study is None:
        n = len(known.told)
        runner.observer.say(
            f"starting from {n} trials of study {known.name} ({known.relation}); --no-history leaves them out"
        )


def _make_up(recorder: Recorder, history: History, runner: Runner) -> None:
    """Keeps what a run told and was killed before it could keep it."""
    assert runner.study is not None
    kept = {
        row["trial"]
        for row in history.measurements(runner.plan.spec.name)
        if not row["generation"] and row["role"] != "repeat"
    }
    for told in store.told_trials(runner.study):
        if told.number not in kept:
            data, role = store.told_data(told), str(told.user_attrs.get(store.ROLE_ATTR, "search"))
            recorder.keep(
                told.number, role, store.told_candidate(told), data["outcome"], data["metrics"], data["wall_s"]
            )


def keep_recommendation(storage: Storage, study: str, generation: int, recommended: Mapping[str, Any]) -> None:
    """Keeps what a study recommends, if it does.

    Args:
        storage: The database.
        study: The study.
        generation: Which of its re-tunings; 0 for the study itself.
        recommended: The content of `recommended.json`.
    """
    pick = recommended["picks"].get("recommended")
    if pick is not None:
        History(storage.engine).recommended(study, generation, pick)
