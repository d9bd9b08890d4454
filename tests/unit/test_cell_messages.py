"""Messages between two members of a cell, of equal and of unequal lengths."""

from __future__ import annotations

from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from cell_members import Member, in_cell
from rule import Edit, rule
from shoal_protos.errors import UserError


@rule(
    "A message between members of a cell that is longer or shorter than the one that is awaited lands nowhere, and "
    "gets one sentence that names both lengths",
    "Groups",
    broken_by=[
        Edit("shoal.cells.call", "        if elements * itemsize != message.nbytes:\n", "        if False:\n"),
    ],
)
@pytest.mark.parametrize(
    ("sent", "awaited"), [(3, 4), (4, 3), (0, 3), (3, 0), (3, 3 << 20), (3 << 20, 3), (3 << 20, 3 << 19), (1015, 1020)]
)
def test_a_message_of_another_length_than_is_awaited_is_told_with_both_lengths(sent: int, awaited: int) -> None:
    sentences: list[str] = []
    both = Barrier(2)

    def act(member: Member) -> None:
        member.hub.on_commit()  # in every step, not in a world's first one alone
        if member.rank == 0:
            work = dist.isend(torch.ones(sent), group_dst=1, group=member.group)
            assert work is not None
        else:
            found = torch.full((awaited,), 7.0)
            with pytest.raises(UserError) as caught:
                dist.recv(found, group_src=0, group=member.group)
            sentences.append(str(caught.value))
            assert bool((found == 7.0).all()) and not member.hub.is_void
        both.wait()  # one that leaves closes what the other may be in

    in_cell(2, act, ends_together=False)
    assert sentences == [
        f"a message between members of a cell has two lengths: coordinate 0 sends {sent} float32 elements ({4 * sent} "
        f"bytes), and coordinate 1 receives {awaited} float32 elements ({4 * awaited} bytes); give both tensors the "
        "same size."
    ]


@pytest.mark.parametrize("length", [0, 1, 1015, 1020, 1021, 1 << 16])
def test_messages_both_ways_and_of_one_tag_come_whole_and_in_their_order(length: int) -> None:
    def act(member: Member) -> None:
        other = 1 - member.rank
        found = [torch.zeros(length), torch.zeros(2, length, dtype=torch.int16), torch.zeros(length).bool()]
        own = [torch.full((length,), member.rank + 1.0), torch.full((length, 2), 5, dtype=torch.int16).T,
               torch.ones(length).bool()]  # fmt: skip
        works = [dist.irecv(one, group_src=other, group=member.group) for one in found]
        works += [dist.isend(one, group_dst=other, group=member.group) for one in own]
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert bool((found[0] == other + 1).all()) and bool((found[1] == 5).all()) and bool(found[2].all())

    in_cell(2, act)
