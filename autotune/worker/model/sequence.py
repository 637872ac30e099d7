"""Ulysses: split each sequence of a transformers causal language model over a group of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.worker.data.samples import IGNORED
from autotune.worker.measure.groups import exchanges
from autotune.worker.model.model_file import ModelFile, WorkloadError

NEEDS = "sequences are split for causal language models of transformers only (DeepSpeed's UlyssesSPAttentionHF)"


def why_none(target: ModelFile, model: nn.Module) -> str:
    """Returns why the sequences of a target cannot be split over ranks; empty if they can."""
    config: Any = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForCausalLM") or not hasattr(config, "get_text_config"):
        return f"{NEEDS}, and this is a {type(model).__name__}"
    if target.loss is not None:
        return "the target's own loss() sees whole sequences; leave it out, and return `labels` in the batches"
    text = config.get_text_config()
    if not isinstance(getattr(text, "num_key_value_heads", None), int):
        return f"{NEEDS} whose attention takes position_ids, and that of {type(model).__name__} does not"
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return "its attention looks at a window of positions, which is lost where sequences are split"
    if config._attn_implementation not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        return f"its attention is {config._attn_implementation}; build it with attn_implementation='sdpa' or flash"
    try:
        from deepspeed.runtime.sequence_parallel import ulysses_sp  # noqa: F401
    except ImportError as error:
        return f"the installed DeepSpeed has no UlyssesSPAttentionHF ({error})"
    return ""


def join(model: nn.Module, degree: int, micro_batch_size: int) -> Any:
    """Makes the model's attention exchange heads for positions; returns the groups, for `deepspeed.initialize`."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_init_required=False)
    config: Any = model.config
    text = config.get_text_config()
    if getattr(text, "head_dim", 0) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    exchanges.watch(UlyssesSPAttentionHF, "forward")
    return UlyssesSPAttentionHF.register_with_transformers(
        model, config._attn_implementation, sequence_parallel_size=degree, micro_batch_size=micro_batch_size
    )


def split_loss(groups: Any) -> Callable[[Any, Any], Tensor]:
    """Returns the loss function of a rank of a sequence group, which is fed whole sequences.

    Its value is the mean over the whole sequences' labels; its gradient is this rank's share, since DeepSpeed sums
    gradients over a sequence group.
    """
    group = groups.get_sequence_parallel_group()
    rank, degree = dist.get_rank(group), dist.get_world_size(group)

    def loss(engine: Any, batch: Any) -> Tensor:
        own = shard(batch, rank, degree)
        output = engine(**own)
        n = (own["labels"] != IGNORED).sum().float()
        # A share without a label has no mean.
        summed = torch.nan_to_num(output.loss.float()) * n
        total = torch.stack([summed.detach(), n])
        dist.all_reduce(total, group=group)
        share = summed / total[1]
        value: Tensor = share + (total[0] / total[1] - share).detach()
        return value

    return loss


def check(batch: Any) -> None:
    """Refuses a batch that cannot be split; call it while the batch is on the host, since it reads the mask.

    Raises:
        WorkloadError: The batch does not consist of token sequences with labels, or is padded on the left.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor) or "labels" not in batch:
        raise WorkloadError("sequence_parallel_size: batches must be dicts with `input_ids` and `labels`")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise WorkloadError("sequence_parallel_size: sequences padded on the left cannot be split; pad on the right")


def shard(batch: Mapping[str, Any], rank: int, degree: int) -> dict[str, Any]:
    """Returns a rank's part of a batch of whole sequences, with positions, and labels shifted before they are cut."""
    tokens = batch["input_ids"]
    n, length = tokens.shape
    whole = dict(batch)
    whole["labels"] = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=tokens.device).expand(n, length)
    size = -(-length // degree)
    found = {name: _cut(name, value, length, rank * size, size) for name, value in whole.items()}
    return {**found, "shift_labels": found["labels"]}


def _cut(name: str, value: Any, length: int, first: int, size: int) -> Any:
    """Returns positions of a tensor; those beyond the end are padding, at the position after the last."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    cut = value[:, first : first + size]
    if (missing := size - cut.shape[1]) and value.dim() == 2:
        start = max(first, length)
        if name == "position_ids":
            after = torch.arange(start, start + missing, device=value.device).expand(value.shape[0], missing)
            return torch.cat([cut, after], 1)
        cut = nn.functional.pad(cut, (0, missing), value=IGNORED if name == "labels" else 0)
    return cut.contiguous()
