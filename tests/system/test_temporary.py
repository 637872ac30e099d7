"""Which temporary folders are those of a killed server."""

import tempfile

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
