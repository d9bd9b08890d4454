"""The fingerprint: one digest of a job's state that does not depend on world, stage, mirrors, offload or history.

SHA-256 over the step, the layout, per block in order the SHA-256 of its parameters and of each optimizer state tensor
(keys sorted, padding +0), the persistent buffers by name, and the updates that parameters have missed, if any. Owners
digest their blocks; all members get all digests, so that the loss of any member loses none.

`verify` computes it of a checkpoint alike: it reads the whole, part by part, so that memory holds a part of a bucket,
compares every checksum, and keeps nothing of it. `shoal verify` calls it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_protos.errors import PeerError
from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.loaded_state import counts_in_gaps
from shoal.blocks.values import without_gaps
from shoal.checkpoint.reader import Reader, Window
from shoal.checkpoint.snapshot import parts_of
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.core.misses import Misses
from shoal.exchange.packing import exchange_framed
from shoal.exchange.traffic import DIGESTS
from shoal.exchange.world import World
from shoal.group.group import Group
from shoal.process.host_memory import tensor_bytes
from shoal.state.training_state import TrainingState, digest_of

ENTRY = struct.Struct("<II")
"""Before the digests of a block: its number, and how many bytes they are. Blocks of other groups have other state."""
VERIFIED_BYTES = 1 << 19
"""Of each tensor that is read at once to be verified."""


def block_digests(state: TrainingState, blocks: Runs) -> dict[int, bytes]:
    """Digests by block number: 32 bytes for the parameters and 32 for each state tensor, keys sorted. None of frozen
    blocks.
    """
    found: dict[int, bytes] = {}
    for stretch, parts in contents(state, blocks):
        if state.held_layout.buckets[stretch.bucket].is_frozen:
            continue
        found.update(digests_of(state.layout, stretch, parts))
    return found


def digests_of(
    layout: Layout,
    stretch: Stretch,
    parts: Sequence[Tensor],  # each (blocks × block elements,), or () for a number that all blocks share
) -> Iterator[tuple[int, bytes]]:
    """Number and digests of each block of a stretch. `parts`: parameters, then state tensors, keys sorted."""
    size, parts = layout.block_elements, [part.cpu() for part in parts]
    for index, number in enumerate(layout.numbers_of(stretch)):
        yield number, b"".join(_digest(part, index * size, size) for part in parts)


def contents(state: TrainingState, blocks: Runs) -> Iterator[tuple[Stretch, list[Tensor]]]:
    """Each stretch of blocks with its parameters, then each state tensor, keys sorted: (blocks × block elements,)
    elements, or () for a number that all blocks share.
    """
    for stretch, tensors in state.held.home.stream(blocks):
        first, _ = state.held_layout.elements(stretch)
        gaps = state.held_layout.buckets[stretch.bucket].gaps
        of_state = {key: () if counts_in_gaps(key, tensors) else gaps for key in tensors}
        parameters = without_gaps(state.weights.of(stretch), first, gaps)
        yield stretch, [parameters, *(without_gaps(tensors[key], first, of_state[key]) for key in sorted(tensors))]


def _digest(part: Tensor, at: int, size: int) -> bytes:
    return hashlib.sha256(tensor_bytes(part if part.dim() == 0 else part[at : at + size])).digest()


def fingerprint(state: TrainingState, world: World) -> str:
    """Hexadecimal. Every member of the world calls it at the same boundary; raises `WorldChanged`."""
    layout = state.layout
    mine = block_digests(state, world.owned)
    mine[layout.blocks + layout.part.coordinate] = digest_of_buffers(state.buffers.committed)
    everyone = dict(mine)
    for number, digest in _exchange(world.group, mine):
        everyone[number] = digest
    buffers = [everyone[layout.blocks + coordinate] for coordinate in range(layout.part.coordinates)]
    return total_of(state.step, layout, everyone, buffers, state.misses)


def digest_of_buffers(buffers: Mapping[str, Tensor]) -> bytes:
    """As it enters the fingerprint."""
    return digest_of(sorted(buffers.items())).encode()


def total_of(step: int, layout: Layout, digests: Mapping[int, bytes], buffers: Sequence[bytes], misses: Misses) -> str:
    """Hexadecimal. `digests`: of every block, as `block_digests` gives them. `buffers`: digests by coordinate."""
    total = hashlib.sha256(f"step {step}\n".encode())
    total.update(layout.digest())
    for number in range(layout.blocks):
        total.update(digests[number])
    total.update(b"".join(buffers))
    if any(one.updates for one in misses.of):
        total.update(repr(misses.runs()).encode())
    return total.hexdigest()


def _exchange(group: Group, mine: dict[int, bytes]) -> list[tuple[int, bytes]]:
    content = b"".join(ENTRY.pack(number, len(digests)) + digests for number, digests in mine.items())
    theirs = exchange_framed(group, DIGESTS, content)
    return [entry for peer, found in theirs.items() for entry in _entries(found, peer)]


def _entries(content: bytes, peer: int) -> Iterator[tuple[int, bytes]]:
    """Number and digests of each block. Raises `PeerError` for a message that ends within one."""
    at = 0
    while at < len(content):
        number, width = ENTRY.unpack_from(content, at) if at + ENTRY.size <= len(content) else (0, len(content))
        at += ENTRY.size + width
        if at > len(content):
            raise PeerError(f"rank {peer} sent digests that end within a block's")
        yield number, content[at - width : at]


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that is whole. `fingerprint`: hexadecimal, as `engine.fingerprint()` gave it at that step."""

    bytes_read: int
    fingerprint: str


def verify(reader: Reader) -> Verified:
    """Raises `CheckpointDamaged` naming the first thing that is wrong."""
    manifest = reader.manifest
    readers = [reader.at(coordinate) for coordinate in range(manifest.layout.coordinates)]
    digests = dict(
        digest
        for one in readers
        for bucket in one.blocks.buckets
        if one.blocks.part.is_first(bucket.division)
        for digest in _digests_read(one, bucket)
    )
    for one in readers:
        one.check_shared_numbers()
    buffers = [digest_of_buffers(one.buffers()) for one in readers]
    reader.check_heads()
    reader.tensors()
    reader.frozen()
    misses = Misses.from_runs(manifest.blocks, manifest.missed)
    digest = total_of(manifest.step, manifest.blocks, digests, buffers, misses)
    return Verified(sum(one.bytes_read for one in readers), digest)


def _digests_read(reader: Reader, bucket: Bucket) -> Iterator[tuple[int, bytes]]:
    """Number and digests of each block of a bucket."""
    for part in parts_of(bucket, VERIFIED_BYTES):
        window = Window(part, bucket)
        reader.parameters([part], window)
        for stretch, state in reader.states([part]).items():
            yield from digests_of(reader.blocks, stretch, [window.of(stretch), *(state[key] for key in sorted(state))])
