"""Writes docs/command.md from the command itself: `python docs/generate/command.py` (`make docs`).

What stands before the commands is in `command_opening.txt`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from shoal_controller.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "command.md"

OPENING = Path(__file__).with_name("command_opening.txt")


def page() -> str:
    """The whole page."""
    return OPENING.read_text() + "".join(sections())


def sections() -> Iterator[str]:
    """Every command with its help."""
    for name, command in commands(typer.main.get_command(app)):
        yield f"\n### shoal {name}\n\n{text_of(command)}\n\n```\nshoal {name}{usage(command)}\n```\n"
        rows = [row for parameter in command.params if (row := row_of(parameter))]
        if rows:
            yield "\n| | meaning |\n|---|---|\n" + "".join(rows)


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """All commands by the words that call them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def text_of(command: Any) -> str:
    """Its help, paragraphs kept."""
    return "\n\n".join(" ".join(part.split()) for part in str(command.help).split("\n\n"))


def usage(command: Any) -> str:
    """Its arguments, as its help writes them."""
    options = any(one.param_type_name == "option" for one in command.params)
    shown = [argument(one) for one in command.params if one.param_type_name == "argument"]
    return "".join(f" {one}" for one in [*(["[OPTIONS]"] if options else []), *shown])


def argument(parameter: Any) -> str:
    """As usages are written: `[WORKER]`, `COMMAND...`."""
    name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    return name if parameter.nargs == 1 else f"{name}..."


def row_of(parameter: Any) -> str:
    """A flag or an argument."""
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    if parameter.param_type_name == "argument":
        return f"| `{parameter.metavar}` | {text} |\n"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    variable = f" (`{parameter.envvar}`)" if parameter.envvar else ""
    default = parameter.default
    is_shown = parameter.show_default and default not in (None, False, "", ())
    value = f" Default: `{getattr(default, 'value', default)}`." if is_shown else ""
    return f"| {names}{value_of(parameter)}{variable} | {text}{value} |\n"


def value_of(parameter: Any) -> str:
    """What follows a flag; empty where nothing does."""
    if parameter.is_flag:
        return ""
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f" `{'/'.join(one.value for one in kind)}`"
    return f" `{parameter.metavar or kind.__name__.upper()}`"


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/command.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
