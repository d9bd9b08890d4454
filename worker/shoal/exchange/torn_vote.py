"""The vote's all-gather, torn where a test has planted a fault in the vote.

Once all other members have voted, this worker's row goes to one of them, which then passes the vote; the fault strikes;
whoever is left has not passed it and must roll forward. A row is on its way once the kernel has it: a worker that is
killed may be known as dead, and the world stopped, before that one has read it. One that is frozen is not, so a test
that needs the vote to be torn freezes the worker first. Called by the engine; without a fault it is the group's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.exchange.ballot import Ballot
from shoal.exchange.vote import Gather, read_ballots
from shoal.faults import Faults
from shoal.group.group import GATHER_TAG, Group


def gather_of(faults: Faults, group: Group, ballot: Ballot, generation: int) -> Gather:
    """How the vote of `ballot` in the world of `generation` is gathered."""
    if faults.due("in_vote", ballot.step):
        return partial(_torn, group, lambda _: faults.at("in_vote", ballot.step))
    if ballot.generation > generation and faults.due("in_vote_to_begin", ballot.step):
        return partial(_torn, group, lambda rows: _strike_if_it_begins(faults, rows, ballot))
    return group.all_gather


def _strike_if_it_begins(
    faults: Faults,
    rows: Tensor,  # (members, bytes of a row) uint8
    mine: Ballot,
) -> None:
    if all(ballot.generation == mine.generation for ballot in read_ballots(rows)):
        faults.at("in_vote_to_begin", mine.step)


def _torn(
    group: Group,
    strike: Callable[[Tensor], None],  # (members, bytes of a row) uint8
    row: Tensor,  # (bytes of a row,) uint8
) -> Tensor:  # (members, bytes of a row)
    """`strike(rows)` happens when one member has this worker's row and the others have not.

    That one is the peer to whom all others have posted theirs before they posted it to this worker.
    """
    rows = torch.empty(group.size, row.numel(), dtype=row.dtype, device="cpu")
    rows[group.rank] = row
    others = [(group.rank - distance) % group.size for distance in range(1, group.size)]
    for work in [group.receive(rows[peer], peer, GATHER_TAG) for peer in others]:
        work.wait()
    for work in [group.send(row, peer, GATHER_TAG) for peer in others[:1]]:
        work.wait()
    strike(rows)
    for work in [group.send(row, peer, GATHER_TAG) for peer in others[1:]]:
        work.wait()
    return rows
