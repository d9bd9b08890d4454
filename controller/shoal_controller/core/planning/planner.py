"""The planner: a pure function from what each process holds, who is here and what is wanted to a `Plan`.

Owners, then mirrors, then fills, of each coordinate by itself; then cells and their lanes. Ownership changes only by
promotion: a plan makes owners and mirrors of those who hold a block already, and names fills towards its target; when
they are done, the next plan promotes the filled. So it never needs to know why the world changes. Every copy that the
target wants and that does not exist yet is sent by one of those who keep the block meanwhile: all have as little to
send as can be, and blocks with the fewest copies go first. Called by `question.answer`; the job machine asks by an
effect. docs/architecture.md, "Plans".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from shoal_protos.errors import ShoalError
from shoal_protos.plan import Fill, Member, Plan, Reason, Recovery, Share, WorkerId, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, Span, every, union

from shoal_controller.core.planning.before import Before
from shoal_controller.core.planning.block_groups import BlockGroup, KeptBlocks, gather, name_fills
from shoal_controller.core.planning.cells import Cell, pair, share_among
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT, Lanes
from shoal_controller.core.planning.mirrors import (
    Partners,
    PartnerTerms,
    choose_partners,
    leave_beside_spares,
    leave_mirrors,
    let_mirrors_wait,
    mirror_everywhere,
    mirror_on_spares,
    share_mirrors,
)
from shoal_controller.core.planning.owners import share_owners, share_pairs
from shoal_controller.core.planning.placement import is_small


class BlocksLost(ShoalError):
    """No candidate holds these blocks: there is no plan without a checkpoint."""

    def __init__(self, blocks: Runs, terms: Terms) -> None:
        self.blocks = blocks
        self.coordinates = tuple(c for c, home in enumerate(terms.homes) if home & blocks)
        """Whose home they are; empty where the shape is one process."""
        where = f", at home at coordinate {', '.join(map(str, self.coordinates))}" if terms.homes else ""
        super().__init__(f"{len(blocks)} of {terms.blocks} blocks have no live copy{where}: {blocks}.")


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
    counted: bool = True
    """Whether its state counts; only a recovery asks."""
    leaving: bool = False
    """Being drained: its blocks are filled elsewhere, and it is in the plan, and trains, as long as it is needed."""
    lane: int = NONE_IN_FLIGHT
    """The lane in flight. Counts only where the shape is one process: elsewhere no lane in flight is kept."""
    host: str = ""
    """Cells are paired within a host first; empty: the failure domain is one."""
    lane_seconds: float = 0.0
    """What a lane takes there, where lanes are shared by speed; 0: they are shared evenly."""


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
    repair_blocks_per_step: int = 0
    """The same where fills bring second copies of blocks: until those are there a second loss takes them. 0: no more
    than elsewhere, as where no mirrors are wanted."""
    first_repair_blocks: int = 0
    """How many of these a source sends at the first boundary after a loss at most."""
    trainers: int = 0
    """So many members train at most: younger ones are spares, which mirror for all and train when one is lost. 0: all
    do, as where a cell has several processes."""
    steps: bool = True
    """Whether optimizer steps run."""
    rounds: bool = False
    """Whether gradients are added up on shards, round by round (stages 2 and 3): consecutive lanes are a round then."""
    sharded: bool = False
    """Whether parameters are with owners and mirrors only (stage 3), as a part of a block's state: who trains gathers
    them, so nothing is ever handed out."""
    homes: tuple[Runs, ...] = ()
    """By coordinate, as in a plan (`Plan.homes`)."""
    models: tuple[Runs, ...] = ()
    """By coordinate, the blocks whose parameters its model has: its home, and what it has in common with others."""
    tight_parts: tuple[tuple[int, ...], ...] = ()
    """All coordinates, by those whose processes must share a host in a new cell; empty where none must."""


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
    stale = _stale(request.terms, world, [share.owned for share in world.shares])
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
    stale = _stale(request.terms, world, follows)
    return _plan(
        request, world, Recovery(step, record, counted, stale, lanes_in_flight=_in_flight(request.terms, world))
    )


def _stale(terms: Terms, world: _World, right: Sequence[Runs]) -> tuple[Runs, ...]:
    """What is handed out to each before the world opens. `right`: blocks whose parameters are right there."""
    if terms.sharded:
        return (NO_BLOCKS,) * len(right)
    return tuple(_model_at(terms, c.member.coordinate) - blocks for c, blocks in zip(world.here, right, strict=True))


def _model_at(terms: Terms, coordinate: int) -> Runs:
    """The blocks whose parameters the model of a process at a coordinate has."""
    return terms.models[coordinate] if terms.models else every(terms.blocks)


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
    cells: Sequence[Cell]
    """Those with lanes; where the shape is one process, the trainers."""


def _compose(terms: Terms, here: Sequence[Candidate], before: Plan | None) -> _World:
    """Owners, mirrors and fills of each coordinate, cells and their lanes."""
    here = _at_home(terms, here)
    holds = [candidate.holds for candidate in here]
    known = Before(before, [candidate.member for candidate in here])
    groups = gather(terms.blocks, holds, known.owned(holds))
    if lost := union(group.blocks for group in groups if not group.holders):
        raise BlocksLost(lost, terms)
    of_coordinates: list[list[BlockGroup]] = [[] for _ in range(len(terms.homes) or 1)]
    for group in groups:
        of_coordinates[here[next(iter(group.holders))].member.coordinate].append(group)
    keepers = [_keepers(here, coordinate) for coordinate in range(len(of_coordinates))]
    kept: list[KeptBlocks] = []
    partners: dict[int, tuple[int, ...]] = {}
    trainers = [staying[: terms.trainers or None] for staying in keepers]
    choose = _with_spares if terms.trainers else _target
    for staying, mine in zip(keepers, of_coordinates, strict=True):
        if staying:
            target = choose(terms, here, staying, known, mine)
            kept += _promote(target.groups, staying, min(terms.mirrors, len(staying) - 1))
            partners.update(target.partners)
    if not terms.homes:
        trainers[0] = [*trainers[0], *_needed_leavers(terms, here, trainers[0], kept)]
    left = known.cells(frozenset(chain.from_iterable(keepers)))
    cells = pair(trainers, [c.host or c.domain for c in here], left, terms.tight_parts)
    flights, paces = [here[cell[0]].lane for cell in cells], [candidate.lane_seconds for candidate in here]
    shared = share_among(cells, terms.lanes, flights, _domains(here), terms.rounds, paces)
    lanes = {worker: mine for cell, mine in shared.items() for worker in cell}
    return _without_the_needless(_World(here, _shares(here, kept, lanes, partners), name_fills(kept), tuple(shared)))


def _at_home(terms: Terms, here: Sequence[Candidate]) -> Sequence[Candidate]:
    """In a cell a process keeps blocks of its home only, and has no lane to begin again: its mates may be elsewhere."""
    if not terms.homes:
        return here
    return [replace(c, holds=c.holds & terms.homes[c.member.coordinate], lane=NONE_IN_FLIGHT) for c in here]


@dataclass(frozen=True, slots=True)
class _Target:
    """Who is to own and mirror what in the end."""

    groups: Sequence[BlockGroup]
    partners: Partners
    """From among whom an owner's mirrors come; empty where those are all others, or nobody mirrors anything."""


