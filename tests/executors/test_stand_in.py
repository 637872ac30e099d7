"""On devices, with a stand-in for them: every rank takes its own, none leaves the visible ones, nothing needs a compiler."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import autotune
from support.paths import MODELS, ROOT, SCRIPTS

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space.torch_settings import TF32
from autotune.study.setup.devices import of_ranks
from autotune.system import device
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.profile import Machine
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.workload import Script, Workload

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}}
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Makes this machine one with devices and without a toolkit; returns what they were used for, as a function."""

    def make(**given):
        given = {"n": 2, "log": str(tmp_path / "log"), **given}
        folders = [str(ROOT / "tests" / "support" / "stand_in"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        monkeypatch.setenv("STAND_IN", json.dumps(given))
        monkeypatch.setenv("DS_ACCELERATOR", "cuda")
        monkeypatch.setenv("CUDA_HOME", "/nowhere")
        monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
        return lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    return make


def request(stage=0, ranks=2, **more):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": {"stage": stage, **more}}
    candidate = {"micro_batch_size": 2, "zero_stage": stage} | {name: value["device"] for name, value in more.items()}
    return TrialRequest(
        target=str(MODELS / "ok.py"), candidate=candidate, world_size=ranks, ds_config=config, budget_s=0.3, deadline_s=120,
    )  # fmt: skip


def pinned(stage, *sections):
    """A request with offload through pinned memory, which its baseline has not."""
    asked = request(stage, **{name: {"device": "cpu", "pin_memory": True} for name in sections})
    settings = [f"zero_optimization.{name}.pin_memory" for name in sections]
    return replace(
        asked, candidate=asked.candidate | dict.fromkeys(settings, True), changed_from=dict.fromkeys(settings, False)
    )


def run(folder: Path, *requests: TrialRequest):
    """The results of trials, and the pid of the server that forked their ranks."""
    executor = LocalExecutor(["torch"], folder / "server.log")
    executor.start()
    try:
        assert executor.cold_reason == "" and executor._server is not None
        found = [base.run(executor, folder / str(n), each) for n, each in enumerate(requests)]
        return found, executor._server.pid
    finally:
        executor.close()


@pytest.mark.system
def test_all_stages_and_offload_run_on_the_devices_of_their_ranks(gpus, tmp_path):
    used = gpus(others=1, busy=0.5, throttled=True)
    host = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    inspect = TrialRequest(target=str(MODELS / "ok.py"), mode="inspect")
    tf32 = replace(request(), candidate=request().candidate | {TF32: True}, changed_from={TF32: None})
    stream = {"zero_optimization.overlap_comm": True}
    beside = replace(request(2), candidate=request(2).candidate | stream, changed_from={next(iter(stream)): None})
    beside.ds_config["zero_optimization"]["overlap_comm"] = True
    trials = [
        replace(request(), device_memory_bytes=40 << 30),
        *map(request, range(1, 4)),
        request(3, **host),
        pinned(3, *host),
        pinned(2, "offload_optimizer"),
        beside,
        tf32,
    ]
    (seen, *found), server = run(tmp_path, inspect, *trials)
    assert [each.reason for each in (seen, *found)] == [""] * 10
    assert [each.observed.unwitnessed for each in found[-4:]] == [()] * 4
    assert {line["device"] for line in used() if line["what"] == "set_device"} == {0, 1}
    assert server not in {line["pid"] for line in used()} and os.getpid() not in {line["pid"] for line in used()}
    here = read_record(TrialDir(tmp_path / "0").workload, Workload).environment
    assert (here.accelerator, here.device_name, here.n_devices, here.capability) == ("cuda", H100, 2, "9.0")
    assert "nvcc" in here.missing_ops["fused_adam"] and here.bf16 and here.fp16 and not here.remarks
    load = found[0].device_load
    assert (
        load.power_w == pytest.approx(700, rel=0.2) and load.n_others == 1 and load.throttled_by == ("the power limit",)
    )
    assert found[0].reserved_memory_bytes and found[0].observed.tf32 is False
    assert found[-1].observed.tf32 and found[-1].observed.unwitnessed == () and "'high'" in found[-1].side_changes[-1]
    assert any("device busy 50%" in caveat for caveat in found[0].caveats)


@pytest.mark.system
def test_a_deepspeed_that_asks_what_devices_can_do_as_it_is_imported_leaves_the_server_warm(gpus, tmp_path):
    used = gpus(asks=True)
    (trial,), server = run(tmp_path, request(3))
    assert trial.outcome is Outcome.COMPLETE and trial.observed.tf32 is False
    asked = [line["pid"] for line in used() if line["parent"] == server and line["what"] == "init"]
    assert asked and server not in {line["pid"] for line in used()}


SCRIPT = """
import os
import deepspeed, torch
from common import Net, config, dataset
os.environ.update(CHOICE)
model = Net()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=dataset(), config=config(train_batch_size=32)
)
for _ in range(100):
    for x, y in loader:
        engine.backward(engine(x, y))
        engine.step()
"""


def probed(folder: Path, **choice: str):
    """The probe of a script on two devices, which sets these variables itself."""
    (folder / "train.py").write_text(SCRIPT.replace("CHOICE", str(choice)))
    script = Script(arguments=(), working_dir=str(SCRIPTS), environment={"PYTHONPATH": str(SCRIPTS)})
    asked = TrialRequest(target=str(folder / "train.py"), mode="probe", world_size=2, script=script, deadline_s=120)
    return run(folder, asked)[0][0]


@pytest.mark.system
def test_the_probe_of_a_script_asks_each_rank_about_its_own_device_alone(gpus, tmp_path, monkeypatch):
    used = gpus()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(SCRIPTS)]))
    found = probed(tmp_path)
    assert found.outcome is Outcome.COMPLETE, found.reason
    ranks = {line["pid"]: line["device"] for line in used() if line["what"] == "set_device"}
    assert sorted(ranks.values()) == [0, 1]
    assert {pid: {line["device"] for line in used() if line["pid"] == pid} for pid in ranks} == {
        pid: {device} for pid, device in ranks.items()
    }
    here = read_record(TrialDir(tmp_path / "0").workload, Workload).environment
    assert len(here.free_bytes) == 2 and here.held_by_others_bytes(2) == 0


