"""Settings of torch itself, which DeepSpeed does not get: products of fp32 matrices in TensorFloat-32."""

from collections.abc import Mapping

from autotune.errors import nearest
from autotune.space.deepspeed import ConfigError, Scalar

PREFIX = "torch."
TF32 = f"{PREFIX}allow_tf32"
# The first compute capability whose tensor cores multiply in TensorFloat-32 (A100, RTX 30).
TF32_CAPABILITY = 8.0


def is_torch(name: str) -> bool:
    """Whether a knob is one of torch."""
    return name.startswith(PREFIX)


def check_knob(name: str) -> None:
    """Refuses a setting of torch that is not tuned."""
    if name != TF32:
        raise ConfigError(f"unknown setting of torch {name!r}.{nearest(name, [TF32])} Known: {TF32}")


def check_value(name: str, value: Scalar) -> None:
    """Refuses a value that a setting of torch does not take."""
    if not isinstance(value, bool | None):
        raise ConfigError(f"{name}: {value!r} is not true or false")


def has_tf32(accelerator: str, capability: str) -> bool:
    """Whether a device multiplies in TensorFloat-32, by its compute capability; AMD names none."""
    try:
        return accelerator == "cuda" and float(capability) >= TF32_CAPABILITY
    except ValueError:
        return False


def numerics(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Those settings of a candidate that change the computed numbers."""
    return {TF32: config[TF32]} if config.get(TF32) is not None else {}


def in_words(config: Mapping[str, Scalar]) -> list[str]:
    """How a user makes the changes of a candidate, one sentence each."""
    if (value := config.get(TF32)) is None:
        return []
    precision = "high" if value else "highest"
    return [f"Script: `torch.set_float32_matmul_precision({precision!r})` before the model is made."]
