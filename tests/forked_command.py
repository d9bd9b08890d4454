"""`shoal` as a process of its own that is forked from the warm one (integration/warm.py), in a hundredth of a second.

A fresh Python imports for one to two seconds before it does anything, and most tests of commands start several. The
process is as real in all else: its arguments, environment, folder, both outputs, signals and exit status. What only a
fresh Python shows, and that the console script is installed, is tested with `SHOAL`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from integration.cluster import ended, fork, send_signal, until

SHOAL = str(Path(sys.executable).with_name("shoal"))
MODULES = ("shoal_controller.cli.main", "shoal_controller.cli.client", "shoal_controller.server")
"""What the warm process of those tests has imported that need no worker."""


class Forked:
    """A running command, whose outputs are files."""

    def __init__(
        self, arguments: Sequence[str], output: Path, errors: Path, folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """`env`: all of its environment; None: this process's."""
        self.output, self.errors = output, errors
        output.touch()
        errors.touch()
        given = {"arguments": [SHOAL, *arguments], "folder": str(folder), "errors": str(errors)}
        env = dict(os.environ if env is None else env)
        self.pid = fork(f"{become.__module__}:{become.__name__}", {**given, "env": env}, {}, output)

    def wait_first_line(self) -> str:
        """Of its standard output; what there is where it has ended without one."""
        until("its first line", lambda: "\n" in self.output.read_text() or self.returncode is not None)
        return self.output.read_text().partition("\n")[0]

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return ended().get(self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def wait(self, seconds: float = 100.0) -> int:
        until("the command to end", lambda: self.returncode is not None, seconds)
        return ended()[self.pid]

    def kill(self) -> None:
        """Returns when it is gone."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()


def shoal(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path | None = None, seconds: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """A command from its begin to its end, as `subprocess.run` returns it."""
    with tempfile.TemporaryDirectory() as place:
        command = Forked(arguments, Path(place, "output"), Path(place, "errors"), folder or Path.cwd(), env)
        try:
            status = command.wait(seconds)
        except BaseException:
            command.kill()
            raise
        return subprocess.CompletedProcess(
            [SHOAL, *arguments], status, command.output.read_text(), command.errors.read_text()
        )


def become(arguments: list[str], env: dict[str, str], folder: str, errors: str) -> NoReturn:
    """In the forked process: what the console script does."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("GRPC_")}  # read at its import
    os.environ.clear()
    os.environ.update({**env, **kept})
    os.chdir(folder)
    log = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = arguments
    from shoal_controller.cli.console import main

    main()
    sys.exit(0)
