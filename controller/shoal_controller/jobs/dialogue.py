"""One worker's stream as a dialogue without I/O: what may come next, what still has to go out, when it is over.

`service.py` drives it over gRPC. A stream begins with a hello, which names its job and how many blocks there are; what
follows is checked against that. One more may come, with the text of what the first one only named. A process that has
no model yet asks for its seat instead, on a stream of its own. Whether the worker
is welcome is the job's affair, not the dialogue's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shoal_protos.errors import NotFound, Refused, ShoalError, UserError
from shoal_protos.messages import AskSeat, Heartbeat, Hello, Refusal
from shoal_protos.release import RELEASE
from shoal_protos.wire import decode_worker, encode_controller, job_of_hello

from shoal_controller.core.machine.events import Connected, MessageReceived, Proof, SeatAsked
from shoal_controller.store.store import NotLeading

OUTBOX_MESSAGES = 64
"""A worker that leaves so many messages unread is cut off. It comes back with a hello, and hears what is current."""


class Dialogue:
    """Fed with bytes by `hear`, with answers by `say`, `refuse` and `close`; what goes out waits in `outbox`."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        self.hello: Hello | None = None
        self.job = ""
        """The job that its first message named; empty: none has come."""
        self._is_brief = False
        self._position: object = None
        """What the last status said that is said at once when it changes."""
        self.routine = False
        """Whether the last message was a heartbeat with nothing new in it: the next tick is soon enough for it."""
        self.proof: Proof | None = None
        """What the worker's token proves; None: it may open any session."""
        self.outbox: deque[bytes] = deque()
        self.closing = False
        """Nothing more is said; the stream ends when the outbox is empty."""
        self.refusal: ShoalError | None = None
        self.overflowed = False

    @property
    def is_over(self) -> bool:
        """Whether nothing that is said now would go out."""
        return self.closing or self.overflowed

    def job_named(self, data: bytes) -> str:
        """The job that the first message names, before the rest of it is read: whoever has no business here costs
        little. Raises `UserError` where a stream must not begin so.
        """
        job = job_of_hello(data)
        if job is None:
            raise UserError(f"a stream must begin with a hello; this one began with {_kind(decode_worker(data))}")
        if self.proof is not None and self.proof.job != job:
            raise Refused(f"the worker shows a token of job {self.proof.job} and says hello to job {job}")
        return job

    def hear(self, data: bytes) -> Connected | SeatAsked | MessageReceived:
        """The event that a message is for its job. Raises `UserError` where the message must not be."""
        if not self.job:
            self.job_named(data)
            message = decode_worker(data)
            assert isinstance(message, Hello | AskSeat)
            self.job = message.job
            return self._greet(message) if isinstance(message, Hello) else self._ask(message)
        if self.hello is None:
            raise UserError("a message came on a stream that has asked for a seat; a worker says hello on a new one")
        message = decode_worker(data, self.hello.description.blocks)
        if isinstance(message, AskSeat):
            raise UserError("a worker that has said hello has asked for a seat; it has one for as long as it lives")
        self.routine = isinstance(message, Heartbeat) and message.status.position == self._position
        if isinstance(message, Heartbeat):
            self._position = message.status.position
        if not isinstance(message, Hello):
            return MessageReceived(self.connection, message)
        if _process(message) != _process(self.hello) or message.description.is_brief or not self._is_brief:
            raise UserError("a second hello came on one stream; a worker opens a new stream to say hello again")
        return self._greet(message)

    def _greet(self, hello: Hello) -> Connected:
        """What the stream keeps of a hello has no text of parameters: there are many streams."""
        self._is_brief = hello.description.is_brief
        self.hello = replace(hello, description=replace(hello.description, parameters=()))
        return Connected(self.connection, hello, self.proof, RELEASE)

    def _ask(self, ask: AskSeat) -> SeatAsked:
        return SeatAsked(self.connection, ask, self.proof)

    def late(self, seconds: float) -> UserError:
        """What to refuse the stream with when no hello came in time."""
        return UserError(f"no hello came within {seconds:g} s of opening the stream")

    def say(self, message: bytes) -> None:
        """Queue an encoded message. Too many unread ones end the dialogue at once."""
        if self.is_over:
            return
        if len(self.outbox) >= OUTBOX_MESSAGES:
            self.overflowed = True
            self.outbox.clear()
            return
        self.outbox.append(message)

    def refuse(self, error: ShoalError, *, leading: bool = True) -> None:
        """Say why as the last message. Only what the user can cure is final, and only where a controller leads; else
        the worker may try again.
        """
        final, unknown_job = leading and isinstance(error, UserError), isinstance(error, NotFound)
        leader = error.leader if isinstance(error, NotLeading) else ""
        self.say(encode_controller(Refusal(str(error), final, unknown_job=unknown_job, leader=leader)))
        self.refusal = self.refusal or error
        self.close()

    def close(self) -> None:
        """End after what was said."""
        self.closing = True

    def farewell(self) -> str:
        """Why the stream ended, for the event history."""
        if self.overflowed:
            return f"it left {OUTBOX_MESSAGES} messages unread and was cut off"
        if self.refusal is not None:
            return f"it was refused: {self.refusal}"
        return "the controller closed the stream" if self.closing else "its stream ended"


def _process(hello: Hello) -> tuple[str, str, str]:
    """● Who says it: the session token that answers a first hello is made out to whom the stream names by then."""
    return hello.job, hello.worker, hello.incarnation


def _kind(message: object) -> str:
    name = type(message).__name__.lower()
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
