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


def test_a_folder_of_logs_stays_until_the_next_one_of_its_name_and_no_longer(tmp_path, monkeypatch):
    """Each check that failed left one more folder in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary.log_folder("autotune-check") as first:
        (first / "log").write_text("why")
        with temporary.log_folder("autotune-check") as beside:  # of a check at the same time
            assert first.is_dir()
        with temporary.log_folder("autotune-predict"):
            assert beside.is_dir()
    assert (first / "log").read_text() == "why"
    with temporary.log_folder("autotune-check", tmp_path) as last:
        assert [path for path in tmp_path.glob("autotune-check*") if path != last] == []


def test_a_folder_of_logs_is_not_taken_for_a_left_one_while_it_is_made(tmp_path, monkeypatch):
    make, beside = tempfile.mkdtemp, []

    def made_as_another_check_begins(**where):
        found = make(**where)
        if not beside:
            beside.append(temporary.log_folder("autotune-check", tmp_path))
            beside[0].__enter__()
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", made_as_another_check_begins)
    with temporary.log_folder("autotune-check", tmp_path) as first:
        assert first.is_dir() and first.name.startswith("autotune-check-")
    beside[0].__exit__(None, None, None)
