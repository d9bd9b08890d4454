"""The group that exchanges tensors of a device: by NCCL where every member has a device of its own, else staged.

All members come to the same answer, because each has said at the rendezvous which device it has, if any. On the host a
group is just what the transport builds.

A `StagedGroup` puts pinned memory between the device and a group that knows the host's memory only. A send is copied
out beside the device's work and posted when it has landed; a receive is copied in when it has come. Sends that have not
landed are posted, in their order, by the next call of the group, and all of them before a thread waits for anything; so
nothing is held back for good. A thread posts what lands while the group is not called, as in a forward. A staged group
is called as the group below it is, and keeps the same promises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, cast

import torch
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.group.build import Cancellation, GroupSpec, Transport
from shoal.group.gloo import GlooGroup
from shoal.group.group import AnyOrder, Group, MessageOrder, Waiting, Work, WorldChanged, message_bytes
from shoal.group.learnt_order import Bulk
from shoal.group.nccl import build_nccl, own_device
from shoal.group.ordered import OrderedGroup, Trust, Wire
from shoal.process.device import LANDED, Accelerator, Device, DeviceCopy

log = get_logger("shoal")

Connect = Callable[[GlooGroup, Device, Cancellation], Wire]


def groups_of(
    transport: Transport,
    device: Device,
    bulk: Bulk,
    own: Callable[[torch.device], bytes] = own_device,
    connect: Connect | None = None,
) -> Transport:
    """Builds groups for tensors of `device`. `bulk`: messages between devices; `own`: what tells this device from
    others, empty where there is to be no wire; `connect`: makes one. Other arguments than the defaults are for
    devices that NCCL does not know.
    """
    if device.on_host:
        return transport
    trust = Trust()

    def build(spec: GroupSpec, cancellation: Cancellation) -> Group:
        host = transport(replace(spec, announces=own(device.kind)), cancellation)
        if host.size == 1:
            return host
        staged = StagedGroup(host, device, posts_beside=True)
        if not isinstance(host, GlooGroup) or not all_have_their_own(host.announced):
            return staged
        try:
            wire = (connect or _by_nccl)(host, device, cancellation)
        except WorldChanged:
            staged.close()
            raise
        group = OrderedGroup(staged, host, wire, device, bulk, trust)
        log.info("exchange", over="NCCL", generation=spec.generation, workers=spec.size)
        if cancellation.is_cancelled:
            group.abort()
            group.close()
            raise WorldChanged(f"the building of the group of generation {spec.generation} was cancelled")
        return group

    return build


def all_have_their_own(announced: Sequence[bytes]) -> bool:
    """Whether each member has said which device it has, and no two the same."""
    return all(announced) and len(set(announced)) == len(announced)


def _by_nccl(host: GlooGroup, device: Device, cancellation: Cancellation) -> Wire:
    assert isinstance(device, Accelerator), f"{device.kind} is said to be a device for NCCL"
    return build_nccl(host, device, cancellation)


class _StagedWork:
    """A message. `posted`: that of the group below, once there is one. Itself: one that is received on the host."""

    def __init__(self, group: StagedGroup) -> None:
        self._group = group
        self.posted: Work | None = None
        self.failure: WorldChanged | None = None

    def wait(self) -> None:
        self._group.wait([self])

    def finish(self) -> None:
        """The message has left, or has come."""


class _StagedSend(_StagedWork):
    """`copy`: out of the device; of a message that lies on the host there is none to wait for."""

    def __init__(self, group: StagedGroup, message: Tensor, copy: DeviceCopy, to: int, tag: int) -> None:
        super().__init__(group)
        self._message: Tensor | None = message
        self.copy, self._to, self._tag = copy, to, tag

    def post(self, below: Group) -> None:
        assert self._message is not None
        try:
            self.posted = below.send(self._message, self._to, self._tag)
        except WorldChanged as error:
            self.failure = error

    def finish(self) -> None:
        if self.copy is not LANDED and self._message is not None:
            self._group.device.give_back(self._message)
        self._message = None


class _StagedReceive(_StagedWork):
    """Into `target` on the device; `message` is where it comes."""

    def __init__(self, group: StagedGroup, message: Tensor, target: Tensor, promised: Any) -> None:
        super().__init__(group)
        self._message: Tensor | None = message
        self._target, self._promised = target, promised

    def finish(self) -> None:
        device, message = self._group.device, self._message
        if message is not None:
            device.to_device(message, self._target, self._promised).join()
            device.give_back(message)
        self._message = None


class _StagedWaiting:
    """Sends that have not landed are begun to wait for when they are posted."""

    def __init__(self, group: StagedGroup, works: Sequence[_StagedWork]) -> None:
        self._group, self._works = group, works
        self._unbegun = list(works)
        self._below: list[Waiting] = []
        self._begin()

    def _begin(self) -> None:
        ready = [work.posted for work in self._unbegun if work.posted is not None]
        if ready:
            self._unbegun = [work for work in self._unbegun if work.posted is None]
            self._below.append(self._group.below.begin_wait(ready))

    @property
    def is_over(self) -> bool:
        self._group.post_landed()
        try:
            self._begin()
        except WorldChanged:
            return True
        return all(work.failure for work in self._unbegun) and all(waiting.is_over for waiting in self._below)

    def wait(self) -> None:
        self._group.post_all()
        self._begin()
        for work in self._unbegun:
            if work.failure is not None:
                raise work.failure
        for waiting in self._below:
            waiting.wait()
        for work in self._works:
            work.finish()


class StagedGroup:
    """A `Group` for tensors of `device`, over the group `below`. `posts_beside`: by a thread of its own too."""

    order: MessageOrder = AnyOrder()

    def __init__(self, below: Group, device: Device, posts_beside: bool = False) -> None:
        self.below, self.device, self._posts_beside = below, device, posts_beside
        self.rank, self.size, self.progress = below.rank, below.size, below.progress
        self._lock = threading.RLock()
        self._leaving: deque[_StagedSend] = deque()
        """Sends that are not posted yet, in their order."""
        self._landing: SimpleQueue[DeviceCopy | None] | None = None
        """What the thread waits for; None ends it."""

    @property
    def broken_peers(self) -> tuple[int, ...]:
        return self.below.broken_peers

    # ---- messages

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        message, copy = tensor, cast(DeviceCopy, LANDED)
        if tensor.numel() and self.device.holds(tensor):
            message = self.device.pinned(tensor.nbytes, torch.uint8)
            copy = self.device.to_host(message_bytes(tensor), message)
        work = _StagedSend(self, message, copy, to, tag)
        with self._lock:
            self._leaving.append(work)
        self.post_landed()
        if work.failure is not None:
            raise work.failure
        if work.posted is None and self._posts_beside:
            self._post_when_landed(copy)
        return work

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if not (tensor.numel() and self.device.holds(tensor)):
            work = _StagedWork(self)
            work.posted = self.below.receive(tensor, source, tag)
            return work
        message = self.device.pinned(tensor.nbytes, torch.uint8)
        staged = _StagedReceive(self, message, message_bytes(tensor), self.device.promise(tensor))
        staged.posted = self.below.receive(message, source, tag)
        return staged

    def wait(self, works: Sequence[Work]) -> None:
        self.begin_wait(works).wait()

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        self.post_landed()
        return _StagedWaiting(self, cast(Sequence[_StagedWork], works))

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """The answers leave at once: the training thread may be elsewhere for long."""

        def answer(peer: int, message: Tensor) -> None:
            with self.device.at_home():
                on_request(peer, message)
            self.post_all()

        self.below.serve(tag, elements, answer)

    def all_gather(self, row: Tensor) -> Tensor:
        self.post_all()
        return self.below.all_gather(row.cpu())

    # ---- sends that have not landed

    def post_landed(self) -> None:
        """Those that no other stands before."""
        with self._lock:
            while self._leaving and self._leaving[0].copy.has_landed:
                self._leaving.popleft().post(self.below)

    def post_all(self) -> None:
        """Waits for the copies: for the device alone, and for no peer."""
        with self._lock:
            while self._leaving:
                work = self._leaving.popleft()
                work.copy.wait()
                work.post(self.below)

    def _post_when_landed(self, copy: DeviceCopy) -> None:
        if self._landing is None:
            self._landing = SimpleQueue()
            given = (self._landing,)
            threading.Thread(target=self._post_beside, args=given, name="shoal-group-posts", daemon=True).start()
        self._landing.put(copy)

    def _post_beside(self, landing: SimpleQueue[DeviceCopy | None]) -> None:
        while (copy := landing.get()) is not None:
            copy.wait()
            self.post_landed()

    # ---- its end

    def abort(self) -> None:
        self.below.abort()

    def close(self) -> None:
        self.below.close()
        if self._landing is not None:
            self._landing.put(None)
        with self._lock:
            leaving, self._leaving = self._leaving, deque()
        for work in leaving:
            work.copy.wait()
