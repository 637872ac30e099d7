"""The run on a GPU, dry: the same code on a CPU with a tiny model, and the figures that are made of what it wrote."""

import json
import os
import re
import subprocess
import sys
import tomllib

import psutil
import pytest
from support.paths import BENCHMARKS, ROOT

with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(BENCHMARKS))
    import common
    import gpu
    import gpu_bench
    import gpu_results

CARD = "NVIDIA H100 80GB HBM3"
MODEL = {
    "part": "model", "model": "gpt-125m",
    "profile": {"n_parameters": 10**8, "flops_per_sample": 1e12},
    "machine": {"flops": {"fp32": 5e13, "bf16": 7e14}, "memory_bytes_per_s": 2e12, "host_bytes_per_s": 5e10, "op_s": 1e-5},
}  # fmt: skip
SYSTEM = {
    "part": "system", "cold_reason": "", "date": "2026-01-01", "dry": False,
    "environment": {"device_name": CARD, "device_memory_bytes": 80 << 30, "n_cores": 16, "versions": {"torch": "2.11"}},
}  # fmt: skip


def said(value, width=0.1):
    return {"value": value, "low": value * (1 - width), "high": value * (1 + width)}


def measured(seconds, memory, *, part="grid", time_off=1.0, joules=None, precision="bf16", accumulation=1):
    """A line of a trial whose memory was foretold 5 % too high, and its time so much off."""
    expected = {"peak_memory_bytes": said(1.05 * memory), "step_time_s": said(time_off * seconds)}
    return {
        "part": part, "model": "gpt-125m", "words": "some", "outcome": "complete", "reason": "", "wall_s": 3.0, "startup_s": {},
        "candidate": {"precision": precision, "gradient_accumulation_steps": accumulation},
        "expected": {"before": expected, "after": expected},
        "step_time_s": seconds, "ci95_s": 0.001, "n_steps": 10, "samples_per_step": 8, "tokens_per_step": 8192,
        "micro_step_s": {"boundary": 0.9 * seconds}, "peak_memory_bytes": memory, "reserved_memory_bytes": memory, "alloc_retries": 1,
        "joules_per_step": joules,
    }  # fmt: skip


def test_several_calls_are_read_as_one(tmp_path):
    """The first was killed in the midst of a line, and had no time for a part that the second ran."""
    first = gpu_bench.Output(tmp_path)
    first.write("limits", error="not run: the time was over")
    first.write("kill", error="not run: the time was over")
    with first.path.open("a") as file:
        file.write('{"part": "gr')
    gpu_bench.Output(tmp_path).write("limits", card="24 GB")
    assert [(row["part"], "error" in row) for row in gpu_results.read(tmp_path)] == [("kill", True), ("limits", False)]


def test_a_configuration_is_told_by_speed_arithmetic_memory_and_energy():
    found = gpu_results.figures([MODEL, SYSTEM, measured(0.1, 10**10, joules=50.0)])["models"]["gpt-125m"]
    (row,) = found["configurations"]
    assert row["samples_per_s"] == pytest.approx(80) and row["tokens_per_s"] == pytest.approx(81920)
    assert row["flops_share"] == pytest.approx(80e12 / 989.4e12) == found["best_flops_share"]
    assert row["joules_per_sample"] == pytest.approx(50 / 8) and row["watts"] == pytest.approx(500)
    assert found["most_alloc_retries"] == 1
    assert row["startup_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("card", "precision", "flops"),
    [
        (CARD, "fp32", 66.9e12),
        ("Some card", "bf16", 7e14),
        ("Some card", "fp16", 5e13),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
    ],
)
def test_on_an_unknown_card_arithmetic_is_measured_against_a_matrix_product(card, precision, flops):
    assert gpu_results.peak_flops(card, precision, MODEL["machine"]["flops"]) == pytest.approx(flops)


def test_forecasts_are_scored_by_error_interval_and_order():
    rows = [measured(0.1, 100), measured(0.2, 200, time_off=1.3), measured(0.4, 400, time_off=0.8), measured(0.3, 300)]
    found = gpu_results.figures([MODEL, SYSTEM, *rows])["models"]["gpt-125m"]["forecast"]["before"]
    memory, time = found["peak_memory_bytes"], found["step_time_s"]
    assert memory["error_median"] == pytest.approx(0.05) and memory["interval_90_holds"] == 1
    assert time["error_median"] == pytest.approx(0.1) and time["interval_90_holds"] == 0.5
    assert found["step_time_kendall_tau"] == pytest.approx(1.0) and found["n"] == 4


