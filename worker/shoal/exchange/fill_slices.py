"""A fill's slice: the state of some blocks travels from one that keeps them to one that will.

Both sides derive the slice from the plan and the number of passed votes. It is sent as of the last commit, beside the
next step's exchange, and the receiver gets that step's reduced gradients too, so it replays from then on. What is sent
is self-describing (safetensors), because an optimizer makes its state when it first needs it.
"""

from __future__ import annotations

import json

from safetensors.torch import load, save
from shoal_protos.activity import StepPhase
from shoal_protos.plan import Fill

from shoal.blocks.held import HeldBlocks, State
from shoal.core.layout import Stretch
from shoal.exchange.framing import FramedSend, receive_framed
from shoal.exchange.traffic import FILLED
from shoal.group.group import Group


def send_slice(group: Group, held: HeldBlocks, fills: tuple[Fill, ...]) -> list[FramedSend]:
    """Posts this member's part of a slice; wait for the sends before the vote."""
    sends = []
    for fill in fills:
        if fill.source == group.rank:
            sends.append(FramedSend(group, fill.target, FILLED, write_states(held.states(fill.blocks))))
    return sends


def receive_slice(group: Group, held: HeldBlocks, fills: tuple[Fill, ...]) -> int:
    """Takes in this member's part of a slice; returns its bytes."""
    group.progress.reach(StepPhase.FILLS)
    taken = 0
    for fill in fills:
        if fill.target == group.rank:
            content = receive_framed(group, fill.source, FILLED)
            held.take(read_states(content))
            taken += len(content)
    return taken


def wait_for(sends: list[FramedSend], group: Group) -> None:
    """Until this member's part of a slice has left."""
    group.progress.reach(StepPhase.SENDS)
    for send in sends:
        send.wait()


def write_states(states: dict[Stretch, State]) -> bytes:
    """The state of some stretches of blocks as a message's content."""
    # cloned: stretches that were split or joined share what is one number for all of them, which the format refuses
    tensors = {
        f"{_text(where)}/{key}": value.clone() for where, state in states.items() for key, value in state.items()
    }
    stretches = ",".join(map(_text, states))
    return bytes(save(tensors, {"stretches": stretches}) if tensors else stretches.encode())


def read_states(content: bytes) -> dict[Stretch, State]:
    """The inverse of `write_states`."""
    if not content.startswith(b"{", 8):
        return {stretch: {} for stretch in _stretches(content.decode())}
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    states: dict[Stretch, State] = {stretch: {} for stretch in _stretches(head["__metadata__"]["stretches"])}
    for name, value in load(content).items():
        text, _, key = name.partition("/")
        states[_stretch(text)][key] = value.clone()
    return states


def _stretches(text: str) -> list[Stretch]:
    return [_stretch(one) for one in text.split(",")]


def _text(stretch: Stretch) -> str:
    return f"{stretch.bucket}:{stretch.start}:{stretch.stop}"


def _stretch(text: str) -> Stretch:
    return Stretch(*map(int, text.split(":")))
