"""No plan moves a block too many: the planner against every possible plan, and against another's network simplex.

With several mirrors the owners are chosen before the mirrors, which in one small world of a hundred costs a block more
than the fewest.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planner_twin import Holders, cheapest_flow, fewest_transfers
from planning import candidate, transfers
from shoal_controller.core.planning.planner import PlanRequest, Terms, plan_change
from shoal_protos.plan import Member, Plan, Reason, Share
from shoal_protos.runs import Runs, every


@st.composite
def inventories(draw: st.DrawFn, workers: int, blocks: int, mirrors: int = 1) -> tuple[Holders, list[str], list[int]]:
    """Who holds which block, everybody's domain, and the owners before: anything that could be."""
    size = draw(st.integers(mirrors + 1, workers))
    count = draw(st.integers(1, blocks))
    held = draw(st.lists(st.frozensets(st.integers(0, size - 1), min_size=1), min_size=count, max_size=count))
    domains = draw(st.lists(st.sampled_from("xyz"), min_size=size, max_size=size) | st.just(list("abcdefgh"[:size])))
    return held, domains, [draw(st.sampled_from(sorted(holders))) for holders in held]


def planned(held: Holders, domains: list[str], owners: list[int], mirrors: int) -> Plan:
    """The planner's answer, after a worker was lost that owned the rest."""
    blocks = len(held)
    here = [
        candidate(worker, Runs.of(block for block in range(blocks) if index in held[block]), domain)
        for index, (worker, domain) in enumerate(zip("abcdefgh", domains, strict=False))
    ]
    owned = [Runs.of(block for block in range(blocks) if owners[block] == index) for index in range(len(here))]
    base = Plan(
        generation=1,
        base=0,
        reason=Reason.START,
        lanes=8,
        blocks=blocks,
        members=(*(known.member for known in here), Member("lost", "lost.1", "127.0.0.1:1")),
        shares=(*(Share((), runs) for runs in owned), Share((), every(blocks))),
        fills=(),
        fill_blocks_per_step=1,
        builder=0,
        steps=True,
    )
    return plan_change(PlanRequest(Terms(8, blocks, mirrors, 16, 4), 2, Reason.KILL), here, base)


@settings(max_examples=examples(60), deadline=None)
@given(inventories(workers=4, blocks=6))
def test_with_one_mirror_no_plan_of_a_small_world_moves_less(inventory: tuple[Holders, list[str], list[int]]) -> None:
    held, domains, _ = inventory
    plan = planned(*inventory, mirrors=1)
    if len(domains) > 2:
        assert transfers(plan) == fewest_transfers(held, domains, 1)
    else:
        assert transfers(plan) == sum(2 - len(holders) for holders in held)


@settings(max_examples=examples(25), deadline=None)
@given(inventories(workers=4, blocks=5, mirrors=3))
def test_with_two_mirrors_it_moves_one_block_more_at_worst(inventory: tuple[Holders, list[str], list[int]]) -> None:
    held, _, owners = inventory
    one_each = list("abcd")
    fewest = fewest_transfers(held, one_each, 2)
    assert fewest <= transfers(planned(held, one_each, owners, mirrors=2)) <= fewest + 1


@settings(max_examples=examples(150), deadline=None)
@given(inventories(workers=8, blocks=60))
def test_with_one_mirror_it_moves_what_the_cheapest_flow_moves(inventory: tuple[Holders, list[str], list[int]]) -> None:
    held, domains, _ = inventory
    if len(domains) > 2:
        everyone = [range(len(domains))] * len(domains)
        assert transfers(planned(*inventory, mirrors=1)) == cheapest_flow(held, domains, everyone)
