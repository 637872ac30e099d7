"""The database: opened safely, shared safely, and read back as it was written."""

import json
import math
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy
from optuna.trial import TrialState
from support.instant import WORKLOAD, Instant, report, runner_of

from autotune.scoring.objective import Objective
from autotune.search.observation import MEASURED_ATTR
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.rule import Setting
from autotune.study.folder import repeat_path
from autotune.study.spec.spec import LONGEST_NAME
from autotune.study.storage import analysed, database, records
from autotune.study.storage.database import StoreError
from autotune.study.storage.optuna_tables import set_study_attr
from autotune.study.storage.records import SearchRecord, StudyRecord
from autotune.trial.folder import write_record
from autotune.trial.result import Outcome, TrialResult

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
RECORD = StudyRecord(
    fingerprint={"space": {"zero_stage": {"choices": [0, 1]}}, "seed": 0},
    target="../../model.py",
    world_size=2,
    base_config={"bf16": {"enabled": True}},
    baseline=Candidate(micro_batch_size=8).key,
    objectives=[Objective(name="latency", metric="step_time_s")],
    reference=None,
    workload=WORKLOAD,
    search=SearchRecord(space={}, samples_per_rank=None, setting=Setting(), memory_limit_bytes=None, bounds=[]),
)


@pytest.fixture
def url(tmp_path):
    return records.default_url(tmp_path / "studies")


def begin(url, name="s", n=0, directions=("minimize",)):
    """A study with n told trials."""
    study = records.create_study(
        database.open_storage(url), name, list(directions), [f"m{i}" for i in range(len(directions))]
    )
    for number in range(n):
        tell(study, Candidate(micro_batch_size=number + 1))
    return study


def tell(study, candidate, outcome=Outcome.COMPLETE, state=None, **metrics):
    asked = study.ask()
    asked.set_user_attr(CANDIDATE_ATTR, candidate.key)
    values = metrics or {"step_time_s": 0.1}
    data = {
        "outcome": outcome,
        "reason": "",
        "phase": "done",
        "wall_s": 1.0,
        "metrics": values,
        "ci95": {},
        "feasible": True,
    }
    text = json.dumps(data | {"censored": [], "caveats": []})
    study._storage.set_trial_system_attr(asked._trial_id, MEASURED_ATTR, text)
    study.tell(asked, None if state else [1.0] * len(study.directions), state=state)
    return asked.number


# Opening.


def test_the_database_and_its_folder_are_made(tmp_path, url):
    database.open_storage(url)
    assert (tmp_path / "studies" / "autotune.db").exists()


def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    said = ["the database system is starting up"] * 7

    def storage(url, connect):
        if said:
            raise sqlalchemy.exc.OperationalError("", {}, Exception(f"FATAL:  {said.pop(0)}"))
        return "open"

    monkeypatch.setattr(database, "Storage", storage)
    monkeypatch.setattr(database.time, "sleep", lambda _: None)
    assert database._made("postgresql://h/d", {}) == "open"
    said[:] = ["the database system is starting up"] * 5 + ["already exists"] * 20
    with pytest.raises(sqlalchemy.exc.OperationalError):  # what others are not about to make is not waited for
        database._made("postgresql://h/d", {})
    said[:] = ["the database system is starting up"]
    monkeypatch.setattr(database, "STARTS_WITHIN_S", -1.0)
    with pytest.raises(database.StoreAway, match=r"ann:\*\*\*@h/d: FATAL.*starting up; the same command") as away:
        database.open_storage("postgresql://ann:secret12@h/d")
    assert away.value.status == 75


