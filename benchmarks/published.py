"""Fit the constants of `autotune advise` on published runs, and say how well they do on sources that were left out.

    python benchmarks/published.py  # writes autotune/advise/constants.json and benchmarks/results/published.json

Each row of `truth/published.csv` is a run that somebody published: it fitted or not, used so much, went so fast. Rows
of one `source_group` are left out together, the constants are fitted on all others, and the rows are then forecast with
them: all figures are of rows that the constants had not seen. The constants that are shipped are fitted on all rows.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from scipy.optimize import least_squares

from autotune.advise.architecture import PLAIN, TIED, Architecture
from autotune.advise.constants import CONSTANTS, FILE, Constants
from autotune.advise.devices import GENERATIONS, GIB, Devices, device_card
from autotune.advise.forecast import Forecasts, forecast, host_terms
from autotune.advise.shape import Training, profile_of
from autotune.forecast.knobs import Knobs
from autotune.forecast.words import SURE
from autotune.scoring.quantiles import Z95
from autotune.space.candidate import Candidate
from autotune.trial.profile import Profile

ROWS = Path(__file__).parent / "truth" / "published.csv"
ZERO = "zero_optimization."
# Number, card, and memory of one.
DEVICES = re.compile(r"(\d+) x (\S+) x (\S+)")
# What is known of a source's trainer and not in its rows. `loss`: llm-foundry and llm.c fuse the cross-entropy in
# place; classifiers have no output layer over the vocabulary.
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    "llm-foundry": {"lean": True, "loss": "fused", "optimizer": "fused-adamw"},
    "torchtitan": {"lean": True, "loss": "plain", "optimizer": "fused-adamw"},
    "llm.c#309": {"lean": True, "loss": "fused", "optimizer": "fused-adamw"},
    "accelerate-deepspeed-blog": {"loss": "none"},
    # Its full fine-tuning is by DeepSpeed's stage 3 on any number of devices (finetune_ds.sh).
    "Qwen-README": {"rank": 64, "bucket": 200_000_000, "full": 3},
}
# Kinds of memory figures that are no peak of training, and rows that no configuration of ours describes.
NO_PEAK = ("failure", "initialisation", "upper end", "before the late")
# What the constants would be from counting alone, and how far (log sd) they may move from it.
PRIOR = {"context_bytes": 0.9e9, "nccl_bytes": 0.9e9, "logit_bytes": 12.0, "activation_factor": 1.0}
PRIOR_SD = {"context_bytes": 0.4, "nccl_bytes": 0.4, "logit_bytes": 0.2, "activation_factor": 0.15}
TIME_PRIOR = {"attention_factor": 1.5, "ampere": 0.65, "hopper": 0.55}
TIME_PRIOR_SD = {"attention_factor": 0.4, "ampere": 0.2, "hopper": 0.2}
# Assumed scatter of a published figure about the truth, for the weight of the priors.
MEMORY_NOISE, TIME_NOISE = 0.12, 0.25
# Three people report 20.2, 22.3 and 24.1 GB for one configuration: no interval is narrower than their scatter.
REPEATED = 0.09


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published run as the forecast takes it, with what was seen."""

    id: str
    group: str
    confidence: str
    model: Architecture
    how: Training
    candidate: Candidate
    devices: Devices
    fits: bool
    peak_bytes: float
    tokens_per_s: float
    machine: str

    def forecast(self, constants: Constants) -> Forecasts:
        """Its forecast."""
        return forecast([self.candidate], profile_of(self.model, self.how, constants), self.devices, None, constants)


def cases(path: Path = ROWS) -> list[Case]:
    """The rows that say enough: shape, method, devices, micro-batch and length."""
    with path.open(newline="", encoding="utf-8") as file:
        return [case for row in csv.DictReader(file) if (case := _case(row)) is not None]


