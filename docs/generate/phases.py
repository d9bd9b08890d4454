"""Draws docs/phases.md from the job machine's table: `python docs/generate/phases.py` (`make docs`).

Which phases a phase can lead to is read from the source: the functions that the table names for it, and all that they
call within `core/machine/phases`, are searched for `phase=Phase.X` and for the phases they are told to finish in. So an
arrow means "some history leads there", and its label is the function that does it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import FunctionType

from shoal_controller.core.machine import machine
from shoal_controller.core.machine.spec import Phase

PAGE = Path(__file__).resolve().parents[1] / "phases.md"
ROOM = "shoal_controller.core.machine.phases"

OPENING = """\
# The phases of a job

<!-- Written by `make docs` from the job machine's table; do not edit. -->

An event is recorded by the function that the table has for it; then the phase's own function draws the conclusions from
all that is known. An arrow's label is the function that takes it, in `controller/shoal_controller/core/machine/phases`.
`paused`, and `waiting` with a world that is too small to step, are shown for a `running` world that commits no steps.
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
            *table("Jobs that are over", machine.OVER),
            "",
        ]
    )


def diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> waiting"]
    living = [phase for phase in Phase if not phase.over and phase in machine.SETTLE]
    anywhere = reached(machine.ALIVE.values())
    for phase in living:
        for target, takers in reached([machine.SETTLE[phase]]).items():
            if target is not phase and target not in anywhere:
                lines.append(f"    {phase} --> {target}: {', '.join(sorted(takers))}")
    lines.append("    state living {")
    lines += [f"        {phase}" for phase in living]
    lines.append("    }")
    for target, takers in anywhere.items():
        wherever = takers | {taker for phase in living for taker in reached([machine.SETTLE[phase]]).get(target, set())}
        lines.append(f"    living --> {target}: {', '.join(sorted(wherever))}")
    return [*lines, "```"]


def table(title: str, handlers: dict[type, machine.Handler]) -> list[str]:
    rows = [f"| `{event.__name__}` | {_documented(handler)} |" for event, handler in handlers.items()]
    return [f"## {title}", "", "| event | what is done |", "|---|---|", *rows]


def _documented(function: Function) -> str:
    """A function's name and the first sentence of what it says of itself."""
    text = " ".join((inspect.getdoc(function) or "").split())
    sentence = text.partition(". ")[0].rstrip(".")
    return f"`{_name(function)}`{': ' + sentence if sentence else ''}"


def reached(functions: Iterable[Function]) -> dict[Phase, set[str]]:
    """The phases that these functions can enter, in the order of `Phase`, and which functions do."""
    found: dict[Phase, set[str]] = {}
    seen: set[Function] = set()
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if function not in seen:
            seen.add(function)
            phases, called = _read(function)
            waiting += called
            for phase in phases:
                found.setdefault(phase, set()).add(_name(function))
    return {phase: found[phase] for phase in Phase if phase in found}


@cache
def _read(function: Function) -> tuple[set[Phase], set[FunctionType]]:
    """The phases that a function enters itself, and the functions of the room that it names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    phases: set[Phase] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "phase")]
            phases |= {phase for value in given for phase in _phases_in(value)}
    named = {_resolved(node, function) for node in ast.walk(tree)}
    return phases, {one for one in named if isinstance(one, FunctionType) and one.__module__.startswith(ROOM)}


def _phases_in(value: ast.expr) -> list[Phase]:
    """`Phase.X`, or either branch of a choice between two."""
    options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    names = [one.attr for one in options if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "Phase"]
    return [Phase[name] for name in names]


def _resolved(node: ast.AST, function: Function) -> object:
    """What a name or `module.name` in a function's source stands for."""
    names = getattr(function, "__globals__", {})
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
    return None


def _name(function: Function) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/phases.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
