"""What members say of evaluations between two votes: each that has lanes to all others, one message after the other.

It says what its lanes have given where an evaluation is over, and that no more comes when it asks for the next batch,
or votes. So a member that evaluates waits for no other that does not, and for none without lanes. Before the vote all
have heard everything, whether they evaluate or not, and come to the same sums. Called by training/evaluation.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.errors import PeerError
from torch import Tensor

from shoal.exchange.packing import MOST_BYTES, as_bytes_tensor
from shoal.exchange.traffic import EVALUATED
from shoal.group.group import AFTER_THE_LOOP, USER_STEPS, Group, Work

Sums = dict[str, list[float]]
"""By name the number of terms, and parts of their sum (core/tree.py)."""
NO_MORE = torch.zeros(1, dtype=torch.int64, device="cpu")
"""The length of a message without content: no more comes, and nothing was asked for."""


class LoopPart(IntEnum):
    """Where an evaluation stands; what was said of a later place ends the one before."""

    BODY = 0
    """In the loop's body, between a step and the next batch."""
    AFTER = 1
    """After the loop."""


@dataclass(slots=True)
class _Stream:
    """What one member has said so far."""

    sums: tuple[list[Sums], ...] = field(default_factory=lambda: tuple([] for _ in LoopPart))
    """By place."""
    asked: list[str] = field(default_factory=list)
    """With its last message: where it wants the model to be exported."""
    saves: bool = False
    """With its last message: it wants a checkpoint."""
    is_over: bool = False
    comes: tuple[Work, Tensor] | None = None
    """The length of its next message, (1,) int64."""

    def has(self, place: LoopPart, number: int) -> bool:
        """Whether it is known what it brings, if anything, as its evaluation of that number there."""
        return self.is_over or self.brings(place, number) or any(self.sums[place + 1 :])

    def brings(self, place: LoopPart, number: int) -> bool:
        """Whether it is known to bring something."""
        return len(self.sums[place]) > number

    def take(self, message: bytes) -> None:
        """Raises `PeerError` for what no member says."""
        if not message:
            self.is_over = True
            return
        try:
            kind, content = json.loads(message)
            if kind is None:
                paths, saves = content
                self.is_over, self.asked, self.saves = True, [str(path) for path in paths], bool(saves)
            else:
                self.sums[LoopPart(kind)].append(content)
        except (ValueError, TypeError) as error:
            raise PeerError(f"what another worker said of its evaluation cannot be read: {error}") from None


