"""Reads a whole checkpoint and compares every checksum and the fingerprint; keeps nothing of it.

Bucket by bucket, so that memory holds one bucket. `shoal verify` calls it.
"""

from __future__ import annotations

import torch
from shoal_protos.runs import Runs

from shoal.checkpoint.commit import digests_of
from shoal.checkpoint.errors import CheckpointDamaged
from shoal.checkpoint.reader import Reader
from shoal.fingerprint import total_of

_NOTHING = torch.empty(0)


def verify(reader: Reader) -> int:
    """Returns how many bytes were read. Raises `CheckpointDamaged` naming the first thing that is wrong."""
    manifest = reader.manifest
    for bucket in manifest.blocks.buckets:
        blocks = Runs(((bucket.first_block, bucket.first_block + bucket.blocks),))
        flat = torch.empty(bucket.elements, dtype=bucket.dtype)
        reader.parameters(blocks, [flat if other is bucket else _NOTHING for other in manifest.blocks.buckets])
        reader.states(blocks)
    reader.check_heads()
    reader.tensors()
    reader.frozen()
    fingerprint = total_of(manifest.step, manifest.blocks, digests_of(manifest.files), reader.buffers())
    if fingerprint != manifest.fingerprint:
        raise CheckpointDamaged(f"{reader.where} is damaged: its fingerprint is not that of what it holds.")
    return reader.bytes_read
