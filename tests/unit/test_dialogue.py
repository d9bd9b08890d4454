"""The rules of one worker's stream, without a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rule import Edit, holds, rule
from shoal_controller.core.machine.events import Connected, MessageReceived, Proof, SeatAsked
from shoal_controller.jobs.dialogue import OUTBOX_MESSAGES, Dialogue
from shoal_protos.description import Description, Parameter, brief, with_digest
from shoal_protos.errors import NotFound, Refused, StoreError, UserError
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    AskSeat,
    Heartbeat,
    Hello,
    MemberState,
    Prepare,
    Ready,
    Refusal,
    Status,
    Telemetry,
)
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import Shape
from shoal_protos.wire import decode_controller, encode_controller, encode_worker

HELLO = Hello(
    version=PROTOCOL_VERSION, job="demo", worker="", incarnation="a1", address="127.0.0.1:29500", host="here",
    pid=1, domain="here", description=Description(8, 40, 4096, 1, 1, 0, 10, (), "AdamW", {}, {}, False, False),
    status=Status(1, 0, MemberState.WARMING_UP, 0, -1, 0),
)  # fmt: skip


def beat(holds: Runs = NO_BLOCKS) -> Heartbeat:
    return Heartbeat(Status(2, 1, MemberState.TRAINING, 1, 3, 1, holds=holds), Telemetry())


def greeted() -> Dialogue:
    dialogue = Dialogue(7)
    dialogue.hear(encode_worker(HELLO))
    return dialogue


def test_a_hello_connects_and_what_follows_is_said() -> None:
    dialogue = Dialogue(7)
    assert dialogue.hear(encode_worker(HELLO)) == Connected(7, HELLO)
    assert dialogue.hear(encode_worker(beat())) == MessageReceived(7, beat())


def test_a_process_asks_for_its_seat_on_a_stream_of_its_own() -> None:
    dialogue, ask = Dialogue(7), AskSeat("demo", "", "a1", "here", 1, Shape(tensor=2))
    assert dialogue.hear(encode_worker(ask)) == SeatAsked(7, ask) and dialogue.job == "demo"
    with pytest.raises(UserError, match="a worker says hello on a new one"):
        dialogue.hear(encode_worker(HELLO))
    with pytest.raises(UserError, match="it has one for as long as it lives"):
        greeted().hear(encode_worker(ask))


@holds("A heartbeat with nothing new")
def test_a_heartbeat_in_which_only_the_step_is_new_is_routine_and_every_other_message_is_news() -> None:
    dialogue = greeted()
    changed = replace(beat().status, committed_in=2, generation=2, promised=2)
    messages = [beat(), beat(), Heartbeat(replace(beat().status, step=4, holds=Runs(((0, 3),))), Telemetry(loss=1.0))]
    messages += [Heartbeat(changed, Telemetry()), Heartbeat(changed, Telemetry()), Ready(2, changed)]
    routine = []
    for message in messages:
        dialogue.hear(encode_worker(message))
        routine.append(dialogue.routine)
    assert routine == [False, True, True, False, True, False]


def test_a_stream_begins_with_a_hello() -> None:
    with pytest.raises(UserError, match=r"^a stream must begin with a hello; this one began with a heartbeat$"):
        Dialogue(7).hear(encode_worker(beat()))


@holds("A worker that does not")
def test_who_has_no_business_here_is_turned_away_before_the_rest_of_its_hello_is_read() -> None:
    unreadable = replace(HELLO, status=replace(HELLO.status, step=-7))
    dialogue = Dialogue(7)
    assert dialogue.job_named(encode_worker(unreadable)) == "demo"
    dialogue.proof = Proof("other", "run-1")
    for read in (dialogue.job_named, dialogue.hear):
        with pytest.raises(Refused, match="shows a token of job other and says hello to job demo"):
            read(encode_worker(unreadable))
    with pytest.raises(UserError, match=r"status\.step is -7"):
        Dialogue(7).hear(encode_worker(unreadable))


def test_a_second_hello_on_a_stream_is_refused() -> None:
    dialogue = greeted()
    with pytest.raises(UserError, match="a second hello came on one stream"):
        dialogue.hear(encode_worker(HELLO))


LARGE = replace(HELLO.description, parameters=(Parameter("weight", (4096, 40), "torch.float32", 0),))


@rule(
    "… and on one stream one process says hello: its session token is made out to whom the stream names",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.jobs.dialogue",
        "    return hello.job, hello.worker, hello.incarnation\n",
        '    return hello.job, "", ""\n',
    ),
    after="A join token is valid",
)
@holds("A hello names the model by a digest")
def test_a_hello_that_names_its_parameters_may_be_followed_by_one_that_tells_them() -> None:
    named, described = replace(HELLO, description=brief(LARGE)), replace(HELLO, description=with_digest(LARGE))
    dialogue = Dialogue(7)
    assert dialogue.hear(encode_worker(named)) == Connected(7, named)
    with pytest.raises(UserError, match="a second hello came on one stream"):
        dialogue.hear(encode_worker(named))
    for other in ({"job": "other"}, {"worker": "w1"}, {"incarnation": "b1"}):
        with pytest.raises(UserError, match="a second hello came on one stream"):
            dialogue.hear(encode_worker(replace(described, **other)))
    assert dialogue.hear(encode_worker(described)) == Connected(7, described)
    assert dialogue.hello is not None and not dialogue.hello.description.parameters, "a stream keeps no text"
    with pytest.raises(UserError, match="a second hello came on one stream"):
        dialogue.hear(encode_worker(described))


def test_blocks_are_held_to_the_count_that_the_hello_told() -> None:
    dialogue = greeted()
    assert dialogue.hear(encode_worker(beat(Runs(((0, 40),)))))
    with pytest.raises(UserError, match="block runs reach block 40; the job has 40 blocks"):
        dialogue.hear(encode_worker(beat(Runs(((0, 41),)))))


def test_a_refusal_is_the_last_message_and_only_a_user_s_fault_is_final() -> None:
    for error, final in ((NotFound("no job demo"), True), (StoreError("the store is away"), False)):
        dialogue = greeted()
        dialogue.say(encode_controller(Prepare(4)))
        dialogue.refuse(error)
        dialogue.say(encode_controller(Prepare(5)))
        messages = [decode_controller(data) for data in dialogue.outbox]
        assert messages == [Prepare(4), Refusal(str(error), final=final, unknown_job=final)]
        assert dialogue.farewell() == f"it was refused: {error}"


def test_nothing_is_said_after_the_end() -> None:
    dialogue = greeted()
    dialogue.close()
    dialogue.say(encode_controller(Prepare(4)))
    assert not dialogue.outbox
    assert dialogue.farewell() == "the controller closed the stream"


def test_a_worker_that_does_not_read_is_cut_off_and_its_messages_are_let_go() -> None:
    dialogue = greeted()
    for number in range(1, OUTBOX_MESSAGES + 1):
        dialogue.say(encode_controller(Prepare(number)))
        assert not dialogue.is_over
    dialogue.say(encode_controller(Prepare(99)))
    assert dialogue.overflowed and dialogue.is_over and not dialogue.outbox
    assert dialogue.farewell() == "it left 64 messages unread and was cut off"
