"""The process groups of a cell: what torch's collectives give over them, and what becomes of them when a world ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cell_members import Member, in_cell, program, run
from matrices import further
from rule import Edit, holds, rule
from shoal.cells.call import CollectiveCall, Kind, LoopPlace, Op
from shoal.cells.hub import CALLS_TAG, CellHub, GroupPlace
from shoal.cells.process_group import CellGroup
from shoal.group.group import WorldChanged
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import Tensor


def gloos_own(store: dist.Store, rank: int, size: int) -> Any:
    """A process group of torch's."""
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def compare_programs(size: int, seeds: range) -> None:
    store = dist.HashStore()

    def act(member: Member) -> None:
        gloo = gloos_own(store, member.rank, size)
        for seed in seeds:
            calls = program(seed)
            expected = run(calls, gloo, member.rank, size)
            found = run(calls, member.group, member.rank, size)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), seed

    in_cell(size, act)


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_of_collectives_give_what_gloo_gives(size: int) -> None:
    compare_programs(size, range(40))


@further
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_thousand_random_programs_of_collectives_give_what_gloo_gives(size: int) -> None:
    compare_programs(size, range(1000))


# ---- void lanes


def _answered(kind: str, group: Any) -> list[Tensor]:
    """Of a collective of two in which rank 1, which is asked, has values of its own and no other answers."""
    mine, other = torch.tensor([4.0, 5.0]), torch.tensor([7.0, 7.0], requires_grad=True)
    pair = [torch.full((2,), 9.0), torch.full((2,), 9.0)]
    if kind == "all_reduce":
        dist.all_reduce(mine, group=group)
        return [mine]
    if kind == "all_reduce of much":
        much = torch.full((100_000,), 3.0)
        dist.all_reduce(much, group=group)
        return [much[:1], much[-1:]]
    if kind == "reduce":
        dist.reduce(mine, group_dst=1, group=group)
        return [mine]
    if kind == "all_gather":
        dist.all_gather(pair, mine, group=group)
        return pair
    if kind == "gather":
        dist.gather(mine, pair, group_dst=1, group=group)
        return pair
    if kind == "reduce_scatter":
        dist.reduce_scatter(other, [torch.zeros(2), mine], group=group)
        return [other]
    if kind == "scatter":
        dist.scatter(other, None, group_src=0, group=group)
        return [other]
    if kind == "scatter from here":
        dist.scatter(other, [torch.zeros(2), mine], group_src=1, group=group)
        return [other]
    if kind == "all_to_all":
        dist.all_to_all_single(longer := torch.ones(5), torch.tensor([1.0, 2.0, 3.0]), [3, 2], [1, 2], group=group)
        return [longer]
    if kind == "broadcast":
        dist.broadcast(other, group_src=0, group=group)
        return [other]
    if kind == "broadcast from here":
        dist.broadcast(mine, group_src=1, group=group)
        return [mine]
    if kind == "recv":
        dist.irecv(other, group_src=0, group=group).wait()
        return [other]
    if kind == "send":
        dist.send(torch.ones(3 << 20), group_dst=0, group=group)
        return []
    if kind == "all_gather_object":
        dist.all_gather_object(found := [None, None], "mine", group=group)
        assert found == ["mine", "mine"]
        return []
    assert kind == "barrier"
    dist.barrier(group=group)
    return []


ANSWERS: dict[str, list[list[float]]] = {
    "all_reduce": [[4, 5]],
    "all_reduce of much": [[3], [3]],
    "reduce": [[4, 5]],
    "all_gather": [[4, 5], [4, 5]],
    "gather": [[4, 5], [4, 5]],
    "reduce_scatter": [[4, 5]],
    "scatter": [[0, 0]],
    "scatter from here": [[4, 5]],
    "all_to_all": [[0, 0, 0, 2, 3]],
    "broadcast": [[0, 0]],
    "broadcast from here": [[4, 5]],
    "recv": [[0, 0]],
    "send": [],
    "all_gather_object": [],
    "barrier": [],
}