@pytest.mark.system
def test_a_script_that_chooses_another_device_itself_is_refused(gpus, tmp_path, monkeypatch):
    gpus()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(SCRIPTS)]))
    assert probed(tmp_path, CUDA_VISIBLE_DEVICES="0,1").outcome is Outcome.COMPLETE
    other = probed(tmp_path, CUDA_VISIBLE_DEVICES="1,0")
    assert "sets CUDA_VISIBLE_DEVICES to '1,0' itself, which comes too late" in other.reason


@pytest.mark.system
def test_no_rank_leaves_the_visible_devices(gpus, tmp_path, monkeypatch):
    used = gpus(capability="7.0", name="Tesla V100-SXM2-32GB", memory_gib=32)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001-aaaa-bbbb-cccc-000000000000")
    (_, trial), _ = run(tmp_path, TrialRequest(target=str(MODELS / "ok.py"), mode="inspect"), request(ranks=1))
    assert trial.outcome is Outcome.COMPLETE and {line["device"] for line in used()} == {1}
    here = of_ranks(read_record(TrialDir(tmp_path / "0").workload, Workload).environment, 1)
    assert here.n_devices == 1 and here.each[0].uuid.startswith("GPU-00000001") and not here.bf16 and here.fp16


@pytest.mark.system
def test_another_accelerator_is_said_to_be_untested_and_never_taken_for_a_cpu(gpus, tmp_path, monkeypatch):
    used = gpus(kind="xpu", name="Intel(R) Data Center GPU Max 1550")
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    asked = [TrialRequest(target=str(MODELS / "ok.py"), mode=mode, world_size=n) for mode, n in
             (("inspect", 1), ("rates", 2), ("profile", 1))]  # fmt: skip
    found, _ = run(tmp_path, *asked, replace(request(2), device_memory_bytes=40 << 30))
    assert [each.reason for each in found] == [""] * 4
    here = read_record(TrialDir(tmp_path / "0").workload, Workload).environment
    assert (here.accelerator, here.n_devices) == ("xpu", 2) and "never tested" in here.remarks[0]
    # The counters of the device, rather than growth of the process.
    assert found[3].reserved_memory_bytes and found[3].alloc_retries == 0
    rates = read_record(TrialDir(tmp_path / "1").machine, Machine)
    assert rates.accelerator == "xpu" and rates.host_memory_bytes_per_s not in (
        0.0,
        Machine.guess("cuda", 1).host_memory_bytes_per_s,
    )
    assert {line["device"] for line in used() if line["what"] == "set_device"} == {0, 1}


