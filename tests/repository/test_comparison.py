"""The page that compares tuners, made from results that a test writes; `make pages-current` compares the real one."""

import importlib.util
import json

import pytest
from support.paths import ROOT

spec = importlib.util.spec_from_file_location("comparison", ROOT / "benchmarks" / "comparison.py")
comparison = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comparison)

WHERE = {"date": "2026-01-02", "cores": 2, "processor": "CPU", "versions": {"torch": "2.13.0"}}
PLACES = "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in comparison.TABLES)


def test_what_has_no_results_is_said_not_to_be_measured(tmp_path):
    text = comparison.rendered(PLACES, tmp_path)
    assert "old" not in text and text.count("Not measured yet") == len(comparison.TABLES) and "make bench-peers" in text


def test_tuners_are_listed_with_their_answers_and_an_answer_that_did_not_run_is_told(tmp_path):
    row = {
        "wall_s": 12.4,
        "trials": 16,
        "samples_per_s": 150.0,
        "claim_over_measured": 1.04,
        "throughput_over_deepspeed": 1.5,
    }
    broken = {"wall_s": 300.0, "trials": 9, "error": "its answer does not run under torchrun"}
    (tmp_path / "peers.json").write_text(json.dumps({"autotune": row, "deepspeed": broken, "measured_on": WHERE}))
    text = comparison.rendered(PLACES, tmp_path)
    assert "| autotune, the same knobs | 12 | 16 | 150 (1.50x DeepSpeed's) | 1.04 |" in text
    assert "| DeepSpeed's autotuner | 300 | 9 | its answer does not run under torchrun |  |" in text
    assert "2026-01-02, 2 cores of an CPU; torch 2.13.0." in text


def test_samplers_are_compared_by_table_and_number_of_trials(tmp_path):
    found = {"physics": {"10": {"hypervolume": 0.8}}, "tpe": {"10": {"hypervolume": 0.654}}}
    (tmp_path / "search.json").write_text(json.dumps({"seeds": 5, "tables": {"conv": found}, "measured_on": WHERE}))
    text = comparison.rendered(PLACES, tmp_path)
    assert "| conv | 10 | `physics` 0.80, `tpe` 0.65 |\n\nMedians of 5 studies. 2026-01-02" in text


def test_a_page_without_a_place_for_a_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one place for peers"):
        comparison.rendered("", tmp_path)
