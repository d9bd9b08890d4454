"""Loading: from a file or dict to a `TrainingConfig`, or to one sentence for each wrong key that says what is allowed.

Called once, when an engine is made; all errors are reported at once. Five steps: read, give old keys their names of
today (both in `shoal_protos`), sift out what only DeepSpeed knows (`sifting.py`), check against the models
(`document.py`), settle batch sizes and "auto" (`training.py`). Paths may contain variables as in a shell
(`$HOME/runs`); nothing behind this file looks at the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from shoal_protos.config_file import parsed_config, read_config
from shoal_protos.corruption import OnCorruption
from shoal_protos.description import OnSlow
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import BUILT_STAGES
from shoal_protos.old_config_keys import with_todays_names
from shoal_protos.shape import Shape
from shoal_protos.text import shown
from shoal_protos.training_log import get_logger
from shoal_protos.validation import MOST_FAULTS, what_is_left

from shoal.config.cell_section import cell_faults, impossible, shape_in
from shoal.config.document import Average, Cell, Checkpoint, Document, OffloadOptimizer, Optimizer
from shoal.config.sentences import all_of, misplaced_key, not_built, sentences_of, unread_in, wrong_value
from shoal.config.sifting import Sifted, sift
from shoal.config.training import (
    ACCUMULATION,
    BATCH,
    MICRO,
    Monitoring,
    Precision,
    Sizes,
    TrainingConfig,
    elastic_of,
    per_lane,
    precision_faults,
    settle,
)
from shoal.core.average_rule import AverageRule

NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay", "momentum_decay", "lambd")
"""Parameters of optimizers that are one number in every class that has them."""
Settled = TypeVar("Settled")
log = get_logger("shoal.config")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a script gives beside the file, which settles what the file leaves open."""

    shoal: Mapping[str, Any] | None = None
    """Keys of the section `shoal`."""
    micro_batch_size: int | None = None
    """Of a DataLoader that was given."""
    optimizer: bool = False
    """Whether an optimizer was given: what is "auto" is as it has it."""
    scheduler: bool = False
    open_end: bool = False
    """Whether the job may end where the scripts do: nothing in the file need say at which step."""


NOTHING_BESIDE = Beside()


def load_config(source: str | Path | Mapping[str, Any], beside: Beside = NOTHING_BESIDE) -> TrainingConfig:
    """Read, check and settle a configuration. Raises `UserError` with a sentence for each fault."""
    faults: list[str] = []
    given = _with_section_shoal(_given(source, faults), beside.shoal, faults)
    sifted = sift(given, faults)
    misplaced = [misplaced_key(key, place) for key, place in sifted.misplaced.items()]
    try:
        document = Document.model_validate(sifted.kept)
    except ValidationError as error:
        faults += sentences_of(error)
        unread = unread_in(error)
        more = [] if unread else _also_unfit(sifted.kept, error, faults, beside)
        raise UserError(all_of([*faults, *more, *misplaced], unread)) from None
    document = _below_root(document)
    settled = _resolve(document, faults, beside)
    if faults:
        raise UserError(all_of([*faults, *misplaced]))
    _tell(sifted)
    _tell_batch(document)
    assert settled is not None, "sizes that do not settle are a fault"
    return settled


def shape_of(source: str | Path | Mapping[str, Any]) -> Shape:
    """The shape that a configuration gives its cells, before anything else of it is read: a script needs it to build
    its model. Raises `UserError`.
    """
    faults: list[str] = []
    shoal = _given(source, faults).get("shoal")
    cell = shoal.get("cell", {}) if isinstance(shoal, Mapping) else {}
    try:
        shape = shape_in(Cell.model_validate(cell))
    except ValidationError as error:
        raise UserError(all_of([*faults, *sentences_of(error, Cell, "shoal.cell")])) from None
    faults += impossible(shape)
    if faults:
        raise UserError(all_of(faults))
    return shape


