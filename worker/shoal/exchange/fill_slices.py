"""A fill's slice: the state of some blocks travels from one that keeps them to one that will.

Both sides derive the slice from the plan and the number of passed votes. It is sent as of the last commit, beside the
next step's exchange, and the receiver gets that step's reduced gradients too, so it replays from then on. A head says
what state there is, because an optimizer makes its state when it first needs it; then each tensor follows as it lies:
sent from the memory of the one, received into the memory of the other, never copied. Of state that is not one value
for each element the values alone are sent (core/value_places.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.errors import PeerError
from shoal_protos.plan import Fill
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.loaded_state import State
from shoal.blocks.state_home import check_averages, check_masters, check_weights, numbers_of
from shoal.core.container import CODES, DTYPES, count_of
from shoal.core.layout import Stretch
from shoal.core.value_places import Places
from shoal.exchange.packing import FramedSend, receive_framed
from shoal.exchange.traffic import FILLED
from shoal.group.group import Group, Work
from shoal.process.host_memory import tensor_bytes

States = dict[Stretch, State]


def send_slice(group: Group, held: HeldBlocks, fills: tuple[Fill, ...]) -> list[Work]:
    """Posts this member's part of a slice; wait for it before the vote: the next update changes what is being sent."""
    works: list[Work] = []
    for fill in fills:
        if fill.source == group.rank:
            states = held.home.states(fill.blocks, with_weights=True)
            works.append(FramedSend(group, fill.target, FILLED, head_of(states)))
            works += [group.send(value, fill.target, FILLED) for value in _large(_changed(states, held, _together))]
    return works


def receive_slice(group: Group, held: HeldBlocks, fills: tuple[Fill, ...]) -> int:
    """Takes in this member's part of a slice; returns its bytes."""
    group.progress.reach(StepPhase.FILLS)
    taken = 0
    for fill in fills:
        if fill.target == group.rank:
            states = blank_states(receive_framed(group, fill.source, FILLED), fill, held)
            group.wait([group.receive(value, fill.source, FILLED) for value in _large(states)])
            taken += sum(value.nbytes for state in states.values() for value in state.values())
            held.take(_changed(states, held, _apart))
    return taken


Change = Callable[[Places, Tensor, int, int], Tensor]
"""Places, values of elements from a first one to before a last one, and these two → values."""


def _changed(states: States, held: HeldBlocks, change: Change) -> States:
    """The states; those that are not one value for each element are changed so."""
    found: States = {}
    for where, state in states.items():
        places, span = held.places_in(where), held.layout.elements(where)
        found[where] = {key: change(places[key], one, *span) if key in places else one for key, one in state.items()}
    return found


def _together(places: Places, values: Tensor, start: int, _: int) -> Tensor:  # (elements,) → (those that have one,)
    return places.together(values, start)


def _apart(places: Places, values: Tensor, start: int, stop: int) -> Tensor:  # the inverse
    return places.apart(values, start, stop)


def wait_for(sends: list[Work], group: Group) -> None:
    """Until this member's part of a slice has left."""
    group.progress.reach(StepPhase.SENDS)
    for send in sends:
        send.wait()


def head_of(states: States) -> bytes:
    """What comes, as JSON: stretches with their states' keys and dtypes, and the numbers that all blocks share."""
    return json.dumps(
        [
            [where.bucket, where.start, where.stop, {key: _description(value) for key, value in state.items()}]
            for where, state in states.items()
        ],
        separators=(",", ":"),
    ).encode()


def blank_states(head: bytes, fill: Fill, held: HeldBlocks) -> States:
    """The states that a head announces, in memory that is still to be filled.

    Raises `PeerError` for a head that is none, or is not of the fill's blocks.
    """
    try:
        announced = {
            Stretch(bucket, start, stop): {key: tuple(entry) for key, entry in state.items()}
            for bucket, start, stop, state in json.loads(head)
        }
        if numbers_of(held.layout, announced) != fill.blocks:
            raise ValueError(f"it brings other blocks than {fill.blocks}")
        states = {
            where: {key: _blank(held, where, key, *entry) for key, entry in state.items()}
            for where, state in announced.items()
        }
        check_masters(held.layout, states)
        check_averages(held.layout, states)
        if held.keeps_weights:
            check_weights(held.layout, states)
        return states
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PeerError(f"rank {fill.source} sent a fill that cannot be read: {error}") from None


def _large(states: States) -> Iterator[Tensor]:  # each (elements,)
    """What follows the head, in the same order on both sides."""
    for state in states.values():
        yield from (value for value in state.values() if value.dim())


def _description(
    value: Tensor,  # (elements,), or () for a number that all blocks share
) -> list[str]:
    code = CODES[value.dtype]
    return [code] if value.dim() else [code, bytes(tensor_bytes(value.cpu())).hex()]


def _blank(
    held: HeldBlocks, where: Stretch, key: str, code: str, shared: str = ""
) -> Tensor:  # (elements of the stretch,), or () for a number that all its blocks share
    """Memory for a state, or the number that was sent with the head."""
    dtype = DTYPES[code]
    if not shared:
        places = held.places_in(where).get(key)
        if places is None:
            return held.memory_for(where, key, dtype)
        return torch.empty(count_of(places, *held.layout.elements(where)), dtype=dtype, device=held.layout.device)
    return torch.frombuffer(bytearray.fromhex(shared), dtype=dtype).reshape(())
