"""Why degrees are refused: ranks that share a copy of the model, or a sequence."""

from collections.abc import Mapping
from functools import partial

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import ZERO, Scalar
from autotune.space.degree import (
    DEGREES,
    EXPERT_DEGREE,
    EXPERTS_SPLIT,
    PARTITION,
    PIPELINE_DEGREE,
    REPLICA_DEGREES,
    SEQUENCE_DEGREE,
    TENSOR_DEGREE,
    configured_degrees,
)
from autotune.space.rule import Rule, Setting, older

HPZ = f"{ZERO}zero_hpz_partition_size"
QUANTISED = tuple(f"{ZERO}zero_quantized_{name}" for name in ("weights", "gradients", "nontrainable_weights"))
QGZ = f"{ZERO}zero_quantized_gradients"
# Modules whose parameters ZeRO-3 gathers at once, as it must where each step runs other experts of a mixture.
LEAVES = f"{ZERO}leaf_module.classes"


def hpz(config: Mapping[str, Scalar]) -> int:
    """Ranks that share a second copy of the weights; 1 without."""
    value = config.get(HPZ)
    return max(1, value) if isinstance(value, int) else 1


def base_stage(setting: Setting) -> Scalar:
    """The stage of the user's own configuration, which may stand there for more ranks than one."""
    return dict(setting.base).get(f"{ZERO}stage", 0)


def why_unlike(candidate: Candidate, setting: Setting, path: str) -> str:
    """What the split model computed unlike the whole one, where that was found; else empty."""
    own = candidate.degree(path)
    return next((why for name, number, why in setting.unlike if (name, number) == (path, own)), "")


def _is_moved(path: str, candidate: Candidate, _: Mapping[str, Scalar], setting: Setting) -> bool:
    own = configured_degrees(dict(setting.base).get).get(path, 1)
    why = {PIPELINE_DEGREE: setting.no_stages, EXPERT_DEGREE: setting.no_experts}.get(path, setting.no_degrees)
    return bool(why) and candidate.degree(path) != own


