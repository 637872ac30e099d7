"""A made-up study such as `studies/code-gpt` leaves behind, and a reader of the page that shows it."""

import base64
import json
import random
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

from autotune.report.data import StudyReport
from autotune.report.script_changes import script_side_changes
from autotune.scoring import recommend
from autotune.scoring.estimates import estimate
from autotune.scoring.measured import Measured
from autotune.scoring.objective import Objective
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

MIB = 2**20
OBJECTIVES = ["step_time_s", "samples_per_s", "time_to_loss_s", "peak_memory_bytes"]
ENVIRONMENT = {
    "accelerator": "cpu", "device_name": "AMD EPYC 9654 96-Core Processor", "n_devices": 1, "device_memory_bytes": 16 * 2**30, "bf16": True,
    "fp16": False, "n_cores": 2, "versions": {"python": "3.11.9", "torch": "2.13.0+cpu", "deepspeed": "0.19.8"},
}  # fmt: skip
WORKLOAD = {
    "n_parameters": 3_240_448, "n_trainable": 3_240_448, "n_samples": 181_204, "n_blocks": 4, "block_class": "Block", "block_share": 0.974,
    "client_optimizer": True, "environment": ENVIRONMENT, "caveats": ["rank 0 and rank 1 share 2 cores"],
}  # fmt: skip
STUDY = {"name": "code-gpt", "target": "/home/ann/models/studies/code-gpt/model.py", "ranks": 2, "objectives": OBJECTIVES, "n_trials": 30,
         "wall_s": 222.4, "sampler": "tpe", "seed": 0}  # fmt: skip


def measured(values: dict, rng: random.Random) -> dict:
    """What a trial of this candidate could have read on two cores."""
    candidate = Candidate.of(values)
    batch = candidate.global_batch_size(2)
    speed = {"fp32": 1.0, "bf16": 0.48, "torch_autocast": 0.7}[candidate.precision]
    recompute = 1 + 0.25 / candidate.checkpoint_every if candidate.checkpoint_every else 1.0
    step = (0.028 + 0.0042 * batch * speed * recompute + 0.012 * candidate.zero_stage) * rng.uniform(0.97, 1.03)
    memory = (
        118
        + 31 * speed
        + candidate.micro_batch_size * 6.1 * speed * (0.45 if candidate.checkpoint_every else 1.0)
        + 18 * (candidate.zero_stage == 3)
    ) * MIB
    to_loss = step * (260 + 2900 / batch) * rng.uniform(0.94, 1.06)
    return {"step_time_s": step, "samples_per_s": batch / step, "tokens_per_s": 64 * batch / step, "peak_memory_bytes": round(memory),
            "time_to_loss_s": to_loss, "cpu_s_per_step": 1.8 * step}  # fmt: skip


def study_report(n_trials: int = 30, **changes) -> StudyReport:
    """A study such as `studies/code-gpt` leaves behind."""
    rng = random.Random(7)
    baseline = {"micro_batch_size": 8, "gradient_accumulation_steps": 1, "zero_stage": 0, "precision": "fp32"}
    trials = []
    for number in range(n_trials):
        drawn = {
            "micro_batch_size": rng.choice([2, 4, 8, 16, 32]), "gradient_accumulation_steps": rng.choice([1, 2, 4]),
            "zero_stage": rng.choice([0, 1, 2, 3]), "precision": rng.choice(["fp32", "bf16", "bf16", "torch_autocast"]),
            "checkpoint_every": rng.choice([0, 0, 1, 2]),
        }  # fmt: skip
        trials.append(one_trial(number, baseline if number == 0 else drawn, rng))
    found = [as_measured(trial, trials[0]) for trial in trials]
    estimates = estimate(found)
    answer = recommend.recommend(estimates, [Objective(name=name, metric=name) for name in OBJECTIVES], world_size=2)
    for trial, seen in zip(trials, estimates.measured, strict=True):
        trial.update(recommend.figures(seen, estimates))
    recommended = {
        "picks": {name: pick.to_data() for name, pick in answer.picks.items()},
        "baseline": answer.baseline and answer.baseline.to_data(),
    }
    given = {
        "study": STUDY | {"n_trials": n_trials}, "recommended": recommended, "trials": trials,
        "front": [recommend.point(m, estimates) for m in answer.front], "environment": ENVIRONMENT, "workload": WORKLOAD,
    }  # fmt: skip
    return StudyReport(**(given | changes))


