"""Limits of pieces (shoal/exchange/pieces.py) by which the small model of a test has several, in place of the usual."""

from __future__ import annotations

from collections.abc import Callable

from shoal.exchange.pieces import PieceLimits


def limits_of(cut: int) -> Callable[..., PieceLimits]:
    """In any world. `cut`: bytes; buckets are joined up to a quarter of it, as on several hosts."""
    return lambda members, on_one_host, by_rounds: PieceLimits(cut // 4, cut)
