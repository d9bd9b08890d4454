"""Whether a state that a checkpoint holds can be one of this script's object, before the object takes it over.

A manifest with the right checksum can hold anything: it may be of another program, or of another version. What an
object takes over unseen fails in the midst of an update, where no earlier checkpoint helps any more. So kinds are
compared with the object's own state; values are its own affair, and so are lengths, for it may keep a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor


def first_difference_in_kind(found: Any, own: Any, where: str) -> str:
    """The first value of another kind than the object's own, one sentence; empty where there is none.

    A key that only one side has, and a value that is None on one, do not count: versions and options differ.
    """
    if found is None or own is None:
        return ""
    if _kind(found) != _kind(own):
        return f"{where} is {_kind(found)}; expected {_kind(own)}."
    if isinstance(own, Mapping):
        pairs = [(found[key], own[key], f"{where}.{key}") for key in own if key in found]
    elif isinstance(own, Sequence) and not isinstance(own, str):
        pairs = [(there, here, f"{where}.{at}") for at, (there, here) in enumerate(zip(found, own, strict=False))]
    else:
        return ""
    return next(filter(None, (first_difference_in_kind(*pair) for pair in pairs)), "")


def _kind(value: Any) -> str:
    if isinstance(value, Number | Tensor):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, Sequence) else type(value).__name__
