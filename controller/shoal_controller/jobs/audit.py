"""Who asked for what: the entry in a job's history that every request of an operator leaves when it is carried out.

Called by `runner.py`. Entries have a bound of their own (`event_bounds.py`), so that they outlive what else happens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal_protos.text import plural

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import (
    Cancel,
    ConfirmLost,
    DrainWorker,
    OperatorRequest,
    Pause,
    Resume,
    Save,
    Scale,
)
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
    match request:
        case Create():
            return "create", "create the job"
        case Scale():
            return "scale", _scaling(request)
        case DrainWorker(worker, grace_seconds, why):
            return "drain", f"drain {worker} within {grace_seconds:g} s{f': {why}' if why else ''}"
        case ConfirmLost(worker):
            return "lost", f"{worker} is dead"
        case Pause():
            return "pause", "pause the job"
        case Resume():
            return "resume", "resume the job"
        case Cancel():
            return "delete", "stop the job"
        case Save():
            return "checkpoint", "save a checkpoint"


def _given(request: OperatorRequest | Create) -> dict[str, object]:
    """What was asked for; what was left as it is is not."""
    return {name: value for name, value in asdict(request).items() if value is not None}


def _scaling(request: Scale) -> str:
    size = f"to {plural(request.workers, 'worker')}" if request.workers is not None else ""
    least = f"with at least {request.least}" if request.least is not None else ""
    most = f"with at most {request.most or 'its lanes'}" if request.most is not None else ""
    return " ".join(filter(None, ("scale", size, " and ".join(filter(None, (least, most))))))
