"""Prints docs/phases.md from the job machine's tables: `python docs/generate/phases.py` (`make docs`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal_controller.core.machine import machine
from shoal_controller.core.machine.phases import worker_messages
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import ALLOWED, LIVING

PAGE = Path(__file__).resolve().parents[1] / "phases.md"

OPENING = """\
# The phases of a job

<!-- Written by `make docs` from the job machine's tables; do not edit. -->

Read here how the job machine handles each event. The function in the table records the event; then the phase's own
function derives the consequences from the whole state. The arrows are the entries of
`controller/shoal_controller/core/machine/turn.py`; the machine allows no others. `paused`, and `waiting` with a
world that is too small to step, are shown for a `running` world that commits no steps.
"""

Function = Callable[..., object]


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            OPENING,
            *diagram(),
            "",
            *table("Living jobs", machine.ALIVE),
            "",
            *table("Messages of a living job's workers", worker_messages.MESSAGES),
            "",
            *table("Jobs that are over", machine.OVER),
            "",
        ]
    )


def diagram() -> list[str]:
    """One arrow per allowed transition; what every living phase allows alike is drawn once."""
    causes = {(before, after): cause for (before, after), cause in ALLOWED.items()}
    anywhere = {after: causes[LIVING[0], after] for after in Phase if all((phase, after) in causes for phase in LIVING)}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.WAITING}"]
    lines += [f"    {a} --> {b}: {cause}" for (a, b), cause in causes.items() if b not in anywhere]
    lines += ["    state living {", *(f"        {phase}" for phase in LIVING), "    }"]
    lines += [f"    living --> {after}: {cause}" for after, cause in anywhere.items()]
    return [*lines, "```"]


def table(title: str, handlers: Mapping[type, Function]) -> list[str]:
    rows = [f"| `{event.__name__}` | {_documented(handler)} |" for event, handler in handlers.items()]
    return [f"## {title}", "", "| event | what is done |", "|---|---|", *rows]


def _documented(function: Function) -> str:
    """A function's name and the first sentence of what it says of itself."""
    text = " ".join((inspect.getdoc(function) or "").split())
    sentence = text.partition(". ")[0].rstrip(".")
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
    return f"`{name}`{': ' + sentence if sentence else ''}"


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/phases.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
