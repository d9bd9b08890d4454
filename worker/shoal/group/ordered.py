"""A group whose bulk goes from device to device by a wire that knows no tags; all else goes by a staged group.

A transport such as NCCL carries messages in the order in which both ends name them, and one that is waited for holds up
all behind it. So all members carry the same batches in the same order, each its own part, and each batch only once this
member has posted all that it has in it. In a step whose order is not known every member tells rank 0 over the host what
it has posted, and rank 0's `Sequencer` says what all carry next: no end ever waits for one that waits for another
message. A step like the one before carries the same batches again (learnt_order.py), and nothing is told.

One thread carries batch after batch, and a waiting thread is told when its message's batch is over: then the device has
it. A wire is aborted with the group, and what was on it fails. A message that the step before did not have breaks the
group at once, and this process's steps are asked for from then on: it is a failure, never a hang.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.group.asked_order import AskedOrder, HostGroup
from shoal.group.group import Answers, Gather, Group, MessageOrder, Waiting, Work, WorldChanged
from shoal.group.learnt_order import Bulk, Carried, LearntOrder, OutOfOrder, Post, PostPlace
from shoal.process.device import Device

log = get_logger("shoal")
OFTEN = 5
"""Times that the way of gathers has changed, with no steady step in between."""


class CarriedMessage(Protocol):
    """A message that is carried."""

    tensor: Tensor
    post: Post
    given: Any
    """What `Device.mark` or `Device.promise` returned when it was posted."""


class Wire(Protocol):
    """What carries messages from device to device. One thread carries; any may abort."""

    def carry(self, messages: Sequence[CarriedMessage]) -> Callable[[], None]:
        """Begins to carry them, at once; returns what blocks until all are over. Raises `RuntimeError` for failures,
        and so may what it returns.
        """

    def abort(self) -> None:
        """Whatever is on its way ends now. Idempotent."""

    def close(self) -> None:
        """Nothing reads or writes a tensor of it any more."""


@dataclass(slots=True)
class Trust:
    """Of one process: whether it repeats the order of steps."""

    holds: bool = True
    _changes: int = 0

    def allows(self, learnt: LearntOrder) -> bool:
        """A step is over here: whether the next one may repeat its order. Says once where gathers change for ever."""
        unit = learnt.changed_at
        if unit is not None:
            self._changes += 1
            if self._changes == OFTEN:
                log.info("order_of_units_differs", unit=unit, means="steps gather units in ever other orders",
                         so="they are asked for over the host")  # fmt: skip
        elif learnt.repeats:
            self._changes = 0
        return self.holds and learnt.is_in_order


class _OrderedWork:
    """A message. `over`: it has come or left, or failed. `place`: among those that the training thread has posted."""

    def __init__(self, group: OrderedGroup, tensor: Tensor, post: Post, given: Any) -> None:
        self._group, self.tensor, self.post, self.given = group, tensor, post, given
        self.place: PostPlace | None = None
        self.is_at_wire = False
        self.over, self.failure = threading.Event(), ""

    def wait(self) -> None:
        self._group.wait([self])


class _OrderedWaiting:
    def __init__(self, group: OrderedGroup, works: Sequence[_OrderedWork], below: Waiting) -> None:
        self._group, self._works, self._below = group, works, below
        self._place = next((work.place for work in works if work.place is not None), None)

    @property
    def is_over(self) -> bool:
        """In a step that repeats another: where it was found over in that one, it is waited for; before that it is not
        over.
        """
        if self._place is not None:
            with self._group.changed:
                repeats, may_be = self._group.learnt.repeats, self._group.learnt.may_be_over(self._place)
            if repeats:
                if may_be:
                    with suppress(WorldChanged):  # `wait` will raise it
                        self.wait()
                return may_be
        is_over = self._below.is_over and all(work.over.is_set() for work in self._works)
        if is_over:
            self._note()
        return is_over

    def wait(self) -> None:
        self._below.wait()
        for work in self._works:
            self._group.wait_for(work)
        self._note()

    def _note(self) -> None:
        if self._place is not None:
            with self._group.changed:
                self._group.learnt.on_over(self._place)


class OrderedGroup:
    """A `Group` for tensors of `device`, and its `MessageOrder`: messages with tags of `bulk` go by `wire`. `below`:
    over the group `host`.
    """

    def __init__(self, below: Group, host: HostGroup, wire: Wire, device: Device, bulk: Bulk, trust: Trust) -> None:
        self.below, self.device, self._host, self._wire, self._bulk = below, device, host, wire, bulk
        self.rank, self.size, self.progress = below.rank, below.size, below.progress
        self.order: MessageOrder = self
        self._trust, self.learnt = trust, LearntOrder(bulk.answers)
        self.changed = threading.Condition()
        self._posted: dict[Post, deque[_OrderedWork]] = defaultdict(deque)
        """What is not carried yet."""
        self._live: set[_OrderedWork] = set()
        self._over = ""
        """Why no message is worth while any more."""
        self._left = 0
        """Batches of a repeated step that are still to be carried."""
        self._at_hand: Carried | None = None
        """That of them which is next."""
        self._lacks = False
        """Whether it waits for what the training thread is to post, as far as the one that carries has looked."""
        self._awaited: set[_OrderedWork] = set()
        self._answers: Answers | None = None
        self._answering: dict[int, Iterator[Tensor]] = {}
        """By peer, what goes to it unasked."""
        self._to_carry: SimpleQueue[Carried | None] = SimpleQueue()
        self._asked = AskedOrder(host, self.rank, self._to_carry, self._fail)
        threading.Thread(target=self._carry, name="shoal-group-carries", daemon=True).start()

    @property
    def broken_peers(self) -> tuple[int, ...]:
        return self.below.broken_peers

    # ---- messages

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        if tag not in self._bulk.tags or not tensor.numel():
            return self.below.send(tensor, to, tag)
        return self._post(self._to_send(tensor, Post(True, to, tag)))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if tag not in self._bulk.tags or not tensor.numel():
            return self.below.receive(tensor, source, tag)
        assert self.device.holds(tensor), f"a message with tag {tag} is received on the host"
        return self._post(_OrderedWork(self, tensor.detach(), Post(False, source, tag), self.device.promise(tensor)))

    def _to_send(self, tensor: Tensor, post: Post) -> _OrderedWork:
        if not self.device.holds(tensor):
            here, tensor = tensor, torch.empty_like(tensor, device=self.device.kind)
            self.device.to_device(here, tensor, self.device.promise(tensor)).join()
        return _OrderedWork(self, tensor.detach(), post, self.device.mark())

    def _post(self, work: _OrderedWork) -> _OrderedWork:
        post = work.post
        with self._breaking(), self.changed:
            self._check_open()
            if not self.learnt.is_answer(post):
                work.place = self.learnt.on_post(post, work.tensor.nbytes)
            self._live.add(work)
            self._posted[post].append(work)
            self._lacks = False
            if self.learnt.repeats:
                self.changed.notify_all()
            else:
                self._asked.on_post(post)  # in the lock: it is told in the order in which it is posted
        return work

    def wait(self, works: Sequence[Work]) -> None:
        self.begin_wait(works).wait()

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        mine = [work for work in works if isinstance(work, _OrderedWork)]
        others = [work for work in works if not isinstance(work, _OrderedWork)]
        return _OrderedWaiting(self, mine, self.below.begin_wait(others))

    def wait_for(self, work: _OrderedWork) -> None:
        """Raises `WorldChanged` where it failed."""
        if not work.over.is_set():
            self.progress.wait_for(work.post.peer)
            with self._breaking(), self.changed:
                self._awaited.add(work)
                self._check_waits()
            with self.progress.waiting():
                self._look_until_over(work)
        with self.changed:
            self._awaited.discard(work)
        if work.failure:
            raise WorldChanged(f"the exchange with rank {work.post.peer} of {self.size} failed: {work.failure}")
        self.progress.go_on()

    def _look_until_over(self, work: _OrderedWork) -> None:
        connection = self._host.connection(work.post.peer)
        while not work.over.wait(connection.pause_seconds):
            wrong = connection.look()
            if wrong is not None:
                raise self._host.on_failure(work.post.peer, wrong)

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        self.below.serve(tag, elements, on_request)

    def all_gather(self, row: Tensor) -> Tensor:
        return self.below.all_gather(row)

    # ---- steps

    def begin_step(self, kind: object, may_repeat: bool) -> None:
        with self.changed:
            learnt = self.learnt
            learnt.begin(kind, may_repeat)
            self._answers = None
            self._left = len(learnt.batches) if learnt.repeats else 0
            if self._left:
                self.progress.begin_wire()
                for batch in learnt.batches:
                    self._to_carry.put(batch)
            else:
                self.progress.leave_wire()

    def end_step(self) -> bool:
        with self._breaking(), self.changed:
            self.learnt.end_gathers()
            self.learnt.check_whole()
            self._lacks = False
            self.changed.notify_all()
        while True:
            with self.changed:
                self._check_open()
                if not self._left:
                    return self._trust.allows(self.learnt)
                peer = self._at_hand.posts[0].peer if self._at_hand is not None else (self.rank + 1) % self.size
                connection = self._host.connection(peer)
                if self.changed.wait(connection.pause_seconds):
                    continue
            wrong = connection.look()
            if wrong is not None:
                raise self._host.on_failure(peer, wrong)

    # ---- units

    def begin_gather(self, unit: int, in_lane: bool) -> Gather:
        with self.changed:
            if self.learnt.begin_gather((unit, in_lane)):
                return Gather.UNASKED
            self._lacks = False
            self.changed.notify_all()
            return Gather.LATE if self.learnt.repeats else Gather.ASKED

    def let_go(self, unit: int, works: Sequence[Work]) -> bool:
        """What is not at the wire yet will come to memory that serves nothing."""
        mine = [work for work in works if isinstance(work, _OrderedWork)]
        with self.changed:
            place = next((work.place for work in mine if work.place is not None), None)
            if place is None or not self.learnt.is_early(place):
                return False
            self.learnt.deviate(unit)
            self._lacks = False
            waiting = [work for work in mine if not work.is_at_wire]
            for work in waiting:
                work.tensor, work.given = _nowhere(self.device, work.tensor.nbytes)
            self.changed.notify_all()
        self.wait([work for work in mine if work not in waiting])
        return bool(waiting)

    def on_asked(self, peer: int, unit: int) -> Gather:
        with self.changed:
            self.learnt.on_asked(peer, unit)
            return Gather.LATE if self.learnt.repeats else Gather.ASKED

    def answer_with(self, answers: Answers) -> None:
        with self.changed:
            self._answers, self._answering = answers, {}
            self.changed.notify_all()

    # ---- on threads of the group

    def _carry(self) -> None:
        while (batch := self._to_carry.get()) is not None:
            try:
                with self._breaking():
                    works = self._works_of(batch)
                self._wire.carry(works)()
            except (RuntimeError, WorldChanged) as error:
                self._fail(str(error))
                return
            with self.changed:
                self._live.difference_update(works)
                for work in works:
                    work.over.set()
                if batch is self._at_hand:  # else of a step whose order was asked for, which may be over on all members
                    self._at_hand, self._left = None, self._left - 1
                    if not self._left:
                        self.progress.end_wire()
                        self.changed.notify_all()

    def _works_of(self, batch: Carried) -> list[_OrderedWork]:
        """Waits until this member has posted all of it. Raises `WorldChanged`, and `OutOfOrder`."""
        with self.changed:
            repeats = self._left > 0
            if repeats:
                self._at_hand = batch
                self.progress.stand_at_wire(batch.number)
            else:
                self.learnt.on_batch(batch)
        works = [self._answer(post) if repeats and self.learnt.is_answer(post) else self._posted_here(post)
                 for post in batch.posts]  # fmt: skip
        with self.changed:
            for work in works:
                work.is_at_wire = True
        if repeats:
            self.progress.stand_at_wire(batch.number, tuple(dict.fromkeys(post.peer for post in batch.posts)))
        return works

    def _posted_here(self, post: Post) -> _OrderedWork:
        with self.changed:
            while not (self._over or self._posted[post]):
                size = self.learnt.drain(post)
                if size is not None:
                    nowhere, given = _nowhere(self.device, size)
                    self._live.add(work := _OrderedWork(self, nowhere, post, given))
                    return work
                self._lacks = True
                self._check_waits()
                self.changed.wait()
            self._lacks = False
            self._check_open()
            return self._posted[post].popleft()

    def _answer(self, post: Post) -> _OrderedWork:
        """What goes to that peer unasked, once this member stands at its boundary."""
        with self.changed:
            while self._answers is None and not self._over:
                self.changed.wait()
            self._check_open()
            if post.peer not in self._answering:
                made, peer = self._answers, post.peer
                assert made is not None
                of_units = (made(peer, unit) for unit in self.learnt.asked_by(peer))
                self._answering[peer] = chain.from_iterable(of_units)
        with self.device.at_home():
            message = next(self._answering[post.peer], None)
            if message is None:
                raise OutOfOrder(f"rank {post.peer} waits for more of the units here than it had asked for", post.peer)
            work = self._to_send(message, post)
        with self.changed:
            self._check_open()
            self._live.add(work)
        return work

    def _check_open(self) -> None:
        if self._over:  # what was posted has failed already
            raise WorldChanged(self._over)

    def _check_waits(self) -> None:
        """Raises `OutOfOrder` where a thread waits for what comes later than what it is to post."""
        if not self._lacks or self._at_hand is None:
            return
        late = next((work.post for work in self._awaited if not work.over.is_set()), None)
        if late is not None:
            earlier = f"all that came earlier in the step before is posted (batch {self._at_hand.number})"
            raise OutOfOrder(f"a message with tag {late.tag} is waited for before {earlier}", late.peer)

    # ---- its end

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What is out of order in it breaks the group, with `WorldChanged`, and is not tried again."""
        try:
            yield
        except OutOfOrder as error:
            self._trust.holds = False
            log.error("message_out_of_order", found=str(error),
                      means="the world is made anew, and from now on the order of messages is asked for")  # fmt: skip
            self._host.on_failure(error.peer, str(error))  # the controller is told of a broken group
            self._fail(f"a message is out of order: {error}")
            self.abort()
            raise WorldChanged(self._over) from None

    def _fail(self, why: str) -> None:
        with self.changed:
            self._over = self._over or why
            live, self._live = self._live, set()
            self._posted.clear()
            for work in live:
                work.failure = self._over
                work.over.set()
            self.changed.notify_all()

    def abort(self) -> None:
        self._fail("the group was aborted")
        self.below.abort()
        self._wire.abort()

    def close(self) -> None:
        with self.changed:
            is_busy = bool(self._live) or self._left > 0
        if is_busy:
            self.abort()
        self._fail("the group is closed")
        self._asked.close()
        self._to_carry.put(None)
        self._wire.close()
        self.below.close()


def _nowhere(device: Device, size: int) -> tuple[Tensor, Any]:
    """Memory on the device for what serves nothing, and what a receive into it needs."""
    memory = torch.empty(size, dtype=torch.uint8, device=device.kind)
    return memory, device.promise(memory)
