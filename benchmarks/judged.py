"""The training that claims are judged by, as one writes it: `torchrun judged.py MODEL STEPS --deepspeed_config FILE`.

No line of autotune is in it. Nothing is waited for between the steps; at the end rank 0 prints the wall time of the steps
after `SETTLING`, with the process's CPU time, context switches and page faults over them.
"""

import argparse
import atexit
import itertools
import json
import os
import resource
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SETTLING = 5


class Perceptron(nn.Module):
    """Steps of some 8 ms."""

    micro_batch_size = 64

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )

    def forward(self, x):
        return self.layers(x)

    @staticmethod
    def samples(n):
        return torch.randn(n, 64), torch.randint(0, 10, (n,))


class Convolutions(nn.Module):
    """Steps of some 60 ms."""

    micro_batch_size = 32

    def __init__(self):
        super().__init__()
        channels = (3, 32, 64, 128)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(channels)
            )
        )
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))

    @staticmethod
    def samples(n):
        return torch.randn(n, 3, 48, 48), torch.randint(0, 10, (n,))


class Decoder(nn.Module):
    """Steps of some 250 ms; twice the layers and the width are steps of a second."""

    micro_batch_size, width, depth, length, words = 8, 256, 4, 64, 512

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(self.words, self.width)
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, self.words)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.blocks(self.token(x), mask=mask))

    @classmethod
    def samples(cls, n):
        text = torch.randint(0, cls.words, (n, cls.length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class LargeDecoder(Decoder):
    """Steps of some 1 s."""

    micro_batch_size, width, depth, length = 8, 384, 6, 96


MODELS = {"perceptron": Perceptron, "convolutions": Convolutions, "decoder": Decoder, "large decoder": LargeDecoder}


def used():
    """Seconds of CPU, context switches that were waited for and that were not, page faults of this process so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.process_time(), own.ru_nvcsw, own.ru_nivcsw, own.ru_minflt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("steps", type=int)
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would leak /dev/shm, and be compiled first
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = json.loads(Path(args.deepspeed_config).read_text())
    model = MODELS[args.model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = TensorDataset(*model.samples(4096))
    loader = DataLoader(
        data, config["train_micro_batch_size_per_gpu"], sampler=DistributedSampler(data), drop_last=True
    )
    dtype = next(engine.module.parameters()).dtype
    step, begun, accumulated = 0, None, 0
    while step < args.steps:
        for drawn in loader:
            x, y = (each.to(engine.device) for each in drawn)
            output = engine(x.to(dtype) if x.is_floating_point() else x)
            loss = F.cross_entropy(output.float().flatten(0, -2), y.flatten())
            engine.backward(loss)
            engine.step()
            accumulated += 1
            if accumulated == config["gradient_accumulation_steps"]:
                step, accumulated = step + 1, 0
                if step == SETTLING:
                    deepspeed.get_accelerator().synchronize()
                    begun = used()
                if step == args.steps:
                    break
    deepspeed.get_accelerator().synchronize()
    if engine.global_rank == 0:
        names = ("wall_s", "cpu_s", "waits", "preemptions", "faults")
        n = args.steps - SETTLING
        print(
            "JUDGED",
            json.dumps({name: (b - a) / n for name, a, b in zip(names, begun, used(), strict=True)}),
            flush=True,
        )
    # One in forty ordinary exits aborts: a thread of gloo lets go of a tensor while the interpreter is finalised.
    atexit.register(os._exit, 0)


if __name__ == "__main__":
    main()
