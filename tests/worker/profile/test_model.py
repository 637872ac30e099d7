"""A workload's profile against known counts; the machine's rates; a model too large to build."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.paths import MODELS
from support.zoo import ADAMW, Zoo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.executors import base
from autotune.trial.folder import read_record
from autotune.trial.links import Probe
from autotune.trial.profile import Machine, Profile
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.worker.profile.model import _optimizer, converted_anew

pytestmark = pytest.mark.process

WIDTH, VOCABULARY, CONTEXT = 32, 61, 16


def profile_of(zoo, target, **config):
    path = target if isinstance(target, Path) else MODELS / f"{target}.py"
    folder = zoo.next_folder()
    request = TrialRequest(target=str(path), mode="profile", ds_config=config or ADAMW, deadline_s=120.0)
    result = base.run(zoo.executor, folder.path, request)
    assert result.outcome is Outcome.COMPLETE, result.reason
    return read_record(folder.profile, Profile)


@pytest.mark.unit
def test_a_model_that_converts_itself_is_built_on_fake_tensors():
    """torch refused there, so that such a model, and each PipelineModule, was built and stepped for real."""
    with FakeTensorMode(), converted_anew():
        words, layer, head = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5, bias=False)
        head.weight = words.weight
        nn.ModuleList([words, layer, nn.Sequential(words), head]).to(torch.bfloat16)
        assert head.weight is words.weight
        assert layer(words(torch.zeros(3, 1, dtype=torch.int64)))[0].dtype is torch.bfloat16
    assert nn.Linear(1, 1).double().weight.dtype is torch.float64


@pytest.fixture(scope="module")
def of_gpt(executor, tmp_path_factory):
    return profile_of(Zoo(executor, tmp_path_factory.mktemp("gpt")), "gpt_tiny")


def test_a_transformers_parameters_products_and_activations_are_those_counted_by_hand(of_gpt):
    found = of_gpt
    block = 4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH * 64 + 64 + WIDTH + 4 * WIDTH
    outside = VOCABULARY * WIDTH + CONTEXT * WIDTH + WIDTH * VOCABULARY + VOCABULARY
    assert found.n_parameters == found.n_trainable == 2 * block + outside
    assert found.block_share == pytest.approx(2 * block / found.n_parameters) and found.n_tied == 0
    assert (found.n_blocks, found.sequence) == (2, CONTEXT) and found.of_tokens and found.caveats == ()
    assert found.built_bytes == 0  # DeepSpeed moves it to the device, whole
    # Six FLOPs per weight of a product and token; attention's own products, forward 2 and backward 5 times 2 T^2 h a
    # layer.
    weights = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH * 64) + WIDTH * VOCABULARY
    attention = 2 * 7 * 2 * CONTEXT * CONTEXT * WIDTH
    assert found.passes["fp32/0"].flops[1] == pytest.approx(6 * weights * CONTEXT + attention, rel=0.02)
    assert found.optimizer_bytes == 8 and found.optimizer_scratch == 8 and not found.scratch_for_all
    # Logits in fp32 and their softmax are kept; every layer keeps at least its input.
    assert found.passes["fp32/0"].kept_bytes[1] > 2 * CONTEXT * VOCABULARY * 4 + 2 * CONTEXT * WIDTH * 4


def test_recomputing_keeps_less_and_computes_more_and_16_bits_take_about_half(of_gpt):
    passes = of_gpt.passes
    assert set(passes) == {f"{name}/{every}" for name in ("fp32", "bf16", "autocast") for every in (0, 1, 2)}
    kept = {name: found.kept_bytes[1] for name, found in passes.items()}
    assert kept["fp32/1"] < kept["fp32/2"] < kept["fp32/0"]
    assert 0.4 < kept["bf16/0"] / kept["fp32/0"] < 0.75
    ratio = passes["fp32/1"].flops[1] / passes["fp32/0"].flops[1]
    assert 1.1 < ratio < 4 / 3  # a forward is a third; what lies outside the blocks is not repeated


@pytest.mark.parametrize(
    ("model", "parameters", "trainable", "tied"),
    [
        ("tied", 50 * 16 + 16 * 16 + 16, 50 * 16 + 16 * 16 + 16, 50 * 16),
        ("frozen", 16 * 64 + 64 + 64 * 64 + 64 + 65, 65, 0),
        ("giant_layer", 65_536 * 64 + 64 * 2 + 2, 65_536 * 64 + 64 * 2 + 2, 0),
    ],
)
def test_tied_frozen_and_giant_parameters_are_counted_once_each_in_their_own_way(
    zoo, model, parameters, trainable, tied
):
    found = profile_of(zoo, model)
    assert (found.n_parameters, found.n_trainable, found.n_tied) == (parameters, trainable, tied)
    assert sum(size * count for size, count in found.sizes) == parameters
    assert found.n_frozen == (4 if model == "frozen" else 0)
    assert max(elements for _, _, elements in found.passes["fp32/0"].moments) <= trainable


@pytest.mark.system
@pytest.mark.parametrize(
    "model", ["vision", *(pytest.param(name, marks=pytest.mark.system) for name in ("hf", "seq2seq"))]
)
def test_convolutions_hugging_face_models_and_two_kinds_of_block_are_followed(zoo, model):
    found = profile_of(zoo, model)
    plain, again = found.passes["fp32/0"], found.passes["fp32/1"]
    assert plain.flops[1] > 0 and again.kept_bytes[1] < plain.kept_bytes[1] and again.flops[1] > plain.flops[1]
    assert plain.kept_bytes[0] <= 0.2 * plain.kept_bytes[1]  # what is kept grows with the batch


def test_pictures_of_several_sizes_are_as_long_as_what_their_lengths_count(zoo, write_model):
    """Their channels stood for it, so that the largest of them were forecast to take twenty times the memory."""
    target = write_model("""
        import torch
        from torch import nn

        def model():
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

        def data():
            return [(torch.zeros(3, 16, 16 + n), n % 2) for n in range(40)]

        def collate(samples):
            widest = max(picture.shape[2] for picture, _ in samples)
            padded = [nn.functional.pad(picture, (0, widest - picture.shape[2])) for picture, _ in samples]
            return torch.stack(padded), torch.tensor([label for _, label in samples])
    """)
    found = profile_of(zoo, target)
    assert found.sequence == found.longest == 55 and len(found.lengths) == 40


@pytest.mark.parametrize("norm", ["LayerNorm", "BatchNorm1d"])  # which takes no batch of one
def test_a_model_that_looks_at_its_values_is_profiled_by_real_steps(zoo, write_model, norm):
    target = write_model(
        """
        import torch

        class Gated(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.norm = torch.nn.Linear(8, 8), torch.nn.NORM(8)

            def forward(self, x):
                y = self.norm(self.layer(x))
                return y * 2 if y.abs().max().item() > 1e9 else y

        def model():
            return Gated()

        def batch(n):
            return torch.ones(n, 8), torch.zeros(n, 8)
    """.replace("NORM", norm)
    )
    found = profile_of(zoo, target)
    assert "real steps" in found.caveats[0] and found.passes["fp32/0"].flops[1] == 2 * 2 * 8 * 8


def test_a_model_that_computes_in_16_bits_alone_is_followed_there(zoo, write_model):
    """As flash attention does. In fp32 it is taken for the same operations on numbers twice as long."""
    target = write_model("""
        import torch

        class Flash(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)

            def forward(self, x):
                y = self.layer(x)
                if y.dtype == torch.float32:
                    raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
                return y

        def model():
            return Flash()

        def batch(n):
            return torch.ones(n, 8), torch.zeros(n, 8)
    """)
    found = profile_of(zoo, target)
    half, whole = found.passes["bf16/0"], found.passes["fp32/0"]
    assert "no pass in fp32, scaled from bf16: RuntimeError: FlashAttention only" in found.caveats[-1]
    assert half.flops == whole.flops and half.flops[1] == 2 * 2 * 8 * 8 and half.n_ops == whole.n_ops
    assert whole.kept_bytes == tuple(2 * each for each in half.kept_bytes)
    assert found.activation_bytes_per_sample == whole.kept_bytes[1] > 0


def test_states_and_scratch_are_those_of_the_optimizer_that_is_named(zoo):
    found = profile_of(zoo, "tied", optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    assert found.optimizer_bytes == 4 and found.optimizer_scratch <= 4
    # DeepSpeed's Muon leaves embeddings, output layers and vectors to Adam, whose states are twice as large.
    of_adam, matrix = 50 * 16 + 16, 16 * 16
    muon = profile_of(zoo, "tied", optimizer={"type": "Muon", "params": {"lr": 0.1}}).optimizer_bytes
    assert muon == pytest.approx((8 * of_adam + 4 * matrix) / (of_adam + matrix))


@pytest.mark.unit
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_an_argument_that_deepspeed_keeps_from_torchs_adam_changes_no_needs(kind):
    given = {"type": kind, "params": {"lr": 0.1, "torch_adam": True, "adam_w_mode": True, "fused": True}}
    subject = SimpleNamespace(device=torch.device("cpu"), caveats=[])
    assert _optimizer(subject, {"optimizer": given}) == (8, 0, False) and not subject.caveats


@pytest.mark.system
@pytest.mark.smoke
def test_a_model_too_large_for_this_machine_is_profiled_without_building_it(zoo, write_model):
    target = write_model("""
        import torch
        from torch import nn

        WIDTH, LAYERS = 12288, 24  # 43 billion parameters: 174 GB in fp32

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(WIDTH)
                self.mlp = nn.Sequential(nn.Linear(WIDTH, 6 * WIDTH), nn.GELU(), nn.Linear(6 * WIDTH, WIDTH))

            def forward(self, x):
                return x + self.mlp(self.norm(x))

        def model():
            return nn.Sequential(*(Block() for _ in range(LAYERS)))

        def batch(n):
            x = torch.zeros(n, 8, WIDTH)
            return x, x
    """)
    found = profile_of(zoo, target)
    width = 12288
    assert found.n_parameters == 24 * (12 * width * width + 6 * width + width + 2 * width)
    assert found.passes["bf16/1"].kept_bytes[1] == pytest.approx(24 * 8 * width * 2, rel=0.2)  # each block's input
    assert found.data_bytes < 2**30


def test_a_model_that_cannot_run_says_so_in_one_sentence(zoo, write_model):
    target = write_model("""
        import torch

        def model():
            return torch.nn.Linear(8, 8)

        def batch(n):
            return torch.ones(n, 9), torch.zeros(n, 8)
    """)
    folder = zoo.next_folder()
    result = base.run(zoo.executor, folder.path, TrialRequest(target=str(target), mode="profile"))
    assert (
        result.outcome is Outcome.CRASHED and "no forward and backward" in result.reason and "\n" not in result.reason
    )


def test_rates_are_those_of_all_ranks_together_and_plausible(zoo):
    folder = zoo.next_folder()
    result = base.run(zoo.executor, folder.path, TrialRequest(target="", mode="rates", world_size=2))
    assert result.outcome is Outcome.COMPLETE, result.reason
    machine = read_record(folder.machine, Machine)
    assert machine.measured and machine.world_size == 2 and machine.accelerator == "cpu"
    assert all(1e6 < rate < 1e15 for rate in machine.flops.values()) and 1e6 < machine.memory_bytes_per_s < 1e13
    assert 0 < machine.link_alpha_s < 1 and machine.link_bytes_per_s > 1e4
    assert 2**20 < machine.workspace_bytes < 2**30


@pytest.mark.system
def test_a_machine_probed_at_length_tells_every_collective_and_loads_the_users_data(zoo):
    folder = zoo.next_folder()
    request = TrialRequest(target=str(MODELS / "slow_loader.py"), mode="machine", world_size=2, deadline_s=120.0)
    result = base.run(zoo.executor, folder.path, request)
    assert result.outcome is Outcome.COMPLETE, result.reason
    found = read_record(folder.probe, Probe)
    assert {"fp32", "bf16"} <= found.flops.keys() and all(rate > 1e8 for rate in found.flops.values())
    assert [link.collective for link in found.links] == ["all_reduce", "all_gather", "reduce_scatter"]
    assert all(link.alpha_s > 0 and link.bytes_per_s > 1e7 and len(link.times_s) == 8 for link in found.links)
    reduced = found.links[0]
    assert (found.machine.link_alpha_s, found.machine.link_bytes_per_s) == (reduced.alpha_s, reduced.bytes_per_s)
    assert found.data is not None and found.data.samples_per_s < 260  # it sleeps for 4 ms a sample
    assert {rate.n_workers for rate in found.loader} == {0, 1, 2}
    assert min(rate.samples_per_s for rate in found.loader) > found.data.samples_per_s
