"""Which temporary folders are those of a killed server."""

import contextlib
import os
import tempfile
import time

from autotune.errors import UserError
from autotune.system import temporary

RUN = "0123456789abcdef0123456789abcdef"


def test_the_folders_of_one_server_or_of_all_of_a_run_are_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    marks = [f"{RUN}.aaaa1111", f"{RUN}.bbbb1111", f"f{RUN[1:]}.aaaa1111"]
    folders = [tmp_path / f"{temporary.prefix(mark)}x" for mark in marks]
    for folder in (*folders, tmp_path / "autotune-"):
        (folder / "below").mkdir(parents=True)
    temporary.remove_left(marks[0])
    assert [folder.exists() for folder in folders] == [False, True, True]
    temporary.remove_left(RUN)
    assert [folder.exists() for folder in folders] == [False, False, True] and (tmp_path / "autotune-").exists()


def test_a_folder_of_logs_stays_for_a_day_where_an_error_names_it(tmp_path, monkeypatch):
    """Each check that failed left one more folder in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for named in (True, False):
        with contextlib.suppress(UserError), temporary.log_folder("autotune-check") as folder:
            raise UserError(f"see {folder / 'log'}" if named else "it cannot be used")
        assert folder.is_dir() == named
    (left,) = tmp_path.iterdir()
    with temporary.folder("autotune-launch") as folder:
        assert folder.is_dir()
    assert not folder.exists()
    for age_s, stays in ((3600, True), (90_000, False)):
        os.utime(left, (time.time() - age_s,) * 2)
        with temporary.log_folder("autotune-check") as folder:
            assert left.is_dir() == stays and folder != left
