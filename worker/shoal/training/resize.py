"""A change of the world as one worker carries it out: ARCHITECTURE section 4.

Loss: stop, report the inventory, and with the plan roll forward if need be, promote, hand out what is stale, be ready,
open. Planned: begin after the hand-out of the vote that named it. A joiner waits for its first message. All of it on
the training thread, between two of the engine's steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shoal_protos.activity import StepPhase
from shoal_protos.errors import JobFailed
from shoal_protos.messages import AskKind, Change, Ending
from shoal_protos.plan import Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs

from shoal.checkpoint.errors import CheckpointDamaged
from shoal.exchange.framing import FramedSend, receive_framed
from shoal.exchange.hand_out import hand_out
from shoal.exchange.traffic import FIRST_MESSAGE, STARTED, Traffic
from shoal.exchange.vote import Record, Request
from shoal.group.group import Group, WorldChanged
from shoal.logs import get_logger
from shoal.session.link import Asked, Begun, Ended, Opened, Prepared, Recover, Stopped
from shoal.training.initial_state import agree_on_the_start, share_frozen
from shoal.world import World

if TYPE_CHECKING:
    from shoal.training.engine import Engine

log = get_logger("shoal")


class Resize:
    """This worker's part in changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.begins: Prepared | None = None
        """The planned generation that all have voted for and that begins at the next boundary."""
        self.frozen_in_place = True
        """Whether this module's frozen parameters are known to be the job's."""
        self._caught_up: World | None = None
        self._clock = _Clock()

    # ---- the loop of a change

    def take_part(self, broken: bool = False) -> None:
        """Does what the controller says until this worker is in a world. May raise SystemExit or JobFailed."""
        engine = self._engine
        if broken:
            self._clock.start()
            engine.publish()
        waiting = broken or engine.world is None
        while waiting or engine.link.stopping:
            match engine.link.take():
                case Stopped(generation):
                    waiting = True
                    self._stop(generation)
                case Recover(plan, group, seconds):
                    self._clock.end_plan(seconds)
                    self._recover(plan, group)
                case Opened():
                    waiting = not self._open()
                case Begun(plan, group, state):
                    self._join(plan, group, state)
                    waiting = False
                case Asked(kind, _):
                    engine.requests.add(Request("stop" if kind is AskKind.STOP else "save"))
                case Ended() as ended:
                    waiting = self._end(ended)

    # ---- loss

    def _stop(self, generation: int) -> None:
        """Answer PREPARE: nothing is in flight any more, and this is what I hold."""
        engine = self._engine
        self._clock.start()
        engine.faults.at("prepare", max(0, engine.state.step))
        self.begins, self._caught_up = None, None
        in_world = engine.world.plan.generation if engine.world else engine.link.membership().generation
        engine.link.answer(engine.state.inventory(generation, in_world, engine.lanes_in_flight()))
        self._clock.end_prepare()

    def _recover(self, plan: Plan, group: Group) -> None:
        """Roll forward if need be, promote, hand out what is stale; then READY."""
        assert plan.recovery is not None
        self._engine.resuming.on_recovery(plan.recovery.checkpoint)
        group.progress.reach(StepPhase.CATCHING_UP)
        try:
            world = self._world(plan, group)
            self._catch_up(world)
        except WorldChanged:
            self._engine.publish()
            return  # another PREPARE is on its way
        except CheckpointDamaged as error:
            self._engine.resuming.on_unreadable(plan.recovery.checkpoint, error)
            self._engine.publish()
            return  # the controller names another one
        self._clock.end_promote()
        if self._engine.link.report_ready(plan.generation):
            self._caught_up = world

    def _catch_up(self, world: World) -> None:
        plan, state, recovery = world.plan, self._engine.state, world.plan.recovery
        assert recovery is not None
        if recovery.checkpoint:
            self._clock.note_checkpoint(self._engine.resuming.take_up(world))
            self.frozen_in_place = True
            self._engine.saving.on_return_to(recovery.step)
            self._engine.boundary.stand_at(recovery.step)
            self._engine.corruption.on_return()
            return
        if plan.reason is Reason.START:
            self._engine.resuming.check_initial()
            self._engine.saving.on_return_to(-1)
            self._engine.boundary.stand_at(0)
            self._engine.corruption.on_return()
            state.begin_anew(plan.shares[world.rank].keeps)
            agree_on_the_start(world, state)
            return
        self._share_small_state(world)
        self._share_frozen(world)
        if not recovery.counted[world.rank]:
            state.held.keep_only(NO_BLOCKS)
        elif state.step == recovery.step - 1:
            self._roll_forward(recovery.record)
        self._engine.faults.at("promote", state.step)
        self._clock.note_promoted(len(plan.shares[world.rank].owned - self._owned_before()))
        self._clock.note_bytes(hand_out(world.group, state.flats, world.traffic.stale))
        state.current = state.everything

    def _roll_forward(self, record: bytes) -> None:
        """Some survivor passed the vote of the next step: all that it commits is here."""
        engine = self._engine
        engine.faults.at("roll_forward", engine.state.step)
        passed = Record.from_bytes(record)
        generation = engine.world.plan.generation if engine.world else engine.state.committed_in
        engine.commit(passed, generation)
        engine.corruption.on_record(passed)
        log.info("rolled_forward", step=passed.step, committed_in=generation)
        engine.meter.on_step()

    def _share_small_state(self, world: World) -> None:
        """Members whose state does not count get it from the lowest rank whose does."""
        recovery, state = world.plan.recovery, self._engine.state
        assert recovery is not None
        if all(recovery.counted):
            return
        source = recovery.counted.index(True)
        if world.rank == source:
            content = state.small_state()
            for send in [FramedSend(world.group, r, STARTED, content) for r, c in enumerate(recovery.counted) if not c]:
                send.wait()
        elif not recovery.counted[world.rank]:
            self.frozen_in_place = state.load_small_state(receive_framed(world.group, source, STARTED))

    def _share_frozen(self, world: World) -> None:
        """Joiners whose frozen parameters are not the job's get them from the lowest rank whose are."""
        in_place = self._engine.boundary.agree(world, self.frozen_in_place)
        lacking = [rank for rank, there in enumerate(in_place) if not there]
        if lacking:
            share_frozen(world.group, self._engine.module, in_place.index(True), lacking)
            self.frozen_in_place = True

    def _owned_before(self) -> Runs:
        world = self._engine.world
        return world.plan.shares[world.rank].owned if world else NO_BLOCKS

    def _open(self) -> bool:
        """Whether this worker is in a world now, its owed boundary settled."""
        world, engine = self._caught_up, self._engine
        if world is None:
            return True
        engine.faults.at("opened", engine.state.step)
        self._enter(world)
        try:
            if engine.boundary.owed:
                engine.vote_without_step()
        except WorldChanged:
            self._clock.start()
            engine.publish()
            return False
        return True

    # ---- planned

    def begin_planned(self) -> None:
        """At a boundary: begins the generation that the last vote named, if it named one."""
        prepared, self.begins = self.begins, None
        if prepared is None:
            return
        engine, old = self._engine, self._engine.world
        assert old is not None
        self._clock.start()
        engine.faults.at("begin", engine.state.step)
        if prepared.plan.rank_of(engine.link.worker, engine.link.incarnation) is None:
            engine.link.begin(prepared.plan, None)
            engine.world = None
            log.info("left", generation=prepared.plan.generation, step=engine.state.step)
            engine.publish()
            engine.resize.take_part()
            return
        world = self._world(prepared.plan, prepared.group or old.group)
        self._clock.end_plan(prepared.group_seconds)
        if world.rank == world.plan.builder:
            was = set(old.plan.members)
            for rank, member in enumerate(world.plan.members):
                if member not in was:
                    FramedSend(world.group, rank, FIRST_MESSAGE, engine.state.small_state()).wait()
        self._enter(world)

    def _join(self, plan: Plan, group: Group, small_state: bytes) -> None:
        """A joiner's first message: it is a standby until a hand-out has given it all parameters."""
        engine = self._engine
        world = self._world(plan, group)
        self.frozen_in_place = engine.state.load_small_state(small_state)
        engine.boundary.stand_at(engine.state.step)
        engine.faults.at("join", engine.state.step)
        if not self.frozen_in_place:
            engine.requests.add(Request("frozen", rank=world.rank))
        self._enter(world)

    # ---- entering, leaving

    def _world(self, plan: Plan, group: Group) -> World:
        link = self._engine.link
        rank = plan.rank_of(link.worker, link.incarnation)
        assert rank is not None, f"plan {plan.generation} leaves out {link.worker}, which was told to carry it out"
        return World(plan, rank, group, Traffic(plan, rank, self._engine.state.layout))

    def _enter(self, world: World) -> None:
        """The world begins here: it replaces the old one whole."""
        engine, plan = self._engine, world.plan
        at_same_step = (
            plan.recovery is not None and not plan.recovery.checkpoint and not plan.recovery.stale[world.rank]
        )
        engine.link.begin(plan, world.group)
        engine.world, engine.boundaries, self._caught_up = world, 0, None
        world.group.progress.begin_boundary(0)
        if not (at_same_step and engine.loop.goes_on(world.lanes)):
            engine.state.forget_gradients()
            engine.loop.begin_step(world.lanes)
        engine.state.pending = NO_BLOCKS
        change = self._clock.end(plan.generation, engine.state.step, plan.recovery is not None)
        engine.meter.on_change(change, planned=plan.recovery is None)
        log.info("world", generation=plan.generation, reason=str(plan.reason), rank=world.rank,
                 world_size=plan.world_size, lanes=list(world.lanes), step=engine.state.step)  # fmt: skip
        engine.corruption.on_world(world)
        engine.saving.on_world(world)
        engine.publish()

    def _end(self, ended: Ended) -> bool:
        """Leaves, or starts over. True: wait for what comes next."""
        engine = self._engine
        match ended.ending:
            case Ending.START_OVER:
                log.warning("starting_over", reason=ended.reason)
                engine.world, self._caught_up, self.begins = None, None, None
                engine.state.give_up()
                engine.loop.begin_step(())
                engine.link.end_warm_up()
                engine.publish()
                return True
            case Ending.FAILED:
                engine.leaving = True
                raise JobFailed(ended.reason)
            case _:
                engine.leaving = True
                log.info("leaving", ending=str(ended.ending), reason=ended.reason)
                raise SystemExit(ended.status)


