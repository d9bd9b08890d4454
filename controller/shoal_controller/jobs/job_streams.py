"""The streams of one job's workers: who has one, and what the shell adds to what the machine says on them."""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.messages import Refusal, ToWorker, Welcome

from shoal_controller.core.machine.events import Connected, Disconnected, Event
from shoal_controller.jobs.ports import Outside


class JobStreams:
    """Used by the job's runner alone."""

    def __init__(self, outside: Outside, cluster: str) -> None:
        self._outside, self._cluster = outside, cluster
        self._connections: set[int] = set()

    def on_event(self, event: Event) -> None:
        """A stream comes or goes."""
        if isinstance(event, Connected):
            self._connections.add(event.connection)
        elif isinstance(event, Disconnected):
            self._connections.discard(event.connection)

    def send(self, connection: int, message: ToWorker) -> None:
        """A welcome and a refusal say which store this is; a welcome also where all its controllers are."""
        if isinstance(message, Welcome):
            message = replace(message, cluster=self._cluster, controllers=self._outside.controllers())
        elif isinstance(message, Refusal):
            message = replace(message, cluster=self._cluster)
        self._outside.streams.send(connection, message)

    def close(self, connection: int) -> None:
        self._outside.streams.close(connection)

    def send_last(self, connection: int, message: ToWorker) -> None:
        """Nothing comes after it, and nothing depends on which store this is."""
        self._outside.streams.send(connection, message)
        self.close(connection)

    def send_last_to_all(self, message: ToWorker) -> None:
        for connection in sorted(self._connections):
            self.send_last(connection, message)

    def close_all(self) -> None:
        for connection in sorted(self._connections):
            self.close(connection)
