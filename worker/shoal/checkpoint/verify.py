"""Reads a whole checkpoint, compares every checksum, and computes the fingerprint; keeps nothing of it.

Bucket by bucket, so that memory holds one bucket. `shoal verify` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.blocks.values import WholeValues
from shoal.checkpoint.fingerprint import digests_of, total_of
from shoal.checkpoint.reader import Reader
from shoal.core.layout import Bucket
from shoal.core.misses import Misses

_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that is whole. `fingerprint`: hexadecimal, as `engine.fingerprint()` gave it at that step."""

    bytes_read: int
    fingerprint: str


def verify(reader: Reader) -> Verified:
    """Raises `CheckpointDamaged` naming the first thing that is wrong."""
    manifest = reader.manifest
    digests = dict(one for bucket in manifest.blocks.buckets for one in _digests(reader, bucket))
    reader.check_shared_numbers()
    reader.check_heads()
    reader.tensors()
    reader.frozen()
    misses = Misses.from_runs(manifest.blocks, manifest.missed)
    fingerprint = total_of(manifest.step, manifest.blocks, digests, reader.buffers(), misses)
    return Verified(reader.bytes_read, fingerprint)


def _digests(reader: Reader, bucket: Bucket) -> Iterator[tuple[int, bytes]]:
    """Number and digests of each block of a bucket."""
    layout = reader.manifest.blocks
    whole = layout.whole(bucket)
    flat = torch.empty(bucket.elements, dtype=bucket.dtype)
    flats = [flat if other is bucket else _NOTHING for other in layout.buckets]
    reader.parameters([whole], WholeValues(layout, flats))
    for stretch, state in reader.states([whole]).items():
        parameters = flat[slice(*layout.elements(stretch))]
        yield from digests_of(layout, stretch, [parameters, *(state[key] for key in sorted(state))])
