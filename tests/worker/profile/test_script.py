"""The profile from one forward of a script's engine, compared with that of a whole pass."""

import numpy as np
import pytest
import torch
from support.instant import WORKLOAD
from torch import nn
from torch.utils import _python_dispatch

from autotune.worker.measure.recompute import Recomputations
from autotune.worker.profile import op_counter
from autotune.worker.profile.script import ForwardProfile

WIDTH, SAMPLES = 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Recomputing(nn.Module):
    """Recomputes all blocks but one."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.blocks, self._reentrant = nn.ModuleList(Block() for _ in range(3)), reentrant
        self.watch = Recomputations(list(self.blocks))

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks[:2]:
            x = torch.utils.checkpoint.checkpoint(self.watch.noting(block), x, use_reentrant=self._reentrant)
        return self.blocks[2](x)


class Engine(nn.Module):
    """As much of DeepSpeed's engine as is looked at."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def sketched(model, x, config=None, samples=SAMPLES, optimizer=None):
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    sketch, engine = None, Engine(model)
    engine.basic_optimizer = optimizer
    sketch = ForwardProfile(engine, blocks, torch.is_grad_enabled, getattr(model, "watch", None))
    with torch.no_grad():
        engine(x)  # an evaluation before training is not what is looked for
    for _ in range(2):
        loss = engine(x).square().mean()
        sketch.goes_backward()
        loss.backward()
    return sketch.profile(WORKLOAD, config or {}, samples)


def test_one_forward_gives_what_backward_needs_and_a_third_of_the_products():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(SAMPLES, 16, WIDTH)
    found = sketched(model, x)
    whole = op_counter.follow(model, lambda m, b: m(b).square().mean(), x)
    plain, again = found.passes["fp32/0"], found.passes["fp32/1"]
    assert 0.8 < plain.kept_bytes[1] * SAMPLES / whole.kept_bytes < 1.2
    assert 0.9 < plain.flops[1] * SAMPLES / whole.flops < 1.2  # the gradient of the input is not asked for
    peak, *_ = plain.highest(np.array([float(SAMPLES)]), np.zeros(1), np.zeros(1))
    assert 0.7 < peak[0] / whole.peak_bytes < 1.3
    assert again.kept_bytes[1] < 0.7 * plain.kept_bytes[1] and again.flops[1] > 1.2 * plain.flops[1]
    assert found.sequence == 16 and not found.of_tokens  # of numbers
    assert found.sizes == ((WIDTH, 3), (4 * WIDTH, 3), (4 * WIDTH * WIDTH, 6))
    assert found.largest_module == 4 * WIDTH * WIDTH + 4 * WIDTH  # which ZeRO 3 gathers at once


@pytest.mark.filterwarnings("ignore:None of the inputs")  # in the evaluation
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_the_script_recomputes_is_known_without_that_too(reentrant):
    """Without recomputation as little memory was forecast as with it, where the baseline has it."""
    x = torch.randn(SAMPLES, 16, WIDTH)
    plain = sketched(nn.Sequential(Block(), Block(), Block()), x.clone().requires_grad_()).passes
    found = sketched(Recomputing(reentrant=reentrant), x).passes
    assert found["fp32/0"].kept_bytes == plain["fp32/0"].kept_bytes
    assert found["fp32/1"].kept_bytes == plain["fp32/1"].kept_bytes and found["fp32/0"].n_ops == plain["fp32/0"].n_ops


