"""Frozen dataclasses to JSON and back, by their type hints.

Serves `durable.py` and `token_register.py`: plans, descriptions, the roster and tokens are plain dataclasses already,
so their text is derived from their fields and nothing is listed twice. Runs are written as run lengths. Standard
library only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from shoal_protos.runs import Runs

MOST = 1 << 62
"""Beyond any number that is written here."""
LIMIT = 1 << 40
"""Beyond any block number: what was written here was checked before."""


class OfAnotherType(ValueError):
    """A value that no field of that type has; the sentence begins with the field's place."""


def plain(value: Any) -> Any:
    """What `json.dumps` takes."""
    kind: Any = type(value)
    write = _writer(kind)
    return value if write is None else write(value)


@cache
def _writer(kind: Any) -> Callable[[Any], Any] | None:
    """How values of that type are written; None: as they are. A plan for a thousand workers has 20,000 of them."""
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, Runs):
        return Runs.encode
    if is_dataclass(kind):
        return _dataclass_writer(kind)
    if issubclass(kind, Mapping):
        return lambda value: {key: plain(item) for key, item in value.items()}
    if issubclass(kind, tuple):
        return lambda value: [plain(item) for item in value]
    return bytes.hex if issubclass(kind, bytes) else None


def _dataclass_writer(kind: Any) -> Callable[[Any], Any]:
    names = [field.name for field in fields(kind) if not field.metadata.get("omitted")]
    omitted = {field.name: field.default for field in fields(kind) if field.metadata.get("omitted")}

    def write(value: Any) -> Any:
        written = {name: plain(getattr(value, name)) for name in names}
        for name, default in omitted.items():
            if (found := getattr(value, name)) != default:
                written[name] = plain(found)
        return written

    return write


def restored(kind: Any, value: Any) -> Any:
    """The inverse of `plain` for a value of that type. A field that the text lacks keeps its default; one that the type
    lacks is a `ValueError`, for whoever wrote it meant something by it. So is a value of another type: what the machine
    takes over unseen, the page that shows it cannot show, nor any other job's beside it.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _any_of([_reader(part) for part in parts])
    if origin is tuple and parts[1:] != (Ellipsis,):
        items = [_reader(part) for part in parts]
        return lambda value: tuple(item(part) for item, part in zip(items, _checked(value, list), strict=True))
    if origin is tuple:
        item = _reader(parts[0])
        return lambda value: tuple(item(part) for part in _checked(value, list))
    if origin is not None and issubclass(origin, Mapping):
        entry = _reader(parts[1])
        return lambda value: {key: entry(part) for key, part in _checked(value, dict).items()}
    if kind is Runs:
        return lambda value: Runs.decode(value, LIMIT)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind is bytes:
        return bytes.fromhex
    if kind is int:
        return _whole_number
    if kind is float:
        return lambda value: _checked(value, int, float)
    return lambda value: _checked(value, kind)


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise OfAnotherType(f"{str(value)[:30]!r} is {type(value).__name__}; expected {kinds[-1].__name__}")
    return value


def _whole_number(value: Any) -> Any:
    if abs(_checked(value, int)) > MOST:
        raise OfAnotherType(f"{str(value)[:30]} is not a number that Shoal stores")
    return value


def _any_of(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The first that takes the value; else the first one's refusal."""

    def read(value: Any) -> Any:
        refusals: list[Exception] = []
        for reader in readers:
            try:
                return reader(value)
            except (ValueError, TypeError, AttributeError) as error:
                refusals.append(error)
        raise refusals[0]

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers: dict[str, Callable[[Any], Any]] = {}

    def read(value: Mapping[str, Any]) -> Any:
        if not readers:
            readers.update({field.name: _reader(hints[field.name]) for field in fields(kind)})
        if unknown := [name for name in _checked(value, dict) if name not in readers]:
            raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; a newer Shoal may have written it")
        return kind(**{name: _read_field(name, readers[name], part) for name, part in value.items()})

    return read


def _read_field(name: str, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except OfAnotherType as error:
        raise OfAnotherType(f"{name}: {error}") from None
