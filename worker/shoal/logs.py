"""The training side's log: standard error, one line an entry, whatever the user's script does with its own logging.

Standard output belongs to the script; a library does not configure other people's structlog.
"""

from __future__ import annotations

import sys

import structlog


class _StandardError:
    """Writes to what is standard error at the time, also when that is replaced."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose entries carry `name`."""
    log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(_StandardError()),  # type: ignore[arg-type]
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "logger", "event"]),
        ],
    ).bind(logger=name)
    return log
