"""The diagnosis of a trial without a study."""

from collections.abc import Sequence
from pathlib import Path

from autotune.report import diagnosis
from autotune.scoring.bottleneck import diagnose
from autotune.scoring.step_parts import Diagnosis, Evidence, StepObservation
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import TrialResult
from autotune.trial.workload import Workload


def of_result(result: TrialResult, path: Path, workload: Workload, others: Sequence[StepObservation] = ()) -> Diagnosis:
    """Diagnoses a trial that completed and belongs to no study."""
    seen = diagnosis._alone(result)
    evidence = Evidence(
        seen=seen,
        world_size=result.world_size,
        ranks=[diagnosis.phases(path, result.world_size)],
        step_s=result.steps.median_s if result.steps else None,
        peak_memory_bytes=result.peak_memory_bytes,
        memory_limit_bytes=read_record(TrialDir(path).request, TrialRequest).device_memory_bytes,
        **diagnosis._of_device(result),
        tokens_per_step=result.tokens_per_step,
        traced=diagnosis.traces(path, result.world_size),
        **diagnosis.of_workload(workload, result.candidate, result.world_size),
    )
    return diagnose(evidence, others)
