"""What trials compute on: what the user hides or names stays so, and a device that is not used is said in a sentence."""

import json
import types

import pytest

from autotune.system import device, toolkit
from autotune.system.device import Device, Devices

TWO = Devices(
    accelerator="cuda", driver="570.86", platform="cuda 12.8",
    each=tuple(Device(name="NVIDIA H100 80GB HBM3", uuid=f"GPU-{n}", capability="9.0", memory_bytes=80 << 30) for n in "ab"),
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Answers as if torch could use a device; returns the variables that were asked about."""
    variables = []
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "_may_use_accelerator", lambda: True)
    monkeypatch.setattr(device, "ask", lambda given: variables.append(dict(given)) or TWO)
    return variables


def test_a_machine_is_asked_once_for_each_choice_of_devices(asked):
    assert device.here({}) == device.here({}) == TWO and len(asked) == 1
    device.here({"CUDA_VISIBLE_DEVICES": "1"})
    device.here({"HIP_VISIBLE_DEVICES": "1"})
    device.here({"UNRELATED": "1"})
    assert len(asked) == 3


def test_a_kept_answer_that_cannot_be_read_is_asked_again(asked, tmp_path):
    device.here({})
    for path in (tmp_path / "devices").iterdir():
        path.write_text('{"accelerator": "cuda"}')
    assert device.here({}) == TWO and len(asked) == 2


def test_an_answer_that_cannot_be_kept_is_asked_for_again(asked, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file" / "cache"))
    assert device.here({}) == device.here({}) == TWO and len(asked) == 2


def test_who_asks_for_the_cpu_gets_it_without_a_question(asked):
    assert device.here({"DS_ACCELERATOR": "cpu"}).accelerator == "cpu" and not asked


@pytest.mark.parametrize("files", [{"/dev/null": "an NVIDIA GPU"}, {"/dev/no-such-device": "an NVIDIA GPU"}])
def test_a_device_that_this_torch_cannot_use_is_one_sentence(monkeypatch, files):
    monkeypatch.setattr(device, "_may_use_accelerator", lambda: False)
    monkeypatch.setattr(device, "_DRIVER_FILES", files)
    found = device.here({})
    said = found.problem
    assert found.accelerator == "cpu" and bool(said) == ("/dev/null" in files)
    assert device.here({"CUDA_VISIBLE_DEVICES": "-1"}).problem == ""  # hidden on purpose
    assert not said or ("NVIDIA GPU" in said and "built for CPUs only" in said and "DS_ACCELERATOR=cpu" in said)


@pytest.mark.process
def test_a_torch_that_does_not_answer_is_a_problem_and_no_silent_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/bin/false")
    found = device.ask({})
    assert found.accelerator == "cpu" and "could not be asked" in found.problem


@pytest.mark.parametrize(
    ("text", "may"),
    [("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False), ("cuda: Optional[str] = '12.8'\nhip = None\n", True),
     ("cuda = None\nhip: Optional[str] = '6.2.41133'\n", True)],
)  # fmt: skip
def test_what_torch_was_built_for_is_read_without_importing_it(monkeypatch, tmp_path, text, may):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{text}")
    spec = types.SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(device.util, "find_spec", lambda name: spec if name == "torch" else None)
    assert device._may_use_accelerator() is may


@pytest.mark.parametrize(
    ("accelerator", "variables", "chosen"),
    [
        ("cuda", {}, ("CUDA_VISIBLE_DEVICES", ["0", "1"])),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3,5"}, ("CUDA_VISIBLE_DEVICES", ["3", "5"])),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-5e3c,MIG-77aa"}, ("CUDA_VISIBLE_DEVICES", ["GPU-5e3c", "MIG-77aa"])),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4,6,-1,7"}, ("CUDA_VISIBLE_DEVICES", ["4", "6"])),
        ("cuda", {"HIP_VISIBLE_DEVICES": "2,3"}, ("HIP_VISIBLE_DEVICES", ["2", "3"])),
        ("xpu", {"ZE_AFFINITY_MASK": "0.1,1.0"}, ("ZE_AFFINITY_MASK", ["0.1", "1.0"])),
        ("npu", {}, ("ASCEND_RT_VISIBLE_DEVICES", ["0", "1"])),
    ],
)
def test_the_users_choice_of_devices_is_kept_by_name(accelerator, variables, chosen):
    assert device.chosen(accelerator, 2, variables) == chosen


def test_untested_accelerators_are_named():
    assert "'xpu' was never tested" in Devices(accelerator="xpu").untested and not TWO.untested
    assert "ROCm" in Devices(accelerator="cuda", platform="rocm 6.2").untested


def test_the_record_survives_json():
    from dataclasses import asdict

    assert device.from_data(json.loads(json.dumps(asdict(TWO)))) == TWO


def test_ops_are_kept_by_kind_of_device_and_toolkit(asked, monkeypatch, tmp_path):
    here = toolkit.extensions_dir({"CUDA_HOME": "/nowhere"})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert toolkit.toolkit({"CUDA_HOME": "/nowhere"}) is None
    assert toolkit.toolkit({"CUDA_HOME": str(tmp_path)}) == tmp_path
    with_toolkit = toolkit.extensions_dir({"CUDA_HOME": str(tmp_path)})
    monkeypatch.setattr(
        device, "here", lambda _: Devices(accelerator="cuda", each=(Device(name="x", capability="7.0"),))
    )
    assert len({here, with_toolkit, toolkit.extensions_dir({"CUDA_HOME": "/nowhere"})}) == 3
    monkeypatch.setattr(device, "here", lambda _: Devices())
    monkeypatch.setattr(toolkit, "USUAL_TOOLKITS", ())
    assert toolkit.extensions_dir({"CUDA_HOME": "/nowhere"}) == toolkit.extensions_dir({"CUDA_HOME": str(tmp_path)})
    assert toolkit.build_environment({"PATH": str(tmp_path / "bin")})["CUDA_HOME"] == str(tmp_path)
    assert "CUDA_HOME" not in toolkit.build_environment({"CUDA_HOME": str(tmp_path)})


def test_pips_headers_are_offered_after_the_toolkits_own(monkeypatch, tmp_path):
    (tmp_path / "nvidia" / "cuda_runtime" / "include").mkdir(parents=True)
    (tmp_path / "nvidia" / "cuda_runtime" / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda _: str(tmp_path))
    given = {"CUDA_HOME": "/nowhere", "CPLUS_INCLUDE_PATH": "/mine"}
    found = toolkit.build_environment(given)
    assert found["CPLUS_INCLUDE_PATH"] == f"/mine:{tmp_path}/nvidia/cuda_runtime/include" and "CUDA_HOME" not in found
    assert toolkit.has_header("cuda_runtime.h", given) and not toolkit.has_header("cublas_v2.h", given)


def test_an_op_is_built_once_its_library_lies_there_and_nobody_compiles_it(tmp_path):
    folder = tmp_path / "fused_adam"
    folder.mkdir()
    assert not toolkit.is_built("fused_adam", tmp_path)
    (folder / "fused_adam.so").touch()
    assert toolkit.is_built("fused_adam", tmp_path) and not toolkit.is_built("cpu_adam", tmp_path)
    (folder / "lock").touch()
    assert not toolkit.is_built("fused_adam", tmp_path)
