"""A study followed from another terminal: the same lines, its end, and a sentence where there is nothing to follow."""

import io
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import called, one_sentence
from support.instant import Instant, failed, finished, report, runner_of
from support.zoo import wait_until

from autotune import session
from autotune.cli import status
from autotune.errors import UserError
from autotune.report import load
from autotune.report.progress import ProgressView
from autotune.study import events
from autotune.study.lock import run_under_way, study_lock
from autotune.study.storage import database, records
from autotune.study.storage.history import History
from autotune.trial.result import Outcome


def view():
    """A view that is no terminal, and what it shows."""
    text = io.StringIO()
    return ProgressView(Console(file=text, width=400, highlight=False)), text


def ran(studies: Path, watcher, **changes):
    """A study of trials that take no time, one of them crashed."""
    behaviour = lambda c: failed(Outcome.CRASHED, "it broke") if c.micro_batch_size == 2 else report(c)  # noqa: E731
    runner_of(studies, Instant(behaviour), watcher=watcher, trials=8, **changes).run()


def test_another_terminal_sees_what_the_run_itself_shows(tmp_path):
    here, shown_here = view()
    there, shown_there = view()
    folder = tmp_path / "studies" / "s"
    with study_lock(folder):
        watched = events.Broadcast(events.Journal(folder), here)
        watched.doing("profiling")
        follower = threading.Thread(target=status.follow, args=(folder, os.getpid(), there))
        follower.start()
        ran(tmp_path / "studies", watched)
        assert wait_until(lambda: shown_there.getvalue() == shown_here.getvalue())
        assert follower.is_alive()
    follower.join(60)
    assert not follower.is_alive()
    said = shown_there.getvalue()
    assert "profiling" in said and "it broke" in said and "base" in said and "again" in said and "best so far" in said


@pytest.mark.system
def test_whoever_comes_later_sees_it_from_the_beginning_and_no_line_twice(tmp_path):
    here, shown_here = view()
    there, shown_there = view()
    folder = tmp_path / "studies" / "s"
    with study_lock(folder):
        watched = events.Broadcast(events.Journal(folder), here)
        ran(tmp_path / "studies", watched)
        follower = threading.Thread(target=status.follow, args=(folder, os.getpid(), there))
        follower.start()
        assert wait_until(lambda: shown_there.getvalue() == shown_here.getvalue())
        time.sleep(3 * status.LOOK_S)
    follower.join(60)
    assert shown_there.getvalue() == shown_here.getvalue()


def test_the_journal_of_an_earlier_run_is_passed_by(tmp_path):
    events.Journal(tmp_path).say("of old")
    follower = events.JournalReader(tmp_path, os.getpid() + 1)
    assert list(follower.events()) == []
    follower = events.JournalReader(tmp_path, os.getpid())
    assert [event.text for event in follower.events()] == ["of old"] and list(follower.events()) == []
    follower.close()


def test_a_line_that_is_only_half_written_is_shown_when_it_is_whole(tmp_path):
    path = events.path_in(tmp_path)
    path.parent.mkdir()
    path.write_text('{"run": 7}\n{"kind": "no')
    follower = events.JournalReader(tmp_path, 7)
    assert list(follower.events()) == []
    with path.open("a") as file:
        file.write('te", "text": "now"}\n')
    assert [event.text for event in follower.events()] == ["now"]
    follower.close()


