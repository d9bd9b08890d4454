"""What `kubectl get ej` shows in its columns: short strings, made of a job's view. Pure."""

from __future__ import annotations

from shoal_protos.readable import number

from shoal_controller.core.machine.spec import JobView, Phase
from shoal_controller.core.overview.resize_sentences import last_telling

UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
WITH_A_SECOND_UNIT = ("d", "h")
"""Minutes and seconds stand alone: `4m`, but `1h20m`."""


def columns(view: JobView, now: float) -> dict[str, str]:
    """By their names in `status.shown`; what is not known yet is left out. Those of a job that is over stand still."""
    now = view.ended_at if view.ended_at is not None else now
    shown = {
        "workers": f"{view.active}/{view.wanted}",
        "step": _step(view),
        "left": _left(view),
        "lastResize": _last_resize(view, now),
        "loss": number(view.loss) if view.loss is not None else "",
        "goodput": f"{view.goodput_ratio:.1%}" if view.last_commit is not None else "",
        "checkpoint": _checkpoint(view, now),
    }
    return {name: text for name, text in shown.items() if text}


def span(seconds: float) -> str:
    """A duration, coarse: `45s`, `4m`, `1h20m`, `2d3h`."""
    rest = max(0, int(seconds))
    for place, (unit, size) in enumerate(UNITS):
        if rest >= size or unit == "s":
            whole, rest = divmod(rest, size)
            smaller, part = UNITS[min(place + 1, len(UNITS) - 1)]
            second = rest // part if unit in WITH_A_SECOND_UNIT else 0
            return f"{whole}{unit}" + (f"{second}{smaller}" if second else "")
    raise AssertionError("seconds are the last unit")


def _step(view: JobView) -> str:
    if view.max_steps is None:
        return f"{view.step:,}" if view.lanes is None else f"{view.step:,}/open"
    return f"{view.step:,}/{view.max_steps:,}"


def _left(view: JobView) -> str:
    """At the present speed; of a job that does not train nobody knows."""
    if view.phase is not Phase.RUNNING or view.max_steps is None or view.step_seconds_median is None:
        return ""
    return span((view.max_steps - view.step) * view.step_seconds_median)


def _last_resize(view: JobView, now: float) -> str:
    if (at := last_telling(view.resizes)) is None:
        return ""
    last = view.resizes[at]
    return f"{last.reason} {span(now - last.began_at)}" if last.began_at else last.reason


def _checkpoint(view: JobView, now: float) -> str:
    if view.last_checkpoint_step is None:
        return ""
    at = view.checkpoints[0].saved_at if view.checkpoints else None
    return f"{view.last_checkpoint_step:,}" + (f" {span(now - at)}" if at is not None else "")
