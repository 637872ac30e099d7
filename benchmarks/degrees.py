"""Do degrees that `check` calls legal train, and as the whole model does? Six families of tiny models on gloo ranks.

`python benchmarks/degrees.py [--ranks 4] [--only llama]` plans a study of each family with every degree and ZeRO stage,
runs each legal candidate for some steps, and compares its losses with those of the same global batch without degrees.
Writes `results/degrees.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, write

from autotune.executors import base
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.degree import DEGREES
from autotune.space.legality import why_illegal
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import Plan, plan
from autotune.study.spec.spec import StudySpec
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

STEPS, MICRO = 8, 4
SIZES = "vocab_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32"
WIDTHS = "hidden_size=32, intermediate_size=64"
NO_DROPOUT = "resid_pdrop=0, embd_pdrop=0, attn_pdrop=0"
FAMILIES = {
    "llama": f"LlamaForCausalLM(LlamaConfig({SIZES}, {WIDTHS}))",
    "qwen3": f"Qwen3ForCausalLM(Qwen3Config({SIZES}, {WIDTHS}, head_dim=8, tie_word_embeddings=True))",
    "gpt2": f"GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, {NO_DROPOUT}))",
    "t5": "T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,"
    " dropout_rate=0, decoder_start_token_id=0))",
    "mixtral": f"MixtralForCausalLM(MixtralConfig({SIZES}, {WIDTHS}, num_local_experts=4))",
    "deepseek": f"DeepseekV3ForCausalLM(DeepseekV3Config({SIZES}, {WIDTHS}, n_routed_experts=4, num_experts_per_tok=2,"
    " moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=8,"
    " qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8))",
}
TARGET = """
import torch
from transformers import {names}

def model():
    return {made}

def data():
    generator = torch.Generator().manual_seed(7)
    return [{{"input_ids": x, "labels": x}} for x in torch.randint(1, 96, (512, 16), generator=generator)]
"""


def family(name: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Runs every legal candidate of a family; returns what came of them."""
    target = folder / f"{name}.py"
    target.write_text(
        TARGET.format(made=FAMILIES[name], names=", ".join(re.findall(r"[A-Z]\w+(?=\()", FAMILIES[name])))
    )
    space = {path: [None, 2, 4] for path in DEGREES} | {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [MICRO]}
    spec = StudySpec.of(target, {"ranks": ranks, "space": [space], "base_config": {"train_batch_size": MICRO * ranks}})
    with executor_for(spec, folder / "run") as executor:
        found = plan(spec, executor, folder / "run")
        dead = feasibility.dead_values(found.full_space, found.baseline, found.setting)
        whole = trial(found, executor, folder / "whole", found.baseline)
        legal = [c for c in found.space.candidates(found.baseline) if why_illegal(c, found.setting) is None]
        ended = {c.describe(): trial(found, executor, folder / "one", c) for c in legal if not c.is_whole}
    complete = {name: result for name, result in ended.items() if result.outcome is Outcome.COMPLETE}
    return {
        "legal": len(ended),
        "crashed": {name: f"{r.outcome}: {r.reason}" for name, r in ended.items() if name not in complete},
        "largest_loss_gap": max((gap(result, whole) for result in complete.values()), default=None),
        "held_share": {name: round(held(result) / held(whole), 3) for name, result in complete.items()},
        "refused": {f"{knob}={value}": why for (knob, value), why in dead.items()},
    }


def trial(found: Plan, executor: Any, path: Path, candidate: Candidate) -> TrialResult:
    request = TrialRequest(
        target=str(found.spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate),
        world_size=found.world_size, seed=found.spec.seed, max_steps=STEPS, min_samples=10**9, budget_s=60.0,
        deadline_s=120.0, changed_from={path: None for path in DEGREES if path in dict(candidate.config)},
    )  # fmt: skip
    return base.run(executor, path, request)


def gap(result: TrialResult, whole: TrialResult) -> float:
    return max(abs(a - b) for a, b in zip(result.losses, whole.losses, strict=False) if a is not None and b is not None)


def held(result: TrialResult) -> int:
    assert result.observed is not None and result.observed.groups is not None
    return result.observed.groups.held_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    arguments = parser.parse_args()
    file = RESULTS / "degrees.json"
    kept = json.loads(file.read_text())["families"] if file.exists() else {}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as scratch:
            kept[name] = family(name, arguments.ranks, Path(scratch))
        write("degrees", {"ranks": arguments.ranks, "steps": STEPS, "families": kept})


if __name__ == "__main__":
    main()
