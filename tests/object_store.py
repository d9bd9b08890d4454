"""A real S3 server on loopback (moto's) with an empty bucket `ckpt`, reached as a user reaches one: by environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.resources.base.ServiceResource]:
    """The bucket, through another library than Shoal's; the environment says where the server is."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    where = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**where, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    resource = boto3.resource("s3")
    made = resource.create_bucket(Bucket="ckpt")
    yield made
    resource.meta.client.close()
    httpx.post(f"http://{host}:{port}/moto-api/reset")  # its memory is this process's
    server.stop()
