"""What members say of evaluations between two votes: each that has lanes to all others, one message after the other.

It says what its lanes have given where an evaluation is over. In a step in which none evaluates nothing is said: each
message wakes its receiver, and a step of a small model would be a tenth longer. So a member that evaluates asks those
that it has heard nothing of; threads of the group answer (`Answers`) once their member asks for the next batch, or
votes. No member waits for another that does not evaluate, nor for one without lanes.

Ballots tell how much each has said. Where that is anything the vote decides nothing: all hear the rest, whether they
evaluate or not, come to the same sums, and vote again. Called by training/evaluation.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.errors import PeerError
from torch import Tensor

from shoal.exchange.packing import MOST_BYTES, as_bytes_tensor
from shoal.exchange.traffic import AWAITED, EVALUATED
from shoal.group.group import AFTER_THE_LOOP, USER_STEPS, Group, Work

Sums = dict[str, list[float]]
"""By name the number of terms, and parts of their sum (core/tree.py)."""
NO_MORE = torch.zeros(1, dtype=torch.int64, device="cpu")
"""The length of a message without content: no more comes. Only those are given it who ask."""

Key = tuple[int, int]
"""Of a round: the generation, and how many votes have passed in its world."""
NO_KEY: Key = (-1, -1)


class LoopPart(IntEnum):
    """Where an evaluation stands; what was said of a later place ends the one before."""

    BODY = 0
    """In the loop's body, between a step and the next batch."""
    AFTER = 1
    """After the loop."""


PARTS = tuple(LoopPart)


@dataclass(slots=True)
class _Stream:
    """What one member has said so far."""

    sums: tuple[list[Sums], ...] = field(default_factory=lambda: tuple([] for _ in PARTS))
    """By place."""
    asked: list[str] = field(default_factory=list)
    """With its last message: where it wants the model to be exported."""
    saves: bool = False
    """With its last message: it wants a checkpoint."""
    is_over: bool = False
    messages: int = 0
    """Those with content that have come."""
    is_asked: bool = False
    """Whether its answer is still to come."""
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
            self.is_over, self.is_asked = True, False
            return
        self.messages += 1
        try:
            kind, content = json.loads(message)
            if kind is None:
                paths, saves = content
                self.is_over, self.asked, self.saves = True, [str(path) for path in paths], bool(saves)
            else:
                self.sums[LoopPart(kind)].append(content)
        except (ValueError, TypeError) as error:
            raise PeerError(f"what another worker said of its evaluation cannot be read: {error}") from None


