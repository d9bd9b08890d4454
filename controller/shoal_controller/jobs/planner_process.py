"""The planner beside the event loop: a process of its own for large worlds, in place for small ones.

One question at a time, in the order in which jobs ask. The process is started by the first question that needs it, and
again by the next one after it died; it ends with its stdin, whatever becomes of the controller. Made by `server.py`.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import structlog
from shoal_protos.errors import PeerError

from shoal_controller.core.planning.question import Answer, Question, answer
from shoal_controller.jobs import planner_main
from shoal_controller.jobs.planner_main import LENGTH, READY, Reply, frame
from shoal_controller.jobs.ports import Begun

IN_PLACE = 64
"""Up to so many workers a plan takes some ten milliseconds, of however many blocks, for which all jobs' heartbeats wait
(docs/decisions/0029-small-worlds-are-planned-in-place.md).
"""

ANSWER_SECONDS = 60.0
"""How long an answer may take: some ten times what the largest jobs need on a slow machine."""

SILENT_SECONDS = 5.0
"""How long a process that answers a question may send nothing: it says every second that it is at work."""

START_SECONDS = 20.0
"""How long the process may take until it is ready: a hundred times what it needs, as it imports little, and no beat
leaves before. Meanwhile all jobs' questions wait.
"""

LOOKS = 5
"""In so many pieces that time is counted: of one in which this process was frozen itself at most a piece counts."""

END_SECONDS = 5.0
"""How long the process may take to end by itself."""

T = TypeVar("T")

log = structlog.get_logger("shoal.planner")


class PlannerProcess:
    """`answer` raises `PeerError` where the process died or was too slow; then the question may be asked again."""

    def __init__(self, in_place: int = IN_PLACE) -> None:
        self._in_place = in_place
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def answer(self, question: Question, begun: Begun = lambda: None) -> Answer:
        """In its turn; then `begun` is called first."""
        if len(question.candidates) <= self._in_place:
            begun()
            return answer(question)
        async with self._turn:
            begun()
            reply = await self._ask(frame(question))
        if reply.answer is None:
            raise PeerError(reply.failure)
        return reply.answer

    async def _ask(self, question: bytes) -> Reply:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._exchange(self._process or await self._start(), question)
        except BaseException as error:  # whatever it was: the next question must not read this one's answer
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                status = await self._end(END_SECONDS)
                raise PeerError(f"the planner's process has ended (exit status {status})") from error
            await self._end(0)
            if isinstance(error, TimeoutError):
                raise PeerError(f"the planner's process had no answer after {ANSWER_SECONDS:g} s") from error
            raise

    async def _exchange(self, process: Process, question: bytes) -> Reply:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(question)
        await _unless_silent(stdin.drain())
        length = 0
        while not length:  # an empty frame says that it is at work
            length = LENGTH.unpack(await _unless_silent(stdout.readexactly(LENGTH.size)))[0]
        reply = pickle.loads(await _unless_silent(stdout.readexactly(length)))
        assert isinstance(reply, Reply)
        return reply

    async def _start(self) -> Process:
        """In a session of its own, so that Ctrl-C in a terminal is for the controller alone."""
        command = (sys.executable, "-P", "-c", f"from {planner_main.__name__} import main; main()")
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        except OSError as error:
            raise PeerError(f"the planner's process cannot be started: {error}") from error
        self._process = process
        log.info("the planner's process is started", pid=process.pid)
        assert process.stdout is not None
        if not await _is_done(process.stdout.readuntil(READY), START_SECONDS):
            raise PeerError(f"the planner's process was not ready {START_SECONDS:g} s after its start")
        return process

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await self._end(END_SECONDS)

    async def _end(self, seconds: float) -> int | None:
        """Wait so long until it has ended by itself, else kill it; returns its exit status. Also called while this task
        is cancelled, when `asyncio.timeout` raises nothing that tells of time before Python 3.11.4.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        if not await _is_done(process.wait(), seconds):
            with suppress(ProcessLookupError):
                process.kill()
        return await process.wait()


async def _unless_silent(something: Awaitable[T]) -> T:
    """Its result. Raises `PeerError` where the process stands still."""
    waited_for = asyncio.ensure_future(something)
    if not await _is_done(waited_for, SILENT_SECONDS):
        raise PeerError(f"the planner's process has stood still for {SILENT_SECONDS:g} s")
    return waited_for.result()


async def _is_done(something: Awaitable[object], seconds: float) -> bool:
    """Whether it came within so long; else it is cancelled. Raises what it raises."""
    waited_for = asyncio.ensure_future(something)
    try:
        for _ in range(LOOKS):
            if (await asyncio.wait([waited_for], timeout=seconds / LOOKS))[0]:
                waited_for.result()
                return True
    finally:
        waited_for.cancel()
    return False
