"""The comparison with other tuners: what is judged, and the script that all of them are given."""

import json
import os
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS

with pytest.MonkeyPatch.context() as patch:  # left on the path, its names would be found by whoever imports after us
    patch.syspath_prepend(str(BENCHMARKS))
    import peers


TRAINING = {"script": "train.py", "arguments": [], "base": {}}


@pytest.fixture
def answered(tmp_path):
    """Three tuners that have answered; the claim of the second is 10 % too high."""
    for name, rate, claimed, wall in (
        ("deepspeed", 100.0, 100.0, 300.0),
        ("tpe", 110.0, 121.0, 150.0),
        ("autotune", 150.0, 150.0, 15.0),
    ):
        answer = {
            "config": {"rate": rate},
            "claimed_samples_per_s": claimed,
            "wall_s": wall,
            "trials": 3,
            "training": TRAINING,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    (tmp_path / "judged.json").write_text("{}")
    return tmp_path


def test_answers_are_judged_in_turns_by_what_they_reach_under_torchrun(answered, monkeypatch):
    ran, written = [], {}

    def torchrun(training, config, folder, steps):
        ran.append(config["rate"])
        return 16 / config["rate"], 16.0

    monkeypatch.setattr(peers, "torchrun", torchrun)
    monkeypatch.setattr(peers, "write", lambda name, figures: written.update({name: figures}))
    peers.judge(answered, rounds=2)
    assert ran == [150.0, 100.0, 110.0] * 2
    found = written["peers"]
    assert found["autotune"]["throughput_over_deepspeed"] == pytest.approx(1.5)
    assert found["autotune"]["seconds_of_deepspeed_over_own"] == pytest.approx(20)
    assert found["tpe"]["claim_over_measured"] == pytest.approx(1.1) and found["deepspeed"][
        "claim_over_measured"
    ] == pytest.approx(1.0)


def test_an_answer_that_does_not_run_is_told_and_the_others_are_judged(answered, monkeypatch):
    written = {}
    monkeypatch.setattr(
        peers, "torchrun", lambda training, config, *_: None if config["rate"] == 100.0 else (0.1, 16.0)
    )
    monkeypatch.setattr(peers, "write", lambda name, figures: written.update({name: figures}))
    peers.judge(answered, rounds=1)
    assert written["peers"]["deepspeed"]["error"] == "its answer does not run under torchrun"
    assert (
        "throughput_over_deepspeed" not in written["peers"]["autotune"]
        and written["peers"]["autotune"]["samples_per_s"] == 160.0
    )


def test_without_answers_the_judge_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match="run one first"):
        peers.judge(tmp_path, rounds=1)


@pytest.mark.process
def test_the_script_trains_what_its_json_says_and_prints_its_steps(tmp_path):
    """One rank, without a launcher: micro-batch 2, two of them a step."""
    config = {**peers.BASE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
    }
    environment |= {"MASTER_PORT": str(20000 + os.getpid() % 20000)}
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
