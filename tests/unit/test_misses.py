"""Missed updates: their run-length code, and how they cut an update. Pure."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, holds, rule
from shoal.core.laying_out import ALIGNMENT_BYTES, lay_out
from shoal.core.layout import Layout, Trainable
from shoal.core.misses import USED_ALWAYS, Missed, Misses, within

MISSED = st.builds(Missed, st.integers(0, 3), st.booleans())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of parameters from less than a cache line to several blocks, in two groups and two units, each bucket half a
    dozen blocks at most.
    """
    drawn = st.tuples(st.integers(1, 20_000) | st.integers(1, 40), st.integers(0, 1), st.integers(0, 1), st.booleans())
    return lay_out(
        [
            Trainable(f"p{number}", (elements,), torch.float64 if is_double else torch.float32, group, unit)
            for number, (elements, group, unit, is_double) in enumerate(draw(st.lists(drawn, min_size=1, max_size=12)))
        ],
        bucket_bytes=200_000,
    )


@st.composite
def updates(draw: st.DrawFn) -> tuple[Layout, Misses, int]:
    """A layout, what was missed before an update, and the parameters that it leaves out, as bits."""
    layout = draw(layouts())
    count = len(layout.groups)
    return (
        layout,
        Misses(tuple(draw(st.lists(MISSED, min_size=count, max_size=count)))),
        draw(st.integers(0, (1 << count) - 1)),
    )


@given(update=updates())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_coded_is_read_again(update: tuple[Layout, Misses, int]) -> None:
    layout, misses, _ = update
    runs = misses.runs()
    assert Misses.from_runs(layout, runs) == misses
    assert len(runs) <= len(layout.groups)
    assert runs == () or len(runs) == len([*groupby(misses.of)])


@pytest.mark.parametrize(
    "runs",
    [
        [(1, 0, False)],
        [(2, -1, False)],
        [(0, 1, False), (2, 1, False)],
        [(3, 1, False)],
        [(2, 1, False), (1, 0, False)],
    ],
)
def test_runs_of_other_parameters_are_refused(runs: list[tuple[int, int, bool]]) -> None:
    layout = lay_out([Trainable("a", (3,), torch.float32, 0), Trainable("b", (3,), torch.float32, 0)])
    with pytest.raises(ValueError, match="parameters"):
        Misses.from_runs(layout, runs)


@rule(
    "An update is cut where parameters differ in what they have missed: at multiples of 64 bytes, and within a block "
    "wherever a world may cut, so that every element has the same bits in every world",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.core.misses",
            "        borders = [start, first_whole, last_whole, stop] if",
            "        borders = [start, stop] if",
        ),
        Edit(
            "shoal.core.misses",
            "        for begin, end in pairwise(borders):",
            "        for begin, end in pairwise(borders[:2]):",
        ),
    ],
)
@given(update=updates())
@settings(max_examples=examples(150), deadline=None)
def test_pieces_cover_all_that_is_used_and_nothing_else(update: tuple[Layout, Misses, int]) -> None:
    layout, misses, unused = update
    cuts, number = misses.cuts(layout, unused), 0
    for bucket in layout.buckets:
        pieces = cuts.get(bucket.index)
        for slot in bucket.slots:
            first, stop = slot.start, slot.start + slot.parameter.elements
            found = misses.of[number]
            if pieces is not None:
                covered = [
                    (max(p.start, first), min(p.stop, stop), p.missed)
                    for p in pieces
                    if p.start < stop and first < p.stop
                ]
                if unused >> number & 1:
                    assert covered == []
                else:
                    assert covered[0][0] == first and covered[-1][1] == stop
                    assert all(one[1] == other[0] for one, other in pairwise(covered))
                    assert {missed for _, _, missed in covered} == {found if found.updates else USED_ALWAYS}
            else:
                assert not unused >> number & 1 and not found.updates
            number += 1
        for piece in pieces or ():
            size, width = bucket.block_elements, ALIGNMENT_BYTES // bucket.dtype.itemsize
            assert piece.start % width == piece.stop % width == 0
            if piece.start // size != (piece.stop - 1) // size:  # a world may cut it
                assert piece.start % size == piece.stop % size == 0


@holds("An update is cut where")
@given(update=updates(), data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_world_that_cuts_a_bucket_takes_the_same_pieces(
    update: tuple[Layout, Misses, int], data: st.DataObject
) -> None:
    """But for whole blocks of one piece, which it may take apart."""
    layout, misses, unused = update
    for index, pieces in misses.cuts(layout, unused).items():
        bucket = layout.buckets[index]
        cut = data.draw(st.integers(0, bucket.blocks)) * bucket.block_elements
        found = [
            (start + first, start + last, missed)
            for start, stop in ((0, cut), (cut, bucket.elements))
            for (first, last), missed in within(pieces, start, stop)
        ]
        assert [(a, b) for a, b, _ in found] == [
            span
            for p in pieces
            for span in ([(p.start, cut), (cut, p.stop)] if p.start < cut < p.stop else [(p.start, p.stop)])
        ]


def test_where_all_have_missed_equally_often_no_bucket_is_cut_within_a_block() -> None:
    layout = lay_out([Trainable(f"p{one}", (5_000,), torch.float32, 0) for one in range(4)])
    assert Misses((USED_ALWAYS,) * 4).cuts(layout, 0) == {}
    (pieces,) = Misses((Missed(2),) * 4).cuts(layout, 0).values()
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, layout.buckets[0].elements)]


def test_an_update_of_another_group_is_none_that_a_parameter_misses() -> None:
    layout = lay_out([Trainable("a", (3,), torch.float32, 0), Trainable("b", (3,), torch.float32, 1)])
    misses = Misses((Missed(is_new=True),) * 2).after(layout, 0b11, [True, False])
    assert misses.of == (Missed(1, is_new=True), Missed(0, is_new=True))
    assert misses.after(layout, 0, [True, True]).of == (Missed(1), USED_ALWAYS)
    assert Misses((USED_ALWAYS,) * 2).after(layout, 0b10, [True, True]).of == (USED_ALWAYS, Missed(1))
