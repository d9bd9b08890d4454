"""What the session's thread drives: what goes out, what comes in, and what becomes of a controller that stays away."""

from __future__ import annotations

import threading
import time

from shoal_protos.errors import UserError
from shoal_protos.messages import (
    NO_CONTROLLER,
    AskSeat,
    Ending,
    Hello,
    Refusal,
    Seat,
    Shutdown,
    ToController,
    ToWorker,
)
from shoal_protos.training_log import get_logger

from shoal.session.dialogue import HEARTBEAT_SECONDS, RECONNECT_SECONDS, is_final
from shoal.session.shared import SharedSession

REPORT_SECONDS = 60.0
"""How long a worker that ends waits for a controller that is not there."""

log = get_logger("shoal.session")


class SessionDriver:
    """Called on the session's thread."""

    def __init__(self, shared: SharedSession) -> None:
        self._shared = shared
        self._told_to_end_at: float | None = None
        """When the first SIGTERM came."""

    @property
    def heartbeat_seconds(self) -> float:
        return self._shared.dialogue.heartbeat_seconds

    @property
    def silent(self) -> bool:
        """Nothing is to be sent or taken in until woken."""
        return self._shared.silent

    def say_hello(self) -> Hello:
        with self._shared.lock:
            return self._shared.dialogue.say_hello()

    def take_outgoing(self, beat: bool) -> list[ToController]:
        shared = self._shared
        with shared.lock:
            if beat:
                shared.dialogue.beat()
            if shared.dialogue.due:
                shared.dialogue.activities = shared.groups.activities()
                shared.dialogue.gpu = shared.gpu.newest if shared.gpu is not None else None
            return shared.dialogue.take_outgoing()

    def on_message(self, message: ToWorker) -> None:
        dialogue = self._shared.dialogue
        before = dialogue.refusal
        self._shared.carry_out(lambda: dialogue.on_message(message))
        if isinstance(message, Refusal) and dialogue.ending is None and message.sentence != before:
            log.warning("refused", reason=message.sentence, means="goes on, and tries again")

    def on_sigterm(self) -> None:
        log.info("sigterm", worker=self._shared.membership.worker, means="asks to be drained")
        if self._told_to_end_at is None:
            self._told_to_end_at = time.monotonic()
        with self._shared.changing() as dialogue:
            dialogue.request_drain()

    def on_last_word(self) -> None:
        with self._shared.spoken:
            self._shared.last_word_arrived = True
            self._shared.spoken.notify_all()

    def on_controller_unreachable(self, seconds: float, why: str = "") -> None:
        """Who has nothing to lose waits only so long for a controller that is not there. `why`: what keeps it away.

        That is a worker whose script has ended; one that was told to end, once its grace is over, for nobody will drain
        it; and one in no world that a launcher has started: the launcher may be gone with the controller, and another
        one starts it again.
        """
        shared = self._shared
        found = f" ({why})" if why else ""
        if shared.dialogue.script_has_ended and seconds > REPORT_SECONDS:
            shared.end(Ending.DONE, f"no controller was reachable for {seconds:.0f} s{found}, and the script had ended")
        if self._grace_is_over and seconds > shared.settings.grace_seconds:
            self._leave(f"no controller was reachable for {seconds:.0f} s{found} to drain this worker after SIGTERM")
        with shared.lock:
            in_no_world = not any(shared.membership.live)
        if shared.settings.launcher and in_no_world and seconds > shared.dialogue.reconnect_seconds + REPORT_SECONDS:
            self._leave(f"no controller was reachable for {seconds:.0f} s{found}, and this worker is in no world")

    @property
    def _grace_is_over(self) -> bool:
        """Since SIGTERM, if it came."""
        told_at = self._told_to_end_at
        return told_at is not None and time.monotonic() - told_at > self._shared.settings.grace_seconds

    def _leave(self, reason: str) -> None:
        log.warning("leaving", reason=reason, status=NO_CONTROLLER)
        self._shared.end(Ending.REPLACED, reason, NO_CONTROLLER)

    def on_failure(self, error: Exception) -> None:
        self._shared.on_failure(error)


class SeatDriver:
    """Drives the session's thread of a process that asks for its seat: one question on each stream, until `wait` has
    the answer. Nothing else is said.
    """

    heartbeat_seconds = HEARTBEAT_SECONDS

    def __init__(self, ask: AskSeat, is_launched: bool) -> None:
        self._ask, self._is_launched = ask, is_launched
        self._over = threading.Event()
        self._answer: Seat | Shutdown | None = None
        self._status = 0
        """What this process then exits with, where it is to end and has not failed."""
        self._refusal = ""

    def wait(self) -> Seat:
        """On the calling thread, for as long as no controller answers. Raises where there is no seat."""
        self._over.wait()
        if isinstance(self._answer, Seat):
            return self._answer
        assert self._answer is not None, "it is over by an answer"
        raise not_taken_in(self._answer, self._status)

    @property
    def silent(self) -> bool:
        return self._over.is_set()

    def say_hello(self) -> AskSeat:
        return self._ask

    def take_outgoing(self, beat: bool) -> list[ToController]:
        del beat
        return []

    def on_message(self, message: ToWorker) -> None:
        match message:
            case Seat() | Shutdown():
                self._end(message)
            case Refusal(sentence) if is_final(message, 0, "", self._ask.run):
                self._end(Shutdown(Ending.FAILED, sentence))
            case Refusal(sentence) if sentence != self._refusal:
                self._refusal = sentence
                log.warning("refused", reason=sentence, means="tries again")
            case _:
                pass

    def on_controller_unreachable(self, seconds: float, why: str = "") -> None:
        """A process that a launcher has started waits only so long: as one that says hello."""
        if self._is_launched and seconds > RECONNECT_SECONDS + REPORT_SECONDS:
            found = f" ({why})" if why else ""
            reason = f"no controller was reachable for {seconds:.0f} s{found}, and this worker is in no world"
            log.warning("leaving", reason=reason, status=NO_CONTROLLER)
            self._end(Shutdown(Ending.REPLACED, reason), NO_CONTROLLER)

    def on_sigterm(self) -> None:
        """Nothing is lost by ending at once: the signal does what it does without us."""

    def on_last_word(self) -> None:
        """There is none."""

    def on_failure(self, error: Exception) -> None:
        self._end(Shutdown(Ending.FAILED, f"the session with the controller failed: {error}"))

    def _end(self, answer: Seat | Shutdown, status: int = 0) -> None:
        if not self.silent:
            self._answer, self._status = answer, status
            self._over.set()


def not_taken_in(ending: Shutdown, status: int) -> SystemExit | UserError:
    """What ends a script whose process has no part in its job. `status`: what it exits with where it has not failed."""
    return SystemExit(status) if status else UserError(ending.reason)
