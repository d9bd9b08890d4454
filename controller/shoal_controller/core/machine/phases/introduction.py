"""Whoever says hello names its model by a digest. Here is what comes of it where the model's text is not known.

A thousand workers that start together tell the same text of megabytes: one of them is asked for it, and the others wait
for what it says. One that does not say it in time is let go, and the next is asked. Who waits in vain says hello again.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal_protos.messages import Describe, Hello

from shoal_controller.core.machine.effects import Close, Send
from shoal_controller.core.machine.events import Connected
from shoal_controller.core.machine.turn import Turn

DESCRIBE_SECONDS = 10.0
"""How long a worker may take to tell its model: as long as it waits for the welcome itself."""


def is_unknown(turn: Turn, hello: Hello) -> bool:
    """Whether it names a model of which the job does not have the text."""
    jobs, theirs = turn.durable.description, hello.description
    return theirs.is_brief and (jobs is None or jobs.parameters_digest != theirs.parameters_digest)


def wait(turn: Turn, event: Connected) -> None:
    """It is answered when the text is known."""
    turn.put("greeting", event.connection, event)
    ask(turn, [event.connection])


def leave(turn: Turn, connection: int) -> None:
    """It waits no longer. Where it was asked, `ask` is to follow."""
    turn.drop("greeting", connection)
    turn.drop("asked_to_describe", connection)


def on_disconnected(turn: Turn, connection: int) -> None:
    """It will not tell: the next one is asked."""
    was_asked = connection in turn.job.asked_to_describe
    leave(turn, connection)
    if was_asked:
        ask(turn, turn.job.greeting)


def known_now(turn: Turn) -> list[Connected]:
    """The hellos that wait without need, in the order in which they came."""
    return [event for event in turn.job.greeting.values() if not is_unknown(turn, event.hello)]


def ask(turn: Turn, numbers: Iterable[int]) -> None:
    """Of those who wait on these connections, ask one of each model that nobody has been asked for."""
    greeting = turn.job.greeting
    asked = {greeting[number].hello.description.parameters_digest for number in turn.job.asked_to_describe}
    for number in numbers:
        digest = greeting[number].hello.description.parameters_digest
        if digest not in asked:
            asked.add(digest)
            turn.put("asked_to_describe", number, turn.now)
            turn.do(Send(number, Describe()))


def on_tick(turn: Turn) -> None:
    """Let go of who was asked and does not answer."""
    late = [number for number, at in turn.job.asked_to_describe.items() if turn.now - at > DESCRIBE_SECONDS]
    for number in late:
        leave(turn, number)
        turn.do(Close(number))
    if late:
        ask(turn, turn.job.greeting)
