"""`deepspeed.utils`: the iterator that begins its loader anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from shoal.deepspeed.own_loader import Feed
from shoal.deepspeed.surface import module_lacks

__all__ = ["RepeatingLoader"]


class RepeatingLoader(Feed):
    """An iterator over a loader that has no end."""

    repeats = True

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader, lambda: iter(loader))


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"utils.{name}")
