"""What this member's lanes have made of the step's buffers, until the step's exchange joins it with the others'.

`LaneResults` is given each lane's buffers by module_buffers.py, and is read by buffer_exchange.py. `LaneDifferences`
looks, in buffers that nobody declared and no norm layer owns, whether lanes differ, and says so once: the mean of a
queue is none. Each member looks at its last lane alone and compares it with what the lanes came to; what the others
find the first of them is shown by their next flags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.core.tree import push
from shoal.exchange.buffer_joins import DeclaredJoins, LaneRows, have_same_bits, undeclared, written_rows

log = get_logger("shoal")


@dataclass(frozen=True, slots=True)
class LaneSum:
    """Sums of a subtree of lanes: of the buffers that one of them changed, by name; others' leaves are idle ones."""

    lanes: int
    changed: dict[str, Tensor]  # each of its buffer's shape, in the dtype of the sum

    def of(
        self,
        name: str,
        idle: Tensor,  # of the buffer's shape, in the dtype of the sum: the leaf of a lane that did not change it
    ) -> Tensor:  # the same
        """The sum of one buffer."""
        sum_of_changed = self.changed.get(name)
        return sum_of_changed if sum_of_changed is not None else sum_of_equals(idle, self.lanes)


def sum_of_equals(
    value: Tensor,  # of the buffer's shape, in the dtype of the sum
    count: int,
) -> Tensor:  # the same
    """`count` equal leaves, added in the tree's shape: the left child is the largest power of two below `count`."""
    if count == 1:
        return value
    left = 1 << (count - 1).bit_length() - 1
    return sum_of_equals(value, left) + sum_of_equals(value, count - left)


class LaneResults:
    """Those of one step. `committed`: the step's buffers, by name."""

    def __init__(
        self,
        committed: Mapping[str, Tensor],  # each of its own shape and dtype
        joins: DeclaredJoins,
        lanes: int,
        norms: Collection[str] = (),
    ) -> None:
        """`lanes`: the job's. `norms`: names of the buffers that norm layers own."""
        self._committed, self.joins, self.lanes = committed, joins, lanes
        self.differences = LaneDifferences(committed.keys() - norms)
        self.clear()

    def clear(self) -> None:
        """Forget what this step's lanes have made."""
        self.changed: set[str] = set()
        self.sums: list[tuple[Span, LaneSum]] = []
        """By whole subtree of this member's lanes."""
        self.lane_0: dict[str, Tensor] = {}
        """What lane 0 has made of buffers that are joined so."""
        self.rows: dict[str, dict[int, LaneRows]] = {}
        """Of buffers that are joined by rows, by lane."""
        self.differences.clear()

    def sum_dtype(self, name: str) -> torch.dtype | None:
        """In which a buffer's leaves are added up; None where it has none."""
        return self.joins[name].sum_dtype(self._committed[name].dtype)

    def wide(self, name: str) -> Tensor:  # of the buffer's shape, in the dtype of the sum
        """The step's value of a buffer that has leaves."""
        dtype = self.sum_dtype(name)
        assert dtype is not None
        return self._committed[name].to(dtype)

    def idle_leaf(self, name: str) -> Tensor:  # of the buffer's shape, in the dtype of the sum
        """That of a lane that did not change it."""
        return self.joins[name].idle_leaf(self.wide(name))

    def add(
        self,
        lane: int,
        now: Mapping[str, Tensor],  # each of its own shape and dtype
        changed: Collection[str],
    ) -> None:
        """A lane is done. Raises `UserError` for rows that cannot be joined."""
        for name, join in self.joins.declared.items():
            if name in changed or join.pointer in changed:
                self._add_rows(lane, name, now)
        self.changed.update(changed)
        leaves = {name: self.joins[name].leaf(now[name], self.wide(name)) for name in changed if self.sum_dtype(name)}
        push(self.sums, lane, LaneSum(1, leaves), self.lanes, self._add)
        if lane == 0:
            self.lane_0 = {name: now[name].clone() for name in changed if self.joins[name].kind == "lane0"}
        self.differences.look(now, changed, self.joins.declared)

    def _add(self, kept: LaneSum, new: LaneSum) -> LaneSum:
        idle = {name: self.idle_leaf(name) for name in kept.changed.keys() | new.changed.keys()}
        sums = {name: kept.of(name, leaf) + new.of(name, leaf) for name, leaf in idle.items()}
        return LaneSum(kept.lanes + new.lanes, sums)

    def _add_rows(
        self,
        lane: int,
        name: str,
        now: Mapping[str, Tensor],  # each of its own shape and dtype
    ) -> None:
        join, before = self.joins[name], self._committed[name]
        stretch = None
        if join.pointer is not None:
            first, last = int(self._committed[join.pointer]), int(now[join.pointer])
            modulo = self.joins[join.pointer].modulo
            stretch = first, (last - first) % modulo if modulo is not None else last - first
        elif join.kind not in ("rows", "writes"):
            return
        try:
            rows = written_rows(join, before, now[name], stretch)
        except ValueError as found:
            raise UserError(
                f'lane {lane} {found}, in buffer "{name}", which is declared with join="writes": one part of a ring. '
                'Rows that are written where they belong are joined by "rows"; a row that gets the bits that it had '
                "is known by a pointer alone (docs/batchnorm.md)."
            ) from None
        if len(rows.at):
            self.rows.setdefault(name, {})[lane] = rows
            self.changed.add(name)


class LaneDifferences:
    """Where lanes differ in a buffer of which nobody has declared how they are joined."""

    def __init__(self, watched: Collection[str]) -> None:
        self._watched = set(watched)
        self.found: set[str] = set()
        """Names that are to be shown."""
        self.clear()

    def clear(self) -> None:
        """The step's lanes begin anew."""
        self._last: dict[str, Tensor] | None = None

    def look(
        self,
        now: Mapping[str, Tensor],  # each of its own shape and dtype
        changed: Collection[str],
        declared: Collection[str],
    ) -> None:
        """A lane is done here."""
        self._watched.difference_update(declared)
        self._last = {name: now[name].clone() for name in changed if name in self._watched}

    def compare(
        self,
        joined: Mapping[str, Tensor],  # each of its own shape and dtype: the new values of buffers that changed
        before: Mapping[str, Tensor],  # each of its own shape and dtype: the step's
        lanes: int,
    ) -> None:
        """All lanes are joined: would they have come to this, had all made what this member's last one has?"""
        if self._last is None:
            return
        for name in self._watched & joined.keys():
            mine, join = self._last.get(name, before[name]), undeclared(before[name])
            dtype = join.sum_dtype(mine.dtype)
            if dtype is not None:
                mine = join.finish(sum_of_equals(mine.to(dtype), lanes), mine.to(dtype), lanes).to(mine.dtype)
            if not have_same_bits(mine, joined[name]):
                self.found.add(name)

    def show(self, names: Collection[str], is_first: bool) -> None:
        """`names`: what some member has found. The first member says it, and all look there no more."""
        for name in sorted(self._watched.intersection(names)):
            if is_first:
                log.warning(
                    "lanes_differ_in_a_buffer", buffer=name,
                    means="it is the mean over lanes, or lane 0's value where it is not floating point: right for a "
                    "statistic, wrong for a queue, a table or a count",
                    do=f'engine.buffer("{name}", join=…) before the loop says how lanes are joined, "mean" and "lane0" '
                    "as now",
                )  # fmt: skip
        self._watched.difference_update(names)
        self.found.clear()
