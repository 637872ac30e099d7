"""Which candidates cannot run, or can have no effect, on a machine, with the reason."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from autotune.space.candidate import Candidate
from autotune.space.data_rules import DATA_RULES
from autotune.space.deepspeed import (
    DTYPES,
    LOSSY_SINCE,
    LOSSY_STAGES,
    RETIRED_KEYS,
    RETIRED_SINCE,
    ZERO,
    Scalar,
    at_path,
    ops_needed,
)
from autotune.space.degree import DEGREES, EXPERTS_SPLIT, PIPELINE_DEGREE, REPLICA_DEGREES, TENSOR_DEGREE
from autotune.space.degree_rules import DEGREE_RULES, HPZ, QGZ, QUANTISED, base_stage, hpz, why_unfit, why_unlike
from autotune.space.ineffective import NO_EFFECT, STAGE_3, STAGES_1_AND_2, UNREAD_BY_BF16_OPTIMIZER, why_no_effect
from autotune.space.rule import Rule, Setting, older, range_words
from autotune.space.torch_settings import TF32

INHERITED_PATHS = (
    "data_types.grad_accum_dtype", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory",
    "optimizer.type", "optimizer.params.torch_adam", "zero_optimization.stage", *DEGREES, EXPERTS_SPLIT, *QUANTISED,
    # Only forecasts look at these.
    "communication_data_type", "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients", "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold", "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance", "zero_optimization.sub_group_size", HPZ,
    "prescale_gradients", "gradient_predivide_factor", "zero_optimization.reduce_scatter", "gradient_allreduce_op",
    "gradient_clipping",
)  # fmt: skip


def inherited_settings(base: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
    """The settings of a DeepSpeed configuration that legality and forecasts depend on, as `Setting.base` takes them."""
    found = {path: at_path(base, path) for path in INHERITED_PATHS}
    return tuple((path, value) for path, value in found.items() if value not in (None, "auto"))


def merged_passes(candidate: Candidate, setting: Setting) -> int:
    """Returns the backward passes that DeepSpeed takes for the last of a step, where it keeps the gradients of one alone; else 1."""
    if candidate.zero_stage not in LOSSY_STAGES or older(setting, *LOSSY_SINCE):
        return 1
    return max(1, setting.passes * (candidate.gradient_accumulation_steps if setting.counts_itself else 1))


def heeded(candidate: Candidate, setting: Setting) -> tuple[str, ...]:
    """Returns what the script changes itself that DeepSpeed heeds: from ZeRO 1 on, and for weights in 16 bits, it has copies elsewhere."""
    heeds = {
        "gradients": candidate.zero_stage == 0,
        "weights": candidate.zero_stage == 0 and candidate.precision not in DTYPES,
    }
    return tuple(what for what in setting.by_hand if heeds[what])


BATCH = ("micro_batch_size", "gradient_accumulation_steps", *REPLICA_DEGREES)
MASTER_WEIGHTS = "bf16.bf16_master_weights_and_grads"
FP16_MASTER_WEIGHTS = "fp16.fp16_master_weights_and_grads"
OPTIMIZER_STATES = "bf16.bf16_optimizer_states"
GRAD_ACCUM_DTYPE = "data_types.grad_accum_dtype"
GRANULARITY = f"{ZERO}stage3_module_granularity_threshold"
NVME_PATHS = {name: f"{ZERO}{name}.nvme_path" for name in ("offload_optimizer", "offload_param")}


OPTIMIZER = ("optimizer.type", "optimizer.params.torch_adam")
_TORCH_ADAM = "; or let torch's Adam do it: optimizer.params.torch_adam: true"
# DeepSpeed's compiled ops that candidates may need, and what else would do.
OPS = {"fused_adam": _TORCH_ADAM, "cpu_adam": _TORCH_ADAM} | dict.fromkeys(
    ("fused_lamb", "fused_lion", "cpu_lion", "cpu_adagrad", "async_io", "quantizer"), ""
)


def _lacks_op(op: str, candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    if op not in dict(setting.missing_ops):
        return False
    held = dict(setting.base) | {path: config.get(path) for path in QUANTISED} | dict(config)
    held |= {f"{ZERO}{name}.device": getattr(candidate, name) for name in NVME_PATHS}
    return op in ops_needed(held.get)


TIMERS = "timers."
MESSAGES = tuple(f"{ZERO}{name}" for name in ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size"))


def _alone(setting: Setting, ranks_per_replica: int = 1) -> bool:
    return setting.world_size <= ranks_per_replica and setting.accelerator != "cpu"


def _offloads(candidate: Candidate) -> bool:
    return {candidate.offload_optimizer, candidate.offload_param} != {"none"}


OP_RULES = tuple(
    Rule(
        partial(_lacks_op, op),
        f"needs DeepSpeed's {op}, which cannot be built: {{missing_{op}}}{otherwise}",
        ("offload_optimizer", "offload_param", "zero_stage", *QUANTISED, *OPTIMIZER),
    )
    for op, otherwise in OPS.items()
)


def _reads(name: str) -> str:
    """A path, or a section, as a rule names what it reads."""
    return f"{name}*" if name.endswith(".") else name


def _ineffective(candidate: Candidate) -> list[str]:
    """Why settings of a candidate cannot have an effect, each with its path."""
    return [f"{path} has no effect: {why}" for path, _ in candidate.config if (why := why_no_effect(path))]


def _of_other_stages(candidate: Candidate) -> list[str]:
    """Settings of a candidate that ZeRO reads at other stages than its own alone."""
    paths = [path for path, _ in candidate.config]
    if candidate.zero_stage == 3:
        return [path for path in paths if path in STAGES_1_AND_2]
    return [path for path in paths if path.startswith(STAGE_3)]


def _unread_in_bf16(candidate: Candidate) -> list[str]:
    """Settings of a candidate that BF16_Optimizer does not read, and that ask for something."""
    unread = UNREAD_BY_BF16_OPTIMIZER
    return [path for path, value in candidate.config if path in unread and value != unread[path]]


def _retired(candidate: Candidate, setting: Setting) -> list[str]:
    """Settings of a candidate that the installed DeepSpeed no longer takes."""
    since = not older(setting, *RETIRED_SINCE)
    return [path for path, _ in candidate.config if since and path.partition(".")[0] in RETIRED_KEYS]


OFFLOAD_PATHS = {f"{ZERO}{name}.": name for name in ("offload_optimizer", "offload_param")}
PINNED = tuple(f"{path}pin_memory" for path in OFFLOAD_PATHS)
WIRE, REDUCED_BY = "communication_data_type", "gradient_allreduce_op"
RATIO, GRAD_NORM = f"{ZERO}offload_optimizer.ratio", f"{ZERO}compute_grad_norm"


def _held(path: str, config: Mapping[str, Scalar], setting: Setting) -> Scalar:
    """The value that a candidate has, or its user's configuration, whose sections are kept."""
    return {**dict(setting.base), **config}.get(path)