@rule(
    "A collective of a cell that fails is answered from its own process, and so are all later ones of the lane",
    "Groups",
    broken_by=[
        Edit("shoal.cells.hub", "self.is_void = self.is_void or self.is_present(world)", "raise failure"),
        Edit("shoal.cells.hub", "                    target.zero_()\n", "                    continue\n"),
    ],
)
def test_a_collective_that_loses_its_world_is_answered_from_here_and_so_are_the_later_ones_of_its_lane() -> None:
    kinds = list(ANSWERS)

    def act(member: Member) -> None:
        for number, kind in enumerate(kinds):
            member.enter(number)
            if member.rank == 0:
                member.worlds[number].abort()
                continue
            for _ in ("it fails in its world", "its lane is void"):
                found = _answered(kind, member.group)
                assert member.hub.is_void
                assert [one.tolist() for one in found] == ANSWERS[kind], kind
            member.hub.begin_lane()
            assert not member.hub.is_void
        member.enter(len(kinds))
        member.hub.make_void()
        dist.all_reduce(mine := torch.tensor([1.0]), group=member.group)
        assert mine.item() == 1.0, "nobody is asked in a lane that is void"

    in_cell(2, act, worlds=len(kinds) + 1)


def test_the_next_world_of_a_cell_goes_on_from_a_lane_that_was_void() -> None:
    def act(member: Member) -> None:
        if member.rank == 0:
            member.worlds[0].abort()
        pending = dist.all_reduce(torch.ones(2), group=member.group, async_op=True)
        dist.all_reduce(torch.ones(2), group=member.group)
        assert member.hub.is_void
        member.enter(1)
        values = torch.full((2,), float(member.rank))
        dist.all_reduce(values, group=member.group)
        assert values.tolist() == [1.0, 1.0]
        pending.wait()
        assert not member.hub.is_void, "a collective of a lane that is over makes no other one void"

    in_cell(2, act, worlds=2)


def test_a_collective_raises_in_the_engines_own_frames_when_its_world_is_lost_or_its_lane_void() -> None:
    def act(member: Member) -> None:
        if member.rank == 0:
            member.worlds[0].abort()
            member.hub.make_void()
            return
        for _ in ("it fails in its world", "its lane is void"):
            with member.hub.raising(), pytest.raises(WorldChanged):
                dist.all_reduce(torch.ones(2), group=member.group)
            assert member.hub.is_void
        with pytest.raises(WorldChanged):
            member.hub.reduce_sum([torch.ones(2)])
        dist.all_reduce(torch.ones(2), group=member.group)

    in_cell(2, act)


def test_a_process_without_a_cell_answers_its_collectives_itself() -> None:
    hub = CellHub(Shape(tensor=2), 1)
    group: Any = CellGroup(hub, range(2), "cell")
    hub.rest()
    hub.begin_lane()
    for kind, answer in ANSWERS.items():
        assert [one.tolist() for one in _answered(kind, group)] == answer
        with hub.raising():
            _answered(kind, group)
    assert not hub.is_void


# ---- while a model is built


def test_a_collective_while_the_model_is_built_is_refused_by_one_sentence_but_for_a_barrier() -> None:
    group: Any = CellGroup(CellHub(Shape(tensor=2), 1), range(2), "cell")
    dist.barrier(group=group)
    for kind in set(ANSWERS) - {"barrier"}:
        with pytest.raises(UserError, match=r"no partner while a model is built.*give them src_data_rank=None"):
            _answered(kind, group)


def test_a_group_of_one_coordinate_needs_nobody_at_any_time() -> None:
    group: Any = CellGroup(CellHub(Shape(tensor=2), 1), [1], "alone")
    values = torch.tensor([3.0])
    dist.all_reduce(values, group=group)
    dist.all_to_all_single(found := torch.zeros(1, 1), values, group=group)
    assert values.tolist() == [3.0] and found.tolist() == [[3.0]]


@rule(
    "Each collective of the whole cell is a place of its members, by which the one is found that is behind",
    "Cells",
    broken_by=Edit("shoal.cells.hub", "                    world.group.progress.step_on()", "                    pass"),
)
def test_a_member_that_is_behind_in_a_lane_is_found_by_the_collectives_that_it_has_begun() -> None:
    def act(member: Member) -> None:
        places: list[int] = []
        for group in (member.group, CellGroup(member.hub, [member.rank], "alone"), member.group):
            dist.all_reduce(torch.ones(1), group=group)
            places.append(member.worlds[0].progress.activity(str).bucket)
        assert places == [1, 1, 2]

    in_cell(2, act)


# ---- the order of sums


