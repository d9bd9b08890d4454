"""The link of a script without a controller: what a controller would say that starts one worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rule import holds
from shoal.group.group import SoloGroup, WorldChanged
from shoal.session.link import Opened, Recover, Stopped
from shoal.session.link_choice import AloneLink
from shoal_protos.description import Description
from shoal_protos.messages import Inventory, MemberState, Status, Telemetry
from shoal_protos.runs import NO_BLOCKS, every

DESCRIPTION = Description(8, 5, 4096, 8, 1, 0, 10, (), "SGD", {}, {}, False, False)
NEW = Status(0, 0, MemberState.WARMING_UP, 0, step=-1, committed_in=0)


def test_a_script_alone_goes_through_a_start_like_any_worker() -> None:
    link = AloneLink()
    link.introduce(DESCRIPTION, NEW)
    assert not link.stopping
    link.end_warm_up()
    assert link.stopping and link.take() == Stopped(1)
    link.answer(Inventory(1, 0, -1, 0, b"", NO_BLOCKS, NO_BLOCKS, NO_BLOCKS))
    recover = link.take()
    assert isinstance(recover, Recover)
    plan = recover.plan
    assert plan.shares[0].lanes == tuple(range(8)) and plan.shares[0].owned == every(5)
    assert plan.recovery is not None and plan.recovery.step == 0
    assert link.report_ready(1) and link.take() == Opened(1)
    link.begin(plan, recover.group)
    link.publish(NEW, Telemetry())
    assert link.membership().state is MemberState.TRAINING
    voted = link.enter_vote(every(5))
    assert voted == 1 and link.leave_vote([voted]) is None
    assert link.take(0.0) is None and not link.stopping


@holds("A generation's number exceeds those")
def test_the_first_generation_comes_after_all_that_were_saved_though_none_of_them_is_taken_up() -> None:
    link = AloneLink()
    link.introduce(DESCRIPTION, NEW)
    link.publish(replace(NEW, highest_saved=7), Telemetry())
    link.end_warm_up()
    assert link.take() == Stopped(8)


def test_a_group_of_one_gathers_its_own_row_until_it_is_over() -> None:
    group, row = SoloGroup(), torch.tensor([1, 2, 3], dtype=torch.uint8)
    rows = group.all_gather(row)
    assert rows.tolist() == [[1, 2, 3]]
    row[0] = 9
    assert rows.tolist() == [[1, 2, 3]]
    group.abort()
    with pytest.raises(WorldChanged):
        group.all_gather(row)
