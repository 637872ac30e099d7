"""The benchmarks' arithmetic; `make pages-current` compares the pages that are made of their results."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS, ROOT

BEFORE = dict(os.environ)
with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(BENCHMARKS))
    import capacity
    import figures
    import peers

WHERE = {"date": "2026-01-02", "cores": 2, "processor": "CPU", "versions": {"torch": "2.13.0"}}
TUNED = {
    "config": {"train_micro_batch_size_per_gpu": 8},
    "wall_s": 12.4,
    "trials": 16,
    "samples_per_s": 150.0,
    "claim_over_measured": 1.04,
    "throughput_over_deepspeed": 1.5,
}
BROKEN = {"wall_s": 300.0, "trials": 9, "error": "its answer does not run under torchrun"}
SAMPLERS = {"physics": {"10": {"hypervolume": 0.8}}, "tpe": {"10": {"hypervolume": 0.654}}}


def test_a_result_becomes_rows_on_the_pages(tmp_path):
    results = {
        "ask": json.loads((figures.RESULTS / "ask.json").read_text()) | {"median_s": 12.5},
        "peers": {"autotune": TUNED, "deepspeed": BROKEN, "measured_on": WHERE},
        "search": {"seeds": 5, "tables": {"conv": SAMPLERS}, "measured_on": WHERE},
    }
    for name, found in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    table = figures.figures(tmp_path)
    assert "| 12.50 s | `python benchmarks/ask.py` |" in table and "overhead.py" not in table  # which never ran there
    text = figures.page(figures.COMPARISON, tmp_path)
    assert "| autotune, the same knobs | 12 | 16 | 150 (1.50x DeepSpeed's) | 1.04 |" in text
    assert "| DeepSpeed's autotuner | 300 | 9 | its answer does not run under torchrun |  |" in text
    assert "2026-01-02, 2 cores of an CPU; torch 2.13.0." in text
    assert "| conv | 10 | `physics` 0.80, `tpe` 0.65 |\n\nMedians of 5 studies. 2026-01-02" in text
    assert "Not measured yet: `make bench-peers SCRIPT=" in text


def test_tuners_that_name_one_configuration_share_its_throughput():
    sizes = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    same = {**sizes, "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "zero_optimization": {"stage": 0}}
    other = {**sizes, "zero_optimization": {"stage": 3}}
    found = {
        name: {"config": config, "samples_per_s": rate, "claimed_samples_per_s": 100.0, "wall_s": 1.0}
        for name, config, rate in (("deepspeed", sizes, 100.0), ("autotune", same, 121.0), ("tpe", other, 55.0))
    }
    together = figures.judged_together({**found, "measured_on": WHERE})
    assert together["autotune"]["samples_per_s"] == together["deepspeed"]["samples_per_s"] == pytest.approx(110.0)
    assert together["autotune"]["throughput_over_deepspeed"] == 1.0 and together["measured_on"] == WHERE
    assert together["tpe"]["throughput_over_deepspeed"] == pytest.approx(0.5)
    assert together["tpe"]["claim_over_measured"] == pytest.approx(100 / 55)


def test_each_result_is_used_and_each_script_is_there():
    """Results of GPUs stand elsewhere."""
    known = {*figures.BENCHMARKS}.union(*figures.TABLES.values())
    left = {path.stem for path in figures.RESULTS.glob("*.json")} - known
    assert {name for name in left if not name.startswith("gpu-")} == set()
    commands = [command.split() for command, _ in figures.BENCHMARKS.values()]
    assert [words[1] for words in commands if words[0] == "python" and not (ROOT / words[1]).is_file()] == []


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="one place for peers"):
        figures.filled("", "peers", "")


def test_beyond_the_measured_range_is_a_straight_line():
    growing = {str(n): {"cpu_s": 0.1 + n / 10_000, "statements": 30.0, "bytes": 4000.0} for n in (100, 500, 1000)}
    prints = {str(ranks): {"files": 4 + 3 * ranks, "bytes": 1000 + 500 * ranks} for ranks in (1, 2, 4)}
    ahead = capacity.extrapolated({"growing": {"random": growing}, "footprints": prints})
    assert ahead["random"]["cpu_s_of_the_last_trial"] == pytest.approx(1.1)
    assert ahead["random"]["cpu_s"] == pytest.approx(6000)  # the mean, 0.6 s, ten thousand times
    assert ahead["random"]["bytes"] == pytest.approx(4e7) and ahead["trial_files"] == pytest.approx(3004)


def test_what_a_test_imports_sets_no_variable_for_the_tests_after_it():
    """A number of threads that a benchmark had set kept `torchrun` from setting its own, and so from being seen to."""
    threads = [
        {name: value for name, value in each.items() if name.endswith("_NUM_THREADS")} for each in (os.environ, BEFORE)
    ]
    assert threads[0] == threads[1]


def judged(tmp_path, monkeypatch, torchrun):
    """What the judge writes of three tuners that have answered; the claim of the second is 10 % too high."""
    for name, rate, claimed, wall in (
        ("deepspeed", 100.0, 100.0, 300.0),
        ("tpe", 110.0, 121.0, 150.0),
        ("autotune", 150.0, 150.0, 15.0),
    ):
        answer = {"config": {"rate": rate}, "claimed_samples_per_s": claimed, "wall_s": wall, "trials": 3}
        answer["training"] = {"script": "train.py", "arguments": [], "base": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    (tmp_path / "judged.json").write_text("{}")
    written = {}
    monkeypatch.setattr(peers, "torchrun", torchrun)
    monkeypatch.setattr(peers, "write", lambda name, found: written.update({name: found}))
    peers.judge(tmp_path, rounds=2)
    return written["peers"]


def test_answers_are_judged_in_turns_by_what_they_reach_under_torchrun(tmp_path, monkeypatch):
    ran = []

    def torchrun(training, config, folder, steps):
        ran.append(config["rate"])
        return 16 / config["rate"], 16.0

    found = judged(tmp_path, monkeypatch, torchrun)
    assert ran == [150.0, 100.0, 110.0] * 2
    assert found["autotune"]["throughput_over_deepspeed"] == pytest.approx(1.5)
    assert found["autotune"]["seconds_of_deepspeed_over_own"] == pytest.approx(20)
    claims = [found[name]["claim_over_measured"] for name in ("tpe", "deepspeed")]
    assert claims == [pytest.approx(1.1), pytest.approx(1.0)]


def test_an_answer_that_does_not_run_is_told_and_the_others_are_judged(tmp_path, monkeypatch):
    found = judged(tmp_path, monkeypatch, lambda _, config, *__: None if config["rate"] == 100.0 else (0.1, 16.0))
    assert found["deepspeed"]["error"] == "its answer does not run under torchrun"
    assert "throughput_over_deepspeed" not in found["autotune"] and found["autotune"]["samples_per_s"] == 160.0
    with pytest.raises(SystemExit, match="run one first"):
        peers.judge(tmp_path / "empty", rounds=1)


@pytest.mark.process
def test_the_script_of_all_tuners_trains_what_its_json_says_and_prints_its_steps(tmp_path):
    """One rank, without a launcher: micro-batch 2, two of them a step."""
    config = {**peers.BASE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    environment = os.environ | alone | {"MASTER_PORT": str(20000 + os.getpid() % 20000)}
    training = peers.Training(peers.SCRIPT, ("--steps", "1000"), config)
    command = [
        sys.executable,
        str(peers.LAUNCH),
        "--measure",
        "3",
        "--local_rank=0",
        *training.command(tmp_path / "ds.json"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if "MEASURED " in line).partition("MEASURED ")[2])
    assert len(found["times_s"]) == 3 and found["samples_per_step"] == 4


def test_what_benchmarks_import_of_the_package_is_there():
    """A table of an hour is not begun anew every week, so nobody would notice a name that has moved."""
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autotune"):
                found = importlib.import_module(node.module)
                for name in [alias.name for alias in node.names if not hasattr(found, alias.name)]:
                    importlib.import_module(f"{node.module}.{name}")