class _Clock:
    """Seconds per phase of the change at hand."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._began: float | None = None
        self._mark = 0.0
        self._phases: dict[str, float] = {}
        self._promoted = 0
        self._bytes = 0
        self._checkpoint_bytes = 0

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark
        self._mark = now

    def start(self) -> None:
        if self._began is None:
            self._began = self._mark = time.monotonic()

    def end_prepare(self) -> None:
        self._lap("prepare")

    def end_plan(self, group_seconds: float) -> None:
        self._lap("plan")
        self._phases["group"] = self._phases.get("group", 0.0) + group_seconds
        self._phases["plan"] = max(0.0, self._phases["plan"] - group_seconds)

    def end_promote(self) -> None:
        self._lap("promote")

    def note_promoted(self, blocks: int) -> None:
        self._promoted = blocks

    def note_bytes(self, count: int) -> None:
        self._bytes = count

    def note_checkpoint(self, count: int) -> None:
        self._checkpoint_bytes = count

    def end(self, generation: int, step: int, recovered: bool) -> Change:
        if self._began is None:
            self._began = self._mark = time.monotonic()
        self._lap("open" if recovered else "switch")
        pause = time.monotonic() - self._began
        change = Change(generation, step, pause, dict(self._phases), self._promoted, self._bytes,
                        checkpoint_bytes=self._checkpoint_bytes)  # fmt: skip
        self._forget()
        return change
