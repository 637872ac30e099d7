"""What a study makes of the devices that it finds: ranks, types, memory, the default optimizer, notes, and disjoint shares of them."""

import contextlib
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.instant import ENVIRONMENT, SPACE, WORKLOAD, plan_of, spec_of
from support.paths import MODELS

from autotune.errors import UserError
from autotune.executors.local import LocalExecutor
from autotune.study import parallel
from autotune.study.events import SILENT
from autotune.study.setup import plan as planning
from autotune.study.setup.devices import limit_notes, of_ranks
from autotune.study.spec.spec import StudySpec
from autotune.system import device
from autotune.trial.workload import Environment

GIB = 2**30
GPUS = replace(
    ENVIRONMENT,
    accelerator="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    n_devices=4,
    device_memory_bytes=80 << 30,
    fp16=True,
    capability="9.0",
)
LARGE = device.Device(name="RTX 4090", capability="8.9", memory_bytes=24 * GIB)
DISPLAY = device.Device(name="GTX 1050", capability="6.1", memory_bytes=4 * GIB)
HERE = replace(
    WORKLOAD.environment, accelerator="cuda", n_devices=2, each=(LARGE, DISPLAY), capability="8.9", bf16=True, remarks=("slow",),
)  # fmt: skip


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Returns the plan of a study on a machine with these devices."""

    def make(environment: Environment, **changes):
        workload = replace(WORKLOAD, environment=environment)
        monkeypatch.setattr(planning, "inspect_workload", lambda *_: workload)
        (tmp_path / "model.py").write_text((MODELS / "ok.py").read_text().partition("def optimizer")[0])
        spec = StudySpec.of(tmp_path / "model.py", {"name": "s", "space": [SPACE], **changes})
        executor = SimpleNamespace(cold_reason="", turn=lambda _: contextlib.nullcontext())
        return planning.plan(spec, executor, tmp_path)

    return make


def test_a_study_takes_all_devices_and_never_more(planned, tmp_path):
    assert planned(GPUS).world_size == 4
    said = "--ranks asks for 5 ranks: this machine has 4 devices; ask for fewer, or set DS_ACCELERATOR=cpu"
    with pytest.raises(UserError, match=said):
        planned(GPUS, ranks=5)
    with pytest.raises(UserError, match="each of the 2 machines has 4 devices"):
        planned(GPUS, ranks=10, executor="slurm", nodes=2)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=4\nd slots=4\n")
    with pytest.raises(UserError, match="cannot be spread evenly over 4 machines, and one has 4 devices"):
        planned(GPUS, ranks=6, hostfile=tmp_path / "hosts")  # all of them on one machine


def test_devices_without_a_rank_are_counted_since_deepspeed_takes_them_for_ranks(planned):
    assert planned(GPUS, ranks=2).setting.idle_devices == 2
    assert planned(GPUS, ranks=8, executor="slurm", nodes=2).setting.idle_devices == 0
    assert planned(ENVIRONMENT, ranks=2).setting.idle_devices == 0


@pytest.mark.parametrize(("environment", "fused"), [(GPUS, True), (replace(GPUS, accelerator="xpu"), None)])
def test_the_default_optimizer_is_fused_where_that_is_known_to_help(planned, environment, fused):
    params = planned(environment).base_config["optimizer"]["params"]
    assert params["torch_adam"] is True and params.get("fused") is fused


def test_a_cpu_says_that_ranks_share_cores_and_that_bf16_is_slow(planned, monkeypatch):
    monkeypatch.setattr(planning, "why_bf16_is_slow", lambda: "this processor has no fast bf16")
    notes = " ".join(planned(ENVIRONMENT, ranks=4).notes)
    assert "4 ranks share 2 cores" in notes and "no fast bf16" in notes
    assert planned(GPUS).notes == []


def test_slots_have_disjoint_devices_by_the_users_names_or_disjoint_cores(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-a,1,0")
    found = replace(plan_of(spec_of(space=[SPACE])), workload=replace(WORKLOAD, environment=GPUS), world_size=2)
    assert parallel.device_shares(found, 2) == [["3", "MIG-a"], ["1", "0"]]
    with pytest.raises(
        UserError, match=r"--parallel 3: trials of 2 rank.s. need disjoint devices, and this machine has 4"
    ):
        parallel.device_shares(found, 3)
    slot = parallel.SlicedExecutor(found, ["1", "0"], None)
    assert slot._own["CUDA_VISIBLE_DEVICES"] == "1,0" and slot._cores == []
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: {0, 2, 5})
    monkeypatch.setattr(parallel, "n_cores", lambda: 3)
    on_cpu = replace(found, workload=WORKLOAD)
    assert parallel.device_shares(on_cpu, 3) == [["0"], ["2"], ["5"]]
    assert parallel.SlicedExecutor(on_cpu, ["2"], None)._cores == [2]
    with pytest.raises(UserError, match="disjoint cores, and this machine has 3"):
        parallel.device_shares(on_cpu, 4)
    monkeypatch.setattr(parallel, "n_cores", lambda: 2)  # of a container
    taken = {str(parallel.device_shares(on_cpu, 2)) for _ in range(60)}
    assert taken == {"[['0'], ['2']]", "[['2'], ['5']]"}, "two such containers took the same cores"


def test_the_servers_of_slots_import_at_the_same_time(monkeypatch, tmp_path):
    """Each takes seconds, and a node may have eight."""
    called = []
    for name in ("launch", "start", "close"):
        monkeypatch.setattr(LocalExecutor, name, lambda self, name=name: called.append(name))
    spec = spec_of(space=[SPACE], parallel=2, overlap=True)
    found = replace(plan_of(spec), workload=replace(WORKLOAD, environment=GPUS), world_size=2)
    with parallel.executors_for(found, LocalExecutor([], tmp_path / "log"), tmp_path, SILENT) as slots:
        assert len(slots) == 2 and called[:4] == ["launch", "launch", "start", "start"]
    assert called[-2:] == ["close", "close"]


@pytest.mark.parametrize(
    ("stated", "found", "set_to"),
    [
        ({}, device.Devices(), "cpu"),
        ({}, device.Devices(problem="the driver is too old"), None),  # a rank asks again, and says so
        ({}, device.Devices(accelerator="cuda", each=(device.Device(name="x"),)), None),
        ({"DS_ACCELERATOR": ""}, device.Devices(), "cpu"),
        ({"DS_ACCELERATOR": "xpu"}, device.Devices(accelerator="xpu"), "xpu"),
    ],
)
def test_trials_are_told_the_cpu_only_where_nothing_else_is_there(monkeypatch, tmp_path, stated, found, set_to):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(device, "here", lambda *_: found)
    executor = parallel.LocalExecutor([], tmp_path / "log", stated)
    assert executor._environment().get("DS_ACCELERATOR") == set_to


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


def test_limits_that_no_device_has_or_that_count_addresses_are_told(monkeypatch):
    """The search took a card for as large as it was said to be; and trials ended by signal 6 where nobody thought of `ulimit -v`."""

    def told(**given):
        return limit_notes(StudySpec.of(MODELS / "ok.py", {"name": "s", **given}), GPUS)

    assert not told() and not told(device_memory_bytes="80GiB")
    (said,) = told(device_memory_bytes="141GiB")
    assert "--device-memory states 141 GiB, and a device has 80.0 GiB, which counts" in said
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**31, -1))
    (said,) = told()
    assert "`ulimit -v` gives a process 2.00 GiB of addresses" in said and not told(executor="slurm", nodes=1)


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
    in_turns = own.model_copy(update={"parallel": 2})  # without --overlap trials run one at a time here
    assert planning.plan(in_turns, executor, tmp_path).memory_limit_bytes > 20 * GIB
    side_by_side = own.model_copy(update={"parallel": 2, "overlap": True})
    with pytest.raises(UserError, match=r"does not compute in bfloat16; .*differ"):
        planning.plan(side_by_side, executor, tmp_path)
