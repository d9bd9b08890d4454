"""How lanes' values of a buffer become one, against a ring that is written lane after lane; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from shoal.exchange.buffer_joins import DeclaredJoins, Join, LaneRows, join_rows, written_rows
from shoal_protos.errors import UserError
from torch import Tensor

BUFFERS = {
    "queue": torch.zeros(6, 2),
    "at": torch.zeros((), dtype=torch.long),
    "pair": torch.zeros(2, dtype=torch.long),
    "is_full": torch.zeros((), dtype=torch.bool),
    "mean": torch.zeros(3),
    "phase": torch.zeros(3, dtype=torch.complex64),
}


def written(ring: Tensor, at: int, rows: Tensor) -> Tensor:
    """A ring after so many rows were written from `at` on, one by one."""
    ring = ring.clone()
    for place, row in enumerate(rows):
        ring[(at + place) % len(ring)] = row
    return ring


@given(st.integers(2, 9), st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(0, 8), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_lanes_that_write_a_ring_come_to_what_one_process_comes_to(
    length: int, counts: list[int], at: int, is_turned: bool
) -> None:
    """Every lane begins with the step's ring, and with its pointer."""
    before, at, number = torch.zeros(length, 2), at % length, 0
    expected, end, lanes = before, at, list[LaneRows]()
    join = Join("writes", dim=int(is_turned))
    turned = before.T.contiguous() if is_turned else before
    for count in (min(one, length - 1) for one in counts):
        rows = torch.arange(number + 1.0, number + 1 + 2 * count).view(count, 2)
        own = written(before, at, rows)
        lanes.append(written_rows(join, turned, own.T.contiguous() if is_turned else own, None))
        expected, end, number = written(expected, end, rows), end + count, number + 2 * count
    joined = join_rows(join, turned, lanes)
    assert (joined.T if is_turned else joined).tolist() == expected.tolist()


def test_rows_that_get_the_value_that_they_had_are_known_by_the_pointer() -> None:
    """Labels: lane 1 writes 5 over 5, and lane 2 is none the less moved on by it."""
    before = torch.tensor([5, 5, 0, 0, 0])
    join = Join("writes", pointer="at")
    lanes = [
        written_rows(join, before, torch.tensor([5, 5, 0, 0, 0]), (0, 2)),
        written_rows(join, before, torch.tensor([7, 5, 0, 0, 0]), (0, 1)),
    ]
    assert join_rows(join, before, lanes).tolist() == [5, 5, 7, 0, 0]


def test_a_pointer_may_count_on_past_the_end_of_the_ring() -> None:
    before, after = torch.tensor([1, 2, 3]), torch.tensor([9, 2, 8])
    rows = written_rows(Join("writes", pointer="at"), before, after, (5, 2))
    assert rows.at.tolist() == [2, 0] and rows.values.flatten().tolist() == [8, 9]


def test_rows_of_a_table_stay_where_they_are_and_the_later_lane_has_the_last_word() -> None:
    before, join = torch.zeros(4), Join("rows")
    each = [torch.tensor([1.0, 0, 3, 0]), torch.tensor([0.0, 0, 4, 5])]
    joined = join_rows(join, before, [written_rows(join, before, after, None) for after in each])
    assert joined.tolist() == [1, 0, 4, 5]


def test_a_row_that_is_not_a_number_is_not_written_for_that() -> None:
    before = torch.tensor([[float("nan")], [1.0], [2.0]])
    after = before.clone()
    after[1] = 7
    assert written_rows(Join("writes"), before, after, None).at.tolist() == [1]


@pytest.mark.parametrize(
    ("after", "stretch", "found"),
    [
        ([1, 1, 1, 1], None, "changed all 4 rows, or more rows than there are"),
        ([1, 0, 1, 0], None, "changed row 0 and row 2, and not all between"),
        ([1, 0, 0, 1], (0, 1), "changed row 3, and its pointer tells of 1 rows from 0 on"),
        ([1, 1, 1, 1], (2, 6), "wrote 6 rows by the pointer, of 4"),
        ([1, 0, 0, 0], (0, -1), "wrote -1 rows by the pointer, of 4"),
    ],
)
def test_rows_that_are_no_part_of_a_ring_are_refused(after: list[int], stretch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        written_rows(Join("writes"), torch.zeros(4), torch.tensor(after).float(), stretch)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9), st.integers(1, 7), st.integers(0, 30))
def test_a_sum_is_counted_modulo_its_number_as_one_process_counts(added: list[int], modulo: int, start: int) -> None:
    join, before = Join("sum", modulo=modulo), torch.tensor(start % modulo)
    leaves = [join.leaf(torch.tensor((start + each) % modulo), before) for each in added]
    assert int(join.finish(torch.stack(leaves).sum(), before, len(added))) == (start + sum(added)) % modulo


