"""What has changed since a study, in words, and what of the search it touches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.instant import ENVIRONMENT, SPACE, WORKLOAD, plan_of, spec_of

from autotune.report.export import deepspeed_config
from autotune.space.candidate import Candidate
from autotune.space.space import SearchSpace
from autotune.study import fingerprint
from autotune.study.fingerprint import Fingerprint, changes, narrowed, opened, touched
from autotune.system.device import Device, Devices
from autotune.system.machine import processor_name
from autotune.trial.command import Invocation
from autotune.trial.workload import DataShape, Probed, Workload

ASKED = {
    "space": SPACE,
    "objectives": [{"name": "latency", "metric": "step_time_s"}],
    "base_config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    "device_memory_bytes": None,
}
BEFORE = replace(
    WORKLOAD,
    client_optimizer=True,
    optimizer="AdamW",
    learning_rates=(0.01,),
    structure="a",
    data=DataShape(fields=("int64[*]",), table=((128.0, 70), (256.0, 30)), n_seen=100),
)


def of(workload: Workload = BEFORE, ranks: int = 2, **asked: object) -> Fingerprint:
    return Fingerprint(values=fingerprint._known(workload, ranks, {**ASKED, **asked}))


def environment(**changed: object) -> Workload:
    return replace(BEFORE, environment=replace(ENVIRONMENT, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("was", "found", "device"),
    [
        ("cuda", Devices(accelerator="cuda", driver="570", each=(Device(name="H100"),) * 2), "H100"),
        ("cuda", Devices(), None),  # a processor does not compare with a device
        ("cpu", Devices(), processor_name()),
    ],
)
def test_what_is_here_is_compared_with_what_was_there(monkeypatch, tmp_path, was, found, device):
    monkeypatch.setattr(Fingerprint, "of", lambda _: Fingerprint(values={"accelerator": was}))
    monkeypatch.setattr("autotune.system.device.here", lambda _: found)
    kept = SimpleNamespace(fingerprint={}, invocation=None)
    values = fingerprint.here(kept, tmp_path / "gone.py", tmp_path).values  # type: ignore[arg-type]
    assert values["accelerator"] == found.accelerator and values.get("device") == device
    assert values.get("devices") == (2 if found.each else None) and values.get("driver") == (found.driver or None)
    # Of a study in Slurm, `status` told the devices of the machine that it was asked on.
    for kept.fingerprint, stated in (({"executor": "slurm"}, ""), ({"nodes": 2}, ""), ({}, "hostfile: hosts")):
        (tmp_path / "study.yaml").write_text(stated)  # a hostfile may name one machine, which is not this one
        elsewhere = fingerprint.here(kept, tmp_path / "gone.py", tmp_path).values  # type: ignore[arg-type]
        assert values.keys() - elsewhere.keys() >= {"accelerator", "cores"} and {"torch", "target"} <= elsewhere.keys()
        assert not {"device", "devices", "driver"} & elsewhere.keys()


def test_a_launcher_that_chose_devices_and_threads_does_so_today(monkeypatch, tmp_path):
    """After `deepspeed --num_gpus 2`, which sets CUDA_VISIBLE_DEVICES, `status` told of the other devices of the machine."""
    of_the_command = {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1"}
    how = Invocation(script="/train.py", working_dir="/", environment=of_the_command)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(Fingerprint, "of", lambda _: Fingerprint(values={"accelerator": "cuda"}))
    monkeypatch.setattr(
        "autotune.system.device.here",
        lambda seen: Devices(
            accelerator="cuda", each=tuple(Device(name=n) for n in seen["CUDA_VISIBLE_DEVICES"].split(","))
        ),
    )
    kept = SimpleNamespace(fingerprint={}, invocation=how)
    values = fingerprint.here(kept, tmp_path / "gone.py", tmp_path).values  # type: ignore[arg-type]
    assert values["devices"] == 2 and values["threads"] == "1"


def test_a_target_that_is_gone_has_changed(monkeypatch, tmp_path):
    """A re-tuning that was due found that nothing had changed, each week anew."""
    monkeypatch.setattr(Fingerprint, "of", lambda _: Fingerprint(values={"target": "0123"}))
    gone = fingerprint.here(SimpleNamespace(fingerprint={}, invocation=None), tmp_path / "gone.py", tmp_path)  # type: ignore[arg-type]
    (found,) = changes(Fingerprint(values={"target": "0123"}), gone)
    assert found.words == "the target's file is gone"


def test_cores_and_threads_of_a_host_are_no_part_of_a_study_on_devices():
    values = of(environment(accelerator="cuda")).values
    assert "cores" not in values and "threads" not in values and of().values["cores"] == 2


def test_nothing_changed_is_nothing_to_say():
    assert changes(of(), of()) == []


@pytest.mark.parametrize(
    ("script", "n_seen"),
    [(None, 2), (Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1), 900)],
    ids=["few samples", "padded batches of a script"],
)
def test_sizes_of_samples_that_may_be_alike_by_chance_are_no_change(script, n_seen):
    """Each re-tuning of a script whose batches are padded searched anew, for samples of another shape."""
    padded, other = (
        of(replace(BEFORE, script=script, data=DataShape(fields=(field,), n_seen=n_seen)))
        for field in ("0 int64[2, 57]", "0 int64[2, *]")
    )
    assert changes(padded, other) == []


@pytest.mark.parametrize(
    ("now", "part", "words"),
    [
        (of(environment(device_name="another")), "device", "device: stub, now another"),
        (of(environment(versions={"deepspeed": "0.20.1"})), "deepspeed", "DeepSpeed: 0.19.8, now 0.20.1"),
        (of(environment(bf16=False)), "bf16", "bfloat16 support: yes, now no"),
        (of(ranks=4), "ranks", "ranks: 2, now 4"),
        (of(replace(BEFORE, structure="b")), "model", "structure of the model has changed"),
        (of(replace(BEFORE, n_parameters=2000)), "parameters", "parameters: 1,000, now 2,000"),
        (of(replace(BEFORE, n_samples=5000)), "data size", "samples in the data set: 4,096, now 5,000"),
        (
            of(replace(BEFORE, learning_rates=(1e-3, 1e-4))),
            "learning rate",
            "learning rate of the target: 0.01, now 0.001; 0.0001",
        ),
        (of(replace(BEFORE, optimizer="SGD")), "optimizer", "optimizer of the target: AdamW, now SGD"),
        (
            of(base_config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "fp16": {"enabled": True}}),
            "base configuration",
            "the baseline's configuration: optimizer.params.lr 0.001, now 0.0001; fp16.enabled not set, now yes",
        ),
        (of(device_memory_bytes=2**33), "memory limit", "device memory or its limit: 16.0 GiB, now 8.00 GiB"),
        (
            of(environment(device_memory_bytes=2**35)),
            "memory limit",
            "device memory or its limit: 16.0 GiB, now 32.0 GiB",
        ),
        (of(space={**SPACE, "zero_stage": [0, 1]}), "space", "search space: new: zero_stage"),
        (
            of(replace(BEFORE, data=DataShape(fields=("int64[*]",), table=((128.0, 20), (512.0, 80)), n_seen=100))),
            "lengths",
            "lengths of the samples: 70% up to 128, 30% up to 256, now 80% up to 512, 20% up to 128",
        ),
    ],
)
def test_a_change_is_told_in_words(now, part, words):
    found = changes(of(), now)
    assert [change.part for change in found] == [part]
    assert [change.words for change in found] == [words]


def test_of_a_scripts_configuration_counts_what_no_candidate_changes():
    """A script's JSON is read anew each time, and no change in it was told."""

    def script(**config):
        return of(script={"base_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **config}})

    adopted = script(bf16={"enabled": True}, zero_optimization={"stage": 2}, train_micro_batch_size_per_gpu=4)
    assert changes(script(), adopted) == []
    found = changes(script(), script(gradient_clipping=1.0, optimizer={"type": "Lion"}))
    assert [change.words for change in found] == [
        "the baseline's configuration: optimizer.type Adam, now Lion; gradient_clipping not set, now 1.0"
    ]


@pytest.mark.parametrize(
    ("own", "changed", "stages"),
    [
        (
            {},
            {"zero_stage": 2, "offload_optimizer": "cpu"},
            0,
        ),  # the script's optimizer, which DeepSpeed has not tested
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}, 0),
        ({"pipeline": {"seed_layers": True}}, {"checkpoint_every": 2}, 2),
        ({}, {"config": (("expert_parallel.autoep_size", 2),)}, 0),
    ],
)
def test_the_answer_in_a_scripts_configuration_is_no_change(own, changed, stages):
    """What DeepSpeed needs beside a candidate's settings was told as a change, and each re-tuning searched again."""
    base = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, **own}
    script = Probed(ds_config=base, micro_batch_size=8, gradient_accumulation_steps=1, pipeline_stages=stages)
    candidate = Candidate(micro_batch_size=4, **changed)
    adopted = deepspeed_config(script.completed(candidate.to_deepspeed(base), candidate), base)
    space = SPACE | {name: [value] for name, value in candidate.config}
    assert adopted != base
    assert changes(*(of(script={"base_config": each}, space=space) for each in (base, adopted))) == []


