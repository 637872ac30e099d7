"""The life of a rank: how ranks meet, and how its failures are classified."""

import asyncio
import contextlib
import runpy
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.comm.torch import TorchBackend

from autotune import errors
from autotune.errors import UserError
from autotune.system import processes
from autotune.trial.failures import means_host_memory
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.worker import rank
from autotune.worker import run as worker_run
from autotune.worker.agent import network
from autotune.worker.script import run


def keep_timeouts(monkeypatch):
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))


def test_the_store_stands_on_the_agents_socket_in_a_way_that_torch_2_6_knows(monkeypatch):
    """Its default backend refuses a socket that listens already; `make floors` runs trials on that release."""
    given = {}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    keep_timeouts(monkeypatch)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **options: given.update(options))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv(network.LISTENER, str(listener.fileno()))
        rank.connect(TrialRequest(target="model.py", world_size=1))
        assert given["master_listen_fd"] == listener.fileno() and given["use_libuv"] is False
    assert given["world_size"] == 1


@pytest.mark.parametrize(
    ("version", "world_size", "bound"),
    [("2.13.0+cu128", 4, torch.device("cuda", 1)), ("2.6.0+cu124", 4, None), ("2.13.0", 1, None)],
)
def test_nccl_is_told_the_ranks_device_and_does_not_guess_it(monkeypatch, version, world_size, bound):
    """Rank 3 of two machines with more than two devices each would be taken for device 3."""
    given = {}
    own = {"RANK": str(min(3, world_size - 1)), "LOCAL_RANK": "1"}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    keep_timeouts(monkeypatch)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    asked = TrialRequest(target="model.py", world_size=world_size, deadline_s=3600)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", CUDA_Accelerator)
    rank.connect(asked)
    assert (given["backend"], given["device_id"]) == ("nccl", bound)
    # Groups that DeepSpeed makes wait as long as the trial may take.
    assert dist.distributed_c10d._get_default_timeout("nccl").total_seconds() == asked.deadline_s + 60


