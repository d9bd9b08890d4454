"""The training side's log: standard error, in the form of `log_stream`, apart from what the user's script does with its
own. It lies here since every room of the worker writes to it.

Standard output belongs to the script; a library does not configure other people's structlog. Where a line cannot be
written (a full disk, a pipe that nobody reads) it is lost: no training process fails or waits for the sake of its log.
"""

from __future__ import annotations

import contextlib

import structlog

from shoal_protos.log_stream import LogStream, rendering


class _StandardError(LogStream):
    """Fails nobody where it cannot be written."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # full or broken; closed
            super().write(text)
        return len(text)

    def isatty(self) -> bool:
        try:
            return super().isatty()
        except (OSError, ValueError):
            return False


STANDARD_ERROR = _StandardError()
EVERYTHING = 0
"""The lowest level."""


def say(sentence: str) -> None:
    """A line for people at the terminal, without time and level."""
    STANDARD_ERROR.write(f"shoal: {sentence}\n")
    STANDARD_ERROR.flush()


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose entries carry `name`."""
    log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(STANDARD_ERROR),  # type: ignore[arg-type]
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            _rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(EVERYTHING),  # not the script's own, with its level
    ).bind(logger=name)
    return log


def _rendered(
    logger: structlog.typing.WrappedLogger, method: str, entry: structlog.typing.EventDict
) -> structlog.typing.ProcessorReturnValue:
    """As a script's standard error is now: it may be replaced."""
    shown: structlog.typing.ProcessorReturnValue = entry
    for processor in rendering(STANDARD_ERROR.isatty()):
        shown = processor(logger, method, shown)  # type: ignore[arg-type]
    return shown
