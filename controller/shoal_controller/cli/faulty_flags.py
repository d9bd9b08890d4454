"""What is wrong with a command's arguments, all of it at once: typer tells the first thing alone.

`AllFaults` is the class of every command (main.py). Nothing heavy may be imported here before something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from shoal_controller.cli.endings import WRONG_USE, say

THE_COMMAND = "the command"


class AllFaults(TyperCommand):
    """A command that names every argument whose value cannot be used, and every one that is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's."""
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter:
            faults = list(self._faults(ctx, given))
            if len(faults) < 2:
                raise
            from shoal_protos.validation import all_of

            raise typer.Exit(say(all_of(faults, THE_COMMAND), WRONG_USE)) from None

    def _faults(self, ctx: Any, given: list[str]) -> Iterator[str]:
        values, rest, _ = self.make_parser(ctx).parse_args(args=given)
        for parameter in self.get_params(ctx):
            if parameter.is_eager:
                continue
            try:
                _, rest = parameter.handle_parse_result(ctx, values, rest)
            except typer.BadParameter as fault:
                yield fault.format_message().removesuffix(".")
