"""Parts of the model that other coordinates of a cell have, where one member needs the whole: for an export.

Each bucket is asked for as a unit of stage 3 is (exchange/unit_fetch.py), between any two votes: owners of the other
coordinates' blocks answer beside their own work, with the weights as of the boundary at which the asker stands, or with
their averages. One more number asks for checksums of the step's buffers: nothing says how those are cut, so all of a
stage are to be alike but for those of experts; another one for the buffers of another stage, or of other experts. The
one who answers for units (gathered_units.py), or for averages (`WholeOwner`), answers for these too, by numbers that
none of them has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.blocks.flat import by_bucket, views
from shoal.blocks.shared_weights import Key
from shoal.blocks.values import RangeValues, WholeValues
from shoal.cells.marks import local_of
from shoal.checkpoint.manifest import CHECKSUM_BYTES, checksum
from shoal.checkpoint.model_export import Reading, write
from shoal.checkpoint.named import Known, check_alike, tied_names
from shoal.core.cell_part import CellPart, Division
from shoal.core.layout import Bucket, ListsOfExperts
from shoal.core.units import named_parameters
from shoal.exchange.module_buffers import persistent_buffers
from shoal.exchange.traffic import GATHERED_UNIT, UnitTraffic
from shoal.exchange.unit_fetch import WHERE, UnitFetch, UnitServer, answers_of, ask, server_in
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.process.device import DeviceCopy
from shoal.process.host_memory import ReusedMemory, tensor_bytes
from shoal.state.half_floats import half_dtype
from shoal.training.context import TrainingContext
from shoal.training.whole_averages import AskedBucket, WholeAverages

SUMS_ASKED, BUFFERS_ASKED = WHERE - 1, WHERE - 2
"""In the place of a unit: checksums of the step's buffers, and these. Below them are the numbers of buckets."""


def first_of(traffic: UnitTraffic, averaged: bool) -> int:
    """What the first bucket is asked for as. `averaged`: its averages of weights."""
    return BUFFERS_ASKED - (2 if averaged else 1) * traffic.units


def are_joined(part: CellPart) -> bool:
    """Whether processes of a cell have parts of the model, which one member can join."""
    return max(part.parts, part.stages, part.experts) > 1