@pytest.mark.system
def test_the_driver_asks_a_process_of_its_own_and_tells_devices_apart(gpus, monkeypatch):
    gpus()
    both = device.here()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = device.here()
    assert [each.uuid[:12] for each in both.each] == ["GPU-00000000", "GPU-00000001"] and one.each == both.each[1:]
    monkeypatch.setenv(
        "STAND_IN", json.dumps({"hip": "6.2.41133", "capability": "gfx942", "name": "AMD Instinct MI300X"})
    )
    amd = device.ask(os.environ)
    assert amd.each[0].capability == "gfx942" and "ROCm" in amd.untested


def of_trials(lines):
    """What was done with devices, once it is sure that neither driver nor server did anything, and each rank kept to one."""
    servers, taken = {line["parent"] for line in lines if "serve" in line["argv"] or "torch" in line["argv"]}, {}
    assert not [line for line in lines if line["pid"] in servers or "autotune" in line["argv"]]
    for line in lines:
        if line["what"] == "set_device":
            taken.setdefault(line["pid"], set()).add(line["device"])
    assert taken and all(len(devices) == 1 for devices in taken.values())
    return set.union(*taken.values())


@pytest.mark.system
@pytest.mark.smoke
def test_the_default_study_completes_without_a_toolkit(gpus, tmp_path):
    """As a newcomer starts it: no configuration, no optimizer in the model, no compiler."""
    used = gpus()
    (tmp_path / "model.py").write_text((MODELS / "ok.py").read_text().partition("def optimizer")[0])
    few = ("--trials", "2", "--quick", "--space", "zero", "--objective", "latency,memory")
    done = autotune("run", "model.py", *few, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (study,) = (path.parent for path in tmp_path.glob("studies/*/study.yaml"))
    trials = [json.loads(path.read_text()) for path in sorted(study.glob("trials/[0-9]*/result.json"))]
    assert [trial["outcome"] for trial in trials] == ["complete"] * 2, [trial["reason"] for trial in trials]
    config = json.loads((study / "trials" / "0000" / "ds_config.json").read_text())
    assert config["optimizer"]["params"]["torch_adam"] is True and config["optimizer"]["params"]["fused"] is True
    assert "rates were not measured" not in done.stderr
    assert of_trials(used()) == {0, 1}


@pytest.mark.system
def test_slots_report_and_the_commands_about_the_machine_keep_to_the_visible_devices(gpus, tmp_path, monkeypatch):
    used = gpus(n=4, throttled=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-00000001-aaaa-bbbb-cccc-000000000000")
    (tmp_path / "model.py").write_text((MODELS / "ok.py").read_text())
    few = ("--trials", "6", "--quick", "--space", "batch", "--objective", "throughput,energy")
    done = autotune("run", "model.py", "--ranks", "1", "--parallel", "2", "--overlap", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert of_trials(used()) == {1, 3}
    (study,) = (path.parent for path in tmp_path.glob("studies/*/study.yaml"))
    report = autotune("report", study.name, cwd=tmp_path)
    assert report.returncode == 0 and H100 in (study / "README.md").read_text(), report.stderr
    diagnosed = autotune("diagnose", study.name, cwd=tmp_path)
    assert diagnosed.returncode == 0, diagnosed.stderr
    again = autotune("changes", study.name, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    for words in (["probe", "--again"], ["doctor"], ["check", "model.py"], ["status", study.name, "--once"]):
        said = autotune(*words, cwd=tmp_path)
        assert said.returncode == 0, (words, said.stdout, said.stderr)
    assert of_trials(used()) == {1, 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # another device is another study's machine
    assert "device" in autotune("changes", study.name, cwd=tmp_path).stdout
