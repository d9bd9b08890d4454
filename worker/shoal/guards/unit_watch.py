"""That no script writes past autograd (`.data`, numpy) to parameters that come and go.

Versions tell of every other write (parameter_guards.py). Of parameters that are copied here one window is compared a
step, another one each time: as it is when its unit has come, and when that is freed. Of those that are seen in their
owners' memory the kernel says which pages were written to; what is written there stays, so it is asked for all of them
in each step. Called by gathered_units.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks import unit_flats
from shoal.blocks.flat import Flats
from shoal.blocks.shared_weights import MappedFlats
from shoal.core.layout import Layout
from shoal.guards.comparisons import Checksum, Comparisons
from shoal.guards.parameter_guards import CHANGED, Windows


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


class ShownWatch:
    """Of buckets that show their owners' memory."""

    def __init__(self, layout: Layout, mapped: MappedFlats) -> None:
        self._layout, self._mapped = layout, mapped

    def refuse(self) -> None:
        """Raises `UserError` naming a parameter that was changed. What has its values again was not."""
        for bucket in self._layout.buckets:
            pages = self._written(bucket.index)
            element = self._mapped.changed(bucket.index, pages) if pages else None
            if element is not None:
                last = next(slot for slot in reversed(bucket.slots) if slot.start <= element)
                raise UserError(f'parameter "{last.parameter.name}" {CHANGED}')
            if pages:
                self._mapped.show(bucket.index)

    def take_back(self, buckets: Iterable[int] | None = None) -> None:
        """What was written to these was allowed, and goes. None: to any."""
        for bucket in range(len(self._layout.buckets)) if buckets is None else buckets:
            if self._written(bucket):
                self._mapped.show(bucket)

    def _written(self, bucket: int) -> list[int]:
        """Pages. Tests that poison memory write to all."""
        if unit_flats.POISON or not self._mapped.is_shown(bucket):
            return []
        return self._mapped.written(bucket)
