"""Instruments of a rank: what counts as a sample, what was recomputed, what memory is in use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

MIB = 1 << 20


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Torch, imported only when a test of the rank side runs."""
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def observe(torch: ModuleType) -> ModuleType:
    """The module under test, which imports torch."""
    return importlib.import_module("autotune.worker.measure.batches")


@pytest.fixture(scope="module")
def recompute(torch: ModuleType) -> ModuleType:
    """The module under test, which imports torch."""
    return importlib.import_module("autotune.worker.measure.recompute")


@pytest.fixture(scope="module")
def memory_watch(torch: ModuleType) -> ModuleType:
    """The module under test, which imports torch."""
    return importlib.import_module("autotune.worker.measure.memory")


@pytest.fixture(scope="module")
def machine_load(torch: ModuleType) -> ModuleType:
    """The module under test, which imports torch."""
    return importlib.import_module("autotune.worker.measure.machine_load")


class TestCountedTensor:
    """Whose leading dimension is the number of samples."""

    def test_names_of_inputs_come_before_others(self, observe: ModuleType, torch: ModuleType) -> None:
        mask, tokens = torch.zeros(1, 8), torch.zeros(4, 8)
        assert observe.counted_tensor((), {"attention_mask": mask, "input_ids": tokens}) is tokens
        assert observe.counted_tensor(({"attention_mask": mask, "input_ids": tokens},), {}) is tokens

    def test_the_first_tensor_counts_otherwise(self, observe: ModuleType, torch: ModuleType) -> None:
        first, second = torch.zeros(4), torch.zeros(5)
        assert observe.counted_tensor((3, [first, second]), {}) is first
        assert observe.counted_tensor((None,), {"left": first, "right": second}) is first
        assert observe.counted_tensor(("text",), {}) is None


class FakeEngine:
    """As much of an engine as the observer looks at: one optimizer step every `accumulation` backward calls."""

    def __init__(self, accumulation: int) -> None:
        self.global_steps, self.micro, self.accumulation, self.training = 0, 0, accumulation, True

    def register_forward_pre_hook(self, hook: Any, *, with_kwargs: bool) -> None:
        self.hook = hook

    def train(self, observer: Any, *batches: Any, drawn: int | None = None) -> None:
        """One micro-batch, its forward called once for each of the batches."""
        observer.drew(drawn)
        for batch in batches:
            self.hook(None, (batch,), {})
        observer.backward()
        self.micro += 1
        self.global_steps += self.micro % self.accumulation == 0
        observer.step()


def test_samples_and_backward_calls_are_counted_per_optimizer_step(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=3)
    observer = observe.BatchObserver(engine)
    for _ in range(6):
        engine.train(observer, torch.zeros(4, 16, dtype=torch.long))
    assert (observer.micro_batch_sizes, observer.backward_counts) == ({4}, {3})
    assert (observer.samples_per_step, observer.tokens_per_step) == ({12}, {12 * 16})


def test_a_loss_that_calls_the_model_twice_counts_its_batch_once(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=1)
    observer = observe.BatchObserver(engine)
    engine.train(observer, torch.zeros(4, 3), torch.zeros(9, 3), drawn=4)
    with torch.no_grad():
        engine.hook(None, (torch.zeros(7, 3),), {})  # an evaluation inside the loss
    engine.train(observer, torch.zeros(4, 3), drawn=4)
    assert (observer.micro_batch_sizes, observer.samples_per_step, observer.tokens_per_step) == ({4}, {4}, {0})


def test_micro_batches_may_be_drawn_ahead_for_a_whole_step(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=2)
    observer = observe.BatchObserver(engine)
    for _ in range(3):
        for _ in range(2):
            observer.drew(4)
        for _ in range(2):  # packed: the leading dimension is 1
            engine.hook(None, (torch.zeros(1, 50),), {})
            observer.backward()
        engine.global_steps += 1
        observer.step()
    assert (observer.loader_batch_sizes, observer.micro_batch_sizes, observer.samples_per_step) == ({4}, {1}, {8})