class EvaluationRound:
    """Of one member, between two votes."""

    def __init__(self, group: Group, speakers: Sequence[int]) -> None:
        """`speakers`: the ranks with lanes, by the world's plan."""
        self.group = group
        self.speaks = group.rank in speakers
        self._others = [rank for rank in range(group.size) if rank != group.rank] if self.speaks else []
        self._streams = {rank: _Stream() for rank in speakers}
        self._taken = [0] * len(LoopPart)
        """Evaluations whose sums were given out, by place."""
        self._made = [0] * len(LoopPart)
        """Evaluations of this member."""
        self._messages: list[tuple[Work, Tensor]] = []
        """What was sent; the works of a last message without content are `_ending`."""
        self._ending: list[Work] = []
        self.is_open = True
        """Whether this member may still bring something."""
        self._are_here = False
        """Whether the last words were waited for elsewhere."""

    def share(self, place: LoopPart, sums: Sums) -> list[list[Sums]]:
        """This member's next evaluation there is over. Returns when all who evaluate have said theirs: what `take`
        returns. Raises `WorldChanged`.
        """
        number = self._made[place]
        self._made[place] += 1
        if self.speaks:
            self._say([int(place), sums])
            self._own.sums[place].append(sums)
        at = AFTER_THE_LOOP * place + (number + 1) * USER_STEPS
        self.group.progress.reach(StepPhase.LANES, at)
        while lacking := [rank for rank, stream in self._streams.items() if not stream.has(place, number)]:
            self._hear(lacking)
        return self.take()

    def end(self, asked: Sequence[str] = (), saves: bool = False) -> None:
        """This member brings no more before the next vote. Of the weights at hand it wants exports to the paths
        `asked`, and a checkpoint where it `saves`. Waits for nobody. Raises `WorldChanged`.
        """
        if not self.is_open:
            return
        self.is_open = False
        if self.speaks:
            if asked or saves:
                self._say([None, [list(asked), saves]])
            else:
                self._ending = [self.group.send(NO_MORE, peer, EVALUATED) for peer in self._others]
            self._own.is_over, self._own.asked, self._own.saves = True, list(asked), saves
        for rank in self._open:
            self._expect(rank)

    def last_words(self) -> list[Work]:
        """After `end`: what it has posted, where this member has said nothing else. The caller waits for it, before
        `settle` and with something else, as each wait has its price.
        """
        if self._messages:
            return []
        self._are_here = True
        return [*self._ending, *(self._expect(rank) for rank in self._open)]

    def settle(self) -> list[list[Sums]]:
        """Returns when all have said that they bring no more, and heard it of this member: what `take` returns. Raises
        `WorldChanged`.

        All that a member with nothing to say has sent is a message for which the others have posted receives, so as a
        rule one wait does for both. What others hear after something else is waited for once all of theirs is heard.
        """
        if self._are_here:
            self._read(self._open)
        elif not self._messages and (self._ending or self._open):
            self._hear(self._open, self._ending)
        while self._open:
            self._hear(self._open)
        if self._messages:
            self.group.wait([*(work for work, _ in self._messages), *self._ending])
        return self.take()

    def take(self) -> list[list[Sums]]:
        """What members have brought, evaluation by evaluation, of those of which all is known and that were not given
        out: on all members the same, in the same order.
        """
        found: list[list[Sums]] = []
        streams = self._streams.values()
        for place in LoopPart:
            while all(one.has(place, self._taken[place]) for one in streams):
                at = self._taken[place]
                brought = [one.sums[place][at] for one in streams if one.brings(place, at)]
                if not brought:
                    break
                found.append(brought)
                self._taken[place] += 1
            else:
                break
        return found

    @property
    def asked(self) -> list[str]:
        """Where members want the model to be exported, as far as they have said so: each once."""
        return list(dict.fromkeys(path for stream in self._streams.values() for path in stream.asked))

    @property
    def saves(self) -> bool:
        """Whether a member wants a checkpoint of the weights at hand, as far as they have said so."""
        return any(stream.saves for stream in self._streams.values())

    # ---- messages

    @property
    def _own(self) -> _Stream:
        return self._streams[self.group.rank]

    @property
    def _open(self) -> list[int]:
        """Who may still say something."""
        return [rank for rank, stream in self._streams.items() if not stream.is_over]

    def _say(self, message: list[Any]) -> None:
        content = as_bytes_tensor(json.dumps(message, separators=(",", ":")).encode())
        length = torch.tensor([content.numel()], dtype=torch.int64, device="cpu")
        for peer in self._others:
            self._messages += [(self.group.send(one, peer, EVALUATED), one) for one in (length, content)]

    def _expect(self, rank: int) -> Work:
        """The next message's length."""
        stream = self._streams[rank]
        if stream.comes is None:
            length = torch.zeros(1, dtype=torch.int64, device="cpu")
            stream.comes = self.group.receive(length, rank, EVALUATED), length
        return stream.comes[0]

    def _hear(self, ranks: Sequence[int], also: Sequence[Work] = ()) -> None:
        """A message from each of these."""
        self.group.wait([*also, *(self._expect(rank) for rank in ranks)])
        self._read(ranks)

    def _read(self, ranks: Sequence[int]) -> None:
        """Their messages, whose lengths are here."""
        contents: dict[int, Tensor] = {}
        for rank in ranks:
            comes, self._streams[rank].comes = self._streams[rank].comes, None
            assert comes is not None
            length = int(comes[1])
            if not 0 <= length <= MOST_BYTES:
                raise PeerError(f"rank {rank} announced a message of {length} bytes; expected 0 to {MOST_BYTES}")
            contents[rank] = torch.empty(length, dtype=torch.uint8, device="cpu")
        coming = [(rank, content) for rank, content in contents.items() if content.numel()]
        if coming:
            self.group.wait([self.group.receive(content, rank, EVALUATED) for rank, content in coming])
        for rank, content in contents.items():
            self._streams[rank].take(content.numpy().tobytes())