def test_a_limit_that_was_promised_and_did_not_run_is_told():
    row = {
        "part": "limits", "model": "gpt-125m", "card": "24 GB", "candidate": {}, "surely_fits": 20, "likely_fits": 24, "ran": 22,
        "out_of_memory": 23, "outcomes": ["complete", "oom"], "cap_bytes": 1,
    }  # fmt: skip
    found = gpu_results.limit(row)
    assert found["what_surely_fits_ran"] and found["left_unused"] == pytest.approx(2 / 22)
    assert not gpu_results.limit({**row, "surely_fits": 23})["what_surely_fits_ran"]


def test_a_search_is_told_by_when_it_was_near_its_best():
    ends = [(0.2, "complete"), (0.101, "complete"), (None, "oom"), (0.1, "complete")]
    same = {"part": "search trial", "samples_per_step": 8, "wall_s": 2.0}
    trials = [
        {**same, "trial": f"{n:04d}", "outcome": outcome, "step_time_s": seconds, "ended_s": 3.0 * n}
        for n, (seconds, outcome) in enumerate(ends)
    ]
    end = {"part": "search", "exit_status": 0, "wall_s": 20.0, "trials_s": 8.0}
    found = gpu_results.figures([MODEL, SYSTEM, *trials, end])["search"]
    assert found["best_over_baseline"] == pytest.approx(2) and found["outcomes"] == {"complete": 3, "oom": 1}
    assert (found["near_best_after_trials"], found["near_best_after_s"]) == (2, 3.0)
    assert found["beyond_its_trials_s"] == pytest.approx(3.0)


def test_what_was_cut_short_says_so_and_keeps_what_there_is(tmp_path):
    lines = [MODEL, SYSTEM, measured(0.1, 100), {"part": "limits", "error": "not run", "card": "80 GB"}]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"part": "sea')
    found = gpu_results.figures(gpu_results.read(tmp_path))
    assert len(found["models"]["gpt-125m"]["configurations"]) == 1
    assert found["search"] is None and found["honesty"] is None
    assert found["not_run"] == ["limits: not run", "the call was ended before its last part"]


def test_a_card_becomes_a_part_of_a_file_name():
    assert gpu_results.slug(CARD) == "h100-80gb-hbm3"
    assert gpu_results.slug("NVIDIA GeForce RTX 4090") == "rtx-4090"


def test_a_killed_rank_and_the_start_of_each_model_are_told():
    killed = {"part": "kill", "candidate": {}, "killed": "crashed", "ended_s": 0.4, "next_trial": "complete", "why": ""}
    starts = [
        {"part": "startup", "model": name, "warm_s": warm, "torchrun_s": 20.0, "startup_s": {}}
        for name, warm in (("gpt-1.3b", 4.0), ("gpt-1.3b", 6.0), ("gpt-125m", 1.0))
    ]
    found = gpu_results.figures([MODEL, SYSTEM, killed, *starts, {"part": "clock", "of": "kill", "seconds": 3.0}])
    assert found["kill"]["next_trial"] == "complete" and found["seconds"] == {"kill": 3.0}
    assert {name: each["ratio"] for name, each in found["startup"].items()} == {"gpt-1.3b": 4.0, "gpt-125m": 20.0}


def test_a_part_begins_nothing_that_its_time_has_no_room_for(tmp_path):
    run = gpu.Run(gpu_bench.Output(tmp_path), tmp_path, dry=False, budget_s=gpu.LEAST_S + 5)
    run.part("kill", lambda: run.output.write("kill", room=run.room(), left=run.left_s))
    run.until -= 10
    run.part("limits", lambda: pytest.fail("begun"))
    rows = gpu_results.read(tmp_path)
    assert rows[0]["room"] and rows[0]["left"] <= gpu.PARTS["kill"] and "not run" in rows[-1]["error"]
    assert sum(list(gpu.PARTS.values())[:3]) <= 300  # what tells most is there by then


