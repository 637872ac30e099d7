"""Two projects in one database are apart: names, `--fresh`, `delete`, schedules and their daemon."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.instant import Instant, Watcher, plan_of, spec_of

from autotune import session
from autotune.errors import UserError
from autotune.retune.schedule import Daemon
from autotune.session import OpenStudy
from autotune.study.runner import Runner
from autotune.study.storage import project, records
from autotune.study.storage.database import open_storage


def runner_in(studies: Path, url: str) -> Runner:
    return Runner(plan_of(spec_of(trials=2, finalists=0)), Instant(), studies / "s", url, Watcher())


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[str, Path, Path]:
    """A database with the study `s` of the first of two folders of studies."""
    root = tmp_path_factory.mktemp("projects")
    url = f"sqlite:///{root}/shared.db"
    runner_in(root / "a", url).run()
    return url, root / "a", root / "b"


def test_a_study_of_another_project_is_not_run_deleted_or_forgotten(shared):
    url, a, b = shared
    for refused in (
        runner_in(b, url).run,
        OpenStudy("s", b / "s", url).check_own,
        lambda: session._forget("s", open_storage(url), b / "s", Instant()),
    ):
        with pytest.raises(UserError, match=f"belongs to another project, {a} on"):
            refused()
    runner = runner_in(a, url)
    runner.run()  # its own goes on
    assert len(runner.state.measured()) == 2


def test_a_folder_that_was_moved_takes_its_key_along(shared):
    url, a, b = shared
    moved = a.with_name("moved")
    a.rename(moved)
    OpenStudy("s", moved / "s", url).check_own()
    moved.rename(a)
    assert project.key_of(a) == project.key_of(a) != project.key_of(b)


def test_a_daemon_starts_its_own_studies_and_leads_beside_that_of_another_project(shared, monkeypatch):
    url, a, b = shared
    started = []
    monkeypatch.setattr(Daemon, "start", lambda self, schedule: started.append(self.studies))
    daemons = [Daemon(url, studies, lambda _: None) for studies in (b, a)]
    daemons[0].history.add_schedule(study="s", every_s=60.0, cron=None, on_change=False, next_run_at=time.time() - 1)
    for daemon in daemons:
        daemon.look()
    assert [daemon.leads for daemon in daemons] == [True, True]
    assert started == [a]


def test_a_damaged_key_is_replaced(tmp_path):
    (tmp_path / project.FILE).write_text("nonsense")
    key = project.key_of(tmp_path)
    assert key == project.key_of(tmp_path) and "nonsense" not in (key, (tmp_path / project.FILE).read_text())


def test_runs_that_begin_at_once_in_a_new_folder_have_one_key(tmp_path, monkeypatch):
    write, all_here = project.files.write_text, threading.Barrier(4)

    def slowly(*args):
        time.sleep(0.05)
        write(*args)

    def key(_):
        all_here.wait()
        return project.key_of(tmp_path / "studies")

    monkeypatch.setattr(project.files, "write_text", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(key, range(4)))) == 1


def test_reading_another_projects_study_writes_no_key(shared, tmp_path):
    assert OpenStudy("s", tmp_path / "s", shared[0]).report.trials
    assert not project.is_own(records.load_study(open_storage(shared[0]), "s"), tmp_path)
    assert list(tmp_path.iterdir()) == []
