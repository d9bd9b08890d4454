"""A plan, spelled out once for all members: who sends which blocks to whom at which boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from shoal_protos.plan import Plan, check_plan
from shoal_protos.runs import Runs

Blocks = frozenset[int]


class World:
    """See the module's text. Ranks and block sets as plain Python, because thousands of seeds pass through here."""

    def __init__(self, plan: Plan, models: Sequence[Runs]) -> None:
        check_plan(plan)
        self.plan = plan
        self._models = models
        self.size = plan.world_size
        self.owned = [frozenset(share.owned) for share in plan.shares]
        self.keeps = [frozenset(share.keeps) for share in plan.shares]
        self.owners = [rank for rank in range(self.size) if self.owned[rank]]
        self.trainers = [rank for rank in range(self.size) if plan.shares[rank].lanes]
        self.coordinates = [member.coordinate for member in plan.members]
        self._mates = {rank: [mate for mate in cell if mate != rank] for cell in plan.cells for rank in cell}
        self.slices = [self._slice(index) for index in range(plan.boundaries)]
        self._replays: dict[tuple[int, int], Blocks] = {}
        self._parts: dict[tuple[int, int, int], tuple[Blocks, Blocks]] = {}

    def _slice(self, index: int) -> list[tuple[int, int, Blocks]]:
        """One message from a source to a target."""
        sent: dict[tuple[int, int], Blocks] = {}
        for fill in self.plan.fill_slice(index):
            pair = fill.source, fill.target
            sent[pair] = sent.get(pair, frozenset()) | frozenset(fill.blocks)
        return [(source, target, blocks) for (source, target), blocks in sent.items()]

    def mates(self, rank: int) -> list[int]:
        """The other members of its cell."""
        return self._mates.get(rank, [])

    def beside(self, rank: int, ranks: Iterable[int]) -> list[int]:
        """Those of these members that are at its coordinate: they exchange gradients, and what they keep."""
        return [other for other in ranks if self.coordinates[other] == self.coordinates[rank]]

    def model(self, rank: int) -> Blocks:
        """The blocks whose parameters it has."""
        models = self._models
        return frozenset(models[self.coordinates[rank]]) if models else frozenset(range(self.plan.blocks))

    def fills(self, index: int) -> list[tuple[int, int, Blocks]]:
        return self.slices[index] if index < len(self.slices) else []

    def replays(self, rank: int, boundary: int) -> Blocks:
        """The blocks that a member updates itself at that boundary."""
        key = rank, min(boundary, len(self.slices))
        if key not in self._replays:
            self._replays[key] = frozenset(self.plan.replays(*key))
        return self._replays[key]

    def parts(self, owner: int, to: int, boundary: int) -> tuple[Blocks, Blocks]:
        """What an owner sends: gradients of blocks that the other replays, parameters of those that it does not."""
        key = owner, to, min(boundary, len(self.slices))
        if key not in self._parts:
            replayed, handed = self.replays(to, boundary), self.owned[owner] & self.model(to)
            self._parts[key] = handed & replayed, handed - replayed
        return self._parts[key]

    def handed_to(self, owner: int, joiner: int) -> Blocks:
        """The blocks whose parameters an owner hands out to a joiner where its first world begins."""
        return self.owned[owner] & self.model(joiner)

    def gathered(self, owner: int, trainer: int) -> Blocks:
        """The blocks whose parameters an owner sends to a member that trains, where that does not keep them."""
        return (self.owned[owner] & self.model(trainer)) - self.keeps[trainer]


@cache
def runs_of(blocks: Blocks) -> Runs:
    return Runs.of(blocks)


class Worlds:
    """The worlds of one simulation, by their plans' numbers."""

    def __init__(self, models: Sequence[Runs]) -> None:
        """`models`: by coordinate, the blocks whose parameters a process has; empty: all."""
        self._models = models
        self._worlds: dict[int, World] = {}

    def of(self, plan: Plan) -> World:
        known = self._worlds.get(plan.generation)
        if known is None:
            known = self._worlds[plan.generation] = World(plan, self._models)
        return known

    def forget(self, generation: int) -> None:
        """Its number is given again."""
        self._worlds.pop(generation, None)

    def forget_after(self, generation: int) -> None:
        """Their numbers are given again."""
        self._worlds = {number: world for number, world in self._worlds.items() if number <= generation}
