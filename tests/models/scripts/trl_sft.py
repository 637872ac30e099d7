"""TRL's own SFTTrainer on samples of any length; nothing is read from a network."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, TrlParser


def main():
    (arguments,) = TrlParser((SFTConfig,)).parse_args_and_config()
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    lengths = torch.exp(torch.randn(512) * 0.8 + 2.5).int().clamp(4, 100).tolist()
    texts = Dataset.from_dict({"input_ids": [torch.randint(2, 64, (n,)).tolist() for n in lengths]})
    SFTTrainer(LlamaForCausalLM(config), arguments, train_dataset=texts, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
