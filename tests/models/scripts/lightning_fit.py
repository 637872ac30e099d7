"""Lightning: `fit` with a strategy (a name, an object, or none), validation, a checkpoint callback, a logger."""

import argparse
import os

import lightning as L
import torch
from common import Block, dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = None

    def configure_model(self):
        if self.body is None:
            torch.manual_seed(0)
            self.body = nn.Sequential(*(Block(16) for _ in range(3)), nn.Linear(16, 4))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        self.log("train_loss", loss)
        if os.environ.get("PRINT_LOSSES") and self.global_rank == 0:
            print("loss", repr(loss.item()), flush=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.body(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        share = {"num_replicas": int(os.environ.get("WORLD_SIZE", "1")), "rank": int(os.environ.get("RANK", "0"))}
        data = dataset(512)
        # Without a sampler of its own Lightning shuffles wherever there may be several ranks, and only there.
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False, **share) if args.ordered else None
        return torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(dataset(64), 32)


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="auto")
parser.add_argument("--precision", default=None)
parser.add_argument("--ordered", action="store_true")
parser.add_argument("--steps", type=int, default=10**6)
args = parser.parse_args()
plugins = None
if args.strategy == "object":
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 4096}, "zero_allow_untested_optimizer": True}
    args.strategy = DeepSpeedStrategy(config=config)
if args.precision == "plugin":
    plugins, args.precision = [DeepSpeedPrecision("bf16-mixed")], None
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="auto", devices=1, strategy=args.strategy, precision=args.precision, plugins=plugins,
    accumulate_grad_batches=2,
    max_epochs=1000, max_steps=args.steps, val_check_interval=10, logger=CSVLogger("logs"), enable_progress_bar=False,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=1)],
)  # fmt: skip
trainer.fit(Module(), Data())
