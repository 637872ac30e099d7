"""The memory of a rank, and what a script completes in the configuration of a candidate."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from support.instant import ENVIRONMENT, WORKLOAD

from autotune.cli.check import _machine
from autotune.cli.doctor import _devices
from autotune.report.load import _threads
from autotune.space.candidate import Candidate
from autotune.study.setup.devices import held_by_others
from autotune.system.device import Device
from autotune.trial.folder import adapter
from autotune.trial.request import TrialRequest
from autotune.trial.workload import ACCELERATE, CUDA_CONTEXT_BYTES, NCCL_BYTES, Probed

GIB = 1 << 30
DEVICE = replace(
    ENVIRONMENT,
    accelerator="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    n_devices=2,
    device_memory_bytes=80 * GIB,
    capability="9.0",
)


@pytest.mark.parametrize(
    ("free", "share"),
    [
        ((), 80 * GIB - CUDA_CONTEXT_BYTES),
        ((79 * GIB, 79 * GIB), 79 * GIB),  # a desktop's 2 GiB counted as none, but nobody is named for so little
        ((30 * GIB, 79 * GIB), 30 * GIB),
    ],
)
def test_a_rank_has_what_others_leave_it(free, share):
    here = replace(DEVICE, free_bytes=free)
    assert here.share_bytes(1) == share
    not_in_use = replace(DEVICE, free_bytes=free[::-1])
    assert not_in_use.share_bytes(1) == (79 * GIB if free else 80 * GIB - CUDA_CONTEXT_BYTES)
    assert here.share_bytes(2) == share - NCCL_BYTES
    said = " ".join(held_by_others(here, 1))
    assert bool(said) is ("other processes hold 50.0 of the 80.0 GiB" in said) is (30 * GIB in free)


def test_ranks_on_other_machines_are_talked_to_and_have_devices_of_their_own():
    """A device that no rank has, and that others use, bounded the memory of all trials; NCCL's was not left out."""
    here = replace(DEVICE, n_devices=4, free_bytes=(79 * GIB, 79 * GIB, 30 * GIB, 79 * GIB))
    assert here.share_bytes(2, 4) == here.share_bytes(1, 8) == 79 * GIB - NCCL_BYTES
    seen = replace(DEVICE, n_devices=2, free_bytes=(79 * GIB, 79 * GIB, 30 * GIB, 79 * GIB))  # by a script's ranks
    assert seen.share_bytes(2, 4) == 30 * GIB - NCCL_BYTES and seen.held_by_others_bytes(2)


def test_ranks_of_a_host_share_its_memory():
    assert replace(ENVIRONMENT, device_memory_bytes=8 * GIB).share_bytes(4) == 2 * GIB
    assert replace(ENVIRONMENT, device_memory_bytes=8 * GIB).share_bytes(2, 4) == 4 * GIB  # two hosts
    assert not held_by_others(ENVIRONMENT, 2)


@pytest.mark.parametrize(
    ("environment", "nodes", "ranks", "threads"),
    [(ENVIRONMENT, 1, 2, 1), (ENVIRONMENT, 2, 2, 2), (ENVIRONMENT, 2, 3, 1), (DEVICE, 1, 2, None)],
)
def test_the_threads_of_a_rank_are_told_of_studies_on_a_cpu_alone(environment, nodes, ranks, threads):
    """Of a study on several machines each rank had the cores of one machine divided by the ranks of all; 3 ranks run on one of two."""
    workload = replace(WORKLOAD, environment=environment)
    assert _threads(SimpleNamespace(workload=workload, world_size=ranks, fingerprint={"nodes": nodes})) == threads


def test_a_check_names_the_devices_with_capability_and_memory():
    assert _machine(asdict(DEVICE)) == "cuda: 2 x NVIDIA H100 80GB HBM3, capability 9.0, 80.0 GiB each"
    assert _machine(asdict(ENVIRONMENT)) == f"cpu: {ENVIRONMENT.device_name}"


def test_the_doctor_names_the_devices_their_free_memory_and_what_speaks_against_them():
    each = (Device(name=DEVICE.device_name, uuid="GPU-1"), Device(name=DEVICE.device_name, uuid="GPU-2"))
    held = replace(DEVICE, each=each, remarks=("the devices differ",), free_bytes=(79 * GIB, 30 * GIB))
    found = [(each.verdict, each.detail) for each in _devices(held)]
    assert found == [
        ("ok", "2 x cuda: NVIDIA H100 80GB HBM3, capability 9.0, GPU-1"),
        ("warn", "the devices differ"),
        ("warn", "30.0 of 80.0 GiB free on the fullest device"),
    ]
    assert [each.detail for each in _devices(ENVIRONMENT)] == ["2 x cpu: stub"]


def test_a_script_whose_micro_batch_nothing_moves_keeps_the_number_that_it_states():
    """It may make its batches by that number, and what was counted may be the length of sequences."""
    probed = Probed(
        ds_config={}, micro_batch_size=20, gradient_accumulation_steps=1, configured_micro_batch_size=8,
        stays={"micro_batch_size": 8},
    )  # fmt: skip
    candidate = Candidate(micro_batch_size=20)
    assert probed.completed(candidate.to_deepspeed(), candidate)["train_micro_batch_size_per_gpu"] == 8


@pytest.mark.parametrize(
    ("family", "own_stages", "stages", "total"),
    [("raw DeepSpeed", 0, 1, 256), (ACCELERATE, 0, 1, None), ("a pipeline", 2, 4, 128), ("a pipeline", 2, 1, 512)],
)
def test_a_global_batch_that_the_script_states_follows_the_candidate(family, own_stages, stages, total):
    """A script that read it ended in a KeyError in its baseline; frameworks fill it in themselves.

    DeepSpeed refused each other number of stages, on which the data-parallel ranks depend.
    """
    probed = Probed(
        ds_config={"train_batch_size": 8}, micro_batch_size=8, gradient_accumulation_steps=2,
        replicas=2, family=family, pipeline_stages=own_stages,
    )  # fmt: skip
    config = (("pipeline.stages", stages),) if stages > 1 else ()
    candidate = Candidate(micro_batch_size=32, gradient_accumulation_steps=4, config=config)
    found = probed.completed(candidate.to_deepspeed(probed.ds_config), candidate)
    assert found.get("train_batch_size") == total


def test_a_stated_global_batch_follows_the_ranks_that_a_trial_is_given():
    """`autotune scale` asked for one configuration on several numbers of ranks, where DeepSpeed refuses another product."""
    stated = TrialRequest(target="train.py", ds_config={"train_batch_size": 64}, world_size=4)
    assert stated.on_ranks(2, 1).ds_config == {"train_batch_size": 32}
    assert TrialRequest(target="train.py", world_size=4).on_ranks(2, 1).ds_config == {}


@pytest.mark.parametrize(("earlier", "paced"), [(True, "number"), (False, ""), ("loader", "loader"), ("", "")])
def test_a_script_as_an_earlier_study_kept_it_can_be_read(earlier, paced):
    """`status` of each study of a script said that another version had made it, and to begin anew."""
    kept = asdict(Probed(ds_config={}, micro_batch_size=4, gradient_accumulation_steps=4)) | {"paced": earlier}
    assert adapter(Probed).validate_python(kept).paced == paced
