"""From a file or dict to a `TrainingConfig`, or to one sentence for each wrong key that says what is allowed.

Called once, by `shoal.initialize`. All errors are reported at once. Four steps: read (JSON), sift out what only
DeepSpeed knows (`deepspeed.py`), check against the models (`document.py`), settle batch sizes and "auto" (`batch.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from shoal_protos.config_file import parsed_config, read_config
from shoal_protos.corruption import OnCorruption
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import BUILT_STAGES
from shoal_protos.validation import shown

from shoal.config.batch import Sizes, per_lane, settle
from shoal.config.deepspeed import NOT_BUILT, REFUSED, SAME_ON_CPU, WITHOUT_MEANING, sections
from shoal.config.document import Checkpoint, Document, OffloadOptimizer, Optimizer
from shoal.config.precision import Precision, precision_faults
from shoal.config.sentences import all_of, keys_of, not_built, refused_value, sentences_of, unknown_key, wrong_value
from shoal.config.training import TrainingConfig
from shoal.logs import get_logger

NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay", "momentum_decay", "lambd")
"""Parameters of optimizers that are one number in every class that has them."""
Settled = TypeVar("Settled")
OUR_SECTIONS = frozenset(
    key for key in keys_of(Document) if any(one.startswith(f"{key}.") for one in keys_of(Document))
)
"""Dotted names of the models' sections."""
log = get_logger("shoal.config")


def load_config(source: str | Path | Mapping[str, Any]) -> TrainingConfig:
    """Read, check and settle a configuration. Raises `UserError` with a sentence for each fault."""
    if not isinstance(source, str | Path | Mapping):
        raise UserError(f"the config is a {type(source).__name__}; expected a path or a dict.")
    given = parsed_config(_as_json(source)) if isinstance(source, Mapping) else read_config(Path(source))
    if "bfloat16" in given and "bf16" not in given:
        given["bf16"] = given.pop("bfloat16")  # DeepSpeed's name of it in earlier versions
    faults: list[str] = []
    kept, ignored = sift(given, faults)
    try:
        document = Document.model_validate(kept)
    except ValidationError as error:
        raise UserError(all_of([*faults, *sentences_of(error)])) from None
    settled = _resolve(document, faults, ignored)
    if faults:
        raise UserError(all_of(faults))
    if ignored:
        log.info("DeepSpeed keys without meaning here are left alone", keys=ignored)
    assert settled is not None, "sizes that do not settle are a fault"
    return settled


def _as_json(source: Mapping[str, Any]) -> str:
    """A dict as the file that it could be, so that both get the same checks."""
    try:
        return json.dumps(dict(source))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the config is not JSON: {error}.") from None


def sift(given: Mapping[str, Any], faults: list[str], section: str = "") -> tuple[dict[str, Any], list[str]]:
    """Take out what only DeepSpeed knows. Returns what the models must check, and the dotted keys left alone.

    What is wrong with the rest of it is added to `faults`.
    """
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in given.items():
        name = f"{section}.{key}" if section else key
        if name in NOT_BUILT:
            if _is_among(value, SAME_ON_CPU.get(name, ())):
                ignored.append(name)
            elif not _is_among(value, NOT_BUILT[name]):
                faults.append(not_built(name, value))
        elif _is_among(value, REFUSED.get(name, ())):
            faults.append(refused_value(name, value))
        elif misplaced := _of_the_section_shoal(name, value):
            faults += misplaced
        elif name in WITHOUT_MEANING or f"{section}.*" in WITHOUT_MEANING:
            ignored.append(name)
        elif name in sections():
            if value is None:
                continue
            if not isinstance(value, Mapping):
                faults.append(wrong_value(name, value, "an object {…}"))
                continue
            inner, below = sift(value, faults, name)
            ignored += below
            if name in OUR_SECTIONS:
                kept[key] = inner
            else:
                faults += [unknown_key(f"{name}.{other}", inner[other]) for other in inner]
        else:
            kept[key] = value
    return kept, ignored


def _is_among(value: object, values: tuple[object, ...]) -> bool:
    """`True` is not 1 here."""
    return any(value is one or (type(value) is type(one) and value == one) for one in values)


def _of_the_section_shoal(name: str, value: object) -> list[str]:
    """DeepSpeed has a section `checkpoint` too, whose keys mean nothing here; ours are looked for under `shoal`."""
    if name != "checkpoint" or not isinstance(value, Mapping):
        return []
    ours = [key for key in value if key in Checkpoint.model_fields]
    return [
        f"`checkpoint.{key}` is given at the top level, where it has no meaning; did you mean `shoal.checkpoint.{key}`?"
        for key in ours
    ]


