"""Threads that wait for gloo in place of the training thread, so that nothing can keep that one for ever.

[Note: lost wake-ups] When gloo closes a connection it wakes whoever waits for an operation that has not begun. It
forgets the one whose bytes are half-way through: that wait ends by its own time-out only, a day later. So the training
thread never waits in gloo itself. It asks one of these threads and waits for its answer, for an abort, or for news of
the connection, whichever comes first; a thread that gloo has forgotten stays behind with its buffer.
Called by gloo.py; knows no group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.group.host_peers import GlooWork

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 60.0
"""How long a peer is waited for before its connection is looked at, and between two looks."""


class Connection:
    """A connection to one peer. A look posts a receive that nobody sends to, so each takes the place of the one before,
    and they become ever rarer in the life of a group: what gloo remembers of each is never given back before its end.
    """

    def __init__(self, receive: Callable[[Tensor], dist.Work | None]) -> None:
        self._receive = receive
        self._look: object = None
        self.pause_seconds = FIRST_LOOK_SECONDS
        """How long to wait before it is looked at."""

    def look(self) -> str | None:
        """What is wrong with it, if anything is: gloo refuses to post on a closed connection."""
        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_LOOK_SECONDS)
        never_sent = torch.zeros(1)
        try:
            self._look = self._receive(never_sent), never_sent
        except RuntimeError as error:
            return str(error)
        return None


Answers = SimpleQueue[str | None]
"""What became of the operations: None when all are done, else why one failed. The first answer counts."""

_Tasks = SimpleQueue[tuple[Iterable[GlooWork], Answers] | None]


class WaitThreads:
    """Threads that wait: as many as there are waits at once: one, as a rule."""

    def __init__(self) -> None:
        self._idle: list[_Tasks] = []
        self._waiting: set[Answers] = set()
        self._over: str | None = None
        """Why no wait is worth while any more."""

    def begin(self, works: Iterable[GlooWork]) -> Answers:
        """Begins to wait for them, one after the other, in the order in which they are iterated over."""
        answers: Answers = SimpleQueue()
        self._waiting.add(answers)
        if self._over is None:
            self._idle_thread().put((works, answers))
        else:
            answers.put(self._over)
        return answers

    def end(self, answers: Answers, connection: Callable[[], Connection]) -> str | None:
        """None when all are done, else why not. `connection()`: to the peer that is waited for at the moment."""
        try:
            return _first_answer(answers, connection)
        finally:
            self._waiting.discard(answers)

    def free(self, why: str) -> None:
        """Free all waits from any thread: every wait ends now, and all later ones at once."""
        self._over = why
        for answers in tuple(self._waiting):
            answers.put(why)

    def close(self) -> None:
        """The threads end, but for those that gloo has forgotten."""
        self.free("the group is closed")
        while self._idle:
            self._idle.pop().put(None)

    # ---- the threads

    def _idle_thread(self) -> _Tasks:
        try:
            return self._idle.pop()
        except IndexError:
            tasks: _Tasks = SimpleQueue()
            threading.Thread(target=self._serve, args=(tasks,), name="shoal-group-waits", daemon=True).start()
            return tasks

    def _serve(self, tasks: _Tasks) -> None:
        while (task := tasks.get()) is not None:
            works, answers = task
            answer = _outcome(works)
            del task, works
            self._idle.append(tasks)
            answers.put(answer)
            if self._over is not None and tasks in self._idle:
                return


def _first_answer(answers: Answers, connection: Callable[[], Connection]) -> str | None:
    while True:
        try:
            return answers.get(timeout=connection().pause_seconds)
        except Empty:
            wrong = connection().look()
            if wrong is not None:
                return wrong


def _outcome(works: Iterable[GlooWork]) -> str | None:
    """In a frame of its own: what an exception's traceback keeps alive keeps gloo's sockets alive."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        return str(error)
    return None
