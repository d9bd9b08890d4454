"""`deepspeed.initialize`: takes what DeepSpeed's takes, and gives back an engine, its optimizer, a loader, a scheduler.

All that is wrong with the arguments is one sentence; what the engine is made of is Shoal's own (training/start.py).
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal_protos.all_at_once import Refusals
from shoal_protos.errors import UserError
from shoal_protos.shape import DIMENSIONS, ONE
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.load import Beside, load_config, shape_of
from shoal.config.sentences import all_of
from shoal.data.given_data import GivenData, batch_size_of, check_batch_size, data_of
from shoal.deepspeed import rank_reads
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.deepspeed.lone_group import init_distributed
from shoal.deepspeed.own_loader import LateSource
from shoal.deepspeed.pipe import PipelineModule
from shoal.deepspeed.pipeline_engine import PipelineEngine
from shoal.deepspeed.surface import ARGUMENTS
from shoal.deepspeed.zero_to_fp32 import leave_script
from shoal.guards.arguments import check_given, refuse_cells, refuse_unknown
from shoal.session.error_hook import tell_errors_in_a_sentence
from shoal.training.start import Given, assemble

Made = tuple[DeepSpeedEngine, Optimizer, ElasticLoader | None, LRScheduler | None]


def initialize(*by_position: Any, **named: Any) -> Made:
    """DeepSpeed's `initialize`, with one argument more: `shoal`, keys of the configuration's section of that name.

    The other arguments are in docs/deepspeed.md. Raises `UserError` with one sentence for anything that cannot work.
    """
    tell_errors_in_a_sentence()
    given = _arguments(by_position, named)
    refusals, samples = Refusals("deepspeed.initialize"), given.get("training_data")
    refusals.of(_check_meaning, given)
    data = refusals.of(_data, samples, given.get("collate_fn"))
    model, parameters = given.get("model"), given.get("model_parameters")
    parameters = list(parameters) if parameters is not None else None
    optimizer, scheduler = given.get("optimizer"), given.get("lr_scheduler")
    if isinstance(model, PipelineModule):
        optimizer = refusals.of(_of_all_stages, model, optimizer, parameters)
    elif optimizer is not None and _is_function(optimizer):
        optimizer = optimizer(parameters if parameters is not None else _trainable(model))
    made = [None if _is_function(one) else one for one in (optimizer, scheduler)]
    refusals.of(check_given, model, *made)
    source = refusals.of(_config, given)
    shoal = _section(given.get("shoal"), source, model)
    beside = Beside(shoal, batch_size_of(samples), optimizer is not None, scheduler is not None, open_end=True)
    config = refusals.of(load_config, source, beside) if source is not None else None
    if config is not None:
        if not isinstance(model, PipelineModule):
            refusals.of(refuse_cells, "deepspeed.initialize of a model that is no PipelineModule", config.cell)
        micro = config.micro_batch_size // config.micro_batches_per_call
        refusals.of(check_batch_size, samples, micro, config.train_batch_size)
    refusals.raise_all()
    assert isinstance(model, nn.Module) and data is not None and config is not None, "refused otherwise"
    late = LateSource() if samples is None else None
    given_parts = Given(
        model, config, data.dataset, optimizer, scheduler, data.collate_fn, parameters, data.reading, late
    )
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    engine = kind(assemble(given_parts))
    if config.checkpoint.path is not None:
        leave_script(config.checkpoint.path)
    if samples is None:
        init_distributed()
        engine.take_own_loaders()
    return engine, engine.optimizer, engine.training_dataloader if samples is not None else None, engine.lr_scheduler


def _arguments(by_position: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    if len(by_position) > len(ARGUMENTS):
        raise UserError(f"deepspeed.initialize takes {len(ARGUMENTS)} arguments; got {len(by_position)}.")
    refuse_unknown("deepspeed.initialize", [name for name in named if name not in ARGUMENTS], ARGUMENTS)
    placed = dict(zip(ARGUMENTS, by_position, strict=False))
    twice = [name for name in named if name in placed]
    if twice:
        raise UserError(f"deepspeed.initialize got {', '.join(twice)} by position and by name; keep one.")
    return {**placed, **named}


def _check_meaning(given: Mapping[str, Any]) -> None:
    """Raises `UserError` for arguments that have none here."""
    faults = [
        f"deepspeed.initialize got {name}; shoal.cell says which processes train a lane together. Leave it out."
        for name in ("mpu", "mesh_param")
        if given.get(name) is not None
    ]
    if faults:
        raise UserError(all_of(faults))


def _data(samples: Any, collate_fn: Any) -> GivenData:
    rank_reads.check()
    return data_of(samples, collate_fn, "training_data") if samples is not None else GivenData(None, collate_fn)


def _config(given: Mapping[str, Any]) -> str | Path | Mapping[str, Any]:
    named = {name: given.get(name) for name in ("config", "config_params")}
    named["args.deepspeed_config"] = getattr(given.get("args"), "deepspeed_config", None)
    found = {name: value for name, value in named.items() if value is not None}
    if not found:
        raise UserError(
            "deepspeed.initialize got no config; give it config= (a path or a dict), or --deepspeed_config."
        )
    first, *others = found
    if any(found[other] != found[first] for other in others):
        raise UserError(f"deepspeed.initialize got {first} and {', '.join(others)}, which differ; keep one.")
    config: str | Path | Mapping[str, Any] = found[first]
    return config


def _section(
    shoal: Mapping[str, Any] | None, source: str | Path | Mapping[str, Any] | None, model: Any
) -> Mapping[str, Any] | None:
    """The keys beside the file, with the cell of a `PipelineModule` where nothing says its shape."""
    if not isinstance(model, PipelineModule) or not isinstance(shoal, Mapping | None) or source is None:
        return shoal
    try:
        has_shape = "cell" in (shoal or {}) or shape_of(source) != ONE
    except UserError:  # load_config says it
        has_shape = True
    if has_shape:
        return shoal
    sizes = {name: getattr(model.cell.shape, name) for name in DIMENSIONS}
    return {**(shoal or {}), "cell": {**sizes, "tight": list(model.cell.shape.tight)}}


def _of_all_stages(model: PipelineModule, optimizer: Any, parameters: list[Any] | None) -> Any:
    """The optimizer as it is given, or what makes one of any stages. Raises `UserError` for groups of parameters of one
    stage alone.
    """
    if _is_function(optimizer):
        return lambda stages: optimizer(_trainable(stages))
    groups = len(optimizer.param_groups) if isinstance(optimizer, Optimizer) else len(_groups(parameters))
    if groups > 1 and len(model.places) > 1:
        raise UserError(
            f"deepspeed.initialize got {groups} groups of parameters for a stage of a PipelineModule, and nothing says "
            "in which group those of other stages are; give a function that divides the parameters of any stage: "
            "optimizer=lambda parameters: AdamW(groups_of(parameters))."
        )
    return optimizer


def _groups(parameters: list[Any] | None) -> list[Any]:
    return [one for one in parameters or [] if isinstance(one, Mapping)]


def _is_function(given: Any) -> bool:
    return callable(given) and not isinstance(given, Optimizer | LRScheduler)


def _trainable(model: Any) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad] if isinstance(model, nn.Module) else []


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`; the first is there for scripts that ask whether it is given."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="Train with an engine.")
    group.add_argument("--deepspeed_config", type=str, default=None, help="Path of the configuration.")
    return parser
