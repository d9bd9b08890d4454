"""Sharded parameters (stage 3): a unit is gathered when a module that uses it is called, and freed when another is.

The next one comes beside it. Backward gathers a unit again for whatever autograd has saved of it, and frees it when its
gradients are in. So nothing need be known of a model beforehand: what is touched out of turn is gathered then, and
stays until it cannot be needed any more. Follows Rajbhandari et al. (2020), stage 3.

`listen` tells of calls: every module that has parameters, or holds modules that do, gets a `forward` of its instance
around its own. The first call that is made while no other is under way is the outermost one; if the world changes in
it, it is run again there. As in activation_checkpointing.py, what is put on a module is a function of this file, so
that copies and pickled modules go on with their class's own `forward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, groupby
from types import MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.blocks.released import OnTouch
from shoal.blocks.unit_flats import Presence, Unit
from shoal.cells.marks import is_divided
from shoal.data.seeds import RandomState
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.process.compiler import is_compiling_calls, uncompiled, uncompiled_frame
from shoal.training.context import TrainingContext
from shoal.training.gathered_units import GatheredUnits
from shoal.training.parameters import Parameters

log = get_logger("shoal")

OWN_FORWARD = "_forward_before_units"
"""Where a module keeps a `forward` that it had besides its class's."""
_MADE: WeakKeyDictionary[type[nn.Module], Callable[..., Any]] = WeakKeyDictionary()
_LISTENERS: WeakKeyDictionary[nn.Module, ReferenceType[ShardedParameters]] = WeakKeyDictionary()
"""A listener keeps its modules, so it is not kept for them: else none of both would ever go."""


def _advice(use: str) -> str:
    """What to do in place of this use of a parameter that is not here. In-place functions end in an underscore."""
    if use == "__setitem__" or (use.endswith("_") and not use.endswith("__")):
        return "Give it its values before shoal.initialize; from then on the optimizer alone changes them."
    return "Use it within the module's forward, or within `with engine.gathered(module):`."


