"""An etcd that is none: a server that says which version it has, and does nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from shoal_controller.etcd.etcd_pb2 import StatusRequest, StatusResponse


@contextmanager
def server_of_version(version: str) -> Iterator[str]:
    """Its address."""

    def status(request: StatusRequest, context: grpc.ServicerContext) -> StatusResponse:
        return StatusResponse(version=version)

    method = grpc.unary_unary_rpc_method_handler(status, StatusRequest.FromString, StatusResponse.SerializeToString)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
