"""The fingerprint: one digest of a job's state that does not depend on world, stage, mirrors, offload or history.

SHA-256 over the step, the layout, per block in order the SHA-256 of its parameters and of each optimizer state tensor
(keys sorted, padding zero), and the persistent buffers by name. Owners digest their blocks; everyone gets all digests,
so that the loss of any member loses none. `shoal verify` computes it of a checkpoint alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.host_memory import tensor_bytes
from shoal.blocks.values import without_gaps
from shoal.core.layout import Layout, Stretch
from shoal.exchange.framing import FramedSend, receive_framed
from shoal.exchange.traffic import DIGESTS
from shoal.group.group import Group
from shoal.training.state import TrainingState, digest_of
from shoal.world import World


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
    for stretch, tensors in state.held.stream(blocks):
        first, _ = state.held_layout.elements(stretch)
        gaps = state.held_layout.buckets[stretch.bucket].gaps
        yield (
            stretch,
            [state.weights.of(stretch), *(without_gaps(tensors[key], first, gaps) for key in sorted(tensors))],
        )


def _digest(part: Tensor, at: int, size: int) -> bytes:
    return hashlib.sha256(tensor_bytes(part if part.dim() == 0 else part[at : at + size])).digest()


def fingerprint(state: TrainingState, world: World) -> str:
    """Hexadecimal. Every member of the world calls it at the same boundary; raises `WorldChanged`."""
    mine = block_digests(state, world.plan.shares[world.rank].owned)
    everyone = dict(mine)
    for number, digest in _exchange(world.group, mine):
        everyone[number] = digest
    return total_of(state.step, state.layout, everyone, state.buffers.committed)


def total_of(step: int, layout: Layout, digests: Mapping[int, bytes], buffers: Mapping[str, Tensor]) -> str:
    """Hexadecimal. `digests`: of every block, as `block_digests` gives them."""
    total = hashlib.sha256(f"step {step}\n".encode())
    total.update(layout.digest())
    for number in range(layout.blocks):
        total.update(digests[number])
    total.update(digest_of(sorted(buffers.items())).encode())
    return total.hexdigest()


def _exchange(group: Group, mine: dict[int, bytes]) -> list[tuple[int, bytes]]:
    numbers = Runs.of(mine)
    head = ",".join(map(str, numbers.encode())).encode()
    content = head + b"\n" + b"".join(mine[number] for number in numbers)
    others = [peer for peer in range(group.size) if peer != group.rank]
    sends = [FramedSend(group, peer, DIGESTS, content) for peer in others]
    found: list[tuple[int, bytes]] = []
    for peer in others:
        text, _, digests = receive_framed(group, peer, DIGESTS).partition(b"\n")
        theirs = Runs.decode([int(n) for n in text.split(b",") if n], 1 << 17)
        width = len(digests) // max(1, len(theirs))
        found += [(number, digests[i * width : (i + 1) * width]) for i, number in enumerate(theirs)]
    for send in sends:
        send.wait()
    return found
