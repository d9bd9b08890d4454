"""What DeepSpeed knows and Shoal does not: keys that are reported and left alone, and keys that must be off.

Taken from DeepSpeed's configuration reference (deepspeed.ai/docs/config-json) and its source up to 0.19.8, keys that
it has removed since included, because files still carry them. Only data: `load.py` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping

OFF = (False, None, "auto")

_ZERO_WITHOUT_MEANING = """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
    elastic_checkpoint enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance
    memory_efficient_linear model_persistence_threshold module_granularity_threshold override_module_apply overlap_comm
    param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
    stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce cpu_offload_use_pin_memory
"""
_OFFLOAD_WITHOUT_MEANING = """
    buffer_count buffer_size cpuadam_cores_perc fast_init max_in_cpu pin_memory pipeline pipeline_read pipeline_write
    ratio super_offload
"""
"""DeepSpeed's buffers hold one tensor each, ours all state of a piece; there are always three, reads and writes always
run beside the update, and host memory is not pinned for a CPU. All of the state is offloaded, whatever the ratio."""
_TOP_WITHOUT_MEANING = """
    aio checkpoint comet comms_logger compile csv_monitor dataloader_drop_last datastates disable_allgather
    disable_python_gc dump_state flops_profiler fp32_allreduce gradient_predivide_factor graph_harvesting log_level
    managed_gradient_accumulation memory_breakdown monitor_config nebula prescale_gradients
    seq_parallel_communication_data_type steps_per_print tensorboard timers use_data_before_expert_parallelism
    use_node_local_storage vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer optimizer.legacy_fusion
"""
_PRECISION_WITHOUT_MEANING = """
    check_grad_overflow immediate_grad_update
"""
_ELASTICITY_WITHOUT_MEANING = """
    ignore_non_elastic_batch_info max_gpus max_train_batch_size micro_batch_sizes min_gpus min_time
    model_parallel_size num_gpus_per_node prefer_larger_batch version
"""
_ACTIVATIONS_WITHOUT_MEANING = """
    contiguous_memory_optimization number_checkpoints partition_activations profile synchronize_checkpoint_boundary
"""
"""Activations are partitioned over model-parallel ranks, which there are none of; the other keys order DeepSpeed's own
buffers and timers."""
_SWITCHED = (
    "amp",
    "autotuning",
    "curriculum_learning",
    "data_efficiency",
    "eigenvalue",
    "fp8",
    "hybrid_engine",
    "progressive_layer_drop",
    "quantize_training",
    "torch_autocast",
)


def _below(section: str, names: str) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for name in names.split())


WITHOUT_MEANING: frozenset[str] = (
    frozenset(_TOP_WITHOUT_MEANING.split())
    | _below("zero_optimization", _ZERO_WITHOUT_MEANING)
    | _below("zero_optimization.offload_optimizer", _OFFLOAD_WITHOUT_MEANING)
    | _below("zero_optimization.offload_param", _OFFLOAD_WITHOUT_MEANING + "nvme_path")
    | _below("bf16", _PRECISION_WITHOUT_MEANING)
    | _below("elasticity", _ELASTICITY_WITHOUT_MEANING)
    | _below("activation_checkpointing", _ACTIVATIONS_WITHOUT_MEANING)
    | frozenset(f"{section}.*" for section in _SWITCHED)
)
"""Dotted keys that change nothing here. A name covers all that stands below it; `section.*` covers the section's keys
that NOT_BUILT does not name."""

NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "fp16.fp16_master_weights_and_grads": OFF,
    "bf16.bf16_master_weights_and_grads": OFF,
    "bf16.bf16_optimizer_states": OFF,
    "elasticity.enabled": OFF,
    **{f"{section}.enabled": OFF for section in _SWITCHED},
    "zero_optimization.offload_param.device": ("none", None),
    "zero_optimization.cpu_offload": OFF,
    "zero_optimization.cpu_offload_param": OFF,
    "zero_optimization.zero_hpz_partition_size": (1, None),
    "zero_optimization.zero_quantized_weights": OFF,
    "zero_optimization.zero_quantized_nontrainable_weights": OFF,
    "zero_optimization.zero_quantized_gradients": OFF,
    "zero_optimization.zenflow": (None,),
    "zero_optimization.mics_shard_size": (-1, None),
    "zero_optimization.mics_hierarchical_params_gather": OFF,
    "zero_optimization.zeropp_loco_param": (None,),
    "compression_training": (None, {}),
    "data_types.grad_accum_dtype": (None, "auto", "fp32"),
    "ddp_bf16": OFF,
    "expert_parallel": (None, {}),
    "gradient_allreduce_op": ("mean", None),
    "pipeline": (None, {}),
    "sparse_attention": (None, {}),
    "sparse_gradients": OFF,
    "tensor_parallel": (None, {}),
    "weight_quantization": (None, {}),
}
"""Dotted keys of something that Shoal lacks, with the values that leave it off."""

ERROR_FEEDBACK = (
    "what rounding leaves over comes back in a later step, and belongs to the lane whose gradient it was: every lane "
    "would carry a copy as large as the model, or results would depend on how many workers there are"
)
_FLOAT32 = "master weights, sums of gradients and optimizer state are float32"
_AS_THEY_ARE = "gathered parameters have the bits of their owner's, on every worker"
_ALL_WORKERS = "blocks are spread over all workers; `shoal.mirrors` makes copies, which need not be gathered"

WHY: Mapping[str, str] = {
    "fp16.fp16_master_weights_and_grads": _FLOAT32,
    "bf16.bf16_master_weights_and_grads": _FLOAT32,
    "bf16.bf16_optimizer_states": _FLOAT32,
    "data_types.grad_accum_dtype": "gradients are always added up in float32",
    "communication_data_type": ERROR_FEEDBACK,
    "fp8.enabled": "the scales of float8 follow from the values of earlier steps, which belong to the lane: a lane's "
    "result would depend on the worker that trains it",
    "zero_optimization.zero_quantized_gradients": ERROR_FEEDBACK,
    "zero_optimization.zeropp_loco_param": ERROR_FEEDBACK,
    "zero_optimization.zero_quantized_weights": _AS_THEY_ARE,
    "zero_optimization.zero_quantized_nontrainable_weights": _AS_THEY_ARE,
    "zero_optimization.zero_hpz_partition_size": _ALL_WORKERS,
    "zero_optimization.mics_shard_size": _ALL_WORKERS,
    "zero_optimization.mics_hierarchical_params_gather": _ALL_WORKERS,
    "zero_optimization.offload_param.device": "others ask for a worker's parameters at any time; files are for "
    "optimizer state (`offload_optimizer`)",
}
"""Why, where the key is not merely missing."""

REFUSED: Mapping[str, tuple[object, ...]] = {"communication_data_type": ("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")}
"""Values of keys that are honoured otherwise."""


SAME_ON_CPU: Mapping[str, tuple[object, ...]] = {
    "zero_optimization.offload_param.device": ("cpu",),
    "zero_optimization.cpu_offload": (True,),
    "zero_optimization.cpu_offload_param": (True,),
}
"""Dotted keys with values that change nothing where the model is on the CPU: all state is in host memory anyway."""


def sections() -> frozenset[str]:
    """The names of all sections that the two tables know, dotted."""
    names: set[str] = set()
    for key in WITHOUT_MEANING | NOT_BUILT.keys():
        parts = key.split(".")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(names)
