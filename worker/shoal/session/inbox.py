"""The inbox: what the session's thread has heard and the training thread has not yet seen. Bounded."""

from __future__ import annotations

import threading
from collections import deque

from shoal.session.link import Asked, Ended, Item, Stopped

MOST_ASKED = 64
"""More requests than this at once are forgotten, oldest first."""


class Inbox:
    """One of each kind at most, but for requests."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = threading.Condition()
        self.waiting = False
        """Whether there is an item. Read without the lock."""

    def put(self, item: Item) -> None:
        """A stop or an end makes all that was heard of a world before it void."""
        with self._arrived:
            if isinstance(item, Stopped | Ended):
                self._items = deque(old for old in self._items if isinstance(old, Asked | Ended))
            elif isinstance(item, Asked):
                asked = [old for old in self._items if isinstance(old, Asked)]
                if len(asked) >= MOST_ASKED:
                    self._items.remove(asked[0])
            self._items.append(item)
            self.waiting = True
            self._arrived.notify_all()

    def take(self, seconds: float | None) -> Item | None:
        """The oldest item; None when none came in time."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._items), seconds)
            item = self._items.popleft() if self._items else None
            self.waiting = bool(self._items)
            return item

    def pause(self, seconds: float) -> None:
        """Waits until there is an item, at most so long."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._items), seconds)