@rule(
    "A cell's sums are made in the order of coordinates, whichever processes it is made of and however they are sent",
    "Groups",
    broken_by=[
        Edit("shoal.cells.collectives", "combine(total, parts[rank], ", "combine(total, parts[-rank], "),
    ],
)
def test_sums_are_made_in_the_order_of_coordinates_on_all_members_for_few_and_for_many_elements() -> None:
    large = [1e8, 1.0, -1e8, 0.5]
    expected = ((torch.tensor(1e8) + 1.0) - 1e8) + 0.5

    def act(member: Member) -> None:
        for count in (1, 7, 300_001):
            values = torch.full((count,), large[member.rank])
            dist.all_reduce(values, group=member.group)
            assert torch.equal(values, expected.expand(count))
            part = torch.empty(count)
            dist.reduce_scatter(part, [torch.full((count,), large[member.rank])] * 4, group=member.group)
            assert torch.equal(part, expected.expand(count))
            rooted = torch.full((count,), large[member.rank])
            dist.reduce(rooted, group_dst=2, group=member.group)
            assert member.rank != 2 or torch.equal(rooted, expected.expand(count))
        first, second = torch.full((2,), large[member.rank]), torch.full((1, 3), large[member.rank])
        member.hub.reduce_sum([first, second])
        assert torch.equal(first, expected.expand(2)) and torch.equal(second, expected.expand(1, 3))

    in_cell(4, act)


def test_collectives_that_are_awaited_in_another_order_than_they_began_do_not_take_each_others_messages() -> None:
    def act(member: Member) -> None:
        tensors = [torch.full((90_000 + number,), float(number)) for number in range(4)]
        works = [dist.all_reduce(one, group=member.group, async_op=True) for one in tensors]
        for work in works if member.rank else reversed(works):
            work.wait()
        assert [one[-1].item() for one in tensors] == [0.0, 2.0, 4.0, 6.0]

    in_cell(2, act)


# ---- arguments, and scripts that differ


def test_arguments_that_cannot_work_are_an_error_of_the_script_and_not_of_the_world() -> None:
    wrong: list[Callable[[Any], object]] = [
        lambda group: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2), group=group),
        lambda group: dist.all_gather([torch.ones(2)], torch.ones(2), group=group),
        lambda group: dist.all_reduce(torch.ones(2).to_sparse(), group=group),
        lambda group: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group),
        lambda group: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), group=group),
        lambda group: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0), group=group),
        lambda group: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group),
        lambda group: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [2, 1], group=group),
        lambda group: dist.irecv(torch.ones(2), group=group),
        lambda group: group.send([torch.ones(2)], group.rank(), 0),
    ]

    def act(member: Member) -> None:
        for call in wrong:
            with pytest.raises((UserError, ValueError, RuntimeError)):
                call(member.group)
        assert not member.hub.is_void
        dist.all_reduce(values := torch.ones(1), group=member.group)
        assert values.item() == 2.0

    in_cell(2, act)


def test_a_collective_that_a_script_interrupts_stands_before_no_other() -> None:
    def act(member: Member) -> None:
        world = member.worlds[0]
        waits = world.wait

        def interrupted(works: Any) -> None:
            waits(works)
            world.wait = waits  # type: ignore[method-assign]
            raise KeyboardInterrupt

        world.wait = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(1), group=member.group)
        dist.all_reduce(values := torch.ones(1), group=member.group)
        assert values.item() == 2.0 and not member.hub.is_void

    in_cell(2, act)


@rule(
    "Members of a cell that make different collectives get one sentence that names both, before what comes is used, "
    "and again at each later one",
    "Groups",
    broken_by=[
        Edit(
            "shoal.cells.hub",
            "return is_first or self.check_collectives or not world.has_stepped",
            "return False",
        ),
        Edit(
            "shoal.cells.hub",
            "                raise UserError(world.difference)\n\n    def _fail",
            "                raise UserError(world.__dict__.pop('difference'))\n\n    def _fail",
        ),
    ],
)
@pytest.mark.parametrize("always", [False, True])
def test_members_that_make_different_collectives_get_one_sentence_that_names_both(always: bool) -> None:
    sentences: list[str] = []
    both = Barrier(2, timeout=100)

    def act(member: Member) -> None:
        member.hub.check_collectives = always
        if always:
            member.hub.on_commit()
        dist.all_reduce(torch.ones(3), group=member.group)
        with pytest.raises(UserError) as caught:
            if member.rank:
                dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=member.group)
            else:
                dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=member.group)
        sentences.append(str(caught.value))
        assert not member.hub.is_void
        both.wait()  # one that leaves closes what the other may be in
        with pytest.raises(UserError, match="the members of a cell make different collectives"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=member.group)

    in_cell(2, act, ends_together=False)
    assert sentences[0] == sentences[1]
    assert "coordinate 0 makes all_gather of 3 float32 elements as number 2" in sentences[0]
    assert "and coordinate 1 all_reduce (MAX) of 3 float32 elements as number 2" in sentences[0]


