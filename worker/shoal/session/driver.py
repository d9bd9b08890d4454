"""What the session's thread drives: what goes out, what comes in, and what becomes of a controller that stays away."""

from __future__ import annotations

import time

from shoal_protos.messages import NO_CONTROLLER, Ending, Hello, Refusal, ToController, ToWorker

from shoal.process.logs import get_logger
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
