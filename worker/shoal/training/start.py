"""`shoal.initialize`: checks what the script gave and puts the engine together. Nothing else lives here.

Kinds of objects that cannot work are refused by name before anything is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch
from shoal_protos.all_at_once import Refusals
from shoal_protos.description import Description, Parameter
from shoal_protos.errors import UserError
from shoal_protos.messages import MemberState, Status
from shoal_protos.runs import Runs
from shoal_protos.shape import ONE, Shape
from shoal_protos.training_log import get_logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.blocks.flat import trainable
from shoal.blocks.loaded_state import probe_state_bytes
from shoal.cells.hub import CellHub, current_hub
from shoal.cells.marks import copies, is_divided, local_of, marks, ties
from shoal.cells.stages import Stages, places_of
from shoal.checkpoint.catalogue import places
from shoal.checkpoint.place_marks import leave_mark
from shoal.config.load import Beside, load_config
from shoal.config.out_of_memory import initializing
from shoal.config.sentences import all_of
from shoal.config.training import TrainingConfig, agreement
from shoal.core.cell_part import CellPart
from shoal.core.cuts import Cut
from shoal.core.layout import Layout, Trainable
from shoal.core.plain import encode
from shoal.core.ties import check_divisions, check_groups
from shoal.core.units import named_buffers, named_parameters, plain_name
from shoal.data.data_workers import HERE, Reading
from shoal.data.fetch import Fetcher
from shoal.data.given_data import batch_size_of, check_batch_size, data_of, micro_batches_of
from shoal.data.source import Source
from shoal.data.stream_source import source_of
from shoal.exchange.world import PEER_FORM
from shoal.guards.arguments import SEVERAL, check_given, lay_out_once, refuse_unknown
from shoal.optim.config_sections import (
    build_optimizer,
    build_scheduler,
    check_scheduled,
    check_total,
    optimizer_differs,
    scheduler_differs,
)
from shoal.optim.elementwise import check_optimizer
from shoal.optim.hyper import take_over
from shoal.optim.schedules import class_of
from shoal.optim.several import Optimizers, Schedulers, Several, schedulers_of, schedules, several, title_of
from shoal.process.device import Device
from shoal.process.faults import Faults
from shoal.process.host_memory import keep_freed_memory
from shoal.process.numerics import identity, make_exact
from shoal.session.error_hook import tell_errors_in_a_sentence
from shoal.session.link import Link
from shoal.session.link_choice import has_peers_on_host_alone, is_worker, open_link
from shoal.session.seat import check_seat, own_identity
from shoal.state.training_state import NO_STEP, Limits, TrainingState
from shoal.training.activation_checkpointing import checkpoint_activations
from shoal.training.engine import Engine
from shoal.training.exit import serve_at_exit, trace_crashes
from shoal.training.monitoring import check_monitoring, show
from shoal.training.residency import residency_of

log = get_logger("shoal")


MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, slots=True)
class Given:
    """What an engine is made of."""

    model: nn.Module
    config: TrainingConfig
    dataset: Any
    optimizer: Optimizers | MakeOptimizer | None = None
    """None: the config names it. A function makes that of any stages of a pipeline."""
    scheduler: Schedulers | Callable[[Optimizer], LRScheduler] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    parameters: Iterable[Any] | None = None
    """What the config's optimizer trains, parameters or groups of them; None: all that require a gradient."""
    reading: Reading = HERE
    """How samples are read ahead."""
    source: Source | None = None
    """What reads the dataset's samples; None: Shoal's own order of them."""
    micro_batches: int | None = None
    """Length of the script's DataLoader if its batches are micro-batches; else None."""
    peers_on_host: bool = True
    """Whether all other workers are on this one's host."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all workers besides config and model, by name."""


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    dataset: Any = None,
    optimizer: Optimizers | MakeOptimizer | None = None,
    scheduler: Schedulers | Callable[[Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **unknown: Any,
) -> Engine:
    """Create the engine of this worker; without a controller in the script's environment, a world of one.

    `model`: any module with parameters in float32 or float64. `config`: path or dict, docs/configuration.md. `dataset`:
    any map-style dataset, an IterableDataset, or a DataLoader that shuffles the one or reads the other. `optimizer`,
    `scheduler`: objects over the model's parameters, if the config names none; several as a list, or as a mapping by
    names for `engine.turn`, with each scheduler over one of the optimizers. Of a pipeline's stages, functions may make
    them: `optimizer(stages)`, which is called for all, and `scheduler(optimizer)`.
    Raises `UserError` with one sentence for each unusable argument or key.
    """
    tell_errors_in_a_sentence()
    refuse_unknown("shoal.initialize", unknown, inspect.signature(initialize).parameters)
    refusals = Refusals("shoal.initialize")
    made = (None if isinstance(model, Stages) and _is_function(one) else one for one in (optimizer, scheduler))
    refusals.of(check_given, model, *made)
    data = refusals.of(data_of, dataset, collate_fn)
    beside = Beside(None, batch_size_of(dataset), optimizer is not None, scheduler is not None)
    settled = refusals.of(load_config, config, beside)
    if settled is not None:
        refusals.of(check_batch_size, dataset, settled.micro_batch_size, settled.train_batch_size)
    refusals.raise_all()
    assert data is not None and settled is not None, "refused otherwise"
    given = Given(model, settled, data.dataset, optimizer, scheduler, data.collate_fn, reading=data.reading)
    return assemble(replace(given, micro_batches=micro_batches_of(dataset, settled.train_batch_size)))


def assemble(given: Given) -> Engine:
    """Makes the engine of this worker. Raises `UserError`."""
    _refuse_another()
    check_seat(given.config.cell)
    trace_crashes()
    with initializing():
        engine = engine_with(replace(given, peers_on_host=has_peers_on_host_alone()), _link_and_faults)
    _engines.append(ref(engine))
    show(engine)
    serve_at_exit(engine)
    return engine


_engines: list[ref[Engine]] = []
"""Those that this process has made."""


def _refuse_another() -> None:
    """Raises `UserError` for a second engine of a worker. Alone, where two train each for itself, it is a warning while
    the first is at work.
    """
    if _engines and is_worker():
        raise UserError(
            f"this is the second shoal.initialize of this script, and a worker is one engine. {SEVERAL} Where they are "
            "trained one after the other, start a job for each."
        )
    engines = [one() for one in _engines]
    if any(one is not None and not one.context.is_over for one in engines):
        log.warning("second_engine", means="each trains for itself, and with workers the script is refused", do=SEVERAL)


def _link_and_faults(device: Device, only_gloo: bool) -> tuple[Link, Faults]:
    link, fault_text = open_link(device=device, only_gloo=only_gloo, identity=own_identity())
    return link, Faults.parse(fault_text, link.worker)


def engine_with(given: Given, open_link: Callable[[Device, bool], tuple[Link, Faults]]) -> Engine:
    """The engine alone. `open_link`: given the device, and whether only gloo may carry bulk."""
    model, settled, dataset = given.model, given.config, given.dataset
    refusals = Refusals("the job")
    refusals.of(check_monitoring, settled.monitoring)
    make_exact(settled.exact, settled.torch_threads)
    keep_freed_memory()
    refusals.of(checkpoint_activations, model, settled)
    source = given.source or refusals.of(source_of, dataset, given.collate_fn, settled, given.reading)
    last_step = refusals.of(source.sampler.last_step, settled.max_steps, settled.epochs) if source else None
    found = refusals.of(_optimizer, given)
    refusals.raise_all()
    assert source is not None and last_step is not None and found is not None, "refused otherwise"
    optimizer, keeps = found
    hub = current_hub()
    sampler, limits = source.sampler, Limits.of(settled, last_step, given.peers_on_host)
    if hub is not None:
        hub.check_collectives = settled.check_collectives
        limits = in_cell(limits, model, optimizer, hub, given.optimizer)
    else:
        limits = replace(limits, part=part_of(model, ONE, 0, limits.units))
    scheduler = _scheduler(given, optimizer, limits.last_step)
    if given.micro_batches is not None:
        for one in schedulers_of(scheduler):
            check_total(one, given.micro_batches, sampler.steps_per_epoch, limits.last_step)
    lay_out_once(model)
    state = TrainingState(model, optimizer, scheduler, limits, residency_of(settled.stage))
    check_joiners_can_be_given(state)
    # data workers are forked before the session has threads and connections
    fetcher = Fetcher(source, given.collate_fn, settled.seed, state.device.kind, given.reading)
    link, faults = open_link(state.device, settled.backend == "gloo")
    status = Status(sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0, step=-1, committed_in=0)
    description = _description(settled, state, optimizer, sampler.samples, are_others=not link.alone)
    config = {**description.config, **given.beside, "what the optimizer keeps": keeps}
    link.introduce(replace(description, config=config), status)
    engine = Engine(settled, state, link, fetcher, faults, hub)
    engine.parts.loading.begin(engine.parts.status.publish)
    take_over(optimizer, scheduler, lambda: state.step > NO_STEP)
    return engine


def in_cell(limits: Limits, model: nn.Module, optimizer: Optimizer, hub: CellHub, make: object = None) -> Limits:
    """With what of the model this process of a cell has. `make`: what has made the optimizer, where that is a function.
    Raises `UserError`.
    """
    if hub.shape.pipeline > 1 and not isinstance(model, Stages):
        raise UserError(
            f"the cell's pipeline has {hub.shape.pipeline} places, and shoal.initialize got a "
            f"{type(model).__name__} for its model; give it the stages of this process, model=cell.stages(build)."
        )
    stages: tuple[tuple[Trainable, ...], ...] = ()
    if isinstance(model, Stages) and hub.shape.pipeline > 1:
        by_place = ((place, optimizer if place is model else _like(optimizer, place, make)) for place in model.places)
        stages = tuple(tuple(_trained_at(place, of_place, limits)) for place, of_place in by_place)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        _check_place(plain_name(name), tensor.device.type)
    part = part_of(model, hub.shape, hub.coordinate, limits.units)
    check_groups(part.ties, {one.name: one.group for of_place in stages for one in of_place})
    return replace(limits, part=part, stages=stages)


def _is_function(given: object) -> bool:
    return callable(given) and not isinstance(given, Optimizer | LRScheduler | type)


def _like(optimizer: Optimizer, place: nn.Module, make: object) -> Optimizer:
    """One over another place of a pipeline, with groups as those of this process's. Raises `UserError`."""
    if _is_function(make):
        made = cast(MakeOptimizer, make)(place)
        return made if isinstance(made, Optimizer) else several(made)
    if len(optimizer.param_groups) > 1:
        raise UserError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, and nothing says in which group "
            "those of other stages are; give a function that makes it: optimizer=lambda stages: AdamW(groups(stages))."
        )
    return torch.optim.SGD([one for one in place.parameters() if one.requires_grad])


