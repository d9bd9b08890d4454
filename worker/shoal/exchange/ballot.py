"""A ballot: what one member brings into a vote, and its bytes.

Numbers as they lie in memory, texts and lists behind their lengths: exact, and quick to read, because every member
reads one of every member's at each step. Bounded: names and requests are limited where they are given.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

MOST_READ = 64
"""Ballots that are remembered as read, but for what differs in every step."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the vote carries and all carry out."""

    kind: str
    """fingerprint | export | save | scheduled (a save by the clock of rank 0) | frozen | gather | stop (the job ends
    after this step) | halt (before it: nothing of it is committed)"""
    detail: str = ""
    """A path for an export, behind `AVERAGES_TO` where it is of averages; for `frozen` the joiner's digest of its
    frozen parameters."""
    rank: int = -1
    """Whose request it is, where that matters."""
    step: int = -1
    """For a `save` in a vote: the first step at which a checkpoint fulfils it."""


HALT = Request("halt")
AVERAGES_TO = "\0"
"""Before the path of an export: no path begins so."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One member's row."""

    step: int
    """The step that the vote would commit; in a vote without a step, the last committed one."""
    generation: int
    """The generation that it is ready for."""
    hyper: str
    """Digest of the step's hyper-parameters."""
    losses: Sequence[float] = ()
    """One per whole subtree of lanes that it trained."""
    reports: dict[str, list[float]] = field(default_factory=dict)
    """Reported numbers by name, in the same form."""
    skipped: int = 0
    """Micro-batches of this step that it was told to skip."""
    micro_batches: int = 1
    """Micro-batches of a lane."""
    skipped_before: int = 0
    """Micro-batches that the job has skipped before this step."""
    bad_loss: str = ""
    """Which of its lanes has a loss that is not finite."""
    bad_gradient: str = ""
    """Which parameter has a gradient that is not finite, in its blocks."""
    is_scaled: int = 0
    """1 where the loss is scaled, so that a gradient that is not finite asks for a smaller scale; else 0."""
    not_finite_before: int = 0
    """Steps before this one that had either."""
    calls_back: int = 0
    """1 where this member has callbacks for committed steps; else 0."""
    evaluations: dict[str, list[float]] = field(default_factory=dict)
    """Evaluations by name: the number of lanes that it evaluated, and their exact sum (core/tree.py)."""
    requests: tuple[Request, ...] = ()
    saving: str = ""
    """How far it is with the save at hand (core/saving.py)."""
    stream: str = ""
    """Where one of its lanes stands in its stream (core/stream_position.py)."""
    unused: str = ""
    """The parameters that none of its lanes used in this step, as bits of a hexadecimal number; empty: none."""
    evaluation_messages: int = 0
    """How many it has sent that others may not have heard (evaluation_round.py)."""
    saved: int = -1
    """The step of the newest whole checkpoint of this life of the job that it knows of."""
    in_order: int = 0
    """1 where the next step's messages may go in the order of this one's (group/learnt_order.py); else 0."""

    def to_bytes(self) -> bytes:
        rest = self._rest()
        return _HEAD.pack(self.step, len(rest)) + _floats(self.losses) + rest

    @classmethod
    def from_bytes(cls, content: memoryview) -> Ballot:
        """The inverse of `to_bytes`; what stands behind it is not read."""
        reader = _Reader(content)
        step, length = reader.unpack(_HEAD)
        return cls(step=step, losses=reader.floats(), **_read_rest(reader.take(length)))

    def _rest(self) -> bytes:
        """All but what differs in every step."""
        parts = [_NUMBERS.pack(*_numbers_of(self)), *map(_text, _texts_of(self))]
        parts += [_lists(self.reports), _lists(self.evaluations), _COUNT.pack(len(self.requests))]
        for request in self.requests:
            parts += [_text(request.kind), _text(request.detail), _PLACE.pack(request.rank, request.step)]
        return b"".join(parts)


_NUMBERS_OF = (
    "generation", "skipped", "micro_batches", "skipped_before", "is_scaled", "not_finite_before", "saved",
    "calls_back", "evaluation_messages", "in_order",
)  # fmt: skip
_TEXTS_OF = ("hyper", "bad_loss", "bad_gradient", "saving", "stream", "unused")
_numbers_of, _texts_of = attrgetter(*_NUMBERS_OF), attrgetter(*_TEXTS_OF)
_HEAD = struct.Struct("<qI")
"""The step, and the length of what stands behind the losses."""
_NUMBERS = struct.Struct(f"<{len(_NUMBERS_OF)}q")
_COUNT, _PLACE = struct.Struct("<I"), struct.Struct("<qq")


def _text(text: str) -> bytes:
    content = text.encode()
    return _COUNT.pack(len(content)) + content


def _floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<I{len(values)}d", len(values), *values)


def _lists(lists: Mapping[str, Sequence[float]]) -> bytes:
    return _COUNT.pack(len(lists)) + b"".join(_text(name) + _floats(values) for name, values in lists.items())


@lru_cache(maxsize=MOST_READ)
def _read_rest(content: bytes) -> dict[str, Any]:
    """Fields of a ballot, which nobody changes: as a rule a member says the same in many steps, as others do."""
    reader = _Reader(memoryview(content))
    fields: dict[str, Any] = dict(zip(_NUMBERS_OF, reader.unpack(_NUMBERS), strict=True))
    fields |= {name: reader.text() for name in _TEXTS_OF}
    fields |= {"reports": reader.lists(), "evaluations": reader.lists()}
    fields["requests"] = tuple(
        Request(reader.text(), reader.text(), *reader.unpack(_PLACE)) for _ in range(reader.count())
    )
    return fields


class _Reader:
    """Reads one thing after the other."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        self._at += form.size
        return form.unpack_from(self._content, self._at - form.size)

    def count(self) -> int:
        self._at += _COUNT.size
        (found,) = _COUNT.unpack_from(self._content, self._at - _COUNT.size)
        return int(found)

    def text(self) -> str:
        return str(self.take(self.count()), "utf-8")

    def take(self, count: int) -> bytes:
        self._at += count
        return bytes(self._content[self._at - count : self._at])

    def floats(self) -> list[float]:
        count = self.count()
        self._at += 8 * count
        return list(struct.unpack_from(f"<{count}d", self._content, self._at - 8 * count))

    def lists(self) -> dict[str, list[float]]:
        return {self.text(): self.floats() for _ in range(self.count())}
