"""Tables that autotune keeps beside Optuna's in the study database, and the migrations that create them."""

import time
from collections.abc import Callable

import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError, IntegrityError

NAME, DIGEST, WORD = sql.String(255), sql.String(64), sql.String(32)
TABLES = sql.MetaData()
MIGRATION = sql.Table(
    "autotune_migration",
    TABLES,
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("applied_at", sql.Double, nullable=False),
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
    sql.Column("words", sql.Text, nullable=False),  # what it gains, as the answer said it
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
    sql.Column("verdict", WORD),  # null while it runs or after an interruption
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
    "autotune_leases",
    TABLES,
    sql.Column("study", sql.String(256), primary_key=True),
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("owner", sql.String(256), nullable=False),
    sql.Column("token", sql.String(32), nullable=False),
    sql.Column("beat", sql.Integer, nullable=False),
)
OF_A_STUDY = (RECOMMENDATION, DECISION)
STUDIES = sql.table("studies", sql.column("study_name"))  # Optuna's


# Applied once each, in this order. A migration that was released is not edited.
MIGRATIONS: dict[str, Callable[[sql.Connection], None]] = {
    "0001-history": lambda connection: TABLES.create_all(connection, OF_A_STUDY),
    "0002-schedules": lambda connection: TABLES.create_all(connection, [SCHEDULE]),
    "0003-leases": lambda connection: LEASE.create(connection, checkfirst=True),
}


def migrate(engine: sql.Engine) -> None:
    """Bring the tables up to date; several processes may do so at once."""
    try:
        with engine.begin() as connection:
            MIGRATION.create(connection, checkfirst=True)
    except DBAPIError:
        if not sql.inspect(engine).has_table(MIGRATION.name):  # else another process has created it meanwhile
            raise
    with engine.connect() as connection:
        applied = set(connection.scalars(sql.select(MIGRATION.c.name)))
    for name, apply in MIGRATIONS.items():
        if name in applied:
            continue
        try:
            with engine.begin() as connection:
                # The name first: the second of two processes fails here, when the first one's tables exist.
                connection.execute(MIGRATION.insert().values(name=name, applied_at=time.time()))
                apply(connection)
        except IntegrityError:
            continue
