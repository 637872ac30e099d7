"""What a study knows of degrees before its trials: facts of the model, and a comparison of each split with the whole."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.executors import base
from autotune.executors.base import Executor
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig, at_path
from autotune.space.degree import DEGREES, EXPERT_DEGREE, EXPERTS_SPLIT, TENSOR_DEGREE, degrees_of
from autotune.space.degree_rules import DEGREE_RULES
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.setup import profile_cache
from autotune.study.spec.spec import StudySpec
from autotune.system.machine import memory_bytes
from autotune.system.units import format_bytes
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.workload import Splitting, Workload

# Samples of the batch on which a split model is compared with the whole one.
COMPARED_SAMPLES = 2
# Of each parameter, in fp32 with its gradient, in every rank of a machine; and of its memory, at most.
COMPARED_BYTES, LARGEST_SHARE = 8, 0.5
WHOLE_PHASE = "build"  # of the comparison: the whole model is trained in it
UNCOMPARED = (
    "the split model was not compared with the whole one, which {}: hold the loss of the first steps against a run without"
    " the degree"
)
SCRIPT = (
    "a training script builds its own groups and feeds its own ranks, so its degrees stay as they are: set the degree in"
    " the script (for transformers' Trainer and Accelerate by their parallelism configuration) and tune the rest, or"
    " give autotune the model as a model.py"
)
ONE_SHAPE = (
    "pipeline.stages: samples differ in length, and stages take every micro-batch to have the first one's shape: pad to one"
    " length, or build the PipelineModule with dynamic_shape=True"
)
NO_EXPERTS = (
    "the model has no mixture of experts that DeepSpeed shares out: neither layers of deepspeed.moe, nor those of a"
    " transformers model that its AutoEP knows"
)
# Settings of the base configuration that tell AutoEP and AutoTP what to split.
TOLD_EXPERTS = ("expert_parallel.moe_layer_pattern", "expert_parallel.preset_model")
TOLD = ("tensor_parallel.partition_config", "tensor_parallel.preset_model")


def facts(workload: Workload, base_config: DsConfig, world_size: int) -> dict[str, Any]:
    """Returns the fields of `Setting` that decide over degrees."""
    splitting, pipeline = workload.splitting, _of_pipeline(workload) | _of_experts(workload, base_config)
    if workload.script is not None:
        return {"no_degrees": SCRIPT, "own_sequence": workload.script.sequence_size, **pipeline}
    if splitting is None:
        return pipeline
    told = any(at_path(base_config, path) for path in TOLD)
    why = f"the model's layers cannot be split by DeepSpeed: {splitting.tensor}"
    results = {
        (path, int(degree)): why
        for key, why in splitting.compared.items()
        for path, _, degree in [key.partition(" of ")[0].partition("=")]
        if key == Splitting.key(path, int(degree), world_size, _beside(base_config, path)) and why
    }
    return {
        **pipeline,
        "heads": splitting.heads,
        "kv_heads": splitting.kv_heads,
        "no_tensor": why if splitting.tensor and not told else "",
        "no_sequence": f"the model's sequences cannot be split: {splitting.sequence}" if splitting.sequence else "",
        "unlike": tuple((path, degree, why) for (path, degree), why in results.items()),
    }


def _of_pipeline(workload: Workload) -> dict[str, Any]:
    """Returns the fields of `Setting` that decide over the stages of a pipeline."""
    pipeline = workload.pipeline
    if pipeline is None:
        return {}
    varies = workload.data is not None and workload.data.varies and not pipeline.dynamic and pipeline.stages == 1
    return {
        "pipeline_stages": pipeline.stages,
        "partition": pipeline.partition,
        "partitions": pipeline.partitions,
        "unfit": tuple(
            (int(stages), partition, why)
            for key, why in pipeline.unfit.items()
            for stages, _, partition in [key.partition(" ")]
        ),
        "no_stages": pipeline.fixed or (ONE_SHAPE if varies else ""),
    }


def _of_experts(workload: Workload, base_config: DsConfig) -> dict[str, Any]:
    """Returns the fields of `Setting` that decide over the experts of a mixture."""
    mixed = workload.experts
    told = any(at_path(base_config, path) for path in TOLD_EXPERTS)
    if mixed is None:
        return {"no_experts": "" if told else NO_EXPERTS}
    why = f"the model's experts cannot be shared out: {mixed.why_none}" if mixed.why_none and not told else ""
    return {"experts": mixed.counts, "no_experts": why, "own_experts": mixed.own}


def _beside(base_config: DsConfig, path: str) -> dict[str, Any]:
    """Returns the base configuration's settings in the section of a degree."""
    section = base_config.get(path.partition(".")[0]) if "." in path else None
    own = {each.partition(".")[2] for each in (path, EXPERTS_SPLIT)}
    return {name: value for name, value in (section or {}).items() if name not in own}


