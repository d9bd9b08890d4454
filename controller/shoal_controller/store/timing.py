"""How long each request to a store took, and whether it failed, for whoever counts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Timed = Callable[[str, float, bool], None]
"""Called with the kind of each request, the seconds that it took, and whether it failed."""


@contextmanager
def timing(kind: str, timed: Timed | None) -> Iterator[None]:
    """Times what is done within it, where anybody wants to know and it has a kind. Being cancelled is no failure."""
    began, failed = time.perf_counter(), False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if timed is not None and kind:
            timed(kind, time.perf_counter() - began, failed)
