"""Settings of ZeRO under names that DeepSpeed has retired and still reads."""

from typing import Any

# Each is true for the host; `cpu_offload_use_pin_memory` beside them is read by nothing any more.
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
RETIRED = OFFLOADS.keys() | {"cpu_offload_use_pin_memory"}


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration with the present names of its offloads; DeepSpeed refuses both names together, even for false."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or not zero.keys() & RETIRED:
        return config
    moved = {new: {"device": "cpu"} | (zero.get(new) or {}) for old, new in OFFLOADS.items() if zero.get(old)}
    return config | {"zero_optimization": {key: zero[key] for key in zero if key not in RETIRED} | moved}
