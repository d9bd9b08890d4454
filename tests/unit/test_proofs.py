"""Whom a worker's token lets in: its own run, its own session, and nobody who lives already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machine_driver import MADE_OF, NEW, RUN, Driver, notes, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Close, Effect, Send
from shoal_controller.core.machine.events import Connected, Disconnected, Proof
from shoal_protos.acts import Cancel
from shoal_protos.description import Parameter, brief, with_digest
from shoal_protos.messages import PROTOCOL_VERSION, Hello, Refusal, Shutdown, Welcome

JOIN = Proof("job", RUN)


def hello(worker: str = "", incarnation: str = "", run: str = "", **fields: Any) -> Hello:
    given = Hello(
        PROTOCOL_VERSION, "job", worker, incarnation or f"inc-{worker}", "host:1", "host", 7, "", MADE_OF, NEW, run=run
    )
    return replace(given, **fields)


def answer(job: Driver, connection: int, greeting: Hello, proof: Proof | None) -> Any:
    """The first message that a stream gets; a refused one is closed."""
    effects: list[Effect] = job.feed(Connected(connection, greeting, proof))
    first = next(effect.message for effect in effects if isinstance(effect, Send) and effect.connection == connection)
    assert (Close(connection) in effects) == isinstance(first, Refusal | Shutdown)
    return first


def own(worker: str) -> Proof:
    return Proof("job", RUN, worker, f"inc-{worker}")


def test_a_join_token_of_the_run_lets_a_new_process_in() -> None:
    job = Driver()
    assert isinstance(answer(job, 1, hello("w0"), JOIN), Welcome)
    assert answer(job, 2, hello(incarnation="new"), JOIN).worker not in ("", "w0")


@rule(
    "A join token is valid for its run, and opens no session of a process that has its stream or was sent a "
    "plan; a session token opens the session of its own process only",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.core.machine.phases.claims", "    if proof.run != spec.run:\n", "    if False:\n"),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "        if (proof.worker, proof.incarnation) == (hello.worker, hello.incarnation):\n",
            "        if proof.worker == hello.worker:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "    return worker if has_stream or was_sent_a_plan else None\n",
            "    return worker if has_stream else None\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "    return worker if has_stream or was_sent_a_plan else None\n",
            "    return worker if was_sent_a_plan else None\n",
        ),
    ],
)
def test_a_token_of_another_run_is_refused_in_one_sentence_also_when_the_job_is_over() -> None:
    job = Driver()
    sentence = (
        "worker w0 on host shows a token of run before of job job, which is over or was replaced; this is run "
        f"{RUN}. Set SHOAL_TOKEN to what `shoal token job` prints now."
    )
    assert answer(job, 1, hello("w0"), Proof("job", "before")) == Refusal(sentence)
    assert not job.job.processes and not any(record.incarnation for record in job.job.durable.roster.values())
    job.feed(Cancel())
    assert answer(job, 2, hello("w0"), Proof("job", "before")) == Refusal(sentence)
    assert isinstance(answer(job, 3, hello("w0"), JOIN), Shutdown)


@holds("A join token is valid")
def test_a_session_token_opens_the_session_of_its_own_process_only() -> None:
    job = Driver()
    answer(job, 1, hello("w0"), JOIN)
    answer(job, 2, hello("w1"), JOIN)
    for greeting in (hello("w1"), hello("w1", "inc-w0"), hello("w0", "inc-w1"), hello("", "inc-w0"), hello("w2")):
        name = greeting.worker or "(new)"
        assert answer(job, 3, greeting, own("w0")) == Refusal(
            f"worker {name} on host shows the session token of worker w0, which opens no other session. Start it again."
        )
    assert job.job.processes["w1"].connection == 2, "whose stream stays"
    assert isinstance(answer(job, 4, hello("w0", run=RUN), own("w0")), Welcome)


@holds("A join token is valid")
@pytest.mark.parametrize("worker", ["w0", ""])
def test_a_join_token_takes_no_session_from_a_process_that_has_its_stream(worker: str) -> None:
    job = Driver()
    answer(job, 1, hello("w0"), JOIN)
    for connection in (2, 3):
        refusal = answer(job, connection, hello(worker, "inc-w0"), JOIN)
        assert refusal == Refusal(
            "worker w0 is in job job already, and host shows a join token in its name; expected the session token that "
            "it was given. Start another worker without SHOAL_WORKER_ID.", final=False,
        )  # fmt: skip
        assert len(notes(job.effects, "refused")) == (1 if connection == 2 else 0), "it may try again every second"
    assert job.job.processes["w0"].connection == 1


@holds("A join token is valid")
def test_a_join_token_takes_no_session_from_a_member_that_was_cut_off_nor_after_a_controllers_restart() -> None:
    job = training(2)
    job.feed(Disconnected(job.connections["w0"], "its stream ended"))
    assert isinstance(answer(job, 7, hello("w0", run=RUN), JOIN), Refusal)
    job.restart()
    assert isinstance(answer(job, 8, hello("w0", run=RUN), JOIN), Refusal)
    status = job.statuses["w0"]
    assert isinstance(answer(job, 9, hello("w0", run=RUN, status=status), own("w0")), Welcome)


def test_a_process_whose_stream_broke_under_its_welcome_comes_back_with_the_join_token() -> None:
    job = Driver()
    answer(job, 1, hello("w0"), JOIN)
    job.feed(Disconnected(1, "its stream ended"))
    assert isinstance(answer(job, 2, hello("w0"), JOIN), Welcome)


def test_what_a_token_proves_is_kept_while_a_process_waits_for_the_models_text() -> None:
    job, model = Driver(), replace(MADE_OF, parameters=(Parameter("weight", (8, 8), "torch.float32", 0),))
    for connection, worker in ((1, "w0"), (2, "w1")):
        job.feed(Connected(connection, hello(worker, "same", description=brief(model)), JOIN))
    effects = job.feed(Connected(1, hello("w0", "same", description=with_digest(model)), JOIN))
    answers = {e.connection: type(e.message) for e in effects if isinstance(e, Send)}
    assert answers == {1: Welcome, 2: Refusal}
