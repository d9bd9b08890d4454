"""From where a request comes that one controller hands on to another: the history shows the client's address.

Only a neighbour is believed. It proves itself with a secret that lies in the store and that nobody else is told: its
word is bound to this request, with this token, to this controller, so that who sees it can use it for nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass

import structlog
from shoal_protos.errors import StoreError
from starlette.datastructures import Headers
from starlette.types import Scope

from shoal_controller.store.store import Damaged, Store, made_once

HEADER = "shoal-forwarded"
"""The header of a request that another controller has handed on: `ADDRESS PROOF`, or what proves nothing."""

UNPROVED = "1"
"""Its value where nothing is known of the client."""

KEY = "/forwarding"
SIZE = 32
PAUSE_SECONDS = 1.0
"""Before a store that has failed is asked again."""

log = structlog.get_logger("shoal.leadership")


@dataclass(frozen=True, slots=True)
class HandedOn:
    """What a word of introduction is bound to."""

    to: str
    """Id of the controller that is asked."""
    method: str
    target: bytes
    """Path and query as they are sent."""
    authorization: str

    @classmethod
    def of(cls, scope: Scope, to: str) -> HandedOn:
        """A request as it came, or as it is handed on: by the very path that was sent."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        return cls(to, scope["method"], target, Headers(scope=scope).get("authorization", ""))


class Introductions:
    """What the controllers of a store tell each other of their clients."""

    def __init__(self, me: str, secret: str) -> None:
        """`me`: this controller's id."""
        self.me = me
        self._secret = secret.encode()

    def word(self, address: str, request: HandedOn) -> str:
        """The header for a request of the client at this address."""
        return f"{address} {self._proof(address, request)}" if address else UNPROVED

    def address(self, word: str, request: HandedOn) -> str:
        """The client's address; empty where no neighbour says so."""
        address, _, proof = word.rpartition(" ")
        expected = self._proof(address, request)
        return address if hmac.compare_digest(proof.encode(errors="replace"), expected.encode()) else ""

    def _proof(self, address: str, request: HandedOn) -> str:
        parts = (address, request.to, request.method, request.authorization)
        message = b"\0".join([*(part.encode(errors="replace") for part in parts), request.target])
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


async def introductions(store: Store, me: str, patient: bool = True) -> Introductions:
    """With the secret of this store, which is made if there is none yet. `patient`: a store that is away is waited for;
    else raises `StoreError`.
    """
    while True:
        try:
            return Introductions(me, await made_once(store, KEY, SIZE))
        except Damaged:
            raise
        except StoreError as error:
            if not patient:
                raise
            log.warning("controllers cannot be introduced yet", why=str(error))
            await asyncio.sleep(PAUSE_SECONDS)
