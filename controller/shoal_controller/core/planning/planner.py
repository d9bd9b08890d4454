"""The planner: a pure function from what each process holds, who is here and what is wanted to a `Plan`.

Lanes, then owners, then mirrors, then fills. Ownership changes only by promotion: a plan makes owners and mirrors of
those who hold a block already, and names fills towards its target; when they are done, the next plan promotes the
filled. So it never needs to know why the world changes. Called by `question.answer`; the job machine
asks by an effect. docs/architecture.md, "Plans".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal_protos.errors import ShoalError
from shoal_protos.plan import Fill, Member, Plan, Reason, Recovery, Share, WorkerId, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, Span, every, union

from shoal_controller.core.planning.block_groups import BlockGroup, gather
from shoal_controller.core.planning.fills import KeptBlocks, name_fills
from shoal_controller.core.planning.lanes import Lanes, share_lanes, share_rounds
from shoal_controller.core.planning.mirrors import (
    Partners,
    PartnerTerms,
    choose_partners,
    leave_mirrors,
    let_mirrors_wait,
    mirror_everywhere,
    share_mirrors,
)
from shoal_controller.core.planning.owners import share_owners, share_pairs
from shoal_controller.core.planning.placement import is_small


class BlocksLost(ShoalError):
    """No candidate holds these blocks: there is no plan without a checkpoint."""

    def __init__(self, blocks: Runs, of: int) -> None:
        super().__init__(f"{len(blocks)} of {of} blocks have no live copy: {blocks}.")
        self.blocks = blocks


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process as the planner sees it."""

    member: Member
    domain: str
    """Failure domain."""
    join_order: int
    """Order of joining the job; the youngest has the highest number."""
    holds: Runs = NO_BLOCKS
    """Blocks whose state it holds with valid bits at the step where the plan begins. For a planned change: what its
    base plan keeps for it or has filled, never what the base releases. At a start it does not matter."""
    current: Runs = NO_BLOCKS
    """Blocks whose parameters are right at that step; only a recovery asks, and not where they are sharded."""
    can_train: bool = True
    """All its parameters are right, or will be handed out in the recovery, or are gathered when it trains: it may get
    lanes and be a fill's target."""
    counted: bool = True
    """Whether its state counts; only a recovery asks."""
    leaving: bool = False
    """Being drained: no lanes, its blocks are filled elsewhere, and it is in the plan only as long as it is needed."""
    lane: int = -1
    """The lane in flight; -1: none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the job wants, whatever happens."""

    lanes: int
    blocks: int
    mirrors: int
    """`EVERYONE` in stage 0."""
    mirror_partners: int
    """Among how many others the mirrors of one owner's blocks are spread."""
    fill_blocks_per_step: int
    steps: bool = True
    """Whether optimizer steps run."""
    rounds: bool = False
    """Whether gradients are added up on shards, round by round (stages 2 and 3): consecutive lanes are a round then."""
    sharded: bool = False
    """Whether parameters are with owners and mirrors only (stage 3), as a part of a block's state: who trains gathers
    them, so nothing is ever handed out, and whoever has none trains at once."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is wanted of this one plan."""

    terms: Terms
    generation: int
    reason: Reason
    avoid: frozenset[WorkerId] = frozenset()
    """Workers whose rendezvous server should not build the group: it failed last time."""


def plan_start(request: PlanRequest, candidates: Sequence[Candidate], step: int = 0, checkpoint: str = "") -> Plan:
    """A start: all have all blocks at hand, so the target is reached at once.

    Or a restore from a checkpoint: nothing that the members hold counts. Each reads what it is to own, so that no block
    is read twice, and mirrors are filled beside training.
    """
    everything = every(request.terms.blocks)
    world = _compose(request.terms, [replace(c, holds=everything) for c in _by_age(candidates)], before=None)
    size = len(world.here)
    if not checkpoint:
        return _plan(request, world, Recovery(step, b"", (True,) * size, (NO_BLOCKS,) * size))
    owners = [replace(c, holds=share.owned) for c, share in zip(world.here, world.shares, strict=True)]
    world = _compose(request.terms, owners, before=None)
    stale = _stale(request.terms, [share.owned for share in world.shares])
    return _plan(request, world, Recovery(step, b"", (False,) * size, stale, checkpoint))