def test_what_goes_wrong_is_written_with_its_place_and_the_next_part_follows(tmp_path, monkeypatch):
    run = gpu.Run(gpu_bench.Output(tmp_path), tmp_path, dry=True, budget_s=60.0)
    monkeypatch.setattr(gpu.StudySpec, "load", lambda *_: 1 / 0)
    run.all({"gpt-tiny": gpu_bench.TINY["gpt-tiny"], "gpt-small": gpu_bench.TINY["gpt-small"]}, ["grid", "larger"])
    rows = gpu_results.read(tmp_path)
    assert [row["part"] for row in rows] == ["bench", "larger", "clock", "end"]
    assert all("ZeroDivisionError" in row["error"] and "in bench" in row["where"] for row in rows[:2])


@pytest.mark.process
def test_wheels_for_another_python_are_refused_before_anything_is_installed(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "nosuch-1.0-cp31-cp31-manylinux_2_28_x86_64.whl").touch()
    environment = os.environ | {"PYTHON": sys.executable, "WHEELS": str(tmp_path / "wheels")}
    command = [str(BENCHMARKS / "gpu.sh"), "--dry-run", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "is not for this Python: pack with TARGET_PYTHON=3." in done.stderr


@pytest.mark.process
def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    status, said = common.ran(["sh", "-c", f"sh -c 'echo begun; sleep 60; : {tmp_path}'; :"], 1.0)
    assert status is None and said.startswith("begun")
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_each_library_that_autotune_needs_is_packed_or_said_to_be_there():
    script = (BENCHMARKS / "gpu.sh").read_text()
    there = re.search(r"assumed to have: (.*)", script)[1].lower() + re.search(r'packages="([^"]*)"', script)[1]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.match(r"[\w-]+", each)[0] for each in (*needed, "transformers", "accelerate", "nvidia-ml-py")]
    assert [name for name in names if not re.search(rf"\b{name}\b", there)] == []


def test_every_configuration_of_the_run_can_be_made():
    from autotune.space.candidate import Candidate

    for size in (*gpu_bench.SIZES.values(), *gpu_bench.TINY.values()):
        found = [Candidate.of(knobs) for knobs in (*gpu_bench.grid(size), *gpu_bench.larger(size))]
        assert len(set(found)) >= 20
        assert not set(map(Candidate.of, gpu_bench.unseen(size))) & set(found)
        assert size.width % size.heads == 0


@pytest.mark.system  # minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_the_dry_run_goes_through_every_part(tmp_path, device):
    """One call from the shell, as on the GPU: each part leaves its lines, and the analysis its files."""
    out = tmp_path / "out"
    environment = os.environ | {"PYTHON": sys.executable, "AUTOTUNE_GPU_CACHE": str(tmp_path / "cache")}
    command = [str(BENCHMARKS / "gpu.sh"), "--dry-run", "--out", str(out), "--budget", "700"]
    command += ["--stand-in"] if device == "stand-in" else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = gpu_results.read(out)
    said_errors = {row["part"]: row["error"] for row in rows if row.get("error")}
    assert not said_errors
    found = json.loads((out / "analysed" / "gpu-dry-run.json").read_text())
    tiny = found["models"]["gpt-tiny"]
    assert len(tiny["configurations"]) >= 4 and tiny["forecast"]["before"]["n"] >= 4
    assert set(found["startup"]) == {"gpt-small", "gpt-tiny"} and found["honesty"]["rounds"] == 1
    assert found["search"]["exit_status"] == 0 and found["search"]["trials"] >= 2
    assert [each["exit_status"] for each in found["commands"]] == [0, 0, 0, 0, 0]
    assert len(found["models"]["gpt-small"]["configurations"]) >= 1
    capped = [row for row in found["limits"] if "ran" in row]
    assert len(capped) == 2
    if device == "cpu":  # what stands in for a device has no allocator that fails
        assert any("oom" in row["outcomes"] for row in capped), capped
    assert found["kill"]["killed"] == "crashed" and found["kill"]["next_trial"] in ("complete", "oom")
    assert found["outcomes"].get("illegal", 0) <= 1 and not found["crashes"]  # most CPUs refuse fp16
    names = {path.name for path in (out / "analysed" / "studies" / "dry-run-gpt-tiny").iterdir()}
    assert {"study.yaml", "model.py", "recommended.json", "front.json", "README.md"} <= names
