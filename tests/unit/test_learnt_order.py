"""What is learnt of the order of a step's messages: against random members that go their ways at random speeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, rule
from shoal.group.asked_order import Sequencer
from shoal.group.group import GroupProgress
from shoal.group.learnt_order import Carried, LearntOrder, OutOfOrder, Post, PostPlace
from shoal_controller.core.machine.wait_graph import broken_links, stragglers
from shoal_protos.activity import Activity, StepPhase

RANDOM = settings(
    max_examples=examples(150), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)
ANSWERS = 1000
"""The tag of units, of which there are none here but where a test says so."""


@dataclass
class Act:
    """What a member does next: waits for a message where `wait` names one, then posts. One that only looks posts where
    the message is found over, and leaves it to a later one otherwise.
    """

    wait: PostPlace | None
    posts: list[Post]
    only_looks: bool = False
    later: Act | None = None


@dataclass
class Member:
    """One member in one step."""

    learnt: LearntOrder
    acts: deque[Act]
    posted: set[Post] = field(default_factory=set)
    script: deque[Carried] = field(default_factory=deque)

    def lacks(self, batch: Carried) -> bool:
        return not self.posted.issuperset(batch.posts)


def random_acts(random: Random, members: int, messages: int) -> list[list[Act]]:
    """By rank. A message has a moment: both ends post it before that, and wait for it after that; so a member that
    carries what both ends have posted is never stuck.
    """
    timed: list[list[tuple[float, Act]]] = [[] for _ in range(members)]
    for number in range(messages):
        sender, receiver = random.sample(range(members), 2)
        for rank, post in ((sender, Post(True, receiver, number)), (receiver, Post(False, sender, number))):
            begin = Act(None, [post])
            timed[rank].append((number - random.random() * 4, begin))
            waits = Act(PostPlace(post, 0), [])
            timed[rank].append((number + 1 + random.random() * 4, waits))
            if random.random() < 0.6:  # what it posts afterwards it may post earlier, where it finds it over
                looks = Act(waits.wait, waits.posts, only_looks=True, later=waits)
                timed[rank].append((number + random.random(), looks))
    for mine in timed:
        mine.sort(key=lambda one: one[0])
        ends = [act for _, act in mine if act.wait is not None and not act.only_looks]
        for at, (_, act) in enumerate(mine):
            following = [later for _, later in mine[at + 1 : at + 3] if later.wait is None]
            if act in ends and following and any(look.later is act for _, look in mine):
                act.posts.extend(following[0].posts)
                following[0].posts.clear()
    return [[act for _, act in mine] for mine in timed]


def run(random: Random, members: Sequence[Member], acts: Sequence[Sequence[Act]], repeats: bool) -> None:
    """One step at random speeds; fails where it does not come to its end."""
    sequencer, reported, carrying, over, number = (
        Sequencer(),
        list[tuple[int, Post]](),
        deque(),
        set[tuple[int, Post]](),
        0,
    )
    done: set[int] = set()

    def post(rank: int, act: Act) -> None:
        for one in act.posts if id(act.posts) not in done else ():
            members[rank].learnt.on_post(one, 4)
            members[rank].posted.add(one)
            reported.append((rank, one))
        done.add(id(act.posts))

    def act_of(rank: int) -> bool:
        """Whether it can go on."""
        member = members[rank]
        act = member.acts[0]
        is_over = act.wait is None or (rank, act.wait.post) in over
        if act.only_looks and repeats:
            assert act.wait is not None
            if member.learnt.may_be_over(act.wait) and not is_over:
                return False
            is_over = member.learnt.may_be_over(act.wait)
        if is_over:
            if act.wait is not None:
                member.learnt.on_over(act.wait)
            post(rank, act)
        elif not act.only_looks:
            return False
        member.acts.popleft()
        return True

    def carry() -> bool:
        if not repeats:
            nonlocal number
            for rank, one in reported:
                sequencer.take(rank, [one])
            reported.clear()
            for batch in sequencer.batches():
                carrying.append({rank: Carried(number, tuple(posts)) for rank, posts in batch.items()})
                number += 1
            if not carrying:
                return False
            for rank, part in carrying.popleft().items():
                members[rank].learnt.on_batch(part)
                over.update((rank, one) for one in part.posts)
            return True
        first = min((member.script[0].number for member in members if member.script), default=None)
        parts = {r: m.script[0] for r, m in enumerate(members) if m.script and m.script[0].number == first}
        if not parts or any(members[rank].lacks(part) for rank, part in parts.items()):
            return False
        for rank, part in parts.items():
            members[rank].script.popleft()
            over.update((rank, one) for one in part.posts)
        return True

    for member, mine in zip(members, acts, strict=True):
        member.acts, member.posted = deque(mine), set()
        member.script = deque(member.learnt.batches if repeats else ())
    while any(member.acts for member in members) or any(member.script for member in members):
        ways = [rank for rank, member in enumerate(members) if member.acts]
        random.shuffle(ways)
        turns = [carry, *(lambda rank=rank: act_of(rank) for rank in ways)] if random.random() < 0.5 else [
            *(lambda rank=rank: act_of(rank) for rank in ways), carry]  # fmt: skip
        assert any(turn() for turn in turns), "all wait for one another"


@rule(
    "A step that repeats another one carries its messages in the order of that one, and goes on where that one had "
    "found what it waits for, at any speeds of its members",
    "Devices",
    broken_by=[
        Edit(
            "shoal.group.learnt_order",
            "        return self._now.made >= self._known.found_over.get(place, 0)\n",
            "        return False\n",
        ),
        Edit(
            "shoal.group.learnt_order",
            "        self._now.batches.append(batch)\n",
            "        self._now.batches.insert(0, batch)\n",
        ),
    ],
)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.integers(1, 60))
@RANDOM
def test_a_step_like_another_comes_to_its_end_in_the_order_of_that_one(number: int, size: int, messages: int) -> None:
    random = Random(number)
    acts = random_acts(random, size, messages)
    members = [Member(LearntOrder(ANSWERS), deque()) for _ in range(size)]
    in_order = False
    for step in range(5):
        for member in members:
            member.learnt.begin("a step", in_order)
            assert member.learnt.repeats == (step > 1)
        run(random, members, acts, repeats=step > 1)
        in_order = all(member.learnt.is_in_order for member in members)
        assert in_order == (step > 0)


UNIT = Post(False, 1, ANSWERS)


def learnt(gathers: Sequence[tuple[int, bool]]) -> LearntOrder:
    """At the beginning of a step that repeats one in which these units came from rank 1, and then a message went."""
    order, in_order = LearntOrder(ANSWERS), False
    for _ in range(2):
        order.begin("a step", in_order)
        for number, gathered in enumerate(gathers):
            assert not order.begin_gather(gathered)
            order.on_post(UNIT, 8 * gathered[0])
            order.on_batch(Carried(number, (UNIT,)))
        order.on_post(Post(True, 1, 0), 4)
        in_order = order.is_in_order
    order.begin("a step", in_order)
    assert order.repeats
    return order


def test_units_come_unasked_as_long_as_they_are_gathered_as_in_the_step_before() -> None:
    order = learnt([(1, True), (2, True)])
    assert order.begin_gather((1, True))
    order.on_post(UNIT, 8)
    assert order.drain(UNIT) is None, "the training thread may still post it"
    assert not order.begin_gather((3, True))
    assert (order.drain(UNIT), order.changed_at) == (16, 3)
    assert not order.begin_gather((2, True)), "until the vote all are asked for"
    order.on_post(Post(True, 1, 0), 4)
    order.check_whole()
    assert not order.is_in_order
    order.begin("a step", False)
    assert not order.repeats


def test_a_unit_that_is_needed_earlier_than_in_the_step_before_is_early() -> None:
    """As what came first then may wait for what this member has not posted yet."""
    order, in_order = LearntOrder(ANSWERS), False
    for _ in range(3):
        order.begin("a step", in_order)
        order.begin_gather((1, True))
        unit = order.on_post(UNIT, 8)
        early = order.is_early(unit)
        order.on_post(Post(True, 1, 0), 4)
        assert not order.is_early(unit)
        order.on_over(unit)
        in_order = order.is_in_order
    assert early


def test_an_evaluation_gathers_apart_from_lanes_and_units_that_are_missing_are_drained() -> None:
    order = learnt([(1, True)])
    assert not order.begin_gather((1, False)), "members that evaluate wait for each other otherwise than in lanes"
    order = learnt([(1, True)])
    order.end_gathers()
    assert (order.drain(UNIT), order.changed_at) == (8, 1)


def test_what_the_step_before_had_not_is_out_of_order() -> None:
    with pytest.raises(OutOfOrder, match="to rank 1 with tag 0 of 8 bytes is posted, and the step before had 4 bytes"):
        learnt([]).on_post(Post(True, 1, 0), 8)
    with pytest.raises(OutOfOrder, match=r"from rank 2 with tag 0 of 8 bytes .* had 0 such messages there"):
        learnt([]).on_post(Post(False, 2, 0), 8)
    with pytest.raises(OutOfOrder, match="to rank 1 with tag 0 is missing"):
        learnt([]).check_whole()


def test_only_a_step_of_the_same_kind_repeats_another() -> None:
    order = learnt([])
    order.on_post(Post(True, 1, 0), 4)
    order.begin("another", order.is_in_order)
    assert not order.repeats and not order.is_in_order
    order.begin(None, True)
    assert not order.repeats and not order.is_in_order


def test_a_slow_member_is_named_where_others_are_held_up_by_it_and_no_link_is_broken() -> None:
    """Between a and b nothing is wrong: b has posted what a waits for, but its wire stands at what c is to send."""
    members = {name: GroupProgress(1) for name in "abc"}
    for name, batch, peers in (("a", 7, [1]), ("b", 3, [2]), ("c", 3, [])):
        members[name].reach(StepPhase.VOTE)
        members[name].begin_wire()
        members[name].stand_at_wire(batch, peers)
    members["b"].begin_boundary(1)
    members["b"].reach(StepPhase.REDUCTION, 9)  # the training thread of b has come further than its wire

    def activities() -> dict[str, Activity]:
        found = {name: progress.activity(lambda rank: "abc"[rank]) for name, progress in members.items()}
        return {name: replace(activity, seconds=20.0) for name, activity in found.items()}

    assert broken_links(activities(), 10.0) == ()
    assert stragglers(activities()) == {"c": 20.0}
    members["b"].end_wire()
    assert [link.ends for link in broken_links(activities(), 10.0)] == [{"a", "b"}], "now b is beyond it"
    members["b"].reach(StepPhase.VOTE)
    assert members["b"].activity(str).phase is StepPhase.VOTE
