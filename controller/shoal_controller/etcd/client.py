"""A client of etcd, version 3: keys, transactions, watches and leases, with a user, TLS and several servers.

It knows nothing of what it is used for; docs/decisions/ says why it is not an existing package.

A `KeptLease` is kept alive while its context lasts and says until when it surely holds. That time counts from before
the request was sent, by this process's clock, so its holder stops before another process can get the lease. Each
keep-alive has a stream of its own and a deadline; if one is not answered, the next one goes to another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.cluster import ATTEMPT_SECONDS, PAUSE_SECONDS, Cluster, Login
from shoal_controller.etcd.endpoint import TRANSIENT, Method, Tls
from shoal_controller.etcd.errors import EtcdError, UnknownOutcome
from shoal_controller.etcd.watching import RANGE, Revision, watch

TXN = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)

PAGE_KEYS = 128


class EtcdClient:
    """A client of one cluster. Ended by `close`; whoever waits for anything then gets `Closed`."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None, login: Login | None = None) -> None:
        self._cluster = Cluster(addresses, tls, login)

    def renew(self, tls: Tls) -> None:
        """Connect with these certificates from now on."""
        self._cluster.renew(tls)

    async def range(self, key: bytes, end: bytes, limit: int = 0) -> tuple[int, list[pb.KeyValue]]:
        """The keys from `key` on and before `end`, at most `limit` (0: all), in order, and the revision at which that
        is so: all of one, however many pages it takes. Raises `Compacted` where that was gone on the way.
        """
        found: list[pb.KeyValue] = []
        revision, more = 0, True
        while more:
            size = min(PAGE_KEYS, limit - len(found)) if limit else PAGE_KEYS
            request = pb.RangeRequest(key=key, range_end=end, limit=size, revision=revision)
            page = await self._cluster.call(RANGE, request)
            found += page.kvs
            revision = revision or page.header.revision
            more = page.more and len(found) != limit
            key = found[-1].key + b"\0" if found else key
        return revision, found

    async def transact(self, compares: Sequence[pb.Compare], operations: Sequence[pb.RequestOp]) -> pb.TxnResponse:
        """All operations where every comparison holds. Raises `UnknownOutcome` where it may have been carried out."""
        request = pb.TxnRequest(compare=compares, success=operations)
        answer, doubt = await self._cluster.send(TXN, request, repeatable=is_guarded(request))
        if doubt and not answer.succeeded:
            raise UnknownOutcome(doubt)
        return answer

    def watch(self, key: bytes, end: bytes, after: int) -> AbstractAsyncContextManager[AsyncIterator[Revision]]:
        return watch(self._cluster, key, end, after)

    def lease(self, seconds: float) -> AbstractAsyncContextManager[KeptLease]:
        return lease(self._cluster, seconds)

    async def versions(self) -> dict[str, str | BaseException]:
        """What each server says that it is, by its address, or why it does not."""
        return await self._cluster.versions()

    async def close(self) -> None:
        await self._cluster.close()


def is_guarded(request: pb.TxnRequest) -> bool:
    """Whether carrying it out makes one of its own comparisons fail: then sending it twice does no harm."""
    puts = {one.request_put.key for one in request.success if one.HasField("request_put")}
    deletes = {one.request_delete_range.key for one in request.success if one.HasField("request_delete_range")}
    guards = [one for one in request.compare if one.target == pb.Compare.MOD and one.result == pb.Compare.EQUAL]
    return any(one.key in puts or (one.key in deletes and one.mod_revision) for one in guards)


def modified_at(key: bytes, revision: int) -> pb.Compare:
    """That the key was last modified at this revision; 0: that it does not exist."""
    return pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=revision)


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


SHORTEST_SECONDS = 2
"""etcd's own bound, with the election timeout that it has by default."""

SIGNS_OF_LIFE = 3
"""In the time of a lease."""

REVOKE_SECONDS = 2.0

GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)


@asynccontextmanager
async def lease(cluster: Cluster, seconds: float) -> AsyncIterator[KeptLease]:
    """A new lease, kept alive within the context, and revoked at its end unless it is lost. Raises what `Cluster.call`
    does."""
    asked = asyncio.get_running_loop().time()
    granted = await cluster.call(GRANT, pb.LeaseGrantRequest(TTL=max(SHORTEST_SECONDS, ceil(seconds))))
    kept = KeptLease(cluster, granted.ID, float(granted.TTL), asked + granted.TTL)
    keeping = asyncio.create_task(kept.keep(), name=f"etcd-lease {kept.id:x}")
    try:
        yield kept
    finally:
        was_lost = kept.lost.is_set()
        keeping.cancel()
        await asyncio.wait([keeping])
        kept.lost.set()
        kept.valid_until = min(kept.valid_until, asyncio.get_running_loop().time())
        if not was_lost:  # one that is lost ends by itself: its keys may have been put on another one
            with suppress(EtcdError):
                await cluster.call(REVOKE, pb.LeaseRevokeRequest(ID=kept.id), REVOKE_SECONDS)


@dataclass(slots=True)
class KeptLease:
    """A lease that was granted, and its signs of life."""

    _cluster: Cluster
    id: int
    seconds: float
    """What was granted: it lives so long after each sign of life."""
    valid_until: float
    """By the event loop's clock; before it, it is over for nobody."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is over, or may be."""

    async def keep(self) -> None:
        """Give signs of life until it is over, or may be."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(TimeoutError, EtcdError):
                async with asyncio.timeout_at(self.valid_until) as limit:
                    while True:
                        granted_at = self.valid_until - self.seconds
                        await asyncio.sleep(max(0.0, granted_at + self.seconds / SIGNS_OF_LIFE - loop.time()))
                        asked = loop.time()
                        if (granted := await self._renewed()) <= 0:
                            return
                        self.valid_until = asked + granted
                        limit.reschedule(self.valid_until)
        finally:
            self.lost.set()

    async def _renewed(self) -> int:
        """Seconds from when it was asked for; 0 where the lease is gone."""
        while True:
            with suppress(*TRANSIENT):
                async with self._cluster.stream(KEEP_ALIVE) as stream, asyncio.timeout(ATTEMPT_SECONDS):
                    return (await stream.ask(pb.LeaseKeepAliveRequest(ID=self.id))).TTL
            await asyncio.sleep(PAUSE_SECONDS)
