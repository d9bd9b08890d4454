"""How one simulated worker goes through the lanes of a step, and how owners come by their sum, by stage.

Whole gradients (stages 0 and 1): all lanes, then one message to each owner. Gradients on shards (stages 2 and 3):
round by round, a driver of the real core/tree.py; a sum is a set of lanes here, so a lane that is lost, or counted
twice, is seen. After a loss nothing is left of the rounds before. In stage 3 whoever trains a lane first gathers the
parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal.core.tree import NO_LANE, Round, first_rounds, rounds, shard_tree
from shoal_protos.activity import LANES_BEGIN

if TYPE_CHECKING:
    from .training import Training
    from .worker import SimWorker
    from .world import World

Expected = list[tuple[int, Collection["SimWorker"]]]
"""The ranks that send something, and from whom that has come."""


class WholeGradients:
    """See the module's text. `in_flight`: the lane that the script has begun, as far as the controller is told."""

    in_flight = NO_LANE
    place = 0
    """How far it has come, within a step's lanes."""

    def __init__(self, training: Training) -> None:
        self.training = training

    @property
    def world(self) -> World:
        assert self.training.world is not None
        return self.training.world

    def forget(self) -> None:
        """No step is being made."""

    def serve_on(self) -> None:
        """Its script has ended, and others may train on."""

    def begin(self) -> None:
        t = self.training
        lanes = len(self.world.plan.shares[t.rank].lanes)
        seconds = t.simulation.step_seconds * (0.5 + t.worker.chance.random()) if lanes else 0.0
        if lanes:
            t.watch.trains(t.worker, t.parameters, t.step)
        t.code.run(seconds, self._done, t.generation, t.boundary)

    def _done(self, generation: int, boundary: int) -> None:
        t = self.training
        if t.is_over(generation, boundary):
            return
        if self.world.plan.shares[t.rank].lanes:
            if t.simulation.script.strikes(t):
                return
            for owner in self.world.owners:
                t.send(owner, "x", 1)
        t.step_phase = "reduce"
        t.progress()

    def go_on(self) -> bool:
        """An owner finishes the tree when every trainer's partials are in."""
        t = self.training
        if self.world.owned[t.rank] and len(t.got("x")) < len(self.world.trainers):
            return False
        t.reduced()
        return True

    def expected(self) -> Expected:
        """For whom it may wait."""
        return [(trainer, self.training.got("x")) for trainer in self.world.trainers]


