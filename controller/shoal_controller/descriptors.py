"""How many files and connections this process may have open: as many as its user may grant it.

Shells and service managers begin with 1,024, for programs that could not bear more. Who opens so many connections to a
controller would keep it from its store and its workers; the commands that serve raise the limit at their start.
"""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Up to the hard limit. Where that is refused (it has no end, say) it stays as it is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