class Nested(nn.Module):
    """Ends with an operation that saves its output; recomputes its blocks, and layers within them."""

    def __init__(self, *, outer, inner, reentrant):
        super().__init__()
        self.blocks, self._recomputed = nn.ModuleList(Block() for _ in range(3)), (outer, inner)
        self._reentrant, self.watch = reentrant, Recomputations(list(self.blocks))

    def _run(self, function, x, recomputed):
        if not recomputed:
            return function(x)
        return torch.utils.checkpoint.checkpoint(self.watch.noting(function), x, use_reentrant=self._reentrant)

    def forward(self, x):
        outer, inner = self._recomputed
        for block in self.blocks:

            def whole(x, block=block):
                return self._run(block, x, inner).tanh()

            x = self._run(whole, x, outer)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs")  # in the evaluation
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, True)])
def test_what_is_recomputed_within_what_is_recomputed_and_its_output_count_once(outer, inner, reentrant):
    """The inner part was missing where both are reentrant: 82 % of all that is kept. An output that is saved counted twice."""
    plain, found = (
        sketched(Nested(outer=a, inner=b, reentrant=reentrant), torch.randn(SAMPLES, 16, WIDTH).requires_grad_()).passes
        for a, b in ((False, False), (outer, inner))
    )
    # In a process that ran many other tests the three outputs counted twice without reentrance, a ninth of the whole.
    off = 0.001 if reentrant else 0.12
    assert found["fp32/0"].kept_bytes[1] == pytest.approx(plain["fp32/0"].kept_bytes[1], rel=off)
    assert found["fp32/0"].n_ops == plain["fp32/0"].n_ops


@pytest.mark.parametrize("frozen", ["base", "all but the head"])
def test_frozen_weights_need_no_gradients_of_their_own(frozen):
    """Of LoRA 1.5 times the products were forecast, of a head on a frozen model three times."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)), torch.randn(SAMPLES, 16, WIDTH)
    model.requires_grad_(False)[-1].requires_grad_()
    if frozen == "base":
        model.insert(0, nn.Linear(WIDTH, WIDTH))
    found = sketched(model, x).passes["fp32/0"]
    whole = op_counter.follow(model, lambda m, b: m(b).square().mean(), x)
    # The gradient of the input is not asked for.
    assert found.flops[1] * SAMPLES == pytest.approx(whole.flops, rel=0.1)
    assert found.moved_bytes[1] * SAMPLES == pytest.approx(whole.moved_bytes, rel=0.2)


def test_the_copies_of_weights_that_autocast_makes_do_not_grow_with_the_batch():
    """They passed for activations and for traffic of each sample."""

    class Autocast(Engine):
        def torch_autocast_enabled(self):
            return True

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = nn.Sequential(Block(), Block())
    engine, slopes = Autocast(model), []
    for samples in (SAMPLES, 4 * SAMPLES):
        sketch = ForwardProfile(engine, list(model), torch.is_grad_enabled)
        engine(torch.randn(samples, 16, WIDTH)).float().square().mean().backward()
        passes = sketch.profile(WORKLOAD, {}, samples).passes
        assert passes["autocast/0"].kept_bytes[0] == 2 * sum(p.numel() for p in model.parameters())
        assert passes["fp32/0"].kept_bytes[0] == 0
        slopes.append((passes["autocast/0"].kept_bytes[1], passes["autocast/0"].moved_bytes[1]))
    assert slopes[0] == pytest.approx(slopes[1], rel=0.001)


class WithLoss(nn.Module):
    """Gives its loss itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return entropy(self.model(x))


def entropy(logits):
    found = logits.log_softmax(-1)
    return (found.exp() * found).mean()


