"""The stages of a `PipelineModule`: chosen while it is built, and what of them the model allows."""

import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autotune.space.candidate import Candidate
from autotune.space.degree import PARTITION
from autotune.trial.workload import Pipeline
from autotune.worker.script.patching import patch

DEFAULT_PARTITION = "parameters"  # DeepSpeed's
OWN_TOPOLOGY = (
    "pipeline.stages: the module is built with its own topology; give `PipelineModule` num_stages instead, and tune"
    " them"
)
# More are not asked for: a stage has a rank.
MOST_STAGES = 64


class Stages:
    """Builds every `PipelineModule` of this process as a candidate says.

    Attributes:
        own: Stages and partition that the target asks for; 0 before it has built a module.
        fixed: Why these cannot be changed; empty if they can.
        partition: The partition that was used.
    """

    def __init__(self) -> None:
        self.own, self.fixed, self.partition = (0, ""), "", ""
        self._candidate: Candidate | None = None
        self._changed: Callable[[str], None] = lambda _: None
        # Seeds layers one by one, so that they start alike however they are shared out; None leaves that as it is.
        self.seed: int | None = None

    def install(self, candidate: Candidate | None, changed: Callable[[str], None] = lambda _: None) -> None:
        """Wraps the constructor; for good, since the process ends with the trial.

        Args:
            candidate: What to build; None builds what the target asks for.
            changed: Called with what differs from the target's own call, as code.
        """
        from deepspeed.runtime.pipe.module import PipelineModule

        self.own, self.fixed, self.partition = (0, ""), "", ""
        self._candidate, self._changed = candidate, changed
        patch(PipelineModule, "__init__", self._build)

    def _build(self, original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
        join()
        bound = inspect.signature(original).bind(module, *args, **kwargs)
        given = bound.arguments
        own = given.get("num_stages"), given.get("partition_method", DEFAULT_PARTITION)
        self.partition = own[1]
        self.fixed = OWN_TOPOLOGY if given.get("topology") is not None else ""
        if self._candidate is not None and not self.fixed:
            given["num_stages"] = self._candidate.pipeline_degree
            given["partition_method"] = self.partition = str(dict(self._candidate.config).get(PARTITION) or own[1])
            self._say(own, (given["num_stages"], self.partition))
        seeded = bool(given.get("seed_layers"))
        if self.seed is not None and not seeded:
            given |= {"seed_layers": True, "base_seed": self.seed, "seed_fn": _seed}
        original(*bound.args, **bound.kwargs)
        # Forward passes would seed each layer's dropout again.
        module.seed_layers = seeded
        self.own = own[0] or module.num_stages, own[1]

    def _say(self, own: tuple[Any, Any], now: tuple[Any, Any]) -> None:
        names = ("num_stages", "partition_method")
        if said := [f"{name}={new!r}" for name, old, new in zip(names, own, now, strict=True) if old != new]:
            self._changed(f"Pipeline: `PipelineModule(..., {', '.join(said)})`.")

    def same_parts(self, module: Any) -> bool:
        """Returns whether the target's own partition would have given each stage the same layers."""
        return list(module.parts) == _parts(module, self.own[1], _trainable(module), module.num_stages)

    def facts(self, module: Any) -> Pipeline:
        """Returns what the stages of a module can be; it changes no random numbers."""
        own_stages, own_partition = self.own
        counts, classes = _trainable(module), _classes(module)
        ways = [own_partition, "uniform", "parameters"]
        ways += [f"type:{name}" for name, n in Counter(classes).items() if n > 1]
        unfit = {}
        for partition in dict.fromkeys(ways):
            for stages in range(2, min(len(counts), MOST_STAGES) + 1):
                parts = _parts(module, partition, counts, stages)
                if why := _why_unfit(parts, counts):
                    unfit[Pipeline.key(stages, partition)] = f"{stages} stages by {partition}: {why}"
        return Pipeline(
            stages=own_stages, partition=own_partition, partitions=tuple(dict.fromkeys(ways)), unfit=unfit,
            fixed=self.fixed, dynamic=bool(getattr(module, "dynamic_shape", False)),
        )  # fmt: skip


def join() -> None:
    """Lets DeepSpeed know of the group of ranks; makes one of this process alone where a model is looked at without others."""
    import deepspeed

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)


def _seed(seed: Any) -> None:
    """Seeds the generators of Python and torch; DeepSpeed's own function gives them a type that Python 3.11 refuses."""
    random.seed(int(seed))
    torch.manual_seed(int(seed))


def _trainable(module: Any) -> list[int]:
    """Returns the trainable parameters of each layer, which DeepSpeed builds to count them."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return [int(n) for n in module._count_layer_params()]
        except Exception:  # a layer reads values while it is built
            return [int(n) for n in module._count_layer_params()]


def _classes(module: Any) -> list[str]:
    """Returns the class of each layer that is a module."""
    built = (getattr(layer, "typename", type(layer)) for layer in module._layer_specs)
    return [each.__name__ for each in built if isinstance(each, type) and issubclass(each, torch.nn.Module)]


def _parts(module: Any, partition: str, counts: list[int], stages: int) -> list[int]:
    """Returns the first layer of each stage, and the end, as `PipelineModule` shares them out."""
    from deepspeed.runtime import utils

    way = partition.lower()
    if way == "uniform":
        return list(utils.partition_uniform(num_items=len(counts), num_parts=stages))
    weights = counts
    if way.startswith("type:"):
        chosen = set(module._find_layer_type(way.partition(":")[2]))
        weights = [int(i in chosen) for i in range(len(counts))]
    return list(utils.partition_balanced(weights=weights, num_parts=stages))


def _why_unfit(parts: list[int], counts: list[int]) -> str:
    for stage, (first, end) in enumerate(itertools.pairwise(parts)):
        if not sum(counts[first:end]):
            return f"stage {stage} would have nothing to train"
    return ""


# Of this process, which trains one engine.
stages = Stages()
