"""How members join the buffers of a step: what each one's lanes have made of them becomes one value, alike on all.

First all tell which buffers they have changed. Where any member has declared how a buffer is joined, all compare what
they have declared, once in a world, before a message depends on it. Sums of subtrees of lanes then go to all, lane 0's
values from the member that trained it, and written rows from each that wrote some; a job that declares nothing sends
neither numbers of rows nor rows. In a cell each coordinate has buffers of its own, joined by the members there. What
all members gather is equally long at every coordinate, though a stage of a pipeline may have fewer buffers.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from shoal_protos.errors import JobFailed
from shoal_protos.plan import Plan
from torch import Tensor

from shoal.core.tree import fold
from shoal.exchange.buffer_joins import NOT_DECLARED, OF_ROWS, LaneRows, join_rows
from shoal.exchange.lane_results import LaneResults
from shoal.exchange.packing import as_bytes_tensor, contents_of
from shoal.exchange.traffic import BUFFERS, Traffic
from shoal.group.group import Group, Work

CHANGED, DIFFERS, DECLARED, WRITTEN = 1, 2, 4, 8
"""Flags of one buffer."""
Joined = dict[str, Tensor]
"""New values by name, each of its buffer's shape and dtype."""


class BufferExchange:
    """The exchange of one member. `committed`: the step's buffers by name, in the same order on all members."""

    def __init__(
        self,
        committed: Mapping[str, Tensor],  # each of its own shape and dtype
        results: LaneResults,
        most: int,
    ) -> None:
        """`most`: how many buffers a member has at most, at any coordinate."""
        self._committed, self._results, self._most = committed, results, most
        self._agreed: Group | None = None
        """The one in which all have declared the same."""

    def join(self, group: Group, traffic: Traffic) -> Joined:
        """The new values of the buffers that some lane has changed. Raises `JobFailed` naming a member that has
        declared otherwise, and `WorldChanged`.
        """
        flags = self._flags_of_all(group, traffic)
        changed, written = self._changed_anywhere(group, traffic, flags), _most_written(flags, traffic.plan)
        results, joined = self._results, Joined()
        for dtype in (torch.float32, torch.float64, torch.int64):
            names = [name for name in changed if results.sum_dtype(name) is dtype]
            if names:
                joined |= self._add_up(group, traffic, names)
        joined |= self._copy_lane_0(group, traffic, self._of_kind(changed, "lane0"))
        if written:
            joined |= self._write_rows(group, traffic, self._of_kind(changed, *OF_ROWS), written)
        results.differences.compare(joined, self._committed, results.lanes)
        if self._is_first(group, traffic):
            results.differences.show(set(results.differences.found), is_first=True)
        return joined

    def _of_kind(self, names: Sequence[str], *kinds: str) -> list[str]:
        return [name for name in names if self._results.joins[name].kind in kinds]

    @staticmethod
    def _is_first(group: Group, traffic: Traffic) -> bool:
        return group.rank == min(traffic.coordinates.mates)

    def _flags_of_all(self, group: Group, traffic: Traffic) -> Tensor:  # (members, most) uint8
        """By rank, in the order of its buffers. Raises as `join` does."""
        results = self._results
        flags = [
            CHANGED * (name in results.changed)
            + DIFFERS * (name in results.differences.found)
            + DECLARED * (name in results.joins.declared)
            + WRITTEN * (name in results.changed and results.joins[name].kind in OF_ROWS)
            for name in self._committed
        ]
        padding = [0] * (self._most - len(flags))
        rows = group.all_gather(torch.tensor(flags + padding, dtype=torch.uint8, device="cpu"))
        if any((rows & DECLARED).amax(dim=0).tolist()) and self._agreed is not group:
            _agree(group, traffic.plan, results.joins.texts)
            self._agreed = group
        return rows

    def _changed_anywhere(
        self,
        group: Group,
        traffic: Traffic,
        rows: Tensor,  # (members, most) uint8
    ) -> list[str]:
        """In the order of the buffers. `rows`: the flags of all."""
        results, names = self._results, list(self._committed)
        mates = rows[list(traffic.coordinates.mates)][:, : len(names)]
        changed, differs = ((mates & flag).amax(dim=0).tolist() for flag in (CHANGED, DIFFERS))
        found = {name for name, flag in zip(names, differs, strict=True) if flag}
        if found:
            results.differences.show(found, self._is_first(group, traffic))
        return [name for name, flag in zip(names, changed, strict=True) if flag]

    def _add_up(self, group: Group, traffic: Traffic, names: Sequence[str]) -> Joined:
        """Buffers whose leaves are added up in one dtype."""
        results = self._results
        dtype = results.sum_dtype(names[0])
        spans = [(span, rank) for rank in range(group.size) for span in traffic.lane_spans[rank]]
        length = sum(self._committed[name].numel() for name in names)
        idle = {name: results.idle_leaf(name) for name in names}
        rows = [torch.cat([sums.of(n, idle[n]).reshape(-1) for n in names]) for _, sums in results.sums]
        device = idle[names[0]].device
        mine = torch.stack(rows or [torch.empty(0, dtype=dtype, device=device)])  # (own subtrees, elements of all)
        received, works = {group.rank: mine}, list[Work]()
        for peer in traffic.other_mates:
            if traffic.lane_spans[peer]:
                received[peer] = torch.empty(len(traffic.lane_spans[peer]), length, dtype=dtype, device=device)
                works.append(group.receive(received[peer], peer, BUFFERS))
            if results.sums:
                works.append(group.send(mine, peer, BUFFERS))
        group.wait(works)
        rows = [row.clone() for rank in range(group.size) if traffic.lane_spans[rank] for row in received[rank]]
        root = 0
        for into, other in fold([span for span, _ in spans], results.lanes):
            rows[into] += rows[other]
            root = into
        joined, at = Joined(), 0
        for name in names:
            old = self._committed[name]
            leaves = rows[root][at : at + old.numel()].view(old.shape)
            joined[name] = results.joins[name].finish(leaves, results.wide(name), results.lanes).to(old.dtype)
            at += old.numel()
        return joined

    def _copy_lane_0(self, group: Group, traffic: Traffic, names: Sequence[str]) -> Joined:
        first = traffic.plan.trainer_of(0, traffic.layout.part.coordinate)
        joined, works = Joined(), list[Work]()
        for name in names:
            if group.rank == first:
                value = self._results.lane_0.get(name, self._committed[name]).contiguous()
                works += [group.send(_as_bytes(value), peer, BUFFERS) for peer in traffic.other_mates]
            else:
                value = torch.empty_like(self._committed[name]).contiguous()
                works.append(group.receive(_as_bytes(value), first, BUFFERS))
            joined[name] = value
        group.wait(works)
        return joined

    def _write_rows(self, group: Group, traffic: Traffic, names: Sequence[str], most: int) -> Joined:
        """First all tell how many rows each of their lanes has written. `most`: of how many buffers a member does at
        most.
        """
        counts, results = self._counts(group, names, most), self._results
        works, coming, kept = list[Work](), list[tuple[str, Mapping[int, int], Tensor]](), list[Tensor]()
        for place, name in enumerate(names):
            if name in results.rows:
                kept.append(_packed(results.rows[name]))
                works += [group.send(kept[-1], peer, BUFFERS) for peer in traffic.other_mates]
            for peer in traffic.other_mates:
                lanes = traffic.plan.lanes_of(peer)
                of_lanes = {lane: int(counts[peer, place, lane]) for lane in lanes if counts[peer, place, lane]}
                if of_lanes:
                    message = self._message(name, sum(of_lanes.values()))
                    works.append(group.receive(message, peer, BUFFERS))
                    coming.append((name, of_lanes, message))
        group.wait(works)
        written = {name: dict(results.rows.get(name, {})) for name in names}
        for name, counted, message in coming:
            written[name] |= _unpacked(message, counted, self._committed[name].dtype)
        return {name: self._joined(name, written[name]) for name in names}

    def _counts(
        self, group: Group, names: Sequence[str], most: int
    ) -> Tensor:  # (members, most, the job's lanes) int64
        """How many rows each lane has written; a member tells of its own."""
        mine = torch.zeros(most, self._results.lanes, dtype=torch.int64, device="cpu")
        for place, name in enumerate(names):
            for lane, rows in self._results.rows.get(name, {}).items():
                mine[place, lane] = len(rows.at)
        return group.all_gather(_as_bytes(mine)).view(torch.int64).view(group.size, *mine.shape)

    def _message(self, name: str, rows: int) -> Tensor:  # (bytes,) uint8
        """What so many rows of a buffer come in."""
        buffer, dim = self._committed[name], self._results.joins[name].dim
        row_bytes = buffer.nbytes // max(1, buffer.shape[dim])
        return torch.empty(rows * (torch.int64.itemsize + row_bytes), dtype=torch.uint8, device=buffer.device)

    def _joined(self, name: str, each: Mapping[int, LaneRows]) -> Tensor:  # of its own shape and dtype
        lanes = [each[lane] for lane in sorted(each)]
        return join_rows(self._results.joins[name], self._committed[name], lanes)


