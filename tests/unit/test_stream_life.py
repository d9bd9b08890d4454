"""What a controller says on streams on which there is nothing else to say."""

from __future__ import annotations

import asyncio
from typing import Any

from integration.session_port import HELLO
from rule import Edit, rule
from shoal_controller.jobs.streams import Stream, Streams
from shoal_protos.messages import Alive, Prepare, ToWorker
from shoal_protos.wire import decode_controller, encode_worker

UNUSED: Any = None
"""gRPC's end of a stream that nobody reads, and its connection."""


def unread(stream: Stream) -> list[ToWorker]:
    return [decode_controller(message) for message in stream.dialogue.outbox]


@rule(
    "A controller says on every stream that it is there; a stream on which nothing comes for 7 s is given up: a "
    "frozen controller keeps its connections",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.jobs.streams", "                stream.dialogue.say(ALIVE)\n", ""),
)
def test_every_stream_is_told_once_a_round_that_the_controller_lives_and_one_that_is_not_read_no_more() -> None:
    async def rounds() -> None:
        streams = Streams()
        greeted = [streams.open(UNUSED, UNUSED) for _ in range(5)]
        for stream in greeted:
            stream.dialogue.hear(encode_worker(HELLO))
        silent, last = streams.open(UNUSED, UNUSED), greeted[-1]
        streams.send(last.dialogue.connection, Prepare(3))
        for _ in range(2):
            for part in range(3):
                streams.show_life(part, 3)
        assert all(unread(stream) == [Alive()] and stream.stirred.is_set() for stream in greeted[:-1])
        assert unread(last) == [Prepare(3)], "what is unread says it as well"
        assert unread(silent) == [], "who has not said hello"
        greeted[0].dialogue.outbox.clear()
        for part in range(3):
            streams.show_life(part, 3)
        assert unread(greeted[0]) == [Alive()], "it was read, and another round has passed"

    asyncio.run(rounds())
