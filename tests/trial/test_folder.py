"""The files of a trial: whole or absent, and read back as what was written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trial import folder as trial_folder
from autotune.trial.folder import TrialDir, phases, read_record, result_in, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, Outcome, RankReport, StepStats, TrialResult
from autotune.trial.workload import Environment, Workload

DONE = RankReport(rank=0, outcome=Outcome.COMPLETE, phase="done", losses=[1.5, None], peak_memory_bytes={"forward": 7})


@pytest.mark.parametrize(
    "value",
    [
        TrialRequest(target="model.py", world_size=2, deadline_s=60.0),
        DONE,
        Exit(codes={0: 0, 1: -9}, first_failed=1, killed="peer", swept=["process 7"]),
        TrialResult(outcome=Outcome.OOM, steps=StepStats(median_s=1.0, ci95_s=0.1, n_steps=5, n_warmup=2)),
        Workload(
            n_parameters=10, n_trainable=9, n_samples=None, n_blocks=2, block_class="Block", block_share=0.5, float_buffers=True,
            client_optimizer=False, caveats=["a"],
            environment=Environment(
                accelerator="cpu", device_name="a", n_devices=2, device_memory_bytes=1, bf16=True, fp16=False, n_cores=2,
                versions={"torch": "2"},
            ),
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_was_written_reads_back(tmp_path: Path, value: Any) -> None:
    write_record(tmp_path / "new" / "value.json", value)
    assert read_record(tmp_path / "new" / "value.json", type(value)) == value


@given(
    st.builds(
        TrialRequest,
        target=st.text(),
        candidate=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
    )
)
def test_any_request_reads_back(tmp_path_factory: pytest.TempPathFactory, request_: TrialRequest) -> None:
    path = tmp_path_factory.getbasetemp() / "any-request.json"
    write_record(path, request_, sync=False)
    assert read_record(path, TrialRequest) == request_


def test_what_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_record(tmp_path / "x.json", {"loss": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"codes": "none"}')
    with pytest.raises(ValueError):
        read_record(tmp_path / "x.json", Exit)


def test_reports_that_are_missing_or_torn_are_left_out(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    write_record(folder.report(0), DONE)
    folder.report(1).write_text('{"rank": 1, "outc')
    assert trial_folder.reports(folder, 3) == {0: DONE}


@pytest.mark.parametrize("what", ["noise", "folder", "pipe", "link", "deep", "nan", "another rank's", "endless"])
def test_what_a_rank_leaves_in_place_of_its_report_is_none(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrialDir(tmp_path)
    path, whole = folder.report(1), {"rank": 1, "outcome": "complete", "phase": "done", "other_cores": 0.5}
    match what:
        case "noise":
            path.write_bytes(bytes(range(256)))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/dev/zero")
        case "deep":
            path.write_text("[" * 100_000)
        case "nan":
            path.write_text(json.dumps(whole | {"other_cores": math.nan}))
        case "another rank's":
            path.write_text(json.dumps(whole | {"rank": 0}))
        case "endless":
            monkeypatch.setattr(trial_folder, "LARGEST_REPORT_BYTES", 50)
            path.write_text(json.dumps(whole))
    assert trial_folder.reports(folder, 2) == {}


def test_a_result_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert result_in(tmp_path) is None
    TrialDir(tmp_path).result.write_text("{")
    assert result_in(tmp_path) is None


def test_phases_come_from_the_event_stream_torn_or_not(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    assert phases(folder) == {}
    events = [
        {"rank": 0, "phase": "build"},
        {"rank": 1, "phase": "import"},
        {"rank": 0, "phase": "warmup"},
        {"rank": 0, "step": 1},
    ]
    folder.events.write_text("\n".join([*map(json.dumps, events), "[1]", '{"rank": 1, "pha']))
    assert phases(folder) == {0: "warmup", 1: "import"}
    nonsense = ['{"rank": 1e999, "phase": "x"}', "[" * 5000, '"phase"', '{"rank": {}, "phase": 1}', "\udcff"]
    with folder.events.open("a", errors="surrogateescape") as file:
        file.write("\n" + "\n".join(nonsense))
    assert phases(folder) == {0: "warmup", 1: "import"}
    folder.events.unlink()
    os.mkfifo(folder.events)  # whoever opened it would wait for ever
    assert phases(folder) == {}


def test_the_ends_are_read_from_the_folder(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    write_record(folder.node_exit(1, 2), Exit(codes={1: 0}))
    (tmp_path / "exit-0.json").write_text('{"codes": {"0')  # still being carried
    assert trial_folder.ends(folder, 2) == {1: Exit(codes={1: 0})}
    assert folder.node_exit(0, 1) == folder.exit


def test_events_of_all_machines_tell_the_phases(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    for node, phase in enumerate(("measure", "warmup")):
        folder.events_of(node).write_text(json.dumps({"rank": node, "phase": phase}) + "\n")
    assert phases(folder) == {0: "measure", 1: "warmup"}
