"""The folder for a trial's temporary files."""

import tempfile

from autotune.worker.agent import temporary


def test_a_folder_in_which_sockets_would_have_too_long_a_path_is_not_made(tmp_path, monkeypatch):
    long = tmp_path / ("x" * temporary.MAX_PATH_BYTES)
    long.mkdir()
    for place in (long, tmp_path / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        assert temporary.make_folder() is None
    assert list(long.iterdir()) == [] and temporary.environment(None) == {}


def test_a_cache_that_the_user_has_moved_stays_there(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it is asked for the folder
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/data/tokens")
    assert temporary.environment(tmp_path / "t").keys() == {"TMPDIR", "TORCHINDUCTOR_CACHE_DIR"}
