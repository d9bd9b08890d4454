"""Tokens of workers: what each of them proves, and that nothing else proves anything."""

from __future__ import annotations

import asyncio
import re

import pytest
from rule import Edit, holds, rule
from shoal_controller.access.worker_tokens import ShownToken, WorkerTokens, is_for_workers
from shoal_controller.core.machine.events import Proof
from shoal_controller.sessions.service import Door, TokenExpired
from shoal_protos.channel import SESSION_TOKEN
from shoal_protos.errors import Refused
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

TOKENS = WorkerTokens("secret")
JOIN = TOKENS.join("train", "run-1")
RUN = Proof("train", "run-1")
W0 = Proof("train", "run-1", "w0", "inc-0")
SESSION = TOKENS.session(W0, 1000.9)


def test_a_join_token_names_a_run_and_a_session_token_a_process_of_it_and_when_it_ends() -> None:
    assert re.fullmatch(r"join:train:run-1:[0-9a-f]{64}", JOIN)
    assert re.fullmatch(r"session:train:run-1:w0:inc-0:1000:[0-9a-f]{64}", SESSION)
    assert TOKENS.read(JOIN) == ShownToken(RUN)
    assert TOKENS.read(SESSION) == ShownToken(W0, 1000.0)
    assert is_for_workers(JOIN) and is_for_workers(SESSION) and not is_for_workers("secret")


def test_every_controller_with_the_same_secret_makes_and_reads_the_same_tokens() -> None:
    other = WorkerTokens("secret")
    assert other.join("train", "run-1") == JOIN and other.read(SESSION) == TOKENS.read(SESSION)
    assert WorkerTokens("another").join("train", "run-1") != JOIN != TOKENS.join("train", "run-2")


@holds("A worker's token opens sessions")
@pytest.mark.parametrize(
    "shown",
    [
        "", "secret", "join:", "join:::", "session:", JOIN[:-1], JOIN + "0", JOIN.upper(), JOIN.removeprefix("join:"),
        JOIN.replace("train", "other"), JOIN.replace("run-1", "run-2"), JOIN.replace("join", "session"),
        SESSION.replace("w0", "w1"), SESSION.replace("inc-0", "inc-1"), SESSION.replace(":1000:", ":9999:"),
        SESSION.replace("session", "join"), WorkerTokens("guess").join("train", "run-1"),
        "join:train:run-1:" + "é" * 64, "join:train:run-1:\udcff", TOKENS._signed("join", "train"),
        TOKENS._signed("another", "train", "run-1"),
    ],
)  # fmt: skip
def test_nothing_else_proves_anything(shown: str) -> None:
    assert TOKENS.read(shown) is None


def test_neither_the_secret_nor_what_is_made_of_it_is_printed() -> None:
    assert repr(TOKENS) == "WorkerTokens()"


def unheard() -> None:
    """A caller's connection of whose wrong token nobody needs to hear."""


def opened(*, bearer: str | None = None, beside: str = "", now: float = 0.0) -> Proof | None:
    headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
    door = Door(TOKENS, lambda: now)
    return asyncio.run(door.proof_of({**headers, **({SESSION_TOKEN: beside} if beside else {})}, "10.0.0.7", unheard))


def test_the_operators_token_opens_every_session_and_each_other_what_it_proves() -> None:
    assert opened(bearer="secret") is None
    assert opened(bearer=JOIN) == RUN
    assert opened(bearer=SESSION, now=999.0) == W0
    assert asyncio.run(Door(None).proof_of({}, "", unheard)) is None, "where no token is asked for, none is read"


@rule(
    "A session token ends, and is renewed before; later it opens nothing by itself, and says whose it is beside "
    "a join token of its run, so that a worker outlives any outage",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.sessions.service",
            "            if shown.expires <= self._clock():\n",
            "            if False:\n",
        ),
        Edit(
            "shoal_controller.jobs.streams",
            "                if stream.renewed <= due:\n",
            "                if False:\n",
        ),
        Edit(
            "shoal.session.thread",
            "        if token and (self._given is None or now < self._fresh_until):\n",
            "        if token:\n",
        ),
    ],
)
def test_a_session_token_whose_time_is_over_opens_nothing_alone_and_says_whose_it_is_beside_a_join_token() -> None:
    with pytest.raises(TokenExpired, match="the session token of worker w0 of job train has expired; expected the"):
        opened(bearer=SESSION, now=1000.0)
    assert opened(bearer=JOIN, beside=SESSION, now=10**9) == W0
    assert opened(bearer=JOIN, beside=SESSION[:-1]) == RUN
    assert opened(bearer=JOIN, beside=TOKENS.session(Proof("train", "run-2", "w0", "inc-0"), 1000)) == RUN
    assert opened(bearer=JOIN, beside=JOIN) == RUN


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, "no token"), ({SESSION_TOKEN: SESSION}, "no token"), ({"authorization": ""}, "no token"),
        ({"authorization": JOIN}, "another token"), ({"authorization": f"Basic {JOIN}"}, "another token"),
        ({"authorization": b"Bearer \xff"}, "another token"), ({"authorization": "Bearer guess"}, "another token"),
    ],
)  # fmt: skip
def test_a_refused_token_is_one_sentence(headers: dict[str, str | bytes], found: str) -> None:
    sentence = f"^the worker showed {found}; set SHOAL_TOKEN to what `shoal token JOB` prints there$"
    with pytest.raises(Refused, match=sentence):
        asyncio.run(Door(TOKENS).proof_of(headers, "", unheard))


def test_a_token_for_workers_that_was_not_made_here_is_refused_with_what_it_may_be() -> None:
    """A controller of another release may have made it in another way: its workers come again and again."""
    with pytest.raises(Refused) as refused:
        asyncio.run(Door(TOKENS).proof_of({"authorization": f"Bearer {JOIN[:-1]}"}, "", unheard))
    assert str(refused.value) == (
        f"the worker showed another token: one for workers that this controller (of {of_shoal(RELEASE)}) has not made, "
        "so it was made from another SHOAL_TOKEN, or by a controller of another release of shoal; set SHOAL_TOKEN to "
        "what `shoal token JOB` prints there"
    )
