"""GPT-2 of any size under transformers' Trainer on made-up tokens: the script that `gpu.py` has autotune tune."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Shape:
    """The size of the model."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50304


class Tokens(Dataset):
    """Samples that are as long as the model's context."""

    def __init__(self, shape, n=4096):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, shape.vocabulary, (n, shape.context), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    shape, arguments = HfArgumentParser((Shape, TrainingArguments)).parse_args_into_dataclasses()
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(shape)).train()


if __name__ == "__main__":
    main()
