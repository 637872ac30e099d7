"""The tables that `make pages` writes; `make pages-current` compares the pages themselves."""

from __future__ import annotations

import json
import os

import pytest
from support.paths import ROOT

BEFORE = dict(os.environ)
with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import capacity
    import figures


def test_a_changed_result_changes_the_table(tmp_path):
    found = json.loads((figures.RESULTS / "ask.json").read_text())
    (tmp_path / "ask.json").write_text(json.dumps(found | {"median_s": 12.5}))
    table = figures.table(tmp_path)
    assert "| 12.50 s | `python benchmarks/ask.py` |" in table and found["measured_on"]["processor"] in table
    assert "startup.py" not in table  # never run there


def test_every_benchmark_is_a_script_that_there_is():
    for each in figures.BENCHMARKS:
        if each.command.startswith("python "):
            assert (ROOT / each.command.split()[1]).is_file(), each.command


def test_results_that_no_row_is_made_of_are_named():
    """Those of simulations and of GPUs stand elsewhere."""
    known = {each.name for each in figures.BENCHMARKS} | {"search_simulated", "capacity", "peers-training_data"}
    left = {path.stem for path in figures.RESULTS.glob("*.json")} - known
    assert {name for name in left if not name.startswith("gpu-")} == set()


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="has no lines"):
        figures.with_table("# nothing")


def test_beyond_the_measured_range_is_a_straight_line():
    growing = {
        "random": {str(n): {"cpu_s": 0.1 + n / 10_000, "statements": 30.0, "bytes": 4000.0} for n in (100, 500, 1000)}
    }
    prints = {str(ranks): {"files": 4 + 3 * ranks, "bytes": 1000 + 500 * ranks} for ranks in (1, 2, 4)}
    ahead = capacity.extrapolated({"growing": growing, "footprints": prints})
    assert ahead["random"]["cpu_s_of_the_last_trial"] == pytest.approx(1.1)
    assert ahead["random"]["cpu_s"] == pytest.approx(6000)  # the mean, 0.6 s, ten thousand times
    assert ahead["random"]["bytes"] == pytest.approx(4e7) and ahead["trial_files"] == pytest.approx(3004)


def test_what_a_test_imports_sets_no_variable_for_the_tests_after_it():
    """A number of threads that a benchmark had set kept `torchrun` from setting its own, and so from being seen to."""
    assert {name for name in os.environ if name.endswith("_NUM_THREADS")} == {
        name for name in BEFORE if name.endswith("_NUM_THREADS")
    }
