"""A small Llama, whose layers and sequences can be split over up to four ranks."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, TOKENS = 256, 64


class Walks(Dataset):
    """Token sequences in which most steps go on by one."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        steps = 1 + torch.randint(0, 10, (TOKENS,), generator=generator) // 9
        tokens = (index + steps.cumsum(0)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def data():
    return Walks()