def test_sqlite_writes_ahead_so_that_readers_do_not_wait(tmp_path, url):
    database.open_storage(url)
    connection = sqlite3.connect(tmp_path / "studies" / "autotune.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_nothing_is_made_for_one_who_only_reads(tmp_path, url):
    with pytest.raises(StoreError, match="nothing has been tuned there yet"):
        database.open_storage(url, create=False)
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize("name", ["feature%2Fx", "100%", "a b", "ü#", "{x}"])
def test_the_database_lies_beside_the_studies_whatever_their_folder_is_called(tmp_path, monkeypatch, name):
    """SQLAlchemy reads `%2F` in a URL: the file lay elsewhere, and what reads a study from its folder found none."""
    (place := tmp_path / "project" / name).mkdir(parents=True)
    monkeypatch.chdir(place)
    records.create_study(database.open_storage(records.default_url(place / "studies")), "s", ["minimize"], ["m"])
    assert records.study_names(database.open_storage(records.default_url(Path("studies")), create=False)) == ["s"]
    assert [path.name for path in (tmp_path / "project").iterdir()] == [name]


def test_a_url_with_options_finds_its_file(tmp_path):
    url = f"sqlite:///{tmp_path}/own.db?timeout=3"
    begin(url)
    assert records.study_names(database.open_storage(url, create=False)) == ["s"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("autotune.db", "Pass a SQLAlchemy URL, for example sqlite:///"),
        ("bogus://x", "bogus"),
        ("sqlite://", "gone at the end of the run"),
        ("sqlite:///:memory:", "gone at the end of the run"),
        ("sqlite:////proc/autotune.db", "unable to open database file"),
        ("sqlite:////proc/none/autotune.db", "/proc/none"),
        ("postgresql://ann:secret@localhost:1/x", "driver for postgresql is not installed|Connection refused"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url, says):
    with pytest.raises(StoreError, match=says) as error:
        database.open_storage(url)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("content", [b"trials: 3\n" * 200, bytes(range(256)) * 40])
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "x.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"file is not a database.*move it away: then `autotune run` takes up"):
        database.open_storage(f"sqlite:///{tmp_path}/x.db")
    assert (tmp_path / "x.db").read_bytes() == content


def test_the_schema_of_another_optuna_is_refused_also_after_one_that_was_not(tmp_path, url):
    database.open_storage(url).engine.dispose()
    with sqlite3.connect(tmp_path / "studies" / "autotune.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v1.3.0.a'")
    with pytest.raises(StoreError, match="no longer compatible"):
        database.open_storage(url)


def test_a_full_disk_is_told_as_such(url, monkeypatch):
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("autotune.study.storage.database.Storage", full)
    with pytest.raises(StoreError, match=r"disk is full\. Free some space"):
        database.open_storage(url)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "studies").write_text("")
    with pytest.raises(StoreError, match="File exists"):
        database.open_storage(records.default_url(tmp_path / "studies"))


def test_a_database_that_fails_in_mid_run_ends_it_with_a_sentence(url):
    words = r"disk I/O error\. Check the disk, which may be full, and the limit .*; what was told before is kept"
    with pytest.raises(StoreError, match=words), database.failing_in_words(url):
        raise sqlalchemy.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("disk I/O error"))


@pytest.mark.parametrize("endings", [("",), ("", "-wal", "-shm")])
def test_a_database_that_is_removed_while_a_study_runs_ends_it_with_a_sentence(tmp_path, endings):
    executor = Instant()

    def removing(candidate):
        if len(executor.ran) == 3:
            for ending in endings:
                (tmp_path / f"autotune.db{ending}").unlink(missing_ok=True)
        return report(candidate)

    executor.behaviour = removing
    # Who finds it first: a connection that was open, or a new one, as of the thread that keeps the lease.
    with pytest.raises(
        StoreError, match=r"the file (was removed while it was in use|is gone)\. Put (the old one|it) back"
    ):
        runner_of(tmp_path, executor, trials=6, finalists=0).run()


def test_a_database_that_is_replaced_while_a_study_runs_ends_it_with_a_sentence(tmp_path, url):
    executor = Instant()
    begin(url)

    def replacing(candidate):
        if len(executor.ran) == 3:
            Path(database.file_of(url)).replace(tmp_path / "autotune.db")
        return report(candidate)

    executor.behaviour = replacing
    with pytest.raises(StoreError, match=r"was replaced by another file while it was in use\. Put the old one back"):
        runner_of(tmp_path, executor, trials=6, finalists=0).run()


def test_a_database_in_a_folder_that_cannot_be_written_to_is_not_taken_for_a_wrong_url(url, monkeypatch):
    """SQLite's words for it, `unable to open database file`, are those for a file that is not there."""
    begin(url)
    monkeypatch.setattr(database.os, "access", lambda *_: False)
    monkeypatch.setattr(database, "_made", lambda *_: sqlite3.connect("/nowhere/at/all.db"))
    with pytest.raises(StoreError, match=r"unable to open database file\. .* make .*/studies writable for you"):
        database.open_storage(url, create=False)


def test_who_may_not_write_reads_what_a_run_has_told_so_far_and_what_it_left(url, monkeypatch):
    """Root may write anywhere, so that only the answer to whether this user may is made up."""
    first = begin(url, "one")  # while it is open its files stay, whenever garbage is collected
    folder = Path(database.file_of(url)).parent
    there = sorted(folder.iterdir())
    monkeypatch.setattr(database.os, "access", lambda *_: False)
    reader = database.open_storage(url, create=False)
    assert records.study_names(reader) == ["one"] and sorted(folder.iterdir()) == there
    with pytest.raises(StoreError, match=r"readonly database\. Make the file and its folder writable for you"):
        records.delete_study(reader, "one")
    run = begin(url, "two")
    assert records.study_names(reader) == ["one", "two"]
    del first, run