class CellParts:
    """Of one worker."""

    def __init__(self, context: TrainingContext) -> None:
        state, self._context = context.state, context
        self._values: tuple[RangeValues, ...] = (state.weights, state.held.home.averages)
        self._traffic: UnitTraffic
        """Of the buckets that this coordinate has."""
        self._world: World
        self._key: Key
        self._answers: list[Callable[[int, int], list[Tensor]]]
        """Of weights, and of averages of them."""

    def on_world(self, world: World) -> None:
        """A world has begun."""
        self._traffic = self._traffic_at(world, self._context.state.layout.part.coordinate)

    def _traffic_at(self, world: World, coordinate: int) -> UnitTraffic:
        layout = self._context.state.layout.at(coordinate)
        units = [(one.index,) for one in layout.buckets]
        return UnitTraffic(world.plan, world.rank, layout, units, of_another=True)

    def stand(self, world: World) -> None:
        """At the boundary at hand."""
        self._world, self._key = world, (world.plan.generation, self._context.boundaries)
        lock = self._context.state.held.segments.lock
        self._answers = [answers_of(self._traffic, self._key[1], values, lock) for values in self._values]

    def answer(self, peer: int, number: int) -> list[Tensor]:  # each (elements,)
        """What a rank gets that asks for a bucket, its averages, `SUMS_ASKED` or `BUFFERS_ASKED`."""
        buffers = self._context.state.buffers.committed
        if number == SUMS_ASKED:
            return [_sums(dict(sorted(buffers.items())))]
        if number == BUFFERS_ASKED:
            return [_packed(buffers)]
        averaged = number < first_of(self._traffic, averaged=False)
        return self._answers[averaged](peer, number - first_of(self._traffic, averaged))

    # ---- what one asks for

    def export(self, path: Path, reading: Reading, averaged: bool) -> None:
        """Writes the model in one process, as of the boundary at hand: the file that `shoal export` makes of it.
        `reading`: of what this member's module has, which is averages of weights if `averaged`. Raises `WorldChanged`,
        and `UserError` for buffers that differ between coordinates.
        """
        state = self._context.state
        frozen = {name: one for name, one in named_parameters(state.module) if not one.requires_grad}
        buffers = self._buffers()
        known = {name: Known(shape, dtype) for name, shape, dtype in state.layout.wholes()}
        known |= {name: Known(tuple(one.shape), one.dtype) for name, one in (*frozen.items(), *buffers.items())}
        tensors = chain(self._parameters(reading, averaged), reading(list(frozen.values())), buffers.values())
        write(path, known, tied_names(state.modules), tensors)

    def _parameters(self, reading: Reading, averaged: bool) -> Iterator[Tensor]:  # each of its own shape
        """In the order of the layout's wholes."""
        state, part = self._context.state, self._context.state.layout.part
        own, joined = by_bucket(state.layout, state.parameters), ReusedMemory()
        memory = defaultdict[int, ReusedMemory](ReusedMemory)
        for stage, bucket in state.layout.of_stages():
            found: list[Iterable[Tensor]] = []
            for piece, coordinate in enumerate(part.firsts(stage, bucket.division)):
                is_here = stage == part.place and piece == part.piece(bucket.division)
                found.append(
                    (local_of(one.detach()) for one in reading(own[bucket.index]))
                    if is_here
                    else views(bucket, self._bring(coordinate, bucket, averaged, memory[piece]))
                )
            for slot, *parts in zip(bucket.slots, *found, strict=True):
                yield from slot.parameter.joined(parts, part.experts, joined.take)

    def _bring(
        self, coordinate: int, bucket: Bucket, averaged: bool, memory: ReusedMemory
    ) -> Tensor:  # (elements,) of the bucket's dtype
        """A bucket as another coordinate has it, from its owners."""
        world, layout = self._world, self._context.state.layout.at(coordinate)
        flats = [
            memory.take((one.elements,), one.dtype) if one is bucket else torch.empty(0, dtype=one.dtype)
            for one in layout.buckets
        ]
        values, traffic = WholeValues(layout, flats), self._traffic_at(world, coordinate)
        fetch = UnitFetch(world.group, traffic, self._key, values, _nothing_here, is_in_lane=bool)
        fetch.first = first_of(traffic, averaged)
        asked = AskedBucket(bucket.index)
        fetch.begin(asked)
        fetch.finish(asked)
        return flats[bucket.index]

    def _buffers(self) -> dict[str, Tensor]:  # each of its own shape
        """Those of all stages and experts. Raises `UserError` where another part of a stage has others."""
        state, part, found = self._context.state, self._context.state.layout.part, dict[str, Tensor]()
        lists, order = ListsOfExperts(state.layout), dict[str, None]()
        for stage, module in enumerate(state.modules):
            names = list(persistent_buffers(module))
            firsts = part.firsts(stage, Division(by_expert=True, by_tensor=True)) if names else []
            here = [part.coordinate] if names and stage == part.place else []
            for coordinate in dict.fromkeys([*here, *firsts]):
                wholes = {name: lists.whole_name(name, coordinate) for name in sorted(names)}
                if all(whole in found for whole in wholes.values()):
                    self._check_alike(coordinate, {whole: found[whole] for whole in wholes.values()})
                    continue
                for name, value in self._buffers_at(coordinate, module).items():
                    first = found.setdefault(wholes[name], value)
                    check_alike(wholes[name], tensor_bytes(first) == tensor_bytes(value), "the model")
            order |= {lists.whole_name(name, one): None for one in firsts for name in names}
        return {whole: found[whole] for whole in order}

    def _buffers_at(self, coordinate: int, module: nn.Module) -> dict[str, Tensor]:  # each of its own shape
        """Those that a coordinate has. `module`: of its stage."""
        if coordinate == self._context.state.layout.part.coordinate:
            return self._context.state.buffers.committed
        buffers = {name: self._empty(one) for name, one in sorted(persistent_buffers(module).items())}
        spans = self._asked(coordinate, BUFFERS_ASKED, _packed(buffers)).split([one.nbytes for one in buffers.values()])
        for one, span in zip(buffers.values(), spans, strict=True):
            one.copy_(span.view(one.dtype).view(one.shape) if one.numel() else one)
        return buffers

    def _check_alike(self, coordinate: int, buffers: Mapping[str, Tensor]) -> None:
        """Raises `UserError` where a coordinate has others. `buffers`: in the order of their names there."""
        mine = _sums(buffers)
        theirs = self._asked(coordinate, SUMS_ASKED, mine)
        for at, name in enumerate(buffers):
            place = slice(at * CHECKSUM_BYTES, (at + 1) * CHECKSUM_BYTES)
            check_alike(name, torch.equal(mine[place], theirs[place]), "the model")

    def _empty(self, buffer: Tensor) -> Tensor:  # of its shape
        """For a buffer of any stage: those of others were not rounded."""
        half = half_dtype(self._context.config.precision) if buffer.is_floating_point() else None
        return torch.empty(buffer.shape, dtype=half or buffer.dtype)

    def _asked(self, coordinate: int, number: int, like: Tensor) -> Tensor:  # (bytes,) uint8
        """What the first member at a coordinate answers, which is as long as `like`."""
        world, answer = self._world, torch.empty_like(like)
        rank = [member.coordinate for member in world.plan.members].index(coordinate)
        received = world.group.receive(answer, rank, GATHERED_UNIT)
        sent, _ = ask(world.group, rank, self._key, number)
        world.group.wait([received, sent])
        return answer


