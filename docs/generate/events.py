"""Writes docs/events.md from `EventKind`: `python docs/generate/events.py` (`make docs`)."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal_controller.core.machine.event_kind import EventKind

PAGE = Path(__file__).resolve().parents[1] / "events.md"

OPENING = """\
# Events

<!-- Written by `make docs` from the code; do not edit. -->

Look up the kinds of events in a job's history (`shoal events JOB`, or `GET /v1/jobs/{job}/events`). Each event has a
revision (its number in the job), a time, a kind, a generation, the worker it concerns (if it is a single one), a
message for people, and data for programs. Programs should ignore unknown kinds, because later versions add some.
"""


def page() -> str:
    """The whole page."""
    rows = [f"| `{kind}` | {kind.meaning} |" for kind in EventKind]
    return "\n".join([OPENING, "| kind | meaning |", "|---|---|", *rows, ""])


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/events.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
