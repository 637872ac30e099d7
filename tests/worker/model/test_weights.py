"""Weights to start from: what a trial saved, a plain state dict, a DeepSpeed checkpoint of any stage."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from support.bench import own_port
from support.paths import MODELS
from torch import nn

from autotune.trial.result import Outcome
from autotune.worker.model import weights

pytestmark = pytest.mark.process

WHOLE = {"min_samples": 10**9, "budget_s": 60.0}


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.system)])
def test_a_trial_goes_on_from_the_weights_that_another_one_left(zoo, tmp_path, stage):
    path = tmp_path / "warm.pt"
    first = zoo.run("ok", micro=16, zero_stage=stage, save_weights=str(path), max_steps=6, **WHOLE)
    after = zoo.run("ok", micro=16, weights=str(path), first_sample=6 * 32, max_steps=3, **WHOLE)
    fresh = zoo.run("ok", micro=16, max_steps=3, **WHOLE)
    assert first.outcome is after.outcome is Outcome.COMPLETE
    assert first.losses[:3] == pytest.approx(fresh.losses, rel=1e-4)
    assert after.losses[0] < fresh.losses[0] - 0.2


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_the_names_of_a_models_own_part_called_module_are_kept(tmp_path, before):
    model, other = (nn.Sequential(OrderedDict(module=nn.Linear(2, 2))) for _ in range(2))
    torch.save({f"{before}{name}": value for name, value in other.state_dict().items()}, tmp_path / "model.pt")
    weights.load(model, tmp_path)
    assert torch.equal(model.module.weight, other.module.weight)


def test_a_tied_tensor_is_found_by_any_of_its_names(tmp_path):
    """safetensors keeps the first one by the alphabet, and such a file was refused."""
    model, other = (nn.Sequential(OrderedDict(embedded=nn.Embedding(4, 2), by=nn.Linear(2, 4))) for _ in range(2))
    for each in (model, other):
        each.by.weight = each.embedded.weight
    state = other.state_dict()
    torch.save({"by.bias": state["by.bias"], "by.weight": state["by.weight"]}, tmp_path / "model.pt")
    weights.load(model, tmp_path)
    assert torch.equal(model.embedded.weight, other.by.weight)
    torch.save({"by.bias": state["by.bias"]}, tmp_path / "model.pt")
    with pytest.raises(weights.WorkloadError, match=r"it has no embedded\.weight, by\.weight"):
        weights.load(model, tmp_path)


def test_the_place_in_the_data_is_where_it_was_said(zoo):
    whole = zoo.run("still", max_steps=6, **WHOLE).losses
    later = zoo.run("still", max_steps=2, first_sample=4 * 8, **WHOLE).losses
    assert later == pytest.approx(whole[4:6], rel=1e-5)


SAVES = """
import os, sys
import torch, deepspeed
# The shared-memory op would be compiled first, and leave its files in /dev/shm for ever.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.path.insert(0, {models!r})
import ok
os.environ["MASTER_PORT"] = {port!r}
torch.manual_seed(5)
model = ok.model()
adam = {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}}
config = {{"train_micro_batch_size_per_gpu": 4, "optimizer": adam, "zero_optimization": {{"stage": {stage}}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.save_checkpoint({folder!r})
"""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.system), 2])
def test_a_deepspeed_checkpoint_is_read_whatever_its_stage(zoo, tmp_path, stage):
    folder = tmp_path / "checkpoint"
    zoo.printed(SAVES.format(models=str(MODELS), port=own_port(), stage=stage, folder=str(folder)))
    read = zoo.run("ok", weights=str(folder), max_steps=2, world_size=1, **WHOLE)
    fresh = zoo.run("ok", max_steps=2, world_size=1, **WHOLE)
    assert read.outcome is Outcome.COMPLETE, read.reason
    assert read.losses[0] != pytest.approx(fresh.losses[0], rel=1e-4)  # other weights than those of the study's seed


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("gone", lambda path: None, "there is no such file or folder"),
        ("text.pt", lambda path: path.write_text("no weights"), "cannot be read as a state dict"),
        ("other.pt", lambda path: torch.save({"else": torch.zeros(2)}, path), "does not fit the model: it has no"),
        ("empty", Path.mkdir, "holds neither a DeepSpeed checkpoint"),
    ],
)
def test_what_is_no_checkpoint_of_the_model_is_refused_in_a_sentence(zoo, tmp_path, name, write, said):
    path = tmp_path / name
    write(path)
    result = zoo.run("ok", weights=str(path), max_steps=2)
    assert result.outcome is Outcome.CRASHED and said in result.reason and str(path) in result.reason