def _sums(buffers: Mapping[str, Tensor]) -> Tensor:  # (CHECKSUM_BYTES × buffers,) uint8, or of one byte
    """In their order."""
    found = b"".join(checksum(tensor_bytes(one)) for one in buffers.values())
    return torch.frombuffer(bytearray(found or b"\0"), dtype=torch.uint8)


def _packed(buffers: Mapping[str, Tensor]) -> Tensor:  # (bytes of all,) uint8
    """By name."""
    return torch.cat([buffers[name].contiguous().view(-1).view(torch.uint8) for name in sorted(buffers)])


class WholeOwner:
    """What this worker answers to others where parameters are whole on every worker: averages of weights, by the
    numbers of buckets, and, by others, its part of the model. One of both there is.
    """

    def __init__(self, context: TrainingContext, averages: WholeAverages | None, parts: CellParts | None) -> None:
        self._context, self._averages, self._parts = context, averages, parts
        self._server: UnitServer | None = None

    def on_world(self, world: World) -> None:
        """In this one from now on. Raises `WorldChanged`."""
        for one in (self._averages, self._parts):
            if one is not None:
                one.on_world(world)
        self._server = server_in(world.group, self._server)
        self.stand(world)

    def stand(self, world: World) -> None:
        """At the boundary at hand. Raises `WorldChanged`."""
        for one in (self._averages, self._parts):
            if one is not None:
                one.stand(world)
        assert self._server is not None
        self._server.open((world.plan.generation, self._context.boundaries), self._answer)

    def _answer(self, peer: int, number: int) -> Sequence[Tensor]:  # each (elements,)
        asked = self._averages if number >= 0 else self._parts
        if asked is None:
            raise WorldChanged(f"rank {peer} asks for {number}, which there is not")
        return asked.answer(peer, number)


def _nothing_here(_: int) -> list[DeviceCopy]:
    """Of another coordinate's bucket."""
    return []
