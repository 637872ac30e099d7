"""Counts of an engine's batches."""

from types import SimpleNamespace

import pytest
import torch

from autotune.worker.measure.batches import BatchObserver, Ragged, counted_tensor
from autotune.worker.script.evaluation import _rows_of

NO, END, SAME_END, UNSAID, VARIES = Ragged.NO, Ragged.END, Ragged.SAME_END, Ragged.UNSAID_END, Ragged.VARIES


def test_the_tensor_that_counts_samples_is_a_named_input_or_the_first_one():
    one, four = torch.zeros(1, 8), torch.zeros(4, 8)
    named = {"attention_mask": one, "input_ids": four}
    assert counted_tensor((), named) is four and counted_tensor((named,), {}) is four
    assert counted_tensor((3, [one, four]), {}) is one
    assert counted_tensor((None,), {"left": one, "right": four}) is one
    assert counted_tensor(("text",), {}) is None
    graphs = SimpleNamespace(edges=one, x=four, net=torch.nn.Linear(2, 2), whole=object())
    assert counted_tensor((graphs,), {}) is four and counted_tensor(([None, [graphs]],), {}) is four
    assert counted_tensor((torch.nn.Linear(2, 2), len, object()), {}) is None


def test_a_graph_that_can_be_called_is_a_batch_too():
    """As those of PyG: `graph(*names)` yields their values, and they keep them in a mapping."""

    class Graph:
        def __init__(self, **stored):
            self._store = stored

        def __call__(self, *names):
            raise AssertionError("it was called")

    nodes = torch.zeros(5, 3)
    assert counted_tensor((Graph(edges=torch.zeros(2, 9), x=nodes),), {}) is nodes


def test_sparse_inputs_are_counted_and_have_no_checksum():
    """As those of graphs: their bytes lie in no one place."""
    engine = FakeEngine(accumulation=1, forgiving=True)
    engine.train(torch.eye(4).to_sparse())
    assert engine.observer.micro_batch_sizes == {4} and not engine.observer.noted.checksums
    assert not _rows_of((torch.eye(4).to_sparse(),), {})


class FakeEngine:
    """Takes an optimizer step every `accumulation` backward calls."""

    def __init__(self, accumulation, *, forgiving=False):
        self.global_steps, self.micro, self.accumulation = 0, 0, accumulation
        self.module = torch.nn.Identity()
        self.observer = BatchObserver(self, forgiving=forgiving)

    def register_forward_pre_hook(self, hook, *, with_kwargs):
        self.forward = lambda *args, **kwargs: hook(None, args, kwargs)

    def register_forward_hook(self, hook):
        self.on_output = lambda output: hook(None, (), output)

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
    assert seen.samples_per_step == {12} and seen.last.tokens == seen.last.real_tokens == seen.last.elements == 12 * 16


def test_a_loss_that_calls_the_model_twice_counts_its_batch_once():
    engine = FakeEngine(accumulation=1)
    engine.train(torch.zeros(4, 3), torch.zeros(9, 3), drawn=4)
    with torch.no_grad():
        engine.forward(torch.zeros(7, 3))  # an evaluation inside the loss
    engine.train(torch.zeros(4, 3), drawn=4)
    seen = engine.observer
    assert (seen.micro_batch_sizes, seen.samples_per_step, seen.last.tokens) == ({4}, {4}, 0)


def test_a_micro_batch_that_goes_backward_once_for_each_of_its_losses_counts_once():
    """Each loss passed for a micro-batch, so that no trial had the batch that was asked for."""
    engine = FakeEngine(accumulation=2)
    for _ in range(4):
        engine.observer.drew(4)
        engine.forward(torch.zeros(4, 3))
        engine.observer.backward()  # with `retain_graph=True`
        engine.go()
    seen = engine.observer
    assert (seen.micro_batch_sizes, seen.backward_counts, seen.samples_per_step, seen.last.n_micro) == (
        {4},
        {2},
        {8},
        2,
    )


