"""The cell of this process: over which group its collectives go, or why they are answered from here.

A process has one `CellHub` for its life, and so have the process groups that its script holds (process_group.py); the
cell behind it is another one in every generation. The training engine drives it: `begin` and `rest` at a change,
`begin_lane` before a lane's first micro-batch, `raising` around its own backward. Until the first of these the script
builds its model and has no partner: a worker that joins builds in the middle of a run.

[Note: void lanes] A collective that fails raises nothing into a script: no frame there could do anything sensible with
it, and other members may be a collective behind. It is answered from here, and so are all later ones until the next
lane begins: the lane is void, and the engine has it trained again. Answers are values like any others, and never
memory as it was, so that a script comes to its lane's end.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.cells.call import CONTENT, OF_LOOPS, ROOM_BYTES, CollectiveCall, Frame, Kind, LoopPlace, compared
from shoal.cells.collectives import Collective, Round, all_gather, all_reduce, broadcast, meeting
from shoal.group.group import RESERVED_TAGS, Group, Work, WorldChanged

CALLS_TAG = 1 << 16
"""Tags from here to `RESERVED_TAGS` are a cell's. This one is of calls, which are compared in the order of the script
in all groups together; the others are dealt to process groups by their names, which all members know."""
BUILDING = (
    "a collective ({}) has no partner while a model is built, because a worker that joins builds it in the middle of a "
    "run. parallelize_module and distribute_tensor send rank 0's values while the model is built; all workers make the "
    "same ones from the seed: give them src_data_rank=None. Other collectives belong behind shoal.initialize."
)
IN_A_CALLBACK = (
    "a collective ({}) is made in a function that engine.on_step, on_evaluation or on_commit calls: after a change of "
    "the world the members of a cell call it at different places of their loops, and on_step's one member alone. Make "
    "it in the body of the loop or in an evaluation, and keep what comes of it for the function."
)

NOTHING_EXCHANGED = (Kind.BARRIER, Kind.MEETING)
UNDIVIDED = (
    "no collective or message over the context dimension was made in a lane of the first step: where each process "
    'trains all tokens of a batch, a cell does the same work several times; take x.chunk(cell.size("context"), '
    'dim=1)[cell.index("context")] of each sequence, and exchange what attention needs'
)
log = get_logger("shoal")


class _World:
    """The cell in one generation."""

    def __init__(self, group: Group, ranks: tuple[int, ...]) -> None:
        """`ranks`: of the group, by coordinate."""
        self.group, self.ranks = group, ranks
        self.calls: Counter[str] = Counter()
        """Collectives that each process group has begun in it."""
        self.has_stepped = False
        """Whether a step was committed in it."""
        self.difference = ""
        """Where members have made different collectives, which ones: what was posted of these is still under way."""


class CellHub:
    """Of this process."""

    def __init__(self, shape: Shape, coordinate: int) -> None:
        self.shape, self.coordinate = shape, coordinate
        self.check_collectives = False
        """Whether all calls are compared, and not those of a world's first step and the first of each place alone."""
        self.is_void = False
        """Whether a collective of the present lane has failed, or its lane is made void: all are answered from here."""
        self.where, self._is_first = LoopPlace.LANE, True
        """Where the script is, and whether it has made no collective of the whole cell there."""
        self.words = OF_LOOPS
        """What the script calls there, the same on all members."""
        self.exchanges_tokens = shape.context == 1
        """Whether a lane has made a call over the contexts, as attention to others' tokens needs one."""
        self.wait_seconds = 0.0
        """For which this process has waited in collectives."""
        self._is_building, self._raises, self._callbacks = True, 0, 0
        self._world: _World | None = None
        self._alike = GroupPlace(self, shape.alike(coordinate), "the whole cell")
        """Those that have the same tokens: what is added up among them here is a gradient of one context."""
        self._all = GroupPlace(self, shape.coordinates, "all of a cell")
        self._at = lru_cache(maxsize=None)(self._stages_at)
        self._line = self._at(tuple(range(shape.pipeline)))

    def index(self, dimension: str) -> int:
        """This process's place in a dimension."""
        return self.shape.index(self.coordinate)[dimension]

    # ---- driven by the engine

    def begin(self, group: Group, ranks: tuple[int, ...]) -> None:
        """Collectives go over this group from now on. `ranks`: of the members of this process's cell, by coordinate."""
        self._is_building = False
        self._world = _World(group, ranks)

    def rest(self) -> None:
        """This process is in no cell: collectives are answered from here."""
        self._is_building = False
        self._world = None

    def on_commit(self) -> None:
        """A step is committed: at the same place in the loop of all members of the cell."""
        if self._world is None:
            return
        self._world.has_stepped = True
        if not self.exchanges_tokens and self.coordinate == 0:
            log.warning("the_sequence_is_not_divided", contexts=self.shape.context, means=UNDIVIDED)
        self.exchanges_tokens = True  # said once

    def begin_lane(self) -> None:
        """The next lane's first micro-batch begins."""
        self.is_void = False

    def come_to(self, place: LoopPlace) -> None:
        """The script is at another place of its loop, as those of all members are when they make its collectives."""
        self.where, self._is_first = place, True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation, after which the script is where it was."""
        before = self.where, self._is_first
        self.come_to(LoopPlace.EVALUATION)
        try:
            yield
        finally:
            self.where, self._is_first = before

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Around a function of the script's that members call at different places: it may make no collective."""
        self._callbacks += 1
        try:
            yield
        finally:
            self._callbacks -= 1

    def make_void(self) -> None:
        """The present lane counts no more. From any thread."""
        self.is_void = True

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within it a collective that fails, or is called in a void lane, raises `WorldChanged`, on whichever thread:
        for frames that are the engine's own.
        """
        self._raises += 1
        try:
            yield
        finally:
            self._raises -= 1

    def reduce_sum(self, tensors: Sequence[Tensor], places: tuple[int, ...] = ()) -> None:
        """Adds tensors of one dtype up over those members of the cell that have the same tokens and stage, each in its
        place, in the order of coordinates. `places`: or over those of the pipeline. Raises `WorldChanged`.
        """
        if not tensors:
            return
        among = self._at(places) if places else self._alike
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with self.raising():
            among.begin(all_reduce(among.me, among.size, flat)).finish()
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def gather(
        self,
        tensor: Tensor,  # of any shape
    ) -> Tensor:  # (processes of a cell with the same tokens, …)
        """What those members of the cell have of it that have the same tokens, by coordinate. Raises `WorldChanged`."""
        found = torch.stack([tensor] * self._alike.size)
        with self.raising():
            self._alike.begin(all_gather(self._alike.me, self._alike.size, found.unbind(), tensor)).finish()
        return found

    def _stages_at(self, places: tuple[int, ...]) -> GroupPlace:
        """Those of this process's pipeline, its own among them."""
        line = self.shape.places(self.coordinate, "pipeline")
        return GroupPlace(self, [line[place] for place in places], f"stages {places} of a pipeline")

    def meet(self, place: LoopPlace) -> None:
        """The script has come to another place of its loop: returns when all members of the cell have come to it.
        Raises `UserError` where some are at another one, and `WorldChanged`.
        """
        self.come_to(place)
        with self.raising():
            self._all.begin(meeting()).finish()

    def spread_from_last_stage(
        self,
        tensor: Tensor,  # of any shape, the same on all
    ) -> None:
        """Gives all stages what the last one has of it, in place. Raises `WorldChanged`."""
        line = self._line
        with self.raising():
            line.begin(broadcast(line.me, line.size, tensor, line.size - 1)).finish()

    # ---- asked by process groups

    @property
    def world(self) -> _World | None:
        """The cell of the present lane; None where collectives are answered from here."""
        return None if self.is_void else self._world

    def check_place(self, call: CollectiveCall) -> None:
        """Raises `UserError` where a collective has no partner that makes it too."""
        if self._callbacks:
            raise UserError(IN_A_CALLBACK.format(call.kind.words))
        if self._is_building and call.kind is not Kind.BARRIER:
            raise UserError(BUILDING.format(call.kind.words))

    def on_answer(self) -> None:
        """A collective is about to be answered from here. Raises `WorldChanged` in the engine's own frames."""
        if self.is_void and self._raises:
            raise WorldChanged("a collective was called in a lane that is void")

    def is_present(self, world: _World) -> bool:
        """Whether this is still the cell of this process."""
        return world is self._world

    def on_failure(self, failure: WorldChanged, world: _World) -> None:
        """A collective has failed: the lane is void. Raises `failure` in the engine's own frames."""
        self.is_void = self.is_void or self.is_present(world)
        if self._raises:
            raise failure

    def compares(self, world: _World, is_whole: bool) -> bool:
        """Whether members tell each other which collective they make. `is_whole`: it is one of all
        members of the cell, of which each has the same first one at a place: a meeting, where they meet.
        """
        is_first = self._is_first and is_whole
        self._is_first = self._is_first and not is_whole
        return is_first or self.check_collectives or not world.has_stepped


