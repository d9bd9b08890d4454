"""How one simulated worker goes through the lanes of a step, and how owners come by their sum, by stage.

Whole gradients (stages 0 and 1): all lanes, then one message to each owner. Gradients on shards (stages 2 and 3):
round by round, a driver of the real core/tree.py; a sum is a set of lanes here, so a lane that is lost, or counted
twice, is seen. After a loss nothing is left of the rounds before. In stage 3 whoever trains a lane first gathers the
parameters.

A lane of a cell needs all its members: each does its part and tells the others, and what it sends to the owners at its
coordinate leaves when all have. So a part that was done with other members counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING

from shoal.core.tree import NO_LANE, Round, first_rounds, rounds, shard_tree
from shoal_protos.activity import LANES_BEGIN

from .speeds import LONGEST_LANE

if TYPE_CHECKING:
    from .training import Training
    from .worker import SimWorker
    from .world import World

Lanes = tuple[int, ...]
Expected = list[tuple[int, Collection["SimWorker"]]]
"""The ranks that send something, and from whom that has come."""


class WholeGradients:
    """See the module's text. `in_flight`: the lane that the script has begun, as far as the controller is told."""

    in_flight = NO_LANE
    sums_up = "reduce"
    """In this phase lanes are added up."""

    def __init__(self, training: Training) -> None:
        self.training = training

    @property
    def world(self) -> World:
        assert self.training.world is not None
        return self.training.world

    @property
    def place(self) -> int:
        """How far it has come, within a step's lanes."""
        return int(self.training.step_phase == "cell")

    def forget(self) -> None:
        """No step is being made."""

    def serve_on(self) -> None:
        """Its script has ended, and others may train on."""

    def begin(self) -> None:
        t = self.training
        lanes = len(self.world.plan.shares[t.rank].lanes)
        seconds = self._seconds() if lanes else 0.0
        if lanes:
            t.watch.trains(t.worker, t.parameters, t.step)
        t.code.run(seconds, self._done, t.generation, t.boundary)

    def _seconds(self) -> float:
        t = self.training
        return t.simulation.step_seconds * t.worker.factor * (LONGEST_LANE - 1 + t.worker.chance.random())

    def _done(self, generation: int, boundary: int) -> None:
        t = self.training
        if t.is_over(generation, boundary):
            return
        if self.world.plan.lanes_of(t.rank) and t.simulation.script.strikes(t):
            return
        self.end_part("", self.world.plan.lanes_of(t.rank))
        t.progress()

    def end_part(self, number: str, lanes: Lanes) -> None:
        """Its part of these lanes is done: it tells the others of its cell."""
        t = self.training
        t.step_phase = "cell"
        for mate in self.world.mates(t.rank):
            t.send(mate, f"l{number}", (t.step, lanes))
        self.leave_cell(number, lanes)

    def leave_cell(self, number: str, lanes: Lanes) -> bool:
        """Send the lanes' gradients to their owners, once all of its cell have done their parts. Returns whether."""
        t = self.training
        parts = t.got(f"l{number}")
        if len(parts) < len(self.world.mates(t.rank)):
            return False
        if any(part != (t.step, lanes) for part in parts.values()):
            t.watch.violated("the members of a cell train different lanes", t.worker, lanes, *parts.values())
        for owner in self.world.beside(t.rank, self.world.owners) if lanes else ():
            t.send(owner, f"x{number}", lanes)
        t.step_phase = self.sums_up
        return True

    def go_on(self) -> bool:
        """An owner finishes the tree when every trainer's partials are in."""
        t = self.training
        if t.step_phase == "cell" and not self.leave_cell("", self.world.plan.lanes_of(t.rank)):
            return False
        sent = t.got("x")
        if self.world.owned[t.rank] and len(sent) < len(self.world.beside(t.rank, self.world.trainers)):
            return False
        if self.world.owned[t.rank] and sorted(chain(*sent.values())) != list(range(self.world.plan.lanes)):
            t.watch.violated("a step lacks lanes", t.worker, "has", *sent.values())
        t.reduced()
        return True

    def expected(self) -> Expected:
        """For whom it may wait."""
        t = self.training
        if t.step_phase == "cell":
            return self.cells_expected("")
        return [(trainer, t.got("x")) for trainer in self.world.beside(t.rank, self.world.trainers)]

    def cells_expected(self, number: str) -> Expected:
        """The others of its cell, for which it waits."""
        return [(mate, self.training.got(f"l{number}")) for mate in self.world.mates(self.training.rank)]


