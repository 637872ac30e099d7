"""What the parts of `gpu.py` share: models and their studies, trials beside their forecasts, results line by line."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from common import request_of

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.forecast.predictor import Predictor
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study.setup.plan import Plan
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

MODEL = Path(__file__).parent / "gpu_model.py"


@dataclass(frozen=True)
class Size:
    """A model: its shape, and a micro-batch that any card takes."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    micro: int
    on_device: bool = False  # where the model is built

    @property
    def line(self) -> str:
        shape = (self.layers, self.width, self.heads, self.context, self.vocabulary, self.on_device)
        return f"LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, ON_DEVICE = {', '.join(map(str, shape))}"


SIZES = {
    "gpt-125m": Size(12, 768, 12, 1024, 50304, 8),
    "gpt-350m": Size(24, 1024, 16, 1024, 50304, 4),
    "gpt-760m": Size(24, 1536, 16, 2048, 50304, 2),
    "gpt-1.3b": Size(24, 2048, 16, 2048, 50304, 1, on_device=True),
}
TINY = {"gpt-tiny": Size(2, 32, 2, 16, 64, 2), "gpt-small": Size(2, 64, 2, 32, 64, 2, on_device=True)}


class Output:
    """The results, one line each, on the disk as soon as they are there, after those of earlier calls."""

    SHOWN = ("model", "words", "outcome", "step_time_s", "reason", "error")

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self.start = folder, folder / "results.jsonl", time.monotonic()
        if self.path.exists() and not self.path.read_bytes().endswith(
            b"\n"
        ):  # a call was killed in the midst of a line
            with self.path.open("a") as file:
                file.write("\n")

    def write(self, part: str, **what: Any) -> None:
        at_s = round(time.monotonic() - self.start, 2)
        with self.path.open("a") as file:
            file.write(json.dumps({"part": part, "at_s": at_s, **what}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shown = {key: value for key, value in what.items() if key in self.SHOWN}
        print(f"{at_s:7.1f} s  {part}  {json.dumps(shown)}", flush=True)


class Bench:
    """One model with its study's plan, an engine, and what was learned of it so far."""

    def __init__(self, name: str, size: Size, found: Plan, executor: LocalExecutor, folder: Path) -> None:
        self.name, self.size, self.found, self.executor, self.folder, self.n = name, size, found, executor, folder, 0
        workload = found.workload
        assert workload.profile is not None and workload.machine is not None, found.notes
        self.predictors = {  # before and after any trial
            name: Predictor(workload.profile, workload.machine, found.base_config) for name in ("before", "after")
        }

    def measure(
        self, output: Output, part: str, knobs: dict[str, Any], *, budget_s: float, deadline_s: float = 90.0,
        cap_bytes: int | None = None, max_steps: int = 1000,
    ) -> TrialResult | None:  # fmt: skip
        """One trial, written with what was expected of it; None where the configuration cannot run here."""
        candidate = Candidate.of(knobs)
        row = {
            "model": self.name,
            "words": candidate.describe(),
            "candidate": candidate.values(),
            "cap_bytes": cap_bytes,
        }
        # What one rank cannot gain by is no proposal of a search, but it runs, and shows whether its forecast holds.
        setting = replace(self.found.setting, global_batch=None, world_size=max(2, self.found.setting.world_size))
        if reason := why_illegal(candidate, setting):
            output.write(part, **row, outcome="illegal", reason=reason)
            return None
        self.n += 1
        path = self.folder / "measured" / f"{self.n:04d}"
        request = self.request(
            candidate, budget_s=budget_s, deadline_s=deadline_s, max_steps=max_steps, device_memory_bytes=cap_bytes
        )
        row["expected"] = {name: self.expected(name, candidate) for name in self.predictors}
        result = base.run(self.executor, path, request)
        row |= {name: getattr(result, name) for name in ("outcome", "reason", "wall_s", "startup_s")}
        if result.outcome is Outcome.COMPLETE and result.steps is not None:
            row |= self.figures(result)
            seen = {"peak_memory_bytes": result.peak_memory_bytes, "step_time_s": result.steps.median_s}
            self.predictors["after"].learn(candidate, **seen)
        output.write(part, **row)
        return result

    def request(self, candidate: Candidate, **fields: Any) -> TrialRequest:
        config = self.found.ds_config(candidate)
        return request_of(self.found.spec.target, candidate, **{"ds_config": config, "deadline_s": 90.0, **fields})

    def expected(self, name: str, candidate: Candidate) -> dict[str, Any]:
        predictor, found = self.predictors[name], {}
        for metric, said in (
            ("peak_memory_bytes", predictor.memory(candidate).total), ("step_time_s", predictor.step_time(candidate).total),
        ):  # fmt: skip
            found[metric] = {"value": said.value, "low": said.low, "high": said.high}
        return found

    def figures(self, result: TrialResult) -> dict[str, Any]:
        assert result.steps is not None
        same = ("samples_per_step", "tokens_per_step", "micro_step_s", "phase_times_s", "peak_memory_bytes",
                "memory_by_phase_bytes", "alloc_retries", "reserved_memory_bytes")  # fmt: skip
        load = result.device_load
        return {name: getattr(result, name) for name in same} | {
            "step_time_s": result.steps.median_s, "ci95_s": result.steps.ci95_s, "n_steps": result.steps.n_steps,
            "final_loss": result.losses[-1] if result.losses else None, "device_load": load and asdict(load),
            "joules_per_step": load.power_w * result.steps.median_s if load and load.power_w is not None else None,
        }  # fmt: skip


def grid(size: Size) -> list[dict[str, Any]]:
    """The configurations of the first model, what tells most first."""
    plain = {"micro_batch_size": size.micro, "precision": "bf16"}
    many = {"micro_batch_size": 4 * size.micro}
    changes: list[dict[str, Any]] = [
        {}, {"zero_stage": 1}, {"precision": "fp16", "zero_stage": 1}, {"precision": "fp32"}, {"zero_stage": 3}, {"checkpoint_every": 1},
        {"zero_stage": 2}, {"precision": "torch_autocast"}, {"zero_stage": 2, "offload_optimizer": "cpu"},
        {"micro_batch_size": 1}, {"micro_batch_size": 2 * size.micro}, {"zero_stage": 1, "gradient_accumulation_steps": 4},
        {"zero_stage": 2, "gradient_accumulation_steps": 4}, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"precision": "fp16"}, {"precision": "fp16", "zero_stage": 3},
    ]  # fmt: skip
    sixteen = {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    changes += [
        {"zero_stage": 1, **sixteen}, many, {**many, "checkpoint_every": 1}, {**many, "checkpoint_every": 2},
    ]  # fmt: skip
    return [{**plain, **change} for change in changes]


def unseen(size: Size) -> list[dict[str, Any]]:
    """Configurations that no other part measures, against whose figures the forecast after the grid is held."""
    plain = {"micro_batch_size": size.micro, "precision": "bf16"}
    thrice = {**plain, "micro_batch_size": 3 * size.micro}
    return [
        thrice, {**thrice, "zero_stage": 1, "checkpoint_every": 1}, {**plain, "zero_stage": 3, "checkpoint_every": 2},
        {**thrice, "zero_stage": 2, "gradient_accumulation_steps": 2}, {**plain, "zero_stage": 1, "offload_optimizer": "cpu"},
        {**plain, "micro_batch_size": 6 * size.micro, "checkpoint_every": 1},
    ]  # fmt: skip


def larger(size: Size) -> list[dict[str, Any]]:
    plain = {"micro_batch_size": size.micro, "precision": "bf16"}
    twice = {**plain, "micro_batch_size": 2 * size.micro}
    return [
        {**plain, "zero_stage": 1}, {**plain, "checkpoint_every": 1}, {**twice, "zero_stage": 1, "checkpoint_every": 1},
        {**plain, "zero_stage": 2, "offload_optimizer": "cpu"}, {**plain, "zero_stage": 3}, plain,
    ]  # fmt: skip


def write_study(folder: Path, size: Size, *, dry: bool) -> Path:
    """A study's folder with the model of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    text, n = re.subn(r"^LAYERS, WIDTH.*$", size.line, MODEL.read_text(), flags=re.MULTILINE)
    assert n == 1, "gpu_model.py has no line of sizes"
    (folder / "model.py").write_text(text)
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True, "fused": True}}
    config = {"train_micro_batch_size_per_gpu": size.micro, "bf16": {"enabled": True}, "optimizer": optimizer}
    study = {
        "target": "model.py", "ranks": 1, "base_config": config, "global_batch": "free", "seed": 0,
        "space": ["batch", "zero", "precision", "checkpointing", "offload"],
        "objectives": ["latency", "throughput", "memory"], "trial_deadline_s": 90,
        **({"trials": 4, "trial_budget_s": 0.2, "finalists": 1, "repeats": 1} if dry else
           {"trials": 40, "trial_budget_s": 2, "finalists": 3, "repeats": 2}),
    }  # fmt: skip
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path
