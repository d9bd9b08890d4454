"""Frozen dataclasses to JSON and back, by their type hints.

Serves `durable.py`: plans, descriptions and the roster are plain dataclasses already, so their text is derived from
their fields and nothing is listed twice. Runs are written as run lengths. Standard library only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from shoal_protos.runs import Runs

LIMIT = 1 << 40
"""Beyond any block number: what was written here was checked before."""


def plain(value: Any) -> Any:
    """What `json.dumps` takes."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Runs):
        return value.encode()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def restored(kind: Any, value: Any) -> Any:
    """The inverse of `plain` for a value of that type. A field that the text lacks keeps its default; one that the type
    lacks is a `ValueError`, for whoever wrote it meant something by it.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = [_reader(part) for part in parts if part is not type(None)]
        return inner[0] if len(inner) == 1 and type(None) not in parts else _optional(inner)
    if origin is tuple:
        item = _reader(parts[0])
        return lambda value: tuple(item(part) for part in value)
    if origin is not None and issubclass(origin, Mapping):
        entry = _reader(parts[1])
        return lambda value: {key: entry(part) for key, part in value.items()}
    if kind is Runs:
        return lambda value: Runs.decode(value, LIMIT)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind is bytes:
        return bytes.fromhex
    return lambda value: value


def _optional(inner: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Decoder of `X | None`; a union of several plain types is kept as it is."""
    if len(inner) > 1:
        return lambda value: value
    return lambda value: None if value is None else inner[0](value)


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers: dict[str, Callable[[Any], Any]] = {}

    def read(value: Mapping[str, Any]) -> Any:
        if not readers:
            readers.update({field.name: _reader(hints[field.name]) for field in fields(kind)})
        if unknown := [name for name in value if name not in readers]:
            raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; a newer Shoal may have written it")
        return kind(**{name: readers[name](part) for name, part in value.items()})

    return read
