"""A resource and its job: the specification that the resource asks for, and the status that the job gives it. Pure.

A resource's `spec` is a job's body without the name, which is the resource's, with keys as Kubernetes writes them:
`maxRestarts`. The cluster's rules (CEL) have refused
most of what is wrong before it comes here; what an older definition lets through is refused here in the same words as
over REST. `why_not_followed` says what of a changed resource its job cannot follow.

The status has numbers, columns and conditions, and a patch writes it. Every condition exists from the first write on,
with a reason and a message, for `kubectl wait`. `columns` makes the short strings that `kubectl get ej` shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from shoal_protos.acts import Scale
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE
from shoal_protos.text import number, plural
from shoal_protos.validation import every_sentence

from shoal_controller.api.models import JobBody, WorkersBody
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase
from shoal_controller.core.overview.shown_sentences import last_telling
from shoal_controller.launchers.kubernetes.pod_manifest import pods_of
from shoal_controller.launchers.kubernetes.resource_kind import FULL_NAME, uid_of
from shoal_controller.launchers.kubernetes.section import Json

OWN_FIELDS = ("wanted", "wanted_by_default", "run", "resource", "request_key", "request_digest", "started_together",
             "kubernetes_defaults", "owner")  # fmt: skip
"""Of a job's specification: those that change in its life, or are not the user's, or another key says."""
SIZE = ("min_workers", "max_workers", "spares")
"""Those that a running job follows (`size_change`), with `wanted`."""
COMPUTED_BY = ("env", "kubernetes.env", "kubernetes.image", "kubernetes.podTemplate")
"""Keys that decide what a worker computes: another value for those that start later would be another computation."""
SECONDS = re.compile(r"\b\d+(\.\d+)? s\b")
REFUSED = "refused"
"""Phase of a resource that no job was made from."""
LONGEST_REASON = 1024
LONGEST_MESSAGE = 4096
OVER = frozenset(phase.value for phase in Phase if phase.is_over)


class ResourceWorkers(WorkersBody):
    """How many workers a resource asks for, with the keys of a resource."""

    model_config = ConfigDict(alias_generator=to_camel)


class ResourceBody(JobBody):
    """What a resource asks for: a job's body, with the keys of a resource."""

    model_config = ConfigDict(alias_generator=to_camel)

    workers: ResourceWorkers = ResourceWorkers()


def job_spec_of(item: Mapping[str, Any]) -> JobSpec:
    """The job that a resource asks for. Raises `UserError`."""
    name = str(item["metadata"]["name"])
    given = {"launcher": "kubernetes", **(item.get("spec") or {}), "job": name}
    try:
        body = ResourceBody.model_validate(given)
    except ValidationError as error:
        sentence = every_sentence(
            error.errors(include_url=False), f"the spec of {FULL_NAME}/{name}", ResourceBody, given
        )
        raise UserError(sentence) from None
    if body.launcher != "kubernetes":
        raise UserError(f"`launcher` is {body.launcher}; expected kubernetes, which starts the workers of a resource")
    spec = body.spec(default_wanted=body.workers.min or 1)
    return replace(spec, min_workers=spec.least_workers, wanted_by_default=False, resource=uid_of(item))


def size_change(view: JobView, asked: JobSpec) -> Scale | None:
    """What to ask of a job so that it has its resource's size; None: it has it."""
    least = asked.min_workers or view.default_bounds.least
    most = asked.max_workers or view.default_bounds.most
    change = Scale(
        workers=asked.wanted if asked.wanted != view.wanted else None,
        least=least if least != view.min_workers else None,
        most=(most or 0) if (most or view.most_members) != view.max_workers else None,
        spares=asked.spares if asked.spares != view.spares else None,
    )
    return change if change != Scale() else None


def why_not_followed(job: JobSpec, asked: JobSpec) -> str:
    """A sentence on what of a resource has changed that a job that is made cannot follow; empty: nothing."""
    changed = changed_keys(job, asked)
    if not changed:
        return ""
    named = ", ".join(f"spec.{name}" for name in changed)
    computed = [name for name in changed if name in COMPUTED_BY]
    why = "a job that is made already cannot follow that"
    if computed:
        why = "workers that start later would compute something else than those that are there, and the result differ"
    return f"{named} changed: {why}; put back what was there, or delete the resource and create it anew"


def changed_keys(job: JobSpec, asked: JobSpec) -> list[str]:
    """Keys of the resource that are not as they were when its job began, but for its size."""
    names = [field.name for field in fields(JobSpec) if field.name not in (*OWN_FIELDS, *SIZE, "kubernetes")]
    changed = [_key_of(name) for name in names if getattr(job, name) != getattr(asked, name)]
    before, after = (json.loads(spec.kubernetes or "{}") for spec in (job, asked))
    inner = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [*changed, *(f"kubernetes.{key}" for key in inner)]


def _key_of(field: str) -> str:
    return ("workers." if field in ResourceWorkers.model_fields else "") + to_camel(field)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether a resource is followed as it stands. `reason` is one word for programs, `message` a sentence."""

    holds: bool
    reason: str
    message: str


ACCEPTED = Acceptance(True, "Accepted", "the job is as the resource asks")
SETTLING = Acceptance(True, "Settling", (
    "the number of workers goes to and fro: the change under way is finished, and the newest number counts when its "
    "pause is over; a longer stabilization window of the autoscaler helps"
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What a status is made of, beside the job."""

    name: str
    generation: int
    """Of the resource that was taken in."""
    acceptance: Acceptance
    now: float
    run: str = ""
    passed_on: int = 0
    """Number of the job's last event that the cluster was told."""


