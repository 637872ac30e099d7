"""What a report says of the data."""

from types import SimpleNamespace

import pytest

from autotune.report import figures, samples

DATA = {"n_seen": 3, "n_samples": 3, "table": [[4.0, 2], [64.0, 1]]}
TAIL = {"samples": 8, "length": 64, "steady_bytes": 2**19, "tail_bytes": 2**20}
ROW = {"trial": 0, "padding": 0.4, "tail": TAIL, "metrics": {"peak_memory_bytes": 2**20}}


def report(data):
    return SimpleNamespace(workload={"data": data}, picks={}, trials=[ROW], memory_limit_bytes=2**22)


def test_lengths_padding_and_tail_are_told_where_samples_differ():
    read, trial = samples.notes(report(DATA))
    assert read == "all 3 samples were read: the longest has a length of 64"
    assert "40% of the tokens are padding; its worst batch, 8 x 64, fits, 1.00 MiB at its peak" in trial
    assert trial.endswith("2.0 times an ordinary step's 512 KiB; 25% of the 4.00 MiB that a rank may use")
    assert figures.lengths(report(DATA))["data"][0]["y"] == pytest.approx([66.7, 33.3], abs=0.1)


def test_nothing_is_said_where_all_samples_are_alike():
    assert samples.notes(report(DATA | {"table": [[4.0, 3]]})) == [] == samples.notes(report(None))
