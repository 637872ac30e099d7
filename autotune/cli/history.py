"""The commands `history` (print measurements, recommendations, decisions) and `delete` (remove a study)."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, OnlyStudy, Storage, StudyName, option
from autotune.cli.presets import answer_words
from autotune.cli.status import SCALING
from autotune.errors import UserError
from autotune.study.folder import RECORD_FILE
from autotune.study.lock import study_lock
from autotune.system.files import shown
from autotune.system.units import format_seconds

if TYPE_CHECKING:
    from autotune.study.storage.history import Row


def history(
    study: OnlyStudy = None,
    what: Annotated[
        str | None,
        option(
            "KIND",
            "measurements, recommendations or decisions (default: recommendations, decisions; with --json decisions).",
            "--what",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, max=10**9, help="How many, newest first.")
    ] = 50,
    storage: Storage = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Print measurements, recommendations or decisions, of one study or all."""
    from autotune.session import default_storage, open_history, open_study
    from autotune.study.storage import database, records

    url = storage or default_storage()
    opened = database.open_storage(url, create=False)
    known = open_history(url, opened)
    known.drop_orphans()
    read: dict[str, Callable[[], Sequence[Row]]] = {
        "measurements": lambda: records.measurements(opened, study),
        "recommendations": lambda: known.recommendations(study),
        "decisions": lambda: known.decisions(study),
    }
    if what is not None and what not in read:
        raise UserError(f"history: unknown {what!r}. Known: {', '.join(read)}")
    # Both kinds for people, since a study that was never re-tuned has no decisions; programs get one kind of row.
    rows = {
        kind: read[kind]()[:limit]
        for kind in ([what or "decisions"] if what or as_json else ["recommendations", "decisions"])
    }
    if study is not None and not any(rows.values()):
        _ = open_study(study, storage).study  # raises for one that is not known, and lists the studies
    for name, number in known.unreadable:
        print(f"note: row {number} of study {name} is left out: it cannot be read", file=sys.stderr)
    if as_json:
        print(json.dumps([row for each in rows.values() for row in each], indent=1))
        return
    found = [line for kind, each in rows.items() for line in _history_lines(kind, each)]
    for _, line in sorted(found, key=lambda pair: -pair[0])[:limit]:
        print(line)
    if not found:
        print(f"no {' and no '.join(rows)} yet", file=sys.stderr)


def delete(
    study: StudyName,
    storage: Storage = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm it.")] = False,
) -> None:
    """Remove a study, its re-tunings, schedules and history; its small files stay."""
    from autotune.session import open_study
    from autotune.study.storage import records
    from autotune.study.storage.history import History

    opened = open_study(study, storage)
    folder, storage_ = opened.folder, opened.storage
    if study not in records.study_names(storage_):
        _ = opened.study  # raises, and lists the studies
    opened.check_own()
    with contextlib.ExitStack() as stack:
        for used in (folder, folder / SCALING):  # by `run` and `retune`, and by `scale`
            if used.is_dir():
                stack.enter_context(study_lock(used, study))
        if not yes:
            raise UserError(
                f"delete: {study!r} and everything measured for it would be gone; say so with --yes:"
                f" {shlex.join(['autotune', 'delete', study, '--yes'])}"
            )
        # The database last: until then the same command finds the study, and removes the rest.
        for name in (RECORD_FILE, "report.html", "scaling.html"):
            (folder / name).unlink(missing_ok=True)
        for path in (folder / name for name in ("trials", "retunes", "scaling")):
            if path.is_symlink():
                print(f"{shown(path)} leads to {path.resolve()}, which stays; remove it yourself", file=sys.stderr)
            shutil.rmtree(path, ignore_errors=True)
        History(storage_.engine).forget(study, schedules=True)
        records.delete_study(storage_, study)
    print(f"study {study} is deleted" + (f"; {shown(folder)} keeps its small files" if folder.is_dir() else ""))


def _history_lines(what: str, rows: Sequence[Row]) -> Iterator[tuple[float, str]]:
    """For each row its Unix time, and the line for people."""
    from autotune.report.trial_notes import ended
    from autotune.retune import schedule

    for row in rows:
        at = row["began_at"] if what == "decisions" else row["at"]
        name = row["study"] + (f" (re-tuning {row['generation']})" if row["generation"] else "")
        if what == "measurements":
            step = (
                f", {format_seconds(row['metrics']['step_time_s'])} a step" if "step_time_s" in row["metrics"] else ""
            )
            where = (
                f"{row['world_size']} rank{'s' * (row['world_size'] != 1)}, {row['environment'].get('device_name', '')}"
            )
            text = f"trial {row['trial']} {row['role']}: {ended(row['outcome'])}{step}; {where}"
        elif what == "recommendations":
            text = f"{'' if row['withdrawn'] else 'recommends '}trial {row['trial']}, {answer_words(row)}"
        else:
            reason = row["evidence"].get("reason")
            text = f"{row['cause']}: {row['verdict'] or 'under way, or interrupted'}" + (
                f": {reason}" if reason else ""
            )
        yield at, f"{schedule.moment(at)}  {name} {text}"
