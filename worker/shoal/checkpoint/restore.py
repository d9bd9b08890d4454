"""Restoring: puts a checkpoint's small state into every worker's state, and its blocks into the workers that keep them.

The inverse of `writer.py` and `snapshot.py`, the same in a world of any size, stage and number of mirrors: each worker
names the blocks that it is to keep.

A manifest with the right checksum may be of another program or another version, and a state that an object takes over
unseen would fail in the midst of an update, where no earlier checkpoint helps any more. So `first_difference_in_kind`
compares kinds with the object's own state first. Values and lengths are the object's affair: it may keep a history.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from numbers import Number
from shlex import quote
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import DIMENSIONS
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.blocks.loaded_state import AVERAGE, MASTER, WEIGHTS
from shoal.blocks.state_home import check_averages, check_masters
from shoal.checkpoint.manifest import MODES, Manifest
from shoal.checkpoint.other_layout import Match, difference, take_by_name
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.writer import States
from shoal.core.average_rule import AverageRule
from shoal.core.cell_part import CellPart
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.container import DTYPES
from shoal.core.layout import Stretch
from shoal.core.loss_scale import LossScale
from shoal.core.manifest_parts import LayoutEntry
from shoal.core.misses import Misses
from shoal.core.plain import decode
from shoal.exchange.module_buffers import persistent_buffers
from shoal.exchange.vote import Record
from shoal.optim.hyper import hyper_parameters
from shoal.optim.schedules import Schedule, class_of
from shoal.optim.several import PLUS, Schedules, schedulers_by_optimizer, schedulers_of, title_of
from shoal.optim.twin import failure_from
from shoal.process.host_memory import host_memory
from shoal.state.given_values import OtherValues, ValuesOfRun
from shoal.state.training_state import (
    TrainingState,
    check_registered,
    frozen_digest,
    frozen_in_blocks,
    frozen_parameters,
)


def fits(manifest: Manifest, state: TrainingState, allow: tuple[str, ...], where: str) -> bool:
    """Whether training goes on from this checkpoint; False where only its tensors are taken by name.

    Raises `UserError` naming what differs where `allow` does not accept it.
    """
    part, saved = state.layout.part, manifest.layout
    there, here = _cells_of(saved), _cells_of(part)
    if manifest.kind == "model":
        return False
    if there != here:
        sizes = zip(DIMENSIONS, part.sizes, strict=True)
        sized = [f" --{name} {size}" for name, size in sizes if size > 1] or [" --tensor 1"]
        raise UserError(
            f"{where} is of {there}, and this job's lanes are trained by {here}; make one of this shape, "
            f"`shoal reshape {quote(where)} NEW{''.join(sized)}`, and give `resume` the folder NEW."
        )
    differs = difference(manifest, state.layout, title_of(state.optimizer), state.held.effects.own_forms)
    if differs is None:
        return True
    if part.coordinates > 1:
        raise UserError(
            f"{where} is not of this job's model: {differs} Taking what matches by name is not supported yet where a "
            "cell has several processes."
        )
    if not allow:
        raise UserError(
            f"{where} is not of this job's model: {differs} To begin at step 0 with what matches by name, set "
            '`shoal.checkpoint.allow: ["new", "missing"]`.'
        )
    return False


def _cells_of(one: LayoutEntry | CellPart) -> str:
    sizes = ("pipeline", one.stages), ("expert", one.experts), ("context", one.contexts)
    sized = [f"{name} {size}" for name, size in sizes if size > 1]
    shape = f" ({', '.join(sized)})" if sized else ""
    return f"cells of {one.coordinates} processes{shape}" if one.coordinates > 1 else "one process"


def load_small_state(reader: Reader, state: TrainingState, registered: States) -> OtherValues | None:
    """Everything but blocks: step, record, hyper-parameters, scheduler, modes, buffers, frozen parameters and the
    script's own states. Returns what script and config have changed of the given values; None: it cannot be told.

    Raises `UserError` where the user's registered states or the model's buffers are others than the checkpoint's,
    `CheckpointDamaged` where what it holds cannot be a state of this job.
    """
    manifest = reader.manifest
    check_registered(registered, manifest.states, reader.where)
    beside = reader.tensors()
    state.step, state.committed_in = manifest.step, 0
    state.record = record_of(manifest, reader.where)
    _load_hyper_parameters(reader, beside, state)
    goes_on = schedules_that_go_on(manifest, state)
    _load_schedulers(reader, beside, state, goes_on)
    state.given.begin_schedules_anew(goes_on)
    outcome = _replace_given(reader, beside, state, goes_on)
    if state.loss_scale is not None and manifest.scaler is not None:
        _load_loss_scale(reader, beside, state, state.loss_scale)
    try:
        if (evaluating := _evaluating(manifest, beside)) is not None:
            state.modes.take_over(evaluating)
        state.stream_positions.replace(manifest.streams)
        state.misses = Misses.from_runs(state.layout, manifest.missed)
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{reader.where} is damaged: {error}.") from None
    state.buffers.load(_buffers(reader, beside, state.buffers.committed))
    for name, of in registered.items():
        of.load_state_dict(decode(manifest.states[name], beside))
    _load_frozen(reader, state)
    state.current = NO_BLOCKS
    return outcome


def _evaluating(manifest: Manifest, beside: Mapping[str, Tensor]) -> Collection[str] | None:
    """Parts of the whole model in evaluation mode: names of stages say which one each is of. None: not known."""
    if manifest.evaluating is not None:
        return manifest.evaluating
    of_stages = [json.loads(bytes(tensor.tolist())) for name, tensor in beside.items() if name.startswith(MODES)]
    return [str(one) for names in of_stages for one in names] if of_stages else None


def schedules_that_go_on(manifest: Manifest, state: TrainingState) -> Collection[int]:
    """Numbers of the optimizers whose saved scheduler is of the class of this job's, as far as is known."""
    own, saved = schedulers_by_optimizer(state.scheduler), _saved_schedulers(manifest, state)

    def goes_on(number: int) -> bool:
        scheduler, name = own[number], saved[number]
        return name in ("", class_of(scheduler)) or (name == Schedule.__name__ and isinstance(scheduler, Schedule))

    return {number for number in own.keys() & saved.keys() if goes_on(number)}