def test_what_an_evaluation_draws_is_not_trained_on(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=1)
    observer = observe.BatchObserver(engine)
    for _ in range(3):
        engine.training = False
        for _ in range(5):
            observer.drew(64)
            engine.hook(None, (torch.zeros(64, 3),), {})
        engine.training = True
        engine.train(observer, torch.zeros(4, 3), drawn=4)
    assert observer.loader_batch_sizes == {4} and observer.samples_per_step == {4}


def test_draws_that_do_not_fit_the_batches_do_not_decide(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=2)
    observer = observe.BatchObserver(engine)
    for _ in range(2):
        engine.train(observer, torch.zeros(4, 3), drawn=4)
        observer.drew(64)  # something else, that never goes forward
        engine.train(observer, torch.zeros(4, 3), drawn=4)
    assert observer.loader_batch_sizes == set() and observer.samples_per_step == {8}


def test_a_batch_that_varies_is_seen(observe: ModuleType, torch: ModuleType) -> None:
    engine = FakeEngine(accumulation=1)
    observer = observe.BatchObserver(engine)
    for n in (4, 3):
        engine.train(observer, torch.zeros(n, 2))
    assert observer.micro_batch_sizes == {3, 4}


@pytest.fixture
def blocks(torch: ModuleType) -> Any:
    """A net of four blocks with dropout."""
    nn = torch.nn
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize(("every", "n"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_every_kth_block_is_recomputed(
    observe: ModuleType, torch: ModuleType, blocks: Any, every: int, n: int, recompute
) -> None:
    checkpointer = recompute.Checkpointer(list(blocks), every)
    blocks(torch.randn(2, 8)).sum().backward()
    assert len(checkpointer.recomputed) == n


def test_recomputation_is_seen_whoever_asks_for_it(
    observe: ModuleType, torch: ModuleType, blocks: Any, recompute
) -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    watch = recompute.Recomputations(list(blocks))
    x = torch.ones(2, 8)
    for n, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if n % 2 == 0 else block(x)
    x.sum().backward()
    assert len(watch.recomputed) == (len(blocks) + 1) // 2 and watch.every == 2
    watch.stop()


def test_recomputing_changes_no_gradient_and_no_name(
    observe: ModuleType, torch: ModuleType, blocks: Any, recompute
) -> None:
    x, names = torch.randn(2, 8), list(blocks.state_dict())

    def gradients() -> list[Any]:
        torch.manual_seed(0)
        blocks.zero_grad()
        blocks(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in blocks.parameters()]

    plain = gradients()
    recompute.Checkpointer(list(blocks), 1)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert list(blocks.state_dict()) == names


def test_nothing_is_recomputed_without_gradients(
    observe: ModuleType, torch: ModuleType, blocks: Any, recompute
) -> None:
    checkpointer = recompute.Checkpointer(list(blocks), 1)
    with torch.no_grad():
        blocks(torch.randn(2, 8))
    assert not checkpointer.recomputed


def test_fewer_bytes_are_saved_for_backward_when_recomputed(
    observe: ModuleType, torch: ModuleType, blocks: Any, recompute
) -> None:
    def saved() -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Any) -> Any:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            blocks(torch.randn(64, 8, requires_grad=True)).sum().backward()
        return sum(kept.values())

    plain = saved()
    recompute.Checkpointer(list(blocks), 1)
    assert saved() < plain


def test_peak_memory_is_what_was_in_use_in_each_phase(observe: ModuleType, torch: ModuleType, memory_watch) -> None:
    memory = memory_watch.Memory("cpu")
    memory.enter("large")
    torch.ones(48 * MIB // 4).sum()
    memory.enter("small")
    torch.ones(4 * MIB // 4).sum()
    memory.enter("steady")
    torch.ones(96 * MIB // 4).sum()
    peaks = memory.finish()
    assert peaks["large"] - peaks["small"] > 36 * MIB
    assert "steady" not in peaks


def test_memory_that_was_freed_before_counts_when_it_is_used_again(
    observe: ModuleType, torch: ModuleType, memory_watch
) -> None:
    """The C library keeps freed chunks below a living one; taken for resident at the start, they would hide the growth."""
    memory_watch.keep_freed_memory(True)
    tensors = [torch.ones(MIB // 4) for _ in range(64)]
    keep, tensors = tensors[-1], []
    memory = memory_watch.Memory("cpu")
    memory.enter("again")
    again = [torch.ones(MIB // 4) for _ in range(64)]
    peaks = memory.finish()
    assert keep is not None and len(again) == 64
    assert peaks["again"] > 48 * MIB


@pytest.mark.parametrize("holes", [False, True])
def test_freed_tensors_are_not_in_use(observe: ModuleType, torch: ModuleType, holes: bool, memory_watch) -> None:
    """Many tensors of 1 MiB come and go: what the C library would keep of them is no memory of the phase after.

    Nor is it where they lay in holes that earlier tensors had left.
    """
    earlier = []
    if holes:
        memory_watch.keep_freed_memory(True)
        earlier = [torch.ones(MIB // 4) for _ in range(256)]
        earlier = [tensor for i, tensor in enumerate(earlier) if i % 4 == 0]
    memory = memory_watch.Memory("cpu")
    memory.enter("many")
    tensors = [torch.ones(MIB // 4) for _ in range(64)]
    keep, tensors = tensors[::8], []
    memory.enter("few")
    torch.ones(MIB // 4).sum()
    peaks = memory.finish()
    assert len(keep) == 8 and (not holes or earlier)
    assert peaks["many"] - peaks["few"] > 40 * MIB


def test_a_rank_far_from_its_limit_is_seldom_looked_at(memory_watch) -> None:
    assert memory_watch.watch_interval_s(100 << 30) == memory_watch.MAX_WATCH_INTERVAL_S
    assert memory_watch.watch_interval_s(0) == memory_watch.MIN_WATCH_INTERVAL_S
    assert 0.05 < memory_watch.watch_interval_s(1 << 30) < 0.1


GROWS_BETWEEN_TWO_LOOKS = """
import os, time
from autotune.worker.measure import memory as memory_watch
memory_watch.MIN_WATCH_INTERVAL_S = memory_watch.MAX_WATCH_INTERVAL_S = 3600.0
look = memory_watch.limit_host_memory(memory_watch.resident_bytes(), 64 << 20, lambda growth: os._exit(77 if growth > 64 << 20 else 1))
time.sleep(0.2)
kept = bytearray(os.urandom(1 << 20)) * {mib}
look()
os._exit(0)
"""


@pytest.mark.process
@pytest.mark.parametrize(("mib", "status"), [(128, 77), (8, 0)])
def test_what_grew_since_the_last_look_is_seen_at_the_end(observe: ModuleType, mib: int, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", GROWS_BETWEEN_TWO_LOOKS.format(mib=mib)], check=False)
    assert done.returncode == status


def test_our_own_work_is_not_that_of_others(observe: ModuleType, monkeypatch: pytest.MonkeyPatch, machine_load) -> None:
    readings = iter([(100.0, 10.0), (103.0, 12.0)])  # busy seconds of all cores, and the wall clock
    monkeypatch.setattr(machine_load.Busyness, "_read", staticmethod(lambda: next(readings)))
    assert machine_load.Busyness().cores_used_by_others(2.0) == pytest.approx(0.5)


def test_more_work_than_the_machine_did_is_no_negative_load(
    observe: ModuleType, monkeypatch: pytest.MonkeyPatch, machine_load
) -> None:
    readings = iter([(100.0, 10.0), (103.0, 12.0)])
    monkeypatch.setattr(machine_load.Busyness, "_read", staticmethod(lambda: next(readings)))
    assert machine_load.Busyness().cores_used_by_others(9.0) == 0.0