def _lacks_own_adam(config: Mapping[str, Scalar], setting: Setting) -> bool:
    return bool(setting.own_optimizer or _held("optimizer.params.torch_adam", config, setting))


def _travel_in_fp16(candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    """Whether all gradients of a candidate travel in fp16; under autocast each has the type of its layer."""
    stated = _held(WIRE, config, setting) or candidate.precision
    return not candidate.precision.startswith("torch_autocast") and str(stated).lower() == "fp16"


SCALED_EARLY = ("prescale_gradients", "gradient_predivide_factor")


def _scattered_early(config: Mapping[str, Scalar], setting: Setting) -> bool:
    """Whether gradients are divided before they are reduced, and scattered."""
    prescaled, factor, scatters = (_held(path, config, setting) for path in (*SCALED_EARLY, f"{ZERO}reduce_scatter"))
    return (bool(prescaled) or factor not in (None, 1)) and scatters is not False


# Each rule was met as a failed (or silently useless) run; see docs/decisions/0002-legality.md.
RULES: tuple[Rule, ...] = (
    *DEGREE_RULES,
    Rule(lambda c, k, s: c.precision in ("fp16", "torch_autocast_fp16") and not s.fp16,
         "{precision}: this device has no fp16 training in DeepSpeed; use bf16 or torch_autocast", ("precision",)),
    Rule(lambda c, k, s: k.get(TF32) is True and not s.tf32,
         f"{TF32}: this device has no TensorFloat-32; NVIDIA's have from compute capability 8.0 on", (TF32,)),
    Rule(lambda c, k, s: k.get(TF32) is not None and c.precision != "fp32",
         f"{TF32} acts on products of fp32 matrices, and precision {{precision}} makes none", ("precision", TF32)),
    Rule(lambda c, k, s: c.precision in ("bf16", "torch_autocast") and not s.bf16,
         "{precision}: this device does not compute in bfloat16", ("precision",)),
    Rule(lambda c, k, s: c.precision in s.unsafe_precisions,
         "{precision}: trials failed as the model mixes types; torch_autocast computes in 16 bits over fp32 weights",
         ("precision",)),
    Rule(lambda c, k, s: c.checkpoint_every > 0 and s.n_blocks == 0,
         "checkpoint_every: the model has no repeated block to checkpoint; name them in `blocks`",
         ("checkpoint_every",)),
    Rule(lambda c, k, s: c.checkpoint_every > max(s.n_blocks, 1),
         "checkpoint_every={checkpoint_every}: the model has only {n_blocks} blocks", ("checkpoint_every",)),
    Rule(lambda c, k, s: s.n_samples is not None and c.global_batch_size(s.world_size) > s.n_samples,
         "global batch {batch}: the data set has only {n_samples} samples", BATCH),
    Rule(lambda c, k, s: s.global_batch is not None
         and not s.global_batch[0] <= c.global_batch_size(s.world_size) <= s.global_batch[1],
         "global batch {batch}: the study keeps to {global_batch}", BATCH),
    Rule(lambda c, k, s: s.only_micro_batch not in (0, c.micro_batch_size),
         "micro-batch {micro_batch_size}: the loss depends on the micro-batch, and is the baseline's with {only_micro_batch} alone",
         ("micro_batch_size",)),
    Rule(lambda c, k, s: c.zero_stage == 0 and s.plain_backward,
         "ZeRO stage 0: DeepSpeed refuses loss.backward() there, torch.autograd.grad of the engine's output, and a backward pass from"
         " another engine; call engine.backward(loss) alone",
         ("zero_stage",)),
    Rule(lambda c, k, s: c.zero_stage > 0 and s.sparse != "",
         "ZeRO stage {zero_stage}: DeepSpeed joins gradients there, and those of {sparse} are sparse; use 0, or sparse=False",
         ("zero_stage",)),
    Rule(lambda c, k, s: c.precision in ("fp16", "torch_autocast_fp16") and s.plain_backward and not s.scales,
         "{precision}: DeepSpeed scales the loss, and refuses loss.backward(), torch.autograd.grad of the engine's output, and a"
         " backward pass from another engine without that; call engine.backward(loss) alone, or engine.scale(loss).backward()",
         ("precision",)),
    Rule(lambda c, k, s: merged_passes(c, s) != s.merged_passes,
         "ZeRO stage {zero_stage}: the script goes backward several times before the step() that updates"
         " the weights, where DeepSpeed's stages 1 and 2 lose gradients, so it would not train as the baseline does",
         ("zero_stage", "gradient_accumulation_steps")),
    Rule(lambda c, k, s: c.zero_stage > 1 and s.unsynced,
         "ZeRO stage {zero_stage}: DeepSpeed refuses `engine.no_sync()` there, in which the script adds up gradients",
         ("zero_stage",)),
    Rule(lambda c, k, s: heeded(c, s) != s.heeded,
         "ZeRO stage {zero_stage}, {precision}: what the script changes itself of gradients or weights takes effect at ZeRO 0 alone"
         " (of weights without 16-bit ones), so it would not train as the baseline does",
         ("zero_stage", "precision")),
    Rule(lambda c, k, s: c.zero_stage > 1 and s.pipeline_stages > 0,
         "ZeRO stage {zero_stage}: DeepSpeed refuses it with a PipelineModule, which splits the model; use 0 or 1",
         ("zero_stage",)),
    Rule(lambda c, k, s: s.pipeline_stages > 0 and c.checkpoint_every > 0 and c.precision.startswith("torch_autocast"),
         "{precision}: a PipelineModule recomputes layers outside of autocast, where they meet other types; use bf16",
         ("checkpoint_every", "precision")),
    Rule(lambda c, k, s: c.offload_optimizer != "none" and c.zero_stage == 0,
         "offload_optimizer needs ZeRO stage 1 or more", ("offload_optimizer", "zero_stage")),
    Rule(lambda c, k, s: c.offload_param != "none" and c.zero_stage != 3,
         "offload_param needs ZeRO stage 3", ("offload_param", "zero_stage")),
    Rule(lambda c, k, s: s.accelerator == "cpu" and {c.offload_optimizer, c.offload_param} != {"none"},
         "offload: on a CPU the host memory is the device memory, so there is nothing to move",
         ("offload_optimizer", "offload_param")),
    Rule(lambda c, k, s: c.offload_optimizer == "nvme" and c.zero_stage in (1, 2),
         "offload_optimizer to nvme needs ZeRO stage 3; at stage {zero_stage} DeepSpeed moves the states to the host instead",
         ("offload_optimizer", "zero_stage")),
    Rule(lambda c, k, s: any(getattr(c, name) == "nvme" and not k.get(path) for name, path in NVME_PATHS.items()),
         "offload to nvme needs its nvme_path in the base config", (*NVME_PATHS, "zero_stage", *NVME_PATHS.values())),
    Rule(lambda c, k, s: k.get(f"{ZERO}overlap_comm") is True and s.accelerator == "cpu",
         "overlap_comm: a CPU has no streams, so nothing can overlap", (f"{ZERO}overlap_comm",)),
    Rule(lambda c, k, s: c.zero_stage == 0 and any(name.startswith(ZERO) for name in dict(c.config)),
         "zero_optimization settings have no effect at ZeRO stage 0", ("zero_stage", f"{ZERO}*")),
    Rule(lambda c, k, s: c.zero_stage != 3 and bool(_of_other_stages(c)),
         "{of_other_stages}: only ZeRO stage 3 reads it", ("zero_stage", *(f"{name}*" for name in STAGE_3))),
    Rule(lambda c, k, s: c.zero_stage == 3 and bool(_of_other_stages(c)),
         "{of_other_stages}: ZeRO stage 3 does not read it", ("zero_stage", *sorted(STAGES_1_AND_2))),
    Rule(lambda c, k, s: any(getattr(c, of) == "none" and any(name.startswith(at) for name, _ in c.config)
                             for at, of in OFFLOAD_PATHS.items()),
         "settings of an offload have no effect without it", (*OFFLOAD_PATHS.values(), *map(_reads, OFFLOAD_PATHS))),
    Rule(lambda c, k, s: s.pins and any(k.get(path) is True and dict(s.base).get(path) is not False for path in PINNED),
         "pin_memory: DeepSpeed {deepspeed_version} pins what it offloads anyway", PINNED),
    Rule(lambda c, k, s: k.get(f"{ZERO}contiguous_gradients") is False and c.zero_stage < 3 and c.offload_optimizer != "none",
         "contiguous_gradients: with an offloaded optimizer DeepSpeed keeps them contiguous all the same",
         ("zero_stage", "offload_optimizer", f"{ZERO}contiguous_gradients")),
    Rule(lambda c, k, s: c.zero_stage > 1 and _scattered_early(k, s),
         "ZeRO stage {zero_stage} scatters gradients, and DeepSpeed then refuses prescale_gradients and another gradient_predivide_factor"
         " than 1; leave them out, or state zero_optimization.reduce_scatter: false",
         ("zero_stage", f"{ZERO}reduce_scatter", *SCALED_EARLY)),
    Rule(lambda c, k, s: k.get(RATIO) not in (None, 1) and _lacks_own_adam(k, s),
         "offload_optimizer.ratio below 1 needs DeepSpeed's own Adam; take optimizer.params.torch_adam, or the target's optimizer, away",
         (RATIO, *OPTIMIZER)),
    Rule(lambda c, k, s: c.zero_stage == 3 and str(_held(REDUCED_BY, k, s)).lower() == "sum",
         "ZeRO stage 3: DeepSpeed refuses gradient_allreduce_op sum there; use stage 0, 1 or 2", ("zero_stage", REDUCED_BY)),
    Rule(lambda c, k, s: c.zero_stage == 3 and str(_held("optimizer.type", k, s)).lower() == "muon"
         and _held(f"{ZERO}reduce_scatter", k, s) is not False,
         "ZeRO stage 3: DeepSpeed refuses Muon where gradients are scattered; state zero_optimization.reduce_scatter: false",
         ("zero_stage", f"{ZERO}reduce_scatter", *OPTIMIZER)),
    Rule(lambda c, k, s: k.get(GRAD_NORM) is False and (_held("gradient_clipping", k, s) != 0 or c.offload_optimizer != "none"),
         "compute_grad_norm false: DeepSpeed refuses it with gradient clipping, which is on by default, and with an offloaded optimizer;"
         " state gradient_clipping: 0", (GRAD_NORM, "gradient_clipping", "offload_optimizer")),
    Rule(lambda c, k, s: k.get(f"{ZERO}overlap_comm") is True and s.pipeline_stages > 0,
         "overlap_comm: DeepSpeed turns it off with a PipelineModule", (f"{ZERO}overlap_comm",)),
    Rule(lambda c, k, s: "nvme" not in (c.offload_optimizer, c.offload_param)
         and any(name.startswith("aio.") for name, _ in c.config),
         "aio settings have no effect without offload to nvme", ("offload_optimizer", "offload_param", "aio.*")),
    Rule(lambda c, k, s: bool(k.get(GRANULARITY)),
         "stage3_module_granularity_threshold fails with a shape error in DeepSpeed", (GRANULARITY,)),
    Rule(lambda c, k, s: any(name.startswith("bf16.") for name in k) and c.precision != "bf16",
         "bf16 settings need precision bf16", ("precision", "bf16.*")),
    Rule(lambda c, k, s: any(name.startswith("fp16.") for name in k) and c.precision != "fp16",
         "fp16 settings need precision fp16", ("precision", "fp16.*")),
    Rule(lambda c, k, s: bool(k.get(MASTER_WEIGHTS)) and c.zero_stage == 0,
         "bf16 master weights need ZeRO stage 1, 2 or 3", ("zero_stage", "precision", MASTER_WEIGHTS)),
    Rule(lambda c, k, s: bool(k.get(OPTIMIZER_STATES)) and not k.get(MASTER_WEIGHTS),
         "bf16_optimizer_states needs bf16_master_weights_and_grads", ("precision", MASTER_WEIGHTS, OPTIMIZER_STATES)),
    Rule(lambda c, k, s: bool(k.get(MASTER_WEIGHTS)) and not k.get(OPTIMIZER_STATES) and c.offload_optimizer != "cpu",
         "bf16 master weights without bf16 optimizer states need the optimizer offloaded to the CPU",
         ("offload_optimizer", "precision", MASTER_WEIGHTS, OPTIMIZER_STATES)),
    Rule(lambda c, k, s: bool(k.get(FP16_MASTER_WEIGHTS)) and c.offload_optimizer == "none",
         "fp16 master weights need the optimizer offloaded to the CPU", ("offload_optimizer", "precision", FP16_MASTER_WEIGHTS)),
    Rule(lambda c, k, s: bool(k.get(MASTER_WEIGHTS) or k.get(FP16_MASTER_WEIGHTS)) and c.offload_optimizer != "none"
         and _lacks_own_adam(k, s),
         "{precision} master weights with an offloaded optimizer need DeepSpeed's own Adam; take optimizer.params.torch_adam, or the"
         " target's optimizer, away", ("offload_optimizer", "precision", MASTER_WEIGHTS, FP16_MASTER_WEIGHTS, *OPTIMIZER)),
    Rule(lambda c, k, s: k.get(GRAD_ACCUM_DTYPE) is not None and c.precision not in DTYPES,
         "grad_accum_dtype has an effect only with precision bf16 or fp16", ("precision", GRAD_ACCUM_DTYPE)),
    Rule(lambda c, k, s: k.get(GRAD_ACCUM_DTYPE) == "fp32" and c.zero_stage == 0,
         "grad_accum_dtype fp32 with 16-bit weights is not implemented at ZeRO stage 0",
         ("zero_stage", "precision", GRAD_ACCUM_DTYPE)),
    Rule(lambda c, k, s: k.get(GRAD_ACCUM_DTYPE) is not None and bool(k.get(MASTER_WEIGHTS)),
         "grad_accum_dtype contradicts bf16 master weights and gradients",
         ("precision", GRAD_ACCUM_DTYPE, MASTER_WEIGHTS)),
    Rule(lambda c, k, s: c.zero_stage == 1 and c.precision == "bf16" and c.offload_optimizer == "none"
         and k.get(GRAD_ACCUM_DTYPE) == "fp32" and bool(_unread_in_bf16(c)),
         "{unread_in_bf16}: DeepSpeed's optimizer of ZeRO stage 1 in bf16 does not read it where grad_accum_dtype is fp32",
         ("zero_stage", "precision", "offload_optimizer", GRAD_ACCUM_DTYPE, *UNREAD_BY_BF16_OPTIMIZER)),
    Rule(lambda c, k, s: k.get("communication_data_type") is not None and s.world_size == 1,
         "communication_data_type: one rank communicates nothing", ("communication_data_type",)),
    Rule(lambda c, k, s: k.get("communication_data_type") is not None and c.zero_stage > 0 and c.precision.startswith("torch_autocast"),
         "communication_data_type: under {precision} ZeRO sends each gradient in the type of its layer, and does not read it",
         ("communication_data_type", "precision", "zero_stage")),
    Rule(lambda c, k, s: k.get("communication_data_type") == "fp16" and not s.fp16 and s.accelerator != "cpu",
         "communication_data_type fp16: no fp16 on this device", ("communication_data_type",)),
    # On a CPU a study of one rank tries out what more ranks will do; on a device it is the training itself.
    Rule(lambda c, k, s: _alone(s, c.tensor_degree * c.pipeline_degree) and c.zero_stage > 1 and not _offloads(c)
         and c.zero_stage != base_stage(s),
         "ZeRO stage {zero_stage}: one rank has nothing to share out, so it only costs time; use 0 or 1, or offload",
         ("zero_stage", "offload_optimizer", "offload_param", TENSOR_DEGREE, PIPELINE_DEGREE)),
    # In 16 bits stage 1 keeps gradients in another type than stage 0, which memory shows.
    Rule(lambda c, k, s: _alone(s, c.tensor_degree * c.pipeline_degree) and c.zero_stage == 1 and c.precision in ("fp32", "torch_autocast")
         and not _offloads(c) and c.zero_stage != base_stage(s),
         "ZeRO stage 1: one rank has no states to share out, so in {precision} it is stage 0 with a copy; use 0, or offload",
         ("zero_stage", "precision", "offload_optimizer", "offload_param", TENSOR_DEGREE, PIPELINE_DEGREE)),
    Rule(lambda c, k, s: _alone(s) and not _offloads(c) and any(name in k for name in MESSAGES),
         "one rank sends no messages, so neither their overlap nor their size matters",
         ("zero_stage", "offload_optimizer", "offload_param", *MESSAGES)),
    Rule(lambda c, k, s: any(k.get(path) for path in QUANTISED) and s.accelerator != "cuda",
         "ZeRO++ quantisation needs a CUDA op of DeepSpeed", ("zero_stage", *QUANTISED)),
    Rule(lambda c, k, s: bool(dict(c.config).get(QGZ)) and s.world_size <= s.ranks_per_node,
         "zero_quantized_gradients has no effect on one node", (QGZ,)),
    # all_to_all_quant_reduce (runtime/comm/coalesced_collectives.py) hands any gradient to `ds_swizzle_quant`, which reads fp16
    # (csrc/quantization/pt_binding.cpp); for weights CUDAQuantizer casts.
    Rule(lambda c, k, s: bool(k.get(QGZ)) and s.world_size > s.ranks_per_node and not _travel_in_fp16(c, k, s),
         "zero_quantized_gradients: DeepSpeed's kernel takes the bits of every gradient for fp16, which ruins other types; use"
         " precision fp16, or communication_data_type fp16 with fp32 or bf16", ("zero_stage", QGZ, "precision", WIRE)),
    Rule(lambda c, k, s: c.zero_stage == 3 and c.precision.startswith("torch_autocast")
         and bool(k.get(f"{ZERO}zero_quantized_weights")),
         "{precision}: DeepSpeed refuses zero_quantized_weights under it; use bf16 or fp16",
         (f"{ZERO}zero_quantized_weights", "precision", "zero_stage")),
    Rule(lambda c, k, s: bool(k.get(QGZ)) and s.world_size > s.ranks_per_node and s.idle_devices > 0,
         "zero_quantized_gradients: DeepSpeed takes each visible device for a rank (coalesced_collectives.py), and {idle_devices} of a"
         " machine have none: leave those out by CUDA_VISIBLE_DEVICES", ("zero_stage", QGZ)),
    # DeepSpeed takes a larger one for all ranks (utils/groups.py), so that of a user's configuration does no harm.
    Rule(lambda c, k, s: hpz(dict(c.config)) >= max(2, s.world_size) or s.world_size % min(hpz(k), s.world_size) != 0,
         "zero_hpz_partition_size must divide the {world_size} ranks and be smaller", ("zero_stage", HPZ)),
    # It asks torch for the second copy on a device "nvme" (zero/partition_parameters.py, `_partition_param_sec`).
    Rule(lambda c, k, s: hpz(k) > 1 and c.offload_param == "nvme",
         "zero_hpz_partition_size: DeepSpeed cannot make its second copy of parameters on nvme; offload them to the CPU, or not",
         ("zero_stage", HPZ, "offload_param")),
    Rule(lambda c, k, s: s.own_optimizer and any(name.startswith("optimizer.params.") for name in k),
         "optimizer.params settings are for an optimizer of the configuration, and the target makes its own: leave them"
         " out of the space, or take the target's away and state one in the base config", ("optimizer.params.*",)),
    Rule(lambda c, k, s: c.precision == "fp16" and c.zero_stage == 0 and not older(s, 0, 18, 3) and older(s, 0, 19, 9),
         "fp16 at ZeRO stage 0: DeepSpeed {deepspeed_version} divides gradients by a loss scale that it never multiplied the loss"
         " with (engine.backward), and that grows until no weight moves; use ZeRO stage 1, 2 or 3, or another precision",
         ("precision", "zero_stage")),
    Rule(lambda c, k, s: c.precision.startswith("torch_autocast") and older(s, 0, 17, 2),
         "{precision} is not in DeepSpeed {deepspeed_version}: it came with 0.17.2", ("precision",)),
    Rule(lambda c, k, s: bool(k.get(MASTER_WEIGHTS) or k.get(OPTIMIZER_STATES)) and older(s, 0, 18, 3),
         "bf16 master weights and optimizer states are ignored by DeepSpeed {deepspeed_version}: they came with 0.18.3",
         ("precision", MASTER_WEIGHTS, OPTIMIZER_STATES)),
    *DATA_RULES,
    *OP_RULES,
    Rule(lambda c, k, s: s.accelerator == "cpu" and any(name.startswith(TIMERS) for name in k),
         f"{TIMERS}* has no effect on a CPU, where DeepSpeed's timer has no device to wait for", (f"{TIMERS}*",)),
    Rule(lambda c, k, s: bool(_ineffective(c)), "{ineffective}", tuple(map(_reads, NO_EFFECT))),
    Rule(lambda c, k, s: bool(_retired(c, s)), "{retired}: no longer taken by DeepSpeed {deepspeed_version}",
         tuple(name for key in sorted(RETIRED_KEYS) for name in (key, f"{key}.*"))),
)  # fmt: skip


def why_illegal(candidate: Candidate, setting: Setting, rules: Iterable[Rule] = RULES) -> str | None:
    """Why a candidate cannot run (or can have no effect) in a setting by some of the rules; None if it can."""
    rule = first_broken(candidate, setting, rules)
    return in_words(rule, candidate, setting) if rule is not None else None


def in_words(rule: Rule, candidate: Candidate, setting: Setting) -> str:
    """The reason of a rule that a candidate breaks, with the candidate's values in it."""
    config = dict(candidate.config)
    partitions = [] if setting.no_stages else [name for name in setting.partitions if name != setting.partition]
    facts = {
        **{field.name: getattr(setting, field.name) for field in fields(setting)},
        **{f"missing_{op}": why for op, why in setting.missing_ops},
        **{f"cannot_{name}": why for name, why in setting.data_cannot},
        **{f"unlike_{path.partition('.')[0]}": why_unlike(candidate, setting, path) for path in DEGREES},
        **candidate.values(),
        "tensor": candidate.tensor_degree,
        "sequence": candidate.sequence_degree,
        "pipeline": candidate.pipeline_degree,
        "expert": candidate.expert_degree,
        "experts_named": " and ".join(map(str, setting.experts)),
        "module_classes_named": ", ".join(setting.module_classes),
        "other_partitions": ", ".join(partitions) or "none",
        "why_unfit": why_unfit(candidate, config, setting),
        "of_other_stages": ", ".join(_of_other_stages(candidate)),
        "unread_in_bf16": ", ".join(_unread_in_bf16(candidate)),
        "ineffective": "; ".join(_ineffective(candidate)),
        "retired": ", ".join(_retired(candidate, setting)),
        "batch": candidate.global_batch_size(setting.world_size),
        "global_batch": range_words(setting.global_batch) if setting.global_batch else "",
    }
    return rule.why.format(**facts)


def first_broken(candidate: Candidate, setting: Setting, rules: Iterable[Rule]) -> Rule | None:
    """The first of some rules that a candidate breaks."""
    config = {**_inherited(candidate, setting), **dict(candidate.config)} if setting.base else dict(candidate.config)
    return next((rule for rule in rules if rule.broken(candidate, config, setting)), None)


def _inherited(candidate: Candidate, setting: Setting) -> dict[str, Scalar]:
    """What of the user's own configuration `to_deepspeed` keeps for a candidate, of what the rules look at."""
    return {
        path: value
        for path, value in setting.base
        if path.startswith(f"{candidate.precision}.")
        or (path.startswith("data_types.") and candidate.precision in DTYPES)
        or (path.endswith("nvme_path") and candidate.zero_stage > 0)
        or (path in (HPZ, *QUANTISED) and candidate.zero_stage == 3)
    }