def _saved_schedulers(manifest: Manifest, state: TrainingState) -> dict[int, str]:
    """Names of classes by the number of the optimizer that each is over; of one over all, 0; empty: none, or such as
    this job's cannot take over.
    """
    saved = manifest.scheduler
    are_several = isinstance(saved, dict) and bool(saved) and all(map(str.isdigit, saved))
    if saved is None or are_several != isinstance(state.scheduler, Schedules):
        return {}
    names = manifest.scheduler_class.split(PLUS)
    return dict(zip(map(int, saved), names, strict=False)) if are_several else {0: manifest.scheduler_class}


def has_scheduler_of(manifest: Manifest, state: TrainingState) -> bool:
    """Whether all schedulers go on, and there are no others."""
    return len(schedules_that_go_on(manifest, state)) == len(schedulers_of(state.scheduler)) == _count(manifest)


def _count(manifest: Manifest) -> int:
    return 0 if manifest.scheduler is None else len(manifest.scheduler_class.split(PLUS))


def record_of(manifest: Manifest, where: str) -> Record | None:
    """Its step's, where one was committed. Raises `CheckpointDamaged`."""
    if not manifest.record:
        return None
    try:
        return Record.from_bytes(manifest.record.encode())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{where} is damaged: its step's record cannot be read: {error!r}.") from None


def _load_hyper_parameters(reader: Reader, beside: Mapping[str, Tensor], state: TrainingState) -> None:
    groups = [decode(group, beside) for group in reader.manifest.groups]
    _refuse_other_kinds(reader, groups, hyper_parameters(state.optimizer), "optimizer groups")
    state.load_hyper_parameters(groups)


def _replace_given(
    reader: Reader, beside: Mapping[str, Tensor], state: TrainingState, goes_on: Collection[int]
) -> OtherValues | None:
    """`goes_on`: numbers of the optimizers whose saved schedule does."""
    entry, own = reader.manifest.given, state.given.values
    if entry is None:
        return None
    groups = [decode(group, beside) for group in entry.groups]
    _refuse_other_kinds(reader, groups, list(own.groups), "given values of groups")
    if len(groups) != len(own.groups):
        raise CheckpointDamaged(f"{reader.where} is damaged: it has given values of {len(groups)} optimizer groups.")
    saved = ValuesOfRun(groups, decode(entry.schedule, beside))
    outcome = state.given.replace(saved, goes_on)
    _refuse_other_states(reader, state, outcome)
    return outcome