@pytest.mark.parametrize("n_calls", [1, 2])
@pytest.mark.parametrize("drawn_ahead", [False, True])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_batch_that_goes_forward_and_is_skipped_is_none_of_the_step(n_calls, drawn_ahead, rows):
    """As where a loss is not finite: the step counted both batches, and no trial had the batch that was asked for."""
    engine = FakeEngine(accumulation=2, forgiving=True)
    engine.observer.drew(4) if drawn_ahead else None
    for i in range(20):
        engine.observer.drew(4)
        outputs = []
        for _ in range(n_calls):
            engine.forward(torch.zeros(rows, 16, dtype=torch.long))
            outputs.append(torch.ones(1, requires_grad=True) * 2)
            engine.on_output({"logits": outputs[-1]})
        if i % 5 in (2, 3):
            continue
        sum(outputs).backward()
        engine.go()
        assert engine.observer.last.tokens in (0, 2 * rows * 16) and not engine.observer.last.ragged
    seen = engine.observer
    assert (seen.samples_per_step, seen.backward_counts, seen.micro_batch_sizes) == ({8}, {2}, {rows})


@pytest.mark.parametrize("rows", [4, 1])
def test_a_first_output_that_no_loss_takes_is_no_skipped_batch(rows):
    """As a target from the model itself: where rows are packed, a step of one sample was counted."""
    engine = FakeEngine(accumulation=1, forgiving=True)
    for _ in range(4):
        engine.observer.drew(4)
        for _ in range(2):
            engine.forward(torch.zeros(rows, 16, dtype=torch.long))
            output = torch.ones(1, requires_grad=True) * 2
            engine.on_output(output)
        output.backward()
        engine.go()
    assert (engine.observer.samples_per_step, engine.observer.loader_batch_sizes) == ({4}, {4})


def test_a_parameter_that_the_model_returns_keeps_no_hooks():
    engine, scale = FakeEngine(accumulation=1), torch.nn.Parameter(torch.ones(()))
    for _ in range(3):
        engine.forward(torch.zeros(4, 3))
        engine.on_output((scale * 2, scale))
    assert not scale._backward_hooks


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
        engine.module.eval()
        for _ in range(5):
            engine.observer.drew(64)
            engine.forward(torch.zeros(64, 3))
        engine.module.train()
        engine.train(torch.zeros(4, 3), drawn=4)
    assert engine.observer.loader_batch_sizes == {4} and engine.observer.samples_per_step == {4}


def test_a_batch_of_which_a_reference_is_taken_first_keeps_its_draw():
    """The rows counted as samples, of which pairs of preferences make two for each sample."""
    engine = FakeEngine(accumulation=2)
    for _ in range(3):
        for _ in range(2):
            engine.observer.drew(4)
            with torch.no_grad():
                engine.forward(torch.zeros(8, 3))
            engine.go(torch.zeros(8, 3))
    seen = engine.observer
    assert (seen.loader_batch_sizes, seen.samples_per_step) == ({4}, {8})


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


