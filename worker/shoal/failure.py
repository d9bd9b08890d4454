"""A failure of this worker as the controller is told it: one sentence, then the end of the traceback.

Used where a script ends in an error (ending.py) and where an update does (engine.py).
"""

from __future__ import annotations

import traceback

from shoal_protos.errors import ShoalError

LONGEST = 4_000
"""Characters of a traceback that are told."""


def told(error: BaseException) -> str:
    """One of our own errors is told in its one sentence."""
    if isinstance(error, ShoalError):
        return str(error)
    lines = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n" + lines[-LONGEST:].strip()
