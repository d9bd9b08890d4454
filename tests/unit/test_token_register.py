"""Named tokens: what each opens, what is kept of it, and that every controller of a store knows the same ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from asynchronous import asynchronous
from rule import holds
from shoal_controller.access.callers import Caller, Role, Unauthorized
from shoal_controller.access.token_register import MOST_TOKENS, TokenRegister
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Put, Store
from shoal_protos.errors import Conflict, NotFound


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def register(
    store: Store, clock: Clock | None = None, root: str | None = "secret"
) -> AsyncIterator[TokenRegister]:
    failures: list[BaseException] = []
    one = TokenRegister(root, clock or Clock())
    await one.start(store, failures.append)
    try:
        yield one
    finally:
        await one.stop()
    assert failures == []


async def kept(store: Store) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in (await store.list("/tokens/")).entries}


@asynchronous
async def test_a_token_is_found_again_by_its_secret_and_by_nothing_near_it(tmp_path: Path) -> None:
    store = await open_store(f"embedded:{tmp_path}")
    async with register(store) as tokens:
        token, shown = await tokens.create("ci", Role.OPERATE, "root", None)
        assert tokens.caller(shown, "10.0.0.7") == Caller("ci", Role.OPERATE, "10.0.0.7")
        assert tokens.caller("secret") == Caller("root", Role.ADMIN)
        near = [shown[:-1], shown + "x", shown.upper(), shown.replace("ci", "di"), shown.rpartition(":")[2]]
        for wrong in [*near, "shoal:ci:", "shoal:ci", token.digest, "secre", ""]:
            with pytest.raises(Unauthorized, match=r"^the request shows (another|no) token; send the header"):
                tokens.caller(wrong)
    await store.close()


@holds("A token opens what its")
@asynchronous
async def test_the_store_has_a_digest_and_no_secret(tmp_path: Path) -> None:
    store = await open_store(f"embedded:{tmp_path}")
    async with register(store) as tokens:
        _, shown = await tokens.create("ci", Role.VIEW, "root", None)
        _, again = await tokens.rotate("ci", "root", 60.0)
        assert len(shown.rpartition(":")[2]) >= 43
        (value,) = (await kept(store)).values()
        for secret in (shown, again):
            assert secret.rpartition(":")[2].encode() not in value
        assert json.loads(value)["created_by"] == "root"
    await store.close()


@asynchronous
async def test_a_token_that_is_revoked_or_rotated_on_one_controller_opens_nothing_on_another(tmp_path: Path) -> None:
    store, clock = await open_store(f"embedded:{tmp_path}"), Clock()
    async with register(store, clock) as one, register(store, clock) as other:
        _, shown = await one.create("ci", Role.VIEW, "root", None)
        await _until_known(other, shown)
        _, renewed = await other.rotate("ci", "root", 60.0)
        await _until_known(one, renewed)
        assert one.caller(shown).token == "ci"
        clock.now += 60.0
        with pytest.raises(Unauthorized, match="token ci was replaced, and the old one has expired"):
            one.caller(shown)
        await one.revoke("ci", "root")
        await _until_unknown(other, renewed)
    async with register(store) as later:
        assert later.tokens() == []
    await store.close()


async def _until_known(tokens: TokenRegister, shown: str) -> None:
    async with asyncio.timeout(100):
        while True:
            try:
                tokens.caller(shown)
                return
            except Unauthorized:
                await asyncio.sleep(0)


async def _until_unknown(tokens: TokenRegister, shown: str) -> None:
    async with asyncio.timeout(100):
        while True:
            try:
                tokens.caller(shown)
            except Unauthorized:
                return
            await asyncio.sleep(0)


@asynchronous
async def test_a_token_that_has_expired_says_so(tmp_path: Path) -> None:
    store, clock = await open_store(f"embedded:{tmp_path}"), Clock()
    async with register(store, clock) as tokens:
        _, shown = await tokens.create("ci", Role.VIEW, "root", 86_400.0)
        clock.now += 86_399.0
        assert tokens.caller(shown).token == "ci"
        clock.now += 1.0
        with pytest.raises(Unauthorized) as refusal:
            tokens.caller(shown)
        assert str(refusal.value) == ("the token ci has expired (1970-01-13 13:46 UTC); ask an admin for a new one")
    await store.close()


@asynchronous
async def test_what_cannot_be_made_or_changed_is_one_sentence(tmp_path: Path) -> None:
    store = await open_store(f"embedded:{tmp_path}")
    async with register(store) as tokens:
        await tokens.create("ci", Role.VIEW, "root", None)
        with pytest.raises(Conflict, match="there is a token ci already; revoke it first, or rotate it"):
            await tokens.create("ci", Role.ADMIN, "root", None)
        with pytest.raises(Conflict, match="root is the name of the controller's own SHOAL_TOKEN"):
            await tokens.create("root", Role.ADMIN, "root", None)
        for act in (tokens.rotate("no", "root", 0.0), tokens.revoke("no", "root")):
            with pytest.raises(NotFound, match="there is no token no; `shoal token list` shows"):
                await act
        tokens._tokens |= {f"t{number}": tokens.tokens()[0] for number in range(MOST_TOKENS)}
        with pytest.raises(Conflict, match="the most that are kept"):
            await tokens.create("more", Role.VIEW, "root", None)
    await store.close()


@asynchronous
async def test_named_tokens_close_the_door_of_a_controller_that_lost_its_own(tmp_path: Path) -> None:
    store = await open_store(f"embedded:{tmp_path}")
    async with register(store, root=None) as tokens:
        assert not tokens.is_required
        with pytest.raises(Conflict, match="started without SHOAL_TOKEN"):
            await tokens.create("ci", Role.ADMIN, "", None)
    async with register(store) as tokens:
        _, shown = await tokens.create("ci", Role.ADMIN, "root", None)
    async with register(store, root=None) as tokens:
        assert tokens.is_required and tokens.caller(shown).role is Role.ADMIN
        with pytest.raises(Unauthorized):
            tokens.caller("")
    await store.close()


@asynchronous
async def test_a_damaged_record_opens_nothing_and_harms_no_other(tmp_path: Path) -> None:
    store = await open_store(f"embedded:{tmp_path}")
    async with register(store) as tokens:
        _, shown = await tokens.create("ci", Role.VIEW, "root", None)
    record = json.loads((await kept(store))["/tokens/ci"])
    damages = [b"", b"{", b"[]", b"null", json.dumps(record).encode()] + [
        json.dumps(record | {"name": name} | {key: value}).encode()
        for name, (key, value) in enumerate(
            [("role", "king"), ("digest", 7), ("format", 2), ("expires", "now"), ("x", 1)]
        )
    ]
    for number, damage in enumerate(damages):
        await store.transact([], [Put(f"/tokens/bad{number}", damage)])
    async with register(store) as tokens:
        assert [token.name for token in tokens.tokens()] == ["ci"]
        assert tokens.caller(shown).token == "ci"
    await store.close()
