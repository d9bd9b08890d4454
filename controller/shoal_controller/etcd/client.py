"""A client of etcd, version 3: keys, transactions, watches and leases, as a user, over TLS, on several servers.

It knows nothing of what it is used for. docs/decisions/ says why it is not one of the packages that there are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.cluster import Cluster, Login
from shoal_controller.etcd.endpoint import Method, Tls
from shoal_controller.etcd.errors import UnknownOutcome
from shoal_controller.etcd.leases import KeptLease, lease
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
