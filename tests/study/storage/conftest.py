"""A PostgreSQL server for the tests of what several coordinators share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import postgres

from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.tables import LEASE


@pytest.fixture(scope="session")
def programs() -> Path:
    found = postgres.binaries()
    if found is None:
        pytest.skip("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    return found


@pytest.fixture(scope="module")
def server(programs: Path) -> Iterator[postgres.Postgres]:
    with postgres.running(programs) as server:
        yield server


@pytest.fixture
def url(server: postgres.Postgres) -> Iterator[str]:
    """The database, with no study in it afterwards."""
    yield server.url
    storage = open_storage(server.url)
    for name in records.study_names(storage):
        records.delete_study(storage, name)
    with storage.engine.begin() as connection:
        connection.execute(LEASE.delete())
