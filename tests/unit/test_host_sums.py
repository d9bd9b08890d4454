"""Sums of a host: every lane reaches every owner once, and a host sends one partial where the tree allows it."""

from __future__ import annotations

from collections import Counter

from crew import Crew, Task
from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal.core.tree import HostSums, fold_up, subtrees
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT, share_lanes
from shoal_protos.runs import Runs, Span


class Case:
    """A world: who trains which lanes, on which host, and who owns blocks."""

    def __init__(self, lanes_of: list[tuple[int, ...]], hosts: list[int], owners: list[int], lanes: int) -> None:
        self.size, self.lanes, self.hosts, self.owners = len(lanes_of), lanes, hosts, owners
        self.spans = [subtrees(Runs.of(held), lanes) for held in lanes_of]
        self.sums = HostSums(self.spans, hosts, owners, lanes)

    def held_by(self, host: int) -> list[Span]:
        return [span for rank, spans in enumerate(self.spans) if self.hosts[rank] == host for span in spans]

    def together(self, host: int) -> list[Span]:
        return subtrees(Runs(self.held_by(host)), self.lanes)


@st.composite
def cases(draw: st.DrawFn, planned: bool = False) -> Case:
    """Any world; `planned`: its lanes are the planner's."""
    size, lanes = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    hosts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    owners = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    if planned:
        return Case(share_lanes(lanes, [NONE_IN_FLIGHT] * size, hosts), hosts, owners, lanes)
    trainers = draw(st.lists(st.integers(0, size - 1), min_size=lanes, max_size=lanes))
    held = [tuple(lane for lane, trainer in enumerate(trainers) if trainer == rank) for rank in range(size)]
    return Case(held, hosts, owners, lanes)


def lanes_in(spans: list[Span]) -> Counter[int]:
    return Counter(lane for start, stop in spans for lane in range(start, stop))


@rule(
    "Where the lanes of a host's workers are fewer subtrees together than apart, one of them adds up what goes "
    "to an owner elsewhere, in the order of the one tree; every lane reaches every owner once",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.core.tree",
        "                found += [(span, adder) for span in self._joint[host]]\n",
        "                found += [(span, adder) for rank in crew for span in self.lane_spans[rank]]\n",
    ),
)
@given(cases())
def test_every_lane_reaches_every_owner_once_and_the_tree_can_be_finished(case: Case) -> None:
    for owner in case.owners:
        spans = [span for span, _ in case.sums.sources(owner)]
        assert lanes_in(spans) == Counter(range(case.lanes))
        assert len(fold_up(spans, case.lanes)[1]) == 1


@holds("Where the lanes of a host's workers")
@given(cases())
def test_who_adds_up_for_an_owner_gets_all_lanes_of_its_host_and_sends_whole_subtrees(case: Case) -> None:
    for owner in case.owners:
        for rank in range(case.size):
            adder = case.sums.adder(rank, owner)
            if adder is None:
                continue
            assert case.hosts[adder] == case.hosts[rank] != case.hosts[owner]
            assert owner in case.sums.adds_for(adder)
            gathered = case.sums.gathered(adder)
            assert sorted(span for span, _ in gathered) == sorted(case.held_by(case.hosts[rank]))
            ends = [span for span, _ in gathered]
            additions, left = fold_up(ends, case.lanes)
            for into, other in additions:
                ends[into] = (min(ends[into][0], ends[other][0]), max(ends[into][1], ends[other][1]))
            sent = [span for span, sender in case.sums.sources(owner) if sender == adder]
            assert [ends[index] for index in left] == sent == case.together(case.hosts[rank])


@given(cases())
def test_a_host_sends_no_more_partials_than_its_lanes_are_subtrees_and_one_member_sends_them(case: Case) -> None:
    for owner in case.owners:
        for host in set(case.hosts) - {case.hosts[owner]}:
            sent = [(span, rank) for span, rank in case.sums.sources(owner) if case.hosts[rank] == host]
            together, apart = case.together(host), case.held_by(host)
            joins = len(together) < len(apart)
            assert sorted(span for span, _ in sent) == (together if joins else sorted(apart))
            assert not joins or len({rank for _, rank in sent}) == 1


@given(cases())
def test_what_goes_to_an_owner_on_the_same_host_goes_at_once(case: Case) -> None:
    for owner in case.owners:
        for rank in range(case.size):
            if case.hosts[rank] == case.hosts[owner]:
                assert case.sums.adder(rank, owner) is None
                assert {span for span, sender in case.sums.sources(owner) if sender == rank} == set(case.spans[rank])


@given(cases())
def test_the_work_of_adding_is_shared_evenly_among_the_trainers_of_a_host(case: Case) -> None:
    for host in set(case.hosts):
        crew = [rank for rank in range(case.size) if case.hosts[rank] == host and case.spans[rank]]
        counts = [len(case.sums.adds_for(rank)) for rank in crew]
        assert not counts or max(counts) - min(counts) <= 1


@given(cases(planned=True))
def test_with_the_planners_lanes_a_host_sends_as_few_partials_as_its_lanes_have_binary_digits(case: Case) -> None:
    for owner in case.owners:
        for host in set(case.hosts) - {case.hosts[owner]}:
            sent = [span for span, rank in case.sums.sources(owner) if case.hosts[rank] == host]
            assert len(sent) <= sum(lanes_in(sent).values()).bit_count()


@given(cases(), st.data())
def test_what_a_member_holds_is_counted(case: Case, data: st.DataObject) -> None:
    """The dumb twin: message by message."""
    sizes = [data.draw(st.integers(1, 9)) if rank in case.owners else 0 for rank in range(case.size)]
    scattered = [data.draw(st.sampled_from((0, size))) for size in sizes]
    sums, held = case.sums, [0] * case.size
    for owner in case.owners:
        for rank, spans in enumerate(case.spans):
            adder, count = sums.adder(rank, owner), len(spans)
            if adder is None and rank != owner:
                held[owner] += count * sizes[owner]
                held[rank] += count * (sizes[owner] if count > 1 else scattered[owner])
            elif adder not in (None, rank):
                held[adder] += count * sizes[owner]
                held[rank] += count * (sizes[owner] if count > 1 else scattered[owner])
        for host in set(case.hosts):
            if adders := {
                a for r in range(case.size) if case.hosts[r] == host and (a := sums.adder(r, owner)) is not None
            }:
                (adder,), joint = adders, len(case.together(host))
                held[owner] += joint * sizes[owner]
                held[adder] += joint * (sizes[owner] if joint > 1 else scattered[owner])
    assert sums.most_held(sizes, scattered) == max(held)


def test_two_hosts_of_two_workers_give_the_bits_of_one_worker_through_a_kill_in_the_exchange() -> None:
    task = Task({"max_steps": 8, "lanes": 8})
    with Crew("a", task) as alone:
        right = alone.finish()
    with Crew("abcd", task, domains=dict(zip("abcd", "xyxy", strict=True))) as crew:
        crew.train_to(2)
        plan = crew.members()[0].engine.context.world.plan
        assert plan.hosts == (0, 1, 0, 1)
        crew.plant("c", 4, "exchange")
        assert crew.finish() == right
    assert not crew.workers["c"].alive
