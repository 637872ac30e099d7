"""The tables beside Optuna's, and their migrations."""

import pytest
import sqlalchemy as sql
from sqlalchemy.exc import OperationalError

from autotune.study.storage import tables


def test_a_disk_that_is_full_is_told_as_such(tmp_path):
    """It was told as `no such table`: whatever kept the first table from being made passed for another process that makes it."""
    engine = sql.create_engine(f"sqlite:///{tmp_path / 'full.db'}")
    sql.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count=1"))
    with pytest.raises(OperationalError, match="disk is full"):
        tables.migrate(engine)
