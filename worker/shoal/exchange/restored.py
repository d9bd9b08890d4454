"""What owners have read from a checkpoint goes on to the blocks' mirrors: read once, verified once.

Fills are letters that say what is in them; here both sides know the manifest, so tensors travel bare and land where
they stay. Called by resuming.py before a restored world opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from shoal_protos.plan import Plan
from shoal_protos.runs import Runs, Span
from torch import Tensor

from shoal.exchange.group import Group
from shoal.exchange.routes import FILLED
from shoal.zero.held import HeldBlocks, State

Blank = Callable[[Runs], Mapping[Span, State]]
"""The states of blocks as the checkpoint cuts them, on every member alike: tensors to be filled."""


def share_states(group: Group, plan: Plan, held: HeldBlocks, blank: Blank) -> None:
    """Every owner holds its blocks' states, and afterwards every mirror too. Raises `WorldChanged`."""
    mine = plan.shares[group.rank]
    others = [(rank, share) for rank, share in enumerate(plan.shares) if rank != group.rank]
    arriving = {rank: blank(share.owned & mine.mirrored) for rank, share in others}
    leaving = {rank: list(blank(mine.owned & share.mirrored)) for rank, share in others}
    works = [group.receive(flat, rank, FILLED) for rank, states in arriving.items() for flat in _flats(states)]
    for rank, spans in leaving.items():
        cut = {span: held.states(Runs((span,)))[span] for span in spans}
        works += [group.send(flat, rank, FILLED) for flat in _flats(cut)]
    for work in works:
        work.wait()
    held.take(dict(chain.from_iterable(states.items() for states in arriving.values())))


def _flats(states: Mapping[Span, State]) -> Iterator[Tensor]:
    """In an order that both sides know. Views."""
    for span in sorted(states):
        for key in sorted(states[span]):
            yield states[span][key].reshape(-1)