def plan_recovery(
    request: PlanRequest, candidates: Sequence[Candidate], before: Plan, step: int, record: bytes
) -> Plan:
    """After a loss, from inventories. Raises `BlocksLost`.

    Leaving candidates that nothing needs any more are not among its members.
    """
    here = [c if c.counted else replace(c, holds=NO_BLOCKS, current=NO_BLOCKS) for c in _by_age(candidates)]
    world = _compose(request.terms, here, before)
    counted = tuple(candidate.counted for candidate in world.here)
    follows = [candidate.current | share.keeps for candidate, share in zip(world.here, world.shares, strict=True)]
    stale = _stale(request.terms, follows)
    return _plan(
        request, world, Recovery(step, record, counted, stale, lanes_in_flight=_in_flight(request.terms, world))
    )


def _stale(terms: Terms, right: Sequence[Runs]) -> tuple[Runs, ...]:
    """What is handed out to each before the world opens. `right`: blocks whose parameters are right there."""
    if terms.sharded:
        return (NO_BLOCKS,) * len(right)
    return tuple(every(terms.blocks) - blocks for blocks in right)


def _in_flight(terms: Terms, world: _World) -> tuple[int, ...]:
    """Which lane each begins with, where all must know: owners add up what comes in by the order of the rounds."""
    if not terms.rounds:
        return ()
    pairs = zip(world.here, world.shares, strict=True)
    return tuple(candidate.lane if candidate.lane in share.lanes else -1 for candidate, share in pairs)


def plan_change(request: PlanRequest, candidates: Sequence[Candidate], before: Plan) -> Plan:
    """A planned change of the world of `before`. Raises `BlocksLost` where one who must not leave yet was left out.

    Leaving candidates that nothing needs any more are not among its members.
    """
    return _plan(request, _compose(request.terms, _by_age(candidates), before), before)


def same_world(one: Plan, other: Plan) -> bool:
    """Whether going from one plan to the other would change nothing."""
    fills = (one.fills, one.fill_blocks_per_step) == (other.fills, other.fill_blocks_per_step)
    return one.is_like(other) and fills


# ---- composition. A worker is its index in `here`, oldest first: its rank.


@dataclass(frozen=True, slots=True)
class _World:
    here: Sequence[Candidate]
    shares: Sequence[Share]
    fills: Sequence[Fill]


def _compose(terms: Terms, here: Sequence[Candidate], before: Plan | None) -> _World:
    """Lanes, owners, mirrors, fills."""
    groups = gather(terms.blocks, [candidate.holds for candidate in here], _owned_before(before, here))
    if lost := union(group.blocks for group in groups if not group.holders):
        raise BlocksLost(lost, terms.blocks)
    keepers = _keepers(here)
    target = _target(terms, here, keepers, before, groups)
    kept = _promote(target.groups, keepers, min(terms.mirrors, len(keepers) - 1))
    domains, flights = _domains(here), [here[keeper].lane for keeper in keepers]
    share = share_rounds if terms.rounds else share_lanes
    lanes = dict(zip(keepers, share(terms.lanes, flights, [domains[keeper] for keeper in keepers]), strict=True))
    return _without_the_needless(_World(here, _shares(len(here), kept, lanes), name_fills(kept)), target.partners)


@dataclass(frozen=True, slots=True)
class _Target:
    """Who is to own and mirror what in the end."""

    groups: Sequence[BlockGroup]
    partners: Partners
    """From among whom an owner's mirrors come; empty where all others mirror everything, or nobody anything."""


