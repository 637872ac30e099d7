"""The user's `model.py`: what it may define, what is refused, and in which order its samples come."""

from __future__ import annotations

import importlib
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Torch, imported only when a test of the rank side runs."""
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def contract(torch: ModuleType) -> ModuleType:
    """The module under test, which imports torch."""
    return importlib.import_module("autotune.worker.model.model_file")


@pytest.fixture
def load(
    contract: ModuleType, write_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """Loads a target from its text, and forgets it afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda text: contract.load(write_model("import torch\nfrom torch import nn\n" + text))
    sys.modules.pop("own_model", None)


MODEL = "def model(): return nn.Linear(4, 1)\n"


def loader(contract: ModuleType, target: Any, **what: int) -> Any:
    """A loader of one rank."""
    return contract.Loader(target, **{"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, **what})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def data(): return []\n", "own_model.py: define model() -> nn.Module"),
        (MODEL, "own_model.py: define data() -> Dataset, or batch(n) -> a batch of n samples"),
    ],
)
def test_a_target_without_what_is_needed_is_refused(
    load: Callable[[str], Any], contract: ModuleType, text: str, message: str
) -> None:
    with pytest.raises(contract.WorkloadError, match=f"^{re.escape(message)}$"):
        load(text)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "torch.utils.data.DataLoader([1, 2])",
            r"data\(\) returned a DataLoader; return its dataset, since the tuner chooses .*",
        ),
        ("3", r"data\(\) returned int; return a Dataset or a list of samples"),
        ("[]", r"data\(\) is empty"),
    ],
)
def test_data_of_no_use_is_refused_in_one_sentence(
    load: Callable[[str], Any], contract: ModuleType, returned: str, message: str
) -> None:
    target = load(MODEL + f"def data(): return {returned}\n")
    with pytest.raises(contract.WorkloadError, match=f"^own_model.py: {message}$"):
        loader(contract, target)


def test_a_model_that_is_none_is_refused(load: Callable[[str], Any], contract: ModuleType) -> None:
    target = load("def model(): return nn.Linear\ndef data(): return [1]\n")
    with pytest.raises(contract.WorkloadError, match=r"model\(\) returned type, not an nn.Module"):
        contract.build_model(target)


