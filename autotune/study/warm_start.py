"""Warm starts: the related study that a new search starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.forecast.features import Prior
from autotune.scoring.convergence.noise_scale import NoiseScale
from autotune.search import transfer
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.search.transfer import Transferred
from autotune.space.candidate import Candidate
from autotune.study.setup.plan import Plan
from autotune.study.storage import analysed, records
from autotune.study.storage.database import Storage
from autotune.study.storage.generations import generation_of
from autotune.study.storage.records import StudyRecord
from autotune.trial.result import RAN

RELATED_SIZE = 4.0  # ratio of parameters up to which models with blocks of one class are related
MAX_FIRST = 3  # candidates of another study that are measured before anything is proposed


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


def related(storage: Storage, found: Plan, studies: Path) -> PriorStudy | None:
    """The study to learn from: of the same model on this machine, else of a model with the same blocks on as many ranks.

    Args:
        studies: The folder of all studies.
    """
    workload, alike = found.workload, list[tuple[bool, bool, str, StudyRecord]]()
    for name, kept in records.kept_records(storage):
        then, now = kept.workload.environment, workload.environment
        here = (then.accelerator, then.device_name) == (now.accelerator, now.device_name)
        same = bool(workload.structure) and kept.workload.structure == workload.structure
        same_ranks, blocks = kept.world_size == found.world_size, workload.block_class
        small, large = sorted((kept.workload.n_parameters, workload.n_parameters))
        same_blocks = bool(blocks) and kept.workload.block_class == blocks and large / max(1, small) <= RELATED_SIZE
        if here and (same or (same_ranks and same_blocks)) and generation_of(name)[0] != found.spec.name:
            alike.append((same, same_ranks, name, kept))
    for same, same_ranks, name, kept in sorted(alike, key=lambda each: each[:2], reverse=True):
        model = (
            "the same model" if same else f"a model of {kept.workload.n_parameters:,} parameters with the same blocks"
        )
        doubt = transfer.SAME_MODEL if same and same_ranks else transfer.RELATED_MODEL
        folder = records.study_folder(name, studies, str(storage.url))
        if (known := from_study(storage, name, folder, f"{model} on this machine", doubt)) is not None:
            return known
    return None


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