def _refuse_other_states(reader: Reader, state: TrainingState, outcome: OtherValues) -> None:
    """Raises `UserError` where the optimizer cannot go on, with what it is given now, from what was kept: of other
    values, or of another class that has its name.
    """
    tried = set()
    pieces = ((file.coordinate, piece) for file in reader.manifest.files for piece in file.pieces)
    for coordinate, piece in pieces:
        bucket = state.layout.at(coordinate).buckets[piece.bucket]
        own = sorted((key, entry) for key, entry in piece.state.items() if key not in (AVERAGE, MASTER))
        kept = {key: (DTYPES[entry.dtype], entry.scalar) for key, entry in own}
        tried.add((bucket.group, bucket.wide_dtype, tuple(kept.items())))
    for group, dtype, entries in tried:
        failure = _failure(state, group, dtype, dict(entries))
        if failure and not _failure(state, group, dtype, {}):
            new = f" with the values that it is given now ({', '.join(outcome.taken)})" if outcome.taken else ""
            before = "the values of before" if outcome.taken else "the class of before, which has the same name"
            raise UserError(
                f"the optimizer cannot go on from {reader.where}{new}: its step fails on what was kept, "
                f"{', '.join(key for key, _ in entries) or 'nothing'} ({failure}). Give it {before}."
            )


def _failure(state: TrainingState, group: int, dtype: torch.dtype, kept: Mapping[str, tuple[torch.dtype, bool]]) -> str:
    """Why a step from such a state fails, or empty."""
    return failure_from(state.optimizer, group, kept, torch.zeros(1, dtype=dtype, device=state.layout.device))


def _load_schedulers(
    reader: Reader, beside: Mapping[str, Tensor], state: TrainingState, numbers: Collection[int]
) -> None:
    found, are_several = decode(reader.manifest.scheduler, beside), isinstance(state.scheduler, Schedules)
    for number, scheduler in schedulers_by_optimizer(state.scheduler).items():
        if number in numbers:
            _load_scheduler(reader, found[str(number)] if are_several else found, scheduler)


def _load_scheduler(reader: Reader, found: Any, scheduler: LRScheduler) -> None:
    groups = scheduler.optimizer.param_groups
    _refuse_other_kinds(reader, found, scheduler.state_dict(), "scheduler")
    try:
        if len(found.get("base_lrs", groups)) != len(groups):
            raise ValueError(f"base_lrs has {len(found['base_lrs'])} values for {len(groups)} optimizer groups")
        scheduler.load_state_dict(found)
    except Exception as error:  # it is the script's class: nobody knows what it raises
        raise CheckpointDamaged(
            f"{reader.where} is damaged: {type(scheduler).__name__} cannot take its scheduler's state over: {error!r}."
        ) from error


def _load_loss_scale(reader: Reader, beside: Mapping[str, Tensor], state: TrainingState, own: LossScale) -> None:
    try:
        state.loss_scale = own.at(decode(reader.manifest.scaler, beside))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{reader.where} is damaged: its loss scale cannot be read: {error}.") from None


def _refuse_other_kinds(reader: Reader, found: Any, own: Any, where: str) -> None:
    sentence = first_difference_in_kind(found, own, where)
    if sentence:
        raise CheckpointDamaged(f"{reader.where} is damaged: {sentence}")


def _buffers(reader: Reader, beside: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: beside[tensor] for name, tensor in reader.names_of_buffers().items()}
    if found.keys() != own.keys():
        name = min(found.keys() ^ own.keys())
        raise UserError(f'{reader.where} does not fit: only one of checkpoint and model has the buffer "{name}".')
    for name, value in found.items():
        if (value.shape, value.dtype) != (own[name].shape, own[name].dtype):
            raise UserError(
                f'{reader.where} does not fit: buffer "{name}" has shape {tuple(own[name].shape)} and '
                f"{own[name].dtype}, the checkpoint's {tuple(value.shape)} and {value.dtype}."
            )
    return found


@torch.no_grad()
def _load_frozen(reader: Reader, state: TrainingState) -> None:
    """Read only where the script's own differ; what is in blocks is read with these."""
    entry, own = reader.manifest.frozen, frozen_parameters(state) | frozen_in_blocks(state)
    if (entry is None) != (not own) or (entry is not None and entry.tensors.keys() != own.keys()):
        raise UserError(f"{reader.where} does not fit: other parameters are frozen in this job's model.")
    if entry is None or entry.digest == frozen_digest(state):
        return
    for name, found in entry.tensors.items():
        if tuple(own[name].shape) != found.shape:
            raise UserError(
                f'{reader.where} does not fit: frozen parameter "{name}" has shape {tuple(own[name].shape)}, the '
                f"checkpoint's {found.shape}."
            )
    whole = frozen_parameters(state)
    for name, value in reader.frozen(whole).items():
        whole[name].copy_(value)


