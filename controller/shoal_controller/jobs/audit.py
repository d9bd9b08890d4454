"""Who asked for what: the entry in a job's history that every request of an operator leaves when it is carried out.

Called by `runner.py`. Entries have a bound of their own (`event_bounds.py`), so that they outlive what else happens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal_protos.acts import Act, OperatorRequest

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.jobs.records import JobEvent


@dataclass(frozen=True, slots=True)
class Create:
    """`POST /v1/jobs`: the request that no machine hears, because it begins one."""


def audit_entry(request: OperatorRequest | Create, by: Caller, time: float, generation: int) -> JobEvent:
    """What the history says of it."""
    action, sentence = _described(request)
    who = f"token {by.token}" if by.token else "a caller without a token"
    place = f" from {by.address}" if by.address else ""
    data = {"action": action, "token": by.token, "role": str(by.role), "address": by.address, **_given(request)}
    worker = str(data.get("worker", ""))
    return JobEvent(time, str(EventKind.AUDIT), generation, worker, f"{who}{place}: {sentence}", data)


def _described(request: OperatorRequest | Create) -> tuple[str, str]:
    """The action's name, which is REST's method where that says more than the path, and the sentence."""
    if isinstance(request, Create):
        return "create", "create the job"
    act = Act.of(request)
    return act.value if act.below else act.method.lower(), request.sentence()


def _given(request: OperatorRequest | Create) -> dict[str, object]:
    """What was asked for; what was left as it is is not."""
    return {name: value for name, value in asdict(request).items() if value is not None}
