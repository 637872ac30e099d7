"""Accelerate: `accumulate`, optimizer and schedule, evaluation, checkpoints and a tracker; prints its losses."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, find_executable_batch_size, set_seed
from common import Net, dataset
from torch.nn.utils import clip_grad_norm_


@find_executable_batch_size(starting_batch_size=8)
def main(_batch_size):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--split_batches", action="store_true")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--largest", type=int, default=64, help="the samples that fit")
    parser.add_argument("--by_hand", action="store_true", help="accumulate two micro-batches unknown to Accelerate")
    parser.add_argument("--clip", choices=["accelerator", "torch", "no"], default="accelerator")
    args = parser.parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=args.split_batches),
        log_with="all",
        project_dir="logs",
    )
    accelerator.init_trackers("net", vars(args))
    set_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    size = args.batch_size * (accelerator.num_processes if args.split_batches else 1)
    train = torch.utils.data.DataLoader(dataset(512), batch_size=size, shuffle=True)
    held_out = torch.utils.data.DataLoader(dataset(64), batch_size=32)
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)
    for _ in range(args.epochs):
        model.train()
        for n, (x, y) in enumerate(train):
            with accelerator.accumulate(model):
                loss = model(x, y)
                if len(x) > args.largest:
                    raise RuntimeError("CUDA out of memory.")
                accelerator.backward(loss)
                if args.by_hand and n % 2 == 0:
                    continue
                if args.clip == "accelerator":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                elif args.clip == "torch":
                    clip_grad_norm_(model.parameters(), max_norm=0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if os.environ.get("PRINT_LOSSES"):
                print("loss", repr(loss.item()), flush=True)
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                accelerator.gather_for_metrics(model(x, y))
        accelerator.save_state("state")


if __name__ == "__main__":
    main()