def test_a_stream_that_ends_starts_again_and_an_empty_one_is_refused(
    load: Callable[[str], Any], contract: ModuleType
) -> None:
    stream = "class S(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter(range({n}))\ndef data(): return S()\n"
    three = loader(contract, load(MODEL + stream.format(n=3)))
    assert [three.next()[0].tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    with pytest.raises(contract.WorkloadError, match="yields no sample"):
        loader(contract, load(MODEL + stream.format(n=0))).next()


def test_ranks_share_a_stream_without_overlap(load: Callable[[str], Any], contract: ModuleType) -> None:
    target = load(MODEL + "def data(): return iter(range(100))\n")
    first, second = (
        loader(contract, load_again, rank=rank, world_size=2) for rank, load_again in ((0, target), (1, target))
    )
    assert first.next()[0].tolist() == [0, 1]
    assert second.next()[0].tolist() == [2, 3]


def test_every_sample_comes_once_an_epoch_in_a_new_order(load: Callable[[str], Any], contract: ModuleType) -> None:
    target = load(MODEL + "def data(): return list(range(10))\n")
    feed = loader(contract, target)
    epochs = [[sample for _ in range(5) for sample in feed.next()[0].tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = loader(contract, target)
    assert [again.next()[0].tolist() for _ in range(5)] == [epochs[0][i : i + 2] for i in range(0, 10, 2)]
    assert loader(contract, target, seed=1).next()[0].tolist() != epochs[0][:2]


@pytest.mark.parametrize("n_samples", [10, 12, 48])
def test_the_global_batch_holds_the_same_samples_however_it_is_split(
    load: Callable[[str], Any], contract: ModuleType, n_samples: int
) -> None:
    """Also where a batch runs over the end of an epoch."""
    target = load(MODEL + f"def data(): return list(range({n_samples}))\n")

    def steps(ranks: int, micro: int, accumulation: int) -> list[list[int]]:
        feeds = [loader(contract, target, micro_batch_size=micro, rank=rank, world_size=ranks) for rank in range(ranks)]
        return [
            sorted(s for _ in range(accumulation) for feed in feeds for s in feed.next()[0].tolist()) for _ in range(7)
        ]

    whole = steps(1, 8, 1)
    assert all(steps(*split) == whole for split in ((2, 4, 1), (2, 1, 4), (1, 2, 4), (4, 2, 1), (8, 1, 1)))


def test_a_step_larger_than_the_data_is_refused(load: Callable[[str], Any], contract: ModuleType) -> None:
    feed = loader(contract, load(MODEL + "def data(): return list(range(6))\n"))
    feed.check(6)
    with pytest.raises(contract.WorkloadError, match=r"data\(\) has 6 samples, but one optimizer step needs 8"):
        feed.check(8)


def test_batch_is_asked_for_the_micro_batch(load: Callable[[str], Any], contract: ModuleType) -> None:
    batch, drawn = loader(contract, load(MODEL + "def batch(n): return torch.zeros(n, 4)\n"), micro_batch_size=5).next()
    assert batch.shape == (5, 4) and drawn is None


def test_a_batch_moves_whole_and_only_numbers_change_type(contract: ModuleType, torch: ModuleType) -> None:
    Pair = namedtuple("Pair", "x y")
    batch = {
        "a": torch.zeros(2),
        "b": [torch.zeros(2, dtype=torch.long), "text"],
        "c": Pair(torch.zeros(1), (torch.ones(1, dtype=bool),)),
    }
    moved = importlib.import_module("autotune.worker.containers").to_device(batch, torch.device("cpu"), torch.bfloat16)
    assert moved["a"].dtype is torch.bfloat16
    assert (moved["b"][0].dtype, moved["b"][1]) == (torch.long, "text")
    assert isinstance(moved["c"], Pair) and moved["c"].x.dtype is torch.bfloat16 and moved["c"].y[0].dtype is torch.bool
    assert (
        importlib.import_module("autotune.worker.containers").to_device(batch, torch.device("cpu"), None)["a"].dtype
        is torch.float32
    )


class TestLoss:
    """Where the loss comes from when the target defines none."""

    @pytest.fixture
    def of(self, contract: ModuleType, torch: ModuleType) -> Callable[..., Any]:
        """The default loss of a forward function on a batch."""

        def of(forward: Callable[..., Any], batch: Any) -> Any:
            net = type("Net", (torch.nn.Module,), {"forward": staticmethod(forward)})()
            target = contract.ModelFile(
                path=Path("m.py"),
                model=None,
                data=None,
                batch=None,
                loss=None,
                optimizer=None,
                collate=None,
                blocks=None,
            )
            return contract.make_loss(target, net)(net, batch)

        return of

    def test_the_output_may_be_it(self, of: Callable[..., Any], torch: ModuleType) -> None:
        scalar = torch.tensor(2.0)
        assert of(lambda x: scalar, torch.zeros(3)) is scalar
        assert of(lambda x: scalar, [torch.zeros(3)]) is scalar

    def test_the_output_may_hold_it(self, of: Callable[..., Any], torch: ModuleType) -> None:
        scalar = torch.tensor(2.0, requires_grad=True)
        Output = namedtuple("Output", "loss logits")
        assert of(lambda input_ids: Output(scalar, torch.zeros(2)), {"input_ids": torch.zeros(2)}) is scalar
        assert of(lambda x: {"loss": scalar}, torch.zeros(3)) is scalar
        assert of(lambda x, y: (torch.zeros(3, 2), scalar), (torch.zeros(3), torch.zeros(3))) is scalar

    def test_classes_mean_cross_entropy(self, of: Callable[..., Any], torch: ModuleType) -> None:
        logits, classes = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
        expected = torch.nn.functional.cross_entropy(logits, classes)
        assert of(lambda x: logits, (torch.zeros(6), classes)) == expected

    def test_next_tokens_mean_cross_entropy_over_the_sequence(self, of: Callable[..., Any], torch: ModuleType) -> None:
        logits, tokens = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
        expected = torch.nn.functional.cross_entropy(logits.view(10, 7), tokens.view(10))
        assert of(lambda x: logits, (torch.zeros(2), tokens)) == expected

    def test_numbers_mean_squared_error(self, of: Callable[..., Any], torch: ModuleType) -> None:
        prediction, wanted = torch.randn(4, 1), torch.randn(4)
        assert of(lambda x: prediction, (torch.zeros(4), wanted)) == torch.nn.functional.mse_loss(
            prediction[:, 0], wanted
        )

    def test_a_model_that_takes_targets_is_given_them(self, of: Callable[..., Any], torch: ModuleType) -> None:
        batch = (torch.ones(2), torch.full((2,), 3.0))
        assert of(lambda x, targets: (x * targets).sum(), batch) == 6
        assert of(lambda x, mask=None: x.sum() * 1.0 if mask is None else mask, batch) == 2

    def test_an_output_without_a_loss_says_what_to_do(
        self, of: Callable[..., Any], contract: ModuleType, torch: ModuleType
    ) -> None:
        with pytest.raises(contract.WorkloadError, match=r"holds no loss; define loss\(model, batch\)"):
            of(lambda x: x, torch.zeros(3))


class TestBlocks:
    """What activation checkpointing can wrap."""

    def test_repeated_children_of_a_list_are_found(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        net = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
        assert contract.find_blocks(net, None) == list(net)

    def test_a_single_name_is_one_class(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        assert contract.find_blocks(net, "Linear") == contract.find_blocks(net, nn.Linear) == [net[0]]

    def test_leaves_and_single_children_are_not_blocks(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        assert (
            contract.find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.ReLU())), None) == []
        )

    def test_only_the_outermost_ones_count(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        inner = [nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
        assert contract.find_blocks(nn.ModuleList(inner), None) == inner

    def test_a_shared_block_counts_once(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        shared = nn.Sequential(nn.Linear(2, 2))
        assert (
            contract.find_blocks(nn.ModuleList([shared, nn.Sequential(nn.Linear(2, 2)), shared]), None).count(shared)
            == 1
        )

    def test_the_target_may_name_them(self, contract: ModuleType, torch: ModuleType) -> None:
        nn = torch.nn
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        assert contract.find_blocks(net, ["Linear"]) == [net[0], net[2]] == contract.find_blocks(net, [nn.Linear])
        with pytest.raises(
            contract.WorkloadError, match=r"blocks = \['Layer'\]: the model has no module of such a class"
        ):
            contract.find_blocks(net, ["Layer"])
