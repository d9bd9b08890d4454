"""A lease that is kept alive for as long as its context lasts, and that says until when it surely is.

It counts from before a request was sent, by this process's clock, so that here it is over before etcd's is: whoever
holds it stops before another one can get it. Each sign of life has a stream of its own and a deadline; where one is
not answered the next goes to another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.cluster import ATTEMPT_SECONDS, PAUSE_SECONDS, Cluster
from shoal_controller.etcd.endpoint import TRANSIENT, Method
from shoal_controller.etcd.errors import EtcdError

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
