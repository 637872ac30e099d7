"""`autotune advise` as a user types it."""

import json
import sys

import pytest
from support.commands import autotune, called, one_sentence

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000,
}  # fmt: skip


def test_names_are_answered_with_a_waterfall_and_the_next_best(tmp_path):
    done = called("advise", "Qwen/Qwen3-8B", "--gpus", "8xA100-40", "--seq", "4096", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    for part in (
        "8.19B parameters",
        "device memory",
        "activations",
        "host memory",
        "step time",
        "tokens/s",
        "MFU",
        "bound by",
        "next best",
        "fewest devices",
    ):
        assert part in done.stdout


def test_time_money_and_the_json_of_a_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    more = ["--tokens", "10B", "--price", "$2.10/h", "-o", "out.json", "--json"]
    done = called("advise", "./config.json", "--gpus", "2x8xH100", *more, cwd=tmp_path)
    said = json.loads(done.stdout)
    assert json.loads((tmp_path / "out.json").read_text()) == said["ds_config"]
    assert said["model_source"] == "./config.json"
    assert said["cost"]["value"] == pytest.approx(said["hours"]["value"] * 16 * 2.10)
    assert said["hours"]["value"] == pytest.approx(1e10 / said["tokens_per_s"]["value"] / 3600)
    assert said["hours"]["low"] < said["hours"]["value"] < said["hours"]["high"]
    assert sum(said["peak_memory_bytes"]["terms"].values()) == pytest.approx(said["peak_memory_bytes"]["value"])


def test_cards_are_compared_a_line_each(tmp_path):
    done = called("advise", "7B", "--gpus", "8xA100-80", "--compare", "H100,4090", "--method", "LoRA", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["8 x A100-80GB", "8 x H100-80GB", "8 x RTX-4090"]


@pytest.mark.system
def test_a_line_of_a_comparison_holds_the_whole_configuration(tmp_path):
    """It was cut at 60 signs, so that a bucket of 50,000,000 elements read as one of 5,000,000."""
    one = called("advise", "8B", "--gpus", "4xA100-40", cwd=tmp_path).stdout
    best = next(line for line in one.splitlines() if line.startswith("best for throughput")).split(maxsplit=3)[3]
    said = called("advise", "8B", "--gpus", "4xA100-40", "--compare", "H100", cwd=tmp_path).stdout.splitlines()[1]
    assert len(best) > 60 and said.endswith(f"  {best}")


def test_what_does_not_fit_is_said_and_ends_with_status_1(tmp_path):
    done = called("advise", "70B", "--gpus", "1x4090", cwd=tmp_path)
    assert done.returncode == 1 and "does not fit" in done.stdout
    assert "likeliest to fit" in done.stdout and "best for" not in done.stdout


def test_a_name_may_be_written_in_words_and_the_memory_that_lacks_is_named(tmp_path):
    done = called("advise", "qwen3", "8b", "--gpus", "A6000", "--price", "2", cwd=tmp_path)
    device, host = (
        next(row for row in done.stdout.splitlines() if row.startswith(f"{which} memory"))
        for which in ("device", "host")
    )
    assert done.returncode == 1 and device.endswith(": fits") and host.endswith("does not fit")
    assert "the host's memory" in done.stdout and "--method lora" in done.stdout and "1B tokens" in done.stdout


def test_cards_to_compare_may_state_their_number_and_long_times_are_years(tmp_path):
    said = called(
        "advise", "qwen3-8b", "--gpus", "8xH100", "--tokens", "1e15", "--compare", "4x4090", cwd=tmp_path
    ).stdout
    assert "4 x RTX-4090" in said and " y " in said


def test_a_card_may_be_stated_alone(tmp_path):
    stated = ["--device-memory", "64GiB", "--peak-flops", "400T", "--host-memory", "1TiB", "--network", "800Gbit/s"]
    assert "8 x Nova" in called("advise", "7B", "--gpus", "8xNova", *stated, cwd=tmp_path).stdout


# The command line, and what the sentence says.
WRONG = {
    "7B": "--gpus is needed",
    "foo --gpus H100": "no model of this name",
    "7B --gpus 8xH1000": "unknown card 'H1000'",
    "7B --gpus 0xH100": "0 devices",
    "7B --gpus 2x8xH100 --nodes 2": "twice",
    "nix.json --gpus H100": "there is no file nix.json",
    "nix.py --gpus H100": "no file nix.py",
    "7B --gpus H100 --method lorra": "Did you mean 'lora'",
    "7B --gpus H100 --goal speed": "throughput, latency, memory, cost",
    "7B --gpus H100 --seq 0": "--seq 0",
    "7B --gpus 8xH100 --global-batch 12": "multiple of 8",
    "7B --gpus H100 --set zero_stagee=3": "Did you mean 'zero_stage'",
    "7B --gpus H100 --set zero_stage=7": "not one of 0, 1, 2, 3",
    "7B --gpus H100 --set zero_stage": "KEY=VALUE",
    "7B --gpus 8xH100 --set offload_optimizer=nvme": "needs its nvme_path",
    "7B --gpus 8xH100 --set micro_batch_size=7 --global-batch 64": "no such micro-batch gives a global batch of 64",
    "7B --gpus H100 --set micro_batch_size=1 --set data.max_length=100": "a model by name comes without data; --seq says",
    "7B --gpus H100 --tokens many": "as in 10B",
    "7B --gpus H100 --tokens 1,5B": "as in 10B",  # was 15B
    "7B --gpus H100 --price -3": "as in 2.10/h",
    "7B --gpus H100 --peak-flops -1": "as in 400T",
    "7B --gpus H100 --device-memory zz": "--device-memory",
    "7B --gpus H100 --host-memory 0": "state a unit",
    "7B --gpus H100 --device-memory 0GiB": "more than 0",
    "0B --gpus H100": "between 10M and 5T",
    "7B --gpus H100 --compare H100,H1000": "--compare: unknown card 'H1000'; the nearest are",
    "7B --gpus H100 --compare 12xH100": "--compare 12xH100: 12 devices are no whole number of nodes",
    "gpt2 --gpus H100 --seq 100000": "1,024 learned positions",
    "7B --gpus H100 --method lora --lora-rank 100000": "narrower than the model",
    "7B --gpus 8xH100 --method lora --set tensor_parallel.autotp_size=2": "AutoTP does not train adapters",
    "7B --gpus H100 --lora-rank 8": "--lora-rank 8: full fine-tuning has no adapters; give --method lora",
    "model.py --gpus H100 --method lora --loss fused": "--method lora, --loss fused: model.py says itself how it trains",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_told_in_one_sentence(tmp_path, line):
    assert WRONG[line] in one_sentence(called("advise", *line.split(), cwd=tmp_path))


@pytest.mark.process
def test_names_are_answered_without_torch_and_deepspeed(tmp_path):
    program = (
        "import sys; from autotune.cli.app import main; sys.argv = ['autotune', 'advise', '7B', '--gpus', 'H100']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "found = {'torch', 'deepspeed', 'optuna', 'scipy', 'pandas'} & set(sys.modules); assert not found, found"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, capture_output=True, timeout=60)


@pytest.mark.system
def test_a_model_file_is_profiled_here_and_advised_for_other_devices(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef model():\n    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])\n\n"
        "def data():\n    return [(torch.zeros(64), torch.zeros(64)) for _ in range(64)]\n\n"
        "def loss(model, batch):\n    x, y = batch\n    return ((model(x) - y) ** 2).mean()\n"
    )
    done = autotune("advise", "model.py", "--gpus", "8xH100", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["fits_probability"] > 0.9
    # Rows of 64 numbers are no sequences of 64 tokens, as which they were counted.
    assert said["tokens_per_s"] is said["sequence"] is None and said["global_batch"] <= 4096
    assert said["samples_per_s"]["value"] * said["step_time_s"]["value"] == pytest.approx(said["global_batch"])
    refused = autotune("advise", "model.py", "--gpus", "8xH100", "--tokens", "1B", cwd=tmp_path)
    assert refused.returncode == 2 and "no sequences of tokens" in one_sentence(refused)
