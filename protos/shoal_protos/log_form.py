"""The form of log entries, the same in a worker and in the controller: a line of JSON each, or text in a terminal.

Workers' logs have what the script prints as well; commands tell the two apart by `is_entry`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import structlog

from shoal_protos.text import number

ENTRY = re.compile(r'\{.*"logger": "shoal["._]')

Processors = Sequence[structlog.typing.Processor]


def in_short(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Return an entry with its numbers rounded for people."""
    return {key: _short(value) for key, value in entry.items()}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [float(number(one)) if isinstance(one, float) else one for one in value]
    return float(number(value)) if isinstance(value, float) else value


LINES: Processors = (structlog.processors.format_exc_info, structlog.processors.JSONRenderer())
TEXT: Processors = (
    in_short,
    structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
)
"""Plain tracebacks here too: rich ones take seconds to draw, in which no heartbeat is heard."""


def rendering(for_people: bool) -> Processors:
    """The last processors of an entry. `for_people`: it goes to a terminal."""
    return TEXT if for_people else LINES


def is_entry(line: str) -> bool:
    """Whether a line of a worker's log is one of Shoal's own."""
    return bool(ENTRY.match(line))
