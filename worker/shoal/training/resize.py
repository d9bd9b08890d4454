"""A change of the world as one worker carries it out: docs/architecture.md, "A change of the world".

Loss: stop, report the inventory, and with the plan roll forward if need be, promote, hand out what is stale, be ready,
open. Planned: begin after the hand-out of the vote that named it. A joiner waits for its first message. All of it on
the training thread, between two of the engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.errors import JobFailed
from shoal_protos.messages import AskKind, Ending
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.training_log import get_logger, say

from shoal.cells.pipelining import plain_shapes, take_shapes
from shoal.cells.stages import shapes_of
from shoal.config.out_of_memory import naming
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.exchange.ballot import Request
from shoal.exchange.hand_out import HandOut
from shoal.exchange.packing import FramedSend, receive_framed
from shoal.exchange.traffic import FIRST_MESSAGE, STARTED, Traffic
from shoal.exchange.vote import Record
from shoal.exchange.world import World
from shoal.group.group import Group, WorldChanged
from shoal.session.link import Asked, Begun, Ended, Opened, Planned, Recover, Stopped
from shoal.state.small_state import packed, unpacked
from shoal.state.training_state import frozen_parameters
from shoal.training.boundary import Boundary
from shoal.training.checkpoint_loading import CheckpointLoading
from shoal.training.context import TrainingContext
from shoal.training.initial_state import (
    agree_on_misses,
    agree_on_the_start,
    check_made,
    check_registered_alike,
    share_frozen,
)
from shoal.training.requests import Requests
from shoal.training.status import StatusReport
from shoal.training.step import Step
from shoal.training.telemetry import ChangeClock

SHAPES = "the shapes of stages"
log = get_logger("shoal")


class Resize:
    """This worker's part in changes."""

    def __init__(
        self,
        context: TrainingContext,
        step: Step,
        boundary: Boundary,
        loading: CheckpointLoading,
        requests: Requests,
        status: StatusReport,
    ) -> None:
        self._context, self._step, self._boundary = context, step, boundary
        self._loading, self._requests, self._status = loading, requests, status
        self._caught_up: World | None = None
        self._cell: tuple[Member, ...] = ()
        """The members of this one's cell, by coordinate."""
        self._planned: tuple[Plan, Traffic] | None = None
        """The plan of a recovery whose group is being built, and what is exchanged in its world."""
        self._clock = ChangeClock()
        self._last_word: Ended | None = None
        """What the controller said last of all; it says nothing after that."""

    # ---- the loop of a change

    def enter(self) -> None:
        """Says once that this worker is warm; then as `take_part`."""
        context = self._context
        if not context.loop.is_warm:
            context.loop.end_warm_up(context.state)
            self._status.publish()  # what it knows of checkpoints, before anyone counts on it
            context.link.end_warm_up()
            self._status.publish()
        self.take_part()

    def take_part(self, broken: bool = False) -> None:
        """Does what the controller says until this worker is in a world. May raise SystemExit or JobFailed: again and
        again where a script has caught it.
        """
        context = self._context
        if self._last_word is not None:
            self._end(self._last_word)
        if broken:
            self._clock.start()
            self._status.publish()
        waiting = broken or context.world is None
        while waiting or context.link.stopping:
            match context.link.take():
                case Stopped(generation):
                    waiting = True
                    self._stop(generation)
                case Planned(plan):
                    self._make_ready(plan)
                case Recover(plan, group, seconds):
                    self._clock.end_plan(seconds)
                    self._recover(plan, group)
                case Opened():
                    waiting = not self._open()
                case Begun(plan, group, state):
                    waiting = not self._join(plan, group, state)
                case Asked(AskKind.END, step):
                    context.state.last_step = context.state.last_step or step
                    self._status.publish()  # a new world is opened to workers that know it
                case Asked(kind, _):
                    self._requests.add(Request("stop" if kind is AskKind.STOP else "save"))
                case Ended() as ended:
                    waiting = self._end(ended)

    def leave_broken_cell(self) -> None:
        """Takes part in the change where a collective of the lane at hand has failed: the script is not told."""
        context = self._context
        if context.loop.in_flight and context.world is not None and not context.is_cell_whole:
            self.take_part(broken=True)

    # ---- loss

    def _stop(self, generation: int) -> None:
        """Answer PREPARE: nothing is in flight any more, and this is what I hold."""
        context = self._context
        self._clock.start()
        context.faults.at("prepare", max(0, context.state.step))
        self._step.parameters.forget()
        context.begins, self._caught_up = None, None
        in_world = context.world.plan.generation if context.world else context.link.membership().generation
        context.link.answer(context.state.inventory(generation, in_world, context.lane_in_flight))
        self._clock.end_prepare()

    def _make_ready(self, plan: Plan) -> None:
        """What a recovery needs of its plan alone, while its group is built."""
        rank = self._rank_in(plan)
        self._planned = plan, self._context.state.traffic(plan, rank)
        self._context.state.sums.reserve(plan.lanes_of(rank) if plan.steps else ())

    def _recover(self, plan: Plan, group: Group) -> None:
        """Roll forward if need be, promote, hand out what is stale; then READY."""
        assert plan.recovery is not None
        self._loading.known.on_recovery(plan.recovery.checkpoint)
        group.progress.reach(StepPhase.CATCHING_UP)
        try:
            world = self._world(plan, group)
            with naming(f"this worker's blocks were put in place for generation {plan.generation}"):
                self._catch_up(world)
        except WorldChanged:
            self._status.publish()
            return  # another PREPARE is on its way
        except CheckpointDamaged as error:
            self._loading.on_unreadable(plan.recovery.checkpoint, error)
            self._status.publish()
            return  # the controller names another one
        self._clock.end_promote()
        if self._context.link.report_ready(plan.generation):
            self._caught_up = world

    def _catch_up(self, world: World) -> None:
        plan, state, recovery = world.plan, self._context.state, world.plan.recovery
        assert recovery is not None
        self._agree_on_the_end(world)
        if recovery.checkpoint or plan.reason is Reason.START:
            state.held.keep_only(NO_BLOCKS)
            state.held.own(world.owned)
        if recovery.checkpoint:
            self._clock.note_checkpoint(self._loading.take_up(world))
            state.frozen_in_place = True
            self._boundary.go_back_to(recovery.step, saved=recovery.step)
            return
        if plan.reason is Reason.START:
            self._loading.check_initial()
            self._boundary.go_back_to(0, saved=-1)
            agree_on_the_start(world, state)
            state.begin_anew(world.kept)
            agree_on_misses(world, state)
            check_made(world, state)
            if self._context.config.checkpoint.path is not None:
                check_registered_alike(world, state)
            return
        self._share_small_state(world)
        self._share_what_is_lacking(world)
        if not recovery.counted[world.rank]:
            state.held.keep_only(NO_BLOCKS)
        elif state.step == recovery.step - 1:
            self._roll_forward(recovery.record)
        self._boundary.agree_on_evaluations(world)
        self._context.faults.at("promote", state.step)
        self._clock.note_promoted(len(world.owned - self._owned_before()))
        brought = world.traffic.brought(recovery.stale)
        self._clock.note_bytes(HandOut(world.group, state.weights, world.traffic, brought).finish())
        state.current = state.everything

    def _agree_on_the_end(self, world: World) -> None:
        """A vote that has said at which step the job ends may have passed on some members alone."""
        state = self._context.state
        mine = torch.tensor([state.last_step], dtype=torch.int64, device="cpu")
        known = [step for step in world.group.all_gather(mine).flatten().tolist() if step]
        state.last_step = min(known, default=0)

    def _roll_forward(self, record: bytes) -> None:
        """Some survivor passed the vote of the next step: all that it commits is here."""
        context = self._context
        context.faults.at("roll_forward", context.state.step)
        passed = Record.from_bytes(record)
        generation = context.world.plan.generation if context.world else context.state.committed_in
        self._step.update.apply(passed, generation)
        self._boundary.on_roll_forward(passed)
        log.info("rolled_forward", step=passed.step, committed_in=generation)
        context.meter.on_step()

    def _share_small_state(self, world: World) -> None:
        """Members whose state does not count get it from the lowest rank at their coordinate whose does."""
        recovery, state = world.plan.recovery, self._context.state
        assert recovery is not None
        counted, plan = recovery.counted, world.plan
        others = counted.index(True)  # where a coordinate has no blocks
        givers = {rank: _mate_with(counted, plan, rank, others) for rank, counts in enumerate(counted) if not counts}
        given = _share(world, givers, state.small_state)
        if given is not None:
            state.load_small_state(given)

    def _share_what_is_lacking(self, world: World) -> None:
        """Joiners whose frozen parameters are not the job's get them from the lowest rank whose are; those whose stages
        have shaken no hands are told what passes between them, where that fits their neighbours.
        """
        (in_place, ends), state = self._boundary.agree(world), self._context.state
        lacking = [rank for rank, there in enumerate(in_place) if not there]
        if lacking:
            share_frozen(world.group, state, in_place.index(True), lacking)
            state.frozen_in_place = True
        if state.layout.stages:
            shapes = shapes_of(state.module)
            content = _share(world, tellers(world.plan, ends), lambda: packed(plain_shapes(shapes), SHAPES))
            if content is not None:
                take_shapes(shapes, world.plan.generation, unpacked(content, SHAPES))

    def _owned_before(self) -> Runs:
        world = self._context.world
        return world.owned if world else NO_BLOCKS

    def _open(self) -> bool:
        """Whether this worker is in a world now, its owed boundary settled."""
        world, context = self._caught_up, self._context
        if world is None:
            return True
        context.faults.at("opened", context.state.step)
        self._enter(world)
        try:
            if self._boundary.is_owed:
                self._step.vote_alone()
                self.begin_planned()
        except WorldChanged:
            self._clock.start()
            self._status.publish()
            return False
        return True

    # ---- planned

    def begin_planned(self) -> None:
        """At a boundary: begins the generation that the last vote named, if it named one."""
        context, old = self._context, self._context.world
        prepared, context.begins = context.begins, None
        if prepared is None:
            return
        assert old is not None
        self._boundary.before_vote()
        self._step.parameters.before_leaving(old)
        self._clock.start()
        context.faults.at("begin", context.state.step)
        self._boundary.before_change(old, prepared.plan)
        if prepared.plan.rank_of(context.link.worker, context.link.incarnation) is None:
            context.link.begin(prepared.plan, None)
            context.world = None
            log.info("left", generation=prepared.plan.generation, step=context.state.step)
            self._status.publish()
            self.take_part()
            return
        world = self._world(prepared.plan, prepared.group or old.group)
        self._clock.end_plan(prepared.group_seconds)
        was = set(old.plan.members)
        joiners = [rank for rank, member in enumerate(world.plan.members) if member not in was]
        for rank in joiners:
            if world.rank == world.plan.builder:
                FramedSend(world.group, rank, FIRST_MESSAGE, context.state.small_state()).wait()
                self._give_frozen(world, rank)
            elif world.rank == _giver(world.plan, rank):
                FramedSend(world.group, rank, STARTED, context.state.small_state()).wait()
        self._enter(world, joiners)

    def _join(self, plan: Plan, group: Group, small_state: bytes) -> bool:
        """A joiner's first message; all parameters come beside its next forward. Returns whether it is in the world:
        where that breaks before, it is a joiner as before.
        """
        context = self._context
        self._clock.forget()  # whatever it was asked to stop for before, the others trained on
        self._clock.start()
        world = self._world(plan, group)
        giver = _giver(plan, world.rank)
        try:
            if giver != plan.builder:  # whose buffers are those of another coordinate
                small_state = receive_framed(group, giver, STARTED)
            context.state.load_small_state(small_state)
            self._take_frozen(world)
        except WorldChanged:
            context.state.give_up()
            return False  # a PREPARE is on its way
        self._boundary.stand_at(context.state.step)
        context.faults.at("join", context.state.step)
        try:
            self._enter(world, [world.rank])
        except WorldChanged:
            self._clock.start()
            self._status.publish()
            return False
        return True

    def _give_frozen(self, world: World, rank: int) -> None:
        """To a joiner that says its own differ: it trains at once, and needs them before."""
        if frozen_parameters(self._context.state):
            lacks = torch.zeros(1, dtype=torch.uint8)
            world.group.receive(lacks, rank, STARTED).wait()
            if lacks.item():
                share_frozen(world.group, self._context.state, world.rank, [rank])

    def _take_frozen(self, world: World) -> None:
        """A joiner's part in it."""
        state, builder = self._context.state, world.plan.builder
        if frozen_parameters(state):
            lacks = torch.tensor([not state.frozen_in_place], dtype=torch.uint8)
            world.group.send(lacks, builder, STARTED).wait()
            if not state.frozen_in_place:
                share_frozen(world.group, state, builder, [world.rank])
                state.frozen_in_place = True

    # ---- entering, leaving

    def _rank_in(self, plan: Plan) -> int:
        link = self._context.link
        rank = plan.rank_of(link.worker, link.incarnation)
        assert rank is not None, f"plan {plan.generation} leaves out {link.worker}, which was told to carry it out"
        return rank

    def _world(self, plan: Plan, group: Group) -> World:
        rank, (planned, self._planned) = self._rank_in(plan), (self._planned, None)
        if planned is not None and planned[0] is plan:
            return World(plan, rank, group, planned[1])
        return World(plan, rank, group, self._context.state.traffic(plan, rank))

    def _enter(self, world: World, joiners: Collection[int] = ()) -> None:
        """The world begins here: it replaces the old one whole. `joiners`: the ranks that lack its parameters, as far
        as this member hands any out to them or gets its own. Raises `WorldChanged` where they cannot come.
        """
        context, plan = self._context, world.plan
        at_same_step = (
            plan.recovery is not None and not plan.recovery.checkpoint and not plan.recovery.stale[world.rank]
        )
        context.link.begin(plan, world.group)
        context.state.held.own(world.owned)
        context.world, context.boundaries, self._caught_up = world, 0, None
        context.is_first_step = True
        self._enter_cell(world)
        self._step.reducing.forget()
        self._step.parameters.on_world(world)
        context.state.held.expect(plan.filled(world.rank, plan.boundaries))
        keeps_lanes = at_same_step and self._step.reducing.keeps_lanes
        if not (keeps_lanes and context.loop.continue_with(world.first_lanes)):
            context.state.forget_gradients()
            context.loop.begin_step(world.first_lanes)
        context.state.pending = NO_BLOCKS
        change = self._clock.end(plan.generation, context.state.step, plan.recovery is not None)
        context.meter.on_change(change, planned=plan.recovery is None)
        log.info("world", generation=plan.generation, reason=str(plan.reason), rank=world.rank,
                 world_size=plan.world_size, lanes=list(world.lanes), step=context.state.step,
                 second_copies=len(plan.second_copies))  # fmt: skip
        self._boundary.on_world(world)
        if joiners:
            self._step.hand_to(joiners)
        if context.are_parameters_here:
            world.group.progress.begin_boundary(0)

    def _enter_cell(self, world: World) -> None:
        """Its collectives go over this world's group from here on. Until the next batch they are answered from here,
        unless the same members go on together: others of a new cell are elsewhere in the loop's body, or in none.
        """
        hub, plan = self._context.hub, world.plan
        if hub is None:
            return
        cell = next((cell for cell in plan.cells if world.rank in cell), ())
        before, self._cell = self._cell, tuple(plan.members[rank] for rank in cell)
        if plan.recovery is not None or self._cell != before:
            hub.make_void()
        if cell:
            hub.begin(world.group, cell)
        else:
            hub.rest()

    def _end(self, ended: Ended) -> bool:
        """Leaves, or starts over. True: wait for what comes next."""
        context = self._context
        self._step.parameters.forget()
        self._last_word = ended if ended.ending is not Ending.START_OVER else None
        match ended.ending:
            case Ending.START_OVER:
                log.warning("starting_over", reason=ended.reason)
                context.world, self._caught_up, context.begins = None, None, None
                context.state.give_up()
                context.meter.on_start_over()
                self._clock.forget()
                context.loop.begin_step(())
                context.loop.void_lanes = 0
                context.link.end_warm_up()
                self._status.publish()
                return True
            case Ending.FAILED:
                context.leaving = True
                raise JobFailed(ended.reason)
            case _:
                context.leaving = True
                log.info("leaving", ending=str(ended.ending), reason=ended.reason)
                if ended.status:
                    say(f"{ended.reason}.")
                raise SystemExit(ended.status)


