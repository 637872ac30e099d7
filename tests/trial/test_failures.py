"""Error messages as torch, CUDA, NCCL, DeepSpeed and Linux word them, and what each means."""

import pytest
import torch

from autotune.trial.failures import (
    HOST_MEMORY,
    advice,
    headline,
    means_host_memory,
    means_lost_peer,
    means_other_dtype,
    means_out_of_memory,
    more_time,
)
from autotune.trial.result import Outcome

DEVICE_MEMORY_OUT = """\
CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 8.31 MiB is free.
HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB
XPU out of memory. Tried to allocate 512.00 MiB
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
rocblas error: Cannot allocate memory
NCCL WARN Failed to CUDA calloc 6291456 bytes
NCCL error: unhandled cuda error\\nLast error:\\nCuda failure 2 'out of memory'
RuntimeError in pin memory thread: CUDA error: out of memory
JAX RESOURCE_EXHAUSTED: failed to allocate request for 4.00GiB
Triton Error [CUDA]: out of memory
oneDNN: could not create a memory object: bad allocation
cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY
rocBLAS error: rocblas_status_memory_error
MIOpen Error: miopenStatusAllocFailed
HIP error: hipErrorMemoryAllocation
level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)
Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)
aclrtMalloc: ACL_ERROR_RT_MEMORY_ALLOCATION, error code is 207001
HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources.
Error in memory allocation: requested 12.5 GiB, available 3.1 GiB
CUDA error: an attempt was made to use more memory than is available on the device
cudaMallocAsync failed: out of memory
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 23.69 GiB total capacity; 20.12
RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: Unable to allocate workspace of 3221225472 bytes
pycuda._driver.MemoryError: cuMemAlloc failed: out of memory
hipErrorOutOfMemory: out of memory
MIOpen Error: /MIOpen/src/hip/handlehip.cpp:101: Memory not available to allocate buffer: 2147483648
zeMemAllocDevice failed with error 0x70000003
RuntimeError: The Inner error is reported as above. Error code is 207001, [Error]: Failed to apply for memory.
aclrtMallocAlign32 failed, error code 207018: device memory limit exceeded; memory allocation error
CUDA driver error: 2
cuBLAS Error: an internal resource allocation failed
torch.cuda.OutOfMemoryError
ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized
ERR00006 PTA memory error
RuntimeError: FATAL ERROR :: MODULE:PT_DEVMEM Workspace Allocation Of Size ::61203283968 Failed!
MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/mr/device/cuda_memory_resource.hpp:70
std::bad_alloc: cudaErrorMemoryAllocation: out of memory
GPU memory exhausted
CUDA memory allocation of 268435456 bytes failed
RuntimeError: Invalid buffer size: 24.00 GB
OutOfMemoryError()
""".splitlines()
HOST_MEMORY_OUT = """\
NCCL error: unhandled system error\\nLast error:\\nFailed to CUDA host alloc 4194304 bytes
cudaMallocHost failed: could not pin 4096 MiB
DeepSpeed: unable to allocate pinned memory of 2147483648 bytes
std::bad_alloc
[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes
[Errno 12] Cannot allocate memory
Unable to allocate 14.9 GiB for an array with shape (2000000000,) and data type float64
unable to mmap 1610612736 bytes from file </dev/shm/torch_1>: Cannot allocate memory (12)
OpenMP: could not allocate memory for its threads
hipHostMalloc failed with code 2
MemoryError: Unable to allocate internal buffer
slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.
slurmstepd: error: Exceeded job memory limit at some point.
Memory cgroup out of memory: Killed process 4321 (python)
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Error allocating pinned buffer of 2147483648 bytes
[Errno 12] mmap failed
Call to posix_memalign failed : Cannot allocate memory
RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
RuntimeError: CUDA error: cudaHostAlloc(&ptr, size, flags) returned out of memory
RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to
ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY
numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.46 TiB for an array with shape (200000000000,)
pyarrow.lib.ArrowMemoryError: malloc of size 17179869184 failed
tcmalloc: large alloc 2147483648 bytes == (nil)
libgomp: Out of memory allocating 128 bytes
<jemalloc>: Error in malloc(): out of memory
memory allocation of 4294967296 bytes failed
srun: error: node07: task 3: Out Of Memory
Killed process 22187 (python3) total-vm:98123456kB, anon-rss:62345678kB, oom_score_adj:1000
Command terminated with exit code 137: container was OOMKilled
safetensors: Cannot allocate memory (os error 12)
mlock failed: Cannot allocate memory
ibv_create_cq failed: Cannot allocate memory
PBS: job killed: mem 131072000kb exceeded limit 125829120kb
TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.
pyarrow.lib.ArrowMemoryError: realloc of size 8589934592 failed
python: malloc failed: Cannot allocate memory
systemd-oomd: Killed /user.slice due to memory pressure: out of memory
""".splitlines()
FULL_DEVICE = """\
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR
GET was unable to find an engine to execute this computation
Unable to find a valid cuDNN algorithm to run convolution
cuFFT error: CUFFT_INTERNAL_ERROR
NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016, please report a bug
cublasLt ran into an error! CUBLAS_STATUS_INTERNAL_ERROR
RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.
miopenStatusUnknownError
Unable to create cuSPARSELt workspace: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES
cublasLt ran into an error! status: 3 shapeA=torch.Size([4096, 1024])
""".splitlines()
SOMETHING_ELSE = """\
CUDA error: an illegal memory access was encountered
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`
cuDNN error: CUDNN_STATUS_BAD_PARAM
NCCL error: unhandled system error\\nLast error:\\nError while creating shared memory segment /dev/shm/nccl-1 (size 9637888)
cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned
[Errno 28] No space left on device
cannot allocate port 29500 to rank 0
triton OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376
DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that its workers are out of shared memory
CUDA error: cudaErrorHostMemoryAlreadyRegistered
unsupported memory format option Preserve
/lib/libtorch.so: cannot allocate memory in static TLS block
module 'torch' has no attribute 'OutOfMemoryError'
out_of_memory_policy must be one of raise, skip
allocation of 12 ranks to 8 devices failed
Unrecognized CachingAllocator option: expandable
Cannot allocate a negative number of samples
CUDA error: unspecified launch failure
unable to open shared memory object </torch_12_3> in read-write mode: Too many open files (24)
input of size 511 is out of range of the memory format
mmap() failed: Invalid argument
No module named 'memory_profiler'
memory_efficient_linear must be a bool
NCCL WARN Call to posix_fallocate failed : No space left on device
BlockingIOError: [Errno 11] Resource temporarily unavailable
OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable
Memory access fault by GPU node-1 (Agent handle: 0x55d) on address 0x7f. Reason: Page not present or supervisor
torch._dynamo.exc.Unsupported: out of memory_format support
RuntimeError: Pin memory thread exited unexpectedly
warning: memory allocation statistics could not be read
AttributeError: 'NoneType' object has no attribute 'max_memory_allocated'
IndexError: list index out of range; memory bank 3
KeyError: 'out_of_memory'
AssertionError: expert allocation failed: 8 experts do not divide 3 ranks
""".splitlines()


