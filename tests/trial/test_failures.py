"""Error messages as torch, CUDA, NCCL, DeepSpeed and Linux word them, and what each means."""

import pytest

from autotune.trial.failures import headline, means_lost_peer, means_other_dtype, means_out_of_memory

OUT_OF_MEMORY = """\
CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 8.31 MiB is free.
CUDA error: out of memory\\nCUDA kernel errors might be asynchronously reported at some other API call
HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB
XPU out of memory. Tried to allocate 512.00 MiB
CUDA driver error: out of memory
NPU out of memory. Tried to allocate 1.20 GiB (NPU 0; 32.00 GiB total capacity)
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
CUDA error: CUSOLVER_STATUS_ALLOC_FAILED when calling `cusolverDnCreate(handle)`
cuSPARSE error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`
rocblas error: Cannot allocate memory
cudaErrorMemoryAllocation: the API call failed because it was unable to allocate enough memory
NCCL WARN Failed to CUDA calloc 6291456 bytes
NCCL error: unhandled cuda error\\nLast error:\\nFailed to CUDA calloc async 608 bytes
NCCL error: unhandled cuda error\\nLast error:\\nCuda failure 2 'out of memory'
NCCL error: unhandled system error\\nLast error:\\nFailed to CUDA host alloc 4194304 bytes
CUDA error: cudaHostAlloc failed for 1073741824 bytes
cudaMallocHost failed: could not pin 4096 MiB
DeepSpeed: unable to allocate pinned memory of 2147483648 bytes
RuntimeError in pin memory thread: CUDA error: out of memory
std::bad_alloc
terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc
[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes
DefaultCPUAllocator: not enough memory: you tried to allocate 137438953472 bytes
[Errno 12] Cannot allocate memory
Unable to allocate 14.9 GiB for an array with shape (2000000000,) and data type float64
unable to mmap 1610612736 bytes from file </dev/shm/torch_1>: Cannot allocate memory (12)
OpenMP: could not allocate memory for its threads
JAX RESOURCE_EXHAUSTED: failed to allocate request for 4.00GiB
Triton Error [CUDA]: out of memory
oneDNN: could not create a memory object: bad allocation
torch.AcceleratorError: CUDA error: out of memory
cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY
CUDNN_BACKEND_EXECUTION_PLAN: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
rocBLAS error: rocblas_status_memory_error
MIOpen Error: miopenStatusAllocFailed
HIP error: hipErrorMemoryAllocation
level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)
Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)
Allocation is out of device memory on current platform.
aclrtMalloc: ACL_ERROR_RT_MEMORY_ALLOCATION, error code is 207001
FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB
MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 384.00 KB)
hipHostMalloc failed with code 2
NCCL error: unhandled cuda error\\nLast error:\\nFailed to CUDA malloc 4194304 bytes
MemoryError: Unable to allocate internal buffer
EL0004: Failed to allocate memory. Possible Cause: Available memory is insufficient.
[ERROR] RUNTIME: rtMalloc execute failed, reason=[driver error:out of memory]
NCCL error: unhandled system error\\nLast error:\\nCall to ibv_reg_mr failed: Cannot allocate memory
cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: 17,179,869,184 bytes).
slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.
slurmstepd: error: Exceeded job memory limit at some point.
Memory cgroup out of memory: Killed process 4321 (python)
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
CUDA error: hipErrorOutOfMemory
HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources.
synapse: synStatus 26 [Generic failure] Graph compile failed. workspace allocation of 12884901888 failed
Error allocating pinned buffer of 2147483648 bytes
posix_memalign failed with error 12
[Errno 12] mmap failed
Error in memory allocation: requested 12.5 GiB, available 3.1 GiB
CUDA error: an attempt was made to use more memory than is available on the device
level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)
cudaMallocAsync failed: out of memory
""".splitlines()
FULL_DEVICE = """\
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_NOT_INITIALIZED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR
CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLtMatmulAlgoGetHeuristic`
FIND was unable to find an engine to execute this computation
GET was unable to find an engine to execute this computation
Unable to find a valid cuDNN algorithm to run convolution
CUDA error: CUSOLVER_STATUS_INTERNAL_ERROR when calling `cusolverDnSgetrf`
HIP error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`
cuFFT error: CUFFT_INTERNAL_ERROR
NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016, please report a bug
""".splitlines()
SOMETHING_ELSE = """\
CUDA error: device-side assert triggered
CUDA error: an illegal memory access was encountered
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`
CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`
cuDNN error: CUDNN_STATUS_BAD_PARAM
CUDA error: no kernel image is available for execution on the device
NCCL error: unhandled system error\\nLast error:\\nError while creating shared memory segment /dev/shm/nccl-1 (size 9637888)
mat1 and mat2 shapes cannot be multiplied (8x16 and 32x16)
Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned
index 50304 is out of bounds for dimension 0 with size 50304
[Errno 28] No space left on device
cannot allocate port 29500 to rank 0
CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`
triton OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376
DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that its workers are out of shared memory
CUDA error: cudaErrorHostMemoryAlreadyRegistered
unsupported memory format option Preserve
cuDNN error: CUDNN_STATUS_NOT_SUPPORTED
/lib/libtorch.so: cannot allocate memory in static TLS block
module 'torch' has no attribute 'OutOfMemoryError'
out_of_memory_policy must be one of raise, skip
allocation of 12 ranks to 8 devices failed
Unrecognized CachingAllocator option: expandable
cudaMemcpyAsync failed: invalid argument
Cannot allocate a negative number of samples
CUDA error: unspecified launch failure
CUDA-capable device(s) is/are busy or unavailable
unable to open shared memory object </torch_12_3> in read-write mode: Too many open files (24)
NCCL error: internal error\\nLast error:\\nBootstrap : no socket interface found
Trying to backward through the graph a second time; saved intermediate values have been freed
input of size 511 is out of range of the memory format
mmap() failed: Invalid argument
can't start new thread
Disk quota exceeded
No module named 'memory_profiler'
memory_efficient_linear must be a bool
""".splitlines()


