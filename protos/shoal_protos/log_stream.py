"""Log entries: their form, and standard error as they go to it.

An entry is a line of JSON, the same in a worker and in the controller, or text in a terminal. Workers' logs have what
the script prints as well; commands tell the two apart by `is_entry`.

What is not taken is lost, and holds nothing up. A pipe whose reader has stopped (a pager, a collector of logs that
hangs) and a terminal that was stopped with Ctrl-S take nothing, and all that write to them wait without end: a
controller with all its heartbeats, a training thread with all that train with it. So each piece is written only where
there is room for it. Both sides' logs and the display use it, and what a controller writes to standard output.
"""

from __future__ import annotations

import json
import re
import select
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from shoal_protos.text import number

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

ENTRY = re.compile(r'\{.*"logger": "shoal["._]')

PATIENCE_MILLISECONDS = 500
"""How long a reader may be behind, once: after that no entry waits until there is room again."""
PIECE = 1024
"""Characters that surely fit where there is room at all: 4096 bytes, as a pipe has it."""


def in_short(_: object, __: str, entry: EventDict) -> EventDict:
    """Return an entry with its numbers rounded for people."""
    return {key: _short(value) for key, value in entry.items()}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [float(number(one)) if isinstance(one, float) else one for one in value]
    return float(number(value)) if isinstance(value, float) else value


def rendering(for_people: bool) -> Sequence[Processor]:
    """Return the last processors of an entry. `for_people`: it goes to a terminal.

    Plain tracebacks there too: rich ones take seconds to draw, in which no heartbeat is heard.
    """
    from structlog import dev, processors  # with rich and asyncio, which commands go without

    if for_people:
        return in_short, dev.ConsoleRenderer(exception_formatter=dev.plain_traceback)
    return processors.format_exc_info, processors.JSONRenderer()


def is_entry(line: str) -> bool:
    """Whether a line of a worker's log is one of Shoal's own."""
    return bool(ENTRY.match(line))


# ---- where they go


def lost_entry(count: int) -> str:
    """What a log says of the entries that are missing there."""
    entry = {"logger": "shoal.log_stream", "entries": count, "event": "entries were lost: nobody read them"}
    return json.dumps({**entry, "level": "warning"})


def standard_error() -> TextIO | None:
    return sys.stderr


def standard_output() -> TextIO | None:
    return sys.stdout


class LogStream:
    """Writes to what is standard error at the time, also when that is replaced. Raises what that raises."""

    encoding = "utf-8"

    def __init__(
        self, lost: Callable[[int], str] = lost_entry, stream: Callable[[], TextIO | None] = standard_error
    ) -> None:
        """`lost`: the line that tells how many were lost. `stream`: where to, in place of standard error."""
        self._lost, self._stream = lost, stream
        self._missing = 0
        self._torn = ""
        """What ends an entry of which only the beginning was written."""

    def write(self, text: str) -> int:
        """A whole entry, which is lost where there is no room for it."""
        stream = self._stream()
        if stream is None:
            return len(text)
        if self._missing and _has_room(stream, 0):
            missing, self._missing = self._missing, 0
            _put(stream, f"{self._torn}{self._lost(missing)}\n")
        for begin in range(0, len(text), PIECE):
            if not _has_room(stream, 0 if self._missing else PATIENCE_MILLISECONDS):
                self._torn = "\n" if begin else self._torn * bool(self._missing)
                self._missing += 1
                break
            _put(stream, text[begin : begin + PIECE])
        return len(text)

    def flush(self) -> None:
        """Nothing is left: each piece has been flushed."""

    def isatty(self) -> bool:
        stream = self._stream()
        return stream is not None and stream.isatty()

    def fileno(self) -> int:
        stream = self._stream()
        if stream is None:
            raise OSError("it was closed")
        return stream.fileno()


def _put(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _has_room(stream: TextIO, milliseconds: int) -> bool:
    """Whether a piece can be written at once. What is no file of the system, or broken, says so when it is written."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(milliseconds))
