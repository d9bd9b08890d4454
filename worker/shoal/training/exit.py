"""The end of a script: serve changes until all members are done, or say why this worker failed.

A worker goes on voting after its loop until every member has committed the last step, given its digests and ended its
script; whoever leaves the loop in another way has failed. That takes threads, so it is done before Python ends those of
the script, and not by `atexit` (docs/decisions/0032-a-scripts-end-is-served-before-its-threads-end.md).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what it does at the end comes after what we do
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from weakref import ReferenceType, finalize, ref

from shoal_protos.errors import ShoalError
from shoal_protos.messages import START_AGAIN, Fault, Result
from shoal_protos.training_log import get_logger, say

from shoal.checkpoint.failure import NeedsFreshProcess, in_a_sentence, result_of
from shoal.config.out_of_memory import explain
from shoal.session.error_hook import FAILED, leave_the_end_to_the_engine, leave_with
from shoal.training.engine import Engine
from shoal.training.memory_report import memory_setting

log = get_logger("shoal")


class _Ending:
    """Sees how the script ends, and what follows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._failure: BaseException | None = None
        self._hook = sys.excepthook
        self.starts_again = False
        """A new process is to run the script."""

    def excepthook(self, _: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Remembers the exception that ends the script."""
        self._failure = in_a_sentence(error)
        self._hook(type(self._failure), self._failure, trace)

    @property
    def _is_of_a_void_lane(self) -> bool:
        """Whether the script itself has raised or ended while collectives of its cell were answered from here
        (cells/hub.py). What it has computed of such answers need not be what it expects: that is no failure of the
        script.
        """
        return not isinstance(self._failure, ShoalError) and not self._engine.context.is_cell_whole

    def end_alone(self) -> None:
        """Where nothing but the script says when the job ends, an error that has ended it is no end of the job."""
        context = self._engine.context
        if not context.state.last_step:
            self._failure = getattr(sys, "last_value", None)
        self.at_exit()
        if context.left_at and self._failure is None:
            log.warning("ended_early", step=context.state.step, means=context.left_at)

    def end(self) -> None:
        """As `at_exit`; a process that is to be started again says so by its status, however the script has ended."""
        self.at_exit()
        if self.starts_again:
            leave_with(START_AGAIN)

    def at_exit(self) -> None:
        context = self._engine.context
        try:
            if context.leaving:
                return
            self._engine.script_end.close_loops()
            if self._failure is None and (context.is_over or self._engine.script_end.is_open):
                self._serve()
            else:
                context.link.result(self._result())
        except Exception as error:
            if not context.leaving:  # else the controller knows it: the job has failed
                self._failure = error
                context.link.result(self._result())
            raise
        finally:
            context.loop.fetcher.close()
            self._engine.parts.saving.close()
            context.link.close()

    def _result(self) -> Result:
        context = self._engine.context
        state = context.state
        if self._is_of_a_void_lane:
            self.starts_again = True
            error = f"{type(self._failure).__name__}: {self._failure}" if self._failure else "the script ended"
            error = error.partition("\n")[0]
            again = "its cell had lost a member, and collectives were answered from here; a new process takes part"
            return result_of(NeedsFreshProcess(f"failed in a void lane: {error} ({again})."), state.step)
        if self._failure is not None:
            return self._where_it_ran(result_of(self._failure, state.step))
        step = max(0, state.step)
        of = f" of {state.last_step}" if state.last_step else ""
        why = context.left_at or (
            f"the script ended at step {step}{of}; go through the loop to its end, or call engine.stop()."
        )
        return Result(step, failure=why, everyone=bool(context.left_at), fault=Fault("", why, ""))

    def _where_it_ran(self, result: Result) -> Result:
        context = self._engine.context
        if context.hub is None or not context.loop.is_warming_up:
            return result
        first, *rest = result.failure.splitlines(keepends=True)
        alone = "in the warm-up (engine.warming_up), which a process of a cell makes alone"
        return replace(result, failure=f"{first.rstrip()}, {alone}\n{''.join(rest)}")

    def _serve(self) -> None:
        """Votes without a step until told to end. Raises why a checkpoint or an export that is owed cannot be made: a
        job that ends well has them.
        """
        context, parts, training = self._engine.context, self._engine.parts, self._engine.training
        try:
            self._engine.script_end.reach()
            parts.saving.on_end()
            while not (context.ended and context.link.alone and context.done):
                parts.saving.check_owed()
                parts.saving.ask_for_what_is_owed()
                if parts.saving.is_settled:
                    parts.requests.check_exports()
                if context.ended != parts.saving.is_settled:
                    context.ended = parts.saving.is_settled
                    parts.status.publish()
                training.vote()
        except SystemExit as ended:
            if isinstance(ended.code, int) and ended.code:
                leave_with(ended.code)


class _ExplainsMemory:
    """What Python calls for an error that nobody has caught: where memory ran out, it is said what would need less."""

    def __init__(self, engine: ReferenceType[Engine]) -> None:
        self._engine, self._hook = engine, sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        engine = self._engine()
        if engine is not None:
            explain(error, _where(engine), partial(memory_setting, engine.context))
        self._hook(kind, error, trace)


def _where(engine: Engine) -> str:
    loop, step = engine.context.loop, engine.context.state.step + 1
    if not (loop.lanes and loop.in_flight):
        return f"before step {step}"
    return f"in the {'backward' if loop.has_gradient else 'forward'} of step {step}, lane {loop.lane}"


def trace_crashes() -> None:
    """Native code that crashes leaves the script's stack on standard error: the signal's name alone helps nobody."""
    stderr = sys.__stderr__
    if not faulthandler.is_enabled() and stderr is not None and not stderr.closed:
        faulthandler.enable(stderr)


def serve_at_exit(engine: Engine) -> None:
    """Called once by `shoal.initialize`."""
    leave_the_end_to_the_engine()
    sys.excepthook = _ExplainsMemory(ref(engine))
    if engine.context.link.alone:
        finalize(engine, engine.parts.saving.saver_end)
        finalize(engine, engine.context.loop.fetcher.close)
        finalize(engine, _unless_forked(engine.context.untrained.tell))
        ends_here = not engine.context.state.last_step  # what is asked for after the loop is carried out at the end
        _at_end(partial(_end_alone, (lambda: engine) if ends_here else ref(engine)))
        return
    ending = _Ending(engine)
    sys.excepthook = ending.excepthook
    _at_end(ending.end)


def _at_end(act: Callable[[], None]) -> None:
    """Calls it when the script has ended, on the same thread; in no child of this process."""
    threading._register_atexit(_unless_forked(partial(_with_status, act)))  # type: ignore[attr-defined]


def _with_status(act: Callable[[], None]) -> None:
    """Where it fails, so does the process: it would leave with the script's own status, which Python knows by now."""
    try:
        act()
    except ShoalError as error:
        leave_with(FAILED)
        say(str(error))
    except Exception:
        leave_with(FAILED)
        raise


def _unless_forked(act: Callable[[], None]) -> Callable[[], None]:
    here = os.getpid()

    def here_only() -> None:
        if os.getpid() == here:
            act()

    return here_only


def _end_alone(known: Callable[[], Engine | None]) -> None:
    """Alone nobody waits for an engine: it lives as long as the script keeps it, for a sweep makes many."""
    engine = known()
    if engine is not None:
        context = engine.context
        if context.world is not None:
            context.untrained.on_left(context.state.step, context.state.last_step)
        _Ending(engine).end_alone()
