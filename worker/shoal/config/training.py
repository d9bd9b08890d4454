"""The settled configuration, by which the engine trains: batch sizes, precision and monitoring without any "auto".

Made by `load_config` alone. `agreement` is the part that must be the same on all workers of a job; the controller
compares it and names the first key that differs. `Monitoring` (DeepSpeed's keys for progress, times and trackers)
changes no bit and need not agree. `Precision`, from the sections `bf16` and `fp16`, says what parameters are kept in,
what the forward computes with and how it is scaled; dtypes are names, for there is no torch here.

`settle` is the batch arithmetic: train_batch_size = micro-batch × lanes × micro-batches per lane. Any three give the
fourth, and two of the first three the third where a lane has one micro-batch. A batch with neither micro-batch nor
lanes, as in DeepSpeed's own documents, is divided into as many lanes as fit, from the file alone: so they are the same
on any number of workers. Every contradiction gets its figures in one sentence. Where DeepSpeed's section `elasticity`
is on, `elastic_of` determines the sizes in its place, and of how many workers they know (the arithmetic is
`shoal_protos.elastic_batch`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from shoal_protos.corruption import OnCorruption
from shoal_protos.description import OnSlow
from shoal_protos.elastic_batch import ElasticBatch, ElasticLanes, batch_and_lanes
from shoal_protos.elastic_section import counted_in_cells
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST_LANES
from shoal_protos.shape import Shape
from shoal_protos.text import plural, shown

from shoal.config.cell_section import shape_in
from shoal.config.document import Checkpoint, CsvMonitor, Document, Optimizer, Scheduler, TensorBoard, Wandb
from shoal.core.average_rule import AverageRule
from shoal.core.loss_scale import LossScaleRule


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The resolved configuration. Fields as in docs/configuration.md unless said otherwise."""

    cell: Shape
    """What a cell is; of one process where nothing is said."""
    lanes: int
    micro_batch_size: int
    """Samples of one forward pass (`train_micro_batch_size_per_gpu`)."""
    micro_batches_per_lane: int
    """In a pipeline 1: a lane is one batch, which its schedule divides."""
    micro_batches_per_call: int
    """Into so many micro-batches; without a pipeline 1."""
    elastic_workers: int | None
    """The number of workers for which `elasticity` 0.2 has made the batch; None: the batch follows from no number."""
    min_workers: int
    """Fewest workers that `elasticity` is for; 0: there is no such section. A bound of a job that has none itself."""
    max_workers: int
    """Most workers, likewise."""
    mirrors: int
    mirrors_on_host: bool
    """Whether host memory keeps the state of blocks that others own: where parameters are there nothing changes."""
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
    whole: tuple[str, ...]
    units: tuple[str, ...]
    activation_checkpointing: Literal["units"] | tuple[str, ...]
    cpu_checkpointing: bool
    stop_on_nan: bool
    mixed_numerics: bool
    exact: bool
    check_collectives: bool
    backend: str
    """`auto` or `gloo`."""
    corruption_steps: int
    """0: off."""
    on_corruption: OnCorruption
    on_slow: OnSlow
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
    average: AverageRule | None
    """How weights are averaged; None: not at all."""
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
        return self.micro_batch_size * self.lanes * self.micro_batches_of_cell

    @property
    def micro_batches_of_cell(self) -> int:
        """Micro-batches of a lane, with those of all places of a cell's experts."""
        return self.micro_batches_per_lane * self.cell.expert


