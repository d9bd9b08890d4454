"""Torch's pipeline schedules, as far as Shoal must know their insides: the one file that does.

A schedule's stages shake hands in its first call: they vote whether shapes were given, and tell each other shapes where
not. In a new world a stage may have other neighbours, who have never met it, and a short batch of an evaluation has
other shapes; so there all stages of a cell do it anew. Where all of them know the shapes from an earlier handshake over
as many samples, or from a process of their coordinate whose shapes fit their neighbours', and a cell has no other
dimension, nothing is computed for it; elsewhere what is leaves no trace in random numbers and buffers. A call that a
change of the world has broken off leaves losses and messages behind, which are forgotten.

A process without neighbours rehearses a call where it knows what its stages get: the first stage does, and others whose
`PipelineStage` has `input_args`. Zeros come from the neighbours then.

tests/unit/test_pipelining.py names the version of torch whose insides these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shoal_protos.errors import PeerError, UserError
from shoal_protos.shape import Shape
from torch import nn

from shoal.cells.stages import Purpose, StageShapes, shapes_of
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
ALONE = 0
"""In place of a generation: a call of a process that is in no world."""


class PipelineSchedules:
    """Those that a script calls by one engine."""

    def __init__(self, cell: Shape, micro_batches: int) -> None:
        self._places, self._micro_batches = cell.pipeline, micro_batches
        self._is_line = cell.processes == cell.pipeline
        """Whether all of a cell vote together in a handshake: in others one line would compute, and its neighbours not.
        """
        self._calls: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """Each one's last: in the world of which generation, and of how many samples."""
        self._shapes: WeakKeyDictionary[Any, dict[Purpose, list[Any]]] = WeakKeyDictionary()
        """What each one's stages have found in handshakes."""
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
        if not isinstance(schedule._loss_fn, loss_fn):  # without one a schedule makes no backward, on any stage
            has = "no loss function" if schedule._loss_fn is None else "a loss function of its own"
            raise UserError(f"{kind} has {has}; make it with loss_fn=engine.loss_fn(function) on every stage.")
        return schedule

    def enter(self, generation: int, schedule: Any, module: nn.Module, samples: int) -> None:
        """A schedule is about to be called in a world, with so many samples. `module`: of its stages."""
        known = self._calls.get(schedule)
        if known is None:
            self._shake_hands_aside(schedule, module)
        if known != (generation, samples):
            _forget(schedule)
            self._calls[schedule] = generation, samples

    def can_rehearse(self, schedule: Any) -> bool:
        """Whether a process can call it that has no neighbours: it knows what all its stages get."""
        return all(stage.is_first or stage._user_meta.inputs is not None for stage in _stages_of(schedule))

    def _shake_hands_aside(self, schedule: Any, module: nn.Module) -> None:
        """From now on its handshakes leave no trace."""
        name = next(one for one in SHAKES_HANDS if hasattr(schedule, one))
        original, shapes = getattr(schedule, name), shapes_of(module)

        def shake_hands(*arguments: Any, **named: Any) -> None:
            if _has_shaken_hands(schedule):
                original(*arguments, **named)
                return
            random = RandomState.save()
            buffers = [(one, one.detach().clone()) for one in module.buffers()]
            self.is_shaking_hands = True
            try:
                is_alone = self._calls[schedule][0] == ALONE
                with _alone(schedule) if is_alone else self._knowing_shapes(schedule, shapes, arguments[0]):
                    original(*arguments, **named)
            finally:
                self.is_shaking_hands = False
                random.restore()
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)

        setattr(schedule, name, shake_hands)

    @contextmanager
    def _knowing_shapes(self, schedule: Any, shapes: StageShapes, inputs: Any) -> Iterator[None]:
        """Within it, a handshake, stages vote as if a script had given the shapes that they know. `inputs`: of the
        first stage.
        """
        found, stages = self._shapes.setdefault(schedule, {}), _stages_of(schedule)
        (generation, samples), given = self._calls[schedule], [stage._user_meta for stage in stages]
        purpose = samples, schedule._has_backward
        known = found.get(purpose) or (shapes.learnt(generation, purpose) if len(self._shapes) == 1 else None)
        if known is None or not self._is_line or (stages[0].is_first and known[0].inputs != _metas_of(inputs)):
            known = given
        try:
            for stage, meta, by_script in zip(stages, known, given, strict=True):
                stage._user_meta = meta
                stage._validate_inferred_metadata = partial(_check_found, stage, by_script)
            yield
            found[purpose] = [_found_by(stage, schedule._has_backward) for stage in stages]
            if schedule._has_backward:  # of evaluations cells may have batches of other lengths
                shapes.find(purpose, found[purpose])
        finally:
            for stage, meta in zip(stages, given, strict=True):
                stage._user_meta = meta
                vars(stage).pop("_validate_inferred_metadata", None)