class ShardedParameters(Parameters):
    """`take_part` is called where the world changes under a call that can be made again."""

    def __init__(
        self, context: TrainingContext, gather: Callable[[OnTouch], GatheredUnits], take_part: Callable[[], None]
    ) -> None:
        """`gather`: makes the units, which call what they are given."""
        self._context, self._take_part = context, uncompiled(torch.inference_mode(False)(take_part))
        self.units = gather(self._on_touch)
        self.parts = self.units.parts
        self._divided = next((one for one in context.state.placed if is_divided(one)), None)
        """A parameter that is a DTensor."""
        self._lacking: dict[int, set[int]] = {}
        """By unit, the buckets whose gradients are still to come in this backward."""
        self._is_called = self._is_backward = False
        self._open: list[list[Unit]] = []
        """Units of each context of `gathered` that is open."""
        self._are_all_here = False
        """Whether nothing is left to gather, whatever is asked for."""
        self._random: RandomState | None = None
        """As the call at hand found it."""
        self._stack: list[Unit] = []
        """Units that calls under way use."""
        self._current: Unit | None = None
        self._paths: WeakKeyDictionary[nn.Module, list[Unit]] = WeakKeyDictionary()
        """By outermost module, the units that its last call used, one after the other."""
        self._path: list[Unit] = []
        """Those of the call at hand."""
        self._to_come: list[Unit] = []
        """As the last call had them from here on."""
        self._before: dict[int, Unit] = {}
        """By unit, which one came before in the last forward."""
        module = context.state.module
        _refuse_scripted(module)
        if len(list(self.units)) == 1 and self.units.are_weights:
            log.warning("one_unit", model=type(module).__name__, means="the whole model is gathered at once",
                        hint="put its layers into an nn.ModuleList, or name their classes in shoal.units")  # fmt: skip
        self._needs = _needs(module, self.units)
        listen(with_parameters(module), self)

    # ---- the steps of training

    def on_world(self, world: World) -> None:
        """Also where a forward of the world before is still to be made again."""
        self._stack.clear()
        self._current = None
        self.units.on_world(world)

    def check_step(self) -> None:
        if self._open:
            raise UserError("engine.step was called within engine.gathered(...); leave that context before it.")
        self.units.refuse_writes()

    def before_vote(self) -> None:
        self.units.settle()
        self.units.free_all()
        self._current = None

    def after_evaluating(self) -> None:
        """Whatever the script has written into parameters is gone with them."""
        self.units.forget_writes()
        if not self._open and self.units.come_and_go and not self._context.loop.has_gradient:
            with contextlib.suppress(WorldChanged):  # what breaks is found by the next who waits
                self.before_vote()
                self._context.state.module_guard.forget_writes()

    def before_leaving(self, world: World) -> None:
        """Callbacks of one member may have asked others until now."""
        self.before_vote()
        world.group.all_gather(torch.zeros(1, dtype=torch.uint8))

    def on_boundary(self, world: World) -> None:
        self.units.stand(world)

    # ---- calls

    # A compiler breaks its graphs here: it compiles what a module does, and calls what is done around it.

    @uncompiled_frame
    def around(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """A call of `module`: `forward()` is its own. Returns the call's result."""
        if self._divided is not None and is_compiling_calls():
            raise _not_compiled(self._context.state.name_of(self._divided))
        if self._are_all_here or not self.units.come_and_go:
            return forward()
        if self._is_called or self._is_backward:
            return self._inside(module, forward) if module in self._needs else forward()
        while True:
            saving = self._begin_call(module)
            try:
                with saving:
                    return self._checked(module, forward)
            except WorldChanged:
                self._end_call()
                self._change_worlds()
            finally:
                self._end_call()

    def _checked(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Whatever comes of it. Raises `WorldChanged` where that may be due to others, who have gone on."""
        try:
            result = self._inside(module, forward)
        except Exception:
            self.units.check()
            raise
        self.units.check()
        return result

    @uncompiled
    def _begin_call(self, module: nn.Module) -> AbstractContextManager[object]:
        self._is_called, self._current = True, None
        self._to_come = self._paths.get(module, [])
        self._path = self._paths[module] = []
        in_lane = self._context.loop.in_flight  # its numbers are those of the lane when it is repeated
        self._random = None if in_lane else RandomState.save()
        return self._saving()

    @uncompiled
    def _end_call(self) -> None:
        self._is_called = False
        self._stack.clear()

    @uncompiled
    def _change_worlds(self) -> None:
        """Then the units of open contexts are here again, and a call that is made again draws the same numbers."""
        self._take_part()
        if self._random is not None:
            self._random.restore()
        self._bring([])

    def _saving(self) -> AbstractContextManager[object]:
        """A context in which what autograd saves of a unit brings it back."""
        if not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @uncompiled_frame
    def _inside(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        entered, result = self._enter_all(module), None
        try:
            result = forward()
        finally:
            self._leave_all(entered, result)
        return result

    @uncompiled
    def _enter_all(self, module: nn.Module) -> int:
        """Gathers the units of its own parameters; returns how many there are."""
        needed = self._needs.get(module, ())
        for unit in needed:
            self._enter(unit)
        return len(needed)

    @uncompiled
    def _leave_all(self, entered: int, result: Any) -> None:
        """What a module returns may be a parameter, or a view of one: its unit stays."""
        if not entered:
            return
        del self._stack[len(self._stack) - entered :]
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            unit = self.units.of_tensor(leaf) if isinstance(leaf, Tensor) else None
            if unit is not None:
                unit.is_pinned = True
                if not self._context.loop.in_flight:
                    self.units.keep(unit)

    def _enter(self, unit: Unit) -> None:
        self._stack.append(unit)
        if unit is self._current and unit.presence is Presence.HERE and not self._is_backward:
            return
        if self._is_backward:
            if not self._open:
                self.units.free_done(self._lacking, [*self._stack, unit])
            self.units.ensure(unit)  # in a backward it is made again: it stays until its gradients are in
            return
        self.units.ensure(unit)
        self.units.free_unused(self._stack)
        if self._current is not None and self._current is not unit:
            self._before[unit.number] = self._current
        self._current = unit
        self._path.append(unit)
        if unit in self._to_come:
            self._to_come = self._to_come[self._to_come.index(unit) + 1 :]
            for following in self._to_come[:1]:
                self.units.begin(following)

    @uncompiled
    def _on_touch(self, parameter: nn.Parameter, use: str) -> None:
        unit = self.units.of_tensor(parameter)
        assert unit is not None
        if not (self._is_called or self._is_backward or self._open):
            name = self._context.state.name_of(parameter)
            raise UserError(
                f'parameter "{name}" is used by {use} while it is not gathered (ZeRO stage 3 keeps each parameter on '
                f"its owners only). {_advice(use)}"
            )
        unit.is_pinned = True
        self._get(unit)

    def _get(self, unit: Unit) -> None:
        """It is here. Outside of calls that could be made again, changes are taken part in at once."""
        if self._is_called or self._is_backward:
            self.units.ensure(unit)
        else:
            self._bring([unit])

    # ---- backward

    @uncompiled
    def _pack(
        self,
        saved: Tensor,  # of any shape
    ) -> Any:
        unit = self.units.of_tensor(saved)
        if unit is None:  # an output that is kept as it is keeps its node, and that what it has saved: a cycle
            return saved.detach() if type(saved) is Tensor or is_divided(saved) else saved
        return unit, saved

    @uncompiled
    def _unpack(self, packed: Any) -> Tensor:  # of any shape
        if isinstance(packed, Tensor):
            return packed
        unit: Unit
        saved: Tensor
        unit, saved = packed
        self._get(unit)
        if unit is not self._current:
            self._current = unit
            if self._is_backward and not self._open:
                self.units.free_done(self._lacking, [*self._stack, unit])
            before = self._before.get(unit.number)
            if before is not None and (self._lacking.get(before.number) or self.units.is_awaited(before)):
                self.units.begin(before)
        return saved

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        self._is_backward, self._current = True, None
        self._lacking = {unit.number: set(unit.gets_gradients) for unit in self.units}
        try:
            yield
        except Exception:  # may be due to others, who have gone on
            self.units.check()
            raise
        finally:
            self._is_backward, self._lacking = False, {}
            self._stack.clear()
        if self.units.come_and_go and not self._open:
            self.before_vote()

    def on_gradients(self, bucket: int) -> None:
        unit = self.units.of_bucket(bucket)
        lacking = self._lacking.get(unit.number, set())
        lacking.discard(bucket)
        if not lacking and self.units.come_and_go and not self._open:
            if not unit.has_frozen:
                self.units.free(unit)
            self.units.free_done(self._lacking, [*self._stack, unit])

    # ---- all of some

    def reading(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:  # each of any shape
        """A unit at a time."""
        for unit, together in groupby(tensors, key=self.units.of_tensor):
            if unit is not None:
                self.units.ensure(unit)
            yield from together
            self.units.check()
            if unit is not None and not unit.is_pinned:
                self.units.free(unit)

    @contextmanager
    def gathered(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        if self._are_all_here:
            yield
            return
        units = self.units.of_modules(list(modules))
        self._bring(units)
        with self._staying(units):
            yield

    @contextmanager
    def all_here(self) -> Iterator[None]:
        units = list(self.units)
        self.units.bring(units)
        with self._staying(units):
            self._are_all_here = True
            try:
                yield
            finally:
                self._are_all_here = False

    @contextmanager
    def _staying(self, units: list[Unit]) -> Iterator[None]:
        self._open.append(units)
        uses = [unit.uses for unit in units]
        try:
            with self._saving():
                yield
        finally:
            self._open.remove(units)
            for unit, before in zip(units, uses, strict=True):
                unit.keep_for_views(before)
                unit.is_pinned = any(unit in others for others in self._open)
            if self.units.come_and_go and not (self._open or self._is_called or self._is_backward):
                self.units.free_unused(self._stack)

    def _bring(self, units: list[Unit]) -> None:
        while True:
            try:
                self.units.bring([*units, *chain.from_iterable(self._open)])
            except WorldChanged:
                if self._is_called or self._is_backward or self._context.is_busy:
                    raise
                self._take_part()
            else:
                return


def _not_compiled(name: str) -> UserError:
    """What is raised where a compiler would trace this DTensor."""
    return UserError(
        f'parameter "{name}" is a DTensor, which torch.compile cannot trace in memory that comes and goes (ZeRO stage '
        "3); leave torch.compile out, set `zero_optimization.stage: 2`, or divide the layers by shoal.sharded."
    )


def _refuse_scripted(model: nn.Module) -> None:
    """Nothing can be done between the calls that its interpreter makes, and it would read memory that is freed."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            named = f'module "{name}"' if name else "the model"
            raise UserError(
                f"{named} was made by torch.jit, whose interpreter knows nothing of parameters that come and "
                "go (ZeRO stage 3). Give the plain module (torch.compile works), or use stage 2."
            )


def _needs(model: nn.Module, units: GatheredUnits) -> dict[nn.Module, list[Unit]]:
    """By module, the units that its own parameters lie in."""
    found = {}
    for module in model.modules():
        own = [units.of_tensor(parameter) for parameter in module.parameters(recurse=False)]
        lying = [unit for unit in own if unit is not None]
        if lying:
            found[module] = list(dict.fromkeys(lying))
    return found


# ---- calls of modules


def with_parameters(model: nn.Module) -> list[nn.Module]:
    """Its parts that have parameters, or hold parts that do."""
    return [part for part in model.modules() if next(part.parameters(), None) is not None]


def listen(modules: list[nn.Module], listener: ShardedParameters) -> None:
    """From now on `listener` is around every call of these modules."""
    for module in modules:
        _LISTENERS[module] = ref(listener)
        before = vars(module).get("forward")
        if getattr(before, "_shoal_is_around", False):
            continue
        if before is not None:
            vars(module)[OWN_FORWARD] = before
        vars(module)["forward"] = MethodType(_around(type(module)), module)


@uncompiled
def _listener(module: nn.Module) -> ShardedParameters | None:
    """What is around its calls. Not traced: other threads change that dictionary while a compiler walks over it."""
    known = _LISTENERS.get(module)
    return known() if known is not None else None


def _around(kind: type[nn.Module]) -> Callable[..., Any]:
    """One for each class: what reads the signature of a `forward` finds the class's."""
    if kind not in _MADE:
        _MADE[kind] = _make(kind)
    return _MADE[kind]


def _make(kind: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get(OWN_FORWARD)
        bound = MethodType(kind.forward, self) if own is None else own
        listener = _listener(self)
        if listener is None:  # of a copy, or the engine has gone
            return bound(*args, **kwargs)
        return listener.around(self, functools.partial(bound, *args, **kwargs))

    forward.__dict__["_shoal_is_around"] = True
    return uncompiled_frame(forward)
