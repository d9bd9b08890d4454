"""The process group of one generation: sends, receives, one small all-gather, and `abort()`.

The engine waits plainly and reads as if nothing could fail; `abort()`, called from the session's thread, makes every
operation of the group fail at once on the training thread. Knows nothing of plans. `gloo.py` is a group over gloo; for
tensors of a device there are `device_group.py` and `ordered.py`. `SoloGroup`, the group of a world of one, keeps the
same promises (an aborted one raises) without gloo, so that the engine need not know that it is alone.

`GroupProgress`, one per group from the beginning of its building, is how far a thread has come in a group, and for whom
it waits since when: what heartbeats tell (`Activity`). Written by the thread inside the group and by the one that waits
for it (wait_threads.py), read by the session's thread; without a lock, because each attribute is replaced whole.
Positions only grow, and at a position a member has posted all that its peers wait for at the same one: so waiting for a
peer that stands beyond, or that waits in turn for this member, is in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch
from shoal_protos.activity import LANES_BEGIN, MOST_NAMED, Activity, StepPhase
from torch import Tensor

RESERVED_TAGS = 1 << 20
"""Tags from here on belong to the group itself."""
GATHER_TAG = RESERVED_TAGS + 1
"""Tag of the rows of an all-gather."""


class WorldChanged(BaseException):
    """An operation of the group failed, or the session told the training thread to stop: take part in the change.

    No `Exception`: it passes through the forwards of users, who catch those (as `asyncio.CancelledError` became one).
    """


class Work(Protocol):
    """A posted send or receive. Its tensor must live until `wait` has returned or the group is closed."""

    def wait(self) -> None:
        """Blocks until done. Raises `WorldChanged` when the group is broken or aborted."""


class Waiting(Protocol):
    """Works that are waited for in the background, from `Group.begin_wait` on."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block: all are done, or the group is broken."""

    def wait(self) -> None:
        """Blocks until all of them are done. Raises `WorldChanged` as their own `wait` does."""


class Gather(Enum):
    """How a unit comes from its owners."""

    ASKED = auto()
    """They are asked for it, and answer by the way of all bulk."""
    UNASKED = auto()
    """They send it of themselves, as in the step before."""
    LATE = auto()
    """They are asked, and answer by a way that has no order."""


Answers = Callable[[int, int], Sequence[Tensor]]
"""By peer and unit, the messages that answer a request, each (elements,)."""


class MessageOrder(Protocol):
    """What a group must know of steps where its bulk goes by a wire on which all messages have one order."""

    def begin_step(self, kind: object, may_repeat: bool) -> None:
        """A vote has passed, and what is posted from now on is of another step. One of the same kind as the step before
        has the same messages, and repeats their order where all members have voted that they may. `kind`: the same on
        all members; None: like no other.
        """

    def end_step(self) -> bool:
        """Before the ballot, when all that this member has posted is over: whether a step like this one may repeat its
        order. Blocks until the wire has carried all; raises `WorldChanged`.
        """

    def begin_gather(self, unit: int, in_lane: bool, /) -> Gather:
        """The training thread is about to receive a unit. `in_lane`: for what all steps do, and not for an evaluation
        or what else a script does between them.
        """

    def let_go(self, unit: int, works: Sequence[Work], /) -> bool:
        """A unit that comes unasked is needed. Whether that is so earlier than in the step before: then nothing of it
        is on its way any more, and it is to be asked for. Raises `WorldChanged`.
        """

    def on_asked(self, peer: int, unit: int, /) -> Gather:
        """A member asks for a unit here: how it is answered."""

    def answer_with(self, answers: Answers) -> None:
        """This member stands at its boundary: units that go to others unasked are made by `answers`."""


class AnyOrder:
    """The `MessageOrder` of a group that finds messages by their tags."""

    def begin_step(self, kind: object, may_repeat: bool) -> None:
        """Steps are alike."""

    def end_step(self) -> bool:
        return False

    def begin_gather(self, *_: int) -> Gather:
        return Gather.ASKED

    def let_go(self, *_: object) -> bool:
        return False

    def on_asked(self, *_: int) -> Gather:
        return Gather.ASKED

    def answer_with(self, answers: Answers) -> None:
        """Nothing leaves unasked."""