class GroupPlace:
    """This process's place in a process group of its cell: what posts collectives and finishes them."""

    def __init__(self, hub: CellHub, coordinates: Sequence[int], name: str) -> None:
        """`coordinates`: of the group's members, by their rank in it."""
        self.hub, self.coordinates, self.name = hub, tuple(coordinates), name
        self.me, self.size = self.coordinates.index(hub.coordinate), len(self.coordinates)
        self.is_whole = self.coordinates == tuple(hub.shape.coordinates)
        self.spans_contexts = len({hub.shape.index(one)["context"] for one in self.coordinates}) > 1
        self.under_way: deque[Doing] = deque()
        """Collectives that are posted and not finished, in the order of the script."""
        self.number = _number(name)
        """Its name, as short as it is told to others."""
        self.tag_of = lru_cache(maxsize=1 << 12)(lambda *purpose: _tag(name, purpose))
        """That of a message, by what it is for and how long it is: members that make different collectives wait for
        each other then, and take no bytes for what they are not (gloo ends a process whose receive is too short).
        """

    def begin(self, collective: Collective) -> Doing:
        """Posts what can be posted. Raises `UserError`, and `WorldChanged` in the engine's own frames."""
        hub = self.hub
        doing = Doing(self, collective)
        if self.size > 1:
            hub.check_place(collective.call)
            if self.spans_contexts and hub.where.is_in_lane and collective.call.kind not in NOTHING_EXCHANGED:
                hub.exchanges_tokens = True
            if (world := hub.world) is not None:
                if world.difference:  # what is under way may have the tag of what comes
                    raise UserError(world.difference)
                doing.post(world)
                return doing
            hub.on_answer()
        doing.answer()
        return doing

    def rank_of(self, world: _World, peer: int) -> int:
        """The rank that a peer has in a world."""
        return world.ranks[self.coordinates[peer]]