class GradientsOnShards(WholeGradients):
    """See the module's text. `go_on` is asked while it waits: for parameters (`gather`), or for a round's lanes."""

    sums_up = "round"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.forget()

    def forget(self) -> None:
        self.in_flight, self._index = NO_LANE, -1

    @property
    def place(self) -> int:
        phases = ("", "cell", "round")  # "gather" is where a lane begins
        phase = self.training.step_phase
        rounds = max(0, 3 * self._index + (phases.index(phase) if phase in phases else 0))
        return LANES_BEGIN + rounds if rounds else 0

    @property
    def _round(self) -> Round:
        return self._rounds[self._index]

    def begin(self) -> None:
        t, plan = self.training, self.world.plan
        is_first = t.committed_in < t.generation
        self._plan_rounds(is_first)
        lanes_begun = plan.recovery.lanes_in_flight if plan.recovery is not None and is_first else ()
        if lanes_begun and lanes_begun[t.rank] not in (NO_LANE, self.in_flight):
            t.watch.violated("a worker is to begin with a lane that it had not begun", t.worker, lanes_begun[t.rank])
        if plan.cells and any(lane != NO_LANE for lane in lanes_begun):
            t.watch.violated("a lane of a broken cell goes on", *lanes_begun)
        self.forget()
        self._tree = shard_tree(self._rounds, plan.lanes)
        self._copies: list[frozenset[int]] = [frozenset()] * self._tree.copies
        self._next_round()
        t.progress()

    def _plan_rounds(self, is_first: bool) -> None:
        """Rounds of all members, whom it sends parameters to, and those of the members at its coordinate: together
        they train every lane.
        """
        self._of_all = first_rounds(self.world.plan) if is_first else rounds(self.world.plan)
        here = frozenset(self.world.beside(self.training.rank, range(self.world.size)))
        self._rounds = [
            tuple(lane if rank in here else NO_LANE for rank, lane in enumerate(one)) for one in self._of_all
        ]

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
        for rank, lane in enumerate(self._of_all[self._index]):
            shard = self.world.gathered(t.rank, rank)
            if lane != NO_LANE and shard:
                t.send(rank, f"g{self._index}", {block: t.blocks[block] for block in shard})

    def serve_on(self) -> None:
        """Its script has ended, and others may train on: they gather what it owns beside that."""
        if self.training.sharded:
            self._plan_rounds(self.training.committed_in < self.training.generation)
            self._index = 0
            self._serve()
        self.forget()

    def _gather(self) -> bool:
        t = self.training
        gathered = t.got(f"g{self._index}")
        kept = self.world.keeps[t.rank]
        if sum(map(len, gathered.values())) < len(self.world.model(t.rank)) - len(kept):
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
        seconds = self._seconds()
        lanes = len(self.world.plan.shares[t.rank].lanes)
        t.code.run(seconds / lanes, self._lane_done, t.generation, t.boundary, self._index)

    def _lane_done(self, generation: int, boundary: int, index: int) -> None:
        t = self.training
        if t.is_over(generation, boundary) or index != self._index:
            return
        is_last = all(one[t.rank] == NO_LANE for one in self._rounds[index + 1 :])
        if is_last and t.simulation.script.strikes(t):
            return
        self.end_part(str(index), (self.in_flight,))
        t.progress()

    # ---- the sum

    def go_on(self) -> bool:
        t = self.training
        if t.step_phase == "gather":
            return self._gather()
        if t.step_phase == "cell" and not self.leave_cell(str(self._index), (self.in_flight,)):
            return False
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
            if lane != NO_LANE and arrived[peer] != (lane,):
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
            owners = [owner for owner in world.owners if world.gathered(owner, t.rank)]
            return [(owner, t.got(f"g{self._index}")) for owner in owners]
        if t.step_phase == "cell":
            return self.cells_expected(str(self._index))
        trainers = [rank for rank, lane in enumerate(self._round) if lane != NO_LANE and world.owned[t.rank]]
        return [(trainer, t.got(f"x{self._index}")) for trainer in trainers]
