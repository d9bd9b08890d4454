"""The plan: who is in a world, which lanes each trains, which blocks each owns and mirrors, what is still to be filled.

A lane is trained by a *cell*: one process at each *coordinate* of the job's *shape*. A shape of one process is the
usual one: then the process runs the whole model, and nothing of cells is in the plan. Others ask the plan for the
trainers of a lane.

Made by the controller's planner, carried out by the workers; nothing else knows how to resize. Pure: standard library
only. `check_plan` holds the invariants; it runs where the planner returns, where a worker receives a plan, and after
every event of a simulation. Ranks index every per-member tuple.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from shoal_protos.errors import PeerError
from shoal_protos.runs import NO_BLOCKS, Runs, every, union

WorkerId = str
"""`w0`, `w1`, …: never used twice in a job."""

EVERYONE = 1 << 30
"""`mirrors` of stage 0: every member mirrors every block that it does not own."""

DEFAULT_MIRROR_PARTNERS = 4
"""Among how many others the mirrors of one owner's blocks are spread where the job's config says nothing."""

OMITTED = MappingProxyType({"omitted": True})
"""Metadata of a field that no text or message has where it is its default: so what a job without it writes stays."""


class Reason(StrEnum):
    """Why a world changes. `kill`: every loss; `balance`: also a promotion after fills."""

    START = "start"
    KILL = "kill"
    JOIN = "join"
    DRAIN = "drain"
    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    BALANCE = "balance"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a world. Its rank is its place in `Plan.members`."""

    worker: WorkerId
    incarnation: str
    """Random, one per process: tells a worker from another process with its id."""
    address: str
    """`HOST:PORT` of the rendezvous server that this process opened at its start."""
    coordinate: int = field(default=0, metadata=OMITTED)
    """Its place in a cell, for as long as the process lives; 0 where the shape is one process."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a plan gives to one member."""

    lanes: tuple[int, ...] = ()
    """Ascending. A member without lanes is a standby. The members of a cell have the same."""
    owned: Runs = NO_BLOCKS
    mirrored: Runs = NO_BLOCKS
    partners: tuple[int, ...] = ()
    """Ranks of the members who are to mirror its blocks in the end; empty: all others at its coordinate. Only the
    planner asks: so that the next plan keeps them."""
    awaited: Runs = NO_BLOCKS
    """Blocks that it is to own once they are filled. Only the planner asks: so that the next plan promotes it."""

    @property
    def keeps(self) -> Runs:
        """The blocks whose optimizer state this member holds from the first commit of the generation on."""
        return self.owned | self.mirrored


@dataclass(frozen=True, slots=True)
class Fill:
    """Blocks whose state one member still has to receive from another, in slices at step boundaries."""

    source: int
    target: int
    blocks: Runs


@dataclass(frozen=True, slots=True)
class Recovery:
    """What only a plan made from inventories says (a start, a loss, a restore): where all stand when it opens."""

    step: int
    """The committed step at which the generation begins."""
    record: bytes
    """The vote's record of that step, for members that still have to roll forward to it; empty where none has to."""
    counted: tuple[bool, ...]
    """Whether each member's state counts, by rank. One that does not count frees what it holds."""
    stale: tuple[Runs, ...]
    """Blocks by rank whose parameters their owners hand out to it again before the generation opens."""
    checkpoint: str = ""
    """Where the state comes from when blocks had no live copy; empty where it comes from the members."""
    lanes_in_flight: tuple[int, ...] = ()
    """By rank, the lane that it had begun, with which it begins its first step again; -1: none. Only where gradients
    are added up round by round (stages 2 and 3): owners must know which lane comes first. Else empty."""
    first_fill_blocks: int = field(default=0, metadata=OMITTED)
    """How many blocks one source sends at the first boundary at most. Only second copies are worth it."""


