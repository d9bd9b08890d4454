"""Layout, flats, lane sums, held blocks, norm and fills on one process: the tensors behind the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fills import fill
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import holds
from shoal.blocks.flat import Gradients, adopt, empty_flats, lay_out_model, trainable
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.loaded_state import probe_state_bytes
from shoal.blocks.values import WholeValues
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.core.tree import fold_numbers, subtrees
from shoal.exchange.finite import subtree_sums
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.optim.elementwise import ELEMENTWISE
from shoal.training.reducing import BucketHooks
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs, every, union
from torch import nn

shapes = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12)


def some_layout(sizes: list[tuple[int, int]], bucket_bytes: int = 1 << 17) -> Layout:
    kinds = (torch.float32, torch.float64)
    return lay_out([Trainable(f"p{i}", s, kinds[i % 3 == 2], i % 2) for i, s in enumerate(sizes)], bucket_bytes)


@given(shapes)
def test_every_parameter_has_a_place_of_its_own_at_a_64_byte_multiple(sizes: list[tuple[int, int]]) -> None:
    layout = some_layout(sizes)
    names = [slot.parameter.name for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(names) == sorted(f"p{i}" for i in range(len(sizes)))
    for bucket in layout.buckets:
        at = 0
        for slot in bucket.slots:
            assert slot.start * bucket.dtype.itemsize % 64 == 0
            assert slot.start >= at
            assert (slot.parameter.group, slot.parameter.dtype) == (bucket.group, bucket.dtype)
            at = slot.start + slot.parameter.elements
        assert at <= bucket.elements == bucket.blocks * layout.block_elements
        inside = {i for s in bucket.slots for i in (s.start, s.start + s.parameter.elements - 1)}
        assert not any(start <= i < stop for start, stop in bucket.gaps for i in inside)


def test_a_bucket_holds_its_parameters_in_reverse_registration_order() -> None:
    layout = lay_out([Trainable(name, (8, 8), torch.float32, 0) for name in "abcd"])
    assert [slot.parameter.name for slot in layout.buckets[0].slots] == ["d", "c", "b", "a"]


def test_a_model_with_many_elements_gets_larger_blocks_and_no_more_than_65536_of_them() -> None:
    layout = lay_out([Trainable(f"p{i}", (1 << 20, 600), torch.float32, 0) for i in range(4)])
    assert layout.blocks <= 65_536
    assert layout.block_elements > 4_096
    assert layout.block_elements & (layout.block_elements - 1) == 0


@given(shapes, st.sets(st.integers(0, 400)))
def test_cutting_blocks_into_buckets_loses_none(sizes: list[tuple[int, int]], chosen: set[int]) -> None:
    layout = some_layout(sizes)
    runs = Runs.of(block for block in chosen if block < layout.blocks)
    assert sum(b - a for ranges in layout.cut(runs) for a, b in ranges) == len(runs) * layout.block_elements


def random_gradients(layout: Layout, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(b.elements, dtype=b.dtype, generator=random) for b in layout.buckets]


@given(st.integers(1, 11), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_the_subtree_stack_gives_the_bits_of_a_plain_recursive_sum(lanes: int, data: st.DataObject) -> None:
    layout = some_layout([(70, 70), (30, 5)])
    held = data.draw(st.sets(st.integers(0, lanes - 1), min_size=1).flatmap(lambda some: st.permutations(sorted(some))))
    sums = LaneSums(layout, lanes)
    for lane in held:
        sums.begin_lane()
        sums.live.zero()
        for flat, value in zip(sums.live.flats, random_gradients(layout, lane), strict=True):
            flat.copy_(value)
        sums.push(lane)

    def summed(start: int, stop: int) -> torch.Tensor:
        if stop - start == 1:
            return random_gradients(layout, start)[0]
        half = 1
        while 2 * half < stop - start:
            half *= 2
        return summed(start, start + half) + summed(start + half, stop)

    assert sums.spans == subtrees(Runs.of(held), lanes)
    for span, partial in zip(sums.spans, (kept.flats[0] for kept in sums.finished), strict=True):
        assert torch.equal(partial, summed(*span))


@holds("The first gradient of a lane is added")
@pytest.mark.parametrize("taken_bytes", [1, 1_000])
def test_a_lane_without_a_gradient_adds_zeros_whatever_its_copy_held(
    taken_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.blocks.flat.TAKEN_BYTES", taken_bytes)
    layout = some_layout([(10, 10), (3, 7)])
    assert any(bucket.gaps for bucket in layout.buckets)
    sums = LaneSums(layout, 4)
    for flat in sums.live.flats:
        flat.fill_(torch.nan)
    sums.begin_lane()
    sums.push(0)
    assert not any(flat.any() for flat in sums.finished[0].flats)


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_an_aligned_run_of_k_lanes_takes_log_k_plus_one_gradient_copies(lanes: int) -> None:
    sums = LaneSums(some_layout([(10, 10)]), lanes)
    for _ in range(3):
        for lane in range(lanes):
            sums.begin_lane()
            sums.push(lane)
        sums.clear()
    assert sums.copies == lanes.bit_length()


@given(st.integers(1, 11), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_the_copies_that_lanes_take_are_there_before_the_step(lanes: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, lanes - 1), min_size=1).flatmap(lambda some: st.permutations(sorted(some))))
    sums, unprepared = (LaneSums(some_layout([(10, 10)]), lanes) for _ in range(2))
    sums.reserve(held)
    reserved = sums.copies
    for one in (sums, unprepared):
        for lane in held:
            one.begin_lane()
            one.push(lane)
    assert reserved == sums.copies == unprepared.copies


@given(st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=examples(30), deadline=None)
def test_the_norm_has_the_same_bits_for_every_split_of_the_blocks(world: int, seed: int) -> None:
    layout = some_layout([(199, 197), (150, 100), (80, 80), (60, 200)])
    gradients = random_gradients(layout, seed)
    random = torch.Generator().manual_seed(seed)
    owners = torch.randint(world, (layout.blocks,), generator=random).tolist()
    parts = []
    for rank in range(world):
        owned = Runs.of(block for block, owner in enumerate(owners) if owner == rank)
        sums = subtree_sums(WholeValues(layout, gradients), owned, layout).tolist()
        parts += list(zip(subtrees(owned, layout.blocks), sums, strict=True))
    spans = subtrees(every(layout.blocks), layout.blocks)
    whole = subtree_sums(WholeValues(layout, gradients), every(layout.blocks), layout).tolist()
    assert fold_numbers(parts, layout.blocks) == fold_numbers(list(zip(spans, whole, strict=True)), layout.blocks)


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {}, "AdamW": {"fused": True}, "NAdam": {}, "RAdam": {}, "Adamax": {},
    "Adagrad": {"initial_accumulator_value": 0.5}, "Adadelta": {}, "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {}, "ASGD": {}, "Lion": {"weight_decay": 0.1},
}  # fmt: skip


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 40), nn.Linear(40, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blocks_held_apart_and_moved_between_holders_get_the_bits_of_the_users_optimizer(name: str) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    [kind] = [one for one in ELEMENTWISE if one.__name__ == name]
    optimizer, plain = kind(model.parameters(), **OPTIMIZERS[name]), kind(twin.parameters(), **OPTIMIZERS[name])
    layout, parameters = lay_out_model(trainable(model, optimizer))
    flats = adopt(layout, parameters)
    named = dict(model.named_parameters())
    holders = [held_blocks(StatePlace(), layout, optimizer, WholeValues(layout, flats), named) for _ in range(3)]
    shares = [Runs.of(b for b in range(layout.blocks) if b % 3 == i) for i in range(3)]
    for holder, share in zip(holders, shares, strict=True):
        holder.hold(share)
    gradients, slots = Gradients(layout), {parameter: slot for slot, parameter in enumerate(parameters)}
    for step in range(5):
        torch.manual_seed(step)
        gradients.begin()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs)
            gradients.add(slots[mine], theirs.grad)
        for holder in holders:
            holder.apply(gradients, 1.0)
        plain.step()
        moving = shares[step % 3].first(2)  # a fill, then the source lets go
        fill(holders[step % 3], holders[(step + 1) % 3], moving, expected=moving)
        holders[step % 3].keep_only(shares[step % 3] - moving)
        holders[(step + 1) % 3].join()
        shares[(step + 1) % 3] |= moving
        shares[step % 3] -= moving
        assert [h.runs for h in holders] == shares
        assert union(shares) == every(layout.blocks)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Counting(torch.optim.SGD):
    """Counts its steps."""

    steps = 0

    def step(self, closure: object = None) -> None:
        self.steps += 1
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Counting])
def test_a_large_update_is_made_in_parts_unless_the_optimizer_could_tell(
    kind: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.blocks.state_home.PART_BYTES", 1)
    model = nn.Sequential(*(nn.Linear(80, 80) for _ in range(4)))
    twin = copy.deepcopy(model)
    optimizer, plain = kind(model.parameters()), kind(twin.parameters())
    layout, parameters = lay_out_model(trainable(model, optimizer))
    held = held_blocks(StatePlace(), layout, optimizer, WholeValues(layout, adopt(layout, parameters)), {})
    held.hold(every(layout.blocks))
    gradients, slots = Gradients(layout), {parameter: slot for slot, parameter in enumerate(parameters)}
    for _ in range(2):
        gradients.begin()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs)
            gradients.add(slots[mine], theirs.grad)
        updated: list[int] = []
        held.apply(gradients, 1.0, updated.append)
        plain.step()
        assert updated == ([3, 2, 1, 0] if kind is torch.optim.AdamW else [0])
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_probed_state_size_is_what_a_block_takes() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    layout, parameters = lay_out_model(trainable(model, optimizer))
    held = held_blocks(StatePlace(), layout, optimizer, WholeValues(layout, adopt(layout, parameters)), {})
    held.hold(Runs.of([1]))
    held.apply(WholeValues(layout, empty_flats(layout)), 1.0)
    assert probe_state_bytes(layout, optimizer) == held.home.state_bytes() == 2 * 4 * layout.block_elements + 4
    held.keep_only(NO_BLOCKS)
    assert held.home.state_bytes() == 0


@holds("The first gradient of a lane is added")
@pytest.mark.parametrize("taken_bytes", [1, 1_000, 1_000_000])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_gradient_has_the_bits_of_an_accumulation_into_zeros_though_zero_grad_dropped_it(
    backwards: int, taken_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.blocks.flat.TAKEN_BYTES", taken_bytes)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, parameters = lay_out_model(trainable(model, optimizer))
    adopt(layout, parameters)
    sums = LaneSums(layout, 1)
    hooks = BucketHooks(layout, parameters, sums)
    sums.begin_lane()
    for _ in range(backwards):
        optimizer.zero_grad(set_to_none=True)
        sums.live.put_back(parameters)
        with hooks.armed_to_take():
            sum((parameter * -0.0).sum() for parameter in parameters[1:]).backward()
        sums.backward_done(parameters)
        assert all(parameter.grad is not None for parameter in parameters)
        assert sums.live.are_in_place(parameters)
    assert all(flat.view(torch.int32).eq(0).all() for flat in sums.live.flats), "a stolen gradient is -0.0"


def test_a_gradient_of_another_dtype_or_shape_than_was_laid_out_is_refused_by_name() -> None:
    gradients = Gradients(some_layout([(10, 10)]))
    gradients.begin()
    for other in (torch.ones(5, 20), torch.ones(10, 10, dtype=torch.float64)):
        parameter = nn.Parameter(other)
        parameter.grad = torch.ones_like(other)
        with pytest.raises(UserError, match='parameter "p0" got new memory after shoal'):
            gradients.take(0, parameter)


def test_a_parameter_that_no_optimizer_group_has_is_refused_by_name() -> None:
    model = small_model()
    with pytest.raises(UserError, match=r'parameter "2.weight" requires a gradient but is in no group'):
        trainable(model, torch.optim.SGD(model[:2].parameters(), lr=0.1))


def test_parameters_that_share_storage_without_being_tied_are_refused_by_name() -> None:
    model = small_model()
    model[2].bias = nn.Parameter(model[1].weight.data.view(-1)[:3])
    with pytest.raises(UserError, match=r'parameters "2.bias" and "1.weight" share storage without being tied'):
        trainable(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_frozen_after_the_start_is_an_error_not_a_silent_zero() -> None:
    model = small_model()
    layout, parameters = lay_out_model(trainable(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    parameters[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"was frozen after shoal\.initialize"):
        Gradients(layout).put_back(parameters)
