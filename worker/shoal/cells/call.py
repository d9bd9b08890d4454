"""Which collective a member makes, or which place of its loop it has come to, in 32 bytes, and the sentence where that
differs between two members of a cell; how long a message between two of them is.

Without the comparison a script that differs between coordinates would hang, or look like a broken connection. Pure but
for the tensors that carry the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Kind(IntEnum):
    """A collective, or a message."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    ALL_GATHER = 3
    GATHER = 4
    REDUCE_SCATTER = 5
    SCATTER = 6
    BROADCAST = 7
    ALL_TO_ALL = 8
    SEND = 9
    RECV = 10
    MEETING = 11
    """The engine's own: nothing but what is compared."""

    @property
    def words(self) -> str:
        """Its name in `torch.distributed`."""
        return self.name.lower()


class LoopPlace(IntEnum):
    """Where in its loop a script makes a collective. Members of a cell meet at some of them."""

    LANE = 0
    EVALUATION = 1
    BETWEEN = 2
    BACKWARD = 3
    BACKWARD_OF_MORE = 4
    SKIP = 5
    RUN = 6

    @property
    def is_in_lane(self) -> bool:
        """Whether a micro-batch is trained there."""
        return self not in (LoopPlace.EVALUATION, LoopPlace.BETWEEN)


PlaceWords = Mapping[LoopPlace, str]
"""How sentences name the places of a loop: by what the script calls there."""
OF_LOOPS: PlaceWords = {
    LoopPlace.LANE: "in a lane",
    LoopPlace.EVALUATION: "in an evaluation",
    LoopPlace.BETWEEN: "between engine.step and the next batch",
    LoopPlace.BACKWARD: "in engine.backward",
    LoopPlace.BACKWARD_OF_MORE: "in engine.backward(more=True)",
    LoopPlace.SKIP: "in engine.skip",
    LoopPlace.RUN: "in engine.run",
}
OF_WHOLE_STEPS: PlaceWords = {
    **OF_LOOPS,
    LoopPlace.EVALUATION: "in engine.eval_batch",
    LoopPlace.BETWEEN: "between two calls of engine.train_batch",
    LoopPlace.BACKWARD: "in engine.train_batch",
    LoopPlace.RUN: "in engine.train_batch",
}
"""Of a script that makes whole steps by calls."""


class Op(IntEnum):
    """How values of members become one."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8


NO_ROOT = (1 << 32) - 1
CONTENT = struct.Struct("<IBBBBQQII")
"""The number in its group, kind, op, dtype, place; elements to the peer, and from it; the group, the root."""
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""Those that are told by name."""