class Loop:
    """A loop over a loader's batches of real tensors, as the hooks see it; keeps the count of each step."""

    def __init__(self, accumulation=1):
        self.engine, self.steps = FakeEngine(accumulation, forgiving=True), []
        self.seen = self.engine.observer

    def draw(self, n, *shape, dim=0):
        batch = torch.zeros(*shape[:dim], n, *shape[dim:])
        self.seen.drew(n, (batch, torch.zeros(n)))
        return batch

    def train(self, *batches):
        before = self.engine.global_steps
        self.engine.go(*batches)
        if self.engine.global_steps > before:
            self.steps.append(self.seen.last)

    @property
    def samples(self):
        return [step.samples for step in self.steps]


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_that_is_cut_into_steps_counts_once(parts, dim):
    loop = Loop()
    for _ in range(5):
        for part in loop.draw(24, 5, dim=dim).chunk(parts, dim):
            loop.train(part)
    assert loop.samples[1:] == [24 // parts] * (5 * parts - 1)  # the first step does not know yet that there are more
    assert loop.seen.micro_batch_sizes == {24 // parts} == loop.seen.samples_per_step
    assert (loop.seen.parts, loop.seen.draw_size, loop.seen.loader_batch_sizes) == (parts, 24, set())
    assert not any(step.ragged for step in loop.steps)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_batch_that_is_cut_into_the_micro_batches_of_a_step_counts_once(parts):
    loop = Loop(accumulation=parts)
    for _ in range(3):
        for part in loop.draw(24, 5).chunk(parts):
            loop.train(part)
    assert loop.samples == [24] * 3 and loop.seen.parts == parts and loop.seen.backward_counts == {parts}


def test_parts_that_do_not_come_out_even_count_what_they_are():
    loop = Loop()
    for _ in range(4):
        for part in loop.draw(32, 5).chunk(3):
            loop.train(part)
    assert loop.samples[1:4] == [11, 10, 11] and sum(loop.samples[3:]) == 3 * 32
    assert loop.seen.micro_batch_sizes == {11} and not any(step.ragged for step in loop.steps)


def test_the_last_batch_of_an_epoch_that_is_cut_into_fewer_parts_is_set_aside():
    loop = Loop()
    for _ in range(2):
        for n in (12, 12, 8):
            parts = loop.draw(n, 4).split(5)
            loop.engine.accumulation, loop.engine.micro = len(parts), 0
            for part in parts:
                loop.train(part)
        loop.seen.ended()
    assert [step.ragged for step in loop.steps] == [NO, NO, END] * 2 and loop.samples[:2] == [12, 12]
    assert (loop.seen.backward_counts, loop.seen.micro_batch_sizes, loop.seen.samples_per_step) == ({3}, {5}, {12})


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_the_short_last_batch_of_an_epoch_that_is_cut_into_steps_is_one_end(parts):
    loop = Loop()
    for _ in range(3):
        for n in (24, 24, 8):
            for part in loop.draw(n, 4).chunk(parts):
                loop.train(part)
        loop.seen.ended()
    n_short = len(torch.zeros(8).chunk(parts))
    assert [step.ragged for step in loop.steps] == ([NO] * 2 * parts + [END] + [SAME_END] * (n_short - 1)) * 3


def test_the_short_last_batch_of_an_epoch_is_set_aside_and_told_from_steps_that_vary():
    loop = Loop()
    for _ in range(3):
        for n in (8, 8, 8, 5):
            loop.train(loop.draw(n, 4))
        loop.seen.ended()
    assert [step.ragged for step in loop.steps] == [NO, NO, NO, END] * 3 and loop.seen.samples_per_step == {8}


def test_the_short_last_batch_of_a_stream_is_known_by_the_end_that_follows():
    for ends, last in ((True, NO), (False, VARIES)):
        loop = Loop()
        for n in (8, 8, 5):
            loop.seen.drew(8 if not ends else n)
            loop.train(torch.zeros(n, 4))
        if ends:
            loop.seen.ended()
        loop.seen.drew(8)
        loop.train(torch.zeros(8, 4))
        assert ends is False or [step.ragged for step in loop.steps] == [NO, NO, END, last]


def test_without_a_loader_a_smaller_step_stands_alone_or_steps_vary():
    for sizes, ragged in (((8, 8, 5, 8, 8), [NO, NO, END, NO, NO]), ((8, 8, 5, 4, 8), [NO, NO, END, VARIES, NO])):
        loop = Loop()
        for n in sizes:
            loop.train(torch.zeros(n, 4))
        assert [step.ragged for step in loop.steps] == ragged


def test_draws_that_differ_within_an_epoch_are_no_ends_of_it():
    loop = Loop()
    for n in (8, 8, 5, 8):
        batch = torch.zeros(n, 4)
        loop.seen.drew(n, (batch,), varies=n == 5)
        loop.train(batch)
    assert [step.ragged for step in loop.steps] == [NO, NO, VARIES, NO]


def test_smaller_draws_after_which_no_loader_ends_vary():
    loop = Loop()
    for n in (8, 4) * 4:  # two loaders in turns
        loop.train(loop.draw(n, 3))
    assert [step.ragged for step in loop.steps][:6] == [NO, END, NO, UNSAID, NO, UNSAID]


@pytest.mark.parametrize(
    ("accumulation", "sizes", "ragged"),
    [(3, (8, 16, 4), [VARIES] * 4), (1, (4, 8), [NO, VARIES, NO, VARIES]), (2, (8, 8), [NO] * 4)],
)
def test_loaders_of_unlike_sizes_in_turns_make_steps_that_vary(accumulation, sizes, ragged):
    """As those of several tasks: steps of 28 samples each were refused as varying, with the advice to make them the same."""
    loop = Loop(accumulation=accumulation)
    for n in sizes * 4 * accumulation:
        loop.train(loop.draw(n, 3))
    assert [step.ragged for step in loop.steps[:4]] == ragged


@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_varying_sizes_count_as_they_come(packed):
    engine = FakeEngine(accumulation=2)
    seen = engine.observer = BatchObserver(engine, uneven=True)
    counts = []
    for n in (5, 9, 7, 3, 8, 2):
        seen.drew(n, (torch.zeros(n, 4),), varies=True)
        engine.go(torch.zeros(1, 4 * n) if packed else torch.zeros(n, 4))
        counts.append(seen.last.samples)
    assert counts[1::2] == [14, 10, 10] and seen.sizes() == [5, 9, 7, 3, 8, 2]
    assert seen.parts == 0 and not seen.last.ragged


def test_samples_of_a_micro_batch_in_one_row_are_flattened_and_a_single_sample_is_not():
    for drawn, flattened in ((4, True), (1, False)):
        engine = FakeEngine(accumulation=1)
        for length in (40, 37):
            engine.train(torch.zeros(1, length, dtype=torch.long), drawn=drawn)
        assert engine.observer.flattened is flattened and engine.observer.samples_per_step == {drawn}
        assert engine.observer.last.real_tokens == 37


def test_several_draws_make_one_micro_batch():
    loop = Loop()
    for _ in range(4):
        loop.train(torch.cat([loop.draw(8, 3), loop.draw(8, 3)]))
    assert loop.samples == [16] * 4 and loop.seen.micro_batch_sizes == {16}


def test_several_draws_and_passes_for_one_backward_call_count_all():
    loop = Loop()
    for _ in range(4):
        loop.train(loop.draw(8, 3), loop.draw(8, 3))
    assert loop.samples[1:] == [16] * 3


def test_two_views_of_a_draw_are_not_twice_the_samples():
    loop = Loop()
    for _ in range(4):
        batch = loop.draw(8, 3)
        loop.train(batch, batch)
        loop.train(torch.cat([loop.draw(8, 3)] * 2))
    assert loop.samples == [8] * 8


def test_what_a_thread_draws_ahead_is_no_part_of_a_step():
    """Draws and calls added up by chance once, and a micro-batch read as twice its samples."""
    engine = FakeEngine(accumulation=1)
    for ahead in (3, 1, 1):
        for _ in range(ahead):
            engine.observer.drew(4, torch.zeros(4, 3))
        engine.go(torch.zeros(4, 3), torch.zeros(4, 3))
    engine.observer.drew(4, torch.zeros(4, 3))
    assert engine.observer.samples_per_step == {4}


def test_what_is_drawn_and_left_out_was_not_trained():
    loop = Loop()
    for _ in range(3):
        loop.train(loop.draw(8, 3)[:5])
    assert loop.samples == [5] * 3


def test_batches_that_the_script_has_kept_are_the_loader_s_still():
    loop = Loop()
    kept = [loop.draw(4, 1) for _ in range(3)]
    loop.seen.ended()
    for _ in range(3):
        for _ in kept:
            loop.train(torch.zeros(1, 50))  # packed: one row
    assert loop.samples == [4] * 9


def test_a_batch_drawn_ahead_of_its_step_belongs_to_the_next_one():
    loop = Loop()
    loop.draw(4, 1)
    for _ in range(5):
        loop.draw(4, 1)
        loop.train(torch.zeros(1, 50))
    assert loop.samples == [4] * 5 and loop.seen.loader_batch_sizes == {4}


@pytest.mark.parametrize(
    "padding", [{"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}, {"lengths": torch.tensor([3, 1])}]
)
def test_padding_is_told_from_tokens(padding):
    loop = Loop()
    loop.engine.forward(input_ids=torch.zeros(2, 4, dtype=torch.long), **padding)
    loop.train()
    assert (loop.steps[0].tokens, int(loop.steps[0].real_tokens)) == (8, 4)
