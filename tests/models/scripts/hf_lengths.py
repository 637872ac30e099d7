"""transformers' Trainer on samples of any length, padded by a collator of its own; `--packing` as TRL's SFTConfig has it."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class SFTConfig(TrainingArguments):
    """Stands in for TRL's: the same arguments, which its trainer reads when it prepares the data set."""

    max_length: int | None = field(default=64, metadata={"help": "Samples are cut to it."})
    packing: bool = field(default=False, metadata={"help": "Rows of `max_length` tokens."})
    padding_free: bool = field(default=False, metadata={"help": "No padding."})


class SFTTrainer(Trainer):
    def __init__(self, model, args, train_dataset, **kwargs):
        cut = [sample[: args.max_length] for sample in train_dataset]
        if args.packing:
            tokens = torch.cat(cut)
            cut = list(tokens[: len(tokens) // args.max_length * args.max_length].view(-1, args.max_length))
        super().__init__(model=model, args=args, train_dataset=[{"input_ids": ids} for ids in cut], **kwargs)


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main():
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    arguments.remove_unused_columns = False
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    lengths = torch.exp(torch.randn(2048) * 0.8 + 2.5).int().clamp(4, 100)
    texts = [torch.randint(1, 64, (int(n),)) for n in lengths]
    SFTTrainer(GPT2LMHeadModel(config), arguments, texts, data_collator=collate).train()


if __name__ == "__main__":
    main()