def _trained_at(place: nn.Module, optimizer: Optimizer, limits: Limits) -> Iterator[Trainable]:
    """The parameters of one place of a pipeline."""
    for one, _ in trainable(place, optimizer, limits.units, limits.half):
        yield one if limits.half is None else replace(one, dtype=limits.half)


def part_of(model: nn.Module, shape: Shape, coordinate: int, units: Collection[str] = ()) -> CellPart:
    """What of the model a process has, as its parameters say it. `units`: classes of units. Raises `UserError`."""
    everywhere = places_of(model)
    named = [
        (plain_name(name), parameter, found[name])
        for place in everywhere
        for found in [marks(place, shape, coordinate)]
        for name, parameter in place.named_parameters()
    ]
    cuts = {
        name: cut
        for name, parameter, mark in named
        if mark.is_own and mark.dim >= 0
        if (cut := Cut(mark.dim, mark.stride)).fits(tuple(local_of(parameter).shape))
    }
    adding = frozenset(name for name, _, mark in named if mark.gradient == "sum")
    own = frozenset(name for name, _, mark in named if mark.is_own and shape.tensor > 1)
    of_expert = frozenset(name for name, _, mark in named if mark.of_expert)
    for name, parameter, _ in named:
        is_in_parts = name in own | of_expert
        if (is_in_parts or shape.pipeline > 1) and not parameter.requires_grad:
            whose = "each process of a cell has a part of it" if is_in_parts else "only one stage of a pipeline has it"
            raise UserError(
                f'parameter "{name}" is frozen, and {whose}; not supported yet. Train it, or give every process the '
                "whole of it."
            )
    tied = ties(everywhere)
    check_divisions(tied, {name: mark.way(shape) for name, _, mark in named})
    numbered = model.count if isinstance(model, Stages) else 0
    copied = {name: of for place in everywhere for name, of in copies(place, units).items()} if numbered else {}
    part = CellPart(shape.processes, coordinate, own, contexts=shape.context, stages=shape.pipeline, cuts=cuts,
                    adding=adding, numbered=numbered, ties=tied, experts=shape.expert, of_expert=of_expert,
                    copies=copied,
                    dealt={name: mark.dealt for name, _, mark in named if mark.dealt is not None})  # fmt: skip
    placed = (name for name, parameter, mark in named if is_divided(parameter) and not mark.of_expert)
    return replace(part, summed=part.summed_of(placed))


