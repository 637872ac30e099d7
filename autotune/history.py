"""What outlives a study, in tables beside Optuna's: measurements with their environment, recommendations, decisions, schedules."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError, IntegrityError

from autotune import UserError, masking

Row: TypeAlias = Mapping[str, Any]

NAME, DIGEST, WORD = sql.String(255), sql.String(64), sql.String(32)
TABLES = sql.MetaData()
MIGRATION = sql.Table(
    "autotune_migration",
    TABLES,
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("applied_at", sql.Double, nullable=False),
)
ENVIRONMENT = sql.Table(
    "autotune_environment",
    TABLES,
    sql.Column("digest", DIGEST, primary_key=True),
    sql.Column("data", sql.JSON, nullable=False),
)
MEASUREMENT = sql.Table(
    "autotune_measurement",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("study", NAME, nullable=False, index=True),
    sql.Column("generation", sql.Integer, nullable=False, default=0),  # 0 is the study itself, n its n-th re-tuning
    sql.Column("trial", sql.Integer, nullable=False),
    sql.Column("role", WORD, nullable=False),
    sql.Column("at", sql.Double, nullable=False),
    sql.Column("environment", DIGEST, sql.ForeignKey("autotune_environment.digest"), nullable=False),
    sql.Column("structure", DIGEST, nullable=False, default=""),
    sql.Column("n_parameters", sql.BigInteger, nullable=False),
    sql.Column("world_size", sql.Integer, nullable=False),
    sql.Column("candidate", sql.Text, nullable=False),
    sql.Column("outcome", WORD, nullable=False),
    sql.Column("metrics", sql.JSON, nullable=False),
    sql.Column("wall_s", sql.Double, nullable=False),
)
RECOMMENDATION = sql.Table(
    "autotune_recommendation",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("study", NAME, nullable=False, index=True),
    sql.Column("generation", sql.Integer, nullable=False, default=0),
    sql.Column("at", sql.Double, nullable=False),
    sql.Column("trial", sql.Integer, nullable=False),
    sql.Column("candidate", sql.Text, nullable=False),
    sql.Column("ds_config", sql.JSON, nullable=False),
    sql.Column("metrics", sql.JSON, nullable=False),
    sql.Column("speedup", sql.Double),
    sql.Column("speedup_low", sql.Double),
    sql.Column("speedup_high", sql.Double),
)
DECISION = sql.Table(
    "autotune_decision",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("study", NAME, nullable=False, index=True),
    sql.Column("generation", sql.Integer, nullable=False),
    sql.Column("cause", WORD, nullable=False),
    sql.Column("began_at", sql.Double, nullable=False),
    sql.Column("ended_at", sql.Double),
    sql.Column("verdict", WORD),  # null while it is under way, or was interrupted
    sql.Column("fingerprint", DIGEST, nullable=False, default=""),
    sql.Column("evidence", sql.JSON, nullable=False),
)
SCHEDULE = sql.Table(
    "autotune_schedule",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("study", NAME, nullable=False, index=True),
    sql.Column("every_s", sql.Double),
    sql.Column("cron", sql.String(128)),
    sql.Column("on_change", sql.Boolean, nullable=False, default=False),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("last_run_at", sql.Double),
    sql.Column("next_run_at", sql.Double, nullable=False),
)
LEASE = sql.Table(
    "autotune_lease",
    TABLES,
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("owner", sql.String(64), nullable=False, default=""),
    sql.Column("beat", sql.BigInteger, nullable=False, default=0),
)
OF_A_STUDY = (MEASUREMENT, RECOMMENDATION, DECISION)
STUDIES = sql.table("studies", sql.column("study_name"))  # Optuna's

# Each is applied once, in this order; what a release has shipped is never edited.
MIGRATIONS: dict[str, Callable[[sql.Connection], None]] = {
    "0001-history": lambda connection: TABLES.create_all(connection, [ENVIRONMENT, *OF_A_STUDY]),
    "0002-schedules": lambda connection: TABLES.create_all(connection, [SCHEDULE, LEASE]),
}


class GoneError(UserError):
    """The study was deleted by someone else."""

    def __init__(self, study: str) -> None:
        super().__init__(f"study {study!r} is gone: it was deleted meanwhile, so nothing is kept of this run")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One trial, or one re-measurement, and what it was measured on.

    Attributes:
        study: The study.
        generation: 0 for the study itself, n for its n-th re-tuning.
        trial: Number of the trial.
        role: `baseline`, `search`, `repeat`, or `check` for one that a re-tuning began with.
        at: Unix time.
        environment: Fields of `trial.Environment`.
        structure: Digest of the model.
        n_parameters: Its parameters.
        world_size: Ranks.
        candidate: `Candidate.key`.
        outcome: How it ended.
        metrics: What it yielded.
        wall_s: What it took.
    """

    study: str
    generation: int
    trial: int
    role: str
    environment: Mapping[str, Any]
    structure: str
    n_parameters: int
    world_size: int
    candidate: str
    outcome: str
    metrics: Mapping[str, float]
    wall_s: float
    at: float = field(default_factory=time.time)


