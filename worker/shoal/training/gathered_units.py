"""The units of sharded parameters on one worker: which are here, on their way, or with their owners.

Between two votes any unit can be gathered, by any member, as often as it likes: owners answer beside their own work
(exchange/unit_fetch.py), or their memory is mapped where it can be seen (exchange/unit_fetch.py). Who asks when is in
sharded_parameters.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Never
from weakref import WeakSet

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.released import OnTouch
from shoal.blocks.segments import HeldWeights
from shoal.blocks.sharded_memory import ShardedMemory
from shoal.blocks.shared_weights import Key, Part, SeenWeights, SharedWeights
from shoal.blocks.unit_flats import Presence, Unit, units_of
from shoal.blocks.values import WholeValues
from shoal.cells.marks import local_of
from shoal.config.out_of_memory import note_what, place_of
from shoal.core.layout import Stretch
from shoal.exchange.traffic import UnitTraffic
from shoal.exchange.unit_fetch import (
    WHERE,
    FirstValuesFetch,
    SeenUnits,
    UnitFetch,
    UnitServer,
    address_message,
    answers_of,
    see_owners,
    server_in,
)
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.guards.write_guards import ShownWatch, UnitWatch
from shoal.process.device import DeviceCopy
from shoal.state.training_state import TrainingState
from shoal.training.cell_parts import CellParts, are_joined
from shoal.training.context import TrainingContext

Own = tuple[list[Tensor], list[Tensor]]
"""Places in the flats of a unit, and the values that go there, (elements,) each."""

PLAIN = {Tensor, nn.Parameter}
"""Classes that change nothing of what is asked of a tensor."""
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _memory_of(
    tensor: Tensor,  # of any shape
) -> int:
    """The key of what it lies in, as `storage_key` has it; 0: in nothing, as it stands for others that do."""
    if tensor.layout is not torch.strided or _is_wrapped(tensor):
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key


class NothingInAChild:
    """How units come in a process that was forked from a worker's: it is in no group, and sees no memory of others."""

    def __init__(self, described: Callable[[Unit], str]) -> None:
        self._described = described

    def begin(self, unit: Unit) -> Never:
        """Raises `UserError`."""
        raise UserError(
            f"{self._described(unit)}, are used in a process that was forked from a worker (a data loader's?): "
            "with ZeRO stage 3 it has those parameters only that were gathered when it was forked. Fork it within "
            "`with engine.gathered():`, or give it a copy that was made there."
        )

    finish = begin

    def give_up(self) -> None:
        """Nothing is on its way."""


class UnitOwner:
    """What this worker answers to others: units of weights, and, by the numbers that follow theirs, of averages; by
    others, its part of the model. `parts`: what answers for that, where a cell has several.
    """

    def __init__(
        self, state: TrainingState, weights: HeldWeights, shared: SharedWeights | None, parts: CellParts | None
    ) -> None:
        self.parts, self._weights, self._averages = parts, weights, state.held.home.averages
        self._lock, self._shared = state.held.segments.lock, shared
        self._server: UnitServer | None = None
        self._traffic: UnitTraffic

    def on_world(self, world: World, traffic: UnitTraffic) -> None:
        """In this one from now on."""
        self._traffic = traffic
        if self.parts is not None:
            self.parts.on_world(world)
        self._server = server_in(world.group, self._server)

    def stand(self, world: World, key: Key) -> None:
        """At the boundary at hand. Raises `WorldChanged`."""
        shared, parts, units = self._shared, self.parts, self._traffic.units
        if parts is not None:
            parts.stand(world)
        of_weights = answers_of(self._traffic, key[1], self._weights, self._lock)
        of_averages = answers_of(self._traffic, key[1], self._averages, self._lock)

        def answers(peer: int, unit: int) -> list[Tensor]:  # each (elements,)
            if unit == WHERE:
                return [address_message(shared.address if shared is not None else None)]
            if unit < 0 and parts is not None:
                return parts.answer(peer, unit)
            if not 0 <= unit < 2 * units:
                raise WorldChanged(f"rank {peer} asks for unit {unit} of {units}")
            return of_weights(peer, unit) if unit < units else of_averages(peer, unit - units)

        if shared is not None:
            shared.stand(key)
        assert self._server is not None
        self._server.open(key, answers)


