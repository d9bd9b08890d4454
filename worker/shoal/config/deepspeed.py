"""What becomes of every key of DeepSpeed's that `document.py` does not have: left alone, refused unless off, renamed.

Taken from DeepSpeed's configuration reference (deepspeed.ai/docs/config-json) and its source up to 0.19.8, keys that
it has removed since included, because files still carry them. Only data: `sifting.py` applies it, docs/deepspeed.md is
written from it (deepspeed.py). A name covers all that stands below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OFF = (False, None, "auto")


@dataclass(frozen=True, slots=True)
class Ignored:
    """Changes nothing here; reported once."""

    why: str
    """What happens instead, or why nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Of something that Shoal lacks."""

    why: str
    off: tuple[object, ...] = OFF
    """Values that leave it off."""


@dataclass(frozen=True, slots=True)
class Switched:
    """A section of something that Shoal lacks: refused where it is on, of no meaning where it is off."""

    why: str
    switch: str = "enabled"
    """The key that switches it on; not given, it is off. Empty: it has none."""
    off: tuple[object, ...] = OFF
    """Values of the switch that leave it off."""
    in_parts: bool = False
    """Whether it is off too where no section within is on (`enabled`)."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another name; `old_config_keys.py` gives the key its name of today before anything is checked."""

    to: str


Fate = Ignored | Unsupported | Switched | Renamed


def _below(section: str, names: str, fate: Fate) -> Iterator[tuple[str, Fate]]:
    yield from ((f"{section}.{name}" if section else name, fate) for name in names.split())


ERROR_FEEDBACK = (
    "rounding errors return in a later step and belong to a lane: every lane would carry a copy as large as the model, "
    "or results would depend on the number of workers"
)
_FLOAT32 = "master weights, sums of gradients and optimizer state are float32"
_AS_THEY_ARE = "gathered parameters have the bits of their owner's, on every worker"
_ALL_WORKERS = "blocks are spread over all workers; `shoal.mirrors` makes copies, which need not be gathered"
_DATA_ORDER = "the order of samples is Shoal's own, the same in every world"
_OTHER_MODEL = "it replaces or drops modules of the model; give the model as it is to be trained"

_UNITS = Ignored("buckets follow from the model's units (`shoal.units`), in every stage alike")
_SENDS = Ignored("blocks travel by sends between the workers that hold them")
_GATHERED = Ignored("a unit is gathered while it is used, and the next one in advance")
_BESIDE = Ignored("gradients always travel during the backward, parameters during the next forward")
_ONE_SUM = Ignored("gradients are added up in float32, in one order, and divided once")
_ELASTIC = Ignored("every checkpoint is elastic and has master weights; see `shoal.checkpoint`")
_WHOLE_EXPORT = Ignored("an export always has all weights")
_THREE_BUFFERS = Ignored("there are always three buffers, and reads and writes always overlap the update")
_ONE_PLACE = Ignored("all of the state is offloaded, for any ratio")
_PINNED = Ignored("host memory is pinned where the model is on an accelerator, and only there")
_TREE = Ignored("parameters and buckets are laid out by Shoal")
_TIMES = Ignored("see `wall_clock_breakdown`, and the metrics of workers and steps")
_NO_MODEL_PARALLEL = Ignored("there are no model-parallel ranks over which activations could be partitioned")
_ANY_SIZE = Ignored("every job is elastic: lanes fix its batch for any number of workers")