@pytest.mark.parametrize("text", [*DEVICE_MEMORY_OUT, *HOST_MEMORY_OUT, *FULL_DEVICE])
def test_out_of_memory_is_known_by_all_its_names(text):
    assert means_out_of_memory(text.replace("\\n", "\n"))


@pytest.mark.parametrize("text", FULL_DEVICE)
def test_what_a_broken_driver_says_too_counts_only_on_a_full_device(text):
    assert means_out_of_memory(text, 0.01) and not means_out_of_memory(text, 0.4)


@pytest.mark.parametrize("text", SOMETHING_ELSE)
def test_other_errors_are_no_lack_of_memory(text):
    assert not means_out_of_memory(text.replace("\\n", "\n"))


@pytest.mark.parametrize("text", [*DEVICE_MEMORY_OUT, *HOST_MEMORY_OUT])
def test_the_hosts_memory_is_told_from_the_devices(text):
    host = text in HOST_MEMORY_OUT
    assert means_host_memory(text.replace("\\n", "\n")) is host
    assert advice(Outcome.OOM, text, on_device=True) == (HOST_MEMORY if host else "")
    assert advice(Outcome.OOM, text, on_device=False) == ""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "--shm-size"),
        ("rank 1 was killed by signal 7", "--shm-size"),
        ("NCCL error (Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888))", "--shm-size"),
        ("triton OutOfResources: out of resource: shared memory, Required: 147456", "smaller blocks"),
        ("[Errno 28] No space left on device: '/cache'", "A disk is full"),
        ("[Errno 122] Disk quota exceeded", "quota"),
        ("received 0 items of ancdata", "ulimit -n"),
        ("unable to open shared memory object </t> in read-write mode: Too many open files (24)", "ulimit -n"),
        ("can't start new thread", "ulimit -u"),
        ("stack expects each tensor to be equal size, but got [3, 24, 24] at entry 0", "collate(samples)"),
        ("TypeError: 'DeepSpeedEngine' object is not subscriptable", "loss(model, batch)"),
        ("TypeError: cannot unpack non-iterable DeepSpeedEngine object", "loss(model, batch)"),
        ("TypeError: unsupported operand type(s) for -: 'DeepSpeedEngine' and 'Tensor'", "loss(model, batch)"),
        ("AttributeError: 'DeepSpeedEngine' object has no attribute 'squeeze'", "loss(model, batch)"),
        (
            "TypeError: cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not DeepSpeedEngine",
            "loss(model, batch)",
        ),
        ("Adam does not support sparse gradients, please consider SparseAdam instead", "sparse=True"),
        ("NotImplementedError: \"add_out_sparse_cpu\" not implemented for 'BFloat16'", "sparse=True"),
        ("NotImplementedError: Could not run 'aten::view' with arguments from the 'SparseCPU' backend.", "sparse=True"),
        (
            "copy_() between dense and sparse Tensors is not implemented! Found self type = torch.FloatTensor",
            "sparse=True",
        ),
        ("AssertionError: attempting to reduce an unsupported grad type: torch.complex64", "view_as_complex"),
        ("AssertionError: attempting to reduce an unsupported grad type: torch.float64", "`model.float()`"),
        (
            "RuntimeError: Direct calls to tensor.backward() are not supported in this configuration.",
            "in the model's forward()",
        ),
        (
            "RuntimeError: Direct calls to tensor.backward() are not supported",
            "call engine.backward(loss)",
        ),  # of a script
        ("RuntimeError: Direct calls to tensor.backward() are not supported", "`engine.module(x)`"),
        (
            "AssertionError: The parameter 4.bias has already been reduced.             Gradient computed twice for this"
            " partition.             Multiple gradient reduction is currently not supported",
            "`requires_grad_(False)`",
        ),
        ("TypeError: DeepSpeedZeroOptimizer is not an Optimizer", "optimizer.optimizer"),
        ("TypeError: DeepSpeedZeroOptimizer_Stage3 is not an Optimizer", "optimizer.optimizer"),
        ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA error: device-side assert triggered", "out of range"),
        ("CUDA error: uncorrectable ECC error encountered", "faulty"),
        ("CUDA error: no kernel image is available for execution on the device", "compute capability"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("CUDA-capable device(s) is/are busy or unavailable", "Another process"),
        ("CUDA error: invalid device ordinal", "more ranks than"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_what_the_machine_refuses_comes_with_what_to_do(text, what):
    assert what in advice(Outcome.CRASHED, text, on_device=True)
    assert (
        advice(Outcome.TIMEOUT, text, on_device=True) == "" == advice(Outcome.CRASHED, "KeyError: 'x'", on_device=True)
    )


@pytest.mark.parametrize(
    "name", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-1b4e28ba-2fa1-11d2-883f-0016d3cca427"]
)
def test_deepspeed_that_cannot_read_a_devices_name_is_told_of_numbers(monkeypatch, name):
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    with pytest.raises(ValueError) as caught:
        CUDA_Accelerator._get_nvml_gpu_id(None, 0)
    assert "nvidia-ml-py" in advice(Outcome.CRASHED, f"ValueError: {caught.value}", on_device=True)


def test_a_parameter_without_dimensions_is_said_to_be_what_deepspeed_fails_on():
    """A script with CLIP's logit_scale ran under Accelerate alone, and DeepSpeed's words named neither it nor a remedy."""
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Parameter(torch.tensor(1.0)).data.view(torch.uint8)  # as its engine does
    said = advice(Outcome.CRASHED, f"RuntimeError: {caught.value}", on_device=False)
    assert said.startswith("DeepSpeed") and "shape [1]" in said


def test_nccls_cause_stands_beside_its_headline():
    text = "NCCL error in: init.cpp:1, unhandled system error\nncclSystemError: System call failed.\nLast error:\nno space in /dev/shm"
    assert headline(text) == "NCCL error in: init.cpp:1, unhandled system error (no space in /dev/shm)"
    assert headline("Error(s) in loading state_dict:\n\tMissing key") == "Error(s) in loading state_dict: Missing key"
    assert headline("") == ""
    assert headline("OSError: no. Try again.\n") == "OSError: no. Try again" and headline("Waiting...") == "Waiting..."


def test_a_headline_has_no_full_stop_where_a_sentence_goes_on_after_it():
    """Reports read "no space left.." and "out of memory.; `--device-memory` ..."."""
    assert headline("Step 1 failed. Try again.\nmore") == "Step 1 failed. Try again"
    assert headline("loading...") == "loading..." and headline(".") == ""


@pytest.mark.parametrize(
    ("means", "text", "holds"),
    [
        (means_lost_peer, "[gloo] Connection closed by peer [127.0.0.1]:1", True),
        (means_lost_peer, "NCCL communicator was aborted on rank 1", True),
        (means_lost_peer, "KeyError: 'x'", False),
        (means_other_dtype, "expected scalar type Half but found Float", True),
        (means_other_dtype, "\"erfinv\" not implemented for 'BFloat16'", True),
        (
            means_other_dtype,
            "expected dtype float for `end` but got dtype c10::BFloat16",
            True,
        ),  # of an average of weights
        (means_other_dtype, "KeyError: 'dtype'", False),
    ],
)
def test_what_a_message_means(means, text, holds):
    assert means(text) is holds


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("first_evaluation", "not begun to train"),
        ("build", "that long to load"),
        ("other_process", "started another process, whose training no trial sees"),
        ("warmup", "begun to train"),
        ("script_ended", "ended on one rank while others still trained"),
        ("measure", "hangs"),
    ],
)
def test_what_had_begun_to_train_is_not_said_to_load(phase, said):
    assert said in more_time(phase)