def _check_place(name: str, device: str) -> None:
    """Raises `UserError` for a tensor that a process of a cell cannot have yet."""
    if device == "meta":
        raise UserError(
            f'"{name}" has no values: shoal.deferred() is not supported yet where a cell has several processes. Build '
            "the model outside of it."
        )
    if device != "cpu":
        raise UserError(
            f'"{name}" lies on a device, {device}: cells of several processes compute on the CPU only in this version. '
            "Leave the model on the CPU."
        )


def check_joiners_can_be_given(state: TrainingState) -> None:
    """Raises `UserError` for buffers that neither a joiner nor a checkpoint could be given."""
    encode(state.buffers.committed, {}, "the module's buffers")


def _optimizer(given: Given) -> tuple[Optimizer, str]:
    """And what of it is carried, in words."""
    settled, optimizer = given.config, cast(Optimizers | None, given.optimizer)
    if _is_function(given.optimizer):
        optimizer = cast(MakeOptimizer, given.optimizer)(given.model)
        check_given(given.model, optimizer, None)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = several(optimizer)
    if settled.optimizer is not None:
        if optimizer is None:
            optimizer = build_optimizer(settled.optimizer, given.model, given.parameters)
        elif faults := list(optimizer_differs(settled.optimizer, optimizer)):
            raise UserError(all_of(faults))
    if optimizer is None:
        raise UserError("there is no optimizer; name one in the config (optimizer.type) or give shoal.initialize one.")
    return optimizer, check_optimizer(optimizer, settled.elementwise, settled.whole)


