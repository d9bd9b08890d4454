"""The named tokens of people and programs: made, listed, renewed, revoked, and found again when one is shown.

The store keeps a token's name, role, and the SHA-256 digest of its secret, at `/tokens/NAME`; the secret has 256 random
bits and is shown once. Every controller of a store watches these keys, so that a revoked token opens nothing anywhere.
`SHOAL_TOKEN` is a token without a record: its name is `root`, its role `admin`. Nothing here waits for the store when a
token is shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NotFound, StoreError
from shoal_protos.text import shown_name

from shoal_controller.access.callers import Caller, Role, Unauthorized
from shoal_controller.access.worker_tokens import is_for_workers
from shoal_controller.core.machine.codec import plain, restored
from shoal_controller.process.tasks import end_task, guarded
from shoal_controller.store.store import Compare, Delete, Put, Store, follow

PREFIX = "/tokens/"
FORMAT = 1
KIND = "shoal"
ROOT = "root"
"""Name of the token that is `SHOAL_TOKEN`."""

MOST_TOKENS = 1000

HINT = (
    "send the header `Authorization: Bearer TOKEN` with the controller's SHOAL_TOKEN or a token of "
    "`shoal token create` (`shoal run` keeps its own in .shoal/token where it was started)"
)

log = structlog.get_logger("shoal.tokens")


@dataclass(frozen=True, slots=True)
class NamedToken:
    """What is kept of a token."""

    name: str
    role: Role
    digest: str
    created: float
    """Seconds since the epoch, as all times here."""
    created_by: str
    """Name of the token that made it."""
    expires: float | None = None
    previous: str = ""
    """Digest of the secret that the last rotation replaced."""
    previous_expires: float = 0.0

    def encoded(self) -> bytes:
        return json.dumps(plain(self) | {"format": FORMAT}).encode()

    @classmethod
    def decoded(cls, value: bytes) -> NamedToken:
        """Raises `ValueError` or `TypeError` for a record that is damaged or of another version."""
        found = json.loads(value)
        if (number := found.pop("format", None)) != FORMAT:
            raise ValueError(f"its format is {number}, this version reads {FORMAT}")
        token: NamedToken = restored(cls, found)
        return token


class TokenRegister:
    """All tokens but those of workers. `start` reads and follows the store; without it there is `root` alone."""

    def __init__(self, root: str | None, clock: Callable[[], float] = time.time) -> None:
        self._opened: Store | None = None
        self._root = None if root is None else _digest(root)
        self._clock = clock
        self._tokens: dict[str, NamedToken] = {}
        self._are_kept = False
        """Whether the store has any, also such as cannot be read."""
        self._following: asyncio.Task[None] | None = None
        self._read = asyncio.Event()

    async def start(self, store: Store, failed: Callable[[BaseException], None]) -> None:
        """Returns when it has read them. `failed` hears when following the store ends unexpectedly."""
        self._opened = store
        self._following = guarded("tokens", follow(store, PREFIX, self._on_records), failed)
        await self._read.wait()

    async def stop(self) -> None:
        if self._following is not None:
            await end_task(self._following)

    # ---- who is it?

    @property
    def is_required(self) -> bool:
        """Whether requests must show a token: also of a controller that lost its `SHOAL_TOKEN`, but has named ones."""
        return self._root is not None or self._are_kept or bool(self._tokens)

    def caller(self, shown: str, address: str = "") -> Caller:
        """Whose token this is. Raises `Unauthorized`. Takes as long for a near miss as for nonsense."""
        digest, now = _digest(shown), self._clock()
        if self._root is not None and hmac.compare_digest(digest, self._root):
            return Caller(ROOT, Role.ADMIN, address)
        kind, _, rest = shown.partition(":")
        token = self._tokens.get(rest.partition(":")[0]) if kind == KIND else None
        is_known = hmac.compare_digest(digest, token.digest if token is not None else _digest(""))
        was_known = hmac.compare_digest(digest, token.previous if token is not None and token.previous else "-" * 64)
        if token is None or not (is_known or was_known):
            raise Unauthorized(f"the request shows {_found(shown)}; {HINT}")
        end = token.expires if is_known else min(token.previous_expires, token.expires or token.previous_expires)
        if end is not None and end <= now:
            why = "has expired" if is_known else "was replaced, and the old one has expired"
            raise Unauthorized(f"the token {token.name} {why} ({_date(end)}); ask an admin for a new one")
        return Caller(token.name, token.role, address)

    # ---- what an admin does

    def tokens(self) -> list[NamedToken]:
        """All of them, by name."""
        return [self._tokens[name] for name in sorted(self._tokens)]

    async def create(self, name: str, role: Role, by: str, seconds: float | None) -> tuple[NamedToken, str]:
        """A new token, and the secret that is shown this once. `seconds`: how long it is valid; None: for ever."""
        if self._root is None:
            raise Conflict(
                "this controller was started without SHOAL_TOKEN; start it with one, or a lost token could lock all out"
            ).coded(ErrorCode.NO_TOKENS_HERE)
        if name == ROOT:
            raise Conflict(f"{ROOT} is the name of the controller's own SHOAL_TOKEN; choose another name").coded(
                ErrorCode.TOKEN_EXISTS
            )
        if len(self._tokens) >= MOST_TOKENS:
            raise Conflict(f"there are {MOST_TOKENS} tokens, the most that are kept; revoke some first").coded(
                ErrorCode.TOO_MANY_TOKENS
            )
        shown, now = _new_secret(name), self._clock()
        token = NamedToken(name, role, _digest(shown), now, by, None if seconds is None else now + seconds)
        outcome = await self._store.transact([Compare(_key(name))], [Put(_key(name), token.encoded())])
        if not outcome.succeeded:
            raise Conflict(f"there is a token {name} already; revoke it first, or rotate it").coded(
                ErrorCode.TOKEN_EXISTS
            )
        self._tokens[name] = token
        log.info("a token was created", token=name, role=str(role), by=by)
        return token, shown

    async def rotate(self, name: str, by: str, keep_seconds: float) -> tuple[NamedToken, str]:
        """A new secret under the same name; the one before stays valid for so long."""
        before = self._of(name)
        shown = _new_secret(name)
        token = replace(
            before, digest=_digest(shown), previous=before.digest, previous_expires=self._clock() + keep_seconds
        )
        await self._write(name, Put(_key(name), token.encoded()))
        self._tokens[name] = token
        log.info("a token was rotated", token=name, by=by, keep_seconds=keep_seconds)
        return token, shown

    async def revoke(self, name: str, by: str) -> NamedToken:
        """From now on it opens nothing."""
        token = self._of(name)
        await self._write(name, Delete(_key(name)))
        self._tokens.pop(name, None)
        log.info("a token was revoked", token=name, by=by)
        return token

    async def _write(self, name: str, operation: Put | Delete) -> None:
        entry = await self._store.get(_key(name))
        guard = Compare(_key(name), entry.modified if entry is not None else 0)
        if entry is None or not (await self._store.transact([guard], [operation])).succeeded:
            raise Conflict(f"the token {name} has just been changed by somebody else; look at it again").coded(
                ErrorCode.TOKEN_CHANGED
            )

    def _of(self, name: str) -> NamedToken:
        try:
            return self._tokens[name]
        except KeyError:
            raise NotFound(f"there is no token {shown_name(name)}; `shoal token list` shows those there are").coded(
                ErrorCode.TOKEN_UNKNOWN
            ) from None

    # ---- the store

    @property
    def _store(self) -> Store:
        if self._opened is None:
            raise StoreError("the store has not answered yet; try again later")
        return self._opened

    def _on_records(self, records: Mapping[str, bytes]) -> None:
        self._tokens, self._are_kept = {}, bool(records)
        for key, value in records.items():
            self._take(key, value)
        self._read.set()

    def _take(self, key: str, value: bytes) -> None:
        name = key.removeprefix(PREFIX)
        try:
            token = NamedToken.decoded(value)
            if token.name != name:
                raise ValueError(f"its name is {token.name!r}")
            self._tokens[name] = token
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("a token cannot be read and opens nothing", token=name, error=str(error))


def _key(name: str) -> str:
    return f"{PREFIX}{name}"


def _new_secret(name: str) -> str:
    return f"{KIND}:{name}:{secrets.token_urlsafe(32)}"


def _digest(shown: str) -> str:
    """Fast on purpose: a secret of 256 random bits cannot be guessed, however fast guesses are tried."""
    return hashlib.sha256(shown.encode(errors="surrogateescape")).hexdigest()


def _found(shown: str) -> str:
    if not shown:
        return "no token"
    return "a token for workers, which is not one for operators" if is_for_workers(shown) else "another token"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
