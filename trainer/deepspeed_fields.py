"""What becomes of each field of a DeepSpeed config, as data: DeepSpeed 0.19's fields, by dotted name.

A field is in one of four tables: it sets an argument (`ARGUMENTS`), it says how DeepSpeed moves or stores what the
engine moves and stores in its own way (`UNUSED`), it is fine with some values only (`ONLY`), or it belongs to a feature
that must be off (`OFF`). The optimizer's and the scheduler's types are read by `deepspeed_config`. What is in no table
is refused, too.
"""

from typing import Any

AUTO = "auto"
"""DeepSpeed's word for: as the training arguments say."""

ARGUMENTS: dict[str, tuple[str, type]] = {
    "train_batch_size": ("hotspa_mini_batch_size", int),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "gradient_clipping": ("max_grad_norm", float),
    "dataloader_drop_last": ("dataloader_drop_last", bool),
    "bf16.enabled": ("bf16", bool),
    "bfloat16.enabled": ("bf16", bool),
    "optimizer.params.lr": ("learning_rate", float),
    "optimizer.params.eps": ("adam_epsilon", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
}
"""Field -> the argument that it sets, and the type of its value."""

UNUSED: dict[str, tuple[str, ...]] = {
    "": (
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "disable_python_gc",
        "disable_allgather", "prescale_gradients", "gradient_predivide_factor", "check_overflow", "vocabulary_size",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "seq_parallel_communication_data_type",
    ),
    "zero_optimization.": (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "sub_group_size",
        "cpu_offload_use_pin_memory", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
        "parameter_alignment", "compute_grad_norm", "zero_hpz_partition_size", "memory_efficient_linear",
        "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "elastic_checkpoint", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    ),
    "zero_optimization.offload_optimizer.": (
        "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc",
        "super_offload", "buffer_size",
    ),
    "zero_optimization.offload_param.": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    "bf16.": ("immediate_grad_update", "check_grad_overflow"),
    "bfloat16.": ("immediate_grad_update", "check_grad_overflow"),
    "optimizer.": ("legacy_fusion",),
    "optimizer.params.": ("torch_adam", "foreach", "freeze_step"),
    "checkpoint.": ("tag_validation", "parallel_write"),
    "checkpoint.parallel_write.": ("pipeline_stage",),
    "aio.": (
        "block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit", "overlap_events", "use_gds",
    ),
    "tensor_parallel.": ("tp_overlap_comm", "tp_grain_size"),
}  # fmt: skip
"""Section -> fields that change neither what is computed nor where it is kept; the engine decides these things."""

_SUMS = "gradients are summed in fp32 and the optimizer's state is fp32; leave it out"
_MEAN = "the loss is the mean over the label tokens of the mini-batch; leave it out"
_TENSOR_PARALLEL = "write the degree into hotspa_strategies, such as dp4tp2:4096"
_RECOMPUTE = "use activation_checkpointing=True, or strategies such as tp2+rc"
_PARAMETERS = (
    "weights are held as hotspa_strategies say: use more tp or pp, or hotspa_strategies=auto, and leave it out"
)

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "communication_data_type": ((None, "fp32", "float32"), _SUMS),
    "gradient_allreduce_op": (("mean",), _MEAN),
    "managed_gradient_accumulation": ((True,), "the Trainer's loop does it; leave it out"),
    "sparse_gradients": ((False,), "gradients are dense here; leave it out"),
    "data_types.grad_accum_dtype": ((None, "fp32", AUTO), _SUMS),
    "data_types.param_dtype": ((None, AUTO), "use bf16, or load the model in the dtype that you want"),
    "data_types.buffer_dtype": ((None, AUTO), "buffers keep their dtype; leave it out"),
    "data_types.keep_in_fp32_modules": ((AUTO,), "the model's class decides; leave it out"),
    "bf16.bf16_master_weights_and_grads": ((False,), _SUMS),
    "bf16.bf16_optimizer_states": ((False,), _SUMS),
    "zero_optimization.cpu_offload": ((False,), 'use "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), _PARAMETERS),
    "zero_optimization.offload_param.device": (("none", None), _PARAMETERS),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "the whole master store is offloaded, or none of it"),
    "zero_optimization.zero_quantized_weights": ((False,), "switches move the bits; leave it out"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "switches move the bits; leave it out"),
    "zero_optimization.zero_quantized_gradients": ((False,), _SUMS),
    "zero_optimization.mics_shard_size": ((-1, 0), "the master store is spread over all ranks; leave it out"),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "leave it out"),
    "zero_optimization.zenflow": ((None,), "every step uses all gradients; leave it out"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": ((False,), "Muon needs whole matrices; use AdamW"),
    "optimizer.params.bias_correction": ((True,), "Adam's bias correction is always on"),
    "optimizer.params.amsgrad": ((False,), "leave it out, or use optim=adamw_torch without a DeepSpeed optimizer"),
    "optimizer.params.adam_w_mode": ((True,), "decay is decoupled (AdamW); leave it out"),
    "optimizer.params.fp32_optimizer_states": ((True,), _SUMS),
    "optimizer.params.max_grad_norm": ((0,), "use gradient_clipping"),
    "activation_checkpointing.partition_activations": ((False,), _RECOMPUTE),
    "activation_checkpointing.cpu_checkpointing": ((False,), _RECOMPUTE),
    "activation_checkpointing.contiguous_memory_optimization": ((False,), _RECOMPUTE),
    "activation_checkpointing.number_checkpoints": ((None, 0), _RECOMPUTE),
    "activation_checkpointing.synchronize_checkpoint_boundary": ((False,), _RECOMPUTE),
    "activation_checkpointing.profile": ((False,), "look at the report of the run (hotspa_report)"),
    "tensor_parallel.autotp_size": ((0, 1), _TENSOR_PARALLEL),
    "tensor_parallel.tp_size": ((1,), _TENSOR_PARALLEL),
    "tensor_parallel.tp.tp_size": ((1,), _TENSOR_PARALLEL),
    "sequence_parallel_size": ((1,), "use strategies such as tp2+sp"),
    "checkpoint.load_universal": ((False,), "checkpoints here are loaded in any layout; leave it out"),
    "checkpoint.use_node_local_storage": ((False,), "all ranks write into one directory; use a shared file system"),
    "use_data_before_expert_parallelism": ((False,), "leave it out"),
}
"""Field -> the values that are fine, and why another one is refused or what to use instead."""

_LOGGING = "use report_to"
_AUTOMATIC = "use hotspa_strategies=auto"

OFF: dict[str, str] = {
    "fp16": "loss scaling is not supported; use bf16",
    "amp": "use bf16",
    "torch_autocast": "use bf16, which keeps fp32 masters",
    "flops_profiler": "look at the report of the run (hotspa_report)",
    "comms_logger": "look at the report of the run (hotspa_report)",
    "tensorboard": _LOGGING,
    "wandb": _LOGGING,
    "comet": _LOGGING,
    "csv_monitor": _LOGGING,
    "compile": "replicas are rebound to other storage for every phase",
    "elasticity": "a checkpoint is resumed on any number of processes; no setting is needed",
    "autotuning": _AUTOMATIC,
    "curriculum_learning": "the order of the data is the Trainer's",
    "data_efficiency": "the order of the data is the Trainer's",
    "progressive_layer_drop": "all layers are trained",
    "eigenvalue": "nothing is quantized",
    "hybrid_engine": "there is no generation in training",
    "nebula": "use hotspa_async_save",
    "datastates_ckpt": "use hotspa_async_save",
    "expert_parallel": "experts are cut by tp of a strategy",
    "quantize_training": "training is not quantized",
    "sparse_attention": "attention is the model's own",
    "compression_training": "the model is trained whole",
    "weight_quantization": "switches move the bits",
    "pipeline": "write the degree into hotspa_strategies, such as dp4pp2:4096",
}
"""Section -> why it is refused, or what to use instead. Fine where its `enabled` says false or auto, or is left out."""

NO_SWITCH = ("expert_parallel", "sparse_attention", "compression_training", "weight_quantization", "pipeline")
"""Those without `enabled`, which are fine when empty."""

SPECIAL = (
    "zero_optimization.stage", "zero_optimization.offload_optimizer.device", "optimizer.type", "optimizer.params.betas",
    "scheduler.type", "scheduler.params",
)  # fmt: skip
"""Fields that `deepspeed_config` reads itself."""

KNOWN = frozenset(
    [section + name for section, names in UNUSED.items() for name in names] + [*ARGUMENTS, *ONLY, *OFF, *SPECIAL]
)
"""All fields of the tables."""
