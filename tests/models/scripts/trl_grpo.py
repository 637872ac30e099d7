"""TRL's GRPOTrainer, which generates from each draw of its loader what several micro-batches train on; no network is read."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, TrlParser


def n_words(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


def main():
    (arguments,) = TrlParser((GRPOConfig,)).parse_args_and_config()
    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"w{2 + i % 60} w3 w4" for i in range(512)]})
    GRPOTrainer(
        LlamaForCausalLM(config), n_words, args=arguments, train_dataset=prompts, processing_class=tokenizer
    ).train()


if __name__ == "__main__":
    main()
