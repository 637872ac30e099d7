"""Counts the injected faults that the quality gate refuses, and the clean numerics that it passes, on two small models.

`python benchmarks/gate.py faults`: the learning rate x 30, bf16 sums over 64 micro-steps, sign compression without
error feedback, two wrong loss scales, on a transformer under Adam and a net under SGD, over several seeds: each has to
be refused every time. `python benchmarks/gate.py clean`: 100 pairs of a reference and other numerics that are in order
(bf16, autocast, 16 bits on the wire, fp32 accumulation), at several stages: fewer than two may be refused. Both write
to `results/gate.json`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, engine, request_of, write

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.scoring.convergence import quality_gate
from autotune.space.candidate import Candidate
from autotune.trial.result import TrialResult

STEPS, REPLICATES, RANKS = 40, 2, 2

TASKS = {
    "transformer, Adam": '''
VOCABULARY, LENGTH, WIDTH = 64, 16, 48
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.mlp(self.norm2(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    def forward(self, x):
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
def data():
    draw = torch.Generator().manual_seed(0)
    table = torch.softmax(2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=draw), dim=-1)
    text = torch.zeros(8192, LENGTH + 1, dtype=torch.long)
    text[:, 0] = torch.randint(VOCABULARY, (8192,), generator=draw)
    for t in range(LENGTH):
        text[:, t + 1] = torch.multinomial(table[text[:, t]], 1, generator=draw)[:, 0]
    return TensorDataset(text[:, :-1], text[:, 1:])
def plain_loss(model, batch):
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())
def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3 * RATE)
''',
    "net, SGD": '''
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
def data():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 32, generator=draw)
    return TensorDataset(x, (x[:, :10] + 0.5 * x[:, 10:20] * x[:, 20:30]).argmax(dim=1))
def plain_loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1 * RATE, momentum=0.9)
''',
}  # fmt: skip
MODEL = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
RATE, SCALE, SIGN = {rate}, {scale}, {sign}
{task}
def model():
    return Net()
def loss(model, batch):
    value = plain_loss(model, batch)
    return value.detach() + SCALE * (value - value.detach())
if SIGN:
    from deepspeed.runtime.engine import DeepSpeedEngine
    reduce = DeepSpeedEngine.allreduce_bucket
    def compressed(self, *args, **kwargs):
        whole = reduce(self, *args, **kwargs)
        return whole.sign() * whole.abs().mean()
    DeepSpeedEngine.allreduce_bucket = compressed
"""
# What is wrong in the target, and the knobs of the candidate.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learning rate x 30": ({"rate": 30}, {"precision": "bf16", "zero_stage": 1}),
    "bf16 sums over 64 micro-steps": (
        {}, {"precision": "bf16", "zero_stage": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 64},
    ),
    "bf16 sums over 64 micro-steps, stage 2": (
        {}, {"precision": "bf16", "zero_stage": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 64},
    ),
    "sign compression without error feedback": ({"sign": True}, {"precision": "fp32", "zero_stage": 0}),
    "loss scale 1024 too high": ({"scale": 1024.0}, {"precision": "bf16", "zero_stage": 1}),
    "loss scale 1024 too low": ({"scale": 1 / 1024}, {"precision": "torch_autocast", "zero_stage": 0}),
}  # fmt: skip
EXACT = {"data_types.grad_accum_dtype": "fp32"}
HALVED = {"micro_batch_size": 16, "gradient_accumulation_steps": 2}
CLEAN: dict[str, dict[str, Any]] = {
    "bf16, stage 0": {"precision": "bf16"},
    "bf16, stage 1": {"precision": "bf16", "zero_stage": 1},
    "bf16, stage 3": {"precision": "bf16", "zero_stage": 3},
    "autocast, stage 0": {"precision": "torch_autocast"},
    "autocast, stage 2": {"precision": "torch_autocast", "zero_stage": 2},
    "bf16 wire, stage 0": {"communication_data_type": "bf16"},
    "bf16 wire, stage 2": {"communication_data_type": "bf16", "zero_stage": 2},
    "bf16, accumulated in fp32, stage 1": {"precision": "bf16", "zero_stage": 1, **HALVED, **EXACT},
    "bf16, accumulated in fp32, stage 2": {"precision": "bf16", "zero_stage": 2, **HALVED, **EXACT},
    "bf16, two micro-steps, stage 2": {"precision": "bf16", "zero_stage": 2, **HALVED},
}  # fmt: skip


