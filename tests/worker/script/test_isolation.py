"""Files and folders that the ranks of a script make: removed, or told."""

import os
from pathlib import Path
from types import SimpleNamespace

from autotune.worker.script.isolation import Isolation


def rank(root: Path) -> Isolation:
    recorder = SimpleNamespace(folder=SimpleNamespace(path=root / "trial"))
    script = SimpleNamespace(working_dir=str(root))
    return Isolation(SimpleNamespace(recorder=recorder, script=script, scratch=root / "trial" / "scratch"))


def test_a_folder_that_one_rank_made_within_another_ranks_is_removed_whoever_ends_first(tmp_path):
    first, second = rank(tmp_path), rank(tmp_path)
    for maker, folder in ((first, tmp_path / "out"), (second, tmp_path / "out" / "checkpoints")):
        maker._audit("os.mkdir", (str(folder),))
        folder.mkdir()
    kept = tmp_path / "own"
    kept.mkdir()
    first._audit("os.mkdir", (str(kept),))  # it was there before
    first.close()
    second.close()
    assert not (tmp_path / "out").exists() and kept.exists()


def test_a_librarys_cache_in_the_working_folder_is_no_file_of_the_scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    found = rank(tmp_path)
    for path in (tmp_path / "cache" / "datasets" / "text_builder.lock", tmp_path / "metrics.json"):
        found._audit("open", (str(path), "w", os.O_WRONLY))
    assert found._files == [str(tmp_path / "metrics.json")]


def test_files_that_a_script_writes_are_told_in_one_sentence(tmp_path):
    found, said = rank(tmp_path), []
    found._context.once = said.append
    for i in range(7):
        found._audit("open", (str(tmp_path / f"{i}.log"), "w", os.O_WRONLY))
    found.close()
    (sentence,) = said
    assert str(tmp_path / "4.log") in sentence and sentence.endswith(" and 2 more")
