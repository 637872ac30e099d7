"""When the runs of a study took place, by what their folders tell."""

import json
import os

import pytest
from support.study_report import study_report

from autotune.report import figures
from autotune.report.page import render
from autotune.report.timeline import Run, runs

BEGAN_S = 1_000.0
# By folder: seconds after the first one, how long it took, and what it was.
RAN = {
    "inspect": (0, 2, "preparation"), "0000": (3, 4, "trials"), "noise": (8, 3, "noise scale"), "0001": (12, 5, "trials"),
    "0001/branch-640": (20, 6, "branches"), "reference-16/0": (30, 2, "quality gate"), "0001/gate": (33, 2, "quality gate"),
    "0001/repeat-1": (40, 1, "measured again"),
}  # fmt: skip


def leave(folder, name, began_s, wall_s):
    path = folder / "trials" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "events.jsonl").write_text(json.dumps({"time": BEGAN_S + began_s, "rank": 0, "phase": "import"}) + "\n{")
    (path / "exit.json").write_text(json.dumps({"wall_s": wall_s}))


def test_every_kind_of_run_has_its_lane_and_its_time(tmp_path):
    for name, (began_s, wall_s, _) in reversed(RAN.items()):
        leave(tmp_path, name, began_s, wall_s)
    found = runs(tmp_path)
    assert {run.name: (run.began_s, run.wall_s, run.lane) for run in found} == RAN and [r.name for r in found] == [*RAN]
    assert {run.trial for run in found if run.lane in ("trials", "branches", "measured again")} == {0, 1}


@pytest.mark.parametrize("text", ["{", "[" * 99_999])
def test_a_long_pause_is_cut_and_what_cannot_be_read_is_left_out(tmp_path, text):
    leave(tmp_path, "0000", 0, 10)
    leave(tmp_path, "0001", 90_000, 10)
    leave(tmp_path, "0002", 90_010, 10)
    (tmp_path / "trials" / "0002" / "exit.json").write_text(text)
    assert [run.began_s for run in runs(tmp_path)] == pytest.approx([0, 70])
    assert runs(tmp_path / "nothing") == []


def test_what_a_trial_removes_while_it_is_looked_for_is_passed_over(tmp_path, monkeypatch):
    """`autotune status` ended with a missing file of a trial that was under way."""
    for name in ("0000", "0000/scratch", "0001"):  # a scratch folder holds what the user's code writes
        leave(tmp_path, name, 0, 10)
    scandir = os.scandir

    def racing(path):
        if os.fspath(path).endswith(("scratch", "0001")):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert [run.name for run in runs(tmp_path)] == ["0000"]
    monkeypatch.undo()
    assert [run.name for run in runs(tmp_path)] == ["0000", "0001"]


def test_the_page_draws_the_lanes_that_there_are():
    lanes = study_report(runs=[Run("trials", 0, "0000", 0.0, 3.0), Run("measured again", 0, "0000/repeat-1", 5.0, 1.0)])
    figure = figures.timeline(lanes)
    drawn = figure["data"]
    assert figure["layout"]["yaxis"]["dtick"] == 1  # at 400 px every second lane had no name
    assert [(trace["y"], trace["base"], trace["x"]) for trace in drawn] == [
        (["trials (1)"], [0.0], [3.0]), (["measured again (1)"], [5.0], [1.0]),
    ]  # fmt: skip
    assert 'id="timeline"' in render.render(lanes) and 'id="timeline"' not in render.render(study_report())