_ROWS: tuple[tuple[str, str, Fate], ...] = (
    ("", "allgather_size", _UNITS),
    ("", "aio", Ignored("files are read and written by the standard library (docs/offload.md)")),
    ("", "checkpoint datastates nebula use_node_local_storage", _ELASTIC),
    ("", "comet trackio", Ignored("no writer for it; `tensorboard`, `wandb` and `csv_monitor` have one")),
    ("", "monitor_config", Ignored("see `tensorboard`, `wandb` and `csv_monitor`")),
    ("", "comms_logger flops_profiler memory_breakdown timers", _TIMES),
    ("", "compile graph_harvesting", Ignored("compile the model yourself: `torch.compile` works before and after")),
    ("", "dataloader_drop_last", Ignored("the rest of an epoch, less than a step, is always dropped")),
    ("", "disable_allgather", _SENDS),
    ("", "disable_python_gc log_level", Ignored("a script's own business")),
    ("", "fp32_allreduce gradient_predivide_factor prescale_gradients", _ONE_SUM),
    ("", "managed_gradient_accumulation", Ignored("the engine always counts micro-batches")),
    ("", "seq_parallel_communication_data_type use_data_before_expert_parallelism", _NO_MODEL_PARALLEL),
    ("", "vocabulary_size", Ignored("nothing is tuned by it")),
    ("", "zero_allow_untested_optimizer", Ignored("see `shoal.elementwise`")),
    ("", "zero_force_ds_cpu_optimizer", Ignored("updates in host memory are made by torch's own kernels")),
    ("optimizer", "legacy_fusion", Ignored("updates are made by torch's own kernels")),
    ("pipeline", "stages", Renamed("shoal.cell.pipeline")),
    ("pipeline", "activation_checkpoint_interval", Unsupported(
        "the model says it: `PipelineModule(…, activation_checkpoint_interval=1)`", (0, None))),
    ("", "pipeline", Ignored("but for its `stages` a PipelineModule is given it as arguments")),
    ("", "expert_parallel", Ignored("where it is on, its `autoep_size` is read")),
    ("", "ddp_bf16", Unsupported("gradients are always added up in float32")),
    ("", "sparse_gradients", Unsupported("a bucket's gradient travels with all of its elements")),
    ("", "gradient_allreduce_op", Unsupported("a step's gradient is the mean over its samples", ("mean", None))),
    ("", "data_parallel_size", _ANY_SIZE),
    ("", "sequence_parallel_size", Renamed("shoal.cell.context")),
    ("data_types", "grad_accum_dtype", Unsupported("gradients are always added up in float32", (None, "auto", "fp32"))),
    ("", "amp", Switched("see `bf16` and `fp16`")),
    ("", "autotuning", Switched("it starts jobs of its own; `shoal estimate` says what fits into memory")),
    ("", "compression_training", Switched(_OTHER_MODEL, switch="", in_parts=True)),
    ("", "progressive_layer_drop", Switched(_OTHER_MODEL)),
    ("", "sparse_attention", Switched(_OTHER_MODEL, "mode", ("dense", None))),
    ("", "curriculum_learning", Switched(_DATA_ORDER)),
    ("", "data_efficiency", Switched(_DATA_ORDER, in_parts=True)),
    ("", "eigenvalue", Switched("it serves `quantize_training` only")),
    ("expert_parallel", "autoep_size", Renamed("shoal.cell.expert")),
    ("tensor_parallel", "autotp_size", Renamed("shoal.cell.tensor")),
    ("tensor_parallel", "partition_config preset_model vocab_parallel_lm_head", Unsupported(
        "the script divides its model itself, after `shoal.cell`, such as by torch's `parallelize_module`")),
    ("tensor_parallel", "tp_overlap_comm", Ignored("the collectives of a cell are made in the script's order")),
    ("", "fp8", Switched("the scales of float8 follow from the values of earlier steps, which belong to the lane: a "
     "lane's result would depend on the worker that trains it")),
    ("", "hybrid_engine", Switched("it generates text between two steps; a script does so itself, with the model")),
    ("", "quantize_training weight_quantization", Switched(_FLOAT32)),
    ("", "torch_autocast", Switched("see `auto_cast` of `bf16` and `fp16`")),
    (
        "zero_optimization",
        "allgather_bucket_size allgather_size reduce_bucket_size prefetch_bucket_size stage3_prefetch_bucket_size "
        "sub_group_size max_elements_per_comm",
        _UNITS,
    ),
    (
        "zero_optimization",
        "allgather_partitions allgather_sequential reduce_scatter stage3_allgather_sequential "
        "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce",
        _SENDS,
    ),
    (
        "zero_optimization",
        "max_live_parameters max_reuse_distance model_persistence_threshold module_granularity_threshold "
        "param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold "
        "leaf_module override_module_apply log_trace_cache_warnings enable_sanity_checks",
        _GATHERED,
    ),
    ("zero_optimization", "grad_hooks overlap_comm", _BESIDE),
    (
        "zero_optimization",
        "contiguous_gradients memory_efficient_linear parameter_alignment round_robin_gradients "
        "save_muon_momentum_buffer_in_memory",
        _TREE,
    ),
    ("zero_optimization", "compute_grad_norm", Ignored("the norm is computed where `gradient_clipping` needs it")),
    ("zero_optimization", "ignore_unused_parameters", Ignored("a parameter that no lane of a step uses is left alone")),
    ("zero_optimization", "elastic_checkpoint legacy_stage1 load_from_fp32_weights", _ELASTIC),
    ("zero_optimization", "pipeline_loading_checkpoint", _ELASTIC),
    (
        "zero_optimization",
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "gather_fp16_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        _WHOLE_EXPORT,
    ),
    ("zero_optimization", "cpu_offload_use_pin_memory", _PINNED),
    ("zero_optimization", "zero_hpz_partition_size", Unsupported(_ALL_WORKERS, (1, None))),
    ("zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights", Unsupported(_AS_THEY_ARE)),
    ("zero_optimization", "zero_quantized_gradients", Unsupported(ERROR_FEEDBACK)),
    ("zero_optimization", "zeropp_loco_param", Unsupported(ERROR_FEEDBACK, (None,))),
    ("zero_optimization", "zenflow", Unsupported("a step updates all parameters before the next one begins", (None,))),
    ("zero_optimization", "mics_shard_size", Unsupported(_ALL_WORKERS, (-1, None))),
    ("zero_optimization", "mics_hierarchical_params_gather", Unsupported(_ALL_WORKERS)),
    ("zero_optimization", "cpu_offload", Renamed("zero_optimization.offload_optimizer.device")),
    ("zero_optimization", "cpu_offload_param cpu_offload_params", Renamed("zero_optimization.offload_param.device")),
    ("zero_optimization.offload_optimizer", "buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init",
     _THREE_BUFFERS),
    ("zero_optimization.offload_optimizer", "ratio max_in_cpu super_offload cpuadam_cores_perc", _ONE_PLACE),
    ("zero_optimization.offload_optimizer", "pin_memory", _PINNED),
    ("zero_optimization.offload_param", "buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init "
     "ratio max_in_cpu super_offload cpuadam_cores_perc nvme_path", Ignored("parameters are in no file")),
    ("zero_optimization.offload_param", "pin_memory", _PINNED),
    ("bf16", "check_grad_overflow immediate_grad_update", Ignored("see `shoal.stop_on_nan`")),
    ("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", Unsupported(_FLOAT32)),
    ("fp16", "fp16_master_weights_and_grads", Unsupported(_FLOAT32)),
    ("", "bfloat16", Renamed("bf16")),
    ("activation_checkpointing", "contiguous_memory_optimization number_checkpoints partition_activations",
     _NO_MODEL_PARALLEL),
    ("activation_checkpointing", "profile synchronize_checkpoint_boundary", _TIMES),
)  # fmt: skip

