"""A stand-in for GPUs, for every process that has this folder on PYTHONPATH: CUDA's faces in torch and DeepSpeed, on a CPU.

`STAND_IN` is JSON: `n`, `kind` (DeepSpeed's name of the accelerator), `name`, `capability`, `memory_gib`, `hip` (a version),
`log` (a file that gets a line for each device that a process takes, or starts a context on), `asks` (DeepSpeed asks for the
capability of devices as it is imported, as before 0.19.3). Tensors that ask for the device are made on the CPU;
memory is the process's own. To count devices starts a thread of the driver, as NVML does.
"""

import _thread
import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
import types

GIVEN = {
    "n": 2,
    "kind": "cuda",
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "9.0",
    "memory_gib": 80,
    "hip": None,
    "log": None,
}
GIVEN |= json.loads(os.environ.get("STAND_IN", "{}"))
KIND = GIVEN["kind"]
TAKEN = {"initialised": False, "device": 0, "peak": 0}


def visible():
    """Numbers of the visible devices, as the driver reads CUDA_VISIBLE_DEVICES: numbers or UUIDs, up to a wrong one."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is None:
        return list(range(GIVEN["n"]))
    names = {str(i): i for i in range(GIVEN["n"])} | {uuid(i): i for i in range(GIVEN["n"])}
    found = []
    for part in stated.split(","):
        if part.strip() not in names:
            break
        found.append(names[part.strip()])
    return found


def load_driver():
    """Starts the thread that a real driver starts in each process that counts devices by NVML."""
    if TAKEN.get("driver") != os.getpid():
        TAKEN["driver"] = os.getpid()
        _thread.start_new_thread(_driver_thread, ())


def _driver_thread():
    ctypes.CDLL(None).prctl(15, b"cuda00001800007", 0, 0, 0)  # PR_SET_NAME
    time.sleep(3600.0)


def count():
    if KIND == "cuda" and not GIVEN["hip"]:
        load_driver()
    return len(visible())


def uuid(index):
    return f"GPU-0000000{index}-aaaa-bbbb-cccc-000000000000"


def note(what, index=None):
    if GIVEN["log"]:
        physical = visible()[TAKEN["device"] if index is None else index] if visible() else None
        line = {"what": what, "pid": os.getpid(), "parent": os.getppid(), "device": physical, "argv": sys.orig_argv}
        with open(GIVEN["log"], "a") as file:
            file.write(json.dumps(line) + "\n")


def take(index=None):
    index = getattr(index, "index", index) if not isinstance(index, str) else int(index.partition(":")[2] or 0)
    if index is not None and index >= len(visible()):
        raise RuntimeError("CUDA error: invalid device ordinal")
    first, moved = not TAKEN["initialised"], index is not None and index != TAKEN["device"]
    TAKEN["initialised"], TAKEN["device"] = True, TAKEN["device"] if index is None else index
    if first or moved or index is not None:
        note("set_device" if index is not None else "init")


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stream:
    """A stream on a device that computes at once."""

    def synchronize(self):
        pass

    wait_stream = wait_event = record_event = lambda self, *_: None


Stream.own = Stream()


def patch_torch(torch):
    memory = int(GIVEN["memory_gib"] * 2**30)
    major, _, minor = GIVEN["capability"].partition(".")

    def properties(index=0):
        take()
        physical = visible()[index if isinstance(index, int) else 0]
        more = {"gcnArchName": GIVEN["capability"] + ":sramecc+"} if GIVEN["hip"] else {}
        numbers = {} if GIVEN["hip"] else {"major": int(major), "minor": int(minor or 0)}
        return types.SimpleNamespace(
            name=GIVEN["name"],
            total_memory=memory,
            uuid=uuid(physical)[4:],
            multi_processor_count=132,
            **more,
            **numbers,
        )

    def limited():
        return memory * TAKEN.get("fraction", 1.0)

    def peak():
        TAKEN["peak"] = max(TAKEN["peak"], resident())
        return TAKEN["peak"]

    def capability(index=0):
        take()
        return int(major), int(minor or 0)

    def free(index=None):
        note("context", TAKEN["device"] if index is None else index)
        return int(limited() - resident()), memory

    class Event:
        def __init__(self, **_):
            self.at = None

        def record(self, *_):
            self.at = time.perf_counter()

        def elapsed_time(self, later):
            return (later.at - self.at) * 1e3

        def query(self):
            return True

        synchronize = wait = lambda self, *_: None

    # Functions of their own: torch's compiler refuses one object under two names.
    def init():
        take()

    def set_device(device):
        take(device)

    faces = {
        "is_available": lambda: bool(count()), "device_count": count, "init": init,
        "is_initialized": lambda: TAKEN["initialised"], "current_device": lambda: TAKEN["device"],
        "set_device": set_device, "get_device_properties": properties,
        "get_device_name": lambda *_: properties().name, "get_device_capability": capability,
        "synchronize": lambda *_: None, "mem_get_info": free,
        "memory_allocated": lambda *_: resident(), "max_memory_allocated": lambda *_: peak(),
        "memory_reserved": lambda *_: resident(), "max_memory_reserved": lambda *_: peak() + (4 << 20),
        "memory_stats": lambda *_: {"num_alloc_retries": 0}, "reset_peak_memory_stats": lambda *_: TAKEN.update(peak=0),
        "set_per_process_memory_fraction": lambda share, *_: TAKEN.update(fraction=share), "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True, "Event": Event, "manual_seed_all": lambda *_: None,
        "manual_seed": lambda *_: None, "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, face in faces.items():
        setattr(torch.cuda, name, face)
        if KIND != "cuda":
            setattr(getattr(torch, KIND), name, face)
    if KIND != "cuda":
        torch.cuda.is_available, torch.cuda.is_initialized = lambda: False, lambda: False
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.version.cuda, torch.version.hip = (None, GIVEN["hip"]) if GIVEN["hip"] or KIND != "cuda" else ("12.8", None)
    torch.version.xpu = "20250101" if KIND == "xpu" else None
    join = torch.distributed.init_process_group

    def init_process_group(backend=None, *args, device_id=None, **more):
        assert device_id is None or device_id.index == TAKEN["device"]
        join("gloo", *args, **more)

    torch.distributed.init_process_group = init_process_group

    factories = (
        "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
        "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
    )  # fmt: skip
    for place, names in (
        (torch, factories),
        (torch.Tensor, ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")),
    ):
        for name in names:
            setattr(place, name, on_the_host(getattr(place, name), torch))
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, _: None


def on_the_host(function, torch):
    """The function, with the CPU where its caller says `cuda`. No TorchFunctionMode: hooks in backward run outside it."""

    def on_cpu(value):
        if (isinstance(value, torch.device) and value.type == KIND) or (
            isinstance(value, str) and value.partition(":")[0] == KIND
        ):
            return torch.device("cpu")
        return value

    @functools.wraps(function)
    def called(*args, **kwargs):
        kwargs.pop("pin_memory", None)  # which needs an allocator of a real device
        return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return called


def patch_accelerator(module):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    class StandIn(CPU_Accelerator):
        def __init__(self):
            super().__init__()
            self._name, self._real = KIND, CUDA_Accelerator.__new__(CUDA_Accelerator)
            self._real.class_dict = None

        def device_name(self, device_index=None):
            return KIND if device_index is None else f"{KIND}:{device_index}"

        def device(self, device_index=None):
            return contextlib.nullcontext()

        def set_device(self, device_index):
            take(device_index)

        def current_device(self):
            return TAKEN["device"]

        def current_device_name(self):
            return f"{KIND}:{TAKEN['device']}"

        def communication_backend_name(self):
            return "nccl" if KIND == "cuda" else "ccl"

        def synchronize(self, device_index=None):
            pass

        def total_memory(self, device_index=None):
            return int(GIVEN["memory_gib"] * 2**30)

        def memory_stats(self, device_index=None):
            return sys.modules["torch"].cuda.memory_stats()

        def max_memory_allocated(self, device_index=None):
            return sys.modules["torch"].cuda.max_memory_allocated()

        def max_memory_reserved(self, device_index=None):
            return sys.modules["torch"].cuda.max_memory_reserved()

        def reset_peak_memory_stats(self, device_index=None):
            sys.modules["torch"].cuda.reset_peak_memory_stats()

        def device_count(self):
            return len(visible())

        def is_available(self):
            return bool(visible())

        def is_fp16_supported(self):
            return True

        def is_bf16_supported(self):
            return True

        def supported_dtypes(self):
            return [*super().supported_dtypes(), sys.modules["torch"].float16]

        def on_accelerator(self, tensor):
            return True

        def is_synchronized_device(self):
            return False

        def Event(self, **more):
            return sys.modules["torch"].cuda.Event(**more)

        def Stream(self, *_, **__):
            return Stream()

        def stream(self, stream):
            return contextlib.nullcontext()

        def current_stream(self, device_index=None):
            return Stream.own

        default_stream = current_stream

        def op_builder_dir(self):
            return "deepspeed.ops.op_builder"

        def create_op_builder(self, name):
            return self._real.create_op_builder(name)

        def get_op_builder(self, name):
            return self._real.get_op_builder(name)

    if visible() and os.environ.get("DS_ACCELERATOR") != "cpu":
        module.set_accelerator(StandIn())


def shrink_probe(module):
    """The machine's rates are measured at sizes for a device, which take a CPU minutes."""
    module.MATRIX["cuda"], module.MATRICES["cuda"] = 128, (64, 128)
    module.MESSAGES["cuda"] = module.MESSAGES["cpu"]
    module.COPIED_BYTES["cuda"], module.OPTIMISED["cuda"], module.LARGEST_MESSAGE["cuda"] = 1 << 20, 1 << 16, 1 << 16


def ask(module):
    if GIVEN.get("asks"):
        cuda = sys.modules["torch"].cuda
        assert cuda.get_device_properties(0).major == cuda.get_device_capability()[0] == int(float(GIVEN["capability"]))


def find_toolkit(module):
    """As a build of torch with CUDA does."""
    if os.path.isdir(os.environ.get("CUDA_HOME", "")):
        module.CUDA_HOME = os.environ["CUDA_HOME"]


WANTED = {
    "torch.utils.cpp_extension": find_toolkit,
    "deepspeed.git_version_info": ask,
    "torch": patch_torch,
    "deepspeed.accelerator.real_accelerator": patch_accelerator,
    "autotune.worker.profile.machine": shrink_probe,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module right after its import."""

    def find_spec(self, name, path=None, target=None):
        if name not in WANTED:
            return None
        call = WANTED.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            call(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
