"""The evaluation step of a script's tail check."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from autotune.worker.script import tail


class Engine:
    """The engine of one stage of a pipeline."""

    device = torch.device("cpu")
    train_batch = None

    def __init__(self, data_iterator):
        self.data_iterator, self.evaluated = data_iterator, []

    def eval_batch(self, data_iter):
        self.evaluated.append(data_iter if data_iter is None else list(itertools.islice(data_iter, 3)))


@pytest.mark.parametrize(
    ("batches", "evaluated"),
    [(iter(["a batch"]), [["a batch"] * 3]), (None, [None]), (iter([]), [])],
    ids=["first or last", "between", "ended"],
)
def test_a_stage_of_a_pipeline_evaluates_on_a_batch_of_its_loader_where_it_takes_one_in(
    batches, evaluated, monkeypatch
):
    """It noted an evaluation in which nothing ran, so that `fits` held for none."""
    monkeypatch.setattr(tail.dist, "all_reduce", lambda *_args, **_kwargs: None)
    said, engine = [], Engine(batches)
    tail.ScriptTail(SimpleNamespace(once=said.append), SimpleNamespace(engine=engine), None)._evaluate()
    assert engine.evaluated == evaluated and bool(said) is (not evaluated)