FATES: Mapping[str, Fate] = {key: fate for section, names, fate in _ROWS for key, fate in _below(section, names, fate)}
"""By dotted key."""

VALUES_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "communication_data_type": (("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"), ERROR_FEEDBACK),
    "zero_optimization.offload_param.device": (
        ("nvme",),
        "others ask for a worker's parameters at any time; files are for optimizer state (`offload_optimizer`)",
    ),
}
"""Values of keys that are honoured otherwise, with the reason."""

REASONS: Mapping[str, str] = {
    "is not supported": "A feature is on that Shoal does not have; the sentence and the table below say why. Switch it "
    "off, or leave the key out.",
    "; expected ": "A value is of another kind than its key allows. Often the file is a template whose placeholders "
    'are still to be filled in: without quotes, they are read as text (`"GBSIZE,"`).',
    "is an unknown key": "A key is one edit from a known one, which the sentence names.",
    "is an unknown parameter": "The optimizer, or the schedule, does not take this argument.",
    "is not for the optimizer": "DeepSpeed refuses it too; the sentence names the key to use.",
    "always correct it": "An Adam without correction of its first steps' bias: none of torch's is.",
    "needed to derive the third": "Batch size, micro-batch and lanes: two of them must be known, from the file, the "
    "script's `shoal=` or its DataLoader.",
    "does not divide into": "Batch size, micro-batch and lanes do not fit together; the sentence has the figures.",
    "nothing determines it": 'A value is "auto", and neither the rest of the file nor the script says what it is.',
    "is neither JSON": "The file cannot be read.",
}
"""Why a file of DeepSpeed's is refused: what its sentence has in it, and what that means."""
