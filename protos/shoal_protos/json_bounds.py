"""What the document of a stranger may cost: how large it may be, and where a value stands in it. The key of a value is
written only for a sentence: there may be a hundred thousand, with a name as long as the document above them.
"""

from __future__ import annotations

from typing import NamedTuple

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