def _load_frozen_blocks(reader: Reader, state: TrainingState, stretches: Sequence[Stretch]) -> None:
    """Tensor by tensor: a checksum is of a whole one."""
    layout = state.held_layout
    elements = {one: one.blocks * layout.buckets[one.bucket].block_elements for one in stretches}
    found = {one: host_memory(count, layout.buckets[one.bucket].dtype) for one, count in elements.items()}
    for bucket in sorted({one.bucket for one in stretches}):
        parts = [(layout.elements(one), found[one]) for one in stretches if one.bucket == bucket]
        for slot in layout.buckets[bucket].slots:
            name, end = slot.parameter.name, slot.start + slot.parameter.elements
            wanted = [(max(start, slot.start), min(stop, end), start, part) for (start, stop), part in parts]
            wanted = [one for one in wanted if one[0] < one[1]]
            flat = reader.frozen([name])[name].reshape(-1) if wanted else None
            for first, last, start, part in wanted:
                assert flat is not None
                part[first - start : last - start] = flat[first - slot.start : last - slot.start]
    state.held.take({one: {WEIGHTS: part} for one, part in found.items()})


def keeps_averages(rule: AverageRule | None, manifest: Manifest) -> bool:
    """Whether a job goes on with averages of that checkpoint: one that begins them later has none before."""
    return rule is not None and manifest.step > rule.from_step


def load_blocks(reader: Reader, state: TrainingState, blocks: Runs) -> None:
    """Holds these blocks as the checkpoint has them, and nothing else."""
    state.held.keep_only(NO_BLOCKS)
    stretches, trained = state.held_layout.stretches(blocks), len(state.layout.buckets)  # frozen buckets come last
    frozen = [one for one in stretches if one.bucket >= trained]
    if frozen:
        _load_frozen_blocks(reader, state, frozen)
    for portion in state.held.home.portions([one for one in stretches if one.bucket < trained]):
        states = reader.states(portion)
        if not keeps_averages(state.held.segments.average_rule, reader.manifest):
            for one in states.values():
                one.pop(AVERAGE, None)
        try:
            check_masters(state.layout, states)
            check_averages(state.layout, states)
        except ValueError as error:
            raise CheckpointDamaged(f"{reader.where} is damaged: {error}.") from None
        state.held.take(states)
        reader.parameters(portion, state.weights)
    state.current = blocks


@torch.no_grad()
def load_model(reader: Reader, state: TrainingState, allow: tuple[str, ...]) -> Match:
    """Takes parameters and buffers by name, and optimizer states where an import has them and all else matches; what
    else there is stays as at step 0.

    Parameters that are in blocks begin with what is read then, part by part (`TrainingState.begin_anew`).
    """
    assert state.originals is not None
    matched, taken = take_by_name(reader, state.module, state.layout, allow)
    whole = {**frozen_parameters(state), **persistent_buffers(state.module)}
    for name in matched.taken:
        if name in whole:
            tensor = whole[name]
            tensor.copy_(taken.part(name, 0, tensor.numel()).view(tensor.shape))
    taken.forget()
    state.originals.take(taken)
    if matched.has_optimizer:
        state.held.loaded.take(taken)
    state.buffers.refresh()
    return matched


def first_difference_in_kind(found: Any, own: Any, where: str) -> str:
    """The first value of another kind than the object's own, one sentence; empty where there is none.

    A key that only one side has, and a value that is None on one, do not count: versions and options differ.
    """
    if found is None or own is None:
        return ""
    if _kind(found) != _kind(own):
        return f"{where} is {_kind(found)}; expected {_kind(own)}."
    if isinstance(own, Mapping):
        pairs = [(found[key], own[key], f"{where}.{key}") for key in own if key in found]
    elif isinstance(own, Sequence) and not isinstance(own, str):
        pairs = [(there, here, f"{where}.{at}") for at, (there, here) in enumerate(zip(found, own, strict=False))]
    else:
        return ""
    return next(filter(None, (first_difference_in_kind(*pair) for pair in pairs)), "")


def _kind(value: Any) -> str:
    if isinstance(value, Number | Tensor):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, Sequence) else type(value).__name__
