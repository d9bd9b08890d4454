"""Where a step stands when the world changes under it: lanes that stay are not trained again."""

import math
from types import SimpleNamespace

import pytest
import torch
from shoal.core.tree import fold_numbers
from shoal.guards.step_guard import Guards
from shoal.process.device import HOST
from shoal.training.lane_loop import LaneLoop, LaneNumbers, kept_loss


def some_state():
    """What the loop needs of a training state; the lanes that were pushed stand in `pushed`."""
    pushed = []
    sums = SimpleNamespace(
        begin_lane=lambda: None,
        backward_done=lambda *_: None,
        lane_done=lambda lane, is_last: None if is_last else pushed.append(lane),
        live=SimpleNamespace(put_back=lambda _: None),
        clear=lambda: None,
    )
    buffers = SimpleNamespace(put_back=lambda: None, begin_micro_batch=lambda: None, lane_done=lambda lane: None)
    return SimpleNamespace(
        step=3,
        last_step=9,
        loss_scale=None,
        device=HOST,
        sums=sums,
        buffers=buffers,
        parameters=[],
        pushed=pushed,
        guards=Guards(),
    )


def some_loop(*lanes, micro_batches=1):
    """Its batches are (step, lane, micro-batch)."""
    loop = LaneLoop(4, micro_batches, SimpleNamespace(micro_batch=lambda *where: where[:3]))
    loop.begin_step(lanes)
    return loop


def train(loop, state):
    """One micro-batch of the lane at hand, whose loss is the lane's number and a half; returns what was fetched."""
    batch = loop.next_batch(state)
    loop.backward(torch.tensor(batch[1] + 0.5, requires_grad=True), state)
    loop.numbers.report({"lane": batch[1]})
    loop.end_micro_batch(state)
    return batch


@pytest.mark.parametrize("lanes", [(1, 2), (0, 2), (2, 3)])
def test_the_lane_in_flight_is_not_trained_again_wherever_the_new_ones_lie(lanes):
    loop, state = some_loop(2), some_state()
    loop.next_batch(state)
    assert loop.continue_with(lanes)
    assert (loop.in_flight, loop.lane, loop.at_last_backward) == (True, 2, False)
    loop.backward(torch.tensor(2.5, requires_grad=True), state)
    loop.numbers.report({"lane": 2})
    loop.end_micro_batch(state)
    other = sum(lanes) - 2
    assert train(loop, state) == (3, other, 0)
    assert loop.lanes_done
    ascending = some_loop(*lanes)
    for _ in lanes:
        train(ascending, some_state())
    assert loop.numbers.of_step() == ascending.numbers.of_step()


def test_a_lane_that_another_worker_has_now_makes_the_step_begin_again():
    loop, state = some_loop(1, 2), some_state()
    train(loop, state)
    loop.next_batch(state)
    assert not loop.continue_with((2, 3))


def test_finished_lanes_and_the_one_in_flight_stay():
    loop, state = some_loop(1, 2, micro_batches=2), some_state()
    for _ in range(3):
        train(loop, state)
    assert loop.continue_with((0, 1, 2, 3))
    assert [train(loop, state) for _ in range(5)] == [
        (3, 2, 1), (3, 0, 0), (3, 0, 1), (3, 3, 0), (3, 3, 1),
    ]  # fmt: skip
    assert loop.lanes_done
    assert loop.numbers.of_step().losses == (fold_numbers([((lane, lane + 1), lane + 0.5) for lane in range(4)], 4),)


def test_a_step_whose_last_lane_is_done_does_not_go_on():
    loop, state = some_loop(1), some_state()
    train(loop, state)
    assert not loop.continue_with((1, 2))


def test_a_step_does_not_go_on_where_all_that_is_left_of_its_lanes_is_done():
    loop, state = some_loop(1, 2), some_state()
    train(loop, state)
    assert not loop.continue_with((1,))


def test_losses_of_a_device_and_those_that_a_script_has_brought_to_the_host_are_counted_in_their_order() -> None:
    losses, found = [3.0, 0.1, math.inf, -2.0, 7.0, math.nan, 0.7, 0.2], []
    for is_there in (lambda _: False, lambda number: number % 3 == 0):
        numbers = LaneNumbers(4, 2)
        for lane in range(4):
            numbers.begin_lane()
            for number in (2 * lane, 2 * lane + 1):
                loss = losses[number]
                numbers.add_loss(torch.tensor(loss, dtype=torch.float64) if is_there(number) else loss)
            numbers.lane_done(lane)
        found.append(numbers.of_step())
    assert repr(found[0]) == repr(found[1]) and found[0].not_finite == "the loss of lane 1 is inf"


def test_the_loss_of_a_model_on_a_device_may_be_on_the_host() -> None:
    device = SimpleNamespace(on_host=False, holds=lambda tensor: tensor.ndim == 0)
    kept = [kept_loss(loss, SimpleNamespace(device=device)) for loss in (torch.tensor(2.0), torch.tensor([3.0]))]
    assert isinstance(kept[0], torch.Tensor) and kept[0].dtype == torch.float64 and kept[1] == 3.0
