"""What a report says of the data."""

from types import SimpleNamespace

from autotune.report import figures, samples

DATA = {"n_seen": 3, "n_samples": 3, "table": [[4.0, 2], [64.0, 1]], "lengths": {"4": 0.67, "64": 0.33}}
ROW = {"trial": 0, "padding": 0.4, "tail": {"samples": 8, "length": 64}, "metrics": {"peak_memory_bytes": 2**20}}


def report(data):
    return SimpleNamespace(workload={"data": data}, picks={}, trials=[ROW])


def test_lengths_padding_and_tail_are_told_where_samples_differ():
    read, trial = samples.notes(report(DATA))
    assert read == "all 3 samples were read: the longest has a length of 64"
    assert "40% of the tokens are padding; its worst batch, 8 x 64, fits, 1.00 MiB at its peak" in trial
    assert figures.lengths(report(DATA))["data"][0]["y"] == [67, 33]


def test_nothing_is_said_where_all_samples_are_alike():
    assert samples.notes(report(DATA | {"table": [[4.0, 3]]})) == [] == samples.notes(report(None))