def agreement(config: TrainingConfig) -> dict[str, str]:
    """Dotted keys with values as JSON: all that changes bits, data order, length or what a vote carries. Not what only
    guards (elementwise), paces (fill_bytes_per_step, on_slow), spreads (mirror_partners), saves memory (activation
    checkpointing, offload) or is compared elsewhere (threads: in the numeric identity)."""
    elastic = {} if config.elastic_workers is None else {"elasticity workers": config.elastic_workers}
    compares = {"shoal.check_collectives": True} if config.check_collectives else {}
    averages = {} if config.average is None else {"shoal.average": asdict(config.average)}
    routes = {"shoal.mirrors_on": "host"} if config.mirrors_on_host and config.stage > 1 else {}  # by the host
    piped = {"micro-batches of a schedule": config.micro_batches_per_call} if config.cell.pipeline > 1 else {}
    values: dict[str, object] = {
        **elastic,
        **compares,
        **averages,
        **routes,
        **piped,
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


BREAKDOWN_STEPS = 10
"""Steps between two lines of times where nothing else is said: DeepSpeed's default of `steps_per_print`."""


@dataclass(frozen=True, slots=True)
class Monitoring:
    """Of one job. None: not wanted."""

    steps_per_line: int | None
    times: bool
    dump: bool
    tensorboard: TensorBoard | None
    csv: CsvMonitor | None
    wandb: Wandb | None

    @classmethod
    def of(cls, document: Document) -> Monitoring:
        given, times = document.steps_per_print, document.wall_clock_breakdown is True
        steps = given if isinstance(given, int) else BREAKDOWN_STEPS if times else None
        return cls(
            steps, times, document.dump_state is True,
            document.tensorboard if document.tensorboard.enabled else None,
            document.csv_monitor if document.csv_monitor.enabled else None,
            document.wandb if document.wandb.enabled else None,
        )  # fmt: skip

    @property
    def has_writers(self) -> bool:
        """Whether numbers are written for a tracker."""
        return any(one is not None for one in (self.tensorboard, self.csv, self.wandb))


Half = Literal["bfloat16", "float16"]
TRAVELS_AS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one job."""

    parameters: Half | None = None
    """What parameters are rounded to; None: they stay as the script made them."""
    autocast: Half | None = None
    """What the forward computes with where it may (`auto_cast`); None: with the parameters' own."""
    scaling: LossScaleRule | None = None
    """How losses are scaled; None: not at all."""

    @classmethod
    def of(cls, document: Document) -> Precision:
        """`document`: without the faults that `precision_faults` finds."""
        bf16, fp16 = document.bf16, document.fp16
        if bf16.enabled is True:
            return cls(None, "bfloat16") if bf16.auto_cast else cls("bfloat16")
        if fp16.enabled is True:
            scaling = LossScaleRule(**fp16.model_dump(exclude={"enabled", "auto_cast"}))
            scaling = scaling.in_stage_0() if document.zero_optimization.stage == 0 else scaling
            return cls(None, "float16", scaling) if fp16.auto_cast else cls("float16", None, scaling)
        return cls()


def precision_faults(document: Document) -> Iterator[str]:
    """What does not fit together."""
    if document.bf16.enabled is True and document.fp16.enabled is True:
        yield "`bf16.enabled` and `fp16.enabled` are both true; keep one."
    fp16, first = document.fp16, 2.0**document.fp16.initial_scale_power
    if fp16.enabled is True and not fp16.loss_scale and fp16.min_loss_scale > first:
        yield (
            f"`fp16.min_loss_scale` is {fp16.min_loss_scale:g}, and the scale begins with 2^{fp16.initial_scale_power} "
            f"= {first:g} (`fp16.initial_scale_power`); the smallest cannot be above the first."
        )
    travels, precision = document.communication_data_type, Precision.of(document)
    if travels in ("auto", "fp32", None) or travels == TRAVELS_AS.get(str(precision.parameters)):
        return
    yield (
        f"`communication_data_type` is {shown(travels)}, and parameters are {precision.parameters or 'float32'}: "
        "gradients would be rounded before they are added up. Gradients of half-precision parameters travel in their "
        "own dtype and are added up in float32 anyway; remove the key."
    )


BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
LANES = "shoal.lanes"
PER_LANE = "shoal.micro_batches_per_lane"
ACCUMULATION = "gradient_accumulation_steps"
EXPERT = "shoal.cell.expert"
LANES_UNSAID = 8
"""At most so many lanes has a job of which only the batch is given."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the file says, and after `settle` what holds. None: not said, or "auto"."""

    train_batch_size: int | None
    micro_batch_size: int | None
    lanes: int | None
    micro_batches_per_lane: int | None
    """Of one place of a cell's experts."""
    experts: int = 1
    """How many such places a cell has."""

    @property
    def times(self) -> str:
        """What a lane's micro-batches are multiplied by, as sentences name it."""
        return f" × `{EXPERT}` {self.experts}" if self.experts > 1 else ""


def per_lane(micro_batches_per_lane: int | None, accumulation: int | None) -> int | None:
    """DeepSpeed's gradient_accumulation_steps is another name for a lane's micro-batches."""
    if micro_batches_per_lane and accumulation and micro_batches_per_lane != accumulation:
        raise UserError(
            f"`{PER_LANE}` is {micro_batches_per_lane} and `{ACCUMULATION}` is {accumulation}; both say how many "
            "micro-batches a lane accumulates. Give one of them."
        )
    return micro_batches_per_lane or accumulation


def settle(given: Sizes) -> Sizes:
    """All of them, or the sentence that says why they do not fit together."""
    batch, micro, lanes, experts = given.train_batch_size, given.micro_batch_size, given.lanes, given.experts
    accumulated = given.micro_batches_per_lane or 1
    of_lane = f"{PER_LANE} {accumulated}{given.times}"
    if batch is None:
        if micro is None or lanes is None:
            raise UserError(_too_few(given))
        return Sizes(micro * lanes * accumulated * experts, micro, lanes, accumulated, experts)
    if micro is None and lanes is None:
        parts = _divide(batch, accumulated * experts, "micro-batches", of_lane)
        lanes = next(lanes for lanes in range(LANES_UNSAID, 0, -1) if parts % lanes == 0)
    if lanes is None:
        assert micro is not None
        lanes = _divide(batch, micro * accumulated * experts, "lanes", f"{MICRO} {micro} × {of_lane}")
        if lanes > MOST_LANES:
            raise UserError(
                f"`{BATCH}` {batch} and `{MICRO}` {micro} make {lanes} lanes; at most {MOST_LANES} are allowed. "
                f"Raise `{MICRO}` or `{PER_LANE}`."
            )
    if micro is not None and given.micro_batches_per_lane is None and batch % (micro * lanes * experts) == 0:
        accumulated = batch // (micro * lanes * experts)
    if micro is None:
        micro = _divide(batch, lanes * accumulated * experts, "micro-batches", f"{LANES} {lanes} × {of_lane}")
    settled = Sizes(batch, micro, lanes, accumulated, experts)
    if batch != micro * lanes * accumulated * experts:
        raise UserError(_contradiction(settled))
    return settled


def _too_few(given: Sizes) -> str:
    names = {BATCH: given.train_batch_size, MICRO: given.micro_batch_size, LANES: given.lanes}
    known = [f"`{name}` {value}" for name, value in names.items() if value is not None]
    return (
        f"two of `{BATCH}`, `{MICRO}` and `{LANES}` are needed to derive the third; "
        f"{'only ' + known[0] if known else 'none of them'} is given."
    )


def _divide(batch: int, by: int, parts: str, shown: str) -> int:
    if batch % by:
        raise UserError(
            f"`{BATCH}` {batch} does not divide into {parts}: {shown} is {by}, and {batch} / {by} is not whole."
        )
    return batch // by


def _contradiction(sizes: Sizes) -> str:
    batch, micro, lanes, accumulated = (
        sizes.train_batch_size, sizes.micro_batch_size, sizes.lanes, sizes.micro_batches_per_lane,
    )  # fmt: skip
    assert batch and micro and lanes and accumulated
    product = micro * lanes * accumulated * sizes.experts
    sentence = (
        f"`{BATCH}` is {batch}, but `{MICRO}` {micro} × `{LANES}` {lanes} × `{PER_LANE}` {accumulated}{sizes.times} "
        f"is {product}."
    )
    return f"{sentence} Leave one of them out."


WANTED = "SHOAL_WANTED_WORKERS"
"""The variable by which a launcher tells workers for how many of them the job was submitted."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """What the section comes to."""

    found: ElasticBatch
    lanes: ElasticLanes
    workers: int | None
    """The number that version 0.2 has looked at."""
    least: int
    """Fewest workers that the section is for."""
    most: int
    """Most workers."""

    @property
    def sizes(self) -> Sizes:
        lanes = self.lanes
        return Sizes(self.found.batch, lanes.micro_batch, lanes.lanes, lanes.micro_batches_per_lane)


def elastic_of(document: Document, environment: Mapping[str, str] = os.environ) -> Elastic | None:
    """None where the section is off. Raises `UserError`."""
    section = document.elasticity
    if section is None:
        return None
    cell = shape_in(document.shoal.cell)
    in_cells = counted_in_cells(section, cell)
    if not section.ignore_non_elastic_batch_info:
        _refuse_batch_keys(document)
    submitted = _workers_at_submission(environment, is_needed=section.version == "0.2")
    if submitted is not None and not section.min_gpus <= submitted <= section.max_gpus:
        raise UserError(
            f"the job was submitted with {plural(submitted, 'worker')}, and `elasticity.min_gpus` is "
            f"{section.min_gpus}, `elasticity.max_gpus` {section.max_gpus}; submit it with a number "
            "between them, or change the section."
        )
    workers = (submitted or 1) if section.version == "0.2" else None
    cells = None if workers is None else max(1, workers // cell.processes)
    found, lanes = batch_and_lanes(in_cells, document.zero_optimization.stage, cells)
    _compare(document, lanes)
    least, most = (cell.processes * count for count in (in_cells.min_gpus, min(in_cells.max_gpus, lanes.lanes)))
    counts = tuple(cell.processes * count for count in found.counts)
    return Elastic(replace(found, counts=counts), lanes, workers, least, most)


def _refuse_batch_keys(document: Document) -> None:
    given = [f"`{key}`" for key in (BATCH, MICRO, ACCUMULATION) if getattr(document, key) not in (None, "auto")]
    if given:
        raise UserError(
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given beside `elasticity`, which determines "
            "the batch; leave out the one or the other, or set `elasticity.ignore_non_elastic_batch_info`."
        )


def _compare(document: Document, found: ElasticLanes) -> None:
    shoal = document.shoal
    both = {LANES: (shoal.lanes, found.lanes), PER_LANE: (shoal.micro_batches_per_lane, found.micro_batches_per_lane)}
    for key, (given, meant) in both.items():
        if given is not None and given != meant:
            raise UserError(f"`{key}` is {given}, and `elasticity` makes it {meant}; leave it out.")


def _workers_at_submission(environment: Mapping[str, str], is_needed: bool) -> int | None:
    """None for a script that trains alone, and where no number is needed nor told. Raises `UserError`."""
    given = environment.get(WANTED, "")
    if given.isascii() and given.isdecimal() and int(given) > 0:
        return int(given)
    if given or (is_needed and environment.get("SHOAL_CONTROLLER")):
        raise UserError(
            f"`elasticity.version` 0.2 makes the batch for the number of workers that the job was submitted with, and "
            f"{WANTED} is {given or 'not set'}; set it to the job's `workers.wanted` on every worker that no launcher "
            "starts, or take version 0.1, which needs no number."
        )
    return None
