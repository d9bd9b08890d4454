"""The plan before, as the workers who are here now see it: what the next plan keeps of it.

Called by planner.py; workers are its indexes, oldest first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal_protos.plan import Member, Plan
from shoal_protos.runs import NO_BLOCKS, Runs, union

from shoal_controller.core.planning.mirrors import Partners


class Before:
    """`plan` is None where a world is planned that follows none."""

    def __init__(self, plan: Plan | None, here: Sequence[Member]) -> None:
        now = {(member.worker, member.incarnation): worker for worker, member in enumerate(here)}
        self._members = plan.members if plan is not None else ()
        self._shares = plan.shares if plan is not None else ()
        self._fills = plan.fills if plan is not None else ()
        self._cells = plan.cells if plan is not None else ()
        self._at = [now.get((member.worker, member.incarnation)) for member in self._members]
        """By rank, the worker who it is now; None: it is gone."""

    def owned(self, holds: Sequence[Runs]) -> dict[int, Runs]:
        """What each owned, or was to own and has been filled with since. `holds` is by worker."""
        owned: dict[int, Runs] = {}
        arrived: dict[int, Runs] = {}
        for worker, share in zip(self._at, self._shares, strict=True):
            if worker is not None:
                owned[worker] = share.owned
                if share.awaited:
                    arrived[worker] = share.awaited & holds[worker]
        if not arrived:
            return owned
        promoted = union(arrived.values())
        return {worker: (blocks - promoted) | arrived.get(worker, NO_BLOCKS) for worker, blocks in owned.items()}

    def partners(self, coordinate: int, count: int) -> Partners:
        """Those who are still here. Where the plan names none, all at a coordinate were each other's if they were so
        few."""
        ranks = self._ranks_at(coordinate)
        everyone = ranks if len(ranks) - 1 <= count else ()
        partners: dict[int, tuple[int, ...]] = {}
        for rank in ranks:
            if (worker := self._at[rank]) is not None:
                chosen = (self._at[partner] for partner in self._shares[rank].partners or everyone if partner != rank)
                partners[worker] = tuple(partner for partner in chosen if partner is not None)
        return partners

    def is_at_rest(self, coordinate: int, holds: Mapping[int, Runs]) -> bool:
        """Whether those who keep blocks at a coordinate are the same and have all that they were to get. `holds`: of
        those who are to keep blocks.

        Then nothing is moved any more for an even spread of mirrors where the cheapest one was not looked for (several
        mirrors, a large world), so that planning comes to an end.
        """
        given = {rank: self._shares[rank].keeps for rank in self._ranks_at(coordinate)}
        for fill in self._fills:
            if fill.target in given:
                given[fill.target] |= fill.blocks
        keeping = [(self._at[rank], blocks) for rank, blocks in given.items() if blocks]
        return {worker for worker, _ in keeping} == holds.keys() and all(
            worker is not None and blocks <= holds[worker] for worker, blocks in keeping
        )

    def cells(self, trainers: frozenset[int]) -> Iterator[list[int]]:
        """The trainers that are left of each cell, by coordinate."""
        for cell in self._cells:
            yield [worker for rank in cell if (worker := self._at[rank]) is not None and worker in trainers]

    def _ranks_at(self, coordinate: int) -> list[int]:
        return [rank for rank, member in enumerate(self._members) if member.coordinate == coordinate]