@pytest.fixture
def joined_on_device():
    """A group of one rank that takes tensors of a device alone, as NCCL's does."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hooked(joined_on_device, monkeypatch):
    for name in ("init_process_group", "destroy_process_group", "is_initialized"):
        monkeypatch.setattr(dist, name, getattr(dist, name))
    run.Joining().install()


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize(
    ("backend", "works"),
    [((), True), (("cpu:gloo,cuda:nccl",), True), (("nccl",), False)],
    ids=["none", "both", "nccl"],
)
def test_a_script_reduces_tensors_on_the_host_where_it_could_in_a_training(backend, works):
    dist.init_process_group(*backend)
    with contextlib.nullcontext() if works else pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(2))
    # Groups as DeepSpeed makes them are those of the device.
    assert dist.new_group([0])._device_types == [torch.device("cuda")]


@pytest.mark.usefixtures("hooked")
def test_what_asks_whether_the_ranks_have_joined_joins_them_be_it_a_script_or_a_library():
    """A library took them for joined and left them; its script was then told that they are not."""
    exec(
        "import torch.distributed as dist\nanswer = dist.is_initialized()", own := {"__name__": "autotune.worker.rank"}
    )
    assert own["answer"] and not dist.is_initialized()
    TorchBackend.init_process_group(SimpleNamespace(), "cpu:gloo,cuda:nccl", None, None, 0, 1)  # asks first
    dist.all_reduce(torch.ones(2))
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nsecond line"), Outcome.OOM,
         "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        (MemoryError(), Outcome.OOM, "MemoryError: "),
        (OSError(12, "Cannot allocate memory"), Outcome.OOM, "OSError: [Errno 12] Cannot allocate memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Outcome.OOM,
         "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (ValueError(), Outcome.CRASHED, "ValueError"),
        (ValueError("a\nb"), Outcome.CRASHED, "ValueError: a"),
        (ValueError("wrong:\n  b"), Outcome.CRASHED, "ValueError: wrong: b"),
        (SystemExit(3), Outcome.CRASHED, "SystemExit: 3"),
        (UserError("model.py: define model()"), Outcome.CRASHED, "model.py: define model()"),
    ],
)  # fmt: skip
def test_failures_are_classified(error, outcome, reason):
    assert rank.classify(error) == (outcome, reason)


def test_an_error_without_a_text_shows_its_line(tmp_path):
    """A bare `assert` of a script ended it as `AssertionError`, which says nothing."""
    script = tmp_path / "train.py"
    script.write_text("steps = 1\nassert steps % 2 == 0\n")
    with pytest.raises(AssertionError) as failed:
        runpy.run_path(str(script))
    assert rank.classify(failed.value)[1] == "AssertionError: `assert steps % 2 == 0` at train.py:2"


def test_a_long_reason_ends_with_a_word_and_dots():
    """It was cut in the middle of one, as if that were all."""
    said = rank.classify(ValueError("what to do stands " * 100))[1]
    assert 900 < len(said) <= errors.LONGEST_REASON and said.removesuffix(" ...").endswith(
        (" what", " to", " do", " stands")
    )
    assert errors.shortened("a" * 30, 20) == "a" * 16 + " ..." and errors.shortened("a b", 3) == "a b"


def test_a_training_that_deepspeed_ends_at_its_least_loss_scale_has_diverged():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=1, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
    )
    with pytest.raises(Exception, match="loss scale") as caught:
        scaler.update_scale(True)
    outcome, reason = rank.classify(caught.value)
    assert outcome is Outcome.DIVERGED and "gradients were not finite" in reason


@pytest.mark.parametrize(("answer", "outcome"), [((1 << 20, 80 << 30), Outcome.OOM), ((40 << 30, 80 << 30), Outcome.CRASHED),
                                                 (None, Outcome.CRASHED)])  # fmt: skip
def test_a_fault_after_which_cuda_answers_nothing_is_no_full_device(monkeypatch, answer, outcome):
    def mem_get_info():
        if answer is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return answer

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert rank.classify(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))[0] is outcome


def failed(call):
    """The error of a call that is given a function of torch's: one in C, which leaves no frame, that finds no memory."""
    loop = asyncio.new_event_loop()
    function = asyncio.Future(loop=loop)
    function.set_exception(
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs")
    )
    loop.close()
    with pytest.raises(RuntimeError) as caught:
        call(function.result)
    return caught.value


THREAD = "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback:\nCUDA error: out of memory"


@pytest.mark.parametrize("free", [1 << 30, 40 << 30])
def test_pinned_memory_that_the_host_lacks_is_not_taken_for_the_devices(monkeypatch, free):
    """cudaHostAlloc and cudaMalloc fail with the same words."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 << 30))
    pinning = failed(
        lambda function: DeepSpeedAccelerator._torch_pin_memory(None, SimpleNamespace(pin_memory=function))
    )
    other = failed(lambda function: function())
    told = [rank.classify(error) for error in (pinning, other, RuntimeError(THREAD))]
    assert {outcome for outcome, _ in told} == {Outcome.OOM}
    assert [means_host_memory(reason) for _, reason in told] == [True, False, free > 8 << 30]


def test_what_a_new_python_took_to_import_counts_to_the_trials_deadline(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(worker_run.stacks, "answer", lambda: None)
    monkeypatch.setattr(worker_run, "abort", lambda recorder, _: ended.append(recorder.began_s))
    monkeypatch.setenv("RANK", "0")
    worker_run.main(str(tmp_path))  # there is no request
    assert time.monotonic() - ended[0] == pytest.approx(processes.age_s(), abs=0.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices_are_seeded_where_deepspeed_has_some_and_torch_is_not_asked_for_any(monkeypatch, device):
    """torch 2.6 starts CUDA to answer, also in a trial on the CPU, whose memory that would be."""
    seeded = []
    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda *_: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: pytest.fail("torch was asked"))
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    torch.default_generator.manual_seed(7)
    expected = torch.rand(1)
    rank.set_seed(7)
    assert (seeded == [7]) is (device == "cuda")
    assert seeded or torch.rand(1) == expected
