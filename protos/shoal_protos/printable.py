"""Text from elsewhere as a terminal may have it: names, reasons, exceptions, logs, files of checkpoints.

A terminal obeys what is written to it: it clears itself, takes a new title, hides text or turns it around. All that
commands print goes through this one function. Standard library only.
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but the tab and the line feed
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064"  # marks that hide or turn text
    "\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff"  # halves of characters
    "\U000e0001\U000e0020-\U000e007f]"  # tags, which are never seen
)


def printable(text: str) -> str:
    """Return the text with what a terminal would obey, or not show, escaped as JSON escapes it."""
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