def test_a_line_that_a_full_disk_cut_short_is_passed_by(tmp_path, monkeypatch):
    watched = events.Journal(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    watched.say("it is full")
    monkeypatch.undo()
    watched.say("there is room again")
    follower = events.JournalReader(tmp_path, os.getpid())
    assert [event.text for event in follower.events()] == ["there is room again"]
    follower.close()


def test_a_line_of_another_version_is_passed_by(tmp_path):
    events.Journal(tmp_path).say("known")
    with events.path_in(tmp_path).open("a") as file:
        file.write('{"kind": "tomorrow", "time_s": 0}\n[1]\n{"kind": "note", "text": "known, too", "new": 1}\n')
    follower = events.JournalReader(tmp_path, os.getpid())
    assert [event.text for event in follower.events()] == ["known", "known, too"]
    follower.close()


def test_in_a_terminal_seconds_pass_also_while_nobody_says_anything():
    text = io.StringIO()
    shown = ProgressView(Console(file=text, force_terminal=True, width=80, highlight=False))
    with shown:
        shown.emit(events.Event(kind=events.Kind.PHASE, text="importing torch", time_s=time.time() - 7))
        assert wait_until(lambda: len(set(re.findall(r"(\d+) s  importing torch", text.getvalue()))) > 1)


def test_what_is_quick_says_nothing_and_what_is_not_says_so_later():
    def shown(after_s: float) -> tuple[ProgressView, io.StringIO]:
        text = io.StringIO()
        return ProgressView(Console(file=text, force_terminal=True, width=80, highlight=False), after_s=after_s), text

    view, text = shown(3600.0)
    with view:
        view.doing("reading the trials")
        assert "reading" not in text.getvalue()
    view, text = shown(0.5)
    with view:
        view.doing("reading the trials")
        assert wait_until(lambda: "reading the trials" in text.getvalue())


def test_looking_does_not_keep_a_run_from_starting(tmp_path):
    stop = threading.Event()
    with study_lock(tmp_path):
        assert run_under_way(tmp_path) == os.getpid()

    def look():
        while not stop.is_set():
            run_under_way(tmp_path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(50):
            with study_lock(tmp_path):
                pass
    finally:
        stop.set()
        for looker in lookers:
            looker.join()
    assert run_under_way(tmp_path) is None and run_under_way(tmp_path / "nowhere") is None


def test_without_a_name_the_one_that_runs_is_meant_and_anything_else_is_said(tmp_path):
    with pytest.raises(UserError, match="no study lies in"):
        status.only_running(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text("")
    (tmp_path / "deleted").mkdir()
    (tmp_path / "deleted" / "study.yaml").write_text("")
    with pytest.raises(UserError, match=r"no study runs now.*: a, b"):
        status.only_running(tmp_path)
    with study_lock(tmp_path / "b"):
        assert status.only_running(tmp_path) == "b"
        with study_lock(tmp_path / "a"), pytest.raises(UserError, match="2 studies run now: a, b"):
            status.only_running(tmp_path)


@pytest.mark.system
def test_status_says_it_once_where_that_is_asked_for_or_nothing_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "studies").mkdir()
    monkeypatch.chdir(tmp_path)
    here, _ = view()
    with study_lock(tmp_path / "studies" / "s"):
        status.status(once=True)
        assert "no trial has ended yet" in capsys.readouterr().out
        status.status("s", as_json=True)
        assert json.loads(capsys.readouterr().out)["process"] == os.getpid()
        ran(tmp_path / "studies", here)
        status.status("s", once=True)
        assert f"process {os.getpid()} runs it now" in capsys.readouterr().out
        data = {"name": "s", "outcomes": {"complete": 1}, "n_trials": 1, "wall_s": 3.0, "running": 0, "process": 7}
        assert status.lines(data) == "study s: 1 trial (1 complete); process 7 runs it now"
        monkeypatch.setattr(load, "run_under_way", lambda _folder: 1)
        status.status("s", once=True)
        assert "next: Wait: another process runs the study now" in capsys.readouterr().out
        History(database.open_storage(records.default_url(tmp_path / "studies")).engine).begin("s", "asked")
        status.status("s", once=True)
        said = capsys.readouterr().out
        assert "re-tunes it now" in said and "next: A re-tuning runs now" in said and "so far" not in said
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
    status.status("s")
    said = capsys.readouterr().out
    assert said.startswith("study s: 8 trials") and "recommended" in said and "runs it now" not in said


def test_only_of_a_study_with_an_answer_is_asked_whether_that_is_still_right(tmp_path, monkeypatch, capsys):
    """A study in which all had failed was to be re-tuned, which is refused."""
    for name, behaviour in (("good", report), ("bad", lambda _: failed(Outcome.OOM, "it is too large"))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        runner_of(
            tmp_path / name / "studies", Instant(behaviour), watcher=events.Broadcast(), trials=2, finalists=1
        ).run()
        status.status("s")
        said = capsys.readouterr().out
        assert "changed since" in said and ("is the answer still right?" in said) is (name == "good")
    monkeypatch.chdir(tmp_path / "good")
    monkeypatch.setattr(session.OpenStudy, "target", Path("gone.py"))
    status.status("s")
    said = capsys.readouterr().out
    assert "the target's file is gone" in said and "still right?" not in said


@pytest.mark.system
def test_the_path_of_a_study_is_answered_with_its_name_and_folder(tmp_path, monkeypatch):
    finished(tmp_path / "studies", "mine")
    monkeypatch.chdir(tmp_path)
    for path in ("studies/mine", "studies/mine/", "studies/mine/study.yaml"):
        with pytest.raises(UserError, match=r"is a path; give the name of the study, mine$"):
            status.status(path)
    monkeypatch.chdir(tmp_path / "studies")
    with pytest.raises(UserError, match=f"the study, mine, in the folder {tmp_path}$"):
        status.status(str(tmp_path / "studies" / "mine"))
    with pytest.raises(UserError, match="`autotune ls studies` lists them"):
        status.status("no/such")


@pytest.fixture
def over(monkeypatch):
    """Set a moment after somebody begins to follow a run."""
    event, follow = threading.Event(), status.follow

    def followed(*given):
        threading.Timer(0.2, event.set).start()
        follow(*given)

    monkeypatch.setattr(status, "follow", followed)
    return event


def test_a_study_that_ends_while_it_is_followed_ends_with_its_answer(tmp_path, monkeypatch, capsys, over):
    monkeypatch.chdir(tmp_path)
    here, _ = view()
    (tmp_path / "studies").mkdir()
    begun = threading.Event()

    def run():
        with study_lock(tmp_path / "studies" / "s"):
            watched = events.Broadcast(events.Journal(tmp_path / "studies" / "s"), here)
            ran(tmp_path / "studies", watched)
            begun.set()
            over.wait(60)

    runner = threading.Thread(target=run)
    runner.start()
    assert begun.wait(60)
    assert status.status("s") == 0
    runner.join()
    found = capsys.readouterr()
    assert "it broke" in found.err and "recommended" in found.out


@pytest.mark.cells(1)
@pytest.mark.parametrize("ran", [True, False])
def test_a_scaling_that_is_measured_is_found_by_its_study_followed_and_said_to_be_in_use(
    tmp_path, monkeypatch, capsys, over, ran
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "studies" / "s" / status.SCALING
    begun = threading.Event()

    def measure():
        with study_lock(folder, "s"):
            events.Journal(folder).say("round 1 of 3: 2 ranks")
            begun.set()
            over.wait(60)
            if ran:
                page.write_text("what it found")

    page = folder.parent / "scaling.html"
    page.parent.mkdir(parents=True)
    page.write_text("of the last one")
    os.utime(page, (0, 0))
    measuring = threading.Thread(target=measure)
    measuring.start()
    assert begun.wait(60) and status.running_studies(tmp_path / "studies") == {"s": os.getpid()}
    with (
        pytest.raises(UserError, match=r"study 's' is being run by process .*`autotune status s`"),
        study_lock(folder, "s"),
    ):
        pass
    assert status.status() == 0
    measuring.join()
    found = capsys.readouterr()
    assert "round 1 of 3: 2 ranks" in found.err and ("studies/s/scaling.html" in found.out) == ran
    assert ran or "it ended without a result" in found.out


@pytest.mark.parametrize("begun", [False, True])
def test_a_study_that_has_just_begun_is_said_to_run_by_every_command(tmp_path, begun):
    """Until its baseline was measured they said that there is no such study."""
    if begun:
        ran(tmp_path / "studies", events.SILENT, name="other", finalists=0)
    with study_lock(tmp_path / "studies" / "s"):
        for command in (["explain", "s"], ["export", "s"], ["retune", "s"], ["changes", "s"], ["delete", "s", "--yes"]):
            said = one_sentence(called(*command, cwd=tmp_path))
            assert f"study 's' is being run by process {os.getpid()}" in said and "`autotune status s`" in said, command


def test_a_study_that_was_killed_before_its_baseline_was_told_holds_no_trial(tmp_path):
    """It was said to need less memory, as no configuration completed."""
    runner_of(tmp_path / "studies", Instant()).state.create()
    for command in (["status", "s"], ["explain", "s"], ["export", "s"], ["report", "s"]):
        assert "study 's' holds no trial yet" in one_sentence(called(*command, cwd=tmp_path)), command


@pytest.mark.system
def test_a_width_of_zero_is_one_that_is_not_known(tmp_path, monkeypatch):
    """The answer was left out."""
    ran(tmp_path / "studies", events.SILENT, finalists=0)
    monkeypatch.setenv("COLUMNS", "0")
    assert "recommended" in called("status", "s", cwd=tmp_path).stdout


def test_a_command_opens_the_database_of_its_study_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran(tmp_path / "studies", events.SILENT, finalists=0)
    opened, original = [], database.open_storage
    monkeypatch.setattr(database, "open_storage", lambda *args, **kw: opened.append(args) or original(*args, **kw))
    status.status("s", once=True, as_json=True)
    assert len(opened) == 1
