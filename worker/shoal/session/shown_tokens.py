"""What a worker's streams show: the token that it was started with, and the session token that it was given.

While the session token is fresh it is shown by itself, so that the other one travels as little as can be; later, or
when the fresh one was of no use, both are shown. Pure: `thread.py` asks before each stream.
"""

from __future__ import annotations

from shoal_protos.channel import SESSION_TOKEN
from shoal_protos.messages import SessionToken

Headers = tuple[tuple[str, str], ...]


class ShownTokens:
    """`given`: what the process was started with; None: nothing. A session token is one incarnation's."""

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._token = ""
        self._incarnation = ""
        self._fresh_until = 0.0

    def headers(self, incarnation: str, now: float) -> Headers:
        """What a stream of this incarnation shows."""
        token = self._token if self._incarnation == incarnation else ""
        if token and (self._given is None or now < self._fresh_until):
            return (_bearer(token),)
        given = () if self._given is None else (_bearer(self._given),)
        return (*given, (SESSION_TOKEN, token)) if token else given

    def on_given(self, message: SessionToken, incarnation: str, now: float) -> None:
        """The controller gave it on a stream of this incarnation."""
        self._token, self._incarnation = message.token, incarnation
        self._fresh_until = now + message.seconds

    def on_refused(self) -> None:
        """A stream was refused: both are shown from now on, until there is a new one."""
        self._fresh_until = 0.0


def _bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")