class Doing:
    """A collective of this process under way.

    Receives and sends of its first round are posted when it begins, so that no member waits for one whose script does
    something else in between; the second round's when it is finished. Where calls are compared, that is done while the
    first round is under way: messages of different collectives have different tags. Collectives of one group are
    finished in the order in which they began, so that messages of one tag are posted in one order everywhere.

    Before each message between two members goes a frame of one size that says how long the message is; a short one
    goes within it. A longer one is under way beside it, at a tag of its length: no other lands in its place.
    """

    __slots__ = (
        "_calling", "_calls", "_frame", "_is_done", "_number", "_place", "_round", "_where", "_works", "_world",
        "collective",
    )  # fmt: skip

    def __init__(self, place: GroupPlace, collective: Collective) -> None:
        self._place, self.collective = place, collective
        self._world: _World | None = None
        self._works: list[Work] = []
        self._calls: list[tuple[int, Tensor]] = []
        """By peer, what it says that it calls, where that is compared and not yet known."""
        self._calling: list[Work] = []
        """The messages that say it. The first round is under way beside them, and nothing of it taken before."""
        self._frame: tuple[int, Frame, Tensor] | None = None
        """Of a message that is awaited: its source, its frame, and where it is to be."""
        self._number = self._round = 0
        """Its own in its group and world, and that of the round that is posted next."""
        self._where = place.hub.where
        """Where in the loop it was made."""
        self._is_done = False

    def post(self, world: _World) -> None:
        """Posts its first messages."""
        place, self._world = self._place, world
        try:
            if not self.collective.call.is_message:
                world.calls[place.name] += 1
                self._number = world.calls[place.name]
                if place.is_whole:
                    world.group.progress.step_on()
                place.under_way.append(self)
                if place.hub.compares(world, place.is_whole):
                    self._tell_call(world)
                self._advance(world)
            else:
                self._post_message(world)
        except WorldChanged as failure:
            self._fail(failure)

    def finish(self) -> None:
        """Waits until it is done, here or by an answer. Raises `UserError` where members make different collectives,
        `WorldChanged` in the engine's own frames.
        """
        while not self._is_done:
            earlier = self if self.collective.call.is_message else self._place.under_way[0]
            earlier._finish()

    @property
    def is_done(self) -> bool:
        """Whether its results are there."""
        return self._is_done

    def _finish(self) -> None:
        hub, world = self._place.hub, self._world
        if world is None or not hub.is_present(world):  # of a lane that is over: it counts no more
            self.answer()
        elif hub.is_void:
            self._fail(WorldChanged("a collective of a lane that is void"))
        else:
            try:
                if world.difference:
                    raise UserError(world.difference)
                if self._calls:
                    self._compare_calls(world)
                if self._frame is not None:
                    self._take_frame(world)
                while not self._is_done:
                    self._wait(world.group, self._works)
                    self._advance(world)
            except WorldChanged as failure:
                self._fail(failure)
            except BaseException:  # it was given up, and stands before no other
                self._end()
                raise

    def _wait(self, group: Group, works: Sequence[Work]) -> None:
        """Until the messages of a round are there. Raises `WorldChanged`."""
        began = time.monotonic()
        try:
            group.wait(works)
        finally:
            self._place.hub.wait_seconds += time.monotonic() - began

    def answer(self) -> None:
        """As if all others had what this process has, and zeros where it has nothing."""
        self._end()
        with torch.no_grad():
            for target, source in self.collective.here:
                if source is None:
                    target.zero_()
                else:
                    target.copy_(source.reshape(target.shape))

    # ---- parts of it

    def _advance(self, world: _World) -> None:
        """Posts the next round, or ends."""
        following = next(self.collective.rounds, None)
        if following is not None:
            self._post_round(world, following)
        elif not self._calls:
            self._end()

    def _post_round(self, world: _World, messages: Round) -> None:
        """All messages of a round: receives first, so that what comes finds its place."""
        place, group, call = self._place, world.group, self.collective.call
        purpose = self._round, call.kind, call.op
        self._round += 1
        rank_of, tag_of, (sends, receives) = place.rank_of, place.tag_of, messages
        self._works = [
            group.receive(one, rank_of(world, peer), tag_of(*purpose, one.nbytes))
            for peer, one in receives
            if one.numel()
        ]
        self._works += [
            group.send(one, rank_of(world, peer), tag_of(*purpose, one.nbytes)) for peer, one in sends if one.numel()
        ]

    def _post_message(self, world: _World) -> None:
        """The one of a call between two members, and its frame."""
        place, group, tag = self._place, world.group, self.collective.call.tag
        sends, receives = next(self.collective.rounds)
        ((peer, message),) = sends or receives
        rank, is_apart = place.rank_of(world, peer), message.nbytes > ROOM_BYTES
        post = group.send if sends else group.receive
        frame = Frame()
        if sends:
            frame.put(message)
        posted = post(frame.tensor, rank, place.tag_of("frame", tag))
        if sends:
            self._works = [posted]
        else:
            self._calling, self._frame = [posted], (peer, frame, message)
        if is_apart:
            self._works.append(post(message, rank, place.tag_of("message", tag, message.nbytes)))

    def _take_frame(self, world: _World) -> None:
        """Raises `UserError` where what comes has another length."""
        assert self._frame is not None
        self._wait(world.group, self._calling)
        (peer, frame, message), self._frame = self._frame, None
        place = self._place
        world.difference = frame.take(message, place.coordinates[peer], place.hub.coordinate)
        if world.difference:
            raise UserError(world.difference)

    def _tell_call(self, world: _World) -> None:
        place, group = self._place, world.group
        peers = [peer for peer in range(place.size) if peer != place.me]
        self._calls = [(peer, torch.empty(CONTENT.size, dtype=torch.uint8)) for peer in peers]
        for peer, content in self._calls:
            self._calling.append(group.receive(content, place.rank_of(world, peer), CALLS_TAG))
        for peer in peers:
            self._calling.append(group.send(self._call(peer), place.rank_of(world, peer), CALLS_TAG))

    def _call(self, peer: int) -> Tensor:  # (32,) uint8
        return self.collective.call.to_tensor(self._number, self._where, self._place.number, peer)

    def _compare_calls(self, world: _World) -> None:
        """Raises `UserError`, on all members that differ from one another."""
        self._wait(world.group, self._calling)
        place, (calls, self._calls) = self._place, (self._calls, [])
        for peer, content in calls:
            hub, there = place.hub, place.coordinates[peer]
            world.difference = compared(self._call(peer), content, hub.coordinate, there, hub.words)
            if world.difference:
                raise UserError(world.difference)

    def _fail(self, failure: WorldChanged) -> None:
        """The lane is void, and this is answered from here. Raises it in the engine's own frames."""
        assert self._world is not None
        self.answer()
        self._place.hub.on_failure(failure, self._world)

    def _end(self) -> None:
        self._is_done = True
        if self in self._place.under_way:
            self._place.under_way.remove(self)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _tag(name: str, purpose: object) -> int:
    """One of a cell's. That two are equal is as likely as to guess one, and harms nothing while members post in one
    order.
    """
    return CALLS_TAG + 1 + _number(f"{name}/{purpose}") % (RESERVED_TAGS - CALLS_TAG - 1)


_hub: CellHub | None = None


def current_hub() -> CellHub | None:
    """The process's; None where its cell is one process."""
    return _hub


def set_hub(hub: CellHub | None) -> None:
    """Makes it the process's."""
    global _hub
    _hub = hub