def _check_found(stage: Any, given: Any) -> None:
    """What is computed must be as a script has `given` it, not as it was known where another stage knew nothing."""
    stage._user_meta = given
    type(stage)._validate_inferred_metadata(stage)


@contextmanager
def _alone(schedule: Any) -> Iterator[None]:
    """Within it, a handshake, no neighbour is there that would tell a stage anything."""
    stages = _stages_of(schedule)
    for stage in stages:
        stage._recv_meta = partial(_told_alone, stage)
    try:
        yield
    finally:
        for stage in stages:
            del stage._recv_meta


def _told_alone(stage: Any, source: int) -> Any:
    """What another stage would say: what goes to this one, or of which form the gradients of its outputs are."""
    from torch.distributed.pipelining import _utils as torchs

    if source > stage.stage_index:
        return torchs._StageBackwardMeta(torchs._derive_grad_metas(stage._stage_meta.outputs))
    inputs = [replace(one, requires_grad=one.dtype.is_floating_point) for one in stage._user_meta.inputs]
    return torchs._StageForwardMeta(tuple(inputs))  # as activations come; a script gives any tensors of the form


def _found_by(stage: Any, has_backward: bool) -> Any:
    """What a handshake has found, without what an earlier one has left."""
    meta = copy(stage._stage_meta)
    if not has_backward:
        meta.input_grads = meta.output_grads = None
    return meta


def _metas_of(inputs: Any) -> Any:
    from torch.distributed.pipelining import _utils as torchs

    return torchs.extract_tensor_metas(torchs.validate_and_normalize_to_tuple(inputs))


def ends_of(shapes: StageShapes) -> tuple[int, int]:
    """A number of what its stages get, and one of what they give, as those of neighbours' are whose shapes fit. Zeros
    where nothing is known; less where schedules differ.
    """
    if not shapes.found:
        return 0, 0
    if not shapes.are_known:
        return -1, -1
    known = [(purpose, metas or []) for purpose, metas in sorted(shapes.found.items())]
    gets = [(purpose, [meta.inputs for meta in metas]) for purpose, metas in known]
    gives = [(purpose, [meta.outputs for meta in metas]) for purpose, metas in known]
    return _number(gets), _number(gives)


def _number(value: object) -> int:
    """The same wherever a value has the same text; above 0."""
    return int.from_bytes(sha256(repr(value).encode()).digest()[:7]) + 1


def plain_shapes(shapes: StageShapes) -> list[Any]:
    """What is known here, in plain values, for another process of this coordinate. Shapes of DTensors are left out."""
    from torch.distributed.pipelining import _utils as torchs

    def plain(one: Any) -> list[Any] | None:
        return one and [list(one.shape), list(one.stride), str(one.dtype).removeprefix("torch."), one.requires_grad]

    return [
        [*purpose, [[part and [plain(one) for one in part] for part in _parts(meta)] for meta in metas]]
        for purpose, metas in shapes.found.items()
        if metas and all(type(one) in (torchs._TensorMeta, type(None)) for one in _all_of(metas))
    ]


def take_shapes(shapes: StageShapes, generation: int, plain: Any) -> None:
    """Takes over `plain_shapes` of another process for the world of a generation. Raises `PeerError`."""
    from torch.distributed.pipelining import _utils as torchs

    def meta(one: Any) -> Any:
        shape, stride, dtype, requires_grad = one
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype) or not all(type(size) is int for size in (*shape, *stride)):
            raise ValueError(f"{one!r:.100} is no shape")
        return torchs._TensorMeta(torch.Size(shape), tuple(stride), kind, bool(requires_grad))

    def part(given: Any) -> tuple[Any, ...] | None:
        return None if given is None else tuple(one and meta(one) for one in given)

    try:
        found = {
            (int(samples), bool(has_backward)): [torchs._StageMeta(*map(part, each)) for each in metas]
            for samples, has_backward, metas in plain
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise PeerError(f"the shapes of stages that another worker sent cannot be read: {error}") from None
    shapes.learn(generation, found)


def _parts(meta: Any) -> tuple[Any, ...]:
    """Of a stage: what it gets and gives, and the gradients of both."""
    return meta.inputs, meta.outputs, meta.input_grads, meta.output_grads


def _all_of(metas: Sequence[Any]) -> Iterator[Any]:
    return chain.from_iterable(part or () for meta in metas for part in _parts(meta))


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