def test_a_build_of_the_same_version_and_a_few_bytes_of_memory_are_no_change():
    assert changes(of(), of(environment(versions={"deepspeed": "0.19.8+cpu"}, device_memory_bytes=2**34 - 2**20))) == []


def test_a_search_goes_on_only_with_the_settings_that_all_its_trials_share():
    """One that was begun with --checkpoint and taken up without ended as failed, with the advice to pass --fresh, which it has not."""
    plan, seeded, more = (plan_of(spec_of(**given)) for given in ({}, {"seed": 3}, {"trials": 9}))
    digests = [Fingerprint.now(each).digest(each) for each in (plan, seeded, more)]
    assert digests[0] == digests[2] != digests[1]


def test_what_an_earlier_version_did_not_know_is_no_change():
    assert changes(of(replace(BEFORE, structure="", data=None)), of()) == []


def test_a_slightly_other_sample_of_lengths_is_no_change():
    near = replace(BEFORE, data=DataShape(fields=("int64[*]",), table=((128.0, 65), (256.0, 35)), n_seen=100))
    assert changes(of(), of(near)) == []


def test_more_memory_opens_the_search_and_another_torch_does_not():
    assert opened(changes(of(), of(environment(device_memory_bytes=2**35))))
    with_torch = [environment(versions={"deepspeed": "0.19.8", "torch": version}) for version in ("2.6", "2.7")]
    assert not opened(changes(of(with_torch[0]), of(with_torch[1])))


def test_only_what_a_change_touches_is_searched():
    space = SearchSpace.parse({**SPACE, "zero_stage": [0, 1, 2]}, "test")
    names = touched(changes(of(), of(environment(versions={"deepspeed": "0.20"}))))
    good = [
        {
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "precision": "bf16",
            "checkpoint_every": 0,
            "zero_stage": 1,
        }
    ]
    kept = narrowed(space, names, good)
    assert kept["checkpoint_every"].all_values() == (0,)
    assert list(kept["zero_stage"].all_values()) == [0, 1, 2]
    assert narrowed(space, None, good) is space


def test_unexplained_or_sweeping_changes_touch_everything():
    assert touched([]) is None
    assert touched(changes(of(), of(replace(BEFORE, structure="b")))) is None
