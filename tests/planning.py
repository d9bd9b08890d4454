"""A world as the planner's tests see it: acts upon it one after another, each answered by a plan that is checked.

    world = World(Terms(lanes=8, blocks=24, mirrors=1, mirror_partners=4, fill_blocks_per_step=4), "abc")
    world.join("d"); world.fill(); world.kill("a")

A letter is a worker, the alphabet is the order of joining, and a worker's failure domain is its own unless told
otherwise. Workers do here what they are told at once: a plan's fills are done when `fill` is called, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal_controller.core.planning.planner import (
    Candidate,
    PlanRequest,
    Terms,
    plan_change,
    plan_recovery,
    plan_start,
    same_world,
)
from shoal_protos.plan import Member, Plan, Reason, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, every

MOST_PLANS = 3
"""So many plans after the last disturbance, at most, the world is at rest: fill, promote, and one for good measure."""


def candidate(worker: str, holds: Runs = NO_BLOCKS, domain: str = "", coordinate: int = 0) -> Candidate:
    member = Member(worker, f"{worker}.1", f"127.0.0.1:{1000 + ord(worker)}", coordinate)
    return Candidate(member, domain or f"host of {worker}", ord(worker), holds=holds)


def transfers(plan: Plan) -> int:
    """Blocks that its fills move."""
    return sum(len(fill.blocks) for fill in plan.fills)


def partners_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Who may mirror an owner's blocks in the end."""
    return plan.shares[rank].partners or tuple(other for other in peers_of(plan, rank) if other != rank)


def peers_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Its coordinate's ranks, its own too."""
    return tuple(r for r, member in enumerate(plan.members) if member.coordinate == plan.members[rank].coordinate)