def _same_coordinate(plan: Plan, rank: int) -> list[int]:
    """The ranks of the members that have the same part of the model, the oldest first."""
    coordinate = plan.members[rank].coordinate
    return [other for other, member in enumerate(plan.members) if member.coordinate == coordinate]


def _mate_with(has: Sequence[bool], plan: Plan, rank: int, otherwise: int) -> int:
    """The lowest rank at a rank's coordinate that has a thing; where none has it, `otherwise`."""
    return next((mate for mate in _same_coordinate(plan, rank) if has[mate]), otherwise)


def tellers(plan: Plan, ends: Sequence[tuple[int, int]]) -> dict[int, int]:
    """By rank of each in a cell that knows no shapes of its stages: the lowest at its coordinate that does. None where
    all of a cell would be told, since nobody there would know a schedule that is new, or where what one stage gives is
    not what the next one gets. `ends`: by rank, as `ends_of`.
    """
    found, knows = dict[int, int](), [gets > 0 for gets, _ in ends]
    for cell in plan.cells:
        givers = {rank: _mate_with(knows, plan, rank, rank) for rank in cell if not ends[rank][0]}
        known = [ends[givers.get(rank, rank)] for rank in cell]
        if len(givers) < len(cell) and all(one[1] == next_one[0] for one, next_one in pairwise(known)):
            found |= givers
    return found


def _share(world: World, givers: Mapping[int, int], content: Callable[[], bytes]) -> bytes | None:
    """What this rank is given, if it is one of the keys of `givers`. Raises `WorldChanged`."""
    if world.rank in givers:
        return receive_framed(world.group, givers[world.rank], STARTED)
    takers = [rank for rank, giver in givers.items() if giver == world.rank]
    if takers:
        mine = content()
        for send in [FramedSend(world.group, rank, STARTED, mine) for rank in takers]:
            send.wait()
    return None


def _giver(plan: Plan, joiner: int) -> int:
    """The rank whose small state is a joiner's: the builder's, but in a cell that of the oldest at its coordinate."""
    return _same_coordinate(plan, joiner)[0] if plan.homes else plan.builder