def units_of_weights(context: TrainingContext, weights: HeldWeights, on_touch: OnTouch) -> GatheredUnits:
    """Those that are trained, which this worker answers for."""
    memory = context.state.memory
    assert isinstance(memory, ShardedMemory)
    parts = CellParts(context) if are_joined(context.state.layout.part) else None
    return GatheredUnits(context, weights, on_touch, memory, UnitOwner(context.state, weights, memory.shared, parts))


class GatheredUnits:
    """`on_touch` is called when a parameter of a unit that is not here is used."""

    are_weights = True
    """Whether they are those that are trained."""

    def __init__(
        self,
        context: TrainingContext,
        weights: HeldWeights,
        on_touch: OnTouch,
        memory: ShardedMemory,
        owner: UnitOwner | None,
    ) -> None:
        """`memory`: what the parameters are views of; `owner`: what answers others here, where that is this one's."""
        self._context, self._weights, self.on_touch, self._owner = context, weights, on_touch, owner
        self.parts = owner.parts if owner is not None else None
        """What joins them with those that other coordinates of a cell have, where there are any."""
        state = context.state
        self._memory, self._flats = memory, WholeValues(state.held_layout, memory.flats)
        self._units = units_of(state.held_layout, memory.flats, state.placed, memory.beneath)
        self.have_frozen = any(unit.has_frozen for unit in self._units)
        self._of_bucket = {bucket: unit for unit in self._units for bucket in unit.buckets}
        self._by_storage = {key: unit for unit in self._units for key in unit.storages}
        self.watch = UnitWatch(memory.flats, state.comparisons)
        self._shown_watch = ShownWatch(state.held_layout, memory.mapped) if memory.mapped is not None else None
        self._first_uses = [unit.uses for unit in self._units]
        self._fetch: UnitFetch | SeenUnits | FirstValuesFetch | NothingInAChild | None = None
        """None: everything is here, until the first world; and until a unit is asked for after a vote."""
        self._world: World | None = None
        """The last one that has begun."""
        self._owners: dict[int, SeenWeights] | None = None
        """By rank, where all of this world's are seen."""
        self._have_looked = False
        """Whether it is known whether they are."""
        if state.comes_later and state.originals is not None:
            self._fetch = FirstValuesFetch(state.originals, memory.flats)
            for unit in self._units:
                unit.begin_elsewhere(on_touch)
        _all.add(self)
        self._traffic: UnitTraffic | None = None
        self._own: dict[int, Own] = {}
        self._own_as_of = (-1, -1)
        self._stretches: list[list[Stretch]] = []
        """By unit, what is held here as of then."""

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    @property
    def come_and_go(self) -> bool:
        """Whether a world has begun, or values were never here."""
        return self._world is not None or self._fetch is not None

    def of_bucket(self, bucket: int) -> Unit:
        return self._of_bucket[bucket]

    def of_tensor(
        self,
        tensor: Tensor,  # of any shape
    ) -> Unit | None:
        """The one in whose flats it lies."""
        if type(tensor) in PLAIN:
            return self._by_storage.get(_memory_of(tensor))
        with torch._C.DisableTorchFunctionSubclass():
            return self._by_storage.get(_memory_of(local_of(tensor)))

    def of_modules(self, modules: list[nn.Module]) -> list[Unit]:
        """Those with parameters of these modules, or of what they hold."""
        wanted = {id(parameter) for module in modules for parameter in module.parameters()}
        return [unit for unit in self if any(id(parameter) in wanted for parameter in unit.parameters)]

    # ---- the world

    def on_world(self, world: World) -> None:
        """What was gathered in the one before is void, and nothing is on its way: its group is closed."""
        state = self._context.state
        if state.originals is not None:
            self._give_up_first_values()
        self._traffic = UnitTraffic(world.plan, world.rank, state.held_layout, [unit.buckets for unit in self])
        if self._owner is not None:
            self._owner.on_world(world, self._traffic)
        self._own_as_of, self._owners, self._have_looked = (-1, -1), None, self._memory.shared is None
        if self._fetch is not None:
            self._fetch.give_up()
        self.free_all()
        if self._memory.mapped is not None:
            self._memory.mapped.forget()
        self.stand(world)

    def _give_up_first_values(self) -> None:
        """Their memory goes with the parameters', but for what the script has kept of them."""
        with_originals = [unit.uses for unit in self]
        self._context.state.originals = None
        for unit, first, before in zip(self, self._first_uses, with_originals, strict=True):
            unit.keep_for_views(first - (before - unit.uses))

    def stand(self, world: World) -> None:
        """At the boundary at hand. Raises `WorldChanged`."""
        self.watch.turn()
        self._world, self._fetch = world, None
        if self._owner is not None:
            self._owner.stand(world, (world.plan.generation, self._context.boundaries))

    def _find_fetch(self) -> UnitFetch | SeenUnits:
        """How units come until the next vote. Raises `WorldChanged`."""
        world, traffic, state = self._world, self._traffic, self._context.state
        assert world is not None and traffic is not None
        key: Key = world.plan.generation, self._context.boundaries
        if not self._have_looked:
            self._have_looked, self._owners = True, self._look(world, key)
        if self._owners is not None and self._memory.mapped is not None:
            return SeenUnits(world.group, self._owners, key, self._memory.mapped)
        loop, module = self._context.loop, state.module
        fetch = UnitFetch(
            world.group, traffic, key, self._flats, self._put_own,
            is_in_lane=lambda: loop.in_flight and module.training,  # and not in an evaluation
        )  # fmt: skip
        if not self.are_weights:
            fetch.first = traffic.units  # averages are asked for by the numbers that follow those of the units
        return fetch

    def _look(self, world: World, key: Key) -> dict[int, SeenWeights] | None:
        """Maps the memory of all owners, where it can be seen."""
        traffic, shared, mapped = self._traffic, self._memory.shared, self._memory.mapped
        assert traffic is not None and shared is not None and mapped is not None
        mine = world.plan.held_by(world.rank, self._context.boundaries)
        others = traffic.asked[world.rank] - mine
        shown = {rank: world.plan.owned_by(rank) & others for rank in world.plan.ranks} | {world.rank: mine}
        ranks = [rank for rank, runs in shown.items() if runs]
        owners = see_owners(world.group, key, shared.address, ranks)
        if owners is None:
            mapped.forget()
            return None
        parts = [
            Part(owners[rank], stretch)
            for rank in ranks
            for stretch in self._context.state.held_layout.stretches(shown[rank])
        ]
        return owners if mapped.see(parts) else None

    def _own_of(self, unit: int) -> Own:
        """Of a unit whose flats have memory, where in them goes what is held here, and where it lies."""
        context, traffic = self._context, self._traffic
        assert traffic is not None
        as_of = min(context.boundaries, traffic.plan.boundaries), context.state.held.segments.revision
        if self._own_as_of != as_of:
            self._own_as_of, self._own = as_of, {}
            self._stretches = traffic.own(context.boundaries)
        if unit not in self._own:
            places: list[Tensor] = []
            values: list[Tensor] = []
            for stretch in self._stretches[unit]:
                parts = self._weights.parts(stretch)
                values += parts
                places += self._flats.of(stretch).split([part.numel() for part in parts])
            self._own[unit] = places, values
        return self._own[unit]

    def _put_own(self, unit: int) -> list[DeviceCopy]:
        """Puts what is held here into a unit's flats; what lies on the host of a device comes beside its work."""
        device, (places, values) = self._context.state.device, self._own_of(unit)
        pairs = [*zip(places, values, strict=True)]
        here = [(place, value) for place, value in pairs if device.holds(value)]
        if here:
            torch._foreach_copy_([place for place, _ in here], [value for _, value in here])
        above = [(place, value) for place, value in pairs if not device.holds(value)] if len(here) < len(pairs) else []
        return [device.to_device(value, place, device.promise(place)) for place, value in above]

    # ---- units

    def begin(self, unit: Unit) -> None:
        """It is asked for, where it is not here or on its way. Raises `WorldChanged`."""
        if unit.presence is not Presence.OUT or not self.come_and_go:
            return
        try:
            self._fetch = self._fetch or self._find_fetch()
            self._fetch.begin(unit)
        except (MemoryError, OSError, RuntimeError) as error:
            note_what(error, f"unit {unit.number} of {len(self._units)} was gathered ({self._described(unit)})")
            raise
        if self._context.loop.in_flight:
            self._context.faults.at("gather", self._context.state.step + 1)

    def _described(self, unit: Unit) -> str:
        buckets = [self._context.state.held_layout.buckets[bucket] for bucket in unit.buckets]
        names = [slot.parameter.name for bucket in buckets for slot in bucket.slots]
        size = sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
        return f"{place_of(names)}, {size:,} bytes of parameters"

    def ensure(self, unit: Unit) -> None:
        """It is here. Raises `WorldChanged`."""
        self.begin(unit)
        if unit.presence is Presence.COMING:
            assert self._fetch is not None
            self._fetch.finish(unit)
            if not isinstance(self._fetch, SeenUnits):
                self.watch.on_here(unit.buckets)

    def check(self) -> None:
        """All that was read of units that are seen was as of this vote. Raises `WorldChanged`."""
        if isinstance(self._fetch, SeenUnits):
            self._fetch.check()

    def refuse_writes(self) -> None:
        """Raises `UserError` where the script is found to have written to parameters past autograd."""
        self.watch.refuse()
        if self._shown_watch is not None:
            self._shown_watch.refuse()

    def forget_writes(self) -> None:
        """What the script has written to parameters past autograd was allowed, and goes."""
        self.watch.forget()
        if self._shown_watch is not None:
            self._shown_watch.take_back()

    def keep(self, unit: Unit) -> None:
        """It is here, and stays as it is: whoever reads it may do so for longer than its owners wait. Raises
        `WorldChanged`.
        """
        if isinstance(self._fetch, SeenUnits) and unit.presence is Presence.HERE:
            self._fetch.keep(unit)
            self.watch.on_here(unit.buckets)

    def bring(self, wanted: list[Unit]) -> None:
        """These are here, and stay. Raises `WorldChanged`."""
        for unit in wanted:
            unit.is_pinned = True
            self.begin(unit)
        for unit in wanted:
            self.ensure(unit)
            self.keep(unit)

    def settle(self) -> None:
        """Nothing is on its way. Raises `WorldChanged`."""
        for unit in self:
            if unit.presence is Presence.COMING:
                self.ensure(unit)

    def free(self, unit: Unit) -> None:
        """Where it is here."""
        if unit.presence is Presence.HERE:
            self.watch.on_free(unit.buckets, by_script=self._context.loop.in_flight)
            if self._shown_watch is not None and not self._context.loop.in_flight:
                self._shown_watch.take_back(unit.buckets)
            unit.free(self.on_touch)

    def free_unused(self, used: Collection[Unit]) -> None:
        """All that are here but these and the pinned ones."""
        for unit in self:
            if not unit.is_pinned and unit not in used:
                self.free(unit)

    def free_done(self, lacking: Mapping[int, Collection[int]], but: Collection[Unit]) -> None:
        """In a backward: those with frozen parameters that no node still to run has saved anything of: they have no
        gradients that tell. `lacking`: by unit, buckets whose gradients are still to come.
        """
        for unit in self if self.have_frozen and self.come_and_go else ():
            is_needed = unit.is_pinned or bool(lacking.get(unit.number)) or unit in but
            if unit.has_frozen and not is_needed and not self.is_awaited(unit):
                self.free(unit)

    def is_awaited(self, unit: Unit) -> bool:
        """Whether somebody has saved something of one with frozen parameters, as autograd does."""
        places, _ = self._own.get(unit.number, ([], []))
        return unit.has_frozen and unit.is_used_beyond(len(places))

    def free_all(self) -> None:
        """Nothing may be on its way in a group that is open."""
        for unit in self:
            self.free(unit)
            if unit.presence is Presence.COMING:
                unit.free(self.on_touch)

    def on_fork(self) -> None:
        """In a forked child, which may live on for long: it has what is here in memory of its own, and no more."""
        if self._world is None:
            return
        mapped = self._memory.mapped
        for unit in self:
            is_shown = mapped is not None and any(map(mapped.is_shown, unit.buckets))
            if unit.presence is Presence.COMING or (unit.presence is Presence.HERE and is_shown):
                unit.free(self.on_touch)
        if mapped is not None:
            mapped.forget()
        self._fetch = NothingInAChild(self._described)


_all: WeakSet[GatheredUnits] = WeakSet()
"""Of this process."""


def _let_go() -> None:
    for units in _all:
        units.on_fork()


os.register_at_fork(after_in_child=_let_go)
