"""The changes of a training script that a configuration needs besides its DeepSpeed JSON, in sentences."""

from autotune.scoring.convergence.learning_rate import LEARNING_RATE_RULES, LearningRate
from autotune.space.candidate import Candidate, every_nth
from autotune.space.degree import PARTITION
from autotune.trial.workload import ACCELERATE, TRAINER

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def script_side_changes(
    candidate: Candidate, baseline: Candidate, block_class: str, *, is_script: bool = False, family: str = ""
) -> list[str]:
    """The changes of the script that a candidate needs besides its DeepSpeed JSON: sentences with code in backticks.

    Args:
        baseline: The configuration of the user's script now.
        block_class: Class of the model's repeated blocks, as the workload names it.
        is_script: The trials ran a training script, and noted themselves what carried the batch and which inputs were
            cast.
        family: The framework of that script, which does some of it by itself.
    """
    found = _batch_changes(candidate, baseline, noted=is_script)
    if not is_script:  # whose degrees stay as they are
        found += _degree_changes(candidate, baseline)
    if candidate.checkpoint_every != baseline.checkpoint_every:
        found.append(_checkpointing(candidate, baseline, block_class or "block", family))
    if candidate.precision != baseline.precision and family != TRAINER:
        found += _precision_changes(candidate.precision, baseline.precision, noted=is_script)
    # A script whose backward DeepSpeed refuses at stage 0 is not tried there.
    if candidate.zero_stage == 0 < baseline.zero_stage and not is_script:
        found.append("Backward: call `engine.backward(loss)`; at stage 0 DeepSpeed refuses `loss.backward()`.")
    if candidate.zero_stage == 3 > baseline.zero_stage and family not in (TRAINER, ACCELERATE):
        found.append(
            "Saving: the ranks hold parts of the weights, so every rank calls `engine.save_checkpoint(...)`;"
            " `state_dict()` is empty."
        )
    return found


def _batch_changes(candidate: Candidate, baseline: Candidate, *, noted: bool) -> list[str]:
    found = []
    micro, steps = candidate.micro_batch_size, candidate.gradient_accumulation_steps
    if micro != baseline.micro_batch_size and not noted:
        found.append(
            f"Micro-batch: the data loader of each rank yields {micro} sample{'s' * (micro > 1)} instead of {baseline.micro_batch_size}:"
            f" `DataLoader(..., batch_size={micro})` (transformers: `--per_device_train_batch_size {micro}`)."
        )
    if steps != baseline.gradient_accumulation_steps and not noted:
        found.append(
            f"Accumulation: DeepSpeed counts {steps} micro-batch{'es' if steps > 1 else ''} per step instead of"
            f" {baseline.gradient_accumulation_steps}; call"
            " `engine.backward(loss)` and `engine.step()` for each (transformers: `--gradient_accumulation_steps"
            f" {steps}`)."
        )
    return found


def _degree_changes(candidate: Candidate, baseline: Candidate) -> list[str]:
    found = []
    tensor, sequence, micro = candidate.tensor_degree, candidate.sequence_degree, candidate.micro_batch_size
    if tensor != baseline.tensor_degree and tensor > 1:
        found.append(
            f"Tensor degree: the JSON splits the layers over {tensor} ranks, which must get the same batches:"
            f" `DistributedSampler(..., num_replicas=world_size // {tensor}, rank=rank // {tensor})`. Accelerate and"
            " transformers' Trainer read the degree in the JSON and do so; leave their `tp_plan` and `tp_size` alone."
        )
    if sequence != baseline.sequence_degree and sequence > 1:
        found.append(
            f"Sequence degree: split the sequences over {sequence} ranks: `mpu ="
            " UlyssesSPAttentionHF.register_with_transformers(model, model.config._attn_implementation,"
            f" sequence_parallel_size={sequence}, micro_batch_size={micro})`, `deepspeed.initialize(..., mpu=mpu)`, and"
            " batches through `UlyssesSPDataLoaderAdapter` (both in `deepspeed.runtime.sequence_parallel.ulysses_sp`)."
            " Accelerate and transformers: `parallelism_config=ParallelismConfig(sp_backend='deepspeed',"
            f" sp_size={sequence})` for `Accelerator` or `TrainingArguments`."
        )
    if candidate.pipeline_degree != baseline.pipeline_degree or (PARTITION in dict(candidate.config)):
        partition = dict(candidate.config).get(PARTITION)
        method = f", partition_method={partition!r}" if partition else ""
        found.append(
            f"Pipeline: `PipelineModule(..., num_stages={candidate.pipeline_degree}{method})`; DeepSpeed does not read"
            " the JSON's `pipeline.stages` and `pipeline.partition`."
        )
    if (degree := candidate.expert_degree) != baseline.expert_degree:
        found.append(
            f"Expert degree: the JSON shares the experts of a transformers model out over {degree} ranks (AutoEP); layers"
            f" of deepspeed.moe take it as `MoE(..., ep_size={degree})`. AutoEP has other names for the experts' weights, so a"
            " checkpoint from before it is not resumed: give `deepspeed.initialize` the model with its weights loaded."
        )
    stages = baseline.pipeline_degree
    if tensor != baseline.tensor_degree or candidate.pipeline_degree != stages:
        saved = (
            f"in {stages} stages"
            if tensor == baseline.tensor_degree
            else f"at a tensor degree of {baseline.tensor_degree}"
        )
        found.append(
            f"Checkpoints: what was saved {saved} is converted first, by `python -m"
            " deepspeed.checkpoint.ds_to_universal --input_folder CHECKPOINT/global_stepN --output_folder"
            ' CHECKPOINT/global_stepN_universal`, and loaded with `"checkpoint": {"load_universal": true}` in the'
            " JSON."
        )
    return found


