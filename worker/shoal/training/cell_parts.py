"""Parts of the model that other coordinates of a cell have, where one member needs the whole: for an export.

Each bucket is asked for as a unit of stage 3 is (exchange/unit_fetch.py), between any two votes: owners of the other
coordinates' blocks answer beside their own work, with the weights as of the boundary at which the asker stands. One
more number asks for checksums of the step's buffers: nothing says how those are cut, so all are to be alike. In stage 3
the one who answers for units answers for these too (gathered_units.py), by numbers that no unit has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from shoal.blocks.segments import HeldWeights
from shoal.blocks.shared_weights import Key
from shoal.blocks.values import RangeValues, WholeValues
from shoal.cells.marks import local_of
from shoal.checkpoint.manifest import CHECKSUM_BYTES, checksum
from shoal.checkpoint.named import check_alike
from shoal.core.cell_part import CellPart
from shoal.core.layout import Bucket
from shoal.exchange.traffic import GATHERED_UNIT, UnitTraffic
from shoal.exchange.unit_fetch import WHERE, PutOwn, UnitFetch, UnitServer, answers_of, ask, server_in
from shoal.exchange.world import World
from shoal.group.group import Group
from shoal.process.device import DeviceCopy
from shoal.process.host_memory import tensor_bytes
from shoal.training.context import TrainingContext
from shoal.training.whole_averages import AskedBucket

BUFFERS_ASKED = WHERE - 1
"""In the place of a unit: checksums of the step's buffers. Below it are the numbers of buckets."""


def first_of(traffic: UnitTraffic) -> int:
    """What the first bucket is asked for as."""
    return BUFFERS_ASKED - traffic.units


class PartFetch(UnitFetch):
    """The same of buckets of another coordinate."""

    def __init__(
        self,
        group: Group,
        traffic: UnitTraffic,
        key: Key,
        flats: RangeValues,
        put_own: PutOwn,
        is_in_lane: Callable[[], bool],
    ) -> None:
        super().__init__(group, traffic, key, flats, put_own, is_in_lane)
        self.first = first_of(traffic)


def are_joined(part: CellPart) -> bool:
    """Whether there are parts that one member can join: those of a pipeline's stages are no parts of one model."""
    return part.parts > 1 == part.stages


class CellParts:
    """Of one worker."""

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._weights = context, HeldWeights(context.state.held.segments)
        self._traffic: UnitTraffic
        """Of the buckets that this coordinate has."""
        self._world: World
        self._key: Key
        self._of_weights: Callable[[int, int], list[Tensor]]

    def on_world(self, world: World) -> None:
        """A world has begun."""
        self._traffic = self._traffic_at(world, self._context.state.layout.part.coordinate)
        self.stand(world)

    def _traffic_at(self, world: World, coordinate: int) -> UnitTraffic:
        layout = self._context.state.layout.at(coordinate)
        units = [(one.index,) for one in layout.buckets]
        return UnitTraffic(world.plan, world.rank, layout, units, of_another=True)

    def stand(self, world: World) -> None:
        """At the boundary at hand."""
        self._world, self._key = world, (world.plan.generation, self._context.boundaries)
        lock = self._context.state.held.segments.lock
        self._of_weights = answers_of(self._traffic, self._key[1], self._weights, lock)

    def answer(self, peer: int, number: int) -> list[Tensor]:  # each (elements,)
        """What a rank gets that asks for a bucket, or for `BUFFERS_ASKED`."""
        bucket = number - first_of(self._traffic)
        return [self._of_buffers()] if number == BUFFERS_ASKED else self._of_weights(peer, bucket)

    # ---- what one asks for

    def joined(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:  # each of any shape
        """These, which lie in the module and are there one after the other, each whole, as of the boundary at hand.
        Raises `WorldChanged`, and `UserError` for buffers that differ between coordinates.
        """
        self._check_buffers()
        state = self._context.state
        places = [(bucket, slot) for bucket in state.layout.buckets for slot in bucket.slots]
        place_of = {id(parameter): place for parameter, place in zip(state.parameters, places, strict=True)}
        part, brought = state.layout.part, dict[int, dict[int, Tensor]]()
        mine = part.coordinate % part.parts
        for tensor in tensors:
            bucket, slot = place_of.get(id(tensor), (None, None))
            if bucket is None or slot is None or not bucket.division.by_tensor:
                yield local_of(tensor)
                continue
            if bucket.index not in brought:
                others = (other for other in range(part.parts) if other != mine)
                brought[bucket.index] = {other: self._bring(other, bucket) for other in others}
            first, stop, shape = slot.start, slot.start + slot.parameter.elements, slot.parameter.shape
            parts = {other: flat[first:stop].view(shape) for other, flat in brought[bucket.index].items()}
            parts[mine] = local_of(tensor).detach()
            yield slot.parameter.joined([parts[other] for other in range(part.parts)])

    def _bring(self, coordinate: int, bucket: Bucket) -> Tensor:  # (elements,) of the bucket's dtype
        """A bucket as another coordinate has it, from its owners."""
        world, layout = self._world, self._context.state.layout.at(coordinate)
        flats = [torch.empty(one.elements if one is bucket else 0, dtype=one.dtype) for one in layout.buckets]
        values, traffic = WholeValues(layout, flats), self._traffic_at(world, coordinate)
        fetch = PartFetch(world.group, traffic, self._key, values, _nothing_here, is_in_lane=bool)
        asked = AskedBucket(bucket.index)
        fetch.begin(asked)
        fetch.finish(asked)
        return flats[bucket.index]

    def _of_buffers(self) -> Tensor:  # (CHECKSUM_BYTES × buffers,) uint8, or of one byte where there are none
        """By name."""
        buffers = self._context.state.buffers.committed
        found = b"".join(checksum(tensor_bytes(buffers[name])) for name in sorted(buffers))
        return torch.frombuffer(bytearray(found or b"\0"), dtype=torch.uint8)

    def _check_buffers(self) -> None:
        """Raises `UserError` where another part of the model has others."""
        world, parts, mine = self._world, self._context.state.layout.part.parts, self._of_buffers()
        first = dict[int, int]()
        for rank, member in enumerate(world.plan.members):
            first.setdefault(member.coordinate % parts, rank)
        for rank in (rank for rank in first.values() if rank != world.rank):
            theirs = torch.empty_like(mine)
            received = world.group.receive(theirs, rank, GATHERED_UNIT)
            sent, _ = ask(world.group, rank, self._key, BUFFERS_ASKED)
            world.group.wait([received, sent])
            for at, name in enumerate(sorted(self._context.state.buffers.committed)):
                place = slice(at * CHECKSUM_BYTES, (at + 1) * CHECKSUM_BYTES)
                check_alike(name, torch.equal(mine[place], theirs[place]), "the model")


class ServedParts(CellParts):
    """Where nothing else is asked for: parameters are whole on every worker."""

    _server: UnitServer | None = None

    def stand(self, world: World) -> None:
        """Raises `WorldChanged`."""
        super().stand(world)
        self._server = server_in(world.group, self._server)
        self._server.open(self._key, self.answer)


def _nothing_here(_: int) -> list[DeviceCopy]:
    """Of another coordinate's bucket."""
    return []