def _case(row: Mapping[str, str]) -> Case | None:
    if (
        not (row["hidden"] and row["micro_batch"] and row["seq"])
        or "+" in row["layers"]
        or row["outcome"] == "host_oom"
    ):
        return None
    found = DEVICES.fullmatch(row["devices"])
    devices = _devices(found, int(row["nodes"] or 1), _capacity(row)) if found else None
    # Float8 products, and checkpoints in host memory, are no settings of DeepSpeed.
    if devices is None or "float8" in row["precision"] or "checkpoint offload" in row["other"]:
        return None
    model, how = _model(row), _training(row)
    candidate = _candidate(row, model)
    samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps * how.sequence
    rate = float(row["tokens_per_s_per_gpu"] or 0) or (samples / float(row["step_s"]) if row["step_s"] else 0.0)
    is_peak = row["peak_gb_per_gpu"] and not any(word in row["mem_kind"] for word in NO_PEAK)
    unit = GIB if "GiB" in row["mem_kind"] or "nvidia-smi" in row["mem_kind"] else 1e9
    reserved = re.search(r"reserved ([0-9.]+)", row["mem_kind"])
    peak = float(reserved[1] if reserved else row["peak_gb_per_gpu"]) * unit if is_peak else 0.0
    return Case(
        id=row["id"], group=row["source_group"], confidence=row["confidence"], model=model, how=how,
        candidate=candidate, devices=devices,
        fits=row["outcome"] == "fits", peak_bytes=peak, tokens_per_s=rate * devices.count,
        machine=f"{row['source_group']} {row['model']} {row['devices']}",
    )  # fmt: skip


def _capacity(row: Mapping[str, str]) -> float:
    """Host memory of a node, where a source states it; 0 if not."""
    return float(row["host_gb"]) * 1e9 if row["host_gb"] and row["host_kind"].startswith("capacity") else 0.0