class Group(Protocol):
    """One member's end of the group. Tags are small non-negative numbers; messages of one tag keep their order."""

    rank: int
    size: int
    progress: GroupProgress
    """Where the thread that is inside it stands; who steps on says so."""
    order: MessageOrder

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Posts a send of a contiguous CPU tensor."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Posts a receive into a contiguous CPU tensor."""

    def wait(self, works: Sequence[Work]) -> None:
        """Blocks until all of them are done, in any order. Raises `WorldChanged` as their own `wait` does."""

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        """Waits for them beside what the training thread does, which may look whether they are done. Raises
        `WorldChanged` for works of a closed group.
        """

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """Calls `on_request(peer, message)`, a message being `(elements,)` int64, for each that comes with this tag:
        beside the training thread, until the group is closed, and never twice at once for one peer.
        """

    def all_gather(self, row: Tensor) -> Tensor:
        """Every member's row, by rank: `(n,)` uint8 → `(size, n)` uint8. Blocks; raises `WorldChanged`."""

    def abort(self) -> None:
        """Abort from any thread: every operation blocked in this group raises at once, here and at the peers.
        Idempotent.
        """

    def close(self) -> None:
        """Frees sockets and threads (aborts first where operations may be in flight); buffers are free afterwards."""

    @property
    def broken_peers(self) -> tuple[int, ...]:
        """Ranks whose connection was seen to break by this process (not by its own abort)."""


class _Over:
    """Nothing to wait for."""

    is_over = True

    def wait(self) -> None:
        """Returns at once."""


class SoloGroup:
    """A `Group` of size one."""

    rank = 0
    size = 1
    order: MessageOrder = AnyOrder()
    broken_peers: tuple[int, ...] = ()

    def __init__(self, progress: GroupProgress | None = None) -> None:
        self.progress = progress or GroupProgress()
        self._over = ""

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        raise AssertionError(f"{tensor.nbytes} bytes with tag {tag} are sent to rank {to} in a world of one")

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        raise AssertionError(f"{tensor.nbytes} bytes with tag {tag} are awaited from rank {source} in a world of one")

    def wait(self, works: Sequence[Work]) -> None:
        assert not works, "there is nobody to wait for in a world of one"

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        self.wait(works)
        return _Over()

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """Nobody asks."""

    def all_gather(self, row: Tensor) -> Tensor:
        if self._over:
            raise WorldChanged(f"the group was {self._over}")
        return row.reshape(1, -1).clone()

    def abort(self) -> None:
        self._over = self._over or "aborted"

    def close(self) -> None:
        self._over = self._over or "closed"


def message_bytes(
    tensor: Tensor,  # contiguous, of any shape and dtype
) -> Tensor:  # (bytes,) uint8
    return tensor.data.reshape(-1).view(torch.uint8)  # as from the wire: no version counter sees what comes


BEFORE_THE_FIRST = 0
"""The boundary of a group whose world has not begun."""
USER_STEPS = 1 << 20
"""Between two places where a member waits for others beside user code (`bucket` counts them), that may take so many
steps.
"""
AFTER_THE_LOOP = LANES_BEGIN >> 1
"""Such places of a boundary, in order: where evaluations are over in the loop's body, then after the loop, then (from
`LANES_BEGIN` on) the rounds of lanes.
"""


class _AtWire(NamedTuple):
    """Where the thread that carries stands in a step whose order is known."""

    boundary: int
    batch: int
    peers: tuple[int, ...]
    """That it waits for; empty: for what is to be posted here."""
    since: float
    is_over: bool = False

    @property
    def position(self) -> tuple[int, StepPhase, int]:
        return self.boundary, StepPhase.LANES, self.batch


