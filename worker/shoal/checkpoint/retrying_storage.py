"""A storage whose operations are tried again, each by itself, where the place fails for a moment.

A save is many operations on a place, and a place of which one in five fails would let none succeed. Made by
`open_storage` around every storage whose driver does not try again by itself. What will not pass (a missing right, no
room, a file in the way) is raised at once; a place that stays away is the affair of whoever saves or looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeVar

from shoal_protos.training_log import get_logger

from shoal.core.checkpoint_errors import TransientStorageFailure

if TYPE_CHECKING:
    from shoal.checkpoint.storage import Storage, Target

TRIES = 24
PATIENCE_SECONDS = 10.0
"""Since the first failure: a driver may take a minute for each, and the next one that fails is the last."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5
"""Before the second try; twice as long before each further one, and by chance up to half as long again: workers that
failed together do not all come back at once. Ten seconds or so in all: one call may be many requests (a listing asks
for each entry), and what stays away longer is tried again with the whole save."""

T = TypeVar("T")

log = get_logger("shoal.checkpoint")


@dataclass(frozen=True, slots=True)
class Chunks:
    """The content of a file that can be gone through again: `of` makes it anew for each try."""

    of: Callable[[], Iterator[memoryview]]

    def __iter__(self) -> Iterator[memoryview]:
        return self.of()


class RetryingStorage:
    """A `Storage` around another one."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.url = storage, storage.url
        self._chance = Random()  # of its own: a script's random numbers are not touched
        self._pause = threading.Event()

    def prepare(self) -> None:
        self._try(self.storage.prepare)

    def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        if iter(chunks) is chunks:
            return self.storage.write(name, chunks)
        return self._try(lambda: self.storage.write(name, chunks))

    def publish(self, name: str, content: bytes) -> None:
        self._try(lambda: self.storage.publish(name, content))

    def read(self, name: str, most: int) -> bytes:
        return self._try(lambda: self.storage.read(name, most))

    def read_ranges(self, name: str, targets: Sequence[Target]) -> None:
        self._try(lambda: self.storage.read_ranges(name, targets))

    def list(self, folder: str = "") -> dict[str, int | None]:
        return self._try(lambda: self.storage.list(folder))

    def remove(self, name: str) -> None:
        self._try(lambda: self.storage.remove(name))

    def remove_folder(self, folder: str) -> None:
        self._try(lambda: self.storage.remove_folder(folder))

    def _try(self, act: Callable[[], T]) -> T:
        seconds, end = FIRST_PAUSE_SECONDS, 0.0
        for number in range(1, TRIES):
            try:
                return act()
            except TransientStorageFailure as error:
                if number == 1:
                    end = time.monotonic() + PATIENCE_SECONDS
                    log.warning("storage_tried_again", tries=TRIES, reason=str(error))
                elif time.monotonic() >= end:
                    raise
            self._pause.wait(seconds * self._chance.uniform(1.0, 1.5))
            seconds = min(2 * seconds, LONGEST_PAUSE_SECONDS)
        return act()