@pytest.mark.parametrize("text", [*OUT_OF_MEMORY, *FULL_DEVICE])
def test_out_of_memory_is_known_by_all_its_names(text):
    assert means_out_of_memory(text.replace("\\n", "\n"))


@pytest.mark.parametrize("text", FULL_DEVICE)
def test_what_a_broken_driver_says_too_counts_only_on_a_full_device(text):
    assert means_out_of_memory(text, 0.01) and not means_out_of_memory(text, 0.4)


@pytest.mark.parametrize("text", SOMETHING_ELSE)
def test_other_errors_are_no_lack_of_memory(text):
    assert not means_out_of_memory(text.replace("\\n", "\n"))


def test_nccls_cause_stands_beside_its_headline():
    text = "NCCL error in: init.cpp:1, unhandled system error\nncclSystemError: System call failed.\nLast error:\nno space in /dev/shm"
    assert headline(text) == "NCCL error in: init.cpp:1, unhandled system error (no space in /dev/shm)"
    assert headline("Error(s) in loading state_dict:\n\tMissing key") == "Error(s) in loading state_dict: Missing key"
    assert headline("") == ""


@pytest.mark.parametrize(
    ("means", "text", "holds"),
    [
        (means_lost_peer, "[gloo] Connection closed by peer [127.0.0.1]:1", True),
        (means_lost_peer, "NCCL communicator was aborted on rank 1", True),
        (means_lost_peer, "KeyError: 'x'", False),
        (means_other_dtype, "expected scalar type Half but found Float", True),
        (means_other_dtype, "\"erfinv\" not implemented for 'BFloat16'", True),
        (means_other_dtype, "KeyError: 'dtype'", False),
    ],
)
def test_what_a_message_means(means, text, holds):
    assert means(text) is holds
