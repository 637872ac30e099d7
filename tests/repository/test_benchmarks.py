"""The benchmarks' arithmetic; `make pages-current` compares the pages that are made of their results."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import time

import pytest
from support.bench import own_port
from support.paths import BENCHMARKS, ROOT

BEFORE = dict(os.environ)
with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(BENCHMARKS))
    import capacity
    import figures
    import peers

WHERE = {"date": "2026-01-02", "cores": 2, "processor": "CPU", "versions": {"torch": "2.13.0"}}
ROW = {"runs": 5, "on": "2026-01-01", "trials": 3, "samples_per_s": 150.0, "claim_over_measured": 1.04}
RACE = {
    "deepspeed": {**ROW, "wall_s": 151.0},
    "autotune": {**ROW, "wall_s": 12.4, "sooner": [12.2, 11.0, 13.4], "faster": [1.0, 1.0, 1.0]},
}
SAMPLERS = {"physics": {"10": {"hypervolume": 0.8}}, "tpe": {"10": {"hypervolume": 0.654}}}


def test_a_result_becomes_rows_on_the_pages(tmp_path):
    results = {
        "ask": json.loads((figures.RESULTS / "ask.json").read_text()) | {"median_s": 12.5},
        "peers": {"trainings": {"gpt": {"fixed": RACE}}, "measured_on": WHERE},
        "search": {"seeds": 5, "tables": {"conv": SAMPLERS}, "measured_on": WHERE},
    }
    for name, found in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    table = figures.figures(tmp_path)
    assert "| 12.50 s | `python benchmarks/ask.py` |" in table and "overhead.py" not in table  # which never ran there
    text = figures.page(figures.COMPARISON, tmp_path)
    assert "| gpt | fixed | DeepSpeed's autotuner | 5 on 2026-01-01 | 151 |  | 3 | 150 |  | 1.04 |" in text
    assert (
        "| `autotune run --quick` | 5 on 2026-01-01 | 12 | 12.2x (11.0 to 13.4) | 3 | 150 | 1.00x (1.00 to 1.00) | 1.04 |"
        in text
    )
    assert "| gpt, fixed: 12.2x sooner, 1.00x the throughput | yes |" in text
    assert "2026-01-02, 2 cores of an CPU; torch 2.13.0." in text
    assert "| conv | 10 | `physics` 0.80, `tpe` 0.65 |\n\nMedians of 5 studies. 2026-01-02" in text
    (tmp_path / "peers.json").unlink()
    assert "Not measured yet: `make bench-peers`" in figures.page(figures.COMPARISON, tmp_path)


def test_each_result_is_used_and_each_script_is_there():
    """Results of GPUs stand elsewhere."""
    known = {*figures.BENCHMARKS}.union(*figures.TABLES.values())
    left = {path.stem for path in figures.RESULTS.glob("*.json")} - known
    assert {name for name in left if not name.startswith("gpu-")} == set()
    commands = [command.split() for command, _ in figures.BENCHMARKS.values()]
    assert [words[1] for words in commands if words[0] == "python" and not (ROOT / words[1]).is_file()] == []


def test_each_script_with_a_figure_is_in_the_readme():
    text = (BENCHMARKS / "README.md").read_text()
    scripts = {
        " ".join(words[1:3])
        for command, _ in figures.BENCHMARKS.values()
        if "overhead.py" in (words := command.split())[1]
    }
    scripts |= {command.split()[1] for command, _ in figures.BENCHMARKS.values()}
    assert [name for name in sorted(scripts) if name not in text] == []


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


def answer(tuner, config, wall_s, claimed=100.0, seed=0):
    where = {"training": "gpt", "track": "free", "seed": seed, "tuner": tuner}
    return {**where, "config": config, "wall_s": wall_s, "claimed_samples_per_s": claimed, "trials": 3}


def test_tuners_that_name_one_configuration_share_its_throughput():
    sizes = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    same = {**sizes, "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "zero_optimization": {"stage": 0}}
    other = {**sizes, "zero_optimization": {"stage": 3}}
    assert peers.trained(sizes) == peers.trained(same) != peers.trained(other)
    answers = [answer("deepspeed", sizes, 300.0), answer("autotune", same, 30.0), answer("tpe", other, 600.0, 66.0)]
    rates = {("gpt", peers.trained(sizes)): [100.0, 121.0, 110.0], ("gpt", peers.trained(other)): [55.0, 55.0, 66.0]}
    found = peers.compared(answers, rates)
    assert found["autotune"]["faster"] == [1.0, 1.0, 1.0] and found["autotune"]["sooner"][0] == pytest.approx(10)
    assert found["tpe"]["faster"][1] < 0.55 < found["tpe"]["faster"][2] and found["tpe"]["sooner"][0] == pytest.approx(
        0.5
    )
    assert found["tpe"]["claim_over_measured"] == pytest.approx(66 / 55) and found["deepspeed"]["wall_s"] == 300.0


def test_answers_are_judged_in_turns_by_what_they_reach_under_torchrun(tmp_path, monkeypatch):
    configs = [{"train_micro_batch_size_per_gpu": n} for n in (1, 2)]
    for seed, own in enumerate((0, 1)):
        for tuner, config in (("deepspeed", configs[0]), ("autotune", configs[own])):
            said = answer(tuner, config, 300.0 if tuner == "deepspeed" else 15.0, seed=seed)
            (tmp_path / f"gpt-free-{seed}-{tuner}.json").write_text(json.dumps(said))
    ran, written = [], {}

    def torchrun(training, config, folder, steps):
        ran.append(config["train_micro_batch_size_per_gpu"])
        return None if ran[-1] == 2 else (0.1, 16.0)

    monkeypatch.setattr(peers, "torchrun", torchrun)
    monkeypatch.setattr(peers, "write", lambda name, found: written.update({name: found}))
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "peers.json").write_text(json.dumps({"trainings": {"gpt": {"free": {}, "fixed": RACE}}}))
    peers.judge(tmp_path, rounds=2)
    assert written["peers"]["trainings"]["gpt"]["fixed"] == RACE  # of another race
    found = written["peers"]["trainings"]["gpt"]["free"]
    assert ran == [1, 2] * 2 and found["autotune"]["not_running"] == 1 and len(found["autotune"]["answers"]) == 2
    assert found["autotune"]["sooner"][0] == pytest.approx(20) and found["autotune"]["samples_per_s"] == 160.0
    with pytest.raises(SystemExit, match="let them"):
        peers.judge(tmp_path / "empty", rounds=1)


def test_what_has_run_is_not_run_again_and_seeds_come_one_after_another(tmp_path, monkeypatch):
    ran = []

    def tuner(training, track, folder, seed):
        ran.append(seed)
        return {"config": {}, "claimed_samples_per_s": 1.0, "trials": 1}

    monkeypatch.setattr(peers, "TUNERS", {"autotune": tuner})
    for minutes in (1.0, 0.0, 1.0):
        peers.race(
            tmp_path, range(2), ["autotune"], ["gpt", "clicks"], list(peers.TRACKS), time.monotonic() + 60 * minutes
        )
    assert ran == [0] * 4 + [1] * 4 and (tmp_path / "clicks-fixed-1-autotune.json").is_file()


@pytest.mark.system
def test_the_script_of_all_tuners_trains_what_its_json_says_and_prints_its_steps(tmp_path):
    """One rank, without a launcher: micro-batch 2, two of them a step."""
    config = {**peers.BASE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    environment = os.environ | alone | {"MASTER_PORT": own_port()}
    training = peers.Training(peers.TRAININGS["gpt"].script, ("--steps", "1000"))
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
