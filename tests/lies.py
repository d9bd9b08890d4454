"""Every lie that one field of a protobuf message can tell, one at a time: numbers at their ends and beyond what is
allowed, texts of every bad kind, lists that are empty, too long or repeat themselves, messages without what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

WHOLE = (-(1 << 63), -1, 0, 1, 2, 1 << 31, 1 << 40, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1)
REAL = (-1.0, 0.0, 1e-320, 1e300, float("inf"), float("nan"))
TEXTS = ("", "w1", "w99", "run-0", "../../etc", "a\x00b", "é", "x" * 129, "x" * (1 << 17), "[::1]:99999", "{")
BYTES = (b"", b"\xff" * 9, bytes((1 << 20) + 1))
MANY = 20_000

Lied = TypeVar("Told", bound=Message)
Change = Callable[[Any], object]


def lies(message: Lied) -> Iterator[tuple[str, Lied]]:
    """What each says, and a copy of the message that says it."""
    for name, change in _changes(message):
        lie = type(message)()
        lie.CopyFrom(message)
        try:
            change(lie)
        except (ValueError, TypeError):
            continue  # protobuf itself has no such value
        yield name, lie


def _changes(message: Message) -> Iterator[tuple[str, Change]]:
    """Within the message and within every message that it holds."""
    for field in message.DESCRIPTOR.fields:
        name, held = field.name, getattr(message, field.name)
        yield f"no {name}", lambda message, name=name: message.ClearField(name)
        if field.message_type is None:
            changes = _of_list(field) if _is_list(field) else _of_value(field)
        elif field.message_type.GetOptions().map_entry:
            changes = _of_map(field)
        elif _is_list(field):
            changes = _of_messages(held)
        else:
            changes = _within(held) if message.HasField(name) else iter(())
        for inner, change in changes:
            yield f"{name} {inner}", lambda message, name=name, change=change: change((message, name))


def _of_value(field: Any) -> Iterator[tuple[str, Change]]:
    for value in _values(field):
        yield _shown(value), lambda at, value=value: setattr(*at, value)


def _of_list(field: Any) -> Iterator[tuple[str, Change]]:
    for value in _values(field):
        yield f"with {_shown(value)}", lambda at, value=value: getattr(*at).append(value)
    yield "without end", lambda at: getattr(*at).extend([_values(field)[2]] * MANY)


def _of_map(field: Any) -> Iterator[tuple[str, Change]]:
    values = _values(field.message_type.fields_by_name["value"])
    for value in values:
        yield f"with {_shown(value)}", lambda at, value=value: getattr(*at).update({"x": value})
    for key in TEXTS:
        yield f"of {_shown(key)}", lambda at, key=key: getattr(*at).update({key: values[2]})
    yield "without end", lambda at: getattr(*at).update({f"k{number}": values[2] for number in range(MANY)})


def _of_messages(held: Any) -> Iterator[tuple[str, Change]]:
    yield "with an empty one", lambda at: getattr(*at).add()
    yield "twice", lambda at: getattr(*at).extend(list(getattr(*at)))
    if held:
        yield "without end", lambda at: getattr(*at).extend([held[0]] * MANY)
        for name, change in _changes(held[0]):
            yield name, lambda at, change=change: change(getattr(*at)[0])


def _within(held: Message) -> Iterator[tuple[str, Change]]:
    for name, change in _changes(held):
        yield name, lambda at, change=change: change(getattr(*at))


def _values(field: Any) -> tuple[Any, ...]:
    if field.cpp_type in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return REAL
    if field.type == Field.TYPE_BYTES:
        return BYTES
    if field.cpp_type == Field.CPPTYPE_STRING:
        return TEXTS
    if field.cpp_type == Field.CPPTYPE_ENUM:
        return (*range(len(field.enum_type.values)), 99, -1)
    return (False, True, True) if field.cpp_type == Field.CPPTYPE_BOOL else WHOLE


def _is_list(field: Any) -> bool:
    # Not by its label, which is deprecated: the warning, an error here, surfaces on Python 3.13
    return bool(field.is_repeated)


def _shown(value: object) -> str:
    return repr(value)[:30]