class Answers:
    """What one member answers in one group to those that wait for its evaluations: that no more comes."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._over = NO_KEY
        """The last round that has ended here."""
        self._early: list[tuple[Key, int]] = []
        """Who is to be answered when which round ends here."""
        self._sent: list[Work] = []
        group.serve(AWAITED, 2, self.on_request)

    def on_request(
        self,
        peer: int,
        message: Tensor,  # (numbers,) int64
    ) -> None:
        """On a thread of the group. Raises `WorldChanged` where it is closed."""
        generation, votes = message.tolist()
        with self._lock:
            self._take((generation, votes), peer)

    def end(self, key: Key) -> None:
        """This round has ended here. Raises `WorldChanged`."""
        with self._lock:
            self._over = key
            early, self._early = self._early, []
            for of, peer in early:
                self._take(of, peer)

    def _take(self, key: Key, peer: int) -> None:
        if key > self._over:
            self._early.append((key, peer))
        else:
            self._sent.append(self.group.send(NO_MORE, peer, EVALUATED))

    def sent(self) -> list[Work]:
        """What is on its way, once."""
        with self._lock:
            sent, self._sent = self._sent, []
        return sent


class EvaluationRound:
    """Of one member, between two votes that pass."""

    def __init__(self, answers: Answers, speakers: Sequence[int], key: Key) -> None:
        """`speakers`: the ranks with lanes, by the world's plan."""
        group = answers.group
        self.group, self._answers, self._key = group, answers, key
        self.speaks = group.rank in speakers
        self._speakers = speakers
        self._taken = [0] * len(PARTS)
        """Evaluations whose sums were given out, by place."""
        self._made = [0] * len(PARTS)
        """Evaluations of this member."""
        self.messages = 0
        """Of this member, that others may not have heard."""
        self._posted: list[tuple[Work, Tensor]] = []
        """What was said, and asked for."""
        self.is_open = True
        """Whether this member may still bring something."""
        self._are_all_heard = False
        self.is_quiet = True
        """Whether no member is known to have evaluated or asked for anything, as in most steps."""

    def share(self, place: LoopPart, sums: Sums) -> list[list[Sums]]:
        """This member's next evaluation there is over. Returns when all who evaluate have said theirs: what `take`
        returns. Raises `WorldChanged`.
        """
        number = self._made[place]
        self._made[place] += 1
        self.is_quiet = False
        if self.speaks:
            self._say([int(place), sums])
            self._own.sums[place].append(sums)
        at = AFTER_THE_LOOP * place + (number + 1) * USER_STEPS
        self.group.progress.reach(StepPhase.LANES, at)
        while lacking := [rank for rank, stream in self._streams.items() if not stream.has(place, number)]:
            self._ask(lacking)
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
                self.is_quiet = False
                self._say([None, [list(asked), saves]])
                self._own.asked, self._own.saves = list(asked), saves
            if not self.is_quiet:
                self._own.is_over = True
            self._answers.end(self._key)

    def before_vote(self) -> None:
        """What others take at once has left. Who has said something is answered for only with the rest. Raises
        `WorldChanged`.
        """
        if not self.messages:
            self._wait_for_posted()

    def settle(self, messages: Sequence[int]) -> list[list[Sums]]:
        """Returns when all that members have said is heard here and, of this member, everywhere: what `take` returns.
        `messages`: by rank, so many. Raises `WorldChanged`.
        """
        others = {rank: stream for rank, stream in self._streams.items() if rank != self.group.rank}
        while lacking := [rank for rank, one in others.items() if one.messages < messages[rank] or one.is_asked]:
            self._hear(lacking)
        for stream in self._streams.values():
            stream.is_over = True
        self._wait_for_posted()
        self.messages, self._are_all_heard = 0, True
        return self.take()

    def take(self) -> list[list[Sums]]:
        """What members have brought, evaluation by evaluation, of those of which all is known and that were not given
        out: on all members the same, in the same order.
        """
        if self.is_quiet:
            return []
        found: list[list[Sums]] = []
        streams = self._streams.values()
        for place in PARTS:
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
        """Where members want the model to be exported, once all have heard it: each once."""
        if self.is_quiet or not self._are_all_heard:
            return []
        return list(dict.fromkeys(path for stream in self._streams.values() for path in stream.asked))

    @property
    def saves(self) -> bool:
        """Whether a member wants a checkpoint of the weights at hand, once all have heard it."""
        return not self.is_quiet and self._are_all_heard and any(stream.saves for stream in self._streams.values())

    # ---- messages

    @cached_property
    def _streams(self) -> dict[int, _Stream]:
        """By rank; in most steps nothing is said, and none is made."""
        streams = {rank: _Stream() for rank in self._speakers}
        if self.speaks:
            streams[self.group.rank].is_over = not self.is_open
        return streams

    @property
    def _own(self) -> _Stream:
        return self._streams[self.group.rank]

    def _say(self, message: list[Any]) -> None:
        content = as_bytes_tensor(json.dumps(message, separators=(",", ":")).encode())
        length = torch.tensor([content.numel()], dtype=torch.int64, device="cpu")
        self.messages += 1
        for peer in (rank for rank in range(self.group.size) if rank != self.group.rank):
            self._posted += [(self.group.send(one, peer, EVALUATED), one) for one in (length, content)]

    def _ask(self, ranks: Sequence[int]) -> None:
        """Each of these, once, for a word where no more comes."""
        for rank in ranks:
            stream = self._streams[rank]
            if not stream.is_asked:
                stream.is_asked, key = True, torch.tensor(self._key, dtype=torch.int64, device="cpu")
                self._posted.append((self.group.send(key, rank, AWAITED), key))

    def _wait_for_posted(self) -> None:
        works = self._answers.sent()
        if self._posted:
            works += [work for work, _ in self._posted]
            self._posted.clear()
        if works:
            self.group.wait(works)

    def _expect(self, rank: int) -> Work:
        """The next message's length."""
        stream = self._streams[rank]
        if stream.comes is None:
            length = torch.zeros(1, dtype=torch.int64, device="cpu")
            stream.comes = self.group.receive(length, rank, EVALUATED), length
        return stream.comes[0]

    def _hear(self, ranks: Sequence[int]) -> None:
        """A message from each of these."""
        self.group.wait([self._expect(rank) for rank in ranks])
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
            self.is_quiet = False
            self.group.wait([self.group.receive(content, rank, EVALUATED) for rank, content in coming])
        for rank, content in contents.items():
            self._streams[rank].take(content.numpy().tobytes())
