"""A file of optimizer state whose transfers land late: whoever does not wait for them reads what is not there yet.

A read spoils its target first, and a write makes sure that nobody changes its source until it is through.
"""

from __future__ import annotations

import threading

from shoal.offload.state_file import StateFile

MOMENT_SECONDS = 0.002


class LateFile(StateFile):
    """`changed`: writes whose source was changed before they were through."""

    def __init__(self, folder: str) -> None:
        self._never = threading.Event()
        self.changed = 0
        super().__init__(folder)

    def read(self, at: int, target: memoryview) -> None:
        target[:] = b"\xff" * len(target)
        self._never.wait(MOMENT_SECONDS)
        super().read(at, target)

    def write(self, at: int, source: memoryview) -> None:
        before = bytes(source)
        self._never.wait(MOMENT_SECONDS)
        self.changed += before != bytes(source)
        super().write(at, source)