def test_who_only_reads_sees_a_new_file_and_makes_none(url):
    path = Path(database.file_of(url))
    begin(url, "one")
    reader = database.open_storage(url)
    assert records.study_names(reader) == ["one"]
    path.rename(path.with_name("old.db"))
    with pytest.raises(StoreError, match="the file was removed while it was in use"):
        records.study_names(reader)
    assert not path.exists()
    begin(url, "two")
    assert records.study_names(reader) == ["two"]


# Studies.


def test_an_unknown_study_is_refused_with_those_that_are_known(url):
    begin(url, "one")
    begin(url, "two")
    with pytest.raises(StoreError, match=r"no study 'three' in .*Known: one, two\."):
        records.load_study(database.open_storage(url), "three")


def test_making_a_study_again_opens_it(url):
    begin(url, n=2)
    assert len(begin(url).trials) == 2


def test_studies_with_other_objectives_live_side_by_side(url):
    begin(url, "one", 1)
    begin(url, "two", 1, ["minimize", "maximize"])
    storage = database.open_storage(url)
    assert [len(records.load_study(storage, name).directions) for name in records.study_names(storage)] == [1, 2]


def test_a_study_is_deleted_with_its_trials_and_no_other_one(url):
    begin(url, "one", 3)
    begin(url, "two", 2)
    records.delete_study(database.open_storage(url), "one")
    assert records.study_names(database.open_storage(url)) == ["two"]
    assert len(begin(url, "one").trials) == 0


def test_deleting_a_study_that_is_not_there_is_no_error(url):
    records.delete_study(database.open_storage(url), "none")


def test_a_hundred_studies_are_listed_in_order(url):
    storage = database.open_storage(url)
    for number in reversed(range(100)):
        records.create_study(storage, f"s{number:03d}", ["minimize"], ["m"])
    assert records.study_names(storage) == [f"s{number:03d}" for number in range(100)]


