"""Who holds what: lanes, blocks and mirrors of each member, which copies are missing, what a failure domain would take.

Read from the plan of the world that may train, and from the votes that its members have passed: what is on its way to
whom. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_protos.plan import Plan, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs, every, union
from shoal_protos.text import plural

from shoal_controller.core.machine.spec import JobView, WorkerView
from shoal_controller.core.machine.view import missing_copies
from shoal_controller.core.overview.amounts import listed, size


@dataclass(frozen=True, slots=True)
class MemberHoldings:
    """What one member of the world has."""

    worker: WorkerId
    rank: int
    host: str
    domain: str
    lanes: tuple[int, ...]
    owned: Runs
    mirrored: Runs


@dataclass(frozen=True, slots=True)
class FillProgress:
    """Blocks on their way from one member to another."""

    source: WorkerId
    target: WorkerId
    blocks: int
    filled: int
    """Of these: how many the target has received."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds what in the world that may train."""

    members: tuple[MemberHoldings, ...]
    fills: tuple[FillProgress, ...]
    missing: Runs
    """Blocks with fewer copies than wanted."""
    domains: Mapping[str, tuple[WorkerId, ...]]
    """Members by failure domain."""
    sentence: str


NOBODY = Holdings((), (), NO_BLOCKS, {}, "no world trains: what workers hold counts again when one is made")


def holdings(view: JobView) -> Holdings:
    """Nobody's where there is no world."""
    world = view.world
    if world is None:
        return NOBODY
    workers = {worker.worker: worker for worker in view.workers}
    members = tuple(_members(world, workers))
    fills = tuple(_fills(world, workers))
    missing = missing_copies(world, view.copies_wanted)
    domains: dict[str, tuple[WorkerId, ...]] = {}
    for member in members:
        domains[member.domain] = (*domains.get(member.domain, ()), member.worker)
    sentences = [_copies(view, world, missing), _on_their_way(view, fills), *_exposed(world, members, domains)]
    return Holdings(members, fills, missing, domains, "; ".join(filter(None, sentences)))


def exposed_blocks(world: Plan, inside: frozenset[WorkerId]) -> Runs:
    """Blocks of which only these members have copies."""
    outside = (rank for rank, member in enumerate(world.members) if member.worker not in inside)
    return every(world.blocks) - union(map(world.kept_by, outside))


def _members(world: Plan, workers: Mapping[WorkerId, WorkerView]) -> Iterator[MemberHoldings]:
    for rank, member in enumerate(world.members):
        known = workers.get(member.worker)
        host, domain = (known.host, known.domain) if known is not None else ("", "")
        blocks = world.owned_by(rank), world.mirrored_by(rank)
        yield MemberHoldings(member.worker, rank, host, domain, world.lanes_of(rank), *blocks)


def _fills(world: Plan, workers: Mapping[WorkerId, WorkerView]) -> Iterator[FillProgress]:
    filled: dict[int, Runs] = {}
    for fill in world.fills:
        source, target = world.members[fill.source].worker, world.members[fill.target].worker
        if fill.target not in filled:
            known = workers.get(target)
            filled[fill.target] = world.filled(fill.target, known.boundaries if known is not None else 0)
        yield FillProgress(source, target, len(fill.blocks), len(fill.blocks & filled[fill.target]))


def _copies(view: JobView, world: Plan, missing: Runs) -> str:
    if world.world_size == 1:
        return f"{world.members[0].worker} has the only copy of every block"
    everywhere = view.copies_wanted == world.world_size
    if missing:
        fewer = "are not with every worker" if everywhere else "have fewer copies than wanted"
        return f"{plural(len(missing), 'block')} {fewer}"
    if everywhere:
        return "every worker has every block"
    none = view.copies_wanted == 1
    if none and (alone := _with_one_worker(view, world)):
        return f"blocks at {listed(alone)} have one copy, as only one worker is there"
    return "no block has a mirror, as none is wanted" if none else f"every block has {view.copies_wanted} copies"


def _with_one_worker(view: JobView, world: Plan) -> list[str]:
    """The coordinates of a cell of several processes at which there is one worker."""
    workers = Counter(member.coordinate for member in world.members)
    return [view.cell.named(place) for place, number in sorted(workers.items()) if number == 1 < world.coordinates]


def _on_their_way(view: JobView, fills: Sequence[FillProgress]) -> str:
    left = {fill.target: 0 for fill in fills if fill.filled < fill.blocks}
    for fill in fills:
        if fill.target in left:
            left[fill.target] += fill.blocks - fill.filled
    if not left:
        return ""
    blocks = sum(left.values())
    amount = f" ({size(blocks * view.block_bytes)})" if view.block_bytes else ""
    return f"{plural(blocks, 'block')}{amount} on the way to {listed(list(left))}"


def _exposed(
    world: Plan, members: Sequence[MemberHoldings], domains: Mapping[str, tuple[WorkerId, ...]]
) -> Iterator[str]:
    """What the loss of a whole failure domain would take, where there is more than one and it has several members."""
    if len(domains) < 2:
        if len(members) > 1:
            yield "all are in one failure domain"
        return
    for domain, inside in domains.items():
        lost = exposed_blocks(world, frozenset(inside)) if len(inside) > 1 else NO_BLOCKS
        if lost:
            yield f"{plural(len(lost), 'block')} only in the failure domain {domain or '(unnamed)'}"
