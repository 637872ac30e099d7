"""What `doctor` says of a machine that lacks something."""

import mmap
from types import SimpleNamespace

import pytest
from support.instant import WORKLOAD

from autotune.cli import doctor
from autotune.trial.result import Outcome, TrialResult

FULL = "DistBackendError: NCCL error (Last error: Error while creating shared memory segment /dev/shm/nccl-7 (size 33030656))"


@pytest.mark.parametrize(("free_mib", "verdict"), [(64, "warn"), (8192, "ok")])
def test_little_shared_memory_is_named_with_what_gives_a_container_more(monkeypatch, tmp_path, free_mib, verdict):
    """Docker gives 64 MiB unless it is asked for more."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mib << 20))
    # Other programs of this machine may have left files in the real one.
    monkeypatch.setattr(doctor.shared_memory, "FOLDER", tmp_path)
    found = doctor._shared_memory()
    assert found.verdict == verdict and ("--shm-size=8g" in found.detail) is (verdict == "warn")


def test_buffers_of_dead_runs_are_named_and_those_of_a_running_one_are_not(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shared_memory, "FOLDER", tmp_path)
    used, left = (tmp_path / f"deepspeed_allreduce_buffer_{name}" for name in ("used", "left"))
    for path in (used, left):
        path.write_bytes(bytes(4096))
    with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        found = doctor._shared_memory()
        assert (
            found.verdict == "warn"
            and f"1 file(s) of dead DeepSpeed runs hold shared memory; remove {left}" in found.detail
        )
        assert str(used) not in found.detail
        left.unlink()
        assert "DeepSpeed" not in doctor._shared_memory().detail


def test_a_trial_that_fails_is_told_with_the_remedy(monkeypatch, tmp_path):
    server = SimpleNamespace(start=lambda: None, close=lambda: None, cold_reason="")
    results = iter(
        [TrialResult(outcome=Outcome.COMPLETE), TrialResult(outcome=Outcome.CRASHED, reason=FULL, wall_s=1.0)]
    )
    monkeypatch.setattr("autotune.executors.local.LocalExecutor", lambda *_: server)
    monkeypatch.setattr("autotune.executors.base.run", lambda *_: next(results))
    monkeypatch.setattr("autotune.trial.folder.read_record", lambda *_: WORKLOAD)
    found = {finding.what: finding for finding in doctor._trial(tmp_path, build=False)}
    assert found["trial"].verdict == "fail" and "--shm-size=8g" in found["trial"].detail


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    """Trials were said to run here, and each run was refused."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    assert doctor._cache() == ("ok", "cache", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file" / "cache"))
    found = doctor._cache()
    assert found.verdict == "fail" and "Set AUTOTUNE_CACHE to a folder that you can write to" in found.detail