class World:
    """Candidates by letter, and the plan that is in force."""

    def __init__(
        self,
        terms: Terms,
        workers: str,
        domains: Mapping[str, str] | None = None,
        coordinates: Mapping[str, int] | None = None,
    ) -> None:
        self.terms = terms
        self.domains = domains or {}
        self.coordinates = coordinates or {}
        self.here = {worker: self._joiner(worker) for worker in workers}
        self.plans: list[Plan] = []
        self.asked: list[list[Candidate]] = []
        """Of every plan: the candidates."""
        joiners = list(self.here.values())
        plan = plan_start(self._request(Reason.START), joiners)
        self._take(plan, [replace(known, holds=every(terms.blocks)) for known in joiners])

    @property
    def plan(self) -> Plan:
        return self.plans[-1]

    def _joiner(self, worker: str) -> Candidate:
        return candidate(worker, domain=self.domains.get(worker, ""), coordinate=self.coordinates.get(worker, 0))

    def _request(self, reason: Reason) -> PlanRequest:
        return PlanRequest(self.terms, len(self.plans) + 1, reason)

    # ---- acts

    def join(self, *workers: str) -> Plan:
        for worker in workers:
            self.here[worker] = self._joiner(worker)
        return self._change(Reason.JOIN)

    def drain(self, *workers: str) -> Plan:
        for worker in workers:
            self.here[worker] = replace(self.here[worker], leaving=True)
        return self._change(Reason.DRAIN)

    def kill(
        self, *workers: str, lanes: Mapping[str, int] | None = None, current: Mapping[str, Runs] | None = None
    ) -> Plan:
        """Survivors hold what the plan keeps for them or has filled. `lanes` are in flight. `current`: the blocks whose
        parameters are right, of those who do not have all.
        """
        everything = every(self.terms.blocks)
        left = {worker: known for worker, known in self.here.items() if worker not in workers}
        stopped = [
            replace(
                known,
                current=(current or {}).get(worker, everything),
                lane=(lanes or {}).get(worker, -1),
            )
            for worker, known in left.items()
        ]
        plan = plan_recovery(self._request(Reason.KILL), stopped, self.plan, step=7, record=b"")
        self.here = left
        return self._take(plan, stopped)

    def fill(self, boundaries: int | None = None) -> None:
        """So many slices of the plan's fills have arrived; None: all."""
        done = self.plan.boundaries if boundaries is None else boundaries
        for rank, member in enumerate(self.plan.members):
            holds = self.plan.shares[rank].keeps | self.plan.filled(rank, done)
            self.here[member.worker] = replace(self.here[member.worker], holds=holds)

    def promote(self) -> Plan:
        """The planner is asked again."""
        return self._change(Reason.BALANCE)

    def settle(self) -> Plan:
        """Fill and ask again until the planner has nothing to change."""
        for _ in range(MOST_PLANS):
            before = self.plan
            self.fill()
            if same_world(self.promote(), before):
                return self.plan
        raise AssertionError(f"the world is not at rest after {MOST_PLANS} plans: {self.plan}")

    # ---- every plan

    def _change(self, reason: Reason) -> Plan:
        candidates = list(self.here.values())
        return self._take(plan_change(self._request(reason), candidates, self.plan), candidates)

    def _take(self, plan: Plan, asked: list[Candidate]) -> Plan:
        """Checks a plan against what was known when it was made; then it is in force."""
        check_plan(plan)
        known = {candidate.member: candidate for candidate in asked}
        somebody_stays = {known.member.coordinate for known in asked if not known.leaving}
        for member, share in zip(plan.members, plan.shares, strict=True):
            assert share.keeps <= known[member].holds, "owners and mirrors have valid bits"
            if known[member].leaving and member.coordinate in somebody_stays:
                assert share.keeps or not share.lanes, "who leaves trains as long as it keeps blocks"
                assert share.keeps, "who leaves and keeps nothing is left out"
        for fill in plan.fills:
            target = known[plan.members[fill.target]]
            stays = target.member.coordinate not in somebody_stays or not target.leaving
            assert stays, "who leaves is not filled"
        self.plans.append(plan)
        self.asked.append(asked)
        self.here = {member.worker: self.here[member.worker] for member in plan.members}
        self.fill(0)
        return plan

    def stays(self, worker: str) -> bool:
        """Whether the worker is to keep blocks in the end."""
        return not self.here[worker].leaving

    # ---- what the wishes say of a world at rest

    @property
    def mirrors(self) -> int:
        return min(self.terms.mirrors, self.plan.world_size - 1)

    def check_at_rest(self) -> None:
        """All that a plan without fills must have reached."""
        plan = self.plan
        domains = [self.here[member.worker].domain for member in plan.members]
        for block in range(plan.blocks):
            copies = [rank for rank, share in enumerate(plan.shares) if block in share.keeps]
            peers = peers_of(plan, copies[0])
            owned = [len(plan.shares[peer].owned) for peer in peers]
            assert max(owned) - min(owned) <= 1, f"owners are even to one block: {owned}"
            mirrors = min(self.terms.mirrors, len(peers) - 1)
            wanted = min(mirrors + 1, len({domains[peer] for peer in peers}))
            assert len(copies) == mirrors + 1, f"block {block} has {len(copies) - 1} mirrors"
            assert len({domains[rank] for rank in copies}) == wanted, f"block {block} is in too few domains"

            for owner, share in enumerate(plan.shares):
                if block in share.owned:
                    assert set(copies) <= {owner, *partners_of(plan, owner)}, f"block {block} has a mirror elsewhere"

    def unevenness(self) -> int:
        """By how many blocks the copies of one owner are spread unevenly over those who may mirror them, at worst."""
        plan = self.plan
        domains = [self.here[member.worker].domain for member in plan.members]
        one_domain = len(set(domains)) == 1
        worst = 0
        for owner, share in enumerate(plan.shares):
            spread = [
                len(share.owned & plan.shares[mirror].mirrored)
                for mirror in partners_of(plan, owner)
                if one_domain or domains[mirror] != domains[owner]
            ]
            worst = max([worst, *(count - min(spread) for count in spread)])
        return worst