class History:
    """The tables of one database; made where they are missing.

    Args:
        engine: The database.
    """

    def __init__(self, engine: sql.Engine) -> None:
        self.engine = engine
        migrate(engine)

    # Measurements and recommendations

    def measured(self, row: Measurement) -> None:
        """Keeps a measurement of a study that exists.

        Raises:
            GoneError: The study was deleted.
        """
        for attempt in range(3):
            try:
                with self._of(row.study) as connection:
                    # The same one again: it was kept, and the answer of the database was lost.
                    there = [
                        getattr(MEASUREMENT.c, name) == getattr(row, name)
                        for name in ("study", "generation", "trial", "role", "at")
                    ]
                    if connection.scalar(sql.select(sql.func.count()).select_from(MEASUREMENT).where(*there)):
                        break
                    values = {**vars(row), "environment": self._environment(connection, row.environment)}
                    connection.execute(MEASUREMENT.insert().values(**values))
                    break
            except IntegrityError:  # another process has just kept the same environment, or removed it as nobody's
                if attempt == 2:
                    raise

    def recommended(self, study: str, generation: int, pick: Row) -> None:
        """Keeps a recommendation, as it stands in `recommended.json`, unless it is the last one again.

        Raises:
            GoneError: The study was deleted.
        """
        low, high = pick.get("speedup_ci95") or (None, None)
        values: dict[str, Any] = {
            "study": study, "generation": generation, "trial": pick["trial"], "candidate": json.dumps(pick["candidate"], sort_keys=True),
            "ds_config": pick["ds_config"], "metrics": pick["metrics"], "speedup": pick.get("speedup"), "speedup_low": low,
            "speedup_high": high,
        }  # fmt: skip
        with self._of(study) as connection:
            last = connection.execute(
                sql.select(RECOMMENDATION)
                .where(RECOMMENDATION.c.study == study)
                .order_by(RECOMMENDATION.c.id.desc())
                .limit(1)
            ).first()
            if last is None or any(last._mapping[name] != value for name, value in values.items()):
                connection.execute(RECOMMENDATION.insert().values(at=time.time(), **values))

    def measurements(self, study: str | None = None, limit: int | None = None) -> list[Row]:
        """Measurements, newest first, their environment in full."""
        query = (
            sql.select(MEASUREMENT, ENVIRONMENT.c.data).join(ENVIRONMENT).order_by(MEASUREMENT.c.id.desc()).limit(limit)
        )
        rows = self._rows(query if study is None else query.where(MEASUREMENT.c.study == study))
        return [
            {**{name: value for name, value in row.items() if name != "data"}, "environment": row["data"]}
            for row in rows
        ]

    def recommendations(self, study: str | None = None) -> list[Row]:
        """Recommendations, newest first."""
        query = sql.select(RECOMMENDATION).order_by(RECOMMENDATION.c.id.desc())
        return self._rows(query if study is None else query.where(RECOMMENDATION.c.study == study))

    def studies_alike(self, structure: str, machine: Mapping[str, Any]) -> list[Row]:
        """Studies with completed measurements on a machine like this: study, generation, structure, n_parameters, world_size, n.

        Args:
            structure: Digest of the model; those of the same model come first.
            machine: Fields of `trial.Environment`.
        """
        m = MEASUREMENT.c
        grouped = (m.study, m.generation, m.structure, m.n_parameters, m.world_size, m.environment)
        query = (
            sql.select(*grouped, ENVIRONMENT.c.data, sql.func.count().label("n"), sql.func.max(m.at).label("at"))
            .select_from(MEASUREMENT.join(ENVIRONMENT))
            .where(m.outcome == "complete", m.role.in_(("baseline", "search")))
            .group_by(*grouped, ENVIRONMENT.c.digest)
        )
        same = ("accelerator", "device_name")
        rows = [row for row in self._rows(query) if all(row["data"].get(name) == machine.get(name) for name in same)]
        return sorted(rows, key=lambda row: (row["structure"] != structure or not structure, -row["at"]))

    # Decisions of re-tuning

    def begin(self, study: str, cause: str) -> int:
        """Notes that a re-tuning begins; returns its number within the database.

        Raises:
            GoneError: The study was deleted.
        """
        with self._of(study) as connection:
            last = connection.scalar(sql.select(sql.func.max(DECISION.c.generation)).where(DECISION.c.study == study))
            values: dict[str, Any] = {
                "study": study,
                "generation": (last or 0) + 1,
                "cause": cause,
                "began_at": time.time(),
                "evidence": {},
            }
            done = connection.execute(DECISION.insert().values(**values))
            return int(done.inserted_primary_key[0])  # type: ignore[index]

    def decide(self, study: str, number: int, **values: Any) -> None:
        """Keeps what is known of a re-tuning of a study by now.

        Raises:
            GoneError: It was deleted, with its study.
        """
        with self.engine.begin() as connection:
            if not connection.execute(
                DECISION.update().where(DECISION.c.id == number).values(**masking.masked(values))
            ).rowcount:
                raise GoneError(study)

    def decisions(self, study: str | None = None) -> list[Row]:
        """Decisions, newest first."""
        query = sql.select(DECISION).order_by(DECISION.c.id.desc())
        return self._rows(query if study is None else query.where(DECISION.c.study == study))

    def interrupted(self, study: str) -> Row | None:
        """The re-tuning of a study that began and did not end; None if there is none."""
        rows = self.decisions(study)
        return rows[0] if rows and rows[0]["verdict"] is None else None

    # Schedules

    def schedules(self, study: str | None = None) -> list[Row]:
        """Schedules, in the order in which they were made."""
        query = sql.select(SCHEDULE).order_by(SCHEDULE.c.id)
        return self._rows(query if study is None else query.where(SCHEDULE.c.study == study))

    def add_schedule(self, **values: Any) -> int:
        """Keeps a schedule; returns its number.

        Raises:
            GoneError: The study is not there.
        """
        with self._of(values["study"]) as connection:
            done = connection.execute(SCHEDULE.insert().values(created_at=time.time(), **values))
            return int(done.inserted_primary_key[0])  # type: ignore[index]

    def update_schedule(self, number: int, **values: Any) -> None:
        """Changes a schedule; one that was removed is no error."""
        with self.engine.begin() as connection:
            connection.execute(SCHEDULE.update().where(SCHEDULE.c.id == number).values(**values))

    def remove_schedule(self, number: int) -> bool:
        """Removes a schedule; False if it is not there."""
        with self.engine.begin() as connection:
            return bool(connection.execute(SCHEDULE.delete().where(SCHEDULE.c.id == number)).rowcount)

    def lease(self, name: str) -> tuple[str, int]:
        """Who holds a lease (empty: nobody), and its last beat."""
        rows = self._rows(sql.select(LEASE).where(LEASE.c.name == name))
        if not rows:
            with contextlib.suppress(IntegrityError), self.engine.begin() as connection:
                connection.execute(LEASE.insert().values(name=name, owner="", beat=0))
            return "", 0
        return rows[0]["owner"], rows[0]["beat"]

    def beat(self, name: str, holder: tuple[str, int], owner: str) -> bool:
        """Takes or renews a lease if it still is as it was seen; False if someone else was quicker.

        Args:
            name: The lease.
            holder: What `lease` gave.
            owner: Who is to hold it; empty to give it back.
        """
        seen = (LEASE.c.name == name) & (LEASE.c.owner == holder[0]) & (LEASE.c.beat == holder[1])
        with self.engine.begin() as connection:
            return bool(connection.execute(LEASE.update().where(seen).values(owner=owner, beat=holder[1] + 1)).rowcount)

    # A study's end

    def forget(self, study: str, *, schedules: bool = False) -> None:
        """Removes all rows of a study, and environments that no other one has.

        Args:
            study: The study.
            schedules: Its schedules too.
        """
        with self.engine.begin() as connection:
            for table in (*OF_A_STUDY, *((SCHEDULE,) if schedules else ())):
                connection.execute(table.delete().where(table.c.study == study))
            used = sql.select(MEASUREMENT.c.environment)
            connection.execute(ENVIRONMENT.delete().where(ENVIRONMENT.c.digest.not_in(used)))

    def drop_orphans(self) -> None:
        """Removes the rows of studies that another program deleted."""
        names = sql.select(STUDIES.c.study_name)
        found = {
            row["study"]
            for table in OF_A_STUDY
            for row in self._rows(sql.select(table.c.study).where(table.c.study.not_in(names)))
        }
        for study in found:
            self.forget(study)

    @contextlib.contextmanager
    def _of(self, study: str) -> Iterator[sql.Connection]:
        """A transaction that writes rows of a study, which must exist at its end too."""
        with self.engine.begin() as connection:
            yield connection
            if (
                connection.scalar(
                    sql.select(sql.func.count()).select_from(STUDIES).where(STUDIES.c.study_name == study)
                )
                != 1
            ):
                raise GoneError(study)

    def _environment(self, connection: sql.Connection, data: Mapping[str, Any]) -> str:
        text = json.dumps(data, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        known = connection.scalar(
            sql.select(sql.func.count()).select_from(ENVIRONMENT).where(ENVIRONMENT.c.digest == digest)
        )
        if not known:
            connection.execute(ENVIRONMENT.insert().values(digest=digest, data=json.loads(text)))
        return digest

    def _rows(self, query: sql.Select[Any]) -> list[Row]:
        with self.engine.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]


def migrate(engine: sql.Engine) -> None:
    """Brings the tables up to date; several processes may do so at once."""
    with contextlib.suppress(DBAPIError), engine.begin() as connection:  # another process makes it at this moment
        MIGRATION.create(connection, checkfirst=True)
    with engine.connect() as connection:
        applied = set(connection.scalars(sql.select(MIGRATION.c.name)))
    for name, apply in MIGRATIONS.items():
        if name in applied:
            continue
        try:
            with engine.begin() as connection:
                # First the name: who comes second fails here, and the other's tables are there.
                connection.execute(MIGRATION.insert().values(name=name, applied_at=time.time()))
                apply(connection)
        except IntegrityError:
            continue


def forget(engine: sql.Engine, study: str) -> None:
    """Removes a deleted study's rows from a database that has such tables."""
    if sql.inspect(engine).has_table(MIGRATION.name):
        History(engine).forget(study)