def _given(source: str | Path | Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """All that a file or dict says, with today's names of its keys."""
    if not isinstance(source, str | Path | Mapping):
        raise UserError(f"the config is a {type(source).__name__}; expected a path or a dict.")
    given = parsed_config(_as_json(source)) if isinstance(source, Mapping) else read_config(Path(source))
    return with_todays_names(given, faults)


def _tell(sifted: Sifted) -> None:
    """What of the file is not read, in one line for each reason."""
    if sifted.left_alone:
        log.info("DeepSpeed keys without meaning here are left alone", keys=sifted.left_alone)
    if sifted.unknown:
        more = len(sifted.unknown) - MOST_FAULTS
        log.info("keys that neither Shoal nor DeepSpeed reads are left alone", keys=sifted.unknown[:MOST_FAULTS],
                 **({"more": more} if more > 0 else {}))  # fmt: skip
    if sifted.misplaced:
        log.warning("keys are left alone where nothing reads them", belong_at=sifted.misplaced)


def _tell_batch(document: Document) -> None:
    """What `elasticity` has made of it, and of how many workers it is made evenly."""
    if (elastic := elastic_of(document)) is not None:
        sizes = elastic.sizes
        log.info("elastic_batch", train_batch_size=sizes.train_batch_size, micro_batch_size=sizes.micro_batch_size,
                 lanes=sizes.lanes, micro_batches_per_lane=sizes.micro_batches_per_lane,
                 even_workers=elastic.found.counts, min=elastic.least, max=elastic.most)  # fmt: skip


def _also_unfit(kept: Mapping[str, Any], error: ValidationError, faults: Sequence[str], beside: Beside) -> list[str]:
    """What does not fit together in the rest of a config that has faults, so that a second look finds no more."""
    left, keys = what_is_left(kept, error.errors(), Document)
    keys |= {key for one in faults for key in re.findall("did you mean `([^`]+)`", one)}
    try:
        document = Document.model_validate(left)
    except ValidationError:
        return []
    if "elasticity" in kept and document.elasticity is None:
        keys.add(BATCH)  # which the section would have determined
    more: list[str] = []
    _resolve(document, more, beside)
    return [one for one in more if not any(key in one for key in keys)]


def _with_section_shoal(given: dict[str, Any], more: Mapping[str, Any] | None, faults: list[str]) -> dict[str, Any]:
    """What a script says of our own section beside the file; both may say the same."""
    mine = given.get("shoal")
    if not more or not isinstance(mine, Mapping | None):
        return given
    more = parsed_config(_as_json(more))
    faults += [
        f"`shoal.{key}` is {shown(mine[key])} in the file and {shown(value)} beside it; keep one."
        for key, value in more.items()
        if mine and key in mine and mine[key] != value
    ]
    return {**given, "shoal": {**(mine or {}), **more}}


def _as_json(source: Mapping[str, Any]) -> str:
    """A dict as the file that it could be, so that both get the same checks."""
    try:
        return json.dumps(dict(source))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the config is not JSON: {error}.") from None


def _resolve(document: Document, faults: list[str], beside: Beside) -> TrainingConfig | None:
    """None where the sizes do not settle. What does not fit together is added to `faults`."""
    shoal = document.shoal
    faults += _unfit(document, beside)
    try:
        given, elastic = _sizes(document, beside), elastic_of(document)
        sizes = elastic.sizes if elastic else settle(given)
    except UserError as error:
        faults.append(f"{error}{_left_open(document)}")
        return None
    assert sizes.lanes and sizes.micro_batch_size and sizes.micro_batches_per_lane
    if elastic is None and given.lanes is None and given.micro_batch_size is None and not faults:
        means = "the greatest number up to 8 that divides the step's batch; `shoal.lanes` may say another"
        log.info("lanes", lanes=sizes.lanes, micro_batch_size=sizes.micro_batch_size, means=means)
    cell = shape_in(shoal.cell)
    calls = sizes.micro_batches_per_lane if cell.pipeline > 1 else 1
    return TrainingConfig(
        cell=cell,
        lanes=sizes.lanes,
        micro_batch_size=sizes.micro_batch_size * calls,
        micro_batches_per_lane=sizes.micro_batches_per_lane // calls,
        micro_batches_per_call=calls,
        elastic_workers=elastic.workers if elastic else None,
        min_workers=elastic.least if elastic else 0,
        max_workers=elastic.most if elastic else 0,
        mirrors=shoal.mirrors,
        mirrors_on_host=shoal.mirrors_on == "host",
        mirror_partners=shoal.mirror_partners,
        seed=shoal.seed,
        max_steps=shoal.max_steps,
        epochs=shoal.epochs,
        torch_threads=shoal.torch_threads or 1,
        fill_bytes_per_step=shoal.fill_bytes_per_step,
        elementwise=shoal.elementwise,
        whole=shoal.whole,
        units=shoal.units,
        activation_checkpointing=shoal.activation_checkpointing,
        cpu_checkpointing=_value_or_none(document.activation_checkpointing.cpu_checkpointing) or False,
        stop_on_nan=shoal.stop_on_nan,
        mixed_numerics=shoal.mixed_numerics,
        exact=shoal.exact,
        check_collectives=shoal.check_collectives,
        backend=shoal.backend,
        corruption_steps=shoal.corruption_steps,
        on_corruption=OnCorruption(shoal.on_corruption),
        on_slow=OnSlow(shoal.on_slow),
        stage=document.zero_optimization.stage,
        state_folder=_state_folder(document.zero_optimization.offload_optimizer),
        state_on_host=document.zero_optimization.offload_optimizer.device == "cpu",
        parameters_on_host=document.zero_optimization.offload_param.device == "cpu",
        gradient_clipping=float(_value_or_none(document.gradient_clipping) or 0.0),
        precision=Precision.of(document),
        average=_average(shoal.average),
        optimizer=document.optimizer,
        scheduler=document.scheduler,
        checkpoint=_with_paths(shoal.checkpoint),
        monitoring=Monitoring.of(document),
    )


def _sizes(document: Document, beside: Beside) -> Sizes:
    """A DataLoader's batch counts where the file says nothing of it. Raises `UserError`."""
    micro = _value_or_none(document.train_micro_batch_size_per_gpu)
    batch, lanes = _value_or_none(document.train_batch_size), document.shoal.lanes
    if micro is None and (batch is None or lanes is None):
        micro = beside.micro_batch_size
    accumulation = per_lane(document.shoal.micro_batches_per_lane, _value_or_none(document.gradient_accumulation_steps))
    return Sizes(batch, micro, lanes, accumulation, document.shoal.cell.expert)


def _left_open(document: Document) -> str:
    """What of the sizes is to be derived, where they cannot be."""
    keys = [f"`{key}`" for key in (BATCH, MICRO, ACCUMULATION) if getattr(document, key) == "auto"]
    if not keys:
        return ""
    named = " and ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys)
    return f' So the "auto" of {named} stays open.'


def _average(section: Average | None) -> AverageRule | None:
    return None if section is None else AverageRule(section.decay, section.every, section.from_step)


def _state_folder(offload: OffloadOptimizer) -> str | None:
    return expanded(offload.nvme_path) if offload.device == "nvme" and offload.nvme_path is not None else None


def _below_root(document: Document) -> Document:
    """Return the document with a path of checkpoints below that of SHOAL_CHECKPOINT_ROOT, where that is set and the
    document names none.
    """
    root, job = os.environ.get("SHOAL_CHECKPOINT_ROOT"), os.environ.get("SHOAL_JOB")
    checkpoint = document.shoal.checkpoint
    if not root or not job or "path" in checkpoint.model_fields_set:
        return document
    named = checkpoint.model_copy(update={"path": f"{root.rstrip('/')}/{job}"})
    return document.model_copy(update={"shoal": document.shoal.model_copy(update={"checkpoint": named})})


def _with_paths(checkpoint: Checkpoint) -> Checkpoint:
    given = {"path": checkpoint.path, "resume": checkpoint.resume}
    paths = {key: expanded(path) for key, path in given.items() if isinstance(path, str)}
    return checkpoint.model_copy(update=paths)


def _value_or_none(value: Settled | str | None) -> Settled | None:
    """The value, None where it is "auto" or not given."""
    return None if value is None or isinstance(value, str) else value


def _unfit(document: Document, beside: Beside) -> Iterator[str]:
    """What no single key is to blame for, or no model can know."""
    shoal = document.shoal
    if document.zero_optimization.stage not in BUILT_STAGES:
        yield not_built("zero_optimization.stage", document.zero_optimization.stage)
    offload = document.zero_optimization.offload_optimizer
    if offload.device == "nvme" and offload.nvme_path is None:
        key = "zero_optimization.offload_optimizer"
        yield f'`{key}.device` is "nvme", but no `{key}.nvme_path` says where; name a folder on a local disk.'
    paths = {
        "zero_optimization.offload_optimizer.nvme_path": offload.nvme_path,
        "shoal.checkpoint.path": shoal.checkpoint.path,
        "shoal.checkpoint.resume": shoal.checkpoint.resume,
    }
    for key, path in paths.items():
        if name := unset_variable(path):
            yield f"`{key}` is {shown(path)}, and the environment has no {name}; set it, or write the path out."
    if shoal.mirrors_on == "host":
        yield from _mirrors_on_host_faults(document)
    if shoal.max_steps is None and shoal.epochs is None and not beside.open_end:
        yield "neither `shoal.max_steps` nor `shoal.epochs` is given; the job needs one of them to end."
    yield from cell_faults(document)
    yield from precision_faults(document)
    yield from _wrong_parameters(document.optimizer, beside.optimizer)
    open_ended = document.scheduler and document.scheduler.params.get("warmup_num_steps") == "auto"
    if open_ended and not beside.scheduler:
        yield '`scheduler.params.warmup_num_steps` is "auto", and nothing determines it; give a number.'
    for key in ("every_steps", "every_minutes"):
        value = getattr(shoal.checkpoint, key)
        if value is not None and shoal.checkpoint.path is None:
            yield f"`shoal.checkpoint.{key}` is {shown(value)}, but no `shoal.checkpoint.path` says where to save."


def _mirrors_on_host_faults(document: Document) -> Iterator[str]:
    """Where none is kept, or all state is away from the device already."""
    device = document.zero_optimization.offload_optimizer.device
    if not document.shoal.mirrors and document.zero_optimization.stage:
        yield '`shoal.mirrors_on` is "host" and `shoal.mirrors` is 0: there are none; leave `mirrors_on` out.'
    if device != "none":
        where = "host memory" if device == "cpu" else "files"
        yield (
            f'`shoal.mirrors_on` is "host" and `zero_optimization.offload_optimizer.device` is "{device}": all state '
            f"is in {where} then, that of mirrors too; leave one of the two out."
        )


def _wrong_parameters(optimizer: Optimizer | None, is_given: bool) -> Iterator[str]:
    """Numbers that are text, which a class of torch would compare with numbers. `is_given`: there is an object too."""
    params = optimizer.params if optimizer else {}
    if params.get("lr") == "auto" and not is_given:
        yield '`optimizer.params.lr` is "auto", and nothing determines it; give a number.'
    for name, value in params.items():
        if name in NUMBERS and value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield wrong_value(f"optimizer.params.{name}", value, "a number")
    betas = params.get("betas", "auto")
    pair = isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas)
    if betas != "auto" and not pair:
        yield wrong_value("optimizer.params.betas", betas, "a list of two numbers")


VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)


def expanded(path: str) -> str:
    """Return the path with the values of the environment's variables."""
    return os.path.expandvars(path)


def unset_variable(path: object) -> str:
    """Return the name of the first variable in a path that the environment lacks; empty where it lacks none."""
    found = VARIABLE.finditer(path) if isinstance(path, str) else ()
    names = (match[1] or match[2] for match in found)
    return next((name for name in names if name not in os.environ), "")
