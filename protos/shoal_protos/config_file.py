"""A training configuration as the JSON object that it is: from a file or a text, or refused in one sentence.

A worker trains by one (`shoal.config`), `shoal estimate` looks into one. What is no JSON is read as Hjson, which is
JSON with comments and without needless commas and quotes: DeepSpeed reads its files so. What keys mean is not known
here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import hjson

from shoal_protos.errors import UserError
from shoal_protos.strict_json import each_key_once, parsed_json
from shoal_protos.text import shown

LARGEST_FILE = 1 << 20
LARGEST_EXACT = 2.0**53
"""Floating-point numbers beyond this one are whole because they have no digits left for the rest."""

BREAKS: dict[type[Exception], str] = {
    ValueError: "a number has thousands of digits",
    IndexError: "a comment or a text has no end",
    OverflowError: "a number is too large",
}
"""What else than its own error hjson lets out, and of which text."""


def read_config(path: Path) -> dict[str, Any]:
    """The object in a file. Raises `UserError`."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)  # a device tells no size, and may have no end
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UserError(f"config {shown(str(path))} is not a name that a file can have.") from None
    if len(content) > LARGEST_FILE:
        raise UserError(f"config {path} is larger than {LARGEST_FILE} bytes; it is not a configuration.")
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not text in UTF-8.") from None
    return parsed_config(text, f" {path}")


def parsed_config(text: str, name: str = "") -> dict[str, Any]:
    """The object in a text; `name`, with a space before it, is what sentences call it. Raises `UserError`."""
    try:
        given = parsed_json(text, f"config{name}", _no_constant)
    except json.JSONDecodeError as error:
        given = _read_as_hjson(text, name, error)
    except UserError as error:
        raise UserError(f"{error}.") from None
    if not isinstance(given, dict):
        raise UserError(f"config{name} is {shown(given)}; expected an object {{…}}.")
    return given


def whole(value: object) -> object:
    """An integer for a number that is written with a point or an exponent and is whole (2000.0, 1e5); everything else
    as it is.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT:
        return int(value)
    return value


def _read_as_hjson(text: str, name: str, as_json: json.JSONDecodeError) -> Any:
    """The value in a text that is no JSON. Raises `UserError` with what both readers say."""
    try:
        return hjson.loads(text, object_pairs_hook=each_key_once(f"config{name}"))
    except UserError as error:
        raise UserError(f"{error}.") from None
    except RecursionError:
        raise UserError(f"config{name} is nested too deeply.") from None
    except tuple(BREAKS) as error:
        why = f"{error.msg}, {_place(error)}" if isinstance(error, hjson.HjsonDecodeError) else BREAKS[type(error)]
        raise UserError(f"config{name} is neither JSON ({as_json.msg}, {_place(as_json)}) nor Hjson ({why}).") from None


def _place(error: Any) -> str:
    return f"line {error.lineno}, column {error.colno}"


def _no_constant(name: str) -> NoReturn:
    raise UserError(f"the config holds {name}; numbers must be finite")
