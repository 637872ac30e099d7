"""Settings that DeepSpeed reads under several names, and types that it reads in several spellings."""

from typing import Any

# Each is true for the host; `cpu_offload_use_pin_memory` beside them is read by nothing any more.
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
RETIRED = OFFLOADS.keys() | {"cpu_offload_use_pin_memory"}
# How DeepSpeed spells a type of `data_types` and `torch_autocast` (`DtypeEnum` of deepspeed/runtime/config.py), and its one name here.
SPELLINGS = {
    spelling: name
    for name, spellings in {
        "fp32": "fp32 float32 torch.float32 float",
        "fp16": "fp16 float16 torch.float16 half",
        "bf16": "bf16 bfloat16 torch.bfloat16",
    }.items()
    for spelling in spellings.split()
}
# Settings whose value is a type, and whether DeepSpeed looks them up in lower case among the short names alone.
TYPES = {
    "communication_data_type": True, "seq_parallel_communication_data_type": True, "data_types.grad_accum_dtype": False,
    "data_types.buffer_dtype": False, "data_types.param_dtype": False, "torch_autocast.dtype": False,
}  # fmt: skip


def one_spelling(path: str, value: Any) -> Any:
    """The value of a setting; a type by the one name by which equal settings are equal."""
    if path not in TYPES or not isinstance(value, str):
        return value
    return SPELLINGS.get(value.lower() if TYPES[path] else value, value)


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration with the present names of its settings and one spelling of its types.

    Of `bf16` and `bfloat16`, its older name, DeepSpeed reads the first; it refuses both names of an offload together, even for false.
    """
    config = {key: one_spelling(key, value) for key, value in config.items() if key != "bfloat16"} | (
        {"bf16": config["bfloat16"]} if config.get("bf16") is None and "bfloat16" in config else {}
    )
    for section in ("data_types", "torch_autocast"):
        if isinstance(found := config.get(section), dict):
            config[section] = {key: one_spelling(f"{section}.{key}", value) for key, value in found.items()}
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or not zero.keys() & RETIRED:
        return config
    moved = {new: zero.get(new) or {} for old, new in OFFLOADS.items() if zero.get(old)}
    moved = {new: {"device": "cpu"} | own if isinstance(own, dict) else own for new, own in moved.items()}
    return config | {"zero_optimization": {key: zero[key] for key in zero if key not in RETIRED} | moved}
