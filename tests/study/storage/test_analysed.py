"""Trials as the analysis takes them, read again and again while a study runs."""

import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from support.instant import Instant, runner_of

from autotune.search.observation import MEASURED_ATTR
from autotune.study.storage import analysed


def test_a_set_of_trials_is_foretold_once_and_each_of_them_anew_with_one_more(tmp_path, monkeypatch):
    runner, taught = runner_of(tmp_path, Instant(), trials=5, finalists=0), []
    original = analysed.CandidateOptimizer

    def counted(candidates, *arguments, **options):
        taught.append(len(candidates))
        return original(candidates, *arguments, **options)

    monkeypatch.setattr(analysed, "CandidateOptimizer", counted)
    runner.run()
    again = runner.state.measured()
    assert taught == sorted(set(taught)) and taught[-1] == len(again) == 5
    fresh = analysed.measured(runner.study, tmp_path / "s", runner.state.record())
    assert fresh == again and all(each.forecast is not None for each in again)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_a_pause_is_one_in_whichever_time_zone_a_study_is_read(tmp_path, monkeypatch, zone):
    """Measured in a container, whose clock says UTC, and read on its host: the pause was lost, and intervals were too narrow."""
    runs = {
        "0000": (0, 10),
        "noise": (11, 600),
        "0001": (612, 10),
        "0002": (4000, 10),
    }  # when they began, and how long they took
    for name, (began, took) in runs.items():
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / "events.jsonl").write_text(json.dumps({"time": 1.7e9 + began}))
        (tmp_path / "trials" / name / "exit.json").write_text(json.dumps({"wall_s": took}))
    ends = [datetime.fromtimestamp(1.7e9 + sum(runs[f"{n:04d}"]), UTC).replace(tzinfo=None) for n in range(3)]
    told = [
        SimpleNamespace(number=n, datetime_complete=end, system_attrs={MEASURED_ATTR: json.dumps({"wall_s": 10})})
        for n, end in enumerate(ends)
    ]
    kept = SimpleNamespace(workload=SimpleNamespace(environment=SimpleNamespace(accelerator="cpu")))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert analysed._sittings(told, tmp_path, kept) == [0, 0, 1]
    finally:
        monkeypatch.undo()
        time.tzset()
