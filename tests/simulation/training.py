"""The training half of a simulated worker: steps, votes, hand-outs, fills and changes, with blocks as symbols.

It simulates docs/architecture.md, "A step": everything that two members say to each other in
a step is a message of the generation's group, and what is not there is waited for, for ever, unless PREPARE ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.loading import StepZero
from shoal_protos.messages import Inventory, MemberState
from shoal_protos.plan import Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs

from . import joining
from .copies import Copies
from .lanes import GradientsOnShards, WholeGradients
from .links import UserCode
from .loading import Reading
from .open_end import OpenEnd
from .saving import Ballot, Saves
from .symbols import initial, right, updated
from .world import World, runs_of

if TYPE_CHECKING:
    from .worker import SimWorker

IDLE_SECONDS = 0.1


class Training:
    """See the module's text. `step_phase` says what it waits for: a key of `PROGRESS`, or nothing."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.simulation = worker, worker.simulation
        self.watch = worker.simulation.watch
        self.groups = worker.simulation.groups
        self.saves, self.loading = Saves(worker), Reading(worker)
        self.code = UserCode(worker)
        self.sharded = worker.simulation.description.shards_parameters
        on_shards = worker.simulation.description.adds_by_rounds
        self.lanes = GradientsOnShards(self) if on_shards else WholeGradients(self)
        self.forget()

    def forget(self) -> None:
        """As a fresh process: no state, no world."""
        self.step_phase = ""
        self.lanes.forget()
        self.building: dict[int, float] = {}
        """Since when its groups are built, or being built."""
        self.copies = Copies(self)
        self.step, self.committed_in, self.boundary = -1, 0, 0
        self.blocks: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.pending: frozenset[int] = frozenset()
        self.world: World | None = None
        self.rank = 0
        self.box: dict[tuple[int, str, int], dict[SimWorker, Any]] = {}
        self.closed: set[int] = set()
        self.built: set[int] = set()
        self.done = self.ended = self.stop_asked = False
        self.end = OpenEnd(self)
        self.ballots: dict[SimWorker, Ballot] = {}
        self.idle = True
        self.over = False

    @property
    def step_phase(self) -> str:
        return self._step_phase

    @step_phase.setter
    def step_phase(self, step_phase: str) -> None:
        self._step_phase, self.step_phase_since = step_phase, self.worker.clock.now

    @property
    def membership(self) -> Any:
        return self.worker.membership

    @property
    def generation(self) -> int:
        return int(self.worker.membership.generation)

    def user_seconds(self) -> float:
        """How long the training thread is in the user's code before it looks."""
        return self.simulation.user_seconds(self.worker)

    def holds(self) -> Runs:
        return runs_of(frozenset(self.blocks)) if self.blocks else NO_BLOCKS

    def peer(self, rank: int) -> SimWorker | None:
        assert self.world is not None
        return self.simulation.process_of(self.world.plan.members[rank])

    def members(self, plan: Plan) -> list[SimWorker]:
        found = (self.simulation.process_of(member) for member in plan.members)
        return [worker for worker in found if worker is not None]

    # ---- the joiner

    def warm_up(self) -> None:
        """Model, optimizer, one lane whose result is thrown away."""
        self.code.run(self.simulation.warm_up_seconds(), self._warmed_up)

    def _warmed_up(self) -> None:
        self.loading.look()
        self.worker.session.publish()
        self.membership.end_warm_up()
        self.worker.session.notice()

    # ---- messages

    def send(self, rank: int, kind: str, payload: Any) -> None:
        to = self.peer(rank)
        if to is not None:
            self.groups.send(self.worker, to, (self.generation, kind, self.boundary), payload)

    def arrived(self, key: tuple[int, str, int], source: SimWorker, payload: Any) -> None:
        if key[0] not in self.closed:
            self.keep(key, source, payload)
            if key[0] == self.generation or key[1] in "sr":
                self.progress()

    def keep(self, key: tuple[int, str, int], source: SimWorker, payload: Any) -> None:
        self.box.setdefault(key, {})[source] = payload

    def got(self, kind: str) -> dict[SimWorker, Any]:
        return self.box.get((self.generation, kind, self.boundary), {})

    def progress(self) -> None:
        while self.worker.alive and not self.over and self.step_phase and PROGRESS[self.step_phase](self):
            pass

    # ---- one boundary: a step, or a vote without one

    def begin_boundary(self) -> None:
        """Lanes, or a pause where no steps run; the slices of fills travel beside it."""
        world = self.world
        assert world is not None
        self.idle = not world.plan.steps or self.end.is_last
        if self.end.begins():
            return
        for source, target, blocks in world.fills(self.boundary):
            if source == self.rank:
                missing = blocks - self.blocks.keys()
                if missing:
                    self.watch.violated("a fill's source lacks blocks", self.worker, sorted(missing))
                slice_of_it = {block: self.blocks[block] for block in blocks}
                self.simulation.bits.filled(slice_of_it, self.step)
                self.send(target, "f", slice_of_it)
        self.step_phase = ""
        if self.idle:
            self.lanes.forget()
            self.worker.after(IDLE_SECONDS, self._pause_over, self.generation, self.boundary)
        else:
            self.lanes.begin()

    def is_over(self, generation: int, boundary: int) -> bool:
        """Whether what was begun there is of no use any more."""
        stale = generation != self.generation or boundary != self.boundary or self.step_phase
        return bool(stale) or self.membership.state is not MemberState.TRAINING or self.world is None

    def _pause_over(self, generation: int, boundary: int) -> None:
        if not self.is_over(generation, boundary):
            self.step_phase = "fills"
            self.progress()

    def reduced(self) -> None:
        """The step's sum is complete: an owner sends it to the mirrors."""
        world = self.world
        assert world is not None
        for rank in range(world.size) if world.owned[self.rank] else ():
            gradients, _ = world.parts(self.rank, rank, self.boundary)
            if gradients:
                self.send(rank, "m", gradients)
        self.step_phase = "fills"

    def _fills(self) -> bool:
        """The vote is entered only when all that the commit reads is in."""
        world = self.world
        assert world is not None
        sources = {source for source, target, _ in world.fills(self.boundary) if target == self.rank}
        filled = self.got("f")
        if len(filled) < len(sources):
            return False
        replays = world.replays(self.rank, self.boundary)
        if not self.idle:
            reduced = frozenset().union(*self.got("m").values())
            if not replays <= reduced:
                return False
        for blocks in filled.values():
            self.blocks.update(blocks)
        if not self.idle:
            self.pending = replays
        holds = world.plan.replays(self.rank, self.boundary) & self.holds() if self.membership.next else NO_BLOCKS
        number = self.membership.enter_vote(holds)
        ballot = self.saves.ballot()
        for rank in range(world.size):
            self.send(rank, "v", (number, self.stop_asked, ballot, self.copies.brings()))
        self.step_phase = "vote"
        self.worker.session.notice()
        return True

    def _vote(self) -> bool:
        world = self.world
        assert world is not None
        votes = self.got("v")
        if len(votes) < world.size:
            return False
        if not self.idle and any(stop for _, stop, _, _ in votes.values()):
            self.end.stop()
        self.ballots = {peer: ballot for peer, (_, _, ballot, _) in votes.items()}
        self.copies.voted({peer: brought for peer, (_, _, _, brought) in votes.items()})
        self.worker.session.leave_vote([number for number, _, _, _ in votes.values()])
        if self.idle:
            self.boundary += 1
            self.saves.on_vote(self.ballots, world, stepped=False)
            return self._switch()
        self._commit(world)
        return True

    def _commit(self, world: World) -> None:
        """Owners and mirrors apply the update; owners hand out the parameters, where others keep them."""
        step = self.step + 1
        missing = self.pending - self.blocks.keys()
        if missing:
            self.watch.violated("a plan counts blocks that were released", self.worker, sorted(missing))
        for block in self.pending:
            self.blocks[block] = updated(self.blocks[block], block, step)
        self.step, self.committed_in, self.worker.has_trained = step, self.generation, True
        for block in self.blocks.keys() - self.pending:
            del self.blocks[block]  # what the plan released is freed after the first commit of its generation
        self.watch.committed(self.worker, step, self.blocks)
        self.parameters.update(self.blocks)
        if world.owned[self.rank] and not self.sharded:
            for rank in range(world.size):
                _, parameters = world.parts(self.rank, rank, self.boundary)
                if parameters:
                    self.send(rank, "h", {block: self.blocks[block] for block in parameters})
        self.step_phase = "hand out"

    def _hand_out(self) -> bool:
        world = self.world
        assert world is not None
        handed = self.got("h")
        count = sum(map(len, handed.values())) + len(world.replays(self.rank, self.boundary))
        if count < len(world.model(self.rank)) and not self.sharded:
            return False
        for parameters in handed.values():
            self.parameters.update(parameters)
        self.pending = frozenset()
        self.boundary += 1
        now = self.generation, "", self.boundary
        self.box = {key: value for key, value in self.box.items() if (key[0], "", key[2]) >= now}
        self.saves.on_vote(self.ballots, world, stepped=True)
        return self._switch()

    def _switch(self) -> bool:
        """After the hand-out: the planned generation begins that all have voted, or the next boundary."""
        self.step_phase = ""
        self.worker.session.publish()
        begins = self.membership.begins
        self.end.look_done()
        if begins is None:
            self.begin_boundary()
            return False
        self.copies.before_change(begins)
        self.step_phase = "compare"
        return True

    def _change(self) -> bool:
        begins = self.membership.begins
        if begins is None or self.world is None or not self.copies.may_change(begins):
            return False
        before = self.world.plan
        self.begin(begins)
        joining.welcome(self, before, begins)
        return False

    def begin(self, plan: Plan, joins: bool = False) -> None:
        """Its next world. `joins`: it has no parameters yet."""
        before = self.generation
        self.worker.session.dialogue.begin(plan)
        self.watch.began(self.worker, plan, self.step)
        self.built.discard(plan.generation)
        self.building.clear()
        rank = plan.rank_of(self.worker.membership.worker, self.worker.incarnation)
        if rank is None:
            self.worker.say("is left out by", plan.generation, "after", before)
            self.step_phase = ""
        else:
            self.world, self.rank, self.boundary = self.simulation.worlds.of(plan), rank, 0
            self.copies.enter()
            if joins and not self.sharded:
                self.step_phase = "join"
            else:
                self.begin_boundary()
        self.worker.session.publish()

    # ---- a planned change

    def build_planned(self, plan: Plan) -> None:
        """In the background."""
        self.closed.discard(plan.generation)  # a stop that came late has ended an earlier attempt
        self.building[plan.generation] = self.worker.clock.now
        self.groups.arrive(self.worker, plan, lambda: self._planned_built(plan.generation))

    def _planned_built(self, generation: int) -> None:
        if generation not in self.closed:
            self.built.add(generation)
            self.building[generation] = self.worker.clock.now
            self.membership.on_built(generation)
            if self.membership.is_joiner:
                self.step_phase = "first message"
                self.progress()
            self.worker.session.notice()

    # ---- a loss

    def peer_gone(self, generation: int, peer: SimWorker) -> None:
        """An operation with a peer of this group failed."""
        recovery = self.membership.recovery
        number = recovery.generation if recovery is not None else self.generation
        if generation == number and generation not in self.closed and peer in self.simulation.group_members(generation):
            if self.worker.chance.random() < 0.5:
                self.step_phase = ""  # it had touched that peer; else it goes on with what it has received
            self.worker.session.on_broken_peer(peer.membership.worker)

    def stop(self, generation: int) -> None:
        """PREPARE: the training thread looks once it is out of the user's code."""
        self.worker.say("stops for", generation, self.worker.where())
        self.step_phase = ""
        self.end.stop_waiting()
        self.code.run(self.user_seconds(), self.report, generation)

    def _abort(self, groups: set[int]) -> None:
        for generation in groups - {0}:
            self.closed.add(generation)
            self.building.pop(generation, None)
            self.groups.withdraw(self.worker, generation)
            self.groups.gone(self.worker, generation, self.simulation.group_members(generation))
        self.built -= groups

    def close_groups(self) -> None:
        """Every group is aborted, and the peers in them notice."""
        self._abort({self.generation, *self.building, *self.built})

    def call_off(self, live: set[int]) -> None:
        """Groups of plans that are void are built no more."""
        for generation in self.building.keys() - live:
            del self.building[generation]
            self.built.discard(generation)
            self.groups.withdraw(self.worker, generation)

    def report(self, generation: int) -> None:
        """The inventory, once the training thread has seen the stop."""
        m = self.membership
        if m.promised != generation or m.state not in (
            MemberState.STOPPED,
            MemberState.WAITING,
            MemberState.WARMING_UP,
        ):
            return
        step = right(self.step) if self.step >= 0 else []
        right_ones = (b for b, value in self.parameters.items() if self.step >= 0 and step[b] == value)
        model = self.simulation.model_at(self.worker.coordinate)
        current = runs_of(model if self.sharded else model & frozenset(right_ones))
        self.worker.session.answer(
            Inventory(
                generation, self.generation, self.step, self.committed_in, b"r%d" % self.step if self.step > 0 else b"",
                self.holds(), runs_of(self.pending), current, self.lanes.in_flight,
            )
        )  # fmt: skip

    def build_recovery(self, plan: Plan) -> None:
        self.building[plan.generation] = self.worker.clock.now
        self.groups.arrive(self.worker, plan, lambda: self._recovery_built(plan))

    def _recovery_built(self, plan: Plan) -> None:
        """Roll forward if need be, promote, hand out what is stale."""
        if self.membership.recovery is not plan or plan.recovery is None:
            return
        rank = plan.rank_of(self.worker.membership.worker, self.worker.incarnation)
        assert rank is not None
        self.world, self.rank, self.boundary = self.simulation.worlds.of(plan), rank, 0
        recovery, world = plan.recovery, self.world
        self.building.pop(plan.generation, None)
        self.loading.known.on_recovery(recovery.checkpoint)
        if recovery.checkpoint:
            if not self._take_up(plan):
                return
        elif plan.reason is Reason.START:
            step_zero = self.loading.known.step_zero(self.worker.has_trained)
            if step_zero is not StepZero.POSSIBLE:
                self.worker.fail_to_begin(step_zero, self.loading.known.taken)
                return
            self.saves.saving.on_return_to(-1)
            self.copies.restored()
            self.blocks = {block: initial(block) for block in world.keeps[rank]}
            self.parameters = {block: initial(block) for block in world.model(rank)}
        elif not recovery.counted[rank]:
            self.blocks = {}
        elif self.step == recovery.step - 1:
            self._roll_forward(recovery.step, recovery.record)
        self.step, self.pending = recovery.step, frozenset()
        self.watch.promotes(self.worker, self.blocks, world.keeps[rank], self.step)
        self.parameters.update(self.blocks)
        if self.sharded and any(recovery.stale):
            self.watch.violated("parameters are handed out that are sharded", plan.generation)
        for other in range(world.size):
            stale = world.owned[rank] & frozenset(recovery.stale[other])
            if stale and other != rank:
                to = self.peer(other)
                if to is not None:
                    payload = {block: self.blocks[block] for block in stale}
                    self.groups.send(self.worker, to, (plan.generation, "r", 0), payload)
        self.step_phase = "catch up"
        self.progress()

    def _take_up(self, plan: Plan) -> bool:
        """Everything as it was at the checkpoint's step, if it can be read."""
        recovery, world = plan.recovery, self.world
        assert recovery is not None and world is not None
        if self.end.is_given_up(recovery.step):
            self.worker.fail(f"the job goes back to step {recovery.step}, and this script has ended")
            return False
        content = self.loading.take_up(recovery.checkpoint)
        if content is None:
            self.step_phase = ""
            self.worker.session.publish()
            return False
        self.worker.say("takes up", recovery.checkpoint)
        self.simulation.bits.taken_up(self.worker, content, recovery.step)
        self.blocks = {block: content[block] for block in world.keeps[self.rank]}
        self.parameters = {block: content[block] for block in world.owned[self.rank]}
        self.committed_in, self.done = 0, False
        self.saves.saving.on_return_to(recovery.step)
        self.copies.restored()
        return True

    def _roll_forward(self, step: int, record: bytes) -> None:
        """The gradients of the step are in, and somebody has its record."""
        if record != b"r%d" % step:
            self.watch.violated("a roll forward without the record", self.worker, step)
        self.worker.say("rolls forward to", step)
        for block in list(self.blocks):
            if block in self.pending:
                self.blocks[block] = updated(self.blocks[block], block, step)
            else:
                del self.blocks[block]

    def _catch_up(self) -> bool:
        plan = self.membership.recovery
        if plan is None or plan.recovery is None or self.world is None or self.world.plan is not plan:
            return False
        handed = self.box.get((plan.generation, "r", 0), {})
        if sum(map(len, handed.values())) < len(plan.recovery.stale[self.rank]):
            return False
        for parameters in handed.values():
            self.parameters.update(parameters)
        self.step_phase = ""
        self.worker.session.report_ready(plan.generation)
        return False

    def opened(self) -> None:
        self.begin(self.membership.recovery)


PROGRESS = {
    "cell": lambda training: training.lanes.go_on(),
    "gather": lambda training: training.lanes.go_on(),
    "round": lambda training: training.lanes.go_on(),
    "reduce": lambda training: training.lanes.go_on(),
    "fills": Training._fills,
    "vote": Training._vote,
    "hand out": Training._hand_out,
    "compare": Training._change,
    "first message": joining.first_message,
    "join": joining.parameters_come,
    "catch up": Training._catch_up,
}
