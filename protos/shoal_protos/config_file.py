"""A training configuration as the JSON object that it is: from a file or a text, or refused in one sentence.

A worker trains by one (`shoal.config`), `shoal estimate` looks into one. What its keys mean is not known here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from shoal_protos.errors import UserError
from shoal_protos.quoting import shown
from shoal_protos.strict_json import parsed_json

LARGEST_FILE = 1 << 20


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
        raise UserError(
            f"config{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except UserError as error:
        raise UserError(f"{error}.") from None
    if not isinstance(given, dict):
        raise UserError(f"config{name} is {shown(given)}; expected an object {{…}}.")
    return given


def _no_constant(name: str) -> NoReturn:
    raise UserError(f"the config holds {name}; numbers must be finite")
