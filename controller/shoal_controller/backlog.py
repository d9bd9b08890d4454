"""What was said to a job while its store could not be written: kept in order, and bounded by who there is to say it.

No message is an event, so of everything that one stream or one worker says of a kind only the latest counts; a stream
that came and went meanwhile has said nothing, and one that went meanwhile only how its script has ended, which nobody
says again. To the job it is as if the controller had been slow.
"""

from __future__ import annotations

from shoal_protos.messages import Result

from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Event,
    Exited,
    MessageReceived,
    NeverStarted,
    Probed,
    Spawned,
)

Key = tuple[object, ...]


class Backlog:
    """Events of one job that wait for its runner."""

    def __init__(self) -> None:
        self._events: dict[Key, Event] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, Disconnected):
            came = (Connected, event.connection) in self._events
            lasting = () if came else ((MessageReceived, event.connection, Result),)
            self._events = {
                key: one for key, one in self._events.items() if key[1] != event.connection or key in lasting
            }
            if came:
                return
        key = _key(event)
        self._events.pop(key, None)
        self._events[key] = event

    def take(self) -> list[Event]:
        """All of them, oldest first; they are not kept any longer."""
        events = list(self._events.values())
        self._events = {}
        return events


def _key(event: Event) -> Key:
    """What a later event must share with an earlier one to take its place."""
    match event:
        case MessageReceived(connection, message):
            return MessageReceived, connection, type(message)
        case Connected(connection) | Disconnected(connection):
            return type(event), connection
        case Probed(worker) | Spawned(worker) | Exited(worker) | NeverStarted(worker):
            return type(event), worker
        case _:
            return type(event), None