def test_calls_are_compared_while_the_first_round_is_under_way() -> None:
    """In a world's first step all are: no collective waits for one more round trip."""

    def act(member: Member) -> None:
        def note(tensor: Tensor, peer: int, tag: int) -> Any:
            tags.append(tag)
            return send(tensor, peer, tag)

        tags: list[int] = []
        send, member.worlds[0].send = member.worlds[0].send, note  # type: ignore[method-assign]
        work = dist.all_reduce(values := torch.ones(3), group=member.group, async_op=True)
        assert tags[0] == CALLS_TAG and len(tags) == 2
        assert work is not None
        work.wait()
        assert values.tolist() == [2, 2, 2]
        dist.all_reduce(torch.ones(0), group=member.group)  # which has no round

    in_cell(2, act)


RIGHT = CollectiveCall(Kind.ALL_REDUCE, torch.float32, 3, Op.SUM)
"""What both members of these tests make first."""


@pytest.mark.parametrize(
    ("at", "byte", "words"),
    [
        (0, 9, "as number 9 of its process group"),
        (4, 99, "an unknown collective (99) (SUM) of 3 float32"),
        (5, 200, "all_reduce (unknown, 200) of 3 float32"),
        (6, 255, "all_reduce (SUM) of 3 other elements"),
        (7, 77, "in this world, at place 77"),
        (8, 4, "of 4 (and 3 back) float32"),
        (23, 255, "float32 elements"),
        (24, 1, "in another process group"),
        (28, 1, "with root "),
    ],
)
@holds("Members of a cell that make different collectives")
def test_what_no_member_of_this_release_calls_is_told_in_one_sentence(at: int, byte: int, words: str) -> None:
    sentences: list[str] = []

    def act(member: Member) -> None:
        world = member.worlds[0]
        if member.rank == 0:
            with pytest.raises(UserError) as caught:
                dist.all_reduce(torch.ones(3), group=member.group)
            sentences.append(str(caught.value))
        else:
            peer = 1 - world.rank
            forged = RIGHT.to_tensor(1, LoopPlace.LANE, GroupPlace(member.hub, (0, 1), "cell").number, 0)
            forged[at] = byte
            answer = torch.empty_like(forged)
            world.wait([world.receive(answer, peer, CALLS_TAG), world.send(forged, peer, CALLS_TAG)])

    in_cell(2, act, ends_together=False)
    (sentence,) = sentences
    assert sentence.startswith("the members of a cell make different collectives: coordinate 0 makes all_reduce (SUM)")
    assert words in sentence.partition(", and coordinate 1 ")[2]


def test_messages_of_different_collectives_never_land_in_one_another() -> None:
    calls: list[Callable[[Any], object]] = [
        lambda group: dist.all_reduce(torch.ones(3), group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=group),
        lambda group: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=group),
        lambda group: dist.all_to_all_single(torch.ones(6), torch.ones(6), group=group),
    ]
    tags: list[int] = []

    def act(member: Member) -> None:
        def note(tensor: Tensor, peer: int, tag: int) -> Any:
            tags.append(tag)
            return send(tensor, peer, tag)

        member.hub.on_commit()
        if member.rank == 0:
            send, member.worlds[0].send = member.worlds[0].send, note  # type: ignore[method-assign]
        for call in calls:
            call(member.group)

    in_cell(2, act)
    assert len(set(tags[: len(calls)])) == len(calls)


def test_after_a_worlds_first_step_only_the_first_call_of_each_place_is_compared() -> None:
    sent: list[int] = []

    def act(member: Member) -> None:
        def count(*message: Any) -> Any:
            sent.append(message[2])
            return send(*message)

        send, member.worlds[0].send = member.worlds[0].send, count  # type: ignore[method-assign]
        for _ in range(3):
            member.worlds[0].progress.begin_boundary(member.rank)  # which members reach at different times
            for _ in ("a lane", "another lane"):
                member.hub.come_to(LoopPlace.LANE)
                dist.all_reduce(torch.ones(3), group=member.group)
                dist.all_reduce(torch.ones(3), group=member.group)
            member.hub.on_commit()

    in_cell(2, act)
    calls = 4 * 3 + 1  # the last is the barrier at the end
    assert len(sent) == 2 * (calls + 4 + 2 + 2)
