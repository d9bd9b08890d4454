"""Reads a whole checkpoint and compares every checksum and the fingerprint; keeps nothing of it.

Bucket by bucket, so that memory holds one bucket. `shoal verify` calls it.
"""

from __future__ import annotations

import torch

from shoal.checkpoint.commit import digests_of
from shoal.checkpoint.errors import CheckpointDamaged
from shoal.checkpoint.reader import Reader
from shoal.fingerprint import total_of

_NOTHING = torch.empty(0)


def verify(reader: Reader) -> int:
    """Returns how many bytes were read. Raises `CheckpointDamaged` naming the first thing that is wrong."""
    manifest = reader.manifest
    for bucket in manifest.blocks.buckets:
        whole = [manifest.blocks.whole(bucket)]
        flat = torch.empty(bucket.elements, dtype=bucket.dtype)
        reader.parameters(whole, [flat if other is bucket else _NOTHING for other in manifest.blocks.buckets])
        reader.states(whole)
    reader.check_shared_numbers()
    reader.check_heads()
    reader.tensors()
    reader.frozen()
    digests = digests_of(manifest.files, manifest.blocks)
    fingerprint = total_of(manifest.step, manifest.blocks, digests, reader.buffers())
    if fingerprint != manifest.fingerprint:
        raise CheckpointDamaged(f"{reader.where} is damaged: its fingerprint is not that of what it holds.")
    return reader.bytes_read