def learning_rate_changes(
    candidate: Candidate, baseline: Candidate, rate: LearningRate, *, in_json: bool, flag: str = ""
) -> list[str]:
    """The change of the learning rate that another global batch asks for, in a sentence.

    Args:
        baseline: The configuration of the user's script now.
        rate: How the trials followed the batch.
        in_json: The DeepSpeed JSON makes the optimizer or its schedule, and so states the learning rate.
        flag: The option that must repeat it, with its value.
    """
    ratio = candidate.samples_per_rank / baseline.samples_per_rank
    if ratio == 1:
        return []
    more = f"Learning rate: the global batch is {ratio:.3g} times the baseline's"
    if rate.rule == "none":
        return [f"{more}, and the trials kept your learning rate and schedule."]
    factor = rate.factor(round(rate.baseline_batch * ratio))
    rule = f"the rule `{rate.rule}`: {LEARNING_RATE_RULES[rate.rule].says}"
    if in_json:
        also = f"transformers wants the same from `{flag}`" if flag else "a schedule of your own should follow"
        return [f"{more}, so the JSON states {factor:.3g} times your learning rate ({rule}); {also}."]
    return [f"{more}, so multiply your learning rate by {factor:.3g}, as the trials did ({rule})."]


def _checkpointing(candidate: Candidate, baseline: Candidate, block_class: str, family: str) -> str:
    every = candidate.checkpoint_every
    if every == 0 and family == TRAINER:
        return "Activation checkpointing: off, without `--gradient_checkpointing` (in TRL: `--gradient_checkpointing False`)."
    if every == 0:
        return (
            f"Activation checkpointing: off; no longer recompute `{block_class}` (transformers: drop"
            " `--gradient_checkpointing`)."
        )
    kwargs = f"--activation_checkpointing --activation_checkpointing_kwargs '{{\"every_n_layers\": {every}}}'"
    hf = "--gradient_checkpointing" if max(every, baseline.checkpoint_every) == 1 else kwargs
    which = f"{every_nth(every)} `{block_class}`" + (" (the first is one)" if every > 1 else "")
    if family == TRAINER:
        return f"Activation checkpointing: recompute {which}: `{hf}`."
    call = "call `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` instead of `block(x)`"
    return f"Activation checkpointing: recompute {which}: {call} (transformers: `{hf}`)."


def _precision_changes(precision: str, before: str, *, noted: bool) -> list[str]:
    autocast = "Precision: DeepSpeed opens `torch.autocast` around the model's forward: leave out any of your own."
    found = []
    if precision in DTYPES and not noted:
        cast = f"`x.to(torch.{DTYPES[precision]})`; integer tokens stay"
        found.append(f"Precision: the weights are {DTYPES[precision]}, so cast floating-point inputs with {cast}.")
    elif before in DTYPES and precision not in DTYPES and not noted:
        found.append("Precision: the weights are float32 again, so leave the inputs in float32.")
    return [*found, autocast] if precision.startswith("torch_autocast") else found
