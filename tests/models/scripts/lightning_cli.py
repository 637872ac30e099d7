"""Lightning: LightningCLI of the package `pytorch_lightning`; the loader is made before Lightning asks for it."""

import pytorch_lightning as pl
import torch
from common import Net, dataset
from pytorch_lightning.cli import LightningCLI


class Module(pl.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr, self.net = lr, Net()

    def training_step(self, batch, index):
        return self.net(*batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.loader = torch.utils.data.DataLoader(dataset(), batch_size=batch_size)

    def train_dataloader(self):
        return self.loader


if __name__ == "__main__":
    LightningCLI(
        Module,
        Data,
        seed_everything_default=0,
        trainer_defaults={"strategy": "deepspeed_stage_2", "precision": "bf16-true"},
    )
