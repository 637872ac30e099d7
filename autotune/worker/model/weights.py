"""Load a model's weights from a DeepSpeed checkpoint or a state dict, and save them as a state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.system import files
from autotune.worker.measure import experts
from autotune.worker.model.model_file import WorkloadError

# File names of a plain state dict in a folder, and keys under which frameworks put it into a larger file.
FILES = ("model.safetensors", "pytorch_model.bin", "model.pt", "model.pth")
KEYS = ("module", "model", "state_dict", "model_state_dict")


def load(model: nn.Module, path: Path) -> None:
    """Puts the weights of a checkpoint into a model.

    Args:
        model: The model, before `deepspeed.initialize`.
        path: A DeepSpeed checkpoint's folder, a folder with a state dict, or a state dict's file.
    """
    known = model.state_dict().keys()  # a model may have a part of that name itself
    state = _state(path).items()  # a wrapped or compiled model's names begin otherwise
    found = {n if n in known else n.removeprefix("module.").removeprefix("_orig_mod."): value for n, value in state}
    found = experts.of_this_rank(model, found)
    try:
        with _gathered(model, modifier_rank=0):
            missing, unknown = model.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise WorkloadError(
            f"checkpoint {path} does not fit the model: {str(error).splitlines()[-1].strip()}"
        ) from None
    own = dict(model.named_parameters(remove_duplicate=False))
    loaded = {own[name] for name in own.keys() - {*missing}}  # a file may have a tied tensor by any of its names
    lost = [name for name in missing if name in own and own[name] not in loaded]
    if lost or len(unknown) == len(found):
        raise WorkloadError(
            f"checkpoint {path} does not fit the model: it has no {', '.join(lost[:3]) or 'parameter of it'}"
        )


def _gathered(model: nn.Module, *, modifier_rank: int | None) -> Any:
    """Gathers parameters sharded by ZeRO-3; changes made by the modifying rank reach all ranks."""
    import deepspeed

    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier_rank, enabled=bool(sharded))


def _state(path: Path) -> Mapping[str, Tensor]:
    if not path.exists():
        raise WorkloadError(f"checkpoint {path}: there is no such file or folder")
    if not path.is_dir():
        return _file(path)
    if (path / "latest").exists() or list(path.glob("*mp_rank_*model_states.pt")):
        return _deepspeed(path)
    for name in FILES:
        if (path / name).exists():
            return _file(path / name)
    raise WorkloadError(
        f"checkpoint {path} holds neither a DeepSpeed checkpoint (`latest`) nor any of {', '.join(FILES)}"
    )


def _deepspeed(path: Path) -> Mapping[str, Tensor]:
    """Returns the fp32 weights of a DeepSpeed checkpoint, joined from all ranks' shards."""
    folder = path / (path / "latest").read_text().strip() if (path / "latest").exists() else path
    if list(folder.glob("*zero_pp_rank_*optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name))
    files = sorted(folder.glob("*mp_rank_*model_states.pt"))
    if len(files) != 1:
        place = f"checkpoint {path}: {len(files)} model states in {folder.name}"
        raise WorkloadError(f"{place}; only a model that is not split up can be read")
    # DeepSpeed keeps more than tensors there; the file is the user's own, as model.py is.
    return _weights_in(torch.load(files[0], map_location="cpu", weights_only=False), files[0])


def _file(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise WorkloadError(f"checkpoint {path}: to read it, pip install safetensors") from None

        return dict(load_file(path))
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = f"cannot be read as a state dict ({type(error).__name__}): save `model.state_dict()` alone, by torch.save"
        raise WorkloadError(f"checkpoint {path} {why}") from None
    return _weights_in(data, path)


def _weights_in(data: Any, path: Path) -> Mapping[str, Tensor]:
    for key in KEYS:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    items = data.items() if isinstance(data, Mapping) else ()
    found = {name: value for name, value in items if isinstance(value, Tensor)}
    if not found:
        raise WorkloadError(f"checkpoint {path} holds no state dict")
    return found


def save(engine: Any, path: Path) -> None:
    """Writes the model's weights atomically; all ranks take part."""
    with _gathered(engine.module, modifier_rank=None):
        if dist.get_rank() == 0:
            state = {name: value.detach().cpu().clone() for name, value in engine.module.state_dict().items()}
            with files.replacing(path) as file:
                torch.save(state, file)
