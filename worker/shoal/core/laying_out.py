"""Parameters → layout: which of them share a bucket, in which order, and how many elements a block has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.core.cell_part import DIVISIONS, WHOLE, CellPart
from shoal.core.layout import FROZEN, MOST_BLOCKS, SMALLEST_BLOCK, Bucket, Layout, Slot, Trainable

MOST_FROZEN_BLOCKS = 16_384
BUCKET_BYTES = 8 << 20
ALIGNMENT_BYTES = 64


def lay_out(
    parameters: Sequence[Trainable],
    bucket_bytes: int = BUCKET_BYTES,
    part: CellPart = WHOLE,
    stages: Sequence[Sequence[Trainable]] = (),
) -> Layout:
    """The layout of parameters given in registration order; a bucket is closed once it holds `bucket_bytes`. `stages`:
    of a pipeline the parameters of all stages, those of this one among them.
    """
    drafts = [list(_drafts(one, bucket_bytes)) for one in stages or (parameters,)]
    everywhere = [draft for of_stage in drafts for draft in of_stage]
    others = [one for one in everywhere for _ in range(1, part.pieces(one[0][0].parameter.division))]
    trained = [elements for slots, elements in (*everywhere, *others) if slots[0].parameter.group != FROZEN]
    frozen = [elements for slots, elements in everywhere if slots[0].parameter.group == FROZEN]
    block = _block_elements(trained, SMALLEST_BLOCK, MOST_BLOCKS)
    size_of_frozen = _block_elements(frozen, block, MOST_FROZEN_BLOCKS)
    found = tuple(tuple(_buckets(of_stage, block, size_of_frozen)) for of_stage in drafts)
    return Layout(block, found[part.place if stages else 0], part=part, stages=found if stages else ())


def _buckets(drafts: Sequence[tuple[list[Slot], int]], block: int, block_of_frozen: int) -> Iterator[Bucket]:
    """Of the elements that a block has."""
    for index, (slots, elements) in enumerate(drafts):
        head = slots[0].parameter
        size = block_of_frozen if head.group == FROZEN else block
        blocks = max(1, -(-elements // size))
        yield Bucket(index, head.group, head.dtype, tuple(slots), blocks, blocks * size)


def _block_elements(buckets: Sequence[int], smallest: int, most: int) -> int:
    """So many elements that there are not too many blocks. `buckets`: the elements of each."""
    size = smallest
    while sum(-(-elements // size) for elements in buckets) > most and size < max(buckets):
        size *= 2
    return size


def _order(parameter: Trainable) -> tuple[bool, int, bool, int]:
    """Of buckets: divided ones first, frozen ones last."""
    return parameter.group == FROZEN, DIVISIONS.index(parameter.division), parameter.summed, parameter.group


def _drafts(parameters: Sequence[Trainable], bucket_bytes: int) -> list[tuple[list[Slot], int]]:
    """Slots and elements of every bucket."""
    drafts: list[tuple[list[Slot], int]] = []
    latest: dict[tuple[object, ...], int] = {}
    backwards = parameters[::-1]
    for parameter in sorted(backwards, key=_order):
        kind = (parameter.division, parameter.summed, parameter.tie, parameter.group, parameter.dtype, parameter.unit)
        align = max(1, ALIGNMENT_BYTES // parameter.dtype.itemsize)
        slots, elements = drafts[latest[kind]] if kind in latest else ([], 0)
        start = -(-elements // align) * align
        if not slots or (start + parameter.elements) * parameter.dtype.itemsize > bucket_bytes:
            slots, start = [], 0
            latest[kind] = len(drafts)
            drafts.append((slots, 0))
        slots.append(Slot(parameter, start))
        drafts[latest[kind]] = (slots, start + parameter.elements)
    return drafts