class GradientsOnShards(WholeGradients):
    """See the module's text. `go_on` is asked while it waits: for parameters (`gather`), or for a round's lanes."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.forget()

    def forget(self) -> None:
        self.in_flight, self._index = NO_LANE, -1

    @property
    def place(self) -> int:  # type: ignore[override]
        rounds = max(0, 2 * self._index + (self.training.step_phase == "round"))
        return LANES_BEGIN + rounds if rounds else 0

    @property
    def _round(self) -> Round:
        return self._rounds[self._index]

    def begin(self) -> None:
        t, plan = self.training, self.world.plan
        is_first = t.committed_in < t.generation
        self._rounds = first_rounds(plan) if is_first else rounds(plan)
        lanes_begun = plan.recovery.lanes_in_flight if plan.recovery is not None and is_first else ()
        if lanes_begun and lanes_begun[t.rank] not in (NO_LANE, self.in_flight):
            t.watch.violated("a worker is to begin with a lane that it had not begun", t.worker, lanes_begun[t.rank])
        self.forget()
        self._tree = shard_tree(self._rounds, plan.lanes)
        self._copies: list[frozenset[int]] = [frozenset()] * self._tree.copies
        self._next_round()
        t.progress()

    def _next_round(self) -> None:
        t = self.training
        self._index += 1
        if self._index == len(self._rounds):
            self.forget()
            t.reduced()
            return
        self.in_flight = self._round[t.rank]
        if t.sharded:
            self._serve()
        if self.in_flight == NO_LANE:
            t.step_phase = "round"
        elif t.sharded:
            t.step_phase = "gather"
        else:
            self._train(t.parameters)

    # ---- parameters

    def _serve(self) -> None:
        """All that this owner sends in a lane is posted where the lane begins."""
        t = self.training
        for rank, lane in enumerate(self._round):
            shard = self.world.owned[t.rank] - self.world.keeps[rank]
            if lane != NO_LANE and shard:
                t.send(rank, f"g{self._index}", {block: t.blocks[block] for block in shard})

    def serve_on(self) -> None:
        """Its script has ended, and others may train on: they gather what it owns beside that."""
        if self.training.sharded:
            plan = self.world.plan
            self._rounds = first_rounds(plan) if self.training.committed_in < self.training.generation else rounds(plan)
            self._index = 0
            self._serve()
        self.forget()

    def _gather(self) -> bool:
        t = self.training
        gathered = t.got(f"g{self._index}")
        kept = self.world.keeps[t.rank]
        if sum(map(len, gathered.values())) < t.simulation.blocks - len(kept):
            return False
        parameters = {block: t.blocks[block] for block in kept}
        for shard in gathered.values():
            parameters.update(shard)
        self._train(parameters)
        return True

    # ---- a lane

    def _train(self, parameters: dict[int, int]) -> None:
        t = self.training
        t.watch.trains(t.worker, parameters, t.step)
        t.step_phase = ""
        seconds = t.simulation.step_seconds * (0.5 + t.worker.chance.random())
        lanes = len(self.world.plan.shares[t.rank].lanes)
        t.code.run(seconds / lanes, self._lane_done, t.generation, t.boundary, self._index)

    def _lane_done(self, generation: int, boundary: int, index: int) -> None:
        t = self.training
        if t.is_over(generation, boundary) or index != self._index:
            return
        is_last = all(one[t.rank] == NO_LANE for one in self._rounds[index + 1 :])
        if is_last and t.simulation.script.strikes(t):
            return
        for owner in self.world.owners:
            t.send(owner, f"x{index}", self.in_flight)
        t.step_phase = "round"
        t.progress()

    # ---- the sum

    def go_on(self) -> bool:
        t = self.training
        if t.step_phase == "gather":
            return self._gather()
        if self.world.owned[t.rank] and not self._add_up():
            return False
        self._next_round()
        return True

    def _add_up(self) -> bool:
        """Whether all lanes of the round are in, and are added up."""
        t, members = self.training, len(self._round)
        arrived = t.got(f"x{self._index}")
        parts: list[frozenset[int]] = []
        for rank, lane in enumerate(self._round):
            peer = t.peer(rank)
            if lane != NO_LANE and peer not in arrived:
                return False
            if lane != NO_LANE and arrived[peer] != lane:
                t.watch.violated("an owner takes a lane for another", t.worker, lane, "from", peer, arrived[peer])
            parts.append(frozenset((lane,)) - {NO_LANE})
        parts += self._copies
        of_round = self._tree.rounds[self._index]
        for into, other in of_round.additions:
            if parts[into] & parts[other]:
                t.watch.violated("a lane is counted twice", t.worker, sorted(parts[into] & parts[other]))
            parts[into] |= parts[other]
        for part, copy in of_round.pushes:
            parts[copy] = parts[part]
        self._copies = parts[members:]
        if self._index == len(self._rounds) - 1 and parts[self._tree.root] != set(range(self.world.plan.lanes)):
            t.watch.violated("a step lacks lanes", t.worker, "has", sorted(parts[self._tree.root]))
        return True

    def expected(self) -> Expected:
        t, world = self.training, self.world
        if t.step_phase == "gather":
            owners = [owner for owner in world.owners if world.owned[owner] - world.keeps[t.rank]]
            return [(owner, t.got(f"g{self._index}")) for owner in owners]
        trainers = [rank for rank, lane in enumerate(self._round) if lane != NO_LANE and world.owned[t.rank]]
        return [(trainer, t.got(f"x{self._index}")) for trainer in trainers]
