"""The history of all studies: recommendations, re-tuning decisions, schedules."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import sqlalchemy as sql

from autotune.errors import UserError
from autotune.study.storage.database import UNREADABLE
from autotune.study.storage.tables import (
    DECISION,
    OF_A_STUDY,
    RECOMMENDATION,
    SCHEDULE,
    STUDIES,
    TABLES,
    migrate,
)  # fmt: skip
from autotune.system import files, redaction

Row: TypeAlias = Mapping[str, Any]
# The words of a row from which on a study recommends nothing.
WITHDRAWN = "withdrawn, nothing is recommended any more"


class GoneError(UserError):
    """Another process deleted the study."""

    def __init__(self, study: str) -> None:
        super().__init__(f"study {study!r} is gone: it was deleted meanwhile, so nothing is kept of this run")


# Columns of all tables that hold numbers, and those that hold JSON objects.
NUMBERS, OBJECTS = (
    {column.name for table in TABLES.tables.values() for column in table.columns if isinstance(column.type, kinds)}
    for kinds in (sql.Integer | sql.Double, sql.JSON)
)


class History:
    """The history in one database; missing tables are created.

    What writes rows of a study raises a `GoneError` if the study is not there, or was deleted meanwhile.

    Attributes:
        unreadable: Rows that were left out because a value in them cannot be read: study, number in the database.
    """

    def __init__(self, engine: sql.Engine) -> None:
        self.engine = engine
        self.unreadable: list[tuple[str, int]] = []
        migrate(engine)

    # Recommendations

    def recommended(self, study: str, generation: int, pick: Row | None, words: str) -> None:
        """Store a recommendation of `recommended.json`; if it equals the last one, only update its words.

        Args:
            generation: Number of its re-tuning; 0 for the study itself.
            pick: None where nothing is recommended: the last one, if any, is stored again without a configuration.
            words: What it gains, as the answer says it.
        """
        query = sql.select(RECOMMENDATION).where(RECOMMENDATION.c.study == study)
        with self._of(study) as connection:
            found = connection.execute(query.order_by(RECOMMENDATION.c.id.desc()).limit(1)).first()
            last: Row | None = None if found is None else dict(found._mapping)
            values: dict[str, Any] = {"study": study, "generation": generation}
            if pick is not None:
                low, high = pick.get("speedup_ci95") or (None, None)
                values |= {
                    "trial": pick["trial"], "candidate": json.dumps(pick["candidate"], sort_keys=True),
                    "ds_config": pick["ds_config"], "metrics": pick["metrics"],
                    "speedup": pick.get("speedup"), "speedup_low": low, "speedup_high": high,
                }  # fmt: skip
            elif last is None or not last["ds_config"]:
                return
            else:
                values |= {"trial": last["trial"], "candidate": last["candidate"], "ds_config": {}, "metrics": {}}
                words = WITHDRAWN
            if last is None or any(last[name] != value for name, value in values.items()):
                connection.execute(RECOMMENDATION.insert().values(at=time.time(), words=words, **values))
            elif last["words"] != words:
                same = RECOMMENDATION.c.id == last["id"]
                connection.execute(RECOMMENDATION.update().where(same).values(words=words))

    def recommendations(self, study: str | None = None) -> list[Row]:
        """Recommendations, newest first; in `withdrawn` whether nothing was recommended any more from then on."""
        query = sql.select(RECOMMENDATION).order_by(RECOMMENDATION.c.id.desc())
        rows = self._rows(query if study is None else query.where(RECOMMENDATION.c.study == study))
        return [{**row, "withdrawn": not row["ds_config"]} for row in rows]

    # Decisions of re-tuning

    def begin(self, study: str, cause: str, there: int = 0) -> int:
        """Store that a re-tuning begins; returns its number in the database.

        Args:
            there: The highest generation of an earlier one that the database may not know.
        """
        with self._of(study) as connection:
            last = connection.scalar(sql.select(sql.func.max(DECISION.c.generation)).where(DECISION.c.study == study))
            begun = DECISION.insert().values(
                study=study, generation=max(last or 0, there) + 1, cause=cause, began_at=time.time(), evidence={}
            )
            done = connection.execute(begun)
            return int(done.inserted_primary_key[0])  # type: ignore[index]

    def decide(self, study: str, number: int, **values: Any) -> None:
        """Update the row of a re-tuning."""
        with self.engine.begin() as connection:
            update = DECISION.update().where(DECISION.c.id == number).values(**redaction.redact(values))
            if not connection.execute(update).rowcount:
                raise GoneError(study)

    def decisions(self, study: str | None = None) -> list[Row]:
        """Decisions, newest first."""
        query = sql.select(DECISION).order_by(DECISION.c.id.desc())
        return self._rows(query if study is None else query.where(DECISION.c.study == study))

    def interrupted(self, study: str) -> Row | None:
        """The last re-tuning of a study, if it has not ended."""
        rows = self.decisions(study)
        return rows[0] if rows and rows[0]["verdict"] is None else None

    # Schedules

    def schedules(self, study: str | None = None) -> list[Row]:
        """Schedules, in the order in which they were made."""
        query = sql.select(SCHEDULE).order_by(SCHEDULE.c.id)
        return self._rows(query if study is None else query.where(SCHEDULE.c.study == study))

    def add_schedule(self, **values: Any) -> int:
        """Store a schedule; returns its number."""
        with self._of(values["study"]) as connection:
            done = connection.execute(SCHEDULE.insert().values(created_at=time.time(), **values))
            return int(done.inserted_primary_key[0])  # type: ignore[index]

    def update_schedule(self, number: int, **values: Any) -> None:
        """Change a schedule; a removed one is no error."""
        with self.engine.begin() as connection:
            connection.execute(SCHEDULE.update().where(SCHEDULE.c.id == number).values(**values))

    def remove_schedule(self, number: int) -> bool:
        """Remove a schedule; False if there is none of that number."""
        with self.engine.begin() as connection:
            return bool(connection.execute(SCHEDULE.delete().where(SCHEDULE.c.id == number)).rowcount)

    # A study's end

    def forget(self, study: str, *, schedules: bool = False) -> None:
        """Remove all rows of a study."""
        with self.engine.begin() as connection:
            for table in (*OF_A_STUDY, *((SCHEDULE,) if schedules else ())):
                connection.execute(table.delete().where(table.c.study == study))

    def drop_orphans(self) -> None:
        """Remove the rows of studies that another program deleted."""
        names = sql.select(STUDIES.c.study_name)
        orphans = sql.union(*(sql.select(table.c.study).where(table.c.study.not_in(names)) for table in OF_A_STUDY))
        with self.engine.connect() as connection:
            found = connection.scalars(orphans).all()
        for study in found:
            self.forget(study)

    @contextlib.contextmanager
    def _of(self, study: str) -> Iterator[sql.Connection]:
        """A transaction on a study's rows; it fails if the study does not exist at its end."""
        with self.engine.begin() as connection:
            yield connection
            if connection.execute(sql.select(STUDIES).where(STUDIES.c.study_name == study)).first() is None:
                raise GoneError(study)

    def _rows(self, query: sql.Select[Any]) -> list[Row]:
        with self.engine.connect() as connection:
            found = [dict(row._mapping) for row in connection.execute(query)]
        self.unreadable += [(row["study"], row["id"]) for row in found if not _is_readable(row) and "id" in row]
        return list(filter(_is_readable, found))


def _is_readable(row: Row) -> bool:
    """Whether the values of a row are of the types that its table states; SQLite keeps whatever it is given."""
    if any(value is UNREADABLE for value in row.values()):
        return False
    if any(isinstance(value, str) for name, value in row.items() if name in NUMBERS):
        return False
    if not all(isinstance(value, dict) for name, value in row.items() if name in OBJECTS):
        return False
    if not all(isinstance(value, int | float | None) for value in row.get("metrics", {}).values()):
        return False
    if isinstance(text := row.get("candidate"), str):
        with contextlib.suppress(ValueError):
            return isinstance(files.json_of(text), dict)
        return False
    return True
