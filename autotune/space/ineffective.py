"""DeepSpeed settings that cannot change how a trial trains, each with the reason."""

from autotune.space.deepspeed import STAGE_3_PREFIXES, ZERO

# By path; one that ends with a dot stands for a whole section. Read in deepspeed 0.15 to 0.19.
NO_EFFECT: dict[str, str] = {
    path: why
    for why, paths in {
        "it only prints or writes, and trials leave it out": f"""
            tensorboard. wandb. comet. csv_monitor. monitor_config. flops_profiler. comms_logger. autotuning.
            wall_clock_breakdown memory_breakdown dump_state steps_per_print log_level {ZERO}log_trace_cache_warnings
        """,
        "it is about saving and loading, and a trial does neither": f"""
            checkpoint. datastates_ckpt. {ZERO}load_from_fp32_weights {ZERO}elastic_checkpoint
            {ZERO}stage3_gather_16bit_weights_on_model_save {ZERO}stage3_gather_fp16_weights_on_model_save
            {ZERO}pipeline_loading_checkpoint
        """,
        "DeepSpeed takes the key and nothing reads it": f"""
            disable_allgather vocabulary_size train_seq_parallel {ZERO}allgather_partitions
        """,
        "it permits an optimizer and changes none": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "it is a retired name of offload_optimizer and offload_param": f"""
            {ZERO}cpu_offload {ZERO}cpu_offload_param {ZERO}cpu_offload_use_pin_memory
        """,
        "it is for inference, and a trial trains": "inference.",
        "it matters only where an epoch ends, and such steps are not timed": "dataloader_drop_last",
        "the precision decides it": "data_types.param_dtype",
        "DeepSpeed refuses it since 0.5.9": f"{ZERO}legacy_stage1",
        "it decides what DeepSpeed complains of, not what it does": f"{ZERO}ignore_unused_parameters",
        # torch has had all_gather_into_tensor since 1.13, and with it DeepSpeed gathers each group of parameters whole.
        "this DeepSpeed gathers each group of parameters at once, and never reads it": f"{ZERO}allgather_bucket_size",
    }.items()
    for path in paths.split()
}
# Settings of ZeRO that one kind of its optimizers reads: stages 1 and 2 share one, stage 3 has its own, whose paths begin as here.
STAGES_1_AND_2 = frozenset(
    f"{ZERO}{name}"
    for name in "round_robin_gradients use_multi_rank_bucket_allreduce parameter_alignment compute_grad_norm".split()
)
STAGE_3 = tuple(f"{ZERO}{name}" for name in STAGE_3_PREFIXES) + tuple(
    f"{ZERO}{name}"
    for name in """
    sub_group_size memory_efficient_linear override_module_apply enable_sanity_checks
    save_muon_momentum_buffer_in_memory offload_optimizer.ratio offload_optimizer.super_offload
    offload_optimizer.cpuadam_cores_perc offload_optimizer.fast_init offload_optimizer.buffer_count
    offload_optimizer.pipeline_read offload_optimizer.pipeline_write
    """.split()
)
# The optimizer of ZeRO 1 in bf16 with fp32 sums, BF16_Optimizer, is told none of these; each with the value that asks for nothing.
# Nor does it read reduce_bucket_size, any value of which is as good there: the engine has other buckets.
UNREAD_BY_BF16_OPTIMIZER: dict[str, bool] = {
    f"{ZERO}contiguous_gradients": True,
    f"{ZERO}overlap_comm": False,
    f"{ZERO}reduce_scatter": True,
    f"{ZERO}round_robin_gradients": False,
    f"{ZERO}use_multi_rank_bucket_allreduce": True,
    f"{ZERO}parameter_alignment": False,
    f"{ZERO}compute_grad_norm": True,  # DeepSpeed refuses `false` there
    "bf16.check_grad_overflow": True,
}


def why_no_effect(path: str) -> str | None:
    """Returns why a setting has no effect whatever the machine; None for a setting that may have one."""
    return NO_EFFECT.get(path) or NO_EFFECT.get(f"{path.partition('.')[0]}.")
