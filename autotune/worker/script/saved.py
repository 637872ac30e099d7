"""What a script saves in a trial: the weights stay out of its files, and stand in again where it reads these back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.worker.containers import tensors_in, with_values

# Begin of what a file holds in place of a tensor, whose name follows.
MARK = "autotune: the trained tensor "


def set_aside(engine: Any, saved: Any) -> Any:
    """Returns a copy of what a script saves, with a name in place of each tensor that is the engine's or a copy of its weights."""
    names = engine.module.state_dict().keys()
    trained = {_place(tensor): name for name, tensor in reversed(_trained(engine).items()) if _place(tensor)}

    def change(value: Any, name: object) -> Any:
        found = (name or trained.get(_place(value))) if isinstance(value, Tensor) else None
        return f"{MARK}{found}" if found else value

    return _mapped(saved, change, names)


def put_back(engine: Any, read: Any, device: Any) -> tuple[Any, bool]:
    """Returns what a script reads back, with copies of the tensors that were set aside as they are now; and whether any was.

    Args:
        device: Where the script wants them; None or a function leaves them where they are.

    Raises:
        KeyError: This rank does not train one of them.
    """
    trained: dict[str, Tensor] = {}
    device = device if isinstance(device, str | torch.device) else None

    def change(value: Any, _: object) -> Any:
        if not isinstance(value, str) or not value.startswith(MARK):
            return value
        if not trained:  # made once and only where it is needed: a data set may keep its samples in such files
            trained.update(_trained(engine))
        return trained[value.removeprefix(MARK)].detach().to(device, copy=True)

    return _mapped(read, change), bool(trained)


def _trained(engine: Any) -> dict[str, Tensor]:
    """Returns the tensors that an engine trains, by names that they have on all ranks: of the model, and of its optimizer."""
    optimizer = getattr(engine, "basic_optimizer", None)
    groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
    states = [*getattr(optimizer, "state", {}).values()]
    numbered = enumerate(tensors_in([groups, states]))
    return {**engine.module.state_dict(), **{f"{i} of the optimizer": tensor for i, tensor in numbered}}


def _place(tensor: Any) -> tuple[int, torch.Size] | None:
    """Returns where a tensor lies, and its shape; None if it is empty or no plain one."""
    plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
    return (tensor.data_ptr(), tensor.shape) if plain and tensor.numel() else None


def _mapped(value: Any, change: Callable[[Any, object], Any], names: Any = None, name: object = None) -> Any:
    """Returns a copy of nested mappings and sequences, the rest changed; in mappings with just these names told its name."""
    if isinstance(value, Mapping):
        whole = value.keys() == names
        return with_values(
            value, {key: _mapped(inner, change, names, key if whole else None) for key, inner in value.items()}
        )
    if type(value) in (list, tuple):  # classes derived from them may not be made of their values
        return type(value)(_mapped(inner, change, names) for inner in value)
    return change(value, name)
