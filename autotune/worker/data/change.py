"""Changes of the data that a candidate asks for: cut, packed or padded samples, and the arguments of the loader."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.space.data import OF_LOADER
from autotune.space.deepspeed import Scalar
from autotune.worker.data.samples import IGNORED, is_mask, is_text, real_mask, takes
from autotune.worker.data.worst import cut_sample

BATCH_CHANGES = ("max_length", "packing", "pad_to_multiple_of")

Collator = Callable[[list[Any]], Any]


class Collate:
    """A collate function that follows the changes of a candidate.

    What the target's own function takes as an argument of that name is passed to it. Else samples are cut before it,
    and packed after it.
    """

    def __init__(self, own: Collator, changes: Mapping[str, Scalar]) -> None:
        if isinstance(own, Collate):  # a framework makes a loader anew from the arguments of another one
            own = own.own
        self.own: Collator = own
        self.passed = {name: changes[name] for name in BATCH_CHANGES if name in changes and takes(own, name)}
        self.length = int(str(changes.get("max_length", 0))) if "max_length" not in self.passed else 0
        self.packs = "packing" in changes and "packing" not in self.passed

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch of some samples."""
        if self.length:
            samples = [cut_sample(sample, self.length) for sample in samples]
        if self.packs:
            return packed(self.own([sample], **self.passed) for sample in samples)
        return self.own(samples, **self.passed)


def packed(batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns one row without padding of batches of one sample each, as transformers' DataCollatorWithFlattening does.

    Positions begin anew at each sample, by which models with packed attention keep them apart, and no loss is taken of
    a sample's first token, which the end of another one would have to foretell.
    """
    rows: dict[str, list[Tensor]] = {}
    for batch in batches:
        ids = batch["input_ids"]
        mask = real_mask(batch, ids.shape)
        real = (torch.ones_like(ids) if mask is None else mask)[0].nonzero().flatten()
        for name, value in batch.items():
            if is_mask(name) or name == "position_ids":
                continue
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape[:2]:
                rows.setdefault(name, []).append(value[:, real])
        rows.setdefault("position_ids", []).append(torch.arange(len(real), device=ids.device)[None])
        if "labels" in rows and len(real):
            rows["labels"][-1][:, 0] = IGNORED
    return {name: torch.cat(parts, dim=1) for name, parts in rows.items()}


def arguments_of(iterator: Any) -> dict[str, Scalar]:
    """Returns the arguments of a DataLoader that one of its iterators shows."""
    return {
        "num_workers": len(getattr(iterator, "_workers", ())),
        "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
        "pin_memory": bool(iterator._pin_memory),
        "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
    }


def apply_to(arguments: dict[str, Any], changes: Mapping[str, Scalar]) -> None:
    """Changes the arguments of a DataLoader as a candidate asks."""
    wanted = {name: changes[name] for name in OF_LOADER if name in changes}
    arguments |= wanted
    if not arguments.get("num_workers"):  # torch refuses them without workers
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            arguments.pop(name, None)
    own = arguments.get("collate_fn")
    asked = {name: changes[name] for name in BATCH_CHANGES if name in changes}
    if arguments.get("batch_size", 1) is None and arguments.get("batch_sampler") is None:  # its data set yields batches
        asked = {name: value for name, value in asked.items() if takes(own, name)}
    if asked:
        arguments["collate_fn"] = Collate(own or torch.utils.data.default_collate, asked)


def why_not(
    dataset: Any, own: Collator, model: Any, *, mapped: bool, loader: bool, collates: bool = True
) -> dict[str, str]:
    """Returns the settings of the data that a target cannot follow, each with the reason.

    Args:
        dataset: The data set; None where there is none.
        mapped: The data set is read by position.
        loader: Batches come from a DataLoader, so that its arguments apply.
        collates: Batches are made of samples; else the data set yields them whole.
    """
    if dataset is None:
        none = "no data set was seen: batches are made by other means"
        return dict.fromkeys((*OF_LOADER, *BATCH_CHANGES, "group_by_length", "token_budget"), none)
    found: dict[str, str] = {}
    if not mapped and not loader:
        found |= dict.fromkeys(OF_LOADER, "data() is a stream, which several workers would read several times over")
    if not loader:
        found["persistent_workers"] = "trials of a model.py read without an end, so workers are never started anew"
        if not mapped:
            found["group_by_length"] = "data() is a stream"
    else:
        found["group_by_length"] = (
            "the order of a script's samples is its own; give its DataLoader a sampler that groups them, such as"
            " transformers' LengthGroupedSampler, and it is measured as it is"
        )
        found["token_budget"] = (
            "the batches of a script are its own; give its DataLoader a batch sampler that fills a number of tokens, and it"
            " is measured as it is"
        )
    if not takes(own, "pad_to_multiple_of"):
        found["pad_to_multiple_of"] = "the collate function takes no argument `pad_to_multiple_of`"
    if not collates:
        whole = "the DataLoader has `batch_size=None`, so that its data set yields whole batches"
        return found | {name: whole for name in BATCH_CHANGES if not takes(own, name)}
    if not takes(own, "max_length") and is_text(_first(dataset, mapped=mapped)):
        found["max_length"] = "samples are text; cut their tokens in a collate function that takes `max_length`"
    if not takes(own, "packing") and (why := _why_not_packed(dataset, own, model, mapped=mapped)):
        found["packing"] = why
    return found


def _first(dataset: Any, *, mapped: bool) -> Any:
    try:
        return dataset[0] if mapped else next(iter(dataset))
    except Exception:  # trials will say what is wrong with the data
        return None


def _why_not_packed(dataset: Any, own: Collator, model: Any, *, mapped: bool) -> str:
    """Why samples cannot be packed by us; empty if they can."""
    if not takes(getattr(model, "forward", None), "position_ids"):
        return "the model takes no `position_ids`, by which packed samples are kept apart"
    try:
        one = packed([own([_first(dataset, mapped=mapped)])])
    except Exception as error:
        return f"its batches cannot be packed ({type(error).__name__}: {error})"
    return "" if "labels" in one else "its batches hold no `labels`, of which packing leaves some out"