def _scheduler(given: Given, optimizer: Optimizer, last_step: int) -> LRScheduler | None:
    section, scheduler = given.config.scheduler, given.scheduler
    if callable(scheduler) and not isinstance(scheduler, LRScheduler):
        try:
            scheduler = scheduler(optimizer)
        except Exception as error:  # of the script's function, which may raise anything
            if isinstance(error, UserError) or not isinstance(optimizer, Several):
                raise
            raise UserError(
                f"the scheduler's function fails on several optimizers as one, {title_of(optimizer)} "
                f"({type(error).__name__}: {str(error).rstrip('.')}); build a scheduler over each of them, and give "
                "these as a list, or by the names of their optimizers."
            ) from error
        check_given(given.model, optimizer, scheduler)
    if isinstance(scheduler, LRScheduler) and isinstance(optimizer, Several) and scheduler.optimizer is not optimizer:
        scheduler = [scheduler]
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        scheduler = schedules(scheduler, optimizer)
    if scheduler is not None:
        check_scheduled(scheduler, optimizer)
    if section is None:
        return scheduler
    if scheduler is None:
        return build_scheduler(section, optimizer, last_step)
    if faults := list(scheduler_differs(section, scheduler)):
        raise UserError(all_of(faults))
    return scheduler


def _description(
    config: TrainingConfig, state: TrainingState, optimizer: Optimizer, samples: int, are_others: bool
) -> Description:
    """`are_others`: whether other workers save to the same place. Raises `StorageFailed` where that cannot be used."""
    place, residency = config.checkpoint.path, residency_of(config.stage)
    trained = {slot.parameter.name: slot.parameter for bucket in state.layout.buckets for slot in bucket.slots}
    parameters = tuple(
        Parameter(name, tuple(local_of(p).shape), str(p.dtype), trained[name].group if name in trained else -1)
        for name, p in named_parameters(state.module)
    )
    if state.layout.stages:
        slots = (slot.parameter for buckets in state.layout.stages for bucket in buckets for slot in bucket.slots)
        parameters = tuple(Parameter(one.name, one.shape, str(one.dtype), one.group) for one in slots)
    return Description(
        lanes=config.lanes,
        blocks=state.held_layout.blocks,
        homes=_by_coordinate(state.held_layout, state.held_layout.home_of),
        models=_by_coordinate(state.held_layout, state.held_layout.model_at),
        block_elements=state.layout.block_elements,
        state_bytes=probe_state_bytes(
            state.held_layout, optimizer, residency.keeps_weights, averages=config.average is not None
        ),
        mirrors=residency.mirrors(config),
        stage=residency.number,
        mirror_partners=config.mirror_partners,
        fill_bytes_per_step=config.fill_bytes_per_step,
        max_steps=state.last_step,
        parameters=parameters,
        optimizer=title_of(optimizer),
        config={**agreement(config), "dataset.samples": str(samples or "a stream"), **_beside_the_config(state)},
        numerics=identity(
            state.device.kind, updates_on_host=config.updates_on_host, in_cells=config.cell.processes > 1
        ),
        mixed_numerics=config.mixed_numerics,
        can_checkpoint=place is not None,
        checkpoint_places=places(place, config.checkpoint.resume),
        checkpoint_marks=leave_mark(place) if place is not None and are_others else (),
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every or 0,
        on_corruption=config.on_corruption,
        on_slow=config.on_slow,
        samples_per_step=config.train_batch_size,
        peers=PEER_FORM,
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        cell=config.cell,
    )


def _by_coordinate(layout: Layout, blocks_of: Callable[[int], Runs]) -> tuple[Runs, ...]:
    """Empty where a cell is one process."""
    coordinates = range(layout.part.coordinates)
    return tuple(map(blocks_of, coordinates)) if len(coordinates) > 1 else ()


def _beside_the_config(state: TrainingState) -> dict[str, str]:
    """What else must agree: what optimizer and scheduler were given, the module's buffers, and its ties."""
    buffers = {f"buffer {name}": f"{value.dtype} {tuple(value.shape)}" for name, value in named_buffers(state.module)}
    if isinstance(state.module, Stages) and state.layout.stages:  # the others' have no precision yet
        named = chain.from_iterable(map(named_buffers, state.module.places))
        buffers = {f"buffer {name}": str(tuple(value.shape)) for name, value in named}
    deferred = state.originals.deferred if state.originals is not None else None
    if deferred is not None:
        buffers["model built within shoal.deferred()"] = deferred.identity()
        buffers["content of the weights that shoal.deferred() reads"] = deferred.weights()
    tied = {f"shoal.tied {name}": tie.name for name, tie in state.layout.part.ties.items()}
    return {**buffers, **tied, **state.given.texts(), "scheduler": class_of(state.scheduler) or "none"}