def _target(
    terms: Terms, here: Sequence[Candidate], keepers: Sequence[int], before: Plan | None, groups: Sequence[BlockGroup]
) -> _Target:
    mirrors = min(terms.mirrors, len(keepers) - 1)
    domains = _domains(here)
    sites = domains if len({domains[keeper] for keeper in keepers}) > 1 else range(len(here))
    if mirrors != 1 and mirrors in (0, len(keepers) - 1):
        owned = share_owners(groups, keepers, {}, mirrors, sites)
        return _Target(mirror_everywhere(owned, keepers) if mirrors else owned, {})
    wanted = PartnerTerms(max(terms.mirror_partners, mirrors), mirrors)
    partners = choose_partners(_partners_before(before, here, wanted.count), keepers, sites, wanted)
    one = mirrors == 1
    settled = not (one and is_small(partners.values())) and _at_rest(before, here, keepers)
    if one and not settled:
        owned = share_pairs(groups, keepers, partners, sites)
    else:
        owned = share_owners(groups, keepers, partners, mirrors, sites)
    mirrored = share_mirrors(owned, partners, mirrors, domains)
    if settled:
        mirrored = leave_mirrors(mirrored, partners, domains)
    return _Target(let_mirrors_wait(mirrored, partners, domains), partners)


def _partners_before(before: Plan | None, here: Sequence[Candidate], count: int) -> Partners:
    """Those of the plan before who are still here. Where it names none, all were each other's if they were so few."""
    if before is None:
        return {}
    now = {(known.member.worker, known.member.incarnation): worker for worker, known in enumerate(here)}
    at = [now.get((member.worker, member.incarnation)) for member in before.members]
    everyone = range(before.world_size) if before.world_size - 1 <= count else ()
    partners: dict[int, tuple[int, ...]] = {}
    for rank, (worker, share) in enumerate(zip(at, before.shares, strict=True)):
        if worker is not None:
            chosen = (at[partner] for partner in share.partners or everyone if partner != rank)
            partners[worker] = tuple(partner for partner in chosen if partner is not None)
    return partners


def _at_rest(before: Plan | None, here: Sequence[Candidate], keepers: Sequence[int]) -> bool:
    """Whether those who keep blocks are the same as before and have all that they were to get.

    Then nothing is moved any more for an even spread of mirrors where the cheapest one was not looked for (several
    mirrors, a large world), so that planning comes to an end.
    """
    if before is None:
        return False
    given = [share.keeps for share in before.shares]
    for fill in before.fills:
        given[fill.target] |= fill.blocks
    keeping = {
        (member.worker, member.incarnation): blocks
        for member, blocks in zip(before.members, given, strict=True)
        if blocks
    }
    now = {(here[keeper].member.worker, here[keeper].member.incarnation): here[keeper].holds for keeper in keepers}
    return keeping.keys() == now.keys() and all(blocks <= now[process] for process, blocks in keeping.items())


def _by_age(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.join_order)


def _domains(here: Sequence[Candidate]) -> list[int]:
    numbers = {domain: number for number, domain in enumerate(sorted({candidate.domain for candidate in here}))}
    return [numbers[candidate.domain] for candidate in here]


def _hosts(here: Sequence[Candidate]) -> tuple[int, ...]:
    """The failure domain of each, where some share one and not all do."""
    domains = _domains(here)
    return tuple(domains) if 1 < len(set(domains)) < len(domains) else ()


def _keepers(here: Sequence[Candidate]) -> list[int]:
    """Who trains and keeps blocks in the end. When all are leaving, the oldest stays: somebody must be the last."""
    able = [worker for worker, candidate in enumerate(here) if candidate.can_train]
    staying = [worker for worker in able if not here[worker].leaving]
    if not able:
        raise ValueError(f"none of {len(here)} candidates may train; a world needs one who does")
    return staying or able[:1]


def _owned_before(before: Plan | None, here: Sequence[Candidate]) -> dict[int, Runs]:
    """What each owned in the plan before, or was to own there and has been filled with since."""
    if before is None:
        return {}
    owned: dict[int, Runs] = {}
    arrived: dict[int, Runs] = {}
    for worker, candidate in enumerate(here):
        rank = before.rank_of(candidate.member.worker, candidate.member.incarnation)
        if rank is not None:
            share = before.shares[rank]
            owned[worker] = share.owned
            if share.awaited:
                arrived[worker] = share.awaited & candidate.holds
    if not arrived:
        return owned
    promoted = union(arrived.values())
    return {worker: (blocks - promoted) | arrived.get(worker, NO_BLOCKS) for worker, blocks in owned.items()}


