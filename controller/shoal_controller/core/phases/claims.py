"""What a worker claims, checked before any of it is believed.

A worker may be of another run, restored from an older state, or broken; one wrong number must not harm the job for
good. Called with every hello; nothing here changes the job. Pure.
"""

from __future__ import annotations

from shoal_protos.messages import Hello, Refusal

from shoal_controller.core.effects import Close, Send
from shoal_controller.core.events import Connected
from shoal_controller.core.spec import JobSpec
from shoal_controller.core.turn import Turn


def turned_away(turn: Turn, event: Connected) -> bool:
    """Whether a worker of another run was refused: nothing of what it says is read."""
    sentence = other_run(turn.spec, event.hello)
    if sentence:
        turn.do(Send(event.connection, Refusal(sentence)))
        turn.do(Close(event.connection))
        turn.note("refused", sentence, host=event.hello.host, pid=event.hello.pid)
    return bool(sentence)


def other_run(spec: JobSpec, hello: Hello) -> str:
    """● Why a worker is none of this run; empty where it is one, or has been in no run yet."""
    name = hello.worker or "(new)"
    if hello.run == spec.run:
        return ""
    if hello.run:
        return (
            f"worker {name} on {hello.host} belongs to run {hello.run} of job {spec.job}, which is over or was "
            f"replaced; this is run {spec.run}. Start it anew."
        )
    if hello.status.generation:
        return (
            f"worker {name} on {hello.host} says that it is in generation {hello.status.generation} of job {spec.job} "
            "and names no run; expected the run that it was welcomed to. Start it anew."
        )
    return ""