def _target(
    terms: Terms, here: Sequence[Candidate], keepers: Sequence[int], before: Before, groups: Sequence[BlockGroup]
) -> _Target:
    mirrors = min(terms.mirrors, len(keepers) - 1)
    domains = _domains(here)
    sites = domains if len({domains[keeper] for keeper in keepers}) > 1 else range(len(here))
    if mirrors != 1 and mirrors in (0, len(keepers) - 1):
        owned = share_owners(groups, keepers, {}, mirrors, sites)
        return _Target(mirror_everywhere(owned, keepers) if mirrors else owned, {})
    wanted = PartnerTerms(max(terms.mirror_partners, mirrors), mirrors)
    coordinate, holds = here[keepers[0]].member.coordinate, {keeper: here[keeper].holds for keeper in keepers}
    partners = choose_partners(before.partners(coordinate, wanted.count), keepers, sites, wanted)
    few = any(len(chosen) < len(partners) - 1 for chosen in partners.values())
    one = mirrors == 1
    settled = not (one and is_small(partners.values())) and before.is_at_rest(coordinate, holds)
    if settled and (kept := _as_kept(groups, partners, mirrors)) is not None:
        return _Target(kept, partners if few else {})
    if one and not settled:
        owned = share_pairs(groups, keepers, partners, sites)
    else:
        owned = share_owners(groups, keepers, partners, mirrors, sites)
    mirrored = share_mirrors(owned, partners, mirrors, domains)
    if settled:
        mirrored = leave_mirrors(mirrored, partners, domains)
    return _Target(let_mirrors_wait(mirrored, partners, domains), partners if few else {})