def _devices(found: re.Match[str], nodes: int, host_bytes: float) -> Devices | None:
    count, name, size = int(found[1]), found[2], found[3]
    if size == "?":
        return None
    known = {"A100": f"A100-{size}", "V100": f"V100-{size}", "H100": f"H100-{size}", "H100-NVL": "H100-NVL"}.get(
        name, name
    )
    if name == "?":
        card = device_card("unnamed", {"memory_bytes": float(size) * 0.985 * GIB, "flops": 2e14})
    elif name.startswith("Ascend"):
        return None
    else:
        card = device_card(known, {})
    return Devices(card=card, count=count, per_node=max(1, count // nodes), stated={"host_bytes": host_bytes or 4e12})


def _model(row: Mapping[str, str]) -> Architecture:
    family = row["model"].lower()
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return Architecture(
        name=row["model"], layers=int(row["layers"]), hidden=hidden, heads=heads,
        kv_heads=int(row["kv_heads"] or heads), head_dim=hidden // heads,
        intermediate=int(row["ffn"]), vocab=int(row["vocab"]),
        tied=family.startswith((*TIED, "deberta")),
        gated=not family.startswith((*PLAIN, "pythia", "deberta", "chatglm-6b")),
    )  # fmt: skip


def _training(row: Mapping[str, str]) -> Training:
    trainer = TRAINERS.get(row["source_group"], {})
    rank = int(found[1]) if (found := re.search(r"rank (\d+)", row["other"])) else trainer.get("rank", 8)
    return Training(
        method=row["method"], sequence=int(row["seq"]), attention="eager" if row["attention"] == "eager" else "flash",
        optimizer=trainer.get("optimizer", "adamw"), lora_rank=rank, loss=trainer.get("loss", "plain"),
        lean_blocks=bool(trainer.get("lean")), train_embeddings="embedding and output layer trained" in row["other"],
    )  # fmt: skip


def _candidate(row: Mapping[str, str], model: Architecture) -> Candidate:
    zero, text, hidden = row["zero"], row["checkpointing"], model.hidden
    trainer = TRAINERS.get(row["source_group"], {})
    said = text or ("full" if "checkpointing" in row["other"] or row["source_group"] in CHECKPOINTED else "none")
    every = {"full": 1, "none": 0}.get(said, 2)  # torchtitan's selective ones recompute about every other block
    stage = {"fsdp": 3, "none": 0, "ddp": 0}.get(zero) if not zero.isdigit() else int(zero)
    stage = 3 if stage is None else trainer.get("full", stage) if row["method"] == "full" and zero == "none" else stage
    config: dict[str, Any] = {}
    if zero == "fsdp":  # one block at a time, and no buckets beyond it
        block = model.parameters_of()["blocks"] // model.layers
        config = {
            f"{ZERO}reduce_bucket_size": block,
            f"{ZERO}stage3_prefetch_bucket_size": block,
            f"{ZERO}stage3_max_reuse_distance": 0,
        }
    elif stage == 3:  # what Hugging Face's Trainer writes for "auto"
        config = {
            f"{ZERO}reduce_bucket_size": hidden**2, f"{ZERO}stage3_prefetch_bucket_size": int(0.9 * hidden**2),
            f"{ZERO}stage3_param_persistence_threshold": 10 * hidden,
        }  # fmt: skip
    elif stage:
        config = {f"{ZERO}reduce_bucket_size": trainer.get("bucket", 500_000_000), f"{ZERO}overlap_comm": True}
    # An optimizer without DeepSpeed keeps the type of the weights: of 16 bits for adapters of a 16-bit model.
    if "PURE" in row["precision"] or (zero in ("none", "ddp") and row["method"] != "full"):
        config |= {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    # Such an optimizer in fp16 stands as one in bf16, which alone has it in DeepSpeed; both compute at one rate.
    in_fp16 = row["precision"].startswith("fp16") and "bf16.bf16_optimizer_states" not in config
    precision = "fp16" if in_fp16 else "fp32" if row["precision"] == "fp32" else "bf16"
    if stage == 0 and row["method"] == "full" and not trainer.get("lean"):
        precision = "torch_autocast"  # without DeepSpeed the Trainer keeps fp32 weights
    return Candidate(
        micro_batch_size=int(row["micro_batch"]), gradient_accumulation_steps=int(row["accumulation"] or 1),
        zero_stage=stage, precision=precision, checkpoint_every=every, **_offload(row, stage),
        config=tuple(sorted(config.items())),
    )  # fmt: skip


def _offload(row: Mapping[str, str], stage: int) -> dict[str, str]:
    """What a row has in host memory; stages below 3 ignore it for parameters."""
    param = "cpu" if row["offload_param"] == "cpu" and stage == 3 else "none"
    return {"offload_optimizer": "cpu" if row["offload_optimizer"] == "cpu" else "none", "offload_param": param}


# Trainers whose examples recompute every block, where a row does not say.
CHECKPOINTED = ("unsloth-docs", "peft")


def fit(known: Sequence[Case]) -> Constants:
    """The constants that explain cases best, with priors from counting; two least-squares fits of logarithms."""
    with_peak = [case for case in known if case.peak_bytes]
    with_rate = [case for case in known if case.tokens_per_s and case.devices.card.capability in GENERATIONS]
    memory = _fitted(
        with_peak, PRIOR, PRIOR_SD, MEMORY_NOISE, lambda values: replace(CONSTANTS, **values), memory_error
    )
    found = replace(CONSTANTS, **memory)

    def timed(values: Mapping[str, float]) -> Constants:
        efficiency = {name: values[name] for name in ("ampere", "hopper")}
        other = math.sqrt(math.prod(efficiency.values()))
        return replace(found, attention_factor=values["attention_factor"], efficiency={**efficiency, "other": other})

    found = timed(_fitted(with_rate, TIME_PRIOR, TIME_PRIOR_SD, TIME_NOISE, timed, time_error))
    return replace(
        found, memory_log_sd=max(REPEATED, _spread(memory_error(case, found) for case in with_peak)),
        time_log_sd=_spread(time_error(case, found) for case in with_rate),
    )  # fmt: skip


def _fitted(
    known: Sequence[Case], prior: Mapping[str, float], sd: Mapping[str, float], noise: float, make: Any, error: Any
) -> dict[str, float]:
    """Values by maximum a posteriori, robust against single rows; a group counts as the root of its rows."""
    names = list(prior)
    counts = {case.group: sum(other.group == case.group for other in known) for case in known}
    weights = np.array([counts[case.group] ** -0.25 for case in known])

    def residuals(x: Any) -> Any:
        constants = make({name: prior[name] * math.exp(value * sd[name]) for name, value in zip(names, x, strict=True)})
        return np.concatenate([weights * [error(case, constants) / noise for case in known], x])

    x = least_squares(residuals, np.zeros(len(names)), loss="soft_l1", diff_step=0.01, xtol=1e-3, ftol=1e-4).x
    return {name: prior[name] * math.exp(value * sd[name]) for name, value in zip(names, x, strict=True)}


def memory_error(case: Case, constants: Constants) -> float:
    """Logarithm of forecast over seen peak."""
    return math.log(case.forecast(constants).peak_bytes[0] / case.peak_bytes)


def time_error(case: Case, constants: Constants) -> float:
    """Logarithm of forecast over seen throughput."""
    return math.log(case.forecast(constants).tokens_per_s[0] / case.tokens_per_s)


def _spread(errors: Iterable[float]) -> float:
    """The standard deviation whose normal 95 % interval holds 95 % of the errors, as the quantile of their size."""
    sizes = sorted(abs(error) for error in errors)
    return float(np.quantile(sizes, 0.95)) / Z95 if sizes else 0.3


def left_out(known: Sequence[Case]) -> list[dict[str, Any]]:
    """Forecasts of every case by constants fitted on the other groups."""
    rows = []
    everything = fit(known)
    for group in dict.fromkeys(case.group for case in known):
        teaches = any(case.group == group and (case.peak_bytes or case.tokens_per_s) for case in known)
        constants = fit([case for case in known if case.group != group]) if teaches else everything
        for case in known:
            if case.group == group:
                said = case.forecast(constants)
                peak = memory_error(case, constants) if case.peak_bytes else None
                rate = time_error(case, constants) if case.tokens_per_s else None
                rows.append({
                    "id": case.id, "group": group, "machine": case.machine, "confidence": case.confidence,
                    "fits": case.fits,
                    "p_fits": float(said.fits[0]), "peak_gib": float(said.peak_bytes[0]) / GIB, "memory_error": peak,
                    "memory_sd": constants.memory_log_sd, "time_error": rate, "time_sd": constants.time_log_sd,
                    "seen": case.tokens_per_s, "said": float(said.tokens_per_s[0]),
                })  # fmt: skip
    return rows


def host_figures(path: Path = ROWS) -> dict[str, Any]:
    """Host memory of offloaded training: nothing in it was fitted, and batch and length do not matter."""
    errors, right = [], []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            row for row in csv.DictReader(file) if row["host_gb"] and row["offload_optimizer"] + row["offload_param"]
        ]
    for row in rows:
        found = DEVICES.fullmatch(row["devices"])
        if found is None or "cpu" not in row["offload_optimizer"] + row["offload_param"]:
            continue
        count, total = int(found[1]), int(float(row["params_b"]) * 1e9)
        profile = Profile.guess(total, total if row["method"] == "full" else total // 100, 1)
        profile = replace(profile, quantized=total if row["method"] == "qlora" else 0)
        stage = int(row["zero"]) if row["zero"].isdigit() else 3
        candidate = Candidate(
            micro_batch_size=1, zero_stage=stage, precision="bf16", **_offload(row, stage)
        )  # fmt: skip
        devices = Devices(card=device_card("A100-80", {}), count=count, per_node=count)
        used = sum(column[0] for column in host_terms(Knobs.of([candidate], {}), profile, devices).values())
        if row["host_kind"].startswith("used"):
            errors.append(abs(math.log(used / (float(row["host_gb"]) * 1e9))))
        else:
            right.append((used <= _capacity(row)) == (row["outcome"] == "fits"))
    return {
        "used": {"rows": len(errors), "median_error": float(np.median(np.expm1(errors)))},
        "capacity": {"rows": len(right), "right": _share(right)},
    }  # fmt: skip


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of left-out rows."""
    high = [row for row in rows if row["confidence"] == "high"]
    peaks = [row for row in rows if row["memory_error"] is not None]
    rates = [row for row in rows if row["time_error"] is not None and row["confidence"] == "high"]
    return {
        "rows": len(rows), "groups": len({row["group"] for row in rows}),
        "fits_high": {"rows": len(high), "right": _share((row["p_fits"] >= 0.5) == row["fits"] for row in high)},
        "fits_all": {"rows": len(rows), "right": _share((row["p_fits"] >= 0.5) == row["fits"] for row in rows)},
        "said_fits_and_failed": _share(row["p_fits"] >= 0.5 and not row["fits"] for row in rows),
        "surely_fits_and_failed": _share(row["p_fits"] >= SURE and not row["fits"] for row in rows),
        "memory": _quality(peaks, "memory"), "throughput": _quality(rates, "time"), "kendall_tau": _tau(rates),
    }  # fmt: skip


def _quality(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    errors = [math.expm1(abs(row[f"{name}_error"])) for row in rows]
    inside = [abs(row[f"{name}_error"]) <= Z95 * row[f"{name}_sd"] for row in rows]
    return {"rows": len(rows), "median_error": float(np.median(errors)), "intervals_hold": _share(inside)}


def _tau(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Kendall's tau over pairs of rows of one model on one machine whose rates differ by more than 5 %.

    Rows that are one configuration to the forecast (with and without torch.compile) are no pair.
    """
    agree = pairs = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if a["machine"] == b["machine"] and abs(math.log(a["seen"] / b["seen"])) > 0.05 and a["said"] != b["said"]:
                pairs += 1
                if "-v" in sys.argv and (a["seen"] - b["seen"]) * (a["said"] - b["said"]) <= 0:
                    print("order", a["id"], b["id"])
                agree += (a["seen"] - b["seen"]) * (a["said"] - b["said"]) > 0
    return {"pairs": pairs, "tau": 2 * agree / pairs - 1 if pairs else math.nan}


def _share(truths: Iterable[bool]) -> float:
    found = list(truths)
    return round(sum(found) / len(found), 4) if found else math.nan


def main() -> None:
    """Fit, leave out, write."""
    known = cases()
    rows = left_out(known)
    constants = asdict(fit(known))
    # The shipped spread is that of left-out rows: the fit's own would be too narrow.
    for name, least in (("memory", REPEATED), ("time", 0.0)):
        spread = _spread(row[f"{name}_error"] for row in rows if row[f"{name}_error"] is not None)
        constants[f"{name}_log_sd"] = max(spread, least)
    said = {
        name: {k: round(v, 3) for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")
        for name, value in constants.items()
    }
    FILE.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    result = {**figures(rows), "host": host_figures(), "constants": said}
    common.write("published", result)
    for row in rows:
        wrong = (row["p_fits"] >= 0.5) != row["fits"]
        errors = " ".join(
            f"{n} {math.expm1(row[n]):+.0%}" for n in ("memory_error", "time_error") if row[n] is not None
        )
        print(row["id"], row["confidence"], row["machine"], f"P={row['p_fits']:.2f}", "WRONG" if wrong else "", errors)


if __name__ == "__main__":
    main()
