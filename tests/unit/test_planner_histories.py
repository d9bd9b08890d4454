"""The planner through random lives of a job: joins, kills, drains, fills that are cut short, in any order.

`World` checks every plan (its invariants, valid bits, who trains, who leaves). Here: after any life the world comes to
rest within a few plans, with all that is wanted reached, and no plan on the way moves a block too many.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planner_twin import cheapest_flow
from planning import World, partners_of, transfers
from shoal_controller.core.planning.planner import BlocksLost, Candidate, Terms
from shoal_protos.plan import EVERYONE, Plan
from shoal_protos.runs import union

Act = tuple[str, int]
"""What happens, and a number that says to whom or how far."""

ACTS = st.lists(
    st.tuples(st.sampled_from(("join", "kill", "drain", "fill", "settle")), st.integers(0, 99)),
    min_size=4,
    max_size=14,
)
MOST_WORKERS = 8


class Life:
    """Acts upon a world; whoever would leave nobody behind is spared."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.joined = len(world.here)

    def live(self, acts: Sequence[Act]) -> None:
        for act, number in acts:
            getattr(self, f"_{act}")(number)

    def _someone(self, number: int) -> str:
        return sorted(self.world.here)[number % len(self.world.here)]

    def _join(self, _: int) -> None:
        if len(self.world.here) < MOST_WORKERS:
            worker = chr(ord("a") + self.joined)
            self.joined += 1
            self.world.domains = {**self.world.domains, worker: self._domain(worker)}
            self.world.join(worker)

    def _domain(self, worker: str) -> str:
        shared = len(set(self.world.domains.values()))
        return sorted(set(self.world.domains.values()))[ord(worker) % shared] if self.world.domains else ""

    def _kill(self, number: int) -> None:
        if len(self.world.here) > 1:
            try:
                self.world.kill(self._someone(number))
            except BlocksLost as lost:
                assert lost.blocks, "blocks are lost only where there are some"

    def _drain(self, number: int) -> None:
        worker = self._someone(number)
        if sum(self.world.stays(other) for other in self.world.here if other != worker) > 0:
            self.world.drain(worker)

    def _fill(self, number: int) -> None:
        self.world.fill(number % (self.world.plan.boundaries + 1))

    def _settle(self, _: int) -> None:
        self.world.settle()


@st.composite
def lives(draw: st.DrawFn, mirrors: st.SearchStrategy[int], shared_domains: bool) -> Life:
    workers = "abcdef"[: draw(st.integers(1, 6))]
    terms = Terms(
        draw(st.integers(1, 16)),
        draw(st.integers(1, 80)),
        draw(mirrors),
        draw(st.sampled_from((1, 2, 3, 4, 4, 16))),
        draw(st.integers(1, 9)),
    )
    domains = {worker: draw(st.sampled_from("xyz")) for worker in workers} if shared_domains else {}
    life = Life(World(terms, workers, domains))
    life.live(draw(ACTS))
    return life


@settings(max_examples=examples(60), deadline=None)
@given(lives(st.sampled_from((0, 1, 1, 2, 3, EVERYONE)), shared_domains=False))
def test_after_any_life_the_world_comes_to_rest_with_every_wish_met(life: Life) -> None:
    life.world.settle()
    life.world.check_at_rest()
    if life.world.mirrors == 1:
        assert life.world.unevenness() <= 1


@settings(max_examples=examples(60), deadline=None)
@given(lives(st.sampled_from((1, 1, 2, 3)), shared_domains=True))
def test_workers_that_share_failure_domains_change_nothing_of_that(life: Life) -> None:
    life.world.settle()
    life.world.check_at_rest()
    if life.world.mirrors == 1:
        assert life.world.unevenness() <= 1


@settings(max_examples=examples(50), deadline=None)
@given(lives(st.just(1), shared_domains=False) | lives(st.just(1), shared_domains=True))
def test_no_plan_of_any_life_moves_more_than_the_cheapest_flow(life: Life) -> None:
    for plan, asked in zip(life.world.plans, life.world.asked, strict=True):
        held, domains = _held_by_those_who_stay(asked, plan.blocks)
        if len(domains) > 2:
            cheapest = cheapest_flow(held, domains, _partners_of_those_who_stay(asked, plan))
            assert transfers(plan) + waiting_mirrors(plan) == cheapest
        else:
            assert transfers(plan) == sum(len(domains) - len(holders) for holders in held)