def _with_spares(
    terms: Terms, here: Sequence[Candidate], keepers: Sequence[int], before: Before, groups: Sequence[BlockGroup]
) -> _Target:
    """The target of a job that is to have spares, also while none is there: trainers own, spares mirror first."""
    trainers, spares = keepers[: terms.trainers], keepers[terms.trainers :]
    mirrors = min(terms.mirrors, len(keepers) - 1)
    domains = _domains(here)
    sites = domains if len({domains[keeper] for keeper in keepers}) > 1 else range(len(here))
    if mirrors == len(keepers) - 1:
        owned = share_owners(groups, trainers, {}, mirrors, sites)
        return _Target(mirror_everywhere(owned, keepers), {})
    wanted = PartnerTerms(max(terms.mirror_partners, mirrors), mirrors)
    coordinate, holds = here[keepers[0]].member.coordinate, {keeper: here[keeper].holds for keeper in keepers}
    known = before.partners(coordinate, wanted.count)
    partners = choose_partners(known, keepers, sites, wanted)
    owned = share_owners(groups, trainers, partners, mirrors, sites)
    beside = choose_partners(known, trainers, sites, wanted) if mirrors <= len(trainers) else {}
    mirrored = mirror_on_spares(owned, partners, beside, spares, mirrors, sites)
    if before.is_at_rest(coordinate, holds):
        mirrored = leave_beside_spares(mirrored, keepers, spares, sites)
    return _Target(mirrored, partners)


def _as_kept(groups: Sequence[BlockGroup], partners: Partners, mirrors: int) -> list[BlockGroup] | None:
    """What is at rest, as it is kept, where that is the target: all owners stay where they are even, and held mirrors
    stay with their partners. None where it is not so, and something has to move.
    """
    owned = dict.fromkeys(partners, 0)
    kept: list[BlockGroup] = []
    for group in groups:
        owner, beside = group.previous_owner, group.holders - {group.previous_owner}
        if len(group.holders) != mirrors + 1 or owner not in partners or not beside.issubset(partners[owner]):
            return None
        owned[owner] += len(group.blocks)
        kept.append(group.decided(owner, tuple(sorted(beside)), group.blocks))
    return kept if max(owned.values()) - min(owned.values()) <= 1 else None


def _by_age(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.join_order)


def _domains(here: Sequence[Candidate]) -> list[int]:
    numbers = {domain: number for number, domain in enumerate(sorted({candidate.domain for candidate in here}))}
    return [numbers[candidate.domain] for candidate in here]


def _hosts(here: Sequence[Candidate]) -> tuple[int, ...]:
    """The failure domain of each, where some share one and not all do."""
    domains = _domains(here)
    return tuple(domains) if 1 < len(set(domains)) < len(domains) else ()


def _keepers(here: Sequence[Candidate], coordinate: int) -> list[int]:
    """Who keeps blocks in the end, oldest first. When all are leaving, the oldest stays: somebody must be the last."""
    known = [worker for worker, candidate in enumerate(here) if candidate.member.coordinate == coordinate]
    staying = [worker for worker in known if not here[worker].leaving]
    return staying or known[:1]


