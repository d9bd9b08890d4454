"""Where the controller's log goes and how it looks: standard error, in the form of `log_stream`.

Configured once, by `server.py`. Libraries (uvicorn, gRPC, asyncio) are heard from warnings on, in the same form.
"""

from __future__ import annotations

import logging
import sys

import structlog
from shoal_protos.log_stream import LogStream, rendering


class _StandardError(logging.StreamHandler[LogStream]):
    """Never waits for whoever reads it: heartbeats would wait with it."""


def configure(level: str) -> None:
    """Log entries of this level and above. Called again, it replaces what it did before."""
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper("iso", utc=True),
    ]
    structlog.configure(
        [*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = _StandardError(LogStream())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering(sys.stderr.isatty())],
            foreign_pre_chain=before,
        )
    )
    root = logging.getLogger()
    root.handlers = [other for other in root.handlers if not isinstance(other, _StandardError)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(level.upper())
