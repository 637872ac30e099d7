"""Atomic files, errors of a disk in words, and studies on a disk that is full or cannot be written to."""

import contextlib
import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest
from support.instant import Instant, Watcher, report, runner_of

from autotune.errors import UserError
from autotune.report import load
from autotune.report.files import write_answer
from autotune.study import events
from autotune.study.lock import study_lock
from autotune.study.storage import records
from autotune.study.storage.database import StoreError, failing_in_words, open_storage
from autotune.system import files
from autotune.trial import folder
from autotune.trial.result import Outcome

MIB = 1 << 20


def refuse(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 16 MiB, and a function that leaves so many bytes of it free."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def leave(n_bytes):
        filler = place / "filler"
        filler.unlink(missing_ok=True)
        found = os.statvfs(place)
        with contextlib.suppress(OSError), open(filler, "wb") as file:
            file.write(bytes(max(0, found.f_bfree * found.f_frsize - n_bytes)))

    yield place, leave
    subprocess.run(["umount", "-l", str(place)], check=True)


# One file.


def test_a_file_that_cannot_be_synced_stays_as_it_was_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_text(path, "old")
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as error:
        files.write_text(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_one_version_or_the_other_whole(tmp_path):
    path, stop, seen = tmp_path / "x.json", threading.Event(), set()
    versions = ["a" * 100_000, "b" * 200_000]
    files.write_text(path, versions[0], sync=False)

    def read():
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(200):
        files.write_text(path, versions[n % 2], sync=False)
    stop.set()
    reader.join()
    assert seen <= set(versions)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_the_file_is_named_and_not_its_draft(tmp_path):
    long = tmp_path / ("x" * 250)
    files.write_text(long, "x")
    assert long.read_text() == "x"
    files.draft_of(tmp_path / "y").mkdir()  # the draft cannot be opened
    for path in (tmp_path / "y", tmp_path):
        with pytest.raises(IsADirectoryError) as error:
            files.write_text(path, "x")
        assert error.value.filename == str(path)


def test_behind_a_link_its_goal_is_written_and_a_pipe_is_written_to(tmp_path):
    goal, link = tmp_path / "goal", tmp_path / "link"
    goal.write_text("old")
    link.symlink_to("goal")
    files.write_text(link, "new")
    assert link.is_symlink() and goal.read_text() == "new"
    read, write = os.pipe()
    files.write_text(Path(f"/proc/self/fd/{write}"), "through a pipe", named=True)
    os.close(write)
    assert os.read(read, 100) == b"through a pipe"
    os.close(read)
    files.write_text(Path(os.devnull), "gone", named=True)
    assert Path(os.devnull).is_char_device()


def test_a_link_that_leads_out_of_its_folder_is_replaced_unless_the_user_named_it(tmp_path):
    goal, folder = tmp_path / "precious", tmp_path / "study"
    goal.write_text("old")
    folder.mkdir()
    (folder / "link").symlink_to(goal)
    files.write_text(folder / "link", "new")
    assert goal.read_text() == "old" and (folder / "link").read_text() == "new" and not (folder / "link").is_symlink()
    (folder / "named").symlink_to(goal)
    files.write_text(folder / "named", "mine", named=True)
    assert goal.read_text() == "mine" and (folder / "named").is_symlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="remove it"):
        files.write_text(folder / "pipe", "x")
    with pytest.raises(ValueError, match="no regular file"):
        files.read_regular(folder / "pipe")


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    alive = files.draft_of(tmp_path / "a.json")
    dead, beside = alive.with_suffix(".999999999"), tmp_path / ".a.json.01234567.1.999999999"
    old = beside.with_name(".b.json.01234567.1.999999999")  # of another host, whose processes are not seen here
    others = [tmp_path / ".lock", tmp_path / ".cache.999999999"]  # the user's may end in a number, too
    for path in (dead, alive, beside, old, *others):
        path.touch()
    os.utime(old, (0, 0))
    files.remove_drafts(tmp_path)
    assert set(tmp_path.iterdir()) == {alive, beside, *others}


def test_threads_that_write_one_file_leave_the_text_of_one_of_them(tmp_path):
    """They shared a draft, which the first of them moved away."""
    path, texts, meet = tmp_path / "granted.json", ["1" * 9, "2" * 999], threading.Barrier(2)
    failed = []

    def write(text):
        try:
            for _ in range(100):
                meet.wait()
                files.write_text(path, text, sync=False)
        except OSError as error:
            failed.append(error)
            meet.abort()

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and path.read_text() in texts and [*tmp_path.iterdir()] == [path]


def test_a_file_may_have_the_longest_name_that_there_is(tmp_path):
    files.write_text(path := tmp_path / ("\N{CJK UNIFIED IDEOGRAPH-5B57}" * 85), "x")
    assert len(os.fsencode(path.name)) == 255 and path.read_text() == "x"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "Free some space"), (errno.EROFS, "Make it writable"), (errno.EFBIG, r"ulimit -f")],
)
def test_what_a_disk_answers_is_said_with_what_to_do(number, remedy):
    said = files.words(OSError(number, os.strerror(number), "studies/a/front.json"))
    assert said.startswith(f"studies/a/front.json: {os.strerror(number)}. ") and remedy in said


