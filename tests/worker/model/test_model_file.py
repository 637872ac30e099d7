"""The user's `model.py`: what it may define, what is refused, and in which order its samples come."""

import os
import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from autotune.worker.containers import to_device
from autotune.worker.data.loader import Loader
from autotune.worker.data.samples import describe
from autotune.worker.model.model_file import (
    ModelFile,
    WorkloadError,
    build_model,
    check_optimizer,
    classes_of,
    find_blocks,
    load,
    make_loss,
    make_optimizer,
)

MODEL = "def model(): return nn.Linear(4, 1)\n"


@pytest.fixture
def target(write_model, monkeypatch):
    """Loads a target from its text, and forgets it afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda text: load(write_model("import torch\nfrom torch import nn\n" + text))
    sys.modules.pop("own_model", None)


@pytest.fixture
def loader(target):
    """A loader of the data that an expression or a function defines."""

    def make(data, **what):
        text = data if "def " in data else f"def data(): return {data}\n"
        return Loader(target(MODEL + text), **{"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, **what})

    return make


def test_a_batch_of_too_few_samples_is_left_for_trials_to_report(loader):
    """Inspection ended with `IndexError: index 1 is out of bounds`, and not with what was asked for and what ran."""
    assert describe(loader("def batch(n): return torch.zeros(n // 2, 8)\n").samples()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def data(): return []\n", "define model() -> nn.Module"),
        (MODEL, "define data() -> Dataset, or batch(n) -> a batch of n samples"),
    ],
)
def test_a_target_without_a_required_function_is_refused(target, text, message):
    with pytest.raises(WorkloadError, match=f"^own_model.py: {re.escape(message)}$"):
        target(text)


def test_a_target_that_raises_leaves_torch_as_it_is(target):
    """Whoever joined the ranks next in that process joined none."""
    join = torch.distributed.init_process_group
    with pytest.raises(ZeroDivisionError):
        target("1 / 0")
    assert torch.distributed.init_process_group is join


def test_a_function_counts_only_where_the_file_names_it(target, tmp_path):
    (tmp_path / "library_of_losses.py").write_text("def loss(*_): ...\ndef collate(*_): ...\nblocks = ['Other']\n")
    sys.path.insert(0, str(tmp_path))
    found = target(f"from library_of_losses import *\nfrom library_of_losses import collate\n{MODEL}def data(): ...\n")
    assert found.loss is None and found.blocks is None and found.collate is not None


def test_a_target_finds_modules_beside_it_and_in_the_working_folder(target, tmp_path, monkeypatch):
    (folder := tmp_path / "work").mkdir()
    monkeypatch.chdir(folder)
    (folder / "module_in_work.py").write_text("")
    target(f"import module_in_work\n{MODEL}def data(): ...\n")
    assert sys.path[:2] == [str(tmp_path), str(folder)]


def test_a_target_may_set_variables_but_not_where_its_rank_stands(target, monkeypatch):
    """As a notebook does for DeepSpeed: other ports ended each trial, and rank 1 would train on the device of rank 0."""
    there = {"MASTER_PORT": "4711", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in {**there, "NCCL_P2P_DISABLE": "0"}.items():
        monkeypatch.setenv(name, value)
    alone = 'os.environ.update(MASTER_PORT="9994", RANK="0", LOCAL_RANK="0", NCCL_P2P_DISABLE="1")'
    target(f"import os\n{alone}\n{MODEL}def data(): ...\n")
    assert {name: os.environ[name] for name in there} == there and os.environ["NCCL_P2P_DISABLE"] == "1"


def test_a_model_that_joins_the_ranks_as_it_is_loaded_joins_them_as_a_trial_does(write_model, monkeypatch):
    """`deepspeed.init_distributed()` at its top found the port taken on which its ranks meet, in each run."""
    monkeypatch.setenv("MASTER_PORT", "4711")
    ports = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: bool(ports))
    alone = 'import os, torch\nfrom torch import nn\nos.environ["MASTER_PORT"] = "9994"\n'
    text = f"{alone}torch.distributed.init_process_group('gloo')\n{MODEL}def data(): ...\n"
    load(write_model(text), lambda: ports.append(os.environ["MASTER_PORT"]))
    assert ports == ["4711"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "torch.utils.data.DataLoader([1, 2])",
            r"returned a DataLoader; return its dataset, since the tuner chooses .*",
        ),
        ("3", "returned int; return a Dataset or a list of samples"),
        ("{'train': [1, 2]}", "returned dict; return a Dataset or a list of samples"),
        ("[]", "is empty"),
    ],
)
def test_data_of_no_use_is_refused_in_one_sentence(loader, returned, message):
    with pytest.raises(WorkloadError, match=rf"^own_model.py: data\(\) {message}$"):
        loader(returned)


def test_a_model_that_is_no_module_is_refused(target):
    with pytest.raises(WorkloadError, match=r"model\(\) returned type, not an nn.Module"):
        build_model(target("def model(): return nn.Linear\ndef data(): return [1]\n"))


def test_an_optimizer_needs_one_parameter_of_the_model_at_least():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for accepted in (torch.optim.SGD(model.parameters(), lr=1), lambda params: None, None):
        assert check_optimizer(model, accepted, "optimizer()") == ""
    part = check_optimizer(model, torch.optim.SGD([model.bias, other.bias], lr=1), "optimizer()")
    assert "leaves out 1 of the model's 2 trainable parameters" in part
    with pytest.raises(WorkloadError, match="none of the model's parameters"):
        check_optimizer(model, torch.optim.SGD(other.parameters(), lr=1), "optimizer()")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "torch.optim.AdamW(model.parameters())",
            "gets the list of .* which has no `parameters`, and not the model: .*",
        ),
        ("torch.optim.AdamW([p for _, p in model.named_parameters()])", "gets the list .* no `named_parameters`, .*"),
        ("None", "returned NoneType, not a torch.optim.Optimizer"),
        ("(torch.optim.AdamW(model), None)", "returned tuple, not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_is_written_for_another_argument_or_returns_none_is_refused(target, body, message):
    file = target(MODEL + f"def data(): return [1]\ndef optimizer(model): return {body}\n")
    with pytest.raises(WorkloadError, match=rf"^own_model.py: optimizer\(\) {message}$"):
        make_optimizer(file, list(file.model().parameters()))


def test_an_error_within_the_targets_optimizer_stays_its_own(target):
    file = target(MODEL + "def data(): return [1]\ndef optimizer(params): return torch.optim.Adan(params)\n")
    with pytest.raises(AttributeError, match="Adan"):
        make_optimizer(file, list(file.model().parameters()))


def test_a_file_that_is_changed_twice_within_a_second_is_read_anew(target, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first = target(MODEL + "def data(): return [1]\n")
    changed = first.path.stat().st_mtime
    first.path.write_text(first.path.read_text().replace("[1]", "[2]"))
    os.utime(first.path, (changed, changed))
    assert (first.data(), load(first.path).data()) == ([1], [2])
    assert not (first.path.parent / "__pycache__").exists()


def test_a_stream_that_ends_starts_again_and_an_empty_one_is_refused(loader):
    stream = "class S(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter(range({}))\n"
    stream += "def data(): return S()\n"
    three = loader(stream.format(3))
    assert [three.next()[0].tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    with pytest.raises(WorkloadError, match="yields no sample"):
        loader(stream.format(0)).next()


def test_ranks_share_a_stream_without_overlap(loader):
    drawn = [loader("iter(range(100))", rank=rank, world_size=2).next()[0].tolist() for rank in (0, 1)]
    assert drawn == [[0, 1], [2, 3]]


def test_every_sample_comes_once_an_epoch_in_a_new_order(loader):
    feed, again = loader("list(range(10))"), loader("list(range(10))")
    epochs = [[sample for _ in range(5) for sample in feed.next()[0].tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [again.next()[0].tolist() for _ in range(5)] == [epochs[0][i : i + 2] for i in range(0, 10, 2)]
    assert loader("list(range(10))", seed=1).next()[0].tolist() != epochs[0][:2]


@pytest.mark.parametrize("n_samples", [10, 12, 48])
def test_the_global_batch_holds_the_same_samples_however_it_is_split(loader, n_samples):
    """Also where a batch runs over the end of an epoch."""

    def steps(ranks, micro, accumulation):
        data = f"list(range({n_samples}))"
        feeds = [loader(data, micro_batch_size=micro, rank=rank, world_size=ranks) for rank in range(ranks)]
        return [
            sorted(s for _ in range(accumulation) for feed in feeds for s in feed.next()[0].tolist()) for _ in range(7)
        ]

    whole = steps(1, 8, 1)
    assert all(steps(*split) == whole for split in ((2, 4, 1), (2, 1, 4), (1, 2, 4), (4, 2, 1), (8, 1, 1)))


def test_a_step_larger_than_the_data_is_refused(loader):
    feed = loader("list(range(6))")
    feed.check(6)
    with pytest.raises(WorkloadError, match=r"data\(\) has 6 samples, but one optimizer step needs 8"):
        feed.check(8)


def test_batch_is_asked_for_the_micro_batch(loader):
    batch, drawn = loader("def batch(n): return torch.zeros(n, 4)\n", micro_batch_size=5).next()
    assert batch.shape == (5, 4) and drawn is None


def test_a_batch_moves_whole_and_only_numbers_change_type():
    Pair = namedtuple("Pair", "x y")
    batch = {
        "a": torch.zeros(2),
        "b": [torch.zeros(2, dtype=torch.long), "text"],
        "c": Pair(torch.zeros(1), (torch.ones(1, dtype=bool),)),
    }
    moved = to_device(batch, torch.device("cpu"), torch.bfloat16)
    assert moved["a"].dtype is torch.bfloat16 and (moved["b"][0].dtype, moved["b"][1]) == (torch.long, "text")
    assert isinstance(moved["c"], Pair) and moved["c"].x.dtype is torch.bfloat16 and moved["c"].y[0].dtype is torch.bool
    assert to_device(batch, torch.device("cpu"), None)["a"].dtype is torch.float32


class TestLoss:
    """The default loss of a forward function on a batch."""

    def of(self, forward, batch):
        net = type("Net", (nn.Module,), {"forward": staticmethod(forward)})()
        optional = dict.fromkeys(("model", "data", "batch", "loss", "optimizer", "collate", "blocks"))
        return make_loss(ModelFile(path=Path("m.py"), **optional), net)(net, batch)

    def test_it_is_the_output_or_in_the_output(self):
        scalar, x = torch.tensor(2.0, requires_grad=True), torch.zeros(3)
        Output = namedtuple("Output", "loss logits")
        assert self.of(lambda x: scalar, x) is self.of(lambda x: scalar, [x]) is scalar
        assert self.of(lambda input_ids: Output(scalar, torch.zeros(2)), {"input_ids": x}) is scalar
        assert self.of(lambda x: {"loss": scalar}, x) is scalar
        assert self.of(lambda x, y: (torch.zeros(3, 2), scalar), (x, x)) is scalar
        with pytest.raises(WorkloadError, match=r"holds no loss; define loss\(model, batch\)"):
            self.of(lambda x: x, x)

    def test_a_batch_that_forward_does_not_take_is_named_and_an_error_of_its_own_stays(self):
        x = torch.zeros(3)
        for batch, why in (({"x": x, "path": ["a"]}, "unexpected keyword argument 'path'"), ((x, x, x), "too many")):
            with pytest.raises(WorkloadError, match=rf"does not take the batch \(.*{why}.*define loss\(model, batch\)"):
                self.of(lambda x: x.sum(), batch)
        with pytest.raises(TypeError, match="unsupported operand"):
            self.of(lambda x: x + None, x)

    def test_the_targets_own_loss_may_stand_beside_what_it_logs(self):
        scalar, logged = torch.tensor(2.0, requires_grad=True), torch.tensor(2.0)

        def of(returned):
            optional = dict.fromkeys(("model", "data", "batch", "optimizer", "collate", "blocks"))
            return make_loss(ModelFile(path=Path("m.py"), loss=lambda *_: returned, **optional), nn.Identity())(0, 0)

        for returned in (scalar, (scalar, logged), (scalar, {"mse": logged}), {"loss": scalar, "kl": scalar}):
            assert of(returned) is scalar
        one = torch.ones(1, requires_grad=True)
        assert of(one) is one  # DeepSpeed takes it as it is
        with pytest.raises(WorkloadError, match=r"the loss that .* leads back to no parameter; leave out detach"):
            of(logged)
        with torch.no_grad():
            assert of(logged) is logged
        with pytest.raises(
            WorkloadError, match=r"m.py: loss\(\) returned a Tensor of shape \(8,\), in which the loss is"
        ):
            of(torch.zeros(8))
        with pytest.raises(WorkloadError, match=r"loss\(\) returned a float, .*; return one scalar tensor"):
            of(2.0)

    def test_classes_and_next_tokens_mean_cross_entropy_and_numbers_squared_error(self):
        logits, classes = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
        assert self.of(lambda x: logits, (torch.zeros(6), classes)) == cross_entropy(logits, classes)
        many, tokens = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
        expected = cross_entropy(many.view(10, 7), tokens.view(10))
        assert self.of(lambda x: many, (torch.zeros(2), tokens)) == expected
        prediction, wanted = torch.randn(4, 1), torch.randn(4)
        assert self.of(lambda x: prediction, (torch.zeros(4), wanted)) == mse_loss(prediction[:, 0], wanted)

    def test_a_model_that_takes_targets_is_given_them(self):
        batch = (torch.ones(2), torch.full((2,), 3.0))
        assert self.of(lambda x, targets: (x * targets).sum(), batch) == 6
        assert self.of(lambda x, mask=None: x.sum() * 1.0 if mask is None else mask, batch) == 2


class TestBlocks:
    """The blocks that activation checkpointing can wrap."""

    def test_the_outermost_repeated_children_of_a_list_are_found_once_each(self):
        plain = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
        assert find_blocks(plain, None) == list(plain)
        nested = [nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
        assert find_blocks(nn.ModuleList(nested), None) == nested
        shared = nn.Sequential(nn.Linear(2, 2))
        found = find_blocks(nn.ModuleList([shared, nn.Sequential(nn.Linear(2, 2)), shared]), None)
        assert found.count(shared) == 1

    def test_a_container_that_nobody_calls_is_no_block_but_what_it_holds_is(self):
        """A ModuleDict for each layer was one, and every trial that was to recompute it did not apply."""
        layers = [nn.ModuleDict({"norm": nn.LayerNorm(2), "mix": nn.Sequential(nn.Linear(2, 2))}) for _ in range(3)]
        assert find_blocks(nn.ModuleList(layers), None) == [layer["mix"] for layer in layers]
        flat = [nn.ModuleDict({"norm": nn.LayerNorm(2), "mix": nn.Linear(2, 2)}) for _ in range(3)]
        assert find_blocks(nn.ModuleList(flat), None) == []

    def test_lists_within_a_list_count_what_they_hold_once(self):
        """Of a U-Net's levels what occurs once was a block too."""
        block = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
        once = [nn.TransformerEncoderLayer(2, 1), nn.TransformerDecoderLayer(2, 1)]
        levels = [nn.ModuleList([once[0], block[0]]), nn.ModuleList([block[1], once[1]])]
        assert find_blocks(nn.ModuleList(levels), None) == block
        net = nn.ModuleDict({"levels": nn.ModuleList(levels), "middle": once[0]})
        assert classes_of(net, block) == "Sequential"
        net["middle"] = nn.Sequential(nn.Linear(2, 2))  # to recompute "every Sequential" was not what ran
        assert classes_of(net, find_blocks(net, None)) == "Sequential in a list"

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script")
    def test_a_scripted_layer_has_a_forward(self):
        """Looking for it ended every study of a model with one."""
        net = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))
        assert find_blocks(net, None) == []

    def test_leaves_and_single_children_are_not_blocks(self):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
        assert find_blocks(net, None) == []

    def test_the_target_may_name_them(self):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        for named in (["Linear"], [nn.Linear], "Linear", nn.Linear):
            assert find_blocks(net, named) == [net[0], net[2]]
        with pytest.raises(WorkloadError, match=r"blocks = \['Layer'\]: the model has no module of such a class"):
            find_blocks(net, ["Layer"])
        for named in ([net[0]], net[0], (nn.ReLU, net[0])):  # ended in "object has no attribute '__name__'"
            with pytest.raises(WorkloadError, match=r"blocks takes classes or their names.* got an object of Linear"):
                find_blocks(net, named)
