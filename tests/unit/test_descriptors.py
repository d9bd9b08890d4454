"""How many files and connections a controller may have open."""

import resource

import pytest
from shoal_controller.descriptors import raise_descriptor_limit

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture
def lowered():
    """This process may open fewer than its user could grant it."""
    soft, hard = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (min(soft, hard) - 1, hard))
    yield hard
    resource.setrlimit(LIMIT, (soft, hard))


def test_a_process_that_serves_may_open_as_many_as_its_user_can_grant(lowered):
    raise_descriptor_limit()
    assert resource.getrlimit(LIMIT) == (lowered, lowered)


def test_where_more_is_refused_the_limit_stays(lowered, monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    before = resource.getrlimit(LIMIT)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    monkeypatch.undo()
    assert resource.getrlimit(LIMIT) == before
