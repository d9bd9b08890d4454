"""What Python does with an error that nothing in a script has caught: those of Shoal are told in their one sentence.

Called by all that a script calls first: `shoal.cell`, `shoal.initialize` and the doors.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from shoal_protos.errors import ShoalError, UserError
from shoal_protos.messages import START_AGAIN, WRONG_USE
from shoal_protos.training_log import say

from shoal.checkpoint.failure import NeedsFreshProcess, sentence_of


def tell_errors_in_a_sentence() -> None:
    """Called as soon as anything can be refused. A mistake of the user's has its own exit status.

    Once: before an engine's own hook, another one would end the script before the engine has seen why.
    """
    if not any(isinstance(hook, _Sentences) for hook in _hooks()):
        sys.excepthook = _Sentences()


def _hooks() -> Iterator[object]:
    """What Python calls, and what is called by it as far as it is ours."""
    hook: object = sys.excepthook
    while hook is not None:
        hook = getattr(hook, "__self__", hook)  # of a method, what it belongs to
        yield hook
        hook = getattr(hook, "_hook", None)


class _Sentences:
    """Exception hook that prints an error of Shoal as its one sentence, with the script's line."""

    def __init__(self) -> None:
        self._hook = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShoalError):
            say(sentence_of(error))
        else:
            self._hook(kind, error, trace)
        # Not raised here: torch.distributed prints what a hook has written only after the hook has returned.
        if isinstance(error, UserError):
            leave_with(WRONG_USE)
        if isinstance(error, NeedsFreshProcess):
            leave_with(START_AGAIN)


def leave_with(status: int) -> None:
    """The process ends with this status, after all that it does at its end. The last call counts."""
    atexit.register(_leave, status)


def _leave(status: int) -> None:
    """`atexit` calls it first, for it came last: what else it has is called before the process leaves."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)
