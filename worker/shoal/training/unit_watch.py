"""That no script writes past autograd (`.data`, numpy) to parameters that come and go.

Versions tell of every other write (parameter_guards.py). Of these one window is compared a step, another one each time:
as it is when its unit has come, and when that is freed. Called by gathered_units.py.
"""

from __future__ import annotations

from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.training.comparisons import Checksum, Comparisons
from shoal.training.parameter_guards import CHANGED, Windows


class UnitWatch:
    """Of these flats; `comparisons` makes the checksums."""

    def __init__(self, flats: Flats, comparisons: Comparisons) -> None:
        self._flats, self._windows, self._comparisons = flats, Windows(flats), comparisons
        self._content: Checksum | None = None
        self._is_done = True
        self._are_equal: list[bool | Tensor] = []
        """What was found since `refuse` was last called; `()` bool of a device that may still look for it."""

    def turn(self) -> None:
        """Another step begins: the next window."""
        self._windows.turn()
        self._content, self._is_done = None, False

    def on_here(self, buckets: tuple[int, ...]) -> None:
        """The values of these have come."""
        if not self._is_done and self._content is None and self._windows.bucket in buckets:
            self._content = self._checksum()

    def on_free(self, buckets: tuple[int, ...], by_script: bool) -> None:
        """They go. `by_script`: nobody but the script can have written to them."""
        if self._content is None or self._windows.bucket not in buckets:
            return
        if by_script:
            self._are_equal.append(self._checksum() == self._content)
        self._content, self._is_done = None, True

    def refuse(self) -> None:
        """Raises `UserError` where something was written. Waits for a device, where a window was compared."""
        if not all(map(bool, self._are_equal)):
            raise UserError(f"a parameter {CHANGED}")
        self._are_equal.clear()

    def forget(self) -> None:
        """What was written until now was allowed, and is gone."""
        self._content = None
        self._are_equal.clear()

    def _checksum(self) -> Checksum:
        return self._comparisons.checksum(self._windows.of(self._flats))
