"""The one fixed tree: whoever holds which lanes, the sum has the same shape, hence the same bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shoal.core.tree import fold, fold_numbers, sibling, subtrees
from shoal_protos.runs import Runs, Span


def written_out(leaves: list[str]) -> str:
    """The dumb twin: the tree as text, level by level."""
    while len(leaves) > 1:
        pairs = [f"({a}+{b})" for a, b in zip(leaves[0::2], leaves[1::2], strict=False)]
        leaves = pairs + leaves[len(leaves) - len(leaves) % 2 :]
    return leaves[0]


def nodes(leaves: int) -> set[Span]:
    level = [(i, i + 1) for i in range(leaves)]
    found = set(level)
    while len(level) > 1:
        pairs = [(a[0], b[1]) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
        found |= set(level)
    return found


splits = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n))


def parts_of(owners: list[int]) -> list[Span]:
    held = [Runs.of(i for i, owner in enumerate(owners) if owner == who) for who in range(6)]
    return [span for runs in held for span in subtrees(runs, len(owners))]


@given(splits)
def test_partial_sums_are_whole_subtrees_and_cover_every_leaf_once(owners: list[int]) -> None:
    spans = parts_of(owners)
    assert set(spans) <= nodes(len(owners))
    assert sorted(leaf for start, stop in spans for leaf in range(start, stop)) == list(range(len(owners)))


@given(splits)
def test_no_two_partial_sums_of_one_holder_could_have_been_added_already(owners: list[int]) -> None:
    for who in set(owners):
        spans = subtrees(Runs.of(i for i, owner in enumerate(owners) if owner == who), len(owners))
        assert not any(sibling(span, len(owners)) in spans for span in spans)


@given(splits, st.randoms(use_true_random=False), st.sets(st.integers(0, 39)))
def test_every_split_of_the_lanes_finishes_the_same_tree(owners: list[int], random, mine: set[int]) -> None:  # type: ignore[no-untyped-def]
    spans = parts_of(owners)
    random.shuffle(spans)
    texts = [written_out([str(leaf) for leaf in range(*span)]) for span in spans]
    ends = list(spans)
    root = 0
    for into, other in fold(spans, len(owners), mine):
        first, second = sorted((into, other), key=lambda index: ends[index])
        texts[into] = f"({texts[first]}+{texts[second]})"
        ends[into] = (ends[first][0], ends[second][1])
        root = into
    assert texts[root] == written_out([str(leaf) for leaf in range(len(owners))])


@given(splits)
def test_a_sum_lands_with_the_preferred_holder_whenever_it_is_added_to_anything(owners: list[int]) -> None:
    spans = parts_of(owners)
    additions = fold(spans, len(owners), [0])
    if additions:
        assert additions[-1][0] == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.data())
def test_numbers_fold_to_the_same_bits_for_every_split(values: list[float], data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
    leaves = [((i, i + 1), value) for i, value in enumerate(values)]

    def partial(start: int, stop: int) -> float:
        return fold_numbers([((i - start, i - start + 1), values[i]) for i in range(start, stop)], stop - start)

    parts = [(span, partial(*span)) for span in parts_of(owners)]
    assert fold_numbers(parts, len(values)) == fold_numbers(leaves, len(values))