def why_unfit(candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> str:
    """Why a stage of a candidate's pipeline would have nothing to train; empty if each has."""
    asked = candidate.pipeline_degree, config.get(PARTITION) or setting.partition
    return next((why for stages, partition, why in setting.unfit if (stages, partition) == asked), "")


def _needs_pipeline(path: str, _: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    return config.get(path) is not None and setting.pipeline_stages == 0


def _lacks_class(name: Scalar, setting: Setting) -> bool:
    return str(name).rpartition(".")[2] not in setting.module_classes


def _does_not_divide(path: str, candidate: Candidate, _: Mapping[str, Scalar], setting: Setting) -> bool:
    return setting.world_size % candidate.degree(path) != 0


def _is_unlike(path: str, candidate: Candidate, _: Mapping[str, Scalar], setting: Setting) -> bool:
    return bool(why_unlike(candidate, setting, path))


# A rule reads one degree where it can, so that a value that no other makes legal is refused for its own reason.
OF_EACH = tuple(
    Rule(partial(broken, path), why, (path,))
    for path, ranks, no in (
        (TENSOR_DEGREE, "{tensor}", "{no_degrees}"),
        (SEQUENCE_DEGREE, "{sequence}", "{no_degrees}"),
        (PIPELINE_DEGREE, "{pipeline}", "{no_stages}"),
        (EXPERT_DEGREE, "{expert}", "{no_experts}"),
    )
    for broken, why in (
        (_is_moved, no),
        (_does_not_divide, f"a group of {ranks} ranks does not divide the {{world_size}} ranks of a trial"),
        (_is_unlike, f"{{unlike_{path.partition('.')[0]}}}"),
    )
)
NO_PIPELINE = "the model is no PipelineModule (deepspeed.pipe), the only kind that DeepSpeed trains in stages"
DEGREE_RULES: tuple[Rule, ...] = (
    *(Rule(partial(_needs_pipeline, path), f"{path}: {NO_PIPELINE}", (path,)) for path in (PIPELINE_DEGREE, PARTITION)),
    *OF_EACH,
    Rule(lambda c, k, s: c.pipeline_degree > 1 and c.pipeline_degree > s.n_blocks,
         "the pipeline has {n_blocks} layers, too few for {pipeline} stages", (PIPELINE_DEGREE,)),
    Rule(lambda c, k, s: c.pipeline_degree > 1 and c.tensor_degree * c.sequence_degree > 1,
         "stages of a pipeline beside tensor or sequence groups: DeepSpeed splits the layers of a PipelineModule no"
         " further; leave one of them out", REPLICA_DEGREES),
    Rule(lambda c, k, s: k.get(PARTITION) is not None and (bool(s.no_stages) or k[PARTITION] not in s.partitions),
         "pipeline.partition: the module's layers are shared out by {partition}; others that are possible:"
         " {other_partitions}", (PARTITION,)),
    Rule(lambda c, k, s: k.get(PARTITION) is not None and k[PARTITION] == s.partition,
         "pipeline.partition: the module shares its layers out so already", (PARTITION,)),
    Rule(lambda c, k, s: k.get(PARTITION) is not None and c.pipeline_degree == 1,
         "pipeline.partition: one stage has all layers", (PARTITION, PIPELINE_DEGREE)),
    Rule(lambda c, k, s: bool(why_unfit(c, k, s)), "{why_unfit}", (PIPELINE_DEGREE, PARTITION)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and c.sequence_degree > 1,
         "tensor and sequence groups at once: DeepSpeed builds the one or the other; leave one of them out", REPLICA_DEGREES),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.ranks_per_node % c.tensor_degree != 0,
         "a tensor group of {tensor} ranks does not fit into machines of {ranks_per_node}: every layer would wait for the"
         " network between them", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and older(s, 0, 16, 4),
         "DeepSpeed {deepspeed_version} trains no split layers: AutoTP for training came with 0.16.4",
         (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.heads % c.tensor_degree != 0,
         "the model's {heads} attention heads do not divide by {tensor} ranks", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.kv_heads % c.tensor_degree != 0,
         "the model's {kv_heads} heads of keys and values do not divide by {tensor} ranks", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and bool(s.no_tensor), "{no_tensor}", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and s.heads % c.sequence_degree != 0,
         "the model's {heads} attention heads do not divide by {sequence} ranks", (SEQUENCE_DEGREE,)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and s.kv_heads % c.sequence_degree != 0
         and c.sequence_degree % (s.kv_heads or 1) != 0,
         "the model's {kv_heads} heads of keys and values and {sequence} ranks do not divide each other",
         (SEQUENCE_DEGREE,)),
    # Its optimizer divides by all ranks that share a gradient, those of a sequence group too.
    Rule(lambda c, k, s: c.sequence_degree > 1 and c.zero_stage == 3,
         "ZeRO stage 3 makes the gradient of a sequence group 1/{sequence} of what it is; use stage 0, 1 or 2",
         (SEQUENCE_DEGREE, "zero_stage")),
    Rule(lambda c, k, s: s.own_sequence > 1 and (c.zero_stage == 3) != (base_stage(s) == 3),
         "ZeRO stage {zero_stage}: stage 3 makes the gradient of ranks that split a sequence 1/{own_sequence} of what it is elsewhere,"
         " so a script that splits its sequences does not move to or from it", ("zero_stage",)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and bool(s.no_sequence), "{no_sequence}", (SEQUENCE_DEGREE,)),
    Rule(lambda c, k, s: c.ranks_per_replica > 1 and (hpz(k) > 1 or any(k.get(path) for path in QUANTISED)),
         "ZeRO++ beside tensor or sequence groups: its groups know nothing of theirs",
         ("zero_stage", *REPLICA_DEGREES, HPZ, *QUANTISED)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and bool(k.get("data.packing")),
         "data.packing: samples that share a row cannot be told apart where sequences are split over ranks",
         (SEQUENCE_DEGREE, "data.packing")),
    Rule(lambda c, k, s: bool(s.module_classes) and bool(k.get(LEAVES)) and _lacks_class(k[LEAVES], s),
         "leaf_module.classes: the model has no module of that class; it has {module_classes_named}", (LEAVES,)),
    Rule(lambda c, k, s: k.get(LEAVES) is not None and older(s, 0, 18, 1),
         "leaf_module is not in DeepSpeed {deepspeed_version}: it came with 0.18.1; call"
         " deepspeed.utils.set_z3_leaf_modules", (LEAVES,)),
    Rule(lambda c, k, s: any(c.expert_degree > 1 and n % c.expert_degree for n in s.experts),
         "the {experts_named} experts of the model's mixtures do not divide by {expert} ranks", (EXPERT_DEGREE,)),
    Rule(lambda c, k, s: c.zero_stage == 3 and s.own_experts,
         "ZeRO stage 3 does not train the expert layers of deepspeed.moe; use stage 0, 1 or 2", ("zero_stage",)),
    Rule(lambda c, k, s: c.expert_degree > 1 and c.ranks_per_replica > 1,
         "expert groups beside tensor, sequence or pipeline groups are not tuned; leave one of them out", DEGREES),
    Rule(lambda c, k, s: c.expert_degree > 1 and (hpz(k) > 1 or any(k.get(path) for path in QUANTISED)),
         "ZeRO++ beside expert groups: DeepSpeed does not train them together",
         ("zero_stage", EXPERT_DEGREE, HPZ, *QUANTISED)),
    # Layers of deepspeed.moe have such a group in any script that trains them under ZeRO.
    Rule(lambda c, k, s: c.expert_degree > 1 and c.zero_stage > 0 and s.own_optimizer and not s.own_experts,
         "the target's own optimizer has no group for experts, which DeepSpeed needs from ZeRO stage 1 on; state an"
         " `optimizer` in the DeepSpeed configuration, or use stage 0", (EXPERT_DEGREE, "zero_stage")),
    Rule(lambda c, k, s: EXPERTS_SPLIT in dict(c.config),
         "expert_parallel.enabled follows from the expert degree; tune `expert_parallel.autoep_size`", (EXPERTS_SPLIT,)),
)  # fmt: skip