@pytest.mark.parametrize(
    ("name", "join", "sentence"),
    [
        ("que", Join("writes"), r"engine\.buffer got 'que', and the module has no persistent buffer .* \"queue\"\?"),
        (7, Join("sum"), r"engine\.buffer got 7, and the module has no persistent buffer of that name; expected"),
        ("own", Join("mean"), r'"own", which was registered with persistent=False'),
        ("queue", Join("last"), r"join='last'; expected one of \"writes\", \"rows\", \"sum\", \"mean\", \"lane0\"\."),
        ("queue", Join(None), r"join=None; expected one of"),  # type: ignore[arg-type]
        ("at", Join("writes"), r'"at" is declared with join="writes" and has no dimension'),
        ("queue", Join("writes", modulo=6), r'join="writes" and modulo=6; expected a whole number .* join="sum"'),
        ("at", Join("sum", modulo=0), r"modulo=0; expected a whole number of at least 1"),
        ("at", Join("sum", modulo=True), r"modulo=True; expected a whole number of at least 1"),
        ("mean", Join("sum", modulo=6), r"torch\.float32 .* modulo=6; expected .* for a buffer of whole numbers"),
        ("is_full", Join("sum"), r"torch\.bool, which cannot be summed"),
        ("phase", Join("sum"), r"torch\.complex64, which cannot be summed"),
        ("at", Join("mean"), r"torch\.int64; expected floating point"),
        ("queue", Join("writes", dim=2), r"shape \(6, 2\) .* dim=2; dim goes with"),
        ("queue", Join("sum", dim=1), r"dim=1; dim goes with"),
        ("queue", Join("rows", pointer="at"), r'pointer and join="rows"; it goes with "writes"'),
        ("queue", Join("writes", pointer="pair"), r"pointer='pair'; expected the name of a buffer of one whole number"),
        ("queue", Join("writes", pointer="at"), r"pointer='at'; expected .* declared with join=\"sum\" before"),
    ],
)
def test_a_declaration_that_cannot_be_carried_out_is_refused_in_a_sentence(
    name: Any, join: Join, sentence: str
) -> None:
    joins = DeclaredJoins(BUFFERS, ["own"])
    joins.declare("pair", Join("sum"))
    with pytest.raises(UserError, match=sentence):
        joins.declare(name, join)
    assert joins.texts == {"pair": "sum"}


def test_a_buffer_is_declared_in_one_way_as_often_as_one_likes() -> None:
    joins = DeclaredJoins(BUFFERS)
    for _ in range(2):
        joins.declare("at", Join("sum", modulo=6))
        joins.declare("queue", Join("writes", pointer="at"))
    with pytest.raises(UserError, match=r'"at" is declared in two ways: sum, modulo 6, and then lane0\. Declare it'):
        joins.declare("at", Join("lane0"))
    assert joins.texts == {"at": "sum, modulo 6", "queue": 'writes, pointer "at"'}


def test_a_pointer_is_counted_modulo_the_length_of_its_ring() -> None:
    joins = DeclaredJoins(BUFFERS)
    joins.declare("at", Join("sum", modulo=5))
    with pytest.raises(UserError, match=r'"queue" has 6 rows, and its pointer "at" is counted modulo 5; .* modulo=6'):
        joins.declare("queue", Join("writes", pointer="at"))


def test_a_pointer_is_of_the_same_stage_of_a_pipeline() -> None:
    joins = DeclaredJoins(BUFFERS, elsewhere=[{"1.at": torch.zeros((), dtype=torch.long)}])
    joins.declare("1.at", Join("sum"))
    with pytest.raises(UserError, match=r'declared with pointer="1\.at", which another process of a pipeline has'):
        joins.declare("queue", Join("writes", pointer="1.at"))
