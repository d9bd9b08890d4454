"""Strict JSON of people and strangers: the value, the size that is accepted, and the place of a fault.

Refuses what the standard library would accept or fail at. Training configs, job specs and the bodies of REST are read
by it. A `JsonPlace` writes its name only for a sentence, because a document may have a hundred thousand places, each
with a name as long as the whole document.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal_protos.errors import UserError
from shoal_protos.text import shown_name


def parsed_json(text: str | bytes, whole: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value in a text; sentences call it `whole`. `parse_constant`: as `json.loads` has it. Raises `UserError`, and
    `json.JSONDecodeError` where it is no JSON.
    """

    try:
        return json.loads(text, object_pairs_hook=each_key_once(whole), parse_constant=parse_constant)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        raise UserError(f"{whole} is not text in UTF-8") from None
    except ValueError:
        raise UserError(f"{whole} holds a number with thousands of digits") from None
    except RecursionError:
        raise UserError(f"{whole} is nested too deeply") from None


def each_key_once(whole: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An `object_pairs_hook` that refuses a key which comes twice in one section of `whole`."""

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(given_twice(key, whole))
            found[key] = value
        return found

    return section


def given_twice(key: str, whole: str) -> str:
    return f"`{shown_name(key)}` is given twice in one section of {whole}; keep one"


MOST_BODY_BYTES = 256 * 1024
"""The largest body that a controller accepts."""
LONGEST_KEY = 200
"""Characters of a key that a sentence repeats."""


class JsonPlace(NamedTuple):
    """An entry (`part`: its name, or its number in a list) of what stands at another place."""

    holder: JsonPlace | None
    part: str | int

    @property
    def key(self) -> str:
        """As `workers.min` or `command[2]`; empty of the document."""
        parts: list[str] = []
        place = self
        while place.holder is not None:
            parts.append(f"[{place.part}]" if isinstance(place.part, int) else f".{place.part[: LONGEST_KEY + 1]}")
            place = place.holder
        key = "".join(reversed(parts)).removeprefix(".")
        return key if len(key) <= LONGEST_KEY else f"{key[: LONGEST_KEY - 1]}…"


DOCUMENT = JsonPlace(None, "")
