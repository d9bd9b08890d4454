"""Puts what a checkpoint holds into a worker's state: the small state into every worker's, blocks into their keepers'.

The inverse of `draft.py` and `snapshot.py`. A world of any size, stage and number of mirrors does it alike: each worker
names the blocks that it is to keep.
"""

from __future__ import annotations

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs

from shoal.checkpoint.draft import States
from shoal.checkpoint.layout_check import Match, difference
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.named import load_by_name
from shoal.checkpoint.plain import decode
from shoal.checkpoint.reader import Reader
from shoal.exchange.vote import Record
from shoal.optim.hyper import load_into
from shoal.training.state import TrainingState, check_registered, frozen_digest, frozen_parameters


def fits(manifest: Manifest, state: TrainingState, allow: tuple[str, ...], where: str) -> bool:
    """Whether training goes on from this checkpoint; False where only its tensors are taken by name.

    Raises `UserError` naming what differs where `allow` does not accept it.
    """
    differs = difference(manifest, state.layout, type(state.optimizer).__name__)
    if differs is None:
        return True
    if manifest.kind == "training" and not allow:
        raise UserError(
            f"{where} is not of this job's model: {differs} To begin at step 0 with what matches by name, set "
            '`shoal.checkpoint.allow: ["new", "missing"]`.'
        )
    return False


def load_small_state(reader: Reader, state: TrainingState, registered: States) -> None:
    """Everything but blocks: step, record, hyper-parameters, scheduler, buffers, frozen parameters, users' states.

    Raises `UserError` where the user's registered states are others than the checkpoint's.
    """
    manifest = reader.manifest
    check_registered(registered, manifest.states, reader.where)
    beside = reader.tensors()
    state.step, state.committed_in = manifest.step, 0
    state.record = Record.from_bytes(manifest.record.encode()) if manifest.record else None
    load_into(state.optimizer, [decode(group, beside) for group in manifest.groups])
    if state.scheduler is not None and manifest.scheduler is not None:
        state.scheduler.load_state_dict(decode(manifest.scheduler, beside))
    buffers = {name: beside[f"buffer/{name}"] for name in manifest.buffers}
    if buffers.keys() != state.buffers.committed.keys():
        name = min(buffers.keys() ^ state.buffers.committed.keys())
        raise UserError(f'{reader.where} does not fit: only one of checkpoint and model has the buffer "{name}".')
    state.buffers.load(buffers)
    for name, of in registered.items():
        of.load_state_dict(decode(manifest.states[name], beside))
    _load_frozen(reader, state)
    state.current = NO_BLOCKS


@torch.no_grad()
def _load_frozen(reader: Reader, state: TrainingState) -> None:
    """Read only where the script's own differ."""
    entry, own = reader.manifest.frozen, frozen_parameters(state.module)
    if (entry is None) != (not own) or (entry is not None and entry.tensors.keys() != own.keys()):
        raise UserError(f"{reader.where} does not fit: other parameters are frozen in this job's model.")
    if entry is None or entry.digest == frozen_digest(state.module):
        return
    for name, value in reader.frozen().items():
        if own[name].shape != value.shape:
            raise UserError(
                f'{reader.where} does not fit: frozen parameter "{name}" has shape {tuple(own[name].shape)}, the '
                f"checkpoint's {tuple(value.shape)}."
            )
        own[name].copy_(value)


def load_blocks(reader: Reader, state: TrainingState, blocks: Runs) -> None:
    """Holds these blocks as the checkpoint has them, and nothing else."""
    state.held.keep_only(NO_BLOCKS)
    state.held.take(reader.states(blocks))
    reader.parameters(blocks, state.flats)
    state.current = blocks


def load_model(reader: Reader, state: TrainingState, allow: tuple[str, ...]) -> Match:
    """Takes parameters and buffers by name; what else there is stays as at step 0."""
    matched = load_by_name(reader, state.module, allow)
    state.buffers.refresh()
    return matched
