"""What a worker's token must prove before it is taken in: the run, and whose session it opens.

A join token brings a process into its run, and opens no session of one that lives there already: that one was given a
session token, which names it. Nothing that a refused stream says is believed: the worker that it names does not change.
"""

from __future__ import annotations

from shoal_protos.messages import Refusal
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.effects import Close, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Connected
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.turn import Turn, worker_of

REMEMBERED = 64
"""Refusals that are noted once."""


def why_not(turn: Turn, event: Connected) -> Refusal | None:
    """● Why a stream's token does not open what its hello asks for; None where it does."""
    proof, hello, spec = event.proof, event.hello, turn.spec
    if proof is None:
        return None
    name = hello.worker or "(new)"
    if proof.run != spec.run:
        return Refusal(
            f"worker {name} on {hello.host} shows a token of run {proof.run} of job {spec.job}, which is over or was "
            f"replaced; this is run {spec.run}. Set SHOAL_TOKEN to what `shoal token {spec.job}` prints now."
        )
    if proof.names_a_process:
        if (proof.worker, proof.incarnation) == (hello.worker, hello.incarnation):
            return None
        return Refusal(
            f"worker {name} on {hello.host} shows the session token of worker {proof.worker}, which opens no other "
            "session. Start it again."
        )
    living = _living(turn, event)
    if living is None:
        return None
    return Refusal(
        f"worker {living} is in job {spec.job} already, and {hello.host} shows a join token in its name; expected "
        "the session token that it was given. Start another worker without SHOAL_WORKER_ID.", final=False,
    )  # fmt: skip


def refuse(turn: Turn, event: Connected, refusal: Refusal) -> None:
    """Turn it away, and note once for each sentence that it came."""
    turn.do(Send(event.connection, refusal))
    turn.do(Close(event.connection))
    if refusal.sentence not in turn.job.refused_tokens:
        turn.change(refused_tokens=(*turn.job.refused_tokens, refusal.sentence)[-REMEMBERED:])
        turn.note(EventKind.REFUSED, refusal.sentence, host=event.hello.host, pid=event.hello.pid)


def _living(turn: Turn, event: Connected) -> WorkerId | None:
    """The worker of this incarnation, where it surely has a session token or has its stream at this moment.

    Whoever has been sent a plan got its token before. One whose stream broke before its welcome came has none, and none
    is asked of it.
    """
    worker = worker_of(turn, event.hello.incarnation)
    if worker is None or turn.durable.roster[worker].ending is not None:
        return None
    process, attempt = turn.process(worker), turn.job.attempt
    has_stream = process is not None and process.connection not in (None, event.connection)
    was_sent_a_plan = (process is not None and process.status.promised > 0) or any(
        is_member(plan, worker) for plan in (turn.world, attempt.plan if attempt is not None else None)
    )
    return worker if has_stream or was_sent_a_plan else None
