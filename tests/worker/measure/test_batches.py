"""Counts of an engine's batches."""

import pytest
import torch

from autotune.worker.measure.batches import BatchObserver, counted_tensor


def test_the_tensor_that_counts_samples_is_a_named_input_or_the_first_one():
    one, four = torch.zeros(1, 8), torch.zeros(4, 8)
    named = {"attention_mask": one, "input_ids": four}
    assert counted_tensor((), named) is four and counted_tensor((named,), {}) is four
    assert counted_tensor((3, [one, four]), {}) is one
    assert counted_tensor((None,), {"left": one, "right": four}) is one
    assert counted_tensor(("text",), {}) is None


class FakeEngine:
    """Takes an optimizer step every `accumulation` backward calls."""

    def __init__(self, accumulation):
        self.global_steps, self.micro, self.accumulation, self.training = 0, 0, accumulation, True
        self.observer = BatchObserver(self)

    def register_forward_pre_hook(self, hook, *, with_kwargs):
        self.forward = lambda *args: hook(None, args, {})

    def train(self, *batches, drawn=None):
        """Trains one micro-batch, whose forward is called once for each of the batches."""
        self.observer.drew(drawn)
        self.go(*batches)

    def go(self, *batches):
        for batch in batches:
            self.forward(batch)
        self.observer.backward()
        self.micro += 1
        self.global_steps += self.micro % self.accumulation == 0
        self.observer.step()


def test_samples_and_backward_calls_are_counted_per_optimizer_step():
    engine = FakeEngine(accumulation=3)
    for _ in range(6):
        engine.train(torch.zeros(4, 16, dtype=torch.long))
    seen = engine.observer
    assert (seen.micro_batch_sizes, seen.backward_counts) == ({4}, {3})
    assert (seen.samples_per_step, seen.tokens_per_step) == ({12}, {12 * 16})


def test_a_loss_that_calls_the_model_twice_counts_its_batch_once():
    engine = FakeEngine(accumulation=1)
    engine.train(torch.zeros(4, 3), torch.zeros(9, 3), drawn=4)
    with torch.no_grad():
        engine.forward(torch.zeros(7, 3))  # an evaluation inside the loss
    engine.train(torch.zeros(4, 3), drawn=4)
    seen = engine.observer
    assert (seen.micro_batch_sizes, seen.samples_per_step, seen.tokens_per_step) == ({4}, {4}, {0})


def test_micro_batches_may_be_drawn_ahead_for_a_whole_step():
    engine = FakeEngine(accumulation=2)
    seen = engine.observer
    for _ in range(3):
        for _ in range(2):
            seen.drew(4)
        for _ in range(2):  # packed: the leading dimension is 1
            engine.go(torch.zeros(1, 50))
    assert (seen.loader_batch_sizes, seen.micro_batch_sizes, seen.samples_per_step) == ({4}, {1}, {8})


def test_batches_of_an_evaluation_do_not_count():
    engine = FakeEngine(accumulation=1)
    for _ in range(3):
        engine.training = False
        for _ in range(5):
            engine.observer.drew(64)
            engine.forward(torch.zeros(64, 3))
        engine.training = True
        engine.train(torch.zeros(4, 3), drawn=4)
    assert engine.observer.loader_batch_sizes == {4} and engine.observer.samples_per_step == {4}


def test_draws_that_do_not_fit_the_batches_do_not_decide():
    engine = FakeEngine(accumulation=2)
    for _ in range(2):
        engine.train(torch.zeros(4, 3), drawn=4)
        engine.observer.drew(64)  # another loader's, which never goes forward
        engine.train(torch.zeros(4, 3), drawn=4)
    assert engine.observer.loader_batch_sizes == set() and engine.observer.samples_per_step == {8}


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4)])
def test_every_size_of_a_batch_that_varies_is_noted(sizes):
    engine = FakeEngine(accumulation=1)
    for n in sizes:
        engine.train(torch.zeros(n, 2))
    assert engine.observer.micro_batch_sizes == {3, 4}
