"""Torch's pipeline schedules, as far as Shoal must know their insides: the one file that does.

A schedule's stages shake hands in its first call: they vote whether shapes were given, and tell each other shapes where
not. In a new world a stage may have other neighbours, who have never met it, and a short batch of an evaluation has
other shapes; so there all stages of a cell do it anew. Where all of them know the shapes from an earlier handshake over
as many samples, and a cell has no other dimension, nothing is computed for it; elsewhere what is leaves no trace in
random numbers and buffers. A call that a change of the world has broken off leaves losses and messages behind, which
are forgotten.

tests/unit/test_pipelining.py names the version of torch whose insides these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import nn

from shoal.data.seeds import RandomState

SUPPORTED = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
FLAGS = (
    ("_stage_forward_initialized", "_stages_forward_initialized"),
    ("_stage_backward_initialized", "_stages_backward_initialized"),
)
"""Whether stages have shaken hands: for their forwards, and for their backwards."""
SHAKES_HANDS = ("_initialize_stage", "_initialize_stages")
UNDER_WAY = ("fwd_recv_ops", "bwd_recv_ops", "backward_counter")
"""What a call that was broken off leaves in a schedule."""


class PipelineSchedules:
    """Those that a script calls by one engine."""

    def __init__(self, cell: Shape, micro_batches: int) -> None:
        self._places, self._micro_batches = cell.pipeline, micro_batches
        self._is_line = cell.processes == cell.pipeline
        """Whether all of a cell vote together in a handshake: in others one line would compute, and its neighbours not.
        """
        self._calls: WeakKeyDictionary[Any, tuple[object, int]] = WeakKeyDictionary()
        """Each one's last: in which world, and of how many samples."""
        self._shapes: WeakKeyDictionary[Any, dict[tuple[int, bool], list[Any]]] = WeakKeyDictionary()
        """What each one's stages have found in handshakes, by samples, and whether a backward follows."""
        self.is_shaking_hands = False
        """Whether a loss is computed for its shape alone."""

    def of(self, call: Callable[..., Any], name: str, loss_fn: type) -> Any:
        """The schedule whose method of that name a script has given: `step`, or `eval` in an evaluation. `loss_fn`:
        what its loss function must be. Raises `UserError`.
        """
        schedule = getattr(call, "__self__", None)
        kind = type(schedule).__name__
        if schedule is None or getattr(call, "__name__", "") != name:
            raise UserError(
                f"engine.run got {call!r:.80}; expected the method `{name}` of a pipeline schedule of torch: `step` "
                "trains a lane, and `eval` is for `with engine.evaluating():`."
            )
        if kind not in SUPPORTED or not type(schedule).__module__.startswith("torch."):
            raise UserError(
                f"engine.run got a schedule of class {kind}, which is not supported; expected one of torch's "
                f"{', '.join(SUPPORTED)}."
            )
        stages = _stages_of(schedule)
        if schedule.scale_grads:
            raise UserError(
                f"{kind} has scale_grads=True, which would divide gradients that have left already; make it with "
                "scale_grads=False: engine.loss_fn divides each loss."
            )
        if schedule._n_microbatches != self._micro_batches:
            raise UserError(
                f"{kind} has {schedule._n_microbatches} micro-batches, and the config's "
                f"`shoal.micro_batches_per_lane` is {self._micro_batches}; make it with engine.micro_batches."
            )
        if any(one.group_size != self._places for one in stages):
            raise UserError(
                f"{kind} has stages in a group of {stages[0].group_size} processes, and the cell's pipeline has "
                f'{self._places}; give PipelineStage group=cell.group("pipeline").'
            )
        if any(one.is_last for one in stages) and not isinstance(schedule._loss_fn, loss_fn):
            raise UserError(f"{kind} has a loss function of its own; make it with loss_fn=engine.loss_fn(function).")
        return schedule

    def enter(self, world: object, schedule: Any, module: nn.Module, samples: int) -> None:
        """A schedule is about to be called in a world, with so many samples. `module`: of its stages."""
        known = self._calls.get(schedule)
        if known is None:
            self._shake_hands_aside(schedule, module)
        if known is None or known[0] is not world or known[1] != samples:
            _forget(schedule)
            self._calls[schedule] = world, samples

    def _shake_hands_aside(self, schedule: Any, module: nn.Module) -> None:
        """From now on its handshakes leave no trace."""
        name = next(one for one in SHAKES_HANDS if hasattr(schedule, one))
        original = getattr(schedule, name)

        def shake_hands(*arguments: Any, **named: Any) -> None:
            if _has_shaken_hands(schedule):
                original(*arguments, **named)
                return
            random = RandomState.save()
            buffers = [(one, one.detach().clone()) for one in module.buffers()]
            self.is_shaking_hands = True
            try:
                with self._knowing_shapes(schedule):
                    original(*arguments, **named)
            finally:
                self.is_shaking_hands = False
                random.restore()
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)

        setattr(schedule, name, shake_hands)

    @contextmanager
    def _knowing_shapes(self, schedule: Any) -> Iterator[None]:
        """Within it, a handshake, stages vote as if a script had given the shapes that they know."""
        found, stages = self._shapes.setdefault(schedule, {}), _stages_of(schedule)
        purpose, given = (self._calls[schedule][1], schedule._has_backward), [stage._user_meta for stage in stages]
        try:
            for stage, known in zip(stages, found.get(purpose, given) if self._is_line else given, strict=True):
                stage._user_meta = known
            yield
            found[purpose] = [copy(stage._stage_meta) for stage in stages]
        finally:
            for stage, meta in zip(stages, given, strict=True):
                stage._user_meta = meta


def _has_shaken_hands(schedule: Any) -> bool:
    """Also for what it is about to do: an evaluation and a training call have other handshakes."""
    forward, backward = (any(getattr(schedule, name, False) for name in names) for names in FLAGS)
    return forward and backward == schedule._has_backward


def _stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _forget(schedule: Any) -> None:
    """What it knows of its neighbours, and of a call that was broken off."""
    for name in chain.from_iterable(FLAGS):
        if hasattr(schedule, name):
            setattr(schedule, name, False)
    for name in UNDER_WAY:
        getattr(schedule, name, {}).clear()
    schedule._internal_losses.clear()
    for stage in _stages_of(schedule):
        stage.bwd_cache.clear()
