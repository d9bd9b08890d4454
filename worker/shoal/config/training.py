"""What the engine trains by: a configuration with batch sizes and "auto" settled. Made by `load_config` alone.

`agreement` is the part of it that must be the same on all workers of a job; the controller compares it and names the
first key that differs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from shoal_protos.corruption import OnCorruption

from shoal.config.document import Checkpoint, Optimizer, Scheduler
from shoal.config.monitoring import Monitoring
from shoal.config.precision import Precision


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The resolved configuration. Fields as in docs/configuration.md unless said otherwise."""

    lanes: int
    micro_batch_size: int
    """Samples of one forward pass (`train_micro_batch_size_per_gpu`)."""
    micro_batches_per_lane: int
    elastic_workers: int | None
    """The number of workers for which `elasticity` 0.2 has made the batch; None: the batch follows from no number."""
    min_workers: int
    """Fewest workers that `elasticity` is for; 0: there is no such section. A bound of a job that has none itself."""
    max_workers: int
    """Most workers, likewise."""
    mirrors: int
    mirror_partners: int
    """Mirrors as given: not yet limited by the world nor raised by stage 0."""
    seed: int
    max_steps: int | None
    """Neither `max_steps` nor `epochs`: the job ends where its scripts do."""
    epochs: int | None
    torch_threads: int
    fill_bytes_per_step: int
    """0: the planner decides."""
    elementwise: bool
    units: tuple[str, ...]
    activation_checkpointing: Literal["units"] | tuple[str, ...]
    cpu_checkpointing: bool
    stop_on_nan: bool
    mixed_numerics: bool
    exact: bool
    backend: str
    """`auto` or `gloo`."""
    corruption_steps: int
    """0: off."""
    on_corruption: OnCorruption
    stage: int
    state_folder: str | None
    """Where a file keeps optimizer state (`offload_optimizer.nvme_path`); None: memory does."""
    state_on_host: bool
    """Whether host memory keeps it (`offload_optimizer.device`): where parameters are on the host nothing changes."""
    parameters_on_host: bool
    """Whether it keeps parameters of held blocks too (`offload_param.device`), in stage 3; likewise."""
    gradient_clipping: float
    """0: off."""
    precision: Precision
    optimizer: Optimizer | None
    scheduler: Scheduler | None
    checkpoint: Checkpoint
    monitoring: Monitoring

    @property
    def is_open(self) -> bool:
        """Whether nothing says beforehand at which step the job ends."""
        return self.max_steps is None and self.epochs is None

    @property
    def updates_on_host(self) -> bool:
        """Whether updates are made on the CPU, wherever parameters are."""
        return self.state_on_host or self.state_folder is not None

    @property
    def train_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch_size * self.lanes * self.micro_batches_per_lane


def agreement(config: TrainingConfig) -> dict[str, str]:
    """Dotted keys with values as JSON: all that changes bits, data order, length or what a vote carries. Not what only
    guards (elementwise), paces (fill_bytes_per_step), spreads (mirror_partners), saves memory (activation
    checkpointing, offload) or is compared elsewhere (threads: in the numeric identity)."""
    elastic = {} if config.elastic_workers is None else {"elasticity workers": config.elastic_workers}
    values: dict[str, object] = {
        **elastic,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization.stage": config.stage,
        "shoal.lanes": config.lanes,
        "shoal.micro_batches_per_lane": config.micro_batches_per_lane,
        "shoal.mirrors": config.mirrors,
        "shoal.seed": config.seed,
        "shoal.max_steps": config.max_steps,
        "shoal.epochs": config.epochs,
        "shoal.units": sorted(set(config.units)),
        "shoal.exact": config.exact,
        "shoal.corruption_steps": config.corruption_steps,
        "shoal.on_corruption": config.on_corruption,
        **_precision(config.precision),
    }
    for section, spec in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        values[f"{section}.type"] = spec.type if spec else None
        for name, value in (spec.params if spec else {}).items():
            values[f"{section}.params.{name}"] = value
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def _precision(precision: Precision) -> dict[str, object]:
    values: dict[str, object] = {}
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        values[f"{section}.enabled"] = dtype in (precision.parameters, precision.autocast)
        values[f"{section}.auto_cast"] = precision.autocast == dtype
    scaling = asdict(precision.scaling) if precision.scaling else {}
    return values | {f"fp16.{name}": value for name, value in scaling.items()}