def waiting_mirrors(plan: Plan) -> int:
    """Of how many blocks no partner of the owner to be has a copy or is to get one now."""
    waiting = 0
    for rank, share in enumerate(plan.shares):
        to_own = (share.owned - union(other.awaited for other in plan.shares)) | share.awaited
        copies = [plan.shares[partner].keeps for partner in partners_of(plan, rank)]
        filled = [fill.blocks for fill in plan.fills if fill.target in partners_of(plan, rank)]
        waiting += len(to_own - union((*copies, *filled)))
    return waiting


# ---- bounds in closed form


def missing_copies(asked: Sequence[Candidate], terms: Terms) -> int:
    """How many copies those who stay lack: no plan can move less."""
    held, domains = _held_by_those_who_stay(asked, terms.blocks)
    copies = 1 + min(terms.mirrors, len(domains) - 1)
    return sum(max(0, copies - len(holders)) for holders in held)


def missing_shares(asked: Sequence[Candidate], terms: Terms) -> int:
    """How many blocks lack, of all who stay, to what each must keep at least where each is its own domain: what it
    owns, and mirrors for all others where all mirror for all."""
    held, domains = _held_by_those_who_stay(asked, terms.blocks)
    workers = len(domains)
    mirrors = min(terms.mirrors, workers - 1)
    owned = terms.blocks // workers
    mirrored = (workers - 1) * (mirrors * owned // (workers - 1)) if 0 < workers - 1 <= terms.mirror_partners else 0
    least = owned + mirrored if workers > 1 else terms.blocks
    return sum(max(0, least - sum(worker in holders for holders in held)) for worker in range(workers))


@settings(max_examples=examples(40), deadline=None)
@given(lives(st.sampled_from((1, EVERYONE)), shared_domains=False))
def test_no_plan_moves_less_than_is_missing(life: Life) -> None:
    for plan, asked in zip(life.world.plans, life.world.asked, strict=True):
        assert transfers(plan) >= missing_copies(asked, life.world.terms)
        assert transfers(plan) >= missing_shares(asked, life.world.terms)
        if life.world.terms.mirrors == EVERYONE:
            assert transfers(plan) == missing_copies(asked, life.world.terms)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(3, 8), st.integers(0, 100), st.sampled_from(("kill", "drain")), st.integers(0, 7))
def test_from_rest_a_loss_or_a_drain_moves_exactly_the_missing_copies(
    workers: int, more: int, act: str, number: int
) -> None:
    """Where there are blocks enough for every worker to mirror one of each other's."""
    world = World(Terms(8, workers * (workers - 1) + more, 1, 16, 4), "abcdefgh"[:workers])
    plan = getattr(world, act)("abcdefgh"[number % workers])
    assert transfers(plan) == missing_copies(world.asked[-1], world.terms)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(2, 8), st.integers(1, 150), st.sampled_from((1, 2)))
def test_from_rest_a_join_moves_the_joiners_share_and_one_block_for_each_other_at_most(
    workers: int, blocks: int, mirrors: int
) -> None:
    world = World(Terms(8, blocks, mirrors, 16, 4), "abcdefgh"[:workers])
    moved = transfers(world.join("z")) - missing_shares(world.asked[-1], world.terms)
    assert 0 <= moved <= workers * mirrors
    if mirrors == 1 and blocks % (workers * (workers + 1)) == 0:
        assert moved == 0


def _stay(asked: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in asked if not candidate.leaving] or list(asked[:1])


def _partners_of_those_who_stay(asked: Sequence[Candidate], plan: Plan) -> list[list[int]]:
    ranks = [plan.members.index(candidate.member) for candidate in _stay(asked)]
    return [[ranks.index(partner) for partner in partners_of(plan, rank) if partner in ranks] for rank in ranks]


def _held_by_those_who_stay(asked: Sequence[Candidate], blocks: int) -> tuple[list[frozenset[int]], list[str]]:
    staying = _stay(asked)
    held = [frozenset(i for i, known in enumerate(staying) if block in known.holds) for block in range(blocks)]
    return held, [candidate.domain for candidate in staying]
