"""Slices of fills: the state of blocks moves from memory to memory, and stays few segments."""

from __future__ import annotations

import pytest
import torch
from fills import fill, pair
from shoal.blocks.flat import Flats, adopt, empty_flats, lay_out_model, trainable
from shoal.blocks.held import HeldBlocks
from shoal.blocks.segments import SEGMENTS_PER_BUCKET
from shoal.blocks.values import WholeValues
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.exchange.fill_slices import receive_slice, send_slice
from shoal.exchange.packing import FramedSend
from shoal.exchange.traffic import FILLED
from shoal.offload.state_place import StatePlace, held_blocks
from shoal_protos.errors import PeerError
from shoal_protos.plan import Fill
from shoal_protos.runs import NO_BLOCKS, Runs, every
from torch import Tensor, nn


def holders(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Layout, HeldBlocks, HeldBlocks, Flats]:
    """One that holds every block after an update, one that holds nothing; and a step's gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 200), nn.Linear(200, 3))
    users = optimizer(model.parameters())  # type: ignore[call-arg]
    layout, parameters = lay_out_model(trainable(model, users))
    flats = adopt(layout, parameters)
    source, target = (held_blocks(StatePlace(), layout, users, WholeValues(layout, flats), {}) for _ in range(2))
    source.hold(every(layout.blocks))
    gradients = [torch.randn_like(flat) for flat in empty_flats(layout)]
    source.apply(WholeValues(layout, gradients), 1.0)
    return layout, source, target, gradients


def tensors(held: HeldBlocks, runs: Runs) -> list[Tensor]:
    return [value for state in held.home.states(runs).values() for value in state.values() if value.dim()]


def largest(layout: Layout) -> Bucket:
    return max(layout.buckets, key=lambda bucket: bucket.blocks)


def place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def test_a_slice_leaves_from_the_memory_of_the_one_and_lands_in_that_of_the_other() -> None:
    layout, source, target, _ = holders()
    moving = Runs.of(range(3, layout.blocks, 2))
    here, there = pair()
    sent: list[tuple[int, int]] = []
    landed: list[tuple[int, int]] = []
    send, receive = here.send, there.receive
    here.send = lambda tensor, to, tag: sent.append(place(tensor)) or send(tensor, to, tag)  # type: ignore[func-returns-value, method-assign]
    there.receive = lambda tensor, source, tag: landed.append(place(tensor)) or receive(tensor, source, tag)  # type: ignore[func-returns-value, method-assign]
    target.expect(moving)
    fills = (Fill(0, 1, moving),)
    with here.wire.changed:
        sends = send_slice(here, source, fills)
        taken = receive_slice(there, target, fills)
        here.wait(sends)
    head = 2  # messages: a length and the head
    assert sent[head:] == [place(value) for value in tensors(source, moving)]
    assert landed[head:] == [place(value) for value in tensors(target, moving)]
    assert taken == target.home.state_bytes()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.SGD])
def test_what_slices_have_brought_is_one_segment_per_stretch_and_updates_alike(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    layout, source, target, gradients = holders(optimizer)
    moving = every(layout.blocks)
    target.expect(moving)
    left = moving
    while left:
        fill(source, target, left.first(3))
        left -= left.first(3)
    assert list(target.home.states(moving)) == layout.stretches(moving)
    assert len(target.segments.in_order) == len(layout.buckets)
    for held in (source, target):
        held.apply(WholeValues(layout, [gradient.clone() for gradient in gradients]), 1.0)
    for mine, theirs in zip(target.home.states(moving).values(), source.home.states(moving).values(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_stretches_that_were_cut_are_joined_by_a_copy_only_where_there_are_many() -> None:
    layout, source, target, _ = holders()
    most = SEGMENTS_PER_BUCKET * len(layout.buckets)
    numbers = layout.numbers_of(layout.whole(largest(layout)))
    assert len(numbers) > most + 1
    for count, number in enumerate(numbers[: most + 1], start=1):
        block = Runs.of([number])
        fill(source, target, block, expected=block)  # each in memory of its own, as fills of many changes are
        target.join()
        assert len(target.segments.in_order) == (count if count <= most else 1)


def test_a_state_of_another_step_is_not_joined() -> None:
    layout, source, target, gradients = holders()
    first, rest = Runs.of([0]), every(layout.blocks) - Runs.of([0])
    fill(source, target, rest, expected=every(layout.blocks))
    source.apply(WholeValues(layout, [gradient.clone() for gradient in gradients]), 1.0)
    fill(source, target, first)
    bucket, position = layout.places[0]
    assert Stretch(bucket, position, position + 1) in target.home.states(every(layout.blocks))


def test_a_fill_brings_blocks_without_state_beside_those_that_have_some() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 40), nn.Linear(40, 3))
    groups = [{"params": [model[0].weight], "momentum": 0.9}, {"params": [*model[1].parameters(), model[0].bias]}]
    optimizer = torch.optim.SGD([*groups, {"params": model[2].parameters()}], lr=0.1)
    layout, parameters = lay_out_model(trainable(model, optimizer))
    flats = adopt(layout, parameters)
    source, target = (held_blocks(StatePlace(), layout, optimizer, WholeValues(layout, flats), {}) for _ in range(2))
    source.hold(every(layout.blocks))
    source.apply(WholeValues(layout, empty_flats(layout)), 1.0)
    fill(source, target, every(layout.blocks), expected=every(layout.blocks))
    assert target.runs == layout.runs(target.home.states(target.runs)) == every(layout.blocks)
    assert {len(state) for state in target.home.states(target.runs).values()} == {0, 1}


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("no JSON", "Expecting value"),
        ("7", "not iterable"),
        ('[[BUCKET, 0, 1, {"exp_avg": ["F99"]}]]', "F99"),
        ('[[BUCKET, 0, 1, {"exp_avg": ["F32", "zz"]}]]', "non-hexadecimal"),
        ("[[BUCKET, 0, 2, {}]]", "it brings other blocks than"),
        ("[[99, 0, 1, {}]]", "lies in no bucket"),
        ("[[BUCKET, 1, 1, {}]]", "lies in no bucket"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_anything_is_taken(head: str, sentence: str) -> None:
    layout, _, target, _ = holders()
    bucket = largest(layout).index
    block = Runs.of([layout.numbers[bucket][0]])
    target.expect(block)
    here, there = pair()
    with here.wire.changed, pytest.raises(PeerError, match=rf"rank 0 sent a fill that cannot be read: .*{sentence}"):
        FramedSend(here, 1, FILLED, head.replace("BUCKET", str(bucket)).encode())
        receive_slice(there, target, (Fill(0, 1, block),))
    assert target.runs == NO_BLOCKS