def asked(space: SearchSpace, baseline: Candidate) -> list[tuple[str, int]]:
    """Returns the degrees above 1 of a space and of a baseline, by path."""
    found = list(degrees_of(baseline.values().get).items())
    found += [(path, value) for path in DEGREES if path in space for value in _degrees(space[path].all_values())]
    return list(dict.fromkeys(found))


def _degrees(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and value > 1]


def compared(
    spec: StudySpec, executor: Executor, path: Path, workload: Workload, base_config: DsConfig, setting: Setting,
    degrees: Iterable[tuple[str, int]], doing: Callable[[str], None],
) -> Workload:  # fmt: skip
    """Returns the workload with the results of splitting its model; each degree is tried once and then remembered.

    Args:
        degrees: Pairs of a degree's path in the configuration and its value, which is above 1.
        doing: Called with a sentence before each comparison.
    """
    if (splitting := workload.splitting) is None:
        return workload
    place = profile_cache.place_of(spec, setting.world_size, workload)
    key = profile_cache.workload_key(spec.target, "optimizer" in base_config, place.where)
    known = profile_cache.load(Workload, key)
    same = known is not None and known.splitting is not None and known.structure == workload.structure
    results = dict(known.splitting.compared) if same and known is not None and known.splitting is not None else {}
    for name, degree in degrees:
        candidate = Candidate(
            micro_batch_size=min(COMPARED_SAMPLES, workload.n_samples or COMPARED_SAMPLES), zero_stage=1,
            config=((name, degree),),
        )  # fmt: skip
        entry = Splitting.key(name, degree, setting.world_size, _beside(base_config, name))
        if entry in results or why_illegal(candidate, setting, DEGREE_RULES):
            continue
        if takes := _too_large(workload, setting, elsewhere=spec.runs_elsewhere):
            workload = replace(workload, caveats=[*workload.caveats, UNCOMPARED.format(takes)])
            break
        doing(f"comparing the model split over {degree} ranks with the whole one")
        result = _compare(spec, executor, path / f"{name.partition('.')[0]}-{degree}", candidate, base_config, setting)
        # As flash attention does in fp32.
        if result.outcome in (Outcome.CRASHED, Outcome.OOM) and result.phase == WHOLE_PHASE:
            alone = f"fails by itself in fp32 ({result.reason})"
            workload = replace(workload, caveats=[*workload.caveats, UNCOMPARED.format(alone)])
            break
        if (said := _said(result)) is not None:
            results[entry] = said
    workload = replace(workload, splitting=replace(splitting, compared=results))
    if results:
        profile_cache.save(replace(workload, profile=None, machine=None), key)
    return workload


def _too_large(workload: Workload, setting: Setting, *, elsewhere: bool) -> str:
    """Returns what whole models with their gradients take of a machine or a device; empty where there is room, or may be."""
    each, room = COMPARED_BYTES * workload.n_parameters, workload.environment.device_memory_bytes
    if workload.environment.accelerator == "cpu":
        rooms = [("machine", each * setting.ranks_per_node, room)]
    else:
        rooms = [("device", each, room)]
        rooms += [] if elsewhere else [("machine", each * setting.ranks_per_node, memory_bytes())]
    full = next(((what, needed) for what, needed, room in rooms if needed > LARGEST_SHARE * room), None)
    return f"takes {format_bytes(full[1])} of a {full[0]}'s memory" if full else ""


def _compare(
    spec: StudySpec, executor: Executor, path: Path, candidate: Candidate, base_config: DsConfig, setting: Setting
) -> TrialResult:
    told = {
        path.partition(".")[0]: beside
        for path in (TENSOR_DEGREE, EXPERT_DEGREE)
        if (beside := _beside(base_config, path))
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    request = TrialRequest(
        target=str(spec.target), mode="split", candidate=candidate.values(), seed=spec.seed,
        ds_config=candidate.to_deepspeed({"optimizer": optimizer, **told}), world_size=setting.world_size,
        nodes=spec.nodes_for(setting.world_size), deadline_s=spec.trial_deadline_s,
    )  # fmt: skip
    return base.run(executor, path, request)


def _said(result: TrialResult) -> str | None:
    """Returns what speaks against a degree; None where the comparison itself did not fit or end."""
    if result.outcome is Outcome.COMPLETE:
        return ""
    if result.outcome is Outcome.CRASHED:
        return f"split so, the model fails (another release of DeepSpeed or of its library may do it): {result.reason}"
    return result.reason if result.outcome is Outcome.NOT_APPLIED else None