def as_measured(trial: dict, baseline: dict) -> Measured:
    candidate = Candidate.of(trial["candidate"])
    return Measured(
        trial=trial["trial"], candidate=candidate, ds_config=candidate.to_deepspeed({"gradient_clipping": 1.0}),
        outcome=Outcome(trial["outcome"]), metrics=trial["metrics"], ci95={name: tuple(ends) for name, ends in trial["ci95"].items()},
        script_side_changes=script_side_changes(candidate, Candidate.of(baseline["candidate"]), "Block"),
    )  # fmt: skip


def one_trial(number: int, values: dict, rng: random.Random) -> dict:
    candidate = Candidate.of(values).values()
    trial = {"trial": number, "role": "search" if number else "baseline", "outcome": "complete", "reason": "", "phase": "done",
             "candidate": candidate, "metrics": {}, "ci95": {}, "wall_s": rng.uniform(3.4, 5.2), "caveats": [], "censored": [],
             "feasible": True}  # fmt: skip
    if number and number % 11 == 5:
        return trial | {"outcome": "oom", "reason": "over the memory limit", "phase": "warmup", "wall_s": 1.1}
    if number and number % 13 == 6:
        reason = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
        return trial | {"outcome": "crashed", "reason": reason, "phase": "initialize", "wall_s": 0.8}
    if number == 17:
        return trial | {
            "outcome": "diverged",
            "reason": "the loss was not finite at step 12",
            "phase": "measure",
            "wall_s": 1.9,
        }
    metrics = measured(values, rng)
    half = {"step_time_s": 0.014, "samples_per_s": 0.014, "tokens_per_s": 0.014, "time_to_loss_s": 0.08}
    ci95 = {name: [value * (1 - half.get(name, 0)), value * (1 + half.get(name, 0))] for name, value in metrics.items()}
    n = max(12, int(3 / metrics["step_time_s"]))
    batch = Candidate.of(values).global_batch_size(2)
    losses = [1.9 + 3.7 / (1 + i * batch / 320) + rng.gauss(0, 0.35 / batch**0.5) for i in range(n)]
    times = [metrics["step_time_s"] * rng.uniform(0.98, 1.03) for _ in range(n)]
    busy = ["the machine was busy: other processes used 0.7 cores while steps were timed"] if number in (0, 9) else []
    censored = ["time_to_loss_s"] if number % 7 == 3 else []
    expected = {
        name: metrics[name] * (0.9 + 0.2 * (number * 0.618 % 1)) for name in ("peak_memory_bytes", "step_time_s")
    }
    forecast = {name: [value, 0.9 * value, 1.12 * value] for name, value in expected.items()}
    return trial | {"metrics": metrics, "ci95": ci95, "losses": losses, "step_times_s": times, "caveats": busy, "censored": censored,
                    "forecast": forecast}  # fmt: skip


EVIL = '<img src=x onerror=alert(1)></script><script>document.title="owned"</script>'


class Tags(HTMLParser):
    """Every element with its attributes, and the texts by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "wbr"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, "elements are closed in order"

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


def with_picks(report: StudyReport, **picks) -> StudyReport:
    return replace(report, recommended={**report.recommended, "picks": {**report.picks, **picks}})


def data_of(page: str) -> dict:
    """What the page's script reads."""
    return json.loads(unpacked(page, "data"))


def unpacked(page: str, name: str) -> str:
    """What a page holds compressed."""
    return zlib.decompress(base64.b64decode(re.search(rf'id="{name}">([^<]*)<', page)[1])).decode()
