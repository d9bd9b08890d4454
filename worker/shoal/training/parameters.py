"""The parameters on one worker between its votes: what steps of training tell them, and the form in which all are here.

`Parameters` has what the steps of training say. Which form a worker has is decided by residency.py; the one in which
parameters come and go a unit at a time is in sharded_parameters.py.

`HandedParameters` are whole ones (stages 0 to 2), for which what other members have updated comes beside the next
forward, and to a joiner all of them. Until its bucket is here a parameter has a class of its own, and each use of it
waits for the bucket: in the model's forward or anywhere else. Where the world changes in such a wait it is taken part
in there, and the use goes on with the values of the new world: the forward that it may be in belongs to a lane that is
then repeated. Where anything could read past that class, parameters come before the loop goes on, as they do where a
step's boundary has something to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import gt
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from shoal.blocks.flat import Flats, all_views, by_bucket, storage_key
from shoal.blocks.released import Arriving, release, restore, touch
from shoal.cells.marks import lie_in
from shoal.exchange.hand_out import HandOut
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.process.compiler import call_before_compiling, has_compiled
from shoal.training.cell_parts import CellParts, WholeOwner, are_joined
from shoal.training.context import NOTHING, TrainingContext
from shoal.training.whole_averages import WholeAverages


class Parameters(ABC):
    """What the steps of training say; a form of parameters that need not do anything then does nothing."""

    parts: CellParts | None = None
    """What joins these with those that other coordinates of a cell have, where there are any."""

    def on_world(self, world: World) -> None:  # noqa: B027
        """A world has begun."""

    def on_gradients(self, bucket: int) -> None:  # noqa: B027
        """A backward has made all gradients of a bucket."""

    def in_backward(self) -> AbstractContextManager[None]:
        """A context for a backward."""
        return NOTHING

    def check_step(self) -> None:  # noqa: B027
        """Raises `UserError` where the script cannot make a step now."""

    @abstractmethod
    def before_vote(self) -> None:
        """All that has been asked for is here: after the vote it may be something else. Raises `WorldChanged`."""

    def before_evaluating(self) -> None:  # noqa: B027
        """An evaluation begins. Changes of the world are taken part in."""

    def after_evaluating(self) -> None:  # noqa: B027
        """An evaluation is over."""

    @abstractmethod
    def before_leaving(self, world: World, /) -> None:
        """The world ends by plan; returns when no member asks for anything in it. Raises `WorldChanged`."""

    def on_updated(self, hand_out: HandOut) -> Collection[int]:
        """The update is made; `hand_out` brings what others have updated. Returns the buckets that are still to come.
        Raises `WorldChanged`.
        """
        hand_out.finish()
        return ()

    def on_boundary(self, world: World) -> None:  # noqa: B027
        """A vote has passed, and its update is made. Raises `WorldChanged`."""

    def settle(self) -> None:  # noqa: B027
        """All that is handed out is here, and what others wait for has left. Raises `WorldChanged`."""

    def forget(self) -> None:  # noqa: B027
        """The world ends: nothing comes any more."""

    @abstractmethod
    def reading(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
        """The same tensors one after the other, each with its values until the next is asked for. Raises
        `WorldChanged`.
        """

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """A context in which all parameters are here, and no change of the world is taken part in. Raises
        `WorldChanged` before it is entered.
        """
        self.settle()
        yield

    @abstractmethod
    def gathered(self, modules: Iterable[nn.Module], /) -> AbstractContextManager[None]:
        """A context in which all parameters of these modules are here, to be read."""

    def averaged(self, is_owed: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context in which the parameters are the averages of weights. `is_owed`: to all members at this boundary:
        where the world changes it raises `WorldChanged`; else changes are taken part in. In no world they are the
        weights.
        """
        return NOTHING


OF_A_FLAT = 2
"""Uses of a flat's memory besides its parameters: the flat, and the memory that it was made of."""


_IN_THIS_PROCESS: WeakSet[HandedParameters] = WeakSet()


