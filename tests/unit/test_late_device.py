"""The engine on a device that is late: whatever it forgets to wait for is a wrong bit, or an assertion of the device.

The bits are those of a world of one on the CPU, in every stage, through a loss and a join.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from crew import Crew, Task, Worker, undisturbed
from late_device import LateDevice
from shoal.device import HOST


def on_the_host(task: Task) -> Task:
    return replace(task, device=lambda: HOST)


def look_at_votes(worker: Worker, point: str, _: int) -> None:
    """Before it votes the host has waited for whatever a commit reads."""
    device = worker.engine.context.state.device
    assert isinstance(device, LateDevice)
    assert point != "vote" or device.is_settled


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_and_a_join_change_no_bit(stage: int) -> None:
    task = Task({"stage": stage, "max_steps": 10}, device=LateDevice)
    with Crew("abc", task) as crew:
        crew.watchers.append(look_at_votes)
        crew.train_to(2)
        crew.kill("b")
        crew.train_to(4)
        crew.add("d")
        crew.train_until("all are members", lambda: len(crew.members()) == 3)
        assert crew.finish() == undisturbed(on_the_host(task))
        devices = [worker.engine.context.state.device for worker in crew.workers.values()]
        assert all(device.copies > 0 for device in devices if isinstance(device, LateDevice))
