"""A command in a terminal of some size, and what its screen shows: rows as people see them, after all escapes."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import pyte


class Terminal:
    """The command's standard streams are one terminal. `rows` has what has scrolled away too, oldest first."""

    def __init__(self, command: Sequence[str], size: tuple[int, int], env: Mapping[str, str]) -> None:
        """`size`: columns and rows."""
        columns, lines = size
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {name: value for name, value in {**os.environ, **env}.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)

    @property
    def rows(self) -> list[str]:
        gone = ["".join(line[at].data for at in range(self._screen.columns)) for line in self._screen.history.top]
        return [row.rstrip() for row in (*gone, *self._screen.display)]

    def read_until(self, part: str) -> None:
        """Returns when a row has it."""
        while not any(part in row for row in self.rows):
            assert self._read(), f"it ended, and never showed {part!r}: {self.rows}"

    def read_to_end(self) -> int:
        """The command's exit status, once it has closed the terminal."""
        while self._read():
            pass
        return self.process.wait(100)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        with suppress(OSError):  # Linux says so of a terminal that all others have closed
            if part := os.read(self._ours, 1 << 16):
                self._stream.feed(part)
                return True
        return False


@contextmanager
def in_terminal(
    command: Sequence[str], size: tuple[int, int] = (80, 24), env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """A command that is killed afterwards, if it has not ended. TERM is xterm unless `env` says otherwise."""
    terminal = Terminal(command, size, {"TERM": "xterm", **(env or {})})
    try:
        yield terminal
    finally:
        terminal.close()