@dataclass(frozen=True)
class Plan:
    """A world. See the module's text; `base` and `recovery` exclude each other."""

    generation: int
    base: int
    """The generation that a planned change replaces; 0 where the plan was made from inventories."""
    reason: Reason
    lanes: int
    """How many lanes the job has."""
    blocks: int
    """How many blocks the job has."""
    members: tuple[Member, ...]
    shares: tuple[Share, ...]
    fills: tuple[Fill, ...]
    fill_blocks_per_step: int
    """How many blocks one source sends at one boundary, over all its fills together. At the first boundary after a
    loss survivors have first touches and another lane to bear already: there `Recovery.first_fill_blocks` counts."""
    builder: int
    """Rank of the member whose rendezvous server the group is built over."""
    steps: bool
    """Whether optimizer steps run (not while paused, below `min`, or without a full cell)."""
    recovery: Recovery | None = None
    hosts: tuple[int, ...] = ()
    """By rank: members with equal numbers share a host (a failure domain) and add up what they send to other hosts.
    Empty: no two do, or all."""
    homes: tuple[Runs, ...] = field(default=(), metadata=OMITTED)
    """By coordinate, the blocks that its members own, mirror and are filled with: a constant of the job. Empty where
    the shape is one process, whose home are all blocks."""
    cells: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMITTED)
    """The cells with lanes, each as the ranks of its members by coordinate. Members in none are spare: standbys, which
    keep blocks. Empty where no cell is full, and where the shape is one process: there each trainer is one."""

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def coordinates(self) -> int:
        """How many processes a cell has."""
        return len(self.homes) or 1

    def rank_of(self, worker: WorkerId, incarnation: str) -> int | None:
        """The rank of this very process, None where the plan leaves it out."""
        return self._ranks.get((worker, incarnation))

    @cached_property
    def workers(self) -> frozenset[WorkerId]:
        """Ids of the members."""
        return frozenset(member.worker for member in self.members)

    @property
    def ranks(self) -> range:
        """Of its members."""
        return range(self.world_size)

    @cached_property
    def _ranks(self) -> Mapping[tuple[WorkerId, str], int]:
        return {(member.worker, member.incarnation): rank for rank, member in enumerate(self.members)}

    def is_like(self, other: Plan) -> bool:
        """Whether the same members train and keep the same in both, and steps run in both or in neither."""
        return (self.members, self.shares, self.steps) == (other.members, other.shares, other.steps)

    # ---- who trains what

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """The lanes that a member trains while steps run, ascending; empty for a standby."""
        return self.shares[rank].lanes

    def trainers_of(self, lane: int) -> tuple[int, ...]:
        """The ranks of the members that train a lane together, by coordinate; empty where no cell is full."""
        cells = self.cells if self.homes else ((rank,) for rank in self.ranks)
        return next((cell for cell in cells if lane in self.lanes_of(cell[0])), ())

    def trainer_of(self, lane: int, coordinate: int = 0) -> int:
        """The rank of the member at a coordinate that trains a lane; somebody has to (`trainers_of`)."""
        return self.trainers_of(lane)[coordinate]

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        """The ranks of the members with lanes, whatever their coordinates; all others are standbys."""
        return tuple(filter(self.lanes_of, self.ranks))

    @property
    def lanes_by_worker(self) -> dict[WorkerId, tuple[int, ...]]:
        """The lanes of every member; standbys have none."""
        return {member.worker: self.lanes_of(rank) for rank, member in enumerate(self.members)}

    @property
    def workers_of_cells(self) -> list[tuple[WorkerId, ...]]:
        """Of each cell, the ids of its members by coordinate."""
        return [tuple(self.members[rank].worker for rank in cell) for cell in self.cells]

    # ---- who has which blocks

    def owned_by(self, rank: int) -> Runs:
        """The blocks that a member updates for all."""
        return self.shares[rank].owned

    def mirrored_by(self, rank: int) -> Runs:
        """The blocks of others whose state a member keeps too."""
        return self.shares[rank].mirrored

    def kept_by(self, rank: int) -> Runs:
        """The blocks that a member owns or mirrors."""
        return self.shares[rank].keeps

    def held_by(self, rank: int, boundaries: int) -> Runs:
        """The blocks that a member keeps, and those that fills have brought it after so many boundaries."""
        return self.kept_by(rank) | self.filled(rank, boundaries)

    def replays(self, rank: int, boundaries: int) -> Runs:
        """The blocks whose update a member applies itself at the vote that follows that many passed ones."""
        return self.held_by(rank, boundaries + 1)

    # ---- fills

    @cached_property
    def second_copies(self) -> Runs:
        """The blocks that only their owner keeps, and that fills bring to another member."""
        filled = union(fill.blocks for fill in self.fills)
        return filled - union(share.mirrored for share in self.shares) if filled else NO_BLOCKS

    def fill_slice(self, index: int) -> tuple[Fill, ...]:
        """What is sent at boundary `index` (0 is the first one of the generation): each source's next blocks.

        A boundary is a passed vote; the slice travels beside the next one. Every member derives the same.
        """
        if index >= self.boundaries:
            return ()  # as at nearly all steps of a world, which may have had thousands of fills
        sent: list[Fill] = []
        for fill, before in self._in_turn():
            taken = fill.blocks.first(self._due(index + 1, before)) - fill.blocks.first(self._due(index, before))
            if taken:
                sent.append(Fill(fill.source, fill.target, taken))
        return tuple(sent)

    def _in_turn(self) -> Iterator[tuple[Fill, int]]:
        """Every fill, with how many blocks its source sends before it."""
        sent = Counter[int]()
        for fill in self.fills:
            yield fill, sent[fill.source]
            sent[fill.source] += len(fill.blocks)

    def _due(self, boundaries: int, before: int) -> int:
        """How many blocks of a fill are sent after so many boundaries, when others of its source come before."""
        if not boundaries:
            return 0
        return max(0, self._first_slice + (boundaries - 1) * self.fill_blocks_per_step - before)

    @property
    def _first_slice(self) -> int:
        """How many blocks one source sends at the first boundary at most."""
        rate = self.fill_blocks_per_step
        return rate if self.recovery is None else min(rate, self.recovery.first_fill_blocks)

    @cached_property
    def boundaries(self) -> int:
        """How many boundaries the fills take."""
        per_source = Counter[int]()
        for fill in self.fills:
            per_source[fill.source] += len(fill.blocks)
        later = max((max(0, count - self._first_slice) for count in per_source.values()), default=0)
        return 1 + -(-later // self.fill_blocks_per_step) if per_source else 0

    def filled(self, rank: int, boundaries: int) -> Runs:
        """The blocks that a member has received by fills after that many boundaries of the generation."""
        fills = self._fills_to.get(rank, ())
        return union(fill.blocks.first(self._due(boundaries, before)) for fill, before in fills)

    @cached_property
    def _fills_to(self) -> Mapping[int, list[tuple[Fill, int]]]:
        """`_in_turn` by target: all members ask, and a world may have thousands of fills."""
        found = defaultdict[int, list[tuple[Fill, int]]](list)
        for fill, before in self._in_turn():
            found[fill.target].append((fill, before))
        return found


def check_plan(plan: Plan) -> None:
    """Raises `PeerError` naming the first broken invariant (docs/architecture.md, "Invariants")."""
    for broken in _broken(plan):
        raise PeerError(f"plan {plan.generation} is unsound: {broken}. This is a bug in Shoal; please report it.")


def _broken(plan: Plan) -> Iterator[str]:
    size = plan.world_size
    if not size:
        yield "it has no members"
    if len({member.worker for member in plan.members}) != size:
        yield "a worker is in it twice"
    if len(plan.shares) != size:
        yield f"it has {len(plan.shares)} shares for {size} members"
    if len(plan.hosts) not in (0, size):
        yield f"it names {len(plan.hosts)} hosts for {size} members"
    if not 0 <= plan.builder < size:
        yield f"its builder is rank {plan.builder} of {size}"
    if plan.generation <= plan.base or plan.base < 0 or plan.generation < 1:
        yield f"it replaces generation {plan.base}"
    if (plan.base == 0) != (plan.recovery is not None):
        yield "a plan has either a base or a recovery"
    yield from _broken_homes(plan)
    yield from _broken_maps(plan)
    yield from _broken_cells(plan)
    yield from _broken_fills(plan)
    if plan.recovery is not None:
        yield from _broken_recovery(plan, plan.recovery)


def _broken_homes(plan: Plan) -> Iterator[str]:
    for member in plan.members:
        if not 0 <= member.coordinate < plan.coordinates:
            yield f"{member.worker} is at coordinate {member.coordinate}, its cells have {plan.coordinates}"
    if not plan.homes:
        return
    if len(plan.homes) == 1:
        yield "it names a home, though its cells are of one process"
    if homeless := every(plan.blocks) - union(plan.homes):
        yield f"{homeless} have no home"
    if sum(map(len, plan.homes)) != plan.blocks:
        yield f"its homes have {sum(map(len, plan.homes))} blocks, the job has {plan.blocks}"
    for rank, (member, share) in enumerate(zip(plan.members, plan.shares, strict=True)):
        if foreign := share.keeps - plan.homes[member.coordinate]:
            yield f"rank {rank} keeps {foreign}, whose home is not coordinate {member.coordinate}"


def _broken_maps(plan: Plan) -> Iterator[str]:
    lanes: list[list[int]] = [[] for _ in range(plan.coordinates)]
    for member, share in zip(plan.members, plan.shares, strict=True):
        lanes[member.coordinate] += share.lanes
    for coordinate, found in enumerate(lanes):
        if sorted(found) != list(range(plan.lanes)) and (plan.cells or not plan.homes):
            at = f" at coordinate {coordinate}" if plan.homes else ""
            yield f"its lanes{at} are {sorted(found)}, each of 0 to {plan.lanes - 1} must have exactly one trainer"
    if any(list(share.lanes) != sorted(share.lanes) for share in plan.shares):
        yield "a member's lanes are not ascending"
    owned = union(share.owned for share in plan.shares)
    if sum(len(share.owned) for share in plan.shares) != len(owned):
        yield f"{_owned_twice(plan)} have two owners"
    everything = every(plan.blocks)
    for rank, share in enumerate(plan.shares):
        if share.owned & share.mirrored:
            yield f"rank {rank} mirrors its own {share.owned & share.mirrored}"
        if not share.mirrored <= everything:
            yield f"rank {rank} mirrors blocks beyond {plan.blocks - 1}"
        if any(not 0 <= partner < plan.world_size for partner in share.partners):
            yield f"rank {rank} has the partners {share.partners} of {plan.world_size} members"
    if owned != everything:
        yield f"{everything - owned} have no owner (of {plan.blocks} blocks)"


def _broken_cells(plan: Plan) -> Iterator[str]:
    if plan.cells and not plan.homes:
        yield "it has cells, though each is of one process"
    if plan.steps and plan.homes and not plan.cells:
        yield "steps run in it without a full cell"
    for number, cell in enumerate(plan.cells):
        if any(not 0 <= rank < plan.world_size for rank in cell):
            yield f"cell {number} has the ranks {cell} of {plan.world_size} members"
        if (found := [plan.members[rank].coordinate for rank in cell]) != list(range(plan.coordinates)):
            yield f"cell {number} has members at coordinates {found}, it takes one at each of {plan.coordinates}"
        if len({plan.lanes_of(rank) for rank in cell}) != 1:
            yield f"the members of cell {number} have different lanes"
        if not plan.lanes_of(cell[0]):
            yield f"cell {number} has no lanes"
    if not plan.homes:
        return
    seats = Counter(rank for cell in plan.cells for rank in cell)
    for rank, (member, share) in enumerate(zip(plan.members, plan.shares, strict=True)):
        if seats[rank] > 1:
            yield f"rank {rank} is in {seats[rank]} cells"
        if share.lanes and not seats[rank]:
            yield f"rank {rank} trains lanes {share.lanes}, and is in no cell"
        if strange := [other for other in share.partners if plan.members[other].coordinate != member.coordinate]:
            yield f"rank {rank} has the partners {strange} at other coordinates"


def _owned_twice(plan: Plan) -> Runs:
    """Looked for only where the counts do not add up: it takes long for a thousand members."""
    once = twice = NO_BLOCKS
    for share in plan.shares:
        twice |= share.owned & once
        once |= share.owned
    return twice


def _broken_fills(plan: Plan) -> Iterator[str]:
    if plan.fills and plan.fill_blocks_per_step < 1:
        yield f"its fills move {plan.fill_blocks_per_step} blocks a step"
    sent: dict[int, list[Runs]] = {}
    received: dict[int, list[Runs]] = {}
    for fill in plan.fills:
        if not (0 <= fill.source < plan.world_size and 0 <= fill.target < plan.world_size):
            yield f"a fill goes from rank {fill.source} to {fill.target} of {plan.world_size}"
        elif plan.members[fill.source].coordinate != plan.members[fill.target].coordinate:
            yield f"a fill goes from rank {fill.source} to {fill.target}, which is at another coordinate"
        elif not fill.blocks:
            yield f"rank {fill.source} sends {fill.blocks} without keeping them"
        else:
            sent.setdefault(fill.source, []).append(fill.blocks)
            received.setdefault(fill.target, []).append(fill.blocks)
    keeps = {rank: plan.shares[rank].keeps for rank in sent.keys() | received.keys()}
    for source, parts in sent.items():
        if not union(parts) <= keeps[source]:
            lacking = next(part for part in parts if not part <= keeps[source])
            yield f"rank {source} sends {lacking} without keeping them"
    for rank, share in enumerate(plan.shares):
        if share.awaited and (missing := share.awaited - union(received.get(rank, ()))):
            yield f"rank {rank} awaits {missing}, which no fill brings"
    for target, parts in received.items():
        blocks = union(parts)
        if twice := blocks & keeps[target]:
            yield f"rank {target} is sent {twice}, which it keeps already"
        if sum(map(len, parts)) != len(blocks):
            yield f"rank {target} is sent a block twice"


def _broken_recovery(plan: Plan, recovery: Recovery) -> Iterator[str]:
    if recovery.step < 0:
        yield f"it begins at step {recovery.step}"
    if len(recovery.counted) != plan.world_size or len(recovery.stale) != plan.world_size:
        yield "its recovery does not speak of every member"
    for rank, (share, stale) in enumerate(zip(plan.shares, recovery.stale, strict=False)):
        if share.owned & stale:
            yield f"rank {rank} owns {share.owned & stale}, whose parameters it lacks"
    if len(recovery.lanes_in_flight) not in (0, plan.world_size):
        yield "its recovery names lanes in flight of some members only"
    for rank, (share, lane) in enumerate(zip(plan.shares, recovery.lanes_in_flight, strict=False)):
        if lane != -1 and lane not in share.lanes:
            yield f"rank {rank} has lane {lane} in flight, which it does not train"