@pytest.mark.parametrize("seen", [True, False])
def test_a_loss_that_the_script_computes_outside_of_its_model_is_counted(seen):
    """Of a language model its logits and their copies are the most that a batch takes; none of it was forecast."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), nn.Linear(WIDTH, 1000)), torch.randn(SAMPLES, WIDTH)
    inside = sketched(WithLoss(model), x).passes["fp32/0"]
    engine = Engine(model)
    sketch = ForwardProfile(engine, [], torch.is_grad_enabled)
    loss = entropy(engine(x))
    if seen:
        sketch.goes_backward()
    loss.backward()
    outside = sketch.profile(WORKLOAD, {}, SAMPLES).passes["fp32/0"]
    assert (outside.kept_bytes == pytest.approx(inside.kept_bytes, rel=0.001)) == seen
    assert (outside.moved_bytes == pytest.approx(inside.moved_bytes, rel=0.001)) == seen
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_what_a_teacher_holds_that_a_loss_calls_is_no_activation():
    """Its weights passed for bytes that each sample keeps."""
    model, teacher, x = Block(), nn.Linear(WIDTH, 100 * WIDTH).requires_grad_(False), torch.randn(SAMPLES, WIDTH)
    plain, engine = sketched(model, x).passes["fp32/0"], Engine(model)
    sketch = ForwardProfile(engine, [], torch.is_grad_enabled)
    found = engine(x).square().mean()
    told = teacher(x)
    sketch.goes_backward()
    passes = sketch.profile(WORKLOAD, {}, SAMPLES).passes
    assert found.item() and passes["fp32/0"].kept_bytes[1] * SAMPLES == plain.kept_bytes[1] * SAMPLES + told.nbytes


def test_all_forwards_before_a_backward_are_of_one_micro_batch():
    """Of two views of each sample, as in contrastive training, half of the memory was forecast."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(SAMPLES, WIDTH)
    one = sketched(model, x, samples=SAMPLES).passes
    engine = Engine(model)
    sketch = ForwardProfile(engine, list(model), torch.is_grad_enabled)
    loss = engine(x).square().mean() + engine(x + 1).square().mean()
    sketch.goes_backward()
    loss.backward()
    two = sketch.profile(WORKLOAD, {}, SAMPLES).passes
    for name in one:
        assert two[name].kept_bytes[1] == pytest.approx(2 * one[name].kept_bytes[1], rel=0.05)
        assert two[name].flops[1] == pytest.approx(2 * one[name].flops[1], rel=0.05)


class Mode(_python_dispatch.TorchDispatchMode):
    """Follows operations, as a script may do with torch's counter of FLOPs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_a_mode_that_the_script_begins_before_its_backward_leaves_none_behind():
    """The probe's timed steps went on with the counter, and what blocks keep without recomputation was not seen."""
    x = torch.randn(SAMPLES, 16, WIDTH)
    plain, model = sketched(Recomputing(reentrant=False), x).passes["fp32/0"], Recomputing(reentrant=False)
    engine = Engine(model)
    sketch = ForwardProfile(engine, list(model.blocks), torch.is_grad_enabled, model.watch)
    for _ in range(2):
        loss = engine(x).square().mean()
        with Mode():
            sketch.goes_backward()
            loss.backward()
    assert _python_dispatch._get_current_dispatch_mode() is None
    assert sketch.profile(WORKLOAD, {}, SAMPLES).passes["fp32/0"].kept_bytes == plain.kept_bytes


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_are_counted_apart_unless_the_target_keeps_them_from_tf32(monkeypatch, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    model, x = nn.Conv2d(1, 9, 1, bias=False), torch.randn(2, 1, 10, 10)
    whole = op_counter.follow(model, lambda m, b: m(b).square().mean(), x)
    assert whole.tf32_flops == (whole.flops if allowed else 0)
    mixed = nn.Sequential(nn.Conv2d(1, 9, 1, bias=False), nn.Flatten(2), nn.Linear(100, 1, bias=False))
    wide = sketched(mixed, torch.randn(SAMPLES, 1, 10, 10)).passes["fp32/0"]
    assert wide.tf32_share == (0.5 if allowed else 0.0)


def test_samples_in_one_row_share_what_was_counted():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(SAMPLES, 16, WIDTH)
    rows, one = sketched(model, x), sketched(model, x.view(1, -1, WIDTH), samples=SAMPLES)
    assert one.sequence == rows.sequence == 16 and one.flops_per_sample == rows.flops_per_sample


def test_16_bit_weights_are_reported_as_the_fp32_that_formulas_scale_down():
    model, x = nn.Sequential(Block(), Block()), torch.randn(SAMPLES, WIDTH)
    wide = sketched(model, x).passes["fp32/0"]
    narrow = sketched(model.to(torch.bfloat16), x.to(torch.bfloat16), {"optimizer": {"type": "SGD"}})
    assert 0.8 < narrow.passes["fp32/0"].kept_bytes[1] / wide.kept_bytes[1] < 1.2
    assert narrow.optimizer_bytes == 0


@pytest.mark.parametrize(
    ("settings", "needs"),
    [({}, (8, 8, False)), ({"foreach": True}, (8, 4, True)), ({"fused": True, "weight_decay": 0.1}, (8, 0, False))],
)  # on CUDA `foreach` is the default
def test_scratch_is_that_of_the_scripts_own_optimizer(settings, needs):
    model, x = Block(), torch.randn(SAMPLES, WIDTH)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(8))], lr=1e-3, **settings)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # adds keys to the groups that no optimizer takes
    found = sketched(model, x, optimizer=optimizer)
    assert (found.optimizer_bytes, found.optimizer_scratch, found.scratch_for_all) == needs


