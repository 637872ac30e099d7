"""What is said of loaders whose batches follow a trial."""

from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from autotune.worker import project
from autotune.worker.script import loaders


class Bucketed(BatchSampler):
    """Puts samples of like lengths together."""


def hooks_that(said):
    """The hooks of a trial that halves batches of four."""
    context = SimpleNamespace(
        drawn=lambda: (4, 2), changed=said.append, candidate=None, data_by_framework={}, request=None
    )
    return loaders.Loaders(context)


@pytest.mark.parametrize(("kind", "others"), [(BatchSampler, False), (Bucketed, True)])
def test_a_sampler_of_the_scripts_own_may_put_other_samples_together(kind, others, monkeypatch):
    """Nothing was said of it, though its buckets are made of as many samples as a batch has."""
    said: list[str] = []
    hooks = hooks_that(said)
    monkeypatch.setattr(loaders, "place_of", lambda _: "train.py:1")
    loader, data = DataLoader.__new__(DataLoader), list(range(8))
    sampler = kind(SequentialSampler(data), 4, drop_last=True)
    hooks._init(DataLoader.__init__, loader, data, batch_sampler=sampler)
    hooks._tell_changes([id(data)])
    assert sampler.batch_size == 2 and ("other samples together" in said[0]) is others


@pytest.mark.parametrize(
    ("given", "named"), [("args.chunk", ", which is `args.chunk` there"), ("4", "")], ids=["flag", "number"]
)
def test_what_a_loader_has_its_batch_size_from_is_told(given, named, tmp_path, monkeypatch):
    """A flag whose name is none of a batch's was not named in the answer, which only showed the loader."""
    said: list[str] = []
    hooks, data, path = hooks_that(said), list(range(8)), tmp_path / "train.py"
    path.write_text(f"make(\n    data,\n    batch_size={given},\n)\n")
    monkeypatch.setattr(project, "_scripts", [str(path)])

    def make(data, **what):
        hooks._init(DataLoader.__init__, DataLoader.__new__(DataLoader), data, **what)

    args = SimpleNamespace(chunk=4)
    exec(compile(path.read_text(), str(path), "exec"), {"make": make, "data": data, "args": args, "__name__": "m"})
    hooks._tell_changes([id(data)])
    assert said == [f"Data: the DataLoader at train.py:1 with `batch_size=2` instead of 4{named}."]