class HandedParameters(Parameters):
    """`take_part` is called where the world changes under a use of a parameter; `on_all_here` when the last of a
    hand-out has come that others did not wait for.
    """

    def __init__(
        self, context: TrainingContext, take_part: Callable[[], None], on_all_here: Callable[[], None]
    ) -> None:
        state = context.state
        self._context, self._take_part, self._on_all_here = context, take_part, on_all_here
        self._by_bucket = by_bucket(state.layout, state.parameters)
        self._bucket_of = {id(one): bucket for bucket, found in enumerate(self._by_bucket) for one in found}
        self._modules = frozenset(state.module.modules())
        self._keys = [storage_key(flat) for flat in state.flats.flats]
        self._can_be_guarded = _can_be_guarded(state.module, state.parameters)
        self._hand_out: HandOut | None = None
        self._guarded: list[int] = []
        """Buckets that are still to come, ascending: the last one comes first."""
        self._hook: RemovableHandle | None = None
        self._lock = threading.RLock()
        """A script may use parameters on threads of its own."""
        self._thread = threading.get_ident()
        _IN_THIS_PROCESS.add(self)
        self._has_views = False
        """Whether the script keeps views of parameters, which no class guards."""
        self._compiles = False
        """Whether the script has compiled anything, though the compiler may have forgotten it."""
        self._averages = WholeAverages(context) if context.config.average is not None else None
        self.parts = CellParts(context) if are_joined(state.layout.part) else None
        is_asked = self._averages is not None or self.parts is not None
        self._owner = WholeOwner(context, self._averages, self.parts) if is_asked else None
        """What answers others, where they ask for something: averages, or parts of a cell."""

    # ---- the steps of training

    def before_vote(self) -> None:
        self.settle()
        self._look_for_views()

    def before_evaluating(self) -> None:
        self._settle_here()

    def before_leaving(self, world: World) -> None:
        self.settle()
        if self._owner is not None:  # callbacks of one member may have asked others until now
            world.group.all_gather(torch.zeros(1, dtype=torch.uint8))

    def on_world(self, world: World) -> None:
        self._look_for_views()
        if self._owner is not None:
            self._owner.on_world(world)

    def on_boundary(self, world: World) -> None:
        if self._owner is not None:
            self._owner.stand(world)

    def on_updated(self, hand_out: HandOut) -> Collection[int]:
        context = self._context
        self._hand_out, self._thread = hand_out, threading.get_ident()
        self._compiles = self._compiles or has_compiled()
        if hand_out.is_empty or not self._can_wait():
            hand_out.finish()
            self._end()
            return ()
        _compilers_ask()
        hand_out.begin()
        coming = hand_out.coming
        for bucket in coming:
            release(self._by_bucket[bucket], self._on_touch, Arriving)
        self._guarded = sorted(coming)
        self._hook = register_module_forward_pre_hook(self._before_module)
        context.are_parameters_here = False
        return coming

    def _can_wait(self) -> bool:
        """Whether the loop can go on without what comes. Not in a cell: a member whose forward waits for another's
        sends nothing more meanwhile, and the other may be waiting for it.
        """
        context, world = self._context, self._context.world
        return (
            self._can_be_guarded
            and context.hub is None
            and not self._has_views
            and world is not None
            and bool(world.lanes)
            and not context.is_over
            and not self._compiles
        )

    def _look_for_views(self) -> None:
        self._has_views = self._can_be_guarded and self._are_viewed()

    def _are_viewed(self) -> bool:
        """Whether more tensors lie in the parameters' memory than they and the held blocks."""
        state = self._context.state
        keys = self._keys
        known = [OF_A_FLAT + len(found) for found in self._by_bucket]
        for segment in state.held.segments.in_order:
            known[segment.stretch.bucket] += storage_key(segment.parameter) == keys[segment.stretch.bucket]
        found = list(map(torch._C._storage_Use_Count, keys))
        return state.originals is not None or any(map(gt, found, known))

    # ---- until all is here

    def settle(self) -> None:
        if self._hand_out is None:
            return  # as a rule
        with self._lock, _apart():
            if self._hand_out is not None:
                self._hand_out.finish()
                self._end()

    def _settle_here(self) -> None:
        try:
            self.settle()
        except WorldChanged:
            self._on_change()

    def _on_change(self) -> None:
        """The world has changed under a use: it is taken part in, where that can be done. Raises `WorldChanged`."""
        if threading.get_ident() != self._thread or self._context.is_busy:
            raise WorldChanged("a parameter was used where no change can be taken part in")
        with _apart():
            self._take_part()

    def _end(self) -> None:
        """All is here."""
        context, others_waited = self._context, self._context.are_parameters_here
        for bucket in self._guarded:
            context.state.module_guard.on_arrived(bucket)
        self.forget()
        context.state.current = context.state.everything
        if not others_waited:
            self._on_all_here()

    def forget(self) -> None:
        with self._lock:
            for bucket in self._guarded:
                restore(self._by_bucket[bucket])
            self._hand_out, self._guarded = None, []
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            self._context.are_parameters_here = True

    def before_compiling(self) -> None:
        """A compiler would trace how parameters come, which happens once."""
        if threading.get_ident() == self._thread:
            self._settle_here()

    def before_fork(self) -> None:
        """A child has no owner that hands anything out."""
        if threading.get_ident() == self._thread:
            with contextlib.suppress(WorldChanged):  # who waits next finds it
                self.settle()

    def after_fork(self) -> None:
        """In the child: what has not come never will."""
        self._lock = threading.RLock()
        self.forget()

    # ---- uses

    def _before_module(self, module: nn.Module, _: Any) -> None:
        """A module may compute with what is no function of torch's, or with what a transform of torch.func wraps."""
        for parameter in module._parameters.values():
            if isinstance(parameter, Arriving):
                touch(parameter, "a module")
            elif module in self._modules and _is_wrapped(parameter):
                self._settle_here()

    def _on_touch(self, parameter: nn.Parameter, _: str) -> None:
        try:
            with self._lock, _apart():
                self._bring(self._bucket_of[id(parameter)])
        except WorldChanged:
            self._on_change()

    def _bring(self, bucket: int) -> None:
        hand_out = self._hand_out
        if hand_out is None:
            return
        self._context.faults.at("arrival", self._context.state.step + 1)
        hand_out.bring(bucket)
        while self._guarded and hand_out.is_here(self._guarded[-1]):
            here = self._guarded.pop()
            restore(self._by_bucket[here])
            self._context.state.module_guard.on_arrived(here)
        if hand_out.is_over:
            self._end()

    # ---- all of some

    def reading(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:  # each of any shape
        self.settle()
        return tensors

    @contextmanager
    def gathered(self, _: Iterable[nn.Module], /) -> Iterator[None]:
        self._settle_here()
        yield

    @contextmanager
    def averaged(self, is_owed: bool = False) -> Iterator[None]:
        """One copy of the parameters, as long as it is open; what lies in their own memory stays."""
        if self._context.world is None or self._averages is None:
            yield
            return
        flats, parameters = self._bring_averages(is_owed), self._context.state.parameters
        pairs, give_back = zip(parameters, all_views(self._context.state.layout, flats), strict=True), []
        try:
            for parameter, view in pairs:
                give_back.append(lie_in(parameter, view))
            yield
        finally:
            for one in give_back:
                one()

    def _bring_averages(self, is_owed: bool) -> Flats:
        assert self._averages is not None
        while True:
            try:
                self.settle()
                return self._averages.bring()
            except WorldChanged:
                if is_owed:
                    raise
                self._on_change()


@functools.cache
def _compilers_ask() -> None:
    """From now on: once for this process."""
    call_before_compiling(_before_compiling)


def _before_compiling() -> None:
    for parameters in tuple(_IN_THIS_PROCESS):
        parameters.before_compiling()


def _before_fork() -> None:
    for parameters in tuple(_IN_THIS_PROCESS):
        parameters.before_fork()


def _after_fork() -> None:
    for parameters in tuple(_IN_THIS_PROCESS):
        parameters.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


@contextmanager
def _apart() -> Iterator[None]:
    """What comes is no part of what the script computes where it is waited for."""
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        yield


def _can_be_guarded(module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a class of ours can stand in for that of these parameters, and each use of them asks it."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return not scripted and all(type(parameter) is nn.Parameter for parameter in parameters)


def _is_wrapped(
    parameter: Tensor | None,  # of any shape
) -> bool:
    """Whether a transform of torch.func computes with it."""
    return parameter is not None and torch._C._functorch.is_functorch_wrapped_tensor(parameter)