def test_an_optimizer_of_deepspeeds_needs_no_scratch_and_one_of_unknown_origin_as_much_as_torchs():
    x, fused = torch.randn(SAMPLES, WIDTH), type("FusedAdam", (), {"__module__": "deepspeed.ops.adam.fused_adam"})
    assert [sketched(Block(), x, optimizer=made).optimizer_scratch for made in (fused(), None)] == [0, 8]


class Lion(torch.optim.SGD):
    """Stands for an optimizer from elsewhere: one state, as large as the parameter."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_steps", "state_bytes"), [(1, 4.0), (0, 8.0)])
def test_an_optimizer_from_elsewhere_has_the_states_that_its_steps_left(n_steps, state_bytes, dtype):
    """It counted as Adam, unless the JSON named another one."""
    parameter = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Lion([parameter], lr=0.1, momentum=0.9)
    for _ in range(n_steps):
        optimizer.step()
    assert sketched(Block(), torch.randn(SAMPLES, WIDTH), optimizer=optimizer).optimizer_bytes == state_bytes


def test_without_a_training_forward_or_a_counted_batch_there_is_no_profile():
    engine = Engine(Block())
    sketch = ForwardProfile(engine, [], torch.is_grad_enabled)
    assert sketch.profile(WORKLOAD, {}, 4) is None
    engine(torch.randn(4, WIDTH)).sum().backward()
    assert sketch.profile(WORKLOAD, {}, None) is None and sketch.profile(WORKLOAD, {}, 4) is not None


def test_weights_that_are_gathered_for_a_forward_are_no_activations():
    """ZeRO-3 gives a parameter its memory when its module is entered, and may keep it until backward."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(SAMPLES, WIDTH)
    plain = sketched(model, x).passes["fp32/0"].kept_bytes
    whole = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)

    def gather(module, _):
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter].clone()

    for module in model.modules():
        module.register_forward_pre_hook(gather)
    engine = Engine(model)
    sketch = ForwardProfile(engine, [], torch.is_grad_enabled)
    loss = engine(x).square().mean()
    sketch.goes_backward()
    loss.backward()
    assert sketch.profile(WORKLOAD, {}, len(x)).passes["fp32/0"].kept_bytes == plain


def test_a_compiled_model_is_counted_as_it_computes_without_the_compiler():
    """Torch refuses to compile while operations are counted, and a whole graph (`fullgraph=True`) with an error."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x, graphs = nn.Sequential(*(Block() for _ in range(3))), torch.randn(SAMPLES, 16, WIDTH), []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    found = sketched(torch.compile(model, backend=backend, fullgraph=True), x)
    assert found.passes["fp32/0"].flops == sketched(model, x).passes["fp32/0"].flops and graphs
    torch._dynamo.reset()
