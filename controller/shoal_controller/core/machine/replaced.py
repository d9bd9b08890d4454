"""A frozen dataclass with some fields replaced, at a quarter of the cost of `dataclasses.replace`.

For the few records that a turn replaces again and again: a batch of a thousand workers makes some ten thousand of them.
They have no slots and nothing to check when they are made; everything else is replaced by `dataclasses.replace`.
"""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def replaced(record: Record, fields: dict[str, Any]) -> Record:
    """A copy with these fields.

    Raises:
        TypeError: A field that the record does not have.
    """
    values = vars(record)
    if not fields.keys() <= values.keys():
        raise TypeError(f"{type(record).__name__} has no field {', '.join(sorted(fields.keys() - values.keys()))}")
    copy: Record = object.__new__(type(record))
    vars(copy).update(values, **fields)
    return copy
