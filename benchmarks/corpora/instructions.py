"""A small Llama on samples whose lengths are those of instructions: log-normal, most of a padded batch is padding."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=1024, use_cache=False,
)  # fmt: skip


def model():
    return LlamaForCausalLM(CONFIG)


def data():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(2000, generator=generator) * 1.0 + 3.4).long().clamp(4, 512).tolist()
    # Counting from a random number on: something to learn.
    starts = torch.randint(1, 400, (2000,), generator=generator).tolist()
    return [{"input_ids": (start + torch.arange(n)) % 511 + 1} for n, start in zip(lengths, starts, strict=True)]


def collate(samples):
    rows = [sample["input_ids"] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
