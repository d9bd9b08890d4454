"""Where a worker looks for its controller: the addresses that it was given, those it was told of, the leader's first.

Pure: `thread.py` asks for the next one before every attempt, and says what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence


class ControllerAddresses:
    """`current` is to be tried; `on_failure` when it was of no use."""

    def __init__(self, given: Sequence[str]) -> None:
        self._given = tuple(given)
        self._all = self._given
        self._at = 0
        self._leader = ""

    @property
    def current(self) -> str:
        """The address to try."""
        return self._leader or self._all[self._at]

    def on_welcome(self, addresses: Sequence[str]) -> None:
        """A controller that welcomed this worker names all of its store. Those that were given stay."""
        here = self.current
        self._all = tuple(dict.fromkeys([*self._given, *addresses]))
        if not self._leader:
            self._at = self._all.index(here) if here in self._all else 0

    def on_failure(self, leader: str = "") -> bool:
        """The controller at `current` was of no use; it may have named the one that leads, which is next. Whether that
        one is to be tried at once: not where this one had been named itself, or two that name each other would be asked
        without a pause.
        """
        failed, was_named, self._leader = self.current, bool(self._leader), ""
        if leader and leader != failed:
            self._leader = leader
            return not was_named
        self._at = (self._at + 1) % len(self._all)
        return False
