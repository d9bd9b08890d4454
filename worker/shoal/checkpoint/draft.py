"""What one worker says of the whole checkpoint: the manifest but for its files, and the tensors that stand beside.

Made at the step boundary by the worker that will write the manifest; all of it is the same on every worker. Everything
that the future depends on and that is in no block is here: step, data position, hyper-parameters, scheduler, buffers,
the user's own states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_protos.release import RELEASE
from torch import Tensor

from shoal.checkpoint.layout_entry import LayoutEntry
from shoal.checkpoint.manifest import DataPosition, GivenEntry, Manifest
from shoal.checkpoint.plain import Json, encode
from shoal.optim.hyper import hyper_parameters
from shoal.optim.scheduler import class_of
from shoal.training.state import TrainingState

States = Mapping[str, Any]
"""Registered states by name: objects with `state_dict` and `load_state_dict`."""


@dataclass(frozen=True, slots=True)
class TakenStates:
    """The states that the script has registered, as they were at one moment."""

    tree: dict[str, Json]
    """By name, as the manifest has them."""
    tensors: dict[str, Tensor]
    """Theirs, in host memory."""

    @classmethod
    def of(cls, registered: States) -> TakenStates:
        """Those of now. Raises `UserError` naming one that cannot be kept, and what a `state_dict` raises, with a note
        that names it.
        """
        tensors: dict[str, Tensor] = {}
        return cls({name: _encoded(name, one, tensors) for name, one in registered.items()}, tensors)


def _encoded(name: str, of: Any, tensors: dict[str, Tensor]) -> Json:
    named = f'the state registered as "{name}"'
    try:
        state = of.state_dict()
    except Exception as error:
        error.add_note(f"state_dict of {named}")
        raise
    return encode(state, tensors, named)


@dataclass(frozen=True, slots=True)
class NoStates:
    """Why a checkpoint has none of them."""

    why: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What does not change in a job's life."""

    job: str
    run: str
    layout: LayoutEntry
    data: DataPosition
    config: Mapping[str, str]
    numerics: Mapping[str, str]


def draft_of(
    state: TrainingState, origin: Origin, generation: int, registered: States
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest without files, and the tensors that its author's file has beside blocks.

    Raises `UserError` naming a state that cannot be kept.
    """
    tensors = {f"buffer/{name}": value.clone() for name, value in state.buffers.committed.items()}
    states = TakenStates.of(registered)
    scheduler = state.scheduler.state_dict() if state.scheduler is not None else None
    manifest = Manifest(
        release=RELEASE,
        kind="training",
        job=origin.job,
        run=origin.run,
        lineage=state.lineage,
        step=state.step,
        generation=generation,
        last_step=state.last_step,
        layout=origin.layout,
        optimizer=type(state.optimizer).__name__,
        groups=[
            encode(group, tensors, f"optimizer group {number}")
            for number, group in enumerate(hyper_parameters(state.optimizer))
        ],
        given=_given(state),
        evaluating=tuple(state.modes.evaluating),
        data=origin.data,
        scheduler=encode(scheduler, tensors, "the scheduler's state"),
        scheduler_class=class_of(state.scheduler),
        scaler=encode(state.loss_scale.position, tensors, "the loss scale") if state.loss_scale is not None else None,
        states=states.tree,
        streams=tuple(state.stream_positions.to_texts()),
        missed=state.misses.runs(),
        record=state.record.to_bytes().decode() if state.record else "",
        buffers=tuple(state.buffers.committed),
        frozen=None,
        config=dict(origin.config),
        numerics=dict(origin.numerics),
        files=(),
    )
    return manifest, tensors | states.tensors


def _given(state: TrainingState) -> GivenEntry:
    given, none = state.given.values, dict[str, Tensor]()
    return GivenEntry(
        groups=[encode(dict(group), none, "a given value") for group in given.groups],
        schedule=encode(dict(given.schedule), none, "a given value"),
    )
