"""Trains: an encoder-decoder transformer that reverses sequences; three tensors a batch, `loss`, two kinds of block."""

import torch
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, LENGTH, START = 20, 32, 10, 0


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, target):
        mask = self.transformer.generate_square_subsequent_mask(
            target.size(1), device=source.device, dtype=self.position.weight.dtype
        )
        source = self.embedding(source) + self.position.weight
        target = self.embedding(target) + self.position.weight
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))


class Reversals(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        source = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        wanted = source.flip(0)
        return {"source": source, "shifted": torch.cat([torch.tensor([START]), wanted[:-1]]), "wanted": wanted}


def model():
    return Seq2Seq()


def data():
    return Reversals()


def loss(model, batch):
    logits = model(batch["source"], batch["shifted"])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["wanted"].flatten())
