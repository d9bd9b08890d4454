"""Which job needs somebody's attention first, and why, in one sentence. Pure: made from what people see of a job.

`shoal top`, the page and `GET /v1/overview` list jobs in this order and show these sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal_protos.text import at_step, plural

from shoal_controller.core.machine.spec import JobView, Phase, State
from shoal_controller.core.overview.amounts import DAY, duration, listed

CALLS_FOR_SECONDS = DAY
"""A job that has failed calls for attention so long."""


class Level(StrEnum):
    """How urgent it is."""

    ACT = "act"
    """Nothing goes on without somebody."""
    WATCH = "watch"
    """It may go on by itself; a look does no harm."""
    FINE = "fine"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Attention:
    """Why a job stands where it does in the list."""

    level: Level
    rank: int
    """Within all levels: the lower the more urgent."""
    sentence: str


def attention(view: JobView, now: float) -> Attention:
    """The first of the rules that holds."""
    for rank, (level, sentence) in enumerate(_rules(view, now)):
        if sentence:
            return Attention(level, rank, sentence)
    raise AssertionError("the last rule holds for every job")


def by_attention(views: Iterable[JobView], now: float) -> list[tuple[JobView, Attention]]:
    """The most urgent first; of equally urgent ones those that are over last, the newest first, else by name."""
    found = [(view, attention(view, now)) for view in views]
    return sorted(found, key=lambda one: (one[1].rank, -(one[0].ended_at or 0.0), one[0].job))


def seconds_left(view: JobView) -> float | None:
    """Until its last step, at its present pace; None: not known, or no steps run."""
    if view.phase is not Phase.RUNNING or view.max_steps is None or not view.step_seconds_median:
        return None
    return max(0, view.max_steps - view.step) * view.step_seconds_median


def _rules(view: JobView, now: float) -> Iterator[tuple[Level, str]]:
    """Every rule with its sentence; an empty one where it does not hold. The order is the order of the list."""
    phase, reason = view.phase, view.reason
    yield Level.ACT, _failed(view, now)
    yield Level.ACT, _with_reason("stands still", reason) if phase is Phase.STALLED else ""
    yield Level.ACT, _with_reason("waits for workers", reason) if _is_deserted(view) else ""
    yield Level.ACT, _with_reason("cannot be changed", reason) if "nothing is decided" in reason else ""
    yield Level.WATCH, _with_reason("waits", reason) if phase is Phase.WAITING else ""
    yield Level.WATCH, _with_reason("changes its world", reason) if phase is Phase.RESIZING else ""
    yield Level.WATCH, _with_reason("starts", reason) if phase is Phase.STARTING else ""
    yield Level.WATCH, _with_reason("paused", reason.removeprefix("paused: ")) if phase is Phase.PAUSED else ""
    yield Level.WATCH, _suspected(view)
    yield Level.WATCH, _with_reason(_trains(view), reason) if phase is Phase.RUNNING and reason else ""
    yield Level.WATCH, _fewer(view)
    yield Level.WATCH, _unmirrored(view)
    yield Level.FINE, _trains(view) if phase is Phase.RUNNING else ""
    yield Level.OVER, _over(view, now)


def _with_reason(state: str, reason: str) -> str:
    """A state with its reason, which may be of many lines: a worker's traceback is not for a list."""
    return f"{state}: {reason.partition(chr(10))[0]}" if reason else state


def _failed(view: JobView, now: float) -> str:
    if view.phase is not Phase.FAILED or (view.ended_at is not None and now - view.ended_at > CALLS_FOR_SECONDS):
        return ""
    return _with_reason(f"failed {at_step(view.step)}", view.reason)


def _is_deserted(view: JobView) -> bool:
    """Whether it waits, and has nobody, and nobody is started for it."""
    gone = all(worker.state in (State.LOST, State.LEFT) for worker in view.workers)
    return view.phase is Phase.WAITING and not view.traits.starts and gone


def _suspected(view: JobView) -> str:
    late = [worker.worker for worker in view.workers if worker.state is State.SUSPECTED]
    return f"{_trains(view)}; nothing is heard of {listed(late)}" if late and view.phase is Phase.RUNNING else ""


def _fewer(view: JobView) -> str:
    if view.phase is not Phase.RUNNING or view.active >= view.wanted:
        return ""
    return f"{_trains(view)}, with {view.active} of {plural(view.wanted, 'worker')}"


def _unmirrored(view: JobView) -> str:
    if view.phase is not Phase.RUNNING or not view.unmirrored_blocks:
        return ""
    return f"{_trains(view)}; {plural(view.unmirrored_blocks, 'block')} with fewer copies than wanted"


def _trains(view: JobView) -> str:
    steps = f"step {view.step}" + (f" of {view.max_steps}" if view.max_steps is not None else "")
    left = seconds_left(view)
    return f"trains: {steps}" + (f", {duration(left)} left" if left is not None else "")


def _over(view: JobView, now: float) -> str:
    ago = f" {duration(max(0.0, now - view.ended_at))} ago" if view.ended_at is not None else ""
    return _with_reason(
        f"{view.phase.value}{ago} {at_step(view.step)}", view.reason if view.phase is Phase.FAILED else ""
    )
