"""Block runs against their dumb twin, a Python set; and what a canonical encoding is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs, every, in_two, union

MOST = 40
SPANS = st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)), max_size=8)
SETS = st.frozensets(st.integers(0, MOST - 1))


def as_set(spans: list[tuple[int, int]]) -> set[int]:
    return {block for start, stop in spans for block in range(start, stop)}


def is_canonical(runs: Runs) -> bool:
    """Ascending, none empty, none touching the next."""
    edges = [edge for span in runs.spans for edge in span]
    return edges == sorted(set(edges))


@given(SPANS)
def test_any_spans_become_the_canonical_runs_of_their_blocks(spans: list[tuple[int, int]]) -> None:
    runs = Runs(spans)
    assert (set(runs), is_canonical(runs)) == (as_set(spans), True)
    assert list(runs) == sorted(as_set(spans))
    assert (len(runs), bool(runs)) == (len(as_set(spans)), bool(as_set(spans)))


@given(SETS, SETS)
def test_runs_are_a_set(one: frozenset[int], other: frozenset[int]) -> None:
    a, b = Runs.of(one), Runs.of(other)
    assert set(a | b) == one | other
    assert set(a & b) == one & other
    assert set(a - b) == one - other
    assert (a <= b) == (one <= other)
    assert (a == b, hash(a) == hash(b) or one != other) == (one == other, True)
    assert all(is_canonical(runs) for runs in (a, b, a | b, a & b, a - b))


@given(st.lists(SETS, max_size=5))
def test_a_union_of_many_is_that_of_their_sets(parts: list[frozenset[int]]) -> None:
    assert set(union(Runs.of(part) for part in parts)) == set().union(*parts)


@given(st.lists(SETS, max_size=5))
def test_what_is_in_two_of_many_is_counted_as_in_their_sets(parts: list[frozenset[int]]) -> None:
    counts = Counter(block for part in parts for block in part)
    runs = in_two(Runs.of(part) for part in parts)
    assert (set(runs), is_canonical(runs)) == ({block for block, count in counts.items() if count > 1}, True)


@given(SETS, st.integers(-3, MOST + 3))
def test_membership_is_that_of_the_set(blocks: frozenset[int], block: int) -> None:
    assert (block in Runs.of(blocks)) == (block in blocks)


@given(SETS, st.integers(-2, MOST + 2))
def test_the_first_few_blocks_are_the_lowest(blocks: frozenset[int], count: int) -> None:
    assert list(Runs.of(blocks).first(count)) == sorted(blocks)[: max(0, count)]


@given(SETS)
def test_what_is_encoded_is_decoded(blocks: frozenset[int]) -> None:
    runs = Runs.of(blocks)
    assert Runs.decode(runs.encode(), limit=MOST) == runs


@given(st.lists(st.integers(-2, 20), max_size=8))
def test_whatever_is_decoded_is_the_only_encoding_of_its_blocks(lengths: list[int]) -> None:
    try:
        runs = Runs.decode(lengths, limit=MOST)
    except UserError:
        return
    assert runs.encode() == lengths
    assert runs <= every(MOST)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([1], "block runs have 1 numbers; expected pairs of gap and length"),
        ([0, 0], "block runs hold gap 0 and length 0; runs must be positive and apart"),
        ([-1, 2], "block runs hold gap -1 and length 2; runs must be positive and apart"),
        ([0, 2, 0, 1], "block runs hold gap 0 and length 1; runs must be positive and apart"),
        ([38, 3], "block runs reach block 40; the job has 40 blocks (0 to 39)"),
    ],
)
def test_another_encoding_is_refused_with_a_sentence(lengths: list[int], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Runs.decode(lengths, limit=MOST)
    assert str(refusal.value) == sentence


def test_a_negative_block_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="a block number is -1; block numbers start at 0"):
        Runs([(-1, 2)])


def test_runs_are_written_like_pages_to_print() -> None:
    assert repr(Runs([(0, 1), (3, 6)])) == "Runs(0, 3-5)"
    assert repr(NO_BLOCKS) == "Runs()"


def test_what_is_no_block_number_is_in_no_runs() -> None:
    assert "3" not in every(5)
