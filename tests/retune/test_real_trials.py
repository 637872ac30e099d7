"""A re-tuning with real trials, on PostgreSQL where that is installed: what was the best becomes slow, and the answer follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import postgres

pytestmark = pytest.mark.system

MODEL = '''
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

CHANGED = Path(__file__).with_name("changed")

class Net(nn.Module):
    """bf16 is the fast one, until a file says that it is not."""
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    def forward(self, x):
        narrow = self.layers[0].weight.dtype is torch.bfloat16
        time.sleep(0.03 if narrow == CHANGED.exists() else 0.01)
        return self.layers(x)

def model():
    return Net()

def data():
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(dim=1))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
'''
STUDY = """
target: model.py
name: s
objectives: [throughput]
space: [{precision: {choices: [fp32, bf16]}, zero_stage: {choices: [0, 1]}}]
base_config: {train_micro_batch_size_per_gpu: 4, optimizer: {type: AdamW, params: {lr: 0.001, torch_adam: true}}}
global_batch: keep
ranks: 2
trials: 4
trial_budget_s: 1
"""


@pytest.fixture
def storage() -> Iterator[list[str]]:
    programs = postgres.binaries()
    if programs is None:
        yield []  # SQLite
        return
    with postgres.running(programs) as server:
        yield ["--storage", server.url]


def test_what_became_slow_is_replaced_and_the_history_tells_it(tmp_path: Path, storage: list[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "study.yaml").write_text(STUDY)
    folder = tmp_path / "studies" / "s"
    config = folder / "ds_config.json"

    def autotune(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "autotune"), *arguments, *storage]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False
        )

    done = autotune("run", "study.yaml")
    assert done.returncode == 0, done.stderr
    before = config.read_text()
    assert json.loads(before)["bf16"] == {"enabled": True}, done.stdout
    (tmp_path / "changed").touch()
    done = autotune("retune", "s")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "bf16" not in json.loads(config.read_text())
    (previous,) = (folder / "retunes").glob("*/previous/ds_config.json")
    assert previous.read_text() == before
    told = json.loads(autotune("history", "s", "--what", "decisions", "--json").stdout)
    assert [row["verdict"] for row in told] == ["improved"]
