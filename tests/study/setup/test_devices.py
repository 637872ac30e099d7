"""The devices of a trial, where a machine has unlike ones."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.instant import WORKLOAD
from support.paths import MODELS

from autotune.errors import UserError
from autotune.study.setup import plan as planning
from autotune.study.setup.devices import of_ranks
from autotune.study.spec.spec import StudySpec
from autotune.system.device import Device

GIB = 2**30
LARGE = Device(name="RTX 4090", capability="8.9", memory_bytes=24 * GIB)
DISPLAY = Device(name="GTX 1050", capability="6.1", memory_bytes=4 * GIB)
HERE = replace(
    WORKLOAD.environment, accelerator="cuda", n_devices=2, each=(LARGE, DISPLAY), capability="8.9", bf16=True, remarks=("slow",),
)  # fmt: skip


def test_a_card_behind_those_of_the_ranks_takes_neither_memory_nor_types_from_a_trial():
    alone = of_ranks(HERE, 1)
    assert (alone.device_memory_bytes, alone.capability, alone.bf16, alone.remarks) == (
        24 * GIB,
        "8.9",
        True,
        ("slow",),
    )
    both = of_ranks(HERE, 2)
    assert (both.device_memory_bytes, both.capability, both.bf16) == (4 * GIB, "6.1", False)
    assert "differ (RTX 4090, GTX 1050)" in both.remarks[1]
    assert of_ranks(both, 1) == alone  # a cache may have kept it so
    assert of_ranks(WORKLOAD.environment, 2) == WORKLOAD.environment


def test_a_study_is_planned_for_the_devices_of_its_ranks_and_names_the_one_that_refuses_it(monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "inspect_workload", lambda *_: replace(WORKLOAD, environment=HERE))
    base = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}
    executor = SimpleNamespace(cold_reason="", turn=lambda _: contextlib.nullcontext())
    own = StudySpec.of(MODELS / "ok.py", {"name": "s", "ranks": 1, "base_config": base})
    assert planning.plan(own, executor, tmp_path).memory_limit_bytes > 20 * GIB
    with pytest.raises(
        UserError, match=r"does not compute in bfloat16; .*differ \(RTX 4090, GTX 1050\): .*CUDA_VISIBLE"
    ):
        planning.plan(own.model_copy(update={"ranks": 2}), executor, tmp_path)
