"""The worker's side of the generation protocol: what it has promised, what it may vote, which world it is in.

One object per process, fed by whoever listens to the controller (the session's thread, the simulator) and asked by
whoever trains (the training thread, the simulated worker). Pure: it holds no group, no socket, no clock. Its drivers
carry out what its answers say and guard it with one lock. docs/architecture.md ("A change of the world"); the abstract
model's names are `promised`, `ready` (here `voted`), `next`, `keep` (here `kept`) and `go` (here `begins`).
"""

from __future__ import annotations

from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.runs import Runs

JOINER = (MemberState.WARMING_UP, MemberState.WAITING, MemberState.JOINING)


class Membership:
    """Where this process stands. `plan` is the plan of the world that it is in, None before the first."""

    def __init__(self, worker: WorkerId, incarnation: str) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.start_over()

    def start_over(self) -> None:
        """Back to a joiner that is not warm; `promised` stays, numbers only grow."""
        self.promised = getattr(self, "promised", 0)
        self.stopped_for = 0
        self.generation = 0
        self.state = MemberState.WARMING_UP
        self.plan: Plan | None = None
        self._forget()

    def _forget(self) -> None:
        self.recovery: Plan | None = None
        self.next: Plan | None = None
        self.next_built = False
        self.kept: dict[int, Plan] = {}
        self.begins: Plan | None = None
        self.deferred: Plan | None = None
        self.voted = self.generation
        self.voting = False

    @property
    def is_joiner(self) -> bool:
        return self.state in JOINER

    def _rank_in(self, plan: Plan) -> int | None:
        return plan.rank_of(self.worker, self.incarnation)

    # ---- from the controller

    def on_prepare(self, generation: int) -> bool:
        """PREPARE. True: abort every group now (the current one, and all that are being built or kept), then report.

        False with `promised == generation`: it has stopped already, say the inventory again.
        """
        if generation <= self.promised:
            return False
        self.promised = self.stopped_for = generation
        self._forget()
        if self.generation:
            self.state = MemberState.STOPPED
        elif self.state is not MemberState.WARMING_UP:
            self.state = MemberState.WAITING  # of no world yet, also where the one that it built was never opened
        return True

    def on_recovery(self, plan: Plan) -> bool:
        """PLAN made from inventories. True: build its group, catch up, then call `report_ready`."""
        wanted = plan.generation == self.promised and self.recovery is None and self._rank_in(plan) is not None
        if not wanted or self.state not in (MemberState.STOPPED, MemberState.WAITING):
            return False
        self.recovery = plan
        self.state = MemberState.BUILDING
        return True

    def on_open(self, generation: int) -> bool:
        """OPEN. True: begin the world of the recovery."""
        return generation == self.promised and self.state is MemberState.READY

    def on_planned(self, plan: Plan) -> bool:
        """A planned change. True: build its group in the background (none needed where `builds(plan)` is false)."""
        newest = max(self.promised, self.generation, self.next.generation if self.next else 0)
        if plan.generation <= newest or self.begins is not None:
            return False
        if self.is_joiner:
            if self.state is MemberState.WARMING_UP or self._rank_in(plan) is None:
                return False
            self._keep_beside(plan)
        elif plan.base != self.generation or self.state is not MemberState.TRAINING:
            return False
        elif self.voting and self.voted > self.generation:
            self.deferred = plan  # what a member voted it keeps until that vote is over
            return False
        self.next, self.next_built = plan, False
        if self.is_joiner:
            self.state = MemberState.WAITING
        elif not self.builds(plan):
            self.next_built = True
        return True

    def _keep_beside(self, plan: Plan) -> None:
        """A joiner has no vote: it keeps every plan that may begin. Void is one whose base is no longer current."""
        if self.next is not None:
            self.kept[self.next.generation] = self.next
        void = [n for n, kept in self.kept.items() if kept.base < plan.base and n != plan.base]
        for generation in void:
            del self.kept[generation]

    def builds(self, plan: Plan) -> bool:
        """Whether this process needs a new group for a planned change: not when left out, nor for the same members."""
        if self._rank_in(plan) is None:
            return False
        return self.plan is None or self.is_joiner or plan.members != self.plan.members

    # ---- from the driver

    def end_warm_up(self) -> None:
        """The joiner is warm, and ready to become a member."""
        if self.state is MemberState.WARMING_UP:
            self.state = MemberState.WAITING

    def on_built(self, generation: int) -> None:
        """The group of a planned change is built."""
        if self.next is not None and self.next.generation == generation:
            self.next_built = True
            if self.is_joiner:
                self.state = MemberState.JOINING
                self.promised = max(self.promised, generation)

    def report_ready(self, generation: int) -> bool:
        """The recovery's group is built and all is in place. False: another PREPARE came meanwhile."""
        if self.recovery is None or self.recovery.generation != generation:
            return False
        self.state = MemberState.READY
        return True

    # ---- the vote

    def enter_vote(self, holds: Runs) -> int:
        """The number to vote: the next generation's when this process is ready for it, else the current one's.

        `holds`: the blocks that it keeps or has filled when this vote passes.
        """
        self.voting = True
        self.voted = self.generation
        if self.next is not None and self.next_built:
            rank = self._rank_in(self.next)
            if rank is None or self.next.kept_by(rank) <= holds:
                self.voted = self.next.generation
        return self.voted

    def leave_vote(self, voted: list[int]) -> Plan | None:
        """The vote has passed with these numbers. Returns the plan that begins after the hand-out, if one does."""
        self.voting = False
        if min(voted) == max(voted) > self.generation:
            self.begins = self.next
        return self.begins

    def take_deferred(self) -> Plan | None:
        """The newest plan that came during the vote that is over now, once: to be carried out.

        A standby is in a vote nearly all the time; no other plan than the one it votes would ever be taken up.
        """
        deferred, self.deferred = self.deferred, None
        return deferred

    # ---- a world begins

    def begin(self, plan: Plan) -> None:
        """The world of `plan` begins here: after a hand-out, on OPEN, or on a joiner's first message.

        A later PREPARE may have come while the driver was on its way here: then it begins, and stands stopped.
        """
        self.promised = max(self.promised, plan.generation)
        if self._rank_in(plan) is None:
            self.state = MemberState.LEFT  # `generation` stays: it says which world its blocks are of
        else:
            self.generation = plan.generation
            self.plan = plan
            self.state = MemberState.TRAINING
        if self.stopped_for > plan.generation:
            self.state = MemberState.STOPPED
        self._forget()

    @property
    def live(self) -> set[int]:
        """The generations whose groups may still be used."""
        plans = (self.recovery, self.next, self.begins)
        return {self.generation, *self.kept} | {plan.generation for plan in plans if plan is not None}

    @property
    def newest_known(self) -> int:
        """What the status says as `promised`: the highest generation stopped for, built or voted."""
        return max(self.promised, self.generation, self.voted)

    @property
    def newest_planned(self) -> int:
        """The highest generation of a plan that may still begin here, promised or not; 0: there is none."""
        plans = (self.next, self.begins, self.deferred, *self.kept.values())
        return max((plan.generation for plan in plans if plan is not None), default=0)
