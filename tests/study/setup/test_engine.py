"""The executor that a study asks for."""

import pytest

from autotune.errors import UserError
from autotune.study.setup.engine import executor_of
from autotune.study.spec.spec import StudySpec


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"executor": "slurm", "executor_options": {"partitions": "gpu"}},
            r"partitions: unknown to slurm\. Did you mean 'partition'",
        ),
        ({"executor_options": {"partition": "gpu"}}, "partition: unknown to local"),
        ({"nodes": 2}, "several machines take --executor slurm or ray, --hostfile, or"),
        ({"executor": "slurm", "executor_options": {"idle": "soon"}}, "idle=soon: a number of at least 30 is needed"),
        ({"executor": "slurm", "executor_options": {"idle": "0"}}, "idle=0: a number of at least 30"),
        ({"executor": "ray", "executor_options": {"idle": "inf"}}, "idle=inf: a number of at least 30"),
        ({"executor": "ray", "executor_options": {"grow": "true"}}, "grow=true: no or yes is needed"),
        ({"executor": "ray", "executor_options": {"files": "shared"}}, "files=shared: auto or ray is needed"),
        ({"executor": "slurm", "executor_options": {"allocation": "mine"}}, "allocation=mine: auto or new is needed"),
    ],
)
def test_what_an_engine_does_not_know_is_refused_before_it_starts(models, tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        executor_of(StudySpec.of(models / "ok.py", settings), tmp_path)
