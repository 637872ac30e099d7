"""Folders that the ranks of a script made are gone after a trial."""

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
