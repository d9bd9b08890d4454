"""`python -m shoal.deepspeed … SCRIPT …`: DeepSpeed's command, handed over to `shoal run` on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal_protos.errors import UserError
from shoal_protos.messages import WRONG_USE
from shoal_protos.training_log import say

from shoal.deepspeed.surface import JOINING, REFUSED_FLAGS, UNREAD_FLAGS

SHORT = {"--hostfile": "-H", "--include": "-i", "--exclude": "-e", "--quiet": "-q"}


def run_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of `shoal`. Raises `UserError` naming a flag that has no meaning here, with what to do instead."""
    parser = _Parser(prog="python -m shoal.deepspeed", description=__doc__, allow_abbrev=False)
    parser.add_argument("--num_gpus", "--num_accelerators", metavar="N", help="number of workers")
    parser.add_argument("--enable_each_rank_log", metavar="DIR", help="folder of the workers' logs")
    parser.add_argument("--num_nodes", type=int, default=1, metavar="N", help="1")
    for flag, _, value in (text.partition(" ") for text in UNREAD_FLAGS):
        kind = "store" if value else "store_true"
        parser.add_argument(flag, *filter(None, [SHORT.get(flag)]), action=kind, help="changes nothing")
    for flag in REFUSED_FLAGS:
        parser.add_argument(flag, *filter(None, [SHORT.get(flag)]), action=_Refused, nargs="?", help=argparse.SUPPRESS)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--module", action="store_true", help="SCRIPT is the name of a module")
    how.add_argument("--no_python", action="store_true", help="SCRIPT is any program")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    if given.num_nodes > 1:
        raise UserError(f"--num_nodes is {given.num_nodes}, and this command starts workers of one host; {JOINING}.")
    flags = {"--workers": given.num_gpus, "--log-dir": given.enable_each_rank_log}
    named = [part for flag, value in flags.items() if value not in (None, "-1", "None") for part in (flag, value)]
    return ["run", *named, *(["-m"] if given.module else []), given.script, "--", *given.arguments]


class _Parser(argparse.ArgumentParser):
    """Says in a sentence what it does not take."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; docs/deepspeed.md has the flags of DeepSpeed's command that are known.")


class _Refused(argparse.Action):
    """A flag without meaning here."""

    def __call__(self, *given: Any) -> NoReturn:
        *_, flag = given
        raise UserError(f"{flag} has no meaning here: {REFUSED_FLAGS[self.option_strings[0]]}.")


def hand_over(arguments: Callable[[], Sequence[str]]) -> NoReturn:
    """This process is `shoal` with these arguments from here on, or ends with one sentence."""
    try:
        given = arguments()
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        command = shutil.which("shoal", path=places)
        if command is None:
            raise UserError("the command `shoal` is not installed: install shoal[controller,worker].")
    except UserError as error:
        say(str(error))
        raise SystemExit(WRONG_USE) from None
    os.execv(command, [command, *given])


if __name__ == "__main__":
    hand_over(lambda: run_command(sys.argv[1:]))