def status_of(view: JobView | None, seen: Seen, before: Mapping[str, Any]) -> Json:
    """The whole status. `view`: None where no job was made. `before`: the one that is there."""
    found: Json = {
        "observedGeneration": seen.generation,
        "selector": pods_of(seen.name),
    }
    if view is None:
        found |= {"phase": REFUSED, "reason": seen.acceptance.message[:LONGEST_REASON], "workers": {"active": 0}}
    else:
        counts = {"active": view.active, "wanted": view.wanted, "min": view.min_workers, "max": view.max_workers}
        counts["spares"] = view.active_spares if view.spares else None
        found |= {
            "run": seen.run, "phase": view.phase.value, "reason": view.reason[:LONGEST_REASON],
            "generation": view.generation, "step": view.step, "events": seen.passed_on,
            "workers": {name: count for name, count in counts.items() if count is not None},
            "shown": columns(view, seen.now),
        }  # fmt: skip
        if view.max_steps is not None:
            found["maxSteps"] = view.max_steps
        if view.cell != ONE:
            counts = {"full": view.full_cells, "wanted": view.wanted_cells}
            found["cells"] = {**counts, "processes": view.cell.processes}
    known = {str(one.get("type")): one for one in before.get("conditions") or ()}
    found["conditions"] = [_dated(one, known.get(one["type"]), seen) for one in _conditions(view, seen.acceptance)]
    return found


def says_over(status: Mapping[str, Any]) -> bool:
    """Whether the job of this very resource has been over: it is not run a second time."""
    return bool(status.get("run")) and status.get("phase") in OVER


def patch_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """The merge patch that makes one of the other: whatever has changed, and null for what is gone."""
    patch: Json = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if inner := patch_between(known, value):
                patch[key] = inner
        elif value != known or key not in before:
            patch[key] = value
    return patch


def tells_news(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether more has changed than for how long something has been so: "waiting for 12 s"."""
    return _timeless(before) != _timeless(after)


def _timeless(status: Mapping[str, Any]) -> str:
    return SECONDS.sub("", json.dumps(status, sort_keys=True))


def dropped_keys(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """What the API server has left out of what it was sent: its definition of the resource does not know it."""
    return sorted(key for key in wanted if key not in stored)


# ---- conditions


def _conditions(view: JobView | None, acceptance: Acceptance) -> Iterable[Json]:
    yield _condition("Accepted", acceptance.holds, acceptance.reason, acceptance.message)
    if view is None:
        return
    phase = view.phase
    word = phase.value.capitalize()
    yield _condition("Running", phase is Phase.RUNNING, word, view.reason or f"the job is {phase.value}")
    yield _degraded(view)
    yield _redundant(view)
    yield _checkpointed(view)
    done = phase is Phase.SUCCEEDED
    yield _condition("Complete", done, word, view.reason if done else f"the job is {phase.value}")
    failed = phase in (Phase.FAILED, Phase.CANCELLED)
    yield _condition("Failed", failed, word, view.reason if failed else f"the job is {phase.value}")


def _degraded(view: JobView) -> Json:
    if view.phase.is_over or view.active >= view.wanted:
        active = plural(view.active, "worker")
        return _condition("Degraded", False, "Over" if view.phase.is_over else "AsWanted", f"{active} active")
    sentence = f"{view.active} of {plural(view.wanted, 'worker')} active"
    return _condition("Degraded", True, "BelowWanted", "; ".join(filter(None, (sentence, view.reason))))


def _redundant(view: JobView) -> Json:
    if view.phase.is_over or not view.active:
        return _condition("Redundant", None, "NoWorld", f"the job is {view.phase.value}; no worker holds its state")
    if view.unmirrored_blocks:
        sentence = f"{plural(view.unmirrored_blocks, 'block')} with fewer copies than wanted"
        return _condition("Redundant", False, "CopiesMissing", sentence)
    if view.copies_wanted == 1:
        return _condition("Redundant", False, "NoMirrors", "every block is with one worker only")
    return _condition("Redundant", True, "Mirrored", "every block has its copies")


def _checkpointed(view: JobView) -> Json:
    if view.last_checkpoint_step is None:
        return _condition("Checkpointed", False, "NoCheckpoint", "no checkpoint of this job is known")
    place = f" at {view.checkpoints[0].path}" if view.checkpoints else ""
    return _condition("Checkpointed", True, "Saved", f"step {view.last_checkpoint_step}{place}")


def _condition(kind: str, holds: bool | None, reason: str, message: str) -> Json:
    status = "Unknown" if holds is None else str(holds)
    return {"type": kind, "status": status, "reason": reason, "message": message[:LONGEST_MESSAGE]}


def _dated(condition: Json, before: Mapping[str, Any] | None, seen: Seen) -> Json:
    """With the time at which it became so."""
    same = before is not None and before.get("status") == condition["status"]
    since = before["lastTransitionTime"] if before is not None and same else timestamp(seen.now)
    return {**condition, "lastTransitionTime": since, "observedGeneration": seen.generation}


def timestamp(seconds: float) -> str:
    """As `metav1.Time` has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
WITH_A_SECOND_UNIT = ("d", "h")
"""Minutes and seconds stand alone: `4m`, but `1h20m`."""


def columns(view: JobView, now: float) -> dict[str, str]:
    """Columns by their names in `status.shown`, without unknown ones. Those of a job that is over stand still."""
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
