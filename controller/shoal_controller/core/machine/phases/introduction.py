"""Whoever says hello names its model by a digest. Here is what comes of it where the model's text is not known.

A thousand workers that start together tell the same text of megabytes: one of them is asked for it, and the others wait
for what it says. One that does not say it in time is let go, and the next is asked. Who waits in vain says hello again.
"""

from __future__ import annotations

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
    """It is answered when the text is known. `ask` is to follow."""
    turn.change(greeting={**turn.job.greeting, event.connection: event.hello})


def leave(turn: Turn, connection: int) -> None:
    """It waits no longer."""
    if connection in turn.job.greeting:
        turn.change(
            greeting={number: hello for number, hello in turn.job.greeting.items() if number != connection},
            asked_to_describe={number: at for number, at in turn.job.asked_to_describe.items() if number != connection},
        )


def known_now(turn: Turn) -> list[Connected]:
    """The hellos that wait without need, in the order in which they came."""
    greeting = turn.job.greeting.items()
    return [Connected(number, hello) for number, hello in greeting if not is_unknown(turn, hello)]


def ask(turn: Turn) -> None:
    """Ask one worker of each model that nobody has been asked for."""
    asked = {turn.job.greeting[number].description.parameters_digest for number in turn.job.asked_to_describe}
    for number, hello in turn.job.greeting.items():
        if hello.description.parameters_digest not in asked:
            asked.add(hello.description.parameters_digest)
            turn.change(asked_to_describe={**turn.job.asked_to_describe, number: turn.now})
            turn.do(Send(number, Describe()))


def on_tick(turn: Turn) -> None:
    """Let go of who was asked and does not answer."""
    late = [number for number, at in turn.job.asked_to_describe.items() if turn.now - at > DESCRIBE_SECONDS]
    for number in late:
        leave(turn, number)
        turn.do(Close(number))
    if late:
        ask(turn)