def _needed_leavers(
    terms: Terms, here: Sequence[Candidate], trainers: Sequence[int], kept: Sequence[KeptBlocks]
) -> list[int]:
    """Leaving workers that train while they keep blocks, where there are lanes for them too: the others have no
    more to do than before.
    """
    leaving = [worker for worker, candidate in enumerate(here) if candidate.leaving and worker not in trainers]
    if not leaving:
        return []
    needed = {worker for now in kept for worker in (now.owner, *now.mirrors)}
    most = min(terms.lanes, terms.trainers or terms.lanes)
    return [worker for worker in leaving if worker in needed][: max(0, most - len(trainers))]


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


def _shares(
    here: Sequence[Candidate], kept: Sequence[KeptBlocks], lanes: Mapping[int, Lanes], partners: Partners
) -> list[Share]:
    owned: list[list[Span]] = [[] for _ in here]
    mirrored: list[list[Span]] = [[] for _ in here]
    awaited: defaultdict[int, list[Span]] = defaultdict(list)
    for now in kept:
        owned[now.owner] += now.group.blocks.spans
        for mirror in now.mirrors:
            mirrored[mirror] += now.group.blocks.spans
        if now.owner != now.group.owner:
            awaited[now.group.owner] += now.group.blocks.spans
    return [
        Share(
            lanes.get(worker, ()), Runs(owned[worker]), Runs(mirrored[worker]), partners.get(worker, ()),
            Runs(awaited.get(worker, ())),
        )
        for worker in range(len(here))
    ]  # fmt: skip


def _without_the_needless(world: _World) -> _World:
    """Lets those go who are leaving and keep nothing any more; the last one trains and stays. Ranks from here on."""
    rank: dict[int, int] = {}
    for worker, (candidate, share) in enumerate(zip(world.here, world.shares, strict=True)):
        if not candidate.leaving or share.keeps or share.lanes:
            rank[worker] = len(rank)
    fills = [Fill(rank[fill.source], rank[fill.target], fill.blocks) for fill in world.fills]
    shares = (world.shares[worker] for worker in rank)
    return _World(
        [world.here[worker] for worker in rank],
        [replace(share, partners=tuple(rank[other] for other in share.partners)) for share in shares],
        fills,
        [tuple(rank[worker] for worker in cell) for cell in world.cells],
    )


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
        steps=terms.steps and bool(world.cells),
        recovery=begins if isinstance(begins, Recovery) else None,
        hosts=_hosts(world.here),
        homes=terms.homes,
        cells=tuple(world.cells) if terms.homes else (),
    )
    rate, first = fill_pace(terms, plan)
    recovery = plan.recovery and replace(plan.recovery, first_fill_blocks=first)
    plan = replace(plan, fill_blocks_per_step=rate, recovery=recovery)
    check_plan(plan)
    return plan


def fill_pace(terms: Terms, plan: Plan) -> tuple[int, int]:
    """Returns how many blocks a source sends at a boundary, and at the first one after a loss: more of a step's time
    where fills bring second copies. Where no steps run, the first vote hands out parameters to all who do not replay
    them: a slice beside it would keep a wrong one where it is.
    """
    if not (terms.repair_blocks_per_step and plan.second_copies):
        return terms.fill_blocks_per_step, 0
    first = terms.first_repair_blocks if plan.recovery is not None and plan.steps else 0
    return max(terms.fill_blocks_per_step, terms.repair_blocks_per_step), first


def _builder(here: Sequence[Candidate], avoid: frozenset[WorkerId], base: Plan | None) -> int:
    """The oldest that stays and whose rendezvous server did not fail last time; if there is none, the next best.

    Always a member of the base: in a planned change the builder sends joiners their first message.
    """

    def preference(rank: int) -> tuple[bool, bool, bool, int]:
        member = here[rank].member
        joiner = base is not None and base.rank_of(member.worker, member.incarnation) is None
        return joiner, member.worker in avoid, here[rank].leaving, rank

    return min(range(len(here)), key=preference)
