"""Checkpoints in an object store: a real S3 server on loopback (moto's), reached as a user reaches one, by URL."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
import torch
from checkpoints import fresh, save, train, trained
from object_store import object_store
from ports import free_port
from shoal.checkpoint.catalogue import Keep, checkpoints, look_into, prune, resolve
from shoal.checkpoint.fingerprint import block_digests, verify
from shoal.checkpoint.restore import fits, load_blocks, load_small_state
from shoal.checkpoint.storage import open_storage
from shoal.core.checkpoint_errors import CheckpointDamaged, StorageFailed
from shoal_protos.runs import every
from tiers import check

pytestmark = check("serves an object store")

URL = "s3://ckpt/jobs/demo"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.resources.base.ServiceResource]:
    """The server's bucket `ckpt`."""
    with object_store(monkeypatch) as made:
        yield made


def test_a_checkpoint_goes_to_the_object_store_and_comes_back(bucket: object) -> None:
    storage, state = open_storage(URL), trained(3)
    storage.prepare()
    name, manifest = save(state, storage)
    found = resolve(URL, "latest", print)
    assert found and found.name == name and found.manifest.files == manifest.files
    other = fresh(seed=1)
    assert fits(found.manifest, other, (), found.path)
    load_small_state(found.reader(), other, {})
    load_blocks(found.reader(), other, every(12))
    assert block_digests(other, every(12)) == block_digests(state, every(12))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.weights.flats, state.weights.flats, strict=True))
    assert verify(found.reader()).bytes_read > 0


def test_a_file_of_many_parts_is_uploaded_in_parts_and_read_by_ranges(bucket: object) -> None:
    storage = open_storage(URL)
    chunk = bytes(range(256)) * (1 << 16)  # 16 MiB
    assert storage.write("large", [memoryview(chunk)] * 7) == 7 << 24
    target = memoryview(bytearray(1 << 10))
    storage.read_ranges("large", [((6 << 24) + 256, target)])
    assert bytes(target) == chunk[: 1 << 10]


def test_retention_deletes_in_the_object_store_too(bucket: object) -> None:
    storage, state = open_storage(URL), trained(1)
    names = []
    for _ in range(3):
        names.append(save(state, storage)[0])
        train(state, 1)
    assert [gone.step for gone in prune(storage, names[-1], Keep(1, None))] == [2, 1]
    assert [found.name.step for found in checkpoints(storage, print)] == [3]
    keys = {entry.key for entry in bucket.objects.all()}  # type: ignore[attr-defined]
    assert len(keys) == 4 and all("step-000000000003" in key or "frozen-" in key for key in keys)


def test_an_object_that_changed_is_seen(bucket: object) -> None:
    storage = open_storage(URL)
    name, manifest = save(trained(1), storage)
    entry = bucket.Object(f"jobs/demo/{name.folder}/{manifest.files[0].name}")  # type: ignore[attr-defined]
    content = bytearray(entry.get()["Body"].read())
    content[-1] ^= 1
    entry.put(Body=bytes(content))
    with pytest.raises(CheckpointDamaged, match=r"is damaged: the checksum of .* differs"):
        verify(look_into(storage, name).reader())
    entry.delete()
    with pytest.raises(CheckpointDamaged, match=r"is damaged: \S+ is not there"):
        look_into(storage, name)


def test_a_bucket_that_is_not_there_gets_a_sentence(bucket: object) -> None:
    with pytest.raises(
        StorageFailed, match=r"^s3://nobody/x is not there: The specified bucket does not exist\. Create"
    ):
        open_storage("s3://nobody/x").prepare()
    with pytest.raises(
        StorageFailed, match=r"^s3://nobody/x is not there: The specified bucket does not exist\. Create"
    ):
        save(trained(1), open_storage("s3://nobody/x"))


def test_a_server_that_does_not_answer_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        StorageFailed, match=r"^cannot look for checkpoints in s3://ckpt/x: EndpointConnectionError: Could"
    ):
        open_storage("s3://ckpt/x").prepare()
