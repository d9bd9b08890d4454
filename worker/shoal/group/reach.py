"""Who is out of reach while gloo connects: gloo does not say for whom it waits.

When connecting takes long, a thread asks every other member's meeting place, as one does who looks whether a process
lives; those that do not answer are whom the building waits for. Called by gloo.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.group.build import Meeting
from shoal.group.rendezvous_server import reachable

LONG_SECONDS = 1.0
"""Connecting takes milliseconds."""
ANSWER_SECONDS = 1.0
MOST_NAMED = 8
"""So many that do not answer are enough."""


@contextmanager
def watched(meeting: Meeting) -> Iterator[None]:
    """Until the block ends the meeting's progress tells for whom it waits: at first for everybody."""
    done = threading.Event()
    meeting.progress.wait_for(*_others(meeting))
    threading.Thread(target=_look, args=(meeting, done), name="shoal-group-reach", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _others(meeting: Meeting) -> list[int]:
    return [rank for rank in range(meeting.size) if rank != meeting.rank]


def _look(meeting: Meeting, done: threading.Event) -> None:
    while not done.wait(LONG_SECONDS):
        away: list[int] = []
        for rank in _others(meeting):
            if done.is_set() or len(away) == MOST_NAMED:
                break
            if not reachable(meeting.addresses[rank], ANSWER_SECONDS):
                away.append(rank)
        if away and not done.is_set():
            meeting.progress.still_waits_for(away)
