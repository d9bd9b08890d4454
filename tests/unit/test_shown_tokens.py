"""What a worker's streams show: as little as opens them."""

from __future__ import annotations

from rule import holds
from shoal.session.thread import ShownTokens
from shoal_protos.channel import SESSION_TOKEN
from shoal_protos.messages import SessionToken

JOIN = ("authorization", "Bearer join")
OWN = ("authorization", "Bearer own")
BESIDE = (SESSION_TOKEN, "own")


@holds("A session token ends")
def test_a_fresh_session_token_is_shown_alone_and_an_old_one_beside_the_join_token() -> None:
    tokens = ShownTokens("join")
    assert tokens.headers("a", 0.0) == (JOIN,)
    tokens.on_given(SessionToken("own", 300.0), "a", 10.0)
    assert tokens.headers("a", 309.0) == (OWN,)
    assert tokens.headers("a", 310.0) == (JOIN, BESIDE)
    tokens.on_given(SessionToken("newer", 300.0), "a", 310.0)
    assert tokens.headers("a", 311.0) == (("authorization", "Bearer newer"),)


def test_after_a_refusal_both_are_shown_though_the_one_should_do() -> None:
    tokens = ShownTokens("join")
    tokens.on_given(SessionToken("own", 300.0), "a", 0.0)
    tokens.on_refused()
    assert tokens.headers("a", 1.0) == (JOIN, BESIDE)


def test_a_process_that_starts_over_shows_nothing_of_what_it_was() -> None:
    tokens = ShownTokens("join")
    tokens.on_given(SessionToken("own", 300.0), "a", 0.0)
    assert tokens.headers("b", 1.0) == (JOIN,)


def test_without_a_token_of_its_own_a_worker_shows_what_it_was_given_or_nothing() -> None:
    tokens = ShownTokens(None)
    assert tokens.headers("a", 0.0) == ()
    tokens.on_given(SessionToken("own", 300.0), "a", 0.0)
    assert tokens.headers("a", 999.0) == (OWN,)


def test_a_session_token_is_not_printed() -> None:
    assert "own" not in repr(SessionToken("own", 300.0))