def test_an_error_that_is_no_file_s_is_left_alone():
    assert files.words(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) is None
    assert (
        files.words(FileNotFoundError(errno.ENOENT, "No such file or directory", "x.yaml"))
        == "x.yaml: No such file or directory"
    )


def test_of_a_file_that_somebody_else_wrote_nothing_but_the_end_of_a_plain_one_is_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert [files.tail(tmp_path / name, 10) for name in ("fifo", "folder", "endless", "none")] == [None] * 4
    (tmp_path / "file").write_bytes(b"0123456789")
    assert files.tail(tmp_path / "file", 4) == b"6789" and files.tail(tmp_path / "file", 4, whole=True) is None


# A full disk.


@pytest.mark.process
def test_a_full_file_system_is_seen(disk):
    place, leave = disk
    files.check_space(place)
    leave(files.LEAST_FREE_BYTES // 2)
    with pytest.raises(OSError, match="No space left on device") as error:
        files.check_space(place)
    assert error.value.filename == str(place)
    with pytest.raises(OSError, match="uota"):
        files.check_space(Path(), "OSError: [Errno 122] Disk quota exceeded")


@pytest.mark.process
def test_a_study_on_a_full_disk_ends_in_a_sentence_and_goes_on_when_there_is_room(disk):
    """Trial files, journal, database and answer all lie there; the disk is full from the third trial on."""
    place, leave = disk
    ran = []

    def filling(candidate):
        ran.append(candidate)
        if len(ran) == 3:
            leave(0)
        return report(candidate)

    url = records.default_url(place)
    with (
        pytest.raises(StoreError, match=r"what was told before is kept\. Run the same command again") as error,
        failing_in_words(url),
    ):
        runner_of(place, Instant(filling), trials=6, finalists=0, watcher=events.Journal(place / "s")).run()
    assert "\n" not in str(error.value)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(place / "s" / "front.json", "x" * MIB)
    leave(8 * MIB)
    watcher = Watcher()
    runner = runner_of(place, Instant(), trials=6, finalists=0, watcher=watcher)
    runner.run()
    told = records.told_trials(runner.study)
    assert len(told) == 6 and "resuming" in watcher.said[0] and records.running(runner.study) == []
    assert {records.told_data(each)["outcome"] for each in told} == {"complete"}
    list(write_answer(load.load("s", url, place / "s"), place / "s"))
    assert folder.read_record(place / "s" / "recommended.json", dict)["picks"]


def test_a_trial_that_failed_on_a_full_disk_is_not_told(tmp_path, monkeypatch):
    executor = Instant()
    executor.behaviour = lambda candidate: (
        None if len(executor.ran) == 3 else report(candidate)
    )  # a rank that could not even report
    monkeypatch.setattr(files, "_is_full", lambda _: len(executor.ran) == 3)
    with pytest.raises(StoreError, match=r"No space left on device\. Free some space"), failing_in_words("sqlite:///x"):
        runner_of(tmp_path, executor, trials=6, finalists=0).run()
    again = runner_of(tmp_path, Instant(), trials=6, finalists=0)
    again.run()
    outcomes = [records.told_data(each)["outcome"] for each in records.told_trials(again.study)]
    assert outcomes == [Outcome.COMPLETE] * 6


@pytest.mark.process
def test_a_study_on_a_full_disk_can_still_be_read(disk):
    """A look at it ended in SQLite's `disk I/O error`, which opens its log even to read."""
    place, leave = disk
    runner = runner_of(place, Instant(), trials=2, finalists=0)
    runner.run()
    runner.storage.engine.dispose()
    leave(0)
    url = records.default_url(place)
    assert len(load.load("s", url, place / "s").trials) == 2
    with pytest.raises(UserError, match=r"Check the disk, which may be full|disk is full"):
        open_storage(url)


@pytest.mark.process
def test_a_read_only_study_folder_is_refused_in_a_sentence(disk):
    place, _ = disk
    (place / "s").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    said = r"s/\.lock: Read-only file system\. Make it writable"
    with pytest.raises(UserError, match=said), failing_in_words("sqlite:///x"), study_lock(place / "s"):
        pass
    with pytest.raises(UserError, match=r"sqlite:///.*autotune\.db: unable to open database file"):
        open_storage(records.default_url(place))


def test_a_private_file_is_nobody_elses_from_its_first_byte_on(tmp_path, monkeypatch):
    seen, replace = [], os.replace
    monkeypatch.setattr(
        os, "replace", lambda draft, goal: (seen.append(Path(draft).stat().st_mode & 0o777), replace(draft, goal))
    )
    files.write_text(tmp_path / "secret", "x", private=True)
    assert seen == [0o600] and (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "[" * 99_999])
def test_what_is_no_json_is_refused_with_one_kind_of_error(text):
    with pytest.raises(ValueError):
        files.json_of(text)
