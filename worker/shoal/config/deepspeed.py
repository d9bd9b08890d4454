"""What becomes of every key of DeepSpeed's that `document.py` does not have: left alone, refused unless off, renamed.

Taken from DeepSpeed's configuration reference (deepspeed.ai/docs/config-json) and its source up to 0.19.8, keys that
it has removed since included, because files still carry them. Only data: `load.py` applies it, docs/deepspeed.md is
written from it (deepspeed_page.py). A name covers all that stands below it; `section.*` covers those keys of the
section that have no row of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

OFF = (False, None, "auto")


@dataclass(frozen=True, slots=True)
class Ignored:
    """Changes nothing here; reported once."""

    why: str
    """What happens instead, or why nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Of something that Shoal lacks."""

    off: tuple[object, ...] = OFF
    """Values that leave it off."""
    why: str = ""
    """Where it is not merely missing."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """An old name; `old_config_keys.py` gives the key its name of today before anything is checked."""

    to: str


Fate = Ignored | Unsupported | Renamed


def _below(section: str, names: str, fate: Fate) -> Iterator[tuple[str, Fate]]:
    yield from ((f"{section}.{name}" if section else name, fate) for name in names.split())


ERROR_FEEDBACK = (
    "what rounding leaves over comes back in a later step, and belongs to the lane whose gradient it was: every lane "
    "would carry a copy as large as the model, or results would depend on how many workers there are"
)
_FLOAT32 = "master weights, sums of gradients and optimizer state are float32"
_AS_THEY_ARE = "gathered parameters have the bits of their owner's, on every worker"
_ALL_WORKERS = "blocks are spread over all workers; `shoal.mirrors` makes copies, which need not be gathered"
_DATA_ORDER = "the order of samples is Shoal's own, the same in every world"
_SPARSE_MODEL = "it replaces modules of the model; give the model as it is to be trained"

_UNITS = Ignored("buckets follow from the model's units (`shoal.units`), in every stage alike")
_SENDS = Ignored("blocks travel by sends between the workers that hold them")
_GATHERED = Ignored("a unit is gathered while it is used, and the next one beside it")
_BESIDE = Ignored("gradients travel beside the backward, parameters beside the next forward, always")
_ONE_SUM = Ignored("gradients are added up in float32, in one order, and divided once")
_ELASTIC = Ignored("every checkpoint is elastic and has master weights; see `shoal.checkpoint`")
_WHOLE_EXPORT = Ignored("an export always has all weights")
_THREE_BUFFERS = Ignored("there are always three buffers, reads and writes always run beside the update")
_ONE_PLACE = Ignored("all of the state is there, whatever the ratio")
_PINNED = Ignored("host memory is pinned where the model is on an accelerator, and only there")
_TREE = Ignored("parameters and buckets are laid out by Shoal")
_TIMES = Ignored("see `wall_clock_breakdown`, and the metrics of workers and steps")
_NO_MODEL_PARALLEL = Ignored("there are no model-parallel ranks over which activations could be partitioned")
_ANY_SIZE = Ignored("every job is elastic: its batch is fixed by lanes, whatever the number of workers")

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
    ("", "ddp_bf16 pipeline sparse_gradients weight_quantization", Unsupported()),
    ("", "gradient_allreduce_op", Unsupported(("mean", None))),
    ("", "compression_training sparse_attention", Unsupported((None, {}), _SPARSE_MODEL)),
    ("", "data_parallel_size", _ANY_SIZE),
    ("", "sequence_parallel_size", Unsupported((1, None), "every lane runs the whole model")),
    ("", "expert_parallel tensor_parallel", Unsupported((None, {}), "every lane runs the whole model")),
    ("data_types", "grad_accum_dtype", Unsupported((None, "auto", "fp32"), "gradients are always added up in float32")),
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
    ("zero_optimization", "zero_hpz_partition_size", Unsupported((1, None), _ALL_WORKERS)),
    ("zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights", Unsupported(why=_AS_THEY_ARE)),
    ("zero_optimization", "zero_quantized_gradients", Unsupported(why=ERROR_FEEDBACK)),
    ("zero_optimization", "zeropp_loco_param", Unsupported((None,), ERROR_FEEDBACK)),
    ("zero_optimization", "zenflow", Unsupported((None,))),
    ("zero_optimization", "mics_shard_size", Unsupported((-1, None), _ALL_WORKERS)),
    ("zero_optimization", "mics_hierarchical_params_gather", Unsupported(why=_ALL_WORKERS)),
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
    ("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", Unsupported(why=_FLOAT32)),
    ("fp16", "fp16_master_weights_and_grads", Unsupported(why=_FLOAT32)),
    ("", "bfloat16", Renamed("bf16")),
    ("elasticity", "enabled", Unsupported(why="every job is elastic, and its batch is fixed by `train_batch_size`, "
     "which you give; leave the section out")),
    ("elasticity", "ignore_non_elastic_batch_info max_gpus max_train_batch_size micro_batch_sizes min_gpus min_time "
     "model_parallel_size num_gpus_per_node prefer_larger_batch version", _ANY_SIZE),
    ("activation_checkpointing", "contiguous_memory_optimization number_checkpoints partition_activations",
     _NO_MODEL_PARALLEL),
    ("activation_checkpointing", "profile synchronize_checkpoint_boundary", _TIMES),
)  # fmt: skip

_SWITCHED: Mapping[str, str] = {
    "amp": "see `bf16` and `fp16`",
    "autotuning": "",
    "curriculum_learning": _DATA_ORDER,
    "data_efficiency": _DATA_ORDER,
    "eigenvalue": "",
    "fp8": "the scales of float8 follow from the values of earlier steps, which belong to the lane: a lane's result "
    "would depend on the worker that trains it",
    "hybrid_engine": "",
    "progressive_layer_drop": "",
    "quantize_training": "",
    "torch_autocast": "see `auto_cast` of `bf16` and `fp16`",
}
"""Sections that are refused where they are on, with the reason; switched off all else in them means nothing."""


def _fates() -> Iterator[tuple[str, Fate]]:
    for section, names, fate in _ROWS:
        yield from _below(section, names, fate)
    for section, why in _SWITCHED.items():
        yield f"{section}.enabled", Unsupported(why=why)
        yield f"{section}.*", Ignored("of a section that is off")


FATES: Mapping[str, Fate] = dict(_fates())
"""By dotted key."""

VALUES_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "communication_data_type": (("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"), ERROR_FEEDBACK),
    "zero_optimization.offload_param.device": (
        ("nvme",),
        "others ask for a worker's parameters at any time; files are for optimizer state (`offload_optimizer`)",
    ),
}
"""Values of keys that are honoured otherwise, with the reason."""


def fate_of(key: str) -> Fate | None:
    """None for a key that has no row, nor its section one for all its keys."""
    section = key.rpartition(".")[0]
    return FATES.get(key) or FATES.get(f"{section}.*")


@cache
def sections() -> frozenset[str]:
    """The names of all sections that the table knows, dotted."""
    names: set[str] = set()
    for key in FATES:
        parts = key.split(".")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(names)
