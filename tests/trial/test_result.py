"""What was asked for and did not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.space.candidate import Candidate
from autotune.trial.result import Observed

OBSERVED = Observed(
    micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=2, samples_per_step=16, tokens_per_step=None,
    zero_stage=1, dtype="float32",
)  # fmt: skip
CANDIDATE = Candidate(micro_batch_size=4, gradient_accumulation_steps=2, zero_stage=1)


@pytest.mark.parametrize(
    ("seen", "asked", "message"),
    [
        ({}, {}, None),
        ({"micro_batch_size": 8}, {}, None),  # `collate` may make two rows of a sample: the loader's count stands
        ({"micro_batch_size": 2, "loader_batch_size": None}, {}, "micro_batch_size: 4 was asked for, 2 ran"),
        (
            {"micro_batch_size": None, "loader_batch_size": None},
            {},
            "micro_batch_size: 4 was asked for, a varying number ran",
        ),
        ({"gradient_accumulation_steps": 1}, {}, "gradient_accumulation_steps: 2 was asked for, 1 ran"),
        ({"zero_stage": 0}, {}, "zero_stage: 1 was asked for, 0 ran"),
        ({}, {"precision": "bf16"}, "dtype: bfloat16 was asked for, float32 ran"),
        ({}, {"precision": "torch_autocast"}, "precision: torch_autocast was asked for, but it was off"),
        ({"autocast": "bfloat16"}, {"precision": "torch_autocast"}, None),
        ({}, {"checkpoint_every": 1}, "checkpoint_every: no block was checkpointed"),
        ({"checkpointed_blocks": 1}, {"checkpoint_every": 1}, None),
        ({"samples_per_step": 15}, {}, "global batch: 16 was asked for, 15 ran"),
    ],
)
def test_a_setting_that_was_not_applied_is_named(
    seen: dict[str, Any], asked: dict[str, Any], message: str | None
) -> None:
    assert replace(OBSERVED, **seen).mismatch(replace(CANDIDATE, **asked), 2) == message
