"""Text for people, for both sides: values and names of others, counts, numbers, durations, and terminal-safe text.

`shown` and `shown_name` cut what is long and escape what cannot be written. `printable` escapes what a terminal would
obey (it clears itself, takes a new title, hides text or turns it around); all that commands print of names, reasons,
exceptions, logs and files goes through it. `passes_milestone` says which counts are reported: the 1st, the 10th, the
100th …, so that what happens often fills no history. Pure; standard library only.
"""

from __future__ import annotations

import json
import re

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


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def at_step(step: int) -> str:
    """Where something ended that counts the steps that it has committed."""
    return f"at step {step}" if step > 0 else "before its first step"


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


LEAST_PLAIN, MOST_PLAIN = 1e-4, 1e9
"""Range of the numbers that are written without an exponent."""
EXACT = 10
"""From 10 days, hours or minutes on, the smaller unit is left out."""


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with `digits` significant digits: 28.93, 1760, 0.00012."""
    if value is None:
        return "–"
    rounded = float(f"{value:.{digits}g}")
    if not LEAST_PLAIN <= abs(rounded) < MOST_PLAIN:  # also for zero and nan
        return f"{rounded:.{digits}g}"
    return f"{rounded:.{digits + 4}f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """Return rounded seconds: "42 s", "3 min 20 s", "19 min", "2 h 5 min", "3 d 4 h"."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = f" {whole % size // part} {smaller}" if whole < EXACT * size else ""
            return f"{whole // size} {unit}{rest}"
    return f"{whole} s"


def passes_milestone(before: int, now: int) -> bool:
    """Whether a count that grows from `before` to `now` reaches 1, 10, 100, …"""
    return now > before and (before == 0 or len(str(now)) > len(str(before)))
