"""The planner's process: answers questions from its stdin on its stdout until that ends.

A frame is a length and a pickle; only `planner_process.py`, which starts it, is at the other end of the pipes. It plans
and does nothing else: it knows no job, no store and no clock.
"""

from __future__ import annotations

import gc
import os
import pickle
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from shoal_controller.core.planning.question import Answer, Question, answer

LENGTH = struct.Struct(">Q")
READY = b"\n# the planner is ready\n"
"""Before the first reply: whatever was printed before it, while modules were imported, is none of the planner's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one question, or where it failed."""

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
            replies.write(frame(_reply(sys.stdin.buffer, LENGTH.unpack(length)[0])))
            replies.flush()
            gc.collect()


def _reply(questions: BinaryIO, length: int) -> Reply:
    question: Question = pickle.loads(questions.read(length))
    try:
        return Reply(answer(question))
    except Exception:
        return Reply(None, traceback.format_exc())
