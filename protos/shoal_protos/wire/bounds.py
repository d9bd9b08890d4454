"""Bounds: how the wire reads numbers, texts and lists that somebody else sent.

Every value of a decoded message passes through one of these. Each raises `UserError` with one sentence that names the
field, what was found and what is allowed; nothing else may come out of them. Texts meant for people are made readable
when they are written (clipped, control characters replaced); names never, for a clipped name would be another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

from shoal_protos.addresses import is_connectable
from shoal_protos.errors import UserError
from shoal_protos.path_part import NAME, NAME_EXPECTED
from shoal_protos.runs import Runs

MAX_NUMBER = (1 << 62) - 1
"""Steps, generations, bytes: what fits everywhere, with room to add one."""

MAX_SECONDS = 10 * 366 * 86_400.0
"""Ten years: no sum of such durations leaves the floating-point numbers, and every timer takes one."""

LEAST_HEARTBEAT_SECONDS = 0.01

MAX_BLOCKS = 1 << 17
MAX_LANES = 1 << 16
MAX_MEMBERS = 1 << 14
MAX_FILLS = 1 << 20
MAX_COORDINATES = 1 << 10
"""Most processes of a cell."""
MAX_PARTNERS = 64
MAX_PARAMETERS = 1 << 18
MAX_DIMENSIONS = 64
MAX_ENTRIES = 1 << 14
"""Most entries of a mapping."""
MAX_KINDS = 64
"""Most kinds of memory or phases of a change: each becomes a metric's series."""
MAX_CHANGES = 64
MAX_CORRUPT = 64
MAX_PLACES = 4
MAX_MARKS = 16
MAX_BUILDS = 64
MAX_CONTROLLERS = 64

NAME_CHARACTERS = 128
LABEL_CHARACTERS = 1024
"""Hosts, parameter names, paths, keys."""
VALUE_CHARACTERS = 1 << 16
"""A config value as text."""
TEXT_CHARACTERS = 1 << 14
"""A sentence, or a failure with its traceback's last lines."""
RECORD_BYTES = 1 << 20
SHOWN_CHARACTERS = 60
"""How much of a wrong value an error repeats."""

_CREDENTIAL = re.compile(r"[!-~]+", re.ASCII)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTROL_IN_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

Many = TypeVar("Many", bound=Sized)
Number = TypeVar("Number", bound=int)
Word = TypeVar("Word", bound=StrEnum)


# ---- numbers


def whole(field: str, value: int, least: int = 0, most: int = MAX_NUMBER) -> int:
    """A number within bounds."""
    if least <= value <= most:
        return value
    allowed = f"{least} or more" if most == MAX_NUMBER and value < least else f"{least} to {most}"
    raise UserError(f"{field} is {value}; expected {allowed}")


def seconds(field: str, value: float, least: float = 0.0) -> float:
    """A duration: not negative, and not longer than a job may live."""
    if not least <= value <= MAX_SECONDS:  # also where it is not a number
        raise UserError(f"{field} is {value}; expected {least:g} to {MAX_SECONDS:.0f} seconds")
    return value


# ---- lists


def few(field: str, values: Many, most: int) -> Many:
    """A list or mapping that is not longer than allowed."""
    if len(values) > most:
        raise UserError(f"{field} has {len(values)} entries; at most {most} are allowed")
    return values


def runs(field: str, lengths: Sequence[int], blocks: int) -> Runs:
    """A set of blocks below `blocks`."""
    if len(lengths) > blocks + 1:  # runs are positive and apart, so more numbers cannot fit
        raise UserError(f"{field}: {len(lengths)} run lengths are too many for {blocks} blocks")
    try:
        return Runs.decode(lengths, blocks)
    except UserError as error:
        raise UserError(f"{field}: {error}") from None


def word(field: str, numbers: Mapping[Number, Word], number: Number) -> Word:
    """A known word of an enumeration."""
    if number not in numbers:
        raise UserError(f"{field} is number {number}; this version of Shoal knows {', '.join(numbers.values())}")
    return numbers[number]


def raw(field: str, value: bytes, most: int = RECORD_BYTES) -> bytes:
    """Bytes that are not looked into."""
    if len(value) > most:
        raise UserError(f"{field} has {len(value)} bytes; at most {most} are allowed")
    return value


# ---- texts


def name(field: str, value: str) -> str:
    """An id: it may become part of a path, a metric's label or a URL."""
    _short(field, value, NAME_CHARACTERS)
    if not _is_name(value):
        raise UserError(f"{field} is {_shown(value)}; expected {NAME_EXPECTED}")
    return value


@lru_cache(maxsize=1 << 12)
def _is_name(value: str) -> bool:
    """The same few names come with every heartbeat."""
    return NAME.fullmatch(value) is not None


def address(field: str, value: str) -> str:
    """`HOST:PORT`, or `[IPV6]:PORT`."""
    _short(field, value, LABEL_CHARACTERS)
    if not is_connectable(value) or _CONTROL.search(value):
        raise UserError(f"{field} is {_shown(value)}; expected HOST:PORT with a port of 1 to 65535")
    return value


def label(field: str, value: str) -> str:
    """One line of text that is compared or shown as it is."""
    _short(field, value, LABEL_CHARACTERS)
    if _CONTROL.search(value):
        raise UserError(f"{field} is {_shown(value)}; control characters are not allowed")
    return value


def labels(field: str, values: Sequence[str], most: int) -> tuple[str, ...]:
    """Several of them."""
    return tuple(label(field, value) for value in few(field, values, most))


def credential(field: str, value: str) -> str:
    """What a header can carry. It is not repeated in an error."""
    _short(field, value, LABEL_CHARACTERS)
    if not _CREDENTIAL.fullmatch(value):
        raise UserError(f"{field} has characters that a header cannot carry, or none; expected printable ASCII")
    return value


def text(field: str, value: str, most: int = TEXT_CHARACTERS) -> str:
    """Lines for people."""
    _short(field, value, most)
    if _CONTROL_IN_TEXT.search(value):
        raise UserError(f"{field} is {_shown(value)}; control characters are not allowed")
    return value


def readable(value: str) -> str:
    """What `text` accepts: control characters replaced, the middle left out where it is too long. For writing."""
    clean = _CONTROL_IN_TEXT.sub("\N{REPLACEMENT CHARACTER}", value.encode("utf-8", "replace").decode())
    if len(clean) <= TEXT_CHARACTERS:
        return clean
    gap = "\n[…]\n"
    head = TEXT_CHARACTERS // 4
    return clean[:head] + gap + clean[len(clean) - (TEXT_CHARACTERS - head - len(gap)) :]


def one_line(value: str) -> str:
    """Return a name that a script has given as `label` accepts it. For writing."""
    return " ".join(readable(value).split())[:LABEL_CHARACTERS]


def _short(field: str, value: str, most: int) -> None:
    if len(value) > most:
        raise UserError(f"{field} has {len(value)} characters; at most {most} are allowed")


def _shown(value: str) -> str:
    return repr(value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "…")
