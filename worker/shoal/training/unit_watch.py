"""That no script writes past autograd (`.data`, numpy) to parameters that come and go.

Versions tell of every other write (parameter_guards.py). Of these one window is compared a step, another one each time:
as it is when its unit has come, and when that is freed. Called by gathered_units.py.
"""

from __future__ import annotations

from shoal.blocks.flat import Flats
from shoal.training.parameter_guards import Windows, checksum


class UnitWatch:
    """`is_broken`: something was written, and the step may not be made."""

    def __init__(self, flats: Flats) -> None:
        self._flats, self._windows = flats, Windows(flats)
        self._content: int | None = None
        self._is_done = True
        self.is_broken = False

    def turn(self) -> None:
        """Another step begins: the next window."""
        self._windows.turn()
        self._content, self._is_done = None, False

    def on_here(self, buckets: tuple[int, ...]) -> None:
        """The values of these have come."""
        if not self._is_done and self._content is None and self._windows.bucket in buckets:
            self._content = checksum(self._windows.of(self._flats))

    def on_free(self, buckets: tuple[int, ...], by_script: bool) -> None:
        """They go. `by_script`: nobody but the script can have written to them."""
        if self._content is None or self._windows.bucket not in buckets:
            return
        self.is_broken |= by_script and checksum(self._windows.of(self._flats)) != self._content
        self._content, self._is_done = None, True

    def forget(self) -> None:
        """What was written until now was allowed, and is gone."""
        self._content, self.is_broken = None, False
