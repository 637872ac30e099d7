"""What the rules let through, DeepSpeed really initialises and trains; what they refuse carries a reason."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import MODELS
from support.zoo import Zoo

from autotune.executors import base
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import RETIRED_KEYS
from autotune.space.ineffective import NO_EFFECT
from autotune.space.legality import DATA_RULES, RULES, why_illegal
from autotune.space.parameter import parse_parameters
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.spec import presets
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

SAMPLES = 4000
# Elements of the largest weight of `models/ok.py`: from this threshold on, ZeRO-3 splits none of its parameters.
A_WEIGHT = 2048
BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
# ok.py has four blocks and 2,048 samples.
HERE = Setting(
    world_size=2, ranks_per_node=2, n_blocks=4, n_samples=2048, global_batch=(1, 64), no_tensor="it has no pairs",
    no_sequence="it has no attention", no_experts="it has no mixture",
)  # fmt: skip


CPU = Setting(world_size=2, ranks_per_node=2, n_blocks=4, n_samples=10_000)
ZERO = "zero_optimization."
ONE_GPU = Setting(accelerator="cuda", fp16=True, n_blocks=24)
OWN_ADAM, NVME = (("optimizer.type", "AdamW"),), {"zero_stage": 3, "offload_param": "nvme"}
# Each op of DeepSpeed that may be missing, with a configuration and a candidate that need it.
QUANTISED = ((f"{ZERO}zero_quantized_weights", True),)
NEEDS_OP = [
    ("fused_adam", OWN_ADAM, {"zero_stage": 1}),
    ("cpu_adam", OWN_ADAM, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    ("fused_lamb", (("optimizer.type", "Lamb"),), {}),
    ("fused_lion", (("optimizer.type", "Lion"),), {"zero_stage": 1}),
    ("cpu_lion", (("optimizer.type", "Lion"),), {"zero_stage": 2, "offload_optimizer": "cpu"}),
    ("cpu_adagrad", (("optimizer.type", "Adagrad"),), {"zero_stage": 1, "offload_optimizer": "cpu"}),
    ("async_io", (("zero_optimization.offload_param.nvme_path", "/fast"),), NVME),
    ("quantizer", (), {"zero_stage": 3, f"{ZERO}zero_quantized_weights": True}),
    ("quantizer", (), {"zero_stage": 3, f"{ZERO}zero_quantized_nontrainable_weights": True}),
]
GPUS = Setting(accelerator="cuda", deepspeed_version="0.18.9", world_size=16, ranks_per_node=8, fp16=True, n_blocks=24)
NODE = replace(GPUS, world_size=8)
BF16 = {"precision": "bf16", "zero_stage": 1}
MASTER, STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
FP16_MASTER = "fp16.fp16_master_weights_and_grads"
TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"
STAGES, PARTITION = "pipeline.stages", "pipeline.partition"
LEAVES = f"{ZERO}leaf_module.classes"
LLAMA = replace(CPU, world_size=4, ranks_per_node=4, heads=4, kv_heads=2)
EXPERTS, MIXTURE = "expert_parallel.autoep_size", replace(LLAMA, experts=(4, 6))
LAYERS = replace(
    CPU, world_size=4, ranks_per_node=4, n_blocks=5, pipeline_stages=2, partition="parameters",
    partitions=("parameters", "uniform"),
)  # fmt: skip
ACCUMULATED, WIRE = {"data_types.grad_accum_dtype": "fp32"}, "communication_data_type"
RATIO = f"{ZERO}offload_optimizer.ratio"
OFFLOADED, PIN = {"zero_stage": 2, "offload_optimizer": "cpu"}, f"{ZERO}offload_optimizer.pin_memory"
QGZ_SET, HPZ = ((f"{ZERO}zero_quantized_gradients", True),), f"{ZERO}zero_hpz_partition_size"
QGZ = {"zero_stage": 3, "precision": "fp16", **dict(QGZ_SET)}
ILLEGAL = [
    ({"timers.throughput.synchronized": False}, CPU, "no device to wait for"),
    ({"torch.allow_tf32": True}, Setting(accelerator="cuda"), "has no TensorFloat-32"),
    (
        {"torch.allow_tf32": True, "precision": "bf16"},
        Setting(accelerator="cuda", tf32=True),
        "precision bf16 makes none",
    ),
    ({"precision": "fp16"}, Setting(accelerator="cuda", fp16=True), "never multiplied the loss with"),
    ({"zero_stage": 2, "offload_optimizer": "nvme"}, Setting(accelerator="cuda"), "nvme needs ZeRO stage 3"),
    *(
        (
            {
                "precision": "bf16",
                "zero_stage": 2,
                "offload_optimizer": "cpu",
                "bf16.bf16_master_weights_and_grads": True,
            },
            Setting(accelerator="cuda", **given),
            "need DeepSpeed's own Adam",
        )
        for given in ({"own_optimizer": True}, {"base": (("optimizer.params.torch_adam", True),)})
    ),
    ({TENSOR: 2}, replace(LLAMA, no_degrees="a script feeds its own ranks"), "a script feeds"),
    ({}, replace(LLAMA, no_degrees="a script feeds its own ranks", base=((TENSOR, 2),)), "a script feeds"),
    ({TENSOR: 3}, LLAMA, "does not divide the 4 ranks"),
    ({TENSOR: 2, SEQUENCE: 2}, LLAMA, "the one or the other"),
    ({TENSOR: 2}, replace(LLAMA, ranks_per_node=1), "machines of 1"),
    ({TENSOR: 2}, replace(LLAMA, deepspeed_version="0.16.3"), "0.16.4"),
    ({TENSOR: 4}, replace(LLAMA, heads=6), "6 attention heads do not divide by 4"),
    ({TENSOR: 4}, LLAMA, "2 heads of keys and values do not divide by 4"),
    ({TENSOR: 2}, replace(LLAMA, no_tensor="AutoTP finds no pairs"), "finds no pairs"),
    ({SEQUENCE: 2}, replace(LLAMA, heads=3), "3 attention heads"),
    ({SEQUENCE: 4}, replace(LLAMA, heads=12, kv_heads=6), "6 heads of keys and values and 4 ranks"),
    ({SEQUENCE: 2, "zero_stage": 3}, LLAMA, "1/2 of what it is"),
    ({SEQUENCE: 2}, replace(LLAMA, no_sequence="no attention"), "no attention"),
    ({STAGES: 2}, LLAMA, "no PipelineModule"),
    ({LEAVES: "Other", "zero_stage": 3}, replace(LLAMA, module_classes=("Layer",)), "it has Layer"),
    ({LEAVES: "Layer", "zero_stage": 3}, replace(LLAMA, deepspeed_version="0.17.0"), "0.18.1"),
    ({LEAVES: "Layer", "zero_stage": 2}, LLAMA, "stage 3"),
    ({PARTITION: "uniform"}, LLAMA, "no PipelineModule"),
    ({STAGES: 3}, LAYERS, "a group of 3 ranks does not divide"),
    ({STAGES: 4}, replace(LAYERS, n_blocks=3), "3 layers, too few for 4 stages"),
    ({STAGES: 2, TENSOR: 2}, LAYERS, "beside tensor or sequence groups"),
    ({STAGES: 2, "zero_stage": 2}, LAYERS, "PipelineModule"),
    ({STAGES: 4}, replace(LAYERS, no_stages="its own topology", base=((STAGES, 2),)), "its own topology"),
    ({STAGES: 2, PARTITION: "profile"}, LAYERS, "others that are possible: uniform"),
    ({STAGES: 2, PARTITION: "parameters"}, LAYERS, "so already"),
    ({PARTITION: "uniform"}, LAYERS, "one stage has all layers"),
    (
        {STAGES: 2, PARTITION: "uniform"},
        replace(LAYERS, unfit=((2, "uniform", "stage 1 is empty"),)),
        "stage 1 is empty",
    ),
    ({STAGES: 2}, replace(LAYERS, unfit=((2, "parameters", "stage 1 is empty"),)), "stage 1 is empty"),
    ({STAGES: 2}, replace(LAYERS, unlike=((STAGES, 2, "the loss is 4.9"),)), "the loss is 4.9"),
    ({EXPERTS: 2}, replace(LLAMA, no_experts="the model has no mixture"), "has no mixture"),
    ({EXPERTS: 3}, MIXTURE, "a group of 3 ranks does not divide"),
    ({EXPERTS: 4}, MIXTURE, "the 4 and 6 experts of the model's mixtures do not divide by 4 ranks"),
    ({EXPERTS: 2, TENSOR: 2}, MIXTURE, "not tuned; leave one of them out"),
    ({EXPERTS: 2, "zero_stage": 3, f"{ZERO}zero_hpz_partition_size": 2}, MIXTURE, "ZeRO++ beside expert groups"),
    ({EXPERTS: 2, "zero_stage": 1}, replace(MIXTURE, own_optimizer=True), "no group for experts"),
    ({EXPERTS: 2}, replace(MIXTURE, unlike=((EXPERTS, 2, "the loss is 4.9"),)), "the loss is 4.9"),
    ({"zero_stage": 3}, replace(MIXTURE, own_experts=True), "does not train the expert layers of deepspeed.moe"),
    ({"expert_parallel.enabled": True}, MIXTURE, "follows from the expert degree"),
    ({SEQUENCE: 2, "data.packing": True}, LLAMA, "share a row"),
    ({TENSOR: 2, "zero_stage": 3, f"{ZERO}zero_hpz_partition_size": 2}, LLAMA, "ZeRO++ beside"),
    ({TENSOR: 2}, replace(LLAMA, unlike=((TENSOR, 2, "the loss is 4.9"),)), "the loss is 4.9"),
    ({SEQUENCE: 2}, replace(LLAMA, unlike=((SEQUENCE, 2, "the loss is 4.7"),)), "the loss is 4.7"),
    ({SEQUENCE: 2}, replace(LLAMA, no_degrees="a script feeds its own ranks"), "a script feeds"),
    ({SEQUENCE: 3}, LLAMA, "a group of 3 ranks"),
    ({"precision": "fp16"}, CPU, "fp16"),
    ({"precision": "torch_autocast_fp16"}, CPU, "fp16"),
    ({"precision": "bf16"}, Setting(bf16=False), "bfloat16"),
    ({"precision": "bf16"}, Setting(unsafe_precisions=("bf16",)), "mixes types"),
    ({"zero_stage": 2}, Setting(pipeline_stages=2), "PipelineModule"),
    ({"precision": "torch_autocast", "checkpoint_every": 1}, Setting(pipeline_stages=2, n_blocks=4), "recomputes"),
    ({"checkpoint_every": 1}, Setting(n_blocks=0), "blocks"),
    ({"checkpoint_every": 5}, CPU, "only 4 blocks"),
    ({"optimizer.params.lr": 1e-4}, Setting(own_optimizer=True), "makes its own"),
    ({"micro_batch_size": 64}, Setting(world_size=2, n_samples=100), "only 100 samples"),
    ({"micro_batch_size": 64}, Setting(global_batch=(1, 32)), "keeps to 1..32"),
    ({"offload_optimizer": "cpu"}, GPUS, "stage 1"),
    ({"offload_param": "cpu", "zero_stage": 2}, GPUS, "stage 3"),
    ({"offload_optimizer": "cpu", "zero_stage": 2}, CPU, "nothing to move"),
    ({"offload_optimizer": "nvme", "zero_stage": 3}, GPUS, "nvme_path"),
    ({**OFFLOADED, PIN: True}, replace(GPUS, pins=True), "pins what it offloads anyway"),
    ({**OFFLOADED, f"{ZERO}contiguous_gradients": False}, GPUS, "contiguous all the same"),
    ({f"{ZERO}overlap_comm": True}, GPUS, "stage 0"),
    ({f"{ZERO}overlap_comm": True, "zero_stage": 1}, CPU, "no streams"),
    ({f"{ZERO}stage3_max_live_parameters": 1, "zero_stage": 2}, GPUS, "stage 3"),
    ({f"{ZERO}stage3_module_granularity_threshold": 9, "zero_stage": 3}, GPUS, "granularity"),
    (
        {"precision": "fp16", "zero_stage": 2, FP16_MASTER: True},
        GPUS,
        "fp16 master weights need the optimizer offloaded",
    ),
    ({"precision": "fp16", "zero_stage": 2}, replace(GPUS, base=((FP16_MASTER, True),)), "fp16 master weights need"),
    (
        {"precision": "fp16", **OFFLOADED, FP16_MASTER: True},
        replace(GPUS, own_optimizer=True),
        "need DeepSpeed's own Adam",
    ),
    ({"zero_stage": 3, "prescale_gradients": True}, GPUS, "scatters gradients"),
    ({"zero_stage": 2}, replace(CPU, base=(("gradient_predivide_factor", 2.0),)), "scatters gradients"),
    ({"bf16.immediate_grad_update": True}, GPUS, "precision bf16"),
    ({"fp16.loss_scale": 1}, GPUS, "precision fp16"),
    ({"precision": "bf16", MASTER: True}, GPUS, "stage 1, 2 or 3"),
    ({**BF16, STATES: True}, GPUS, "needs bf16_master"),
    ({**BF16, MASTER: True}, GPUS, "offloaded"),
    ({**BF16, MASTER: True, STATES: True}, replace(CPU, deepspeed_version="0.18.2"), "0.18.3"),
    ({**BF16, MASTER: True, STATES: True, **ACCUMULATED}, CPU, "contradicts"),
    (ACCUMULATED, GPUS, "bf16 or fp16"),
    ({"precision": "bf16", **ACCUMULATED}, GPUS, "stage 0"),
    ({"precision": "bf16"}, Setting(base=tuple(ACCUMULATED.items())), "stage 0"),
    ({**BF16, **ACCUMULATED, f"{ZERO}contiguous_gradients": False}, CPU, "contiguous_gradients: DeepSpeed's optimizer"),
    ({**BF16, f"{ZERO}overlap_comm": True}, replace(GPUS, base=tuple(ACCUMULATED.items())), "grad_accum_dtype is fp32"),
    ({WIRE: "bf16"}, Setting(world_size=1), "one rank"),
    ({"zero_stage": 3}, ONE_GPU, "stage 3: one rank has nothing to share out"),
    ({"zero_stage": 1}, ONE_GPU, "stage 1: one rank has no states to share out"),
    ({"zero_stage": 1, "precision": "bf16", f"{ZERO}overlap_comm": True}, ONE_GPU, "one rank sends no messages"),
    *(
        (
            values,
            replace(ONE_GPU, world_size=8, base=base, missing_ops=((op, "no nvcc"),)),
            f"{op}, which cannot be built: no nvcc",
        )
        for op, base, values in NEEDS_OP
    ),
    (
        {"zero_stage": 3},
        replace(GPUS, base=QUANTISED, missing_ops=(("quantizer", "no nvcc"),)),
        "needs DeepSpeed's quantizer",
    ),
    ({WIRE: "fp16"}, replace(GPUS, fp16=False), "no fp16 on this device"),
    ({f"{ZERO}zero_quantized_weights": True, "zero_stage": 3}, CPU, "CUDA"),
    (QGZ, NODE, "one node"),
    (QGZ, replace(GPUS, idle_devices=4), "4 of a machine have none"),
    ({"zero_stage": 3}, replace(CPU, base=QUANTISED), "CUDA"),
    ({"zero_stage": 3, "precision": "bf16"}, replace(GPUS, base=QGZ_SET), "takes the bits of every gradient for fp16"),
    ({"zero_stage": 3, "precision": "fp16"}, replace(GPUS, base=QGZ_SET, idle_devices=4), "4 of a machine have none"),
    ({"zero_stage": 3, TENSOR: 2}, replace(LLAMA, accelerator="cuda", base=QUANTISED), "ZeRO++ beside"),
    ({"zero_stage": 3}, replace(GPUS, base=((HPZ, 3),)), "16 ranks"),
    ({**QGZ, "precision": "bf16"}, GPUS, "takes the bits of every gradient for fp16"),
    ({**QGZ, "precision": "fp32"}, GPUS, "takes the bits of every gradient for fp16"),
    ({**QGZ, WIRE: "bf16"}, GPUS, "takes the bits of every gradient for fp16"),
    ({**QGZ, "precision": "torch_autocast_fp16"}, GPUS, "takes the bits of every gradient for fp16"),
    (
        {f"{ZERO}zero_quantized_weights": True, "zero_stage": 3, "precision": "torch_autocast"},
        GPUS,
        "refuses zero_quantized_weights under it",
    ),
    (
        {"zero_stage": 3, "precision": "torch_autocast"},
        replace(GPUS, base=QUANTISED),
        "refuses zero_quantized_weights under it",
    ),
    ({WIRE: "bf16", "precision": "torch_autocast", "zero_stage": 1}, GPUS, "in the type of its layer"),
    ({HPZ: 3, "zero_stage": 3}, GPUS, "16 ranks"),
    (
        {f"{ZERO}zero_hpz_partition_size": 2, "zero_stage": 3, "offload_param": "nvme"},
        replace(GPUS, base=((f"{ZERO}offload_param.nvme_path", "/fast"),)),
        "second copy",
    ),
    ({"micro_batch_size": 8}, Setting(only_micro_batch=4), "is the baseline's with 4 alone"),
    ({"zero_stage": 0}, Setting(plain_backward=True), "refuses loss.backward()"),
    ({"zero_stage": 1, "precision": "fp16"}, Setting(plain_backward=True, fp16=True), "scales the loss"),
    ({"zero_stage": 1}, Setting(passes=2), "lose gradients"),
    ({"zero_stage": 2, "gradient_accumulation_steps": 4}, Setting(counts_itself=True), "lose gradients"),
    ({"zero_stage": 3}, Setting(passes=2, merged_passes=2), "not train as the baseline does"),
    ({"zero_stage": 1}, Setting(sparse="Embedding"), "those of Embedding are sparse; use 0"),
    ({"zero_stage": 3}, Setting(unsynced=True), "refuses `engine.no_sync()` there"),
    ({"zero_stage": 1}, Setting(by_hand=("gradients",), heeded=("gradients",)), "takes effect at ZeRO 0 alone"),
    ({"zero_stage": 3}, Setting(own_sequence=2), "the gradient of ranks that split a sequence 1/2 of"),
    ({"zero_stage": 1}, Setting(own_sequence=2, base=(("zero_optimization.stage", 3),)), "does not move to or from it"),
    ({"zero_stage": 0}, Setting(by_hand=("gradients",)), "takes effect at ZeRO 0 alone"),
    ({"precision": "bf16"}, Setting(by_hand=("weights",), heeded=("weights",)), "of weights without 16-bit ones"),
    ({"precision": "torch_autocast"}, Setting(deepspeed_version="0.17.1"), "0.17.2"),
    ({f"{ZERO}sub_group_size": 9, "zero_stage": 2}, GPUS, "sub_group_size: only ZeRO stage 3 reads it"),
    ({**OFFLOADED, RATIO: 0.5}, GPUS, "offload_optimizer.ratio: only ZeRO stage 3 reads it"),
    (
        {**OFFLOADED, "zero_stage": 3, RATIO: 0.5},
        replace(GPUS, own_optimizer=True),
        "ratio below 1 needs DeepSpeed's own Adam",
    ),
    ({"zero_stage": 3, "gradient_allreduce_op": "SUM"}, GPUS, "gradient_allreduce_op sum"),
    ({"zero_stage": 3}, replace(GPUS, base=(("gradient_allreduce_op", "sum"),)), "gradient_allreduce_op sum"),
    ({"zero_stage": 3}, replace(GPUS, base=(("optimizer.type", "Muon"),)), "refuses Muon"),
    ({"zero_stage": 2, f"{ZERO}compute_grad_norm": False}, GPUS, "with gradient clipping, which is on by default"),
    (
        {**OFFLOADED, f"{ZERO}compute_grad_norm": False},
        replace(GPUS, base=(("gradient_clipping", 0.0),)),
        "with an offloaded optimizer",
    ),
    ({"zero_stage": 1, f"{ZERO}overlap_comm": True}, replace(GPUS, pipeline_stages=2), "with a PipelineModule"),
    ({f"{ZERO}round_robin_gradients": True, "zero_stage": 3}, GPUS, "gradients: ZeRO stage 3 does not read it"),
    ({f"{ZERO}offload_optimizer.pin_memory": True, "zero_stage": 2}, GPUS, "no effect without it"),
    ({"aio.block_size": 9}, GPUS, "without offload to nvme"),
    *(({f"{name}x" if name.endswith(".") else name: 1, "zero_stage": 3}, GPUS, why) for name, why in NO_EFFECT.items()),
    *(({name: True}, replace(GPUS, deepspeed_version="0.19.8"), "no longer taken") for name in RETIRED_KEYS),
]
LEGAL = [
    ({**OFFLOADED, "zero_stage": 3, RATIO: 0.5}, GPUS),
    ({"zero_stage": 2, f"{ZERO}compute_grad_norm": False}, replace(GPUS, base=(("gradient_clipping", 0),))),
    ({"zero_stage": 3, f"{ZERO}reduce_scatter": False}, replace(GPUS, base=(("optimizer.type", "muon"),))),
    ({}, CPU),
    ({}, replace(CPU, base=(("timers.throughput.synchronized", False),))),
    ({"timers.throughput.synchronized": False}, GPUS),
    ({TENSOR: 2, "zero_stage": 3}, LLAMA),
    ({STAGES: 2, "zero_stage": 1, PARTITION: "uniform"}, LAYERS),
    ({STAGES: 2}, replace(LAYERS, unfit=((2, "uniform", "stage 1 is empty"),))),
    ({TENSOR: 2}, replace(LLAMA, no_degrees="a script feeds its own ranks", base=((TENSOR, 2),))),
    ({TENSOR: 2}, replace(LLAMA, unlike=((TENSOR, 4, "the loss is 4.9"),))),
    ({"precision": "bf16", "zero_stage": 3, "checkpoint_every": 4}, CPU),
    ({**BF16, MASTER: True, STATES: True}, CPU),
    ({**BF16, **ACCUMULATED, f"{ZERO}reduce_bucket_size": 9, f"{ZERO}contiguous_gradients": True}, CPU),
    ({**BF16, **ACCUMULATED, "zero_stage": 2, f"{ZERO}contiguous_gradients": False}, CPU),
    ({**BF16, **ACCUMULATED, "offload_optimizer": "cpu", f"{ZERO}round_robin_gradients": True}, GPUS),
    ({**OFFLOADED, PIN: True}, GPUS),
    ({**OFFLOADED, PIN: True}, replace(GPUS, pins=True, base=((PIN, False),))),
    ({**OFFLOADED, PIN: False}, replace(GPUS, pins=True)),
    ({**OFFLOADED, "zero_stage": 3, f"{ZERO}contiguous_gradients": False}, GPUS),
    ({"precision": "fp16", **OFFLOADED, FP16_MASTER: True}, GPUS),
    ({"precision": "bf16", "zero_stage": 2}, replace(GPUS, base=((FP16_MASTER, True),))),
    ({"zero_stage": 1, "prescale_gradients": True}, GPUS),
    ({"zero_stage": 3, f"{ZERO}reduce_scatter": False}, replace(CPU, base=(("prescale_gradients", True),))),
    ({"zero_stage": 2}, replace(CPU, base=(("gradient_predivide_factor", 1.0), ("prescale_gradients", False)))),
    ({"precision": "torch_autocast"}, Setting(deepspeed_version="0.17.2")),
    ({WIRE: "fp16"}, CPU),
    ({"precision": "fp16", "zero_stage": 1}, GPUS),
    ({"precision": "fp16"}, replace(GPUS, deepspeed_version="0.18.2")),
    ({"precision": "fp32"}, Setting(base=tuple(ACCUMULATED.items()))),
    ({"zero_stage": 2}, replace(ONE_GPU, base=(("zero_optimization.stage", 2),))),
    ({"zero_stage": 3}, replace(GPUS, own_sequence=2, base=(("zero_optimization.stage", 3),))),
    ({"zero_stage": 2}, replace(GPUS, own_sequence=2, base=(("zero_optimization.stage", 1),))),
    ({"zero_stage": 3, "offload_param": "cpu"}, ONE_GPU),
    *(
        (
            {"zero_stage": 2, "offload_optimizer": "cpu"},
            replace(ONE_GPU, base=base, missing_ops=(("fused_adam", "no nvcc"),)),
        )
        for base in (OWN_ADAM, (*OWN_ADAM, ("optimizer.params.torch_adam", True)))
    ),
    ({"zero_stage": 2}, replace(GPUS, base=QUANTISED, missing_ops=(("quantizer", "no nvcc"),))),
    ({"micro_batch_size": 32}, Setting(global_batch=(32, 32), n_samples=32)),
    ({"micro_batch_size": 4}, Setting(only_micro_batch=4)),
    ({**QGZ, "offload_param": "cpu", "offload_optimizer": "cpu"}, GPUS),
    ({"zero_stage": 3, "precision": "bf16"}, replace(NODE, base=(*QGZ_SET, (HPZ, 8)), idle_devices=4)),
    ({"zero_stage": 1, TENSOR: 2}, replace(LLAMA, base=(*QUANTISED, (HPZ, 3)))),
    (OFFLOADED, replace(GPUS, base=((f"{ZERO}offload_param.nvme_path", "/fast"),))),
    ({**QGZ, "precision": "fp32", WIRE: "fp16"}, GPUS),
    ({**QGZ, "precision": "bf16"}, replace(GPUS, base=((WIRE, "fp16"),))),
    ({f"{ZERO}zero_quantized_weights": True, "zero_stage": 3, "precision": "bf16"}, GPUS),
    ({"zero_stage": 2, "precision": "torch_autocast"}, replace(GPUS, base=QUANTISED)),
    ({WIRE: "bf16", "precision": "torch_autocast"}, GPUS),
]


@pytest.mark.parametrize(("values", "setting", "said"), ILLEGAL)
def test_what_cannot_run_is_refused_with_its_reason(values, setting, said):
    reason = why_illegal(Candidate.of({"micro_batch_size": 1} | values), setting)
    assert reason is not None and said in reason


@pytest.mark.parametrize(("values", "setting"), LEGAL)
def test_what_ran_is_not_refused(values, setting):
    assert why_illegal(Candidate.of({"micro_batch_size": 1} | values), setting) is None


def test_every_rule_is_met_by_a_case_above():
    cases = [(Candidate.of({"micro_batch_size": 1} | values), setting) for values, setting, _ in ILLEGAL]
    others = [rule for rule in RULES if rule not in DATA_RULES]  # tests/space/test_data.py
    assert all(any(rule.broken(c, dict(c.config), setting) for c, setting in cases) for rule in others)


def every_preset() -> SearchSpace:
    parts = []
    for name in presets.presets("search_spaces"):
        if name == "data":  # not DeepSpeed's; the model here can follow little of it: tests/worker/data
            continue
        place, data = presets.load_preset("search_spaces", name, Path(), "test")
        parts.append((place, parse_parameters(data, place)))
    return SearchSpace.compose(parts)


def structure(candidate: Candidate) -> tuple[object, ...]:
    """What DeepSpeed branches on: not how large batches and buckets are, nor which module, that no model here has, is a leaf."""
    plain = {name: value for name, value in candidate.values().items() if name not in ("micro_batch_size",)}
    plain["gradient_accumulation_steps"] = candidate.gradient_accumulation_steps > 1
    plain["checkpoint_every"] = candidate.checkpoint_every > 0
    for name, value in plain.items():
        if name.endswith("_threshold"):
            plain[name] = int(value) >= A_WEIGHT
        elif name.endswith(("_size", ".classes")):
            plain[name] = True
    return tuple(sorted((name, str(value)) for name, value in plain.items()))


@pytest.fixture(scope="module")
def drawn() -> list[Candidate]:
    space, rng = every_preset(), random.Random(0)
    baseline = Candidate(micro_batch_size=8)
    # Each knob uniformly, and not each candidate, so that rare structures are among them.
    chosen = (space.suggest(lambda knob: rng.choice(knob.all_values()), baseline) for _ in range(SAMPLES))
    return [space.candidate(values, baseline) for values in chosen]


def test_every_refusal_has_a_reason(drawn):
    refused = [reason for candidate in drawn if (reason := why_illegal(candidate, HERE)) is not None]
    assert len(refused) > SAMPLES / 10
    assert all(len(reason) > 10 and "{" not in reason for reason in refused)


class Recorder:
    """A candidate that notes which fields are read."""

    def __init__(self, candidate: Candidate, seen: set[str]) -> None:
        self.candidate, self.seen = candidate, seen

    def __getattr__(self, name):
        if name == "global_batch_size":
            return lambda world_size: Candidate.global_batch_size(self, world_size)
        if name == "config":
            return RecordedSettings(dict(self.candidate.config), self.seen).items()
        if isinstance(derived := getattr(Candidate, name, None), property):
            return derived.fget(self)
        if name == "degree":
            return self._degree_at
        self.seen.add(name)
        return getattr(self.candidate, name)

    def _degree_at(self, path: str) -> int:
        self.seen.add(path)
        return self.candidate.degree(path)


class RecordedSettings(dict):
    """DeepSpeed settings that note which paths are read; to walk through them reads all."""

    def __init__(self, settings, seen: set[str]) -> None:
        super().__init__(settings)
        self.seen = seen

    def get(self, name, default=None):
        self.seen.add(name)
        return super().get(name, default)

    def __iter__(self):
        self.seen.add("*")
        return super().__iter__()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why[:40])
def test_a_rule_names_what_it_reads(rule, drawn):
    base = (("bf16.bf16_master_weights_and_grads", True), ("data_types.grad_accum_dtype", "fp32"))
    settings = [
        HERE, replace(HERE, accelerator="cuda", fp16=True, base=base, plain_backward=True, deepspeed_version="0.18.0"),
        replace(HERE, world_size=1, pipeline_stages=2, n_blocks=0, bf16=False, unsafe_precisions=("bf16",)),
    ]  # fmt: skip
    named = {name for name in rule.reads if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in rule.reads if name.endswith("*"))
    seen: set[str] = set()
    for candidate, setting in itertools.product(drawn[:500], settings):
        config = dict(candidate.config)
        broken = rule.broken(Recorder(candidate, seen), RecordedSettings(config, seen), setting)
        if broken and prefixes:  # more of what it reads by prefix does not heal it
            more = {f"{prefix}more": True for prefix in prefixes}
            assert rule.broken(
                replace(candidate, config=tuple({**config, **more}.items())), {**config, **more}, setting
            )
        unread = {path: value for path, value in config.items() if path in named or path.startswith(prefixes)}
        assert rule.broken(replace(candidate, config=tuple(unread.items())), unread, setting) == broken
    assert seen - {"*"} <= named and ("*" not in seen or prefixes)


@pytest.fixture(scope="module")
def kinds(drawn) -> list[Candidate]:
    """Of each structure that is legal one candidate."""
    space, baseline = (
        feasibility.pruned(every_preset(), Candidate(micro_batch_size=8), HERE),
        Candidate(micro_batch_size=8),
    )
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in [*drawn, *space.draw(random.Random(1), baseline, SAMPLES)]:
        if why_illegal(candidate, HERE) is None:
            found.setdefault(structure(candidate), candidate)
    return list(found.values())


def every_pair(kinds: list[Candidate], rng: random.Random) -> list[Candidate]:
    """Few candidates in which any two settings meet that meet in one of the kinds."""
    pairs = {id(kind): set(itertools.combinations(structure(kind), 2)) for kind in kinds}
    left, chosen = set().union(*pairs.values()), []
    while left:
        useful = [kind for kind in kinds if pairs[id(kind)] & left]
        best = max(rng.sample(useful, min(100, len(useful))), key=lambda kind: len(pairs[id(kind)] & left))
        left -= pairs[id(best)]
        chosen.append(best)
    return chosen


def assert_all_train(chosen: list[Candidate], zoo: Zoo) -> None:
    failed = []
    for candidate in chosen:
        request = TrialRequest(
            target=str(MODELS / "ok.py"), candidate=candidate.values(), ds_config=candidate.to_deepspeed(BASE),
            world_size=2, max_steps=2,
        )  # fmt: skip
        result = base.run(zoo.executor, zoo.next_folder().path, request)
        if result.outcome is not Outcome.COMPLETE:
            failed.append((candidate.describe(), str(result.outcome), result.reason))
    assert not failed


@pytest.mark.system
@pytest.mark.smoke
@pytest.mark.timeout(1200)
def test_every_pair_of_settings_that_is_legal_initialises_and_trains(kinds, zoo):
    assert_all_train(every_pair(kinds, random.Random(1)), zoo)


@pytest.mark.system
@pytest.mark.timeout(1200)
def test_every_kind_of_legal_candidate_initialises_and_trains(kinds, zoo):
    assert_all_train(kinds, zoo)