def _most_written(
    rows: Tensor,  # (members, most) uint8: the flags of all
    plan: Plan,
) -> int:
    """How many buffers are joined by rows at the coordinate that has most of them."""
    ranks = defaultdict[int, list[int]](list)
    for rank, member in enumerate(plan.members):
        ranks[member.coordinate].append(rank)
    written = rows & WRITTEN
    return max(sum(map(bool, written[mates].amax(dim=0).tolist())) for mates in ranks.values())


def _packed(written: Mapping[int, LaneRows]) -> Tensor:  # (bytes,) uint8
    """Where all rows are, and then all of them, lane by lane."""
    lanes = [written[lane] for lane in sorted(written)]
    return torch.cat([_as_bytes(lane.at) for lane in lanes] + [_as_bytes(lane.values) for lane in lanes])


def _unpacked(
    message: Tensor,  # (bytes,) uint8
    of_lanes: Mapping[int, int],
    dtype: torch.dtype,
) -> dict[int, LaneRows]:
    """`of_lanes`: how many rows each lane has written."""
    rows = sum(of_lanes.values())
    at = message[: rows * torch.int64.itemsize].view(torch.int64)
    values = message[rows * torch.int64.itemsize :].clone().view(dtype).view(rows, -1)
    counts = [of_lanes[lane] for lane in sorted(of_lanes)]
    parts = zip(sorted(of_lanes), at.split(counts), values.split(counts), strict=True)
    return {lane: LaneRows(places, each) for lane, places, each in parts}


def _as_bytes(
    value: Tensor,  # contiguous, of any shape and dtype
) -> Tensor:  # (bytes,) uint8
    return value.reshape(-1).view(torch.uint8)


def _agree(group: Group, plan: Plan, mine: Mapping[str, str]) -> None:
    """Raises `JobFailed` on all members where two have declared different joins. `mine`: by name of the buffer."""
    content = json.dumps(mine).encode()
    digests = group.all_gather(as_bytes_tensor(hashlib.sha256(content).digest()))
    others = [rank for rank in range(group.size) if not torch.equal(digests[rank], digests[0])]
    if not others:
        return
    first, other = (json.loads(text) for text in contents_of(group, (0, others[0]), content))
    name = min(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    workers = [plan.members[rank].worker for rank in (0, others[0])]
    ways = [one.get(name, NOT_DECLARED) for one in (first, other)]
    raise JobFailed(
        f'worker {workers[1]} joins the lanes of buffer "{name}" by {ways[1]}, worker {workers[0]} by {ways[0]}: '
        "engine.buffer has to declare the same on all workers."
    )
