"""The world of a simulated job: its steps, fills and saves, and the plan that replaces it.

All members commit a step at one instant, when the slowest has trained its lanes: a *barrier*. So one event stands for
all that they send each other, and where nothing is to change one event stands for many steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import MemberState, Telemetry
from shoal_protos.plan import Plan

from shoal_controller.simulation.clock import Clock
from shoal_controller.simulation.member import SimulatedMember
from shoal_controller.simulation.paces import RUN, Paces, SimulatedJob

IDLE_SECONDS = 0.1
"""Of a vote without a step."""


class Listener(Protocol):
    """Who hears of the world."""

    def say(self, member: SimulatedMember) -> None:
        """A member says where it stands."""

    def on_barrier(self) -> None:
        """Steps were committed."""

    def on_change(self) -> None:
        """Something else has happened than steps."""


class SteppingWorld:
    """See the module's text."""

    def __init__(self, clock: Clock, job: SimulatedJob, paces: Paces, listener: Listener) -> None:
        self.clock, self.job, self.paces, self._listener = clock, job, paces, listener
        self.plan: Plan | None = None
        self.ranks: list[SimulatedMember] = []
        """The members in the order of their ranks, those that have died since included."""
        self.checkpoint: CheckpointRef | None = None
        self.commits = self.worlds = 0
        """Steps that were committed, those made again included, and worlds that have begun."""
        self.may_leap = False
        """Whether all that happens from outside is on the clock's line: many steps may then be one event."""
        self._trained = 0.0
        """Seconds in steps."""
        self._step_seconds = 0.0
        """Of a whole step of this world."""
        self._began = 0.0
        """When the step under way was begun in this world."""
        self._barrier = 0
        """Number of the barrier that is awaited: an older one is over."""
        self._next: Plan | None = None
        self._informed: set[int] = set()
        """Connections of the members that know the next plan."""
        self._concerned = 0
        """How many have to know it."""
        self._next_is_built = False
        self._living: Iterable[SimulatedMember] = ()
        """Who may be in the next world."""

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way that will be committed, as far as is known now."""
        return self.plan is not None and self.plan.steps and self._is_whole(self.plan)

    def _is_whole(self, plan: Plan) -> bool:
        return len(self.ranks) == plan.world_size and all(member.has_begun for member in self.ranks)

    # ---- from one world to the next

    def begin(self, plan: Plan, living: Iterable[SimulatedMember]) -> None:
        """A world begins, for all at this instant."""
        members = [member for member in living if member.rank_in(plan) is not None]
        left = [member for member in self.ranks if member.has_begun and member.rank_in(plan) is None]
        step = max((member.step for member in self.ranks), default=-1)
        self.halt()
        self.plan, self.worlds = plan, self.worlds + 1
        self._step_seconds = self.paces.step(max(len(plan.lanes_of(rank)) for rank in plan.ranks))
        self.ranks = sorted(members, key=lambda member: member.rank_in(plan) or 0)
        for member in self.ranks:
            if plan.recovery is None and member.step < 0:
                member.step = step
        for member in (*self.ranks, *left):
            member.begin(plan)
            self._listener.say(member)
        self._listener.on_change()
        self._go_on(self._barrier)

    def halt(self) -> None:
        """No barrier of this world is reached any more."""
        self._barrier += 1
        self._next, self._informed, self._next_is_built = None, set(), False

    def stop(self, member: SimulatedMember) -> float:
        """A member is to stop: it first trains the lane in flight. Return the seconds that this takes."""
        trained, seconds = 0, 0.0
        if member.has_begun and member.remaining and self.plan is not None and self.plan.steps:
            lanes = (self.clock.now - self._began) / self.paces.lane
            trained = min(len(member.remaining), int(lanes) + 1)
            seconds = max(0.0, (trained - lanes) * self.paces.lane)
        if self.job.keeps_lanes:
            member.finished.update(member.remaining[:trained])
        self.halt()
        return seconds

    def learn(self, member: SimulatedMember, plan: Plan, living: Iterable[SimulatedMember]) -> None:
        """A member knows of a planned change: its group is built once all know who are in one of both worlds."""
        world, known = self.plan, self._next
        if world is None or plan.base != world.generation or (known is not None and plan.generation < known.generation):
            return
        if known is None or plan.generation > known.generation:
            self._next, self._informed, self._next_is_built = plan, set(), False
            self._concerned = len(world.workers | plan.workers)
        is_joiner = member.state in (MemberState.WAITING, MemberState.JOINING)
        if member.connection in self._informed or not (is_joiner or member.has_begun):
            return
        self._informed.add(member.connection)
        if len(self._informed) == self._concerned:
            same = plan.members == world.members
            self.clock.after(0.0 if same else self.paces.group, self._built, plan, living)

    def _built(self, plan: Plan, living: Iterable[SimulatedMember]) -> None:
        if plan is not self._next:
            return
        self._next_is_built = True
        for member in living:
            if member.state is MemberState.WAITING and member.rank_in(plan) is not None:
                member.state, member.promised = MemberState.JOINING, plan.generation
                self._listener.say(member)
        self._listener.on_change()
        self._living = living
        if self.plan is not None and not self.plan.steps:
            self._await_barrier(self.plan)

    def _begins(self) -> Plan | None:
        """The plan that replaces the world at this barrier: its group is built, and all hold what they are to keep."""
        plan = self._next
        if plan is None or not self._next_is_built:
            return None
        kept = ((member, member.rank_in(plan)) for member in self.ranks)
        return plan if all(rank is None or plan.kept_by(rank) <= member.holds for member, rank in kept) else None

    # ---- steps

    def _go_on(self, number: int) -> None:
        """At a world's begin, or after a pause at a boundary."""
        if number == self._barrier and self.plan is not None:
            self._began = self.clock.now
            self._await_barrier(self.plan)

    def _await_barrier(self, plan: Plan) -> None:
        """The next one is when the step under way is done; of a world in which nothing goes on but steps, the last one
        before anything else happens.
        """
        self._barrier += 1
        boundaries = self.ranks[0].boundaries
        if not plan.steps:
            if self._next is not None or boundaries < plan.boundaries:
                self.clock.after(IDLE_SECONDS, self._commit, self._barrier, 1)
            return
        first, each = self.paces.step(max(len(member.remaining) for member in self.ranks)), self._step_seconds
        more = 0
        if self.may_leap and self._next is None and boundaries:
            more = max(0, int((self.clock.next_at - self.clock.now - first) / each))
            if self.clock.now + (first + more * each) >= self.clock.next_at:  # that would be first, and break all of it
                more = max(0, more - 1)
            if boundaries < plan.boundaries:  # then all is filled, and the controller is to know
                more = min(more, plan.boundaries - boundaries - 1)
            if self.job.save_steps:
                more = min(more, self.job.save_steps - 1 - self.ranks[0].step % self.job.save_steps)
        self.clock.after(first + more * each, self._commit, self._barrier, 1 + more)

    def _commit(self, number: int, steps: int) -> None:
        """All have trained their lanes, or voted without; where a member is missing nothing comes of it."""
        plan = self.plan
        if number != self._barrier or plan is None or not self._is_whole(plan):
            return
        was_filling = self.ranks[0].boundaries < max(1, plan.boundaries)
        if plan.steps:
            self._count(plan, steps)
        else:
            for member in self.ranks:
                member.boundaries += 1
        self._listener.on_barrier()
        if was_filling:
            self._fill(plan)
        if (begins := self._begins()) is not None:
            self.begin(begins, self._living)
        elif pause := self._save(plan):
            self.clock.after(pause, self._go_on, self._barrier)
        else:
            self._go_on(self._barrier)

    def _count(self, plan: Plan, steps: int) -> None:
        seconds = self._step_seconds
        self.commits += steps
        self._trained += steps * seconds
        telemetry = Telemetry(step_seconds=seconds, step_seconds_median=seconds, training_seconds=self._trained)
        for rank, member in enumerate(self.ranks):
            member.commit(steps, telemetry)
            member.remaining = plan.lanes_of(rank)

    def _fill(self, plan: Plan) -> None:
        """What fills have brought by this boundary; what the world before had and this one does not keep is freed."""
        boundaries = self.ranks[0].boundaries
        targets = {fill.target for fill in plan.fills}
        is_news = boundaries == 1 or boundaries >= plan.boundaries
        for rank, member in enumerate(self.ranks):
            if rank in targets:
                member.holds = plan.held_by(rank, boundaries)
            elif boundaries == 1:
                member.holds = plan.kept_by(rank)
            if is_news:
                self._listener.say(member)
        if is_news:
            self._listener.on_change()

    # ---- saves

    def _save(self, plan: Plan) -> float:
        """Return the seconds for which training waits: where a checkpoint is due, which is whole a while later."""
        step = self.ranks[0].step
        if not (plan.steps and self.job.save_steps) or step % self.job.save_steps:
            return 0.0
        saved = CheckpointRef(plan.generation, step, f"/saves/{step}-{plan.generation}", run=RUN)
        self.clock.after(self.paces.save + self.paces.write, self._saved, saved)
        return self.paces.save

    def _saved(self, saved: CheckpointRef) -> None:
        """One that was begun by members who are gone is not completed."""
        members = [member for member in self.ranks if member.alive and member.generation >= saved.generation]
        if members:
            self.checkpoint = saved
            for member in members:
                member.checkpoint = saved
            self._listener.say(members[0])