class Bench:
    """Runs trials of a task, one after another."""

    def __init__(self, executor: LocalExecutor, folder: Path) -> None:
        self.executor, self.folder, self.n = executor, folder, 0

    def run(
        self, task: str, seed: int, knobs: dict[str, Any], fault: dict[str, Any] | None = None, replicate: int = 0
    ) -> TrialResult:
        self.n += 1
        target = self.folder / f"model_{self.n}.py"
        target.write_text(MODEL.format(task=TASKS[task], **({"rate": 1, "scale": 1.0, "sign": False} | (fault or {}))))
        candidate = Candidate.of({"micro_batch_size": 32, **knobs})
        request = request_of(
            target, candidate, world_size=RANKS, seed=seed, max_steps=STEPS, min_samples=10**12, budget_s=120.0,
            check_gradient=True, replicate=replicate,
        )  # fmt: skip
        return base.run(self.executor, self.folder / str(self.n), request)

    def references(self, task: str, seed: int, micro: int) -> list[TrialResult]:
        return [self.run(task, seed, {"micro_batch_size": micro}, replicate=n) for n in range(REPLICATES + 1)]


def refusal(own: TrialResult, references: list[TrialResult]) -> str:
    """Why the gate refuses a candidate; empty if it does not."""
    reference, *others = references
    if own.outcome != "complete":
        return f"{own.outcome}: {own.reason}"
    if wrong := quality_gate.judge_gradient(own.gradient, reference.gradient, {}):
        return wrong
    found = quality_gate.judge(own.losses, reference.losses, [each.losses for each in others])
    return "" if found.passed else found.reason


Verdict = tuple[str, bool, str]  # the pair, whether it is refused, and why


def faults(bench: Bench) -> Iterator[Verdict]:
    for task, seed in itertools.product(TASKS, range(3)):
        references = {micro: bench.references(task, seed, micro) for micro in (32, 64)}
        for name, (fault, knobs) in FAULTS.items():
            micro = 64 if knobs.get("micro_batch_size") == 1 else 32
            why = refusal(bench.run(task, seed, knobs, fault), references[micro])
            yield name, bool(why), why


def clean(bench: Bench) -> Iterator[Verdict]:
    for task, seed in itertools.product(TASKS, range(5)):
        references = bench.references(task, seed, 32)
        for name, knobs in CLEAN.items():
            why = refusal(bench.run(task, seed, knobs), references)
            yield name, bool(why), why


def scored(found: Iterator[Verdict]) -> dict[str, Any]:
    start, rows, by_kind = time.perf_counter(), list[Verdict](), dict[str, list[int]]()
    for row in found:
        rows.append(row)
        print(*row, sep="; ", flush=True)
        kind = by_kind.setdefault(row[0], [0, 0])
        kind[0] += row[1]
        kind[1] += 1
    return {
        "refused": sum(hit for _, hit, _ in rows), "of": len(rows), "by_kind": by_kind, "seconds": time.perf_counter() - start,
        "for_example": {name: why for name, _, why in rows if why},
    }  # fmt: skip


def main() -> None:
    path = RESULTS / "gate.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    figures.pop("measured_on", None)
    with engine("torch") as (executor, folder):
        for part in sys.argv[1:] or ["faults", "clean"]:
            figures[part] = scored({"faults": faults, "clean": clean}[part](Bench(executor, folder)))
    write("gate", figures)


if __name__ == "__main__":
    main()