class GroupProgress:
    """What this process waits for in one group, and since when.

    Where messages go in an order that is known before they are posted, one is held up by all that stand before it: then
    a peer that has long posted its end is not waited for in vain. So for as long as the wire carries such a step, the
    position is that of the wire, and those are waited for who have a part in the batch that it stands at.
    """

    __slots__ = ("_moved", "_pieces", "_slowest", "_state", "_wire", "generation", "waiting")

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        now = time.monotonic()
        self._state: tuple[int, StepPhase, int, tuple[int, ...], float] = (
            BEFORE_THE_FIRST, StepPhase.BUILDING, 0, (), now,
        )  # fmt: skip
        self._moved, self._slowest, self._pieces = now, 0.0, 0
        self._wire: _AtWire | None = None
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context around each wait of the thread inside the group that blocks: a clock of what that thread does takes
        the wait off."""

    # ---- on the thread that is inside the group

    def reach(self, phase: StepPhase, bucket: int = 0) -> None:
        """It stands at this position now, and waits for nobody."""
        self._state = (self._state[0], phase, bucket, (), time.monotonic())

    def begin_boundary(self, boundaries: int) -> None:
        """So many votes have passed in this world; the user's code is next."""
        self._state = (boundaries + 1, StepPhase.LANES, 0, (), time.monotonic())

    def step_on(self) -> None:
        """The user's code has come further: a micro-batch is done."""
        boundary, phase, bucket, _, _ = self._state
        self._state = (boundary, phase, bucket + 1, (), time.monotonic())

    def wait_for(self, *peers: int) -> None:
        """It waits for these ranks from now on."""
        boundary, phase, bucket, _, _ = self._state
        self._pieces = 0
        self._state = (boundary, phase, bucket, peers, time.monotonic())

    def keep_waiting_for(self, peers: Sequence[int]) -> None:
        """The others have come: it goes on waiting for these."""
        boundary, phase, bucket, _, since = self._state
        self._state = (boundary, phase, bucket, tuple(peers), since)

    def go_on(self) -> None:
        """The wait is over."""
        boundary, phase, bucket, _, _ = self._state
        self._state = (boundary, phase, bucket, (), time.monotonic())

    # ---- on the thread that waits for it

    def on_piece(self) -> None:
        """A message, or a piece of one, is complete: the wait begins anew. The first piece may have waited for a peer
        that was busy, so only the later ones tell how slow the connection is.
        """
        now = time.monotonic()
        if self._pieces:
            self._slowest = max(self._slowest, now - self._moved)
        self._pieces += 1
        self._moved = now

    # ---- on the thread that carries

    def begin_wire(self) -> None:
        """A vote has passed, and the order of the step that follows is known."""
        self._wire = _AtWire(self._state[0] + 1, 0, (), time.monotonic())

    def stand_at_wire(self, batch: int, peers: Sequence[int] = ()) -> None:
        """The batch of this number is next; `peers`: those that it goes to or comes from, once all is posted here."""
        if self._wire is not None:
            self._wire = _AtWire(self._wire.boundary, batch, tuple(peers), time.monotonic())

    def end_wire(self) -> None:
        """All of the step's batches are carried."""
        if self._wire is not None:
            self._wire = _AtWire(self._wire.boundary, self._wire.batch + 1, (), time.monotonic(), is_over=True)

    def leave_wire(self) -> None:
        """The step that follows is of no known order."""
        self._wire = None

    # ---- on the session's thread

    def activity(self, name_of: Callable[[int], str]) -> Activity:
        """What a heartbeat tells; `name_of` gives the id of a rank."""
        boundary, phase, bucket, peers, since = self._state
        wire = self._wire
        if wire is not None and not (wire.is_over and (boundary, phase, bucket) > wire.position):
            since = wire.since if wire.peers else max(since, wire.since)
            (boundary, phase, bucket), peers = wire.position, wire.peers
        seconds = max(0.0, time.monotonic() - max(since, self._moved))
        named = tuple(map(name_of, peers[:MOST_NAMED]))
        return Activity(self.generation, boundary, phase, bucket, named, seconds, self._slowest)
