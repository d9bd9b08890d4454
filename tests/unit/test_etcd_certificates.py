"""Certificates of an etcd that are renewed while a store is open: a server that knows only the new ones is reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from asynchronous import asynchronous
from certificates import authority, certificate
from ports import free_port
from rule import Edit, rule
from shoal_controller.etcd.etcd_pb2 import RangeRequest, RangeResponse, StatusRequest, StatusResponse, TxnRequest
from shoal_controller.etcd.etcd_pb2 import TxnResponse as Answer
from shoal_controller.store import etcd_store
from shoal_controller.store.etcd_store import EtcdAccess, EtcdStore, parsed_etcd_url
from shoal_protos.errors import StoreError
from tiers import check

pytestmark = check("starts servers of etcd")


def signed(folder: Path, name: str) -> None:
    """An authority of its own, and the files of a server and of a client that it has signed."""
    authority(folder, f"{name}-ca")
    for one in ("server", "client"):
        certificate(folder, f"{name}-{one}", f"{name}-ca", names="DNS:localhost,IP:127.0.0.1")


def put_in_place(folder: Path, name: str) -> EtcdAccess:
    """The client's files, written beside and renamed."""
    for place, source in (("ca.pem", "ca.pem"), ("client.pem", "client.pem"), ("client.key", "client.key")):
        (folder / "new").write_bytes((folder / f"{name}-{source}").read_bytes())
        (folder / "new").rename(folder / place)
    return EtcdAccess(folder / "ca.pem", folder / "client.pem", folder / "client.key", None)


@asynccontextmanager
async def etcd(folder: Path, name: str, port: int) -> AsyncIterator[None]:
    """A server that knows this authority alone, and has no keys."""

    async def status(request: StatusRequest, context: object) -> StatusResponse:
        return StatusResponse(version="3.5.1")

    async def get(request: RangeRequest, context: object) -> RangeResponse:
        return RangeResponse()

    async def txn(request: TxnRequest, context: object) -> Answer:
        return Answer(succeeded=False)

    handlers = [
        grpc.method_handlers_generic_handler(
            "etcdserverpb.Maintenance",
            {"Status": grpc.unary_unary_rpc_method_handler(status, StatusRequest.FromString, _text)},
        ),
        grpc.method_handlers_generic_handler(
            "etcdserverpb.KV",
            {
                "Range": grpc.unary_unary_rpc_method_handler(get, RangeRequest.FromString, _text),
                "Txn": grpc.unary_unary_rpc_method_handler(txn, TxnRequest.FromString, _text),
            },
        ),
    ]
    pair = tuple((folder / f"{name}-server.{kind}").read_bytes() for kind in ("key", "pem"))
    trusted = (folder / f"{name}-ca.pem").read_bytes()
    one = grpc.aio.server(handlers=handlers)
    one.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair], trusted, True))
    await one.start()
    try:
        yield
    finally:
        await one.stop(None)


def _text(message: StatusResponse | RangeResponse | Answer) -> bytes:
    return message.SerializeToString()


@rule(
    "A store's certificates that are renewed count for its next connection: one shown for ever ends with its day",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.store.etcd_store",
        "            if (tls := files.newer()) is not None:\n",
        "            if (tls := files.newer()) is not None and not files:\n",
    ),
)
@asynchronous
async def test_certificates_that_are_renewed_count_for_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "RENEWED_SECONDS", 0.05)
    for name in ("old", "new"):
        signed(tmp_path, name)
    port = free_port()
    access = put_in_place(tmp_path, "old")
    async with etcd(tmp_path, "old", port):
        store = await EtcdStore.open(parsed_etcd_url(f"etcd://127.0.0.1:{port}/shoal"), access)
        try:
            assert await store.get("/a") is None
        except BaseException:
            await store.close()
            raise
    try:
        async with etcd(tmp_path, "new", port):
            (tmp_path / "client.pem").write_text("half of it")
            with pytest.raises(StoreError):
                await store.get("/a")
            put_in_place(tmp_path, "new")
            assert await store.get("/a") is None
    finally:
        await store.close()
