"""What somebody else gave, as a sentence repeats it: cut where it is long, in characters that can be written.

Values of documents, and names of what is asked for. Standard library only.
"""

from __future__ import annotations

import json

LONGEST_SHOWN = 80
"""Characters of a wrong value, or of a name, that are repeated."""


def shown(value: object) -> str:
    """A value as JSON, cut where it is long. Half of a surrogate pair, which no file can hold, is escaped."""
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
            text += piece.encode(errors="backslashreplace").decode()
            if len(text) > LONGEST_SHOWN:
                return text[: LONGEST_SHOWN - 1] + "…"
    except ValueError:  # it contains itself
        return shown(repr(value))
    return text


def shown_name(name: str) -> str:
    """The same of a name, without its quotes."""
    return shown(name).removeprefix('"').removesuffix('"')


def of_shoal(release: str) -> str:
    """How a sentence names a release; one from before releases were named has none."""
    return f"shoal {release}" if release else "an older shoal"
