"""Fine-tuning of the last block of a decoder of 1.1 billion parameters from disk, as one writes it.

`torchrun large_model.py FOLDER STEPS --deepspeed_config FILE`: at the end rank 0 prints the seconds that it read and
moved weights (`from_pretrained`, `deepspeed.initialize`), and those of its steps. Also a `model.py`, whose weights lie
in the folder that `LARGE_MODEL` names.
"""

import argparse
import atexit
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

WORDS, LENGTH = 32000, 16


def write(folder):
    """Writes the model of TinyLlama's shape with random weights; a piece of random numbers is repeated."""
    config = LlamaConfig(vocab_size=WORDS, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
                         num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=64)  # fmt: skip
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    piece = 0.02 * torch.randn(1 << 20)
    state = {
        name: piece.to(torch.bfloat16).repeat(-(-like.numel() // len(piece)))[: like.numel()].view(like.shape).clone()
        for name, like in found.state_dict().items()
    }
    found.save_pretrained(folder, state_dict=state)


class LastBlock(nn.Module):
    """The decoder, of which the last block is trained."""

    def __init__(self, folder):
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.decoder.requires_grad_(False)
        self.decoder.model.layers[-1].requires_grad_(True)

    def forward(self, x):
        return self.decoder(input_ids=x, use_cache=False).logits


def model():
    return LastBlock(os.environ["LARGE_MODEL"])


def data():
    text = torch.randint(0, WORDS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def optimizer(params):
    return torch.optim.AdamW([each for each in params if each.requires_grad], lr=1e-5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would leak /dev/shm, and be compiled first
    deepspeed.init_distributed()
    config = json.loads(Path(args.deepspeed_config).read_text())
    begun = time.perf_counter()
    net = LastBlock(args.folder)
    read_s = time.perf_counter() - begun
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer(net.parameters()), config=config)
    moved_s = time.perf_counter() - begun
    dataset = data()
    loader = DataLoader(dataset, config["train_micro_batch_size_per_gpu"], sampler=DistributedSampler(dataset))
    marks = [time.perf_counter()]
    while len(marks) <= args.steps:
        for x, y in loader:
            output = engine(x.to(engine.device))
            engine.backward(F.cross_entropy(output.float().flatten(0, -2), y.to(engine.device).flatten()))
            engine.step()
            marks.append(time.perf_counter())
            if len(marks) > args.steps:
                break
    if engine.global_rank == 0:
        print("LARGE", json.dumps({"read_s": read_s, "moved_s": moved_s, "steps_s": marks[-1] - marks[0]}), flush=True)
    # One in forty ordinary exits aborts: a thread of gloo lets go of a tensor while the interpreter is finalised.
    atexit.register(os._exit, 0)


if __name__ == "__main__":
    main()
