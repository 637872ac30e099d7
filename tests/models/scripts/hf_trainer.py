"""transformers' Trainer: HfArgumentParser, a subclass, evaluation, saving and tracking on; prints its losses."""

import math
import os
import sys
from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_layer: int = field(default=2, metadata={"help": "Layers of the model."})
    adds_up: bool = field(default=False, metadata={"help": "A loss that Trainer does not divide."})
    predicts: bool = field(default=False, metadata={"help": "Predict before training."})
    half: bool = field(
        default=False, metadata={"help": "Weights in bfloat16, as checkpoints of large models have them."}
    )


class Summing(GPT2LMHeadModel):
    """Its loss ignores the number of tokens in the batch, as that of many models does, so that Trainer adds losses up."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(input_ids, labels=labels, **kwargs)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, n):
        self.tokens = torch.randint(0, 64, (n, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class PrintingTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if os.environ.get("PRINT_LOSSES"):
            print("loss", repr(loss.item()), flush=True)
        return loss


def main():
    model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    if os.path.isdir(training_args.output_dir) and os.listdir(training_args.output_dir):
        raise ValueError(f"Output directory ({training_args.output_dir}) already exists and is not empty.")
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=model_args.n_layer, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = (Summing if model_args.adds_up else GPT2LMHeadModel)(config)
    if model_args.half:
        model = model.to(torch.bfloat16)
    trainer = PrintingTrainer(model=model, args=training_args, train_dataset=Tokens(2048), eval_dataset=Tokens(16))
    os.listdir(trainer.args.output_dir)  # on each rank, as where a script looks for its checkpoints
    if "--deepspeed" not in sys.argv:  # with DeepSpeed transformers cannot save before it trains
        trainer.save_model("untrained")
        print(f"perplexity {math.exp(trainer.evaluate()['eval_loss']):.1f}")  # with DeepSpeed only at ZeRO 3
    if model_args.predicts:
        trainer.predict(Tokens(16))
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
