"""Matrices: many cases of one kind, each with real processes or of many seconds.

`make test` and `make check` (tests/tiers.py) run the short ones that are named here, `make faults` all others: they
bear the marker `matrix`, and `pytest -m ''` runs both. A kind of its own is no further case, and never bears it. Of the
examples that hypothesis draws those two take a third; `make faults` sets SHOAL_EXAMPLES and takes all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

further = pytest.mark.matrix
"""A test of which `make test` or `make check` has another one of the same kind."""


EVERY_EXAMPLE = bool(os.environ.get("SHOAL_EXAMPLES"))


def examples(count: int) -> int:
    """How many of so many examples are tried."""
    return count if EVERY_EXAMPLE else count // 3


def shortened(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases, of which `make test` or `make check` runs those that are kept."""
    cases = list(cases)
    assert kept and not [one for one in kept if one not in cases], f"{kept} must be among {cases}"
    return [one if one in kept else _further(one) for one in cases]


def _further(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=further)
