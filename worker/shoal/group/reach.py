"""Who is out of reach while gloo connects: gloo does not say for whom it waits.

When connecting takes long, a thread asks every other member's rendezvous server, as one does who looks whether a
process lives; those that do not answer are whom the building waits for. Called by gloo.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.group.build import GroupSpec
from shoal.group.rendezvous_server import reachable

LONG_SECONDS = 1.0
"""Connecting takes milliseconds."""
ANSWER_SECONDS = 1.0
MOST_NAMED = 8
"""So many that do not answer are enough."""


@contextmanager
def watch_reach(spec: GroupSpec) -> Iterator[None]:
    """Until the block ends the progress tells for whom the building waits: at first for everybody."""
    done = threading.Event()
    spec.progress.wait_for(*_others(spec))
    threading.Thread(target=_look, args=(spec, done), name="shoal-group-reach", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _others(spec: GroupSpec) -> list[int]:
    return [rank for rank in range(spec.size) if rank != spec.rank]


def _look(spec: GroupSpec, done: threading.Event) -> None:
    while not done.wait(LONG_SECONDS):
        away: list[int] = []
        for rank in _others(spec):
            if done.is_set() or len(away) == MOST_NAMED:
                break
            if not reachable(spec.addresses[rank], spec.incarnation(rank), ANSWER_SECONDS):
                away.append(rank)
        if away and not done.is_set():
            spec.progress.keep_waiting_for(away)
