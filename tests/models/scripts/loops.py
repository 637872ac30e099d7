"""The loops of `styles.py`."""

import argparse
import itertools
import time

import deepspeed
import torch
from common import Net, config, dataset


class TwoByTwo:
    """A batch sampler of the user's own, which tells nobody its size."""

    def __iter__(self):
        for first in range(0, 4096, 8):
            yield list(range(first, first + 8))


class Batches(torch.utils.data.IterableDataset):
    """Yields whole batches."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        data = dataset()
        for first in range(0, len(data), self.size):
            yield data[first : first + self.size]


def pack(samples):
    """All samples of a batch in one row."""
    return torch.cat([x for x, _ in samples])[None], torch.stack([torch.as_tensor(y) for _, y in samples])[None]


class Packed(Net):
    def forward(self, x, y):
        return super().forward(x.view(-1, 16), y.view(-1))


class Maker(Net):
    """Makes inputs of another model."""

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return x


class TwoTasks(Net):
    """Trains on a batch of another data set, too."""

    def forward(self, x, y, other_x, other_y):
        return super().forward(x, y) + super().forward(other_x, other_y)


class Big(Net):
    """Fits four samples."""

    def forward(self, x, y):
        if len(x) > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x, y)


def loader_of(style, batch):
    data = dataset()
    if style == "workers":
        return torch.utils.data.DataLoader(data, batch_size=batch, num_workers=2)
    if style == "batch sampler":
        sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), batch, drop_last=True)
        return torch.utils.data.DataLoader(data, batch_sampler=sampler)
    if style == "own sampler":
        return torch.utils.data.DataLoader(data, batch_sampler=TwoByTwo())
    if style == "iterable":
        return torch.utils.data.DataLoader(Batches(batch), batch_size=None)
    return torch.utils.data.DataLoader(data, batch_size=batch, collate_fn=pack if style == "packed" else None)


def train(style, batch, accum, arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--bsz", default="8")  # a text
    args = parser.parse_args(arguments)
    deepspeed.init_distributed()
    torch.manual_seed(-1 if style == "noise" else 0)
    itself = {"gradient_accumulation_steps": 1}
    at_1 = {"zero_optimization": {"stage": 1}}
    own = {"own steps": itself, "divides own steps": itself, "judged": at_1, "judged second": at_1, "scales": at_1}
    settings = config(**own.get(style, {}))
    if style == "judged second":
        made = Maker()
        generator, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=settings)
    model = {"packed": Packed, "halves": Big, "two loaders": TwoTasks}.get(style, Net)()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    if style == "critic":
        other = Net()
        critic, *_ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config=config())
    if style == "judged":
        made = Maker()
        generator, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=settings)
    called = {"by name": engine.forward, "module": engine.module}.get(style, engine)
    schedule = (
        torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.01, total_iters=100) if style == "schedule" else None
    )
    rival = Net()
    rival_optimizer = torch.optim.SGD(rival.parameters(), lr=1e-3)
    loader = loader_of(style, int(args.bsz) if style == "text flag" else batch)
    held_out = iter(torch.utils.data.DataLoader(dataset(10**5, seed=2), batch_size=8 * int(args.bsz)))
    if style == "evaluates first":
        engine.eval()
        for x, y in torch.utils.data.DataLoader(dataset(8 * 8, seed=2), batch_size=8):
            with torch.no_grad():
                engine(x, y)
            time.sleep(0.05)
        engine.train()
    if style == "evaluation mode":
        engine.eval()
    beside = itertools.cycle(torch.utils.data.DataLoader(dataset(96, seed=3), batch_size=16))
    n = 0
    while True:
        for batch_of_samples in loader:
            x, y = (part.to(engine.device) for part in batch_of_samples)
            if style == "only eight" and len(x) != 8:
                raise ValueError("a batch is eight samples here")
            if style == "evaluates" and n % 2:
                engine.eval()
                with torch.no_grad():
                    engine(*next(held_out))
                engine.train()
            if style == "noise":
                x = x + torch.randn_like(x)
            if (style in ("evaluates at times", "plays") and n % 4 == 0) or (style == "labels" and n % 2 == 0):
                with torch.no_grad():
                    engine(*((x, y) if style == "plays" else next(held_out)))
                time.sleep(0.5 if n < 16 else 0.0)  # the inspection goes on for longer
            try:
                loss = called(x, y, *(next(beside) if style == "two loaders" else ()))
            except RuntimeError:  # as scripts do that halve what does not fit
                loss = called(x[:4], y[:4])
            if style == "divides":
                loss = loss / engine.gradient_accumulation_steps()
            if style == "divides own steps":
                loss = loss / accum
            if style == "by rows":
                loss = loss * len(x)
            if style == "critic":
                critic.backward(critic(x, y))
                critic.step()
            if style in ("judged", "judged second"):
                generator.backward(engine(generator(x, y), y))
                generator.step()
            if style == "another model":
                rival(x.detach(), y).backward()
                rival_optimizer.step()
            if style == "scales":
                engine.scale(loss).backward()
            else:
                engine.backward(loss, retain_graph=style == "two losses")
            if style == "two losses":
                engine.backward(0.5 * loss)
            if schedule is not None:
                schedule.step()
            n += 1
            if "own steps" not in style or n % accum == 0:
                engine.step()
