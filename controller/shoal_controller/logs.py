"""Where the controller's log goes and how it looks: standard error, one line per entry, JSON unless a person reads it.

Configured once, by `server.py`. Libraries (uvicorn, gRPC, asyncio) are heard from warnings on, in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str, stream: TextIO | None = None) -> None:
    """Log entries of this level and above."""
    stream = stream or sys.stderr
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper("iso", utc=True),
    ]
    if stream.isatty():
        after: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        after = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        [*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[strip, *after], foreign_pre_chain=before))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("shoal").setLevel(level.upper())