def test_two_studies_are_written_at_once_and_no_trial_is_missing(tmp_path, url):
    begin(url, "one"), begin(url, "two")
    failures = []

    def write(name):
        try:
            study = records.load_study(database.open_storage(url), name)
            for number in range(25):
                tell(study, Candidate(micro_batch_size=number + 1))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    storage = database.open_storage(url)
    assert [len(records.told_trials(records.load_study(storage, name))) for name in ("one", "two")] == [25, 25]
    assert sqlite3.connect(tmp_path / "studies" / "autotune.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)


# The record.


def test_the_record_is_read_back_as_it_was_kept(tmp_path, url):
    study = begin(url)
    records.keep(study, RECORD, tmp_path)
    assert records.record(records.load_study(database.open_storage(url), "s")) == RECORD


def test_a_study_that_is_not_ours_has_no_record(url):
    assert records.record(begin(url, n=1)) is None


def test_a_record_of_another_version_is_refused_with_what_to_do(tmp_path, url):
    study = begin(url)
    records.keep(study, RECORD, tmp_path)
    storage, number = study._storage, study._study_id
    data = json.loads(storage.get_study_system_attrs(number)[records.RECORD_ATTR])
    del data["workload"]["float_buffers"]
    storage.set_study_system_attr(number, records.RECORD_ATTR, json.dumps(data))
    with pytest.raises(StoreError, match="another version of autotune; run it again with --fresh"):
        records.record(records.load_study(database.open_storage(url), "s"))


# Trials.


def test_of_all_studies_the_one_that_ran_last_comes_first_and_those_without_a_record_are_left_out(
    tmp_path, url, monkeypatch
):
    for name, ends_s in (("a", 1.0), ("b", 3.0), ("c", 2.0), ("strange", 4.0)):
        study = begin(url, name, n=1)
        records.ENDS_S.store(study, ends_s)
        if name != "strange":
            records.keep(study, replace(RECORD, target=name), tmp_path / name)
    set_study_attr(begin(url, "c"), records.RECORD_ATTR, "{}")  # of another version
    storage = database.open_storage(url)
    assert [(name, kept.target) for name, kept in records.kept_records(storage)] == [("b", "b"), ("a", "a")]
    assert [(row["study"], row["trial"]) for row in records.measurements(storage, "a")] == [("a", 0)]
    there = list(records.kept_records(storage))
    monkeypatch.setattr(records, "kept_records", lambda _: [("deleted meanwhile", RECORD), *there])
    assert [row["study"] for row in records.measurements(storage)] == ["b", "a"]  # it ended with `no study`


def test_a_lost_trial_is_not_told_and_a_failed_one_is(url):
    study = begin(url)
    tell(study, Candidate(micro_batch_size=1))
    tell(study, Candidate(micro_batch_size=2), Outcome.OOM, TrialState.PRUNED)
    tell(study, Candidate(micro_batch_size=3), Outcome.LOST, TrialState.FAIL)
    study.ask()
    assert [told.number for told in records.told_trials(study)] == [0, 1]
    assert [left.number for left in records.running(study)] == [3]


def repeat(
    folder: Path, number: int, n: int, candidate: Candidate, outcome: Outcome = Outcome.COMPLETE, phase: str = "step"
) -> None:
    by_phase = {phase: n * 100}
    result = TrialResult(
        outcome=outcome, candidate=candidate.values(), peak_memory_bytes=n * 100, memory_by_phase_bytes=by_phase
    )
    write_record(repeat_path(folder, number, n) / "result.json", result)


def test_re_measurements_are_read_with_their_trial_whatever_their_numbers(tmp_path, url):
    study, candidate = begin(url), Candidate(micro_batch_size=1)
    tell(study, candidate, step_time_s=0.1)
    for n in (3, 11):
        repeat(tmp_path, 0, n, candidate)
    (seen,) = analysed.measured(study, tmp_path, RECORD)
    assert {n: found["peak_memory_bytes"] for n, found in seen.repeats.items()} == {3: 300, 11: 1100}
    assert list(seen.repeats) == [3, 11]
    assert seen.metrics == {"step_time_s": 0.1}


@pytest.mark.parametrize("phase", ["save", "evaluate"])
def test_the_peak_of_a_trial_that_saved_when_it_was_measured_again_alone_is_that_with_saving(tmp_path, url, phase):
    """That of a pipeline was a mean of the two: no worst batch was fed to it by which they could be told apart."""
    study, candidate = begin(url), Candidate(micro_batch_size=1)
    tell(study, candidate, peak_memory_bytes=100)
    for n in (2, 3):
        repeat(tmp_path, 0, n, candidate, phase=phase)
    (seen,) = analysed.measured(study, tmp_path, RECORD)
    assert seen.metrics == {"peak_memory_bytes": 300}


def test_a_trial_has_what_the_model_of_all_trials_foretells_of_it(tmp_path, url):
    """A slow one among alike ones is foretold to be like them."""
    study = begin(url)
    for size, step_time_s in zip((1, 2, 3, 4, 6, 8), (0.1, 0.2, 0.3, 0.8, 0.6, 0.8), strict=True):
        tell(study, Candidate(micro_batch_size=size), step_time_s=step_time_s)
    tell(study, Candidate(micro_batch_size=12), Outcome.OOM, TrialState.PRUNED)
    *seen, failed = analysed.measured(study, tmp_path, RECORD)
    assert math.exp(seen[3].forecast.mean - seen[2].forecast.mean) < 1.9 and failed.forecast is None
    alike, far = (np.dot(seen[0].forecast.row, seen[n].forecast.row) for n in (1, 5))
    assert alike > far


def test_a_re_measurement_that_failed_or_is_of_another_candidate_does_not_count(tmp_path, url):
    """A study folder may outlive its database."""
    study, candidate = begin(url), Candidate(micro_batch_size=1)
    tell(study, candidate)
    repeat(tmp_path, 0, 1, replace(candidate, zero_stage=1))
    repeat(tmp_path, 0, 2, candidate, Outcome.OOM)
    (repeat_path(tmp_path, 0, 3)).mkdir()
    (repeat_path(tmp_path, 0, 4)).mkdir()
    (repeat_path(tmp_path, 0, 4) / "result.json").write_text('{"outcome": "compl')
    (seen,) = analysed.measured(study, tmp_path, RECORD)
    assert seen.repeats == {}


def test_a_folder_beside_the_named_database_is_found(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "s").mkdir(parents=True)
    assert records.study_folder("s", here, records.default_url(there)) == there / "s"
    (here / "s").mkdir(parents=True)
    assert records.study_folder("s", here, records.default_url(there)) == here / "s"
    assert records.study_folder("new", here, "postgresql://h/d") == here / "new"
    longest = "n" * LONGEST_NAME
    assert records.study_folder(f"{longest}.retune-1", here, "postgresql://h/d") == here / longest / "retunes" / "0001"
