"""A training of another style: features of people and things in, clicks out, with a loader of its own."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PEOPLE, THINGS, WIDTH, HIDDEN = 20_000, 5_000, 32, 512

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=200)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Clicks(Dataset):
    """Who saw what, and whether it was clicked."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        person, thing = (index * 7919) % PEOPLE, (index * 104_729) % THINGS
        return person, thing, float((person * thing) % 7 < 3)


class Ranker(nn.Module):
    """Scores a thing for a person."""

    def __init__(self):
        super().__init__()
        self.people, self.things = nn.Embedding(PEOPLE, WIDTH), nn.Embedding(THINGS, WIDTH)
        layers = [nn.Linear(2 * WIDTH, HIDDEN), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        self.score = nn.Sequential(*layers, nn.Linear(HIDDEN, 1))

    def forward(self, people, things):
        return self.score(torch.cat([self.people(people), self.things(things)], dim=1)).squeeze(1)


torch.manual_seed(0)
deepspeed.init_distributed()
model = Ranker()
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
clicks = Clicks()
sampler = DistributedSampler(clicks, seed=0)
loader = DataLoader(clicks, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
while engine.global_steps < args.steps:
    for people, things, clicked in loader:
        scores = engine(people.to(engine.device), things.to(engine.device))
        engine.backward(nn.functional.binary_cross_entropy_with_logits(scores.float(), clicked.float()))
        engine.step()
        if engine.global_steps >= args.steps:
            break
