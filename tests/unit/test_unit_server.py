"""Units asked for over real groups: answered beside other work, early requests when their time has come, none after."""

from __future__ import annotations

import threading

import torch
from over_gloo import over_gloo
from shoal.exchange.traffic import GATHERED_UNIT
from shoal.exchange.unit_fetch import UnitServer, ask
from shoal.group.group import Group

UNITS = 5


def test_members_get_what_they_ask_for_though_owners_come_later_and_do_something_else() -> None:
    late = threading.Barrier(3, timeout=100)

    def member(group: Group) -> None:
        server = UnitServer(group)
        others = [rank for rank in range(group.size) if rank != group.rank]
        for boundary in range(3):
            values = [torch.full((1000,), 100.0 * boundary + 10 * group.rank + unit) for unit in range(UNITS)]
            receives = []
            for owner in others:
                for unit in range(UNITS):
                    ask(group, owner, (1, boundary), unit)
                    arriving = torch.empty(1000)
                    receives.append((group.receive(arriving, owner, GATHERED_UNIT), arriving, owner, unit))
            late.wait()  # all have asked, and nobody stands there yet
            server.open((1, boundary), lambda peer, unit, values=values: [values[unit]])
            for work, arriving, owner, unit in receives:
                work.wait()
                assert torch.equal(arriving, torch.full((1000,), 100.0 * boundary + 10 * owner + unit))
            late.wait()

    over_gloo(3, member)


def test_nothing_serves_any_more_when_a_group_is_closed() -> None:
    def serving() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-group-serves")]

    over_gloo(3, UnitServer)
    for thread in threading.enumerate():
        if thread.name.startswith("shoal-group-serves"):
            thread.join(100)
    assert serving() == []
