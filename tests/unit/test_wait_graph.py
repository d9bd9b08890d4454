"""The graph of who waits for whom: which links are broken, and who is a straggler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal_controller.core.machine.wait_graph import Activities, broken_links, stragglers
from shoal_protos.activity import Activity, StepPhase

LIMIT = 10.0
REDUCTION, VOTE, HAND_OUT, LANES = StepPhase.REDUCTION, StepPhase.VOTE, StepPhase.HAND_OUT, StepPhase.LANES


def at(phase: StepPhase, *waits_for: str, boundary: int = 5, seconds: float = 20.0) -> Activity:
    return Activity(1, boundary, phase, 0, waits_for, seconds)


def pairs(activities: Activities) -> set[frozenset[str]]:
    return {link.ends for link in broken_links(activities, LIMIT)}


def test_two_that_wait_for_each_other_at_one_position_cannot_reach_each_other() -> None:
    found = broken_links({"a": at(VOTE, "b"), "b": at(VOTE, "a"), "c": at(HAND_OUT, "a")}, LIMIT)
    assert [link.ends for link in found] == [{"a", "b"}]
    assert found[0].seen == (
        "a has waited for b for 20 s (generation 1, vote), and b for a for 20 s (generation 1, vote)"
    )


def test_who_waits_for_one_that_stands_beyond_cannot_be_reached_by_it() -> None:
    """One way only: what b sent is lost, and b has what it needs."""
    found = broken_links({"a": at(REDUCTION, "b"), "b": at(LANES, boundary=6), "c": at(REDUCTION, "a")}, LIMIT)
    assert [link.ends for link in found] == [{"a", "b"}]
    assert "b has been beyond that for 20 s (generation 1, lanes)" in found[0].seen


def test_of_a_chain_the_links_along_it_are_not_broken() -> None:
    assert pairs({"a": at(VOTE, "b"), "b": at(REDUCTION, "c"), "c": at(REDUCTION, "b")}) == {frozenset("bc")}


def test_a_chain_that_ends_in_user_code_has_no_broken_link_but_a_straggler() -> None:
    slow = {"a": at(VOTE, "b"), "b": at(REDUCTION, "c", seconds=30.0), "c": at(LANES)}
    assert pairs(slow) == set()
    assert stragglers(slow) == {"c": 30.0}


@rule(
    "… only waits older than the limit count, on both sides: slow is not broken, and workers' reports are not of "
    "the same instant",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.wait_graph",
            "            if peer in old and _in_vain(worker, activity, old[peer]):\n",
            "            if peer in activities and _in_vain(worker, activity, activities[peer]):\n",
        ),
        Edit(
            "shoal.group.group",
            "        self._pieces += 1\n        self._moved = now\n",
            "        self._pieces += 1\n",
        ),
        Edit(
            "shoal.group.group",
            "        self._state = (boundary, phase, bucket, tuple(peers), since)\n",
            "        self._state = (boundary, phase, bucket, tuple(peers), time.monotonic())\n",
            by="test_who_goes_on_waiting_for_fewer_has_waited_as_long_as_before",
        ),
        Edit(
            "shoal.group.group",
            "        self._state = (self._state[0], phase, bucket, (), time.monotonic())\n",
            "        self._state = (self._state[0], phase, bucket, (), self._state[4])\n",
            by="test_whatever_it_does_it_has_done_for_no_time_yet",
        ),
    ],
    after="When no vote passes although",
)
def test_a_wait_that_is_younger_than_the_limit_does_not_count() -> None:
    assert pairs({"a": at(VOTE, "b"), "b": at(VOTE, "a", seconds=9.0)}) == set()
    assert pairs({"a": at(VOTE, "b", seconds=9.0), "b": at(HAND_OUT, "c"), "c": at(LANES)}) == set()


@holds("… only waits older than")
def test_who_has_just_come_beyond_is_not_blamed_because_what_workers_say_is_not_of_one_instant() -> None:
    """b was a straggler for a minute, and has now sent what a waits for: a's last heartbeat does not know."""
    assert pairs({"a": at(VOTE, "b", seconds=60.0), "b": at(LANES, boundary=6, seconds=0.1)}) == set()


def test_a_later_generation_is_beyond() -> None:
    behind, ahead = at(HAND_OUT, "b"), Activity(2, 1, VOTE, 0, ("a",), 20.0)
    assert pairs({"a": behind, "b": ahead}) == {frozenset("ab")}


def test_a_ring_at_one_position_is_broken_because_nobody_of_it_is_busy() -> None:
    assert pairs({"a": at(VOTE, "b"), "b": at(VOTE, "c"), "c": at(VOTE, "a")}) == {
        frozenset("ab"), frozenset("bc"), frozenset("ca"),
    }  # fmt: skip


def test_where_nobody_waits_those_who_have_come_least_far_hold_the_others_up() -> None:
    assert set(stragglers({"a": at(LANES), "b": at(LANES), "c": at(LANES, boundary=6)})) == {"a", "b"}


activities = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(
        lambda phase, waits, seconds: at(phase, *waits, seconds=seconds),
        st.sampled_from([REDUCTION, VOTE, HAND_OUT]),
        st.lists(st.sampled_from("abcde"), max_size=2),
        st.sampled_from([1.0, 20.0]),
    ),
)


@given(activities)
def test_a_link_is_broken_only_between_two_that_both_stand_still(found: Activities) -> None:
    for link in broken_links(found, LIMIT):
        assert found[link.waiting].seconds > LIMIT and found[link.peer].seconds > LIMIT
        assert link.peer in found[link.waiting].waits_for


@given(activities)
def test_who_waits_is_no_straggler(found: Activities) -> None:
    assert all(not found[worker].waits_for for worker in stragglers(found) if worker in found)


def test_a_long_chain_and_many_waits_are_looked_through_in_one_go() -> None:
    """A thousand members that each wait for the next one: linear, because it is looked at in every tick."""
    chain = {f"w{n}": at(VOTE, f"w{n + 1}") for n in range(2000)} | {"w2000": at(LANES)}
    assert pairs(chain) == set()
    assert stragglers(chain) == {"w2000": 20.0}
    ring = {f"w{n}": at(VOTE, f"w{(n + 1) % 2000}") for n in range(2000)}
    assert len(pairs(ring)) == 2000
