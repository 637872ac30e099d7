"""Mixtures of experts: what a model has of them, how layers are built for a degree, and which experts a rank holds."""

import sys

import pytest
import torch
from support.paths import MODELS

from autotune.space.candidate import Candidate
from autotune.trial.groups import Groups
from autotune.worker.measure import experts
from autotune.worker.model import model_file

EXPERTS = "expert_parallel.autoep_size"


@pytest.fixture
def target():
    yield model_file.load(MODELS / "experts.py")
    sys.modules.pop("experts", None)


def shared_out(target, degree):
    return model_file.build_model(target, Candidate.of({"micro_batch_size": 1, EXPERTS: degree}))


def test_layers_of_deepspeed_are_built_for_the_candidates_degree(target):
    whole, half = model_file.build_model(target), shared_out(target, 2)
    found = experts.facts(whole)
    assert (found.counts, found.layers, found.per_token, found.own, found.degree) == ((4,), 2, 1.0, True, 1)
    assert found.parameters == 2 * 4 * (2 * 32 * 64 + 32 + 64)
    assert experts.facts(half).parameters == found.parameters
    assert (experts.degree(whole), experts.degree(half)) == (1, 2)


def test_the_experts_of_layers_with_degrees_and_choices_of_their_own_are_all_counted(target):
    """All were multiplied by the first layer's degree, and tokens passed as many experts as there."""
    parts = shared_out(target, 2), model_file.build_model(target)
    parts[1].blocks[0].moe.deepspeed_moe.gate.k = 2
    mixed, whole = experts.facts(torch.nn.ModuleList(parts)), experts.facts(parts[0])
    assert (mixed.parameters, mixed.per_token) == (2 * whole.parameters, 1.25)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_own_experts_of_a_whole_models_weights(target, monkeypatch, rank):
    whole, half = model_file.build_model(target), shared_out(target, 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    half.load_state_dict(experts.of_this_rank(half, whole.state_dict()))
    mine, theirs = (model.blocks[1].moe.deepspeed_moe.experts.deepspeed_experts for model in (half, whole))
    assert all(torch.equal(mine[i].up.weight, theirs[2 * rank + i].up.weight) for i in range(2))
    assert not torch.equal(mine[0].up.weight, theirs[2 - 2 * rank].up.weight)


def test_autoep_finds_the_experts_of_a_transformers_model_and_says_where_it_does_not():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("deepspeed.module_inject.auto_ep")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    mixture = transformers.MixtralConfig(**small, intermediate_size=16, num_key_value_heads=2, num_local_experts=4)
    unknown = transformers.OlmoeConfig(**small, intermediate_size=16, num_key_value_heads=2, num_experts=4)
    dense = transformers.LlamaConfig(**small, intermediate_size=16)
    with torch.device("meta"):
        found, none, other = (
            experts.facts(transformers.AutoModelForCausalLM.from_config(c)) for c in (mixture, dense, unknown)
        )
    assert (found.counts, found.layers, found.per_token, found.own) == ((4,), 2, 2.0, False)
    assert found.parameters == 2 * 4 * 3 * 32 * 16
    assert none is None and "AutoEP" in other.why_none


def test_a_degree_without_tokens_for_other_ranks_was_not_applied():
    asked = Candidate.of({"micro_batch_size": 1, EXPERTS: 2})
    assert Groups(data=2, expert=2, exchanges=8).mismatch(asked) is None
    assert "2 was asked for, 1 ran" in Groups(data=2).mismatch(asked)
    assert "no token was sent" in Groups(data=2, expert=2).mismatch(asked)


def test_a_scripts_own_groups_stay_where_its_configuration_states_none():
    """Accelerate writes no sequence degree into the configuration: each trial of such a script was not applied."""
    asked = Candidate.of({"micro_batch_size": 1})
    assert "1 was asked for, 2 ran" in Groups(sequence=2).mismatch(asked)
    assert Groups(sequence=2, by_script=True).mismatch(asked) is None
    assert Groups(tensor=2, split_modules=3, by_script=True).mismatch(asked) is None
    stated = Candidate.of({"micro_batch_size": 1, "sequence_parallel_size": 4})
    assert "4 was asked for, 2 ran" in Groups(sequence=2, by_script=True).mismatch(stated)
    assert "2 ran" in Groups(pipeline=2, by_script=True).mismatch(asked)
