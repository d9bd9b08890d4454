"""What Python does with an error that nothing in a script has caught: those of Shoal are told in their one sentence.

A script that ends before it has an engine ends its process, too, where a controller waits for it: Python would first
wait for the script's threads. Called by all that a script calls first: `shoal.cell`, `shoal.initialize` and the doors.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from shoal_protos.errors import ShoalError, UserError
from shoal_protos.messages import START_AGAIN, WRONG_USE
from shoal_protos.training_log import say

from shoal.checkpoint.failure import NeedsFreshProcess, sentence_of

FAILED = 1
"""Exit status of a process whose script came to its end, where what followed failed, or its threads do not end."""
GRACE_SECONDS = 5.0
"""For as long threads of a script that has ended without an engine may run on."""
_has_engine = threading.Event()
_statuses: list[int] = []
"""That the process was to end with."""


def tell_errors_in_a_sentence(environment: Mapping[str, str] = os.environ) -> None:
    """Called as soon as anything can be refused. A mistake of the user's has its own exit status.

    Once: before an engine's own hook, another one would end the script before the engine has seen why.
    """
    if any(isinstance(hook, _Sentences) for hook in _hooks()):
        return
    sys.excepthook = _Sentences()
    if environment.get("SHOAL_CONTROLLER"):
        here = os.getpid()
        threading._register_atexit(lambda: _end_soon() if os.getpid() == here else None)  # type: ignore[attr-defined]


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
    _statuses.append(status)
    atexit.register(_leave, status)


def _leave(status: int) -> None:
    """`atexit` calls it first, for it came last: what else it has is called before the process leaves."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    _end_with(status)


def _end_with(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)


# ---- where there is no engine


def leave_the_end_to_the_engine() -> None:
    """Called once there is one: it tells the controller how the script has ended."""
    _has_engine.set()


def _end_soon() -> None:
    """Called when the main thread has ended, before Python waits for others."""
    if not _has_engine.is_set():
        threading.Thread(target=_end_later, name="shoal-end", daemon=True).start()


def _end_later() -> None:
    time.sleep(GRACE_SECONDS)
    if not _statuses:  # else the sentence that explains it is the last one
        runs = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        still = f'its thread "{runs[0]}" still runs' if runs else "something that it has started still runs"
        say(f"the script has ended without an engine, and {still} after {GRACE_SECONDS:g} s: its process is ended.")
    _end_with(_statuses[-1] if _statuses else FAILED)
