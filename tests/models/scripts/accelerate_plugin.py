"""Accelerate with a `DeepSpeedPlugin`, dummy optimizer and schedule, a Llama; saves and uploads its weights."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
repo_id = HfApi().create_repo("nobody/nothing", exist_ok=True).repo_id
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG), mixed_precision="bf16")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
)
model.gradient_checkpointing_enable()
tokens = torch.randint(0, 64, (256, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, collate_fn=default_data_collator)
optimizer = DummyOptim(model.parameters(), lr=1e-3)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, loader, DummyScheduler(optimizer, total_num_steps=400)
)
for epoch in range(20):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.save_checkpoint("epochs", epoch)
accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)
HfApi().upload_folder(folder_path="out", repo_id=repo_id)
