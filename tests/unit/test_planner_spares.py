"""Spares: members without lanes, who mirror for all in other failure domains and train in the recovery's own plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planning import World, transfers
from rule import Edit, rule
from shoal_controller.core.planning.planner import Terms, same_world
from shoal_protos.plan import EVERYONE
from shoal_protos.runs import NO_BLOCKS, every, union

TERMS = Terms(lanes=8, blocks=24, mirrors=1, mirror_partners=4, fill_blocks_per_step=64, trainers=4)
RACKS = {"a": "1", "b": "1", "c": "2", "d": "2", "e": "3", "f": "3"}


def lanes(world: World) -> dict[str, int]:
    return {worker: len(lanes) for worker, lanes in world.plan.lanes_by_worker.items()}


def copies(world: World) -> set[int]:
    """How many members keep a block, of all blocks."""
    return {sum(block in share.keeps for share in world.plan.shares) for block in range(world.terms.blocks)}


def racks_of_blocks(world: World) -> set[int]:
    """In how many failure domains a block is kept, of all blocks."""
    racks = [world.here[member.worker].domain for member in world.plan.members]
    kept = [share.keeps for share in world.plan.shares]
    return {len({rack for rack, mine in zip(racks, kept, strict=True) if block in mine}) for block in every(24)}


def test_a_spare_owns_nothing_trains_nothing_and_mirrors_for_all() -> None:
    world = World(TERMS, "abcde")
    assert lanes(world) == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 0}
    assert [len(share.owned) for share in world.plan.shares] == [6, 6, 6, 6, 0]
    assert world.plan.shares[4].mirrored == every(24) and copies(world) == {2}


@rule(
    "A spare has lanes and owns what it mirrored in the plan of the recovery itself, and nothing is moved for that",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.planning.planner",
        "    choose = _with_spares if terms.trainers else _target\n",
        "    choose = _target\n",
    ),
)
@pytest.mark.parametrize("victim", "abcd")
def test_a_spare_trains_in_the_recovery_itself(victim: str) -> None:
    world = World(TERMS, "abcde")
    world.kill(victim)
    assert set(lanes(world).values()) == {2} and lanes(world)["e"] == 2
    assert [len(share.owned) for share in world.plan.shares] == [6, 6, 6, 6], "owners are even without a fill"
    assert transfers(world.plan) == 6, "the copies of the copies, beside training"
    world.settle()
    assert lanes(world)["e"] == 2 and copies(world) == {2}


def test_the_next_spare_takes_over_the_mirrors_and_owns_nothing() -> None:
    world = World(TERMS, "abcde")
    world.kill("b")
    world.settle()
    world.join("f")
    world.settle()
    assert lanes(world) == {"a": 2, "c": 2, "d": 2, "e": 2, "f": 0}
    assert world.plan.shares[-1].mirrored == every(24) and not world.plan.shares[-1].owned and copies(world) == {2}


def test_a_rack_that_is_lost_while_its_spares_are_in_another_one_costs_no_lane_and_no_block_moves_before() -> None:
    world = World(TERMS, "abcdef", RACKS)
    world.kill("a", "b")
    assert lanes(world) == {"c": 2, "d": 2, "e": 2, "f": 2}
    assert sorted(len(share.owned) for share in world.plan.shares) == [6, 6, 6, 6]
    assert world.plan.second_copies == union(fill.blocks for fill in world.plan.fills), "only copies of copies"


def test_a_copy_is_never_with_a_spare_in_its_owners_domain_while_there_is_another_one() -> None:
    world = World(TERMS, "abcde", {"a": "1", "b": "1", "c": "2", "d": "2", "e": "2"})
    world.settle()
    for rank, share in enumerate(world.plan.shares[:2]):
        assert share.owned <= world.plan.shares[4].mirrored, rank
    for share in world.plan.shares[2:4]:
        assert not share.owned & world.plan.shares[4].mirrored


def test_until_the_next_spare_has_come_no_two_copies_stay_in_one_rack_while_there_is_another_one() -> None:
    world = World(replace(TERMS, trainers=5), "abc", {"a": "2", "b": "1", "c": "2", "d": "1"})
    world.kill("b")
    world.settle()
    world.join("d")
    world.settle()
    racks = [world.here[member.worker].domain for member in world.plan.members]
    assert len(set(racks)) == 2 and racks_of_blocks(world) == {2}


def test_with_two_mirrors_one_is_with_the_spare_and_one_with_a_trainer() -> None:
    world = World(replace(TERMS, mirrors=2), "abcdef")
    assert copies(world) == {3}
    assert union(share.mirrored for share in world.plan.shares[4:]) == every(24)
    assert world.plan.shares[4].mirrored & world.plan.shares[5].mirrored == NO_BLOCKS


@rule(
    "Beside a spare, too, the copies of a block lie in as many failure domains as there are",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.mirrors",
            "        for one in share_mirrors(bare, partners, mirrors, domains, taken):\n",
            "        for one in share_mirrors(bare, partners, mirrors, domains):\n",
        ),
        Edit(
            "shoal_controller.core.planning.mirrors",
            "    chosen, copies = (alone, lacking) if lacking > 0 else (spares, 1)\n",
            "    chosen, copies = spares, 1\n",
        ),
    ],
)
@pytest.mark.parametrize("racks", ["112233", "112231", "123312", "111123", "112332", "121313"])
@pytest.mark.parametrize("mirrors", [2, 3])
def test_no_further_copy_is_in_the_rack_of_the_spare_that_has_the_first_while_another_rack_is_there(
    racks: str, mirrors: int
) -> None:
    world = World(replace(TERMS, mirrors=mirrors), "abcdef", dict(zip("abcdef", racks, strict=True)))
    world.settle()
    assert racks_of_blocks(world) == {3}


@rule(
    "A world with spares comes to rest, too: who keeps enough copies keeps them where they are no less far apart",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.planning.planner",
        "        mirrored = leave_beside_spares(mirrored, keepers, spares, sites)\n",
        "        mirrored = list(mirrored)\n",
    ),
)
@pytest.mark.parametrize("racks", ["112332", "121123", "131132"])
def test_copies_of_several_mirrors_stay_with_trainers_that_hold_them_so_that_the_world_comes_to_rest(
    racks: str,
) -> None:
    world = World(replace(TERMS, mirrors=3), "abcdef", dict(zip("abcdef", racks, strict=True)))
    world.drain("c")
    world.settle()
    assert racks_of_blocks(world) == {3} and copies(world) == {4}


@st.composite
def histories(draw: st.DrawFn) -> tuple[World, list[str]]:
    mirrors = draw(st.sampled_from([1, 1, 2, EVERYONE]))
    terms = replace(TERMS, mirrors=mirrors, trainers=draw(st.integers(1, 4)), sharded=draw(st.booleans()))
    domains = {worker: draw(st.sampled_from("123")) for worker in "abcdefghijkl"}
    return World(terms, "abcdef"[: draw(st.integers(2, 6))], domains), draw(
        st.lists(st.sampled_from(["kill", "join", "drain", "fill", "promote"]), max_size=8)
    )


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None)
def test_after_any_history_the_oldest_train_own_evenly_and_blocks_have_their_copies(
    history: tuple[World, list[str]], chance: object
) -> None:
    world, acts = history
    free = iter("ghijkl")
    for act in acts:
        here = sorted(world.here)
        if act == "kill" and len(here) > 1:
            gone = chance.choice(here)  # type: ignore[attr-defined]
            held = union(world.here[worker].holds for worker in here if worker != gone)
            if held == every(24):
                world.kill(gone)
        elif act == "join" and (worker := next(free, None)):
            world.join(worker)
        elif act == "drain" and sum(not world.here[worker].leaving for worker in here) > 1:
            world.drain(chance.choice([w for w in here if not world.here[w].leaving]))  # type: ignore[attr-defined]
        elif act == "fill":
            world.fill()
        else:
            world.promote()
    for _ in range(6):
        before = world.plan
        world.fill()
        if same_world(world.promote(), before):
            break
    else:
        raise AssertionError("not at rest after 6 plans")
    plan = world.plan
    training = min(world.terms.trainers, plan.world_size)
    owned = [len(share.owned) for share in plan.shares]
    assert [bool(share.lanes) for share in plan.shares] == [rank < training for rank in plan.ranks]
    assert max(owned[:training]) - min(owned[:training]) <= 1 and not any(owned[training:])
    kept = min(world.terms.mirrors, plan.world_size - 1) + 1
    assert copies(world) == {kept}
    assert racks_of_blocks(world) == {min(kept, len({world.here[member.worker].domain for member in plan.members}))}