def _promote(groups: Sequence[BlockGroup], keepers: Sequence[int], mirrors: int) -> list[KeptBlocks]:
    """Owners and mirrors until the fills are done: holders only."""
    staying = frozenset(keepers)
    return [
        KeptBlocks(group, group.owner, group.mirrors)
        if group.holders.issuperset(group.keepers)
        else _meanwhile(group, staying, mirrors)
        for group in groups
    ]


def _meanwhile(group: BlockGroup, keepers: frozenset[int], mirrors: int) -> KeptBlocks:
    """The owner before stays while the wanted one is being filled. Who is to keep the blocks comes first.

    Holders beyond the wanted copies release the blocks.
    """
    wanted = [worker for worker in group.keepers if worker in group.holders]
    targets = tuple(worker for worker in group.keepers if worker not in group.holders)
    staying = sorted(group.holders & keepers)
    if group.owner in group.holders:
        owner = group.owner
    elif group.previous_owner in keepers:
        owner = group.previous_owner
    else:
        owner = (wanted or staying or sorted(group.holders))[0]
    order = dict.fromkeys((*wanted, *staying, *sorted(group.holders)))
    del order[owner]
    return KeptBlocks(group, owner, tuple(order)[:mirrors], targets)


def _shares(size: int, kept: Sequence[KeptBlocks], lanes: Mapping[int, Lanes]) -> list[Share]:
    owned: list[list[Span]] = [[] for _ in range(size)]
    mirrored: list[list[Span]] = [[] for _ in range(size)]
    awaited: defaultdict[int, list[Span]] = defaultdict(list)
    for now in kept:
        owned[now.owner] += now.group.blocks.spans
        for mirror in now.mirrors:
            mirrored[mirror] += now.group.blocks.spans
        if now.owner != now.group.owner:
            awaited[now.group.owner] += now.group.blocks.spans
    return [
        Share(lanes.get(worker, ()), Runs(owned[worker]), Runs(mirrored[worker]), awaited=Runs(awaited.get(worker, ())))
        for worker in range(size)
    ]


def _without_the_needless(world: _World, partners: Partners) -> _World:
    """Lets those go who are leaving and keep nothing any more; the last one trains and stays. Ranks from here on."""
    rank: dict[int, int] = {}
    for worker, (candidate, share) in enumerate(zip(world.here, world.shares, strict=True)):
        if not candidate.leaving or share.keeps or share.lanes:
            rank[worker] = len(rank)
    fills = [Fill(rank[fill.source], rank[fill.target], fill.blocks) for fill in world.fills]
    few = any(len(chosen) < len(partners) - 1 for chosen in partners.values())
    shares = [
        replace(world.shares[worker], partners=tuple(rank[partner] for partner in partners.get(worker, ())))
        if few
        else world.shares[worker]
        for worker in rank
    ]
    return _World([world.here[worker] for worker in rank], shares, fills)


def _plan(request: PlanRequest, world: _World, begins: Plan | Recovery) -> Plan:
    """`begins`: the world that a planned change replaces, or where all stand."""
    terms, base = request.terms, begins if isinstance(begins, Plan) else None
    plan = Plan(
        generation=request.generation,
        base=base.generation if base is not None else 0,
        reason=request.reason,
        lanes=terms.lanes,
        blocks=terms.blocks,
        members=tuple(candidate.member for candidate in world.here),
        shares=tuple(world.shares),
        fills=tuple(world.fills),
        fill_blocks_per_step=terms.fill_blocks_per_step,
        builder=_builder(world.here, request.avoid, base),
        steps=terms.steps,
        recovery=begins if isinstance(begins, Recovery) else None,
        hosts=_hosts(world.here),
    )
    check_plan(plan)
    return plan


def _builder(here: Sequence[Candidate], avoid: frozenset[WorkerId], base: Plan | None) -> int:
    """The oldest that stays and whose rendezvous server did not fail last time; if there is none, the next best.

    Always a member of the base: in a planned change the builder sends joiners their first message.
    """

    def preference(rank: int) -> tuple[bool, bool, bool, int]:
        member = here[rank].member
        joiner = base is not None and base.rank_of(member.worker, member.incarnation) is None
        return joiner, member.worker in avoid, here[rank].leaving, rank

    return min(range(len(here)), key=preference)
