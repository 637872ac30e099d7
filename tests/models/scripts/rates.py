"""The script's schedule over its optimizer; prints the change of the first weight and the rate after each step."""

import argparse
import contextlib

import deepspeed
import torch
from common import Net, dataset

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.5)
parser.add_argument("--sharded", action="store_true", help="Make the model inside zero.Init.")
parser.add_argument("--late", action="store_true", help="Make the schedule from the optimizer that DeepSpeed returns.")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--scales", action="store_true", help="Let the rate follow the batch, as scripts do by themselves.")
args = parser.parse_args()
if args.scales:
    args.rate *= args.batch_size / 8
CONFIG = {
    "train_micro_batch_size_per_gpu": args.batch_size,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3 * args.sharded},
    "zero_allow_untested_optimizer": True,
}
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=CONFIG) if args.sharded else contextlib.nullcontext():
    model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
schedule = (
    None if args.late else torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5 if args.rate else 1.0)
)
engine, own, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=CONFIG)
loader = engine.deepspeed_io(dataset(1024), num_local_io_workers=0)
late = torch.optim.lr_scheduler.MultiplicativeLR(own, lambda step: 0.5) if args.late else None
partitioned = engine.zero_optimization_partition_weights()
for _ in range(100):
    for x, y in loader:
        before = 0.0 if partitioned else model.head.weight[0, 0].item()
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary() and not args.sharded:
            engine.step()
            if late is not None:
                late.step()
            rate = (late or schedule).get_last_lr()[0]
            print(
                "moved",
                repr(before - (0.0 if partitioned else model.head.weight[0, 0].item())),
                "shows",
                rate,
                flush=True,
            )
        else:
            engine.step()
