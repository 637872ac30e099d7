"""Trains: a two-layer transformer that predicts counting sequences; dict batches, and the loss in its output."""

import torch
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, CONTEXT = 61, 32, 16


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


class Counting(Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        tokens = (index + torch.arange(CONTEXT + 1) * (1 + index % 5)) % VOCABULARY
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def model():
    return GPT()


def data():
    return Counting()


def optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3)
