"""Raw DeepSpeed on texts of any length: each batch is padded to its longest; one text in many is far longer.

With the argument `budget` a batch has as many texts as 512 tokens hold, but at most 5 or 9 in turns.
"""

import sys

import deepspeed
import torch
from common import config
from torch import nn

LONG, EVERY = 32 * 16, 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask):
        loss = nn.functional.cross_entropy(
            self.head(self.embed(input_ids)).transpose(1, 2), input_ids, reduction="none"
        )
        return (loss * attention_mask).sum() / attention_mask.sum()


def padded(texts):
    input_ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return {"input_ids": input_ids, "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()}


def of_budget():
    batch, most = [], 5
    for i in range(len(texts)):
        longest = max(len(texts[j]) for j in [*batch, i])
        if batch and (len(batch) == most or (len(batch) + 1) * longest > LONG):
            yield batch
            batch, most = [], 14 - most
        batch.append(i)
    yield batch


deepspeed.init_distributed()
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
texts = [torch.ones(LONG if i % EVERY == EVERY - 1 else 16, dtype=torch.long) for i in range(640)]
while True:
    size = {"batch_sampler": list(of_budget())} if "budget" in sys.argv else {"batch_size": 8}
    for batch in torch.utils.data.DataLoader(texts, collate_fn=padded, **size):
        engine.backward(engine(**batch))
        engine.step()
