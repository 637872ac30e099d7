"""Describe a model and its environment as a `Workload`."""

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.errors import UserError
from autotune.system.machine import memory_bytes, n_cores, processor_name
from autotune.trial.request import TrialRequest
from autotune.trial.workload import Environment, Workload
from autotune.worker.containers import n_elements
from autotune.worker.data import samples
from autotune.worker.data.loader import Loader
from autotune.worker.device import accelerator, found_devices, free_bytes, kind
from autotune.worker.measure import experts
from autotune.worker.measure.stages import join
from autotune.worker.model import model_file, staged
from autotune.worker.model.split import splitting
from autotune.worker.rank import versions

# They have no forward of their own, before which their parameters could be gathered.
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def inspect_model(request: TrialRequest) -> Workload:
    """Loads and describes the target of a request, without allocating its weights if the model permits."""
    on_cuda = kind() == "cuda"  # which the user may not want, though it is here
    free = free_bytes(range(torch.cuda.device_count())) if on_cuda else ()  # the model may be made on a device
    target, replaced = model_file.load(Path(request.target), join), list[str]()
    if target.optimizer is not None and "optimizer" in request.ds_config:
        target.optimizer = None
        replaced.append(f"{target.path.name}: optimizer() gives way to the configuration's `optimizer`")
    try:
        with torch.device("meta"):
            model = model_file.build_model(target)
    except UserError:
        raise
    except Exception:  # the model reads values while it is built
        model = model_file.build_model(target)
    blocks = model_file.find_blocks(model, target.blocks)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise model_file.WorkloadError(f"{target.path.name}: model() has no trainable parameter")
    loader = Loader(target, micro_batch_size=1, rank=0, world_size=1, seed=request.seed)
    found = workload_of(model, blocks, n_samples=loader.n_samples, client_optimizer=target.optimizer is not None)
    found = staged.described(found, model) if staged.is_staged(model) else found
    own, rates = _own_optimizer(target, model)
    data = samples.describe(loader.samples(), loader.cannot(model), loader.collate)
    split = splitting(target, model)
    found = with_batch_norm(with_experts(found, model), model)
    found = replace(found, environment=replace(found.environment, free_bytes=free))
    caveats = [*found.caveats, *replaced]
    return replace(found, optimizer=own, learning_rates=rates, data=data, splitting=split, caveats=caveats)


def _own_optimizer(target: model_file.ModelFile, model: torch.nn.Module) -> tuple[str, tuple[float, ...]]:
    """Returns class and learning rates of the target's optimizer; nothing where it has none."""
    if target.optimizer is not None:
        with contextlib.suppress(Exception):  # it reads values, which only trials have
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            made = model_file.make_optimizer(target, trainable)
            return type(made).__name__, tuple(float(group["lr"]) for group in made.param_groups if "lr" in group)
    return "", ()


def workload_of(
    model: torch.nn.Module, blocks: list[torch.nn.Module], *, n_samples: int | None, client_optimizer: bool
) -> Workload:
    """Describes a model that DeepSpeed has not changed yet, for legality and the report."""
    return Workload(
        **shares_of(model, blocks),
        n_samples=n_samples,
        block_class=model_file.classes_of(model, blocks),
        float_buffers=_has_float_buffers(model),
        client_optimizer=client_optimizer,
        environment=_environment(),
        structure=_structure(model),
        module_classes=_module_classes(model),
        sparse=_with_sparse_gradients(model),
        caveats=[] if blocks else ["the model has no repeated block, so activation checkpointing is not tuned"],
    )


def shares_of(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> dict[str, Any]:
    """Returns the fields of a workload, and of a profile, that tell how many parameters train, and are in blocks."""
    sizes = {parameter: n_elements(parameter) for parameter in model.parameters()}
    in_blocks = dict.fromkeys(p for block in blocks for p in block.parameters())
    return {
        "n_parameters": sum(sizes.values()),
        "n_trainable": sum(size for parameter, size in sizes.items() if parameter.requires_grad),
        "n_blocks": len(blocks),
        "block_share": sum(map(n_elements, in_blocks)) / max(1, sum(sizes.values())),
    }


def with_batch_norm(workload: Workload, model: torch.nn.Module) -> Workload:
    """Returns the workload with the layers of its model that normalise by the statistics of a micro-batch as they train.

    They change training with the micro-batch in a way that the first losses of a new model hardly show. Layers that a script
    has frozen by its first steps do not count.
    """
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    names = {type(module).__name__ for module in norms if module.training or not module.track_running_stats}
    if not names:  # none, or frozen ones
        return workload
    found = ", ".join(sorted(names))
    text = (
        f"{found} normalises by the statistics of a micro-batch: each other micro-batch is checked, and none is drop-in"
    )
    return replace(workload, by_micro_batch=found, caveats=[*workload.caveats, text])


def with_experts(workload: Workload, model: torch.nn.Module) -> Workload:
    """Returns the workload with the mixtures of its model, and the parameters of experts that other ranks hold."""
    mixed = experts.facts(model)
    if mixed is None:
        return workload
    elsewhere = round(mixed.parameters * (1 - 1 / experts.degree(model)))
    return replace(
        workload,
        n_parameters=workload.n_parameters + elsewhere,
        n_trainable=workload.n_trainable + elsewhere,
        experts=mixed,
    )


def _module_classes(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the classes of modules within a model that have both parameters and modules of their own."""
    within = (module for module in model.modules() if module is not model and not isinstance(module, CONTAINERS))
    found = (m for m in within if any(True for _ in m.children()) and any(True for _ in m.parameters()))
    return tuple(sorted({type(module).__name__ for module in found}))


def _with_sparse_gradients(model: torch.nn.Module) -> str:
    """Returns the classes of embeddings that are trained by sparse gradients."""
    # A subclass may lack it.
    sparse = (m for m in model.modules() if isinstance(m, EMBEDDINGS) and getattr(m, "sparse", False))
    trained = (m for m in sparse if any(p.requires_grad for p in m.parameters(recurse=False)))
    return ", ".join(sorted({type(module).__name__ for module in trained}))


def _structure(model: torch.nn.Module) -> str:
    """Returns a digest of the classes of modules, and of names, shapes and types of parameters."""
    lines = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        lines.append(f"{name} {shape} {n_elements(parameter)} {parameter.dtype} {parameter.requires_grad}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _has_float_buffers(model: torch.nn.Module) -> bool:
    """Returns whether the model has floating-point buffers that must have the type of its weights.

    Buffers that transformers does not save, such as the frequencies of rotary embeddings, must not: they would be wrong
    in 16 bits, and transformers casts them where it uses them.
    """
    own = any(base.__name__ == "PreTrainedModel" for module in model.modules() for base in type(module).__mro__)
    return any(
        buffer is not None and buffer.is_floating_point() and not (own and name in module._non_persistent_buffers_set)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    )


def _environment() -> Environment:
    from autotune.worker.agent import ops

    devices = found_devices()
    first = devices.each[0] if devices.each else None  # `of_ranks` looks at those of a trial
    return Environment(
        accelerator=devices.accelerator,
        device_name=first.name if first else processor_name(),
        n_devices=len(devices.each) or 1,
        device_memory_bytes=first.memory_bytes if first else memory_bytes(),
        bf16=bool(accelerator().is_bf16_supported()),
        fp16=bool(accelerator().is_fp16_supported()),
        n_cores=n_cores(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        versions=versions(),
        capability=first.capability if first else "",
        each=devices.each,
        missing_ops=ops.missing(),
        remarks=tuple(filter(None, [devices.problem, devices.untested])),
    )