def _resolve(document: Document, faults: list[str], ignored: list[str]) -> TrainingConfig | None:
    """None where the sizes do not settle. What does not fit together is added to `faults`.

    `ignored`: keys that were left alone.
    """
    shoal = document.shoal
    faults += _unfit(document)
    try:
        sizes = settle(
            Sizes(
                _value_or_none(document.train_batch_size),
                _value_or_none(document.train_micro_batch_size_per_gpu),
                shoal.lanes,
                per_lane(shoal.micro_batches_per_lane, _value_or_none(document.gradient_accumulation_steps)),
            )
        )
    except UserError as error:
        faults.append(str(error))
        return None
    assert sizes.lanes and sizes.micro_batch_size and sizes.micro_batches_per_lane
    return TrainingConfig(
        lanes=sizes.lanes,
        micro_batch_size=sizes.micro_batch_size,
        micro_batches_per_lane=sizes.micro_batches_per_lane,
        mirrors=shoal.mirrors,
        mirror_partners=shoal.mirror_partners,
        seed=shoal.seed,
        max_steps=shoal.max_steps,
        epochs=shoal.epochs,
        torch_threads=shoal.torch_threads or 1,
        fill_bytes_per_step=shoal.fill_bytes_per_step,
        elementwise=shoal.elementwise,
        units=shoal.units,
        activation_checkpointing=shoal.activation_checkpointing,
        cpu_checkpointing=_value_or_none(document.activation_checkpointing.cpu_checkpointing) or False,
        stop_on_nan=shoal.stop_on_nan,
        mixed_numerics=shoal.mixed_numerics,
        exact=shoal.exact,
        corruption_steps=shoal.corruption_steps,
        on_corruption=OnCorruption(shoal.on_corruption),
        stage=document.zero_optimization.stage,
        state_folder=_state_folder(document.zero_optimization.offload_optimizer),
        state_on_host=document.zero_optimization.offload_optimizer.device == "cpu",
        host_only=tuple(key for key in ignored if key in SAME_ON_CPU),
        gradient_clipping=float(_value_or_none(document.gradient_clipping) or 0.0),
        precision=Precision.of(document),
        optimizer=document.optimizer,
        scheduler=document.scheduler,
        checkpoint=shoal.checkpoint,
    )


def _state_folder(offload: OffloadOptimizer) -> str | None:
    return offload.nvme_path if offload.device == "nvme" else None


def _value_or_none(value: Settled | str | None) -> Settled | None:
    """The value, None where it is "auto" or not given."""
    return None if value is None or isinstance(value, str) else value


def _unfit(document: Document) -> Iterator[str]:
    """What no single key is to blame for, or no model can know."""
    shoal = document.shoal
    if document.zero_optimization.stage not in BUILT_STAGES:
        yield not_built("zero_optimization.stage", document.zero_optimization.stage)
    offload = document.zero_optimization.offload_optimizer
    if offload.device == "nvme" and offload.nvme_path is None:
        key = "zero_optimization.offload_optimizer"
        yield f'`{key}.device` is "nvme", but no `{key}.nvme_path` says where; name a folder on a local disk.'
    if shoal.max_steps is None and shoal.epochs is None:
        yield "neither `shoal.max_steps` nor `shoal.epochs` is given; the job needs one of them to end."
    yield from precision_faults(document)
    yield from _wrong_parameters(document.optimizer)
    if document.scheduler and document.scheduler.params.get("warmup_num_steps") == "auto":
        yield '`scheduler.params.warmup_num_steps` is "auto", and nothing determines it; give a number.'
    for key in ("every_steps", "every_minutes"):
        value = getattr(shoal.checkpoint, key)
        if value is not None and shoal.checkpoint.path is None:
            yield f"`shoal.checkpoint.{key}` is {shown(value)}, but no `shoal.checkpoint.path` says where to save."


def _wrong_parameters(optimizer: Optimizer | None) -> Iterator[str]:
    """Numbers that are text, which a class of torch would compare with numbers."""
    params = optimizer.params if optimizer else {}
    if params.get("lr") == "auto":
        yield '`optimizer.params.lr` is "auto", and nothing determines it; give a number.'
    for name, value in params.items():
        if name in NUMBERS and value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield wrong_value(f"optimizer.params.{name}", value, "a number")
    betas = params.get("betas", "auto")
    pair = isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas)
    if betas != "auto" and not pair:
        yield wrong_value("optimizer.params.betas", betas, "a list of two numbers")
