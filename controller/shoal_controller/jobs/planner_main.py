"""The planner's process: answers questions from its stdin on its stdout until that ends.

A frame is a length and a pickle; only `planner_process.py`, which starts it, is at the other end of the pipes. While it
plans an empty frame leaves every so often: who stands still sends none. It plans and does nothing else: it knows no job
and no store.
"""

from __future__ import annotations

import gc
import os
import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from shoal_controller.core.planning.question import Answer, Question, answer

LENGTH = struct.Struct(">Q")
BEAT_SECONDS = 1.0
"""Between two empty frames."""
READY = b"\n# the planner is ready\n"
"""Before the first reply: whatever was printed before it, while modules were imported, is none of the planner's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one question, or why there is none, as a sentence."""

    answer: Answer | None
    failure: str = ""


def frame(content: object) -> bytes:
    data = pickle.dumps(content, protocol=5)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as replies:  # nobody listens any more
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed gets between the replies
        replies.write(READY)
        replies.flush()
        gc.disable()  # a plan is many objects and no cycles: looking for some takes a third of the time
        while (length := sys.stdin.buffer.read(LENGTH.size)) != b"":
            with _beating(replies):
                reply = frame(_reply(sys.stdin.buffer, LENGTH.unpack(length)[0]))
            replies.write(reply)
            replies.flush()
            gc.collect()


@contextmanager
def _beating(replies: BinaryIO) -> Iterator[None]:
    """Empty frames leave meanwhile, and nothing else may."""
    over = threading.Event()

    def beat() -> None:
        with suppress(BrokenPipeError):
            while not over.wait(BEAT_SECONDS):
                replies.write(LENGTH.pack(0))
                replies.flush()

    thread = threading.Thread(target=beat, name="beats")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _reply(questions: BinaryIO, length: int) -> Reply:
    try:
        question: Question = pickle.loads(questions.read(length))
        return Reply(answer(question))
    except MemoryError:
        return Reply(None, "the planner's process ran out of memory; give the controller more")
    except Exception:
        return Reply(None, f"the planner failed. This is a bug in Shoal; please report it.\n{traceback.format_exc()}")
