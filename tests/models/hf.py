"""Trains: a Hugging Face Llama built from a configuration; dict batches, repeated decoder layers."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class Tokens(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = (index + torch.arange(32)) % 97
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def model():
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def data():
    return Tokens()
