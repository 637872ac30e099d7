"""Check that each DeepSpeed setting of a trial acted, by a witness for every knob in the running engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.space.deepspeed import ZERO, Scalar
from autotune.space.ineffective import UNREAD_BY_BF16_OPTIMIZER
from autotune.worker.measure import sizes
from autotune.worker.measure.witnesses import SECTIONS, SEEN_BY_OBSERVED, WITNESSES, Idle, Witness

# Where DeepSpeed keeps its parsed sections, and what it takes where other keys are left out.
PARSED = {"zero_optimization": "zero_config", "bf16": "bfloat16_config", "fp16": "float16_config"}
DEFAULTS: dict[str, Scalar] = {
    "prescale_gradients": False, "gradient_predivide_factor": 1.0, "disable_python_gc": False,
    "sequence_parallel_size": 1, "gradient_allreduce_op": "mean",
    "use_data_before_expert_parallelism": False, "managed_gradient_accumulation": True,
}  # fmt: skip
BUCKET = f"{ZERO}reduce_bucket_size"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Findings of the witnesses about a candidate's settings.

    Attributes:
        inert: Why a setting did not act, by setting. What did what happens anyway (`Idle`) is among them where nothing
            else differs from the baseline on this rank.
        unwitnessed: Settings that nothing in the engine shows.
    """

    inert: Mapping[str, str]
    unwitnessed: tuple[str, ...]


def judge(engine: Any, settings: Mapping[str, Scalar], base: Mapping[str, Scalar]) -> Verdict:
    """Asks the witness of each setting whether the setting acted.

    Args:
        settings: The settings, by knob, that were asked for and differ from the baseline's; None leaves the key out.
        base: The baseline's values of these knobs.
    """
    inert: dict[str, str] = {}
    idle: dict[str, str] = {}
    unwitnessed, acted = [], False
    for name, value in settings.items():
        try:
            why = None if name in SEEN_BY_OBSERVED else _why_not(engine, name, value, base.get(name))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            unwitnessed.append(name)
            continue
        if why is None:
            acted = True
        else:
            (idle if isinstance(why, Idle) else inert)[name] = why
    alone = not acted and not unwitnessed
    return Verdict(inert=inert | idle if alone else inert, unwitnessed=tuple(unwitnessed))


def _why_not(engine: Any, name: str, value: Scalar, base: Scalar) -> str | None:
    """Says why a setting did not act, or did what the baseline's value does; None where it acted."""
    if name in (BUCKET, *UNREAD_BY_BF16_OPTIMIZER) and type(engine.optimizer).__name__ == "BF16_Optimizer":
        why = "DeepSpeed's BF16_Optimizer, which ran, does not read it"
        asks = value is not None and name != BUCKET and value != UNREAD_BY_BF16_OPTIMIZER[name]
        return why if asks else Idle(why)
    now, before = (_in_effect(engine, name, each) for each in (value, base))
    if now is not None and now == before:
        return Idle(f"DeepSpeed does the same {'without the key' if base is None else f'with {base}'}")
    if now is not None and before is not None and sizes.same_effect(engine, name, now, before):
        return Idle(f"with a model of this size it does the same as {before}")
    if value is not None:
        return _witness(name)(engine, value)
    if base is not None and _witness(name)(engine, base) is None:
        return Idle(f"without the key DeepSpeed does the same as with {base}")
    return None


def _in_effect(engine: Any, name: str, value: Scalar) -> Scalar:
    """A setting's value; where the key is left out, the one that DeepSpeed takes then, None if that is not known."""
    if value is not None:
        return value
    if name == f"{ZERO}overlap_comm":
        return bool(engine.zero_optimization_stage() == 3)
    if name == "gradient_clipping":
        from deepspeed.runtime import constants  # 0 once, 1 in 0.19.8

        return float(constants.GRADIENT_CLIPPING_DEFAULT)
    section, *rest = name.split(".")
    if section not in PARSED or not rest:
        return DEFAULTS.get(name)
    *inner, key = rest
    parsed = getattr(getattr(engine, "_config", None), PARSED[section], None)
    for part in inner:
        parsed = getattr(parsed, part, None)
    fields = getattr(type(parsed), "model_fields", {})
    found = fields.get(key) or next((field for field in fields.values() if field.alias == key), None)
    default = found.default if found is not None else None
    return default if isinstance(default, str | int | float) else None


def _witness(name: str) -> Witness:
    if name in WITNESSES:
        return WITNESSES[name]
    section, _, rest = name.partition(".")
    return SECTIONS[section](rest)
