"""What tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clusters import SlurmCluster, slurm, why_no_slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes."""
    if why := why_no_slurm():
        pytest.skip(why)
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
