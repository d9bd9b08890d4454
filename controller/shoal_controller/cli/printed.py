"""What workers print, read from their logs as these grow: for `shoal run`, above its progress, and for `shoal logs`.

Only files of this machine. A log that was cut or replaced by a new one is read from its beginning.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal_protos.log_stream import is_entry
from shoal_protos.rest import Json

MOST_BYTES = 1 << 16
"""Most bytes shown at one look; of more, the end is shown."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""How a script sets colours: its lines are read without them."""


class LineSplitter:
    """The whole lines of bytes that come in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, new: bytes) -> list[str]:
        """Lines that are whole now."""
        *whole, self._rest = (self._rest + new).split(b"\n")
        return [_readable(line) for line in whole]

    def take_rest(self) -> list[str]:
        """A last line without an end."""
        rest, self._rest = self._rest, b""
        return [_readable(rest)] if rest else []


class ShownLines:
    """The lines of a log that is read again from its beginning where it broke off. Those that it still begins with are
    not shown twice; a log that was rotated begins with others.
    """

    def __init__(self) -> None:
        self._shown = array("q")
        """Hashes of the lines that were shown: a log may be long."""
        self._at = 0
        self._lines = LineSplitter()

    def begin_again(self) -> None:
        """What comes next is the beginning of the log."""
        self._at, self._lines = 0, LineSplitter()

    def take(self, part: str) -> list[str]:
        """Return the lines that are whole now and were not shown."""
        new = []
        for line in self._lines.take(part.encode()):
            if self._at < len(self._shown) and self._shown[self._at] != hash(line):
                del self._shown[self._at :]
            if self._at == len(self._shown):
                self._shown.append(hash(line))
                new.append(line)
            self._at += 1
        return new

    def take_rest(self) -> list[str]:
        """Return a last line without an end."""
        return self._lines.take_rest()


class Tail:
    """The whole lines of a growing file, from a place on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._lines = LineSplitter()

    def skip(self) -> list[str]:
        """Where more has come than is shown at one look, go to its end. A line that says so."""
        skipped = self.path.stat().st_size - self._offset - MOST_BYTES
        if skipped <= 0:
            return []
        self._offset, self._lines = self._offset + skipped, LineSplitter()
        return [f"… {skipped} bytes more are in {self.path}"]

    def take_lines(self) -> Iterator[str]:
        """Lines that came since the last look. Raises `OSError`."""
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset, self._lines = 0, LineSplitter()
            file.seek(self._offset)
            while new := file.read(MOST_BYTES):
                self._offset += len(new)
                yield from self._lines.take(new)

    def take_rest(self) -> list[str]:
        """A last line without an end."""
        return self._lines.take_rest()


class Printed:
    """The lines that the script of rank 0 prints, whoever that is."""

    def __init__(self, before: Mapping[str, int]) -> None:
        """`before`: how long the logs were when the command began."""
        self._before = before
        self._worker = ""
        self._tail: Tail | None = None

    def take_lines(self, workers: Sequence[Json]) -> list[str]:
        """What is new. A log that cannot be read shows nothing."""
        first = next((one for one in workers if one["rank"] == 0 and one["log"]), None)
        try:
            if first is not None and first["worker"] != self._worker:
                path = Path(first["log"])
                offset = path.stat().st_size if self._worker else self._before.get(first["log"], 0)
                self._worker, self._tail = first["worker"], Tail(path, offset)
            lines = [*self._tail.skip(), *self._tail.take_lines()] if self._tail is not None else []
        except OSError:
            return []
        return [line for line in lines if not is_entry(line)]

    def take_last_lines(self, workers: Sequence[Json]) -> list[str]:
        """What is left once the job is over. One that was over before anybody was seen as rank 0 shows a worker's that
        has come the furthest, for the scripts end alike.
        """
        trained = [one for one in workers if one["log"] and one["step"]]
        if trained and not self._worker:
            workers = [{**max(trained, key=lambda one: int(one["step"])), "rank": 0}]
        lines = self.take_lines(workers)
        rest = self._tail.take_rest() if self._tail is not None else []
        return [*lines, *(line for line in rest if not is_entry(line))]


def lengths(folder: Path) -> dict[str, int]:
    """Sizes of all logs in a folder, by path."""
    return {str(path): path.stat().st_size for path in folder.glob("*.log")}


def _readable(line: bytes) -> str:
    """A progress bar draws itself again and again: only its last state is a line."""
    return COLOURS.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])
