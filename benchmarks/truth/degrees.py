"""A small Llama whose layers and sequences can be split over four ranks."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, SAMPLES = 1024, 64, 4096


def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def data():
    """Each token follows from the one before it, but for some noise."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, VOCABULARY, (SAMPLES,), generator=generator)]
    for _ in range(LENGTH - 1):
        rows.append((rows[-1] * 5 + torch.randint(1, 4, (SAMPLES,), generator=generator)) % VOCABULARY)
    return [{"input_ids": tokens, "labels": tokens} for tokens in torch.stack(rows, 1)]