@dataclass(slots=True)
class CollectiveCall:
    """What a script calls on one member."""

    kind: Kind
    dtype: torch.dtype
    elements: int
    """That each member gives, or gets from each."""
    op: Op = Op.NONE
    root: int = NO_ROOT
    by_peer: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Where they differ between peers: elements to each, and from each."""
    tag: int = 0
    """Of a message, as the script gave it."""

    @property
    def is_message(self) -> bool:
        """Whether it is between two members."""
        return self.kind in (Kind.SEND, Kind.RECV)

    def to_tensor(self, number: int, place: LoopPlace, group: int, peer: int) -> Tensor:  # (32,) uint8
        """What a peer is told: it is the `number`-th of the group."""
        sent, awaited = self.elements, self.elements
        if self.by_peer is not None:
            sent, awaited = self.by_peer[0][peer], self.by_peer[1][peer]
        dtype = DTYPES.index(self.dtype) if self.dtype in DTYPES else len(DTYPES)
        content = CONTENT.pack(number, self.kind, self.op, dtype, place, sent, awaited, group, self.root)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# ---- messages between two members


FRAME_BYTES = 4 << 10
"""Of what goes before a message: how long that is, and all of it where there is room."""
LENGTH = struct.Struct("<QII")
"""Elements, dtype, bytes of an element."""
ROOM_BYTES = FRAME_BYTES - LENGTH.size
DIFFERENT_LENGTHS = (
    "a message between members of a cell has two lengths: coordinate {} sends {} elements ({} bytes), and coordinate "
    "{} receives {} elements ({} bytes); give both tensors the same size."
)


class Frame:
    """What goes before a message, here or at its source."""

    __slots__ = ("_memory", "tensor")

    def __init__(self) -> None:
        self._memory = bytearray(FRAME_BYTES)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        """`(FRAME_BYTES,)`."""

    def put(
        self,
        message: Tensor,  # contiguous, of any shape
    ) -> None:
        """It is that of a message."""
        kind = DTYPES.index(message.dtype) if message.dtype in DTYPES else len(DTYPES)
        LENGTH.pack_into(self._memory, 0, message.numel(), kind, message.itemsize)
        if 0 < message.nbytes <= ROOM_BYTES:
            self._place(message.nbytes).copy_(message.view(-1).view(torch.uint8))

    def take(
        self,
        message: Tensor,  # contiguous, of any shape
        source: int,
        here: int,
    ) -> str:
        """Why it is not that of the message that is awaited; empty where it is. One that has come with its frame is
        there then. `source`, `here`: coordinates.
        """
        elements, kind, itemsize = LENGTH.unpack_from(self._memory)
        if elements * itemsize != message.nbytes:
            sent = f"{elements} {_name_of(kind)}", elements * itemsize
            awaited = f"{message.numel()} {str(message.dtype).removeprefix('torch.')}", message.nbytes
            return DIFFERENT_LENGTHS.format(source, *sent, here, *awaited)
        if 0 < message.nbytes <= ROOM_BYTES:
            message.view(-1).view(torch.uint8).copy_(self._place(message.nbytes))
        return ""

    def _place(self, size: int) -> Tensor:  # (size,) uint8
        return self.tensor[LENGTH.size : LENGTH.size + size]


# ---- comparison


def compared(
    mine: Tensor,  # (32,) uint8
    theirs: Tensor,  # (32,) uint8
    here: int,
    there: int,
    words: PlaceWords = OF_LOOPS,
) -> str:
    """Why two members do not make the same collective, or are at different places, the same words on both; empty where
    they do not differ. `here`, `there`: their coordinates. `words`: how places are named.
    """
    own, other = CONTENT.unpack(mine.numpy().tobytes()), CONTENT.unpack(theirs.numpy().tobytes())
    number, kind, op, dtype, place, sent, awaited, group, root = other
    if own == (number, kind, op, dtype, place, awaited, sent, group, root):
        return ""
    first, second = sorted(((here, own), (there, other)))
    both = f"coordinate {first[0]} {_act(first[1], words)}, and coordinate {second[0]}"
    if Kind.MEETING in (own[1], kind):
        return AT_DIFFERENT_PLACES.format(f"{both} {_act(second[1], words)}")
    elsewhere = ", in another process group" if own[7] != group else ""
    return DIFFERENT_COLLECTIVES.format(f"{both} {_sentence(second[1], words)}{elsewhere}")


DIFFERENT_COLLECTIVES = (
    "the members of a cell make different collectives: {}; a script must make the same collectives in the same order "
    "at every coordinate of a cell."
)
AT_DIFFERENT_PLACES = (
    "the members of a cell are at different places of their loops: {}; all of them must skip the same micro-batches, "
    "evaluate together, and make the same collectives in the same order."
)


def _act(content: tuple[int, ...], words: PlaceWords) -> str:
    is_meeting = content[1] == Kind.MEETING
    return f"is {_where(content[4], words)}" if is_meeting else f"makes {_sentence(content, words)}"


def _where(place: int, words: PlaceWords) -> str:
    return words[LoopPlace(place)] if place < len(LoopPlace) else f"at place {place}"


def _sentence(content: tuple[int, ...], words: PlaceWords) -> str:
    """Also of a content that no member of this release tells."""
    number, kind, op, dtype, place, sent, awaited, _, root = content
    name = _name_of(dtype)
    ways = f"{sent}" if sent == awaited else f"{sent} (and {awaited} back)"
    made = Kind(kind).words if kind < len(Kind) else f"an unknown collective ({kind})"
    by = f" ({Op(op).name if op < len(Op) else f'unknown, {op}'})" if op != Op.NONE else ""
    rooted = f" with root {root}" if root != NO_ROOT else ""
    nth = f"as number {number} of its process group in this world"
    return f"{made}{by} of {ways} {name} elements{rooted} {nth}, {_where(place, words)}"


def _name_of(dtype: int) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "other"
