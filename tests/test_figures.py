"""The README's figures are those of `benchmarks/results`, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures


def test_the_readme_holds_the_figures_that_were_measured():
    text = figures.README.read_text()
    assert figures.with_table(text) == text, "python benchmarks/figures.py writes them"


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
    known = {each.name for each in figures.BENCHMARKS} | {"search_simulated"}
    left = {path.stem for path in figures.RESULTS.glob("*.json")} - known
    assert {name for name in left if not name.startswith("gpu-")} == set()


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="has no lines"):
        figures.with_table("# nothing")
