"""Warm starts: the history of all measurements, and the related study that a new search starts from."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from autotune.errors import UserError
from autotune.forecast.features import Prior
from autotune.scoring.convergence.noise_scale import NoiseScale
from autotune.scoring.metrics import remeasured
from autotune.search import transfer
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.search.transfer import Transferred
from autotune.space.candidate import Candidate
from autotune.study.events import Event, EventSink
from autotune.study.setup.plan import Plan
from autotune.study.storage import analysed, records
from autotune.study.storage.database import Storage
from autotune.study.storage.generations import generation_name
from autotune.study.storage.history import History, Measurement
from autotune.study.storage.records import StudyRecord
from autotune.trial.folder import result_in
from autotune.trial.result import RAN
from autotune.trial.workload import Workload

RELATED_SIZE = 4.0  # ratio of parameters up to which models with blocks of one class are related
MAX_FIRST = 3  # candidates of another study that are measured before anything is proposed


class HistoryRecorder(EventSink):
    """Keeps every measurement of a run in the history; generation 0 is the study itself, n its n-th re-tuning."""

    def __init__(self, storage: Storage, study: str, generation: int, workload: Workload, world_size: int) -> None:
        self._storage, self._history = storage, History(storage.engine)
        self._study, self._generation = study, generation
        self._workload, self._world_size = workload, world_size

    def emit(self, event: Event) -> None:
        """Keeps the measurement of a trial that ended."""
        if (p := event.progress) is not None:
            self.keep(p.number, p.role, p.candidate, str(p.outcome), p.metrics, p.wall_s)

    def keep(
        self, trial: int, role: str, candidate: Candidate, outcome: str, metrics: Mapping[str, float], wall_s: float
    ) -> None:
        """Keeps one measurement."""
        measurement = Measurement(
            study=self._study, generation=self._generation, trial=trial, role=role, candidate=candidate.key,
            environment=asdict(self._workload.environment), structure=self._workload.structure,
            n_parameters=self._workload.n_parameters, world_size=self._world_size,
            outcome=outcome, metrics=dict(metrics), wall_s=wall_s,
        )  # fmt: skip
        self._storage.patiently(lambda: self._history.measured(measurement))

    def keep_missing(self, told: Sequence[FrozenTrial], folder: Path) -> None:
        """Keeps the told trials and their re-measurements in the study's folder that a killed run had no time to keep."""
        rows = [row for row in self._history.measurements(self._study) if not row["generation"]]
        kept = {row["trial"] for row in rows if row["role"] != "repeat"}
        n_repeats = Counter(row["trial"] for row in rows if row["role"] == "repeat")
        for trial in told:
            number, candidate = trial.number, records.told_candidate(trial)
            if number not in kept:
                data, role = records.told_data(trial), str(trial.user_attrs.get(records.ROLE_ATTR, "search"))
                self.keep(number, role, candidate, data["outcome"], data["metrics"], data["wall_s"])
            ended = [r for path in records.repeat_paths(folder, number).values() if (r := result_in(path)) is not None]
            for result in ended[n_repeats[number] :]:  # each is kept as it ends, so that the last ones are missing
                self.keep(number, "repeat", candidate, str(result.outcome), remeasured(result, None), result.wall_s)


@dataclass(frozen=True, kw_only=True)
class PriorStudy:
    """An earlier study to learn from.

    Attributes:
        relation: Its relation to the new study in words.
        doubt: Factor on the prior's spread that remains after its corrections.
    """

    name: str
    relation: str
    kept: StudyRecord
    told: list[Observation]
    doubt: float
    guide: CandidateOptimizer

    @property
    def best(self) -> list[Candidate]:
        """The measured configurations that its search believes to be best, one for each objective."""
        return list(dict.fromkeys(self.guide.best(self.told).values()))

    def warm_start(self, found: Plan, first: Sequence[Candidate]) -> "WarmStart":
        """Returns the knowledge that a new study of a plan starts from, whose prior its measurements correct."""
        before, now = Candidate.from_key(self.kept.baseline), found.baseline
        scale = now.global_batch_size(found.data_parallel) / before.global_batch_size(self.kept.data_parallel)
        return WarmStart(
            prior=lambda prior: Transferred(prior, self.guide, self.told, self.doubt, scale),
            first=tuple(c for c in dict.fromkeys(first) if c != found.baseline),
        )


def from_study(
    storage: Storage, name: str, folder: Path, relation: str, doubt: float = transfer.SAME_MODEL
) -> PriorStudy | None:
    """The study of a folder to learn from; None if it has too few trials, or cannot be read."""
    try:
        study = records.load_study(storage, name)
        kept = records.record(study)
        if kept is None:
            return None
        _, sampler = analysed.search_of(study, folder, kept)
    except UserError:
        return None
    sampler.proposes = False  # it only judges
    told = sampler.told(study)
    if sum(t.outcome in RAN for t in told) < transfer.ENOUGH:
        return None
    return PriorStudy(name=name, relation=relation, kept=kept, told=told, doubt=doubt, guide=sampler.guide)


def related(storage: Storage, history: History, found: Plan, studies: Path) -> PriorStudy | None:
    """The study to learn from: of the same model on this machine, else of a model with the same blocks on as many ranks.

    Args:
        studies: The folder of all studies.
    """
    workload = found.workload
    for row in history.studies_alike(workload.structure, asdict(workload.environment), found.world_size):
        if row["study"] == found.spec.name:
            continue
        same = bool(workload.structure) and row["structure"] == workload.structure
        small, large = sorted((row["n_parameters"], workload.n_parameters))
        same_ranks = row["world_size"] == found.world_size
        if not same and not (same_ranks and large / max(1, small) <= RELATED_SIZE):
            continue
        name = generation_name(row["study"], row["generation"]) if row["generation"] else row["study"]
        model = "the same model" if same else f"a model of {row['n_parameters']:,} parameters with the same blocks"
        doubt = transfer.SAME_MODEL if same and same_ranks else transfer.RELATED_MODEL
        folder = records.study_folder(name, studies, str(storage.url))
        known = from_study(storage, name, folder, f"{model} on this machine", doubt)
        blocks = workload.block_class
        if known is not None and (same or (blocks and known.kept.workload.block_class == blocks)):
            return known
    return None


def keep_recommendation(
    storage: Storage, study: str, generation: int, recommended: Mapping[str, Any], words: str
) -> None:
    """Keeps a study's recommendation in the history; if there is none, notes that an earlier one is withdrawn.

    Args:
        generation: Number of its re-tuning; 0 for the study itself.
        recommended: The content of `recommended.json`.
        words: What its pick gains, as the answer says it.
    """
    pick, history = recommended["picks"].get("recommended"), History(storage.engine)
    if pick is not None:
        history.recommended(study, generation, pick, words)
    else:
        history.withdrawn(study, generation)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Knowledge of another study to start from.

    Attributes:
        prior: Corrects the study's own prior.
        first: Candidates to measure before anything is proposed: the best of the other study.
        compromise: Whether to search the best compromise alone, not the whole front.
        noise: Its gradient noise scale, which counts where the study cannot measure one.
    """

    prior: Callable[[Prior], Prior]
    first: tuple[Candidate, ...] = ()
    compromise: bool = False
    noise: NoiseScale | None = None
